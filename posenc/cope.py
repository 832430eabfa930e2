"""Contextual position encoding: Golovneva et al. 2024 (2405.18719)."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.base import Dims, PositionScheme, PosParam
from spec import SpecError


class CoPE(PositionScheme):
  """(q_i . k_j + q_i . e[p_ij]) / sqrt(H), where p_ij counts the tokens from j to i that pass a gate.

  g_ij = sigmoid(q_i . k_j / sqrt(H)), p_ij = min(sum of g_it over j <= t <= i, npos_max - 1), and e between two rows is
  interpolated linearly. Positions depend on the text: p_ii is g_ii, not 0, and `Positions` is not read. The table
  starts at 0, is shared by the heads, and its rows above the largest p of training stay 0.

  A temperature (log-n) multiplies q . k, hence acts on the gates too.

  npos_max: rows of the table, 64 for language models in the paper.
  gate_scale: factor on the gate's argument; the paper's text, without the square root, is sqrt(H).
  div: False adds q_i . e[p] undivided, the form of the paper's appendix and of x-transformers.
  per_layer: a table for each layer, as in the authors' code.
  """

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    npos_max: int = 64,
    gate_scale: float = 1.0,
    div: bool = True,
    per_layer: bool = True,
  ):
    super().__init__(dims, rngs)
    if npos_max < 2:
      raise SpecError(f'cope: npos_max = {npos_max}: a whole number of at least 2 is allowed')
    if gate_scale <= 0:
      # Also what keeps the gates of masked keys, sigmoid of a large negative number, at 0.
      raise SpecError(f'cope: gate_scale = {gate_scale!r}: a number above 0 is allowed')
    self.npos_max, self.gate_scale, self.div, self.per_layer = npos_max, float(gate_scale), div, per_layer
    self.table = PosParam(jnp.zeros((npos_max, dims.head_dim)))

  @property
  def reads_distance(self):
    return False

  def remarks(self):
    if self.npos_max <= self.dims.train_len + 1:
      return []
    return [
      f'cope(npos_max={self.npos_max}): rows above {self.dims.train_len} are never trained at {self.dims.train_len} '
      'tokens and stay 0; longer contexts meet no bias'
    ]

  def init_carry(self, q_BtNR):
    """Gates passed so far on the way from the diagonal leftwards, f32[B, N, t]."""
    b, t, n, _ = q_BtNR.shape
    return jnp.zeros((b, n, t), jnp.float32)

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    by_row = jnp.einsum('BtNR,cR->BNtc', q_BtNR, self.table[...], preferred_element_type=jnp.float32)
    if not self.div:
      by_row = by_row / self.q_scale

    def counting():
      # The mask is in the logits, so a later key's gate is exactly 0: unmasked, it would be counted, and leak.
      gate_BNts = jax.nn.sigmoid(self.gate_scale * logits_BNts)
      count_BNts = carry[..., None] + jnp.cumsum(gate_BNts[..., ::-1], -1)[..., ::-1]
      p_BNts = jnp.minimum(count_BNts, self.npos_max - 1.0)  # before the ceiling, which would step past the table
      floor = jnp.floor(p_BNts)
      # mode='fill': were a row past the table asked for all the same, NaN is loud where a silent clamp is not.
      lower, upper = (
        jnp.take_along_axis(by_row, row.astype(jnp.int32), -1, mode='fill') for row in (floor, jnp.ceil(p_BNts))
      )
      return logits_BNts + lower + (p_BNts - floor) * (upper - lower), carry + gate_BNts.sum(-1)

    # Once every query has counted to the end of the table, nothing further left can change.
    full = jnp.all(carry >= self.npos_max - 1)
    return jax.lax.cond(full, lambda: (logits_BNts + by_row[..., -1:], carry), counting)

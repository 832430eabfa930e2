"""Relative position vectors on keys and values: Shaw et al. 2018 (1803.02155), equations 3 and 4."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.base import Dims, PositionScheme, PosParam, distance
from spec import SpecError


class Shaw(PositionScheme):
  """q_i . (k_j + a_K[j - i]) / sqrt(H), and sum_j p_ij (v_j + a_V[j - i]), j - i clipped to [-k, k].

  The index is key minus query. Under the causal mask j - i runs from -k to 0, so a table holds k + 1 rows, row
  k + (j - i): the paper's 2k + 1 less the k that no causal model reads. From k tokens on all keys share row 0. Shared
  by the heads, N(0, 1/H).

  clip: k.
  use_values: the table a_V, which many re-implementations leave out.
  per_layer: tables for each layer, as in the paper.
  """

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, clip: int = 16, use_values: bool = True, per_layer: bool = True):
    super().__init__(dims, rngs)
    if clip < 1:
      raise SpecError(f'shaw: clip = {clip}: a whole number of at least 1 is allowed')
    self.clip, self.use_values, self.per_layer = clip, use_values, per_layer

    def table():
      return PosParam(dims.head_dim**-0.5 * jax.random.normal(rngs.params(), (clip + 1, dims.head_dim)))

    self.key_table = table()
    if use_values:
      self.value_table = table()

  def remarks(self):
    if self.clip < self.dims.train_len:
      return []
    return [
      f'shaw(clip={self.clip}): rows 0..{self.clip - self.dims.train_len} are never trained at {self.dims.train_len} '
      'tokens; longer contexts meet random vectors'
    ]

  def row(self, at_t: jax.Array, at_s: jax.Array) -> jax.Array:
    """Row of the tables for each query and key, i32[t, s]: k + clip(j - i, -k, 0)."""
    return self.clip - jnp.minimum(distance(at_t, at_s), self.clip).astype(jnp.int32)

  def _is_row(self, at_t, at_s):
    """The same as f32[t, s, k + 1]: matmuls with it gather, and scatter in the backward pass, where indices crawl."""
    return jax.nn.one_hot(self.row(at_t, at_s), self.clip + 1)

  def _all_clipped(self, at_t, at_s):
    """Whether the nearest pair of a tile is `clip` apart: all share row 0, and there is nothing to look up."""
    return at_t[0] - at_s[-1] >= self.clip

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    by_row = jnp.einsum('BtNR,cR->BNtc', q_BtNR, self.key_table[...], preferred_element_type=jnp.float32)
    more_BNts = jax.lax.cond(
      self._all_clipped(at_t, at_s),
      lambda: jnp.broadcast_to(by_row[..., :1], logits_BNts.shape),
      lambda: jnp.einsum('BNtc,tsc->BNts', by_row, self._is_row(at_t, at_s)),
    )
    return logits_BNts + more_BNts, carry

  def values(self, p_BNts, at_t, at_s):
    if not self.use_values:
      return None
    by_row = jax.lax.cond(
      self._all_clipped(at_t, at_s),
      lambda: jnp.pad(p_BNts.sum(-1, keepdims=True), ((0, 0),) * 3 + ((0, self.clip),)),
      lambda: jnp.einsum('BNts,tsc->BNtc', p_BNts, self._is_row(at_t, at_s)),
    )
    return by_row @ self.value_table[...]

"""xPos: Sun et al. 2022, A Length-Extrapolatable Transformer (2212.10554)."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, Positions
from posenc.rope import RoPE, turn
from spec import SpecError

EXPONENT = 64.0  # e**64 leaves float32 ten decades for queries and keys themselves, at either end


class XPos(RoPE):
  """RoPE whose pair p decays with the distance: times zeta_p**((i-j)/scale_base), zeta_p = (2p + 0.4 d) / 1.4 d.

  Queries are multiplied by zeta_p**((i-c)/scale_base), keys by zeta_p**((c-j)/scale_base). The centre c cancels in
  their product and is there for the range: uncentred, float32 would end at half the length. It is a function of the
  length alone, since a second position map rotates queries and keys in separate calls, which must agree on it. The
  fastest pair decays fastest, zeta_0 = 0.286; the causal mask is part of the definition, for j > i it grows.

  scale_base: tokens over which pair p decays by zeta_p.
  bca: blockwise causal attention, as in the paper's evaluation: a query sees its own block of L tokens, L the training
    length, and the block before. Nothing changes within L. Without it this is only half of the method.
  """

  name = 'xpos'
  max_len_why = 'beyond, its factors leave float32; a larger scale_base has a longer reach'

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    base: float = 10000.0,
    scale_base: float = 512.0,
    bca: bool = False,
    pairing: str = 'half_split',
  ):
    super().__init__(dims, rngs, base=base, pairing=pairing)
    if scale_base <= 0:
      raise SpecError(f'xpos: scale_base = {scale_base!r}: a number above 0 is allowed')
    self.scale_base, self.bca = float(scale_base), bca
    self.max_len = int(2 * EXPONENT * self.scale_base / -np.log(self.zeta_P[0]))
    if dims.train_len > self.max_len:
      raise SpecError(
        f'xpos: scale_base = {scale_base!r}: its factors leave float32 beyond {self.max_len} tokens; '
        f'a larger one is allowed for a training length of {dims.train_len}'
      )

  @property
  def zeta_P(self) -> np.ndarray:
    """Decay of each pair over `scale_base` tokens, float64."""
    return (np.arange(0, self.rot, 2) + 0.4 * self.rot) / (1.4 * self.rot)

  def plain(self, length):
    pos = super().plain(length)
    if not self.bca:
      return pos
    block = self.dims.train_len
    return dataclasses.replace(pos, window_T=np.minimum(pos.window_T, np.arange(length) % block + block + 1.0))

  def rotate(self, q_BTNH, k_BTKH, pos: Positions):
    cos_TP, sin_TP = self.cos_sin(pos)
    centre = pos.at_T.shape[0] // 2
    log_TP = (pos.at_T - centre)[:, None] * jnp.asarray(np.log(self.zeta_P) / self.scale_base, jnp.float32)
    grow_TP, shrink_TP = jnp.exp(log_TP), jnp.exp(-log_TP)
    # With the rotation, before anything is cast to the activations' type.
    q_BTNR = turn(q_BTNH, cos_TP * grow_TP, sin_TP * grow_TP, self.pairing)
    return q_BTNR, turn(k_BTKH, cos_TP * shrink_TP, sin_TP * shrink_TP, self.pairing)

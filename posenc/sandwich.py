"""Sandwich: Chi et al. 2022, Dissecting transformer length extrapolation (2212.10356)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Bias, Dims
from spec import SpecError


class Sandwich(Bias):
  """logit + (sum_i cos((i - j) w_i) - d/2) / (8h/N), w_i = 10000**(-2i/d), d/2 frequencies, heads h = 1 .. N.

  The product of two sinusoidal position vectors of width d, flatter from head to head. Nothing learned. Softmax cannot
  see the d/2; with it the bias is 0 on the diagonal, as in NeMo.

  d: a hyper-parameter, not the model's width.
  first_index: i = 1 .. d/2 in NeMo, the only code there is; 0 gives 0 .. d/2 - 1, as the paper's snippet prints.
  """

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, d: int = 128, first_index: int = 1):
    super().__init__(dims, rngs)
    if d < 2 or d % 2:
      raise SpecError(f'sandwich: d = {d}: an even number of at least 2 is allowed')
    if first_index not in (0, 1):
      raise SpecError(f'sandwich: first_index = {first_index}: 0 or 1 is allowed')
    self.d, self.first_index = d, first_index

  @property
  def wave_freq(self) -> np.ndarray:
    """w_i, float64[d / 2]. Not `inv_freq_P`: nothing is rotated, and no scaling method is defined for them."""
    return 1e4 ** (-2 * (self.first_index + np.arange(self.d // 2, dtype=np.float64)) / self.d)

  def bias(self, at_t, at_s):
    freq = jnp.asarray(self.wave_freq, jnp.float32)

    # cos(a - b) = cos a cos b + sin a sin b: a matmul of two small tables, where a cosine per pair of tokens and
    # frequency would be most of attention's cost. Angles are counted from the tile, so that they are no larger than
    # the distances, and as exact.
    def waves(at):
      angle = (at - at_t[0])[:, None] * freq
      return jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], -1)

    cos_ts = jnp.einsum('ti,si->ts', waves(at_t), waves(at_s), precision=jax.lax.Precision.HIGHEST)
    ratio = 8 * np.arange(1, self.dims.heads + 1) / self.dims.heads
    return (cos_ts - self.d // 2) / jnp.asarray(ratio, jnp.float32)[:, None, None]

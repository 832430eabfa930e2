"""Sinusoidal absolute positions: Vaswani et al. 2017 (1706.03762), section 3.5."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, Positions, PositionScheme
from spec import SpecError, one_of


class Sinusoidal(PositionScheme):
  """PE[pos, 2i] = sin(pos w_i), PE[pos, 2i+1] = cos(pos w_i), added to the embeddings times sqrt(D).

  layout: 'interleaved' as printed in the paper, or 'concat' = [sin ... | cos ...] as in tensor2tensor and fairseq.
    Irrelevant to a model trained from scratch: the next layer is linear.
  exponent: 'paper' w_i = 10000**(-2i/D); 't2t' w_i = 10000**(-i/(D/2 - 1)), what the released code computes, with a
    lowest frequency of exactly 1/10000. Not irrelevant.
  embed_scale: multiply the embeddings by sqrt(D) first (they are initialised with std D**-0.5), as the paper does;
    without it the positions, of rms 0.707, swamp them.
  """

  relative = False

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    layout: str = 'interleaved',
    exponent: str = 'paper',
    embed_scale: bool = True,
  ):
    super().__init__(dims, rngs)
    if layout not in ('interleaved', 'concat'):
      raise SpecError(one_of('sinusoidal: layout', layout, ('interleaved', 'concat')))
    if exponent not in ('paper', 't2t'):
      raise SpecError(one_of('sinusoidal: exponent', exponent, ('paper', 't2t')))
    self.layout, self.exponent, self.embed_scale = layout, exponent, embed_scale

  @property
  def wave_freq(self) -> np.ndarray:
    """Frequencies of the added waves, float64[D // 2]. Not `inv_freq_P`: no scaling method is defined for them."""
    half = self.dims.d_model // 2
    i = np.arange(half, dtype=np.float64)
    return 1e4 ** (-(2 * i / self.dims.d_model if self.exponent == 'paper' else i / max(half - 1, 1)))

  def table(self, at_T) -> jnp.ndarray:
    """f32[T, D]. An odd D ends in a zero column, as in the released code."""
    angle = jnp.asarray(at_T, jnp.float32)[:, None] * jnp.asarray(self.wave_freq, jnp.float32)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    if self.layout == 'concat':
      table_TD = jnp.concatenate([sin, cos], -1)
    else:
      table_TD = jnp.stack([sin, cos], -1).reshape(angle.shape[0], -1)
    return jnp.pad(table_TD, ((0, 0), (0, self.dims.d_model % 2)))

  def embed(self, x_BTD, pos: Positions):
    scale = self.dims.d_model**0.5 if self.embed_scale else 1.0
    return (x_BTD * scale + self.table(pos.at_T)).astype(x_BTD.dtype)

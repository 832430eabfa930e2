"""Rotary positions on a grid: RoPE-ViT (Heo et al. 2024, 2403.13298), Pixtral, Qwen2-VL and lucidrains' axial form."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, Positions, PositionScheme
from posenc.rope import PAIRINGS, turn
from spec import SpecError, one_of


class RoPE2D(PositionScheme):
  """RoPE by row for half of the pairs and by column for the others; token n stands at row n // width, column n % width.

  q.k then depends on the two differences, of rows and of columns: not on n - m, so no method made for a sequence
  applies. Beyond the training length there are more rows; columns stay within the grid.

    naver-ai/rope-vit, axial                     rope2d(order='xy', pairing='interleaved', base=100.0)
    Mistral's Pixtral                            rope2d(freqs='alternating', pairing='interleaved')
    Qwen2-VL's vision tower, Hugging Face        rope2d()
    lucidrains' rotary-embedding-torch, axial    rope2d(pairing='interleaved')

  width: tokens in a row.
  order: 'hw' gives the first half of the pairs to the row, 'xy' to the column.
  freqs: 'shared': both halves have base**(-4p/H), p < H/4; 'alternating': the second half has base**(-(4p+2)/H), so
    that the two together are RoPE's.
  pairing: as `rope`'s, over the whole head.
  """

  relative = False

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    width: int,
    base: float = 10000.0,
    order: str = 'hw',
    freqs: str = 'shared',
    pairing: str = 'half_split',
  ):
    super().__init__(dims, rngs)
    for option, value, allowed in (
      ('order', order, ('hw', 'xy')),
      ('freqs', freqs, ('shared', 'alternating')),
      ('pairing', pairing, PAIRINGS),
    ):
      if value not in allowed:
        raise SpecError(one_of(f'rope2d: {option}', value, allowed))
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
      raise SpecError(f'rope2d: width = {width!r}: a whole number of at least 1 is allowed')
    if base <= 1:
      raise SpecError(f'rope2d: base = {base!r}: a number above 1 is allowed')
    if dims.head_dim % 4:
      raise SpecError(f'rope2d: head_dim = {dims.head_dim}: a multiple of 4 is allowed')
    self.width, self.base, self.order, self.freqs, self.pairing = width, float(base), order, freqs, pairing

  @property
  def inv_freq_P(self):
    """In the order of the pairs: radians per row or per column. `rot` stays 0: none are along the sequence."""
    exponent = np.arange(0, self.dims.head_dim, 4, dtype=np.float64)
    second = exponent + (2.0 if self.freqs == 'alternating' else 0.0)
    return np.float64(self.base) ** (-np.concatenate([exponent, second]) / self.dims.head_dim)

  def rotate(self, q_BTNH, k_BTKH, pos: Positions):
    at_T = pos.at_T.astype(jnp.int32)  # a float's remainder is off where the division rounds
    row_T, column_T = at_T // self.width, at_T % self.width
    first_T, second_T = (row_T, column_T) if self.order == 'hw' else (column_T, row_T)
    half = pos.inv_freq_P.shape[0] // 2
    where_TP = jnp.repeat(jnp.stack([first_T, second_T], -1).astype(jnp.float32), half, -1)
    angle_TP = where_TP * pos.inv_freq_P
    cos_TP, sin_TP = jnp.cos(angle_TP), jnp.sin(angle_TP)
    return turn(q_BTNH, cos_TP, sin_TP, self.pairing), turn(k_BTKH, cos_TP, sin_TP, self.pairing)

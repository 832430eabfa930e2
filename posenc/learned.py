"""Learned absolute positions: a table with one row per position, as in GPT-2 (Radford et al. 2019)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, Positions, PositionScheme, PosParam
from spec import SpecError, one_of


class Learned(PositionScheme):
  """x + table[position], N(0, init_std**2).

  Beyond the table there is no row. Indexing would silently repeat the last one and `jnp.take` would return NaN, so
  `max_len` makes `posenc.positions` refuse the length, and a sweep records the point as unsupported.

  rows: of the table; 0 is the training length L. More are for training at positions beyond L (skipped, randomized):
    with positions 0 .. L - 1 they stay as they were drawn.
  oob: 'error' as above. 'interpolate', an ablation: at l tokens, more than rows, token i stands at i (rows-1)/(l-1),
    between two rows. It follows the length, so its curve is an oracle's, and no token stands where it was trained.
  """

  relative = False

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, init_std: float = 0.02, rows: int = 0, oob: str = 'error'):
    super().__init__(dims, rngs)
    if oob not in ('error', 'interpolate'):
      raise SpecError(one_of('learned: oob', oob, ('error', 'interpolate')))
    if rows and rows < dims.train_len:
      raise SpecError(
        f'learned: rows = {rows}: at least the training length, {dims.train_len}, is allowed, or 0 for just that'
      )
    self.rows, self.oob = rows or dims.train_len, oob
    self.max_len = self.rows if oob == 'error' else None
    self.table = PosParam(init_std * jax.random.normal(rngs.params(), (self.rows, dims.d_model)))

  def remarks(self):
    length = self.dims.train_len
    if self.rows == length:
      return []
    return [
      f'learned(rows={self.rows}): unless training positions go beyond 0..{length - 1}, '
      f'rows {length}..{self.rows - 1} are never trained'
    ]

  def plain(self, length):
    pos = super().plain(length)
    if self.oob == 'error' or length <= self.rows:
      return pos
    return dataclasses.replace(pos, at_T=np.arange(length) * (self.rows - 1) / (length - 1))

  def embed(self, x_BTD, pos: Positions):
    floor_T = jnp.floor(pos.at_T)

    def rows_TD(index_T):
      # mode='fill': should a position past the table ever get here, NaN is loud where the default, clamping, is not.
      return self.table[...].at[index_T.astype(jnp.int32)].get(mode='fill', fill_value=jnp.nan)

    # At a whole number both are one row, and the sum is that row to the last bit.
    share_T1 = (pos.at_T - floor_T)[:, None]
    mixed_TD = (1 - share_T1) * rows_TD(floor_T) + share_T1 * rows_TD(jnp.ceil(pos.at_T))
    return (x_BTD + mixed_TD).astype(x_BTD.dtype)

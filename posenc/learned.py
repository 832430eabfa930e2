"""Learned absolute positions: a table with one row per position, as in GPT-2 (Radford et al. 2019)."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.base import Dims, Positions, PositionScheme, PosParam


class Learned(PositionScheme):
  """x + table[position], a table of `train_len` rows, N(0, init_std**2).

  Beyond the training length there is no row. Indexing would silently repeat the last one and `jnp.take` would return
  NaN, so `max_len` makes `posenc.positions` refuse the length, and a sweep records the point as unsupported.
  """

  relative = False

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, init_std: float = 0.02):
    super().__init__(dims, rngs)
    self.max_len = dims.train_len
    self.table = PosParam(init_std * jax.random.normal(rngs.params(), (dims.train_len, dims.d_model)))

  def embed(self, x_BTD, pos: Positions):
    # mode='fill': should a position past the table ever get here, NaN is loud where the default, clamping, is not.
    rows_TD = self.table[...].at[pos.at_T.astype(jnp.int32)].get(mode='fill', fill_value=jnp.nan)
    return (x_BTD + rows_TD).astype(x_BTD.dtype)

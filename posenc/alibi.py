"""Attention with linear biases: Press et al. 2021 (2108.12409)."""

import jax.numpy as jnp
import numpy as np

from posenc.base import Bias, distance


def slopes(heads: int) -> np.ndarray:
  """m_h = 2**(-8h/N), h = 1 .. N, positive, float64[N], for N a power of two.

  Otherwise the P slopes of the largest power of two P below N, then every second slope of 2P heads: the order of the
  authors' code, BLOOM and MPT, which is not sorted and not one geometric series.
  """
  power = 2 ** int(np.log2(heads))
  first = 2.0 ** (-8.0 * np.arange(1, power + 1) / power)
  if power == heads:
    return first
  return np.concatenate([first, slopes(2 * power)[0::2][: heads - power]])


class ALiBi(Bias):
  """logit - m_h (i - j). Nothing learned.

  Formed from distances in float32. The authors' code adds m_h j, equal under softmax in exact arithmetic, but in
  bfloat16 neighbouring keys then get one value.
  """

  def bias(self, at_t, at_s):
    return -jnp.asarray(slopes(self.dims.heads), jnp.float32)[:, None, None] * distance(at_t, at_s)

  def columns(self, at_T, state):
    return slopes(self.dims.heads)[None, None, :, None].astype(np.float32), at_T[None, :, None, None]

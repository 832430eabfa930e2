"""Polar coordinate positions: Gopalakrishnan et al. 2025 (2509.10534)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, PosParam
from posenc.kerple import bounded
from posenc.rope import RoPE
from spec import SpecError, one_of


class PoPE(RoPE):
  """sum over channels c of softplus(q_c) softplus(k_c) cos((n - m) theta_c + delta_c) / sqrt(H).

  What is matched is in the magnitudes, never negative; where, in the phases, which the text cannot move. As RoPE on
  vectors twice as wide: every channel is a pair whose second half is 0, so H frequencies theta_c = base**(-c/H) where
  RoPE has H/2. Values keep their width.

  delta is learned per query head and channel. It turns the queries back where the paper turns the keys forward: the
  same logits, and heads that share a key may differ. Held in [-2 pi, 0] as in x-transformers, but with its gradient
  outside too: a clip's is 0 there, and delta starts on the bound.

  base: as RoPE's, trained with.
  phase_init: 'zeros', or 'uniform' over [-2 pi, 0].
  per_layer: phases for each layer; x-transformers has one set for all.
  """

  name = 'pope'

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    base: float = 10000.0,
    phase_init: str = 'zeros',
    per_layer: bool = False,
  ):
    super().__init__(dims._replace(head_dim=2 * dims.head_dim), rngs, base=base)
    if phase_init not in ('zeros', 'uniform'):
      raise SpecError(one_of('pope: phase_init', phase_init, ('zeros', 'uniform')))
    self.dims, self.q_scale, self.per_layer = dims, dims.head_dim**-0.5, per_layer
    share = jax.random.uniform(rngs.params(), (dims.heads, dims.head_dim)) if phase_init == 'uniform' else 0.0
    self.phase = PosParam(jnp.zeros((dims.heads, dims.head_dim)) - 2 * np.pi * share)

  def rotate(self, q_BTNH, k_BTKH, pos):
    phase_NH = bounded(self.phase[...], 0.0, -2 * np.pi)
    q_BTNH_, k_BTKH_ = (jax.nn.softplus(x.astype(jnp.float32)) for x in (q_BTNH, k_BTKH))
    # The phase is turned by before the angle: added to one of 10 000 radians, it would round both.
    q_BTNR = jnp.concatenate([q_BTNH_ * jnp.cos(phase_NH), -q_BTNH_ * jnp.sin(phase_NH)], -1)
    k_BTKR = jnp.concatenate([k_BTKH_, jnp.zeros_like(k_BTKH_)], -1)
    q_BTNR, k_BTKR = super().rotate(q_BTNR, k_BTKR, pos)
    return q_BTNR.astype(q_BTNH.dtype), k_BTKR.astype(k_BTKH.dtype)

"""Forgetting Transformer: Lin et al. 2025 (2503.02130)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, PositionScheme, PosParam
from posenc.rope import RoPE
from spec import SpecError

BLOCK = 128  # tokens
STEPS = 64  # to the nat: sums of multiples of 1/64 are exact in float32 up to 2**18


def split_cumsum(log_f_BTN: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Cumulative sum over T as coarse + fine, whose differences are exact where those of a plain one are rounded.

  Half-open gates reach -11000 at 16k tokens, where float32 has steps of 1e-3: as much as a gate of a far-sighted head
  says. The coarse part is a sum of whole steps and never rounded; the fine part, at most half a step a token, stays
  small. It alone has a gradient, that of the whole.
  """
  coarse_BTN = jax.lax.stop_gradient(jnp.round(STEPS * log_f_BTN) / STEPS)
  return _cumsum(coarse_BTN), _cumsum(log_f_BTN - coarse_BTN)


def _cumsum(x_BTN: jax.Array) -> jax.Array:
  """Over T, within blocks and over blocks: a plain one is quadratic in T where devices share the sequence."""
  b, length, n = x_BTN.shape
  if length <= BLOCK:
    return jnp.cumsum(x_BTN, 1)
  x = jnp.pad(x_BTN, ((0, 0), (0, -length % BLOCK), (0, 0))).reshape(b, -1, BLOCK, n)
  within = jnp.cumsum(x, 2)
  before = jnp.cumsum(jnp.pad(within[:, :-1, -1], ((0, 0), (1, 0), (0, 0))), 1)
  return (within + before[:, :, None]).reshape(b, -1, n)[:, :length]


class FoX(RoPE):
  """logit + sum of log f_l over j < l <= i, f_l = sigmoid(w . x_l + b) per head, x the layer's normalised input.

  ALiBi with a slope that the text sets token by token; `Positions` is not read without a rotation. Parameters are each
  layer's own. w from N(0, 0.02), b 0 as in the authors' code: every gate starts half open. Their output norm, output
  gate and shifted keys (the "Pro" block) are architecture, not position, and are not here.

  rope: rotate as well. The paper's models do without.
  base: that rotation's.
  decay_time: (T_min, T_max) starts head h at f = exp(-1/T_h), T_h in tokens, log-spaced over the heads: how the authors
    start gates that do not see the text. None: b = 0, T = 1.44.
  """

  name = 'fox'
  per_layer = True

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    rope: bool = False,
    base: float = 10000.0,
    decay_time: tuple[float, float] | None = None,
  ):
    if rope:
      super().__init__(dims, rngs, base=base)
    else:
      PositionScheme.__init__(self, dims, rngs)
    self.w = PosParam(0.02 * jax.random.normal(rngs.params(), (dims.d_model, dims.heads)))
    self.b = PosParam(jnp.zeros(dims.heads) if decay_time is None else self._bias(decay_time))

  def _bias(self, decay_time) -> jax.Array:
    number = lambda t: isinstance(t, (int, float)) and not isinstance(t, bool) and 0 < t < np.inf  # noqa: E731
    if not (isinstance(decay_time, tuple) and len(decay_time) == 2 and all(map(number, decay_time))):
      raise SpecError(f'fox: decay_time = {decay_time!r}: two numbers of tokens above 0 are allowed, or None')
    time_N = np.geomspace(*decay_time, self.dims.heads)
    return jnp.asarray(-np.log(np.expm1(1 / time_N)), jnp.float32)  # -1 / time = log sigmoid of it

  @property
  def reads_distance(self):
    return bool(self.rot)

  def remarks(self):
    return super().remarks() if self.rot else []

  def rotate(self, q_BTNH, k_BTKH, pos):
    return super().rotate(q_BTNH, k_BTKH, pos) if self.rot else (q_BTNH, k_BTKH)

  def token_state(self, x_BTD, pos):
    gate_BTN = jnp.einsum('BTD,DN->BTN', x_BTD.astype(jnp.float32), self.w[...]) + self.b[...]
    return split_cumsum(jax.nn.log_sigmoid(gate_BTN))

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    for c_BtN, c_BsN in zip(state_t, state_s):
      c_BNt, c_BNs = jnp.swapaxes(c_BtN, 1, 2), jnp.swapaxes(c_BsN, 1, 2)
      # Each part's difference first: the sum of the parts is the rounded number that they are there to avoid.
      logits_BNts = logits_BNts + (c_BNt[..., None] - c_BNs[..., None, :])
    return logits_BNts, carry

  def columns(self, at_T, state):
    return np.ones((1, 1, 1, len(state)), np.float32), -jnp.stack(state, -1)

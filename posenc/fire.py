"""FIRE, functional interpolation for relative positions: Li et al. 2023 (2310.04418)."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.base import Bias, Dims, PosParam, distance
from spec import SpecError

EPS = 1e-6  # the authors': the normaliser is 0 at query 0 once the threshold has shrunk to 0
FEW = 8  # units; one costs about a fourteenth of the whole hidden layer


def plain_mlp(x_ts: jax.Array, w1_F: jax.Array, b1_F: jax.Array, w2_FN: jax.Array) -> jax.Array:
  """sum_F w2 relu(w1 x + b1), f32[N, t, s]."""
  return jnp.einsum('tsF,FN->Nts', jax.nn.relu(x_ts[..., None] * w1_F + b1_F), w2_FN)


@jax.custom_vjp
def mlp(x_ts: jax.Array, w1_F: jax.Array, b1_F: jax.Array, w2_FN: jax.Array) -> jax.Array:
  """`plain_mlp`, without the hidden layer where few of its units bend.

  A tile far from the diagonal sees little of [0, 1], over which nearly every unit is on or off: together they are one
  straight line per head. Units that bend inside are added one by one. w1 x + b1 is monotone in x, rounding included,
  so that its two ends say which.
  """
  ends_2F = jnp.stack([x_ts.min(), x_ts.max()])[:, None] * w1_F + b1_F
  on_F, bent_F = ends_2F.min(0) >= 0, (ends_2F.min(0) < 0) & (ends_2F.max(0) > 0)
  count = bent_F.sum()

  def pieces():
    which_F = jnp.argsort(~bent_F)
    slope_N, level_N = (jnp.where(on_F, a, 0) @ w2_FN for a in (w1_F, b1_F))
    line_Nts = slope_N[:, None, None] * x_ts + level_N[:, None, None]

    def add(i, y_Nts):
      f = which_F[i]
      return y_Nts + w2_FN[f][:, None, None] * jax.nn.relu(w1_F[f] * x_ts + b1_F[f])

    return jax.lax.fori_loop(0, count, add, line_Nts)

  return jax.lax.cond(count <= FEW, pieces, lambda: plain_mlp(x_ts, w1_F, b1_F, w2_FN))


mlp.defvjp(lambda *a: (mlp(*a), a), lambda a, d_Nts: jax.vjp(plain_mlp, *a)[1](d_Nts))


class FIRE(Bias):
  """logit + MLP(psi(i - j) / psi(max(i, tau))), psi(x) = ln(|c x| + 1), tau = |L_mult init_len|.

  The MLP, 1 -> 32 -> N with a ReLU, sees a number in [0, 1] at any length: that is the argument for extrapolation. It
  knows where the query stands, so shifting all positions changes it. c starts at 0.1, L_mult at 1.

  The second layer has no bias, unlike the authors': it would be added to all the keys of a query, which softmax cannot
  see, and would never be trained.

  init_len: tokens up to which the normaliser is constant, before L_mult is trained. None: a quarter of the training
    length. The authors' 512 is more than a short run ever sees; the normaliser would then first move beyond it.
  per_layer: a function per layer, as in the paper; False is its FIRE-S, one for all.
  """

  relative = False

  def __init__(
    self, dims: Dims, rngs: nnx.Rngs, *, init_len: float | None = None, width: int = 32, per_layer: bool = True
  ):
    super().__init__(dims, rngs)
    if init_len is None:
      init_len = max(dims.train_len // 4, 1)
    if isinstance(init_len, bool) or not isinstance(init_len, (int, float)) or init_len < 0:
      raise SpecError(f'fire: init_len = {init_len!r}: a number of at least 0 is allowed, or None')
    if width < 1:
      raise SpecError(f'fire: width = {width}: a whole number of at least 1 is allowed')
    self.init_len, self.per_layer = float(init_len), per_layer

    # Drawn as the authors' library does, biases too: zeros there would put the kink of every ReLU at 0, and the MLP
    # would be linear on [0, 1].
    def uniform(shape, fan_in):
      return PosParam(jax.random.uniform(rngs.params(), shape, minval=-1, maxval=1) * fan_in**-0.5)

    self.w1, self.b1, self.w2 = uniform((width,), 1), uniform((width,), 1), uniform((width, dims.heads), width)
    self.c = PosParam(jnp.asarray(0.1))
    self.l_mult = PosParam(jnp.asarray(1.0))

  def remarks(self):
    if self.init_len < self.dims.train_len:
      return []
    return [
      f'fire(init_len={self.init_len:g}): the normaliser starts constant over the {self.dims.train_len} tokens of '
      'training; unless L_mult learns otherwise it first moves beyond them'
    ]

  def bias(self, at_t, at_s):
    def psi(x):
      return jnp.log(jnp.abs(self.c[...] * x) + 1)

    last_t = jnp.maximum(at_t, jnp.abs(self.l_mult[...] * self.init_len))
    share_ts = psi(distance(at_t, at_s)) / (psi(last_t) + EPS)[:, None]
    return mlp(share_ts, self.w1[...], self.b1[...], self.w2[...])

"""KERPLE: kernelised relative biases with learned scales, Chi et al. 2022 (2205.09921)."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.base import Dims, DistanceBias, PosParam

LEAST = 0.01  # the authors' lower bound of every parameter


def bounded(x: jax.Array, most: float | None = None, least: float = LEAST) -> jax.Array:
  """x held within [least, most], with the gradient of x itself.

  A plain clip has gradient 0 outside: a head that once stepped over the bound would stay there, for good. The authors
  clamp the parameter's data before each use, and the gradient flows. Written so that the value is exactly the bound
  however far out x is: x + (bound - x) would round.
  """
  return jax.lax.stop_gradient(jnp.clip(x, least, most)) + (x - jax.lax.stop_gradient(x))


class KerpleLog(DistanceBias):
  """logit - r1 ln(1 + r2 (i - j)), r1 and r2 above 0, per head, shared by all layers.

  r1 from 2 U(0, 1), r2 from U(0, 1). The authors' code calls r1 `bias_p` and r2 `bias_a`.
  """

  def __init__(self, dims: Dims, rngs: nnx.Rngs):
    super().__init__(dims, rngs)
    self.r1 = PosParam(2 * jax.random.uniform(rngs.params(), (dims.heads,)))
    self.r2 = PosParam(jax.random.uniform(rngs.params(), (dims.heads,)))

  def of(self, distance):
    r1, r2 = (jnp.expand_dims(bounded(r[...]), range(1, distance.ndim + 1)) for r in (self.r1, self.r2))
    return -r1 * jnp.log1p(r2 * distance)


class KerplePower(DistanceBias):
  """logit - r1 (i - j)**r2, r1 above 0, r2 in (0, 2] (beyond 2 the kernel is not conditionally positive definite).

  r1 from U(0, 1), r2 from 2 U(0, 1). The names swap roles in the authors' code: r1 is `bias_a` here, r2 `bias_p`.
  """

  def __init__(self, dims: Dims, rngs: nnx.Rngs):
    super().__init__(dims, rngs)
    self.r1 = PosParam(jax.random.uniform(rngs.params(), (dims.heads,)))
    self.r2 = PosParam(2 * jax.random.uniform(rngs.params(), (dims.heads,)))

  def of(self, distance):
    r1 = jnp.expand_dims(bounded(self.r1[...]), range(1, distance.ndim + 1))
    r2 = jnp.expand_dims(bounded(self.r2[...], 2.0), range(1, distance.ndim + 1))
    return -r1 * distance**r2

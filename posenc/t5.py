"""T5's relative bias: Raffel et al. 2020 (1910.10683), section 2.1 and the released code."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc.base import Dims, DistanceBias, PosParam
from spec import SpecError


def buckets(num_buckets: int, max_distance: int) -> np.ndarray:
  """Causal bucket of each distance 0 .. max_distance, int32[max_distance + 1]; everything further is in the last.

  Half the buckets are exact distances, the others logarithmic up to max_distance. A table from float64 on the host:
  bucket edges that are exact powers sit on the rounding of the logarithm, which differs between devices.
  """
  exact = num_buckets // 2
  n = np.arange(max_distance + 1)
  with np.errstate(divide='ignore'):
    log = exact + np.floor(np.log(n / exact) / np.log(max_distance / exact) * (num_buckets - exact) + 1e-9)
  return np.where(n < exact, n, np.minimum(log, num_buckets - 1)).astype(np.int32)


class T5(DistanceBias):
  """logit + b[bucket(i - j), head], one table shared by all layers, N(0, 1/D).

  scale_logits: multiply q.k by 1/sqrt(H) as every other scheme here does. T5 itself does not (its initialisation
    absorbs the factor): False is the original form.
  """

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    num_buckets: int = 32,
    max_distance: int = 128,
    scale_logits: bool = True,
  ):
    super().__init__(dims, rngs)
    if num_buckets < 2 or num_buckets % 2:
      raise SpecError(f't5: num_buckets = {num_buckets}: an even number of at least 2 is allowed')
    if max_distance <= num_buckets // 2:
      raise SpecError(f't5: max_distance = {max_distance}: more than num_buckets / 2 = {num_buckets // 2} is allowed')
    self.num_buckets, self.max_distance = num_buckets, max_distance
    if not scale_logits:
      self.q_scale = 1.0
    self.table = PosParam(dims.d_model**-0.5 * jax.random.normal(rngs.params(), (num_buckets, dims.heads)))

  def remarks(self):
    reach = buckets(self.num_buckets, self.max_distance)
    last = int(reach[min(self.dims.train_len - 1, self.max_distance)])
    if last == self.num_buckets - 1:
      return []
    return [
      f't5(num_buckets={self.num_buckets}, max_distance={self.max_distance}): buckets {last + 1}..'
      f'{self.num_buckets - 1} are never trained at {self.dims.train_len} tokens; longer contexts meet random biases'
    ]

  def level(self):
    return self.max_distance, self.table[...][-1]

  def of(self, distance):
    far = jnp.minimum(distance, self.max_distance).astype(jnp.int32)
    bucket = jnp.asarray(buckets(self.num_buckets, self.max_distance))[far]
    is_bucket = jax.nn.one_hot(bucket, self.num_buckets)
    return jnp.einsum('...b,bN->N...', is_bucket, self.table[...], precision=jax.lax.Precision.HIGHEST)

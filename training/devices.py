"""The mesh: one axis, `data`, over which a batch is spread; parameters are whole on every device."""

import os
import pathlib

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def start_jax() -> None:
  """Compile cache on, and one virtual CPU device per core; before the first array is made.

  XLA spreads one small program badly over cores: two devices with half a batch each train a nano model 1.3 times as
  fast as one device on two cores. Without effect on GPU and TPU.
  """
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path.home() / '.cache' / 'longcurve' / 'jax'))
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  if 'JAX_NUM_CPU_DEVICES' not in os.environ:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1  # macOS has none
    jax.config.update('jax_num_cpu_devices', min(cores, 8))


def make_mesh(batch: int) -> jax.sharding.Mesh:
  """All devices, or as many as divide `batch`."""
  devices = jax.devices()
  count = max(n for n in range(1, len(devices) + 1) if batch % n == 0)
  # Auto axes: the compiler spreads what the batch's sharding implies; Explicit, the default, would type every array.
  return jax.make_mesh((count,), ('data',), devices=devices[:count], axis_types=(AxisType.Auto,))


def split_batch(mesh: jax.sharding.Mesh, axis: int = 0) -> NamedSharding:
  """Rows over devices; `axis` is the array's batch axis."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, 'data'))


def whole(mesh: jax.sharding.Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())

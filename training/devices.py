"""The mesh of a run, `config.mesh`, and how data, parameters and optimizer state lie on it."""

import math
import os
import pathlib
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from models.ring import BATCH, CONTEXT
from spec import SpecError
from training import hosts

SMALL = 1024  # elements: below, gathering an array costs more than keeping it


def start_jax() -> None:
  """Compile cache on, one virtual CPU device per core, one of several processes if there are; before the first array.

  XLA spreads one small program badly over cores: two devices with half a batch each train a nano model 1.3 times as
  fast as one device on two cores. It prefers vectors of 256 bits where a core has 512: with those attention takes 6 %
  less, a step 2 to 4 %. Without effect on GPU and TPU; what XLA_FLAGS say already stays.
  """
  cache = os.environ.get('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path.home() / '.cache' / 'longcurve' / 'jax'))
  jax.config.update('jax_compilation_cache_dir', cache)
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  if 'JAX_NUM_CPU_DEVICES' not in os.environ:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1  # macOS has none
    jax.config.update('jax_num_cpu_devices', min(cores, 8))
  flags = os.environ.get('XLA_FLAGS', '')
  if flags[:1] in ('', '-') and 'xla_cpu_prefer_vector_width' not in flags:  # otherwise they may name a file
    os.environ['XLA_FLAGS'] = f'{flags} --xla_cpu_prefer_vector_width=512'.strip()
  hosts.join()
  try:
    jax.devices()
  except (RuntimeError, AssertionError) as error:  # the second where jax knows a platform that this jaxlib does not
    platforms: Any = jax.config
    raise SpecError(
      f'JAX_PLATFORMS = {platforms.jax_platforms!r}: jax has no such device here '
      f'({(str(error).strip().splitlines() or [type(error).__name__])[0]}); scripts/setup.sh gpu or tpu installs what '
      'one needs, JAX_PLATFORMS=cpu does without'
    ) from None


def make_mesh(batch: int, shape: tuple[int, int, int] = (0, 1, 1)) -> Mesh:
  """(data, fsdp, context) of the devices at hand; data 0: as many as there are, or as divide `batch` (0: any do)."""
  data, fsdp, context = shape
  devices = jax.devices()
  least = max(data, 1) * fsdp * context
  if least > len(devices):
    raise SpecError(f'config.mesh = {shape}: at most the {len(devices)} devices at hand are allowed, not {least}')
  if batch % (max(data, 1) * fsdp):
    raise SpecError(f'config.mesh = {shape}: a data x fsdp is allowed that divides the {batch} windows of a batch')
  if not data:
    data = max(n for n in range(1, len(devices) // least + 1) if batch % (n * fsdp) == 0)
  if devices[0].platform == 'cpu' and fsdp * context > 1:
    # jax gives every collective inside `shard_map` one channel. XLA keeps them apart by their order, which an
    # executable for the CPU loses on its way through the cache: it computes garbage, or waits for ever (jax 0.10.2).
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()
  shape = (data, fsdp, context)
  idle = jax.process_count() - len({device.process_index for device in devices[: math.prod(shape)]})
  if idle:
    raise SpecError(
      f'config.mesh = {shape}: one with devices of all {jax.process_count()} processes is allowed, {idle} would be idle'
    )
  # Auto axes: the compiler spreads what the batch's sharding implies; Explicit, the default, would type every array.
  return jax.make_mesh(
    shape, (*BATCH, CONTEXT), devices=devices[: math.prod(shape)], axis_types=(AxisType.Auto,) * len(shape)
  )


def split_batch(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """Rows over devices; `axis` is the array's batch axis, and the one after it, if any, is left whole."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH))


def split_tokens(mesh: Mesh, axis: int = 0) -> NamedSharding:
  """The same, and the axis after `axis`, the sequence, over `context`."""
  return NamedSharding(mesh, PartitionSpec(*(None,) * axis, BATCH, CONTEXT))


def whole_shares(mesh: Mesh, rows: int) -> int:
  """`rows`, or the next number of them that the devices of a batch can share."""
  shares = math.prod(mesh.shape[axis] for axis in BATCH)
  return -(-rows // shares) * shares


def whole(mesh: Mesh) -> NamedSharding:
  return NamedSharding(mesh, PartitionSpec())


def spread(mesh: Mesh, state: Any) -> Any:
  """Where parameters and optimizer state lie: the longest axis that `fsdp` divides over it; small arrays whole."""

  def sharding(x):
    size = mesh.shape['fsdp']
    fits = [(n, axis) for axis, n in enumerate(x.shape) if n % size == 0]
    if size == 1 or not fits or math.prod(x.shape) < SMALL:
      return whole(mesh)
    _, axis = max(fits)
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, 'fsdp'))

  return jax.tree.map(sharding, state)

"""Several processes in one run, by `jax.distributed`: how they find each other, agree, and end together."""

import functools
import itertools
import os
import re
import signal
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spec import SpecError

HEARTBEAT = 40  # seconds without one until a process is given up; jax's 100 would leave the others waiting for minutes
LATE = 3600  # seconds that processes wait for one whose data take long to read; one that is gone is noticed before
_meetings = itertools.count()


class Stopped(Exception):
  """The run cannot go on, through no fault of its config: one line, exit code 1."""


def join() -> None:
  """Makes this process one of several, where the environment says that there are; before the first array is made.

  JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say so themselves. In a step of
  SLURM or Open MPI with several tasks, and on TPUs, jax finds out. JAX_NUM_PROCESSES=1: one process, whatever is there.
  """
  count, index = _number('JAX_NUM_PROCESSES'), _number('JAX_PROCESS_ID')
  if count == 1:
    return
  address = os.environ.get('JAX_COORDINATOR_ADDRESS')
  explicit = None not in (address, count, index)
  options: Any = jax.config  # typed without its options
  tpu = (options.jax_platforms or '').startswith('tpu')  # jax sets it on a machine with TPUs
  if not (address or count or tpu or _tasks() > 1):
    return
  try:
    jax.distributed.initialize(
      address,
      count,
      index,
      # A process would be left with one GPU of its own choice, where it was not asked to choose.
      cluster_detection_method='deactivate' if explicit else None,
      heartbeat_timeout_seconds=HEARTBEAT,
    )
  except (ValueError, RuntimeError) as error:
    if tpu and not (address or count):  # on a host that belongs to no pod
      return
    raise SpecError(
      f'several processes: {" ".join(str(error).split())} JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and '
      'JAX_PROCESS_ID say everything; JAX_NUM_PROCESSES=1 that there is one'
    ) from None
  signal.signal(signal.SIGTERM, signal.SIG_DFL)  # jax's handler keeps it to itself
  if not first():
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # by number: gloo writes there, past sys.stdout


def _number(name: str) -> int | None:
  text = os.environ.get(name)
  try:
    return None if text is None else int(text)
  except ValueError:
    raise SpecError(f'{name} = {text!r}: a whole number is allowed') from None


def _tasks() -> int:
  """Of this step. A shell inside an allocation has SLURM's numbers too, but those of no step."""
  names = ['SLURM_STEP_NUM_TASKS', 'SLURM_NTASKS'] if 'SLURM_STEP_NODELIST' in os.environ else []
  return next(filter(None, map(_number, [*names, 'OMPI_COMM_WORLD_SIZE'])), 1)


def first() -> bool:
  """The process that writes and speaks."""
  return jax.process_index() == 0


def quiet() -> bool | None:
  """tqdm's `disable`: None shows bars on terminals only."""
  return None if first() else True


@functools.lru_cache
def told(mesh: Mesh, value: int) -> jax.Array:
  """int32[devices of `mesh`], on each what its process says."""
  lies = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  return jax.make_array_from_callback((mesh.size,), lies, lambda index: np.full(1, value, np.int32))


def agree(mesh: Mesh, value: int) -> int:
  """The largest `value` of all processes, once the last of them has come.

  Reduced over every group of axes in turn: gloo gives up where a process is 30 s late for the first collective of a
  group, because it compiles, say, but not at later ones. Here all come at the same time.
  """
  if jax.process_count() == 1:
    return value
  from orbax.checkpoint import multihost  # two seconds; what does not train or sweep need not wait for it

  # The coordinator's barrier. `sync_global_processes` and jax's own would be a first collective already.
  multihost.get_barrier_sync_fn()(key=f'agree {next(_meetings)}', timeout_ms=LATE * 1000)

  def largest(x):
    axes = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    for n in range(1, len(axes) + 1):
      for group in itertools.combinations(axes, n):
        x = jax.lax.pmax(x, group)
    return x

  specs = {'in_specs': PartitionSpec(mesh.axis_names), 'out_specs': PartitionSpec()}
  reduce = jax.shard_map(largest, mesh=mesh, check_vma=False, **specs)
  return np.asarray(jax.jit(reduce)(told(mesh, value))).item()


def on_first(mesh: Mesh, do: Callable[[], Any]) -> None:
  """`do` on process 0, while the others wait; where it raises, all end."""
  error = None
  if first():
    try:
      do()
    except Exception as raised:
      error = raised
  failed = agree(mesh, int(error is not None))
  if error is not None:
    raise error
  if failed:
    raise Stopped('process 0 cannot go on; its own message says why')


def lost(error: BaseException | None) -> str | None:
  """What an error says, in one line, where it comes from another process's end."""
  if not jax.distributed.is_initialized():
    return None
  while error is not None:
    # By its words: gloo's come as ValueError, the coordinator's as JaxRuntimeError, both from any array that is read.
    if re.search(r'Gloo|NCCL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED|[Bb]arrier|heartbeat', str(error)):
      return ' '.join(str(error).split())
    error = error.__cause__ or error.__context__
  return None


def leave(code: int) -> NoReturn:
  """Ends this process. With others it does not wait for them, as jax would at exit: they may be gone, or not know."""
  if jax.distributed.is_initialized():
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
  sys.exit(code)

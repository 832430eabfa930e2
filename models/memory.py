"""Whether a program fits: what XLA will allocate against what is there, before anything runs."""

import math
import os
import pathlib
from typing import Any

import jax

from spec import SpecError

GIB = 2**30


class OutOfMemory(SpecError):
  """A program that does not fit, with the numbers. A sweep records it as the outcome of its points."""


def bytes_needed(compiled: Any) -> int:
  """Peak of `compiled` on each device: arguments, temporaries and results. 0 where the backend does not say."""
  memory = compiled.memory_analysis()
  if memory is None:
    return 0
  new = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes  # donated ones serve twice
  return memory.argument_size_in_bytes + new


def bytes_there(held: Any, memory_gb: float = 0) -> float:
  """What a program may take of each device: what is free, and `held`, those of its arguments that are there already.

  memory_gb: that much instead, GiB of each GPU or TPU, or of the machine for the CPUs, which share its memory. Several
  processes must run one program: without memory_gb nothing limits it there, because each would find another number.
  """
  device = jax.local_devices()[0]
  cpu = device.platform == 'cpu'
  shares = jax.local_device_count() if cpu else 1
  if memory_gb:
    return memory_gb * GIB / shares
  if jax.process_count() > 1:
    return math.inf
  stats = device.memory_stats() or {}
  if 'bytes_limit' in stats:
    free = stats['bytes_limit'] - stats['bytes_in_use']
  else:
    free = free_memory() if cpu else math.inf
  return free / shares + _bytes_on_one(held)


def free_memory(root: pathlib.Path = pathlib.Path('/')) -> float:
  """Of this machine: /proc/meminfo, and what each control group that the process is in has left (SLURM, containers)."""
  try:
    lines = (root / 'proc/meminfo').read_text().splitlines()
    free = next(1024 * int(line.split()[1]) for line in lines if line.startswith('MemAvailable'))
  except (OSError, StopIteration):  # macOS
    return os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  try:
    groups = [line.split(':', 2) for line in (root / 'proc/self/cgroup').read_text().splitlines()]
  except OSError:
    groups = []
  for _, controllers, group in groups:
    if controllers not in ('', 'memory'):
      continue
    top = root / 'sys/fs/cgroup' / controllers  # version 2 has one tree and names no controllers
    names = ('memory.limit_in_bytes', 'memory.usage_in_bytes') if controllers else ('memory.max', 'memory.current')
    path = pathlib.PurePosixPath(group)
    for parent in (path, *path.parents):
      free = min(free, _left(top / str(parent).strip('/'), *names))
  return free


def _left(folder: pathlib.Path, limit: str, usage: str) -> float:
  """Of a control group: its limit less what it uses; file pages that can be dropped do not count. inf: no limit."""
  try:
    most = (folder / limit).read_text().strip()
    if most == 'max':
      return math.inf
    stat = dict(line.split() for line in (folder / 'memory.stat').read_text().splitlines())
    return int(most) - int((folder / usage).read_text()) + int(stat.get('total_inactive_file', stat['inactive_file']))
  except (OSError, ValueError, KeyError):  # the root has no such files, and a container may not see its parents
    return math.inf


def _bytes_on_one(tree: Any) -> int:
  arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
  return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arrays)


def fitted(step: Any, *arguments: Any, memory_gb: float = 0) -> tuple[Any, int, str]:
  """A jitted training step, compiled for these arguments, the bytes it needs of each device, and that as text.

  OutOfMemory if it does not fit.
  """
  compiled = step.lower(*arguments).compile()
  needed, there = bytes_needed(compiled), bytes_there(arguments, memory_gb)
  if needed > there:
    less = 'a smaller batch with more to accumulate, model.remat, or more devices on fsdp or context need less'
    raise OutOfMemory(f'one step of training: {as_text(needed, there)}; {less}')
  return compiled, needed, as_text(needed, there)


def check_state(shapes: Any, shardings: Any, memory_gb: float = 0) -> None:
  """OutOfMemory if a train state of these shapes does not fit beside its gradients, before any of it is made."""
  on_one = jax.tree.map(lambda a, s: math.prod(s.shard_shape(a.shape)) * a.dtype.itemsize, shapes, shardings)
  needed, there = sum(jax.tree.leaves(on_one)) + sum(jax.tree.leaves(on_one['params'])), bytes_there((), memory_gb)
  if needed > there:
    raise OutOfMemory(f'parameters, gradients and optimizer state: {as_text(needed, there)}')


def as_text(needed: float, there: float) -> str:
  return f'{needed / GIB:.3g} GiB needed of {there / GIB:.3g} GiB per device'

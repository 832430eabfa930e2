"""What a program needs, what there is, and what is said when the one is more than the other."""

import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from models.memory import GIB, OutOfMemory, bytes_needed, bytes_there, fitted, free_memory
from spec import SpecError

MEMINFO = 'MemTotal:       64000000 kB\nMemFree:         1000000 kB\nMemAvailable:   32000000 kB\n'
HERE = 32000000 * 1024


def machine(folder, groups='0::/\n', **files):
  """A root with /proc, and control group files by path, whose slashes are written __."""
  for path, text in {'proc__meminfo': MEMINFO, 'proc__self__cgroup': groups, **files}.items():
    path = folder / path.replace('__', '/')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
  return folder


def test_what_is_free_is_what_the_kernel_says(tmp_path):
  assert free_memory(machine(tmp_path)) == HERE
  assert free_memory() > 2**20  # the machine that runs this


def group(folder, limit, usage, stat, names=('memory.max', 'memory.current')):
  root = f'sys__fs__cgroup{folder}__'
  return {root + names[0]: f'{limit}\n', root + names[1]: f'{usage}\n', root + 'memory.stat': stat}


@pytest.mark.parametrize('limits, want', [
  ({}, HERE),
  ({'__job__step': ('max', 7)}, HERE),
  ({'__job__step': (5000, 3000)}, 5000 - 3000 + 500),
  ({'__job__step': ('max', 7), '__job': (9000, 8000)}, 9000 - 8000 + 500),  # a parent's limit holds as well
  ({'__other': (10, 0)}, HERE),
])  # fmt: skip
def test_control_groups_leave_less(tmp_path, limits, want):
  files = {}
  for folder, (limit, usage) in limits.items():
    files |= group(folder, limit, usage, 'anon 12\ninactive_file 500\n')
  assert free_memory(machine(tmp_path, '0::/job/step\n', **files)) == want


def test_control_groups_of_version_1(tmp_path):
  files = group('__memory__job', 4000, 3000, 'inactive_file 1\ntotal_inactive_file 100\n',
                ('memory.limit_in_bytes', 'memory.usage_in_bytes'))  # fmt: skip
  assert free_memory(machine(tmp_path, '5:cpu,cpuacct:/job\n4:memory:/job\n', **files)) == 4000 - 3000 + 100


def test_needed_are_arguments_temporaries_and_results():
  x = jnp.ones((256, 256))

  def step(x):
    return x * 2 + 1

  plain, donated = (jax.jit(step, donate_argnums=d).lower(x).compile() for d in ((), 0))
  assert 2 * x.nbytes <= bytes_needed(plain) <= 4 * x.nbytes
  assert bytes_needed(plain) - bytes_needed(donated) == x.nbytes  # a donated argument's memory serves twice


def test_what_is_held_already_is_there():
  x = jnp.ones(2**24)
  assert bytes_there((), 1.5) == bytes_there(x, 1.5) == 1.5 * GIB / jax.local_device_count()
  assert bytes_there(x) == pytest.approx(free_memory() + x.nbytes, rel=0.2)
  assert bytes_there({'x': x, 'n': 3}) < math.inf


def test_a_step_that_does_not_fit_is_a_users_error():
  step, x = jax.jit(lambda x: x + 1), jnp.ones(2**20)
  need = bytes_needed(step.lower(x).compile())
  run, needed, text = fitted(step, x, memory_gb=need / GIB)
  assert needed == need
  assert run(x)[0] == 2 and 'GiB needed of' in text
  with pytest.raises(OutOfMemory, match='^one step of training: 0.00781 GiB needed of .* a smaller batch') as error:
    fitted(step, x, memory_gb=(need - 1) / GIB)
  assert isinstance(error.value, SpecError) and '\n' not in str(error.value)


def test_programs_refuse_with_one_line_or_an_outcome(root, tmp_path):
  """Training ends before its first step; a sweep gives every point an outcome, and resuming with more memory works."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}

  def run(program, *options):
    command = [sys.executable, root / f'{program}.py', f'--workdir={tmp_path / "run"}', *options]
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)

  train = ('train', f'--config={root}/configs/smoke.py', '--config.steps=2', '--config.optimizer.warmup_steps=1')
  done = run(*train, '--config.memory_gb=0.0015')
  assert done.returncode == 2 and 'Traceback' not in done.stderr
  (line,) = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert line.startswith('error: one step of training: ')
  done = run(*train)
  assert done.returncode == 0, done.stderr
  assert 'memory: ' in done.stdout + done.stderr
  done = run('eval_extrapolation', '--memory_gb=1e-5', '--multiples=1,2')
  assert done.returncode == 0, done.stderr
  assert done.stdout.count('\nout of memory: ') == 1 and done.stdout.count('out of memory') == 9

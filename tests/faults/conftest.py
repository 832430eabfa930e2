"""Programs that tests start, and the runs that they kill and damage copies of."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
from harness import FIELDS, KILLER, SWEEP, environment


@pytest.fixture(scope='session')
def start(root):
  def run(program, *arguments, kill=None, code=None):
    """`kill`: (module, class, method, n), the process dies in call n + 1, which with code 0 is never made."""
    command = [sys.executable, f'{program}.py', *arguments]
    if kill:
      command = [sys.executable, '-c', KILLER, *map(str, kill), *command[1:]]
      code = -signal.SIGKILL if code is None else code
    done = subprocess.run(command, cwd=root, env=environment(), capture_output=True, text=True)
    assert done.returncode == (code or 0), f'{done.stdout}\n{done.stderr}'
    return done.stdout

  return run


@pytest.fixture(scope='session')
def train(start):
  """train(workdir, kill=None); a checkpoint every 4 of 20 steps."""

  def run(workdir, **kwargs):
    return start('train', *FIELDS, f'--workdir={workdir}', **kwargs)

  return run


@pytest.fixture(scope='session')
def finished(train, tmp_path_factory):
  """An uninterrupted run: (workdir, what it printed)."""
  workdir = tmp_path_factory.mktemp('faults') / 'run'
  return workdir, train(workdir)


@pytest.fixture
def rng():
  """Seeded by the clock: another place every time; the seed is shown, so that a failure can be repeated."""
  seed = int(os.environ.get('FAULTS_SEED', time.time()))
  print(f'FAULTS_SEED={seed}')
  return random.Random(seed)


@pytest.fixture(scope='session')
def rope(start, tmp_path_factory):
  """A run whose sweep is some twenty batches."""
  workdir = tmp_path_factory.mktemp('rope') / 'run'
  start('train', '--config=configs/smoke.py', f'--workdir={workdir}')
  return workdir


@pytest.fixture(scope='session')
def curve(start, finished):
  """The uninterrupted sweep of the finished run: (its folder, options)."""
  out = start('eval_extrapolation', f'--workdir={finished[0]}', *SWEEP)
  assert 'unsupported' in out
  return finished[0] / 'extrapolation', SWEEP

"""One writer a folder: who has it is said, and a dead one keeps nobody out."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from spec import SpecError
from training import lock

HOLD = """
import pathlib, sys, time
from training import lock
lock.take(pathlib.Path(sys.argv[1]))
print(1, flush=True)
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def held(root, tmp_path):
  """A process that has the lock of tmp_path / 'run'."""
  command = [sys.executable, '-c', HOLD, str(tmp_path / 'run'), '99']
  process = subprocess.Popen(command, cwd=root, env={**os.environ, 'PYTHONPATH': str(root)}, stdout=subprocess.PIPE)
  assert process.stdout.readline()
  yield process
  process.kill()
  process.wait()
  process.stdout.close()


def test_the_second_one_is_refused_with_the_first_ones_pid_and_host(held, tmp_path):
  who = f'pid {held.pid} on {socket.gethostname()}'
  assert lock.holder(tmp_path / 'run') == who
  with pytest.raises(SpecError) as refused:
    lock.take(tmp_path / 'run')
  assert str(tmp_path / 'run') in str(refused.value) and who in str(refused.value) and '\n' not in str(refused.value)


def test_a_killed_one_is_no_hindrance(held, tmp_path):
  held.send_signal(signal.SIGKILL)
  held.wait()
  assert (tmp_path / 'run' / lock.NAME).read_text() == f'pid {held.pid} on {socket.gethostname()}\n'
  assert lock.holder(tmp_path / 'run') is None
  lock.take(tmp_path / 'run')
  lock.take(tmp_path / 'run')  # it is this process's own
  assert (tmp_path / 'run' / lock.NAME).read_text() == f'pid {os.getpid()} on {socket.gethostname()}\n'


def test_asking_creates_nothing(tmp_path):
  assert lock.holder(tmp_path / 'gone') is None and not (tmp_path / 'gone').exists()

"""Several processes in one run: the same numbers as one process, one ending of all."""

import dataclasses
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from configs.schema import Config
from data import TokenDocument, TrainWindows
from mesh_test import BATCH, Run, difference
from models.lm import abstract
from models.ring import held, place
from spec import SpecError
from training import hosts
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, split_tokens, whole
from training.provenance import read

SLOW = pytest.mark.slow
GONE = 'error: a process of this run is gone'


# ---- what two child processes do


def trained(mesh):
  """Losses and parameters of three updates, a sweep's windows; every process has cut its own rows only."""
  run = Run('rope', mesh)
  rng, state, losses = np.random.default_rng(0), run.init(), []
  for n in range(3):
    tokens = rng.integers(0, 256, (BATCH, run.train_len + 1), dtype=np.int32)
    cut = lambda rows, tokens=tokens: (tokens[rows, :-1], tokens[rows, 1:])  # noqa: E731
    state, metrics = run.step(state, *place(split_tokens(mesh, axis=1), (1, BATCH, run.train_len), cut), n)
    losses.append(float(metrics['loss']))
  return run, state, {'losses': losses, 'nll': run.evaluate(state['params']).tolist()}


def main():
  """Prints what it has computed; then process 1 dies, and the other finds out in a step."""
  mesh = make_mesh(BATCH)
  hosts.on_first(mesh, lambda: None)
  run, state, out = trained(mesh)
  sharding = split_tokens(mesh)
  out |= {'agreed': hosts.agree(mesh, 7 * jax.process_index()), 'rows': {}}
  out['rows'] = {p: held(sharding, (BATCH, 4), p).tolist() for p in range(2)}
  if hosts.first():
    print(json.dumps(out), flush=True)
  for n in range(100):
    if n == 3 and not hosts.first():
      os.kill(os.getpid(), signal.SIGKILL)
    tokens = np.zeros((1, BATCH, run.train_len), np.int32)
    batch = place(split_tokens(mesh, axis=1), tokens.shape, lambda rows, t=tokens[0]: (t[rows], t[rows]))
    state, metrics = run.step(state, *batch, n)
    float(metrics['loss'])


# ---- the same seen from here

# Tests make arrays where they are imported: not before the processes have met.
CHILD = """
from training import cli, devices
devices.start_jax()
import hosts_test
cli.guard(hosts_test.main)
"""

# Runs a program as __main__ whose process gets a signal when it asks for batch n.
SIGNALLED = """
import os, runpy, sys
number, n, program, *arguments = sys.argv[1:]
from data import TrainWindows
left, original = int(n), TrainWindows.batch

def batch(self, *args):
  global left
  left -= 1
  if left == -1:
    os.kill(os.getpid(), int(number))
  return original(self, *args)

TrainWindows.batch = batch
sys.argv = [program, *arguments]
runpy.run_path(program, run_name='__main__')
"""


def together(root, *command, signalled=None, timeout=300):
  """Runs `command` in two processes of one device. signalled: (process, signal, batch). -> [(code, stdout, stderr)]"""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '1', 'PYTHONPATH': f'{root}:{root / "tests"}'}
  env.setdefault('JAX_COMPILATION_CACHE_DIR', str(jax.config.jax_compilation_cache_dir))
  env |= {'JAX_COORDINATOR_ADDRESS': address, 'JAX_NUM_PROCESSES': '2'}
  processes = []
  for index in range(2):
    mine = list(command)
    if signalled and signalled[0] == index:
      mine = ['-c', SIGNALLED, *(str(int(number)) for number in signalled[1:]), *mine]
    processes.append(
      subprocess.Popen(
        [sys.executable, *mine],
        cwd=root,
        env=env | {'JAX_PROCESS_ID': str(index)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
      )
    )
  try:
    return [(p.returncode, *out) for p, out in [(p, p.communicate(timeout=timeout)) for p in processes]]
  finally:
    for process in processes:
      process.kill()


def said(stdout):
  return [line for line in stdout.splitlines() if not line.startswith('[Gloo]')]


def test_two_processes_train_and_evaluate_like_one_and_notice_a_death(root):
  began = time.monotonic()
  (code, stdout, stderr), (killed, silence, _) = together(root, '-c', CHILD)
  assert (code, killed) == (1, -signal.SIGKILL), stderr
  assert stderr.count('\n') == 1 and stderr.startswith(GONE), stderr
  assert not silence
  out = json.loads(said(stdout)[0])
  _, _, alone = trained(make_mesh(BATCH))
  assert difference(out['losses'], alone['losses']) < 1e-5
  assert difference(out['nll'], alone['nll']) < 1e-5
  assert out['agreed'] == 7
  assert out['rows'] == {'0': [0, 1, 2, 3], '1': [4, 5, 6, 7]}
  assert time.monotonic() - began < 240


@dataclasses.dataclass(frozen=True)
class Device:
  id: int
  process_index: int
  platform: str = 'cpu'


@pytest.mark.parametrize('processes', [1, 2, 4])
@pytest.mark.parametrize('shape', [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (1, 2, 4)])
def test_each_process_cuts_its_own_windows_and_together_all(shape, processes):
  devices = np.array([Device(n, n * processes // 8) for n in range(8)])
  sharding = split_tokens(Mesh(devices.reshape(shape), ('data', 'fsdp', 'context')), axis=1)
  batch = (3, 16, 8)
  seen = np.zeros(batch, int)
  rows = [held(sharding, batch, p) for p in range(processes)]
  for device, index in sharding.devices_indices_map(batch).items():
    seen[index] += 1
    assert set(range(*index[1].indices(16))) <= set(rows[device.process_index])
  assert (seen == 1).all()
  # Of several processes that hold parts of one row each cuts it; otherwise a row is one process's.
  sharing = max(1, shape[2] * processes // 8)
  assert sorted(np.concatenate(rows)) == sorted([*range(16)] * sharing)


def test_rows_of_a_batch_are_those_of_the_whole():
  tokens = np.random.default_rng(0).integers(0, 256, 500).astype(np.uint16)
  windows = TrainWindows([TokenDocument('a', tokens, 500)], 16, 'window', 256, seed=3)
  inputs, targets = windows.batch(5, 12)
  rows = np.array([2, 3, 7])
  some, their = windows.batch(5, 12, rows)
  assert (some == inputs[rows]).all() and (their == targets[rows]).all()


STEP = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'a[1-2]', 'SLURM_NTASKS': '2', 'SLURM_PROCID': '1'}
MPI = {'OMPI_MCA_orte_hnp_uri': '4096.0;tcp://10.0.0.1:1', 'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '1'}
EXPLICIT = {'JAX_COORDINATOR_ADDRESS': 'a:1', 'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'}


@pytest.fixture
def joined(monkeypatch):
  """joined(environment) -> what jax was asked for, or None."""
  names = [name for name in os.environ if name.startswith(('SLURM_', 'OMPI_', 'JAX_NUM_P', 'JAX_PROC', 'JAX_COORD'))]
  for name in names:
    monkeypatch.delenv(name)
  handler = signal.getsignal(signal.SIGTERM)

  def join(environment, initialize=None):
    calls = []
    monkeypatch.setattr(jax.distributed, 'initialize', initialize or (lambda *a, **k: calls.append((a, k))))
    for name, value in environment.items():
      monkeypatch.setenv(name, value)
    hosts.join()
    return calls[0] if calls else None

  yield join
  signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize('environment', [
  {},
  {k: v for k, v in STEP.items() if 'STEP' not in k},  # a shell in an allocation
  STEP | {'SLURM_NTASKS': '1'},
  STEP | {'SLURM_STEP_NUM_TASKS': '1'},
  MPI | {'OMPI_COMM_WORLD_SIZE': '1'},
  STEP | {'JAX_NUM_PROCESSES': '1'},
])  # fmt: skip
def test_one_process_connects_to_nothing(joined, environment):
  assert joined(environment) is None


@pytest.mark.parametrize('environment, arguments, method', [
  (EXPLICIT, ('a:1', 2, 1), 'deactivate'),
  (EXPLICIT | STEP, ('a:1', 2, 1), 'deactivate'),
  (STEP, (None, None, None), None),
  (MPI, (None, None, None), None),
])  # fmt: skip
def test_the_environment_says_who_else_there_is(joined, environment, arguments, method):
  got, options = joined(environment)
  assert got == arguments
  assert options['cluster_detection_method'] == method
  assert options['heartbeat_timeout_seconds'] < 60
  assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


@pytest.mark.parametrize('count, says', [
  ('two', "^JAX_NUM_PROCESSES = 'two': a whole number is allowed$"),
  ('2', '^several processes: no address, no port JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and '),
])  # fmt: skip
def test_an_environment_that_does_not_say_enough(joined, count, says):
  def initialize(*args, **kwargs):
    raise ValueError('no address,\nno port')

  with pytest.raises(SpecError, match=says) as error:
    joined({'JAX_NUM_PROCESSES': count}, initialize)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('text, gone', [
  ('UNKNOWN: Gloo all-reduce failed: [x/pair.cc:547] Connection closed by peer [127.0.0.1]:1', True),
  ('DEADLINE_EXCEEDED: Barrier timed out. Id: x', True),
  ('RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.', False),
])  # fmt: skip
def test_errors_that_another_end_makes(monkeypatch, text, gone):
  assert hosts.lost(ValueError(text)) is None  # alone, it is something else
  monkeypatch.setattr(jax.distributed, 'is_initialized', lambda: True)
  error = RuntimeError('save failed')
  error.__cause__ = ValueError(text)
  assert (hosts.lost(error) is not None) == gone


# ---- the programs


def train(workdir, *options):
  return ('train.py', '--config=configs/smoke.py:alibi', f'--workdir={workdir}', *options)


def sweep(workdir):
  return ('eval_extrapolation.py', f'--workdir={workdir}', '--method=none', '--multiples=0.5,1,2')


def ran(root, *command):
  """In one process with two devices."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2'}
  done = subprocess.run([sys.executable, *command], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  return done.stdout


def parameters(workdir, step=20):
  _, shapes = abstract(functools.partial(Config.from_dict(read(workdir)).build_model, 257))
  checkpoints = Checkpoints(workdir)
  out = checkpoints.restore(step, {'params': as_abstract(shapes, whole(make_mesh(1)))})
  checkpoints.close()
  return out


def nll(workdir):
  lines = map(json.loads, (workdir / 'extrapolation' / 'curve.jsonl').read_text().splitlines())
  return {(p['length'], p['protocol']): p['nll'] for p in lines}


@pytest.fixture(scope='module')
def alone(root, tmp_path_factory):
  """alone(mesh) -> the folder of a run of one process."""
  made = {}

  def run(mesh):
    if mesh not in made:
      made[mesh] = tmp_path_factory.mktemp('alone')
      ran(root, *train(made[mesh], f'--config.mesh={mesh}'))
    return made[mesh]

  return run


@SLOW
@pytest.mark.parametrize('mesh', [(0, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_two_processes_make_the_curve_of_one(root, alone, tmp_path, mesh):
  ran(root, *sweep(alone(mesh)))
  for command in (train(tmp_path, f'--config.mesh={mesh}'), sweep(tmp_path)):
    (code, stdout, stderr), (other, silence, errors) = together(root, *command)
    assert (code, other, errors, silence) == (0, 0, '', ''), stderr + errors
  assert difference(parameters(tmp_path), parameters(alone(mesh))) < 1e-5
  curve, expected = nll(tmp_path), nll(alone(mesh))
  assert curve.keys() == expected.keys() and len(curve) == 3 * 2 + 2  # lengths x protocols, and two controls
  np.testing.assert_allclose([*curve.values()], [*expected.values()], atol=1e-6)
  assert len(list((tmp_path / 'tensorboard' / 'train').iterdir())) == 1  # one process writes


@SLOW
@pytest.mark.parametrize('victim', [0, 1])
def test_a_death_ends_all_and_the_run_goes_on(root, alone, tmp_path, victim):
  """jax's own runtime ends the others where process 0 dies, which hosts its coordinator."""
  began = time.monotonic()
  results = together(root, *train(tmp_path), signalled=(victim, signal.SIGKILL, 14))
  code, _, stderr = results[1 - victim]
  assert results[victim][0] == -signal.SIGKILL
  assert code not in (0, -signal.SIGKILL)
  assert GONE in stderr or (victim == 0 and 'another task died' in stderr), stderr
  assert time.monotonic() - began < 240  # of which a minute at most is waiting
  for code, _, stderr in together(root, *train(tmp_path)):
    assert code == 0, stderr
  assert difference(parameters(tmp_path), parameters(alone((0, 1, 1)))) < 1e-5


@SLOW
@pytest.mark.parametrize('told', [0, 1])
def test_a_signal_to_one_stops_all_at_one_step(root, alone, tmp_path, told):
  results = together(root, *train(tmp_path), signalled=(told, signal.SIGTERM, 4))
  assert [code for code, _, _ in results] == [128 + signal.SIGTERM] * 2, results
  assert 'SIGTERM: saved step' in results[0][1] and not results[1][1] + results[1][2]
  (saved,) = (int(path.name) for path in (tmp_path / 'checkpoints').iterdir())
  assert 5 <= saved <= 8
  for code, stdout, stderr in together(root, *train(tmp_path)):
    assert code == 0, stderr
    assert not stdout or f'resuming at step {saved}' in stdout
  assert difference(parameters(tmp_path), parameters(alone((0, 1, 1)))) < 1e-5


@SLOW
def test_what_process_0_refuses_ends_all(root, alone):
  """Quickly, the one with the reason and the other without."""
  (code, _, stderr), (other, _, errors) = together(root, *train(alone((0, 1, 1)), '--config.seed=1'))
  assert (code, other) == (2, 1), stderr + errors
  assert 'config.seed: 0 -> 1' in stderr and stderr.count('\n') == 1
  assert errors.startswith('error: ') and errors.count('\n') == 1


LATE = """
import time
from training import devices, hosts
devices.start_jax()
mesh = devices.make_mesh(0)
time.sleep(0 if hosts.first() else 35)
print(hosts.agree(mesh, 5))
"""


@SLOW
def test_a_late_process_is_waited_for(root):
  """For longer than the 30 s after which gloo gives up at a first collective."""
  (code, stdout, stderr), (other, _, errors) = together(root, '-c', LATE)
  assert (code, other) == (0, 0), stderr + errors
  assert said(stdout) == ['5']


@SLOW
def test_a_mesh_without_a_process(root, tmp_path):
  for code, _, stderr in together(root, *train(tmp_path, '--config.mesh=(1, 1, 1)')):
    assert code == 2
    assert 'config.mesh = (1, 1, 1): one with devices of all 2 processes is allowed, 1 would be idle' in stderr

"""The real programs, killed: a run that is started again ends where an uninterrupted one does, to the bit."""

import functools
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from flax import nnx

from configs.schema import Config
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole
from training.optimizer import decay_mask, make_optimizer

# Runs a program as __main__ and kills its process, as a power cut would, when a method has been called n times.
KILLER = """
import importlib, os, runpy, signal, sys
module, cls, method, n, program, *arguments = sys.argv[1:]
cls, left = getattr(importlib.import_module(module), cls), int(n)
original = getattr(cls, method)

def counted(*args, **kwargs):
  global left
  left -= 1
  if left < 0:
    os.kill(os.getpid(), signal.SIGKILL)
  return original(*args, **kwargs)

setattr(cls, method, counted)
sys.argv = [program, *arguments]
runpy.run_path(program, run_name='__main__')
"""

# Slot 0 knows no position past its table, slot 1 no frequencies: two kinds of unsupported points in one curve.
PATTERN = "('learned', 'alibi')"


@pytest.fixture(scope='module')
def start(root):
  def run(program, *arguments, kill=None, code=None):
    """`kill`: (module, class, method, n), the process dies in call n + 1, which with code 0 is never made."""
    command = [sys.executable, f'{program}.py', *arguments]
    if kill:
      command = [sys.executable, '-c', KILLER, *map(str, kill), *command[1:]]
      code = -signal.SIGKILL if code is None else code
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == (code or 0), f'{done.stdout}\n{done.stderr}'
    return done.stdout

  return run


@pytest.fixture(scope='module')
def train(start):
  """train(workdir, kill=None); a checkpoint every 4 of 20 steps."""

  def run(workdir, **kwargs):
    fields = {'posenc': PATTERN, 'log.every': 1, 'log.checkpoint_every': 4, 'log.keep': 9}
    options = [f'--config.{name}={value}' for name, value in fields.items()]
    return start('train', '--config=configs/smoke.py', f'--workdir={workdir}', *options, **kwargs)

  return run


@pytest.fixture(scope='module')
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


def digest(workdir, step=20):
  """Of parameters and optimizer state."""
  config = Config.from_dict(provenance.read(workdir))
  make = functools.partial(config.build_model, 257)
  tx = make_optimizer(config.optimizer, config.steps, decay_mask(nnx.eval_shape(make)))

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(params)}

  checkpoints = Checkpoints(workdir)
  state = checkpoints.restore(step, as_abstract(jax.eval_shape(init), whole(make_mesh(1))))
  checkpoints.close()
  return hashlib.sha256(b''.join(np.asarray(a).tobytes() for a in jax.tree.leaves(state))).hexdigest()


def at_batch(n):
  """Death in the n-th batch that is cut, counted from 0; validation cuts two in 20 steps."""
  return ('data', 'TrainWindows', 'batch', n)


def test_a_killed_run_goes_on_bit_for_bit(train, finished, tmp_path, rng):
  workdir = tmp_path / 'run'
  train(workdir, kill=at_batch(rng.randrange(1, 20)))
  train(workdir)
  assert digest(workdir) == digest(finished[0])


def test_validation_beyond_a_table_is_left_out_with_a_note(finished):
  assert 'note: no validation at 2x: learned has positions for 32 tokens, asked for 64' in finished[1]
  assert 'validation perplexity' in finished[1]


@pytest.mark.faults
def test_killed_five_times_even_while_saving(train, finished, tmp_path, rng):
  """Every life but the last dies: at the first batch after a save was begun, before any save, anywhere."""
  workdir = tmp_path / 'run'
  lives = [0, 4, rng.randrange(1, 4), 4, rng.randrange(1, 5)]
  for n in lives:
    train(workdir, kill=at_batch(n))
  out = train(workdir)
  assert digest(workdir) == digest(finished[0])
  assert 'finished, step 20' in out
  assert not list((workdir / 'checkpoints').glob('*tmp*')), 'leftovers of killed saves are swept'
  assert sorted(int(p.name) for p in (workdir / 'checkpoints').iterdir()) == [4, 8, 12, 16, 20]


@pytest.mark.faults
def test_killed_in_the_middle_of_writing_a_checkpoint(train, finished, tmp_path):
  """The files are partly there, under a name that nobody takes for a step."""
  workdir = tmp_path / 'run'
  saving = ('orbax.checkpoint._src.path.atomicity', 'AtomicRenameTemporaryPath', 'finalize', 3)
  train(workdir, kill=saving)
  assert list((workdir / 'checkpoints').glob('*tmp*')), 'nothing was being written: kill somewhere else'
  train(workdir)
  assert digest(workdir) == digest(finished[0])
  assert not list((workdir / 'checkpoints').glob('*tmp*'))


@pytest.mark.faults
def test_a_run_on_a_stream_goes_on_bit_for_bit(start, tmp_path, rng, monkeypatch):
  """Killed while it streams, then while it trains; refused once the stream holds something else."""
  monkeypatch.setenv('HF_HOME', str(tmp_path / 'hub'))
  monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path / 'tokens'))
  rows, path = [{'text': ''.join(rng.choices('etaoin shrdlu', k=400 + i))} for i in range(40)], tmp_path / 'text'
  path.mkdir()
  (path / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))

  def train(workdir, kill=None, code=None):
    fields = {'data.corpus': f'hub(id="{path}", split="train", streaming=True)', 'log.checkpoint_every': 4}
    options = [f'--config.{name}={value}' for name, value in fields.items()]
    return start('train', '--config=configs/smoke.py', f'--workdir={workdir}', *options, kill=kill, code=code)

  train(tmp_path / 'whole')
  shutil.rmtree(tmp_path / 'tokens')
  train(tmp_path / 'run', kill=('data.duplicates', 'Sketches', 'add', rng.randrange(40)))
  train(tmp_path / 'run', kill=at_batch(rng.randrange(5, 20)))
  train(tmp_path / 'run')
  assert digest(tmp_path / 'run') == digest(tmp_path / 'whole')
  (path / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows[1:])))
  assert train(tmp_path / 'run', code=2) == ''


@pytest.fixture(scope='module')
def curve(start, finished):
  """The uninterrupted sweep of the finished run: (its folder, options)."""
  options = ['--method=none', '--method=ntk', '--method=logn', '--multiples=0.5,1,2']
  out = start('eval_extrapolation', f'--workdir={finished[0]}', *options)
  assert 'unsupported' in out
  return finished[0] / 'extrapolation', options


def copy_of(run, to):
  shutil.copytree(run, to, ignore=shutil.ignore_patterns('extrapolation'))
  return to


def test_a_sweep_killed_three_times_gives_the_same_bytes(start, finished, curve, tmp_path, rng):
  """Before a batch is put away, while a file is renamed, before a batch is scored: four of them are to be scored."""
  folder, options = curve
  workdir = copy_of(finished[0], tmp_path / 'run')
  lives = [
    ('evaluation.store', 'Shelf', 'put', rng.randrange(2)),
    ('evaluation.store', 'os', 'replace', rng.randrange(4)),
    ('evaluation.plan', 'Plan', 'tokens', 0),
  ]
  for kill in lives:
    start('eval_extrapolation', f'--workdir={workdir}', *options, kill=kill)
    partial, whole = workdir / 'extrapolation' / 'curve.jsonl', (folder / 'curve.jsonl').read_text().splitlines()
    if partial.exists():  # whole lengths or nothing
      assert set(partial.read_text().splitlines()) < set(whole)
  start('eval_extrapolation', f'--workdir={workdir}', *options)
  for name in ('curve.jsonl', 'curve.csv'):
    assert (workdir / 'extrapolation' / name).read_bytes() == (folder / name).read_bytes()


def test_a_finished_sweep_loads_no_model(start, curve):
  """So nothing is compiled or scored, and what follows from the curve is left alone."""
  folder, options = curve

  def written():
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir() if p.name not in ('curve.jsonl', '.lock')}

  before, never = written(), ('training.checkpoints', 'Checkpoints', 'restore', 0)
  out = start('eval_extrapolation', f'--workdir={folder.parent}', *options, kill=never, code=0)
  assert 'curve.png' in out
  assert written() == before


# Runs a sweep that tells a file of every batch that it begins to score and of every one that it has put away, and dies
# so many seconds after its first.
TRACED = """
import json, os, runpy, signal, sys, threading, time
log, delay, *arguments = sys.argv[1:]
from evaluation import sweep
from evaluation.score import Scorer
from evaluation.store import Shelf

def tell(*what):
  with open(log, 'a') as file:
    file.write(json.dumps(what) + '\\n')

program, put, fill = Scorer.program, Shelf.put, sweep.fill

def traced_program(self, *args):
  made = program(self, *args)
  return made._replace(run=lambda *args: (tell('run'), made.run(*args))[1])

def traced_put(self, places, rows, seconds=0.0):
  put(self, places, rows, seconds)
  tell('kept', *([self.key.address, *place] for place in places))

def traced_fill(*args):
  if sweep.fill is traced_fill:
    sweep.fill = fill
    timer = threading.Timer(float(delay), os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
    tell('begun', time.time())
  fill(*args)

Scorer.program, Shelf.put, sweep.fill = traced_program, traced_put, traced_fill
sys.argv = arguments
try:
  runpy.run_path(arguments[0], run_name='__main__')
finally:
  tell('ended', time.time())
"""


@pytest.fixture(scope='module')
def rope(start, tmp_path_factory):
  """A run whose sweep is some twenty batches."""
  workdir = tmp_path_factory.mktemp('rope') / 'run'
  start('train', '--config=configs/smoke.py', f'--workdir={workdir}')
  return workdir


@pytest.mark.faults
def test_a_sweep_killed_at_twenty_moments_scores_nothing_twice(root, rope, tmp_path, rng):
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}

  def life(workdir, delay):
    """Exit code and what it told."""
    log = tmp_path / 'log'
    log.write_text('')
    arguments = [str(log), str(delay), 'eval_extrapolation.py', f'--workdir={workdir}']
    done = subprocess.run([sys.executable, '-c', TRACED, *arguments], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [json.loads(line) for line in log.read_text().splitlines()]

  whole = copy_of(rope, tmp_path / 'whole')
  life(whole, 1000)  # programs are in the compile cache from here on
  shutil.rmtree(whole / 'extrapolation')
  _, told = life(whole, 1000)
  seconds = next(t[1] for t in told if t[0] == 'ended') - next(t[1] for t in told if t[0] == 'begun')
  want = (whole / 'extrapolation' / 'curve.jsonl').read_bytes()
  batches = sum(t[0] == 'run' for t in told)
  assert batches == sum(t[0] == 'kept' for t in told) > 15
  kills = finished = 0
  while kills < 20 or not finished:
    workdir = copy_of(rope, tmp_path / f'run{finished}')
    runs, kept, mine, code = 0, [], 0, -1
    while code:
      code, told = life(workdir, rng.uniform(0, 0.8 * seconds))
      runs += sum(t[0] == 'run' for t in told)
      kept += [tuple(place) for t in told if t[0] == 'kept' for place in t[1:]]
      mine += code != 0
    assert (workdir / 'extrapolation' / 'curve.jsonl').read_bytes() == want
    assert len(set(kept)) == len(kept), 'scored and put away twice'
    assert runs <= batches + 2 * mine  # one on the devices, one on its way to the store
    kills, finished = kills + mine, finished + 1
  print(f'{kills} kills in {finished} sweeps of {seconds:.1f} s')


@pytest.mark.faults
def test_two_sweeps_share_a_store(root, rope, tmp_path):
  """Copies of a run are one checkpoint. Both end with the curve of a sweep of its own."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
  alone = copy_of(rope, tmp_path / 'alone')
  command = [sys.executable, 'eval_extrapolation.py']
  subprocess.run([*command, f'--workdir={alone}'], cwd=root, env=env, check=True, capture_output=True)
  both = [copy_of(rope, tmp_path / name) for name in 'ab']
  started = [
    subprocess.Popen(
      [*command, f'--workdir={run}', f'--store={tmp_path}/store'], cwd=root, env=env, stdout=subprocess.DEVNULL
    )
    for run in both
  ]
  assert [process.wait() for process in started] == [0, 0]
  for run in both:
    for name in ('curve.jsonl', 'curve.csv'):
      assert (run / 'extrapolation' / name).read_bytes() == (alone / 'extrapolation' / name).read_bytes()
    assert not (run / 'extrapolation' / 'store').exists()
  assert len(list(tmp_path.glob('store/*/*.npz'))) == len(list(alone.glob('extrapolation/store/*/*.npz')))


def test_what_a_scheme_cannot_give_is_recorded_as_unsupported(curve):
  """Exit 0 and a reason: a table has no row past its end, and NTK nothing to act on without frequencies."""
  points = [json.loads(line) for line in (curve[0] / 'curve.jsonl').read_text().splitlines()]
  outcome = {
    (p['method'], p['length']): (p['outcome'], p['reason']) for p in points if p['protocol'] == 'fixed_targets'
  }
  table = ('unsupported', 'learned has positions for 32 tokens, asked for 64')
  none = 'has no frequencies along the sequence to scale'
  frequencies = ('unsupported', f'ntk: learned {none}; alibi {none}')
  assert outcome == {
    **{('none', n): ('ok', None) for n in (16, 32)},
    **{('logn', n): ('ok', None) for n in (16, 32)},
    **{('ntk', n): frequencies for n in (16, 32)},
    **{(method, 64): table for method in ('none', 'ntk', 'logn')},
  }
  assert all(('nll' in p) == (p['outcome'] == 'ok') for p in points), 'a number where there is none to give'
  assert (curve[0] / 'curve.png').stat().st_size > 1000


@pytest.mark.parametrize(
  ('flag', 'says'), [('--checkpoint=7', '7: allowed: 4, 8, 12, 16, 20'), ('--checkpoint=x', "'x'")]
)
@pytest.mark.faults
def test_a_sweep_of_what_was_not_saved(root, finished, flag, says):
  command = [sys.executable, 'eval_extrapolation.py', f'--workdir={finished[0]}', flag]
  done = subprocess.run(command, cwd=root, capture_output=True, text=True)
  assert done.returncode == 2
  assert done.stderr.startswith('error: ')
  assert done.stderr.count('\n') == 1
  assert says in done.stderr


FULL_DISK = """
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # files end here, as on a full disk
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name='__main__')
"""


@pytest.mark.faults
def test_a_full_disk_is_no_success(root, tmp_path):
  """The save fails in the background, after the loop has gone on; exit 0 would leave a run without its end."""
  command = [sys.executable, '-c', FULL_DISK, 'train.py', '--config=configs/smoke.py', f'--workdir={tmp_path}/run']
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root), 'JAX_ENABLE_COMPILATION_CACHE': 'false'}
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
  assert done.returncode == 1, done.stdout + done.stderr
  assert 'finished, step 20' not in done.stdout
  assert Checkpoints(tmp_path / 'run').steps == []

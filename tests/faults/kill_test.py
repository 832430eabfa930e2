"""The real programs, killed: a run that is started again ends where an uninterrupted one does, to the bit."""

import json
import shutil
import signal
import subprocess
import sys

import pytest
from harness import FIELDS, KILLS, SWEEP, TIMED, copy_of, curves, digest, environment, one_line, run


def at_batch(n):
  """Death in the n-th batch that is cut, counted from 0; validation cuts two in 20 steps."""
  return ('data', 'TrainWindows', 'batch', n)


BATCH, ROWS = ('data', 'TrainWindows', 'batch'), ('evaluation.plan', 'Plan', 'tokens')


@pytest.mark.parametrize('kills', [KILLS[0], pytest.param(KILLS[1], marks=pytest.mark.faults)])
def test_killed_at_random_moments(finished, curve, tmp_path, rng, kills, record_property):
  """Trainings, two kills of three, and sweeps: after every batch, in the midst of saves, of files, of a compilation."""
  done = {'training': 0, 'sweep': 0}
  left = {'sweep': kills // 3, 'training': kills - kills // 3}

  def life(kind, workdir, seconds):
    method, program, options = {
      'training': (BATCH, 'train', FIELDS),
      'sweep': (ROWS, 'eval_extrapolation', SWEEP),
    }[kind]
    before = ['-c', TIMED, *method, seconds, tmp_path / 'lived', f'{program}.py']
    code, out, err = run('', f'--workdir={workdir}', *options, before=before, code=None)
    assert code in (0, -signal.SIGKILL), f'{out}\n{err}'
    return code

  def complete(kind, workdir):
    if kind == 'training':
      assert digest(workdir) == digest(finished[0])
      assert curves(workdir) == curves(finished[0])
      assert not list((workdir / 'checkpoints').glob('*tmp*')) and not (workdir / 'damaged').exists()
      return
    for name in ('curve.jsonl', 'curve.csv'):
      assert (workdir / 'extrapolation' / name).read_bytes() == (curve[0] / name).read_bytes()

  for kind in left:
    longest = None if kills > 10 else 1.0  # how long a life is, which costs one more of them
    while left[kind] or not done[kind]:
      workdir = tmp_path / f'{kind}{done[kind]}'
      if kind == 'sweep':
        copy_of(finished[0], workdir)
      code = -1
      while code:
        if longest is None:
          code, longest = life(kind, workdir, 1000), float((tmp_path / 'lived').read_text())
          continue
        code = life(kind, workdir, rng.uniform(0, longest) if left[kind] else 1000)
        left[kind] -= code != 0
      complete(kind, workdir)
      done[kind] += 1
      shutil.rmtree(workdir)
  record_property('counted', f'{kills} kills in {done["training"]} trainings and {done["sweep"]} sweeps')


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


@pytest.mark.faults
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


@pytest.mark.faults
def test_a_sweep_killed_at_twenty_moments_scores_nothing_twice(root, rope, tmp_path, rng):
  env = environment()

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
def test_a_sweep_of_what_was_not_saved(finished, flag, says):
  _, err = run('eval_extrapolation', f'--workdir={finished[0]}', flag, code=2)
  assert says in one_line(err)

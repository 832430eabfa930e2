"""A grid: which cells there are, what is wrong with them before any runs, and that all of them end."""

import argparse
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from evaluation import results
from evaluation.points import read_curve
from lock_test import HOLD
from report_test import point
from scripts import grid
from spec import SpecError
from training import lock

# ml_collections loads a config file by a method that importlib has deprecated.
pytestmark = pytest.mark.filterwarnings(r'ignore:the load_module\(\) method:DeprecationWarning')

BASE = {'config': 'configs/smoke.py', 'posenc': 'rope', 'seeds': '0', 'set': [], 'rest': []}


@pytest.fixture
def make(tmp_path, root, monkeypatch):
  """make(posenc=..., seeds=..., set=[...]) -> cells below tmp_path / 'grid'."""
  monkeypatch.chdir(root)

  def make(**changes):
    return grid.cells(argparse.Namespace(**{**BASE, 'workdir': tmp_path / 'grid', **changes}))

  return make


def test_cells_are_named_by_what_they_are(make):
  found = make(
    posenc="rope(base=100.0); ('rope', 'nope')", seeds='0,2', set=['optimizer.learning_rate=1e-3,0.003', 'methods=ntk']
  )
  assert [c.name for c in found][:3] == [
    'rope_base=100.0,optimizer.learning_rate=0.001,methods=ntk,seed=0',
    'rope_base=100.0,optimizer.learning_rate=0.001,methods=ntk,seed=2',
    'rope_base=100.0,optimizer.learning_rate=0.003,methods=ntk,seed=0',
  ]
  assert len(found) == 8 and found[-1].name == 'rope+nope,optimizer.learning_rate=0.003,methods=ntk,seed=2'
  last = found[-1].config
  assert (last.posenc, last.seed, last.optimizer.learning_rate, last.methods) == (('rope', 'nope'), 2, 0.003, ('ntk',))
  (written,) = make(set=['optimizer.learning_rate=0.0010'])
  assert written.name == 'rope,optimizer.learning_rate=0.001,seed=0'  # as 1e-3 is


def test_values_are_split_outside_brackets_and_quotes():
  assert grid.split('1e-3,3e-3') == ['1e-3', '3e-3']
  assert grid.split("('none','pi'),yarn(factor=8, beta_fast=5)") == ["('none','pi')", 'yarn(factor=8, beta_fast=5)']


@pytest.mark.parametrize(('changes', 'says'), [
  ({'posenc': 'rope;rpoe'}, "config.posenc: scheme = 'rpoe': did you mean 'rope'?"),
  ({'set': ['optimizer.learning_rat=1']}, "--set = 'optimizer.learning_rat': did you mean 'optimizer.learning_rate'?"),
  ({'set': ['optimizer.learning_rate=1e-3,0']}, 'config.optimizer.learning_rate = 0.0: a number above 0'),
  ({'set': ['optimizer.learning_rate=1e-3,x']}, 'could not convert string to float'),
  ({'set': ['optimizer.learning_rate=1e-3,0.001']}, 'rope,optimizer.learning_rate=0.001,seed=0: each'),
  ({'set': ['steps=1', 'steps=2']}, '--set steps=2: field=value,value is allowed, each field once'),
  ({'set': ['steps']}, '--set steps: field=value,value is allowed'),
  ({'set': ['seed=1']}, '--set seed=1: --seeds sets it'),
  ({'seeds': ''}, 'at least one of each is allowed'),
  ({'config': 'configs/gone.py'}, 'gone.py'),
])  # fmt: skip
def test_what_is_wrong_is_wrong_before_any_cell_runs(make, tmp_path, changes, says):
  with pytest.raises(SpecError) as refused:
    make(**changes)
  assert says in str(refused.value) and '\n' not in str(refused.value)
  assert not (tmp_path / 'grid').exists()


# Stands for train.py and eval_extrapolation.py: leaves what they leave, says what they say, a line a life in a file.
PROGRAM = """
import os, pathlib, sys, time
program, workdir, steps, what = sys.argv[1], pathlib.Path(sys.argv[2]), sys.argv[3], sys.argv[4]
with open(workdir.parent / 'lives', 'a') as file:
  file.write(f'{program} {workdir.name}\\n')
if what == 'fail':
  print('error: loss = nan at step 3')
  sys.exit(1)
if what == 'wait':
  time.sleep(60)
if program == 'train':
  (workdir / 'checkpoints' / steps).mkdir(parents=True)
  (workdir / 'checkpoints' / steps / 'arrays').touch()
else:
  import hashlib, shutil
  (workdir / 'extrapolation').mkdir()
  shutil.copy(workdir.parent / 'curve.jsonl', workdir / 'extrapolation' / 'curve.jsonl')
  curve = (workdir / 'extrapolation' / 'curve.jsonl').read_bytes()
  (workdir / 'extrapolation' / '.drawn').write_text(hashlib.sha256(curve).hexdigest())
"""


@pytest.fixture
def run(make, tmp_path, monkeypatch):
  """run(cells, does={name: what}) -> Grid. What its programs do instead of training."""
  points = [
    {**point('rope', method, n, [2.0] * 12), 'protocol': protocol, 'checkpoint_step': 20}
    for method in ('none', 'yarn')
    for n in (16, 32, 64, 256)
    for protocol in ('fixed_targets', 'non_overlapping')
  ]
  (tmp_path / 'grid').mkdir()
  results.write(tmp_path / 'made', points, redraw=False)
  shutil.copy(tmp_path / 'made' / 'curve.jsonl', tmp_path / 'grid' / 'curve.jsonl')

  def run(todo, does=None, jobs=2):
    def command(cell, program):
      what = (does or {}).get(cell.name, '')
      return [sys.executable, '-c', PROGRAM, program, str(cell.workdir), str(cell.config.steps), what]

    monkeypatch.setattr(grid.Cell, 'command', command)
    made = grid.Grid(todo, jobs)
    made.run()
    return made

  return run


def lives(tmp_path):
  return sorted((tmp_path / 'grid' / 'lives').read_text().splitlines())


def test_a_cell_that_fails_stops_no_other_and_is_tried_again(make, run, tmp_path, capsys):
  todo = make(posenc='rope;alibi;nope')
  bad = todo[1].name
  made = run(todo, {bad: 'fail'})
  assert made.failed == {bad: 'train: loss = nan at step 3, exit code 1'} and not made.stopped
  assert 'failed: loss = nan at step 3' in grid.status(todo) and '2 of 3 cells are done' in grid.status(todo)
  before = lives(tmp_path)
  assert before == sorted(
    [f'train {bad}', *(f'{p} {c.name}' for c in (todo[0], todo[2]) for p in ('train', 'eval_extrapolation'))]
  )
  assert run(todo).failed == {}
  assert lives(tmp_path) == sorted([*before, f'train {bad}', f'eval_extrapolation {bad}'])  # the others: left alone
  assert '3 of 3 cells are done' in grid.status(todo)
  out = capsys.readouterr().out
  assert f'1/3 done, 1 failed  {bad}: FAILED: train: loss = nan' in out or 'FAILED: train: loss = nan at step 3' in out


def test_a_sweep_that_ends_without_all_its_points_is_no_success(make, run, tmp_path):
  path = tmp_path / 'grid' / 'curve.jsonl'
  path.write_text('\n'.join(path.read_text().splitlines()[:-1]) + '\n')
  (cell,) = make()
  assert list(run([cell]).failed) == [cell.name]
  assert lives(tmp_path) == [f'eval_extrapolation {cell.name}', f'train {cell.name}']  # once, not for ever


def test_a_signal_reaches_the_runs_and_ends_the_grid(make, run, tmp_path):
  todo = make(posenc='rope;alibi')
  before = signal.getsignal(signal.SIGTERM)
  kill = f'import os, signal, time; time.sleep(1.5); os.kill({os.getpid()}, signal.SIGTERM)'
  killer = subprocess.Popen([sys.executable, '-c', kill])
  began = time.monotonic()
  made = run(todo, {cell.name: 'wait' for cell in todo}, jobs=1)
  killer.wait()
  assert made.stopped == signal.SIGTERM and not made.failed and time.monotonic() - began < 30
  assert lives(tmp_path) == [f'train {todo[0].name}']
  assert signal.getsignal(signal.SIGTERM) is before
  assert 'not begun' in grid.status(todo)  # it was stopped before its first checkpoint, and did not fail


def test_a_cell_in_other_hands_is_waited_for(make, run, tmp_path, root):
  """The orphan of a killed grid trains on: beginning a second one would only be refused."""
  todo = make(posenc='rope;alibi')
  command = [sys.executable, '-c', HOLD, str(todo[0].workdir), '4']
  other = subprocess.Popen(command, env={**os.environ, 'PYTHONPATH': str(root)}, stdout=subprocess.PIPE)
  other.stdout.readline()
  assert f'training (pid {other.pid} on' in grid.status(todo)
  assert run(todo).failed == {}
  assert other.wait() == 0
  other.stdout.close()
  order = [line.split()[1] for line in (tmp_path / 'grid' / 'lives').read_text().splitlines()]
  assert order == [todo[1].name] * 2 + [todo[0].name] * 2


def test_a_command_a_line_for_what_is_not_finished(make, run, root, tmp_path, capsys, monkeypatch):
  todo = make(posenc='rope;t5(num_buckets=16)')
  run(todo[:1])
  monkeypatch.undo()
  monkeypatch.chdir(root)
  arguments = [f'--workdir={tmp_path / "grid"}', '--config=configs/smoke.py', '--posenc=rope;t5(num_buckets=16)']
  capsys.readouterr()
  assert grid.main([*arguments, '--config.steps=20', '--print']) == 0
  (line,) = capsys.readouterr().out.splitlines()
  train, sweep = line.split(' && ')
  assert "'--config.posenc=t5(num_buckets=16)'" in train and '--config.steps=20' in train and 'train.py' in train
  assert sweep.endswith(f'--workdir={todo[1].workdir}') and 'eval_extrapolation.py' in sweep


def test_a_second_grid_in_one_folder_is_refused(tmp_path, root, monkeypatch):
  monkeypatch.chdir(root)

  def refuse(directory, what):
    raise SpecError(f'{directory}: in use by another {what}')

  monkeypatch.setattr(lock, 'take', refuse)
  monkeypatch.setattr(grid.Grid, 'run', lambda self: pytest.fail('ran'))
  with pytest.raises(SpecError, match='in use by another grid'):
    grid.main([f'--workdir={tmp_path}', '--config=configs/smoke.py', '--posenc=rope'])


@pytest.mark.faults
def test_a_grid_killed_twice_ends_with_the_curves_of_one_that_was_not(root, tmp_path):
  """SIGKILL of the grid alone, whose trainer goes on, then of the grid and its program."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}

  def command(name):
    return [
      *(sys.executable, '-m', 'scripts.grid', '--config=configs/smoke.py', f'--workdir={tmp_path / name}'),
      *('--posenc=alibi;nope', '--set=eval.multiples=(1,2)', '--config.methods=none', '--config.eval.controls=()'),
    ]

  def told():
    return len(list((tmp_path / 'killed').glob('*/metrics.jsonl')))

  start = functools.partial(subprocess.Popen, cwd=root, env=env, stdout=subprocess.DEVNULL)
  for orphan in (True, False):
    process = start(command('killed'))
    begun, before = time.monotonic(), told()
    while told() == before and time.monotonic() - begun < 300:  # another cell is being trained
      time.sleep(0.05)
    children = subprocess.run(['ps', '-o', 'pid=', '--ppid', str(process.pid)], capture_output=True, text=True)
    process.kill()
    process.wait()
    for pid in [] if orphan else children.stdout.split():
      os.kill(int(pid), signal.SIGKILL)
  assert start(command('killed')).wait() == 0
  assert start(command('whole')).wait() == 0
  folders = sorted(p.parent.parent for p in (tmp_path / 'whole').glob('*/extrapolation/curve.jsonl'))
  assert len(folders) == 2
  for folder in folders:
    other = tmp_path / 'killed' / folder.name / 'extrapolation' / 'curve.jsonl'
    assert other.read_bytes() == (folder / 'extrapolation' / 'curve.jsonl').read_bytes()
    steps = [json.loads(line)['step'] for line in (folder / 'metrics.jsonl').read_text().splitlines()]
    assert steps == sorted(steps) and len(read_curve(other)) == 4

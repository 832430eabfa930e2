"""eval_extrapolation.py on a real run, checked against its parts put together again by hand."""

import functools
import math
import os
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import posenc
from configs.schema import Config
from evaluation import diagnosis, runs, tokens
from evaluation.plan import Plan
from evaluation.points import read_curve
from models.lm import abstract
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole

FILES = 24  # documents of 600 to 1300 bytes, no two alike


@pytest.fixture(scope='module')
def run(root, tmp_path_factory):
  """run(program, *options) -> CompletedProcess, in a folder with its own corpus, whose training is done."""
  folder = tmp_path_factory.mktemp('eval')
  (folder / 'books').mkdir()
  rng = np.random.default_rng(0)
  for i in range(FILES):
    words = rng.choice(['tide', 'moor', 'elm', 'quartz', 'yonder', 'vex', 'blithe'], 100 + 5 * i)
    (folder / 'books' / f'{i:02d}.txt').write_text(' '.join(words))

  def start(program, *options):
    env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
    command = [sys.executable, root / f'{program}.py', f'--workdir={folder / "run"}', *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)

  start.folder = folder
  small = {'train_len': 16, 'data.corpus': f"text(glob='{folder}/books/*.txt')", 'log.validate_multiples': '(1.0,)'}
  small['eval.multiples'] = '(1.0, 2.0, 8.0)'
  start.config = [f'--config={root}/configs/smoke.py', *(f'--config.{name}={value}' for name, value in small.items())]
  done = start('train', *start.config)
  assert done.returncode == 0, done.stderr
  return start


@pytest.fixture(scope='module')
def swept(run):
  done = run('eval_extrapolation')
  assert done.returncode == 0, done.stderr
  return done.stdout, read_curve(run.folder / 'run' / 'extrapolation' / 'curve.jsonl')


def test_scores_the_held_out_documents_with_the_trained_parameters(run, swept):
  """The one number that everything is about, from data, plan, checkpoint and model without the driver."""
  workdir = run.folder / 'run'
  config = Config.from_dict(provenance.read(workdir))
  data = config.load_data()
  trained = {d.name for d in (*data.splits.train, *data.splits.validation)}
  assert trained and not trained & {d.name for d in data.splits.test}
  plan = Plan(
    config.eval,
    data.splits.test,
    train_len=16,
    max_multiple=8,
    bos='window',
    bos_id=256,
    corpus_sha256=data.sha256,
  )
  graphdef, shapes = abstract(functools.partial(config.build_model, 257))
  params = Checkpoints(workdir).restore(20, {'params': as_abstract(shapes, whole(make_mesh(1)))})['params']
  lm = nnx.merge(graphdef, params)
  for method, length in (('none', 16), ('none', 128), ('yarn', 128)):
    windows = plan.windows('fixed_targets', length)
    pos = posenc.positions(method, list(lm.schemes), 16, length)
    want = np.asarray(jax.jit(lm.nll)(*plan.tokens(windows), pos))[:, -8:].mean()
    (point,) = [p for p in swept[1] if (p['protocol'], p['method'], p['length']) == ('fixed_targets', method, length)]
    assert point['nll'] == pytest.approx(want, abs=1e-5)
    assert point['targets_hash'] == plan.targets_hash


def test_points_say_what_was_evaluated(swept):
  for point in swept[1]:
    assert (point['seed'], point['learning_rate'], point['checkpoint_step']) == (0, 1e-3, 20)
    assert point['tokens_seen'] == 20 * 8 * 16 and point['bos'] == 'window' and point['train_length'] == 16
    assert point['positions'] == 'sequential'
    assert point['bits_per_byte'] == pytest.approx(point['nll'] / math.log(2))


def test_says_what_a_reader_should_know(swept):
  assert 'note: rope(base=10000)' in swept[0] and 'note: yarn' in swept[0]
  assert 'fixed_targets' in swept[0] and 'curve.png' in swept[0]


def test_writes_one_tensorboard_run_per_method(run, swept):
  runs = sorted((run.folder / 'run' / 'extrapolation' / 'tensorboard').iterdir())
  assert [r.name for r in runs] == ['rope none seed 0', 'rope yarn seed 0']
  for folder in runs:
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [e.step for e in events.Scalars('fixed_targets/ppl')] == [16, 32, 128]


def test_tokens_that_got_better_and_worse(run, swept):
  """From the store: the change of a document's tokens is the curve's, and the text is the one that was scored."""
  read = runs.read(run.folder / 'run')
  (pair,) = tokens.pairs('yarn - none at 8x', [read])
  assert pair.title == 'rope yarn - rope none at 8x, seed 0'
  found = tokens.changes(pair)
  (point,) = [p for p in swept[1] if (p['protocol'], p['method'], p['length']) == ('fixed_targets', 'yarn', 128)]
  assert found.targets == point['tokens'] and found.n_better + found.n_worse <= found.targets
  change = [[x - y for x, y in (t.nll for t in ts)] for ts in (found.better, found.worse)]
  assert change[0] == sorted(change[0]) and max(change[0]) < 0
  assert change[1] == sorted(change[1], reverse=True) and min(change[1]) > 0
  _, plan = tokens._plan(read)
  x_NT = tokens._rows(read, plan, 'yarn', 128)
  scored = {
    (plan.documents[d].name, first + t): x for (d, first), x_T in zip(plan.spans, x_NT) for t, x in enumerate(x_T)
  }
  for token in (*found.better, *found.worse):
    assert scored[token.document, token.offset] == token.nll[0]
    text = next((run.folder / 'books').glob(f'*{token.document.rsplit("/", 1)[-1]}')).read_text()
    assert text[token.offset] == token.text and text[: token.offset].endswith(token.before)
    assert text[token.offset + 1 :].startswith(token.after) and len(token.before) == min(60, token.offset)
  with pytest.raises(tokens.Missing, match='yarn has no number at 64 tokens'):
    tokens.changes(pair._replace(length=64))


def test_tokens_of_lines_are_means_over_their_seeds(run, swept, monkeypatch):
  """A line of two seeds against one of another scheme: the same targets, the means of each line's losses."""
  read = runs.read(run.folder / 'run')
  _, plan = tokens._plan(read)
  x_NT = {m: tokens._rows(read, plan, m, 128) for m in ('yarn', 'none')}
  other = read._replace(points=[{**p, 'seed': 1} for p in read.points])
  alibi = read._replace(points=[{**p, 'scheme': 'alibi'} for p in read.points])
  real = tokens._rows

  def rows(run, plan, method, length):  # the second seed is worse by 1 nat at every target
    return real(run, plan, method, length) + (run is other)

  monkeypatch.setattr(tokens, '_rows', rows)
  (pair,) = tokens.pairs('alibi yarn - rope none at 8x', [read, other, alibi])
  assert pair.title == 'alibi yarn - rope none at 8x, means of seeds 0 and of 0, 1'
  found = tokens.changes(pair)
  change = x_NT['yarn'].astype(np.float64) - (x_NT['none'] + 0.5)
  assert found.n_better == (change <= -tokens.SPREAD).sum() and found.n_worse == (change >= tokens.SPREAD).sum()
  best = found.better[0].nll
  assert best[0] - best[1] == pytest.approx(change.min(), abs=1e-6) and best[1] in x_NT['none'] + 0.5


def test_status_and_dry_run_score_nothing(run, swept):
  folder = run.folder / 'run' / 'extrapolation'
  before = {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()}
  status, plan = (run('eval_extrapolation', '--method=pi', f'--{flag}') for flag in ('status', 'dry_run'))
  assert (status.returncode, plan.returncode) == (0, 0), (status.stderr, plan.stderr)
  (none,), (pi,) = ([line for line in status.stdout.splitlines() if line.startswith(m)] for m in ('none', 'pi'))
  there, needed = (none.split()[i::3] for i in (1, 3))
  assert there == needed and len(there) == 3 and pi.split()[-3:-1] == ['0', 'of'] and status.stdout in plan.stdout
  parts = [line for line in plan.stdout.splitlines() if ' windows missing, ' in line]
  assert len(parts) >= 3 and '128 tokens: ' in plan.stdout and 'TFLOP' in plan.stdout
  (total,) = [line for line in plan.stdout.splitlines() if line.startswith('in all ')]
  assert int(total.split()[2]) == sum(int(line.split()[2]) for line in parts) > 0
  assert {path: path.read_bytes() for path in folder.rglob('*') if path.is_file()} == before


def test_a_rerun_draws_what_a_killed_sweep_did_not_and_remembers_a_shared_store(run, swept):
  folder, shared = run.folder / 'run' / 'extrapolation', run.folder / 'shared'
  picture = (folder / 'curve.png').read_bytes()
  (folder / 'store').rename(shared)
  (folder / 'curve.png').write_bytes(b'of the curve before')
  shutil.rmtree(folder / 'tensorboard')
  (folder / '.drawn').write_text('the hash of that curve')
  try:
    done = run('eval_extrapolation', f'--store={shared}')
    assert done.returncode == 0, done.stderr
    assert not (folder / 'store').exists() and read_curve(folder / 'curve.jsonl') == swept[1]
    assert (folder / 'curve.png').read_bytes() == picture and len([*(folder / 'tensorboard').iterdir()]) == 2
    read = runs.read(run.folder / 'run')
    assert len(tokens._rows(read, tokens._plan(read)[1], 'yarn', 128))
  finally:
    shared.rename(folder / 'store')


def test_another_checkpoint_joins_the_curve(run, swept):
  done = run('eval_extrapolation', '--checkpoint=10', '--method=none', '--multiples=1')
  assert done.returncode == 0, done.stderr
  points = read_curve(run.folder / 'run' / 'extrapolation' / 'curve.jsonl')
  assert {p['checkpoint_step'] for p in points} == {10, 20}
  assert [p for p in points if p['checkpoint_step'] == 20] == swept[1]


def test_diagnoses_what_it_swept(run, swept, root):
  """The program on a real run: its `none` is the sweep's, and made again it scores nothing and changes nothing."""
  command = [
    sys.executable,
    '-m',
    'evaluation.diagnose',
    f'--workdir={run.folder / "run"}',
    '--multiples=2',
    '--spans=0',
  ]
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
  folder = run.folder / 'run' / 'diagnosis'
  made = []
  for _ in range(2):
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    made.append((folder / 'pairs.jsonl').read_bytes())
  assert made[0] == made[1] and 'held incomplete' in done.stdout and (folder / 'attention.png').exists()
  nll = {p['length']: p['nll'] for p in diagnosis.read(folder / 'pairs.jsonl') if p['what'] == 'none'}
  want = {p['length']: p['nll'] for p in swept[1] if (p['protocol'], p['method']) == ('fixed_targets', 'none')}
  assert nll == pytest.approx({n: want[n] for n in (16, 32)}, abs=1e-6)
  done = subprocess.run([*command, '--method=yarn+no'], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr.count('\n') == 1


def test_changed_files_behind_the_same_config_are_refused(run, swept):
  """The split is a function of the corpus: with a file more, what was trained on would be scored."""
  added = run.folder / 'books' / 'new.txt'
  added.write_text('a file that was not there')
  try:
    for program, options in (('eval_extrapolation', []), ('train', run.config)):
      done = run(program, *options)
      assert done.returncode == 2 and done.stderr.count('error: ') == 1
      assert 'is not what this run began with (corpus_sha256' in done.stderr and 'Traceback' not in done.stderr
  finally:
    added.unlink()

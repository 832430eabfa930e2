"""train.py from end to end on the smoke recipe, in this process: what it leaves behind, how it stops and goes on."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import flags
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import data
import posenc
from configs import schema, smoke
from configs.schema import Config
from evaluation.points import read_curve, read_metrics
from evaluation.score import Scorer
from evaluation.store import Store
from faults.harness import restored
from lock_test import HOLD
from models.lm import LM, ModelConfig, abstract
from models.memory import fitted
from training import cli, provenance
from training.checkpoints import Checkpoints
from training.optimizer import OptimizerConfig, decay_mask, make_optimizer, schedule
from training.step import make_train_step, make_validate

LOG = {'log.every': 1, 'log.validate_every': 10, 'log.checkpoint_every': 6}


@pytest.fixture(scope='module')
def program():
  """train.py as a module. Both programs define --workdir, so its flags leave the global table again."""
  mine = ('config', 'workdir')
  kept = {name: flags.FLAGS[name] for name in mine if name in flags.FLAGS}
  for name in kept:
    delattr(flags.FLAGS, name)
  import train

  for name in mine:
    if name in flags.FLAGS:
      delattr(flags.FLAGS, name)
  for name, flag in kept.items():
    flags.FLAGS[name] = flag
  return train


@pytest.fixture(scope='module')
def train(program):
  """train(workdir, fields, at={}) -> exit code. `at` calls a function when the batch of a step is cut; other keywords
  replace names of the program."""
  load = functools.cache(data.load_data)  # a second of reading and splitting, the same for every run here

  def run(workdir, fields=None, *, at=None, **patches):
    config = smoke.get_config()
    for name, value in {**LOG, **(fields or {})}.items():
      *path, last = name.split('.')
      group = config
      for part in path:
        group = group[part]
      group[last] = value

    class Windows(data.TrainWindows):
      def batch(self, step, batch, *rows):
        # Training, not validation: the tests with an `at` train on batches of another size.
        if self.seed == config.seed and self.length == config.train_len and batch != config.log.validation_windows:
          (at or {}).get(step, lambda: None)()
        return super().batch(step, batch, *rows)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(program, 'CONFIG', SimpleNamespace(value=config))
      patch.setattr(program, 'WORKDIR', SimpleNamespace(value=str(workdir)))
      patch.setattr(schema, 'load_data', load)
      patch.setattr(program, 'TrainWindows', Windows)
      for name, value in patches.items():
        patch.setattr(program, name, value)
      try:
        with pytest.raises(SystemExit) as stopped:
          cli.guard(program.main)
        return stopped.value.code
      finally:
        for number, handler in handlers.items():
          signal.signal(number, handler)

  return run


@pytest.fixture(scope='module')
def finished(train, tmp_path_factory):
  """The workdir of an uninterrupted run."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  assert train(workdir, {'batch': 4}) == 0
  return workdir


def final(workdir, step=20):
  """The train state that a run ended with, as {path: bytes}: parameters and optimizer."""
  return {path: a.tobytes() for path, a in restored(workdir, step).items()}


def events(workdir):
  accumulator = EventAccumulator(str(workdir / 'tensorboard' / 'train'), size_guidance={'scalars': 0})
  accumulator.Reload()
  tags = accumulator.Tags()['scalars']
  return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}


# ---- what a run leaves behind


def test_a_run_leaves_config_checkpoints_and_event_files(finished):
  assert sorted(p.name for p in finished.iterdir()) == [
    '.lock',
    'checkpoints',
    'config.json',
    'metrics.jsonl',
    'tensorboard',
  ]
  record = json.loads((finished / 'config.json').read_text())
  assert Config.from_dict(record['config']).steps == 20
  assert record['versions']['jax'] == jax.__version__
  assert set(record['versions']) >= {'jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy'}
  assert record['python'].count('.') == 2
  assert record['git_commit'] is None or len(record['git_commit'].removesuffix('-dirty')) == 40
  checkpoints = Checkpoints(finished)
  assert checkpoints.steps == [12, 18, 20]  # keep = 3: step 6 went when 20 came
  checkpoints.close()


def test_scalars(finished):
  read = events(finished)
  assert set(read) == {
    *(f'train/{name}' for name in ('loss', 'bits_per_byte', 'learning_rate', 'grad_norm')),
    *('train/tokens_per_second', 'train/model_flops_per_second', 'train/bytes'),
    *(f'validation/{name}_{multiple}x' for name in ('nll', 'ppl') for multiple in (1, 2)),
  }
  for tag, points in read.items():
    # The first step compiles, so that its pace is none.
    first = 2 if tag.endswith('_per_second') else 1
    want = range(first, 21) if tag.startswith('train/') else (10, 20)
    assert [step for step, _ in points] == list(want), tag
    assert np.isfinite([value for _, value in points]).all()
  config = Config.from_dict(provenance.read(finished))
  lr = schedule(config.optimizer, config.steps)
  # Step n is update n, made with the schedule's value for n - 1 updates done.
  np.testing.assert_allclose([value for _, value in read['train/learning_rate']], [lr(n) for n in range(20)], rtol=1e-5)
  loss, bits = (np.array([value for _, value in read[f'train/{tag}']]) for tag in ('loss', 'bits_per_byte'))
  np.testing.assert_allclose(bits, loss / np.log(2), rtol=1e-5)  # a byte is a token here
  for multiple in (1, 2):
    for (_, nll), (_, ppl) in zip(read[f'validation/nll_{multiple}x'], read[f'validation/ppl_{multiple}x']):
      assert ppl == pytest.approx(np.exp(nll), rel=1e-5)
  tokens, flops = (np.array([v for _, v in read[f'train/{t}_per_second']]) for t in ('tokens', 'model_flops'))
  # 3 x (2 x weights + 2 x layers x heads x width x T), the norms' scales counted as weights.
  np.testing.assert_allclose(flops / tokens, 3 * (2 * 35008 + 2 * 2 * 2 * 16 * 32), rtol=1e-5)


def told(workdir):
  """{tag: [(step, value), ...]} of metrics.jsonl."""
  out = {}
  for line in read_metrics(workdir):
    for tag, value in line.items():
      if tag != 'step':
        out.setdefault(tag, []).append((line['step'], value))
  return out


def test_the_same_numbers_are_in_a_plain_file(finished):
  read, plain = events(finished), told(finished)
  assert set(read) == set(plain)
  for tag, points in read.items():
    assert [step for step, _ in points] == [step for step, _ in plain[tag]]
    np.testing.assert_allclose([v for _, v in points], [v for _, v in plain[tag]], rtol=1e-6)  # float32 in the one


def test_loss_goes_down(finished):
  loss = [value for _, value in events(finished)['train/loss']]
  assert loss[0] == pytest.approx(np.log(257), abs=0.5), 'an untrained model should be near uniform'
  assert np.mean(loss[-5:]) < loss[0] - 0.5


# ---- again, and with something else


def test_a_finished_run_is_left_as_it_is(train, finished, capsys):
  def written():
    return {p: p.stat().st_mtime_ns for p in finished.rglob('*') if p.is_file() and p.name != '.lock'}

  before = written()
  assert train(finished, {'batch': 4}, at={0: lambda: pytest.fail('trained again')}) == 0
  assert 'finished, step 20 of 20; nothing to do' in capsys.readouterr().out
  assert written() == before


def test_another_config_is_refused_with_the_difference(train, finished, capsys):
  fields = {'batch': 4, 'optimizer.learning_rate': 0.5, 'posenc': ('rope', 'nope')}
  assert train(finished, fields) == 2
  out, err = capsys.readouterr()
  assert err.count('\n') == 1
  assert err.startswith('error: ')
  assert 'config.optimizer.learning_rate: 0.001 -> 0.5' in err
  assert "config.posenc: ['rope'] -> ['rope', 'nope']" in err
  assert 'batch' not in err


def test_a_run_goes_on_with_another_log_interval(train, finished, tmp_path, capsys):
  """What is said, validated and saved when changes no update: the end is the same, bit for bit."""
  workdir = tmp_path / 'run'
  assert train(workdir, {'batch': 4}, at={7: lambda: os.kill(os.getpid(), signal.SIGTERM)}) == 143
  other = {'batch': 4, 'log.every': 3, 'log.validate_every': 20, 'log.checkpoint_every': 9, 'log.keep': 2}
  assert train(workdir, {**other, 'optimizer.learning_rate': 0.5}) == 2
  err = capsys.readouterr().err
  assert '(config.optimizer.learning_rate: 0.001 -> 0.5)' in err
  assert train(workdir, other) == 0
  assert 'note: config.log.every: 1 -> 3, from here on' in capsys.readouterr().out
  assert final(workdir) == final(finished)
  steps, loss = zip(*events(workdir)['train/loss'])
  assert steps == (*range(1, 9), 9, 12, 15, 18, 20)
  assert set(zip(steps, loss)) < set(events(finished)['train/loss'])
  assert checkpoints_of(workdir) == ['18', '20']


def test_a_damaged_end_is_trained_again(train, finished, tmp_path, capsys):
  """One byte of step 20; the run was finished."""
  workdir = shutil.copytree(finished, tmp_path / 'run')
  table = max((workdir / 'checkpoints' / '20' / 'params').rglob('d/*'), key=lambda path: path.stat().st_size)
  content = bytearray(table.read_bytes())
  content[len(content) // 2] ^= 1
  table.write_bytes(content)
  cut = []
  assert train(workdir, {'batch': 4}, at={n: functools.partial(cut.append, n) for n in range(20)}) == 0
  out = capsys.readouterr().out
  assert 'warning: checkpoint 20 is damaged (params/ocdbt' in out and 'going on from step 18' in out
  assert cut == [18, 19]
  assert final(workdir) == final(finished) and checkpoints_of(workdir) == checkpoints_of(finished)
  ours, theirs = events(workdir), events(finished)
  assert ours['train/loss'] == theirs['train/loss']


def test_a_config_that_fails_claims_no_workdir(train, tmp_path, capsys):
  """Or the corrected config would be refused as another one."""
  rng = np.random.default_rng(0)
  for i in range(6):  # the one document long enough for the test split, and five too short for validation at 8x
    (tmp_path / f'{i}.txt').write_bytes(rng.bytes(100 if i else 300))
  corpus = {'data.corpus': f"text(glob='{tmp_path}/*.txt')", 'data.test_docs': 1, 'data.validation_docs': 1}
  assert train(tmp_path / 'run', {**corpus, 'log.validate_multiples': (8.0,)}) == 2
  assert train(tmp_path / 'run', {**corpus, 'data.test_docs': 2}) == 2
  assert train(tmp_path / 'run', {**corpus, 'model.heads': 3}) == 2
  assert capsys.readouterr().err.count('error: ') == 3
  assert not (tmp_path / 'run').exists()


def test_a_second_trainer_is_refused(train, finished, tmp_path, root, capsys):
  """In one line with the first one's pid, before it has swept away what that one is saving."""
  env = {**os.environ, 'PYTHONPATH': str(root)}
  first = subprocess.Popen([sys.executable, '-c', HOLD, str(tmp_path), '60'], env=env, stdout=subprocess.PIPE)
  first.stdout.readline()
  (tmp_path / 'checkpoints' / '6.orbax-checkpoint-tmp-0').mkdir(parents=True)
  assert train(tmp_path, {'batch': 4}, at={0: lambda: pytest.fail('trained')}) == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and f'in use by another run (pid {first.pid} on ' in err
  assert list((tmp_path / 'checkpoints').iterdir()) and not (tmp_path / 'config.json').exists()
  first.kill()
  first.wait()
  first.stdout.close()
  assert train(tmp_path, {'batch': 4}) == 0
  assert final(tmp_path) == final(finished)


# ---- stopping and going on


@pytest.mark.parametrize(('number', 'code'), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=['TERM', 'INT'])
def test_a_stopped_run_goes_on_bit_for_bit(train, finished, tmp_path, capsys, number, code):
  """The signal falls into step 8, which is due for nothing: it is saved because of the signal alone."""
  workdir = tmp_path / 'run'
  assert train(workdir, {'batch': 4}, at={7: lambda: os.kill(os.getpid(), number)}) == code
  assert f'{number.name}: saved step 8 of 20' in capsys.readouterr().out
  assert [step for step, _ in events(workdir)['train/loss']] == list(range(1, 9))
  cut = []
  assert train(workdir, {'batch': 4}, at={n: functools.partial(cut.append, n) for n in range(20)}) == 0
  assert 'resuming at step 8' in capsys.readouterr().out
  assert cut == list(range(8, 20))
  assert final(workdir) == final(finished)
  ours, theirs = events(workdir), events(finished)
  for tag in theirs:
    if not tag.endswith('per_second'):
      assert ours[tag] == theirs[tag], tag


class Killed(BaseException):
  """Like SIGKILL in that nothing catches it; the loop ends where it stands."""


def kill():
  raise Killed


def test_steps_past_the_checkpoint_appear_once(train, finished, tmp_path):
  """Killed in step 11, saved at 6: steps 7 to 10 run again, and a viewer must not see them twice."""
  with pytest.raises(Killed):
    train(tmp_path / 'run', {'batch': 4}, at={10: kill})
  assert [step for step, _ in events(tmp_path / 'run')['train/loss']][-1] > 6
  with (tmp_path / 'run' / 'metrics.jsonl').open('a') as file:
    file.write('{"step": 3, "train/lo')  # as a kill may leave it
  assert train(tmp_path / 'run', {'batch': 4}) == 0
  ours, theirs = events(tmp_path / 'run'), events(finished)
  for tag in theirs:
    if not tag.endswith('per_second'):
      assert ours[tag] == theirs[tag], tag
  assert final(tmp_path / 'run') == final(finished)


# ---- while it is trained

SURFACE = {'surface.checkpoints': 3, 'surface.multiples': (1.0, 2.0), 'surface.docs': 2, 'batch': 4}


@pytest.fixture(scope='module')
def watched(train, tmp_path_factory):
  """`finished`, with a surface."""
  workdir = tmp_path_factory.mktemp('watched') / 'run'
  assert train(workdir, SURFACE) == 0
  return workdir


def test_a_surface_changes_nothing_of_the_training(watched, finished):
  """No run is stopped and no checkpoint is kept for what it says of longer lengths."""
  assert final(watched) == final(finished)
  assert checkpoints_of(watched) == checkpoints_of(finished)


def checkpoints_of(workdir):
  return sorted(p.name for p in (workdir / 'checkpoints').iterdir())


def test_a_surface_is_of_validation_documents(watched):
  """Its last points, scored again by the parts of a sweep, on documents that are not of the test."""
  points = read_curve(watched / 'extrapolation' / 'surface.jsonl')
  assert [(p['checkpoint_step'], p['length']) for p in points] == [(s, n) for s in (7, 14, 20) for n in (32, 64)]
  assert [p['tokens_seen'] for p in points[::2]] == [step * 4 * 32 for step in (7, 14, 20)]
  config = Config.from_dict(provenance.read(watched))
  splits = config.load_data().splits
  store = Store(watched / 'extrapolation' / 'store')
  stored = {place.document for key in store.keys() for place in store.open(key)._rows}  # noqa: SIM118
  assert len(stored) == 2 and stored <= {d.name for d in splits.validation}
  assert not stored & {d.name for d in splits.test}
  scalars = told(watched)
  for n in (32, 64):
    want = [(p['checkpoint_step'], p['nll']) for p in points if p['length'] == n]
    assert scalars[f'surface/nll_{n // 32}x'] == want


def test_a_killed_run_scores_its_surface_once(train, watched, tmp_path, monkeypatch):
  """Killed in step 11, saved at 6, measured at 7: its second life reads that from the store."""
  with pytest.raises(Killed):
    train(tmp_path / 'run', SURFACE, at={10: kill})
  scored, runs = [], Scorer.runs
  monkeypatch.setattr(Scorer, 'runs', lambda *args: (scored.append(1), runs(*args))[1])
  assert train(tmp_path / 'run', SURFACE) == 0
  assert len(scored) == 2 * 2  # two lengths at steps 14 and 20
  path = 'extrapolation/surface.jsonl'
  assert (tmp_path / 'run' / path).read_bytes() == (watched / path).read_bytes()


def test_a_surface_that_no_document_can_serve_is_refused_before_anything_is_written(train, tmp_path, capsys):
  assert train(tmp_path / 'run', {**SURFACE, 'surface.docs': 9}) == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and 'config.surface.docs = 9: 2 of 2 validation documents have the 72 tokens of 2x' in err
  assert not (tmp_path / 'run').exists()


POSITIONS = {
  'randomized': ("randomized(max_len=60, per_layer=True, eval='arange')", "('alibi', 'rope')"),
  'pose': ('pose(target_len=256)', 'rope'),
}


@pytest.mark.parametrize(('rule', 'posenc'), POSITIONS.values(), ids=POSITIONS)
def test_sampled_positions_survive_a_restart(train, tmp_path, capsys, rule, posenc):
  """Positions of a step are a function of (seed, step) too; one program serves every step."""
  compiled = []

  def counted(step, *args, memory_gb):
    # Compiled ahead: other shapes than those of the first update would be an error.
    compiled.append(step)
    return fitted(step, *args, memory_gb=memory_gb)

  fields = {'positions': rule, 'posenc': posenc, 'steps': 6, 'log.checkpoint_every': 100, 'optimizer.accumulate': 2}
  assert train(tmp_path / 'whole', fields, fitted=counted) == 0
  assert len(compiled) == 1 and compiled[0]._cache_size() == 0
  out = capsys.readouterr().out
  assert f'32 tokens at {rule} positions' in out
  assert ('no validation at 2x: randomized has 60 positions, asked for 64' in out) == rule.startswith('randomized')
  assert train(tmp_path / 'parts', fields, at={2: lambda: os.kill(os.getpid(), signal.SIGTERM)}) == 143
  assert train(tmp_path / 'parts', {**fields, 'positions': 'sequential'}) == 2
  assert f"config.positions: {rule!r} -> 'sequential'" in capsys.readouterr().err
  assert train(tmp_path / 'parts', fields) == 0
  assert final(tmp_path / 'parts', 6) == final(tmp_path / 'whole', 6)


def test_each_step_has_its_own_positions(train, tmp_path, monkeypatch):
  """What reaches the program: the rule's draw for the run's seed and this step, validation at those of evaluation."""
  seen, validated = [], []

  def spied(step, *args, memory_gb):
    return lambda *args: (seen.append(args[4]), step(*args))[1], 0, ''

  def validate(*args):
    step = make_validate(*args)
    return lambda *args: (validated.append(args[3]), step(*args))[1]

  fields = {'positions': 'randomized(max_len=64)', 'steps': 3, 'seed': 5, 'batch': 4, 'log.validate_every': 3}
  assert train(tmp_path / 'run', fields, fitted=spied, make_validate=validate) == 0
  slots = [posenc.build('rope', heads=2, head_dim=16, d_model=32, train_len=32, rngs=nnx.Rngs(0))]
  rule = posenc.build_rule('randomized(max_len=64)', slots, train_len=32, layers=2)
  assert len(seen) == 3
  for step, at in enumerate(seen):
    np.testing.assert_array_equal(at, rule.train(5, step))
  assert [pos[0].at_T.shape for pos in validated] == [(32,), (64,)]
  for pos in validated:
    np.testing.assert_array_equal(pos[0].at_T, rule.evaluate(len(pos[0].at_T))[0])


def test_a_loss_that_is_no_number_stops_the_run(train, tmp_path, capsys):
  fields = {'optimizer.learning_rate': 1e30, 'optimizer.warmup_steps': 0, 'log.checkpoint_every': 1}
  assert train(tmp_path / 'run', fields) == 1
  err = capsys.readouterr().err
  assert err.count('\n') == 1
  assert err.startswith('error: ')
  assert f'nan at step 2; its windows are in {tmp_path}/run/batch_2.npz; last checkpoint: 1' in err
  batch = np.load(tmp_path / 'run' / 'batch_2.npz')
  config = Config.from_dict(provenance.read(tmp_path / 'run'))
  documents = {d.name: d.tokens[:] for d in config.load_data().splits.train}
  assert batch['inputs'].shape == batch['targets'].shape == (8, 32)
  for name, start, targets_T in zip(batch['document'], batch['start'], batch['targets']):
    np.testing.assert_array_equal(targets_T, documents[name][start : start + 32])
  checkpoints = Checkpoints(tmp_path / 'run')
  assert checkpoints.steps == [1], 'a broken state was saved'
  checkpoints.close()


def test_a_last_update_that_breaks_the_model_is_no_success(train, tmp_path, capsys):
  """The loss of its step is finite, being the one before it; only the validation after it can tell."""
  broken = lambda *args: lambda *args: jnp.float32(jnp.nan)  # noqa: E731
  assert train(tmp_path / 'run', {'batch': 4, 'steps': 1}, make_validate=broken) == 1
  err = capsys.readouterr().err
  assert f'error: validation nll = nan at step 1; its windows are in {tmp_path}/run/batch_1.npz; last che' in err


# ---- one step


def tiny(dropout=0.0):
  model = ModelConfig(layers=2, d_model=16, heads=2, d_mlp=32, dropout=dropout)
  return lambda: LM(model, ['rope'], vocab_size=17, train_len=8, rngs=nnx.Rngs(0))


def tiny_step(make, seed):
  graphdef, _ = abstract(make)
  cfg = OptimizerConfig(learning_rate=1e-2, warmup_steps=0)
  tx = make_optimizer(cfg, 10, decay_mask(nnx.eval_shape(make)))
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
  pos = posenc.positions('none', list(nnx.eval_shape(make).schemes), 8, 8)
  return graphdef, make_train_step(graphdef, tx, pos, seed), {'params': params, 'opt': tx.init(params)}, pos


TOKENS = np.arange(4 * 9).reshape(4, 9).astype(np.int32) * 7 % 17
INPUTS, TARGETS = TOKENS[None, :, :-1], TOKENS[None, :, 1:]


def test_golden_train_step():
  """Loss and gradient norm of update 1 and 3 of a fixed model on fixed tokens.

  The model's weights are set from sines, so that no random number generator is in between.
  """
  _, step, state, _ = tiny_step(tiny(), None)
  # Norms stay 1; everything else is a sine wave over its own index.
  state['params'] = jax.tree_util.tree_map_with_path(
    lambda path, a: a if path[-1].key == 'scale' else 0.2 * jnp.sin(jnp.arange(1.0, a.size + 1)).reshape(a.shape),
    state['params'],
  )
  out = []
  for n in range(3):
    state, metrics = step(state, INPUTS, TARGETS, n)
    out.append([float(metrics['loss']), float(metrics['grad_norm'])])
  np.testing.assert_allclose(
    [out[0], out[2]],
    GOLDEN_STEP,
    rtol=1e-4,
    err_msg='The numbers of a training step have changed. If model, loss or optimizer were meant to change, check the '
    'new values against a run of the quickstart and put them into GOLDEN_STEP, in a commit of their own that says why; '
    'if not, something that every result rests on is broken.',
  )


GOLDEN_STEP = [[4.177080, 4.673494], [3.206027, 5.520649]]


def test_positions_as_an_argument_are_those_of_the_constant():
  """The same update, whether positions are part of the program or handed to it; other positions are another update."""
  _, step, state, pos = tiny_step(tiny(), None)

  def loss(at):
    return float(step(jax.tree.map(jnp.copy, state), INPUTS, TARGETS, 0, at)[1]['loss'])

  plain, same = float(step(jax.tree.map(jnp.copy, state), INPUTS, TARGETS, 0)[1]['loss']), loss((pos[0].at_T,))
  assert same == pytest.approx(plain, rel=1e-6)
  assert loss((jnp.tile(pos[0].at_T, (2, 1)),)) == pytest.approx(plain, rel=1e-6)
  assert abs(loss((pos[0].at_T * 9,)) - plain) > 1e-4


def test_dropout_is_a_function_of_seed_and_step():
  """And of the micro-batch: equal ones would otherwise drop the same units."""
  _, step, state, _ = tiny_step(tiny(0.5), 0)
  _, other, _, _ = tiny_step(tiny(0.5), 1)

  def loss(step, n, k=1):
    batch = np.repeat(INPUTS, k, 0), np.repeat(TARGETS, k, 0)
    return float(step(jax.tree.map(jnp.copy, state), *batch, n)[1]['loss'])

  assert loss(step, 3) == loss(step, 3)
  assert len({loss(step, 3), loss(step, 4), loss(other, 3), loss(step, 3, k=2)}) == 4


def test_dropout_is_off_in_evaluation():
  graphdef, _, state, pos = tiny_step(tiny(0.5), 0)
  dry = abstract(tiny(0.0))[0]
  assert graphdef != dry
  ours, theirs = (
    make_validate(g)(state['params'], jnp.asarray(INPUTS[0]), jnp.asarray(TARGETS[0]), pos) for g in (graphdef, dry)
  )
  assert float(ours) == float(theirs)


NNX_MODES = """
import jax, jax.numpy as jnp
from flax import config, nnx
import posenc
from models.lm import LM, ModelConfig, abstract
from training.optimizer import OptimizerConfig, decay_mask, make_optimizer
from training.step import make_train_step

model = ModelConfig(layers=2, d_model=16, heads=2, d_mlp=32)
make = lambda: LM(model, ['t5'], vocab_size=17, train_len=8, rngs=nnx.Rngs(0))
graphdef, shapes = abstract(make)
mask = decay_mask(nnx.eval_shape(make))
assert not mask['schemes'][0]['table'] and mask['embedding']['embedding']
tx = make_optimizer(OptimizerConfig(warmup_steps=0), 10, mask)
params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
assert jax.tree.structure(params) == jax.tree.structure(shapes)
step = make_train_step(graphdef, tx, posenc.positions('none', list(nnx.eval_shape(make).schemes), 8, 8), None)
state = {'params': params, 'opt': tx.init(params)}
tokens = jnp.arange(36, dtype=jnp.int32).reshape(1, 4, 9) * 7 % 17
for n in range(2):
  state, metrics = step(state, tokens[..., :-1], tokens[..., 1:], n)
print(config.nnx_graph_mode, config.nnx_graph_updates, float(metrics['loss']).hex())
"""


def test_nnx_graph_and_tree_mode_train_alike(root, capsys):
  """Flax means to make tree mode the default; the code must not depend on which it meets."""
  exec(NNX_MODES, {})
  graph = capsys.readouterr().out.split()
  env = {**os.environ, 'NNX_GRAPH_MODE': 'false', 'NNX_GRAPH_UPDATES': 'false', 'PYTHONPATH': str(root)}
  done = subprocess.run([sys.executable, '-c', NNX_MODES], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert graph[:2] == ['True', 'True']
  assert done.stdout.split() == ['False', 'False', graph[2]]

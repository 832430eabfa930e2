"""Cases T, C, G05 and G07 of docs/CASES.md: updates and their rates, compilations, checkpoints, what is logged."""

import functools
import math
import os
import pathlib
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import posenc
from checkpoints_test import abstract_of, make_state
from configs import smoke
from configs.schema import Config
from evaluation import events
from evaluation.points import read_metrics
from evaluation.score import Scorer
from forms import jit, refused
from models.lm import LM, ModelConfig, abstract, merge
from results_test import NON_FINITE, curve, strict
from score_test import LENGTHS, make_plan, model
from spec import SpecError
from sweep_test import schemes
from train_test import final, program, train  # noqa: F401
from training import cli
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole
from training.log import RunLog
from training.optimizer import OptimizerConfig, decay_mask, make_optimizer, schedule
from training.step import make_train_step

# Adam without its moments: an update is lr * sign(gradient), and `mu` is the clipped gradient.
PLAIN = {'b1': 0.0, 'b2': 0.0, 'weight_decay': 0.0}
FIELDS = {
  'steps': 4, 'batch': 2, 'model.layers': 1, 'model.dropout': 0.3, 'log.checkpoint_every': 2, 'log.validate_every': 4,
  'optimizer.warmup_steps': 10, 'optimizer.accumulate': 2,
}  # fmt: skip


@pytest.fixture(scope='module')
def finished(train, tmp_path_factory):  # noqa: F811
  """A run of 4 updates, and one that was stopped after 2, both by relative paths."""
  folder, here = tmp_path_factory.mktemp('runs'), pathlib.Path.cwd()
  try:
    os.chdir(folder)
    assert train('./whole', FIELDS) == 0
    assert train('./parts', FIELDS, at={1: lambda: os.kill(os.getpid(), signal.SIGTERM)}) == 143
    os.chdir('/')
    assert train(folder / 'parts', FIELDS) == 0
  finally:
    os.chdir(here)
  return folder


# ---- T


def test_T02(finished):
  """The rate that is logged is the one applied, above 0 from the first update on, and goes on after a restart."""
  cfg = OptimizerConfig(learning_rate=1e-2, warmup_steps=10, clip_norm=0.0, **PLAIN)
  tx, lr = make_optimizer(cfg, 100, {'w': False}), schedule(cfg, 100)
  assert float(lr(0)) == pytest.approx(1e-2 / 11)
  params = {'w': jnp.zeros(1)}
  opt = tx.init(params)
  for n in range(6):  # the state is what a checkpoint holds: update 6 uses schedule(5)
    opt = jax.tree.map(jnp.asarray, jax.tree.map(np.asarray, opt))
    updates, opt = tx.update({'w': jnp.ones(1)}, opt, params)
    assert float(updates['w'][0]) == pytest.approx(-float(lr(n)), rel=1e-5)
  lr = schedule(OptimizerConfig(warmup_steps=10), 4)
  for run in ('whole', 'parts'):
    logged = {
      line['step']: line['train/learning_rate'] for line in read_metrics(finished / run) if 'train/loss' in line
    }
    assert logged == {n: pytest.approx(float(lr(n - 1)), rel=1e-6) for n in (1, 2, 3, 4)}


class Linear(nnx.Module):
  """Whose nll is w . x, so that its gradient is x."""

  def __init__(self):
    self.w = nnx.Param(jnp.zeros(2))

  def nll(self, inputs_BT, targets_BT, pos, *, key=None):
    return inputs_BT * self.w[...]


def linear_step(cfg):
  graphdef, state = nnx.split(Linear())
  params = nnx.to_pure_dict(state)
  tx = make_optimizer(cfg, 100, {'w': False})
  return make_train_step(graphdef, tx, (), None), {'params': params, 'opt': tx.init(params)}


def test_T04():
  """Steps count updates: 64 micro-batches at 4 each are 16 updates, rates 0 to 15. None is left over, none is empty.

  A run asks for as many windows as its updates need: windows are drawn without end, so that no epoch ends in between.
  """
  cfg = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, accumulate=4, clip_norm=0.0, **PLAIN)
  step, state = linear_step(cfg)
  lr, batch, want = schedule(cfg, 100), np.ones((4, 1, 2), np.float32), 0.0
  for n in range(16):
    state, _ = step(state, batch, batch, n)
    want -= float(lr(n))
  assert {int(n) for _, n in optax.tree.get_all_with_path(state['opt'], 'count')} == {16}
  np.testing.assert_allclose(state['params']['w'], [want] * 2, rtol=1e-5)
  for field in ('steps', 'batch', 'optimizer.accumulate'):
    values = smoke.get_config().to_dict()
    group = values['optimizer'] if '.' in field else values
    group[field.split('.')[-1]] = 0
    with refused(SpecError, f'config.{field} = 0: a whole number of at least 1 is allowed'):
      Config.from_dict(values)


def test_T05():
  """The batch's gradient is clipped, not each micro-batch's; 0 is off, and no gradient is no NaN."""
  micro = np.float32([[[10, 0]], [[0, 1]]])
  step, state = linear_step(OptimizerConfig(warmup_steps=0, accumulate=2, clip_norm=1.0, **PLAIN))
  state, metrics = step(state, micro, micro, 0)
  clipped = optax.tree.get(state['opt'], 'mu')['w']
  np.testing.assert_allclose(clipped, [0.99503719, 0.09950372], rtol=1e-6)
  assert float(metrics['grad_norm']) == pytest.approx(math.hypot(10, 1) / micro.size)  # logged as it was
  for clip in (0.0, 1.0):
    step, state = linear_step(OptimizerConfig(warmup_steps=0, clip_norm=clip))
    state, _ = step(state, np.zeros((1, 1, 2), np.float32), np.zeros((1, 1, 2), np.float32), 0)
    assert np.isfinite(state['params']['w']).all()
  step, state = linear_step(OptimizerConfig(warmup_steps=0, clip_norm=0.0, **PLAIN))
  state, _ = step(state, micro[:1], micro[:1], 0)
  np.testing.assert_allclose(optax.tree.get(state['opt'], 'mu')['w'], [5, 0])
  with pytest.raises(ValueError, match='clip_norm = nan: a finite number of at least 0 is allowed'):
    OptimizerConfig(clip_norm=math.nan)


def test_T06():
  """100 updates without a gradient: kernels shrink to 0.90479215, norms and position parameters keep every bit."""
  pattern = ('t5', 'kerple_log', 'fire', 'cope', 'fox')
  cfg = ModelConfig(layers=5, d_model=16, heads=2, d_mlp=32)
  make = lambda: LM(cfg, pattern, vocab_size=17, train_len=8, rngs=nnx.Rngs(0))  # noqa: E731
  optimizer = OptimizerConfig(learning_rate=1e-2, final_fraction=1.0, warmup_steps=0, weight_decay=0.1)
  tx = make_optimizer(optimizer, 100, decay_mask(nnx.eval_shape(make)))

  def updated():
    params = jax.tree.map(lambda a: jnp.ones(a.shape, a.dtype), abstract(make)[1])

    def update(_, both):
      params, opt = both
      updates, opt = tx.update(jax.tree.map(jnp.zeros_like, params), opt, params)
      return optax.apply_updates(params, updates), opt

    return jax.lax.fori_loop(0, 100, update, (params, tx.init(params)))[0]

  kinds = {True: 0, False: 0}
  for path, leaf in jax.tree_util.tree_leaves_with_path(jit(updated)()):
    name = jax.tree_util.keystr(path)
    exempt = 'norm' in name or 'schemes' in name
    np.testing.assert_allclose(leaf, 1.0 if exempt else 0.90479215, rtol=0 if exempt else 1e-5, err_msg=name)
    kinds[exempt] += 1
  assert kinds[True] >= 3 + 10 and kinds[False] >= 8
  assert 'norms and of position schemes' in decay_mask.__doc__


def test_T07(caplog):
  """6 lengths, 4 whole batches and a partial one each, twice: 6 compilations, then none."""
  plan, slots = make_plan(), schemes('rope')
  graphdef, params, _ = model()
  scorer = Scorer(graphdef, params, make_mesh(1), 64)
  compiled = []
  for _ in range(2):
    caplog.clear()
    with jax.log_compiles(), caplog.at_level('WARNING', logger='jax'):
      for length in LENGTHS:
        windows = (plan.windows('fixed_targets', length) * 3)[: 4 * scorer.rows(length) + 1]
        assert len(windows) == 4 * scorer.rows(length) + 1
        scorer(plan, windows, [posenc.positions('none', slots, 16, length)])
    compiled.append(sum('Finished XLA compilation of jit(nll)' in record.getMessage() for record in caplog.records))
  assert compiled == [6, 0]


# ---- C


def test_C02(tmp_path):
  """More layers, fewer, another width, another scheme: an error that names a leaf of the parameters."""
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(1, jit(make_state(['learned'], layers=3))())
  wants = r'^checkpoint 1: params\.\S+ is \S+ ?.*, this config wants .*$'
  for pattern, layers, width, leaf in (
    (['learned'], 4, 16, r'float32\[3, 16, 16\], this config wants float32\[4, 16, 16\]'),
    (['learned'], 2, 16, r'float32\[3, 16, 16\], this config wants float32\[2, 16, 16\]'),
    (['learned'], 3, 32, r'params\.embedding\.embedding is float32\[17, 16\], this config wants float32\[17, 32\]'),
    (['rope'], 3, 16, r'params\.schemes\.0\.table is float32\[8, 16\], this config wants absent'),
  ):
    shapes = abstract_of(make_state(pattern, layers=layers, d_model=width))
    with pytest.raises(SpecError, match=wants) as caught:
      checkpoints.restore(1, {'params': shapes['params']})
    assert caught.match(leaf)
  checkpoints.close()


def test_C03(finished, train, capsys, tmp_path):  # noqa: F811
  """The last step is saved once where it is also due; again is a no-op; another run in the same folder is refused."""
  run = finished / 'whole'
  assert sorted(p.name for p in (run / 'checkpoints').iterdir()) == ['2', '4']
  before = {p: p.stat().st_mtime_ns for p in (run / 'checkpoints').rglob('*')}
  assert train(run, FIELDS, at={0: lambda: pytest.fail('trained again')}) == 0
  assert 'finished, step 4 of 4; nothing to do' in capsys.readouterr().out
  assert train(run, {**FIELDS, 'steps': 2}) == 2
  assert 'config.steps: 4 -> 2' in capsys.readouterr().err
  assert {p: p.stat().st_mtime_ns for p in (run / 'checkpoints').rglob('*')} == before
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save(10, {'params': {'w': jnp.ones(3)}})
  for step in (10, 5):  # orbax would say False, and the program nothing
    with pytest.raises(Exception, match='10'):
      checkpoints.save(step, {'params': {'w': jnp.zeros(3)}})
      checkpoints.wait()
  assert checkpoints.steps == [10]
  checkpoints.close()


EIGHT = """
import sys
import jax, numpy as np
import cases_train_test as case
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, spread, whole

mesh = make_mesh(8, (1, 8, 1))
params, _ = case.wide()
home = spread(mesh, params)
shared = jax.device_put(params, home)
assert any(len(a.addressable_shards) == 8 and a.addressable_shards[0].data.size < a.size for a in jax.tree.leaves(shared))
ours = Checkpoints(sys.argv[1], keep=1)
ours.save(1, {'params': shared})
ours.close()
theirs = Checkpoints(sys.argv[2])
read = theirs.restore(1, {'params': as_abstract(params, whole(mesh))})['params']
theirs.close()
np.save(sys.argv[3], case.nll(read, make_mesh(8)))
"""  # noqa: E501


def wide():
  """(parameters that 8 devices share, graphdef)."""
  cfg = ModelConfig(layers=1, d_model=32, heads=4)
  graphdef, shapes = abstract(lambda: LM(cfg, ('rope',), vocab_size=64, train_len=8, rngs=nnx.Rngs(0)))
  return jax.tree.map(lambda a: np.sin(np.arange(a.size, dtype=np.float32)).reshape(a.shape), shapes), graphdef


def nll(params, mesh):
  _, graphdef = wide()
  tokens_BT = np.arange(72).reshape(8, 9) * 7 % 64
  pos = posenc.positions('none', schemes('rope'), 8, 8)
  validate = jit(lambda params, inputs, targets: merge(graphdef, params, mesh).nll(inputs, targets, pos))
  return np.asarray(validate(params, tokens_BT[:, :-1], tokens_BT[:, 1:]))


def test_C05(tmp_path, root):
  """Saved where 8 devices share the parameters, read on one, and the other way round: the same nll."""
  params = jax.tree.map(jnp.asarray, wide()[0])
  ours = Checkpoints(tmp_path / 'one', keep=1)
  ours.save(1, {'params': params})
  ours.close()
  env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '8', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{root}:{root}/tests'}
  command = [sys.executable, '-c', EIGHT, *(str(tmp_path / name) for name in ('eight', 'one', 'nll.npy'))]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  theirs = Checkpoints(tmp_path / 'eight')
  read = theirs.restore(1, {'params': as_abstract(params, whole(make_mesh(1)))})['params']
  theirs.close()
  want = nll(params, make_mesh(1))
  np.testing.assert_allclose(nll(read, make_mesh(1)), want, atol=1e-6)
  np.testing.assert_allclose(np.load(tmp_path / 'nll.npy'), want, atol=1e-5)  # sums in another order


def test_C06(finished):
  """Dropout's masks go on as if nothing had been: there is no key to be saved, a mask is of (seed, update)."""
  assert final(finished / 'parts', 4) == final(finished / 'whole', 4)
  saved = jax.tree_util.tree_leaves_with_path(jax.eval_shape(make_state()))
  assert not [path for path, leaf in saved if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)]


def test_C08(finished, tmp_path, monkeypatch):
  """A relative workdir is where it was when the program began."""
  assert Checkpoints(finished / 'whole').steps == [2, 4]
  monkeypatch.chdir(tmp_path)
  checkpoints = Checkpoints('out', keep=1)
  monkeypatch.chdir('/')
  checkpoints.save(1, {'params': {'w': jnp.ones(3)}})
  checkpoints.close()
  assert Checkpoints(tmp_path / 'out').latest == 1


def test_C09(finished, train, tmp_path, capsys):  # noqa: F811
  """A run ends after its last save is complete; one that failed behind its back is no success."""
  assert set(final(finished / 'whole', 4)) >= {"['params']['norm']['scale']"}

  class Full(Checkpoints):
    def save(self, step, items):
      def result():
        raise OSError(28, 'No space left on device', str(tmp_path / 'full'))

      self._saving = type('Saving', (), {'result': staticmethod(result)})

  assert train(tmp_path / 'full', FIELDS, Checkpoints=Full) == 2
  out, err = capsys.readouterr()
  assert err == f'error: {tmp_path}/full: No space left on device\n'
  assert 'finished' not in out
  locked = tmp_path / 'locked'
  locked.mkdir()
  (locked / 'checkpoints').write_text('a file')
  with pytest.raises(OSError):
    checkpoints = Checkpoints(locked, keep=1)
    checkpoints.save(1, {'params': {'w': jnp.ones(3)}})
    checkpoints.close()


# ---- G


def scalars(workdir):
  accumulator = EventAccumulator(str(workdir / 'tensorboard' / 'train'), size_guidance={'scalars': 0})
  accumulator.Reload()
  return {tag: [(e.step, e.value) for e in accumulator.Scalars(tag)] for tag in accumulator.Tags()['scalars']}


def test_G05(tmp_path):
  """Logged to 15, saved at 10, gone on to 20: every step once, in the event files and in metrics.jsonl."""
  for start, last in ((0, 15), (10, 20)):
    log = RunLog(tmp_path, start=start, total=20)
    for step in range(start + 1, last + 1):
      log.scalars(step, {'train/loss': step + start / 100})
    log.close()
  want = [*((n, n) for n in range(1, 11)), *((n, n + 0.1) for n in range(11, 21))]
  found = scalars(tmp_path)['train/loss']
  assert [n for n, _ in found] == list(range(1, 21))
  np.testing.assert_allclose([v for _, v in found], [v for _, v in want], rtol=1e-6)
  assert [(line['step'], line['train/loss']) for line in read_metrics(tmp_path)] == want


def test_G07(tmp_path, capsys):
  """jax scalars, bfloat16, NaN and inf are logged as what they are; what is no number ends no run, and is said."""
  log = RunLog(tmp_path, start=0, total=1)
  values = {'jax': jnp.float32(1.5), 'half': jnp.bfloat16(2.5), 'numpy': np.float64(3.5), 'nan': math.nan,
            'inf': jnp.float32(math.inf), 'text': 'fast', 'none': None}  # fmt: skip
  log.scalars(1, values)
  log.close()
  said = capsys.readouterr().out.splitlines()
  assert said == [f'note: step 1: {x} is no number and is not logged' for x in ("text = 'fast'", 'none = None')]
  found = {tag: value for tag, ((_, value),) in scalars(tmp_path).items()}
  assert math.isnan(found.pop('nan'))
  assert found == {'jax': 1.5, 'half': 2.5, 'numpy': 3.5, 'inf': math.inf}
  line = strict((tmp_path / 'metrics.jsonl').read_text())
  assert line == {'step': 1, 'jax': 1.5, 'half': 2.5, 'numpy': 3.5, 'nan': 'nan', 'inf': 'inf'}
  events.write(tmp_path / 'sweep', [*NON_FINITE, *curve()[:1]], {}, None)  # points hold None, strings, inf and NaN
  with pytest.raises(SystemExit) as stopped:  # and a metric that is NaN stops training
    cli.guard(functools.partial(raise_, cli.Stopped('loss = nan at step 2')))
  assert stopped.value.code == 1


def raise_(error):
  raise error

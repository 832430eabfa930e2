"""Checkpoints: what comes back is what was saved, and nothing comes back in silence that was not."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.lm import LM, ModelConfig
from spec import SpecError
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole
from training.hosts import Stopped
from training.optimizer import OptimizerConfig, decay_mask, make_optimizer


def make_state(pattern=('rope',), layers=2, d_model=16):
  """A train state as train.py holds it, parameters and AdamW's moments."""
  cfg = ModelConfig(layers=layers, d_model=d_model, heads=2, d_mlp=32)
  make = lambda: LM(cfg, pattern, vocab_size=17, train_len=8, rngs=nnx.Rngs(0))  # noqa: E731
  tx = make_optimizer(OptimizerConfig(), 10, decay_mask(nnx.eval_shape(make)))

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(jax.tree.map(lambda p: p + 0.5, params))}

  return init


def abstract_of(init):
  return as_abstract(jax.eval_shape(init), whole(make_mesh(1)))


def plus(tree, n):
  return jax.tree.map(lambda a: a + n, tree)


def assert_same(ours, theirs):
  assert jax.tree.structure(ours) == jax.tree.structure(theirs)
  for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
    assert a.dtype == b.dtype
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """A folder with steps 2 and 3 of `keep=2`, of which 1 has been dropped; step n holds the initial state + n."""
  workdir = tmp_path_factory.mktemp('saved')
  state = jax.jit(make_state())()
  checkpoints = Checkpoints(workdir, keep=2)
  for step in (1, 2, 3):
    checkpoints.save(step, plus(state, step))
  checkpoints.close()
  return workdir, state


def test_round_trip_is_bit_equal_and_keeps_n(saved):
  workdir, state = saved
  checkpoints = Checkpoints(workdir)
  assert (checkpoints.steps, checkpoints.latest) == ([2, 3], 3)
  for step in (2, 3):
    assert_same(checkpoints.restore(step, abstract_of(make_state())), plus(state, step))
  checkpoints.close()


def test_parameters_come_alone(saved):
  workdir, state = saved
  checkpoints = Checkpoints(workdir)
  shapes = abstract_of(make_state())
  restored = checkpoints.restore(3, {'params': shapes['params']})
  assert_same(restored, {'params': plus(state['params'], 3)})
  checkpoints.close()


@pytest.mark.parametrize(
  ('other', 'leaf'),
  [
    ({'layers': 4}, r'params\.slots\.0\.attention\.key\.kernel is float32\[2, 16, 16\], .* wants float32\[4, 16, 16\]'),
    ({'layers': 1}, r'params\.slots\.0\.attention\.key\.kernel is float32\[2, 16, 16\], .* wants float32\[1, 16, 16\]'),
    ({'d_model': 32}, r'params\.embedding\.embedding is float32\[17, 16\], this config wants float32\[17, 32\]'),
    ({'pattern': ['learned']}, r'params\.schemes\.0\.table is absent, this config wants float32\[8, 16\]'),
    ({'pattern': ['t5']}, r'params\.schemes\.0\.table is absent, this config wants float32\[32, 2\]'),
  ],
  ids=str,
)
def test_another_model_is_refused_by_the_name_of_a_leaf(saved, other, leaf):
  """A 12-layer checkpoint in a 16-layer model, partly fresh and without a word, is how this fails elsewhere."""
  checkpoints = Checkpoints(saved[0])
  shapes = abstract_of(make_state(**{'pattern': ['rope'], **other}))
  with pytest.raises(SpecError, match='^checkpoint 3: ' + leaf + '$'):
    checkpoints.restore(3, {'params': shapes['params']})
  checkpoints.close()


def test_a_leaf_that_the_config_does_not_want_is_no_less_an_error(tmp_path):
  state = jax.jit(make_state(['learned']))()
  checkpoints = Checkpoints(tmp_path, keep=1)
  checkpoints.save(5, state)
  with pytest.raises(SpecError, match=r'params\.schemes\.0\.table is float32\[8, 16\], this config wants absent$'):
    checkpoints.restore(5, {'params': abstract_of(make_state())['params']})
  checkpoints.close()


def test_another_dtype_is_refused(saved):
  """orbax would cast it and say nothing."""
  checkpoints = Checkpoints(saved[0])
  half = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16, sharding=a.sharding), abstract_of(make_state())['params']
  )
  with pytest.raises(SpecError, match=r'is float32\[17, 16\], this config wants bfloat16\[17, 16\]$'):
    checkpoints.restore(3, {'params': half})
  checkpoints.close()


def test_a_missing_step_lists_what_there_is(saved, tmp_path):
  checkpoints = Checkpoints(saved[0])
  with pytest.raises(SpecError, match='^checkpoint = 1: allowed: 2, 3$'):
    checkpoints.restore(1, abstract_of(make_state()))
  checkpoints.close()
  empty = Checkpoints(tmp_path, keep=1)
  assert empty.latest is None
  with pytest.raises(SpecError, match='^checkpoint = 1: allowed: none saved yet$'):
    empty.restore(1, abstract_of(make_state()))
  empty.close()


def test_reading_where_no_run_is_changes_nothing(tmp_path):
  with pytest.raises(SpecError, match='holds no checkpoints; train there first'):
    Checkpoints(tmp_path / 'typo')
  assert not list(tmp_path.iterdir())


def test_relative_workdir(tmp_path, monkeypatch):
  """orbax refuses a relative path at the first save, after the training that led there."""
  monkeypatch.chdir(tmp_path)
  checkpoints = Checkpoints('out', keep=1)
  checkpoints.save(1, {'params': {'w': jnp.ones(3)}})
  checkpoints.close()
  monkeypatch.chdir('/')
  assert Checkpoints(tmp_path / 'out').latest == 1


def test_an_unfinished_save_is_ignored_by_readers_and_swept_by_the_next_writer(tmp_path):
  writer = Checkpoints(tmp_path, keep=3)
  writer.save(1, {'params': {'w': jnp.ones(3)}})
  writer.close()
  leftover = tmp_path / 'checkpoints' / '5.orbax-checkpoint-tmp'
  (leftover / 'params').mkdir(parents=True)
  reader = Checkpoints(tmp_path)
  assert reader.steps == [1]
  assert leftover.exists()
  reader.close()
  writer = Checkpoints(tmp_path, keep=3)
  assert writer.steps == [1]
  writer.save(9, {'params': {'w': jnp.zeros(3)}})
  assert writer.steps == [1, 9]
  writer.close()
  assert not leftover.exists()


@pytest.mark.parametrize('step', [2, 1], ids=['existing', 'older'])
def test_a_step_is_saved_once(tmp_path, step):
  """orbax reports some of these by returning False, and a run that ends on one has lost its last state."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save(2, {'params': {'w': jnp.ones(3)}})
  with pytest.raises(Exception, match='2'):
    checkpoints.save(step, {'params': {'w': jnp.zeros(3)}})
    checkpoints.wait()
  assert checkpoints.steps == [2]
  w = as_abstract({'w': jnp.ones(3)}, whole(make_mesh(1)))
  assert checkpoints.restore(2, {'params': w})['params']['w'].tolist() == [1, 1, 1]
  checkpoints.close()


def test_arrays_may_be_donated_once_save_returns(tmp_path):
  """The loop reuses the state's buffers for the next step while the files are still being written."""
  add = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
  state = {'params': {'w': jnp.zeros((256, 256))}}
  checkpoints = Checkpoints(tmp_path, keep=9)
  for step in (1, 2, 3):
    checkpoints.save(step, state)
    state = add(add(state))
  shapes = as_abstract(state, whole(make_mesh(1)))
  for step in (1, 2, 3):
    assert (checkpoints.restore(step, shapes)['params']['w'] == 2 * (step - 1)).all()
  checkpoints.close()


@pytest.mark.parametrize('found_by', ['save', 'close', 'latest'])
def test_a_failed_background_save_is_raised(tmp_path, found_by, monkeypatch):
  """A disk that fills up while the next step computes: without this the run ends with exit 0 and no checkpoint."""
  checkpoints = Checkpoints(tmp_path, keep=3)
  checkpoints.save(1, {'params': {'w': jnp.ones(3)}})
  checkpoints.wait()

  class Failed:
    def result(self):
      raise OSError(28, 'No space left on device', 'd')

  monkeypatch.setattr(checkpoints._orbax, 'save_checkpointables_async', lambda *_, **__: Failed())
  checkpoints.save(2, {'params': {'w': jnp.ones(3)}})
  use = {
    'save': lambda: checkpoints.save(3, {'params': {'w': jnp.ones(3)}}),
    'close': checkpoints.close,
    'latest': lambda: checkpoints.latest,
  }
  with pytest.raises(Stopped, match='^checkpoint 2 cannot be written .*No space left.*; those before it are whole$'):
    use[found_by]()
  checkpoints._orbax.close()


OTHER_DEVICES = """
import sys
import jax, jax.numpy as jnp, numpy as np
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, split_batch, whole

assert len(jax.devices()) == 2
mesh = make_mesh(2)
tree = {'whole': jnp.arange(6.0), 'split': jnp.arange(8.0).reshape(2, 4)}
shardings = {'whole': whole(mesh), 'split': split_batch(mesh)}
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {'params': jax.device_put(tree, shardings)})
checkpoints.close()

checkpoints = Checkpoints(sys.argv[2])
restored = checkpoints.restore(1, {'params': as_abstract(tree, whole(mesh))})['params']
checkpoints.close()
assert len(restored['whole'].sharding.device_set) == 2
jax.tree.map(np.testing.assert_array_equal, restored, tree)
"""


def test_two_devices_to_one_and_back(tmp_path, root):
  """orbax records the sharding and, left to itself, fails on another number of devices."""
  tree = {'whole': jnp.arange(6.0), 'split': jnp.arange(8.0).reshape(2, 4)}
  ours = Checkpoints(tmp_path / 'one', keep=1)
  ours.save(1, {'params': tree})
  ours.close()
  env = {**os.environ, 'JAX_NUM_CPU_DEVICES': '2', 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
  command = [sys.executable, '-c', OTHER_DEVICES, str(tmp_path / 'two'), str(tmp_path / 'one')]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  theirs = Checkpoints(tmp_path / 'two')
  restored = theirs.restore(1, {'params': as_abstract(tree, whole(make_mesh(1)))})['params']
  theirs.close()
  assert len(restored['split'].sharding.device_set) == 1
  assert_same(restored, tree)

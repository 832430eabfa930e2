"""Every scheme learns: 300 steps of the smoke recipe beat a bigram model of the same tokens."""

import jax
import numpy as np
import pytest
from flax import nnx

import posenc
from configs import smoke
from configs.schema import Config
from data import TrainWindows
from forms import FORMS
from posenc import PosParam
from training.optimizer import decay_mask, make_optimizer
from training.step import make_train_step

pytestmark = pytest.mark.slow
STEPS, LAST = 300, 50


@pytest.fixture(scope='module')
def recipe():
  """The smoke recipe with 300 steps, its data, and the loss of a bigram model counted on the tokens it trains on."""
  config = smoke.get_config()
  config.steps = STEPS
  config.batch = 32
  config.optimizer.learning_rate = 1e-2
  config = Config.from_dict(config.to_dict())
  data = config.load_data()
  windows = TrainWindows(data.splits.train, config.train_len, config.data.bos, data.tokenizer.bos, seed=config.seed)
  counts = np.zeros((data.tokenizer.vocab_size,) * 2)
  seen = [windows.batch(step, config.batch) for step in range(STEPS)]
  for inputs, targets in seen:
    np.add.at(counts, (inputs, targets), 1)
  # In its favour: fitted on the very tokens that it is scored on, and nothing held back for pairs not seen.
  p = counts / np.maximum(counts.sum(1, keepdims=True), 1)
  bigram = np.mean([-np.log(p[inputs, targets]).mean() for inputs, targets in seen[-LAST:]])
  return config, data, seen, float(bigram)


@pytest.mark.parametrize('form', FORMS)
def test_beats_a_bigram_model(form, recipe):
  config, data, seen, bigram = recipe
  config = Config.from_dict(config.to_dict() | {'posenc': form})
  make = lambda: config.build_model(data.tokenizer.vocab_size)  # noqa: E731
  graphdef, model = nnx.split(make())
  params = jax.tree.map(lambda a: a.copy(), nnx.to_pure_dict(model))
  slots = [config.build_scheme(text) for text in config.posenc]
  tx = make_optimizer(config.optimizer, STEPS, decay_mask(nnx.eval_shape(make)))
  pos = posenc.positions('none', slots, config.train_len, config.train_len)
  step = make_train_step(graphdef, tx, pos, None)
  state = {'params': params, 'opt': tx.init(params)}
  losses = []
  for n, batch in enumerate(seen):
    state, metrics = step(state, *(a[None] for a in batch), n)
    losses.append(metrics['loss'])
  losses = np.asarray(losses)
  assert np.isfinite(losses).all()
  own = [v for _, v in nnx.iter_graph(slots[0]) if isinstance(v, PosParam)]
  before, after = (jax.tree.leaves(tree.get('schemes', {})) for tree in (nnx.to_pure_dict(model), state['params']))
  assert len(before) == len(own)
  for a, b in zip(before, after):
    assert np.isfinite(b).all() and float(abs(a - b).max()) > 1e-4
  assert losses[-LAST:].mean() < bigram, f'{form}: {losses[-LAST:].mean():.3f} after {STEPS} steps, bigram {bigram:.3f}'

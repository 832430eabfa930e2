"""The optimizer against numbers worked out by hand: schedule, decay and its mask, clipping, accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import posenc
from models.lm import LM, ModelConfig, abstract
from training.optimizer import OptimizerConfig, decay_mask, make_optimizer, schedule
from training.step import make_train_step

MODEL = ModelConfig(layers=2, d_model=16, heads=2, d_mlp=32)
# Adam without its moments: the update of a single gradient is lr * sign(gradient), and mu is the clipped gradient.
PLAIN = {'b1': 0.0, 'b2': 0.0, 'weight_decay': 0.0}


def lm(*pattern, model=MODEL):
  return lambda: LM(model, pattern, vocab_size=17, train_len=8, rngs=nnx.Rngs(0))


def test_schedule_values():
  lr = schedule(OptimizerConfig(learning_rate=1e-2, warmup_steps=10, final_fraction=0.1), 100)
  numbers = {0: 1e-2 / 11, 5: 1e-2 * (1 / 11 + 5 / 11), 10: 1e-2, 55: 5.5e-3, 100: 1e-3}
  for count, want in numbers.items():
    assert float(lr(count)) == pytest.approx(want, rel=1e-5), f'update {count}'
  values = [float(lr(n)) for n in range(101)]
  assert np.argmax(values) == 10
  assert np.all(np.diff(values[:11]) > 0)
  assert np.all(np.diff(values[10:]) < 0)


@pytest.mark.parametrize(('warmup', 'steps'), [(0, 10), (10, 10), (100, 10), (0, 1), (1, 1)])
def test_schedule_at_its_edges(warmup, steps):
  """No warm-up, and a warm-up that the run never leaves, still give a positive finite rate for every update."""
  lr = schedule(OptimizerConfig(learning_rate=1e-2, warmup_steps=warmup), steps)
  values = np.array([float(lr(n)) for n in range(steps)])
  assert np.all((values > 0) & (values <= 1e-2 * (1 + 1e-6)))
  assert (values[0] == pytest.approx(1e-2)) == (warmup == 0)
  assert values.max() > 4.9e-3, 'a run shorter than its warm-up should not crawl'


def test_update_n_is_made_with_the_rate_that_is_logged_for_it():
  """Off by one, the first update is wasted or the log differs from the run."""
  cfg = OptimizerConfig(learning_rate=1e-2, warmup_steps=4, clip_norm=0.0, **PLAIN)
  tx, lr = make_optimizer(cfg, 12, {'w': True}), schedule(cfg, 12)
  params = {'w': jnp.zeros(3)}
  opt = tx.init(params)
  for n in range(12):
    updates, opt = tx.update({'w': jnp.array([2.0, -3.0, 0.5])}, opt, params)
    np.testing.assert_allclose(updates['w'], float(lr(n)) * np.array([-1, 1, -1]), rtol=1e-5, err_msg=f'update {n}')


@pytest.mark.parametrize('scheme', ['t5', 'learned'])
def test_decay_is_decoupled_and_spares_norms_and_positions(scheme):
  """100 updates without gradients: kernels shrink to (1 - lr decay)**100, the exempt keep every bit."""
  make = lm(scheme)
  cfg = OptimizerConfig(learning_rate=1e-2, final_fraction=1.0, warmup_steps=0, weight_decay=0.1)
  tx = make_optimizer(cfg, 100, decay_mask(nnx.eval_shape(make)))
  params = nnx.to_pure_dict(nnx.state(make()))
  zeros = jax.tree.map(jnp.zeros_like, params)

  @jax.jit
  def run(params):
    def body(_, carry):
      updates, opt = tx.update(zeros, carry[1], carry[0])
      return optax.apply_updates(carry[0], updates), opt

    return jax.lax.fori_loop(0, 100, body, (params, tx.init(params)))[0]

  after = run(params)
  kernel = lambda p: np.asarray(p['slots'][0]['attention']['query']['kernel'])  # noqa: E731
  np.testing.assert_allclose(kernel(after), 0.90479215 * kernel(params), rtol=2e-5)
  table = lambda p: np.asarray(p['embedding']['embedding'])  # noqa: E731
  np.testing.assert_allclose(table(after), 0.90479215 * table(params), rtol=2e-5)
  exempt = [after['norm'], after['slots'][0]['norm_mlp'], after['slots'][0]['norm_attention']]
  assert all((leaf == 1).all() for leaf in jax.tree.leaves(exempt))
  jax.tree.map(np.testing.assert_array_equal, after['schemes'], params['schemes'])


def test_biases_and_both_kinds_of_norm_do_not_decay():
  cfg = ModelConfig(
    layers=2, d_model=16, heads=2, norm='layer', biases=('qkv', 'out', 'mlp', 'norm'), qk_norm=True, post_norm=True
  )
  mask = decay_mask(nnx.eval_shape(lambda: LM(cfg, ('rope',), vocab_size=11, train_len=8, rngs=nnx.Rngs(0))))
  leaves = {jax.tree_util.keystr(path): decays for path, decays in jax.tree_util.tree_leaves_with_path(mask)}
  assert sum('bias' in path for path in leaves) == 12  # seven matrices and four norms of a block, and the last norm
  assert all(decays == ('kernel' in path or 'embedding' in path) for path, decays in leaves.items())


@pytest.mark.parametrize(
  'pattern',
  [
    *((name if name != 'rope2d' else 'rope2d(width=4)',) for name in posenc.SCHEMES),
    ('rope', 't5'),
    ('learned', 'alibi'),
  ],
  ids=str,
)
def test_decay_mask(pattern):
  """By name here, by type in the code: a scheme whose parameters are a new type must not slip through."""
  mask = decay_mask(nnx.eval_shape(lm(*pattern)))
  _, shapes = abstract(lm(*pattern))
  assert jax.tree.structure(mask) == jax.tree.structure(shapes)
  decayed, kept = set(), set()
  for path, decays in jax.tree_util.tree_leaves_with_path(mask):
    (decayed if decays else kept).add('.'.join(str(key.key) for key in path))
  assert kept == {p for p in decayed | kept if p.startswith('schemes.') or p.endswith('.scale')}
  assert {p.rsplit('.', 1)[1] for p in decayed} == {'embedding', 'kernel'}


def test_decay_mask_holds_the_untied_head():
  model = ModelConfig(layers=2, d_model=16, heads=2, d_mlp=32, tied=False)
  assert decay_mask(nnx.eval_shape(lm('rope', model=model)))['head'] == {'kernel': True}


class Toy(nnx.Module):
  """One weight per token id; the loss of a position is weight * target, so gradients are the targets, by id."""

  def __init__(self):
    self.w = nnx.Param(jnp.zeros(2))

  def nll(self, inputs_BT, targets_BT, pos, key=None):
    return self.w[...][inputs_BT] * targets_BT


def toy_step(clip_norm, micro_batches):
  cfg = OptimizerConfig(learning_rate=1e-2, warmup_steps=0, clip_norm=clip_norm, **PLAIN)
  tx = make_optimizer(cfg, 10, {'w': True})
  params = {'w': jnp.zeros(2)}
  inputs, targets = (jnp.array(a, jnp.int32)[:, None, None] for a in zip(*micro_batches))
  step = make_train_step(nnx.split(Toy())[0], tx, (), None)
  state, metrics = step({'params': params, 'opt': tx.init(params)}, inputs, targets, 0)
  return np.asarray(optax.tree.get(state['opt'], 'mu')['w']), state['params']['w'], metrics


def test_clipping_comes_after_averaging():
  """(10, 0) and (0, 1): clipping each micro-batch would give (0.5, 0.5)."""
  clipped, _, metrics = toy_step(1.0, [(0, 10), (1, 1)])
  np.testing.assert_allclose(clipped, [0.99503719, 0.09950372], rtol=1e-6)
  assert float(metrics['grad_norm']) == pytest.approx(np.hypot(5, 0.5)), 'the norm that is logged is the unclipped one'


def test_a_gradient_below_the_norm_is_left_alone():
  np.testing.assert_allclose(toy_step(100.0, [(0, 10), (1, 1)])[0], [5, 0.5])


@pytest.mark.parametrize('clip_norm', [0.0, 1.0])
def test_clipping_of_zero_gradients_is_finite_and_0_is_off(clip_norm):
  """optax's own clip by 0 turns zero gradients into NaN."""
  for batch in [(0, 0), (1, 0)], [(0, 1000), (1, 0)]:
    clipped, params, _ = toy_step(clip_norm, batch)
    assert np.isfinite(clipped).all()
    assert np.isfinite(params).all()
  np.testing.assert_allclose(clipped, [1.0 if clip_norm else 500.0, 0], rtol=1e-6)


def test_accumulation_equals_one_batch_of_the_whole_size():
  make = lm('rope', model=ModelConfig(layers=1, d_model=16, heads=2, d_mlp=32))
  graphdef, _ = abstract(make)
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
  cfg = OptimizerConfig(warmup_steps=0, clip_norm=0.1, **PLAIN)
  tx = make_optimizer(cfg, 10, decay_mask(nnx.eval_shape(make)))
  pos = posenc.positions('none', list(nnx.eval_shape(make).schemes), 8, 8)
  step = make_train_step(graphdef, tx, pos, None)
  tokens = np.random.default_rng(0).integers(0, 17, (8, 9)).astype(np.int32)
  out = []
  for k in (1, 2):
    inputs, targets = (a.reshape(k, 8 // k, 8) for a in (tokens[:, :-1], tokens[:, 1:]))
    state = {'params': jax.tree.map(jnp.copy, params), 'opt': tx.init(params)}
    state, metrics = step(state, inputs, targets, 0)
    count = optax.tree.get(state['opt'], 'count', filtering=lambda path, _: 'ScaleByAdam' in str(path))
    assert int(count) == 1, 'micro-batches are no updates'
    out.append((metrics, optax.tree.get(state['opt'], 'mu')))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), *out)
  assert float(optax.tree.norm(out[0][1])) == pytest.approx(0.1, rel=1e-5)


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('learning_rate', 0.0),
    ('learning_rate', float('nan')),
    ('learning_rate', float('inf')),
    ('b1', 1.0),
    ('b2', 1.0),
    ('b1', -0.1),
    ('final_fraction', 1.1),
    ('weight_decay', -0.1),
    ('clip_norm', -1.0),
    ('warmup_steps', -1),
    ('accumulate', 0),
  ],
)
def test_values_outside_what_is_allowed(field, value):
  """b1 = 1 and b2 = 1 among them: Adam's bias correction would divide by 0 in the first update."""
  with pytest.raises(ValueError, match=f'^{field} = {value}: .* allowed'):
    OptimizerConfig(**{field: value})

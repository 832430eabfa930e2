"""What every scheme and every method must hold, whichever they are: a new line in SCHEMES or METHODS is tested here."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from forms import COMBINATIONS, FORMS, SPEC, jit, method_of
from models.attention import attend
from models.lm import LM, ModelConfig
from posenc import METHODS, WITHIN, PosParam

TRAIN_LEN, TILE = 10, 8
T = 3 * TILE + 1  # three tiles and one token: a last tile that is almost all padding
# One layer, logits in one chunk: compiling is what this file spends its time on.
CONFIG = ModelConfig(layers=1, d_model=32, heads=4, kv_heads=2, tile=TILE, loss_chunk=T)
VOCAB = 29

# What a scheme's parameters are called in a checkpoint, for those whose checkpoints exist: renaming one would orphan
# them. A new scheme needs no line.
PARAMETERS = {
  **dict.fromkeys(('nope', 'sinusoidal', 'rope', 'rope2d', 'xpos', 'alibi', 'sandwich'), set()),
  'learned': {'table'},
  't5': {'table'},
  'kerple_log': {'r1', 'r2'},
  'kerple_power': {'r1', 'r2'},
  'fire': {'w1', 'b1', 'w2', 'c', 'l_mult'},
  'shaw': {'key_table', 'value_table'},
  'cope': {'table'},
  'rope(ssmax=True)': {'ssmax'},
  'fox': {'w', 'b'},
  'pope': {'phase'},
  'dape': {'bias', 'w1', 'b1', 'w2'},
}


class Model:
  """A tiny LM of one scheme. `params` are `start` with the scheme's zeros drawn, so that every part matters."""

  def __init__(self, form: str):
    # `learned` has no positions past its table, so it is tested inside it.
    self.train_len = T if form == 'learned' else TRAIN_LEN
    lm = LM(CONFIG, (form,), vocab_size=VOCAB, train_len=self.train_len, rngs=nnx.Rngs(0))
    self.graphdef, state = nnx.split(lm)
    self.start = nnx.to_pure_dict(state)
    draw = lambda a: a if a.any() else jax.random.normal(jax.random.key(3), a.shape)  # noqa: E731
    schemes = jax.tree.map(draw, self.start.get('schemes', {}))
    self.params = self.start | ({'schemes': schemes} if schemes else {})
    self.slots = list(lm.schemes)
    self.traces = 0

    def nll(params, tokens, targets, pos, tile):
      self.traces += 1
      return nnx.merge(self.graphdef, params).nll(tokens, targets, pos, tile=tile)

    self.nll = jit(nll, static_argnames='tile')
    self.grad = jit(jax.grad(lambda *args: nll(*args).sum()), static_argnums=4)

    def attention(params, q, k, v, pos, tile):
      slot = nnx.merge(self.layer_graphdef, params)
      return attend(q, k, v, slot, pos, slot.token_state(X, pos), tile=tile)

    def gradients(params, q, k, v, pos, weight_T, tile):
      def loss(*args):
        out = attention(*args, pos, tile)
        return (out**2 * weight_T[:, None, None]).sum(), out

      (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(params, q, k, v)
      return out, grads

    self.layer_graphdef = nnx.graphdef(self.layer(0))
    self.attention, self.gradients = jit(attention, static_argnames='tile'), jit(gradients, static_argnames='tile')

  def attend(self, q, k, v, pos, weight_T=None, tile=TILE):
    """Of the first layer's scheme: output, and gradients of its squares by parameters, q, k and v."""
    weight_T = np.ones(T) if weight_T is None else weight_T
    return self.gradients(nnx.state(self.layer(0)), q, k, v, pos, jnp.asarray(weight_T, jnp.float32), tile=tile)

  def layer(self, index):
    """The scheme as a layer sees it: its own, where the scheme is one per layer."""
    (scheme,) = nnx.merge(self.graphdef, self.params).schemes
    graphdef, params = nnx.split(scheme)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a[index], params)) if scheme.per_layer else scheme

  def positions(self, name, length=T):
    return posenc.positions(method_of(name, len(self.slots[0].inv_freq_P)), self.slots, self.train_len, length)


@pytest.fixture(scope='module')
def model():
  made: dict[str, Model] = {}

  def get(form):
    if form not in made:
      made[form] = Model(form)
    return made[form]

  return get


def positions_or_skip(model, method):
  """Combinations without meaning are `Unsupported` with a reason; that is their whole contract."""
  try:
    return model.positions(method)
  except posenc.Unsupported as reason:
    assert str(reason)
    return None


def own_parameters(scheme):
  return [v for _, v in nnx.iter_graph(scheme) if isinstance(v, nnx.Variable)]


TOKENS = jax.random.randint(jax.random.key(0), (2, T), 0, VOCAB)
TARGETS = jax.random.randint(jax.random.key(1), (2, T), 0, VOCAB)
QKV = tuple(jax.random.normal(jax.random.key(i), (2, T, n, CONFIG.width)) for i, n in enumerate((4, 2, 2)))
X = jax.random.normal(jax.random.key(9), (2, T, CONFIG.d_model))
each_scheme = pytest.mark.parametrize('scheme', FORMS)
each_combination = pytest.mark.parametrize('scheme, method', COMBINATIONS)


@each_combination
def test_1_causal(model, scheme, method):
  """Tokens after t change nothing at or before t, bit for bit."""
  m = model(scheme)
  if (pos := positions_or_skip(m, method)) is None:
    return
  for t in (3, TILE - 1, TILE, 2 * TILE + 3):
    changed = TOKENS.at[:, t + 1 :].set((TOKENS[:, t + 1 :] + 1) % VOCAB)
    a, b = (m.nll(m.params, tokens, TARGETS, pos, TILE) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(a[:, : t + 1], b[:, : t + 1])
    assert not np.array_equal(a[:, t + 1 :], b[:, t + 1 :])


@each_scheme
def test_1_every_earlier_token_matters(model, scheme):
  """The gradient before t is not zero within the window: a scheme that hides the past would pass the test above."""
  m = model(scheme)
  (pos,) = m.positions('none')
  _, (_, _, k, v) = m.attend(*QKV, pos, np.arange(T) == T - 1)
  seen = np.maximum(jnp.abs(k), jnp.abs(v)).max((2, 3)) > 0
  np.testing.assert_array_equal(seen, np.broadcast_to(np.arange(T)[::-1] < pos.window_T[-1], seen.shape))


@each_combination
def test_2_tile_invariance(model, scheme, method):
  """The tile is a matter of speed: values and gradients are those of the dense path."""
  m = model(scheme)
  if (pos := positions_or_skip(m, method)) is None:
    return
  (tiled, tiled_grads), (dense, dense_grads) = (m.attend(*QKV, pos[0], tile=tile) for tile in (TILE, 64))
  np.testing.assert_allclose(tiled, dense, atol=2e-5)
  for a, b in zip(jax.tree.leaves(tiled_grads), jax.tree.leaves(dense_grads), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(jnp.abs(b).max())))


@each_scheme
def test_3_gqa_is_mha_with_repeated_heads(model, scheme):
  m = model(scheme)
  (pos,), (q, k, v) = m.positions('none'), QKV
  want = m.attention(nnx.state(m.layer(0)), q, jnp.repeat(k, 2, 2), jnp.repeat(v, 2, 2), pos, tile=TILE)
  np.testing.assert_allclose(m.attend(q, k, v, pos)[0], want, atol=1e-6)


@each_scheme
def test_4_shift_of_all_positions(model, scheme):
  """Relative schemes do not see a constant added to every position; those that say they are absolute do."""
  m = model(scheme)
  (pos,) = m.positions('none')
  # A table has no row to shift to; turned round, each of its positions is another one.
  shifted = pos.replace(at_T=pos.at_T[::-1] if m.slots[0].name == 'learned' else pos.at_T + 3.0)
  a, b = (m.nll(m.params, TOKENS, TARGETS, (p,), TILE) for p in (pos, shifted))
  if m.slots[0].relative:
    np.testing.assert_allclose(a, b, atol=2e-5)
  else:
    assert float(jnp.abs(a - b).max()) > 1e-3


@each_scheme
def test_5_every_position_parameter_learns(model, scheme):
  """A gradient that is zero at the start is a parameter that is never trained; each layer's, where it has its own.

  Far above rounding: a number that softmax cannot see has a gradient of 1e-7, not of 0.
  """
  m = model(scheme)
  grads = m.grad(m.start, TOKENS, TARGETS, m.positions('none'), TILE)
  leaves = jax.tree.leaves(grads.get('schemes', {}))
  assert len(leaves) == len(own_parameters(m.slots[0]))
  per_layer = m.slots[0].per_layer
  for g in leaves:
    assert not per_layer or g.shape[0] == CONFIG.layers
    assert all(float(jnp.abs(part).max()) > 1e-4 for part in (g if per_layer else [g]))


@each_combination
def test_6_identity_within_the_training_length(model, scheme, method):
  """By its bare name a method changes nothing at all at or below 1x, unless it is tagged as one that does."""
  m, changed = model(scheme), False
  if m.slots[0].window < TRAIN_LEN:
    return  # sinks reach outside a window that is shorter than the training length
  for length in (1, TRAIN_LEN // 2, TRAIN_LEN):
    try:
      pos = m.positions(method, length)
    except posenc.Unsupported:
      return
    same = jax.tree.map(np.array_equal, pos, m.positions('none', length)) if pos[0].far is None else False
    changed = changed or not jax.tree.all(same)
  assert changed == (METHODS[method] in WITHIN)


@each_combination
def test_6_no_frequency_out_of_nothing(model, scheme, method):
  """A pair that a scheme does not rotate stays so: a method that starts from the base would set it turning."""
  m = model(scheme)
  if (pos := positions_or_skip(m, method)) is None:
    return
  np.testing.assert_array_equal(pos[0].inv_freq_P == 0, m.slots[0].inv_freq_P == 0)


@each_scheme
def test_7_one_compilation_per_length(model, scheme):
  """Methods are arrays: all of them run one program, those with a second position map another one."""
  m = Model(scheme)
  programs = set()
  for length in (TRAIN_LEN, T):
    for method in METHODS:
      try:
        pos = m.positions(method, length)
      except posenc.Unsupported:
        continue
      m.nll.lower(m.params, TOKENS[:, :length], TARGETS[:, :length], pos, TILE)  # a new signature is a new program
      programs.add((length, pos[0].far is None))
  assert m.traces == len(programs)


@pytest.mark.parametrize('pattern', [(form,) for form in FORMS] + [('rope', 'nope'), ('rope', 'rope')])
def test_8_no_shared_references(pattern):
  """One Variable, one path: sharing would break NNX's tree mode, and a checkpoint would hold it once or twice."""
  two_layers = dataclasses.replace(CONFIG, layers=2)
  lm = LM(two_layers, pattern, vocab_size=VOCAB, train_len=T, rngs=nnx.Rngs(0))
  variables = [v for _, v in nnx.iter_graph(lm) if isinstance(v, nnx.Variable)]
  assert len({id(v) for v in variables}) == len(variables)
  assert len(variables) == len(jax.tree.leaves(nnx.to_pure_dict(nnx.state(lm))))
  with_tree = jax.tree.leaves(lm, is_leaf=lambda v: isinstance(v, nnx.Variable))
  assert len({id(v) for v in with_tree}) == len(with_tree) == len(variables)


@each_scheme
def test_9_whether_positions_are_read(model, scheme):
  """What a scheme says of itself decides which training-time positions a config may have. Rolled: Sandwich is even."""
  m = model(scheme)
  (pos,) = m.positions('none')
  turned = pos.replace(at_T=jnp.roll(pos.at_T, 3))
  same = np.array_equal(*(m.nll(m.params, TOKENS, TARGETS, (p,), TILE) for p in (pos, turned)))
  assert m.slots[0].reads_positions == (not same)
  same = np.array_equal(*(m.attend(*QKV, p)[0] for p in (pos, turned)))
  assert m.layer(0).reads_distance == (not same)


@each_scheme
def test_12_state_is_parameters_only(model, scheme):
  """A numpy constant stored on a module becomes state: it would be trained, decayed and saved."""
  lm = LM(CONFIG, (scheme,), vocab_size=VOCAB, train_len=T, rngs=nnx.Rngs(0))
  _, state = nnx.split(lm)
  variables = [v for _, v in nnx.iter_graph(lm) if isinstance(v, nnx.Variable)]
  assert all(isinstance(v, nnx.Param) for v in variables)
  pure = nnx.to_pure_dict(state)
  assert set(pure) - {'schemes'} == {'embedding', 'slots', 'norm'}
  name = next((name for name, form in SPEC.items() if form == scheme), scheme)
  if name in PARAMETERS:
    assert set(pure.get('schemes', {}).get(0, {})) == PARAMETERS[name]
  assert set(pure['slots'][0]) == {'attention', 'mlp', 'norm_attention', 'norm_mlp'}
  assert all(isinstance(v, PosParam) for v in own_parameters(lm.schemes[0]))

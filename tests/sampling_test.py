"""Training-time positions: what is drawn, from what, and how a model reads it."""

import collections
import dataclasses
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import forms
import posenc
from data import TokenDocument
from data.windows import TrainWindows
from golden_test import each
from models.lm import LM, ModelConfig
from posenc import RULES, SCHEMES, PositionScheme, SpecError, sampling
from posenc.sampling import skip

T, LAYERS = 16, 4
SPEC = {'randomized': 'randomized(max_len=128)', 'pose': 'pose(target_len=128)'}
FORMS = [
  *(SPEC.get(name, name) for name in RULES),
  'randomized(max_len=128, per_layer=True)',
  "randomized(max_len=128, eval='arange')",
  "randomized(max_len=128, eval='evenly_spaced')",
  'pose(target_len=128, chunks=5)',
]
SAMPLED = [form for form in FORMS if form != 'sequential']
each_rule = pytest.mark.parametrize('text', SAMPLED)


def slots(*texts, train_len=T):
  shapes = {'heads': 2, 'head_dim': 8, 'd_model': 16, 'train_len': train_len}
  return [posenc.build(text, **shapes, rngs=nnx.Rngs(0)) for text in texts]


def build(text, *schemes, train_len=T, layers=LAYERS):
  return posenc.build_rule(
    text, slots(*(schemes or ('rope',)), train_len=train_len), train_len=train_len, layers=layers
  )


def drawn(text, steps, seed=0, **shapes):
  """Positions of many steps, [steps, T], of the first layer."""
  rule = build(text, **shapes)
  return np.stack([np.atleast_2d(rule.train(seed, step)[0])[0] for step in range(steps)])


# Draws.


@each_rule
def test_positions_rise_within_their_range(text):
  rule, at = build(text), drawn(text, 200)
  assert at.dtype == np.float64
  assert (at == np.round(at)).all()
  assert (np.diff(at) >= 1).all(), 'sorted, and no position twice'
  assert at.min() == 0 and at.max() == rule.largest == 127


@each_rule
def test_a_draw_is_a_function_of_seed_and_step(text):
  """Whatever was drawn before: a resumed run asks for its step."""
  a, b = build(text), build(text)
  for step in (7, 3, 0):
    a.train(5, step)
  for ours, theirs in zip(a.train(2**32 - 1, 3), b.train(2**32 - 1, 3)):
    np.testing.assert_array_equal(ours, theirs)
  others = [b.train(seed, step)[0].tobytes() for seed, step in ((0, 0), (0, 1), (1, 0), (1, 1), (2**32 - 1, 3))]
  assert len(set(others)) == 5


def test_sequential_positions_do_not_depend_on_the_step():
  rule = build('sequential')
  assert rule.train(0, 0) is None and not rule.sampled
  assert rule.evaluate(40) is None  # the scheme's own


def test_streams_are_not_those_of_the_windows(monkeypatch):
  """With one key, positions would be a function of which windows are cut."""
  keys = []
  philox = np.random.Philox
  monkeypatch.setattr(np.random, 'Philox', lambda key: keys.append(tuple(key.tolist())) or philox(key=key))
  document = TokenDocument('text', np.arange(99), 99)
  for seed in (0, 1, 2**32 - 1):
    for step in (0, 16):
      TrainWindows([document], T, 'window', 256, seed).batch(step, 1)
      build(SPEC['randomized']).train(seed, step)
  build(SPEC['randomized']).evaluate(16)
  assert len(keys) == len(set(keys)) == 13


def test_randomized_is_uniform_over_subsets():
  """Each of the 10 pairs out of 5 as often as another."""
  counts = collections.Counter(map(tuple, drawn('randomized(max_len=5)', 4000, train_len=2)))
  assert len(counts) == 10
  assert all(abs(n - 400) < 5 * 400**0.5 for n in counts.values())


def test_randomized_at_its_training_length_is_sequential():
  np.testing.assert_array_equal(drawn(f'randomized(max_len={T})', 3), np.tile(np.arange(T), (3, 1)))


def chunks(at):
  """(lengths, skips) of positions; chunks that happen to touch are one."""
  skips = at - np.arange(len(at))
  values, first = np.unique(skips, return_index=True)
  return np.diff([*first, len(at)]), values


def test_pose_draws_both_uniformly():
  """The first chunk U{1 .. (T+1)//2} tokens, the second skipped by U{0 .. target_len - T}."""
  at = drawn('pose(target_len=19)', 4000, train_len=15)  # skips 0 .. 4, lengths 1 .. 8
  skips = collections.Counter((at[:, -1] - 14).tolist())
  assert set(skips) == {0, 1, 2, 3, 4}
  assert all(abs(n - 800) < 5 * 800**0.5 for n in skips.values())
  lengths = collections.Counter(int(chunks(row)[0][0]) for row in at if row[-1] > 14)
  total = sum(lengths.values())
  assert set(lengths) == set(range(1, 9))
  assert all(abs(n - total / 8) < 5 * (total / 8) ** 0.5 for n in lengths.values())
  assert (at[:, 0] == 0).all()


@pytest.mark.parametrize('count', [2, 3, 5])
def test_pose_cuts_as_many_chunks_as_it_is_told(count):
  at = drawn(f'pose(target_len=10000, chunks={count})', 300)
  found = [len(chunks(row)[0]) for row in at]
  assert max(found) == count and np.mean(found) > count - 1  # two skips are rarely equal
  assert len({row.tobytes() for row in at}) == 300


def test_pose_skips_grow_uniformly():
  """u_2 is uniform on u_1 .. 1000 - T, not the larger of two: its share of what u_1 leaves is 1/2 on average."""
  found = [chunks(row)[1] for row in drawn('pose(target_len=1016, chunks=3)', 2000)]
  share = [(u[2] - u[1]) / (1000 - u[1]) for u in found if len(u) == 3]
  assert len(share) > 1900 and np.mean(share) == pytest.approx(0.5, abs=0.03)


@each('attn_modifiers', 'pose/')
def test_pose_of_the_released_code(case):
  """Their draws, made again with Python's generator in their order, are where our positions come from."""
  context, target = (case['inputs'][f'{k}_max_position_embeddings'] for k in ('model', 'scaled'))
  rng = random.Random(0)
  outputs = zip(case['inputs']['input_lengths'], case['outputs']['token_indices'], case['outputs']['position_ids'])
  for input_length, tokens, theirs in outputs:
    length = min(input_length, context)
    first = rng.randint(1, (length + 1) // 2)
    end = rng.randint(length, input_length)  # where their text ends: v_1, which we do not have
    assert tokens == [*range(first), *range(end - (length - first), end)]
    ours = skip(np.array([first, length - first]), np.array([0, rng.randint(0, target - length)]))
    np.testing.assert_array_equal(ours, theirs)


# Layers.


def test_each_layer_has_its_own_draw():
  """Layer l is repeat l // 2 of slot l % 2."""
  rule = build('randomized(max_len=128, per_layer=True)', 'rope', 'alibi')
  for at in (rule.train(0, 3), rule.evaluate(40)):
    assert [a.shape[0] for a in at] == [2, 2]
    assert len({row.tobytes() for a in at for row in a}) == LAYERS
    assert all((np.diff(row) >= 1).all() and row[0] >= 0 and row[-1] < 128 for a in at for row in a)
  alone = build('randomized(max_len=128, per_layer=True)').train(0, 3)[0]  # a pattern moves no layer's draw
  for slot, at in enumerate(rule.train(0, 3)):
    np.testing.assert_array_equal(at, alone[slot::2])
  shared = build('randomized(max_len=128)', 'rope', 'alibi').train(0, 3)
  assert [a.shape for a in shared] == [(T,), (T,)]
  np.testing.assert_array_equal(*shared)


def lm(*schemes, **changes):
  cfg = ModelConfig(**{'layers': LAYERS, 'd_model': 16, 'heads': 2, 'd_mlp': 32, 'tile': 8, 'loss_chunk': 8, **changes})
  return LM(cfg, schemes, vocab_size=17, train_len=T, rngs=nnx.Rngs(0))


TOKENS = jnp.arange(2 * T).reshape(2, T) * 7 % 17


@pytest.mark.parametrize(
  ('pattern', 'remat'), [(('rope',), False), (('sinusoidal', 'rope'), True), (('alibi', 'fire'), False)], ids=str
)
def test_a_layer_reads_its_own_positions(pattern, remat):
  """Against blocks called one after the other, each with its layer's positions; the embeddings read the first's."""
  model = lm(*pattern, remat=remat)
  rule = build('randomized(max_len=128, per_layer=True)', *pattern)
  pos = posenc.positions('none', list(model.schemes), T, T, rule=rule)

  def of_layer(module, repeat):
    graphdef, params = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a[repeat], params))

  @jax.jit
  def by_hand(tokens, pos):
    x = model.embedding(tokens)
    for layer in range(LAYERS):
      repeat, slot = divmod(layer, len(pattern))
      here = dataclasses.replace(pos[slot], at_T=pos[slot].at_T[repeat])
      scheme = model.schemes[slot]
      x = scheme.embed(x, here) if layer == 0 else x
      scheme = of_layer(scheme, repeat) if scheme.per_layer else scheme
      x = of_layer(model.slots[slot], repeat)(x, scheme, here, 8, None)
    return model.norm(x)

  np.testing.assert_allclose(jax.jit(model.hidden)(TOKENS, pos), by_hand(TOKENS, pos), atol=1e-5)


@pytest.mark.parametrize(
  ('scheme', 'text'),
  [
    ('shaw', 'randomized(max_len=32, per_layer=True)'),
    ('learned', 'randomized(max_len=16)'),
    ('kerple_log', 'pose(target_len=32)'),
  ],
)
def test_every_parameter_still_learns(scheme, text):
  """In a window half as long as the model was built for, so that a table holds its positions."""
  model, half = lm(scheme, layers=2), T // 2
  rule = posenc.build_rule(text, list(model.schemes), train_len=half, layers=2)
  (pos,) = posenc.positions('none', list(model.schemes), half, half)
  graphdef, params = nnx.split(model)

  @jax.jit
  @jax.grad
  def grads(params, at):
    tokens = TOKENS[:, :half]
    return nnx.merge(graphdef, params).nll(tokens, tokens, (dataclasses.replace(pos, at_T=at),)).sum()

  leaves = [jax.tree.leaves(grads(params, jnp.float32(rule.train(0, step)[0]))) for step in (0, 1)]
  for first, second in zip(*leaves):
    assert np.isfinite(first).all() and np.abs(first).max() > 1e-6
    assert not np.array_equal(first, second)


# Evaluation.


def test_pose_is_evaluated_in_sequence():
  assert build(SPEC['pose']).evaluate(300) is None


@pytest.mark.parametrize('length', [1, 2, T, 40, 127, 128])
def test_randomized_evaluation(length):
  random_, arange, even = (
    build(f'randomized(max_len=128, eval={how!r})').evaluate(length)[0] for how in ('random', 'arange', 'evenly_spaced')
  )
  for at in (random_, arange, even):
    assert at.shape == (length,) and (np.diff(at) >= 1).all() and at[0] >= 0 and at[-1] < 128
  np.testing.assert_array_equal(arange, np.arange(length))
  np.testing.assert_array_equal(even, np.floor(np.arange(length) * (128 / length)))
  np.testing.assert_array_equal(random_, build(SPEC['randomized']).evaluate(length)[0])
  assert length in (1, 128) or not np.array_equal(random_, even)


def test_too_long_for_randomized_is_unsupported():
  for how in ('random', 'arange', 'evenly_spaced'):
    rule = build(f'randomized(max_len=64, eval={how!r})')
    with pytest.raises(posenc.Unsupported, match='randomized has 64 positions, asked for 65'):
      posenc.positions('none', slots('rope')[0], T, 65, rule=rule)


def test_methods_compose_with_a_rule():
  """The rule writes where tokens stand, the method everything that it writes without one."""
  rule, (rope,) = build('randomized(max_len=128)'), slots('rope')
  ours = posenc.positions('yarn(factor=8)+logn', rope, T, 100, rule=rule)
  plain = posenc.positions('yarn(factor=8)+logn', rope, T, 100)
  np.testing.assert_array_equal(ours.at_T, rule.evaluate(100)[0])
  for a, b in zip(*(jax.tree.leaves(p.replace(at_T=0)) for p in (ours, plain))):
    np.testing.assert_array_equal(a, b)


def test_sequential_is_no_rule():
  for name in SCHEMES:
    text = forms.SPEC.get(name, name)
    (slot,) = slots(text)
    ours, plain = (posenc.positions('logn', slot, T, T, rule=rule) for rule in (build('sequential', text), None))
    assert jax.tree.all(jax.tree.map(np.array_equal, ours, plain))


@pytest.mark.parametrize(
  ('method', 'text', 'follows'),
  [
    ('none', 'sequential', False),
    ('none', SPEC['pose'], False),
    ('pi(factor=8)', SPEC['pose'], False),
    ('pi', SPEC['pose'], True),
    ('none', SPEC['randomized'], True),
    ('none', 'randomized(max_len=128, per_layer=True)', True),
    ('none', "randomized(max_len=128, eval='evenly_spaced')", True),
    ('none', "randomized(max_len=128, eval='arange')", False),
    # Positions for less than 4 or 2 training lengths are told their length all the same.
    ('none', 'randomized(max_len=40)', True),
    ('none', 'randomized(max_len=20)', True),
    ('none', "randomized(max_len=20, eval='arange')", False),
  ],
)
def test_label_of_an_oracle(method, text, follows):
  assert posenc.follows_length(method, slots('rope')[0], T, rule=build(text)) == follows
  assert bool(build(text).remarks()) == (text != 'sequential' and 'arange' not in text)


def test_a_second_map_counts_tokens_so_positions_must(monkeypatch):
  def two_maps(pos, scheme, train_len, eval_len):
    at = np.arange(eval_len) * 1.0
    return {'far': posenc.Far(at, at / 2, 4.0)}

  monkeypatch.setitem(posenc.METHODS, 'two_maps', two_maps)
  (rope,) = slots('rope')
  assert posenc.positions('two_maps', rope, T, T, rule=build(SPEC['pose'])).far is not None
  for text in (SPEC['randomized'], 'randomized(max_len=128, per_layer=True)'):
    with pytest.raises(posenc.Unsupported, match='a second position map is defined for sequential positions'):
      posenc.positions('two_maps', rope, T, T, rule=build(text))


class Table(PositionScheme):
  name, max_len = 'table', 64

  def embed(self, x_BTD, pos):
    return x_BTD + pos.at_T[:, None]


def test_a_table_must_hold_every_position():
  table = Table(slots('nope')[0].dims, nnx.Rngs(0))
  for text in ('randomized(max_len=64)', 'pose(target_len=64)'):
    posenc.build_rule(text, [table], train_len=T, layers=1)
  for text in ('randomized(max_len=65)', 'pose(target_len=65)'):
    with pytest.raises(SpecError, match='reaches position 64: at most 63 is allowed, the last row of table'):
      posenc.build_rule(text, [table], train_len=T, layers=1)
  rule = posenc.build_rule('pose(target_len=64)', [table], train_len=T, layers=1)
  posenc.positions('none', table, T, 64, rule=rule)
  with pytest.raises(posenc.Unsupported, match='table has positions for 64 tokens, asked for 65'):
    posenc.positions('none', table, T, 65, rule=rule)


# Strings.


def test_a_new_rule_is_one_line(monkeypatch):
  class Stretched(sampling.Rule):
    sampled = True

    def __init__(self, train_len, layers, slots, *, by: int = 2):
      super().__init__(train_len, layers, slots)
      self.by = by

    def train(self, seed, step):
      return (np.arange(self.train_len) * float(self.by),) * self.slots

  monkeypatch.setitem(RULES, 'stretched', Stretched)
  np.testing.assert_array_equal(build('stretched(by=3)').train(0, 0)[0], np.arange(T) * 3)
  with pytest.raises(SpecError, match="rule stretched: unknown argument bye = 1: did you mean 'by'"):
    posenc.check_rule('stretched(bye=1)')


def test_the_rule_keeps_its_string():
  assert build('pose(target_len=128)').text == 'pose(target_len=128)'
  assert build('pose(target_len=128)').remarks()[0].startswith('pose(target_len=128): positions up to 127')

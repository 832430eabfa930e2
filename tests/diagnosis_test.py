"""Why a curve broke: what is held is held exactly, what is counted is what a dense attention says, and 1x is 1x."""

import dataclasses
import functools
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import posenc
from evaluation import diagnosis, events, figures, nulls, report
from evaluation.diagnosis import NONE, Candidate, Diagnosis, candidates
from evaluation.score import Scorer
from models import attention
from models.lm import LM, ModelConfig
from models.tiles import MASKED
from report_test import make  # noqa: F401, a fixture
from training.devices import make_mesh

L, LENGTH, HEADS, WIDTH = 16, 40, 4, 8
SHAPES = {'heads': HEADS, 'head_dim': WIDTH, 'd_model': 32, 'train_len': L}


def scheme_of(text):
  return posenc.build(text, rngs=nnx.Rngs(0), **SHAPES)


def vectors(length=LENGTH, kv=2):
  keys = jax.random.split(jax.random.key(0), 3)
  q = jax.random.normal(keys[0], (2, length, HEADS, WIDTH))
  k, v = (jax.random.normal(key, (2, length, kv, WIDTH)) for key in keys[1:])
  return q, k, v


# Pairs.


def test_candidates_split_the_pairs_as_training_did():
  """At 16 tokens base 10000 and width 8: theta = 1, 0.1, 0.01, 0.001, of which one completes a turn."""
  found = candidates(['rope', 'nope'], [scheme_of('rope'), scheme_of('nope')], L - 1)
  sets = {c.which: c.pairs for c in found if c.what == 'held' and c.which != 'pair'}
  assert found[0] == NONE and sets == {'complete': (0,), 'incomplete': (1, 2, 3), 'all': (0, 1, 2, 3)}
  assert [c.pairs for c in found if (c.what, c.which) == ('pi', 'pair')] == [(0,), (1,), (2,), (3,)]
  assert candidates(['alibi'], [scheme_of('alibi')], L - 1) == [NONE]
  cut = scheme_of('rope(cut="incomplete")')
  assert {p for c in candidates(['rope'], [cut], L - 1) for p in c.pairs} == {0}  # the others stand still


def logits_by_hand(scheme, q, k, pairs, what):
  """[B, N, T, T] in float64, pair by pair, from the definition: angles of these pairs kept within those of training."""
  q, k = (np.asarray(x, np.float64) for x in (q, jnp.repeat(k, HEADS // k.shape[2], 2)))
  half, theta = WIDTH // 2, scheme.inv_freq_P
  d = np.arange(LENGTH)[:, None] - np.arange(LENGTH)[None]
  out = np.zeros((2, HEADS, LENGTH, LENGTH))
  for p in range(half):
    angle = theta[p] * d
    if p in pairs:
      angle = theta[p] * np.minimum(d, L - 1) if what == 'held' else angle * L / LENGTH
    qa, qb, ka, kb = q[..., p], q[..., half + p], k[..., p], k[..., half + p]

    def dot(x, y):
      return np.einsum('BtN,BsN->BNts', x, y)

    # The real and the imaginary part of q conj(k), turned by the angle.
    out += (dot(qa, ka) + dot(qb, kb)) * np.cos(angle) + (dot(qa, kb) - dot(qb, ka)) * np.sin(angle)
  return out * WIDTH**-0.5


def attended(logits, v):
  visible = np.tril(np.ones((LENGTH, LENGTH), bool))
  p = jax.nn.softmax(jnp.where(visible, logits, -np.inf), -1)
  return np.einsum('BNts,BsNH->BtNH', p, jnp.repeat(v, HEADS // v.shape[2], 2))


@pytest.mark.parametrize('pairs', [(), (0,), (2,), (1, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize('what', ['held', 'pi'])
def test_the_angle_of_these_pairs_and_of_no_other_is_kept_within_training(what, pairs):
  scheme, (q, k, v) = scheme_of('rope'), vectors()
  made = [posenc.positions('none', scheme, L, LENGTH)]
  (pos,) = diagnosis.positions(Candidate('rope', what, 'all', pairs), ['rope'], [scheme], made, L - 1, LENGTH)
  want = attended(logits_by_hand(scheme, q, k, pairs, what), v)
  for tile in (8, LENGTH):
    np.testing.assert_allclose(attention.attend(q, k, v, scheme, pos, tile=tile), want, atol=2e-5)
  if not pairs:
    plain_o = attention.attend(q, k, v, scheme, made[0], tile=8)
    np.testing.assert_array_equal(attention.attend(q, k, v, scheme, pos, tile=8), plain_o)


def test_all_pairs_held_is_rerope_at_the_farthest_distance_of_training():
  scheme, (q, k, v) = scheme_of('rope'), vectors()
  made = [posenc.positions('none', scheme, L, LENGTH)]
  (pos,) = diagnosis.positions(Candidate('rope', 'held', 'all', (0, 1, 2, 3)), ['rope'], [scheme], made, L - 1, LENGTH)
  want = attention.attend(q, k, v, scheme, posenc.positions(f'rerope(w={L - 1})', scheme, L, LENGTH))
  np.testing.assert_allclose(attention.attend(q, k, v, scheme, pos), want, atol=2e-6)


@pytest.mark.parametrize('text', ['xpos', 'pope', 'fox(rope=True)', 'rope(fraction=0.5, pairing="interleaved")'])
def test_other_schemes_that_rotate_hold_only_the_angle(text):
  """Between any two tokens the far map has the angle of distance L - 1; xPos still decays with the distance."""
  scheme, (q, k, _) = scheme_of(text), vectors()
  largest = L - 1
  made = posenc.positions('none', scheme, L, LENGTH)
  every = tuple(range(len(scheme.inv_freq_P)))
  (pos,) = diagnosis.positions(Candidate(text, 'held', 'all', every), [text], [scheme], [made], largest, LENGTH)

  def dots(mine, at=None):
    pos_q, pos_k = (mine, mine) if at is None else mine.afar()
    rotated_q, _ = scheme.rotate(q, k, pos_q)
    _, rotated_k = scheme.rotate(q, k, pos_k)
    return jnp.einsum('BtNR,BsNR->BNts', rotated_q, jnp.repeat(rotated_k, 2, 2))

  # All pairs at once: the angle of distance L - 1 between any two tokens, by turning queries alone at one position.
  still = dataclasses.replace(made, inv_freq_P=0 * made.inv_freq_P)
  turned = dataclasses.replace(still, phase_P=jnp.asarray(scheme.inv_freq_P * largest, jnp.float32))
  q_turned, _ = scheme.rotate(q, k, turned)
  _, k_still = scheme.rotate(q, k, still)
  want = jnp.einsum('BtNR,BsNR->BNts', q_turned, jnp.repeat(k_still, 2, 2))
  np.testing.assert_allclose(dots(pos, at='far'), want, rtol=1e-5, atol=1e-5)
  # And that is the angle that training knows: token L - 1 and token 0, but for xPos's decay.
  if text != 'xpos':
    np.testing.assert_allclose(want[..., largest, 0], dots(made)[..., largest, 0], rtol=1e-4, atol=1e-5)


def test_what_has_no_distance_to_hold_is_refused():
  scheme = scheme_of('rope')
  held = Candidate('rope', 'held', 'all', (0, 1, 2, 3))
  for method in ('rerope', 'longrope(long=(1.0, 1.0, 2.0, 4.0), onset=4)'):
    made = [posenc.positions(method, scheme, L, LENGTH)]
    with pytest.raises(posenc.Unsupported, match='of the distance alone'):
      diagnosis.positions(held, ['rope'], [scheme], made, L - 1, LENGTH)
  made = [posenc.positions('ntk', scheme, L, LENGTH)]
  with pytest.raises(posenc.Unsupported, match='at several distances'):
    diagnosis.positions(held, ['rope'], [scheme], made, L - 1, LENGTH)
  one = Candidate('rope', 'held', 'pair', (1,))
  (pos,) = diagnosis.positions(one, ['rope'], [scheme], made, L - 1, LENGTH)
  first = int(pos.far.threshold)  # the first distance whose angle is new
  limit, freq = 0.1 * (L - 1), float(made[0].inv_freq_P[1])
  assert freq * (first - 1) <= limit < freq * first


# Attention.


def dense(scheme, q, k, pos, state, last):
  """Logits of every pair at once, as the scheme scores them, and what follows from them in float64."""
  scale_TN = scheme.query_scale(pos)
  rotated_q, rotated_k = scheme.rotate(q, k, pos)
  rotated_q = rotated_q * scale_TN[:, :, None]
  rotated_k = rotated_k * pos.key_scale_T[:, None, None]
  if pos.far is not None:
    raise NotImplementedError
  wide = jnp.repeat(rotated_k, HEADS // k.shape[2], 2)
  d = jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH)[None]
  visible = (d >= 0) & ((d < pos.window_T[:, None]) | (jnp.arange(LENGTH) < pos.sinks))
  masked = jnp.where(visible, jnp.einsum('BtNR,BsNR->BNts', rotated_q, wide), MASKED)
  carry = scheme.init_carry(rotated_q)
  logits, _ = scheme.score(masked, rotated_q, rotated_k, pos.at_T, pos.at_T, state, state, carry)
  x = np.where(visible, np.asarray(logits, np.float64), -np.inf)[:, :, -last:]
  p = np.exp(x - x.max(-1, keepdims=True))
  p /= p.sum(-1, keepdims=True)
  with np.errstate(divide='ignore', invalid='ignore'):
    entropy = -np.where(p > 0, p * np.log(p), 0).sum(-1)
  return entropy, x.max(-1), p[..., 0], np.where(np.asarray(d)[-last:] >= L, p, 0).sum(-1)


@pytest.mark.parametrize(
  'text, method',
  [(text, 'none') for text in ('rope', 'nope(ssmax=True)', 'alibi', 't5', 'fire', 'shaw', 'cope', 'fox', 'dape')]
  + [('rope', 'sink_window(window=12)'), ('cope', 'sliding_window(window=12)'), ('xpos', 'logn')],
)
def test_statistics_are_those_of_a_dense_attention(text, method):
  scheme, (q, k, _) = scheme_of(text), vectors()
  pos = posenc.positions(method, scheme, L, LENGTH)
  state = scheme.token_state(jax.random.normal(jax.random.key(3), (2, LENGTH, 32)), pos)
  want = dense(scheme, q, k, pos, state, 6)
  for tile in (8, LENGTH):
    found = attention.statistics(q, k, scheme, pos, state, last=6, beyond=L, tile=tile)
    for name, x, y in zip(diagnosis.STATISTICS, found, want):
      np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6, err_msg=f'{name}, tile {tile}')
  assert float(found.entropy.max()) > 0.5 and (method != 'none' or float(found.beyond.max()) > 0)


def test_statistics_read_the_second_map_and_large_logits():
  """Against attention itself: what values of 0 and 1 come out as is the mass; with huge logits too."""
  scheme, (q, k, _) = scheme_of('rope'), vectors()
  pos = posenc.positions('rerope(w=6)', scheme, L, LENGTH)
  found = attention.statistics(30 * q, k, scheme, pos, last=4, beyond=L, tile=8)
  v = jnp.broadcast_to((jnp.arange(LENGTH) == 0)[None, :, None, None], k.shape).astype(jnp.float32)
  mass = jnp.moveaxis(attention.attend(30 * q, k, v, scheme, pos)[:, -4:, :, 0], 1, 2)
  np.testing.assert_allclose(found.first, mass, atol=1e-6)
  assert (
    float(found.largest.max()) > 50 and np.isfinite(found.entropy).all() and (np.asarray(found.entropy) > -1e-4).all()
  )


def test_memory_of_statistics_is_that_of_a_tile():
  """No array is as long twice over as the sequence, whatever the length."""
  scheme, length = scheme_of('alibi'), 4096
  shapes = [jax.ShapeDtypeStruct((1, length, n, WIDTH), jnp.float32) for n in (HEADS, 2)]
  pos = posenc.positions('none', scheme, L, length)
  run = functools.partial(attention.statistics, scheme=scheme, pos=pos, last=16, beyond=L, tile=256)
  compiled = jax.jit(run).lower(*shapes).compile()
  assert compiled.memory_analysis().temp_size_in_bytes < 4 * length * length


def test_layers_of_a_model_are_in_order():
  """Two slots, two repeats: each layer's statistics are those of that layer, wherever it is in the scan."""
  cfg = ModelConfig(layers=4, d_model=16, heads=2)
  lm = LM(cfg, ('alibi', 'nope(window=4)'), vocab_size=11, train_len=L, rngs=nnx.Rngs(0))
  tokens = jnp.arange(LENGTH)[None] % 11
  pos = posenc.positions('none', list(lm.schemes), L, LENGTH)
  found = lm.statistics(tokens, pos, last=8, beyond=4)
  assert found.entropy.shape == (4, 1, 2, 8)
  beyond = np.asarray(found.beyond).max((1, 2, 3))
  assert (beyond[[0, 2]] > 0.1).all() and (beyond[[1, 3]] == 0).all()  # a window of 4 has nothing beyond
  x_BTD = lm.schemes[0].embed(lm.embedding(tokens), pos[0])
  for layer in range(4):
    slot, repeat = layer % 2, layer // 2
    graphdef, state = nnx.split(lm.slots[slot])
    block = nnx.merge(graphdef, jax.tree.map(lambda a, i=repeat: a[i], state))
    want = block.statistics(x_BTD, lm.schemes[slot], pos[slot], 0, 8, 4)
    jax.tree.map(lambda x, y, i=layer: np.testing.assert_allclose(x[i], y, rtol=1e-4, atol=1e-5), found, want)
    x_BTD = block(x_BTD, lm.schemes[slot], pos[slot], 0, None)
  assert (
    not np.allclose(found.entropy[0], found.entropy[2]) and (np.asarray(found.entropy[1]) <= math.log(4) + 1e-6).all()
  )


# The whole of it.


@pytest.fixture(scope='module')
def diagnosed():
  """Of a random model: its logits mean something by their size alone."""
  plan = nulls.synthetic_plan(train_len=L, max_multiple=4)
  text = 'rope'
  cfg = ModelConfig(layers=2, d_model=32, heads=2, head_dim=8)
  lm = LM(cfg, (text,), vocab_size=257, train_len=L, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(lm)
  params = jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a, params)
  mesh = make_mesh(1, (1, 1, 1))
  scorer = Scorer(graphdef, params, mesh, 2048)
  schemes = list(lm.schemes)
  rule = posenc.build_rule('sequential', schemes, train_len=L, layers=2)
  facts = {'run': text, 'checkpoint_step': 100, 'seed': 0}
  found = Diagnosis(plan, [text], schemes, 'none', L, rule, 1, facts)
  said = []
  bar = type('Bar', (), {'update': lambda self, n: None})()
  pairs = [p for part in found.pairs((32, 64), lambda: scorer, bar, said.append) for p in part]
  heads = [p for part in found.attention((16, 64), graphdef, params, mesh, 2048, bar) for p in part]
  assert not said
  return pairs, heads, scorer, plan


def test_one_program_a_length_serves_every_candidate(diagnosed):
  pairs, _, scorer, _ = diagnosed
  assert {p['length'] for p in pairs} == {16, 32, 64}
  assert scorer.traces == 3 and len(pairs) == 3 * (1 + 2 * (4 + 3))


def test_nothing_is_recovered_at_1x_and_what_is_beyond_is_the_difference(diagnosed):
  pairs, _, scorer, plan = diagnosed
  for p in pairs:
    if p['length'] == L:
      assert p['recovered'] == p['damage'] == 0, p
  at = {(p['length'], diagnosis.line(p)): p for p in pairs}
  none = at[64, 'none']
  assert none['damage'] == pytest.approx(none['nll'] - at[16, 'none']['nll'])
  held, pi = at[64, 'rope held incomplete'], at[64, 'rope pi incomplete']
  assert held['recovered'] == pytest.approx(none['nll'] - held['nll']) and abs(held['recovered']) > 1e-4
  assert held['over_pi'] == pytest.approx(pi['nll'] - held['nll'])
  assert held['turns'] == pytest.approx([16 * t / 2 / math.pi for t in (0.1, 0.01, 0.001)])
  # `none` is the sweep's own number, and all pairs under pi are the method.
  schemes = [scheme_of('rope')]
  windows = [part.window for part in diagnosis.select(plan, 64, 1).parts]
  for name, method in (('none', 'none'), ('rope pi all', 'pi')):
    pos = posenc.positions(method, schemes, L, 64)
    nll = np.mean(scorer(plan, windows, [pos])[0], dtype=np.float64)
    assert at[64, name]['nll'] == pytest.approx(nll, abs=1e-5)


def test_points_of_attention(diagnosed):
  _, heads, _, _ = diagnosed
  assert len(heads) == 2 * 2 * 2
  for p in heads:
    assert 0 < p['entropy'] < math.log(p['length']) and p['largest'] <= p['largest_of_all']
    assert (p['beyond'] > 0) == (p['length'] > L) and 0 < p['first'] < 1


def test_what_is_written_is_merged_read_drawn_and_shown(diagnosed, make, tmp_path):  # noqa: F811
  pairs, heads, _, _ = diagnosed
  folder = make('a')
  for name, points in (('pairs', pairs), ('attention', heads)):
    path = folder / 'diagnosis' / f'{name}.jsonl'
    diagnosis.write(path, points[: len(points) // 2])
    again = diagnosis.write(path, points)
    assert again == diagnosis.read(path) and len(again) == len(points)
    other = [{**points[0], 'method': 'yarn'}]
    assert diagnosis.write(path, other) == diagnosis.read(path)[-1:]
    getattr(figures, name)(points).savefig(folder / 'diagnosis' / f'{name}.png')
  pictures = {name: folder / 'diagnosis' / f'{name}.png' for name in ('pairs', 'attention')}
  table = diagnosis.table(pairs)
  assert 'held incomplete' in table and 'more than by pi' in table
  events.write_diagnosis(folder / 'diagnosis' / 'tensorboard', 'rope none', pairs, heads, {'pairs': table}, pictures)
  read = EventAccumulator(str(folder / 'diagnosis' / 'tensorboard' / 'rope none'))
  read.Reload()
  assert [e.step for e in read.Scalars('entropy/layer_1_head_0')] == [16, 64]
  assert [e.step for e in read.Scalars('recovered/rope/held/pair_003')] == [16, 32, 64]
  assert set(read.Tags()['images']) == {'pairs', 'attention'}
  assert report.main([str(folder), f'--out={tmp_path / "out"}']) == 0
  page = (tmp_path / 'out' / 'report.html').read_text()
  value = next(p for p in pairs if p['length'] == 64 and diagnosis.line(p) == 'rope held incomplete')['recovered']
  assert 'Why it broke' in page and repr(value) in page and 'not diagnosed' not in page
  shutil.rmtree(folder / 'diagnosis')
  assert report.main([str(folder), f'--out={tmp_path / "out"}']) == 0
  assert 'not diagnosed' in (tmp_path / 'out' / 'report.html').read_text()

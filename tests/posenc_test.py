"""What must hold of schemes whatever the numbers, and numbers that people have got wrong."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from forms import FACTORED, FREQUENCY, ONE_OF_EACH, SHAPES, build, differs, refused, rope, same
from posenc.alibi import slopes
from posenc.base import distance, with_options
from posenc.fire import mlp, plain_mlp
from posenc.fox import split_cumsum
from posenc.t5 import buckets
from spec import SpecError, keywords


def test_learned_positions_end_with_their_table():
  """An index past the table would silently repeat its last row."""
  scheme = build('learned', d_model=8, train_len=64)
  for slots in (scheme, [build('nope'), scheme]):
    posenc.positions('none', slots, 64, 64)
    with refused(posenc.Unsupported, 'learned', '64', '65'):
      posenc.positions('none', slots, 64, 65)
  pos = posenc.positions('none', scheme, 64, 16)
  x = jnp.ones((2, 16, 8))
  np.testing.assert_array_equal(scheme.embed(x, pos), np.broadcast_to(1 + scheme.table[:16], (2, 16, 8)))
  past = scheme.embed(x, pos.replace(at_T=pos.at_T + 56))
  assert np.isfinite(past[:, :8]).all() and np.isnan(past[:, 8:]).all()


def test_learned_positions_between_rows():
  """Past the table its last row is the last token's, and the others lie between two; within it nothing changes."""
  plain, stretched = (build(f'learned{rest}', d_model=8, train_len=64) for rest in ('', '(oob="interpolate")'))
  x, table = jnp.ones((1, 64, 8)), np.asarray(plain.table[...])
  for length in (1, 63, 64):
    pos, want = (posenc.positions('none', scheme, 64, length) for scheme in (stretched, plain))
    same(pos, want)
    for scheme in (plain, stretched):
      np.testing.assert_array_equal(scheme.embed(x[:, :length], pos)[0], 1 + table[:length])
  for length in (65, 127, 2048):
    pos = posenc.positions('none', stretched, 64, length)
    assert pos.at_T[0] == 0 and pos.at_T[-1] == 63
    added = np.asarray(stretched.embed(jnp.zeros((1, length, 8)), pos)[0])
    at = np.arange(length) * 63 / (length - 1)
    want = np.stack([np.interp(at, np.arange(64), column) for column in table.T], -1)
    np.testing.assert_allclose(added, want, atol=2e-6)
    np.testing.assert_array_equal(added[[0, -1]], table[[0, -1]])
  with refused(posenc.Unsupported, 'learned', '64', '65'):
    posenc.positions('none', plain, 64, 65)
  assert posenc.follows_length('none', stretched, 64) and not posenc.follows_length('none', plain, 64)


def test_learned_positions_beyond_the_training_length():
  """A longer table is there to be trained at larger positions; with plain ones its end is noise: a remark."""
  scheme = build('learned(rows=200)', d_model=8, train_len=128)
  assert scheme.table.shape == (200, 8)
  pos = posenc.positions('none', scheme, 128, 200)
  np.testing.assert_array_equal(scheme.embed(jnp.zeros((1, 200, 8)), pos)[0], scheme.table[...])
  with refused(posenc.Unsupported, 'learned', '200', '201'):
    posenc.positions('none', scheme, 128, 201)
  (line,) = posenc.remarks((), [scheme], 128)
  assert 'learned(rows=200)' in line and 'rows 128..199 are never trained' in line
  for text in ('learned', 'learned(rows=128)', 'learned(oob="interpolate")'):
    assert posenc.remarks((), [build(text)], 128) == []


@pytest.mark.parametrize(
  'text, words',
  [
    ('ropee', ["scheme = 'ropee'", "did you mean 'rope'?", 'sinusoidal']),
    ('rope(bas=2.0)', ['rope', 'bas = 2.0', "did you mean 'base'?"]),
    ('rope(base=1.0)', ['rope', 'base = 1.0', 'above 1']),
    ('rope(base="1e4")', ['rope', "base = '1e4'", 'a number']),
    ('rope(pairing="half")', ['rope', "pairing = 'half'", 'half_split', 'interleaved']),
    ('rope(fraction=0.3)', ['rope', 'fraction = 0.3', 'even', 'head_dim = 32', 'it is 9']),
    ('rope(fraction=0.05)', ['rope', 'fraction = 0.05', 'at least 2', 'it is 1']),
    ('rope(fraction=1.5)', ['rope', 'fraction = 1.5', '(0, 1]']),
    ('rope(proportion=-0.5)', ['rope', 'proportion = -0.5', '0 to 1']),
    ('rope(cut="incomplet")', ['rope', "cut = 'incomplet'", "did you mean 'incomplete'?", 'none']),
    ('xpos(base=1.0)', ['xpos', 'base = 1.0', 'above 1']),
    ('xpos(scale_base=0.0)', ['xpos', 'scale_base = 0.0', 'above 0']),
    ('xpos(scale_base=1.0)', ['xpos', 'scale_base = 1.0', '102 tokens', 'length of 128']),
    ('xpos(bca=1)', ['xpos', 'bca = 1', 'True or False']),
    ('xpos(fraction=0.5)', ['xpos', 'fraction = 0.5', 'scale_base']),
    ('rope2d', ['rope2d', 'needs the argument width']),
    ('rope2d(width=0)', ['rope2d', 'width = 0', 'at least 1']),
    ('rope2d(width=2.0)', ['rope2d', 'width = 2.0', 'whole']),
    ('rope2d(width=8, order="wh")', ['rope2d', "order = 'wh'", 'hw', 'xy']),
    ('rope2d(width=8, freqs="share")', ['rope2d', "did you mean 'shared'?", 'alternating']),
    ('rope2d(width=8, pairing="half")', ['rope2d', "pairing = 'half'", 'half_split']),
    ('rope2d(width=8, base=0.5)', ['rope2d', 'base = 0.5', 'above 1']),
    ('learned(oob="clamp")', ['learned', "oob = 'clamp'", 'error', 'interpolate']),
    ('learned(rows=127)', ['learned', 'rows = 127', 'training length, 128']),
    ('learned(rows=-1)', ['learned', 'rows = -1', 'at least the training length']),
    ('sinusoidal(layout="concatt")', ['sinusoidal', "layout = 'concatt'", "did you mean 'concat'?"]),
    ('sinusoidal(exponent="t2")', ['sinusoidal', "exponent = 't2'", 'paper', 't2t']),
    ('sinusoidal(embed_scale=1)', ['sinusoidal', 'embed_scale = 1', 'True or False']),
    ('t5(num_buckets=31)', ['t5', 'num_buckets = 31', 'even']),
    ('t5(num_buckets=0)', ['t5', 'num_buckets = 0', 'even']),
    ('t5(num_buckets=32.0)', ['t5', 'num_buckets = 32.0', 'whole']),
    ('t5(max_distance=128.5)', ['t5', 'max_distance = 128.5', 'whole']),
    ('t5(max_distance=16)', ['t5', 'max_distance = 16', 'more than']),
    ('fire(init_len=-1)', ['fire', 'init_len = -1', 'at least 0', 'None']),
    ('fire(init_len="64")', ['fire', "init_len = '64'", 'at least 0']),
    ('fire(init_len=True)', ['fire', 'init_len = True', 'at least 0']),
    ('fire(width=0)', ['fire', 'width = 0', 'at least 1']),
    ('fire(per_layer=1)', ['fire', 'per_layer = 1', 'True or False']),
    ('sandwich(d=15)', ['sandwich', 'd = 15', 'even']),
    ('sandwich(d=0)', ['sandwich', 'd = 0', 'even']),
    ('sandwich(first_index=2)', ['sandwich', 'first_index = 2', '0 or 1']),
    ('shaw(clip=0)', ['shaw', 'clip = 0', 'at least 1']),
    ('shaw(clip=2.5)', ['shaw', 'clip = 2.5', 'whole']),
    ('cope(npos_max=1)', ['cope', 'npos_max = 1', 'at least 2']),
    ('cope(gate_scale=0)', ['cope', 'gate_scale = 0', 'above 0']),
    ('cope(gate_scale=-1.0)', ['cope', 'gate_scale = -1.0', 'above 0']),
    ('kerple_log(r1=1.0)', ['kerple_log', 'r1 = 1.0', 'allowed: window, ssmax']),
    ('fox(rope=True, base=0.5)', ['fox', 'base = 0.5', 'above 1']),
    ('fox(decay_time=(2.0, 0.0))', ['fox', 'decay_time = (2.0, 0.0)', 'above 0', 'None']),
    ('fox(decay_time=64.0)', ['fox', 'decay_time = 64.0', 'two numbers']),
    ('fox(rope=1)', ['fox', 'rope = 1', 'True or False']),
    ('pope(base=1.0)', ['pope', 'base = 1.0', 'above 1']),
    ('pope(phase_init="zero")', ['pope', "phase_init = 'zero'", "did you mean 'zeros'?", 'uniform']),
    ('dape(bias="kerple")', ['dape', "bias = 'kerple'", "did you mean 'kerple_log'?", 'fire']),
    ('dape(width=0)', ['dape', 'width = 0', 'at least 1']),
    ('kerple', ["scheme = 'kerple'", "did you mean 'kerple_log'?"]),
    ('nope(base=2.0)', ['nope', 'base = 2.0', 'allowed: window, ssmax']),
    ('alibi+rope', ['alibi+rope', 'single']),
    ('rope@alibi', ['rope@alibi', 'single']),
  ],
)
def test_refused_schemes(text, words):
  with refused(SpecError, *words):
    build(text)


def test_refused_shapes():
  for scheme in ('rope', 'xpos'):
    with refused(SpecError, scheme, 'head_dim = 31', 'even'):
      build(scheme, head_dim=31)
  with refused(SpecError, 'rope2d', 'head_dim = 30', 'multiple of 4'):
    build('rope2d(width=8)', head_dim=30)
  for method in ('ntk', 'dynamic_ntk', 'dynamic_ntk_hf'):
    with refused(posenc.Unsupported, method, 'd - 2'):
      posenc.positions(method, rope(2), 128, 256)
  for bad in (0, -1, 1.0, True, None):
    with refused(SpecError, 'eval_len', repr(bad), 'at least 1'):
      posenc.positions('none', rope(), 128, bad)
    with refused(SpecError, 'train_len', repr(bad), 'at least 1'):
      posenc.positions('none', rope(), bad, 128)
  posenc.positions('none', rope(), np.int64(128), np.int32(256))


# Every scheme with every method.


@pytest.mark.parametrize('scheme', ONE_OF_EACH)
def test_positions_are_finite_float32_of_one_structure(scheme):
  """One compiled program per length serves every method: same tree, shapes and types."""
  slot = build(scheme, train_len=4096)
  for times in (1, 2, 4, 8, 16, 32):
    plain = posenc.positions('none', slot, 128, 128 * times)
    shapes = jax.tree.map(lambda a: (a.shape, a.dtype), plain)
    assert plain.at_T.shape == plain.logit_scale_T.shape == plain.key_scale_T.shape == (128 * times,)
    assert plain.inv_freq_P.shape == (slot.rot // 2,) and plain.onset.shape == plain.sinks.shape == ()
    assert plain.window_T.shape == (128 * times,)
    for method in ('none', 'logn', *FREQUENCY, *(f'{name}(factor=8)' for name in FACTORED)):
      try:
        pos = posenc.positions(method, slot, 128, 128 * times)
      except posenc.Unsupported:
        assert not slot.rot
        continue
      assert jax.tree.map(lambda a: (a.shape, a.dtype), pos) == shapes
      assert all(a.dtype == jnp.float32 for a in jax.tree.leaves(pos))
      assert all(np.isfinite(a).all() for a in jax.tree.leaves(pos.replace(window_T=jnp.zeros(()))))
      assert (pos.window_T == np.inf).all() and pos.sinks == pos.onset == 0 and pos.far is None
      np.testing.assert_array_equal(pos.at_T, np.arange(128 * times))


@pytest.mark.parametrize('scheme', ONE_OF_EACH)
def test_state_holds_parameters_only(scheme):
  """NNX would make any array attribute a state, and the optimiser would train it."""
  slot = build(scheme)
  shapes = {
    'learned': {'table': (128, 128)},
    't5': {'table': (32, 4)},
    'kerple_log': {'r1': (4,), 'r2': (4,)},
    'kerple_power': {'r1': (4,), 'r2': (4,)},
    'fire': {'w1': (32,), 'b1': (32,), 'w2': (32, 4), 'c': (), 'l_mult': ()},
    'shaw': {'key_table': (17, 32), 'value_table': (17, 32)},
    'cope': {'table': (64, 32)},
    'fox': {'w': (128, 4), 'b': (4,)},
    'pope': {'phase': (4, 32)},
    'dape': {'bias.r1': (4,), 'bias.r2': (4,), 'w1': (8, 32), 'b1': (32,), 'w2': (32, 4)},
  }
  state = nnx.to_flat_state(nnx.state(slot))
  assert {'.'.join(path): v[...].shape for path, v in state} == shapes.get(scheme, {})
  assert all(isinstance(v, posenc.PosParam) for _, v in state)
  assert not nnx.to_flat_state(nnx.state(slot, nnx.Not(posenc.PosParam)))
  assert slot.name == scheme and slot.relative == (scheme not in ('sinusoidal', 'learned', 'fire'))
  assert slot.per_layer == (scheme in ('fire', 'shaw', 'cope', 'fox', 'dape'))
  assert slot.q_scale == 32**-0.5


@pytest.mark.parametrize('scheme', ONE_OF_EACH)
def test_hooks_that_a_scheme_does_not_need_are_the_identity(scheme):
  slot = build(scheme, heads=2, head_dim=8, d_model=16)
  pos = posenc.positions('none', slot, 128, 4)
  x_ = np.random.default_rng(0).normal(size=(1, 4, 16)).astype(np.float32)
  x, q, k = (jnp.asarray(a) for a in (x_, x_.reshape(1, 4, 2, 8), x_[..., :8].reshape(1, 4, 1, 8)))
  at, logits = pos.at_T, jnp.zeros((1, 2, 4, 4))
  assert (scheme in ('sinusoidal', 'learned')) == differs(slot.embed(x, pos), x)
  turned = slot.rotate(q, k, pos)
  width = 16 if scheme == 'pope' else 8
  assert [a.shape for a in turned] == [(1, 4, 2, width), (1, 4, 1, width)]
  assert (scheme in ('rope', 'pope')) == differs(turned[0][..., :8], q) == differs(turned[1][..., :8], k)
  start = slot.init_carry(q)
  if scheme == 'cope':
    assert start.shape == (1, 2, 4) and not start.any()
    slot.table[...] += 1  # it starts at 0
  else:
    assert start == ()
  state = slot.token_state(x, pos)
  assert [a.shape for a in jax.tree.leaves(state)] == ([(1, 4, 2)] * 2 if scheme == 'fox' else [])
  scored, carry = slot.score(logits, q, k, at, at, state, state, start)
  assert (scheme not in ('nope', 'sinusoidal', 'learned', 'rope', 'pope')) == differs(scored, logits)
  assert jax.tree.structure(carry) == jax.tree.structure(start)
  assert (slot.values(logits, at, at) is None) == (scheme != 'shaw')


def test_types_of_activations_are_kept():
  """Angles and waves are formed in float32, whatever the activations are."""
  for scheme in ('rope', 'pope', 'sinusoidal', 'learned'):
    slot = build(scheme, heads=1, head_dim=16, d_model=16, train_len=512)
    pos = posenc.positions('none', slot, 512, 512)
    shape = (1, 512, 1, 16) if slot.rot else (1, 512, 16)
    low, full = (jnp.asarray(np.ones(shape), dtype) for dtype in (jnp.bfloat16, jnp.float32))
    low, full = (slot.rotate(x, x, pos)[0] if slot.rot else slot.embed(x, pos) for x in (low, full))
    assert low.dtype == jnp.bfloat16 and full.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(low, np.float32), full, rtol=2**-8, atol=1e-6)


def test_the_example_of_the_package():
  """The lines that the package shows a newcomer run as they stand."""
  lines = [line for line in posenc.__doc__.splitlines() if line.startswith('  ') and ' = posenc.' in line]
  assert len(lines) == 2
  names = {'posenc': posenc, 'nnx': nnx}
  exec('\n'.join(line.strip() for line in lines), names)
  assert names['scheme'].name == 'rope' and names['pos'].at_T.shape == (1024,)
  assert float(names['pos'].logit_scale_T[-1]) > 1.459


# Schemes.


@pytest.mark.parametrize('method', ['none', *(f'{name}(factor=8)' for name in FACTORED)])
@pytest.mark.parametrize('pairing', ['half_split', 'interleaved'])
def test_rope_depends_on_the_distance_alone(method, pairing):
  """The score of (q at p + 7, k at p) is the same for every p, and right: angles in float64."""
  scheme = build(f'rope(pairing={pairing!r})', heads=1)
  pos = posenc.positions(method, scheme, 128, 4096)
  rng = np.random.default_rng(0)
  q, k = rng.normal(size=(2, 32))
  far = np.array([0, 100, 1000, 4000])
  turned = [
    np.asarray(scheme.rotate(*[jnp.asarray(x, jnp.float32).reshape(1, 1, 1, 32).repeat(4, 1)] * 2, at)[0])
    for x, at in ((q, pos.replace(at_T=jnp.float32(far + 7))), (k, pos.replace(at_T=jnp.float32(far))))
  ]
  scores = (turned[0] * turned[1]).sum((0, 2, 3))
  pair = (slice(16), slice(16, 32)) if pairing == 'half_split' else (slice(0, 32, 2), slice(1, 32, 2))
  complex_q, complex_k = (x[pair[0]] + 1j * x[pair[1]] for x in (q, k))
  turn = np.exp(7j * np.asarray(pos.inv_freq_P, np.float64))
  np.testing.assert_allclose(scores, (complex_q * turn * complex_k.conj()).real.sum(), atol=1e-3)
  assert abs(scores[0] - q @ k) > 0.1


@pytest.mark.parametrize('method', ['none', *FREQUENCY])
def test_rotations_do_not_end_with_a_table(method):
  """A cos table sized for the training length would repeat its last row or crash. Lengths are kept."""
  scheme = build('rope', heads=1)
  pos = posenc.positions(method, scheme, 128, 4096)
  unit = jnp.concatenate([jnp.ones((1, 4096, 1, 16)), jnp.zeros((1, 4096, 1, 16))], -1)
  turned = np.asarray(scheme.rotate(unit, unit, pos)[0])[0, :, 0]
  angle = np.arange(4096)[:, None] * np.asarray(pos.inv_freq_P, np.float64)
  np.testing.assert_allclose(turned, np.concatenate([np.cos(angle), np.sin(angle)], -1), atol=4096 * 2**-24)
  assert (abs(turned[128:] - turned[127]).max(-1) > 1e-3).all()


def test_tokens_before_the_onset_keep_the_trained_frequencies():
  scheme = build('rope', heads=1)
  plain, scaled = (posenc.positions(m, scheme, 128, 16) for m in ('none', 'pi(factor=8)'))
  x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 16, 1, 32)), jnp.float32)
  onset = scaled.replace(onset=jnp.float32(5))
  a, b, mixed = (np.asarray(scheme.rotate(x, x, pos)[0]) for pos in (plain, scaled, onset))
  np.testing.assert_array_equal(mixed[:, :5], a[:, :5])
  np.testing.assert_array_equal(mixed[:, 5:], b[:, 5:])
  assert (a[:, 1:] != b[:, 1:]).any(-1).all()


# Less of a rotation: some channels, some pairs, none.

PARTS = ('fraction=0.5', 'proportion=0.5', 'proportion=0.25, fraction=0.5', 'cut="incomplete"')


def vectors(length=64, width=32, seed=0):
  shape = (2, 1, length, 1, width)
  return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def scores(scheme, pos, q, k):
  """Of the first head, [T, T] in float64."""
  q, k = (np.asarray(x, np.float64)[0, :, 0] for x in scheme.rotate(q, k, pos))
  return q @ k.T


@pytest.mark.parametrize('pairing', ['half_split', 'interleaved'])
def test_p_rope_lies_between_nope_and_rope(pairing):
  """A proportion of 1 is RoPE and one of 0 NoPE, to the last bit; in between it is neither."""
  x = vectors()
  out = {}
  for p in ('0.0', '0.5', '1.0'):
    scheme = build(f'rope(pairing={pairing!r}, proportion={p})', heads=1)
    out[p] = scheme.rotate(*x, posenc.positions('none', scheme, 128, 64))
  plain = build(f'rope(pairing={pairing!r})', heads=1)
  turned = plain.rotate(*x, posenc.positions('none', plain, 128, 64))
  for i in (0, 1):
    np.testing.assert_array_equal(out['0.0'][i], x[i])
    np.testing.assert_array_equal(out['1.0'][i], turned[i])
    assert differs(out['0.5'][i], x[i]) and differs(out['0.5'][i], turned[i])
  with refused(posenc.Unsupported, 'yarn', 'rope has no frequencies'):
    posenc.positions('yarn', build('rope(proportion=0.0)'), 128, 256)


@pytest.mark.parametrize('pairing', ['half_split', 'interleaved'])
def test_part_of_a_head_rotates(pairing):
  """`fraction` is a narrower RoPE on the first channels; `proportion` picks other channels in each pairing."""
  x = vectors()
  part, narrow = (
    build(f'rope(pairing={pairing!r}{rest})', heads=1, head_dim=width)
    for rest, width in ((', fraction=0.5', 32), ('', 16))
  )
  got, want = (
    s.rotate(*(a[..., : s.dims.head_dim] for a in x), posenc.positions('none', s, 128, 64)) for s in (part, narrow)
  )
  for a, b, whole in zip(got, want, x):
    np.testing.assert_array_equal(a[..., :16], b)
    np.testing.assert_array_equal(a[..., 16:], whole[..., 16:])
  still = {'half_split': [*range(8, 16), *range(24, 32)], 'interleaved': [*range(16, 32)]}[pairing]
  scheme = build(f'rope(pairing={pairing!r}, proportion=0.5)', heads=1)
  turned = scheme.rotate(*x, posenc.positions('none', scheme, 128, 64))[0]
  unmoved = (np.asarray(turned) == x[0]).all((0, 1, 2))
  np.testing.assert_array_equal(np.flatnonzero(unmoved), still)


@pytest.mark.parametrize('width, base, train_len', SHAPES)
def test_hope_cuts_the_pairs_that_never_complete_a_turn(width, base, train_len):
  """Beyond the training length no angle is new: that is what the cut is for, and there is nothing to remark."""
  cut = build(f'rope(base={base!r}, cut="incomplete")', head_dim=width, train_len=train_len)
  plain = rope(width, base, train_len)
  turns = plain.inv_freq_P * train_len / (2 * np.pi)
  np.testing.assert_array_equal(cut.inv_freq_P, np.where(turns >= 1, plain.inv_freq_P, 0))
  assert 0 < (cut.inv_freq_P > 0).sum() < width // 2
  assert cut.remarks() == [] and plain.remarks()
  assert '2 of 8 frequency pairs' in build('rope(proportion=0.5)').remarks()[0]


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('method', [*FREQUENCY, *(f'{name}(factor=3)' for name in FACTORED), 'logn'])
def test_a_pair_without_a_frequency_never_gets_one(method, part):
  """Whatever a method makes of the others, at any length and factor. A base raised to a power would forget it."""
  scheme = build(f'rope({part})', train_len=64)
  zero = scheme.inv_freq_P == 0
  assert zero.any() == (part != 'fraction=0.5') and len(zero) == (8 if 'fraction' in part else 16)
  for times in (1, 2, 32):
    pos = posenc.positions(method, scheme, 64, 64 * times)
    np.testing.assert_array_equal(np.asarray(pos.inv_freq_P) == 0, zero)


# xPos.


def xpos(rest='', **kwargs):
  return build(f'xpos(scale_base=64.0{rest})', heads=1, **kwargs)


@pytest.mark.parametrize('method', ['none', 'pi(factor=8)', 'yarn(factor=8)'])
def test_xpos_decays_with_the_distance_alone(method):
  """Pair by pair it is RoPE's score times zeta_p**(distance / scale_base), wherever the two stand."""
  scheme, plain = xpos(), build('rope', heads=1)
  (q, k), pos = vectors(), posenc.positions(method, scheme, 128, 64)
  i, j = np.tril_indices(64)
  want = np.zeros((64, 64))
  for p in range(16):
    keep = jnp.asarray(np.arange(32) % 16 == p, jnp.float32)
    # Without its decay the pair is RoPE's; with it the fastest, of zeta 0.286, decays fastest.
    want[i, j] += (
      scores(plain, pos, q * keep, k) * scheme.zeta_P[p] ** (np.subtract.outer(*[np.arange(64)] * 2) / 64)
    )[i, j]
  np.testing.assert_allclose(scores(scheme, pos, q, k)[i, j], want[i, j], atol=1e-4)
  np.testing.assert_allclose(scheme.zeta_P[[0, -1]], [0.4 / 1.4, (30 / 32 + 0.4) / 1.4], rtol=1e-12)
  shifted = scores(scheme, pos.replace(at_T=pos.at_T + 7), q, k)
  np.testing.assert_allclose(shifted[i, j], scores(scheme, pos, q, k)[i, j], atol=1e-4)


def test_xpos_has_one_centre_under_two_position_maps():
  """Queries and keys rotated in two calls, with unlike positions: the distance between the maps is what counts."""
  scheme, (q, k) = xpos(), vectors()
  pos = posenc.positions('none', scheme, 128, 64)
  at_q, at_k = pos.at_T // 4 + 100.0, pos.at_T // 4
  q_far = scheme.rotate(q, k, pos.replace(at_T=at_q))[0]
  k_far = scheme.rotate(q, k, pos.replace(at_T=at_k))[1]
  got = np.asarray(q_far[0, 40, 0], np.float64) @ np.asarray(k_far[0, 8, 0], np.float64)
  distance = int(at_q[40] - at_k[8])
  longer = posenc.positions('none', scheme, 128, 128)
  swapped = [jnp.zeros((1, 128, 1, 32)).at[:, n].set(x) for n, x in ((distance, q[:, 40]), (0, k[:, 8]))]
  np.testing.assert_allclose(got, scores(scheme, longer, *swapped)[distance, 0], rtol=1e-4)


def test_xpos_ends_where_float32_does():
  """Up to there queries and keys of any usual size have finite vectors and the right scores; then it says why."""
  scheme = build('xpos', heads=1)
  assert scheme.max_len == 52313
  with refused(posenc.Unsupported, 'xpos', '52313', '52314', 'float32', 'scale_base'):
    posenc.positions('none', scheme, 128, 52314)
  short = build('xpos(scale_base=4.0)', heads=1, train_len=64)
  pos = posenc.positions('none', short, 64, short.max_len)
  q, k = vectors(short.max_len)
  turned = short.rotate(1e3 * q, 1e-3 * k, pos)
  assert all(np.isfinite(x).all() and float(jnp.abs(x).max(-1).min()) > 1e-33 for x in turned)
  near = scores(short, pos, q, k)
  for n in (1, short.max_len // 2, short.max_len - 1):
    pair = [jnp.zeros((1, 64, 1, 32)).at[:, at].set(x) for at, x in ((1, q[:, n]), (0, k[:, n - 1]))]
    np.testing.assert_allclose(
      near[n, n - 1], scores(short, posenc.positions('none', short, 64, 64), *pair)[1, 0], rtol=1e-3
    )


def test_blockwise_causal_attention():
  """A query sees its block of the training length and the one before, whatever the length; a window narrows that."""
  for length in (5, 8, 31):
    pos, plain = (posenc.positions('none', xpos(rest, train_len=8), 8, length) for rest in (', bca=True', ''))
    i, j = np.arange(length)[:, None], np.arange(length)
    seen = (i - j >= 0) & (i - j < np.asarray(pos.window_T)[:, None])
    np.testing.assert_array_equal(seen, (i >= j) & (j // 8 >= i // 8 - 1))
    same(pos.replace(window_T=plain.window_T), plain)
  narrow = posenc.positions('none', xpos(', bca=True, window=11', train_len=8), 8, 31)
  np.testing.assert_array_equal(narrow.window_T, np.minimum(np.arange(31) % 8 + 9, 11))
  assert not posenc.follows_length('none', xpos(', bca=True', train_len=8), 8)


# A grid.


def test_rope2d_depends_on_the_two_differences():
  """Moved by whole rows, or by columns within the grid, scores stay; moved by as many tokens across an edge, not."""
  scheme = build('rope2d(width=8)', heads=1)
  q, k = vectors()
  pos = posenc.positions('none', scheme, 128, 64)
  score = scores(scheme, pos, q[:, :1] + 0 * q, k[:, :1] + 0 * k).reshape(8, 8, 8, 8)  # row, column; row, column
  np.testing.assert_allclose(score[3:, :, 3:], score[:-3, :, :-3], atol=1e-4)
  np.testing.assert_allclose(score[:, 2:, :, 2:], score[:, :-2, :, :-2], atol=1e-4)
  flat = score.reshape(64, 64)
  assert abs(flat[3:, 3:] - flat[:-3, :-3]).max() > 0.1
  # Half of the pairs do not see the column, so that far rows are told apart and far columns too.
  assert abs(score[:, 0, 0, 0] - score[0, :, 0, 0]).max() > 0.1


@pytest.mark.parametrize('order', ['hw', 'xy'])
def test_rope2d_of_one_row_is_rope_on_half_of_the_pairs(order):
  """In a single row only the column pairs turn, as RoPE of half the width would; 'alternating' has all of RoPE's."""
  scheme = build(f'rope2d(width=64, order={order!r}, pairing="interleaved")', heads=1)
  plain = build('rope(pairing="interleaved")', heads=1, head_dim=16)
  x = vectors()
  got = scheme.rotate(*x, posenc.positions('none', scheme, 128, 64))
  turning, still = (slice(16, 32), slice(0, 16)) if order == 'hw' else (slice(0, 16), slice(16, 32))
  want = plain.rotate(*(a[..., turning] for a in x), posenc.positions('none', plain, 128, 64))
  for a, b, whole in zip(got, want, x):
    np.testing.assert_allclose(a[..., turning], b, atol=1e-5)
    np.testing.assert_array_equal(a[..., still], whole[..., still])
  both = build('rope2d(width=64, freqs="alternating")').inv_freq_P
  np.testing.assert_allclose(np.sort(both)[::-1], rope().inv_freq_P, rtol=1e-12)


@pytest.mark.parametrize('method', FREQUENCY)
def test_a_grid_has_no_frequencies_along_the_sequence(method):
  with refused(posenc.Unsupported, method, 'rope2d has no frequencies along the sequence'):
    posenc.positions(method, build('rope2d(width=16)'), 128, 256)


@pytest.mark.parametrize('layout', ['interleaved', 'concat'])
@pytest.mark.parametrize('exponent', ['paper', 't2t'])
def test_sinusoids_turn_by_a_matrix_that_does_not_know_the_position(layout, exponent):
  """PE(n + k) = M(k) PE(n): the reason given for these waves in the first place."""
  scheme = build(f'sinusoidal(layout={layout!r}, exponent={exponent!r})', d_model=16)
  table = np.asarray(scheme.table(jnp.arange(64)), np.float64)
  sin, cos = np.split(table, 2, -1) if layout == 'concat' else (table[:, 0::2], table[:, 1::2])
  s, c = np.sin(5 * scheme.wave_freq), np.cos(5 * scheme.wave_freq)
  np.testing.assert_allclose(sin[5:], sin[:-5] * c + cos[:-5] * s, atol=1e-5)
  np.testing.assert_allclose(cos[5:], cos[:-5] * c - sin[:-5] * s, atol=1e-5)
  lowest = 1e4 ** -(14 / 16) if exponent == 'paper' else 1e-4
  np.testing.assert_allclose(scheme.wave_freq[[0, -1]], [1, lowest], rtol=1e-12)


def test_sinusoids_are_added_to_scaled_embeddings():
  x = jnp.ones((1, 4, 16))
  scaled, plain = (build(f'sinusoidal(embed_scale={on})', d_model=16) for on in (True, False))
  pos = posenc.positions('none', scaled, 128, 4)
  table = scaled.table(pos.at_T)
  np.testing.assert_allclose(scaled.embed(x, pos)[0], 4 + table, rtol=1e-6)
  np.testing.assert_allclose(plain.embed(x, pos)[0], 1 + table, rtol=1e-6)


@pytest.mark.parametrize(
  'heads, theirs',
  [
    (1, [2**-8]),
    (3, [0.0625, 0.00390625, 0.25]),
    (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
    (8, [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]),
    (12, [*(2.0**-h for h in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835]),
  ],
)
def test_alibi_slopes(heads, theirs):
  """Not sorted, not one series, not from 1.0: each has been shipped by someone."""
  np.testing.assert_allclose(slopes(heads), theirs, rtol=1e-7)


def test_alibi_favours_near_keys():
  """Zero on the diagonal, rising towards it in every head, faster where the slope is larger."""
  at = jnp.arange(32, dtype=jnp.float32)
  bias = np.asarray(build('alibi', heads=6).bias(at, at))
  last = bias[:, -1]
  assert (np.diagonal(bias, axis1=1, axis2=2) == 0).all() and (np.diff(last) > 0).all()
  np.testing.assert_allclose(np.diff(last), np.repeat(slopes(6)[:, None], 31, 1), rtol=1e-5)
  np.testing.assert_allclose(slopes(16)[1:] / slopes(16)[:-1], 2**-0.5, rtol=1e-12)
  shifted = build('alibi', heads=6).bias(at + 1000, at + 1000)
  np.testing.assert_array_equal(bias, shifted)


def test_alibi_in_a_bfloat16_model():
  """Biases are float32 whatever the rest is: in bfloat16 300 and 301 get one value, 4096 only 769."""
  pos = posenc.positions('none', build('alibi', heads=8), 128, 4096)
  scheme = build('alibi', heads=8)
  logits = jnp.zeros((1, 8, 1, 4096), jnp.float32)
  q = jnp.zeros((1, 1, 8, 32), jnp.bfloat16)
  scored, _ = scheme.score(logits, q, q, pos.at_T[-1:], pos.at_T, (), (), ())
  by_distance = np.asarray(scored)[0, 0, 0, ::-1]
  assert scored.dtype == jnp.float32
  assert by_distance[300] == -150.0 and by_distance[301] == -150.5
  assert len(np.unique(by_distance)) == 4096


def test_t5_buckets():
  """16 exact, 16 logarithmic; the first distance of each. Everything from 113 on is in the last one."""
  table = buckets(32, 128)
  first = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
  assert [int(np.argmax(table == b)) for b in range(32)] == first
  assert (np.diff(table) >= 0).all() and set(table) == set(range(32)) and table.dtype == np.int32
  np.testing.assert_array_equal(buckets(32, 1024)[[127, 128]], buckets(32, 1024)[128] + np.array([-1, 0]))


def test_t5_bias():
  """One row of the table per bucket, distances past the last edge share its row, later keys the first."""
  scheme = build('t5', heads=3)
  assert build('t5(scale_logits=False)').q_scale == 1
  bias = np.asarray(scheme.bias(jnp.array([0.0, 20.0, 5000.0]), jnp.array([0.0, 8.0])))
  table = np.asarray(scheme.table[...])
  assert bias.shape == (3, 3, 2)
  np.testing.assert_array_equal(bias[:, :, 0], table[[0, 17, 31]].T)
  np.testing.assert_array_equal(bias[:, :, 1], table[[0, 12, 31]].T)
  assert 0.5 < table.std() * 128**0.5 < 1.5


@pytest.mark.parametrize('scheme', ['alibi', 'kerple_log', 'kerple_power', 'sandwich'])
def test_these_biases_are_0_on_the_diagonal_and_nowhere_above(scheme):
  at = jnp.arange(4096, dtype=jnp.float32)
  bias = np.asarray(build(scheme).bias(at[-1:], at))[:, 0, ::-1]
  np.testing.assert_allclose(bias[:, 0], 0, atol=2e-5)
  assert (bias[:, 1:] < 0).all()
  if scheme != 'sandwich':  # which oscillates
    assert (np.diff(bias) < 0).all()


def test_kerple_by_numbers():
  at = jnp.array([0.0, 1, 2, 100, 4095])
  log, power = build('kerple_log', heads=2), build('kerple_power', heads=2)
  for scheme in (log, power):
    scheme.r1[...], scheme.r2[...] = jnp.array([1.0, 3.0]), jnp.array([0.5, 1.5])
  got = log.bias(at, at[:1])[..., 0]
  np.testing.assert_allclose(got[0], [0, -0.405465, -0.693147, -3.931826, -7.624863], rtol=1e-6)
  np.testing.assert_allclose(got[1], -3 * np.log(1 + 1.5 * np.float64(at)), rtol=1e-6)
  np.testing.assert_allclose(power.bias(at, at[:1])[0, :, 0], -np.sqrt(np.float64(at)), rtol=1e-6)
  for name in ('kerple_log', 'kerple_power'):
    many = build(name, heads=4096)
    wide, narrow = (many.r1, many.r2) if name == 'kerple_log' else (many.r2, many.r1)
    for r, top in ((wide, 2), (narrow, 1)):
      assert 0 <= float(r[...].min()) < 0.01 and 0.99 < float(r[...].max()) / top < 1
      assert abs(float(r[...].mean()) / top - 0.5) < 0.03


@pytest.mark.parametrize('scheme', ['kerple_log', 'kerple_power'])
@pytest.mark.parametrize('raw, bound', [(-1e-3, 0.01), (-5.0, 0.01), (-1e6, 0.01), (3.0, 2.0), (1e6, 2.0)])
def test_kerple_out_of_bounds(scheme, raw, bound):
  """Training may step over a bound: the bias is that at the bound, exactly, and the way back has a gradient."""
  graphdef, _ = nnx.split(build(scheme, heads=1))
  at = jnp.array([0.0, 1, 30, 4095])
  bias = lambda r1, r2: nnx.merge(graphdef, {'r1': r1, 'r2': r2}).bias(at, at[:1])[0, :, 0]  # noqa: E731

  one = jnp.ones(1)
  for i in (0, 1):
    if bound == 2.0 and (scheme, i) != ('kerple_power', 1):
      continue
    out, inside = ([one * r if j == i else one for j in (0, 1)] for r in (raw, bound))
    np.testing.assert_array_equal(bias(*out), bias(*inside))
    slope, want = (jax.grad(lambda *r: bias(*r).sum(), argnums=i)(*r) for r in (out, inside))
    np.testing.assert_array_equal(slope, want)
    assert abs(float(slope[0])) > 1


def identity_fire(text='fire(init_len=32)', c=0.1):
  """FIRE whose MLP hands its input through, so that `bias` is the interpolated distance."""
  scheme = build(text.replace(')', ', width=1)'), heads=1)
  scheme.w1[...], scheme.b1[...], scheme.w2[...] = jnp.ones(1), jnp.zeros(1), jnp.ones((1, 1))
  scheme.c[...] = jnp.asarray(c)
  return scheme


@pytest.mark.parametrize('form', ['t5', 'kerple_log', 'kerple_power'])
@pytest.mark.parametrize('t, s', [(5, 8), (8, 5), (1, 6)])
def test_a_bias_by_its_diagonals_is_that_of_every_pair(form, t, s):
  """Where positions are consecutive, each distance is asked for once; elsewhere each pair is. Values and gradients."""
  graphdef, params = nnx.split(build(form))
  weights_Nts = jax.random.normal(jax.random.key(0), (4, t, s))

  def by_diagonal(params, at_t, at_s):
    return nnx.merge(graphdef, params).bias(at_t, at_s)

  def every_pair(params, at_t, at_s):
    return nnx.merge(graphdef, params).of(distance(at_t, at_s))

  # Consecutive: below, on and over the diagonal. Not: farther apart than 1, and closer together.
  for start_t, start_s, step in (
    (40.0, 7.0, 1.0),
    (3.0, 3.0, 1.0),
    (0.0, 2.0, 1.0),
    (40.0, 7.0, 3.0),
    (12.0, 1.0, 0.5),
  ):
    at_t, at_s = start_t + step * jnp.arange(t), start_s + step * jnp.arange(s)
    np.testing.assert_allclose(by_diagonal(params, at_t, at_s), every_pair(params, at_t, at_s), rtol=1e-6, atol=1e-6)
    sums = [lambda p, f=f, at=(at_t, at_s): (f(p, *at) * weights_Nts).sum() for f in (by_diagonal, every_pair)]
    grads = [jax.grad(f)(params) for f in sums]
    for got, want in zip(*map(jax.tree.leaves, grads)):
      np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_bias_learns_from_every_text():
  graphdef, params = nnx.split(build('t5'))
  at, logits, weights = jnp.arange(6.0), jnp.zeros((3, 4, 6, 6)), jax.random.normal(jax.random.key(0), (3, 4, 6, 6))

  def by_score(params):
    return (nnx.merge(graphdef, params).score(logits, None, None, at, at, (), (), ())[0] * weights).sum()

  def by_hand(params):
    return (nnx.merge(graphdef, params).bias(at, at) * weights.sum(0)).sum()

  grads = [jax.tree.leaves(jax.grad(f)(params))[0] for f in (by_score, by_hand)]
  np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('low, high', [(0.0, 1.0), (0.30, 0.31), (0.5, 0.5), (0.0, 0.0), (0.9, 1.0)])
def test_fire_in_straight_pieces_is_fire(low, high):
  """Over a short stretch of [0, 1] few units bend, the others make one line; over all of it the whole layer runs."""
  scheme = build('fire')
  x_ts = jnp.linspace(low, high, 6 * 7).reshape(6, 7)
  # The kink of one unit at an end of the stretch, of one beyond it by a step of float32, and of one in the middle.
  kinks = jnp.asarray([low, np.nextafter(np.float32(high), np.float32(2)), (low + high) / 2])
  w1, b1 = scheme.w1[...].at[:3].set(1.0), scheme.b1[...].at[:3].set(-kinks)
  arguments = x_ts, w1, b1, scheme.w2[...]
  np.testing.assert_allclose(mlp(*arguments), plain_mlp(*arguments), rtol=1e-5, atol=1e-6)
  squares = (lambda *a, f=f: jnp.square(f(*a)).sum() for f in (mlp, plain_mlp))
  grads = [jax.grad(f, argnums=(0, 1, 2, 3))(*arguments) for f in squares]
  for got, want in zip(*grads):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_fire_interpolates():
  scheme = identity_fire()
  share = scheme.bias(jnp.array([10.0, 100]), jnp.array([5.0, 50, 0]))[0]
  np.testing.assert_allclose([share[0, 0], share[1, 1], share[1, 2]], [0.28253744, 0.74722174, 1], atol=2e-6)
  assert build('fire').init_len == 32 and build('fire', train_len=3).init_len == 1
  scheme.l_mult[...] = jnp.asarray(-2.0)  # a threshold of 64
  np.testing.assert_allclose(scheme.bias(jnp.array([10.0]), jnp.array([5.0])), np.log(1.5) / np.log(7.4), atol=2e-6)


@pytest.mark.parametrize('init_len, l_mult', [(32, 1.0), (32, -3.0), (32, 0.0), (0, 1.0), (1e-3, 1.0)])
@pytest.mark.parametrize('c', [0.1, -2.0, 1e-4, 0.0])
def test_fire_stays_within_0_and_1(c, init_len, l_mult):
  """At any length, also at query 0 once the threshold has shrunk to 0: log 1 / log 1 has been shipped."""
  scheme = identity_fire(f'fire(init_len={init_len})', c)
  scheme.l_mult[...] = jnp.asarray(l_mult)
  for at in (jnp.arange(64.0), jnp.arange(32768.0)[:: 1 << 8]):
    share = np.asarray(scheme.bias(at, at))
    assert (share >= 0).all() and (share <= 1).all()
  graphdef, params = nnx.split(scheme)
  grads = jax.grad(lambda p: nnx.merge(graphdef, p).bias(at, at).sum())(params)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_fire_starts_bent():
  """Weights and biases within 1/sqrt(fan in) of 0; with biases of 0 every head would start linear on [0, 1]."""
  scheme = build('fire(init_len=0)')
  for w, fan_in in ((scheme.w1, 1), (scheme.b1, 1), (scheme.w2, 32)):
    assert 0.9 < float(jnp.abs(w[...]).max()) * fan_in**0.5 <= 1 and abs(float(w[...].mean())) * fan_in**0.5 < 0.3
  share = np.linspace(0, 1, 65)
  distances = np.expm1(share * np.log1p(0.1 * 1000)) / 0.1
  bias = np.asarray(scheme.bias(jnp.array([1000.0]), jnp.asarray(1000 - distances, jnp.float32)))[:, 0]
  assert (abs(np.diff(bias, 2)).max(-1) > 1e-3).all()


def test_shaw_shares_a_row_from_k_on():
  """Key minus query: the other sign would give every earlier key one row. 20 earlier keys use 17."""
  scheme = build('shaw')
  row = np.asarray(scheme.row(jnp.array([20.0]), jnp.arange(32.0)))[0]
  np.testing.assert_array_equal(row, np.clip(np.arange(32) - 20, -16, 0) + 16)
  assert len(set(row[:21])) == 17
  far = np.asarray(scheme.row(jnp.array([4095.0]), jnp.arange(4096.0)))[0]
  assert (far[: 4096 - 16] == 0).all() and far[-16] == 1 and far[-1] == 16
  keys, q = np.asarray(scheme.key_table[...]), jax.random.normal(jax.random.key(0), (1, 1, 4, 32))
  at, logits = jnp.array([20.0]), jnp.zeros((1, 4, 1, 32))
  scored, _ = scheme.score(logits, q, q, at, jnp.arange(32.0), (), (), ())
  np.testing.assert_allclose(scored[0, :, 0], np.asarray(q)[0, 0] @ keys[row].T, atol=1e-4)
  np.testing.assert_allclose(
    scheme.values(jnp.full((1, 4, 1, 32), 1 / 32), at, jnp.arange(32.0))[0, 0, 0],
    np.asarray(scheme.value_table[...])[row].mean(0),
    atol=1e-6,
  )
  assert build('shaw(use_values=False)').values(logits, at, at) is None
  assert not hasattr(build('shaw(use_values=False)'), 'value_table')


def cope_positions(logits, npos_max=64, gate_scale=1.0):
  """p_ij of a CoPE whose table says its row's number, from logits [t, s] of which the future is masked here."""
  scheme = build(f'cope(npos_max={npos_max}, gate_scale={gate_scale}, div=False)', heads=1, head_dim=1)
  scheme.table[...] = jnp.arange(npos_max, dtype=jnp.float32)[:, None]
  logits = jnp.where(np.tri(*logits.shape) > 0, jnp.asarray(logits, jnp.float32), -1e30)[None, None]
  q = jnp.full((1, logits.shape[2], 1, 1), scheme.q_scale)
  at = jnp.arange(logits.shape[-1], dtype=jnp.float32)
  scored, carry = scheme.score(jnp.zeros_like(logits) + logits, q, q, at, at, (), (), scheme.init_carry(q))
  np.testing.assert_allclose(carry[0, 0], jax.nn.sigmoid(gate_scale * logits[0, 0]).sum(-1), rtol=1e-6)
  return np.asarray(scored - logits)[0, 0]


def test_cope_counts_gates():
  """Half-open gates count halves; open ones make it a relative embedding shifted by one; closed ones a constant."""
  back = np.tril(np.subtract.outer(np.arange(40), np.arange(40)) + 1.0)
  np.testing.assert_allclose(cope_positions(np.zeros((6, 6)))[5], [3, 2.5, 2, 1.5, 1, 0.5], rtol=1e-6)
  lower = np.tri(40) > 0
  np.testing.assert_allclose(cope_positions(np.full((40, 40), 30.0))[lower], back[lower], atol=1e-4)
  np.testing.assert_allclose(cope_positions(np.full((40, 40), -30.0))[lower], 0, atol=1e-4)
  capped = cope_positions(np.full((40, 40), 30.0), npos_max=5)
  np.testing.assert_allclose(capped[lower], np.minimum(back, 4)[lower], atol=1e-4)
  gate = jax.nn.sigmoid(3 * 0.7)
  np.testing.assert_allclose(cope_positions(np.full((6, 6), 0.7), gate_scale=3)[5, 3], 3 * gate, rtol=1e-5)


def test_cope_learns_through_the_weight_between_rows():
  """The floor has no gradient, the weight has: moving a logit moves the position of the keys to its left."""
  scheme = build('cope(div=False)', heads=1, head_dim=1)
  scheme.table[...] = jnp.arange(64, dtype=jnp.float32)[:, None]
  q, at = jnp.full((1, 1, 1, 1), scheme.q_scale), jnp.arange(6.0)

  def positions(row):
    # 0.1 has passed further right, so that no position is a whole number, where the weight has a kink.
    logits = row[None, None, None]
    return (scheme.score(logits, q, q, at[-1:], at, (), (), scheme.init_carry(q) + 0.1)[0] - logits)[0, 0, 0]

  np.testing.assert_allclose(positions(jnp.zeros(6)), [3.1, 2.6, 2.1, 1.6, 1.1, 0.6], rtol=1e-6)
  np.testing.assert_allclose(jax.jacobian(positions)(jnp.zeros(6)), np.triu(np.full((6, 6), 0.25)), atol=1e-6)


# Options that every scheme has.


def test_a_trained_window_is_part_of_the_scheme():
  """Every method starts from it, at every length."""
  for name in ONE_OF_EACH:
    text = f'{name}(window=9)'
    for length in (4, 128):
      pos = posenc.positions('none', build(text), 128, length)
      np.testing.assert_array_equal(pos.window_T, np.full(length, 9, np.float32))


def test_ssmax_multiplies_queries_by_s_ln_n():
  """n counts the keys that a query sees: a window and sinks bound it. One key alone has ln 1 = 0."""
  n = np.arange(1, 41)
  for text, seen, mean in (
    ('nope(ssmax=True)', n, np.log(np.arange(1, 129)).mean()),
    ('rope(ssmax=True, window=7)', np.minimum(n, 7), np.log(np.minimum(np.arange(1, 129), 7)).mean()),
  ):
    scheme = build(text)
    assert scheme.per_layer
    np.testing.assert_allclose(scheme.ssmax[...], np.full(4, 1 / mean), rtol=1e-6)
    scheme.ssmax[...] = jnp.arange(4.0)
    pos = posenc.positions('none', scheme, 128, 40)
    want = 32**-0.5 * np.arange(4) * np.log(seen)[:, None]
    np.testing.assert_allclose(scheme.query_scale(pos), want, rtol=1e-6)
    if 'window' in text:
      sinks = scheme.query_scale(pos.replace(sinks=jnp.float32(3)))
      np.testing.assert_allclose(sinks[:, 1], 32**-0.5 * np.log(np.minimum(n, 10)), rtol=1e-6)
  # Its own parameters stay shared where the scheme shares them.
  assert not build('t5(ssmax=True)').per_layer and build('shaw(ssmax=True)').per_layer


@pytest.mark.parametrize('text, words', [
  ('rope(window=0)', ['rope: window = 0', 'at least 1']),
  ('alibi(window=2.5)', ['alibi: window = 2.5', 'whole number']),
  ('nope(window=True)', ['nope: window = True', 'whole number']),
  ('nope(ssmax=1)', ['nope', 'ssmax = 1', 'True or False']),
])  # fmt: skip
def test_refused_options(text, words):
  with refused(SpecError, *words):
    build(text)


def test_no_scheme_has_an_option_of_the_same_name():
  """It would be passed to one of the two, silently."""
  for name, scheme in posenc.SCHEMES.items():
    assert not set(keywords(scheme.__init__)) & set(keywords(with_options)), name


# Schemes that read more than distances.


def test_fox_sums_what_float32_cannot():
  """Differences of neighbours and of tokens far apart at 16k, against float64; a plain sum is off by 1e-3 there."""
  length, rng = 16384, np.random.default_rng(0)
  scheme, q = build('fox', heads=1), jnp.zeros((1, 64, 1, 32))
  for centre in (0.0, 5.0):  # half-open gates, and those of a head that sees some hundred tokens
    log_f = jax.nn.log_sigmoid(jnp.asarray(rng.normal(size=(1, length, 1)) + centre, jnp.float32))
    exact = np.cumsum(np.float64(log_f[0, :, 0]))
    state = split_cumsum(log_f)
    coarse = np.asarray(state[0])[0, :, 0]
    np.testing.assert_array_equal(coarse * 64, np.cumsum(np.round(64 * np.float64(log_f[0, :, 0]))))
    plain = np.asarray(jnp.cumsum(log_f, 1), np.float64)[0, :, 0]
    if centre == 0:
      assert abs(np.diff(plain) - np.diff(exact)).max() > 5e-4
    for start in (0, 8192, length - 64):
      t, s = ([part[:, i : i + 64] for part in state] for i in (length - 64, start))
      scored, _ = scheme.score(jnp.zeros((1, 1, 64, 64)), q, q, jnp.arange(64.0), jnp.arange(64.0), t, s, ())
      want = exact[-64:, None] - exact[start : start + 64]
      np.testing.assert_allclose(scored[0, 0], want, atol=1e-5, rtol=2**-23)


def test_fox_gradient_is_that_of_the_sum():
  """The coarse part is a constant to the gradient; what is left must not be a coarse gradient."""
  log_f = -jnp.abs(jax.random.normal(jax.random.key(0), (1, 50, 2)))
  weight = jax.random.normal(jax.random.key(1), (1, 50, 2))
  slope = jax.grad(lambda x: sum((part * weight).sum() for part in split_cumsum(x)))(log_f)
  np.testing.assert_allclose(slope, jnp.cumsum(weight[:, ::-1], 1)[:, ::-1], atol=1e-5)


def test_fox_starts_half_open_or_where_it_is_told():
  """exp(-1/T) with T log-spaced; -1.44 tokens is log 1/2. Shut gates hide the past, open ones make it NoPE."""
  scheme = build('fox')
  assert not scheme.b[...].any() and abs(float(scheme.w[...].std()) / 0.02 - 1) < 0.1
  told = build('fox(decay_time=(2, 128))')
  log_f = jax.nn.log_sigmoid(told.b[...])
  np.testing.assert_allclose(-1 / log_f, [2, 8, 32, 128], rtol=1e-5)
  assert told.b[...].dtype == jnp.float32
  x, pos = jnp.ones((1, 4, 128), jnp.bfloat16), posenc.positions('none', told, 128, 4)
  logits, q = jnp.zeros((1, 4, 4, 4)), jnp.zeros((1, 4, 4, 32))
  for bias, want in ((1e4, 0.0), (0.0, np.log(0.5)), (-30.0, -30.0)):
    told.w[...], told.b[...] = jnp.zeros((128, 4)), jnp.full(4, bias)
    state = told.token_state(x, pos)
    assert all(part.dtype == jnp.float32 for part in state)
    scored, _ = told.score(logits, q, q, pos.at_T, pos.at_T, state, state, ())
    np.testing.assert_allclose(scored[0, :, 3], np.tile(want * np.array([3, 2, 1, 0]), (4, 1)), rtol=1e-6)


@pytest.mark.parametrize('method', ['none', 'pi(factor=8)', 'ntk(factor=8)', 'yarn(factor=8)', 'dynamic_ntk'])
def test_fox_may_rotate(method):
  """As RoPE, to the bit, under every method; without, it has nothing that a frequency method could scale."""
  both, rope_ = build('fox(rope=True, base=500.0)'), build('rope(base=500.0)')
  same(*(posenc.positions(method, scheme, 128, 256) for scheme in (both, rope_)))
  pos = posenc.positions(method, both, 128, 256)
  q, k = (jax.random.normal(jax.random.key(i), (1, 256, n, 32)) for i, n in enumerate((4, 2)))
  same(both.rotate(q, k, pos), rope_.rotate(q, k, pos))
  odd = build('fox', head_dim=31)
  assert odd.rotate(q, k, pos)[0] is q and odd.inv_freq_P.size == 0
  with refused(posenc.Unsupported, 'fox has no frequencies'):
    posenc.positions('pi', odd, 128, 256)


@pytest.mark.parametrize('method', ['none', 'pi(factor=8)', 'ntk(factor=8)', 'yarn(factor=8)'])
def test_pope_depends_on_the_distance_alone(method):
  """Its logit written out in float64: magnitudes times the cosine of distance and phase, at any offset."""
  scheme = build('pope(phase_init="uniform")', heads=1, head_dim=8)
  phase = np.asarray(scheme.phase[...], np.float64)[0]
  pos = posenc.positions(method, scheme, 128, 4096)
  theta = np.asarray(pos.inv_freq_P, np.float64)
  if method == 'none':
    np.testing.assert_allclose(theta, 1e4 ** (-np.arange(8) / 8), rtol=1e-6)
  q, k = np.random.default_rng(0).normal(size=(2, 8))
  offsets = np.array([0, 1, 100, 4000])
  want = (np.log1p(np.exp(q)) * np.log1p(np.exp(k)) * np.cos(-7 * theta + phase)).sum()
  at = [pos.replace(at_T=jnp.asarray(offsets + back, jnp.float32)) for back in (7, 0)]
  wide = [jnp.asarray(np.tile(x, (1, 4, 1, 1)), jnp.float32) for x in (q, k)]
  got = scheme.rotate(wide[0], wide[1], at[0])[0] * scheme.rotate(wide[0], wide[1], at[1])[1]
  np.testing.assert_allclose(got.sum((0, 2, 3)), want, atol=2e-3)
  np.testing.assert_allclose(got.sum((0, 2, 3))[:2], want, atol=1e-5)


def test_pope_keeps_the_trained_frequencies_before_onset():
  """LongRoPE's n-hat, read by the code that RoPE reads it with."""
  scheme = build('pope', heads=1, head_dim=8)
  plain, pi = (posenc.positions(method, scheme, 128, 64) for method in ('none', 'pi(factor=4)'))
  x = jax.random.normal(jax.random.key(0), (1, 64, 1, 8))
  rotated = {name: scheme.rotate(x, x, pos)[1] for name, pos in (('plain', plain), ('pi', pi))}
  mixed = scheme.rotate(x, x, pi.replace(onset=jnp.float32(20)))[1]
  np.testing.assert_array_equal(mixed[:, :20], rotated['plain'][:, :20])
  np.testing.assert_array_equal(mixed[:, 20:], rotated['pi'][:, 20:])
  assert differs(rotated['plain'], rotated['pi'])


@pytest.mark.parametrize('raw, in_force', [(0.0, 0.0), (0.5, 0.0), (-7.0, -2 * np.pi), (-1.0, -1.0)])
def test_pope_phases_out_of_bounds(raw, in_force):
  """They start on a bound, so a gradient that stopped there would stop half of them at their first step."""
  graphdef, params = nnx.split(build('pope', heads=1, head_dim=8))
  q = jnp.ones((1, 2, 1, 8))

  def logit(phase):
    scheme = nnx.merge(graphdef, jax.tree.map(lambda a: jnp.full_like(a, phase), params))
    q_, k_ = scheme.rotate(q, q, posenc.positions('none', scheme, 128, 2))
    return (q_[0, 1] * k_[0, 0]).sum()

  np.testing.assert_array_equal(logit(raw), logit(in_force))
  np.testing.assert_array_equal(jax.grad(logit)(raw), jax.grad(logit)(in_force))
  assert abs(float(jax.grad(logit)(raw))) > 1


@pytest.mark.parametrize('bias', ['kerple_log', 'alibi', 'fire'])
def test_dape_with_its_mlp_silent_is_its_bias(bias):
  """And it is relative, has its remarks and is drawn like it: the same class under the same name."""
  scheme, alone = build(f'dape(bias={bias!r})'), build(bias)
  assert type(scheme.bias) is posenc.SCHEMES[bias] and scheme.relative == alone.relative
  assert build(f'dape(bias={bias!r})', train_len=1).remarks() == build(bias, train_len=1).remarks()
  scheme.w2[...] = jnp.zeros((32, 4))
  at, logits = jnp.arange(9.0), jax.random.normal(jax.random.key(0), (2, 4, 9, 9))
  q = jnp.zeros((2, 9, 4, 32))
  scored, _ = scheme.score(logits, q, q, at, at, (), (), ())
  np.testing.assert_array_equal(scored, logits + scheme.bias.bias(at, at))


def test_dape_does_not_learn_from_the_mask():
  """A masked logit of -1e30 in the MLP would leave no other number in its gradient, or in those of its neighbours."""
  graphdef, params = nnx.split(build('dape'))
  at, q = jnp.arange(6.0), jnp.zeros((1, 6, 4, 32))
  logits = jax.random.normal(jax.random.key(0), (1, 4, 6, 6))
  visible = np.tri(6) > 0

  def grads(hidden):
    masked = jnp.where(visible, logits, hidden)
    loss = lambda p: (nnx.merge(graphdef, p).score(masked, q, q, at, at, (), (), ())[0] - masked).sum()  # noqa: E731
    return jax.tree.leaves(jax.grad(loss)(params))

  for a, b in zip(grads(-1e30), grads(0.0), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-4)


def test_remarks():
  """Pairs that never complete a turn, buckets that are never trained, ramps without a pair to start from."""
  for width, base, train_len, count in ((32, 1e4, 128, 10), (64, 1e4, 256, 19), (128, 1e4, 4096, 18)):
    line, *matched = posenc.remarks((), [rope(width, base, train_len)], train_len)
    assert f'{count} of {width // 2} frequency pairs' in line
    assert len(matched) == (train_len < 4096), 'a base for a short model, none for Llama 2 itself'
  assert posenc.remarks(('none', 'pi'), [build('nope'), build('alibi'), build('t5')], 128) == []
  (line,) = posenc.remarks((), [build('t5(max_distance=1024)')], 128)
  assert 'buckets 24..31' in line and '128 tokens' in line and 't5(num_buckets=32, max_distance=1024)' in line
  assert buckets(32, 1024)[127] == 23
  for text, words in (
    ('fire(init_len=128)', 'constant over the 128 tokens'),
    ('shaw(clip=128)', 'rows 0..0 are never trained'),
    ('cope(npos_max=130)', 'rows above 128 are never trained'),
  ):
    (line,) = posenc.remarks((), [build(text)], 128)
    assert text in line and words in line
  for text in ('fire', 'fire(init_len=127)', 'shaw(clip=127)', 'cope', 'cope(npos_max=129)', 'kerple_log', 'sandwich'):
    assert posenc.remarks((), [build(text)], 128) == []
  tiny, llama = [rope()], [rope(128, train_len=4096)]
  lines = posenc.remarks(('yarn', 'yarn+logn', 'pi', 'yarn(factor=8, beta_fast=4)', 'ntk_by_parts@rope'), tiny, 128)
  assert [line.split(':')[0] for line in lines[2:]] == ['yarn, ntk_by_parts', 'yarn(beta_fast=4)']
  assert '1 kept, 5 blended, 10 divided' in lines[2] and 'beta_fast = 32' in lines[2] and '20.4' in lines[2]
  assert '3 kept, 3 blended, 10 divided' in lines[3] and 'none makes' not in lines[3]
  (line,) = posenc.remarks(('llama31(high=21.0)',), tiny, 128)[2:]
  assert line.startswith('llama31(high=21.0): ') and 'none makes high = 21 turns' in line
  assert len(posenc.remarks(('yarn', 'ntk_by_parts(factor=8)'), llama, 4096)) == 2
  assert posenc.remarks(('yarn@alibi',), [*tiny, build('alibi')], 128) == lines[:2]
  assert all('\n' not in line for line in lines)

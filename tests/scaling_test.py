"""What must hold of scaling methods whatever the numbers, and numbers that people have got wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc
from forms import FACTORED, FREQUENCY, ONE_OF_EACH, REMAPPED, SHAPES, build, refused, rope, same
from spec import SpecError, keywords


def stretch(method, width=32, base=10000.0, train_len=128, eval_len=None):
  """lambda_p: how many times slower each pair turns. Without `eval_len` at 8 L."""
  scheme = rope(width, base, train_len)
  pos = posenc.positions(method, scheme, train_len=train_len, eval_len=eval_len or 8 * train_len)
  return scheme.inv_freq_P / np.asarray(pos.inv_freq_P, np.float64)


def factor(method, **kwargs):
  """The attention factor a, of which the logits get the square."""
  pos = posenc.positions(method, rope(**kwargs), train_len=128, eval_len=256)
  assert np.ptp(pos.logit_scale_T) == 0
  return float(np.sqrt(np.float64(pos.logit_scale_T[0])))


# Stretch factors.


@pytest.mark.parametrize('width, base, train_len', SHAPES)
@pytest.mark.parametrize('s', [1.5, 2, 8, 32])
@pytest.mark.parametrize(
  'method',
  [
    'pi', 'dynamic_pi', 'ntk', 'dynamic_ntk', 'ntk_by_parts', 'ntk_by_parts(truncate=False)', 'ntk_by_parts_v0', 'yarn',
    'dynamic_yarn', 'yarn(beta_fast=4)', 'ntk_by_parts(ramp="rotations")', 'llama31', 'ntk_mixed_su',
  ],
)  # fmt: skip
def test_stretch_lies_between_1_and_s_and_grows_with_the_wavelength(method, s, width, base, train_len):
  lam = stretch(method, width, base, train_len, eval_len=int(s * train_len))
  assert (lam > 1 - 1e-6).all() and (lam < s * (1 + 1e-6)).all()
  assert (np.diff(lam) > -1e-6 * s).all()
  np.testing.assert_allclose(lam[-1], s, rtol=1e-6)  # the last wavelength is longer than L in every shape here
  if 'pi' in method:
    np.testing.assert_allclose(lam, s, rtol=1e-6)
  elif method == 'ntk_mixed_su':
    assert lam[0] > 1.01
  elif 'rotations' in method and train_len / (2 * np.pi) < 32:
    assert lam[0] > 1.1
  else:
    assert lam[0] == 1


def test_ntk_is_geometric_over_all_pairs():
  np.testing.assert_allclose(stretch('ntk(factor=8)', 64), 8 ** (2 * np.arange(32) / 62), rtol=1e-6)


def test_two_ramps():
  """Code and paper differ by up to 2.3 times. At L = 128 no pair makes 32 turns: the paper keeps none."""
  index, exact, rotations = (
    stretch(f'ntk_by_parts(factor=8, {extra})') for extra in ('ramp="index"', 'truncate=False', 'ramp="rotations"')
  )
  np.testing.assert_allclose(index[:8], [1, 1.17, 1.41, 1.78, 2.4, 3.69, 8, 8], atol=0.005)
  np.testing.assert_allclose(exact[:8], [1, 1.20, 1.50, 2.01, 3.02, 6.08, 8, 8], atol=0.005)
  np.testing.assert_allclose(rotations[:8], [1.49, 2.38, 3.59, 5.02, 6.48, 7.75, 8, 8], atol=0.005)
  llama2 = [stretch(f'ntk_by_parts(factor=8, ramp={ramp!r})', 128, train_len=4096) for ramp in ('index', 'rotations')]
  np.testing.assert_allclose([lam[40] for lam in llama2], [3.06, 6.45], atol=0.005)
  np.testing.assert_allclose((llama2[1] / llama2[0]).max(), 2.3, atol=0.05)


def test_ramp_starts_from_the_training_length():
  """Not from the extended one (which gives 0.1 and 0.00596), and a given factor is not replaced by l/L."""
  for eval_len in (2048, 4096):
    pos = posenc.positions('yarn(factor=8)', rope(64, train_len=512), train_len=512, eval_len=eval_len)
    np.testing.assert_allclose(pos.inv_freq_P[jnp.array([8, 16])], [0.06634615, 0.00125], rtol=1e-6)
  np.testing.assert_allclose(stretch('yarn(factor=8)', 64, train_len=512, eval_len=2048)[-1], 8, rtol=1e-6)


def test_linear_scaling_touches_every_pair_once():
  scheme = rope(64)
  before, after = (posenc.positions(m, scheme, 128, 1024).inv_freq_P[5] for m in ('none', 'pi(factor=8)'))
  np.testing.assert_allclose([before, after], [0.2371374, 0.0296422], rtol=1e-6)


def test_lowest_frequency_is_not_one_over_base():
  for width, period in ((128, 54410), (32, 35333)):
    np.testing.assert_allclose(2 * np.pi / rope(width).inv_freq_P[-1], period, rtol=1e-4)
    assert rope(width).inv_freq_P[0] == 1
    assert rope(width).inv_freq_P.dtype == np.float64


# Lengths.


@pytest.mark.parametrize('method', [*FREQUENCY, 'logn', 'yarn(ramp="rotations")', 'dynamic_ntk_hf(factor=4)'])
@pytest.mark.parametrize('width, base, train_len', SHAPES)
def test_nothing_changes_up_to_the_training_length(method, width, base, train_len):
  """With a factor that follows the length. Hugging Face's bracket goes negative: NaN if taken literally."""
  scheme = rope(width, base, train_len)
  for length in (1, train_len // 8, train_len // 2, train_len):
    same(posenc.positions(method, scheme, train_len, length), posenc.positions('none', scheme, train_len, length))


@pytest.mark.parametrize('method', [*(m for m in FACTORED if m != 'dynamic_ntk_hf'), 'ntk_by_parts@rope'])
@pytest.mark.parametrize('width, base, train_len', SHAPES)
def test_factor_1_is_the_identity(method, width, base, train_len):
  scheme = rope(width, base, train_len)
  name, *slot = method.split('@')
  text = '@'.join([f'{name}(factor=1)', *slot])
  for length in (train_len, 8 * train_len):
    same(posenc.positions(text, scheme, train_len, length), posenc.positions('none', scheme, train_len, length))


def test_dynamic_ntk_below_its_training_length():
  """factor 4, L = 512: the raw bracket at 256 tokens is -1, and (-1)**(64/62) is no number."""
  scheme = rope(64, train_len=512)
  for length in (256, 64):
    pos = posenc.positions('dynamic_ntk_hf(factor=4)', scheme, train_len=512, eval_len=length)
    np.testing.assert_array_equal(pos.inv_freq_P, np.float32(scheme.inv_freq_P))


def test_dynamic_factors():
  """Hugging Face's factor is no extension ratio: 2 at 2L slows the last pair by 3. Ours is a cap."""
  last = {m: stretch(m, eval_len=256)[-1] for m in ('dynamic_ntk', 'dynamic_ntk_hf', 'dynamic_ntk_hf(factor=1)')}
  np.testing.assert_allclose(list(last.values()), [2, 3, 2], rtol=1e-6)
  capped = [stretch('dynamic_ntk(factor=4)', eval_len=length)[-1] for length in (128, 256, 512, 1024)]
  np.testing.assert_allclose(capped, [1, 2, 4, 4], rtol=1e-6)


def test_qwen_extends_in_steps():
  """2**ceil(log2(l/L) + 1) - 1: 3 from the first token beyond L, though 2 would do, and 7 from the first beyond 2L."""
  steps = {1: 1, 128: 1, 129: 3, 192: 3, 256: 3, 257: 7, 512: 7, 513: 15, 1024: 15}
  last = [stretch('dynamic_ntk_qwen', eval_len=length)[-1] for length in steps]
  np.testing.assert_allclose(last, list(steps.values()), rtol=1e-6)


def test_order_of_a_sweep_does_not_matter():
  """No state leaks from a long pass into a short one."""
  scheme = rope(train_len=512)
  first, _, again = (posenc.positions('dynamic_ntk_hf(factor=4)', scheme, 512, n) for n in (512, 4096, 512))
  same(first, again)
  np.testing.assert_array_equal(again.inv_freq_P, np.float32(scheme.inv_freq_P))


@pytest.mark.parametrize(
  'method, follows',
  [
    *((name, name in FREQUENCY) for name in ('none', 'logn', *FREQUENCY)),
    *((f'{name}(factor=8)', 'dynamic' in name) for name in FACTORED),
    ('rerope', False),
    ('rerope(w=8)', False),
    ('leaky_rerope', True),
    ('leaky_rerope(k=4)', False),
    ('self_extend', True),
    ('self_extend(group=4)', False),
    ('sink_window(window=8)', False),
    ('lm_infinite', False),
    ('logn(trained=True)', False),
    ('resonance', False),
    ('yarn(factor=8)+resonance', False),
    ('yarn+resonance', True),
    (f'longrope(long={(2.0,) * 16}, factor=8)', True),  # long factors beyond L: told that the input is long
    (f'longrope(long={(2.0,) * 16}, short={(2.0,) * 16}, factor=8)', False),
    ('dynamic_ntk(factor=2)', True),
    ('yarn(factor=8)+logn', False),
    ('yarn+logn', True),
    ('pi@rope', True),
  ],
)
def test_label_of_an_oracle(method, follows):
  """Log-n knows where its query stands, as any model does; a factor that follows the length knows more."""
  assert posenc.follows_length(method, rope(), 128) is follows
  assert posenc.follows_length(method, (build('nope'), rope()), 128) is follows


# Relations between methods.


@pytest.mark.parametrize('width, base, train_len', SHAPES)
@pytest.mark.parametrize('arguments', ['', 'ramp="rotations"', 'beta_fast=8.0, truncate=False'])
def test_yarn_is_by_parts_and_a_temperature(arguments, width, base, train_len):
  scheme = rope(width, base, train_len)
  for s in (2, 8):
    yarn, parts = (
      posenc.positions(f'{name}({arguments})', scheme, train_len, s * train_len) for name in ('yarn', 'ntk_by_parts')
    )
    a = 0.1 * np.log(s) + 1
    np.testing.assert_allclose(yarn.logit_scale_T, a**2, rtol=1e-6)
    same(yarn.replace(logit_scale_T=parts.logit_scale_T), parts)
    np.testing.assert_array_equal(parts.logit_scale_T, 1)


@pytest.mark.parametrize('width, base, train_len', SHAPES)
def test_llama31_is_the_rotations_ramp_from_1_to_4(width, base, train_len):
  scheme = rope(width, base, train_len)
  ours, parts = (
    posenc.positions(text, scheme, train_len, 8 * train_len)
    for text in ('llama31', 'ntk_by_parts(ramp="rotations", beta_slow=1.0, beta_fast=4.0)')
  )
  same(ours, parts)
  with pytest.raises(AssertionError):
    same(ours, posenc.positions('ntk_by_parts(ramp="rotations")', scheme, train_len, 8 * train_len))


@pytest.mark.parametrize('width, base, train_len', SHAPES)
def test_ntk_is_rope_with_a_larger_base(width, base, train_len):
  rebased = rope(width, float(base * 8.0 ** (width / (width - 2))), train_len)
  for method in ('ntk(factor=8)', 'ntk', 'dynamic_ntk', 'dynamic_ntk_hf(factor=1)'):
    pos = posenc.positions(method, rope(width, base, train_len), train_len, 8 * train_len)
    np.testing.assert_allclose(pos.inv_freq_P, rebased.inv_freq_P, rtol=1e-6)


# Temperatures.


def test_attention_factor():
  """sqrt(1/t) = 0.1 ln s + 1 sharpens: logits times 1.459 at s = 8, not times sqrt(1/8)."""
  assert factor('yarn(factor=8)') == pytest.approx(1.2079442, rel=1e-6)
  assert factor('yarn(factor=8)') ** 2 == pytest.approx(1.459, abs=5e-4)
  assert factor('yarn(factor=64)') == pytest.approx(1.4158883, rel=1e-6)
  assert factor('yarn(factor=64, attention_factor=1.0)') == 1
  assert factor('yarn(factor=4, attention_factor=0.5)') == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize(
  'arguments, a',
  [
    ('factor=16, mscale=1.0, mscale_all_dim=1.0', 1.0),
    ('factor=40, mscale=0.707, mscale_all_dim=1.0', 0.9210424),
    ('factor=40, mscale=1.0, mscale_all_dim=0.707', 1.0857264),
    ('factor=16', 1.2772589),
    ('factor=1, mscale=0.5, mscale_all_dim=1.0', 1.0),
    ('factor=40, mscale=1.0, mscale_all_dim=0.707, attention_factor=1.25', 1.25),
  ],
)
def test_deepseek_mscale(arguments, a):
  assert factor(f'yarn({arguments})') == pytest.approx(a, rel=1e-6)


def test_logn():
  """max(1, ln(i + 1)/ln L) per query, 0-based: exactly 1 up to L tokens, 1.5 at i + 1 = L**1.5."""
  pos = posenc.positions('logn', rope(train_len=64), train_len=64, eval_len=4096)
  scale = np.asarray(pos.logit_scale_T)
  np.testing.assert_array_equal(scale[:64], 1)
  assert (np.diff(scale[63:]) > 0).all()
  np.testing.assert_allclose(scale[[64, 511, 4095]], [np.log(65) / np.log(64), 1.5, 2], rtol=1e-6)
  same(pos.replace(logit_scale_T=jnp.ones(4096)), posenc.positions('none', rope(), 64, 4096))


@pytest.mark.parametrize('scheme', ONE_OF_EACH)
def test_logn_and_none_mean_something_for_every_scheme(scheme):
  """The temperature is on q.k, so an additive bias is no obstacle."""
  slot = build(scheme)
  for method in ('logn', 'none', 'none+logn'):
    pos = posenc.positions(method, slot, train_len=64, eval_len=128)
    assert (float(pos.logit_scale_T[-1]) > 1) == ('logn' in method)


def test_logn_as_trained_is_not_clipped():
  pos = posenc.positions('logn(trained=True)', rope(), 128, 256)
  np.testing.assert_allclose(pos.logit_scale_T, np.log(np.arange(1, 257)) / np.log(128), rtol=1e-6)


# LongRoPE, resonance.


def test_longrope_divides():
  """lambda = s is PI; YaRN's lambdas are by-parts. A multiplied frequency would turn faster than the trained one."""
  scheme = rope()
  for long, method in ((np.full(16, 8.0), 'pi(factor=8)'), (stretch('yarn(factor=8)'), 'ntk_by_parts(factor=8)')):
    ours = posenc.positions(f'longrope(long={tuple(long.tolist())}, attention=1)', scheme, 128, 1024)
    theirs = posenc.positions(method, scheme, 128, 1024)
    np.testing.assert_allclose(ours.inv_freq_P, theirs.inv_freq_P, rtol=1e-6)
    np.testing.assert_array_equal(ours.logit_scale_T, 1)


def test_longrope_switches_at_the_training_length():
  long, short = (2.0,) * 16, (1.5,) * 16
  text = f'longrope(long={long}, short={short}, factor=8)'
  for length, lam in ((64, 1.5), (128, 1.5), (129, 2.0), (1024, 2.0)):
    np.testing.assert_allclose(stretch(text, eval_len=length), lam, rtol=1e-6)
    pos = posenc.positions(text, rope(), 128, length)  # the temperature is that of s at every length, as released
    np.testing.assert_allclose(pos.logit_scale_T * pos.key_scale_T, 1 + np.log(8) / np.log(128), rtol=1e-6)
  dynamic = f'longrope_dynamic(long={long}, factor=8)'
  for length, lam in ((64, 1), (128, 1), (576, 1.5), (1024, 2)):
    np.testing.assert_allclose(stretch(dynamic, eval_len=length), lam, rtol=1e-6)


def test_longrope_leaves_the_first_tokens_alone():
  """Both sides below n-hat: the trained logit. One side: a once, two frequencies. Neither: a squared."""
  scheme, length, onset = rope(), 300, 5
  text = f'longrope(long={(4.0,) * 16}, factor=8, onset={onset})'
  pos, plain = posenc.positions(text, scheme, 128, length), posenc.positions('none', scheme, 128, length)
  a = np.sqrt(1 + np.log(8) / np.log(128))
  for scale_T in (pos.logit_scale_T, pos.key_scale_T):
    np.testing.assert_allclose(scale_T, np.where(np.arange(length) < onset, 1, a), rtol=1e-6)
  x = jax.random.normal(jax.random.key(0), (1, length, 1, 32))
  (q, _), (q_plain, _) = scheme.rotate(x, x, pos), scheme.rotate(x, x, plain)
  np.testing.assert_array_equal(q[:, :onset], q_plain[:, :onset])
  assert float(jnp.abs(q[:, onset] - q_plain[:, onset]).max()) > 0.1


def test_resonance_makes_wavelengths_whole():
  scheme = rope()
  for method in ('resonance', 'yarn(factor=8)+resonance', 'pi+resonance'):
    pos = posenc.positions(method, scheme, 128, 1024)
    before = posenc.positions(method.removesuffix('resonance').removesuffix('+') or 'none', scheme, 128, 1024)
    wavelength, was = (2 * np.pi / np.asarray(p.inv_freq_P, np.float64) for p in (pos, before))
    np.testing.assert_allclose(wavelength, np.round(was), rtol=1e-6)
    np.testing.assert_array_equal(pos.logit_scale_T, before.logit_scale_T)
  assert np.round(2 * np.pi / np.asarray(posenc.positions('resonance', scheme, 128, 9).inv_freq_P))[0] == 6


# Second position maps and windows.


def distances(method, length=1024, train_len=128, text='rope'):
  """f64[T, T] of what the methods make of i - j, and which keys are seen."""
  pos = posenc.positions(method, build(text, train_len=train_len), train_len, length)
  i = np.arange(length)
  back = i[:, None] - i[None, :]
  seen = (back >= 0) & ((back < np.asarray(pos.window_T)[:, None]) | (i < float(pos.sinks)))
  if pos.far is None:
    return back * 1.0, seen
  far = np.asarray(pos.far.at_q_T, np.float64)[:, None] - np.asarray(pos.far.at_k_T, np.float64)
  return np.where(back < float(pos.far.threshold), back, far), seen


@pytest.mark.parametrize('method', REMAPPED)
@pytest.mark.parametrize('times', [1, 2, 8, 32])
def test_no_distance_is_new(method, times):
  """By its bare name, at every length: that is the whole argument of these methods. LM-Infinite's far keys are at L."""
  mapped, seen = distances(method, length=64 * times, train_len=64)
  assert mapped[seen].max() <= (64 if method == 'lm_infinite' else 63)
  back = np.subtract.outer(np.arange(64 * times), np.arange(64 * times))
  near = seen & (back < 32)
  np.testing.assert_array_equal(mapped[near], back[near])


def test_rectified_distances():
  back = np.maximum(np.subtract.outer(np.arange(300), np.arange(300)), 0)
  mapped, seen = distances('rerope(w=50)', 300)
  np.testing.assert_array_equal(mapped[seen], np.minimum(back, 50)[seen])
  mapped, seen = distances('leaky_rerope(w=50, k=16)', 300)
  np.testing.assert_allclose(mapped[seen], np.where(back < 50, back, 50 + (back - 50) / 16)[seen], atol=1e-4)
  mapped, seen = distances('lm_infinite(n_local=50, n_global=3)', 300)
  np.testing.assert_array_equal(seen, np.tri(300, dtype=bool) & ((back < 50) | (np.arange(300) < 3)))
  np.testing.assert_array_equal(mapped[seen], np.minimum(back, 50)[seen])


@pytest.mark.parametrize('scheme', ONE_OF_EACH)
@pytest.mark.parametrize('method', REMAPPED)
def test_a_second_map_needs_distances(method, scheme):
  """A curve of a method that changes nothing would look like a result."""
  why = {
    'nope': 'reads no distances', 'sinusoidal': 'reads where a token stands', 'cope': 'runs a sum',
    'learned': 'reads where a token stands', 'fire': 'reads where a token stands', 'fox': 'reads no distances',
  }  # fmt: skip
  slot = build(scheme, train_len=512)
  if scheme in why:
    with refused(posenc.Unsupported, method, why[scheme]):
      posenc.positions(method, slot, 128, 512)
  else:
    assert posenc.positions(method, slot, 128, 512).far is not None


def test_these_are_no_functions_of_the_distance():
  """The exceptions to relative positions, each for a reason of its own: groups, first tokens, the query's own place."""
  mapped, _ = distances('self_extend(group=4, window=8)', 64)
  assert mapped[20, 5] != mapped[23, 8]  # i modulo G matters
  rerope, _ = distances('rerope(w=8)', 64)
  assert rerope[20, 5] == rerope[23, 8]
  scheme = rope()
  for onset, same_logit in ((0, True), (4, False)):
    pos = posenc.positions(f'longrope(long={(4.0,) * 16}, onset={onset})', scheme, 128, 256)
    x = jnp.ones((1, 256, 1, 32))
    q, k = scheme.rotate(x, x, pos)
    near, shifted = (float((q[0, i] * k[0, i - 3]).sum()) for i in (6, 106))  # key 3 lies below the onset, key 103 not
    assert (abs(near - shifted) < 1e-3) == same_logit
  fire, at = build('fire(init_len=8)'), jnp.arange(64.0)
  bias = np.asarray(fire.bias(at, at))
  assert abs(bias[:, 20, 5] - bias[:, 50, 35]).max() > 1e-4


def test_a_window_follows_the_trained_one():
  """Without a number: the window of the scheme, else the training length."""
  for text, want in (('rope', 128), ('rope(window=9)', 9)):
    for method in ('sliding_window', 'sink_window', 'lm_infinite'):
      pos = posenc.positions(method, build(text), 128, 512)
      np.testing.assert_array_equal(pos.window_T, want)
  assert float(posenc.positions('sink_window', build('rope'), 128, 512).sinks) == 4


# Composition, patterns, refusals.


def test_scales_multiply():
  scheme = rope()
  yarn, logn, both, other = (
    posenc.positions(m, scheme, 128, 1024)
    for m in ('yarn(factor=8)', 'logn', 'yarn(factor=8)+logn', 'logn+yarn(factor=8)')
  )
  np.testing.assert_allclose(both.logit_scale_T, yarn.logit_scale_T * logn.logit_scale_T, rtol=1e-6)
  same(both.replace(logit_scale_T=yarn.logit_scale_T), yarn)
  np.testing.assert_allclose(other.logit_scale_T, both.logit_scale_T, rtol=1e-6)
  np.testing.assert_array_equal(other.inv_freq_P, both.inv_freq_P)
  same(posenc.positions('none+yarn(factor=8)+none', scheme, 128, 1024), yarn)


@pytest.mark.parametrize('first, second', list(itertools.product(FREQUENCY, FREQUENCY)))
def test_a_field_has_one_writer(first, second):
  with refused(SpecError, first, f'{second} both write inv_freq_P'):
    posenc.positions(f'{first}+logn+{second}', rope(), 128, 256)


@pytest.mark.parametrize('scheme', [name for name in ONE_OF_EACH if name not in ('rope', 'pope')])
@pytest.mark.parametrize('method', FREQUENCY)
def test_a_frequency_method_needs_frequencies(method, scheme):
  """PI too: a scheme without a rotation is not extended by pretending that it has one."""
  with refused(posenc.Unsupported, method, 'no frequencies'):
    posenc.positions(method, build(scheme, train_len=512), train_len=128, eval_len=256)


def test_a_pattern_has_positions_per_slot():
  """A method acts where it can; the other slots keep their trained positions."""
  slots = (rope(), build('nope'), rope(base=500000.0), build('alibi'))
  out = posenc.positions('yarn(factor=8)', slots, 128, 1024)
  assert isinstance(out, tuple) and len(out) == 4
  for slot, pos in zip(slots, out):
    method = 'yarn(factor=8)' if slot.rot else 'none'
    same(pos, posenc.positions(method, slot, 128, 1024))
  single = posenc.positions('yarn(factor=8)', slots[:1], 128, 1024)
  assert isinstance(single, tuple) and len(single) == 1
  assert isinstance(posenc.positions('yarn(factor=8)', slots[0], 128, 1024), posenc.Positions)


def test_a_method_may_address_slots_by_name():
  slots = [rope(), build('nope'), build('alibi')]
  everywhere, rotary = (posenc.positions(m, slots, 128, 1024) for m in ('logn', 'logn@rope'))
  same(rotary[0], everywhere[0])
  for slot, pos in zip(slots[1:], rotary[1:]):
    same(pos, posenc.positions('none', slot, 128, 1024))
  mixed = posenc.positions('pi@rope+logn@nope', slots, 128, 1024)
  same(mixed[0], posenc.positions('pi', slots[0], 128, 1024))
  same(mixed[1], posenc.positions('logn', slots[1], 128, 1024))
  same(mixed[2], posenc.positions('none', slots[2], 128, 1024))
  for method, word in (('logn@t5', 't5'), ('pi@nope', 'nope'), ('pi@rope+pi@alibi', 'alibi')):
    with refused(posenc.Unsupported, method.split('+')[-1].split('@')[0], word):
      posenc.positions(method, slots, 128, 1024)
  with refused(SpecError, 'pi', 'ntk', 'inv_freq_P'):
    posenc.positions('pi@rope+ntk', slots, 128, 1024)
  with refused(posenc.Unsupported, 'pi', 'no frequencies'):
    posenc.positions('pi', slots[1:], 128, 1024)


@pytest.mark.parametrize(
  'method, words',
  [
    ('yarn(beta_fast=1.0, beta_slow=32.0)', ['yarn', 'beta_fast = 1.0', 'beta_slow = 32.0', 'allowed']),
    ('ntk_by_parts(beta_slow=0.0)', ['ntk_by_parts', 'beta_slow = 0.0', 'allowed']),
    ('yarn(beta_fast=1.0)', ['yarn', 'beta_fast = 1.0', 'beta_slow = 1.0', 'allowed']),
    ('llama31(low=4.0, high=1.0)', ['llama31', 'low = 4.0', 'high = 1.0', 'allowed']),
    ('yarn(ramp="indx")', ['yarn', "ramp = 'indx'", "did you mean 'index'?", 'rotations']),
    ('yarn(factor=4, attn_factor=0.8782489)', ['yarn', 'attn_factor', "did you mean 'attention_factor'?"]),
    ('yarn(mscale=1.0)', ['yarn', 'mscale = 1.0', 'mscale_all_dim = None', 'both']),
    ('yarn(attention_factor=0.0)', ['yarn', 'attention_factor = 0.0', 'above 0']),
    ('yarn(attention_factor=True)', ['yarn', 'attention_factor = True', 'above 0']),
    ('pi(factor=0.5)', ['pi', 'factor = 0.5', 'at least 1']),
    ('pi(factor=-8)', ['pi', 'factor = -8', 'at least 1']),
    ('pi(factor="8")', ['pi', "factor = '8'", 'at least 1']),
    ('pi(factor=True)', ['pi', 'factor = True', 'at least 1']),
    ('dynamic_ntk(factor=0.9)', ['dynamic_ntk', 'factor = 0.9', 'at least 1']),
    ('dynamic_ntk_hf(factor=0.5)', ['dynamic_ntk_hf', 'factor = 0.5', 'at least 1']),
    ('yran', ["method = 'yran'", "did you mean 'yarn'?", 'llama31']),
    ('none(factor=8)', ['none', 'factor', 'allowed: none']),
    ('logn(base=2)', ['logn', 'base', 'allowed: trained']),
    ('ntk_mixed_su(power=0.0)', ['ntk_mixed_su', 'power = 0.0', 'above 0']),
    ('longrope', ['longrope', 'long = None', 'a tuple of 16 numbers of at least 1']),
    ('longrope(long=(1.0, 2.0))', ['longrope', 'long = 2 values', 'a tuple of 16']),
    (f'longrope(long={(0.5,) * 16})', ['longrope', 'long', 'at least 1']),
    (f'longrope(long={(1.5,) * 16}, short=(1.0,))', ['longrope', 'short = 1 values', 'a tuple of 16']),
    (f'longrope(long={(1.5,) * 16}, onset=-1)', ['longrope', 'onset = -1', 'at least 0']),
    (f'longrope(long={(1.5,) * 16}, attention="sue")', ['longrope', "attention = 'sue'", "'su'", "'yarn'"]),
    (f'longrope(long={(1.5,) * 16}, attention=0)', ['longrope', 'attention = 0', 'above 0']),
    ('longrope_dynamic(factor=8)', ['longrope_dynamic', 'long = None', 'a tuple of 16']),
    (f'longrope_dynamic(long={(1.5,) * 16})', ['longrope_dynamic', 'factor = None', 'above 1']),
    ('sliding_window(window=0)', ['sliding_window', 'window = 0', 'at least 1']),
    ('sink_window(sinks=-1)', ['sink_window', 'sinks = -1', 'at least 0']),
    ('lm_infinite(n_local=1.5)', ['lm_infinite', 'n_local = 1.5', 'whole number']),
    ('rerope(w=0)', ['rerope', 'w = 0', 'at least 1']),
    ('leaky_rerope(k=0.5)', ['leaky_rerope', 'k = 0.5', 'at least 1']),
    ('self_extend(group=0)', ['self_extend', 'group = 0', 'at least 1']),
    ('self_extend(window=True)', ['self_extend', 'window = True', 'whole number']),
    ('rerope+lm_infinite', ['rerope and lm_infinite both write far']),
    ('resonance+yarn', ['resonance and yarn both write inv_freq_P']),
    ('sliding_window+sink_window', ['sliding_window and sink_window both write window_T']),
  ],
)
def test_refused_methods(method, words):
  with refused(SpecError, *words):
    posenc.positions(method, rope(), 128, 256)


@pytest.mark.parametrize('method', [m for m in posenc.METHODS if 'factor' in keywords(posenc.METHODS[m])])
@pytest.mark.parametrize('factor', ['0', '-1', '0.5', '"8"'])
def test_a_bad_factor_is_refused_on_every_scheme(method, factor):
  """Also where the method would be unsupported: a typo is an error, not an outcome to record."""
  for name in posenc.SCHEMES:
    with refused(SpecError, 'factor'):
      scheme = build(name if name != 'rope2d' else 'rope2d(width=16)')
      posenc.positions(f'{method}(factor={factor})', scheme, 128, 128)

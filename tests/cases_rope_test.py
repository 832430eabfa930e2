"""Cases R of docs/CASES.md: what went wrong with rotary positions and their scaling elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc
from decoding import VOCAB, decode, small_lm
from forms import FREQUENCY, build, differs, jit, refused, rope, same
from posenc.rope import turn
from spec import SpecError


def at(method, length, scheme, train_len):
  return posenc.positions(method, scheme, train_len, length)


def attention_factor(method, length, train_len, width=8):
  """What queries and keys are multiplied by: the logits get its square."""
  scale_T = np.float64(at(method, length, rope(width, train_len=train_len), train_len).logit_scale_T)
  assert np.ptp(scale_T) == 0
  return np.sqrt(scale_T[0])


@pytest.mark.parametrize('method', ['dynamic_ntk(factor=4)', 'dynamic_ntk_hf(factor=4)'])
def test_R01(method):
  """A long pass leaves nothing behind: 512, 4096, 512 tokens, and lengths in any order."""
  scheme = rope(64, train_len=512)
  first, long, second = (at(method, n, scheme, 512) for n in (512, 4096, 512))
  same(first, second)
  same(first, at('none', 512, scheme, 512))
  assert scheme.base == 10000.0
  assert differs(first.inv_freq_P, long.inv_freq_P)
  lengths = (256, 512, 1024, 2048, 4096)
  up, down = ({n: at(method, n, scheme, 512) for n in order} for order in (lengths, lengths[::-1]))
  for n in lengths:
    same(up[n], down[n])


@pytest.mark.parametrize('length', [256, 64])
def test_R03(length):
  """Below the training length the bracket is negative (-1 at 256): the base stays, and so does every number."""
  assert 4 * 256 / 512 - 3 == -1
  scheme = rope(64, train_len=512)
  for method in ('dynamic_ntk_hf(factor=4)', 'dynamic_ntk(factor=4)', 'dynamic_ntk_qwen'):
    pos = at(method, length, scheme, 512)
    same(pos, at('none', length, scheme, 512))
    assert np.isfinite(pos.inv_freq_P).all()


def test_R05():
  """Positions stay whole numbers, a factor is not ignored, and what counts as long is the length alone."""
  scheme = rope(64, train_len=512)
  none, ntk, pi = (at(m, 1024, scheme, 512) for m in ('none', 'ntk(factor=8)', 'pi(factor=8)'))
  for pos in (none, ntk, pi):
    np.testing.assert_array_equal(pos.at_T, np.arange(1024))
  assert none.inv_freq_P[5] == pytest.approx(0.2371374, abs=1e-7)
  assert pi.inv_freq_P[5] == pytest.approx(0.0296422, abs=1e-7)
  assert ntk.inv_freq_P[0] == 1 and ntk.inv_freq_P[-1] == pytest.approx(scheme.inv_freq_P[-1] / 8, rel=1e-6)
  many, one = (build('rope', head_dim=64, heads=n, train_len=512) for n in (64, 1))
  for method in ('dynamic_ntk', 'dynamic_ntk_hf', 'dynamic_yarn', 'dynamic_pi'):
    np.testing.assert_array_equal(at(method, 40, many, 512).inv_freq_P, none.inv_freq_P)  # 64 heads are no length
    assert differs(at(method, 1024, one, 512).inv_freq_P, none.inv_freq_P)
    same(at(method, 1024, one, 512), at(method, 1024, many, 512))


def test_R07():
  """An explicit attention factor counts, 1.0 too; another spelling is an error."""
  assert attention_factor('yarn(factor=64)', 1024, 512) == pytest.approx(1.4158883, abs=1e-6)
  assert attention_factor('yarn(factor=64, attention_factor=1.0)', 1024, 512) == 1.0
  assert attention_factor('yarn(factor=4)', 1024, 512) == pytest.approx(1.1386294, abs=1e-6)
  assert pytest.approx(1.0, abs=1e-6) == 1.1386294 * 0.8782489  # the other key's meaning: a factor on the factor
  with refused(SpecError, "unknown argument attn_factor = 0.8782489: did you mean 'attention_factor'?"):
    posenc.check_method('yarn(factor=4, attn_factor=0.8782489)')


def test_R09():
  """Hugging Face's convention; DeepSeek's own, where the softmax scale compensates, is in `yarn`'s docstring."""
  for keywords, want in (
    ('factor=16, mscale=1.0, mscale_all_dim=1.0', 1.0),
    ('factor=40, mscale=0.707, mscale_all_dim=1.0', 0.9210424),
    ('factor=40, mscale=1.0, mscale_all_dim=0.707', 1.0857264),
    ('factor=16', 1.2772589),
  ):
    assert attention_factor(f'yarn({keywords})', 1024, 512) == pytest.approx(want, abs=1e-6), keywords
  assert 'DeepSeek' in posenc.METHODS['yarn'].__doc__
  with refused(SpecError, 'mscale = 1.0, mscale_all_dim = None: both are allowed, or neither'):
    at('yarn(factor=16, mscale=1.0)', 1024, rope(8), 512)


def test_R11():
  """The ramp is the training length's, not the extended one's; a factor that is given is the factor."""
  scheme = rope(64, train_len=512)
  pos = at('yarn(factor=8)', 4096, scheme, 512)
  assert pos.inv_freq_P[8] == pytest.approx(0.06634615, rel=1e-6)
  assert pos.inv_freq_P[16] == pytest.approx(0.00125, rel=1e-6)
  wrong = at('yarn(factor=8)', 4096, scheme, 4096)
  np.testing.assert_allclose(wrong.inv_freq_P[np.array([8, 16])], [0.1, 0.00596154], rtol=1e-6)
  shorter = at('yarn(factor=8)', 4 * 512, scheme, 512)
  assert shorter.inv_freq_P[-1] == pytest.approx(scheme.inv_freq_P[-1] / 8, rel=1e-6)


def test_R12():
  """The fast end is kept and the slow end interpolated; betas the other way round are refused."""
  scheme = rope(64, train_len=512)
  divisor_P = scheme.inv_freq_P / np.float64(at('yarn(factor=8)', 4096, scheme, 512).inv_freq_P)
  assert divisor_P[0] == 1
  assert divisor_P[-1] == pytest.approx(8, rel=1e-6)
  for ramp in ('index', 'rotations'):
    with refused(SpecError, 'beta_fast = 1.0, beta_slow = 32.0', 'the ramp is inverted'):
      at(f'yarn(factor=8, beta_fast=1.0, beta_slow=32.0, ramp={ramp!r})', 4096, scheme, 512)


def test_R15():
  """From 120 to 140 tokens across a switch of factor lists at 128: the same as 140 tokens afresh.

  There is no cache to go stale: one pass has one list. Keys of a cache would have to be rotated as that pass is; as
  they were when they came, they spoil the logits.
  """
  lm = small_lm('rope', layers=1, train_len=128)
  (scheme,) = lm.schemes
  method = f'longrope(short={(1.0,) * 4}, long={tuple(2.0 + pair for pair in range(4))})'
  beyond, within = (at(method, n, scheme, 128) for n in (140, 120))
  assert differs(beyond.inv_freq_P, within.inv_freq_P)
  tokens_BT = jax.random.randint(jax.random.key(0), (1, 140), 0, VOCAB)
  fresh = jit(lambda: lm.logits(lm.hidden(tokens_BT, [beyond])))()
  chunks = jit(lambda: decode(lm, tokens_BT, beyond, (120, 20)))()
  np.testing.assert_allclose(chunks, fresh, atol=1e-4)
  stale = beyond.replace(onset=jnp.float32(120))  # the first 120 tokens by the short list
  assert np.abs(jit(lambda: decode(lm, tokens_BT, stale, (120, 20)))()[:, 120:] - fresh[:, 120:]).max() > 1e-2


def test_R16():
  """sqrt(1 + ln s / ln L), and not sqrt((1 + ln s) / ln L)."""
  for s, train_len, want in ((32, 4096, 1.1902381), (8, 512, 1.1547005), (1, 512, 1.0)):
    pos = at(f'longrope(long={(1.5,) * 4}, factor={s})', train_len + 1, rope(8, train_len=train_len), train_len)
    for scale_T in (pos.logit_scale_T, pos.key_scale_T):
      np.testing.assert_allclose(scale_T, want, rtol=1e-6)
  assert np.sqrt((1 + np.log(32)) / np.log(4096)) == pytest.approx(0.7327, abs=1e-4)


def test_R17():
  """A partial rotation is counted in its own width, by methods too; the other channels pass untouched."""
  scheme = build('rope(fraction=0.25)', head_dim=64, train_len=512)
  want = [1, 0.31622777, 0.1, 0.03162278, 0.01, 0.00316228, 0.001, 0.00031623]
  np.testing.assert_allclose(scheme.inv_freq_P, want, rtol=1e-5)
  q_BTNH = jax.random.normal(jax.random.key(0), (1, 9, 4, 64))
  q, k = scheme.rotate(q_BTNH, q_BTNH[:, :, :2], at('none', 9, scheme, 512))
  np.testing.assert_array_equal(q[..., 16:], q_BTNH[..., 16:])
  np.testing.assert_array_equal(k[..., 16:], q_BTNH[:, :, :2, 16:])
  assert (np.asarray(q != q_BTNH)[:, 1:, :, :16]).all()
  pair = np.arange(8)
  ntk = at('ntk(factor=4)', 2048, scheme, 512).inv_freq_P
  np.testing.assert_allclose(ntk, (1e4 * 4 ** (16 / 14)) ** (-pair / 8), rtol=1e-6)
  whole = build('rope', head_dim=16, train_len=512)  # what a head of that width is told
  same(at('yarn(factor=4)', 2048, scheme, 512), at('yarn(factor=4)', 2048, whole, 512))


@pytest.mark.parametrize('method', ['none', *FREQUENCY])
def test_R18(method):
  """No table that ends: angles at and beyond the training length are the closed form, each of its own."""
  scheme = rope(32, train_len=128)
  pos = at(method, 4096, scheme, 128)
  cos_TP, sin_TP = scheme.cos_sin(pos)
  for row in (127, 128, 4095):
    angle_P = row * np.float64(pos.inv_freq_P)
    np.testing.assert_allclose(cos_TP[row], np.cos(angle_P), atol=1e-3)
    np.testing.assert_allclose(sin_TP[row], np.sin(angle_P), atol=1e-3)
  both = np.concatenate([cos_TP, sin_TP], -1)
  assert (np.abs(both[128:] - both[127]).max(-1) > 1e-3).all()
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 4096, 1, 32))
  q, k = (turn(jnp.broadcast_to(x[:, :1], x.shape), cos_TP, sin_TP, 'half_split')[0, :, 0] for x in (q, k))
  starts = np.array([0, 100, 1000, 4000])
  scores = np.einsum('pH,pH->p', q[starts + 7], k[starts])
  assert np.ptp(scores) < 1e-3

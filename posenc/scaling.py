"""Scaling methods: what may be changed at evaluation so that a model trained at L tokens reads l > L of them.

A method looks at the scheme, L (`train_len`, or the original length of a fine-tuned model) and l (`eval_len`) and
returns the fields of `Positions` that it writes. numpy float64 in and out. `factor=None` follows the length, s = l/L:
an oracle told how long its input is; a number is one model for the whole curve.

Symbols, as in YaRN (Peng et al. 2023, 2309.00071): theta_p trained frequency of pair p, d rotary width, w_p =
2 pi / theta_p wavelength, r_p = L / w_p turns made within L, s scale.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from posenc import rotations
from posenc.base import Far, Positions, PositionScheme, Unsupported
from spec import SpecError, one_of

Writes = dict[str, Any]
Method = Callable[..., Writes]
WITHIN: set[Method] = set()  # methods that act at or below the training length too
TRANSFORMS: set[Method] = set()  # methods that write a field as a function of what stands in it


def within(method: Method) -> Method:
  """Tags a method whose bare name changes something within the training length: a price to be measured at 1x."""
  WITHIN.add(method)
  return method


def transform(method: Method) -> Method:
  """Tags a method that reads the fields it writes, so that it may follow another writer of them: `yarn+resonance`."""
  TRANSFORMS.add(method)
  return method


# Frequencies, and the temperatures that go with them.


def _frequencies(scheme: PositionScheme) -> np.ndarray:
  """The trained ones. A method scales them or works them out anew from the base; one of 0 must stay 0."""
  theta = scheme.inv_freq_P
  if not scheme.rot or not theta.any():
    raise Unsupported(f'{scheme.name} has no frequencies along the sequence to scale')
  return theta


def _scale(factor: float | None, train_len: int, eval_len: int) -> float:
  """s >= 1. A factor below 1 (or not a number) would stretch frequencies the model knows: refused, not clamped."""
  if factor is None:
    return max(1.0, eval_len / train_len)
  if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not 1 <= factor < np.inf:
    raise SpecError(f'factor = {factor!r}: a finite number of at least 1 is allowed, or None to follow the length')
  return float(factor)


def none(pos: Positions, scheme: PositionScheme, train_len: int, eval_len: int) -> Writes:
  """Positions 0, 1, 2 ... and the trained frequencies: the model as it is."""
  return {}


def pi(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """Position interpolation, Chen et al. 2023 (2306.15595) eq. 4: every frequency divided by s.

  Frequencies rather than positions, so that positions stay integers, exact in float32.
  """
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _frequencies(scheme) / s}


def _capped(factor: float | None, train_len: int, eval_len: int) -> float:
  """s = max(1, l/L), at most `factor`: of methods that always follow the length."""
  return min(_scale(None, train_len, eval_len), np.inf if factor is None else _scale(factor, train_len, eval_len))


def dynamic_pi(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """Dynamic position interpolation: `pi` with s = max(1, l/L) of the pass at hand. factor: the largest s, a cap."""
  s = _capped(factor, train_len, eval_len)
  return {'inv_freq_P': _frequencies(scheme) / s}


def _ntk(scheme: PositionScheme, s: float) -> np.ndarray:
  theta = _frequencies(scheme)
  if scheme.rot < 4:
    raise Unsupported(f'ntk divides by d - 2, and the rotary width d is {scheme.rot}')
  d = scheme.rot
  base = np.float64(scheme.base) * s ** (d / (d - 2))
  return theta if s == 1 else np.where(theta > 0, base ** (-np.arange(0, d, 2) / d), 0.0)


def ntk(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """NTK-aware (bloc97 2023), YaRN (2309.00071) eq. 16: base' = base s**(d/(d-2)), so pair 0 is kept and the last is
  divided by exactly s."""
  return {'inv_freq_P': _ntk(scheme, _scale(factor, train_len, eval_len))}


def dynamic_ntk(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """Dynamic NTK, YaRN (2309.00071) section 3.3: `ntk` with s = max(1, l/L) of the pass at hand. factor: a cap on s."""
  return {'inv_freq_P': _ntk(scheme, _capped(factor, train_len, eval_len))}


def dynamic_ntk_hf(pos, scheme, train_len, eval_len, *, factor: float = 2.0) -> Writes:
  """Hugging Face's `dynamic`: base times (f l/L - (f - 1))**(d/(d-2)) for l > L.

  f is not the extension ratio: f = 2 at l = 2L divides the last frequency by 3.
  """
  f = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _ntk(scheme, max(1.0, f * eval_len / train_len - (f - 1)))}


def dynamic_ntk_qwen(pos, scheme, train_len, eval_len) -> Writes:
  """Qwen's dynamic NTK (`get_ntk_alpha`): `ntk` with s = max(1, 2**ceil(log2(l/L) + 1) - 1): 1, 3, 7, 15 ..."""
  return {'inv_freq_P': _ntk(scheme, max(1.0, 2 ** np.ceil(np.log2(eval_len / train_len) + 1) - 1))}


def ntk_mixed_su(pos, scheme, train_len, eval_len, *, factor: float | None = None, power: float = 0.75) -> Writes:
  """Mixed-base NTK (Su 2023, kexue.fm 9706): lambda_p = exp(a (p + 1)**power), a = ln s / (d/2)**power.

  The last pair is divided by s as in `ntk`, but pair 0 is slowed down too. His code fixes s = 12.
  """
  if not 0 < power < np.inf:
    raise SpecError(f'power = {power!r}: a number above 0 is allowed')
  s, theta = _scale(factor, train_len, eval_len), _frequencies(scheme)
  pair = np.arange(1, len(theta) + 1, dtype=np.float64)
  return {'inv_freq_P': theta / np.exp(np.log(s) * (pair / len(theta)) ** power)}


def _kept(scheme, train_len, beta_fast, beta_slow, ramp, truncate) -> np.ndarray:
  """How much of each pair is kept, 1 .. 0, on a ramp from beta_fast turns within L to beta_slow."""
  if not (np.isfinite(beta_fast) and np.isfinite(beta_slow) and beta_fast > beta_slow > 0):
    raise SpecError(
      f'beta_fast = {beta_fast!r}, beta_slow = {beta_slow!r}: beta_fast > beta_slow > 0 is allowed '
      '(the other way round the ramp is inverted)'
    )
  if ramp not in ('index', 'rotations'):
    raise SpecError(one_of('ramp', ramp, ('index', 'rotations')))
  # Only now: a typo is an error on every scheme, not an outcome to record where the method is unsupported.
  theta, d = _frequencies(scheme), scheme.rot
  if ramp == 'rotations':
    return np.clip((train_len * theta / (2 * np.pi) - beta_slow) / (beta_fast - beta_slow), 0, 1)
  low, high = (rotations.crossing(beta, d, scheme.base, train_len) for beta in (beta_fast, beta_slow))
  if truncate:
    low, high = np.floor(low), np.ceil(high)
  low, high = max(low, 0.0), min(high, d - 1.0)
  return 1 - np.clip((np.arange(d // 2) - low) / (high - low if high != low else 1e-3), 0, 1)


def _by_parts(scheme, train_len, s, beta_fast, beta_slow, ramp, truncate) -> np.ndarray:
  keep = _kept(scheme, train_len, beta_fast, beta_slow, ramp, truncate)
  return (1 - keep) * scheme.inv_freq_P / s + keep * scheme.inv_freq_P


def ntk_by_parts(
  pos,
  scheme,
  train_len,
  eval_len,
  *,
  factor: float | None = None,
  beta_fast: float = 32.0,
  beta_slow: float = 1.0,
  ramp: str = 'index',
  truncate: bool = True,
) -> Writes:
  """NTK-by-parts, YaRN (2309.00071) section 3.2: theta' = (1 - g_p) theta/s + g_p theta, a blend in frequency.

  ramp: 'rotations' is the paper's eq. 17-18, g = clip((r_p - beta_slow)/(beta_fast - beta_slow), 0, 1); 'index' is the
    released code, linear in p between c(beta_fast) and c(beta_slow), c(r) = d ln(L/(2 pi r)) / (2 ln base), rounded
    outwards when `truncate`. They differ by up to 2.3x.
  """
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _by_parts(scheme, train_len, s, beta_fast, beta_slow, ramp, truncate)}


def ntk_by_parts_v0(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """NTK-by-parts before the paper (jquesnelle/yarn, `LlamaPartNTK...`): PI, `ntk` and the trained frequency mixed.

  Two index ramps with the constants that its authors found on LLaMA: from PI at 0.75 turns within L to `ntk` at 1.25,
  then from that at 2 turns to the trained frequency at 16.
  """
  s, theta = _scale(factor, train_len, eval_len), _frequencies(scheme)
  to_ntk = _kept(scheme, train_len, 1.25, 0.75, 'index', True)
  to_trained = _kept(scheme, train_len, 16.0, 2.0, 'index', True)
  mixed = (1 - to_ntk) * theta / s + to_ntk * _ntk(scheme, s)
  return {'inv_freq_P': (1 - to_trained) * mixed + to_trained * theta}


def _mscale(s: float, c: float = 1.0) -> float:
  return 0.1 * c * np.log(s) + 1.0 if s > 1 else 1.0


def yarn(
  pos,
  scheme,
  train_len,
  eval_len,
  *,
  factor: float | None = None,
  beta_fast: float = 32.0,
  beta_slow: float = 1.0,
  ramp: str = 'index',
  truncate: bool = True,
  attention_factor: float | None = None,
  mscale: float | None = None,
  mscale_all_dim: float | None = None,
) -> Writes:
  """YaRN, Peng et al. 2023 (2309.00071) eq. 21-22: NTK-by-parts, and queries and keys both times a = 0.1 ln s + 1, so
  logits times a**2.

  The default ramp is the released code's, which every deployed model uses; the paper's is `yarn(ramp="rotations")`.
  attention_factor: a number replaces a. mscale, mscale_all_dim: where both are given a = m(s, mscale) / m(s,
    mscale_all_dim), m(s, c) = 0.1 c ln s + 1, as in Hugging Face. DeepSeek's own attention multiplies its logits by
    m(s, mscale_all_dim)**2 besides; that belongs to that model, not to the method.
  """
  s = _scale(factor, train_len, eval_len)
  names = ('attention_factor', 'mscale', 'mscale_all_dim')
  for name, value in zip(names, (attention_factor, mscale, mscale_all_dim)):
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < np.inf):
      raise SpecError(f'{name} = {value!r}: a finite number above 0 is allowed, or None')
  if (mscale is None) != (mscale_all_dim is None):
    raise SpecError(f'mscale = {mscale!r}, mscale_all_dim = {mscale_all_dim!r}: both are allowed, or neither')
  if attention_factor is not None:
    a = attention_factor
  elif mscale is not None and mscale_all_dim is not None:
    a = _mscale(s, mscale) / _mscale(s, mscale_all_dim)
  else:
    a = _mscale(s)
  return {
    'inv_freq_P': _by_parts(scheme, train_len, s, beta_fast, beta_slow, ramp, truncate),
    'logit_scale_T': np.full(eval_len, np.float64(a) ** 2),
  }


def dynamic_yarn(
  pos,
  scheme,
  train_len,
  eval_len,
  *,
  factor: float | None = None,
  beta_fast: float = 32.0,
  beta_slow: float = 1.0,
  ramp: str = 'index',
  truncate: bool = True,
) -> Writes:
  """Dynamic YaRN: `yarn` with s = max(1, l/L) of the pass at hand, temperature included. factor: a cap on s."""
  s = _capped(factor, train_len, eval_len)
  ramps = {'beta_fast': beta_fast, 'beta_slow': beta_slow, 'ramp': ramp, 'truncate': truncate}
  return yarn(pos, scheme, train_len, eval_len, factor=s, **ramps)


def llama31(
  pos, scheme, train_len, eval_len, *, factor: float | None = None, low: float = 1.0, high: float = 4.0
) -> Writes:
  """Llama 3.1 (2407.21783, released code): wavelengths above L/low divided by s, below L/high kept, blended between.

  The rotations ramp of NTK-by-parts with (low, high) for (beta_slow, beta_fast), and no temperature: not YaRN. The
  released models fix factor = 8 (3.1) or 32 (3.2).
  """
  if not 0 < low < high < np.inf:
    raise SpecError(f'low = {low!r}, high = {high!r}: 0 < low < high is allowed')
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _by_parts(scheme, train_len, s, high, low, 'rotations', True)}


def _factors(name: str, value: Any, scheme: PositionScheme) -> np.ndarray:
  """lambda_p, one per pair, at least 1: they divide. Read as multipliers they would speed every pair up."""
  allowed = 'numbers of at least 1, one per frequency pair'
  if value is None:
    raise SpecError(f'{name} = None: needs a tuple of {len(scheme.inv_freq_P) or ""} {allowed}'.replace('  ', ' '))
  theta = _frequencies(scheme)
  numbers = isinstance(value, (tuple, list)) and all(
    isinstance(v, (int, float)) and not isinstance(v, bool) and 1 <= v < np.inf for v in value
  )
  if not numbers or len(value) != len(theta):
    what = f'{len(value)} values' if isinstance(value, (tuple, list)) else repr(value)
    raise SpecError(f'{name} = {what}: a tuple of {len(theta)} {allowed}, is allowed')
  return np.asarray(value, np.float64)


def _longrope_attention(attention: Any, s: float, train_len: int) -> float:
  """a, on queries and keys: sqrt(1 + ln s / ln L) (None, 'su'), YaRN's 0.1 ln s + 1 ('yarn'), or a number."""
  if attention in (None, 'su'):
    if train_len < 2:
      raise Unsupported(f'longrope divides by the logarithm of the training length, {train_len}')
    return np.sqrt(1 + np.log(s) / np.log(train_len))
  if attention == 'yarn':
    return _mscale(s)
  if isinstance(attention, bool) or not isinstance(attention, (int, float)) or not 0 < attention < np.inf:
    raise SpecError(f"attention = {attention!r}: 'su', 'yarn' or a finite number above 0 is allowed")
  return float(attention)


def longrope(
  pos,
  scheme,
  train_len,
  eval_len,
  *,
  short: tuple[float, ...] | None = None,
  long: tuple[float, ...] | None = None,
  factor: float | None = None,
  onset: int = 0,
  attention: str | float | None = None,
) -> Writes:
  """LongRoPE, Ding et al. 2024 (2402.13753) eq. 3: theta_p / lambda_p, and the trained theta_p for tokens below n-hat.

  long, short: lambda_p beyond and within L, for the whole pass as in Hugging Face (not per position); `short` is all
    ones unless given. They divide, and are found by a search: there is no default `long`.
  factor: s of the temperature alone.
  onset: n-hat, tokens before it keep the trained frequencies and, as in the released code, no temperature.
  attention: 'su', or None: a = sqrt(1 + ln s / ln L); 'yarn': a = 0.1 ln s + 1; or a number. The logits get a**2.
  """
  s = _scale(factor, train_len, eval_len)
  a = _longrope_attention(attention, s, train_len)
  if onset < 0:
    raise SpecError(f'onset = {onset!r}: a whole number of at least 0 is allowed')
  beyond = _factors('long', long, scheme)
  within_L = np.ones_like(beyond) if short is None else _factors('short', short, scheme)
  stretch = beyond if eval_len > train_len else within_L
  if a == 1 and (stretch == 1).all():
    return {}
  scale_T = np.where(np.arange(eval_len) < onset, 1.0, a)
  return {
    'inv_freq_P': scheme.inv_freq_P / stretch,
    'onset': float(onset),
    'logit_scale_T': scale_T,
    'key_scale_T': scale_T,
  }


def longrope_dynamic(
  pos,
  scheme,
  train_len,
  eval_len,
  *,
  long: tuple[float, ...] | None = None,
  factor: float | None = None,
  attention: str | float | None = None,
) -> Writes:
  """LongRoPE (2402.13753) that follows the length, as released: lambda_p(l) = 1 + (lambda_p - 1)(l/L - 1)/(s - 1).

  long: lambda_p found for s. factor: that s. The temperature is that of s at every length beyond L, as in the code;
  within L nothing is changed, where the code's lambda falls below 1.
  """
  if factor is None or (s := _scale(factor, train_len, eval_len)) <= 1:
    raise SpecError(f'factor = {factor!r}: needs the scale above 1 that `long` was found for')
  a = _longrope_attention(attention, s, train_len)
  stretch = _factors('long', long, scheme)
  if eval_len <= train_len:
    return {}
  stretch = 1 + (stretch - 1) * (eval_len / train_len - 1) / (s - 1)
  scale_T = np.full(eval_len, a)
  return {'inv_freq_P': scheme.inv_freq_P / stretch, 'logit_scale_T': scale_T, 'key_scale_T': scale_T}


@within
@transform
def resonance(pos, scheme, train_len, eval_len) -> Writes:
  """Resonance RoPE, Wang et al. 2024 (2403.00071): wavelengths rounded to whole numbers of tokens.

  A pair then meets no angle that it has not met in its first turn. Of the frequencies in force: `yarn+resonance`.
  """
  _frequencies(scheme)
  turning = pos.inv_freq_P > 0
  wavelength = 2 * np.pi / np.where(turning, pos.inv_freq_P, 1.0)
  return {'inv_freq_P': np.where(turning, 2 * np.pi / np.round(wavelength), 0.0)}


def logn(pos, scheme, train_len, eval_len, *, trained: bool = False) -> Writes:
  """Log-n (Su 2021; Chiang and Cholak 2022, 2202.12172): query i times max(1, ln(i + 1) / ln L).

  On q.k alone, never on an additive bias, and per query: nothing changes within the training length.

  trained: without the max, for a model whose queries were so scaled in training. To learn the scale, `ssmax`.
  """
  if train_len < 2:
    raise Unsupported(f'logn divides by the logarithm of the training length, {train_len}')
  scale_T = np.log(np.arange(1, eval_len + 1)) / np.log(train_len)
  return {'logit_scale_T': scale_T if trained else np.maximum(1.0, scale_T)}


# Which keys are seen, and second position maps. All bound the distance a model meets; none changes a frequency.


def _tokens(name: str, value: int | None, default: int, least: int = 1) -> int:
  if value is None:
    return max(default, least)
  if isinstance(value, bool) or not isinstance(value, int) or value < least:
    raise SpecError(f'{name} = {value!r}: a whole number of at least {least} is allowed, or None for {default}')
  return value


def _window(pos: Positions, scheme: PositionScheme, train_len: int, eval_len: int, name: str, value: Any) -> Writes:
  """A window of `value` tokens; None: the one trained with, or the training length. Nothing where nothing is masked."""
  width = _tokens(name, value, int(min(scheme.window, train_len)))
  return {} if width >= eval_len and (pos.window_T >= eval_len).all() else {'window_T': np.full(eval_len, width * 1.0)}


def sliding_window(pos, scheme, train_len, eval_len, *, window: int | None = None) -> Writes:
  """A query sees the last `window` keys, its own included: i - window < j <= i (Longformer, Beltagy et al. 2020,
  2004.05150). None: the training length.

  Mistral's released mask keeps one more; Hugging Face's keeps these.
  """
  return _window(pos, scheme, train_len, eval_len, 'window', window)


def sink_window(pos, scheme, train_len, eval_len, *, sinks: int = 4, window: int | None = None) -> Writes:
  """`sliding_window` plus the first `sinks` tokens: StreamingLLM (Xiao et al. 2023, 2309.17453) as one masked pass.

  Tokens keep their true positions. The paper's cache re-indexes them, which is another method, and sees one key more.
  """
  masked = _window(pos, scheme, train_len, eval_len, 'window', window)
  sinks = _tokens('sinks', sinks, 4, least=0)
  return masked and masked | {'sinks': float(sinks)}


def _remapped(scheme: PositionScheme) -> None:
  """Raises unless a second position map means something to the scheme."""
  if not scheme.relative:
    raise Unsupported(f'{scheme.name} reads where a token stands, not only distances; a second position map bends both')
  if type(scheme).init_carry is not PositionScheme.init_carry:
    raise Unsupported(f'{scheme.name} runs a sum along the row of keys, which a second position map would split')
  if not scheme.reads_distance:
    raise Unsupported(f'{scheme.name} reads no distances that a second position map could bound')


def _rectified(eval_len: int, w: float) -> Far:
  """All keys `w` or more tokens back at distance w: queries stand there, keys at 0."""
  return Far(np.full(eval_len, float(w)), np.zeros(eval_len), float(w))


def lm_infinite(pos, scheme, train_len, eval_len, *, n_local: int | None = None, n_global: int = 10) -> Writes:
  """LM-Infinite, Han et al. 2023 (2308.16137): the last n_local keys, and the first n_global as if n_local away.

  n_local: None is the training length, the paper's choice. The released code has a limit of its own on the distance;
  where it differs from n_local, two logits are added there, so the two are one number here.
  """
  masked = _window(pos, scheme, train_len, eval_len, 'n_local', n_local)
  sinks = _tokens('n_global', n_global, 10, least=0)
  _remapped(scheme)
  if not masked:
    return {}
  local = masked['window_T'][0]
  return masked | {'sinks': float(sinks), 'far': _rectified(eval_len, local)}


@within
def rerope(pos, scheme, train_len, eval_len, *, w: int | None = None) -> Writes:
  """ReRoPE (Su 2023, kexue.fm 9708): distance min(i - j, w). None: half the training length.

  The released code also multiplies queries by log-n: `rerope+logn`.
  """
  w = _tokens('w', w, train_len // 2)
  _remapped(scheme)
  return {} if eval_len <= w else {'far': _rectified(eval_len, w)}


def leaky_rerope(pos, scheme, train_len, eval_len, *, w: int | None = None, k: float | None = None) -> Writes:
  """Leaky ReRoPE (Su 2023, kexue.fm 9708): distance i - j below w, and w + (i - j - w)/k from there on.

  w: None is half the training length. k: None follows the length, the least that keeps every distance below L; Su's is
  16. His code multiplies queries by log-n too: `leaky_rerope+logn`.
  """
  w = _tokens('w', w, train_len // 2)
  if k is None:
    k = max(1.0, (eval_len - 1 - w) / max(train_len - 1 - w, 1))
  elif isinstance(k, bool) or not isinstance(k, (int, float)) or not 1 <= k < np.inf:
    raise SpecError(f'k = {k!r}: a finite number of at least 1 is allowed, or None to follow the length')
  _remapped(scheme)
  token_T = np.arange(eval_len, dtype=np.float64)
  return {} if k == 1 or eval_len <= w else {'far': Far((token_T + w * (k - 1)) / k, token_T / k, float(w))}


def self_extend(pos, scheme, train_len, eval_len, *, group: int | None = None, window: int | None = None) -> Writes:
  """Self-Extend, Jin et al. 2024 (2401.01325): i - j below `window`, else i//G + W - W//G - j//G.

  window: W, None is half the training length. group: G, None follows the length, the least that keeps every distance
  below L. Not a function of i - j alone beyond the window: it depends on i modulo G.
  """
  width = _tokens('window', window, train_len // 2)

  def longest(g: int) -> int:
    return (eval_len - 1) // g + width - width // g

  if group is None:
    group = next((g for g in range(1, eval_len) if longest(g) < train_len), max(eval_len, 1))
  group = _tokens('group', group, 1)
  _remapped(scheme)
  if group == 1 or eval_len <= width:
    return {}
  token_T = np.arange(eval_len)
  return {'far': Far((token_T // group + width - width // group) * 1.0, (token_T // group) * 1.0, float(width))}


METHODS: dict[str, Method] = {
  'none': none,
  'pi': pi,
  'dynamic_pi': dynamic_pi,
  'ntk': ntk,
  'dynamic_ntk': dynamic_ntk,
  'dynamic_ntk_hf': dynamic_ntk_hf,
  'dynamic_ntk_qwen': dynamic_ntk_qwen,
  'ntk_mixed_su': ntk_mixed_su,
  'ntk_by_parts': ntk_by_parts,
  'ntk_by_parts_v0': ntk_by_parts_v0,
  'yarn': yarn,
  'dynamic_yarn': dynamic_yarn,
  'llama31': llama31,
  'longrope': longrope,
  'longrope_dynamic': longrope_dynamic,
  'resonance': resonance,
  'logn': logn,
  'sliding_window': sliding_window,
  'sink_window': sink_window,
  'lm_infinite': lm_infinite,
  'rerope': rerope,
  'leaky_rerope': leaky_rerope,
  'self_extend': self_extend,
}

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

from posenc.base import Positions, PositionScheme, Unsupported
from spec import SpecError, one_of

Writes = dict[str, Any]
WITHIN: set[Callable[..., Writes]] = set()  # methods that act at or below the training length too


def within(method: Callable[..., Writes]) -> Callable[..., Writes]:
  """Tags a method whose bare name changes something within the training length: a price to be measured at 1x."""
  WITHIN.add(method)
  return method


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
  """Positions 0, 1, 2 ... and the trained frequencies."""
  return {}


def pi(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """Position interpolation, Chen et al. 2023 (2306.15595) eq. 4: every frequency divided by s.

  Frequencies rather than positions, so that positions stay integers, exact in float32.
  """
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _frequencies(scheme) / s}


def _ntk(scheme: PositionScheme, s: float) -> np.ndarray:
  theta = _frequencies(scheme)
  if scheme.rot < 4:
    raise Unsupported(f'ntk divides by d - 2, and the rotary width d is {scheme.rot}')
  d = scheme.rot
  base = np.float64(scheme.base) * s ** (d / (d - 2))
  return theta if s == 1 else np.where(theta > 0, base ** (-np.arange(0, d, 2) / d), 0.0)


def ntk(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """NTK-aware, YaRN eq. 16: base' = base s**(d/(d-2)), so pair 0 is kept and the last is divided by exactly s."""
  return {'inv_freq_P': _ntk(scheme, _scale(factor, train_len, eval_len))}


def dynamic_ntk(pos, scheme, train_len, eval_len, *, factor: float | None = None) -> Writes:
  """Dynamic NTK, YaRN section 3.3: `ntk` with s = max(1, l/L) of the pass at hand. factor: the largest s, a cap."""
  cap = np.inf if factor is None else _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _ntk(scheme, min(_scale(None, train_len, eval_len), cap))}


def dynamic_ntk_hf(pos, scheme, train_len, eval_len, *, factor: float = 2.0) -> Writes:
  """Hugging Face's `dynamic`: base times (f l/L - (f - 1))**(d/(d-2)) for l > L.

  f is not the extension ratio: f = 2 at l = 2L divides the last frequency by 3.
  """
  f = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _ntk(scheme, max(1.0, f * eval_len / train_len - (f - 1)))}


def _by_parts(scheme, train_len, s, beta_fast, beta_slow, ramp, truncate) -> np.ndarray:
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
    keep = np.clip((train_len * theta / (2 * np.pi) - beta_slow) / (beta_fast - beta_slow), 0, 1)
  else:
    low, high = (
      d * np.log(train_len / (2 * np.pi * beta)) / (2 * np.log(scheme.base)) for beta in (beta_fast, beta_slow)
    )
    if truncate:
      low, high = np.floor(low), np.ceil(high)
    low, high = max(low, 0.0), min(high, d - 1.0)
    keep = 1 - np.clip((np.arange(d // 2) - low) / (high - low if high != low else 1e-3), 0, 1)
  return (1 - keep) * theta / s + keep * theta


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
  """NTK-by-parts, YaRN section 3.2: theta' = (1 - g_p) theta/s + g_p theta, a blend in frequency.

  ramp: 'rotations' is the paper's eq. 17-18, g = clip((r_p - beta_slow)/(beta_fast - beta_slow), 0, 1); 'index' is the
    released code, linear in p between c(beta_fast) and c(beta_slow), c(r) = d ln(L/(2 pi r)) / (2 ln base), rounded
    outwards when `truncate`. They differ by up to 2.3x.
  """
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _by_parts(scheme, train_len, s, beta_fast, beta_slow, ramp, truncate)}


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
  """YaRN, eq. 21-22: NTK-by-parts, and queries and keys both times a = 0.1 ln s + 1, so logits times a**2.

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


def logn(pos, scheme, train_len, eval_len) -> Writes:
  """Log-n (Su 2021; Chiang and Cholak 2022, 2202.12172): query i times max(1, ln(i + 1) / ln L).

  On q.k alone, never on an additive bias, and per query: nothing changes within the training length.
  """
  if train_len < 2:
    raise Unsupported(f'logn divides by the logarithm of the training length, {train_len}')
  i = np.arange(eval_len)
  return {'logit_scale_T': np.maximum(1.0, np.log(i + 1) / np.log(train_len))}


METHODS: dict[str, Callable[..., Writes]] = {
  'none': none,
  'pi': pi,
  'ntk': ntk,
  'dynamic_ntk': dynamic_ntk,
  'dynamic_ntk_hf': dynamic_ntk_hf,
  'ntk_by_parts': ntk_by_parts,
  'yarn': yarn,
  'llama31': llama31,
  'logn': logn,
}

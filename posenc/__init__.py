"""Position schemes, scaling methods and training-time positions: three tables, and the functions that read them.

  scheme = posenc.build('rope(base=10000.0)', heads=4, head_dim=32, d_model=128, train_len=128, rngs=nnx.Rngs(0))
  pos = posenc.positions('yarn(factor=8)+logn', scheme, train_len=128, eval_len=1024)

A scaling method builds a `Positions`; a scheme reads a `Positions`. A new scheme is one file, its import and
its entry in SCHEMES; a new method one function and its entry in METHODS (`posenc/scaling.py`); a new rule for
training-time positions one class and its entry in RULES (`posenc/sampling.py`). All are listed in README.md and
docs/catalogue.md.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc import interchange, rotations
from posenc.alibi import ALiBi
from posenc.base import Bias, Dims, Far, Positions, PositionScheme, PosParam, Unsupported, with_options
from posenc.cope import CoPE
from posenc.dape import DAPE
from posenc.fire import FIRE
from posenc.fox import FoX
from posenc.kerple import KerpleLog, KerplePower
from posenc.learned import Learned
from posenc.pope import PoPE
from posenc.rope import RoPE
from posenc.rope2d import RoPE2D
from posenc.sampling import RULES, Rule
from posenc.sandwich import Sandwich
from posenc.scaling import METHODS, TRANSFORMS, WITHIN
from posenc.shaw import Shaw
from posenc.sinusoidal import Sinusoidal
from posenc.t5 import T5
from posenc.xpos import XPos
from spec import Call, SpecError, check_keywords, check_required, choose, keywords, one_of, parse

__all__ = [
  'METHODS', 'RULES', 'SCHEMES', 'WITHIN', 'Bias', 'Dims', 'Far', 'PosParam', 'PositionScheme', 'Positions', 'Rule',
  'Unsupported', 'build', 'build_rule', 'check_method', 'check_rule', 'check_scheme', 'follows_length', 'kept',
  'positions', 'remarks',
]  # fmt: skip

SCHEMES: dict[str, type[PositionScheme]] = {
  'nope': PositionScheme,
  'sinusoidal': Sinusoidal,
  'learned': Learned,
  'rope': RoPE,
  'rope2d': RoPE2D,
  'xpos': XPos,
  'alibi': ALiBi,
  't5': T5,
  'kerple_log': KerpleLog,
  'kerple_power': KerplePower,
  'fire': FIRE,
  'sandwich': Sandwich,
  'shaw': Shaw,
  'cope': CoPE,
  'fox': FoX,
  'pope': PoPE,
  'dape': DAPE,
}

_SCALES = (
  'logit_scale_T',
  'key_scale_T',
)  # fields that multiply when methods are composed; others have one writer


def check_scheme(text: str) -> Call:
  """Parses a scheme's string; raises SpecError unless it names one of SCHEMES with arguments that it takes."""
  return choose('scheme', text, SCHEMES, keywords(with_options))


def check_method(text: str) -> list[Call]:
  """Parses a method's string; raises SpecError unless every term is one of METHODS with arguments that it takes.

  'hf:{"rope_type": "yarn", "factor": 4.0}' is the method that Hugging Face's dict stands for.
  """
  calls = parse(interchange.ours(text))
  for call in calls:
    if call.name not in METHODS:
      raise SpecError(one_of('method', call.name, METHODS))
    check_keywords('method', call, keywords(METHODS[call.name]))
    check_required('method', call, METHODS[call.name])
    if call.at is not None and call.at not in SCHEMES:
      raise SpecError(one_of(f'method {call.name}: slot', call.at, SCHEMES))
  return calls


def check_rule(text: str) -> Call:
  """Parses a rule's string; raises SpecError unless it names one of RULES with arguments that it takes."""
  return choose('rule', text, RULES)


def build(text: str, *, heads: int, head_dim: int, d_model: int, train_len: int, rngs: nnx.Rngs) -> PositionScheme:
  """The scheme that `text` names, for these shapes. SpecError, in one line, if it names none."""
  call = check_scheme(text)
  options = {key: value for key, value in call.kwargs.items() if key in keywords(with_options)}
  own = {key: value for key, value in call.kwargs.items() if key not in options}
  # A whole number is the float that it equals, as in a config: jax takes no integer of 2**31 or more.
  defaults = keywords(SCHEMES[call.name].__init__)
  own = {key: float(x) if isinstance(defaults[key], float) and type(x) is int else x for key, x in own.items()}
  scheme = SCHEMES[call.name](Dims(heads, head_dim, d_model, train_len), rngs, **own)
  scheme.name = call.name
  return with_options(scheme, rngs, **options)


def build_rule(
  text: str, schemes: Sequence[PositionScheme], *, train_len: int, layers: int, method: str = 'none', base_len: int = 0
) -> Rule:
  """The rule for training-time positions that `text` names, for a pattern of schemes over so many layers.

  train_len: tokens in a training window. method: the scaling method in force while it was trained, of base_len tokens
  (0: train_len), what `positions` calls train_len.

  SpecError, in one line, if it names none, or if its positions are read by no scheme or not held by a scheme's table.
  """
  call = check_rule(text)
  rule = RULES[call.name](train_len, layers, len(schemes), **call.kwargs)
  rule.method = method
  tuned = [f'tuned at {train_len}'] if base_len not in (0, train_len) else []
  told = [part for part, plain in ((text, 'sequential'), (method, 'none')) if part != plain]
  rule.text = ', '.join([*tuned, *told]) or text
  names = ', '.join(dict.fromkeys(scheme.name for scheme in schemes))
  if rule.sampled and not any(scheme.reads_positions for scheme in schemes):
    raise SpecError(f'{call.name}: positions are not read by {names}: sequential is allowed')
  if rule.per_layer and not any(scheme.reads_distance for scheme in schemes):
    raise SpecError(f'{call.name}: per_layer = True: False is allowed with {names}, read once, with the embeddings')
  for scheme in schemes:
    if scheme.max_len is not None and rule.largest >= scheme.max_len:
      raise SpecError(
        f'{call.name}: reaches position {rule.largest}: at most {scheme.max_len - 1} is allowed, the last row of '
        f'{scheme.name}'
      )
  return rule


@overload
def positions(
  method: str, scheme: PositionScheme, train_len: int, eval_len: int, *, rule: Rule | None = None
) -> Positions: ...


@overload
def positions(
  method: str, scheme: Sequence[PositionScheme], train_len: int, eval_len: int, *, rule: Rule | None = None
) -> tuple[Positions, ...]: ...


def positions(
  method: str,
  scheme: PositionScheme | Sequence[PositionScheme],
  train_len: int,
  eval_len: int,
  *,
  rule: Rule | None = None,
) -> Positions | tuple[Positions, ...]:
  """What `method` makes of `scheme` at `eval_len` tokens, float32: a `Positions`, or one per slot of a pattern.

  `a+b` folds from left to right from the trained positions: scales multiply, any other field has one writer. A term
  applies to every slot that has what it writes, or to the slots its `@name` addresses.

  rule: what the model was trained with; it says where tokens stand before a method is asked. None: sequential.

  Where it was trained with a method in force, 'none' is as trained. A method with frequencies of its own takes its
  place, and scales the base's by the same L (PI at 16 of a model tuned with PI at 8 divides by 16); any other, log-n or
  a window, joins it. L of those is the longest window trained on, and so is that of the former without one in force:
  the frequencies were trained there as they are.

  Raises:
    SpecError: `method` is no method, or two of its terms write one field.
    Unsupported: no slot has what a term writes, or a scheme or rule has no positions at this length.
  """
  for what, value in (('train_len', train_len), ('eval_len', eval_len)):
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
      raise SpecError(f'{what} = {value!r}: a whole number of at least 1 is allowed')
  slots = [scheme] if isinstance(scheme, PositionScheme) else list(scheme)
  method = interchange.ours(method, train_len, [slot.base for slot in slots if slot.rot])
  terms = _terms(method, slots, train_len, rule)
  out = [slot.plain(eval_len) for slot in slots]
  if rule is not None and (at := rule.evaluate(eval_len)) is not None:
    out = [dataclasses.replace(pos, at_T=at_T) for pos, at_T in zip(out, at, strict=True)]
  for slot, pos in zip(slots, out):
    if slot.max_len is not None and (longest := int(pos.at_T.max()) + 1) > slot.max_len:
      why = f': {slot.max_len_why}' if slot.max_len_why else ''
      raise Unsupported(f'{slot.name} has positions for {slot.max_len} tokens, asked for {longest}{why}')
  writers: list[dict[str, str]] = [{} for _ in slots]
  for call, length in terms:
    reasons, used = [], False
    for i, slot in enumerate(slots):
      if call.at is not None and call.at != slot.name:
        reasons.append(f'{slot.name} is not {call.at}')
        continue
      try:
        writes = METHODS[call.name](out[i], slot, length, eval_len, **call.kwargs)
        if 'far' in writes and not np.array_equal(out[i].at_T, np.arange(eval_len)):
          # Both maps must count alike, and a method's counts tokens.
          raise Unsupported('a second position map is defined for sequential positions')
      except SpecError as error:
        raise SpecError(f'method {call.name}: {error}') from None
      except Unsupported as reason:
        reasons.append(str(reason))
        continue
      used = True
      for field, value in writes.items():
        if field in _SCALES:
          writes[field] = getattr(out[i], field) * value
        elif field in writers[i] and METHODS[call.name] not in TRANSFORMS:
          raise SpecError(f'method {method!r}: {writers[i][field]} and {call.name} both write {field}')
        else:
          writers[i][field] = call.name
      out[i] = dataclasses.replace(out[i], **writes)
    if not used:
      raise Unsupported(f'{call.name}: ' + '; '.join(dict.fromkeys(reasons)))
  cast = [jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float32)), pos) for pos in out]
  return cast[0] if isinstance(scheme, PositionScheme) else tuple(cast)


def _terms(method: str, slots: Sequence[PositionScheme], train_len: int, rule: Rule | None) -> list[tuple[Call, int]]:
  """What is folded, each with its L: `method`, after what was in force in training unless it takes its place."""
  calls = check_method(method)
  force = [call for call in check_method(rule.method) if call.name != 'none'] if rule is not None else []
  longest = train_len if rule is None else max(train_len, rule.train_len)
  if force:
    scales = [any(_scales(call, slot, train_len) for slot in slots) for call in calls]
    if any(scales):
      return [(call, train_len if own else longest) for call, own in zip(calls, scales, strict=True)]
  return [*((call, train_len) for call in force), *((call, longest) for call in calls)]


def _scales(call: Call, slot: PositionScheme, train_len: int) -> bool:
  """Whether it makes frequencies of the trained ones. Asked of what it writes, so that no method need say so."""
  method = METHODS[call.name]
  if method in TRANSFORMS or not slot.rot:
    return False
  with contextlib.suppress(SpecError, Unsupported):  # told when it is folded
    length = 2 * train_len
    return 'inv_freq_P' in method(slot.plain(length), slot, train_len, length, **call.kwargs)
  return False


def follows_length(
  method: str, scheme: PositionScheme | Sequence[PositionScheme], train_len: int, *, rule: Rule | None = None
) -> bool:
  """Whether the method or the rule is told how long its input is: what is done to the same tokens differs with it.

  Such a curve is an oracle's, not one deployable model's, and is drawn dashed. Asked of the arrays rather than of the
  keywords, so that a new method cannot be mislabelled: at 1/2, 1, 2 and 4 times the training length, or as many of them
  as there are positions at. A sorted draw from [0, max_len) follows the length too: its mean gap is max_len / T.
  """
  made = []
  for length in dict.fromkeys((max(train_len // 2, 1), train_len, 2 * train_len, 4 * train_len)):
    with contextlib.suppress(Unsupported):
      pos = positions(method, scheme, train_len, length, rule=rule)
      made.append((length, pos if isinstance(pos, tuple) else (pos,)))
  for length, short in made[:-1]:
    for a, b in zip(short, made[-1][1]):
      a, b = _first(a, length), _first(b, length)
      if jax.tree.structure(a) != jax.tree.structure(b) or not jax.tree.all(jax.tree.map(np.array_equal, a, b)):
        return True
  return False


def _first(pos: Positions, length: int) -> Positions:
  """What becomes of the first tokens: a window or a second map that begins beyond them is none to them."""
  inv_freq_P = np.asarray(pos.inv_freq_P)
  pos = jax.tree.map(lambda a: np.asarray(a)[..., :length] if np.ndim(a) else np.asarray(a), pos)
  window_T = np.where(pos.window_T < length, pos.window_T, np.inf)
  pos = dataclasses.replace(pos, inv_freq_P=inv_freq_P, window_T=window_T)
  if np.isinf(pos.window_T).all():
    pos = dataclasses.replace(pos, sinks=np.zeros(()))
  if pos.far is not None and pos.far.threshold >= length:
    pos = dataclasses.replace(pos, far=None)
  return pos


def kept(call: Call, scheme: PositionScheme, train_len: int) -> np.ndarray | None:
  """Share of its trained frequency that each pair keeps under a by-parts method, float64[P]; None for any other method.

  1 kept, 0 divided by s, blended between; NaN for a pair that is not rotated. Asked of the frequencies that the method
  writes rather than worked out from its betas, and the same for every s.
  """
  if _fast(call) is None or not scheme.rot or call.at not in (None, scheme.name):
    return None
  s = 2
  kwargs = {**call.kwargs, 'factor': s}
  writes = METHODS[call.name](scheme.plain(s * train_len), scheme, train_len, s * train_len, **kwargs)
  return rotations.kept(scheme.inv_freq_P, writes['inv_freq_P'], s)


def _fast(call: Call) -> tuple[str, float] | None:
  """The keyword of a by-parts method from which number of turns on a pair is kept, and its value."""
  arguments = {**keywords(METHODS[call.name]), **call.kwargs}
  return next(((name, arguments[name]) for name in ('beta_fast', 'high') if name in arguments), None)


def remarks(methods: Sequence[str], schemes: Sequence[PositionScheme], train_len: int) -> list[str]:
  """What a reader should know before believing a curve at this training length, one line each."""
  lines = [line for scheme in schemes for line in scheme.remarks()]
  split: dict[str, list[str]] = {}  # methods that split the pairs alike share a line
  for call in (call for method in methods for call in check_method(method)):
    for scheme in schemes:
      share_P, fast = kept(call, scheme, train_len), _fast(call)
      if share_P is None or fast is None:
        continue
      line = (
        f'of {np.sum(share_P >= 0)} frequency pairs {np.sum(share_P == 1)} kept, '
        f'{np.sum((share_P > 0) & (share_P < 1))} blended, {np.sum(share_P == 0)} divided by s'
      )
      most = rotations.turns(scheme.inv_freq_P, train_len).max()
      if most < fast[1]:
        line += f'; none makes {fast[0]} = {fast[1]:g} turns within {train_len} tokens (at most {most:.1f})'
      arguments = ', '.join(f'{key}={value!r}' for key, value in call.kwargs.items() if key != 'factor')
      name = f'{call.name}({arguments})' if arguments else call.name
      names = split.setdefault(line, [])
      if name not in names:
        names.append(name)
  lines += [f'{", ".join(names)}: {line}' for line, names in split.items()]
  return list(dict.fromkeys(lines))

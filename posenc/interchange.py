"""Rope settings of Hugging Face's config.json, read and written.

  read({'rope_theta': 5e5, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}})   {'': Rope(base=500000.0, ...)}
  ours('hf:{"rope_type": "yarn", "factor": 4.0}')                                      'yarn(factor=4.0)'
  write(Rope(method='yarn(factor=4.0)', original=4096), head_dim=128)                  {'rope_theta': 10000.0, ...}

Meanings are those of transformers 5: a `factor` that is given is used, whatever the lengths say; one of yarn or
longrope that is not is max_position_embeddings / original_max_position_embeddings. Every key is understood or refused
by name, and so is one that is said twice in two ways, where transformers takes one of the two in silence.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from posenc.scaling import METHODS
from spec import SpecError, keywords, one_of, parse

PREFIX = 'hf:'  # of a method that is written as a `rope_scaling` dict

# Their key -> our keyword, by rope_type.
_TYPES: dict[str, tuple[str, dict[str, str]]] = {
  'default': ('none', {}),
  'linear': ('pi', {'factor': 'factor'}),
  'dynamic': ('dynamic_ntk_hf', {'factor': 'factor'}),
  'yarn': (
    'yarn',
    {
      name: name
      for name in ('factor', 'beta_fast', 'beta_slow', 'truncate', 'attention_factor', 'mscale', 'mscale_all_dim')
    },
  ),
  'llama3': ('llama31', {'factor': 'factor', 'low_freq_factor': 'low', 'high_freq_factor': 'high'}),
  'longrope': (
    'longrope',
    {'factor': 'factor', 'short_factor': 'short', 'long_factor': 'long', 'attention_factor': 'attention'},
  ),
  'proportional': ('pi', {'factor': 'factor'}),
}
_OLD = {'su': 'longrope'}  # Phi-3's first name for it
_NEEDS = {
  'linear': ('factor',),
  'dynamic': ('factor',),
  'yarn': ('factor',),
  'llama3': ('factor', 'low_freq_factor', 'high_freq_factor'),
  'longrope': ('short_factor', 'long_factor', 'factor'),
}
_IMPLIED = ('yarn', 'longrope')  # whose factor may follow from the two lengths
_ORIGINAL, _LONGEST = 'original_max_position_embeddings', 'max_position_embeddings'
# GPT-NeoX's names for two of them, and what may stand beside the dict or in it.
_ALIASES = {
  'rope_theta': ('rope_theta', 'rotary_emb_base'),
  'partial_rotary_factor': ('partial_rotary_factor', 'rotary_pct'),
}
_SHARED = ('rope_theta', 'partial_rotary_factor', _ORIGINAL)
_DICTS = ('rope_parameters', 'rope_scaling')
_LOCAL = 'rope_local_base_freq'  # of Gemma 3's sliding layers, before there was a dict for each kind


class Rope(NamedTuple):
  """What a config says of the layers of one kind.

  fraction: of a head that is rotated. proportion: of the pairs that have a frequency, 'proportional'; one of the two is
  1. original: L in tokens, what methods measure by; None where the config names no length.
  """

  base: float = 10000.0
  fraction: float = 1.0
  proportion: float = 1.0
  method: str = 'none'
  original: int | None = None

  @property
  def scheme(self) -> str:
    said = self._asdict()
    shares = [f', {name}={said[name]!r}' for name in ('fraction', 'proportion') if said[name] != 1]
    return f'rope(base={self.base!r}{"".join(shares)})'


def read(config: Mapping[str, Any]) -> dict[str, Rope | None]:
  """By kind of layer, as `layer_types` name them; '' is all of them. None: layers of that kind are not rotated.

  config: of a whole model, or as much of it as there is. Keys that are not about rotation are not looked at.
  """
  known = {*_DICTS, _LOCAL, _ORIGINAL, *(name for names in _ALIASES.values() for name in names)}
  for key in config:
    if key.startswith(('rope_', 'rotary_')) and key not in known:
      raise SpecError(one_of('key', key, known))
  given = {key: config[key] for key in _DICTS if config.get(key) is not None}
  for key, value in given.items():
    if not isinstance(value, Mapping):
      raise SpecError(f'{key} = {value!r}: a dict is allowed')
  given = {key: value for key, value in given.items() if value}
  if len(given) == 2 and given['rope_parameters'] != given['rope_scaling']:
    raise SpecError('rope_parameters, rope_scaling: they differ; one of the two is allowed')
  where, settings = next(iter(given.items()), ('rope_parameters', {}))
  kinds = [key for key, value in settings.items() if isinstance(value, Mapping)]
  if not kinds:
    whole = _one(where, settings, config)
    if config.get(_LOCAL) is None:
      return {'': whole}
    local = {key: value for key, value in config.items() if key not in (*_ALIASES['rope_theta'], *_DICTS)}
    return {'sliding_attention': _one(_LOCAL, {'rope_theta': config[_LOCAL]}, local), 'full_attention': whole}
  if config.get(_LOCAL) is not None:
    raise SpecError(
      f'{_LOCAL}: {where} has a dict for each kind of layer, which says the same: one of the two is allowed'
    )
  for key, value in settings.items():
    if value is not None and key not in kinds:
      raise SpecError(
        f'{where}: {key} = {value!r}: a dict is allowed beside {", ".join(kinds)}, one for each kind of layer'
      )
  # A base beside dicts is of those that have none; what else is beside them counts for all.
  return {
    kind: value and _one(f'{where}.{kind}', value, _without_base(config, value)) for kind, value in settings.items()
  }


def _without_base(config: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
  if settings.get('rope_theta') is None:
    return config
  return {key: value for key, value in config.items() if key not in _ALIASES['rope_theta']}


def _one(where: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Rope:
  """settings: the dict. config: what is beside it."""
  kind = _kind(where, settings)
  name, ours = _TYPES[kind]
  allowed = {'rope_type', 'type', *_SHARED, *ours}
  for key in settings:
    if key not in allowed:
      raise SpecError(one_of(f'{where}: {kind}: key', key, allowed))
  base = _said(where, 'rope_theta', settings, config)
  if base is not None and _number(f'{where}: rope_theta', base) <= 1:
    raise SpecError(f'{where}: rope_theta = {base!r}: a number above 1 is allowed')
  share = _said(where, 'partial_rotary_factor', settings, config)
  least = 0.0 if kind == 'proportional' else 1e-9
  if share is not None and not least <= _number(f'{where}: partial_rotary_factor', share) <= 1:
    raise SpecError(f'{where}: partial_rotary_factor = {share!r}: a share of at most 1 is allowed')
  original, longest = _said(where, _ORIGINAL, settings, config), config.get(_LONGEST)
  for key, value in ((_ORIGINAL, original), (_LONGEST, longest)):
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
      raise SpecError(f'{where}: {key} = {value!r}: a whole number of at least 1 is allowed')
  if kind == 'dynamic' and None not in (original, longest) and original != longest:
    raise SpecError(
      f'{where}: {_ORIGINAL} = {original}: dynamic measures by {_LONGEST} = {longest}: the same is allowed'
    )
  values = {key: settings[key] for key in ours if settings.get(key) is not None}
  if kind in _IMPLIED and 'factor' not in values and None not in (original, longest):
    values['factor'] = longest / original
  for key in _NEEDS.get(kind, ()):
    if key not in values:
      from_lengths = f', or {_LONGEST} and {_ORIGINAL}' if key == 'factor' and kind in _IMPLIED else ''
      raise SpecError(f'{where}: {kind} needs {key}{from_lengths}')
  arguments = {ours[key]: _checked(where, key, value) for key, value in values.items()}
  if (('mscale' in arguments) + ('mscale_all_dim' in arguments)) == 1:
    raise SpecError(f'{where}: mscale, mscale_all_dim: both are allowed, or neither: readers differ on one alone')
  if arguments.get('beta_slow', 1.0) >= arguments.get('beta_fast', 32.0):
    raise SpecError(f'{where}: beta_fast, beta_slow: beta_fast > beta_slow is allowed')
  if kind == 'llama3' and arguments['low'] >= arguments['high']:
    raise SpecError(f'{where}: low_freq_factor, high_freq_factor: low_freq_factor < high_freq_factor is allowed')
  if kind == 'longrope' and len(arguments['short']) != len(arguments['long']):
    raise SpecError(f'{where}: short_factor, long_factor: lists of one length are allowed')
  if kind == 'longrope' and set(arguments['short']) == {1.0}:
    del arguments['short']  # its default
  if kind == 'proportional' and arguments.get('factor', 1.0) == 1:
    name, arguments = 'none', {}
  return Rope(
    base=10000.0 if base is None else float(base),
    fraction=1.0 if share is None or kind == 'proportional' else float(share),
    proportion=1.0 if share is None or kind != 'proportional' else float(share),
    method=_call(name, arguments, keywords(METHODS[name])),
    original=longest if original is None else original,
  )


def _kind(where: str, settings: Mapping[str, Any]) -> str:
  said = {key: settings[key] for key in ('rope_type', 'type') if settings.get(key) is not None}
  for key, value in said.items():
    if not isinstance(value, str) or _OLD.get(value, value) not in _TYPES:
      raise SpecError(one_of(f'{where}: {key}', value, (*_TYPES, *_OLD)))
  kinds = {_OLD.get(value, value) for value in said.values()}
  if len(kinds) > 1:
    raise SpecError(f'{where}: rope_type, type: they differ; one of the two is allowed')
  if not kinds and (scaling := [key for key in settings if key not in ('rope_type', 'type', *_SHARED)]):
    raise SpecError(f'{where}: needs rope_type: {scaling[0]} may be of more than one')
  return kinds.pop() if kinds else 'default'


def _said(where: str, key: str, settings: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
  """One value, in the dict or beside it."""
  names = _ALIASES.get(key, (key,))
  values = [settings.get(key), *(config.get(name) for name in names)]
  values = [value for value in values if value is not None]
  if any(value != values[0] for value in values[1:]):
    raise SpecError(f'{where}: {key}: {" and ".join(map(repr, values))} are given; one of them is allowed')
  return values[0] if values else None


def _number(name: str, value: Any) -> float:
  if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
    raise SpecError(f'{name} = {value!r}: a finite number is allowed')
  return float(value)


def _checked(where: str, key: str, value: Any) -> Any:
  if key == 'truncate':
    if not isinstance(value, bool):
      raise SpecError(f'{where}: truncate = {value!r}: true or false is allowed')
    return value
  if key in ('short_factor', 'long_factor'):
    if not isinstance(value, (list, tuple)) or not value:
      raise SpecError(f'{where}: {key} = {value!r}: a list of numbers is allowed')
    value = tuple(_number(f'{where}: {key}[{i}]', x) for i, x in enumerate(value))
    if min(value) < 1:
      raise SpecError(f'{where}: {key}: {min(value)!r}: numbers of at least 1 are allowed, they divide')
    return value
  number = _number(f'{where}: {key}', value)
  if number < 1 if key == 'factor' else number <= 0:
    raise SpecError(
      f'{where}: {key} = {value!r}: a number {"of at least 1" if key == "factor" else "above 0"} is allowed'
    )
  return number


def _call(name: str, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
  """Without what is the default: two configs that say the same are one string, and one curve."""
  texts = [f'{key}={arguments[key]!r}' for key in defaults if key in arguments and arguments[key] != defaults[key]]
  return f'{name}({", ".join(texts)})' if texts else name


# Methods by their dict.


def ours(text: str, train_len: int | None = None, bases: Iterable[float] = ()) -> str:
  """A method's string as it is, or the one that 'hf:{...}' stands for; terms may follow it, as in 'hf:{...}+logn'.

  train_len, bases: of who is asked for positions. A dict that names another original length or base is refused: the one
  is the run's, the other the scheme's.
  """
  if not isinstance(text, str) or not text.strip().startswith(PREFIX):
    return text
  text = text.strip().removeprefix(PREFIX)
  try:
    settings, end = json.JSONDecoder(object_pairs_hook=_unique).raw_decode(text.lstrip())
  except json.JSONDecodeError as error:
    raise SpecError(f'{PREFIX}{text}: no JSON ({error.msg} at {error.pos})') from None
  rest = text.lstrip()[end:]
  if not isinstance(settings, dict):
    raise SpecError(f'{PREFIX}{text}: a dict such as {{"rope_type": "yarn", "factor": 4.0}} is allowed')
  if rest.strip() and not rest.strip().startswith(('+', '@')):
    raise SpecError(f'{PREFIX}{text}: {rest.strip()!r}: + or @slot is allowed after the dict')
  config = settings if set(_DICTS) & set(settings) else {'rope_parameters': settings}
  found = read(config)
  if list(found) != ['']:
    raise SpecError(f'{PREFIX} {next(iter(found))}: one dict for all layers is allowed; name@slot addresses a scheme')
  rope = found['']
  assert rope is not None
  if rope.fraction != 1 or rope.proportion != 1:
    raise SpecError(f'{PREFIX} partial_rotary_factor: it is of the scheme, rope(fraction=...) or rope(proportion=...)')
  named = {**settings, **next((settings[key] for key in _DICTS if settings.get(key)), {})}
  if train_len is not None and named.get(_ORIGINAL) not in (None, train_len):
    raise SpecError(f'{PREFIX} {_ORIGINAL} = {named[_ORIGINAL]}: the original length here, {train_len}, is allowed')
  for base in dict.fromkeys(bases):
    if named.get('rope_theta') not in (None, base):
      raise SpecError(f'{PREFIX} rope_theta = {named["rope_theta"]}: the base here, {base:g}, is allowed')
  return rope.method + rest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  out: dict[str, Any] = {}
  for key, value in pairs:
    if key in out:
      raise SpecError(f'{PREFIX} {key}: given twice')
    out[key] = value
  return out


# And back.


def write(rope: Rope, head_dim: int) -> dict[str, Any]:
  """The keys of a config.json: the old ones, which every version of transformers reads, and other servers too.

  SpecError for a method that has no form there: one that follows the length (but `dynamic`), windows, log-n, LongRoPE's
  first tokens.
  """
  calls = [call for call in parse(rope.method) if call.name != 'none']
  if len(calls) > 1:
    raise SpecError(f'method {rope.method!r}: Hugging Face has no form for several methods at once')
  base, original, longest = rope.base, rope.original, rope.original
  settings: dict[str, Any] = {}
  if calls:
    (call,) = calls
    if call.name not in METHODS:
      raise SpecError(one_of('method', call.name, METHODS))
    if original is None:
      raise SpecError(f'method {call.name}: needs the original length')
    arguments = {**keywords(METHODS[call.name]), **call.kwargs}
    factor = arguments.get('factor')
    if call.name == 'ntk' and factor is not None:  # no scaling to them, but a larger base
      rot = int(head_dim * rope.fraction)
      if rot < 4:
        raise SpecError(f'method ntk: a rotary width of at least 4 is allowed, {rot} is given')
      base = float(np.float64(base) * factor ** (rot / (rot - 2)))
    else:
      settings = _settings(call.name, arguments, call.kwargs)
      if 'factor' in settings and settings['rope_type'] not in ('linear', 'dynamic'):
        settings[_ORIGINAL] = original
    if factor is not None and call.name not in ('pi', 'dynamic_ntk_hf'):
      longest = round(original * factor)
  if rope.proportion != 1:
    if settings.get('rope_type', 'linear') != 'linear':
      raise SpecError(
        f'method {rope.method!r}: Hugging Face has no form for it with rope(proportion={rope.proportion})'
      )
    settings = {**settings, 'rope_type': 'proportional', 'partial_rotary_factor': rope.proportion}
  out = {'rope_theta': base, 'rope_scaling': settings or None, _LONGEST: longest}
  if rope.fraction != 1:
    out['partial_rotary_factor'] = rope.fraction
  return out


def _settings(name: str, arguments: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
  """`rope_scaling` of a method with all its arguments; given: those that its string has."""

  def refuse(why: str) -> SpecError:
    return SpecError(f'method {name}: Hugging Face has no form for it{why}')

  if name == 'dynamic_ntk':  # their factor of 1 is the paper's
    if arguments['factor'] is not None:
      raise refuse(f' with factor = {arguments["factor"]!r}, a cap')
    return {'rope_type': 'dynamic', 'factor': 1.0}
  forms = {'pi': 'linear', 'dynamic_ntk_hf': 'dynamic', 'yarn': 'yarn', 'llama31': 'llama3', 'longrope': 'longrope'}
  forms['ntk_by_parts'] = 'yarn' if arguments.get('ramp') == 'index' else 'llama3'
  if name not in forms:
    raise refuse(' without a factor: it follows the length' if name == 'ntk' else '')
  if arguments['factor'] is None:
    raise refuse(' without a factor: it follows the length')
  kind, factor = forms[name], float(arguments['factor'])
  if name == 'ntk_by_parts':
    if kind == 'llama3':
      low, high = arguments['beta_slow'], arguments['beta_fast']
      return {'rope_type': kind, 'factor': factor, 'low_freq_factor': low, 'high_freq_factor': high}
    return {**_settings('yarn', {**keywords(METHODS['yarn']), **arguments}, given), 'attention_factor': 1.0}
  if name == 'yarn' and arguments['ramp'] != 'index':
    raise refuse(f' with ramp = {arguments["ramp"]!r}')
  if name == 'longrope':
    return _longrope(arguments, factor, refuse)
  # Of llama3 all keys are needed; else what the string leaves out is left out there.
  theirs = {mine: key for key, mine in _TYPES[kind][1].items()}
  said = {
    theirs[key]: value for key, value in arguments.items() if key in theirs and (key in given or kind == 'llama3')
  }
  return {'rope_type': kind, **said, 'factor': factor}


def _longrope(arguments: Mapping[str, Any], factor: float, refuse: Any) -> dict[str, Any]:
  if arguments['onset']:
    raise refuse(f' with onset = {arguments["onset"]!r}: it scales all tokens alike')
  if arguments['long'] is None:
    raise SpecError('method longrope: needs long')
  long = list(arguments['long'])
  short = [1.0] * len(long) if arguments['short'] is None else list(arguments['short'])
  out = {'rope_type': 'longrope', 'factor': factor, 'short_factor': short, 'long_factor': long}
  attention = arguments['attention']
  if attention == 'yarn':
    attention = 0.1 * math.log(factor) + 1
  return out if attention in (None, 'su') else {**out, 'attention_factor': float(attention)}

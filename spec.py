"""One kind of string names everything a config can choose: `rope(base=500000.0)`, `yarn(factor=8)+logn`.

A name, then optional literal keyword arguments, read with `ast` and never evaluated. Defaults live in the constructor
or function that the name stands for, nowhere else, so that overriding leaves no stale keys and the string itself can be
the label of a curve. This module is a leaf: it imports nothing of the project and anyone may import it.
"""

import ast
import difflib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

LARGEST = 2**31 - 1  # whole number, wherever one is asked for: what an index of 32 bits can reach


class SpecError(ValueError):
  """A string that names nothing, or an argument outside what is allowed. The message is one line."""


class Call(NamedTuple):
  name: str
  kwargs: dict[str, Any]
  at: str | None = None  # 'yarn@rope' addresses the slots whose scheme is called rope


def one_of(what: str, value: object, allowed: Iterable[str]) -> str:
  """'what = value is not one of ...', with the nearest allowed word first when there is one."""
  allowed = sorted(allowed)
  near = difflib.get_close_matches(str(value), allowed, n=1)
  hint = f'did you mean {near[0]!r}? ' if near else ''
  return f'{what} = {value!r}: {hint}allowed: {", ".join(allowed)}'


def _call(node: ast.expr, text: str) -> Call:
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult) and isinstance(node.right, ast.Name):
    call = _call(node.left, text)
    if call.at is not None:
      raise SpecError(f'{text!r}: expected one @slot after a name or name(key=value, ...)')
    return call._replace(at=node.right.id)
  if isinstance(node, ast.Name):
    return Call(node.id, {})
  if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
    if node.args:
      raise SpecError(f'{text!r}: arguments are named, as in name(key=value)')
    names = [k.arg or '**' for k in node.keywords]
    for name in names:
      if names.count(name) > 1:
        raise SpecError(f'{text!r}: {name} is given twice')
    try:
      return Call(node.func.id, {name: ast.literal_eval(k.value) for name, k in zip(names, node.keywords)})
    except (ValueError, TypeError):
      raise SpecError(f'{text!r}: argument values are literals (numbers, strings, tuples)') from None
  raise SpecError(f'{text!r}: expected name or name(key=value, ...), joined by + where methods are composed')


def parse(text: str) -> list[Call]:
  """'a(x=1)+b@slot' -> [Call('a', {'x': 1}), Call('b', {}, 'slot')]."""
  if not isinstance(text, str):
    raise SpecError(f'{text!r}: expected a string such as name(key=value)')
  # It is the label of a curve. Python reads other alphabets' letters as these, and the label would not show it.
  if not text.isprintable() or not re.sub(r'"[^"]*"|\'[^\']*\'', '', text).isascii():
    raise SpecError(f'{text!r}: expected name or name(key=value, ...), printable, in ASCII letters but for strings')
  try:
    node = ast.parse(text.strip(), mode='eval').body
  except (SyntaxError, ValueError, RecursionError, MemoryError):
    raise SpecError(f'{text!r}: expected name or name(key=value, ...)') from None
  terms = []
  while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
    terms.append(node.right)
    node = node.left
  return [_call(n, text) for n in (node, *reversed(terms))]


def parse_one(text: str) -> Call:
  calls = parse(text)
  if len(calls) != 1 or calls[0].at is not None:
    raise SpecError(f'{text!r}: expected a single name or name(key=value, ...)')
  return calls[0]


def keywords(fn: Callable) -> dict[str, Any]:
  """The keyword arguments a config may set on `fn` with their defaults: its keyword-only parameters."""
  params = inspect.signature(fn).parameters.values()
  return {p.name: p.default for p in params if p.kind is p.KEYWORD_ONLY}


def check_keywords(what: str, call: Call, allowed: dict[str, Any]) -> None:
  """Raises unless every keyword of `call` is allowed, required ones are there, and numbers are finite numbers."""
  for key, value in call.kwargs.items():
    if key not in allowed:
      names = ', '.join(allowed) or 'none'
      near = difflib.get_close_matches(key, list(allowed), n=1)
      hint = f'did you mean {near[0]!r}? ' if near else ''
      raise SpecError(f'{what} {call.name}: unknown argument {key} = {value!r}: {hint}allowed: {names}')
    default = allowed[key]
    number = isinstance(default, (int, float)) and not isinstance(default, bool)
    if number and (isinstance(value, bool) or not isinstance(value, (int, float))):
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: a number is allowed')
    if isinstance(default, bool) and not isinstance(value, bool):
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: True or False is allowed')
    if isinstance(default, str) and not isinstance(value, str):
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: a string is allowed')
    if isinstance(default, int) and number and not isinstance(value, int):
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: a whole number is allowed')
    if isinstance(default, int) and number and abs(value) > LARGEST:  # of an array's axis, of a seed
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: a whole number of at most {LARGEST} is allowed')
    if isinstance(value, (int, float)) and not abs(value) <= sys.float_info.max:
      raise SpecError(f'{what} {call.name}: {key} = {value!r}: a finite number is allowed')
  for key, default in allowed.items():
    if default is inspect.Parameter.empty and key not in call.kwargs:
      raise SpecError(f'{what} {call.name}: needs the argument {key}')


def check_required(what: str, call: Call, entry: Callable) -> None:
  """Raises unless arguments without a default, by which `check_keywords` would know, are strings where declared so."""
  params = inspect.signature(entry.__init__ if isinstance(entry, type) else entry).parameters.values()
  needed = [p for p in params if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
  typed = {p.name: '' for p in needed if p.annotation is str}
  given = {key: value for key, value in call.kwargs.items() if key in typed}
  check_keywords(what, call._replace(kwargs=given), {key: typed[key] for key in given})


def choose(what: str, text: str, table: Mapping[str, Callable], common: Mapping[str, Any] | None = None) -> Call:
  """The one call that `text` is; SpecError unless it names an entry of `table` with arguments that the entry takes.

  common: keyword arguments, with their defaults, that every entry takes besides.
  """
  call = parse_one(text)
  if call.name not in table:
    raise SpecError(one_of(what, call.name, table))
  entry = table[call.name]
  # A class is asked for its constructor: NNX's metaclass would answer for the class with (*args, **kwargs).
  own = keywords(entry.__init__ if isinstance(entry, type) else entry)
  check_keywords(what, call, {**own, **(common or {})})
  check_required(what, call, entry)
  return call

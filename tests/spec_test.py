"""The one kind of string that names things: what it may hold, and what is said when it does not."""

import inspect
import re

import pytest

from spec import Call, SpecError, check_keywords, keywords, one_of, parse, parse_one


def refused(*words):
  """One line that holds all the words."""
  return pytest.raises(SpecError, match='(?s)' + ''.join(f'(?=.*{re.escape(w)})' for w in words) + r'\A[^\n]*\Z')


@pytest.mark.parametrize(
  'text, calls',
  [
    ('rope', [Call('rope', {})]),
    ('rope()', [Call('rope', {})]),
    ('  rope ( base = 5e5 ) ', [Call('rope', {'base': 5e5})]),
    ('t5(num_buckets=16, scale_logits=False)', [Call('t5', {'num_buckets': 16, 'scale_logits': False})]),
    ('a(x=-1, y=-2.5, z=+3)', [Call('a', {'x': -1, 'y': -2.5, 'z': 3})]),
    ('a(x="half_split", y=\'b\', z=None)', [Call('a', {'x': 'half_split', 'y': 'b', 'z': None})]),
    ('a(x=(1, 2.0), y=[3], z=())', [Call('a', {'x': (1, 2.0), 'y': [3], 'z': ()})]),
    ('a+b', [Call('a', {}), Call('b', {})]),
    ('a(x=1)+b@slot+c', [Call('a', {'x': 1}), Call('b', {}, 'slot'), Call('c', {})]),
    ('a@b + c(y="+")@d', [Call('a', {}, 'b'), Call('c', {'y': '+'}, 'd')]),
    ('a(x="@")', [Call('a', {'x': '@'})]),
  ],
)
def test_parse(text, calls):
  parsed = parse(text)
  assert parsed == calls
  assert [[type(v) for v in c.kwargs.values()] for c in parsed] == [[type(v) for v in c.kwargs.values()] for c in calls]


@pytest.mark.parametrize(
  'text',
  [
    '', ' ', '+', 'a+', 'a b', 'a,b', '(a, b)', 'a;b', 'a=1', 'a.b', 'a.b(x=1)', 'a[0]', '1', '"a"', '-a',
    'a-b', 'a*2', 'a+(b+c)', 'a(x=1', 'a)x', 'a()()', 'a@', '@a', 'a@b()', 'a@1', 'a@"b"', '(a+b)@c',
    'lambda: 1', 'a if b else c', 'a\n+b', 'a\x00', 'a\nb', '[a]', '{a}', 'a@b@c',
    'ａ', 'a(é=1)', 'a+𝐛', 'a(x="\u202e")', 'a(x="\ud800")', 'a(x=\n1)',
  ],
)  # fmt: skip
def test_parse_refuses_what_is_not_names_and_arguments(text):
  with refused('name(key=value'):
    parse(text)


@pytest.mark.parametrize('text', ['a(1)', 'a("x", y=2)', 'a(*[1])', 'a(b)'])
def test_arguments_are_named(text):
  with refused(repr(text), 'named'):
    parse(text)


@pytest.mark.parametrize(
  'value',
  [
    'b', 'nan', 'inf', '-b', '1+1', '2**3', 'f()', '[b]', 'b.c', '"%d" % 1', 'f"{1}"', 'lambda: 1',
    '(i for i in ())', '10**400', '{[1]: 2}', '1 < 2', 'True or False', '-"x"',
  ],
)  # fmt: skip
def test_values_are_literals(value):
  with refused('literals'):
    parse(f'a(x={value})')


@pytest.mark.parametrize(
  'form', ['a(x={})', '{}', 'a+{}', 'a(x=[{}])', 'a({})', 'a(**{})', 'a@{}', 'a(x=1 if {} else 2)']
)
def test_no_code_runs(form, tmp_path):
  """A config string comes from a command line or a checkpoint, and must not be able to do anything."""
  path = tmp_path / 'ran'
  with pytest.raises(SpecError):
    parse_one(form.format(f'open({str(path)!r}, "w")'))
  assert not path.exists()


@pytest.mark.parametrize('value', [None, 1, 1.0, ['a'], ('a', 'b'), b'a', Call('a', {})])
def test_only_strings_are_parsed(value):
  with refused('expected a string'):
    parse(value)


def test_an_argument_is_given_once():
  """Python would keep the last one without a word."""
  with refused('a(x=1, x=2)', 'x', 'twice'):
    parse('a(x=1, x=2)')


def test_parse_one():
  assert parse_one('a(x=1)') == Call('a', {'x': 1})
  for text in ('a+b', 'a@b', 'a(x=1)@b'):
    with refused(repr(text), 'single'):
      parse_one(text)


def scheme(
  dims,
  rngs,
  *,
  base: float = 1e4,
  count: int = 32,
  kind: str = 'x',
  on: bool = True,
  free: float | None = None,
):
  """Stands for a constructor."""


def required(*, needed, other=1):
  """Stands for a function with an argument that has no default."""


def test_keywords():
  """What a config may set is what the constructor takes by keyword only."""
  assert keywords(scheme) == {'base': 1e4, 'count': 32, 'kind': 'x', 'on': True, 'free': None}
  assert keywords(required) == {'needed': inspect.Parameter.empty, 'other': 1}
  assert keywords(lambda a, b=1, *rest, **more: None) == {}


@pytest.mark.parametrize(
  'text',
  [
    's', 's(base=5e5)', 's(base=500000)', 's(base=-1.0)', 's(count=3)', 's(kind="y")', 's(on=False)',
    's(free=None)', 's(free=3)', 's(free="anything")', 's(base=2.0, count=3, kind="", on=True, free=2.0)',
  ],
)  # fmt: skip
def test_allowed_keywords(text):
  check_keywords('scheme', parse_one(text), keywords(scheme))


@pytest.mark.parametrize(
  'text, words',
  [
    ('s(bass=2.0)', ['unknown argument bass = 2.0', "did you mean 'base'?", 'base, count, kind, on, free']),
    ('s(zzz="q")', ["unknown argument zzz = 'q'", 'allowed: base, count, kind, on, free']),
    ('s(dims=1)', ['unknown argument dims = 1']),
    ('s(**{"base": 1.0})', ['unknown argument']),
    ('s(base="1e4")', ["base = '1e4'", 'a number is allowed']),
    ('s(base=True)', ['base = True', 'a number is allowed']),
    ('s(base=None)', ['base = None', 'a number is allowed']),
    ('s(base=(1.0,))', ['base = (1.0,)', 'a number is allowed']),
    ('s(base=1+2j)', ['base = (1+2j)', 'a number is allowed']),
    ('s(base=1e999)', ['base = inf', 'finite']),
    ('s(base=-1e999)', ['base = -inf', 'finite']),
    ('s(free=1e999)', ['free = inf', 'finite']),
    ('s(base=' + '9' * 400 + ')', ['base = 999', 'finite']),
    ('s(free=' + '9' * 400 + ')', ['free = 999', 'finite']),
    ('s(count=True)', ['count = True', 'number is allowed']),
    ('s(count="3")', ["count = '3'", 'number is allowed']),
    ('s(count=3.0)', ['count = 3.0', 'whole number']),
    ('s(count=3.5)', ['count = 3.5', 'whole number']),
    ('s(kind=1)', ['kind = 1', 'a string is allowed']),
    ('s(kind=None)', ['kind = None', 'a string is allowed']),
    ('s(kind=b"y")', ["kind = b'y'", 'a string is allowed']),
    ('s(on=1)', ['on = 1', 'True or False is allowed']),
    ('s(on="False")', ["on = 'False'", 'True or False is allowed']),
    ('s(kind="y\\nz", on=0)', ['on = 0']),
    ('s(kin="y\\nz")', ['kin =', "did you mean 'kind'?"]),
  ],
)
def test_refused_keywords(text, words):
  with refused('scheme s', *words):
    check_keywords('scheme', parse_one(text), keywords(scheme))


def test_nan_is_refused():
  """Not a literal, but a caller may hold one."""
  for key in ('base', 'free'):
    with refused('scheme s', f'{key} = nan', 'finite'):
      check_keywords('scheme', Call('s', {key: float('nan')}), keywords(scheme))


def test_required_and_empty():
  check_keywords('method', parse_one('m(needed="x")'), keywords(required))
  with refused('method m', 'needs', 'needed'):
    check_keywords('method', parse_one('m(other=2)'), keywords(required))
  with refused('method m', 'unknown argument a = 1', 'allowed: none'):
    check_keywords('method', parse_one('m(a=1)'), {})


def test_strings_may_hold_any_letter():
  assert parse('a(x="é", y=\'ü\')+b') == [Call('a', {'x': 'é', 'y': 'ü'}), Call('b', {})]


def test_one_of():
  allowed = {'yarn', 'ntk', 'pi'}
  assert one_of('method', 'yran', allowed) == "method = 'yran': did you mean 'yarn'? allowed: ntk, pi, yarn"
  assert one_of('method', 'zzzz', allowed) == "method = 'zzzz': allowed: ntk, pi, yarn"
  assert one_of('method', None, ['pi']) == 'method = None: allowed: pi'
  assert '\n' not in one_of('method', 'a\nb', allowed)


def test_a_spec_error_is_a_value_error():
  assert issubclass(SpecError, ValueError)

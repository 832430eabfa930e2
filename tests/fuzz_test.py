"""Configs, command lines and strings of schemes, methods, rules, corpora that nobody would write.

Whatever it is, it is refused in one line, or it is what it says: read back from its own text it is the same again. No
traceback, and nothing in between. 200 inputs by default, always the same ones; 2000 others each time with `--all`.
"""

import ast
import dataclasses
import functools
import json
import math
import os
import resource
import time

import pytest
from flax import nnx
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import posenc
from cli_test import RECIPE, parse, refusal  # noqa: F401
from configs import smoke
from configs.schema import Config
from data import corpora, tokenizers
from evaluation import protocols
from evaluation.controls import CONTROLS
from models.lm import abstract
from models.memory import OutOfMemory
from spec import SpecError, keywords
from training.optimizer import schedule

# The second number of each pair: inputs of the test, together 200 and 2100.
COUNTS = {'config': (70, 800), 'command line': (20, 200), 'method': (50, 500), 'scheme': (30, 300), 'others': (30, 300)}
COMMON = {
  'deadline': None, 'database': None, 'suppress_health_check': list(HealthCheck), 'print_blob': True,
}  # fmt: skip


@pytest.fixture(autouse=True, scope='module')
def bounded():
  """Memory, so that an input that asks for all of it is a MemoryError here and not the end of the machine's day."""
  before = resource.getrlimit(resource.RLIMIT_AS)
  with open('/proc/self/statm') as file:
    mapped = int(file.read().split()[0]) * resource.getpagesize()
  resource.setrlimit(resource.RLIMIT_AS, (mapped + 6 * 2**30, before[1]))
  yield
  resource.setrlimit(resource.RLIMIT_AS, before)


def profiles(kind):
  few, many = COUNTS[kind]
  return pytest.mark.parametrize('n', [few, pytest.param(many, marks=pytest.mark.faults)])


@pytest.fixture
def tried(record_property):
  """tried(n, strategy, check): `check` on n inputs; how many they were, and how many accepted, is printed."""
  return functools.partial(_tried, record_property)


def _tried(record_property, n, strategy, check):
  outcomes = []
  few = n <= 100
  number = 0 if few else int(os.environ.get('FAULTS_SEED', time.time()))

  @settings(max_examples=n, derandomize=few, **COMMON)
  @given(strategy)
  def run(value):
    outcomes.append(refused_or(check, value))

  (run if few else seed(number)(run))()
  record_property('counted', f'{len(outcomes)} inputs tried, {outcomes.count(True)} accepted (FAULTS_SEED={number})')
  assert len(outcomes) >= n
  assert 0.02 < outcomes.count(True) / len(outcomes) < 0.98, 'no test of the one kind or of the other'


def refused_or(check, value):
  """Whether it is accepted, and then `check` holds. What is refused is refused in one line of printable text."""
  try:
    check(value)
  except (SpecError, posenc.Unsupported) as error:
    line = str(error)
    assert line and '\n' not in line and '\r' not in line, repr(line)
    line.encode()  # a lone surrogate could not be printed
    return False
  return True


# ---- values

HUGE = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63, 10**30, 10**400, -1, -(2**63)]
ODD_FLOATS = [0.0, -0.0, 1e-320, 5e-324, 1e308, -1e308, math.inf, -math.inf, math.nan, 1.0000001, 0.3, 1 / 3, 1e18]
ODD_TEXT = [
  '', ' ', '\x00', '\n', 'é', 'ROPE', '𝐫𝐨𝐩𝐞', '\ud800', '(', ')', '((', "('rope',)", '[]', '()', 'None', 'rope;alibi',
  'rope(', 'rope()', '1' * 5000, '(' * 300, '-' * 2000 + '1', 'rope#', "rope(**{'base': 1})", 'lambda: 0', "rope('x')",
  '__import__("os")', 'yarn(factor=1_000)', 'yarn(factor=0x8)', 'yarn(factor=8j)', 'a' * 10000, '\u202eepor', '.',
]  # fmt: skip

whole = st.one_of(st.integers(-2, 70), st.sampled_from(HUGE), st.integers())
number = st.one_of(whole, st.sampled_from(ODD_FLOATS), st.floats(), st.floats(0, 64))
text = st.one_of(st.sampled_from(ODD_TEXT), st.text(max_size=20))
scalar = st.one_of(number, st.booleans(), st.none(), text)
value = st.one_of(
  scalar,
  st.lists(scalar, max_size=4),
  st.lists(scalar, max_size=4).map(tuple),
  st.dictionaries(text, scalar, max_size=2),
)
PLAUSIBLE = st.sampled_from([1, 2, 3, 4, 8, 8.0, 16, 0.5, 0.25, 1.0, 2.0, 100.0, 10000.0, True, False, None, 1e-3, 1e6])
argument = st.one_of(
  PLAUSIBLE, PLAUSIBLE, PLAUSIBLE,
  st.recursive(scalar, lambda x: st.one_of(st.lists(x, max_size=3), st.lists(x, max_size=3).map(tuple)), max_leaves=4),
  st.sampled_from(['su', 'yarn', 'index', 'rotations', 'random', 'arange', 'self', 'official', 'none']),
)  # fmt: skip


def literal(value):
  """As it would be written; inf as people write it."""
  return repr(value) if not (isinstance(value, float) and math.isinf(value)) else '1e999' if value > 0 else '-1e999'


def calls(table, common=()):
  """'name(keyword=value, ...)' of a table of functions or classes, with misspelt names and keywords among them."""

  def of(name):
    entry = table[name]
    known = [*keywords(entry.__init__ if isinstance(entry, type) else entry), *common]
    words = st.sampled_from(known) if known else st.just('factor')
    word = st.one_of(words, words, words, words, st.sampled_from(['factr', 'class', 'é', 'self', '_', 'base']))
    one = st.tuples(words, PLAUSIBLE).map(lambda pair: [pair])
    some = st.lists(st.tuples(word, argument), max_size=3)
    arguments = st.one_of(st.just([]), one, one, some, st.lists(st.tuples(words, number), max_size=2))
    return arguments.map(lambda pairs: f'{name}({", ".join(f"{k}={literal(v)}" for k, v in pairs)})' if pairs else name)

  named = st.sampled_from(sorted(table)).flatmap(of)
  return st.one_of(named, named, named, named, st.builds(lambda a, b: a[: b % (len(a) + 1)], named, whole), text)


SCHEME = calls(posenc.SCHEMES, ('window', 'ssmax'))
SLOT = st.sampled_from([*posenc.SCHEMES, 'all', ''])
TERM = st.one_of(calls(posenc.METHODS), st.builds(lambda term, slot: f'{term}@{slot}', calls(posenc.METHODS), SLOT))
METHOD = st.lists(TERM, min_size=1, max_size=3).map('+'.join)
RULE = calls(posenc.RULES)


# ---- strings


def same_calls(read, written):
  """What is accepted says, in its parts, what its text says: written out again it is the same."""
  made = read(written)
  again = '+'.join(
    f'{c.name}({", ".join(f"{k}={literal(v)}" for k, v in c.kwargs.items())})' + (f'@{c.at}' if c.at else '')
    for c in (made if isinstance(made, list) else [made])
  )
  assert repr(read(again)) == repr(made), f'{written!r} is read as {again!r}'
  return made


@profiles('scheme')
def test_schemes(n, tried):
  def check(written):
    same_calls(posenc.check_scheme, written)
    shapes = {'heads': 2, 'head_dim': 8, 'd_model': 16, 'train_len': 12}
    scheme = nnx.eval_shape(lambda: posenc.build(written, **shapes, rngs=nnx.Rngs(0)))  # as the config does
    pos = posenc.positions('none', scheme, 12, 12)
    assert pos.at_T.shape == (12,)

  tried(n, SCHEME, check)


@pytest.fixture(scope='module')
def slots():
  shapes = {'heads': 2, 'head_dim': 8, 'd_model': 16, 'train_len': 12}
  return [posenc.build(name, **shapes, rngs=nnx.Rngs(0)) for name in ('rope', 'alibi')]


@profiles('method')
def test_methods(n, tried, slots):
  def check(written):
    same_calls(posenc.check_method, written)
    for length in (6, 12, 48):
      for pos in posenc.positions(written, slots, 12, length):
        assert pos.at_T.shape == (length,)

  tried(n, METHOD, check)


@profiles('others')
def test_rules_corpora_tokenizers_protocols_and_controls(n, tried, slots):
  """Nothing is read or drawn: what can be checked before that is what is checked."""

  def check(kind_and_text):
    kind, written = kind_and_text
    if kind == 'rule':
      same_calls(posenc.check_rule, written)
      rule = posenc.build_rule(written, slots, train_len=12, layers=2)
      for at in rule.train(0, 0) or ():
        assert at.shape[-1] == 12
    else:
      CHECKS[kind](written)

  kinds = [('rule', RULE), ('corpus', calls(corpora.CORPORA)), ('tokenizer', calls(tokenizers.TOKENIZERS)),
           ('protocol', calls(protocols.PROTOCOLS)), ('control', calls(CONTROLS))]  # fmt: skip
  tried(n, st.one_of([st.tuples(st.just(kind), strategy) for kind, strategy in kinds]), check)


CHECKS = {
  'corpus': corpora.check,
  'tokenizer': tokenizers.check,
  'protocol': protocols.check,
  'control': lambda written: protocols.check(written, CONTROLS, 'controls'),
}


# ---- configs


def fields(config=None, prefix=''):
  """{'model.heads': 4, ...} of every field."""
  out = {}
  for field in dataclasses.fields(config or Config()):
    default = getattr(config or Config(), field.name)
    name = f'{prefix}{field.name}'
    out |= fields(default, f'{name}.') if dataclasses.is_dataclass(default) else {name: default}
  return out


FIELDS = fields()


def of_field(name):
  """Values for a field: of its own kind mostly."""
  default = FIELDS[name]
  own = {
    'posenc': st.one_of(SCHEME, st.lists(SCHEME, max_size=3)),
    'methods': st.one_of(METHOD, st.lists(METHOD, max_size=3)),
    'positions': RULE,
    'data.corpus': calls(corpora.CORPORA),
  }.get(name)
  if own is None:
    kind = default[0] if isinstance(default, tuple) and default else default
    plain = st.one_of(st.integers(1, 16), st.sampled_from([0, 32, 64, 128, 0.5, 1.0, 2.0]))
    numbers = st.one_of(plain, plain, number) if isinstance(kind, int) else st.one_of(PLAUSIBLE, number)
    own = st.booleans() if isinstance(kind, bool) else numbers if isinstance(kind, (int, float)) else text
    if isinstance(default, tuple):
      own = st.one_of(st.lists(own, max_size=4).map(tuple), own)
  return st.one_of(own, own, own, value).map(lambda v: (name, v))


TYPOS = st.sampled_from(['stepz', 'model.head', 'optimizer', 'model', 'data', 'log.', 'é', 'eval.multiple'])
CHANGES = st.lists(
  st.one_of(
    st.sampled_from(sorted(FIELDS)).flatmap(of_field),
    st.sampled_from(sorted(FIELDS)).flatmap(of_field),
    st.sampled_from(sorted(FIELDS)).flatmap(of_field),
    st.tuples(TYPOS, value),
  ),
  min_size=1, max_size=3,
)  # fmt: skip


def changed(changes):
  values = smoke.get_config().to_dict()
  for name, new in changes:
    *path, last = name.split('.')
    group = values
    for part in path:
      group = group[part] if isinstance(group, dict) and isinstance(group.get(part), dict) else {}
    group[last] = new
  return values


def means(given, got):
  """Whether a field that was given one value may hold the other: widened to a float, put into a tuple, or read."""
  if isinstance(got, tuple) and isinstance(given, str) and given.startswith(('(', '[')):
    given = ast.literal_eval(given)  # of a plain string it is a text as any: a folder may be called '('
  if isinstance(got, tuple):
    given = tuple(given) if isinstance(given, (list, tuple)) else (given,)
    return len(given) == len(got) and all(map(means, given, got))
  return type(given) in (type(got), int) and type(given) is not bool or type(got) is bool is type(given) \
    if given == got else False  # fmt: skip


@profiles('config')
def test_configs(n, tried):
  def check(changes):
    values = changed(changes)
    config = Config.from_dict(values)
    flat = fields(config)
    for name, new in dict(changes).items():
      if name in flat:
        assert means(new, flat[name]), f'{name} = {new!r} is read as {flat[name]!r}'
    assert Config.from_dict(config.to_dict()) == config
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    try:
      _, shapes = abstract(functools.partial(config.build_model, 257))
    except OutOfMemory:
      return
    # Fewer rows than the tokenizer has ids are refused with the data.
    assert shapes['embedding']['embedding'].shape == (config.model.vocab or 257, config.model.d_model)
    assert 0 < float(schedule(config.optimizer, config.steps)(0)) < math.inf

  tried(n, CHANGES, check)


FLAGS = st.sampled_from(['--workdri', '--confg', 'workdir', '-config', '--', '-', '--config.', '--noconfig', '--v'])
FLAG = st.one_of(
  st.builds(lambda changes: [f'--config.{k}={v if isinstance(v, str) else literal(v)}' for k, v in changes], CHANGES),
  st.builds(lambda name, v: [f'{name}={v}'], FLAGS, text),
)


@profiles('command line')
@pytest.mark.filterwarnings(r'ignore:the load_module\(\) method:DeprecationWarning')
def test_command_lines(n, tried, parse, capsys):  # noqa: F811
  """train.py's: exit code 2 and one line on stderr, or a config, which is valid or refused as above."""

  def check(options):
    try:
      rest, table = parse(*RECIPE, *options)
    except SystemExit as stopped:
      assert stopped.code == 2
      raise SpecError(refusal(capsys)) from None
    assert rest == ['train.py'] and Config.from_dict(table.config.to_dict())

  tried(n, FLAG, check)


def test_the_counts_are_those_that_are_promised():
  assert sum(few for few, _ in COUNTS.values()) >= 200 and sum(many for _, many in COUNTS.values()) >= 2000

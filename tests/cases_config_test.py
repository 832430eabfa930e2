"""Cases G of docs/CASES.md that are of the command line: overrides, types, what is refused."""

import ml_collections
import pytest

import posenc
from cli_test import parse, refusal  # noqa: F401
from configs import schema, smoke
from configs.schema import Config
from forms import build, refused
from spec import SpecError

# ml_collections loads a config file by a method that importlib has deprecated.
pytestmark = pytest.mark.filterwarnings(r'ignore:the load_module\(\) method:DeprecationWarning')
RECIPE = ('--config=configs/smoke.py', '--workdir=w')


def fields(group, prefix='config'):
  for name, value in group.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from fields(value, f'{prefix}.{name}')
    else:
      yield f'{prefix}.{name}', value


def get(config, name):
  for part in name.split('.')[1:]:
    config = getattr(config, part)
  return config


def other(value):
  """A value of the same type."""
  if isinstance(value, bool):
    return not value
  if isinstance(value, tuple):
    return (*value, value[-1] if value else 'x')
  return value + 'x' if isinstance(value, str) else value * 2 + 1


def test_G01(parse):  # noqa: F811
  """Every field can be set from the command line, lists too, with its type; no default is None."""
  default = dict(fields(schema.default()))
  assert len(default) > 40 and None not in default.values()
  wanted = {name: other(value) for name, value in default.items()}
  config = parse(*RECIPE, *(f'--{name}={value}' for name, value in wanted.items()))[1].config
  for name, value in wanted.items():
    got = get(config, name)
    assert (tuple(got) if isinstance(value, tuple) else got) == value, name
    assert isinstance(got, type(value)) or isinstance(value, tuple), name
  config = parse(*RECIPE, *(f'--{name}={value}' for name, value in default.items()))[1].config
  assert Config.from_dict(config.to_dict()) == Config()


def changed(field, value):
  values = smoke.get_config().to_dict()
  *path, last = field.split('.')
  group = values
  for part in path:
    group = group[part]
  group[last] = value
  return Config.from_dict(values)


def test_G02(parse, capsys):  # noqa: F811
  """A whole number is a float where one is wanted; the other way round is one line that names field and type."""
  scheme = build('rope')
  assert posenc.positions('pi(factor=8)', scheme, 128, 256).inv_freq_P[0] == 1 / 8
  for value in ('100.0', '1e3'):
    with pytest.raises(SystemExit) as stopped:
      parse(*RECIPE, f'--config.steps={value}')
    assert stopped.value.code == 2
    assert refusal(capsys) == f"flag --config.steps={value}: invalid literal for int() with base 10: '{value}'"
  with refused(SpecError, 'config.steps = 100.0: a value of type int is allowed'):
    changed('steps', 100.0)
  lengths = parse(*RECIPE, '--config.eval.multiples=4')[1].config.eval.multiples
  assert changed('eval.multiples', lengths).eval.multiples == (4.0,)
  assert changed('eval.multiples', (0.5, 2)).eval.multiples == (0.5, 2.0)  # 16 and 64 tokens
  with refused(SpecError, 'config.eval.multiples: 0.3 x train_len = 32: a whole number of tokens is allowed'):
    changed('eval.multiples', (0.3, 2))
  for value in (0, -1, float('inf'), float('nan')):
    with refused(SpecError, 'config.eval.multiples = (', 'finite numbers above 0 are allowed'):
      changed('eval.multiples', (value, 2))


REFUSED = {
  ('posenc', 'rope(tetha=1)'): ('unknown argument tetha = 1', 'allowed: base, pairing'),
  ('posenc', 'ropee'): ("scheme = 'ropee': did you mean 'rope'? allowed: ",),
  ('methods', 'yarn2'): ("method = 'yarn2': did you mean 'yarn'? allowed: ",),
  ('methods', 'yarn(factor=0.5)'): ('factor = 0.5: a finite number of at least 1 is allowed',),
  ('methods', 'yarn(factor=0)'): ('factor = 0: a finite number of at least 1 is allowed',),
  ('methods', 'yarn(factor=-1)'): ('factor = -1: a finite number of at least 1 is allowed',),
  ('methods', 'yarn(factor=1e999)'): ('factor = inf: a finite number is allowed',),
  ('methods', 'yarn(factor=nan)'): ('argument values are literals',),
  ('model.head_dim', 15): ('rope: head_dim = 15: an even rotary width is allowed',),
  ('model.dtype', 'float15'): ("dtype = 'float15': allowed: float32, bfloat16",),
  ('data.bos', 'twice'): ("bos = 'twice'", 'allowed: document, none, window'),
}


def test_G03(parse, capsys):  # noqa: F811
  """A misspelt key, an unknown name and a number outside what is allowed: one line, before anything runs."""
  for (field, value), words in REFUSED.items():
    with refused(SpecError, 'config.', *words):
      changed(field, value)
  with pytest.raises(SystemExit) as stopped:
    parse(*RECIPE, '--config.pos.tetha=1')
  assert stopped.value.code == 2
  assert 'pos' in refusal(capsys)

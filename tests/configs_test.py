"""Every recipe is valid and builds its model; every field is read; every mistake is one line before anything runs."""

import ast
import dataclasses
import importlib
import inspect
import json
import math
import time

import jax
import jax.numpy as jnp
import ml_collections
import pytest
from flax import nnx

import posenc
from configs import schema, smoke
from configs.schema import Config
from evaluation.plan import Comparison
from models.lm import LM
from posenc import rotations
from spec import SpecError, keywords
from training import provenance

NAMES = (
  'base',
  'extend',
  'grid',
  'landscape',
  'length_generalisation',
  'markov_copy',
  'quickstart',
  'recall',
  'smoke',
  'smollm2',
)
SCHEMES = [name if name != 'rope2d' else 'rope2d(width=16)' for name in posenc.SCHEMES]
RECIPES = [
  (name, scheme)
  for name in NAMES
  for scheme in (
    SCHEMES
    if 'scheme' in inspect.signature(importlib.import_module(f'configs.{name}').get_config).parameters
    else [None]
  )
]
GROUPS = [Config, *(type(f.default) for f in dataclasses.fields(Config) if dataclasses.is_dataclass(f.default))]


def recipe(name, scheme=None):
  return importlib.import_module(f'configs.{name}').get_config(*([scheme] if scheme else []))


def test_no_recipe_is_forgotten(root):
  found = [p.stem for p in sorted((root / 'configs').glob('*.py')) if 'def get_config(' in p.read_text()]
  assert found == sorted(NAMES)


@pytest.mark.parametrize(('name', 'scheme'), RECIPES)
def test_recipe_runs_forward(name, scheme):
  """Shapes only: the base recipe is too large for more, and a wrong shape shows all the same."""
  config = Config.from_dict(recipe(name, scheme).to_dict())
  assert config.posenc == (scheme or 'rope',)
  slots = [config.build_scheme(text) for text in config.posenc]
  pos = posenc.positions('none', slots, config.train_len, 16)

  def nll():
    model = LM(config.model, config.posenc, vocab_size=257, train_len=config.train_len, rngs=nnx.Rngs(config.seed))
    tokens_BT = jnp.zeros((2, 16), jnp.int32)
    return model.nll(tokens_BT, tokens_BT, pos)

  out = jax.eval_shape(nll)
  assert (out.shape, out.dtype) == ((2, 16), jnp.float32)


def test_the_matched_recipe_is_matched():
  """Base and beta_fast of rope_matched are those of the nano map, rounded; the rest is the quickstart."""
  config = Config.from_dict(recipe('quickstart', 'rope_matched').to_dict())
  plain = Config.from_dict(recipe('quickstart').to_dict())
  (compare,) = config.eval.compare
  assert Comparison.parse(compare).method in config.methods
  rest = dataclasses.replace(config.eval, compare=plain.eval.compare)
  assert dataclasses.replace(config, posenc=plain.posenc, methods=plain.methods, eval=rest) == plain
  (scheme,) = [config.build_scheme(text) for text in config.posenc]
  large = rotations.REFERENCES[0]
  base = rotations.matched_base(config.train_len, large)
  assert scheme.base == pytest.approx(base, rel=0.01)
  betas = [call.kwargs['beta_fast'] for m in config.methods for call in posenc.check_method(m) if call.name == 'yarn']
  assert betas == [pytest.approx(rotations.matched_beta(32, base, large), rel=0.01)] * 2


@pytest.mark.parametrize('name', NAMES)
def test_recipe_can_be_overridden_field_by_field(name):
  """ml_collections takes neither a list nor None from the command line."""

  def walk(group):
    for field, value in group.items():
      if isinstance(value, ml_collections.ConfigDict):
        walk(value)
      else:
        assert isinstance(value, (str, bool, int, float, tuple)), f'{field} = {value!r}'

  walk(recipe(name))


@pytest.mark.parametrize('name', NAMES)
def test_recipe_opens_with_its_command(name):
  assert f'--config=configs/{name}.py' in importlib.import_module(f'configs.{name}').__doc__


def test_round_trip_through_json():
  config = Config.from_dict(smoke.get_config('t5(num_buckets=16)').to_dict())
  assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config
  assert Config.from_dict(config.to_dict()) == config
  assert Config.from_dict({}) == Config(), 'a config.json from before a field was added takes its default'
  assert hash(config) == hash(Config.from_dict(config.to_dict()))


def test_a_written_config_is_read_back(tmp_path):
  config = Config.from_dict(smoke.get_config().to_dict())
  provenance.claim(tmp_path, config, config.load_data())
  assert Config.from_dict(provenance.read(tmp_path)) == config


def test_every_field_is_read_somewhere(root):
  """A knob that nothing reads is worse than none. An attribute counts anywhere but in its own class's checks."""
  reads = set()
  for path in [p for d in ('data', 'models', 'training', 'evaluation') for p in (root / d).glob('*.py')] + [
    root / 'train.py', root / 'eval_extrapolation.py', root / 'configs' / 'schema.py'
  ]:  # fmt: skip
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef) and node.name == '__post_init__':
        node.body = []
    reads |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)}
  fields = {f'{group.__name__}.{field.name}': field.name for group in GROUPS for field in dataclasses.fields(group)}
  assert len(fields) > 40
  assert not {knob for knob, name in fields.items() if name not in reads}


def test_every_field_reaches_the_recipe():
  config = schema.default()
  for group in GROUPS[1:]:
    name = next(f.name for f in dataclasses.fields(Config) if type(f.default) is group)
    assert set(config[name]) == {f.name for f in dataclasses.fields(group)}
  assert set(config) == {f.name for f in dataclasses.fields(Config)}


@pytest.mark.parametrize(
  ('field', 'value', 'want'),
  [
    ('posenc', 'alibi', ('alibi',)),
    ('posenc', "('rope', 'nope')", ('rope', 'nope')),
    ('posenc', "('rope')", ('rope',)),
    ('posenc', ['rope', 'nope'], ('rope', 'nope')),
    ('methods', 'yarn(factor=8)', ('yarn(factor=8)',)),
    ('methods', ('yarn(factor=8)+logn', 'none'), ('yarn(factor=8)+logn', 'none')),
    ('methods', ('none',), ('none',)),
    ('eval.multiples', 4, (4.0,)),
    ('eval.multiples', (1, 2.0), (1.0, 2.0)),
    ('log.validate_multiples', (), ()),
    ('optimizer.learning_rate', 1, 1.0),
    ('model.head_dim', 24, 24),
    # A meaningless combination is an outcome of the sweep, not an error.
    ('posenc', 'learned', ('learned',)),
  ],
)
def test_accepted_values(field, value, want):
  config = Config.from_dict(changed(field, value))
  for part in field.split('.'):
    config = getattr(config, part)
  assert config == want
  assert [type(x) for x in (config if isinstance(config, tuple) else [config])] == [
    type(x) for x in (want if isinstance(want, tuple) else [want])
  ]


def changed(field, value, **others):
  config = smoke.get_config().to_dict()
  for name, new in {field: value, **others}.items():
    group = config
    *path, last = name.split('.')
    for part in path:
      group = group[part]
    group[last] = new
  return config


NAN, INF = math.nan, math.inf
REFUSED = [
  # Names: what was meant, and what there is.
  ('posenc', 'ropee', r"posenc: scheme = 'ropee': did you mean 'rope'\? allowed: alibi, "),
  ('posenc', 'rope(tetha=1)', 'posenc: scheme rope: unknown argument tetha = 1: .*allowed: base'),
  ('posenc', 'rope(base=0)', 'posenc: rope: base = 0.0: a number above 1 is allowed'),
  ('posenc', 'rope(base=nan)', 'posenc: .*base=nan.*: argument values are literals'),
  ('posenc', '', "posenc: '': expected name"),
  ('posenc', (), r'posenc = \(\): at least one scheme is allowed'),
  ('posenc', '(3)', r"posenc = '\(3\)': a string, or a tuple of strings .* is allowed"),
  ('posenc', "('rope', 3)", 'posenc = 3: a value of type str is allowed'),
  ('posenc', "('rope',", r'posenc = .*: a string, or a tuple of strings .* is allowed'),
  ('posenc', ('rope', 'nope', 'nope'), r'model\.layers = 2: a multiple of the 3 slots'),
  ('methods', 'yarn2', r"methods: method = 'yarn2': did you mean 'yarn'\? allowed: "),
  ('methods', ('none', 'yarn2'), "methods: method = 'yarn2'"),
  ('methods', 'yarn(factr=8)', "methods: method yarn: unknown argument factr = 8: did you mean 'factor'"),
  *(
    ('methods', f'{name}(factor={factor})', f'methods: method {name}: factor = {factor}: .* at least 1 is allowed')
    for name in ('pi', 'ntk', 'yarn')
    for factor in ('0', '-1', '0.5', "'8'", 'True')
  ),
  ('methods', 'yarn(factor=nan)', 'methods: .*factor=nan.*: argument values are literals'),
  ('methods', 'pi(factor=1e400)', 'methods: method pi: factor = inf: a finite number .*is allowed'),
  ('methods', 'yarn(beta_fast=1.0, beta_slow=32.0)', 'methods: method yarn: beta_fast = 1.0.* is allowed'),
  ('methods', 'pi+yarn', 'methods: .*pi and yarn both write inv_freq_P'),
  (
    'positions',
    'poze(target_len=64)',
    r"positions: rule = 'poze': did you mean 'pose'\? allowed: pose, randomized, seq",
  ),
  ('positions', 'pose', 'positions: rule pose: needs the argument target_len'),
  ('positions', 'pose(target_len=31)', r'positions: pose: target_len = 31: a whole number from 32 \(train_len\)'),
  ('positions', 'pose(target_len=64.5)', r'positions: pose: target_len = 64\.5: a whole number from 32 \(train_len\)'),
  ('positions', 'pose(target_len=64, chunks=1)', r'positions: pose: chunks = 1: a whole number from 2 to 32'),
  ('positions', 'pose(target_len=64, chunks=33)', r'positions: pose: chunks = 33: a whole number from 2 to 32'),
  ('positions', 'randomized(max_len=31)', r'positions: randomized: max_len = 31: a whole number from 32 \(train_len\)'),
  ('positions', 'randomized(max_len=16777217)', 'positions: randomized: max_len = 16777217: .*to 16777216 is allowed'),
  (
    'positions',
    "randomized(max_len=64, eval='even')",
    "positions: randomized: eval = 'even': .*arange, evenly_spaced, random",
  ),
  ('positions', 'randomized(max_len=64, per_layer=1)', 'positions: rule randomized: per_layer = 1: True or False'),
  ('positions', ('sequential',), r"positions = \('sequential',\): a value of type str is allowed"),
  ('data.corpus', 'sotuu', r"data\.corpus = 'sotuu': did you mean 'sotu'\? allowed: "),
  ('data.tokenizer', 'bite', r"data\.tokenizer = 'bite': .*allowed: bpe, bytes"),
  ('data.bos', 'never', r"data\.bos = 'never': allowed: document, none, window"),
  ('model.dtype', 'float16', r"model\.dtype = 'float16': allowed: float32, bfloat16"),
  ('eval.protocols', 'fixed', r"eval\.protocols = 'fixed': allowed: .*fixed_targets"),
  ('eval.controls', 'shuffle', r"eval\.controls = 'shuffle': did you mean 'shuffled'\?"),
  ('eval.controls', 'foreign(spans=-1)', r'eval\.controls foreign: spans = -1: a whole number of at least 0'),
  ('eval.controls', ('foreign', 'foreign'), r"eval\.controls = \('foreign', 'foreign'\): each once"),
  ('eval.compare', 'yarn', r"eval\.compare = 'yarn': a comparison such as 'yarn - none at 4x' is allowed"),
  ('eval.compare', 'yarn - none at 4', r"eval\.compare = 'yarn - none at 4': a comparison such as"),
  ('eval.compare', 'yarn - non at 4x', r"eval\.compare = 'yarn - non at 4x': method = 'non': did you mean 'none'"),
  ('stepz', 3, r"config: field = 'stepz': did you mean 'steps'\? allowed: "),
  ('model.layer', 3, r"config\.model: field = 'layer': did you mean 'layers'\? allowed: "),
  # Shapes.
  ('model.heads', 3, r'model\.heads = 3: a divisor of d_model = 32 is allowed'),
  ('model.heads', 32, 'posenc: rope: head_dim = 1: an even rotary width is allowed'),
  ('model.head_dim', 15, 'posenc: rope: head_dim = 15: an even rotary width is allowed'),
  ('model.kv_heads', 3, r'model\.kv_heads = 3: a divisor of heads = 2 is allowed'),
  *(
    (f'model.{f}', v, rf'model\.{f} = {v}: a whole number')
    for f in ('layers', 'd_model', 'heads', 'loss_chunk')
    for v in (0, -1)
  ),
  *((f'model.{f}', -1, rf'model\.{f} = -1: a positive whole number is allowed') for f in ('head_dim', 'tile')),
  *(('model.dropout', v, rf'model\.dropout = {v}: a number in \[0, 1\)') for v in (1.0, -0.1, NAN)),
  # Lengths and counts.
  *((f, v, rf'{f} = {v}: a whole number') for f in ('train_len', 'max_multiple', 'steps', 'batch') for v in (0, -5)),
  ('seed', -1, r'seed = -1: a whole number from 0 to 2\*\*32 - 1 is allowed'),
  ('seed', 2**32, r'seed = 4294967296: a whole number below 2\*\*32 is allowed'),
  ('optimizer.clip_norm', 10**400, r'optimizer\.clip_norm = 2\*\*1328 or more: .* larger ones as 1e12'),  # float() too
  ('model.layers', 2**20 + 1, r'model\.layers = 1048577: a whole number of at most 1048576 is allowed'),
  ('model.heads', 2**31, r'model\.heads = 2147483648: a whole number of at most 1048576 is allowed'),
  ('max_multiple', 2**19 + 1, r'max_multiple = 524289: at most 16777216 tokens are allowed, not 32 times as many: bey'),
  *(
    (f'{group}.{f}', 0, rf'{group}\.{f} = 0: a whole number')
    for group, names in {
      'log': ('every', 'validate_every', 'validation_windows', 'checkpoint_every', 'keep'),
      'eval': ('spans', 'batch_tokens'),
      'data': ('test_docs', 'validation_docs'),
      'optimizer': ('accumulate',),
    }.items()
    for f in names
  ),
  ('eval.non_overlapping_docs', -1, r'eval\.non_overlapping_docs = -1: a whole number'),
  *(
    (f'{group}multiples', (value,), rf'{group}multiples = \({value},\): .*numbers above 0 are allowed')
    for group in ('eval.', 'log.validate_')
    for value in (0.0, -1.0, NAN, INF)
  ),
  ('eval.multiples', (0.25,), r'eval\.multiples: 0\.25 x train_len = 8 tokens: more than the 8 targets .* is allowed'),
  ('eval.multiples', (16,), r'eval\.multiples: 16\.0: at most max_multiple = 8 is allowed'),
  ('log.validate_multiples', (9,), r'log\.validate_multiples: 9\.0: at most max_multiple = 8 is allowed'),
  ('surface.multiples', (16.0,), r'surface\.multiples: 16\.0: at most max_multiple = 8 is allowed'),
  ('surface.multiples', (1.3,), r'surface\.multiples: 1\.3 x train_len = 32: a whole number of tokens is allowed'),
  ('surface.multiples', (0.25,), r'surface\.multiples: 0\.25 x train_len = 8 tokens: more than the 8 targets'),
  ('surface.multiples', (), r'surface\.multiples = \(\): at least one, and each once, is allowed'),
  ('surface.checkpoints', -1, r'surface\.checkpoints = -1: a whole number of at least 0 is allowed'),
  ('surface.docs', 0, r'surface\.docs = 0: a whole number of at least 1 is allowed'),
  ('eval.multiples', (1.3,), r'eval\.multiples: 1\.3 x train_len = 32: a whole number of tokens is allowed'),
  ('log.validate_multiples', (1.3,), r'log\.validate_multiples: 1\.3 x train_len = 32: a whole number of tokens'),
  ('eval.multiples', (1, 1.0), r'eval\.multiples = \(1\.0, 1\.0\): .*once.* is allowed'),
  ('eval.multiples', (), r'eval\.multiples = \(\): at least one.* is allowed'),
  ('eval.protocols', (), r'eval\.protocols = \(\): at least one.* is allowed'),
  # Types: nothing but an int is converted, and that only to a float.
  ('steps', 100.0, r'steps = 100\.0: a value of type int is allowed'),
  ('steps', True, 'steps = True: a value of type int is allowed'),
  ('train_len', '32', "train_len = '32': a value of type int is allowed"),
  ('optimizer.weight_decay', True, r'optimizer\.weight_decay = True: a value of type float is allowed'),
  ('optimizer.clip_norm', None, r'optimizer\.clip_norm = None: a value of type float is allowed'),
  ('eval.multiples', (0.5, '2'), r"eval\.multiples = '2': a value of type float is allowed"),
  ('model.tied', 1, r'model\.tied = 1: a value of type bool is allowed'),
  ('posenc', 3, 'posenc = 3: a value of type str is allowed'),
  ('data', 3, 'data = 3: a group of fields is allowed'),
  # The optimizer's own ranges have their own test; here, that the error carries the whole path.
  ('optimizer.learning_rate', 0.0, r'optimizer\.learning_rate = 0\.0: a number above 0 is allowed'),
  (
    'optimizer.learning_rate',
    1e-320,
    r'optimizer\.learning_rate = 1e-320: a number above 0 is allowed that float32 ho',
  ),
  ('optimizer.learning_rate', 1e39, r'optimizer\.learning_rate = 1e\+39: a number above 0 is allowed that float32 ho'),
  # Found by tests/fuzz_test.py.
  ('posenc', '𝐫𝐨𝐩𝐞', "posenc: '𝐫𝐨𝐩𝐞': expected name or .*, in ASCII letters but for strings"),
  (
    'posenc',
    'cope(npos_max=2147483648)',
    r'posenc: scheme cope: npos_max = 2147483648: .* at most 2147483647 is allow',
  ),
  ('data.corpus', 'text(glob=100.0)', r'data\.corpus text: glob = 100\.0: a string is allowed'),
]


def test_a_number_that_python_does_not_write_is_refused_too():
  with pytest.raises(SpecError, match=r'^config\.seed = 2\*\*16609 or more: a whole number below 2\*\*32 is allowed'):
    Config.from_dict(changed('seed', 10**5000))


def test_a_scheme_as_large_as_can_be_said_is_checked_without_memory_for_it():
  """68 GB of a table, which were allocated to check the config."""
  config = Config.from_dict(changed('posenc', 'cope(npos_max=2147483647)'))
  (scheme,) = (config.build_scheme(text) for text in config.posenc)
  assert scheme.table.shape == (2**31 - 1, 16)


@pytest.mark.parametrize('name', posenc.SCHEMES)
def test_whole_numbers_are_the_floats_that_they_equal(name):
  """learned(init_std=2147483648) was a traceback: jax has no such integer."""

  def allowed(text):
    try:
      Config.from_dict(changed('posenc', text))
    except SpecError:
      return False
    return True

  for key, default in keywords(posenc.SCHEMES[name].__init__).items():
    if isinstance(default, float):
      assert allowed(f'{name}({key}={2**31})') == allowed(f'{name}({key}={2.0**31})'), key


@pytest.mark.parametrize(('field', 'value', 'message'), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_in_one_line(field, value, message):
  config = changed(field, value, **({'surface.checkpoints': 2} if field == 'surface.multiples' else {}))
  began = time.monotonic()
  with pytest.raises(SpecError, match=r'^(config\.)?' + message) as error:
    Config.from_dict(config)
  assert '\n' not in str(error.value)
  assert time.monotonic() - began < 1, 'something was compiled or read before the config was checked'


@pytest.mark.parametrize(
  ('schemes', 'rule', 'message'),
  [
    ('nope', 'pose(target_len=64)', 'pose: positions are not read by nope: sequential is allowed'),
    ('cope', 'randomized(max_len=64)', 'randomized: positions are not read by cope: sequential is allowed'),
    (('nope', 'cope'), 'pose(target_len=64)', 'pose: positions are not read by nope, cope: sequential is allowed'),
    (
      'learned',
      'randomized(max_len=33)',
      'randomized: reaches position 32: at most 31 is allowed, the last row of learned',
    ),
    ('learned', 'pose(target_len=64)', 'pose: reaches position 63: at most 31 is allowed, the last row of learned'),
    (
      'sinusoidal',
      'randomized(max_len=64, per_layer=True)',
      'randomized: per_layer = True: False is allowed with sinusoidal, read once, with the embeddings',
    ),
  ],
)
def test_positions_that_a_scheme_does_not_read_or_hold_are_refused(schemes, rule, message):
  with pytest.raises(SpecError) as error:
    Config.from_dict(changed('posenc', schemes, positions=rule))
  assert str(error.value) == f'config.positions: {message}'


@pytest.mark.parametrize(
  ('schemes', 'rule'),
  [
    (('rope', 'nope'), 'randomized(max_len=64, per_layer=True)'),
    (('sinusoidal', 'nope'), 'pose(target_len=64)'),
    ('learned', 'randomized(max_len=32)'),
    *((name, 'sequential') for name in SCHEMES),
  ],
)
def test_positions_that_one_slot_reads_are_accepted(schemes, rule):
  assert Config.from_dict(changed('posenc', schemes, positions=rule)).positions == rule


def test_a_run_of_before_there_was_a_field_had_its_default(tmp_path):
  config = Config.from_dict(smoke.get_config().to_dict())
  data = config.load_data()
  provenance.claim(tmp_path, config, data)
  record = json.loads((tmp_path / 'config.json').read_text())
  del record['config']['positions']
  (tmp_path / 'config.json').write_text(json.dumps(record))
  provenance.claim(tmp_path, config, data)
  other = dataclasses.replace(config, positions='pose(target_len=64)')
  with pytest.raises(SpecError, match=r"\(config\.positions: 'sequential' -> 'pose\(target_len=64\)'\)"):
    provenance.claim(tmp_path, other, data)


def test_a_bad_factor_is_refused_on_every_scheme():
  """Where a method does not apply, its points are unsupported; its arguments are checked all the same."""
  with pytest.raises(SpecError, match=r'methods: method yarn: factor = 0\.5'):
    Config.from_dict(changed('methods', 'yarn(factor=0.5)', posenc='alibi'))


def test_lengths_of_drawn_text_are_multiples_of_its_stride():
  """Known once the corpus is: still before anything is compiled, and before the training that would be in vain."""
  config = {'data.corpus': 'markov_copy(tokens=400, documents=40)', 'data.test_docs': 4, 'train_len': 18}
  Config.from_dict(changed('eval.multiples', (1.0,), **config)).load_data()
  with pytest.raises(
    SpecError, match=r'config\.eval\.multiples: 0\.5 x train_len = 9 tokens: a multiple of 2, the str'
  ):
    Config.from_dict(changed('eval.multiples', (0.5, 1.0), **config)).load_data()
  with pytest.raises(SpecError, match=r'config\.train_len = 17: a multiple of 2, the stride of corpus .* is allowed'):
    Config.from_dict(changed('eval.multiples', (1.0,), **config | {'train_len': 17})).load_data()

"""What the README tells a newcomer to type, typed: its scheme and its method, its recipes' options, its files."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import golden_test
import posenc
import spec
from data import corpora
from models.lm import LM, ModelConfig
from posenc import scaling


@pytest.fixture(scope='module')
def readme(root):
  return (root / 'README.md').read_text()


def code(readme, word):
  """The python block that has `word` in it."""
  (block,) = [b for b in re.findall(r'```python\n(.*?)```', readme, re.S) if word in b]
  return block


def test_the_scheme_is_one_that_trains(readme, monkeypatch):
  namespace = {}
  exec(code(readme, 'class Windowed'), namespace)
  monkeypatch.setitem(posenc.SCHEMES, 'windowed', namespace['Windowed'])
  lm = LM(
    ModelConfig(layers=1, d_model=16, heads=2), ('windowed(reach=3)',), vocab_size=7, train_len=16, rngs=nnx.Rngs(0)
  )
  graphdef, params = nnx.split(lm)
  pos = posenc.positions('none', list(lm.schemes), 16, 16)
  tokens = jnp.arange(16)[None] % 7
  grads = jax.grad(lambda p: nnx.merge(graphdef, p).nll(tokens, tokens, pos).sum())(params)
  assert float(jnp.abs(nnx.to_pure_dict(grads)['schemes'][0]['slope']).max()) > 0
  assert not lm.schemes[0].slope[...].aval.weak_type  # or the train step would compile twice


def test_the_method_is_one_that_composes_and_refuses(readme, monkeypatch):
  namespace = dict(vars(scaling))
  exec(code(readme, 'def half_pi'), namespace)
  monkeypatch.setitem(posenc.METHODS, 'half_pi', namespace['half_pi'])
  dims = {'heads': 2, 'head_dim': 8, 'd_model': 16, 'train_len': 16, 'rngs': nnx.Rngs(0)}
  rope, alibi = (posenc.build(name, **dims) for name in ('rope', 'alibi'))
  got = posenc.positions('half_pi+logn', rope, 16, 64)
  np.testing.assert_allclose(got.inv_freq_P, rope.inv_freq_P / 2, rtol=1e-6)
  np.testing.assert_array_equal(posenc.positions('half_pi', rope, 16, 16).inv_freq_P, np.float32(rope.inv_freq_P))
  with pytest.raises(posenc.Unsupported, match='alibi has no frequencies'):
    posenc.positions('half_pi', alibi, 16, 64)


@pytest.fixture(scope='module')
def catalogue(root):
  return (root / 'docs' / 'catalogue.md').read_text()


def test_every_scheme_method_and_rule_is_named(readme, catalogue):
  for name in (*posenc.SCHEMES, *posenc.METHODS, *posenc.RULES):
    assert re.search(rf'`{name}[`(]', readme), name
    assert re.search(rf'^\| .*`{name}[`(]', catalogue, re.M), name


def test_every_keyword_is_in_the_catalogue_with_its_default(catalogue):
  for name, method in posenc.METHODS.items():
    arguments = ', '.join(f'{key}={default!r}' for key, default in spec.keywords(method).items())
    assert f'| `{name}({arguments})` |'.replace('()', '') in catalogue, name
  for name, scheme in (*posenc.SCHEMES.items(), *posenc.RULES.items()):
    rows = ' '.join(re.findall(rf'^\| (.*`{name}\b[^|]*)', catalogue, re.M))
    for key, default in spec.keywords(scheme.__init__).items():
      word = key if default is inspect.Parameter.empty else f'{key}={default!r}'
      assert re.search(rf'[(, ]{re.escape(word)}[,)]', rows), f'{name}: {word}'


def test_every_golden_file_is_in_the_catalogue(catalogue):
  for name, parts in golden_test.COUNTS.items():
    assert f'| `{name}` | {sum(parts.values())} |' in catalogue, name


def test_every_corpus_and_its_arguments_are_in_the_table(readme, root):
  table = (root / 'docs' / 'data.md').read_text()
  for name, source in corpora.CORPORA.items():
    (row,) = re.findall(rf'^\| `({name}\b[^`]*)`', table, re.M)
    for key, default in spec.keywords(source).items():
      assert f'{key}={default!r}' in row.replace('"', "'") or (default is inspect.Parameter.empty and key in row), key


def test_every_file_it_names_exists(readme, root):
  texts = {root: readme, **{path: path.read_text() for path in (root / 'docs').glob('*.md')}}
  folders = 'configs|posenc|models|docs|scripts|data|evaluation|training|benchmarks|tests'
  for path, text in texts.items():
    named = set(re.findall(rf'(?<![\w/.-])(?:{folders})/[\w/]+\.(?:py|md|png|sh)', text)) - {'posenc/windowed.py'}
    assert len(named) > 8 or path != root
    assert not [name for name in named if not (root / name).exists()], path
    links = set(re.findall(r'\]\(([\w/.-]+)\)', text))
    assert not [link for link in links if not ((path if path == root else path.parent) / link).exists()], path


def test_every_document_is_reached_from_the_readme(readme, root):
  for path in (root / 'docs').glob('*.md'):
    assert f'docs/{path.name}' in readme, path.name


def test_every_method_string_of_the_recipes_parses(readme):
  methods = re.findall(r"--method='([^']+)'|--method=(\w\S*)", readme)
  assert len(methods) >= 3
  for quoted, plain in methods:
    posenc.check_method(quoted or plain)

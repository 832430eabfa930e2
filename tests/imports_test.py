"""Imports point one way, so that each part can be read, tested and replaced without those built on it."""

import ast
import os
import subprocess
import sys

import pytest

# What each part of the project may import besides itself. Drivers and scripts are the end: anyone, and nobody them.
ALLOWED = {
  'spec': set(),
  'data': {'spec'},
  'posenc': {'spec'},
  'models': {'posenc', 'spec'},
  'training': {'models', 'posenc', 'data', 'spec'},
  'evaluation': {'models', 'posenc', 'data', 'spec'},
  'configs': {'training', 'evaluation', 'models', 'posenc', 'data', 'spec'},
}
END = {'train', 'eval_extrapolation', 'scripts', 'benchmarks', 'tests'}
# So is a program that stands with the part that it shows. Nobody imports it.
PROGRAMS = {'data/show.py'}


def imported(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}: relative import'
      yield node.module.split('.')[0]
    elif isinstance(node, ast.Import):
      yield from (alias.name.split('.')[0] for alias in node.names)


def test_nobody_imports_a_program(root):
  names = {path.removesuffix('.py').replace('/', '.') for path in PROGRAMS}
  for path in [*root.glob('*.py'), *(p for part in ALLOWED if part != 'spec' for p in (root / part).rglob('*.py'))]:
    text = path.read_text()
    for name in names:
      package, _, module = name.rpartition('.')
      assert f'import {name}' not in text and f'from {name} ' not in text, path
      assert f'from {package} import {module}\n' not in text, path


@pytest.mark.parametrize('part', ALLOWED)
def test_imports_point_one_way(root, part):
  files = [root / 'spec.py'] if part == 'spec' else sorted((root / part).rglob('*.py'))
  assert files
  for path in files:
    if path.relative_to(root).as_posix() in PROGRAMS:
      continue
    ours = set(imported(path)) & (ALLOWED.keys() | END) - {part}
    assert ours <= ALLOWED[part], f'{path.relative_to(root)} imports {ours - ALLOWED[part]}'


# What takes as long to import as jax, or half of it, and what a program that does not use it need not wait for.
LAZY = {
  'posenc, models.lm': {'absl.app', 'datasets', 'matplotlib', 'orbax', 'scipy', 'tensorboardX', 'tokenizers', 'tqdm'},
  'train': {'datasets', 'matplotlib', 'orbax', 'scipy', 'tokenizers', 'jax.experimental.pallas'},
  'eval_extrapolation': {'datasets', 'matplotlib', 'orbax', 'tokenizers', 'jax.experimental.pallas'},
}


@pytest.mark.parametrize('modules', LAZY)
def test_what_is_heavy_is_imported_where_it_is_used(root, modules):
  code = f'import {modules}, sys; print(*sys.modules)'
  env = {**os.environ, 'PYTHONPATH': str(root)}
  done = subprocess.run([sys.executable, '-c', code], cwd=root, env=env, capture_output=True, text=True, check=True)
  assert LAZY[modules] & set(done.stdout.split()) == set()

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
  'opened': {'configs', 'training', 'evaluation', 'models', 'data'},
}
END = {'train', 'eval_extrapolation', 'scripts', 'benchmarks', 'tests'}
# Programs that are started as modules of a part: ends like drivers, which nothing in it imports.
PROGRAMS = {'data': {'show'}, 'evaluation': {'diagnose', 'tasks', 'windows'}}


def modules(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}: relative import'
      yield node.module
      yield from (f'{node.module}.{alias.name}' for alias in node.names)
    elif isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)


def imported(path):
  return {name.split('.')[0] for name in modules(path)}


@pytest.mark.parametrize('part', ALLOWED)
def test_imports_point_one_way(root, part):
  files = sorted((root / part).rglob('*.py')) or [root / f'{part}.py']
  programs = PROGRAMS.get(part, set())
  assert programs <= {path.stem for path in files}
  for path in files:
    assert not {f'{part}.{program}' for program in programs} & set(modules(path)), path.relative_to(root)
    ours = imported(path) & (ALLOWED.keys() | END) - {part}
    if path.stem in programs:
      continue
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

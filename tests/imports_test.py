"""Imports point one way, so that each part can be read, tested and replaced without those built on it."""

import ast

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


def imported(path):
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.ImportFrom):
      assert not node.level, f'{path}: relative import'
      yield node.module.split('.')[0]
    elif isinstance(node, ast.Import):
      yield from (alias.name.split('.')[0] for alias in node.names)


@pytest.mark.parametrize('part', ALLOWED)
def test_imports_point_one_way(root, part):
  files = [root / 'spec.py'] if part == 'spec' else sorted((root / part).rglob('*.py'))
  assert files
  for path in files:
    ours = set(imported(path)) & (ALLOWED.keys() | END) - {part}
    assert ours <= ALLOWED[part], f'{path.relative_to(root)} imports {ours - ALLOWED[part]}'

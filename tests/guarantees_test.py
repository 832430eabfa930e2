"""docs/GUARANTEES.md against the tests: every promise names one; every one named exists and runs when it says."""

import ast
import re


def test_every_promise_names_tests_that_there_are(root):
  text = (root / 'docs' / 'GUARANTEES.md').read_text()
  rows = [
    line for line in text.splitlines() if line.startswith('| ') and not line.startswith(('| promise', '| scheme'))
  ]
  promises = [row for row in rows if not row.startswith('| `')]
  assert len(promises) > 25
  assert all(re.search(r'\| `[\w/]+\.py::test_\w+`', row) for row in promises)
  named = re.findall(r'`([\w/]+\.py)::(test_\w+)`(†?)', text)
  assert len(named) > 40
  for file, test, dagger in named:
    path = root / 'tests' / file
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert test in functions, f'{file}::{test}'
    marks = {ast.unparse(mark) for mark in functions[test].decorator_list}
    marked = marks & {'pytest.mark.faults', 'pytest.mark.slow'}
    whole = any(ast.unparse(node) == 'pytestmark = pytest.mark.faults' for node in tree.body)
    assert (dagger == '†') == bool(marked or whole), f'{file}::{test} {"is" if dagger else "is not"} marked'

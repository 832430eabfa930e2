"""docs/CASES.md against the tests: every case has a row and a test of its name, in the file that the row says."""

import re


def test_every_case_has_a_row_and_a_test_and_the_other_way_round(root):
  rows = re.findall(
    r'^\| ([A-Z]\d\d) \|.*\| `(cases_\w+_test\.py)` \| (.+) \|$', (root / 'docs' / 'CASES.md').read_text(), re.M
  )
  named = {case: file for case, file, _ in rows}
  found = {
    case: path.name
    for path in (root / 'tests').glob('cases_*_test.py')
    for case in re.findall(r'^def test_([A-Z]\d\d)\(', path.read_text(), re.M)
  }
  assert named == found
  assert len(rows) == len(named) == 63
  for case, _, outcome in rows:
    assert re.match('right|refused|cannot arise', outcome), case

"""What a dry run promises of intervals, against intervals: drawn ones, and those of the sweep that follows."""

import math
import re

import numpy as np
import pytest

from evaluation import coverage, expect
from evaluation.stats import Components, components, half_width, infer
from evaluation.store import Store
from sweep_test import DOCS, Moody, at, documents, make_plan, make_survey, run

SPREADS = [s for of in expect.KINDS.values() for s in of]


@pytest.mark.parametrize('spans', [1, 16])
@pytest.mark.parametrize('S, D', [(1, 12), (3, 20), (5, 40)])
@pytest.mark.parametrize('spread', SPREADS, ids=lambda s: s.name)
def test_half_widths_are_those_of_drawn_intervals(spread, S, D, spans):
  """Effects of seeds, documents and spans are drawn, and each draw has its interval from evaluation/stats.py."""
  c, trials, rng = spread.components, 4000, np.random.default_rng(0)
  own = max(c.document - spread.between, 0)  # of four spans
  S_of = S * spread.groups
  shared = math.sqrt(c.document - own) * rng.standard_normal((1, D, trials))
  for _ in range(spans):
    shared = shared + math.sqrt(4 * own) * rng.standard_normal((1, D, trials)) / spans
  rest = np.sqrt(4 * c.residual / spans / spread.groups) * rng.standard_normal((S_of, D, trials))
  seed = np.sqrt(c.seed / spread.groups) * rng.standard_normal((S_of, 1, trials)) if S > 1 else 0.0
  x = seed + rest
  two = (shared + x[:S], x[S:]) if spread.groups == 2 else (shared + x, None)
  cells = infer(*two, alone=True)
  drawn = float((cells.high - cells.low).mean() / 2)
  assert half_width(spread.of(spans), S, D, groups=spread.groups) == pytest.approx(drawn, rel=0.03)


def test_a_level_halves_its_half_width_with_four_times_the_documents():
  """And not with four times the spans, of which a document's own deviation stays."""
  one, more = (half_width(expect.LEVEL.of(4), 1, d) for d in (40, 160))
  assert more / one == pytest.approx(0.49, abs=0.01)
  assert half_width(expect.LEVEL.of(1_000_000), 1, 40) == pytest.approx(
    0.0523 * one / math.hypot(0.2092, 0.0489), rel=0.01
  )


def test_our_models_scatter_as_the_page_says(root):
  """Standard deviations of docs/statistics.md, with which coverage is tried too."""
  page = (root / 'docs' / 'statistics.md').read_text()
  rows = {cells[0]: cells[1:] for line in page.splitlines() if (cells := re.findall(r'[^|]+(?= \|)', line))}
  table = {name.strip(): [c.strip() for c in cells] for name, cells in rows.items()}
  named = {
    expect.LEVEL: 'rope none 1x', expect.FLAT: 'alibi none 8x - 1x', expect.RISING: 'rope yarn 2x - 1x',
    expect.BROKEN: 'rope yarn - none 2x', expect.SCHEMES: 'alibi - rope none 1x',
  }  # fmt: skip
  assert set(named) == set(SPREADS)
  for spread, name in named.items():
    assert [f'{v**0.5:.4f}' for v in spread.components] == table[name][-3:]
    assert f'{spread.between**0.5:.4f}' == table[f'{name}, seed 0'][1]
  assert coverage.MEASURED['level at 1x'] == expect.LEVEL.components


def test_what_is_in_the_store_is_asked_first(tmp_path):
  """The widths that were expected are the widths that then come, number by number."""
  store, methods, lengths = Store(tmp_path), ('none', 'yarn', 'ntk'), (16, 32, 128)
  before = make_survey(methods, lengths, plan=make_plan(), stored=store)
  assert not any(expect.measured(before).values())
  lines = expect.text(before).splitlines()
  assert lines[1].endswith('as rope at 1x') and len(lines) == 2 + len(expect.KINDS)
  assert '12 documents x 2 spans of 8 targets' in lines[-1]
  points = run(Moody(), methods, lengths, plan=make_plan(), stored=store)
  there = expect.measured(make_survey(methods, lengths, plan=make_plan(), stored=store))

  def x_D(method, length):
    return np.array(at(points, method, length)['nll_documents'])

  want = {
    'level': [x_D('none', 16)],
    'length - 1x': [x_D(m, n) - x_D(m, 16) for n in (32, 128) for m in methods],
    'method - none': [x_D(m, n) - x_D('none', n) for n in (32, 128) for m in methods[1:]],
  }
  for kind, of in want.items():
    of = [x for x in of if x.std() > 1e-6]
    assert [c.document for c in there[kind]] == pytest.approx([components(x[None]).document for x in of])
  point = at(points, 'none', 16)
  half = (math.log(point['ci_high']) - math.log(point['ci_low'])) / 2
  said = expect.text(make_survey(methods, lengths, plan=make_plan(), stored=store)).splitlines()
  # A drawn interval is a little narrower on average than this one, which takes the variance for the true one.
  assert half_width(there['level'][0], 1, DOCS) == pytest.approx(half, rel=0.03)
  assert (
    said[1].split()[1] == f'{half_width(there["level"][0], 1, DOCS):.2g}' and 'this run, 1 of its numbers' in said[1]
  )
  assert 'scheme - scheme' in said[4] and 'this run' not in said[4]


def test_a_killed_sweep_is_asked_as_far_as_it_came(tmp_path):
  store, rng = Store(tmp_path), np.random.default_rng(0)
  docs = documents(14)
  survey = make_survey(('none',), (16,), plan=make_plan(docs), stored=store)
  stage = survey.stage(16)
  windows = stage.windows[16]
  ((_, key),) = stage.shelves
  nll = rng.exponential(size=(len(windows), 8)).astype(np.float32)
  for n in (22, 26):  # 11 documents, then 13
    rows = [nll[i] for i in range(n)]
    stage.shelves[16, key].put([stage.plan.place(w) for w in windows[:n]], rows)
    found = expect.measured(make_survey(('none',), (16,), plan=make_plan(docs), stored=store))['level']
    x_D = nll[: n // 2 * 2].reshape(n // 2, -1).mean(1)
    assert [c.document for c in found] == (pytest.approx([x_D.var(ddof=1)]) if n > 24 else [])


def test_few_documents_have_no_interval():
  survey = make_survey(plan=make_plan(documents(11)))
  assert expect.text(survey) == 'no interval of levels is given of 11 documents: 12 are needed'


def test_a_number_without_spread_has_no_width():
  assert half_width(Components(0.0, 0.0, 0.0), 3, 20) == 0.0

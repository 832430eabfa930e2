"""How wide a sweep's intervals will be, before it is run: half of a 95 % interval, nats, of fixed targets."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from evaluation.protocols import Selection
from evaluation.stats import MIN_DOCUMENTS, Components, components, half_width
from evaluation.survey import Stage, Survey

SPANS = 4  # of a document of our models, whose targets were 16 each
SEEDS = 3, 5


class Spread(NamedTuple):
  """What one number of our own models scatters by. between: of a document's variance, what more spans do not lessen."""

  name: str
  components: Components  # nats**2, with SPANS spans a document
  between: float  # nats**2
  groups: int = 1  # 2: a difference of schemes

  def of(self, spans: int) -> Components:
    """A span's own scatter goes down with their number, the residual with it."""
    c, n = self.components, SPANS / spans
    own = max(c.document - self.between, 0.0)
    return Components(c.seed, c.document - own + own * n, c.residual * n)


def _spread(name: str, seed: float, document: float, residual: float, between: float, groups: int = 1) -> Spread:
  """Of standard deviations, nats."""
  return Spread(name, Components(seed**2, document**2, residual**2), between**2, groups)


# docs/statistics.md: components of configs/quickstart.py's seeds 0, 1, 2, `between` of seed 0.
LEVEL = _spread('rope at 1x', 0.0031, 0.2092, 0.0489, 0.0523)
FLAT = _spread('alibi, 8x - 1x', 0.0009, 0.0, 0.0066, 0.0)
RISING = _spread('rope yarn, 2x - 1x', 0.0013, 0.0, 0.0324, 0.0)
BROKEN = _spread('rope, yarn - none at 2x', 0.1284, 0.1099, 0.1434, 0.0)
SCHEMES = _spread('alibi - rope at 1x', 0.0042, 0.0391, 0.0752, 0.0360, 2)

KINDS = {
  'level': (LEVEL,),
  'length - 1x': (FLAT, RISING),
  'method - none': (BROKEN,),
  'scheme - scheme': (SCHEMES,),
}


def text(survey: Survey) -> str:
  """A line a kind of number. This checkpoint: by what of it is in the store already, else as our own models scatter.

  What seeds add is never in the store of one run.
  """
  documents, spans = len(survey.plan.documents), survey.plan.cfg.spans
  if documents < MIN_DOCUMENTS:
    return f'no interval of levels is given of {documents} documents: {MIN_DOCUMENTS} are needed'
  there = measured(survey)
  table = [['expected half of a 95 % interval, nats', 'this checkpoint', *(f'{n} seeds' for n in SEEDS), '']]
  for kind, spreads in KINDS.items():
    found = there.get(kind, [])
    of = [s.of(spans) for s in spreads]
    one = [half_width(c, 1, documents) for c in found or of]
    more = [[half_width(c, n, documents, groups=s.groups) for c, s in zip(of, spreads)] for n in SEEDS]
    source = '; '.join(s.name for s in spreads)
    if found:
      source = f'this run, {len(found)} of its numbers; seeds as {source}'
    table.append([kind, _ends(one), *map(_ends, more), f'as {source}' if not found else source])
  widths = [max(map(len, column)) for column in zip(*table)]
  lines = ['  '.join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in table]
  lengths, cells = len(survey.lengths), max((len(survey.methods) - 1) * len(survey.lengths), 1)
  flat = Components(math.nan, 1.0, 0.0)
  wider = [half_width(flat, 1, documents, level=0.05 / n) / half_width(flat, 1, documents) for n in (lengths, cells)]
  lines.append(
    f'{documents} documents x {spans} spans of {survey.plan.targets} targets, each number by itself; a band over '
    f'{lengths} lengths is at most {wider[0]:.2f}, a table of {cells} differences {wider[1]:.2f} times as wide'
  )
  return '\n'.join(lines)


def measured(survey: Survey) -> dict[str, list[Components]]:
  """By kind, of numbers for which the store has all spans of 12 documents. Exact differences are left out."""
  x: dict[tuple[str, int], np.ndarray] = {}
  for length in survey.order:
    stage = survey.stage(length)
    selection = stage.selections.get('fixed_targets')
    if selection:
      x |= {(method, length): x_D for method, x_D in _documents(survey, stage, selection)}
  one = survey.train_len
  levels = [x_D for (method, length), x_D in x.items() if (method, length) == ('none', one)]
  out = {
    'level': levels or [x_D for (method, _), x_D in x.items() if method == 'none'][:1],
    'length - 1x': [x_D - x[m, one] for (m, n), x_D in x.items() if n != one and (m, one) in x],
    'method - none': [x_D - x['none', n] for (m, n), x_D in x.items() if m != 'none' and ('none', n) in x],
  }
  found = {kind: [_finite(x_D) for x_D in of] for kind, of in out.items()}
  return {
    kind: [components(x_D[None]) for x_D in of if len(x_D) >= MIN_DOCUMENTS and x_D.std() > 1e-6]
    for kind, of in found.items()
  }


def _documents(survey: Survey, stage: Stage, selection: Selection) -> Iterator[tuple[str, np.ndarray]]:
  """(method, mean NLL of each document, NaN where some of it is missing)."""
  plan = survey.plan
  for method, keys in stage.keys.items():
    sum_D = np.zeros(len(plan.documents))
    rows = stage.shelves[stage.length, keys[stage.length]]
    for window, _, _ in selection.parts:
      place, d = plan.place(window), window.document
      sum_D[d] += rows.row(place, window.scored).mean(dtype=np.float64) if rows.has(place, window.scored) else math.nan
    yield method, sum_D / plan.cfg.spans


def _finite(x_D: np.ndarray) -> np.ndarray:
  return x_D[np.isfinite(x_D)]


def _ends(values: Sequence[float]) -> str:
  """Least and most."""
  return ' to '.join(dict.fromkeys(f'{v:.2g}' for v in (min(values), max(values))))

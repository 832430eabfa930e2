"""What a report says: its numbers, its figures, its sources. How it looks is evaluation/sections.py."""

import csv
import functools
import inspect
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import posenc
from evaluation import diagnosis, figures, stability, summary, tokens
from evaluation.chosen import Setting
from evaluation.plan import Comparison
from evaluation.points import FLOOR, floors, line_name, plain, trained
from evaluation.runs import Run, compared
from evaluation.sweep import Point, exp
from spec import SpecError, parse

if TYPE_CHECKING:
  from matplotlib.figure import Figure

PERPLEXITY, LESS_NONE, LESS_FIRST, GAIN = 'perplexity', 'less none', 'less the first scheme', 'gain of far text'
VALIDATION = 'validation at 1x'


_PAIRS = (
  'Nats that come back where the angles of frequency pairs are kept within the range of training. Held: keys farther '
  'than in training are seen by these pairs under the angle of the farthest distance in training. pi: all distances '
  'are squeezed, for these pairs alone. Parts do not add up.'
)
_ATTENTION = 'Attention of the queries that predict the targets, by layer and head.'


class Number(NamedTuple):
  """A cell of a table of the report, and a line of its csv. NaN: nothing can be said. said: instead, or besides."""

  table: str
  line: str
  scheme: str
  positions: str
  method: str
  protocol: str
  length: int | None
  unit: str
  value: float = math.nan
  low: float = math.nan
  high: float = math.nan
  p: float = math.nan
  marked: bool = False
  said: str = ''


class Picture(NamedTuple):
  title: str
  figure: 'Figure'
  caption: str


class Report:
  """What is said of `runs`. comparisons: whose tokens are shown; the configs' own, or the widest differences.

  settings: what `runs` were chosen from. unswept: folders of runs that have no curve.
  """

  def __init__(
    self,
    runs: Sequence[Run],
    comparisons: Sequence[str] = (),
    settings: Sequence[Setting] = (),
    unswept: Sequence[pathlib.Path] = (),
  ):
    self.runs, self._asked, self.settings, self.unswept = runs, comparisons, settings, unswept
    self.points = [p for run in runs for p in run.points]
    self.train_len = self.points[0]['train_length']
    self.rows = summary.rows(self.points)
    self.several = len({trained(p) for p in self.rows}) > 1
    asked = dict.fromkeys(p['protocol'] for p in self.rows)
    # position_wise is non_overlapping taken apart: one number, which is shown once.
    self.protocols = [name for name in asked if (name, 'non_overlapping' in asked) != ('position_wise', True)]
    self.lines = summary.curves([p for p in self.points if 'gain_documents' not in p])
    self.looks = figures.looks(self.rows)

  def of(self, protocol: str) -> list[Point]:
    return [p for p in self.rows if p['protocol'] == protocol]

  # ---- numbers

  def _number(self, table: str, key: Sequence[Any], unit: str, **values: Any) -> Number:
    scheme, positions, method, protocol, *length = key
    line = line_name({'scheme': scheme, 'positions': positions, 'method': method}, self.several)
    return Number(table, line, scheme, positions, method, protocol, length[0] if length else None, unit, **values)

  def _cell(self, table: str, key: Sequence[Any], cell: summary.Cell) -> Number:
    lost = f'{cell.diverged} seeds diverged' if cell.diverged else ''
    ends = {'low': cell.low, 'high': cell.high, 'p': cell.p, 'marked': cell.marked}
    return self._number(table, key, 'nats', value=cell.mean, **ends, said=lost)

  @functools.cached_property
  def numbers(self) -> list[Number]:
    out = []
    for s in self.settings:
      said = f'seeds {", ".join(map(str, s.nll)) or "none"}: {s.said}'
      key = s.scheme, s.positions, 'none', 'validation', self.train_len
      number = self._number(VALIDATION, key, 'nats', value=s.mean, marked=s.chosen, said=said)
      out.append(number._replace(line=s.text))
    for p in self.rows:
      key = p['scheme'], p.get('positions', 'sequential'), p['method'], p['protocol'], p['length']
      said = p['outcome'] if p['outcome'] != 'ok' else ''
      low, high = (math.nan if p.get(k) is None else p[k] for k in ('ci_low', 'ci_high'))
      value = p.get('ppl', math.nan)
      out.append(self._number(PERPLEXITY, key, 'perplexity', value=value, low=low, high=high, said=said))
      if 'marked' in p:
        ends = {'low': p['vs_none_low'], 'high': p['vs_none_high'], 'p': p['p'], 'marked': p['marked']}
        out.append(self._number(LESS_NONE, key, 'nats', value=p['vs_none'], **ends))
    for protocol in self.protocols:
      found = summary.between([c for c in self.lines if c.protocol == protocol])
      out += [self._cell(LESS_FIRST, key, cell) for key, cell in found.items()]
      for length, floor in floors(self.of(protocol)).items():
        out.append(Number(FLOOR, FLOOR, '', '', '', protocol, length, 'perplexity', exp(floor)))
    out += [self._cell(GAIN, key, cell) for key, cell in summary.gains(self.points).items()]
    for key, buckets in summary.by_position(self.points).items():
      for first, end, nll in buckets.tolist():
        out.append(self._number(f'at positions {first:.0f} to {end - 1:.0f}', key, 'nats', value=nll))
    for curve, far, used in self.extents:
      named = [(f'stretch({summary.DELTA:g})', far)] if far else []
      for name, e in [*named, *((f'reach({eps:g})', e) for eps, e in zip(summary.EPSILONS, used))]:
        values = {'value': e.value, 'low': e.low, 'high': e.high, 'said': e.text(self.train_len)}
        out.append(self._number(name, curve[:4], 'tokens', **values))
    for scheme, positions, _, text, cell, least in self.declared:
      said = '' if math.isnan(least) else f'four in five true differences of {least:.2g} nats are found'
      key = scheme, positions, text, 'fixed_targets'
      out.append(self._cell('fixed in advance', key, cell)._replace(said=said))
    return out

  @functools.cached_property
  def extents(self) -> list[summary.Extents]:
    return summary.extents(self.points)

  @functools.cached_property
  def declared(self) -> list[summary.Declared]:
    return summary.declared(self.points, compared(self.runs))

  def write_csv(self, path: pathlib.Path) -> None:
    with path.open('w', newline='') as file:
      writer = csv.writer(file)
      writer.writerow(Number._fields)
      writer.writerows([plain(v) for v in n] for n in self.numbers)

  # ---- figures

  @functools.cached_property
  def pictures(self) -> dict[str, Picture]:
    """By what they show: a protocol, 'plane', 'position', 'surface'."""
    out = {}
    for protocol in self.protocols:
      rows = self.of(protocol)
      if any('ppl' in p for p in rows):
        caption = counted(rows)
        out[protocol] = Picture(protocol, figures.curves(rows, self.looks), caption)
    dots = [
      (line_name({'scheme': c.scheme, 'positions': c.positions, 'method': c.method}, self.several), far, used[0])
      for c, far, used in self.extents
      if far and not math.isnan(far.value) and not math.isnan(used[0].value)
    ]
    if dots:
      caption = (
        f'stretch({summary.DELTA:g}): the largest length such that no length from 1x to it is worse than 1x by more '
        f'than {summary.DELTA:g} nats. reach({summary.EPSILONS[0]:g}): the smallest length such that no longer one is '
        f'better by more than {summary.EPSILONS[0]:g} nats. On the grey line text is of use as far as the curve holds; '
        'below it the curve is flat. Both are lengths of the sweep; dots are set apart a little.'
      )
      out['plane'] = Picture('stretch and reach', figures.plane(dots, self.train_len, self.looks), caption)
    for name, draw in (('pairs', figures.pairs), ('attention', figures.attention)):
      for run, of in self.diagnoses[name]:
        what = {'pairs': _PAIRS, 'attention': _ATTENTION}[name]
        title = f'{name}: {trained(run.points[0])}, seed {run.seed}, {of[0]["method"]}'
        out[f'{name} {run.workdir} {of[0]["method"]}'] = Picture(title, draw(of), f'{what} {_of(of)}')
    buckets = [p for p in self.points if p.get('buckets')]
    if buckets:
      caption = (
        'Targets at positions 0, 1, 2-3, 4-7 ... of windows side by side; a point stands at the middle of its bucket. '
        'Where a line goes up beyond the dotted training length the scheme breaks there.'
      )
      out['position'] = Picture('NLL by position in the window', figures.by_position(buckets, self.looks), caption)
    surface = stability.points(self.runs)
    if any('nll' in p for p in surface):
      caption = (
        'Fixed targets of validation documents, none of the test; a line is the mean of its seeds, each drawn thin. '
        'What rises from left to right gets worse with training.'
      )
      figure = figures.surface(stability.lines(surface), self.train_len)
      out['surface'] = Picture('perplexity against tokens seen', figure, f'{counted(surface)}{caption}')
    if self.several:  # an order of schemes is of one token budget
      out = {name: p._replace(caption=f'{p.caption} {self.stability}') for name, p in out.items()}
    return out

  @functools.cached_property
  def diagnoses(self) -> dict[str, list[tuple[Run, list[Point]]]]:
    """'pairs' and 'attention': what evaluation.diagnose left of each run's checkpoint, by method."""
    out: dict[str, list[tuple[Run, list[Point]]]] = {'pairs': [], 'attention': []}
    for name, found in out.items():
      for run in self.runs:
        points = diagnosis.read(run.workdir / 'diagnosis' / f'{name}.jsonl')
        points = [p for p in points if p['checkpoint_step'] == run.points[0]['checkpoint_step']]
        for method in dict.fromkeys(p['method'] for p in points):
          found.append((run, [p for p in points if p['method'] == method]))
    return out

  @functools.cached_property
  def stability(self) -> str:
    return stability.rank_stability(self.runs)

  @functools.cached_property
  def references(self) -> list[tuple[str, str]]:
    """(name, what its source is), of everything drawn: the first paragraph of what the code says of itself."""
    schemes = dict.fromkeys(text for p in self.points for text in p.get('posenc', p['scheme'].split(' ')))
    rules = dict.fromkeys(p.get('positions', 'sequential') for p in self.points)
    out = {}
    for text in (*schemes, *(r for r in rules if r != 'sequential'), *dict.fromkeys(p['method'] for p in self.points)):
      for call in _parsed(text):
        out[call.name] = source(call.name)
    return [(name, text) for name, text in out.items() if text]

  def comparisons(self) -> list[tokens.Pair]:
    """Whose tokens are shown. As asked for, or of each scheme what its config says or its best method at the longest
    length against none; then the best line of each other scheme against that of the first."""
    if self._asked:
      return [pair for text in self._asked for pair in tokens.pairs(text, self.runs)]
    out, best = [], {}
    lines = tokens.lines(self.runs)
    fixed = [p for p in self.of('fixed_targets') if math.isfinite(p.get('nll', math.inf))]
    for scheme in dict.fromkeys(map(trained, fixed)):
      mine = [p for p in fixed if trained(p) == scheme]
      by = {line.method: line for line in lines if line.name == f'{scheme} {line.method}'}
      asked = [
        c for c in map(Comparison.parse, compared(self.runs).get(scheme, [])) if {c.method, c.reference} <= set(by)
      ]
      longest = max(p['length'] for p in mine)
      others = [p for p in mine if p['method'] != 'none' and p['length'] == longest]
      if not asked and others and 'none' in by:
        least = min(others, key=lambda p: p['nll'])
        asked = [Comparison(least['method'], 'none', longest / self.train_len)]
      out += [tokens.Pair(by[c.method], by[c.reference], round(c.multiple * self.train_len)) for c in asked]
      best[scheme] = {
        n: min((p['nll'], p['method']) for p in mine if p['length'] == n) for n in {p['length'] for p in mine}
      }
    first, *rest = best or [None]
    for scheme in rest:
      shared = set(best[scheme]) & set(best[first])
      if shared:
        n = max(shared)
        line, reference = (next(x for x in lines if x.name == f'{s} {best[s][n][1]}') for s in (scheme, first))
        out.append(tokens.Pair(line, reference, n))
    return out

  def lengths(self, protocol: str) -> list[int]:
    return sorted({p['length'] for p in self.points if p['protocol'] == protocol})


def source(name: str) -> str:
  """Of a scheme, method or rule: paper and formula, as its own file says; '' where it is none of ours."""
  if name not in posenc.SCHEMES:
    return _first((posenc.METHODS | posenc.RULES).get(name, ''))
  scheme = posenc.SCHEMES[name]
  module = inspect.getmodule(scheme)
  return _first(scheme) if module is posenc.base else f'{_first(module)} {_first(scheme)}'


def _of(points: Sequence[Point]) -> str:
  p = points[0]
  return f'{p["targets"]} targets of {p["documents"]} documents.'


def counted(rows: Sequence[Point]) -> str:
  """What population the numbers speak of."""
  some = [p for p in rows if 'windows' in p]
  if not some:
    return 'Nothing was scored. '

  def ends(field: str) -> str:
    values = sorted({p[field] for p in some})
    return f'{values[0]:,}' if len(values) == 1 else f'{values[0]:,} to {values[-1]:,}'

  of = f'{ends("windows")} windows, {ends("tokens")} targets of {ends("documents")} documents a point. '
  late = 'The same late tokens of long documents at every length. ' if rows[0]['protocol'] == 'fixed_targets' else ''
  return of + late


def _first(of: object) -> str:
  return '' if isinstance(of, str) else ' '.join((inspect.getdoc(of) or '').split('\n\n')[0].split())


def _parsed(text: str) -> list[Any]:
  try:
    return parse(text)
  except SpecError:
    return []

"""What a table of curves says as a whole: bands, marks, stretch and reach, gains, comparisons fixed in advance.

Functions of points (curve.jsonl) of one run, or of several: runs of one scheme that differ in their seed are one line
over seeds. Nothing of it is stored: one more method changes what all the others' marks are worth.
"""

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from evaluation.plan import Comparison
from evaluation.points import trained
from evaluation.stats import (
  MIN_DOCUMENTS,
  MIN_PAIRS,
  Cells,
  Extent,
  components,
  infer,
  min_detectable,
  reaches,
  stretch,
)
from evaluation.sweep import Point, exp

Key = tuple[Any, ...]  # scheme, positions, method, protocol; of a cell also its length

LEVEL = 0.05
DELTA = 0.05  # nats
EPSILONS = (0.01, 0.002)  # nats


class Curve(NamedTuple):
  """A scheme and method under one protocol, over the lengths at which every seed has a number."""

  scheme: str
  positions: str  # of training
  method: str
  protocol: str
  seeds: tuple[int, ...]
  lengths: tuple[int, ...]  # tokens, rising
  x_SDL: np.ndarray  # nats: NLL, or the gain over a control
  point: Point  # one of them, for what all have in common


def _apart(points: Sequence[Point]) -> list[Point]:
  """Seeds with key tokens of their own are lines of their own: they score other targets."""
  of: dict[Key, set[str]] = {}
  for p in points:
    if 'keys_hash' in p:
      of.setdefault((p['scheme'], p.get('positions'), p['protocol']), set()).add(p['keys_hash'])

  def alone(p: Point) -> bool:
    return 'keys_hash' in p and len(of[p['scheme'], p.get('positions'), p['protocol']]) > 1

  return [{**p, 'scheme': f'{p["scheme"]} seed {p.get("seed", 0)}'} if alone(p) else p for p in points]


def curves(points: Sequence[Point], field: str = 'nll_documents') -> list[Curve]:
  """In the order of the points. `field`: 'gain_documents' for those of controls."""
  found: dict[Key, dict[int, dict[int, Point]]] = {}
  for p in _apart(points):
    if field in p:
      key = p['scheme'], p.get('positions', 'sequential'), p['method'], p['protocol']
      found.setdefault(key, {}).setdefault(p.get('seed', 0), {})[p['length']] = p
  out = []
  for key, seeds in found.items():
    shared = set.intersection(*(set(by_length) for by_length in seeds.values()))
    sizes = {n: {len(by_length[n][field]) for by_length in seeds.values()} for n in shared}
    most = max((max(size) for size in sizes.values()), default=0)  # a stream may leave a document without a target
    lengths = tuple(sorted(n for n in shared if sizes[n] == {most}))
    if lengths:
      x_SLD = np.array([[by_length[n][field] for n in lengths] for by_length in seeds.values()], np.float64)
      point = next(iter(seeds.values()))[lengths[0]]
      scheme, positions, method, protocol = key
      out.append(Curve(scheme, positions, method, protocol, tuple(seeds), lengths, x_SLD.swapaxes(1, 2), point))
  return out


def by_position(points: Sequence[Point]) -> dict[Key, np.ndarray]:
  """(scheme, positions, method, protocol, length) -> [buckets, (first, end, NLL)] of those that have buckets.

  NLL, nats: the mean over seeds, of targets at positions first .. end - 1 of the window.
  """
  found: dict[Key, list[np.ndarray]] = {}
  for p in _apart(points):
    if p.get('buckets'):
      key = p['scheme'], p.get('positions', 'sequential'), p['method'], p['protocol'], p['length']
      found.setdefault(key, []).append(np.array(p['buckets'], np.float64)[:, :3])
  return {key: np.mean(seeds, 0) for key, seeds in found.items()}


class Cell(NamedTuple):
  """One of a family: ends hold, and p < LEVEL marks, for all of the family at once. NaN: nothing can be said."""

  mean: float
  low: float
  high: float
  p: float
  diverged: int  # seeds

  @property
  def marked(self) -> bool:
    return self.p < LEVEL


def family(x: Mapping[Key, np.ndarray], y: Mapping[Key, np.ndarray] | None = None) -> dict[Key, Cell]:
  """Of differences x[S, D] of each cell, by document; or of x less y of as many documents, each with seeds of its own.

  Cells of one shape are drawn together (max-t); shapes share the error (Bonferroni).
  """
  out = {}
  for shape in dict.fromkeys(v.shape for v in x.values()):
    keys = [key for key, v in x.items() if v.shape == shape]
    share = len(keys) / len(x)
    groups = [np.stack([group[key] for key in keys], -1) for group in (x, y) if group is not None]
    cells = infer(*groups, confidence=1 - LEVEL * share, least=MIN_PAIRS)
    for i, key in enumerate(keys):
      out[key] = _cell(cells, i)._replace(p=float(np.minimum(cells.p[i] / share, 1)))
  return out


def _cell(cells: Cells, i: int) -> Cell:
  mean, low, high, p = (float(v[i]) for v in (cells.mean, cells.low, cells.high, cells.p))
  return Cell(mean, low, high, p, int(cells.diverged[i]))


def differences(lines: Sequence[Curve]) -> dict[Key, np.ndarray]:
  """(scheme, positions, method, protocol, length) -> x[S, D] less that of 'none' of the same runs, nats.

  Not where key tokens were judged: one of two methods there may have chosen what speaks for it.
  """
  base = {(c.scheme, c.positions, c.protocol): c for c in lines if c.method == 'none'}
  out = {}
  for c in lines:
    none = base.get((c.scheme, c.positions, c.protocol))
    if c is not none and none is not None:
      fair = (n for n in c.lengths if n not in c.point.get('judged_at', ()))
      out |= {(*c[:4], n): x_SD for n in fair if (x_SD := paired(c, none, n)) is not None}
  return out


def between(lines: Sequence[Curve]) -> dict[Key, Cell]:
  """(scheme, positions, method, protocol, length) -> a line of another scheme less 'none' of the first one, nats.

  Of one protocol. Schemes share documents and no seed: they pair by document. All of them are one family. On key tokens
  of their own they do not compare.
  """
  first = next((c for c in lines if c.method == 'none'), None)
  if first is None:
    return {}
  x, y = {}, {}
  for c in lines:
    for i, n in enumerate(c.lengths):
      alike = c.point.get('keys_hash') == first.point.get('keys_hash')
      if c[:2] != first[:2] and alike and n in first.lengths and c.x_SDL.shape[1] == first.x_SDL.shape[1]:
        x[*c[:4], n], y[*c[:4], n] = c.x_SDL[:, :, i], first.x_SDL[:, :, first.lengths.index(n)]
  return family(x, y)


def paired(c: Curve, reference: Curve, length: float) -> np.ndarray | None:
  """x[S, D] of `c` less that of `reference`, by seed and document; None where the reference lacks a seed or the length.

  Both are of one scheme: seeds of two have nothing in common but their number.
  """
  shared = length in c.lengths and length in reference.lengths and c.x_SDL.shape[1] == reference.x_SDL.shape[1]
  if not shared or not set(c.seeds) <= set(reference.seeds):
    return None
  x_SD = c.x_SDL[:, :, c.lengths.index(length)]
  y_SD = reference.x_SDL[[reference.seeds.index(seed) for seed in c.seeds], :, reference.lengths.index(length)]
  with np.errstate(invalid='ignore'):
    return x_SD - y_SD


def rows(points: Sequence[Point]) -> list[Point]:
  """A point for each line and length, as sweeps make them, but its numbers are the line's, over all its seeds.

  ci_low, ci_high: a band over all lengths of the line at once. vs_none, its ends, `p` and `marked`: over the whole
  table of a protocol's methods x lengths at once.
  """
  points = _apart(points)
  lines = curves([p for p in points if 'gain_documents' not in p])
  at = {(*c[:4], n): (c, i) for c in lines for i, n in enumerate(c.lengths)}
  band = {c[:4]: infer(c.x_SDL) for c in lines}
  marks: dict[Key, Cell] = {}
  for protocol in dict.fromkeys(c.protocol for c in lines):
    marks |= family(differences([c for c in lines if c.protocol == protocol]))
  out: dict[Key, Point] = {}
  for p in points:
    if 'gain_documents' in p:
      continue
    key = p['scheme'], p.get('positions', 'sequential'), p['method'], p['protocol'], p['length']
    if key in out:
      continue
    out[key] = row = dict(p)
    if key in at:
      c, i = at[key]
      cell, several = _cell(band[c[:4]], i), len(c.seeds) > 1
      if several:
        row |= {'seed': None, 'seeds': list(c.seeds), 'diverged': cell.diverged, **_level(cell.mean)}
        for of_one_seed in ('bits_per_byte', 'nll_documents', 'buckets', 'vs_1x', 'vs_1x_low', 'vs_1x_high'):
          row.pop(of_one_seed, None)
        if c.x_SDL.shape[1] < MIN_DOCUMENTS:  # to be drawn
          row['nll_documents'] = c.x_SDL[:, :, i].mean(0).tolist()
      ends = None if math.isnan(cell.low) else (exp(cell.low), exp(cell.high))
      row |= {'ci_low': ends and ends[0], 'ci_high': ends and ends[1]}
      if ends:
        row['interval'] = f'over all lengths at once, {f"{len(c.seeds)} seeds" if several else "this checkpoint"}'
    if key in marks:
      m = marks[key]
      row |= {'vs_none': m.mean, 'vs_none_low': m.low, 'vs_none_high': m.high, 'p': m.p, 'marked': m.marked}
  return list(out.values())


def _level(nll: float) -> Point:
  ppl = exp(nll)
  return {'nll': nll, 'ppl': ppl, 'outcome': 'ok' if math.isfinite(ppl) else 'diverged'}


class Extents(NamedTuple):
  curve: Curve
  stretch: Extent | None  # None: 1x was not swept
  reach: tuple[Extent, ...]  # of EPSILONS


def extents(points: Sequence[Point]) -> list[Extents]:
  """Of the fixed targets: how far a line may go, and how much of it is of use."""
  out = []
  for c in curves(points):
    if c.protocol == 'fixed_targets':
      one = c.point['train_length']
      far = stretch(c.x_SDL, c.lengths, one, DELTA) if one in c.lengths else None
      out.append(Extents(c, far, tuple(reaches(c.x_SDL, c.lengths, EPSILONS))))
  return out


def gains(points: Sequence[Point]) -> dict[Key, Cell]:
  """(scheme, positions, method, control, length) -> gain of the true far text over the control's, nats; one family."""
  lines = curves(points, 'gain_documents')
  return family({(*c[:4], n): c.x_SDL[:, :, i] for c in lines for i, n in enumerate(c.lengths)})


class Declared(NamedTuple):
  scheme: str
  positions: str
  seeds: tuple[int, ...]
  text: str
  cell: Cell  # tested alone
  detectable: float  # nats; what four of five such tests would find


def declared(points: Sequence[Point], comparisons: Mapping[str, Sequence[str]]) -> list[Declared]:
  """Comparisons of fixed targets that a config named before there were numbers, where there are numbers now.

  By scheme as `trained` names it: what one scheme's config fixed is not fixed in advance for another's.
  """
  lines = {(c.scheme, c.positions, c.method): c for c in curves(points) if c.protocol == 'fixed_targets'}
  out = []
  for text in dict.fromkeys(text for texts in comparisons.values() for text in texts):
    method, reference, multiple = Comparison.parse(text)
    for (scheme, positions, name), c in lines.items():
      other, mine = lines.get((scheme, positions, reference)), comparisons.get(_trained(scheme, positions), ())
      if name != method or other is None or text not in mine:
        continue
      x_SD = paired(c, other, multiple * c.point['train_length'])
      if x_SD is None:
        continue
      cell = _cell(infer(x_SD[:, :, None], alone=True, least=MIN_PAIRS), 0)
      out.append(Declared(scheme, positions, c.seeds, text, cell, detectable(x_SD)))
  return out


def detectable(x_SD: np.ndarray) -> float:
  """The difference, nats, that four of five such runs would find when it is tested alone; NaN where one diverged."""
  if not np.isfinite(x_SD).all():
    return math.nan
  return min_detectable(components(x_SD), *x_SD.shape)


def text(points: Sequence[Point], comparisons: Mapping[str, Sequence[str]] = types.MappingProxyType({})) -> str:
  """All of it for a terminal, in nats and tokens, but the table of levels, which `results.table` makes of `rows`."""
  parts = [_marks(points), _extents(points), _gains(points), _declared(points, comparisons)]
  return '\n\n'.join(part for part in parts if part)


def _name(scheme: str, positions: str, method: str, points: Sequence[Point]) -> str:
  several = len({(p['scheme'], p.get('positions', 'sequential')) for p in points}) > 1
  return f'{_trained(scheme, positions)} {method}' if several else method


def _trained(scheme: str, positions: str) -> str:
  return trained({'scheme': scheme, 'positions': positions})


def _columns(table: Sequence[Sequence[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*table)]
  return '\n'.join('  '.join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table)


def _marks(points: Sequence[Point]) -> str:
  lines = [c for c in curves(points) if c.protocol == 'fixed_targets']
  x = differences(lines)
  if not lines:
    return ''
  few = (documents := lines[0].x_SDL.shape[1]) < MIN_DOCUMENTS
  out = [
    f'{documents} documents: no interval of levels below {MIN_DOCUMENTS}'
    if few
    else '±: half of a 95 % band over all lengths of a line at once'
  ]
  marks = family(x) if documents >= MIN_PAIRS else {}
  if marks:
    out.append(f'*: differs from none, p < {LEVEL:g} over all {len(marks)} cells of the table at once')
  missed = [detectable(x[key]) for key, cell in marks.items() if not cell.marked]
  missed = [d for d in missed if d > 1e-6]  # NaN: diverged; rounding: the method changes nothing there
  if missed:
    ends = ' to '.join(dict.fromkeys(f'{d:.2g}' for d in (min(missed), max(missed))))
    out.append(f'unmarked: of true differences of {ends} nats such a run finds four in five, each tested alone')
  return '\n'.join(out)


def _extents(points: Sequence[Point]) -> str:
  found = extents(points)
  if not found:
    return ''
  one = found[0].curve.point['train_length']
  head = [f'tokens, 1x = {one}', f'stretch({DELTA:g})', *(f'reach({epsilon:g})' for epsilon in EPSILONS)]
  table, slopes = [head], []
  for c, far, used in found:
    name = _name(c.scheme, c.positions, c.method, points)
    table.append([name, far.text(one, 1) if far else '1x was not swept', *(extent.text(one, 1) for extent in used)])
    slope = c.point.get('slope')
    if slope:
      scaled = ', '.join(f'reach({e:g}) {extent.text(one, slope)}' for e, extent in zip(EPSILONS, used))
      slopes.append(f'{name}, in 1/m = {1 / slope:g} tokens, m the smallest slope: {scaled}')
  return '\n'.join([_columns(table), *slopes])


def _gains(points: Sequence[Point]) -> str:
  found = gains(points)
  if not found:
    return ''
  one, lengths = points[0]['train_length'], sorted({key[-1] for key in found})
  table = [['gain of far text over', '', *(f'{n / one:g}x' for n in lengths)]]
  lines = list(dict.fromkeys(key[:-1] for key in found))
  order = list(dict.fromkeys(line[:3] for line in lines))
  for scheme, positions, method, control in sorted(lines, key=lambda line: order.index(line[:3])):
    cells = []
    for n in lengths:
      cell = found.get((scheme, positions, method, control, n))
      if cell is None:
        cells.append('')
      elif math.isnan(cell.low):
        cells.append(f'{cell.mean:+.4f}' if math.isfinite(cell.mean) else 'diverged')
      else:
        cells.append(f'{cell.mean:+.4f} ±{(cell.high - cell.low) / 2:.4f}{"*" * cell.marked}')
    table.append([_name(scheme, positions, method, points), control, *cells])
  return (
    f'{_columns(table)}\nnats; far: beyond {one} tokens before the targets, positive: it helps; ± and * over all '
    f'{len(found)} cells at once'
  )


def _declared(points: Sequence[Point], comparisons: Mapping[str, Sequence[str]]) -> str:
  out = []
  for scheme, positions, _, comparison, cell, least in declared(points, comparisons):
    ends = '' if math.isnan(cell.low) else f' [{cell.low:+.4f}, {cell.high:+.4f}], p = {cell.p:.2g}'
    found = '' if math.isnan(least) else f'; of true ones of {least:.2g} four in five are found'
    out.append(
      f'fixed in advance, tested alone: {_trained(scheme, positions)}, {comparison}: {cell.mean:+.4f} nats{ends}{found}'
    )
  return '\n'.join(out)

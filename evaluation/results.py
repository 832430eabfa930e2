"""What a sweep leaves behind: curve.jsonl, curve.csv, curve.png, event files, and a table on the terminal."""

import csv
import pathlib
import shutil
from collections.abc import Sequence

from evaluation import events, figures, summary
from evaluation.points import (
  FLOOR,
  chance,
  fake_gain,
  floors,
  line_name,
  mark_drawn,
  merge,
  plain,
  read_curve,
  to_line,
  trained,
)
from evaluation.sweep import Point, exp


def check_writable(directory: pathlib.Path) -> None:
  """OSError with the path, before an hour of scoring rather than after it."""
  directory.mkdir(parents=True, exist_ok=True)
  probe = directory / '.probe'
  probe.touch()
  probe.unlink()


def write(
  directory: pathlib.Path, new: Sequence[Point], *, keep: bool = True, redraw: bool = True
) -> tuple[list[Point], str | None]:
  """Merges `new` into the directory's curve and, `redraw`, draws it again.

  Returns all points of the same checkpoint and targets, and the name under which the previous curve was kept, if any of
  its points changed: nothing that was measured is overwritten in silence. `keep` False: it has been kept already.
  """
  directory.mkdir(parents=True, exist_ok=True)
  path = directory / 'curve.jsonl'
  old = read_curve(path) if path.exists() else []
  points = merge(old, new)
  lines = [to_line(p) for p in points]
  kept = None
  if keep and old and not {to_line(p) for p in old} <= set(lines):
    kept = next(f'curve-{n:03d}.jsonl' for n in range(1, 1000) if not (directory / f'curve-{n:03d}.jsonl').exists())
    shutil.copy2(path, directory / kept)
  temporary = path.with_suffix('.tmp')
  temporary.write_text('\n'.join(lines) + '\n')
  temporary.replace(path)  # whole or not at all: a killed sweep leaves the previous curve
  same = [p for p in points if all(p[k] == new[0][k] for k in ('checkpoint_step', 'targets_hash'))]
  if redraw:
    draw(directory, same)
  return same, kept


def draw(directory: pathlib.Path, points: Sequence[Point]) -> None:
  """What follows from the curve: curve.csv of all of it, curve.png and event files of these points."""
  write_csv(directory / 'curve.csv', read_curve(directory / 'curve.jsonl'))
  rows, picture = summary.rows(points), directory / 'curve.png'
  figures.plot(picture, rows)
  tables = {protocol: table(rows, protocol) for protocol in dict.fromkeys(p['protocol'] for p in rows)}
  events.write(directory / 'tensorboard', points, tables, picture)
  mark_drawn(directory)  # last: one who is killed before draws it all again


def write_csv(path: pathlib.Path, points: Sequence[Point]) -> None:
  fields = [
    k for k in dict.fromkeys(k for p in points for k in p) if k not in ('nll_documents', 'gain_documents', 'buckets')
  ]
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, fields, extrasaction='ignore')
    writer.writeheader()
    writer.writerows({k: plain(v) for k, v in p.items()} for p in points)


def table(points: Sequence[Point], protocol: str = 'fixed_targets') -> str:
  """Perplexity by line and length, with the half width of its interval; the cost at 1x of methods that have one.

  Of points as a sweep makes them, or of `summary.rows`, whose intervals are of a band and which are marked.
  """
  rows = [p for p in points if p['protocol'] == protocol]
  lengths = sorted({p['length'] for p in rows})
  several = len({trained(p) for p in rows}) > 1
  labels = list(dict.fromkeys(line_name(p, several) for p in rows))
  at = {(line_name(p, several), p['length']): p for p in rows}
  head = [protocol, *(f'{length / rows[0]["train_length"]:g}x' for length in lengths), 'cost at 1x']
  body = []
  for label in labels:
    cells = [_cell(at.get((label, length))) for length in lengths]
    one = at.get((label, rows[0]['train_length']))
    difference = one.get('vs_none') if one else None
    body.append([label, *cells, f'{100 * (exp(difference) - 1):+.1f} %' if difference else ''])
  floor = floors(rows)
  if floor:
    body.append([FLOOR, *(f'{exp(floor[n]):.4g}' if n in floor else '' for n in lengths), ''])
  fake = fake_gain(rows)
  widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

  def line(row):
    return '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])

  lines = [line(head), *(line(row) for row in body)]
  if fake is not None:
    lines.append(f'note: a model that uses at most 1x tokens of context falls by {100 * fake:.0f} % here')
  keys = chance(rows)
  if keys is not None:
    lines.append(f'note: {keys}')
  return '\n'.join(lines)


def _cell(point: Point | None) -> str:
  if point is None:
    return ''
  if point['outcome'] != 'ok':
    return point['outcome']
  lost = f' ({point["diverged"]} diverged)' if point.get('diverged') else ''  # seeds, which left the mean
  if point['ci_low'] is None:
    return f'{point["ppl"]:.4g}{"*" * point.get("marked", False)}{lost}'
  half = (point['ci_high'] - point['ci_low']) / 2
  return f'{point["ppl"]:.4g} ±{half:.2g}{"*" * point.get("marked", False)}{lost}'

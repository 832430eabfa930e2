"""What a sweep leaves behind: curve.jsonl, curve.csv, curve.png, event files, and a table on the terminal."""

import csv
import json
import math
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from evaluation import summary
from evaluation.sweep import Point, exp

# A point's identity: a second sweep replaces what it measures again and leaves the rest.
KEY = ('protocol', 'length', 'method', 'checkpoint_step', 'targets_hash')
SCALARS = ('ppl', 'nll', 'bits_per_byte')
FLOOR = 'theoretical floor'
MARKERS = 'osDv*'


def _plain(value: Any) -> Any:
  """Strict JSON has no Infinity and no NaN: they become the strings "inf", "-inf", "nan"."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, (list, tuple)):
    return [_plain(v) for v in value]
  return value


def _number(value: Any) -> Any:
  if isinstance(value, list):
    return [_number(v) for v in value]
  return float(value) if value in ('inf', '-inf', 'nan') else value


def to_line(point: Point) -> str:
  return json.dumps({k: _plain(v) for k, v in point.items()}, allow_nan=False)


def read_curve(path: pathlib.Path) -> list[Point]:
  """The points of a curve.jsonl; non-finite numbers are floats again."""
  points = [json.loads(line) for line in path.read_text().splitlines() if line]
  return [{k: _number(v) for k, v in p.items()} for p in points]


def check_writable(directory: pathlib.Path) -> None:
  """OSError with the path, before an hour of scoring rather than after it."""
  directory.mkdir(parents=True, exist_ok=True)
  probe = directory / '.probe'
  probe.touch()
  probe.unlink()


def merge(old: Sequence[Point], new: Sequence[Point]) -> list[Point]:
  """`old` with what `new` measured again replaced; points of another checkpoint or target set stay.

  Sorted by what a point is, not by when it was measured: a sweep made again leaves the same bytes.
  """
  merged = {tuple(p[k] for k in KEY): p for p in (*old, *new)}

  def order(p):
    method = p['method']
    return p['checkpoint_step'], p['targets_hash'], p['protocol'], p['length'], method != 'none', method

  return sorted(merged.values(), key=order)


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
  """What follows from the curve: curve.csv of all of it, event files and curve.png of these points."""
  write_csv(directory / 'curve.csv', read_curve(directory / 'curve.jsonl'))
  write_events(directory, points)
  plot(directory / 'curve.png', summary.rows(points))


def write_csv(path: pathlib.Path, points: Sequence[Point]) -> None:
  fields = [
    k for k in dict.fromkeys(k for p in points for k in p) if k not in ('nll_documents', 'gain_documents', 'buckets')
  ]
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, fields, extrasaction='ignore')
    writer.writeheader()
    writer.writerows({k: _plain(v) for k, v in p.items()} for p in points)


def write_events(directory: pathlib.Path, points: Sequence[Point]) -> None:
  """One TensorBoard run per (scheme, method), step = length in rising order: a step back hides what came before.

  Earlier event files are replaced, or the server would see the lengths start over, and runs of another checkpoint
  among these.
  """
  for stale in (directory / 'tensorboard').glob('*/events.out.tfevents.*'):
    stale.unlink()
  for method in dict.fromkeys(p['method'] for p in points):
    run = directory / 'tensorboard' / f'{_trained(points[0])} {method}'.replace('/', '_')
    with SummaryWriter(str(run)) as writer:
      for point in sorted((p for p in points if p['method'] == method), key=lambda p: p['length']):
        if 'gain' in point:
          writer.add_scalar(f'gain/{point["protocol"]}', point['gain'], point['length'])
        elif 'ppl' in point:
          for tag in SCALARS:
            writer.add_scalar(f'{point["protocol"]}/{tag}', point[tag], point['length'])


def _floor(points: Sequence[Point]) -> dict[int, float]:
  """Length -> nats, where the corpus's entropy is known. It belongs to the targets: one line for all methods."""
  return {p['length']: p['floor'] for p in sorted(points, key=lambda p: p['length']) if 'floor' in p}


def _trained(point: Point) -> str:
  """The scheme, and how it was trained where that is not at positions 0, 1, 2 ..."""
  rule = point.get('positions', 'sequential')  # curves of before there were rules have none
  return point['scheme'] if rule == 'sequential' else f'{point["scheme"]} {rule}'


def _label(point: Point, several: bool) -> str:
  return f'{_trained(point)} {point["method"]}' if several else point['method']


def fake_gain(points: Sequence[Point]) -> float | None:
  """By what share perplexity falls from 1x to the longest length for a model that uses at most 1x tokens.

  Of one protocol's points; None for the default, which leaves less than one per cent of it, and where it is next to
  nothing or points do not tell.
  """
  null = {p['length']: p['null'] for p in points if 'null' in p}
  one = points[0]['train_length']
  if points[0]['protocol'] == 'fixed_targets' or one not in null:
    return None
  gain = 1 - exp(null[max(null)] - null[one])
  return gain if gain > 0.005 else None


def table(points: Sequence[Point], protocol: str = 'fixed_targets') -> str:
  """Perplexity by line and length, with the half width of its interval; the cost at 1x of methods that have one.

  Of points as a sweep makes them, or of `summary.rows`, whose intervals are of a band and which are marked.
  """
  rows = [p for p in points if p['protocol'] == protocol]
  lengths = sorted({p['length'] for p in rows})
  several = len({_trained(p) for p in rows}) > 1
  labels = list(dict.fromkeys(_label(p, several) for p in rows))
  at = {(_label(p, several), p['length']): p for p in rows}
  head = [protocol, *(f'{length / rows[0]["train_length"]:g}x' for length in lengths), 'cost at 1x']
  body = []
  for label in labels:
    cells = [_cell(at.get((label, length))) for length in lengths]
    one = at.get((label, rows[0]['train_length']))
    difference = one.get('vs_none') if one else None
    body.append([label, *cells, f'{100 * (exp(difference) - 1):+.1f} %' if difference else ''])
  floor = _floor(rows)
  if floor:
    body.append([FLOOR, *(f'{exp(floor[n]):.4g}' if n in floor else '' for n in lengths), ''])
  fake = fake_gain(rows)
  widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

  def line(row):
    return '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])

  lines = [line(head), *(line(row) for row in body)]
  if fake is not None:
    lines.append(f'note: a model that uses at most 1x tokens of context falls by {100 * fake:.0f} % here')
  return '\n'.join(lines)


def _cell(point: Point | None) -> str:
  if point is None:
    return ''
  if point['outcome'] != 'ok':
    return point['outcome']
  lost = f' ({point["diverged"]} diverged)' if point.get('diverged') else ''  # seeds, which left the mean
  if point['ci_low'] is None:
    return f'{point["ppl"]:.4g}{lost}'
  half = (point['ci_high'] - point['ci_low']) / 2
  return f'{point["ppl"]:.4g} ±{half:.2g}{"*" * point.get("marked", False)}{lost}'


def plot(path: pathlib.Path, points: Sequence[Point]) -> None:
  """Perplexity against length, log2 both ways, a panel per protocol, a band per line; of `summary.rows`.

  Dashed lines are oracles: their method is told how long the input is. Failures reach 10**3, so y ends at 15 times the
  lowest value; points above sit on the edge as triangles. A thin grey line is the corpus's entropy, where it is known.
  """
  import matplotlib.figure  # no pyplot: it would look for a display

  protocols = list(dict.fromkeys(p['protocol'] for p in points))
  several = len({_trained(p) for p in points}) > 1
  train_len = points[0]['train_length']
  lengths = sorted({p['length'] for p in points})
  bottom, ceiling = _range(points)
  labels = list(dict.fromkeys(_label(p, several) for p in points))
  # Only what is drawn takes a colour, and after ten of them the marks change: no two lines look alike.
  drawn = list(dict.fromkeys(_label(p, several) for p in points if 'ppl' in p))
  looks = {label: (f'C{i % 10}', MARKERS[i // 10 % len(MARKERS)]) for i, label in enumerate(drawn)}
  figure = matplotlib.figure.Figure(figsize=(5.2 * len(protocols) + 2.2, 4.4), layout='constrained')
  axes = figure.subplots(1, len(protocols), squeeze=False, sharey=True)[0]
  for ax, protocol in zip(axes, protocols):
    for label in labels:
      line = [p for p in points if p['protocol'] == protocol and _label(p, several) == label]
      _line(ax, sorted(line, key=lambda p: p['length']), label, looks.get(label, ('C0', 'o')), ceiling)
    floor = _floor([p for p in points if p['protocol'] == protocol])
    if floor:
      ax.plot(list(floor), [exp(nats) for nats in floor.values()], color='0.5', lw=0.8, zorder=1, label=FLOOR)
    ax.axvline(train_len, color='0.5', lw=1, ls=':')
    above = {'transform': ax.get_xaxis_transform(), 'ha': 'center', 'va': 'bottom'}  # no curve runs there
    ax.text(train_len, 1.01, 'training length', fontsize=8, color='0.4', **above)
    ax.set_xscale('log', base=2)
    ax.set_yscale('log', base=2)
    ax.set_xticks(lengths, [f'{n}\n{n / train_len:g}x' for n in lengths], fontsize=8)
    ticks = [t * 10.0**e for e in range(-1, 4) for t in (1, 1.5, 2, 3, 4, 5, 7) if bottom <= t * 10.0**e <= ceiling]
    if len(ticks) < 3:  # a flat curve may lie between two round numbers
      ticks = np.linspace(bottom, ceiling, 4)
    ax.set_yticks(ticks, [f'{t:.3g}' for t in ticks])
    ax.minorticks_off()
    ax.set_ylim(bottom * 0.97, ceiling * 1.04)
    ax.set_xlabel(f'evaluation length, tokens (context of a target: {_contexts(points, protocol)})')
    ax.set_title(protocol.replace('_', ' '), fontsize=10, loc='right')
    ax.grid(alpha=0.25)
    fake = fake_gain([p for p in points if p['protocol'] == protocol])
    if fake is not None:
      remark = f'a model of at most 1x context falls {100 * fake:.0f} % here'
      ax.text(0.98, 0.02, remark, fontsize=8, color='0.4', ha='right', transform=ax.transAxes)
  axes[0].set_ylabel('perplexity per token')
  trained = '' if several or points[0].get('positions', 'sequential') == 'sequential' else f'{_trained(points[0])}\n'
  title = (
    f'{trained}checkpoint {points[0]["checkpoint_step"]}\n95 % band over all lengths of a line,\n'
    f'{_seeds(points)}\ndashed: told its length (oracle)'
  )
  handles, names = axes[0].get_legend_handles_labels()
  figure.legend(handles, names, loc='outside right upper', fontsize=8, title=title, title_fontsize=7)
  figure.savefig(path, dpi=150)


def _seeds(points: Sequence[Point]) -> str:
  """What a line speaks of."""
  counts = sorted({len(p['seeds']) if 'seeds' in p else 1 for p in points})
  if counts == [1]:
    return 'over documents, this checkpoint,\nnot this scheme'
  return f'over documents and {" to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds'


def _range(points: Sequence[Point]) -> tuple[float, float]:
  ok = [p for p in points if p['outcome'] == 'ok']
  if not ok:
    return 1.0, 10.0
  best = min(p['ppl'] for p in ok)
  # Bands may reach down to half the best value: with few documents they would otherwise squeeze the curves.
  bottom = max(min(p['ppl'] if p['ci_low'] is None else p['ci_low'] for p in ok), best / 2)
  bottom = min([bottom, *(exp(p['floor']) for p in ok if 'floor' in p)])
  return bottom, max(min(15 * best, max(p['ppl'] for p in ok)), 1.2 * best)


def _contexts(points: Sequence[Point], protocol: str) -> str:
  if protocol != 'fixed_targets':
    return '0 .. L-1'
  return f'L-{next(p["T"] for p in points if p["protocol"] == protocol)} .. L-1'


def _line(ax: Any, line: Sequence[Point], label: str, look: tuple[str, str], ceiling: float) -> None:
  """One method's curve and band; what lies above `ceiling`, or diverged, is a triangle on the edge."""
  shown = [p for p in line if 'ppl' in p]
  if not shown:
    # Without a point it was only not asked for under this protocol.
    ax.plot([], [], ' ', label=f'{label} ({line[0]["outcome"]})' if line else label)
    return
  x = np.array([p['length'] for p in shown])
  y = np.array([p['ppl'] if p['outcome'] == 'ok' else np.inf for p in shown])
  colour, marker = look
  style = '--' if shown[0]['follows_length'] else '-'
  ax.plot(x, np.minimum(y, ceiling), style, marker=marker, ms=3, color=colour, label=label)
  over = y > ceiling
  if over.any():  # an empty unclipped line has an infinite box, which breaks the layout
    ax.plot(x[over], np.full(over.sum(), ceiling), '^', ms=7, color=colour, clip_on=False)
  band = [p for p in shown if p['outcome'] == 'ok' and p['ci_low'] is not None]
  low, high = (np.minimum([p[k] for p in band], ceiling) for k in ('ci_low', 'ci_high'))
  ax.fill_between([p['length'] for p in band], low, high, color=colour, alpha=0.15, lw=0)

"""What tasks.jsonl holds, drawn: heat maps of depth against length, accuracy against length, a table, event files."""

import json
import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation import events
from evaluation.answers import Point, pooled
from evaluation.points import trained

if TYPE_CHECKING:
  from matplotlib.figure import Figure

Lines = Mapping[str, list[Point]]


def read(path: pathlib.Path) -> list[Point]:
  return [json.loads(line) for line in path.read_text().splitlines() if line]


def file_name(text: str) -> str:
  return re.sub(r'[^-\w.=]+', '_', text).strip('_')


def lines(points: Sequence[Point]) -> dict[str, list[Point]]:
  """Name -> its points. Of runs of one scheme that differ in their seed, seeds of one line."""
  several = len({trained(p) for p in points}) > 1
  out: dict[str, list[Point]] = {}
  for p in points:
    out.setdefault(f'{trained(p)} {p["method"]}' if several else p['method'], []).append(p)
  return out


def draw(points: Sequence[Point]) -> 'Figure':
  """Of one task: heat maps where it has depths, else curves."""
  return heat_maps(lines(points)) if any('depth' in p for p in points) else curves(lines(points))


def _figure(width: float, height: float) -> 'Figure':
  import matplotlib.figure  # no pyplot: it would look for a display

  return matplotlib.figure.Figure(figsize=(width, height), layout='constrained')


def _lengths(points: Sequence[Point]) -> tuple[list[int], list[str]]:
  lengths, one = sorted({p['length'] for p in points}), points[0]['train_length']
  return lengths, [f'{n}\n{n / one:g}x' for n in lengths]


def heat_maps(lines: Lines) -> 'Figure':
  """A panel per line: the share of exact answers, per cent in the cell; grey where there is none. Seeds are pooled."""
  everything = [p for line in lines.values() for p in line]
  depths = sorted({p['depth'] for p in everything if 'depth' in p})
  lengths, names = _lengths(everything)
  figure = _figure(1.6 + (0.7 * len(lengths) + 0.3) * len(lines), 1.4 + 0.42 * len(depths))
  axes = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
  for ax, (name, line) in zip(axes, lines.items()):
    share = np.full((len(depths), len(lengths)), np.nan)
    for i, depth in enumerate(depths):
      for j, length in enumerate(lengths):
        cell = [p for p in line if p['length'] == length and p.get('depth') == depth]
        if cell:
          share[i, j] = pooled(cell)['exact']
          dark = share[i, j] < 0.6
          ax.text(j, i, f'{100 * share[i, j]:.0f}', ha='center', va='center', color='w' if dark else 'k', fontsize=8)
    ax.set_facecolor('0.85')
    ax.imshow(share, vmin=0, vmax=1, cmap='viridis', aspect='auto')
    ax.set_xticks(range(len(lengths)), names, fontsize=8)
    ax.set_yticks(range(len(depths)), [f'{d:g}' for d in depths], fontsize=8)
    ax.set_title(name, fontsize=9, parse_math=False)
  axes[0].set_ylabel('depth of the key\n(0 beginning, 1 end)')
  first = next(p for p in everything if 'trials' in p)
  figure.supxlabel('length, tokens', fontsize=10)
  figure.colorbar(axes[0].images[0], ax=axes, label='exact answers')
  figure.suptitle(f'{first["task"]}: per cent of exact answers, {first["trials"]} trials a cell and run', fontsize=10)
  return figure


def curves(lines: Lines) -> 'Figure':
  """Exact answers and answer tokens against length: every run thin, the median over seeds thick."""
  everything = [p for line in lines.values() for p in line]
  lengths, names = _lengths(everything)
  first = next((p for p in everything if 'trials' in p), everything[0])
  figure = _figure(10.4, 3.8)
  titles = {'exact': 'exact answers', 'token': 'answer tokens'}
  for ax, (field, title) in zip(figure.subplots(1, 2, sharex=True), titles.items()):
    for i, (name, line) in enumerate(lines.items()):
      seeds: dict[Any, dict[int, float]] = {}
      for p in line:
        if field in p:
          seeds.setdefault(p.get('run', p['seed']), {})[p['length']] = p[field]
      for of_seed in seeds.values():
        x = sorted(of_seed)
        ax.plot(x, [of_seed[n] for n in x], color=f'C{i % 10}', lw=0.7, alpha=0.6)
      x = sorted({n for of_seed in seeds.values() for n in of_seed})
      median = [np.median([s[n] for s in seeds.values() if n in s]) for n in x]
      label = f'{name} ({len(seeds)} seeds)' if len(seeds) > 1 else name
      style = '--' if line[0].get('follows_length') else '-'
      ax.plot(x, median, style, color=f'C{i % 10}', lw=2, marker='o', ms=3, label=label)
    ax.axvline(first['train_length'], color='0.6', lw=0.8, ls=':')
    ax.set_xscale('log', base=2)
    ax.set_xticks(lengths, names, fontsize=8)
    ax.minorticks_off()
    ax.set_ylim(-0.03, 1.03)
    ax.set_xlabel('length, tokens (dotted: trained up to)')
    ax.set_title(f'{first["task"]}: {title}', fontsize=10)
  for text in ax.legend(fontsize=8).get_texts():
    text.set_parse_math(False)
  return figure


def table(points: Sequence[Point]) -> str:
  """Of one task, per cent of exact answers with the 95 % interval, over all depths; tokens and rank below."""
  lengths, names = _lengths(points)
  head = [points[0]['task'], *(name.split('\n')[1] for name in names)]
  body = []
  for name, line in lines(points).items():
    cells = {n: [p for p in line if p['length'] == n and 'trials' in p] for n in lengths}
    whole = {n: pooled(cell) for n, cell in cells.items() if cell}
    body.append([f'{name}: exact', *(_share(whole.get(n), 'exact') for n in lengths)])
    body.append(['  tokens', *(f'{100 * whole[n]["token"]:.1f} %' if n in whole else '' for n in lengths)])
    ranked = next((p for p in whole.values() if 'first' in p), None)
    if ranked:
      body.append([f'  first of {ranked["candidates"]}', *(_share(whole.get(n), 'first') for n in lengths)])
      body.append(['  mean rank', *(f'{whole[n]["rank"]:.2f}' if n in whole else '' for n in lengths)])
  asked = next((sum(p['trials'] for p in points if p['length'] == n and 'trials' in p) for n in lengths), 0)
  widths = [max(len(row[i]) for row in (head, *body)) for i in range(len(head))]

  def text(row):
    return '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))])

  reasons = dict.fromkeys(f'{p["outcome"]}: {p["reason"]}' for p in points if p.get('reason'))
  count = asked // max(len(lines(points)), 1)
  return '\n'.join(
    [*map(text, (head, *body)), f'{count} trials a line and length; intervals: Clopper-Pearson, 95 %', *reasons]
  )


def _share(point: Point | None, name: str) -> str:
  if point is None:
    return ''
  return f'{100 * point[name]:.1f} % [{100 * point[f"{name}_low"]:.0f}, {100 * point[f"{name}_high"]:.0f}]'


def events_of(directory: pathlib.Path, points: Sequence[Point], picture: pathlib.Path) -> None:
  """One run per line, step = length, and the picture."""
  from tensorboardX import SummaryWriter

  shutil.rmtree(directory, ignore_errors=True)
  for name, line in lines(points).items():
    with SummaryWriter(str(directory / file_name(name))) as writer:
      for length in sorted({p['length'] for p in line if 'trials' in p}):
        whole = pooled([p for p in line if p['length'] == length and 'trials' in p])
        for field in ('exact', 'exact_low', 'exact_high', 'token', 'nll', 'first', 'rank'):
          if field in whole:
            writer.add_scalar(f'{file_name(whole["task"])}/{field}', whole[field], length)
  with SummaryWriter(str(directory)) as writer:
    file: Any = writer.file_writer
    file.add_summary(events.image(f'{file_name(points[0]["task"])}', picture.read_bytes()))

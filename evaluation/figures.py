"""Figures of points: curves, the stretch-reach plane, NLL by position in the window."""

import contextlib
import io
import math
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evaluation import summary
from evaluation.points import FLOOR, fake_gain, floors, line_name, trained
from evaluation.stats import MIN_DOCUMENTS, Extent
from evaluation.sweep import Point, exp

if TYPE_CHECKING:
  from matplotlib.figure import Figure

  from evaluation.stability import Line

MARKERS = 'osDv*'

Looks = Mapping[str, tuple[str, str]]


def looks(points: Sequence[Point]) -> Looks:
  """Line -> colour, marker: the same in every figure. Only what is drawn takes a colour, and after ten of them the
  marks change: no two lines look alike."""
  several = len({trained(p) for p in points}) > 1
  drawn = dict.fromkeys(line_name(p, several) for p in points if 'ppl' in p)
  return {label: (f'C{i % 10}', MARKERS[i // 10 % len(MARKERS)]) for i, label in enumerate(drawn)}


def plot(path: pathlib.Path, points: Sequence[Point]) -> None:
  """`curves` as a picture."""
  curves(points, looks(points)).savefig(path, dpi=150)


def svg(figure: 'Figure') -> str:
  """An <svg> element to stand in a page: text is text, and no address of a namespace or a maker is in it."""
  file = io.StringIO()
  with _style():
    figure.savefig(file, format='svg', metadata=dict.fromkeys(('Creator', 'Date', 'Format', 'Type')))
  head, body = file.getvalue().split('<svg ', 1)[1].split('>', 1)
  head = re.sub(r'xmlns(:\w+)?="[^"]*" ?', '', head)
  return f'<svg {head}>{body}'


def _style() -> contextlib.AbstractContextManager:
  """Names of lines are no formulas, and what is drawn twice has the same bytes."""
  import matplotlib

  return matplotlib.rc_context({'text.parse_math': False, 'svg.fonttype': 'none', 'svg.hashsalt': 'longcurve'})


def _figure(width: float, height: float) -> 'Figure':
  import matplotlib.figure  # no pyplot: it would look for a display

  return matplotlib.figure.Figure(figsize=(width, height), layout='constrained')


def curves(points: Sequence[Point], looks: Looks) -> 'Figure':
  """Perplexity against length, log2 both ways, a panel per protocol, a band per line; of `summary.rows`.

  Dashed lines are oracles: their method is told how long the input is. Failures reach 10**3, so y ends at 15 times the
  lowest value; points above sit on the edge as triangles. Of too few documents for a band each is a faint line. A thin
  grey line is the corpus's entropy, where it is known.
  """
  protocols = list(dict.fromkeys(p['protocol'] for p in points))
  several = len({trained(p) for p in points}) > 1
  train_len = points[0]['train_length']
  bottom, ceiling = _range(points)
  labels = list(dict.fromkeys(line_name(p, several) for p in points))
  with _style():
    figure = _figure(5.2 * len(protocols) + 2.2, 4.4)
    axes = figure.subplots(1, len(protocols), squeeze=False, sharey=True)[0]
    for ax, protocol in zip(axes, protocols):
      for label in labels:
        line = [p for p in points if p['protocol'] == protocol and line_name(p, several) == label]
        _line(ax, sorted(line, key=lambda p: p['length']), label, looks.get(label, ('C0', 'o')), ceiling)
      floor = floors([p for p in points if p['protocol'] == protocol])
      if floor:
        ax.plot(list(floor), [exp(nats) for nats in floor.values()], color='0.5', lw=0.8, zorder=1, label=FLOOR)
      _lengths(ax, sorted({p['length'] for p in points}), train_len)
      ax.set_yscale('log', base=2)
      ticks = [t * 10.0**e for e in range(-1, 4) for t in (1, 1.5, 2, 3, 4, 5, 7) if bottom <= t * 10.0**e <= ceiling]
      if len(ticks) < 3:  # a flat curve may lie between two round numbers
        ticks = np.linspace(bottom, ceiling, 4)
      ax.set_yticks(ticks, [f'{t:.3g}' for t in ticks])
      ax.minorticks_off()
      ax.set_ylim(bottom * 0.97, ceiling * 1.04)
      ax.set_xlabel(f'evaluation length, tokens (context of a target: {_contexts(points, protocol)})')
      name = protocol.replace('_', ' ')
      ax.set_title(name, fontsize=10, loc='right', pad=16 if len(name) > 24 else None)  # above 'training length'
      fake = fake_gain([p for p in points if p['protocol'] == protocol])
      if fake is not None:
        remark = f'a model of at most 1x context falls {100 * fake:.0f} % here'
        ax.text(0.98, 0.02, remark, fontsize=8, color='0.4', ha='right', transform=ax.transAxes)
    axes[0].set_ylabel('perplexity per token')
    rule = '' if several or points[0].get('positions', 'sequential') == 'sequential' else f'{trained(points[0])}\n'
    title = f'{rule}checkpoint {_checkpoints(points)}\n{_spread(points)}\ndashed: told its length (oracle)'
    _legend(figure, axes[0], title)
  return figure


def plane(found: Sequence[tuple[str, Extent, Extent]], train_len: int, looks: Looks) -> 'Figure':
  """How far a line may go against how much of it is of use: (line, stretch, reach), a dot each, log2 both ways.

  Extents are lengths of the sweep, on which many lines coincide: dots are set apart by less than half an octave in all.
  An arrow: the sweep ends there, so the length is at least that, or at most.
  """
  ends = [v for _, *two in found for e in two for v in (e.shortest, e.longest)]
  low, high = min(ends), max(ends)
  grid = [low * 2**i for i in range(math.floor(math.log2(high / low)) + 1)]
  with _style():
    figure = _figure(7.4, 4.8)
    ax = figure.subplots()
    ax.plot([low / 2, high * 2], [low / 2, high * 2], color='0.8', lw=0.8, zorder=0)
    for i, (label, stretch, reach) in enumerate(found):
      apart = 2.0 ** (0.4 * (i / max(len(found) - 1, 1) - 0.5))
      colour, marker = looks.get(label, ('C0', 'o'))
      x, y = stretch.value * apart, reach.value * apart
      bars = [
        None if math.isnan(e.low) else [[(e.value - e.low) * apart], [(e.high - e.value) * apart]]
        for e in (reach, stretch)
      ]
      ax.errorbar(x, y, *bars, fmt='none', ecolor=colour, elinewidth=1, capsize=2)
      ax.plot(x, y, marker, color=colour, ms=6, label=label)
      for dx, dy, extent in ((1, 0, stretch), (0, 1, reach)):
        sign = 1 if extent.value == extent.longest else -1 if extent.value == extent.shortest < train_len else 0
        if sign:
          tip = x * 2 ** (0.45 * sign * dx), y * 2 ** (0.45 * sign * dy)
          ax.annotate('', tip, (x, y), arrowprops={'arrowstyle': '->', 'color': colour, 'lw': 1})
    ax.set_xscale('log', base=2)
    ax.set_yscale('log', base=2)
    ticks = [f'{n:g} = {n / train_len:g}x' for n in grid]
    ax.set_xticks(grid, [t.replace(' = ', '\n') for t in ticks], fontsize=8)
    ax.set_yticks(grid, ticks, fontsize=8)
    ax.minorticks_off()
    ax.set_xlim(low / 2**0.7, high * 2**0.7)
    ax.set_ylim(low / 2**0.7, high * 2**0.7)
    ax.set_xlabel('stretch, tokens: does not get worse up to here')
    ax.set_ylabel('reach, tokens: gets better up to here')
    ax.grid(alpha=0.25)
    _legend(figure, ax, '95 % each\narrow: at least, or at most')
  return figure


def by_position(points: Sequence[Point], looks: Looks) -> 'Figure':
  """NLL by position in the window, a panel per length; of points with `buckets`."""
  several = len({trained(p) for p in points}) > 1
  train_len = points[0]['train_length']
  lengths = sorted({p['length'] for p in points})
  lines = {
    (length, line_name({'scheme': scheme, 'positions': positions, 'method': method}, several)): buckets
    for (scheme, positions, method, _, length), buckets in summary.by_position(points).items()
  }
  nll = np.concatenate([b[:, 2] for b in lines.values()])
  best, worst = float(np.nanmin(nll)), float(np.max(nll, where=np.isfinite(nll), initial=-np.inf))
  ticks = [n for n in (4**i for i in range(12)) if n <= lengths[-1]]
  columns = min(3, len(lengths))
  rows = math.ceil(len(lengths) / columns)
  with _style():
    figure = _figure(3.3 * columns + 2, 2.5 * rows + 0.4)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for ax, length in zip(axes, lengths):
      for (n, label), buckets in lines.items():
        if n == length:
          colour, marker = looks.get(label, ('C0', 'o'))
          first, end, nll = buckets.T
          ax.plot((first + end + 1) / 2, nll, marker=marker, ms=2.5, lw=1, color=colour, label=label)
      ax.axvline(train_len, color='0.5', lw=1, ls=':')
      ax.set_title(f'{length} tokens, {length / train_len:g}x', fontsize=9)
      ax.set_xscale('log', base=2)
      ax.set_xticks(ticks, [f'{n:g}' for n in ticks], fontsize=8)
      ax.minorticks_off()
      ax.set_ylim(
        best - 0.1, min(best + math.log(15), worst + 0.1)
      )  # of all: the first panel's own would cut the others
      ax.grid(alpha=0.25)
    for ax in list(axes)[len(lengths) :]:
      ax.set_axis_off()
    figure.supxlabel('position in the window, from 1; dotted: training length', fontsize=9)
    figure.supylabel('NLL, nats per token', fontsize=9)
    handles = {
      str(h.get_label()): h for ax in figure.axes for h in ax.get_lines() if not str(h.get_label()).startswith('_')
    }
    figure.legend(list(handles.values()), list(handles), loc='outside right upper', fontsize=8)
  return figure


def factors(lines: Mapping[str, Sequence[float]], title: str) -> 'Figure':
  """By how much each frequency pair is divided, from the fastest to the slowest; the first line is what was found."""
  from matplotlib import ticker

  with _style():
    figure = _figure(7.5, 4.0)
    ax = figure.subplots()
    for i, (label, factors_P) in enumerate(lines.items()):
      style: Any = (
        {'color': 'k', 'lw': 1.8, 'marker': 'o', 'ms': 4, 'zorder': 3}
        if not i
        else {'lw': 1.4, 'ls': ('-', '--', ':')[i % 3]}
      )
      ax.plot(range(len(factors_P)), factors_P, label=label, **style)
    ax.set_yscale('log', base=2)
    ax.yaxis.set_major_formatter('{x:g}')
    ax.set_xlabel('frequency pair')
    ax.set_ylabel('lambda: frequency divided by')
    ax.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    ax.set_title(title, fontsize=9)
    ax.grid(alpha=0.25)
    ax.legend(fontsize=8, loc='best')
  return figure


def pairs(points: Sequence[Mapping[str, Any]]) -> 'Figure':
  """What evaluation/diagnosis.py makes of pairs: nats recovered by each pair alone, and by sets of them.

  A row per scheme, a panel per length above 1x. Sets are levels; pairs that never completed a turn are shaded.
  """
  asked = [p for p in points if p['what'] != 'none' and p['length'] > p['train_length']]
  schemes, lengths = list(dict.fromkeys(p['scheme'] for p in asked)), sorted({p['length'] for p in asked})
  sets = {'incomplete': '--', 'complete': ':', 'all': '-'}
  with _style():
    figure = _figure(3.4 * len(lengths) + 2.4, 3.4 * len(schemes) + 0.6)
    if not asked:
      return figure
    axes = figure.subplots(len(schemes), len(lengths), squeeze=False, sharex='row')
    for row, scheme in zip(axes, schemes):
      for ax, length in zip(row, lengths):
        here = [p for p in asked if (p['scheme'], p['length']) == (scheme, length)]
        turns = {p['pairs'][0]: p['turns'][0] for p in here if p['which'] == 'pair'}
        unseen = [p for p, r in turns.items() if r < 1]
        if unseen:
          ax.axvspan(min(unseen) - 0.5, max(unseen) + 0.5, color='0.93', zorder=0)
        ax.axhline(0, color='0.6', lw=0.8)
        ax.axhline(here[0]['damage'], color='C3', lw=1.2, label='damage: rise over 1x')
        for what, colour, marker in (('held', 'C0', 'o'), ('pi', 'C1', 'x')):
          mine = [p for p in here if p['what'] == what]
          one = sorted((p for p in mine if p['which'] == 'pair'), key=lambda p: p['pairs'])
          y = [p['recovered'] for p in one]
          bars = [
            [0 if p['recovered_low'] is None else abs(p['recovered'] - p[end]) for p in one]
            for end in ('recovered_low', 'recovered_high')
          ]
          x = [p['pairs'][0] for p in one]
          ax.errorbar(x, y, bars, fmt=marker, color=colour, ms=4, elinewidth=0.8, label=f'{what}: that pair alone')
          for p in mine:
            if p['which'] in sets:
              label = f'{what}: {p["which"]}'
              ax.axhline(p['recovered'], color=colour, ls=sets[p['which']], lw=1, label=label)
        shown = list(turns)[:: max(len(turns) // 8, 1)]
        ax.set_xticks(shown, [f'{p}\n{turns[p]:.2g}' for p in shown], fontsize=7)
        ax.set_title(f'{length} tokens, {length / here[0]["train_length"]:g}x', fontsize=9)
        ax.grid(alpha=0.25)
      row[0].set_ylabel(f'{scheme}\nnats recovered', fontsize=9)
    figure.supxlabel('frequency pair, and its turns within the range of training', fontsize=9)
    title = f'{_looked_at(asked[0])}\n95 % over documents\ngrey: never completed a turn'
    _legend(figure, axes[0][-1], title)
  return figure


def attention(points: Sequence[Mapping[str, Any]]) -> 'Figure':
  """Entropy, largest logit and masses of attention against length, a row each, a line per head, a panel per layer.

  Of more than eight layers eight are shown, evenly spread.
  """
  layers = sorted({p['layer'] for p in points})
  layers = [layers[i * len(layers) // min(len(layers), 8)] for i in range(min(len(layers), 8))]
  lengths, train_len = sorted({p['length'] for p in points}), points[0]['train_length']
  titles = {
    'entropy': 'entropy, nats',
    'largest': 'largest logit',
    'first': 'mass on the\nfirst token',
    'beyond': f'mass {train_len} tokens\nback or more',
  }
  with _style():
    figure = _figure(2.5 * len(layers) + 1.8, 8.4)
    axes = figure.subplots(len(titles), len(layers), squeeze=False, sharex=True, sharey='row')
    for row, (name, title) in zip(axes, titles.items()):
      row[0].set_ylabel(title, fontsize=9)
      for ax, layer in zip(row, layers):
        mine = sorted((p for p in points if p['layer'] == layer), key=lambda p: p['length'])
        for head in sorted({p['head'] for p in mine}):
          of = [p for p in mine if p['head'] == head]
          ax.plot([p['length'] for p in of], [p[name] for p in of], 'o-', ms=3, lw=1, label=f'head {head}')
        if name == 'entropy':
          ax.plot(lengths, np.log(lengths), color='0.6', lw=0.8, label='uniform: ln L')
          ax.set_title(f'layer {layer}, {mine[0]["scheme"]}', fontsize=9)
        ax.axvline(train_len, color='0.5', lw=1, ls=':')
        ax.set_xscale('log', base=2)
        ax.set_xticks(lengths, [f'{n / train_len:g}x' for n in lengths], fontsize=8)
        ax.minorticks_off()
        ax.grid(alpha=0.25)
    figure.supxlabel('evaluation length', fontsize=9)
    _legend(figure, axes[0][0], f'{_looked_at(points[0])}\nmeans over the queries\nof the fixed targets')
  return figure


def _looked_at(point: Mapping[str, Any]) -> str:
  return f'{point["run"]} {point["method"]},\ncheckpoint {point["checkpoint_step"]}, seed {point["seed"]}'


def surface(lines: Sequence['Line'], train_len: int) -> 'Figure':
  """Perplexity against tokens seen, a panel per scheme, a line per length; y as in `curves`."""
  import matplotlib

  schemes, lengths = list(dict.fromkeys(line.scheme for line in lines)), sorted({line.length for line in lines})
  colour = {n: matplotlib.colormaps['viridis'](i / max(len(lengths), 2)) for i, n in enumerate(lengths)}
  finite = [x for line in lines for x in line.nll_SC.mean(0) if math.isfinite(x)] or [0.0]
  bottom, ceiling = exp(min(finite)), min(15 * exp(min(finite)), 1.2 * exp(max(finite)))
  columns = min(4, len(schemes))
  rows = math.ceil(len(schemes) / columns)
  with _style():
    figure = _figure(2.9 * columns + 1.4, 2.6 * rows + 0.5)
    axes = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True).flat
    for ax, scheme in zip(axes, schemes):
      for line in (line for line in lines if line.scheme == scheme):
        mean = np.minimum(np.exp(np.minimum(line.nll_SC.mean(0), 700)), ceiling)
        for x_C in line.nll_SC if len(line.nll_SC) > 1 else ():
          seed = np.minimum(np.exp(np.minimum(x_C, 700)), ceiling)
          ax.plot(line.tokens, seed, lw=0.6, alpha=0.4, color=colour[line.length])
        style = '-' if line.length >= train_len else ':'
        ax.plot(
          line.tokens, mean, style, marker='o', ms=2.5, color=colour[line.length], label=f'{line.length / train_len:g}x'
        )
      ax.set_title(scheme, fontsize=9)
      ax.set_yscale('log', base=2)
      ticks = [t * 10.0**e for e in range(-1, 4) for t in (1, 1.5, 2, 3, 5, 7) if bottom <= t * 10.0**e <= ceiling]
      ticks = ticks if len(ticks) > 2 else list(np.linspace(bottom, ceiling, 4))
      ax.set_yticks(ticks, [f'{t:.3g}' for t in ticks], fontsize=8)
      ax.tick_params(axis='x', labelsize=8)
      ax.minorticks_off()
      ax.set_ylim(bottom * 0.97, ceiling * 1.04)
      ax.grid(alpha=0.25)
    for ax in list(axes)[len(schemes) :]:
      ax.set_axis_off()
    figure.supxlabel('tokens seen', fontsize=9)
    figure.supylabel('perplexity per token', fontsize=9)
    handles = {str(h.get_label()): h for ax in figure.axes for h in ax.get_lines() if str(h.get_label())[0] != '_'}
    named = [f'{n / train_len:g}x' for n in lengths]
    figure.legend([handles[n] for n in named], named, loc='outside right upper', fontsize=8, title='length')
  return figure


def _lengths(ax: Any, lengths: Sequence[int], train_len: int) -> None:
  """The axis of all curves."""
  ax.axvline(train_len, color='0.5', lw=1, ls=':')
  above = {'transform': ax.get_xaxis_transform(), 'ha': 'center', 'va': 'bottom'}  # no curve runs there
  ax.text(train_len, 1.01, 'training length', fontsize=8, color='0.4', **above)
  ax.set_xscale('log', base=2)
  ax.set_xticks(lengths, [f'{n}\n{n / train_len:g}x' for n in lengths], fontsize=8)
  ax.grid(alpha=0.25)


def _legend(figure: 'Figure', ax: Any, title: str) -> None:
  handles, names = ax.get_legend_handles_labels()
  figure.legend(handles, names, loc='outside right upper', fontsize=8, title=title, title_fontsize=7)


def _checkpoints(points: Sequence[Point]) -> str:
  return ', '.join(map(str, sorted({p['checkpoint_step'] for p in points})))


def _spread(points: Sequence[Point]) -> str:
  """What is around a line, and what it speaks of."""
  few = max(len(_each(p)) for p in points)
  if few and all(p.get('ci_low') is None for p in points):
    return f'{few} documents, a faint line each:\nno interval'
  counts = sorted({len(p['seeds']) if 'seeds' in p else 1 for p in points})
  seeds = ' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))
  of = ', this checkpoint,\nnot this scheme' if counts == [1] else f' and {seeds} seeds'
  return f'95 % band over all lengths of a line,\nover documents{of}'


def _range(points: Sequence[Point]) -> tuple[float, float]:
  ok = [p for p in points if p['outcome'] == 'ok']
  if not ok:
    return 1.0, 10.0
  best = min(p['ppl'] for p in ok)
  # Bands may reach down to half the best value: with few documents they would otherwise squeeze the curves.
  bottom = max(min(x for p in ok for x in (p['ppl'] if p['ci_low'] is None else p['ci_low'], *_each(p))), best / 2)
  bottom = min([bottom, *(exp(p['floor']) for p in ok if 'floor' in p)])
  return bottom, max(min(15 * best, max(p['ppl'] for p in ok)), 1.2 * best)


def _each(point: Point) -> list[float]:
  """Perplexity of each document where there are too few for an interval; diverged is infinite."""
  nll_D = point.get('nll_documents', ())
  if point.get('ci_low') is not None or len(nll_D) >= MIN_DOCUMENTS:
    return []
  return [exp(x) if math.isfinite(x) else math.inf for x in nll_D]


def _contexts(points: Sequence[Point], protocol: str) -> str:
  if protocol.split('(')[0] not in ('fixed_targets', 'key_tokens'):
    return '0 .. L-1'
  return f'L-{next(p["T"] for p in points if p["protocol"] == protocol and p["T"])} .. L-1'


def _line(ax: Any, line: Sequence[Point], label: str, look: tuple[str, str], ceiling: float) -> None:
  """One method's curve and band; what lies above `ceiling`, or diverged, is a triangle on the edge."""
  from matplotlib.collections import LineCollection

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
  documents = [np.column_stack((x, np.minimum(ppl_L, ceiling))) for ppl_L in zip(*map(_each, shown))]
  if documents:  # out of the limits: one far below all means would overflow a logarithmic margin
    ax.add_collection(LineCollection(documents, lw=0.6, alpha=0.4, color=colour, zorder=1), autolim=False)
  band = [p for p in shown if p['outcome'] == 'ok' and p['ci_low'] is not None]
  low, high = (np.minimum([p[k] for p in band], ceiling) for k in ('ci_low', 'ci_high'))
  ax.fill_between([p['length'] for p in band], low, high, color=colour, alpha=0.15, lw=0)


def sheets(paragraphs: Sequence[str]) -> list['Figure']:
  """Pages of text."""
  lines = [line for text in paragraphs for line in (*textwrap.wrap(text, 105), '')]
  out = []
  with _style():
    for i in range(0, len(lines), 44):
      out.append(_figure(8.3, 8.3))
      out[-1].text(0.04, 0.97, '\n'.join(lines[i : i + 44]), va='top', fontsize=8)
  return out

"""Trains and sweeps every scheme of the catalogue alike, and prints one overview table with numbers.

  python -m scripts.landscape --workdir=runs/landscape

A grid (scripts/grid.py) of configs/landscape.py: run the same command again to go on. --smoke takes minutes and means
nothing. --table makes the table of what is there. Other arguments are the grid's: --seeds, --posenc, --jobs, --status,
--print, and --set optimizer.learning_rate=1e-3,3e-3, of which each scheme then gets the one that is better on
validation text at 1x. Writes landscape.md to --workdir.
"""

import argparse
import math
import pathlib
import statistics
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc
from configs.schema import Config
from evaluation import summary
from evaluation.chosen import choose
from evaluation.gather import Report
from evaluation.points import read_metrics, trained
from evaluation.runs import Run, apart, curve_of, together
from evaluation.sweep import Point
from posenc.base import PositionScheme, owner
from scripts import grid
from spec import SpecError
from training import cli

# A scheme's string where its defaults need a number; rows of text have none, so the grid of 2D-RoPE is arbitrary.
FORMS = {'rope2d': 'rope2d(width=16)'}
WHERE = {'embed': 'embeddings', 'rotate': 'queries, keys', 'score': 'logits', 'values': 'values'}
SMOKE = (
  '--config.steps=10', '--config.train_len=32', '--config.batch=8', '--config.data.corpus=stdlib',
  '--config.data.test_docs=12', '--config.model.layers=1', '--config.model.d_model=48',
  '--config.optimizer.warmup_steps=2', '--config.eval.multiples=(0.5, 1.0, 2.0, 8.0)', '--config.surface.checkpoints=2',
)  # fmt: skip
HEAD = ('scheme', 'positions', 'acts on', 'learned', 'NLL at 1x', 'stretch', 'reach', 'tokens/s', 'bytes')


class Cost(NamedTuple):
  """Of a run's training: tokens per second, and bytes of a step on each device. NaN: not told."""

  speed: float
  bytes: float


def cost(run: Run) -> Cost:
  told = read_metrics(run.workdir)

  def quantile(tag, q):
    values = [line[tag] for line in told if tag in line]
    return float(np.quantile(values, q)) if values else math.nan

  # Not the median of the speed: what else a machine does for a while only slows a run.
  return Cost(quantile('train/tokens_per_second', 0.75), quantile('train/bytes', 0.5))


def where(scheme: PositionScheme) -> str:
  """What of a layer a scheme changes, by the hooks that it has of its own and uses: some are options."""
  n, pos = scheme.dims.heads, posenc.positions('none', scheme, scheme.dims.train_len, 2)
  idle = {}

  def look(scheme):
    q, p = jnp.zeros((1, 2, n, scheme.dims.head_dim)), jnp.zeros((1, n, 2, 2))
    idle.update(rotate=scheme.rotate(q, q, pos)[0] is q, values=scheme.values(p, pos.at_T, pos.at_T) is None)

  nnx.eval_shape(look, scheme)  # that of a config has shapes for parameters
  own = [hook for hook in WHERE if owner(scheme, hook) is not PositionScheme and not idle.get(hook)]
  return ', '.join(WHERE[hook] for hook in own) or 'nothing'


def kind(scheme: PositionScheme) -> str:
  if not scheme.reads_positions:
    return 'none' if where(scheme) == 'nothing' else 'of the text'
  return 'relative' if scheme.relative else 'absolute'


def table(runs: Sequence[Run]) -> str:
  """Markdown: schemes by how far they stretch, then the methods of plain RoPE with their cost at 1x."""
  settings = choose(runs)
  kept = {run.workdir for s in settings if s.chosen for run in s.runs}
  report = Report(apart([run for run in runs if run.workdir in kept]), settings=settings)
  by_scheme: dict[str, list[Run]] = {}
  for run in report.runs:
    by_scheme.setdefault(trained(run.points[0]), []).append(run)
  nope = by_scheme.get('nope', [])
  extents = {(trained(c.point), c.method): (c, far, used) for c, far, used in report.extents}
  at_1x = {(trained(p), p['method']): p for p in report.of('fixed_targets') if p['length'] == report.train_len}
  longest = max(p['length'] for p in report.rows)

  def ratio(mine: Sequence[Run], field: str) -> str:
    ours, theirs = ([getattr(cost(run), field) for run in of] for of in (mine, nope))
    if not ours or not theirs:
      return '?'
    value = statistics.median(ours) / statistics.median(theirs)
    return '?' if math.isnan(value) else f'{value:.2f}'

  def curve(key) -> list[str]:
    if key not in extents:
      return ['', '']
    c, far, used = extents[key]
    if far is None:  # 1x was not swept
      return ['', '']
    ends = '' if c.lengths[-1] == longest else f', ends at {c.lengths[-1] / report.train_len:g}x'
    return [far.text(report.train_len) + ends, used[0].text(report.train_len)]

  rows = []
  for name, mine in by_scheme.items():
    config = Config.from_dict(mine[0].config)
    slots = [config.build_scheme(text) for text in config.posenc]
    said = [' + '.join(dict.fromkeys(of(scheme) for scheme in slots)) for of in (kind, where)]
    learned = mine[0].points[0]['params'] - nope[0].points[0]['params'] if nope else math.nan
    point = at_1x.get((name, 'none'), {})
    costs = [ratio(mine, 'speed'), ratio(mine, 'bytes')]
    row = [
      f'`{name}`',
      *said,
      '?' if math.isnan(learned) else f'{learned:,}',
      _nll(point),
      *curve((name, 'none')),
      *costs,
    ]
    far = extents.get((name, 'none'), (None, None, None))[1]
    rows.append(((-far.value if far else 0, point.get('nll', math.inf)), row))
  lines = [row for _, row in sorted(rows, key=lambda item: item[0])]
  lines += list(_methods(at_1x, curve, 'rope'))
  seeds = sorted({run.seed for run in report.runs})
  rates = {Config.from_dict(run.config).optimizer.learning_rate for run in runs}
  config = Config.from_dict(runs[0].config)
  tokens = config.steps * config.optimizer.accumulate * config.batch * config.train_len
  about = [
    f'{next(iter(at_1x.values()))["params"]:,} parameters, trained at {report.train_len} tokens (1x) on {tokens:,} '
    f'tokens of {report.points[0]["corpus"]}; seeds {", ".join(map(str, seeds))}; '
    + (
      f'learning rate {rates.pop():g} for all: no scheme has one of its own.'
      if len(rates) == 1
      else f'learning rate of {", ".join(f"{r:g}" for r in sorted(rates))} by validation text at 1x, scheme by scheme.'
    ),
    f'NLL: nats a token, fixed targets, ± half of a 95 % band. stretch({summary.DELTA:g}) and '
    f'reach({summary.EPSILONS[0]:g}) of lengths to {longest / report.train_len:g}x, with 95 % intervals. tokens/s (the '
    "upper quartile of a run's logs) and bytes: of a training step, NoPE is 1. relative: a shift of all positions "
    "changes nothing (rows of 2D-RoPE end, FIRE divides by the query's own position). Methods of RoPE: what they cost "
    'at 1x is behind their NLL; * marked over the whole table.',
    report.stability if report.several else '',
  ]
  return '\n\n'.join([_markdown(HEAD, lines), *filter(None, about)])


def _methods(at_1x: dict, curve, scheme: str) -> Iterator[list[str]]:
  for (name, method), point in at_1x.items():
    if name == scheme and method != 'none' and point['outcome'] == 'ok':
      cost = f' ({point["vs_none"]:+.3f}{"*" if point.get("marked") else ""})' if 'vs_none' in point else ''
      yield [f'`{scheme}` `{method}`', '', '', '', _nll(point) + cost, *curve((name, method)), '', '']


def _nll(point: Point) -> str:
  if 'nll' not in point:
    return point.get('outcome', 'not swept')
  if point.get('ci_low') is None:
    return f'{point["nll"]:.3f}'
  return f'{point["nll"]:.3f} ±{(math.log(point["ci_high"]) - math.log(point["ci_low"])) / 2:.3f}'


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *rows]
  return '\n'.join(f'| {" | ".join(line)} |' for line in lines)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__.split('\n')[0],
    epilog='--set, --jobs, --status, --print and --config.field=value are those of scripts.grid.',
  )
  parser.add_argument('--workdir', required=True, type=pathlib.Path, help='folder of the runs and of landscape.md')
  parser.add_argument(
    '--smoke', action='store_true', help='tiny runs of one seed, in minutes: the numbers mean nothing'
  )
  parser.add_argument('--table', action='store_true', help='train nothing: the table of what is there')
  parser.add_argument('--seeds', help='0,1,2 by default')
  parser.add_argument(
    '--posenc', default=';'.join(FORMS.get(s, s) for s in posenc.SCHEMES), help="such as 'rope;alibi'"
  )
  args, rest = parser.parse_known_args(argv)
  code = 0
  if not args.table:
    seeds = args.seeds or ('0' if args.smoke else '0,1,2')
    asked = [
      '--config=configs/landscape.py',
      f'--workdir={args.workdir}',
      f'--posenc={args.posenc}',
      f'--seeds={seeds}',
    ]
    code = grid.main([*asked, *(SMOKE if args.smoke else ()), *rest])
    if code > 1 or {'--status', '--print'} & set(rest):  # 1: some cells failed, the others have a table
      return code
  swept = sorted(path for path in args.workdir.glob('*seed=*') if curve_of(path).exists())
  if not swept:
    raise SpecError(f'--workdir={args.workdir}: no run that was swept')
  text = table(together(swept))
  (args.workdir / 'landscape.md').write_text(f'{text}\n')
  print(f'\n{text}\n\n{args.workdir / "landscape.md"}')
  return code


if __name__ == '__main__':
  cli.guard(main)

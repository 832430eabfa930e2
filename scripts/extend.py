"""Tunes a RoPE model for longer windows in every way of configs/extend.py, and draws NLL against tokens spent.

  python -m scripts.extend --workdir=runs/extend

Trains a source per seed, then a run for each arm, budget and seed; run the same command again to go on (scripts/grid.py
has the rest: a cell that fails stops no other). --smoke takes minutes and means nothing. --table makes table and figure
of what is there. --config.field=value is for all runs. Writes extend.md and extend.png to --workdir.
"""

import argparse
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from configs.extend import ARMS, SCALED
from configs.schema import Config
from evaluation import stats
from evaluation.points import read_curve
from evaluation.runs import curve_of
from scripts import grid
from scripts.grid import Cell
from spec import SpecError
from training import cli, lock

BUDGETS = '0,0.5,1,2,5,10'
CONTROL = 'short'
SMOKE = (
  '--config.data.corpus=stdlib', '--config.data.test_docs=12', '--config.max_multiple=8', '--config.model.layers=1',
  '--config.model.d_model=48', '--config.eval.spans=2',
)  # fmt: skip


class Spent(NamedTuple):
  """NLL of one arm, nats: x[seeds, documents, budgets, lengths]."""

  budgets: tuple[float, ...]  # per cent of the source's tokens
  x_SDBL: np.ndarray


def _cell(workdir: pathlib.Path, name: str, arm: str, options: Sequence[str]) -> Cell:
  asked = (f'--config=configs/extend.py:{arm}', *options)
  return Cell(name, workdir / name, Config.from_dict(cli.read_config(asked).to_dict()), asked)


def sources(args: argparse.Namespace) -> dict[int, Cell]:
  steps = ('--config.steps=40',) if args.smoke else ()
  return {
    seed: _cell(args.workdir, f'source,seed={seed}', 'source', (*args.options, *steps, f'--config.seed={seed}'))
    for seed in args.seeds
  }


def arms(args: argparse.Namespace, of: Mapping[int, Cell]) -> dict[tuple[str, float, int], Cell]:
  """By arm, budget and seed. What a method does without tuning is in the source's own sweep."""
  out = {}
  for arm, fields in ARMS.items():
    for budget in args.budgets:
      if not budget and 'posenc' not in fields:
        continue
      for seed, source in of.items():
        steps = max(round(source.config.steps * budget / 100), 1) if budget else 0
        own = (f'--config.init_from={source.workdir}', f'--config.steps={steps}', f'--config.seed={seed}')
        out[arm, budget, seed] = _cell(args.workdir, f'{arm},{budget:g}%,seed={seed}', arm, (*args.options, *own))
  return out


def _documents(cell: Cell, method: str) -> list[list[float]] | None:
  """NLL of each document at each length, of a cell that was swept."""
  path = curve_of(cell.workdir)
  points = read_curve(path) if path.exists() else []
  at = {p['length']: p for p in points if p['method'] == method and p['checkpoint_step'] == cell.config.steps}
  lengths = [cell.config.tokens(m) for m in cell.config.eval.multiples]
  return [at[n]['nll_documents'] for n in lengths] if set(lengths) <= set(at) else None


def collect(of: Mapping[int, Cell], tuned: Mapping[tuple[str, float, int], Cell]) -> dict[str, Spent]:
  """Of what was swept: a seed that is missing somewhere is left out everywhere, so that all arms pair."""
  budgets = sorted({budget for _, budget, _ in tuned} | {0.0})
  found: dict[int, dict[tuple[str, float], list[list[float]]]] = {}
  for seed, source in of.items():
    mine = {}
    for arm, fields in ARMS.items():
      for budget in budgets:
        cell = tuned.get((arm, budget, seed))
        there = _documents(cell, 'none') if cell else _documents(source, str(fields.get('method', 'none')))
        if there is not None:
          mine[arm, budget] = there
    found[seed] = mine
  whole = [mine for mine in found.values() if len(mine) == len(ARMS) * len(budgets)]
  if not whole:
    raise SpecError('no seed has been swept for every arm and budget')
  return {
    arm: Spent(tuple(budgets), np.array([[mine[arm, b] for b in budgets] for mine in whole]).transpose(0, 3, 1, 2))
    for arm in ARMS
  }


def report(found: Mapping[str, Spent], lengths: Sequence[int], tokens: int) -> str:
  """Markdown: a table a length, what was predicted, and where tuning without scaling catches up."""
  home = stats.infer(_home(found)[..., None])
  differ = differences(found)
  others = [arm for arm in found if arm != CONTROL]
  less = stats.infer(np.stack([found[arm].x_SDBL - found[CONTROL].x_SDBL for arm in others], -1), least=stats.MIN_PAIRS)
  seeds, documents, budgets, _ = found[CONTROL].x_SDBL.shape
  parts = []
  for i, length in enumerate(lengths):
    rows = [['tokens spent', *(f'{b:g} %' for b in found[CONTROL].budgets)]]
    for arm, cells in differ.items():
      marks = less.p[:, i, others.index(arm)] < 0.05 if arm in others else [False] * budgets
      numbers = [_number(cells, b, i) + '*' * int(marks[b]) for b in range(budgets)]
      rows.append([f'`{arm}`', *numbers])
    head = f'{length} tokens ({length // lengths[0]}x): NLL less that of the source at {lengths[0]}, nats'
    parts.append(f'{head}\n\n{_markdown(rows)}')
  parts.append(
    f'{seeds} seeds, {documents} documents; the source has {_number(home, 0)} nats at {lengths[0]}, 100 % are '
    f'{tokens:,} tokens. ±: half of a 95 % band that holds over all of an arm. *: not `{CONTROL}` with as many tokens, '
    'by seed and document, p < 0.05 over both tables.'
  )
  far = {arm: spent.x_SDBL[..., -1] for arm, spent in found.items()}
  parts.append(_claims(far, found[CONTROL].budgets, lengths[-1]))
  return '\n\n'.join(parts)


def _home(found: Mapping[str, Spent]) -> np.ndarray:
  """NLL of the sources at 1x, x[S, D]: what the control has spent nothing on."""
  return found[CONTROL].x_SDBL[:, :, 0, 0]


def differences(found: Mapping[str, Spent]) -> dict[str, stats.Cells]:
  """By arm, [budgets, lengths]: less the source at 1x, by seed and document. The targets are the same at all lengths,
  so that what texts differ in cancels."""
  return {
    arm: stats.infer(spent.x_SDBL - _home(found)[..., None, None], least=stats.MIN_PAIRS)
    for arm, spent in found.items()
  }


def _claims(far: Mapping[str, np.ndarray], budgets: Sequence[float], length: int) -> str:
  """far: x[S, D, B] of each arm at the longest length."""
  pi = far['pi'].mean((0, 1))
  worst = budgets[int(np.argmax(pi))]
  lines = [f'a. PI at {length}: worst at {worst:g} % ({"held" if worst == 0 else "failed"})']
  if 1.0 in budgets:
    cell = stats.infer(
      (far['pi'][..., budgets.index(1.0)] - far['pi'][..., 0])[..., None], alone=True, least=stats.MIN_PAIRS
    )
    mean, low, high = (float(v[0]) for v in (cell.mean, cell.low, cell.high))
    held = 'held' if high < 0 else 'failed'
    lines[0] += f'; 1 % of the tokens change it by {mean:+.3f} [{low:+.3f}, {high:+.3f}] ({held})'
  for arm in (name for name, fields in ARMS.items() if fields.get('method') in SCALED):
    cells = stats.infer(far['long'] - far[arm], least=stats.MIN_PAIRS)
    behind = [b for b, low in zip(budgets, cells.low) if low > 0]
    ahead = [b for b, high in zip(budgets, cells.high) if high < 0]
    said = [f'behind at {", ".join(f"{b:g}" for b in behind)} %'] if behind else []
    said += [f'ahead at {", ".join(f"{b:g}" for b in ahead)} %'] if ahead else []
    by_budget = ', '.join(f'{m:+.3f}' for m in cells.mean)
    lines.append(f'`long` less `{arm}` at {length}: {by_budget}; {", ".join(said) or "neither ahead nor behind"}')
  return '\n'.join(f'- {line}' for line in lines)


def _number(cells: stats.Cells, *at: int) -> str:
  mean, low, high = (float(v[at]) for v in (cells.mean, cells.low, cells.high))
  sign = '+' if len(at) > 1 else ''
  return f'{mean:{sign}.3f}' + ('' if np.isnan(low) else f' ±{(high - low) / 2:.3f}')


def _markdown(rows: Sequence[Sequence[str]]) -> str:
  head, *rest = rows
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ['---'] * len(head), *rest))


def draw(path: pathlib.Path, found: Mapping[str, Spent], lengths: Sequence[int], tokens: int) -> None:
  import matplotlib.figure  # no pyplot: it would look for a display

  figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout='constrained')
  axes = figure.subplots(1, len(lengths))
  budgets = found[CONTROL].budgets
  for i, (ax, length) in enumerate(zip(axes, lengths)):
    for k, (arm, cells) in enumerate(differences(found).items()):
      at = np.arange(len(budgets))
      style = {'color': '0.3', 'ls': '--'} if arm == CONTROL else {'color': f'C{k}'}
      ax.plot(at, cells.mean[:, i], marker='o', ms=4, label=arm, **style)
      ax.fill_between(at, cells.low[:, i], cells.high[:, i], color=style['color'], alpha=0.15, lw=0)
    ax.axhline(0, color='0.5', lw=1, ls=':')
    ax.set_xticks(np.arange(len(budgets)), [f'{b:g}' for b in budgets])
    ax.set_xlabel(f'tokens spent, % of {tokens:,}')
    ax.set_title(f'{length} tokens ({length // lengths[0]}x): {"the target" if i else "the price"}', fontsize=10)
    ax.grid(alpha=0.25)
  axes[0].set_ylabel(f'NLL less that of the source at {lengths[0]}, nats')
  axes[-1].legend(fontsize=8)
  figure.savefig(path, dpi=130)


def _numbers(flag: str, text: str, kind: type) -> list:
  try:
    values = [kind(part) for part in text.split(',')]
  except ValueError:
    raise SpecError(
      f'--{flag}={text}: numbers such as {BUDGETS if flag == "budgets" else "0,1,2"} are allowed'
    ) from None
  if len(set(values)) < len(values) or min(values) < 0:
    raise SpecError(f'--{flag}={text}: numbers of at least 0, each once, are allowed')
  return values


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__.split('\n')[0],
    epilog='--config.field=value is for all runs.',
  )
  parser.add_argument(
    '--workdir', required=True, type=pathlib.Path, help='folder of the runs, extend.md and extend.png'
  )
  parser.add_argument('--seeds', help='0,1,2 by default')
  parser.add_argument('--budgets', help=f"per cent of the source's tokens, {BUDGETS} by default")
  parser.add_argument('--jobs', type=int, default=1, help='cells at a time')
  parser.add_argument('--smoke', action='store_true', help='tiny runs of one seed: the numbers mean nothing')
  parser.add_argument('--status', action='store_true', help='show where each run stands, and run nothing')
  parser.add_argument('--table', action='store_true', help='train nothing: table and figure of what is there')
  args, rest = parser.parse_known_args(argv)
  for text in rest:
    if not text.startswith('--config.'):
      parser.error(f'{text!r}: options are written --name=value, fields of all runs --config.field=value')
  args.workdir = args.workdir.absolute()
  args.options = (*(SMOKE if args.smoke else ()), *rest)
  args.seeds = _numbers('seeds', args.seeds or ('0' if args.smoke else '0,1,2'), int)
  args.budgets = _numbers('budgets', args.budgets or ('0,5,10' if args.smoke else BUDGETS), float)
  jax.config.update('jax_platforms', 'cpu')  # configs build their schemes; the accelerator is the runs'
  of = sources(args)
  tuned = arms(args, of)
  if args.status:
    print(grid.status([*of.values(), *tuned.values()]))
    return 0
  code = 0
  if not args.table:
    lock.take(args.workdir, 'grid')
    for cells in (list(of.values()), list(tuned.values())):
      runs = grid.Grid(cells, args.jobs)
      runs.run()
      if runs.stopped:
        print(f'{signal.Signals(runs.stopped).name}: stopped; run the same command to go on')
        return 128 + runs.stopped
      for name, why in runs.failed.items():
        print(f'{name}: {why}; all of it in {args.workdir / name / "cell.log"}')
        code = 1
  found = collect(of, tuned)
  config = next(iter(of.values())).config
  lengths = [config.tokens(m) for m in config.eval.multiples]
  tokens = config.steps * config.optimizer.accumulate * config.batch * config.window
  text = report(found, lengths, tokens)
  (args.workdir / 'extend.md').write_text(f'{text}\n')
  draw(args.workdir / 'extend.png', found, lengths, tokens)
  print(f'\n{text}\n\n{args.workdir / "extend.png"}')
  return code


if __name__ == '__main__':
  cli.guard(main)

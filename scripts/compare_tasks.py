"""What several runs make of one task, in one figure and one table: heat maps side by side, or accuracy against length.

  python -m evaluation.tasks --workdir=runs/copy/nope-0 --task=copy --multiples=0.5,1,1.5,2   # each run first
  python -m scripts.compare_tasks runs/copy/* --task=copy --out=runs/copy.png

Runs of one scheme are seeds of one line: heat maps pool their trials, curves draw every seed and the median, and the
table has every seed's number. Of each run the newest checkpoint asked.
"""

import argparse
import pathlib

import numpy as np

from evaluation import heat
from evaluation.answers import Point, pooled
from spec import SpecError


def read(workdirs: list[pathlib.Path], task: str, method: str) -> list[Point]:
  points = []
  for workdir in workdirs:
    path = workdir / 'extrapolation' / 'tasks.jsonl'
    if not path.exists():
      raise SpecError(f'{path}: no such file; run python -m evaluation.tasks --workdir={workdir} first')
    mine = [p for p in heat.read(path) if p['task'] == task and p['method'] == method]
    if not mine:
      raise SpecError(f'{path}: task {task!r}, method {method!r} was not asked')
    newest = max(p['checkpoint_step'] for p in mine)
    points += [{**p, 'run': str(workdir)} for p in mine if p['checkpoint_step'] == newest]
  return points


def table(points: list[Point], field: str) -> str:
  """Of each line and length, per cent: the median over runs, then every run, rising."""
  lengths = sorted({p['length'] for p in points})
  lines = [
    f'| {points[0]["task"]}: {field} | ' + ' | '.join(f'{n / points[0]["train_length"]:g}x' for n in lengths) + ' |'
  ]
  lines.append('|---' * (len(lengths) + 1) + '|')
  for name, line in heat.lines(points).items():
    cells = []
    for length in lengths:
      runs: dict[str, list[Point]] = {}
      for p in line:
        if p['length'] == length and 'trials' in p:
          runs.setdefault(p['run'], []).append(p)
      shares = sorted(100 * pooled(of)[field] for of in runs.values())
      every = ' '.join(f'{s:.0f}' for s in shares)
      cells.append(f'{np.median(shares):.0f} ({every})' if len(shares) > 1 else every)
    lines.append(f'| `{name}` | ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--task', required=True, help='as it was asked, such as passkey')
  parser.add_argument('--method', default='none', help='one scaling method; none by default')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('tasks.png'), help='the picture')
  args = parser.parse_args(argv)
  try:
    points = read(args.workdirs, args.task, args.method)
  except SpecError as error:
    parser.error(str(error))
  args.out.parent.mkdir(parents=True, exist_ok=True)
  heat.draw(points).savefig(args.out, dpi=110)
  print(table(points, 'exact'), table(points, 'token'), args.out, sep='\n\n')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())

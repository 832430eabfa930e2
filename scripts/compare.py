"""Several runs' curves in one figure and one table.

  python -m scripts.compare runs/quickstart/rope runs/quickstart/alibi --out=runs/quickstart

Writes curve.png and curve.csv to --out. Curves measured on different targets are refused: they have no common axis.
Runs that differ in nothing but their seed are one line over seeds and documents.
"""

import argparse
import pathlib

from evaluation import figures, results, stability, summary
from evaluation.points import trained
from evaluation.runs import compared, side_by_side
from training import cli


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  args = parser.parse_args(argv)
  runs = side_by_side(args.workdirs)
  points = [p for run in runs for p in run.points]
  args.out.mkdir(parents=True, exist_ok=True)
  rows = summary.rows(points)
  figures.plot(args.out / 'curve.png', rows)
  results.write_csv(args.out / 'curve.csv', points)
  for protocol in dict.fromkeys(p['protocol'] for p in rows):
    print(f'{results.table(rows, protocol)}\n')
  print(f'{summary.text(points, compared(runs))}\n')
  if len({trained(p) for p in rows}) > 1:
    print(f'{stability.rank_stability(runs)}\n')
  print(args.out / 'curve.png')


if __name__ == '__main__':
  cli.guard(main)

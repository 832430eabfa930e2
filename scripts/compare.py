"""Several runs' curves in one figure and one table.

  python -m scripts.compare runs/quickstart/rope runs/quickstart/alibi --out=runs/quickstart

Writes curve.png and curve.csv to --out. Curves measured on different targets are refused: they have no common axis.
"""

import argparse
import pathlib

from evaluation import report
from spec import SpecError
from training import cli


def latest_points(workdir: pathlib.Path) -> list[report.Point]:
  """The points of the newest checkpoint swept in `workdir`."""
  path = workdir / 'extrapolation' / 'curve.jsonl'
  if not path.exists():
    raise SpecError(f'{path}: no such curve; run eval_extrapolation.py --workdir={workdir} first')
  points = report.read_curve(path)
  newest = max(p['checkpoint_step'] for p in points)
  return [p for p in points if p['checkpoint_step'] == newest]


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  args = parser.parse_args(argv)
  curves = {workdir: latest_points(workdir) for workdir in args.workdirs}
  hashes = {p['targets_hash']: workdir for workdir, points in curves.items() for p in points}
  if len(hashes) > 1:
    raise SpecError(f'{" and ".join(map(str, hashes.values()))} score different targets: {", ".join(hashes)}')
  schemes = [points[0]['scheme'] for points in curves.values()]
  points = [
    # Two runs of one scheme, of two seeds say, are told apart by their folders.
    {**p, 'scheme': f'{p["scheme"]} {workdir}'} if schemes.count(p['scheme']) > 1 else p
    for workdir, curve in curves.items()
    for p in curve
  ]
  args.out.mkdir(parents=True, exist_ok=True)
  report.plot(args.out / 'curve.png', points)
  report.write_csv(args.out / 'curve.csv', points)
  for protocol in dict.fromkeys(p['protocol'] for p in points):
    print(f'{report.table(points, protocol)}\n')
  print(args.out / 'curve.png')


if __name__ == '__main__':
  cli.guard(main)

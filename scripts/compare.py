"""Several runs' curves in one figure and one table.

  python -m scripts.compare runs/quickstart/rope runs/quickstart/alibi --out=runs/quickstart

Writes curve.png and curve.csv to --out. Curves measured on different targets are refused: they have no common axis.
Runs that differ in nothing but their seed are one line over seeds and documents.
"""

import argparse
import json
import pathlib
from typing import Any

from evaluation import report, summary
from spec import SpecError
from training import cli, provenance


def latest_points(workdir: pathlib.Path) -> list[report.Point]:
  """The points of the newest checkpoint swept in `workdir`."""
  path = workdir / 'extrapolation' / 'curve.jsonl'
  if not path.exists():
    raise SpecError(f'{path}: no such curve; run eval_extrapolation.py --workdir={workdir} first')
  points = report.read_curve(path)
  newest = max(p['checkpoint_step'] for p in points)
  return [p for p in points if p['checkpoint_step'] == newest]


def training(workdir: pathlib.Path, points: list[report.Point]) -> str:
  """What was trained, as text: the config but for the seed and what changes no parameter, and the checkpoint."""
  config = _config(workdir)
  other = ('seed', 'mesh', 'memory_gb', 'methods', 'eval', 'log')
  return json.dumps([{k: v for k, v in config.items() if k not in other}, points[0]['checkpoint_step']], sort_keys=True)


def declared(workdir: pathlib.Path) -> list[str]:
  """The comparisons that its config fixed in advance."""
  return _config(workdir).get('eval', {}).get('compare', [])


def _config(workdir: pathlib.Path) -> dict[str, Any]:
  return provenance.read(workdir) if (workdir / 'config.json').exists() else {}


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  args = parser.parse_args(argv)
  curves = {workdir: latest_points(workdir) for workdir in args.workdirs}
  hashes = {p['targets_hash']: workdir for workdir, points in curves.items() for p in points}
  if len(hashes) > 1:
    raise SpecError(f'{" and ".join(map(str, hashes.values()))} score different targets: {", ".join(hashes)}')
  alike: dict[str, set[str]] = {}  # scheme -> what its runs were, but for the seed
  seeds: dict[str, list[int]] = {}
  for workdir, points in curves.items():
    scheme = points[0]['scheme']
    alike.setdefault(scheme, set()).add(training(workdir, points))
    seeds.setdefault(scheme, []).append(points[0].get('seed', 0))
  # Two runs of one scheme that are no two seeds of one recipe are told apart by their folders.
  apart = {scheme for scheme, of in seeds.items() if len(alike[scheme]) > 1 or len(set(of)) < len(of)}
  points = [
    {**p, 'scheme': f'{p["scheme"]} {workdir}'} if p['scheme'] in apart else p
    for workdir, curve in curves.items()
    for p in curve
  ]
  args.out.mkdir(parents=True, exist_ok=True)
  rows = summary.rows(points)
  report.plot(args.out / 'curve.png', rows)
  report.write_csv(args.out / 'curve.csv', points)
  for protocol in dict.fromkeys(p['protocol'] for p in rows):
    print(f'{report.table(rows, protocol)}\n')
  print(f'{summary.text(points, list(dict.fromkeys(c for w in args.workdirs for c in declared(w))))}\n')
  print(args.out / 'curve.png')


if __name__ == '__main__':
  cli.guard(main)

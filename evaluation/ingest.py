"""Puts what another program scored into a folder that every report reads like a run of ours.

  python -m evaluation.ingest scores.npz --windows=windows.npz --name='Llama (torch)' --workdir=runs/theirs
  python -m evaluation.ingest --workdir=runs/theirs --protocol=position_wise

scores.npz: docs/bring_your_own.md. The second form makes the curve again, for other protocols of the same windows.
"""

import argparse
import pathlib
import sys

from evaluation import exchange, results, summary
from evaluation.protocols import check
from spec import SpecError


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('scores', nargs='?', type=pathlib.Path, help='what the other program wrote')
  parser.add_argument('--windows', type=pathlib.Path, help='what it scored, by evaluation.windows')
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='folder of this model and no other')
  parser.add_argument('--name', default='', help="the line's name, in place of a scheme")
  parser.add_argument('--method', default='none', help='how the model was run; others are compared with none')
  parser.add_argument('--follows_length', action='store_true', help='so run, it is told how long its input is')
  parser.add_argument('--step', type=int, default=0, help='updates that the model has had; 0 by default')
  parser.add_argument('--seed', type=int, default=0, help='models that differ in it alone become one line')
  parser.add_argument('--protocol', action='append', default=[], help='repeat for more; those of --windows')
  args = parser.parse_args(argv)
  try:
    for text in args.protocol:
      check(text)
    points = exchange.ingest(
      args.workdir,
      scores=args.scores,
      windows=args.windows,
      name=args.name,
      method=args.method,
      follows_length=args.follows_length,
      step=args.step,
      seed=args.seed,
      protocols=args.protocol,
    )
  except SpecError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  rows = summary.rows(points)
  for protocol in dict.fromkeys(p['protocol'] for p in rows):
    print(f'\n{results.table(rows, protocol)}')
  print(f'\n{args.workdir / "extrapolation" / "curve.png"}')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())

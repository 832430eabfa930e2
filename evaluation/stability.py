"""What surfaces say: extrapolation against tokens seen, and whether the order of schemes still changes at the end."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluation.points import read_curve, trained
from evaluation.runs import Run
from evaluation.sweep import Point

LAST = 5  # checkpoints that are looked at


class Line(NamedTuple):
  """Of a scheme at one length, over the checkpoints at which every seed has a number."""

  scheme: str
  length: int  # tokens
  steps: tuple[int, ...]
  tokens: tuple[int, ...]  # seen
  nll_SC: np.ndarray  # nats, by seed and checkpoint


def points(runs: Sequence[Run]) -> list[Point]:
  """Of surface.jsonl, under the runs' own names; [] of those that have none."""
  found = []
  for run in runs:
    path = run.workdir / 'extrapolation' / 'surface.jsonl'
    found += [{**p, 'scheme': run.scheme} for p in (read_curve(path) if path.exists() else [])]
  return found


def lines(found: Sequence[Point]) -> list[Line]:
  at: dict[tuple[str, int], dict[int, dict[int, Point]]] = {}
  for p in found:
    if 'nll' in p:
      of = at.setdefault((trained(p), p['length']), {})
      of.setdefault(p.get('seed', 0), {})[p['checkpoint_step']] = p
  out = []
  for (scheme, length), seeds in at.items():
    steps = tuple(sorted(set.intersection(*(set(by_step) for by_step in seeds.values()))))
    if steps:
      first = next(iter(seeds.values()))
      nll_SC = np.array([[by_step[step]['nll'] for step in steps] for by_step in seeds.values()], np.float64)
      out.append(Line(scheme, length, steps, tuple(first[step]['tokens_seen'] for step in steps), nll_SC))
  return out


def rank_stability(runs: Sequence[Run]) -> str:
  """Kendall's tau-b between the order of the schemes, by NLL, seeds averaged, at the last checkpoint and at each of the
  LAST - 1 before it: a sentence, for under a figure of several schemes."""
  from scipy import stats  # a second that a report of one scheme need not wait for

  found, schemes = points(runs), dict.fromkeys(trained(run.points[0]) for run in runs)
  told = lines(found)
  without = [scheme for scheme in schemes if scheme not in {line.scheme for line in told}]
  if without:
    return f'Rank stability: not measured, {", ".join(without)} trained without config.surface.checkpoints.'
  if len({p['targets_hash'] for p in found}) > 1:
    return 'Rank stability: not comparable, the surfaces are of different targets.'
  shared = sorted(set.intersection(*(set(line.steps) for line in told)))[-LAST:]
  if len(shared) < 2:
    return 'Rank stability: fewer than two checkpoints are shared by all schemes.'
  one, cells = found[0]['train_length'], []
  for length in sorted({line.length for line in told}):
    here = [line for line in told if line.length == length]
    if len(here) < 2:
      continue
    x_KC = np.stack([line.nll_SC.mean(0)[[line.steps.index(step) for step in shared]] for line in here])
    taus = [float(stats.kendalltau(x_KC[:, -1], x_K).statistic) for x_K in x_KC.T[:-1]]
    some = '' if len(here) == len(schemes) else f' of {len(here)} schemes'
    cells.append(
      f'{length / one:g}x {np.mean(taus):.2f} [{min(taus):.2f}]{some}'
      if np.isfinite(taus).all()
      else f'{length / one:g}x no order'
    )
  return (
    f"Rank stability: Kendall's tau of the order of {len(schemes)} schemes at the last checkpoint with those at the "
    f'{len(shared) - 1} before it, steps {shared[0]} to {shared[-1]}, mean [lowest], {found[0]["tokens"]} targets of '
    f'{found[0]["documents"]} validation documents: {", ".join(cells)}.'
  )

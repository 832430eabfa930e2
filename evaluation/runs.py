"""Runs side by side: their points under names that tell them apart, and what they were.

Runs that differ in nothing but their seed are one scheme with several seeds.
"""

import glob
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from evaluation.points import read_curve, trained
from evaluation.sweep import Point
from spec import SpecError

if TYPE_CHECKING:
  import pandas as pd

# What a run may differ in without being another recipe: nothing of it changes what a parameter becomes, but the seed.
APART = ('seed', 'mesh', 'memory_gb', 'methods', 'eval', 'surface', 'log')
_ARRAYS = ('nll_documents', 'gain_documents', 'buckets')


class Run(NamedTuple):
  """points: of the newest checkpoint swept. record: config.json, {} where there is none."""

  workdir: pathlib.Path
  points: list[Point]
  record: dict[str, Any]

  @property
  def config(self) -> dict[str, Any]:
    return self.record.get('config', {})

  @property
  def scheme(self) -> str:
    return self.points[0]['scheme']

  @property
  def seed(self) -> int:
    return self.points[0].get('seed', 0)

  @property
  def compare(self) -> list[str]:
    """The comparisons that its config fixed in advance."""
    return self.config.get('eval', {}).get('compare', [])

  @property
  def recipe(self) -> str:
    """What was trained, as text. Seeds that go on from seeds of one source are one recipe."""
    source = dict(self.record.get('source') or {})
    whence = {'config': _lasting(source.get('config', {})), **{k: source.get(k) for k in ('step', 'sha256')}}
    return json.dumps([_lasting(self.config), self.points[0]['checkpoint_step'], whence], sort_keys=True)


def _lasting(config: dict[str, Any]) -> dict[str, Any]:
  return {k: v for k, v in config.items() if k not in (*APART, 'init_from')}


def curve_of(workdir: pathlib.Path) -> pathlib.Path:
  return workdir / 'extrapolation' / 'curve.jsonl'


def read(workdir: pathlib.Path) -> Run:
  path = curve_of(workdir)
  if not path.exists():
    raise SpecError(f'{path}: no such curve; run eval_extrapolation.py --workdir={workdir} first')
  try:
    points = read_curve(path)
    newest = max(p['checkpoint_step'] for p in points)
    config = workdir / 'config.json'
    record = json.loads(config.read_text()) if config.exists() else {}
  except (ValueError, KeyError, TypeError, AttributeError) as error:
    raise SpecError(f'{workdir}: not what a sweep wrote ({type(error).__name__}: {error})') from None
  return Run(workdir, [p for p in points if p['checkpoint_step'] == newest], record)


def side_by_side(workdirs: Sequence[pathlib.Path]) -> list[Run]:
  return apart(together(workdirs))


def together(workdirs: Sequence[pathlib.Path]) -> list[Run]:
  """SpecError where they have no common axis."""
  runs = [read(workdir) for workdir in workdirs]
  hashes = {p['targets_hash']: run.workdir for run in runs for p in run.points}
  if len(hashes) > 1:
    raise SpecError(f'{" and ".join(map(str, hashes.values()))} score different targets: {", ".join(hashes)}')
  return runs


def apart(runs: Sequence[Run]) -> list[Run]:
  """Two runs of one scheme that are no two seeds of one recipe are told apart by their folders."""
  alike: dict[str, set[str]] = {}  # scheme -> its recipes
  seeds: dict[str, list[int]] = {}
  for run in runs:
    alike.setdefault(run.scheme, set()).add(run.recipe)
    seeds.setdefault(run.scheme, []).append(run.seed)
  several = {scheme for scheme, of in seeds.items() if len(alike[scheme]) > 1 or len(set(of)) < len(of)}
  return [
    run._replace(points=[{**p, 'scheme': f'{p["scheme"]} {run.workdir}'} for p in run.points])
    if run.scheme in several
    else run
    for run in runs
  ]


def compared(runs: Sequence[Run]) -> dict[str, list[str]]:
  """By scheme, the comparisons that a config of one of its runs fixed in advance."""
  out: dict[str, list[str]] = {}
  for run in runs:
    mine = out.setdefault(trained(run.points[0]), [])
    mine += [text for text in run.compare if text not in mine]
  return out


def load(patterns: str | Iterable[str]) -> 'pd.DataFrame':
  """One row per (run, scheme, seed, method, protocol, length), of the newest checkpoint of every run that was swept.

  patterns: folders of runs, or globs of them ('runs/*'). The columns are the fields of a point: nll, ppl, ci_low,
  ci_high, vs_none ..., without the arrays over documents.
  """
  import pandas as pd

  asked = [patterns] if isinstance(patterns, str) else list(patterns)
  found = {path: None for pattern in asked for path in sorted(glob.glob(pattern))}
  swept = [path for path in map(pathlib.Path, found) if curve_of(path).exists()]
  if not swept:
    raise SpecError(f'{", ".join(asked)}: no run that was swept')
  rows = [
    {'run': str(path), **{'seed': 0, **{k: v for k, v in p.items() if k not in _ARRAYS}}}
    for path in swept
    for p in read(path).points
  ]
  first = ['run', 'scheme', 'seed', 'method', 'protocol', 'length']
  return pd.DataFrame(rows)[[*first, *(k for k in dict.fromkeys(k for row in rows for k in row) if k not in first)]]

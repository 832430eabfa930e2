"""Which of a recipe's settings is compared: of every scheme the one that is best on validation text at 1x.

A ranking at one learning rate is not a ranking. What is chosen by may not be what is reported: it is the validation
documents, at the length of training, and there is no way to ask for a longer one.
"""

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from evaluation.points import read_metrics, trained
from evaluation.runs import APART, Run
from spec import SpecError, one_of

VALIDATION = 'validation/nll_1x'


class Setting(NamedTuple):
  """Runs of one recipe that differ in their seed alone. nll: by seed, nats, at the checkpoint that was swept."""

  scheme: str
  positions: str
  values: dict[str, Any]  # of the fields in which settings differ
  runs: tuple[Run, ...]
  nll: dict[int, float]
  chosen: bool
  said: str

  @property
  def mean(self) -> float:
    return sum(self.nll.values()) / len(self.nll) if self.nll else math.nan

  @property
  def text(self) -> str:
    return ', '.join(f'{field} = {value}' for field, value in self.values.items()) or 'one setting'


def choose(runs: Sequence[Run], asked: Sequence[str] = ()) -> list[Setting]:
  """Settings of all schemes, in the order of the runs. asked: groups or fields to choose among; by default 'optimizer'.

  Of one recipe's settings the lowest mean over seeds of the final validation NLL at 1x is chosen, among those with as
  many seeds as any: what is missing may have diverged. All of them where one has no number; then nothing is left out.
  """
  recipes: dict[str, dict[str, list[Run]]] = {}
  flat = {run.workdir: {k: v for k, v in _flat(run.config).items() if k.split('.')[0] not in APART} for run in runs}
  known = {name for of in flat.values() for k in of for name in (k, k.rpartition('.')[0]) if name}
  for field in asked:
    if field not in known:
      raise SpecError(one_of('--choose', field, known))
  fields = asked or ('optimizer',)
  for run in runs:
    parts: tuple[dict, dict] = {}, {}
    for k, v in flat[run.workdir].items():
      parts[any(k == field or k.startswith(f'{field}.') for field in fields)][k] = v
    rest, mine = (json.dumps(part, sort_keys=True) for part in parts)
    recipe = json.dumps([trained(run.points[0]), run.points[0]['checkpoint_step'], rest])
    recipes.setdefault(recipe, {}).setdefault(mine, []).append(run)
  tried: dict[str, dict[str, None]] = {}
  for setting in dict.fromkeys(mine for of in recipes.values() for mine in of):
    for field, value in json.loads(setting).items():
      tried.setdefault(field, {})[json.dumps(value)] = None
  differ = [field for field, values in tried.items() if len(values) > 1]
  return [s for of in recipes.values() for s in _best([_setting(of[mine], json.loads(mine), differ) for mine in of])]


def _setting(runs: Sequence[Run], values: dict[str, Any], differ: Sequence[str]) -> Setting:
  found = {run.seed: _validation(run) for run in runs}
  point = runs[0].points[0]
  return Setting(
    point['scheme'],
    point.get('positions', 'sequential'),
    {field: values.get(field) for field in differ},
    tuple(runs),
    {seed: nll for seed, nll in found.items() if nll is not None},
    True,
    '',
  )


def _best(settings: Sequence[Setting]) -> list[Setting]:
  """Of one recipe."""
  if len(settings) == 1:
    return [settings[0]._replace(said='the only one')]
  if any(len(s.nll) < len(s.runs) for s in settings):
    return [s._replace(said='none is chosen: not all runs have told it') for s in settings]
  most = max(len(s.nll) for s in settings)
  best = min((s.mean for s in settings if len(s.nll) == most and not math.isnan(s.mean)), default=None)
  if best is None:
    return [s._replace(said='none is chosen: none has a number') for s in settings]
  first = next(s for s in settings if len(s.nll) == most and s.mean == best)

  def said(s: Setting) -> str:
    if len(s.nll) < most:
      return f'{len(s.nll)} of {most} seeds: not compared'
    if s.mean == best:
      return ('chosen' if s is first else 'not chosen') + ', a tie' * (sum(t.mean == best for t in settings) > 1)
    return f'{s.mean - best:.4f} worse'

  return [s._replace(chosen=s is first, said=said(s)) for s in settings]


def _validation(run: Run) -> float | None:
  step = run.points[0]['checkpoint_step']
  told = [line[VALIDATION] for line in read_metrics(run.workdir) if line['step'] == step and VALIDATION in line]
  return told[-1] if told else None


def _flat(tree: Any, prefix: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {prefix: tree}
  return {k: v for key, value in tree.items() for k, v in _flat(value, f'{prefix}.{key}' if prefix else key).items()}

"""Which tokens one line predicts better than another, and which worse: their text, from the store of what was scored.

Two methods of a scheme, or a method of one and a method of another: the targets are the same, whoever scores them.
"""

import functools
import json
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data import Data
from evaluation.plan import Plan, load
from evaluation.points import trained
from evaluation.runs import Run
from evaluation.store import Key, Store, store_folders
from spec import SpecError

SHOWN = 8  # tokens at each end
BEFORE, AFTER = 60, 20  # tokens of text around one
SPREAD = 0.1  # nats; less is no change


class Missing(Exception):
  """Why it cannot be shown, in one line."""


class Line(NamedTuple):
  """A scheme read by a method: the runs that differ in nothing but their seed."""

  runs: tuple[Run, ...]
  method: str

  @property
  def name(self) -> str:
    return f'{trained(self.runs[0].points[0])} {self.method}'


class Pair(NamedTuple):
  """What is compared with what at a length, tokens."""

  line: Line
  reference: Line
  length: int

  @property
  def title(self) -> str:
    seeds = list(dict.fromkeys(', '.join(str(run.seed) for run in line.runs) for line in self[:2]))
    multiple = self.length / self.line.runs[0].points[0]['train_length']
    several = any(len(line.runs) > 1 for line in self[:2])
    of = f'means of seeds {" and of ".join(seeds)}' if several else f'seed {" and ".join(seeds)}'
    return f'{self.line.name} - {self.reference.name} at {multiple:g}x, {of}'


def lines(runs: Sequence[Run]) -> list[Line]:
  """All that have fixed targets, in the order of the runs."""
  of: dict[tuple[str, str], dict[int, Run]] = {}
  for i, run in enumerate(runs):
    for p in run.points:
      if p['protocol'] == 'fixed_targets' and 'nll_documents' in p:
        of.setdefault((trained(p), p['method']), {})[i] = run
  return [Line(tuple(found.values()), method) for (_, method), found in of.items()]


def pairs(text: str, runs: Sequence[Run]) -> list[Pair]:
  """'yarn - none at 4x', of every scheme that has both, or 'alibi none - rope yarn at 4x'. SpecError, in one line.

  A scheme is called what the report calls it, or by its string where one line alone answers to that; so is a method.
  """
  parts = re.fullmatch(r'(\S.*) - (\S.*) at (\d+(?:\.\d+)?)x', text)
  if not parts:
    allowed = "a comparison such as 'yarn - none at 4x' or 'alibi none - rope yarn at 4x'"
    raise SpecError(f'tokens = {text!r}: {allowed} is allowed')
  there = lines(runs)
  length = round(float(parts[3]) * runs[0].points[0]['train_length'])
  methods = {line.method for line in there}
  if {parts[1], parts[2]} <= methods:
    by = {(line.name.removesuffix(line.method), line.method): line for line in there}
    found = [
      Pair(line, by[of, parts[2]], length) for (of, m), line in by.items() if m == parts[1] and (of, parts[2]) in by
    ]
    if found:
      return found
  return [Pair(_line(text, parts[1], there), _line(text, parts[2], there), length)]


def _line(text: str, name: str, there: Sequence[Line]) -> Line:
  def names(line: Line) -> tuple[str, str, str]:
    point = line.runs[0].points[0]
    return line.name, f'{" ".join(point.get("posenc", [point["scheme"]]))} {line.method}', line.method

  for i in range(3):
    found = [line for line in there if names(line)[i] == name]
    if len(found) == 1:
      return found[0]
    if found:
      break
  known = ', '.join(repr(line.name) for line in found or there)
  raise SpecError(f'tokens = {text!r}: {name!r} is {"several" if found else "none"} of the lines: {known} are allowed')


class Token(NamedTuple):
  document: str
  offset: int
  nll: tuple[float, float]  # by the line, by what it is compared with; means over their seeds
  before: str
  text: str
  after: str


class Changes(NamedTuple):
  """better, worse: those whose NLL differs most, in that order; by how many, of `targets`, at least SPREAD."""

  targets: int
  n_better: int
  n_worse: int
  better: list[Token]
  worse: list[Token]


def changes(pair: Pair) -> Changes:
  """Of the fixed targets. Missing where a run's store or corpus does not tell."""
  data, plan = _plan(pair.line.runs[0])
  x_NT, y_NT = (_mean(line, pair.length) for line in pair[:2])
  with np.errstate(invalid='ignore'):
    change_N = np.nan_to_num((x_NT - y_NT).ravel(), nan=0.0, posinf=np.inf, neginf=-np.inf)  # both diverged: no change
  order = np.argsort(change_N, kind='stable')

  def token(i: int) -> Token:
    span, t = divmod(i, plan.targets)
    d, first = plan.spans[span]
    document, at = plan.documents[d], first + t
    texts = [document.tokens[max(at - BEFORE, 0) : at], document.tokens[at : at + 1], document.tokens[at + 1 :][:AFTER]]
    before, text, after = (data.tokenizer.decode(ids.tolist()).decode(errors='replace') for ids in texts)
    return Token(document.name, at, (float(x_NT[span, t]), float(y_NT[span, t])), before, text, after)

  return Changes(
    targets=len(order),
    n_better=int((change_N <= -SPREAD).sum()),
    n_worse=int((change_N >= SPREAD).sum()),
    better=[token(i) for i in order[:SHOWN].tolist() if change_N[i] < 0],
    worse=[token(i) for i in order[::-1][:SHOWN].tolist() if change_N[i] > 0],
  )


def _mean(line: Line, length: int) -> np.ndarray:
  """float64[spans, T], over the seeds."""
  return np.stack([_rows(run, _plan(run)[1], line.method, length) for run in line.runs]).mean(0, np.float64)


def _rows(run: Run, plan: Plan, method: str, length: int) -> np.ndarray:
  """float32[spans, T], of the shelf whose numbers are the curve's."""
  found = (p for p in run.points if (p['method'], p['protocol'], p['length']) == (method, 'fixed_targets', length))
  point = next(found, None)
  if point is None or 'nll_documents' not in point:
    raise Missing(f'{method} has no number at {length} tokens')
  folders, warnings = store_folders(run.workdir / 'extrapolation'), []
  windows = plan.select('fixed_targets', length).parts

  def mine(key: Key) -> bool:
    of_point = ' '.join(point['posenc']), point['positions_hash'], length, point['bos']
    corpus = run.record['data'].get('tokens_sha256', key.corpus)
    return (key.scheme, key.positions, key.length, key.bos, key.corpus) == (*of_point, corpus)

  stores = [Store(folder, warnings.append, writes=False) for folder in folders]
  for shelves, key in ((store, key) for store in stores for key in filter(mine, store.keys())):
    shelf = shelves.open(key)
    places = [plan.place(part.window) for part in windows]
    if all(shelf.has(place, plan.targets) for place in places):
      x_NT = np.stack([shelf.row(place, plan.targets) for place in places])
      nll_D = x_NT.astype(np.float64).reshape(len(plan.documents), -1).mean(1)
      # Another checkpoint's shelf may lie in the same store.
      if np.allclose(nll_D, point['nll_documents'], rtol=1e-9, atol=0, equal_nan=True):
        return x_NT
  raise Missing(f'{" or ".join(map(str, folders))} does not hold what {method} scored at {length} tokens')


def _plan(run: Run) -> tuple[Data, Plan]:
  if not run.record:
    raise Missing(f'{run.workdir} has no config.json, which names the corpus')
  config, point = run.config, run.points[0]
  try:
    found = _load(json.dumps({k: config[k] for k in ('data', 'eval', 'train_len', 'max_multiple')}))
  except (SpecError, OSError, KeyError, TypeError) as error:
    raise Missing(f'the corpus of {run.workdir} is not to be had: {error}') from None
  if found[1].targets_hash != point['targets_hash']:
    raise Missing(f'the corpus of {run.workdir} is no longer the one that was scored')
  return found


@functools.cache
def _load(text: str) -> tuple[Data, Plan]:
  """Runs that are compared share their corpus: it is read once."""
  return load(json.loads(text))

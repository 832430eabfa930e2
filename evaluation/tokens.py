"""Which tokens a method makes better and which worse: the text around them, from the store of what was scored."""

import functools
import json
from typing import NamedTuple

import numpy as np

from data import Data
from evaluation.plan import Plan, load
from evaluation.runs import Run
from evaluation.store import Key, Store
from spec import SpecError

SHOWN = 8  # tokens at each end
BEFORE, AFTER = 60, 20  # tokens of text around one
SPREAD = 0.1  # nats; less is no change


class Missing(Exception):
  """Why it cannot be shown, in one line."""


class Token(NamedTuple):
  document: str
  offset: int
  nll: tuple[float, float]  # by the method, by what it is compared with
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


def changes(run: Run, method: str, reference: str, length: int) -> Changes:
  """Of the fixed targets at one length. Missing where the run's store or corpus does not tell."""
  data, plan = _plan(run)
  x_NT, y_NT = (_rows(run, plan, m, length) for m in (method, reference))
  change_N = (x_NT.astype(np.float64) - y_NT).ravel()
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


def _rows(run: Run, plan: Plan, method: str, length: int) -> np.ndarray:
  """float32[spans, T], of the shelf whose numbers are the curve's."""
  found = (p for p in run.points if (p['method'], p['protocol'], p['length']) == (method, 'fixed_targets', length))
  point = next(found, None)
  if point is None or 'nll_documents' not in point:
    raise Missing(f'{method} has no number at {length} tokens')
  store, warnings = run.workdir / 'extrapolation' / 'store', []
  shelves = Store(store, warnings.append, writes=False)
  windows = plan.select('fixed_targets', length).parts

  def mine(key: Key) -> bool:
    of_point = ' '.join(point['posenc']), point['positions_hash'], length, point['bos']
    corpus = run.record['data'].get('tokens_sha256', key.corpus)
    return (key.scheme, key.positions, key.length, key.bos, key.corpus) == (*of_point, corpus)

  for key in filter(mine, shelves.keys()):
    shelf = shelves.open(key)
    places = [plan.place(part.window) for part in windows]
    if all(shelf.has(place, plan.targets) for place in places):
      x_NT = np.stack([shelf.row(place, plan.targets) for place in places])
      nll_D = x_NT.astype(np.float64).reshape(len(plan.documents), -1).mean(1)
      # Another checkpoint's shelf may lie in the same store.
      if np.allclose(nll_D, point['nll_documents'], rtol=1e-9, atol=0, equal_nan=True):
        return x_NT
  raise Missing(f'{store} does not hold what {method} scored at {length} tokens')


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

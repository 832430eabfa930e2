"""A sweep: every method at every length, points with their intervals and everything needed to repeat them."""

import dataclasses
import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

import posenc
from data import Floor
from evaluation.plan import Plan
from evaluation.score import Scorer
from evaluation.stats import t_interval
from models.memory import OutOfMemory

Point = dict[str, Any]


@dataclasses.dataclass
class _Outcome:
  nll_D: np.ndarray  # float64, mean NLL of each document, nats
  tokens: int
  bytes: int


def positions_hash(pos: Any) -> str:
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(pos):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()[:16]


def cost(plan: Plan, lengths: Sequence[int], methods: Sequence[str]) -> int:
  """Tokens of a whole sweep, before what methods share is scored once; for the progress bar."""
  windows = (plan.windows(p, n) for p in plan.cfg.protocols for n in lengths)
  return len(methods) * sum(len(w) * w[0].length for w in windows)


def sweep(
  scorer: Scorer,
  plan: Plan,
  schemes: Sequence[posenc.PositionScheme],
  methods: Sequence[str],
  lengths: Sequence[int],
  *,
  train_len: int,
  rule: posenc.Rule,
  bytes_per_token_V: np.ndarray,
  facts: dict[str, Any],
  progress: Any,
  floor: Floor | None = None,
) -> Iterator[list[Point]]:
  """The points of one length after the other, by protocol and method. `facts` go into each; `progress` is a tqdm bar.

  'none' comes first: methods are compared with it, document by document. Two methods that make the same arrays at a
  length (yarn and yarn(factor=8) at 8x, everything that follows the length at 1x) are scored once. With a `floor` each
  point has the mean of it over its own targets, nats.
  """
  # Lengths are the outer loop: a program is compiled, serves every method and protocol, and is not needed again. 1x is
  # first, because shorter lengths are compared with it too.
  follows = {m: posenc.follows_length(m, schemes, train_len, rule=rule) for m in methods}
  first: dict[str, np.ndarray] = {}
  for length in sorted(lengths, key=lambda n: (n != train_len, n)):
    progress.set_postfix_str(f'{length} tokens')
    key, made, refused = {}, {}, {}
    for method in methods:
      try:
        pos = posenc.positions(method, schemes, train_len, length, rule=rule)
        scorer.program(length, pos)
      except posenc.Unsupported as unsupported:
        refused[method] = 'unsupported', str(unsupported)
      except OutOfMemory as too_large:
        refused[method] = 'out of memory', str(too_large)
      else:
        key[method] = positions_hash(pos)
        made[key[method]] = pos
    windows = {protocol: plan.windows(protocol, length) for protocol in plan.cfg.protocols}
    progress.update((len(methods) - len(made)) * sum(len(w) * length for w in windows.values()))
    scored = _score(scorer, plan, windows, made, bytes_per_token_V, progress)
    points: list[Point] = []
    for protocol in plan.cfg.protocols:
      low, high = plan.contexts(protocol, length)
      known = {} if floor is None else {'floor': float(floor(*plan.seen(windows[protocol])).mean())}
      none: np.ndarray | None = None
      for method in methods:
        outcome, reason = refused.get(method, ('ok', None))
        point = {
          'scheme': ' '.join(facts['posenc']),
          'positions': rule.text,
          'method': method,
          'follows_length': follows[method],
          'train_length': train_len,
          'length': length,
          'protocol': protocol,
          'outcome': outcome,
          'reason': reason,
          'T': windows[protocol][0].scored,
          'context_min': low,
          'context_max': high,
          'targets_hash': plan.targets_hash,
          'positions_hash': key.get(method),
          **facts,
          **known,
        }
        points.append(point)
        if method in refused:
          continue
        found = scored[key[method], protocol]
        point |= _numbers(found)
        if method == 'none':
          none = found.nll_D
        if none is not None:
          point |= _difference('vs_none', found.nll_D, none)
        if protocol == 'fixed_targets':
          # The same targets at every length, so a method's rise over its own 1x pairs by document too.
          if length == train_len:
            first[method] = found.nll_D
          if method in first:
            point |= _difference('vs_1x', found.nll_D, first[method])
    measured = (p for p in points[: len(methods)] if 'ppl' in p)
    progress.write(f'{length} tokens: ' + ', '.join(f'{p["method"]} {p["ppl"]:.4g}' for p in measured))
    yield points


def _score(scorer, plan, windows, made, bytes_per_token_V, progress) -> dict[tuple[str, str], _Outcome]:
  """(key, protocol) -> what the windows of a protocol give under the positions `made[key]`.

  In one call: protocols share batches, and methods what was cut for them.
  """
  if not made:
    return {}
  nll = scorer(plan, [w for ws in windows.values() for w in ws], list(made.values()), progress.update)
  outcomes, end = {}, 0
  for protocol, ws in windows.items():
    begin, end = end, end + len(ws)
    document = np.array([w.document for w in ws])
    count = int(document.max()) + 1
    tokens = np.bincount(document, [w.scored for w in ws], count)
    _, targets = plan.tokens([w._replace(start=w.start + w.length - w.scored, length=w.scored) for w in ws])
    n_bytes = int(bytes_per_token_V[targets].sum())
    for key, rows in zip(made, nll):
      sums = np.bincount(document, np.stack(rows[begin:end]).astype(np.float64).sum(1), count)
      outcomes[key, protocol] = _Outcome(sums / tokens, int(tokens.sum()), n_bytes)
  return outcomes


def _numbers(outcome: _Outcome) -> Point:
  # Every document has equally many targets, so the mean over documents is the mean over tokens.
  mean, low, high = t_interval(outcome.nll_D)
  if low is not None:
    interval = 't over documents, this checkpoint'
  else:
    interval = 'none: fewer than 12 documents' if math.isfinite(mean) else 'none: diverged'
  return {
    'outcome': 'ok' if math.isfinite(exp(mean)) else 'diverged',
    'nll': mean,
    'ppl': exp(mean),
    'bits_per_byte': mean * outcome.tokens / (outcome.bytes * math.log(2)),
    'ci_low': None if low is None else exp(low),
    'ci_high': None if high is None else exp(high),
    'interval': interval,
    'tokens': outcome.tokens,
    'documents': len(outcome.nll_D),
    'nll_documents': [float(x) for x in outcome.nll_D],
  }


def _difference(name: str, nll_D: np.ndarray, reference_D: np.ndarray) -> Point:
  """A paired difference in nats: positive is worse. NaN where both have diverged."""
  with np.errstate(invalid='ignore'):
    mean, low, high = t_interval(nll_D - reference_D)
  return {name: mean, f'{name}_low': low, f'{name}_high': high}


def exp(x: float) -> float:
  """exp that ends at inf: a model that blew up at 32x loses no run."""
  try:
    return math.exp(x)
  except OverflowError:
    return math.inf

"""A sweep: every method at every length, points with their intervals and everything needed to repeat them."""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import posenc
from data import Floor
from evaluation.nulls import smooth
from evaluation.plan import Plan
from evaluation.protocols import STREAM, Numbers, Selection, power, reduce
from evaluation.score import Scorer
from evaluation.stats import MIN_PAIRS, t_interval
from evaluation.survey import Stage, Survey, fill

Point = dict[str, Any]


def sweep(
  survey: Survey,
  make_scorer: Callable[[], Scorer],
  *,
  bytes_per_token_V: np.ndarray,
  facts: dict[str, Any],
  progress: Any,
  floor: Floor | None = None,
) -> Iterator[list[Point]]:
  """The points of one length after the other, by protocol and method. `facts` go into each; `progress` is a tqdm bar.

  'none' comes first: methods are compared with it, document by document. With a `floor` each point has the mean of it
  over its own targets, nats. `make_scorer` is called when there is something to score. Points of controls have their
  `gain` and are made only where there is one; what a method was refused for is told by those of protocols. Those of
  `key_tokens` come last, and have how many targets are `mirrored` and `keys_hash`, of which ones they are; at the
  lengths where they were `judged_at` methods are not compared.
  """
  # Lengths are the outer loop: a program is compiled, serves every method and protocol, and is not needed again.
  plan, methods, train_len = survey.plan, survey.methods, survey.train_len
  follows = {method: survey.follows(method) for method in methods}
  first: dict[str, np.ndarray] = {}
  # What a judge chooses from is scored at two lengths: it waits until all of them are.
  waiting = [p for p in plan.cfg.protocols if p.split('(')[0] == 'key_tokens']
  rounds = [[p for p in plan.cfg.asked if p not in waiting], *([waiting] if waiting else [])]
  stages: dict[int, Stage] = {}
  for asked, length in itertools.product(rounds, survey.order):
    progress.set_postfix_str(f'{length} tokens')
    stage = stages.get(length) or survey.stage(length)
    if length not in stages:
      fill(stage, make_scorer, progress)
    if waiting:
      stages[length] = stage
    points: list[Point] = []
    for protocol in asked:
      control = protocol in plan.cfg.controls
      known, none, scored = dict.fromkeys(('T', 'context_min', 'context_max')), None, {}
      if protocol in stage.selections:
        known = _of_the_targets(plan, stage.selections[protocol], train_len, bytes_per_token_V, floor)
      for method in methods:
        outcome, reason = stage.refused.get(method, ('ok', None))
        if protocol in stage.nothing:
          outcome, reason = 'unsupported', stage.nothing[protocol]
        if control and reason:
          continue
        point = {
          'scheme': ' '.join(facts['posenc']),
          'positions': survey.rule.text,
          'method': method,
          'follows_length': follows[method],
          'train_length': train_len,
          'length': length,
          'protocol': protocol,
          'outcome': outcome,
          'reason': reason,
          'targets_hash': plan.targets_hash,
          'positions_hash': stage.keys.get(method, {}).get(length),
          **facts,
          **known,
        }
        points.append(point)
        if reason:
          continue
        key, selection = tuple(sorted(stage.keys[method].items())), stage.selections[protocol]
        if key not in scored:
          true = [selection._replace(parts=list(selection.true))] if control else []
          try:
            judge = survey.judge(selection, stages)
            scored[key] = [stage.numbers(s, method, bytes_per_token_V, judge) for s in (selection, *true)]
          except posenc.Unsupported as told:
            point |= {'outcome': 'unsupported', 'reason': str(told)}
            continue
        found, *true = scored[key]
        nll_D = _documents(found)
        point |= _numbers(found, nll_D, selection.base)
        if true:
          gain_D = _less(nll_D, _documents(true[0]))
          point |= {**_interval('gain', gain_D), 'gain_documents': gain_D.tolist()}
          continue
        if method == 'none':
          none = nll_D
        if none is not None and not (selection.judge and length in selection.judge.lengths):
          point |= _interval('vs_none', _less(nll_D, none))
        if protocol == 'fixed_targets':
          # The same targets at every length, so a method's rise over its own 1x pairs by document too.
          if length == train_len:
            first[method] = nll_D
          if method in first:
            point |= _interval('vs_1x', _less(nll_D, first[method]))
    if asked is not waiting:
      measured = (p for p in points[: len(methods)] if 'ppl' in p)
      progress.write(f'{length} tokens: ' + ', '.join(f'{p["method"]} {p["ppl"]:.4g}' for p in measured))
    if points:
      yield points


def _of_the_targets(
  plan: Plan, selection: Selection, train_len: int, bytes_V: np.ndarray, floor: Floor | None
) -> dict[str, Any]:
  """What a point says whatever the model: its contexts, the floor, and what the protocol makes of a null.

  null: NLL under this protocol of a model that uses at most train_len tokens. As much of any curve's fall as there is
  of this one's is the protocol's.
  """
  parts = selection.parts
  low, high = min(p.first for p in parts), max(p.last for p in parts) - 1
  known: dict[str, Any] = {'T': parts[-1].last - parts[-1].first, 'context_min': low, 'context_max': high}
  if selection.judge:  # a null chooses other targets, or none
    return {**known, 'judged_at': list(selection.judge.lengths)}
  known['null'] = reduce(plan, selection, smooth(train_len).row, bytes_V).nll
  if floor is not None and all(p.window.document != STREAM and not p.window.far for p in parts):

    def row(window):
      return floor(*plan.seen(window))

    known['floor'] = reduce(plan, selection, row, bytes_V).nll
  return known


def _documents(found: Numbers) -> np.ndarray:
  """Per document, nats: its mean, weighted as the protocol weighs it. The plain mean of them is the number itself."""
  if np.ptp(found.weight_D) < 1e-12:
    return found.nll_D
  with np.errstate(invalid='ignore'):
    return found.nll + len(found.nll_D) * found.weight_D * (found.nll_D - found.nll)


def _numbers(found: Numbers, nll_D: np.ndarray, base: float) -> Point:
  mean, low, high = t_interval(nll_D)
  if low is not None:
    interval = 't over documents, this checkpoint'
  else:
    interval = 'none: fewer than 12 documents' if math.isfinite(mean) else 'none: diverged'
  return {
    'outcome': 'ok' if math.isfinite(found.ppl) else 'diverged',
    'nll': found.nll,
    'ppl': found.ppl,
    'bits_per_byte': found.nll * found.tokens / (found.bytes * math.log(2)),
    'ci_low': None if low is None else power(base, low),
    'ci_high': None if high is None else power(base, high),
    'interval': interval,
    'windows': found.windows,
    'tokens': found.tokens,
    'documents': found.documents,
    'nll_documents': nll_D.tolist(),
    **({'buckets': [list(bucket) for bucket in found.buckets]} if found.buckets else {}),
    **({'mirrored': found.chosen.mirrored, 'keys_hash': found.chosen.digest} if found.chosen else {}),
  }


def _less(nll_D: np.ndarray, reference_D: np.ndarray) -> np.ndarray:
  """A paired difference in nats: positive is worse. NaN where both have diverged."""
  with np.errstate(invalid='ignore'):
    return nll_D - reference_D


def _interval(name: str, x_D: np.ndarray) -> Point:
  mean, low, high = t_interval(x_D, least=MIN_PAIRS)
  return {name: mean, f'{name}_low': low, f'{name}_high': high}


def exp(x: float) -> float:
  return power(math.e, x)

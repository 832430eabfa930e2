"""A search for LongRoPE's factors: what a candidate is worth to a model, and what the best one is worth held out.

Fitness is the mean NLL of fixed targets at one length, of search documents, which are no test documents. Positions are
arrays, so a candidate is a forward pass of a program that is compiled already. Most candidates never see all windows:
they race.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import posenc
from data import TokenDocument
from evaluation.diagnosis import select
from evaluation.factors import CMAES, Candidate, Optimizer, Point
from evaluation.plan import EvalConfig, Plan
from evaluation.protocols import Window, choose_targets
from evaluation.stats import MIN_PAIRS, Interval, t_interval
from evaluation.store import Rows
from evaluation.survey import Stage, fill
from posenc import Positions, PositionScheme, interchange, rotations
from spec import SpecError, parse_one

Made = Callable[[str, int], tuple[str, tuple[Positions, ...]]]  # (method, length) -> hash, positions
OpenRows = Callable[[str, int], Rows]  # (hash, length)


# What is asked.


@dataclasses.dataclass(frozen=True)
class SearchConfig(EvalConfig):
  """Of a plan of search windows: the last half of a trained length is scored, not an eighth of it.

  Four times the targets at no cost but a wider range of contexts: a search takes the best of a thousand numbers, and
  the fewer targets they are made of the more of that is luck.
  """

  @staticmethod
  def targets(train_len: int) -> int:
    return max(train_len // 2, 1)


def search_plan(
  validation: Sequence[TokenDocument],
  train: Sequence[TokenDocument],
  length: int,
  train_len: int,
  *,
  docs: int,
  spans: int,
  stride: int,
  **facts: Any,
) -> Plan:
  """Windows of `length` in `docs` documents that are not held out, of which validation documents come first.

  docs: 0 is all validation documents that are long enough. facts: bos, bos_id, corpus_sha256 of a plan.
  """
  unit = min(train_len, length)  # of a search within the trained length
  multiple = math.ceil(length / unit)
  cfg = SearchConfig((length / unit,), ('fixed_targets',), (), spans=spans)
  least = cfg.min_test_tokens(unit, multiple) + spans * (stride - 1)
  known, others = ([d for d in part if len(d.tokens) >= least] for part in (validation, train))
  found = known[: docs or len(known)]
  if docs > len(found):
    found += others[: docs - len(found)]
  if not found or len(found) < docs:
    raise SpecError(
      f'docs = {docs}: {len(known)} validation and {len(others)} training documents have the {least} tokens of '
      f'{spans} spans at {length}; a smaller number, fewer spans or a shorter target_len are allowed'
    )
  return Plan(cfg, found, train_len=unit, max_multiple=multiple, stride=stride, **facts)


class Counted(NamedTuple):
  """Windows in the order in which a race scores them, and which of their targets count, bool[W, T]."""

  windows: list[Window]
  counts_WT: np.ndarray


def all_targets(plan: Plan, length: int) -> Counted:
  """First one span of every document, then the next of each: whoever looks at few windows looks at many texts."""
  parts = plan.select('fixed_targets', length).parts
  spans = plan.cfg.spans
  order = sorted(range(len(parts)), key=lambda i: (i % spans, i // spans))
  windows = [parts[i].window for i in order]
  return Counted(windows, np.ones((len(windows), plan.targets), bool))


def key_targets(
  plan: Plan, length: int, protocol: str, made: Made, open_rows: OpenRows, make_scorer: Callable[[], Any], bar: Any
) -> Counted:
  """Of these the key tokens, of which LongRoPE2 (2502.20082) makes its fitness; chosen as the protocol says.

  `make_scorer` is called where the judge has not been scored. Unsupported where it finds none.
  """
  selection = plan.select(protocol, length)
  judge = selection.judge
  if judge is None:
    raise SpecError(f'fitness = {protocol!r}: all, or key_tokens with its arguments, is allowed')
  rows = {}
  for parts in (judge.short, judge.long):
    n = parts[0].window.length
    scored = _stage(plan, n, [part.window for part in parts], [judge.method], made, open_rows)
    fill(scored, make_scorer, bar)
    _said(scored)
    rows[n] = scored.shelves[n, scored.keys[judge.method][n]]
  chosen = choose_targets(judge, lambda window: rows[window.length].row(plan.place(window), window.scored))
  keys = {part.window: keys for part, keys in zip(selection.parts, chosen.keys, strict=True)}
  windows = [w for w in all_targets(plan, length).windows if keys[w].any()]
  return Counted(windows, np.array([keys[w] for w in windows]))


# What a candidate is worth.


class Score(NamedTuple):
  """nll: nats, mean over the targets that count; of one that was dropped an estimate. windows: that it was given."""

  nll: float
  windows: int
  whole: bool


class Races:
  """The worth of candidates, of all windows for those that matter and of few for the rest.

  All score the same first quarter of the windows, then half, then all. After each part those are dropped that are worse
  than what matters to the optimiser, by more than one standard error of their difference from the best so far, paired
  by window. What they are told is that difference, added to the best one's mean: an estimate free of how hard the first
  windows are. Only who has run to the end can win.

  What is scored is put away batch by batch, and asked for before anything is: a search that goes on repeats nothing,
  and two methods that make the same arrays are scored once. scored: windows that were not there.
  """

  def __init__(
    self,
    plan: Plan,
    counted: Counted,
    made: Made,
    open_rows: OpenRows,
    make_scorer: Callable[[], Any],
    stages: Sequence[int] | None = None,
  ):
    self.plan, self.windows = plan, counted.windows
    self.length = counted.windows[0].length
    self.stages = list(stages or race_stages(len(self.windows)))
    self._counts_WT, self._n_W = counted.counts_WT, counted.counts_WT.sum(1).astype(np.float64)
    self._made, self._open_rows, self._make_scorer = made, open_rows, make_scorer
    self._rows: dict[str, Rows] = {}
    self._best: tuple[float, np.ndarray] | None = None  # of those with all windows: its mean, its sums by window
    self.scored = 0

  def __call__(self, methods: Sequence[str], bar: float = math.inf, share: float = 1.0) -> list[Score]:
    """In their order. bar, share: what matters, see `Optimizer`."""
    made = [self._made(method, self.length) for method in methods]
    positions = dict(made)
    left, told = list(positions), dict[str, Score]()
    for end in self.stages:
      self._fill({key: positions[key] for key in left}, end)
      sum_KW = {key: self._sums(key, end) for key in left}
      if end == len(self.windows):
        for key, x_W in sum_KW.items():
          told[key] = Score(_mean(x_W, self._n_W), end, True)
          if self._best is None or told[key].nll < self._best[0]:
            self._best = told[key].nll, x_W
        break
      seen = {key: self._estimate(x_W, sum_KW) for key, x_W in sum_KW.items()}
      told |= {key: Score(mean, end, False) for key, (mean, _) in seen.items()}
      ranked = sorted(score.nll for score in told.values())
      matters = min(bar, math.inf if share >= 1 else ranked[math.ceil(share * len(ranked)) - 1])
      left = [key for key in left if seen[key][1] <= matters]
    return [told[key] for key, _ in made]

  def documents(self, method: str) -> np.ndarray:
    """float64[D], mean NLL by search document of a method that has all windows; of those with targets that count."""
    x_W = self._sums(self._made(method, self.length)[0], len(self.windows))
    document_W = np.array([w.document for w in self.windows])
    return np.array([_mean(x_W[document_W == d], self._n_W[document_W == d]) for d in np.unique(document_W)])

  def _estimate(self, x_W: np.ndarray, sum_KW: Mapping[str, np.ndarray]) -> tuple[float, float]:
    """(mean, lower bound) over all windows of one that has seen the first few."""
    k, n_W = len(x_W), self._n_W[: len(x_W)]
    if self._best is not None:
      base, best_W = self._best[0], self._best[1][:k]
    else:
      best_W = min(sum_KW.values(), key=lambda y_W: _mean(y_W, n_W))
      base = _mean(best_W, n_W)
    with np.errstate(invalid='ignore'):
      less = float((x_W - best_W).sum() / n_W.sum())
      each_W = x_W - best_W - less * n_W
      error = math.sqrt((each_W**2).sum() * k / max(k - 1, 1)) / n_W.sum()
    if not math.isfinite(less):
      return math.inf, math.inf
    return base + less, base + less - error

  def _sums(self, key: str, end: int) -> np.ndarray:
    """By window, float64, of the targets that count; inf where one is not finite."""
    rows, windows = self._open(key), self.windows[:end]
    x_WT = np.array([rows.row(self.plan.place(w), w.scored) for w in windows], np.float64)
    x_W = np.where(self._counts_WT[:end], x_WT, 0).sum(1)
    return np.where(np.isfinite(x_W), x_W, np.inf)

  def _fill(self, positions: Mapping[str, tuple[Positions, ...]], end: int) -> None:
    """Those that miss the same windows side by side."""
    groups: dict[tuple[Window, ...], list[str]] = {}
    for key in positions:
      rows = self._open(key)
      missing = tuple(w for w in self.windows[:end] if not rows.has(self.plan.place(w), w.scored))
      if missing:
        groups.setdefault(missing, []).append(key)
    for windows, keys in groups.items():
      for i, part, rows in self._make_scorer().runs(self.plan, windows, [positions[key] for key in keys]):
        self._open(keys[i]).put([self.plan.place(w) for w in part], rows)
        self.scored += len(part)

  def _open(self, key: str) -> Rows:
    if key not in self._rows:
      self._rows[key] = self._open_rows(key, self.length)
    return self._rows[key]


def race_stages(windows: int) -> list[int]:
  """A quarter, half, all; no part of fewer than three windows, whose scatter would be unknown."""
  return sorted({n for n in (windows // 4, windows // 2) if n >= 3} | {windows})


def _mean(x_W: np.ndarray, n_W: np.ndarray) -> float:
  return float(x_W.sum() / n_W.sum())


class Told(NamedTuple):
  candidate: Candidate
  method: str
  score: Score


def spend(
  optimizer: Optimizer,
  races: Races,
  name: Callable[[Candidate], str],
  evaluations: float,
  stop: Callable[[], bool] = lambda: False,
) -> Iterator[list[Told]]:
  """Batch by batch what the optimiser asked for and was told, until so many were, or `stop`."""
  done = 0
  while done < evaluations and not stop():
    asked = optimizer.ask()
    batch = asked[: int(min(evaluations - done, len(asked)))]
    if not batch:
      return
    scores = races([name(candidate) for candidate in batch], optimizer.bar, optimizer.share)
    told = [Told(c, name(c), score) for c, score in zip(batch, scores)]
    done += len(told)
    yield told
    if len(batch) == len(asked):
      optimizer.tell([(candidate, score.nll) for candidate, _, score in told])


def best(told: Sequence[Told], before: Told | None = None) -> Told | None:
  """The lowest of those with all windows; the oldest of equals."""
  whole = [*([before] if before else []), *(one for one in told if one.score.whole)]
  return min(whole, key=lambda one: one.score.nll) if whole else None


# Factors, and the strings that have them.


def scheme_of(schemes: Sequence[PositionScheme]) -> PositionScheme:
  """The one whose frequencies are searched: of a pattern, the same in every slot that has some."""
  turning = [scheme for scheme in schemes if scheme.rot and scheme.inv_freq_P.any()]
  if not turning or any(not np.array_equal(s.inv_freq_P, turning[0].inv_freq_P) for s in turning):
    names = ', '.join(scheme.name for scheme in schemes)
    raise SpecError(
      f'posenc = {names}: schemes with one and the same set of frequencies are allowed, others without any'
    )
  return turning[0]


def factors_of(method: str, scheme: PositionScheme, train_len: int, length: int) -> Candidate:
  """lambda_p and n-hat that a method of frequencies amounts to at this length; its temperature is no part of it."""
  call = parse_one(method)
  posenc.check_method(method)
  try:
    writes = posenc.METHODS[call.name](scheme.plain(length), scheme, train_len, length, **call.kwargs)
  except posenc.Unsupported as reason:
    raise SpecError(f'init = {method!r}: {reason}') from None
  others = writes.keys() - {'inv_freq_P', 'onset', 'logit_scale_T', 'key_scale_T'}
  if others:
    raise SpecError(
      f'init = {method!r}: a method of frequencies is allowed, this one writes {", ".join(sorted(others))}'
    )
  theta_P = scheme.inv_freq_P
  now_P = writes.get('inv_freq_P', theta_P)
  ratio_P = np.divide(theta_P, now_P, out=np.ones(len(theta_P)), where=theta_P > 0)
  # A rounding error below its neighbour, or a pair that stands still, is no reason to refuse.
  factors_P = np.where(theta_P > 0, np.round(ratio_P, 12), np.maximum.accumulate(np.round(ratio_P, 12)))
  return Candidate(tuple(factors_P.tolist()), int(writes.get('onset', 0)))


def method_of(
  candidate: Candidate, attention: float, *, short: Sequence[float] | None = None, long: Sequence[float] | None = None
) -> str:
  """`longrope(...)`. short: another list beside the candidate's. long: that other list, and the candidate is short."""
  lists = {'short': short, 'long': candidate.factors} if long is None else {'short': candidate.factors, 'long': long}
  arguments = [f'{name}={tuple(x)!r}' for name, x in lists.items() if x is not None]
  arguments += [f'onset={candidate.onset}'] if candidate.onset else []
  return f'longrope({", ".join(arguments)}, attention={attention!r})'


def hugging_face(method: str, scheme: PositionScheme, train_len: int, length: int) -> dict[str, Any]:
  """Keys of a config.json. SpecError with n-hat above 0, for which they have no field."""
  scaled = f'{method[:-1]}, factor={max(length / train_len, 1.0)!r})'  # of `method_of`; with its temperature no other
  fraction = scheme.rot / scheme.dims.head_dim
  rope = interchange.Rope(base=scheme.base, fraction=fraction, method=scaled, original=train_len)
  return interchange.write(rope, scheme.dims.head_dim)


class Betas(CMAES):
  """YaRN's betas, by CMA-ES over where its ramp begins and ends, in pairs: c(beta_fast) and c(beta_slow).

  Not rounded to whole pairs, which are among them. names: the method of a candidate.
  """

  def __init__(self, scheme: PositionScheme, train_len: int, length: int, seed: int = 0):
    d, base, last = scheme.rot, scheme.base, float(scheme.rot - 1)
    self.names: dict[Candidate, str] = {}

    def named(method: str) -> Candidate:
      candidate = factors_of(method, scheme, train_len, length)
      self.names.setdefault(candidate, method)
      return candidate

    def beta(pair: float) -> float:
      return float(f'{train_len / (2 * np.pi) * base ** (-2 * pair / d):.3g}')

    def read(x: np.ndarray) -> Point:
      low = float(np.clip(x[0], 0, last - 0.1))
      high = float(np.clip(x[1], low + 0.1, last))
      method = f'yarn(beta_fast={beta(low)!r}, beta_slow={beta(high)!r}, truncate=False)'
      return Point(named(method), np.array([low, high]))

    edges = [rotations.crossing(turns, d, base, train_len) for turns in (32.0, 1.0)]
    super().__init__([Point(named('yarn'), np.clip(edges, 0, last))], read, d / 8, seed)


# What was found, held out.


def _stage(
  plan: Plan, length: int, windows: Sequence[Window], methods: Sequence[str], made: Made, open_rows: OpenRows
) -> Stage:
  """For `fill`."""
  of = {method: made(method, length) for method in methods}
  keys = {method: {length: key} for method, (key, _) in of.items()}
  positions = {(length, key): pos for key, pos in of.values()}
  shelves = {(length, key): open_rows(key, length) for _, key in positions}
  return Stage(length, {}, {}, {length: list(windows)}, positions, keys, {}, shelves, plan)


def _said(stage: Stage) -> None:
  for method, (outcome, reason) in stage.refused.items():
    raise SpecError(f'{method}: {outcome}: {reason}')


def held_out(
  plan: Plan,
  length: int,
  spans: int,
  methods: Sequence[str],
  made: Made,
  open_rows: OpenRows,
  make_scorer: Callable[[], Any],
  bar: Any,
) -> dict[str, np.ndarray]:
  """float64[D] per method, mean NLL of each test document's fixed targets, `spans` spans of them; 0: all."""
  windows = [part.window for part in select(plan, length, spans).parts]
  stage = _stage(plan, length, windows, methods, made, open_rows)
  fill(stage, make_scorer, bar)
  _said(stage)
  out = {}
  for method in methods:
    shelf = stage.shelves[length, stage.keys[method][length]]
    x_NT = np.stack([shelf.row(plan.place(w), w.scored) for w in windows])
    out[method] = x_NT.astype(np.float64).reshape(len(plan.documents), -1).mean(1)
  return out


class Line(NamedTuple):
  """Of a method in the report: its string, and by document its NLL on the search documents and the held-out ones."""

  label: str
  method: str
  attention: float
  search_D: np.ndarray
  held_out_D: np.ndarray


def gap(line_D: np.ndarray, winner_D: np.ndarray) -> Interval:
  """How much worse than the winner, nats, paired by document."""
  with np.errstate(invalid='ignore'):
    return t_interval(line_D - winner_D, least=MIN_PAIRS)


def table(lines: Sequence[Line]) -> str:
  """Markdown. The first line is the winner. Gaps on the search documents are what it was chosen by."""
  head = ['method', 'attention', 'NLL, search', 'worse, search', 'NLL, held out', 'worse, held out']
  rows = []
  for line in lines:
    gaps = [gap(x, y) for x, y in zip(line[3:], lines[0][3:])]
    texts = ['' if line is lines[0] else _signed(interval) for interval in gaps]
    nll = [f'{x_D.mean():.4f}' for x_D in line[3:]]
    rows.append([line.label, f'{line.attention:.4g}', nll[0], texts[0], nll[1], texts[1]])
  return '\n'.join(f'| {" | ".join(row)} |' for row in (head, ['---'] * len(head), *rows))


def _signed(x: Interval) -> str:
  if x.low is None or x.high is None:
    return f'{x.mean:+.4f}'
  return f'{x.mean:+.4f} ±{(x.high - x.low) / 2:.4f}' + (' *' if x.low > 0 or x.high < 0 else '')

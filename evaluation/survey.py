"""What a sweep needs scored, what of it is there already, what the rest costs, and its scoring."""

import dataclasses
import functools
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import posenc
from evaluation.plan import Plan
from evaluation.protocols import Numbers, Selection, Window, needed, reduce
from evaluation.score import Scorer
from evaluation.store import Rows
from models.memory import OutOfMemory


def positions_hash(pos: Any) -> str:
  digest = hashlib.sha256()
  for leaf in jax.tree.leaves(pos):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()[:16]


@dataclasses.dataclass
class Stage:
  """One length of a sweep: what its protocols count, what the methods make of it, and what is there.

  selections: of the protocols that count something, the others' reasons are in `nothing`. windows: by their own length,
  which a partial last one has less of. made: positions by (length, hash). keys: of each method, hash by length.
  refused: method -> outcome, reason.
  """

  length: int
  selections: dict[str, Selection]
  nothing: dict[str, str]
  windows: dict[int, list[Window]]
  made: dict[tuple[int, str], tuple[posenc.Positions, ...]]
  keys: dict[str, dict[int, str]]
  refused: dict[str, tuple[str, str]]
  shelves: dict[tuple[int, str], Rows]
  plan: Plan

  @property
  def tokens(self) -> int:
    """Of its windows, by one method."""
    return sum(n * len(windows) for n, windows in self.windows.items())

  def missing(self, length: int, key: str) -> list[Window]:
    rows = self.shelves[length, key]
    return [w for w in self.windows[length] if not rows.has(self.plan.place(w), w.scored)]

  def numbers(
    self, selection: Selection, method: str, bytes_V: np.ndarray, judge: Callable[[Window], np.ndarray] | None = None
  ) -> Numbers:
    keys = self.keys[method]

    def row(window):
      return self.shelves[window.length, keys[window.length]].row(self.plan.place(window), window.scored)

    return reduce(self.plan, selection, row, bytes_V, judge)


@dataclasses.dataclass
class Survey:
  """What a sweep asks for, and what of it is there: no model is run, none need be loaded.

  open_rows(positions hash, window length): where what was scored lies; in memory if not told.
  """

  plan: Plan
  schemes: Sequence[posenc.PositionScheme]
  methods: Sequence[str]
  lengths: Sequence[int]
  train_len: int
  rule: posenc.Rule
  open_rows: Callable[[str, int], Rows] = lambda positions, length: Rows()

  @property
  def order(self) -> list[int]:
    """1x first, because shorter lengths are compared with it too."""
    return sorted(self.lengths, key=lambda n: (n != self.train_len, n))

  def judge(self, selection: Selection, stages: Mapping[int, Stage]) -> Callable[[Window], np.ndarray] | None:
    """The rows of who chooses its targets, if anyone does: of these stages, or there from another sweep.

    Unsupported where they are not: nothing is scored for a judge.
    """
    if selection.judge is None:
      return None
    method, shelves = selection.judge.method, {}
    for n, parts in zip(selection.judge.lengths, (selection.judge.short, selection.judge.long)):
      key, _ = self.made(method, n)
      mine = stages[n].shelves if n in stages else {}
      rows = shelves[n] = mine[n, key] if (n, key) in mine else self.open_rows(key, n)
      if not all(rows.has(self.plan.place(part.window), part.window.scored) for part in parts):
        raise posenc.Unsupported(f'key_tokens: their judge, {method}, has not been scored at {n} tokens')
    return lambda window: shelves[window.length].row(self.plan.place(window), window.scored)

  @property
  def window_lengths(self) -> set[int]:
    return {n for length in self.lengths for n in self._windows(length)}

  @property
  def tokens(self) -> int:
    """Of the whole sweep, before what methods share is scored once; for the progress bar."""
    return len(self.methods) * sum(n * len(w) for length in self.lengths for n, w in self._windows(length).items())

  def made(self, method: str, length: int) -> tuple[str, tuple[posenc.Positions, ...]]:
    """What a method makes of a length, by its hash. Unsupported where that is nothing."""
    pos = posenc.positions(method, self.schemes, self.train_len, length, rule=self.rule)
    return positions_hash(pos), pos

  def follows(self, method: str) -> bool:
    """Whether the method is told how long its input is."""
    return posenc.follows_length(method, self.schemes, self.train_len, rule=self.rule)

  @functools.cached_property
  def selected(self) -> dict[int, dict[str, Selection | str]]:
    """By length and protocol; a reason where nothing counts."""
    out: dict[int, dict[str, Selection | str]] = {}
    for length in self.lengths:
      out[length] = {}
      for protocol in self.plan.cfg.asked:
        try:
          out[length][protocol] = self.plan.select(protocol, length)
        except posenc.Unsupported as reason:
          out[length][protocol] = str(reason)
    return out

  @functools.cached_property
  def _needed(self) -> dict[Window, Window]:
    """At all lengths: a partial window of one may be a whole one of another, of which more is kept."""
    chosen = (s for selected in self.selected.values() for s in selected.values() if isinstance(s, Selection))
    return {window.whole: window for window in needed(chosen)}

  @property
  def windows(self) -> dict[int, list[Window]]:
    """All that it asks for, each once, by their own length."""
    out: dict[int, list[Window]] = {}
    for window in self._needed.values():
      out.setdefault(window.length, []).append(window)
    return out

  def _windows(self, length: int) -> dict[int, list[Window]]:
    """By their own length."""
    out: dict[int, list[Window]] = {}
    for window in needed(s for s in self.selected[length].values() if isinstance(s, Selection)):
      out.setdefault(window.length, []).append(self._needed[window.whole])
    return out

  def missing_hash(self) -> str:
    """Of all that is missing."""
    digest = hashlib.sha256()
    for length in self.order:
      stage = self.stage(length)
      for n, key in sorted(stage.shelves):
        digest.update(json.dumps([n, key, stage.missing(n, key)]).encode())
    return digest.hexdigest()

  def stage(self, length: int) -> Stage:
    selected, windows = self.selected[length], self._windows(length)
    selections = {protocol: s for protocol, s in selected.items() if isinstance(s, Selection)}
    nothing = {protocol: s for protocol, s in selected.items() if isinstance(s, str)}
    made, keys, refused = {}, {}, {}
    for method in self.methods:
      try:
        mine = {n: self.made(method, n) for n in {length, *windows}}
      except posenc.Unsupported as reason:
        refused[method] = 'unsupported', str(reason)
      else:
        keys[method] = {n: key for n, (key, _) in mine.items()}
        made |= {(n, key): pos for n, (key, pos) in mine.items()}
    shelves = {(n, key): self.open_rows(key, n) for n, key in made if n in windows}
    return Stage(length, selections, nothing, windows, made, keys, refused, shelves, self.plan)


def fill(stage: Stage, make_scorer: Callable[[], Scorer], progress: Any) -> None:
  """Scores what is missing, each batch put away as it is fetched; methods that do not fit become refused.

  Two methods that make the same arrays at a length (yarn and yarn(factor=8) at 8x, everything that follows the length
  at 1x) are scored once, and those that miss the same windows side by side.
  """
  plan, left = stage.plan, stage.tokens * (len(stage.keys) + len(stage.refused))
  for n in sorted(stage.windows):
    groups: dict[tuple[Window, ...], list[str]] = {}
    for key in dict.fromkeys(keys[n] for keys in stage.keys.values()):
      missing = tuple(stage.missing(n, key))
      if missing:
        groups.setdefault(missing, []).append(key)
    for windows, keys in groups.items():
      scorer, fitting = make_scorer(), []
      for key in keys:
        try:
          scorer.program(n, stage.made[n, key])
          fitting.append(key)
        except OutOfMemory as too_large:
          for method in [m for m, mine in stage.keys.items() if mine[n] == key]:
            del stage.keys[method]
            stage.refused[method] = 'out of memory', str(too_large)
      if not fitting:
        continue
      start = time.perf_counter()
      for i, part, rows in scorer.runs(plan, windows, [stage.made[n, key] for key in fitting]):
        now = time.perf_counter()
        stage.shelves[n, fitting[i]].put([plan.place(w) for w in part], rows, now - start)
        start = now
        progress.update(n * len(part))
        left -= n * len(part)
    for key in dict.fromkeys(keys[n] for keys in stage.keys.values()):
      stage.shelves[n, key].compact()
  progress.update(left)  # what is shared, was there, or cannot be


@dataclasses.dataclass
class Rest:
  """What is missing at one length of windows: how many by all methods together, of how many, and what they cost.

  seconds: by what such windows took so far; None where none were scored.
  """

  length: int
  missing: int
  needed: int
  flops: float
  seconds: float | None

  @property
  def tokens(self) -> int:
    return self.length * self.missing


def rest(survey: Survey, flops: Callable[[int], float]) -> list[Rest]:
  """By length of windows. `flops(length)` of a window's forward pass. Methods that make the same arrays count once."""
  out: dict[int, Rest] = {}
  for length in sorted(survey.lengths):
    stage = survey.stage(length)
    for n, windows in sorted(stage.windows.items()):
      at = out.setdefault(n, Rest(n, 0, 0, 0.0, None))
      took = [rows.seconds for (m, _), rows in stage.shelves.items() if m == n and rows.seconds]
      missing = sum(len(stage.missing(n, key)) for m, key in stage.shelves if m == n)
      at.missing += missing
      at.needed += len(windows) * sum(m == n for m, _ in stage.shelves)
      at.flops += missing * flops(n)
      if missing and took:
        at.seconds = (at.seconds or 0.0) + missing * float(np.mean(took))
  return [out[n] for n in sorted(out)]


def rate(survey: Survey, flops: Callable[[int], float], make_scorer: Callable[[], Scorer]) -> float:
  """FLOP/s of a batch at the length nearest to 1x where something is missing, compiled and run for this; not kept."""
  for length in sorted(survey.lengths, key=lambda n: abs(n - survey.train_len)):
    stage = survey.stage(length)
    for n, key in stage.shelves:
      windows = stage.missing(n, key)
      if windows:
        scorer, pos = make_scorer(), stage.made[n, key]
        windows = windows[: scorer.program(n, pos).rows]
        start = 0.0
        for _ in range(2):  # the first run is of cold caches
          start = time.perf_counter()
          list(scorer.runs(survey.plan, windows, [pos]))
        return len(windows) * flops(n) / (time.perf_counter() - start)
  return 0.0


def costs(survey: Survey) -> list[tuple[str, int, int, int]]:
  """(protocol, windows and tokens that a method scores for it, tokens that the protocols before it do not)."""
  out, before = [], set()
  for protocol in survey.plan.cfg.asked:
    selected = (survey.selected[length][protocol] for length in survey.lengths)
    mine = {window.whole for window in needed(s for s in selected if isinstance(s, Selection))}
    out.append((protocol, len(mine), sum(w.length for w in mine), sum(w.length for w in mine - before)))
    before |= mine
  return out


def status(survey: Survey) -> str:
  """A line per method: of the windows that its points need at each length, how many are there."""
  stages = {length: survey.stage(length) for length in sorted(survey.lengths)}
  rows = [['windows there', *(str(length) for length in stages)]]
  for method in survey.methods:
    cells = []
    for stage in stages.values():
      if method in stage.refused:
        cells.append(stage.refused[method][0])
        continue
      total = sum(len(windows) for windows in stage.windows.values())
      missing = sum(len(stage.missing(n, stage.keys[method][n])) for n in stage.windows)
      cells.append(f'{total - missing} of {total}')
    rows.append([method, *cells])
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join(
    '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows
  )

"""LongRoPE's search space and the optimisers that search it: numbers alone, no model.

A candidate is lambda_p, one per frequency pair, and n-hat: see `longrope` in posenc/scaling.py. All optimisers have one
interface: `ask` for the next candidates, `tell` what each is worth (nats, smaller is better), for as long as the budget
lasts. Ding et al. 2024 (2402.13753), section 3.3, algorithm 1 and table 4.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from spec import SpecError

ONSETS = (0, 1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 64, 128, 256)  # n-hat, table 4
STEP = 0.01  # of lambda


class Candidate(NamedTuple):
  """lambda_p, from the fastest pair to the slowest, and n-hat."""

  factors: tuple[float, ...]
  onset: int = 0


@dataclasses.dataclass(frozen=True)
class Box:
  """1 <= lambda_0 <= lambda_1 <= ... <= top, and n-hat one of a list. top: 1.25 s in the paper, s = target / L."""

  pairs: int
  top: float
  onsets: tuple[int, ...] = ONSETS

  def holds(self, candidate: Candidate) -> bool:
    x_P = np.asarray(candidate.factors)
    inside = len(x_P) == self.pairs and x_P[0] >= 1 and x_P[-1] <= self.top and (np.diff(x_P) >= 0).all()
    return bool(inside) and candidate.onset in self.onsets

  def check(self, candidate: Candidate) -> Candidate:
    if not self.holds(candidate):
      x = candidate.factors
      raise SpecError(
        f'init: {len(x)} factors, {min(x):g} to {max(x):g}, onset = {candidate.onset}: {self.pairs} from 1 to '
        f'{self.top:g}, none below the one before, and an onset of {self.onsets} are allowed'
      )
    return candidate


class Optimizer:
  """`ask` gives the next batch, all of which is told before it is asked again.

  share, bar: of a batch, what matters to the optimiser are its best `share`, and what is better than `bar`. The rest
  need only be known to be worse.
  """

  bar, share = math.inf, 1.0

  def ask(self) -> list[Candidate]:
    raise NotImplementedError

  def tell(self, told: Sequence[tuple[Candidate, float]]) -> None:
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Of an evolution: population P, then mutants N1 and children N2 of the k best so far, T times.

  p: probability that a number is changed. tries: draws for a candidate that is new, and a child that is monotone. The
  paper's table 4, and the released code's.
  """

  population: int = 64
  mutants: int = 16
  children: int = 16
  iterations: int = 40
  p: float = 0.3
  parents: int = 32
  tries: int = 20

  @property
  def evaluations(self) -> int:
    """Of the whole search: 1344."""
    return self.population + self.iterations * (self.mutants + self.children)


class Paper(Optimizer):
  """Algorithm 1: the given members and mutants of them; then mutants of the k best so far, and children of two.

  A mutant has each lambda_p drawn again with probability p, uniformly over the multiples of 0.01 between its
  neighbours, and n-hat over its list. A child has each number of either parent, alike; one that is not monotone is
  drawn again, and after `tries` draws is a mutant of the first. The paper has the constraint without saying how draws
  meet it: a lambda drawn from the whole range is between its neighbours once in P draws.
  """

  def __init__(self, box: Box, members: Sequence[Candidate], seed: int = 0, sizes: Sizes | None = None):
    self.box, self.sizes, self.rng = box, sizes or Sizes(), np.random.default_rng(seed)
    self._members = [box.check(c) for c in dict.fromkeys(members)][: self.sizes.population]
    self._best: list[tuple[float, Candidate]] = []
    self._seen: set[Candidate] = set()
    self.share = min(self.sizes.parents / self.sizes.population, 1.0)

  def ask(self):
    sizes = self.sizes
    if not self._best:
      self._seen.update(self._members)
      more = sizes.population - len(self._members)
      return [*self._members, *(self._new(self._members) for _ in range(more))]
    parents = [candidate for _, candidate in self._best]
    mutants = [self._new(parents) for _ in range(sizes.mutants)]
    return mutants + [self._child(parents) for _ in range(sizes.children)]

  def tell(self, told):
    ranked = [*self._best, *((value, candidate) for candidate, value in told)]
    self._best = sorted(ranked, key=lambda at: at[0])[: self.sizes.parents]  # stable: of two equals the older one
    if len(self._best) == self.sizes.parents:
      self.bar, self.share = self._best[-1][0], 1.0

  def mutated(self, parent: Candidate) -> Candidate:
    x_P, box = list(parent.factors), self.box
    for i in np.flatnonzero(self.rng.random(box.pairs) < self.sizes.p):
      x_P[i] = self._between(x_P[i - 1] if i else 1.0, x_P[i + 1] if i + 1 < box.pairs else box.top)
    return Candidate(tuple(x_P), self._onset(parent))

  def crossed(self, a: Candidate, b: Candidate) -> Candidate | None:
    for _ in range(self.sizes.tries):
      from_b = self.rng.random(self.box.pairs + 1) < 0.5
      x_P = np.where(from_b[:-1], b.factors, a.factors)
      child = Candidate(tuple(x_P.tolist()), b.onset if from_b[-1] else a.onset)
      if self.box.holds(child) and child not in self._seen:
        return child
    return None

  def _onset(self, parent: Candidate) -> int:
    return int(self.rng.choice(self.box.onsets)) if self.rng.random() < self.sizes.p else parent.onset

  def _between(self, low: float, high: float) -> float:
    """`low` where no multiple of the step lies between."""
    first, last = math.ceil(round(low / STEP, 6)), math.floor(round(high / STEP, 6))
    drawn = round(int(self.rng.integers(first, last + 1)) * STEP, 6) if first <= last else low
    return min(max(drawn, low), high)  # 4 less a rounding error is 4 in the line above, and not to `holds`

  def _any(self, of: Sequence[Candidate]) -> Candidate:
    return of[int(self.rng.integers(len(of)))]

  def _child(self, parents: Sequence[Candidate]) -> Candidate:
    a, b = self._any(parents), self._any(parents)
    child = self.crossed(a, b)
    if child is None:
      return self._new([a])
    self._seen.add(child)
    return child

  def _new(self, parents: Sequence[Candidate]) -> Candidate:
    """A mutant that was not asked before, if one of `tries` is."""
    candidate = self.mutated(self._any(parents))
    for _ in range(self.sizes.tries):
      if candidate not in self._seen:
        break
      candidate = self.mutated(self._any(parents))
    self._seen.add(candidate)
    return candidate


class Released(Paper):
  """The released code (microsoft/LongRoPE, `dim_mono`): other than the paper, as its users have it.

  One first member, of which all others are mutants, and which is called YaRN: `linear` of it. n-hat is not searched.
  The steps of 0.01 are counted from the left neighbour. A child is one parent with single numbers of the other, as few
  as make it new and monotone. The upper end is 1 + s.
  """

  def crossed(self, a, b):
    x_P = list(a.factors)
    for _ in range(self.sizes.tries):
      for i in range(self.box.pairs):
        if self.rng.random() < self.sizes.p and self.rng.random() < 0.5:
          x_P[i] = b.factors[i]
          child = Candidate(tuple(x_P), a.onset)
          if self.box.holds(child) and child not in self._seen:
            return child
    return None

  def _onset(self, parent):
    return parent.onset

  def _between(self, low, high):
    steps = math.floor(round((high - low) / STEP, 6))
    return min(round(low + int(self.rng.integers(steps + 1)) * STEP, 7), high)


def linear(factors: Sequence[float], s: float) -> tuple[float, ...]:
  """What the released code makes of YaRN's ramp g: lambda = s (1 - g) + g, where YaRN has 1 / lambda = (1 - g) / s + g.

  factors: YaRN's. Up to 1.9 times as much at s = 8.
  """
  kept_P = (1 / np.asarray(factors) - 1 / s) / (1 - 1 / s) if s > 1 else np.ones(len(factors))
  return tuple(np.round(s * (1 - kept_P) + kept_P, 7).tolist())


class Point(NamedTuple):
  """A candidate, and where it lies for CMA-ES."""

  candidate: Candidate
  x: np.ndarray


class CMAES(Optimizer):
  """CMA-ES (Hansen and Ostermeier 2001; `cmaes`), from the best of `members`, which are told first.

  read(x): the candidate that x stands for, and the x of just that candidate: what lies outside the box is told where it
  was brought back to. When half of a generation has been asked before, it has converged, and begins again from the best
  so far with twice the population, up to 16 times.
  """

  def __init__(self, members: Sequence[Point], read: Callable[[np.ndarray], Point], sigma: float, seed: int = 0):
    self._read, self._sigma, self._seed, self._starts = read, sigma, seed, 0
    self._es: Any = None
    self._batch, self._best = list(members), (math.inf, members[0].x)
    self._seen: set[Candidate] = set()

  def ask(self):
    if self._es is not None:
      self._batch = [self._read(self._es.ask()) for _ in range(self._es.population_size)]
    return [point.candidate for point in self._batch]

  def tell(self, told):
    points = [(point.x, value) for point, (_, value) in zip(self._batch, told, strict=True)]
    for x, value in points:
      if value < self._best[0]:
        self._best = value, x
    if self._es is not None:
      self._es.tell(points)
    new = {point.candidate for point in self._batch} - self._seen
    if self._es is None or self._es.should_stop() or 2 * len(new) < len(points):
      self._start()
    self._seen |= new

  def _start(self) -> None:
    from cmaes import CMA  # here: whoever only reads a result need not have it

    pairs = len(self._best[1])
    size = (4 + math.floor(3 * math.log(pairs))) * 2 ** min(self._starts, 4)
    seed = (self._seed * 1000 + self._starts) % 2**32
    self._es = CMA(mean=self._best[1].astype(np.float64), sigma=self._sigma, seed=seed, population_size=size)
    self._starts += 1
    self.share = 0.5  # of a generation the better half moves the mean


def cma(box: Box, members: Sequence[Candidate], seed: int = 0) -> CMAES:
  """Of ln lambda_p, brought back to the nearest that rises and lies in the box; n-hat stays that of the first member.

  Nearest by isotonic regression. Increments of ln lambda as coordinates need no bringing back, but make a far corner of
  every optimum with equal neighbours: within the paper's budget they came within 0.1 to 2.6 of a planted lambda, these
  within 0.01.
  """
  top, onset = math.log(box.top), members[0].onset

  def read(x: np.ndarray) -> Point:
    x = np.clip(isotonic(x), 0.0, top)
    factors = np.clip(np.round(np.exp(x), 2), 1.0, box.top)  # the step of the others
    return Point(Candidate(tuple(factors.tolist()), onset), x)

  points = [Point(box.check(c), np.log(c.factors)) for c in dict.fromkeys(members)]
  return CMAES(points, read, 0.3, seed)


def isotonic(x: np.ndarray) -> np.ndarray:
  """The nearest sequence none of whose numbers is below the one before: neighbours that fall are pooled."""
  pools: list[tuple[float, int]] = []
  for value in x.tolist():
    pool = (value, 1)
    while pools and pools[-1][0] > pool[0]:
      before, n = pools.pop()
      pool = ((before * n + pool[0] * pool[1]) / (n + pool[1]), n + pool[1])
    pools.append(pool)
  return np.repeat([value for value, _ in pools], [n for _, n in pools])


ALGORITHMS = ('paper', 'released', 'cma')


def optimizer(
  algorithm: str, pairs: int, s: float, members: Sequence[Candidate], yarn: Candidate, onsets: Sequence[int], seed: int
) -> Optimizer:
  """members: the initial population's, of which `yarn` is one."""
  if algorithm == 'released':
    start = Candidate(linear(yarn.factors, s))
    return Released(Box(pairs, 1 + s, (0,)), [start], seed)
  box = Box(pairs, round(1.25 * s, 9), tuple(onsets))
  return cma(box, members, seed) if algorithm == 'cma' else Paper(box, members, seed)

"""What a curve's numbers are worth: intervals, bands, marks, stretch and reach. evaluation/coverage.py tries them.

Axes: S seeds, D documents, C cells (lengths, or methods x lengths). The unit is a document's mean NLL over its fixed
targets, nats: tokens of one text are not independent, and every seed is scored on the same texts, so seeds and
documents are crossed. With one seed every statement is about this checkpoint, not about its scheme.

  x_sd = mu + a_s + b_d + e_sd            variances of a, b, e: seed, document, residual

Differences take the place of x. Methods on one checkpoint pair by seed and document: pass x - y. Schemes have no seed
in common, and pair by document: pass x and y.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import special  # scipy.stats takes longer to import than a finished sweep takes to read

# Levels of few documents are those of the documents that were drawn: no interval, draw every one. What they share
# cancels in a difference by document, which scatters about an effect and not about texts: Student's t serves sooner.
MIN_DOCUMENTS = 12
MIN_PAIRS = 3


class Interval(NamedTuple):
  mean: float
  low: float | None
  high: float | None


def t_interval(x_D: np.ndarray, confidence: float = 0.95, least: int = MIN_DOCUMENTS) -> Interval:
  """Mean of per-document values and its Student t interval, nats.

  No ends below `least` documents (MIN_PAIRS for differences), or where a value is not finite.

  By simulation the t interval of document means covers 95 %; a percentile bootstrap over 20 documents covers 92 %, over
  tokens far less.
  """
  x_D = np.asarray(x_D, np.float64)
  mean = float(x_D.mean())
  if len(x_D) < least or not np.isfinite(x_D).all():
    return Interval(mean, None, None)
  half = float(special.stdtrit(len(x_D) - 1, (1 + confidence) / 2) * x_D.std(ddof=1) / np.sqrt(len(x_D)))
  return Interval(mean, mean - half, mean + half)


class Cells(NamedTuple):
  """Arrays of one shape, a number per cell. NaN: nothing can be said (all seeds diverged; too few documents)."""

  mean: np.ndarray  # nats, over the seeds that did not diverge
  low: np.ndarray
  high: np.ndarray
  p: np.ndarray  # two-sided against 0, adjusted for all cells unless alone; below 1 - confidence iff 0 is outside
  se: np.ndarray
  diverged: np.ndarray  # seeds with a non-finite document: they leave the mean and are counted


class _Squares(NamedTuple):
  """Variances of the grand mean, nats**2: from the document means, and from the seeds of each group of two or more.

  The variance is (MS_seed + MS_doc - MS_res) / (S D), as MS_doc / (S D), which is the variance of document means over
  D, plus (MS_seed - MS_res) / (S D), which is 0 where it would be negative. Left negative, three seeds without any
  effect cover 86 %; with MS_doc >= MS_res too, 100 %.
  """

  document: np.ndarray  # [..., C], document means: MS_doc / (S D) of one group
  seed_G: list[np.ndarray]  # MS_seed / (S D)
  residual_G: list[np.ndarray]  # MS_res / (S D)
  df_K: list[int]  # of document and seed_G

  @property
  def variance(self) -> np.ndarray:
    return np.sum(self.parts(alone=True), 0)

  def parts(self, alone: bool) -> list[np.ndarray]:
    """What each of `df_K` has its share in, for `_p`.

    One test: the parts of the variance. A family's tests are in the far tail, where most of what is beyond a quantile
    are draws in which few seeds agreed by chance and MS_seed - MS_res came out 0. There MS_seed itself counts: a seed
    part is never without weight. At 95 % that would cover 98-99 % where seeds have no effect.
    """
    pairs = zip(self.seed_G, self.residual_G, strict=True)
    return [self.document, *(np.maximum(s - r, 0) if alone else s for s, r in pairs)]

  def p(self, mean: np.ndarray, alone: bool) -> np.ndarray:
    """Two-sided p of mean / sqrt(variance), against 0."""
    variance = self.variance
    t = np.divide(mean, np.sqrt(variance), out=np.zeros_like(mean), where=variance > 0)
    return np.where(variance > 0, _p(t, self.parts(alone), self.df_K), mean == 0)


def _p(t: np.ndarray, parts_K: Sequence[np.ndarray], df_K: Sequence[float]) -> np.ndarray:
  """sum_k share_k p_k, with p_k Student's for df_k: Cochran's weights, of p.

  Satterthwaite (1946) is one Student t with 1 / df = sum_k share_k**2 / df_k. That takes estimated shares for true
  ones: where three seeds happen to agree, the error is small and the quantile too. 95 % intervals then cover 92.4 %,
  and the far tail is worse. The mixture has the tail of the part with the fewest degrees of freedom. Both are Student's
  where one part is all there is.
  """
  total = np.sum(parts_K, 0)
  total = np.where(total > 0, total, 1)
  return np.sum([2 * v / total * special.stdtr(n, -np.abs(t)) for v, n in zip(parts_K, df_K, strict=True)], 0)


def _quantile(level: np.ndarray, parts_K: Sequence[np.ndarray], df_K: Sequence[float]) -> np.ndarray:
  """The t at which `_p` is `level`: it lies between the quantiles of the parts."""
  of_K = [-special.stdtrit(n, level / 2) for n in df_K]
  low, high = np.min(of_K, 0), np.max(of_K, 0)
  for _ in range(50 if len(df_K) > 1 else 0):
    middle = (low + high) / 2
    short = _p(middle, parts_K, df_K) > level
    low, high = np.where(short, middle, low), np.where(short, high, middle)
  return high


def _squares(groups: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray, _Squares]:
  """Of groups [S, D, C]: the mean of the first minus that of the second, if any; per document; and its squares."""
  x_DC = groups[0].mean(0) - (groups[1].mean(0) if len(groups) > 1 else 0)
  D = len(x_DC)
  document_C = x_DC.var(0, ddof=1) / D if D > 1 else np.full(x_DC.shape[1], np.nan)
  squares = _Squares(document_C, [], [], [max(D - 1, 1)])
  for x_SDC in groups:
    S = len(x_SDC)
    if S > 1:
      seed_SC = x_SDC.mean(1)
      e_SDC = x_SDC - x_SDC.mean(0) - (seed_SC - seed_SC.mean(0))[:, None]
      squares.seed_G.append(seed_SC.var(0, ddof=1) / S)
      squares.residual_G.append((e_SDC**2).sum((0, 1)) / max((S - 1) * (D - 1), 1) / (S * D))
      squares.df_K.append(S - 1)
  return x_DC.mean(0), x_DC, squares


def _least_p(x_DC: np.ndarray, squares: _Squares, draws: int, rng: np.random.Generator) -> np.ndarray:
  """The least p of all cells when no cell has an effect, sorted: `draws` draws of means and mean squares.

  Means and mean squares are drawn from their normal and Wishart laws (Cochran: independent), and each draw goes through
  the same p, so that cells with different degrees of freedom compare, and what p does in the far tail is paid for.
  Documents' effects have their estimated covariance over cells. Seeds' effects are drawn independent from cell to
  cell: the covariance of a few seeds has rank S - 1, and taken for the truth it makes one false mark in 10 of 72 cells
  twice as frequent. Their variance, MS_seed - MS_res, is 0 where three seeds agree by chance, and just those cells get
  marks: against documents' it is at least what it is in all cells together. With each cell's own, tables of three seeds
  have a false mark in 7 % (docs/statistics.md).
  """
  D, C = x_DC.shape
  # Rows whose cross product is the covariance of the mean, as few as there are dimensions: pairs of lengths have few.
  _, size_R, axis_RC = np.linalg.svd((x_DC - x_DC.mean(0)) / math.sqrt(D * (D - 1)), full_matrices=False)
  root_RC = (size_R[:, None] * axis_RC)[size_R > 1e-9 * size_R[0]]
  mean_BC = rng.standard_normal((draws, len(root_RC))) @ root_RC
  document_BC = np.zeros((draws, C))
  for _ in range(D - 1):
    document_BC += (rng.standard_normal((draws, len(root_RC))) @ root_RC) ** 2 / (D - 1)
  seeds = []
  for seed_C, residual_C, df in zip(squares.seed_G, squares.residual_G, squares.df_K[1:], strict=True):
    share_C = squares.document / max(squares.document.sum(), 1e-300)
    own_C = np.maximum(seed_C - residual_C, max((seed_C - residual_C).sum(), 0) * share_C)
    mean_BC += rng.standard_normal((draws, C)) * np.sqrt(own_C)
    seeds.append(np.maximum(seed_C, own_C + residual_C) * rng.chisquare(df, (draws, C)) / df)
  return np.sort(squares._replace(document=document_BC, seed_G=seeds).p(mean_BC, False).min(1))


def infer(
  x: np.ndarray,
  y: np.ndarray | None = None,
  *,
  confidence: float = 0.95,
  alone: bool = False,
  draws: int = 4000,
  least: int = MIN_DOCUMENTS,
) -> Cells:
  """Mean of x[S, D, ...], or mean of x minus mean of y, for each cell: two-way random effects and Student t.

  All cells are one family. `low` and `high` hold for all at once: lengths give a sup-t band (Montiel Olea and
  Plagborg-Moller 2019); `p` is the single-step max-t of Westfall and Young (1993) in its min-p form, so a methods x
  lengths table marked where p < 0.05 has a false mark in 5 % of tables. `alone`: each cell by itself, for a comparison
  fixed before its numbers were seen. Below `least` documents nothing is said: MIN_PAIRS where x is a difference.

  A cell with a diverged seed is not in the joint draws and gets Bonferroni's share of the error. A cell without any
  spread (a method that changes nothing at 1x) is exact and not counted. The generator's seed is fixed: equal data give
  equal numbers.
  """
  groups = [np.asarray(g, np.float64) for g in ((x,) if y is None else (x, y))]
  if groups[0].ndim < 2 or groups[-1].shape[1:] != groups[0].shape[1:]:
    raise ValueError(f'shapes {[g.shape for g in groups]}: [seeds, documents, cells], the latter two in common')
  D, *shape = groups[0].shape[1:]
  groups = [g.reshape(len(g), D, -1) for g in groups]
  finite = [np.all(np.isfinite(g), axis=1) for g in groups]
  diverged = np.sum([(~f).sum(0) for f in finite], 0)
  # Cells in which every seed is finite at once, the others one by one: each has seeds of its own.
  whole, pieces = np.flatnonzero(diverged == 0), []
  for cells in (whole, *np.flatnonzero(diverged)[:, None]):
    kept = [g[:, :, cells][f[:, cells].all(1)] for g, f in zip(groups, finite, strict=True)]
    if len(cells) and all(map(len, kept)):
      pieces.append((cells, *_squares(kept)))
  mean, low, high, p, se = np.full((5, len(diverged)), np.nan)
  for cells, mean_C, _, squares in pieces:
    mean[cells], se[cells] = mean_C, np.sqrt(squares.variance)
  if least <= D:
    n, alpha = int((se > 0).sum()), 1 - confidence
    for cells, mean_C, x_DC, squares in pieces:
      single = alone or n <= 1
      p_C, spread_C = squares.p(mean_C, single), se[cells] > 0
      level, joint = alpha if single else alpha / n, spread_C.sum()
      if single:
        p[cells] = p_C
      elif cells is whole and joint:
        some = squares._replace(
          document=squares.document[spread_C],
          seed_G=[v[spread_C] for v in squares.seed_G],
          residual_G=[v[spread_C] for v in squares.residual_G],
        )
        least_B = _least_p(x_DC[:, spread_C], some, draws, np.random.default_rng(0))
        # p < alpha exactly where 0 is outside. Below: the share of alpha that belongs to these cells.
        level = min(least_B[int(alpha * joint / n * (draws + 1)) - 1], alpha)
        least_C = (1 + np.searchsorted(least_B, p_C, 'right')) / (draws + 1) * n / joint
        p[cells] = np.where(spread_C, np.clip(least_C, p_C, 1), p_C)
      else:
        p[cells] = np.where(spread_C, np.minimum(p_C * n, 1), p_C)
      half_C = _quantile(np.full(len(cells), level), squares.parts(single), squares.df_K) * se[cells]
      low[cells], high[cells] = mean_C - half_C, mean_C + half_C
  return Cells(*(v.reshape(shape) for v in (mean, low, high, p, se, diverged)))


def percentile_bootstrap(x_SD: np.ndarray, confidence: float = 0.95, draws: int = 4000) -> Interval:
  """The grand mean and percentiles of it over resampled seeds and resampled documents: an option that under-covers.

  No degrees of freedom: 5 seeds x 20 documents cover 88-91 % of a nominal 95 %, one seed x 12 documents 91 %.
  """
  rng = np.random.default_rng(0)
  S, D = x_SD.shape
  weight_BS = rng.multinomial(S, np.full(S, 1 / S), draws) / S
  weight_BD = rng.multinomial(D, np.full(D, 1 / D), draws) / D
  mean_B = ((weight_BS @ x_SD) * weight_BD).sum(1)
  low, high = np.quantile(mean_B, [(1 - confidence) / 2, (1 + confidence) / 2])
  return Interval(float(x_SD.mean()), float(low), float(high))


class Components(NamedTuple):
  """Variances of a_s, b_d, e_sd, nats**2. With one seed `seed` is NaN, and `document` holds the residual too."""

  seed: float
  document: float
  residual: float


def components(x_SD: np.ndarray, y_SD: np.ndarray | None = None) -> Components:
  """Variance components from mean squares; a negative one is 0. Of x and y: of their difference, sums over both."""
  groups = [g[:, :, None] for g in ((x_SD,) if y_SD is None else (x_SD, y_SD))]
  D, squares = x_SD.shape[1], _squares(groups)[2]
  document = float(squares.document[0]) * D
  if min(map(len, groups)) == 1:
    return Components(math.nan, document, 0.0)
  residual = [float(r[0]) * len(g) * D for r, g in zip(squares.residual_G, groups, strict=True)]
  seed = [max(float(s[0]) * len(g) - r / D, 0) for s, r, g in zip(squares.seed_G, residual, groups, strict=True)]
  document -= sum(r / len(g) for r, g in zip(residual, groups, strict=True))
  return Components(sum(seed), max(document, 0.0), sum(residual))


def _half_widths(c: Components, S: int, D: int, groups: int, level: float) -> tuple[float, np.ndarray]:
  """Standard error of the mean under `c`, and half widths of 4000 intervals whose mean squares are drawn."""
  rng, draws = np.random.default_rng(0), 4000
  seed = c.seed / S if S > 1 else 0.0
  residual = c.residual / (S * D)
  document = c.document / D + residual
  squares = _Squares(document * rng.chisquare(D - 1, draws) / (D - 1), [], [], [D - 1])
  for _ in range(groups if S > 1 else 0):
    df = S - 1, (S - 1) * (D - 1)
    squares.seed_G.append((seed + residual) / groups * rng.chisquare(df[0], draws) / df[0])
    squares.residual_G.append(residual / groups * rng.chisquare(df[1], draws) / df[1])
    squares.df_K.append(S - 1)
  quantile_B = _quantile(np.full(draws, level), squares.parts(alone=True), squares.df_K)
  return math.sqrt(seed + document), quantile_B * np.sqrt(squares.variance)


def half_width(c: Components, seeds: int, documents: int, *, groups: int = 1, level: float = 0.05) -> float:
  """Half of an interval, on average, nats, of a number with these components. One seed, `groups`: see `power`."""
  return float(_half_widths(c, seeds, documents, groups, level)[1].mean())


def _power(effect: float, se: float, half_B: np.ndarray) -> float:
  return float((special.ndtr((effect - half_B) / se) + special.ndtr((-effect - half_B) / se)).mean())


def power(effect: float, c: Components, seeds: int, documents: int, *, groups: int = 1, level: float = 0.05) -> float:
  """Probability that a true difference `effect`, nats, is marked when it is tested alone.

  The mean is normal and independent of the mean squares, which are drawn: a noncentral t would presume their shares
  known, and calls 64 % 80 %. `c`: components of the difference. One seed: seeds do not vary, and the claim is about the
  checkpoints. `groups`: 2 where schemes with `seeds` seeds each are compared.
  """
  return _power(effect, *_half_widths(c, seeds, documents, groups, level))


def min_detectable(
  c: Components, seeds: int, documents: int, *, groups: int = 1, target: float = 0.8, level: float = 0.05
) -> float:
  """The difference, nats, whose `power` is `target`: what a table without marks could not have shown."""
  se, half_B = _half_widths(c, seeds, documents, groups, level)
  low, high = 0.0, float(half_B.max() + 10 * se)
  for _ in range(40):
    middle = (low + high) / 2
    low, high = (low, middle) if se == 0 or _power(middle, se, half_B) > target else (middle, high)
  return high if se > 0 else 0.0


class Extent(NamedTuple):
  """A length of a curve, tokens, one of those swept: nothing is interpolated. NaN: not defined, or no interval."""

  value: float
  low: float
  high: float
  shortest: int  # of those it could have been: 'at most' where it is the reach
  longest: int  # 'at least' where it is this one: the sweep ends here

  def text(self, train_len: int, scale: float = 0.0) -> str:
    """In multiples of train_len, or times `scale`: 1 for tokens."""

    def one(v: float) -> str:
      if math.isnan(v):
        return '?'
      sign = '≥ ' if v == self.longest else '≤ ' if v == self.shortest < train_len else ''
      return sign + (f'{v * scale:.4g}' if scale else f'{v / train_len:g}x')

    return one(self.value) + ('' if math.isnan(self.low) else f' [{one(self.low)}, {one(self.high)}]')


def stretch(x_SDL: np.ndarray, lengths: Sequence[int], train_len: int, delta: float = 0.05) -> Extent:
  """stretch(delta): the largest L with NLL(L') <= NLL(1x) + delta at every L' from 1x to L.

  Shorter lengths are no part of it: what has less context may well be worse. Differences from 1x pair by seed and
  document. Low end: 1x, 2x, ... as long as each one's own upper bound is within delta: a sequence fixed in advance, so
  a false claim needs the first bad length to fail its single test. High end: up to the first whose lower bound, of a
  band over all lengths, is above. A length at which a seed diverged ends it.
  """
  _check(x_SDL, lengths)
  first = list(lengths).index(train_len)
  grid = list(lengths)[first:]
  if not np.isfinite(x_SDL[:, :, first]).all():
    return Extent(math.nan, math.nan, math.nan, grid[0], grid[-1])
  with np.errstate(invalid='ignore'):
    rise = x_SDL[:, :, first + 1 :] - x_SDL[:, :, first : first + 1]
  band, each = infer(rise), infer(rise, alone=True)
  ends = band.diverged > 0

  def until(above: np.ndarray) -> float:
    over = above | ends
    return float(grid[int(np.argmax(over)) if over.any() else -1])

  low, high = (math.nan, math.nan)
  if x_SDL.shape[1] >= MIN_DOCUMENTS:
    low, high = until(each.high > delta), until(band.low > delta)
  return Extent(until(band.mean > delta), low, high, grid[0], grid[-1])


def reach(x_SDL: np.ndarray, lengths: Sequence[int], epsilon: float = 0.01) -> Extent:
  """reach(epsilon): the smallest L with NLL(L) - NLL(L') <= epsilon for every longer L'.

  Low end: the smallest L that no longer length beats by more than epsilon beyond the bound of a band over all pairs of
  lengths. High end: the smallest L whose gains have every upper bound within epsilon. To claim it falsely of one L,
  the one pair that is above must fail its own test (Berger 1982), so only the number of L is paid for. Lengths at which
  a seed diverged are none of both.
  """
  return reaches(x_SDL, lengths, (epsilon,))[0]


def reaches(x_SDL: np.ndarray, lengths: Sequence[int], epsilons: Sequence[float]) -> list[Extent]:
  """`reach` of several, each by itself, of one band."""
  _check(x_SDL, lengths)
  fine = np.all(np.isfinite(x_SDL), axis=(0, 1))
  short, long = np.triu_indices(len(lengths), 1)
  keep = fine[short] & fine[long]
  short, long = short[keep], long[keep]
  if not fine.any():
    return [Extent(math.nan, math.nan, math.nan, lengths[0], lengths[-1]) for _ in epsilons]
  pairs = x_SDL[:, :, short] - x_SDL[:, :, long]
  gain, each = infer(pairs), infer(pairs, alone=True, confidence=1 - 0.05 / max(len(lengths) - 1, 1))

  def first(beaten: np.ndarray) -> float:
    return float(next(n for i, n in enumerate(lengths) if fine[i] and not beaten[short == i].any()))

  out = []
  for epsilon in epsilons:
    low, high = (math.nan, math.nan)
    if x_SDL.shape[1] >= MIN_DOCUMENTS:
      low, high = first(gain.low > epsilon), first(each.high > epsilon)
    out.append(Extent(first(gain.mean > epsilon), low, high, lengths[0], lengths[-1]))
  return out


def _check(x_SDL: np.ndarray, lengths: Sequence[int]) -> None:
  if x_SDL.ndim != 3 or x_SDL.shape[2] != len(lengths) or list(lengths) != sorted(set(lengths)):
    raise ValueError(f'shape {x_SDL.shape}, lengths {list(lengths)}: [seeds, documents, lengths], lengths rising')

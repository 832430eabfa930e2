"""Puts evaluation/stats.py on data whose truth is known: python -m evaluation.coverage [--trials 4000] [--runs DIR ...]

Tables of what nominal 95 % covers, how often a table without effects gets a mark, what a comparison can find, and
whether stretch and reach find the truth; docs/statistics.md keeps a run. `--runs` prints variance components instead:
of curves of one or two schemes with two or more seeds each.
"""

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import special

from evaluation import expect, stats
from evaluation.stats import Components

SEEDS, DOCUMENTS = (1, 3, 5, 10), (12, 20, 40)
LAWS = ('normal', 't4', 'lognormal')
LENGTHS = (64, 128, 256, 512, 1024, 2048)


def _variances(seed: float, document: float, residual: float) -> Components:
  return Components(seed**2, document**2, residual**2)


# As --runs prints them: configs/quickstart.py, seeds 0, 1, 2, 40 documents.
MEASURED = {'level at 1x': expect.LEVEL.components, 'yarn - none at 2x': expect.BROKEN.components}
COMPARISONS = (expect.RISING, expect.FLAT, expect.BROKEN, expect.SCHEMES)
NLL = 1.32  # nats per byte at 1x
TOKEN_SD = 1.45  # nats, of tokens within a document at 1x
PAIR_SD = 0.0066  # nats, of a document's difference between two lengths that break nothing: alibi
UNMEASURED = {
  'no seed effect': _variances(0.0, 0.2, 0.2),
  'residual only': _variances(0.0, 0.0, 0.2),
  'seeds rule': _variances(0.3, 0.1, 0.1),
}


def draw(law: str, shape: Sequence[int], rng: np.random.Generator) -> np.ndarray:
  """Mean 0, variance 1. t4: Student's t with 4 degrees of freedom; lognormal: skewness 1."""
  if law == 'normal':
    return rng.standard_normal(shape)
  if law == 't4':
    return rng.standard_t(4, shape) / np.sqrt(2)
  sigma = 0.3142  # of the logarithm
  z = np.exp(sigma * rng.standard_normal(shape) - sigma**2 / 2)
  return (z - 1) / np.sqrt(np.expm1(sigma**2))


def crossed(
  c: Components, S: int, D: int, C: int, law: str, rng: np.random.Generator, root_CC: np.ndarray | None = None
) -> np.ndarray:
  """x[S, D, C] with mean 0; effects are independent over cells, or mixed by `root_CC`."""
  mix = (lambda x: x) if root_CC is None else (lambda x: x @ root_CC)
  seed = 0 if S == 1 else np.sqrt(c.seed) * mix(draw(law, (S, 1, C), rng))
  return (
    seed + np.sqrt(c.document) * mix(draw(law, (1, D, C), rng)) + np.sqrt(c.residual) * mix(draw(law, (S, D, C), rng))
  )


def covered(c: Components, S: int, D: int, law: str, trials: int, rng: np.random.Generator) -> float:
  """Share of nominal 95 % intervals of a mean that hold the truth. Trials are cells, each by itself."""
  x = crossed(c, S, D, trials, law, rng)
  return float((stats.infer(x, alone=True).p > 0.05).mean())


def alternatives(c: Components, S: int, D: int, trials: int, rng: np.random.Generator, tokens: int = 64) -> list[float]:
  """Coverage of: ours, Satterthwaite's df, percentile bootstrap, documents only, all tokens as if independent.

  Tokens scatter by TOKEN_SD about their document's mean, whose scatter `c` already holds.
  """
  x = crossed(c, S, D, trials, 'normal', rng)
  ours = (stats.infer(x, alone=True).p > 0.05).mean()
  mean, document, squares = stats._squares([x])
  parts = [squares.document, *squares.seed_G, *(-r for r in squares.residual_G)]
  df = [*squares.df_K, *([(S - 1) * (D - 1)] if S > 1 else [])]
  # Unrestricted, as in the textbook; a negative variance covers nothing.
  total = np.sum(parts, 0)
  satterthwaite = total**2 / sum(v**2 / n for v, n in zip(parts, df, strict=True))
  t = mean / np.sqrt(np.maximum(total, 1e-30))
  few = x[:, :, : min(trials, 1000)]
  ends = np.array([stats.percentile_bootstrap(few[:, :, i], draws=1000) for i in range(few.shape[2])], float)
  only = document.mean(0) / np.sqrt(document.var(0, ddof=1) / D)
  one = x.mean((0, 1)) / np.sqrt((x.var((0, 1)) + TOKEN_SD**2) / (S * D * tokens))  # of the token's own scatter
  return [
    float(ours),
    float((2 * special.stdtr(satterthwaite, -np.abs(t)) > 0.05).mean()),
    float(((ends[:, 1] <= 0) & (ends[:, 2] >= 0)).mean()),
    float((2 * special.stdtr(D - 1, -np.abs(only)) > 0.05).mean()),
    float((np.abs(one) < 1.96).mean()),
  ]


def table_root(methods: int, lengths: int, methods_r: float = 0.5, lengths_r: float = 0.9) -> np.ndarray:
  """Root of the correlation of a methods x lengths table: equal between methods, lengths_r ** |i - j| over lengths."""
  i = np.arange(lengths)
  between = np.full((methods, methods), methods_r) + (1 - methods_r) * np.eye(methods)
  return np.linalg.cholesky(np.kron(between, lengths_r ** np.abs(i[:, None] - i))).T


def false_marks(
  c: Components, S: int, D: int, root_CC: np.ndarray, law: str, trials: int, rng: np.random.Generator
) -> tuple[float, float, float]:
  """Of tables without effects: share with a mark; share with one where cells are tested alone; marks per such table."""
  marked = alone = 0
  marks = 0.0
  for _ in range(trials):
    x = crossed(c, S, D, len(root_CC), law, rng, root_CC)
    marked += (stats.infer(x, draws=999).p < 0.05).any()
    single = (stats.infer(x, alone=True).p < 0.05).sum()
    alone, marks = alone + (single > 0), marks + single
  return marked / trials, alone / trials, marks / trials


def null_curve(k: float, lengths: Sequence[int], targets: int = 16, broken: float = np.inf) -> np.ndarray:
  """Fixed-target NLL of a model that uses at most k tokens, and beyond `broken` rises by 0.3 nats a doubling."""
  t = np.array(lengths)[:, None] - 1 - np.arange(targets)
  nll = (2.9 + 2.6 * (np.minimum(t, k) + 1.0) ** -0.45).mean(1)
  return nll + 0.3 * np.log2(np.maximum(np.array(lengths) / broken, 1))


def recovered(
  truth_L: np.ndarray, S: int, D: int, noise: float, trials: int, rng: np.random.Generator
) -> dict[str, tuple[float, float]]:
  """Of stretch and reach: share of estimates within one step of the grid, share of intervals that hold the truth.

  `noise`: standard deviation of a document's difference between two lengths.
  """
  ask = {
    'stretch(0.05)': lambda x: stats.stretch(x, LENGTHS, 128),
    'reach(0.01)': lambda x: stats.reach(x, LENGTHS),
    'reach(0.002)': lambda x: stats.reach(x, LENGTHS, 0.002),
  }
  hits = {name: np.zeros(2) for name in ask}
  for _ in range(trials):
    own = noise / np.sqrt(2) * rng.standard_normal((S, D, len(truth_L)))
    x = truth_L + crossed(MEASURED['level at 1x'], S, D, 1, 'normal', rng) + own
    for name, of in ask.items():
      true, got = of(truth_L[None, None]).value, of(x)
      hits[name] += abs(np.log2(got.value / true)) <= 1, got.low <= true <= got.high
  return {name: (float(near / trials), float(held / trials)) for name, (near, held) in hits.items()}


def found(c: Components, S: int, D: int, groups: int, effect: float, trials: int, rng: np.random.Generator) -> float:
  """Share of comparisons, tested alone, that mark a true difference."""
  # Two schemes share no seed: each has half of the seeds' and of the residual variance.
  each = c if groups == 1 else Components(c.seed / 2, 0.0, c.residual / 2)
  x = effect + crossed(each, S, D, trials, 'normal', rng)
  if groups == 1:
    return float((stats.infer(x, alone=True).p < 0.05).mean())
  x += np.sqrt(c.document) * rng.standard_normal((1, D, trials))
  return float((stats.infer(x, crossed(each, S, D, trials, 'normal', rng), alone=True).p < 0.05).mean())


def _table(title: str, head: Sequence[str], rows: Iterator[Sequence[object]]) -> None:
  print(f'\n{title}\n\n| ' + ' | '.join(head) + ' |\n|' + '---|' * len(head))
  for row in rows:
    print('| ' + ' | '.join(f'{v:.1f}' if isinstance(v, float) else str(v) for v in row) + ' |', flush=True)


def report(trials: int) -> None:
  rng = np.random.default_rng(0)
  settings = MEASURED | UNMEASURED
  for law in LAWS:
    _table(
      f'Coverage of nominal 95 %, %, {law} effects',
      ['seeds', 'documents', *settings],
      (
        [S, D, *(100 * covered(c, S, D, law, trials, rng) for c in settings.values())]
        for S, D in itertools.product(SEEDS, DOCUMENTS)
      ),
    )
  _table(
    'Coverage of other intervals, %: yarn - none at 2x; with one seed, and last, level at 1x',
    ['seeds', 'documents', 'ours', 'Satterthwaite', 'percentile bootstrap', 'documents only', 'tokens independent'],
    (
      [S, D, *(100 * v for v in alternatives(MEASURED[at], S, D, trials, rng))]
      for S, D, at in [
        *((1, D, 'level at 1x') for D in DOCUMENTS),
        *((S, D, 'yarn - none at 2x') for S in SEEDS[1:] for D in DOCUMENTS),
        *((S, 20, 'level at 1x') for S in SEEDS[1:]),
      ]
    ),
  )
  for size, root in (('12 methods x 6 lengths', table_root(12, 6)), ('6 lengths', table_root(1, 6))):
    _table(
      f'Tables of {size} without effects, yarn - none at 2x: with a false mark, %',
      ['seeds', 'documents', 'effects', 'max-t', 'each cell alone', 'marks per table, alone'],
      (
        [S, D, law, 100 * a, 100 * b, f'{m:.1f}']
        for S, D, law in itertools.product((1, 3, 5), DOCUMENTS, LAWS[:2])
        for a, b, m in [false_marks(MEASURED['yarn - none at 2x'], S, D, root, law, max(trials // 5, 10), rng)]
      ),
    )
  effect = 0.005 * NLL
  _table(
    f'Power for 0.5 % of NLL ({effect:.4f} nats), %, by formula and simulated, and the difference of power 0.8, nats',
    ['comparison', 'seeds', 'documents', 'power', 'simulated', 'detectable', '% of NLL'],
    (
      [
        name,
        S,
        D,
        100 * stats.power(effect, c, S, D, groups=g),
        100 * found(c, S, D, g, effect, trials, rng),
        f'{m:.4f}',
        100 * m / NLL,
      ]
      for (name, c, _, g), (S, D) in itertools.product(
        COMPARISONS, [(1, 40), (3, 20), (3, 40), (5, 40), (10, 40), (10, 160)]
      )
      for m in [stats.min_detectable(c, S, D, groups=g)]
    ),
  )
  curves = {
    'uses 64': null_curve(64, LENGTHS),
    'uses 512': null_curve(512, LENGTHS),
    'breaks at 512': null_curve(64, LENGTHS, broken=512),
  }
  _table(
    f'Null models, lengths {LENGTHS[0]} to {LENGTHS[-1]}: within one step of the truth / interval holds it, %',
    ['model', 'seeds', 'documents', 'stretch(0.05)', 'reach(0.01)', 'reach(0.002)'],
    (
      [
        name,
        S,
        D,
        *(
          f'{100 * a:.1f} / {100 * b:.1f}'
          for a, b in recovered(curve, S, D, PAIR_SD, max(trials // 10, 10), rng).values()
        ),
      ]
      for (name, curve), (S, D) in itertools.product(curves.items(), [(1, 12), (1, 40), (3, 40)])
    ),
  )


def _curves(runs: Sequence[str]) -> dict[str, dict[tuple[str, int], dict[int, list[float]]]]:
  """scheme -> (method, length) -> seed -> documents, of fixed targets, from each run's curve.jsonl."""
  found: dict[str, dict[tuple[str, int], dict[int, list[float]]]] = {}
  for run in runs:
    for line in (Path(run) / 'extrapolation' / 'curve.jsonl').read_text().splitlines():
      point = json.loads(line)
      if point['protocol'] == 'fixed_targets' and 'nll_documents' in point:
        cells = found.setdefault(point['scheme'], {}).setdefault((point['method'], point['length']), {})
        cells[point['seed']] = point['nll_documents']
  return found


def measure(runs: Sequence[str]) -> None:
  """Components of levels, of method - none, of length - 1x and of the second scheme minus the first; stretch, reach."""
  rows: list[list[object]] = []

  def add(name: str, x: np.ndarray, y: np.ndarray | None = None) -> None:
    mean = x.mean() - (0 if y is None else y.mean())
    rows.append([name, len(x), f'{mean:.4f}', *(f'{v**0.5:.4f}' for v in stats.components(x, y))])

  curves = _curves(runs)
  extents = []
  train_len = json.loads((Path(runs[0]) / 'extrapolation' / 'curve.jsonl').read_text().splitlines()[0])['train_length']
  arrays = {s: {k: np.array([v[i] for i in sorted(v)]) for k, v in cells.items()} for s, cells in curves.items()}
  for scheme, cells in arrays.items():
    for (method, length), x in cells.items():
      at = f'{length / train_len:g}x'
      add(f'{scheme} {method} {at}', x)
      if method != 'none':
        add(f'{scheme} {method} - none {at}', x - cells['none', length])
      if length != train_len:
        add(f'{scheme} {method} {at} - 1x', x - cells[method, train_len])
    for method in {m: None for m, _ in cells}:
      lengths = sorted(n for m, n in cells if m == method)
      x = np.stack([cells[method, n] for n in lengths], -1)
      of = stats.stretch(x, lengths, train_len), stats.reach(x, lengths), stats.reach(x, lengths, 0.002)
      extents.append([f'{scheme} {method}', len(x), *(e.text(train_len) for e in of)])
  first, *others = arrays
  for other in others:
    for key in (k for k in arrays[first] if k in arrays[other]):
      add(f'{other} - {first} {key[0]} {key[1] / train_len:g}x', arrays[other][key], arrays[first][key])
  _table('Standard deviations of effects, nats', ['', 'seeds', 'mean', 'seed', 'document', 'residual'], iter(rows))
  _table('Two lengths per curve', ['', 'seeds', 'stretch(0.05)', 'reach(0.01)', 'reach(0.002)'], iter(extents))


if __name__ == '__main__':
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument(
    '--trials', type=int, default=4000, help='a fifth of it where a trial is a table, a tenth where it is a curve'
  )
  parser.add_argument('--runs', nargs='+', help='measure variance components of these runs instead')
  args = parser.parse_args()
  if args.runs:
    measure(args.runs)
  else:
    report(args.trials)

"""Corpora with a known answer: text drawn from a distribution whose entropy at every token and context is exact.

A curve above its floor is what the model lacks, not what the text withholds, and a step of the floor says how far a
model has to look. Everything follows from the arguments, `seed` among them; a change of numpy's streams would change
the corpus's sha256, which every result holds.
"""

import numpy as np

import spec
from data.document import Document, Drawn


def _entropy(p: np.ndarray) -> np.ndarray:
  """Nats, over the last axis; 0 ln 0 = 0."""
  return -(p * np.log(np.where(p > 0, p, 1.0))).sum(-1)  # scipy's entr; importing it takes as long as flax


def check(corpus: str, key: str, value: float, ok: bool, allowed: str) -> None:
  if not ok:
    raise spec.SpecError(f'corpus {corpus}: {key} = {value!r}: {allowed} is allowed')


def names(count: int) -> list[str]:
  return [f'{i:06d}' for i in range(count)]


# ---- grids


def next_row(cells: np.ndarray, rule: int) -> np.ndarray:
  """One step of an elementary cellular automaton, 0 outside: bit 4 l + 2 c + r of `rule` (Wolfram 1983)."""
  padded = np.pad(cells, [(0, 0)] * (cells.ndim - 1) + [(1, 1)])
  neighbours = 4 * padded[..., :-2] + 2 * padded[..., 1:-1] + padded[..., 2:]
  return (rule >> neighbours & 1).astype(cells.dtype)


def _permutes_rows(rule: int, width: int) -> bool:
  """Whether the rule maps the 2**width rows one to one."""
  rows = (np.arange(2**width, dtype=np.int32)[:, None] >> np.arange(width) & 1).astype(np.int16)
  images = next_row(rows, rule) @ (1 << np.arange(width, dtype=np.int32))
  return len(np.unique(images)) == len(rows)


def grid(
  *, rows: int = 80, width: int = 16, grids: int = 1000, rule: int = 90, noise: float = 0.05, seed: int = 0
) -> Drawn:
  """Noisy cellular automata, raster-scanned: `width` cells of '.' and '#', a newline, row after row.

  Row 0 is fair coins. Cell (r, c) is the rule's function of (r-1, c-1), (r-1, c), (r-1, c+1), '.' outside, flipped
  with probability `noise`: what predicts it lies width, width + 1 and width + 2 bytes back, in two dimensions next
  door. The default, 90, is the exclusive or of the outer two, either of which alone tells nothing; 150 is that of all
  three and takes a small model several times as long. Rule 30 and other irreversible ones are refused: only where the
  rule permutes the rows is each row uniform whatever its number, without noise and hence with it, so that density is
  1/2 and the floor exact.

  Floor: 0 for a newline, ln 2 for a cell of a window's first row, below it the entropy of one flip. `stride` is a row.
  """
  check('grid', 'rows', rows, rows >= 2, 'a whole number >= 2')
  check('grid', 'width', width, 2 <= width <= 20, 'a whole number from 2 to 20')
  check('grid', 'grids', grids, grids >= 1, 'a whole number >= 1')
  check('grid', 'rule', rule, 0 <= rule <= 255, 'a whole number from 0 to 255')
  check('grid', 'noise', noise, 0 < noise <= 0.5, 'a number above 0, at most 0.5,')
  check('grid', 'seed', seed, seed >= 0, 'a whole number >= 0')
  if not _permutes_rows(rule, width):
    able = ' or '.join(str(r) for r in (60, 90, 150) if _permutes_rows(r, width))
    raise spec.SpecError(
      f'corpus grid: rule = {rule}, width = {width}: a rule that permutes the rows ({able} at this width) is allowed'
    )
  rng = np.random.default_rng(seed)
  cells = np.empty((rows, grids, width), np.int16)
  cells[0] = rng.random((grids, width)) < 0.5
  for r in range(1, rows):
    cells[r] = next_row(cells[r - 1], rule) ^ (rng.random((grids, width)) < noise)
  text = np.full((grids, rows, width + 1), ord('\n'), np.uint8)
  text[:, :, :width] = np.where(cells.swapaxes(0, 1), ord('#'), ord('.'))
  flip = float(_entropy(np.array([noise, 1 - noise])))

  def floor(position: np.ndarray, visible: np.ndarray) -> np.ndarray:
    row, column = np.divmod(position, width + 1)
    below = row > (position - visible + width) // (width + 1)  # its window's first whole row
    return np.where(column == width, 0.0, np.where(below, flip, np.log(2)))

  return Drawn([Document(n, t.tobytes()) for n, t in zip(names(grids), text)], floor, stride=width + 1)


# ---- a copy at a distance among Markov text


def transitions(letters: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
  """(P[letters, letters], its stationary distribution). Rows are eighth powers of uniforms, normalized: about four
  letters in 16 are likely after each."""
  weights = np.random.default_rng([seed, 1]).random((letters, letters)) ** 8
  p = weights / weights.sum(1, keepdims=True)
  # pi (P - 1) = 0 and sum(pi) = 1, as least squares.
  equations = np.concatenate([p.T - np.eye(letters), np.ones((1, letters))])
  pi = np.linalg.lstsq(equations, np.append(np.zeros(letters), 1.0))[0]
  return p, pi


def markov_copy(
  *,
  distance: int = 32,
  letters: int = 16,
  noise: float = 0.05,
  tokens: int = 4096,
  documents: int = 400,
  seed: int = 0,
) -> Drawn:
  """Two interleaved texts: one that needs two bytes of context, and one that needs exactly `distance`.

  Offsets 1, 3, 5 ...: 'a', 'b' ... of a Markov chain of order 1 on its own subsequence, started stationary; its
  transitions are drawn from `seed`. Offsets 0, 2, 4 ...: 'A', 'B' ...; each is the one `distance` bytes before,
  or with probability `noise`, and in a document's first `distance` bytes, a fair draw from all `letters`.

  Floor of a capital: ln A, A = `letters`, with fewer than `distance` bytes visible, of which it is independent; else
  the entropy of the copy, (1 - noise) + noise/A for its own letter and noise/A for each other. Of a small letter: the
  stationary entropy with 0 or 1 bytes visible, else the chain's entropy rate. Which of the two comes is known: case
  alternates, and `stride` 2 makes a capital each window's first.
  """
  at = 'markov_copy'
  check(at, 'distance', distance, distance >= 2 and distance % 2 == 0, 'an even whole number >= 2')
  check(at, 'letters', letters, 2 <= letters <= 26, 'a whole number from 2 to 26')
  check(at, 'noise', noise, 0 < noise <= 0.5, 'a number above 0, at most 0.5,')
  check(at, 'tokens', tokens, tokens > distance, f'a whole number above distance = {distance}')
  check(at, 'documents', documents, documents >= 1, 'a whole number >= 1')
  check(at, 'seed', seed, seed >= 0, 'a whole number >= 0')
  p, pi = transitions(letters, seed)
  rng = np.random.default_rng([seed, 0])
  half = (tokens + 1) // 2

  fresh = rng.integers(letters, size=(half, documents))
  copied = rng.random((half, documents)) >= noise
  for i in range(distance // 2, half):
    fresh[i] = np.where(copied[i], fresh[i - distance // 2], fresh[i])

  chain = np.empty((half, documents), np.int64)
  cumulative, u = np.cumsum(p, axis=1), rng.random((half, documents))
  # Without the last: rounding may leave it below 1.
  chain[0] = (u[0][:, None] >= np.cumsum(pi)[:-1]).sum(1)
  for i in range(1, half):
    chain[i] = (u[i][:, None] >= cumulative[chain[i - 1], :-1]).sum(1)

  text = np.empty((documents, 2 * half), np.uint8)
  text[:, 0::2] = ord('A') + fresh.T
  text[:, 1::2] = ord('a') + chain.T
  same = np.full(letters, noise / letters)
  same[0] += 1 - noise
  copy_nats, fair_nats = float(_entropy(same)), np.log(letters)
  rate_nats, stationary_nats = float(pi @ _entropy(p)), float(_entropy(pi))

  def floor(position: np.ndarray, visible: np.ndarray) -> np.ndarray:
    capital = np.where(visible < distance, fair_nats, copy_nats)
    small = np.where(visible < 2, stationary_nats, rate_nats)
    return np.where(position % 2, small, capital)

  return Drawn([Document(n, t[:tokens].tobytes()) for n, t in zip(names(documents), text)], floor, stride=2)

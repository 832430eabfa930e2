"""Which documents are trained on, watched and scored: near-duplicates together, never by the run's seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

import spec
from data.corpora import Corpus

SHINGLE = 24  # bytes, a multiple of 8: about four English words, long enough not to be shared by chance
KEPT = 8  # one shingle in 8 is looked at: 0.8 s for 12 MB; one in 32 merges files of 100 bytes by chance


class TokenDocument(NamedTuple):
  name: str
  tokens: np.ndarray  # int32[n], text only: BOS is put in where windows are cut
  n_bytes: int  # of the source text, for bits per byte
  answer_n: np.ndarray | None = None  # bool[n], the tokens that are trained on; None: all


@dataclass(frozen=True, eq=False)
class Splits:
  train: tuple[TokenDocument, ...]
  validation: tuple[TokenDocument, ...]
  test: tuple[TokenDocument, ...]


def _sketch(text: bytes) -> np.ndarray:
  """Sorted distinct hashes, uint64, of the kept shingles. What is kept depends on the hash alone: a shared
  shingle is kept in both documents or in neither, and the shared fraction is estimated without bias."""
  n = len(text) - SHINGLE + 1
  if n < 1:
    return np.empty(0, np.uint64)
  hash_n = np.zeros(n, np.uint64)
  for at in range(0, SHINGLE, 8):
    hash_n ^= np.ndarray(n, '<u8', buffer=text, offset=at, strides=(1,))  # 8 bytes from every offset
    hash_n *= np.uint64(0x9E3779B97F4A7C15)
    hash_n ^= hash_n >> np.uint64(29)
  return np.unique(hash_n[hash_n % np.uint64(KEPT) == 0])


def near_duplicate_groups(texts: Sequence[bytes], *, threshold: float = 0.3) -> np.ndarray:
  """A group label per document, int32[n]: equal texts, and texts that share more than `threshold` of the
  smaller one's 24-byte shingles, are in one group, transitively.

  An address that was sent twice, or a module kept in two places, would otherwise be trained on and scored.
  Exact deduplication misses those; all pairs by edit distance take hours. Sketches take a second.
  """
  # Half as long as jax to import, and corpora that are already grouped do without.
  from scipy import sparse
  from scipy.sparse.csgraph import connected_components

  sketches = [_sketch(text) for text in texts]
  size_n = np.array([len(sketch) for sketch in sketches])
  n = len(texts)
  distinct, column = np.unique(np.concatenate(sketches), return_inverse=True)
  row = np.repeat(np.arange(n), size_n)
  has = sparse.csr_array((np.ones(len(row), np.int32), (row, column)), shape=(n, len(distinct)))
  shared = (has @ has.T).tocoo()
  i, j = shared.coords
  near = shared.data > threshold * np.minimum(size_n[i], size_n[j])
  first: dict[bytes, int] = {}
  twin = [first.setdefault(text, k) for k, text in enumerate(texts)]  # documents too short for a sketch
  edges = np.concatenate([i[near], np.arange(n)]), np.concatenate([j[near], twin])
  graph = sparse.coo_array((np.ones(len(edges[0]), np.int8), edges), shape=(n, n))
  return connected_components(graph, directed=False)[1]


def document_groups(corpus: Corpus) -> np.ndarray:
  """A group label per document, for `draw_splits`. Drawn documents are each their own: rows of a narrow grid repeat by
  chance, and 400 grids 8 cells wide with noise 0.01 were one group of near-duplicates."""
  if corpus.independent:
    return np.arange(len(corpus.documents))
  return near_duplicate_groups([d.text for d in corpus.documents])


def draw_splits(
  corpus: Corpus,
  documents: Sequence[TokenDocument],
  group_n: np.ndarray,
  *,
  test_docs: int,
  validation_docs: int,
  min_test_tokens: int,
  min_validation_tokens: int,
) -> Splits:
  """Whole groups in the order of a hash: first into test, then validation, the rest is train.

  A group is drawn when a document of it is long enough, and only such documents are listed: its short ones
  are neither scored nor trained on. `test` exceeds `test_docs` where its last group has several. Lists keep
  the hash order, so that the first k test documents are a sample too. A group with over half of the bytes
  always trains, or it could swallow the corpus. Raises ValueError where documents are too few.

  A function of texts, names and lengths alone. Drawn from the run's seed, seeds would be scored on different
  documents and could not be compared; the last files of a listing would make one decade the test.
  """
  members: dict[int, list[TokenDocument]] = {}
  for document, group in zip(documents, group_n.tolist()):
    members.setdefault(group, []).append(document)

  def order(group: list[TokenDocument]) -> bytes:
    return hashlib.sha256(f'{corpus.sha256}/{min(d.name for d in group)}'.encode()).digest()

  def is_most(group: list[TokenDocument]) -> bool:
    return 2 * sum(d.n_bytes for d in group) > corpus.n_bytes

  def draw(field: str, wanted: int, shortest: int) -> tuple[TokenDocument, ...]:
    nonlocal groups
    drawn, left = [], []
    for group in groups:
      enough = [d for d in group if len(d.tokens) >= shortest]
      if enough and len(drawn) < wanted and not is_most(group):
        drawn += enough
      else:
        left.append(group)
    groups = left
    if len(drawn) < wanted:
      most = [f' outside the group of {len(g)} that is over half of its bytes' for g in left if is_most(g)]
      raise spec.SpecError(
        f'corpus {corpus.name!r} has {len(drawn)} documents of >= {shortest} tokens{"".join(most)}, '
        f'config.data.{field} = {wanted} are needed; shorten train_len or max_multiple, or lower {field}'
      )
    return tuple(drawn)

  groups = sorted(members.values(), key=order)
  test = draw('test_docs', test_docs, min_test_tokens)
  validation = draw('validation_docs', validation_docs, min_validation_tokens)
  train = tuple(d for group in groups for d in group)
  if max((len(d.tokens) for d in train), default=0) < min_validation_tokens:
    raise spec.SpecError(
      f'corpus {corpus.name!r}: the train split would be empty: of {len(documents)} documents none is left '
      f'with >= {min_validation_tokens} tokens; lower config.data.test_docs or validation_docs'
    )
  return Splits(train, validation, test)

"""Which documents are nearly the same, for corpora of any size: sketches go through files, not through memory."""

import contextlib
import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

SHINGLE = 24  # bytes, a multiple of 8: about four English words, long enough not to be shared by chance
KEPT = 8  # one shingle in 8 is looked at; one in 32 merges files of 100 bytes by chance. A power of 2
THRESHOLD = 0.3  # of the smaller document's shingles

BITS = 8  # of a hash, its highest, say in which of 256 files it waits: each is sorted in memory, a 256th of all
HELD = 1 << 21  # hashes that wait in memory for their files, and pairs that are counted at once
PIECE = 1 << 17  # bytes of text whose shingles are hashed at once: their hashes fit into a core's cache
# Of a shingle that k documents share, k (k - 1) / 2 pairs would have to be counted. In corpora of more than EXACT
# documents, one that more than COMMON share counts between neighbours in their list only: copies of one template share
# most of their lists and are chained, and what shares a licence's header with thousands is compared with two of them.
EXACT, COMMON = 1024, 64
WAITING = np.dtype([('hash', '<u8'), ('document', '<u4')])


def _hashes(text: bytes | memoryview) -> np.ndarray:
  """Sorted distinct hashes, uint64, of the kept shingles of at most a piece. What is kept depends on the hash alone: a
  shared shingle is kept in both documents or in neither, and the shared fraction is estimated without bias."""
  n = len(text) - SHINGLE + 1
  if n < 1:
    return np.empty(0, np.uint64)
  hash_n = np.zeros(n, np.uint64)
  for at in range(0, SHINGLE, 8):
    hash_n ^= np.ndarray(n, '<u8', buffer=text, offset=at, strides=(1,))  # 8 bytes from every offset
    hash_n *= np.uint64(0x9E3779B97F4A7C15)
    hash_n ^= hash_n >> np.uint64(29)
  return np.unique(hash_n[hash_n & np.uint64(KEPT - 1) == 0])


def sketch(text: bytes) -> np.ndarray:
  """Those of a whole document."""
  whole = memoryview(text)
  parts = [_hashes(whole[at : at + PIECE + SHINGLE - 1]) for at in range(0, len(text), PIECE)]
  return parts[0] if len(parts) == 1 else np.unique(np.concatenate([np.empty(0, np.uint64), *parts]))


class Sketches:
  """Documents, added one at a time, then their groups. Memory: 100 bytes a document, and a 256th of all hashes.

  An address that was sent twice, or a module kept in two places, would otherwise be trained on and scored. Exact
  deduplication misses those; all pairs by edit distance take hours.
  """

  def __init__(self, folder: str | Path):
    """`folder`: of its own, for 1.5 times the bytes of the corpus."""
    self._folder = Path(folder)
    self._first: dict[bytes, int] = {}
    self._twin: list[int] = []  # the first document with this text
    self._size: list[int] = []
    self._waiting: list[np.ndarray] = []
    self._held = 0

  def add(self, text: bytes) -> None:
    document = len(self._twin)
    twin = self._first.setdefault(hashlib.sha256(text).digest(), document)
    hashes = sketch(text) if twin == document else np.empty(0, np.uint64)  # a copy is where its first is
    self._twin.append(twin)
    self._size.append(len(hashes))
    waiting = np.empty(len(hashes), WAITING)
    waiting['hash'], waiting['document'] = hashes, document
    self._waiting.append(waiting)
    self._held += len(hashes)
    if self._held > HELD:
      self._spill()

  def groups(self, threshold: float = THRESHOLD) -> np.ndarray:
    """A group label per document, int32[n]: equal texts, and texts that share more than `threshold` of the smaller
    one's shingles, are in one group, transitively."""
    # Half as long as jax to import, and corpora that are already grouped do without.
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    self._spill()
    n, size_n = len(self._twin), np.array(self._size)
    pair, shared = _sums(self._pairs(n))
    i, j = pair // max(n, 1), pair % max(n, 1)
    near = shared > threshold * np.minimum(size_n[i], size_n[j])
    edges = np.concatenate([i[near], np.arange(n)]), np.concatenate([j[near], self._twin])
    graph = sparse.coo_array((np.ones(len(edges[0]), np.int8), edges), shape=(n, n))
    return connected_components(graph, directed=False)[1]

  def _spill(self) -> None:
    waiting = np.concatenate([np.empty(0, WAITING), *self._waiting])
    self._waiting, self._held = [], 0
    bucket = (waiting['hash'] >> np.uint64(64 - BITS)).astype(np.uint8)
    waiting = waiting[np.argsort(bucket, kind='stable')]
    ends = np.cumsum(np.bincount(bucket, minlength=1 << BITS))
    with contextlib.ExitStack() as stack:
      for k, part in enumerate(np.split(waiting, ends[:-1])):
        if len(part):
          file: BinaryIO = stack.enter_context(open(self._folder / f'{k}', 'ab'))
          part.tofile(file)

  def _pairs(self, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(i n + j, shingles that documents i < j share), of a part of the shingles each."""
    common = n if n <= EXACT else COMMON
    for path in sorted(self._folder.iterdir()):
      waiting = np.fromfile(path, WAITING)
      path.unlink()
      hashes = np.sort(waiting['hash'])
      several = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
      if not len(several):
        continue
      at = np.minimum(np.searchsorted(several, waiting['hash']), len(several) - 1)
      waiting = waiting[several[at] == waiting['hash']]
      waiting = waiting[np.argsort(waiting['hash'], kind='stable')]  # and by document: they came in that order
      document = waiting['document'].astype(np.int64)
      same = np.concatenate([[-1], np.flatnonzero(np.diff(waiting['hash'])), [len(waiting) - 1]])
      first, count = same[:-1] + 1, np.diff(same)
      for k in np.unique(count):
        lists = document[first[count == k][:, None] + np.arange(k)]  # the same documents share many shingles
        lists, times = np.unique(lists, axis=0, return_counts=True)
        a, b = np.triu_indices(k, 1) if k <= common else (np.arange(k - 1), np.arange(1, k))
        step = max(HELD // len(a), 1)
        for some in range(0, len(lists), step):
          part = lists[some : some + step]
          yield (part[:, a] * n + part[:, b]).ravel(), np.repeat(times[some : some + step], len(a))


def _sums(parts: Iterable[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
  """(distinct keys, sums of their values), with little more in memory than those."""
  keys, sums = np.empty(0, np.int64), np.empty(0, np.int64)
  waiting: list[tuple[np.ndarray, np.ndarray]] = []
  held = 0

  def merged() -> tuple[np.ndarray, np.ndarray]:
    every = np.concatenate([keys, *(k for k, _ in waiting)])
    distinct, where = np.unique(every, return_inverse=True)
    values = np.concatenate([sums, *(v for _, v in waiting)])
    return distinct, np.bincount(where, values, minlength=len(distinct)).astype(np.int64)

  for part in parts:
    waiting.append(part)
    held += len(part[0])
    if held > max(HELD, len(keys)):
      keys, sums = merged()
      waiting, held = [], 0
  return merged()


def near_duplicate_groups(texts: Iterable[bytes], *, threshold: float = THRESHOLD) -> np.ndarray:
  """`Sketches.groups` of texts that are at hand."""
  with tempfile.TemporaryDirectory() as folder:
    sketches = Sketches(folder)
    for text in texts:
      sketches.add(text)
    return sketches.groups(threshold)

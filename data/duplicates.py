"""Which documents are nearly the same, for corpora of any size: sketches go through files, not through memory."""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

SHINGLE = 24  # bytes, a multiple of 8: about four English words, long enough not to be shared by chance
KEPT = 8  # one shingle in 8 is looked at; one in 32 merges files of 100 bytes by chance. A power of 2
THRESHOLD = 0.3  # of the smaller document's shingles

FILES = 256  # in which hashes wait, by their highest bits, then pairs, by their first document; one at a time is read
HELD = 1 << 21  # hashes, or pairs, that wait in memory for their files
PIECE = 1 << 17  # bytes of text whose shingles are hashed at once: their hashes fit into a core's cache
# Of a shingle that k documents share, k (k - 1) / 2 pairs would have to be counted. In corpora of more than EXACT
# documents, one that more than COMMON share counts between neighbours in their list only: copies of one template share
# most of their lists and are chained, and what shares a licence's header with thousands is compared with two of them.
EXACT, COMMON = 1024, 8
HASHES = np.dtype([('hash', '<u8'), ('document', '<u4')])
NONE = np.empty((2, 0), np.int64)
PAIRS = np.dtype([('pair', '<u8'), ('shared', '<u4')])


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


class _Waiting:
  """Records that are too many for memory, in files of those that belong together."""

  def __init__(self, folder: Path, dtype: np.dtype):
    self._folder, self._dtype = folder, dtype
    folder.mkdir()

  def add(self, records: np.ndarray, file_n: np.ndarray) -> None:
    """`file_n`: uint8, where each belongs."""
    order = np.argsort(file_n, kind='stable')
    ends = np.cumsum(np.bincount(file_n, minlength=FILES))
    for k, part in enumerate(np.split(records[order], ends[:-1])):
      if len(part):
        with open(self._folder / f'{k:03}', 'ab') as file:
          part.tofile(file)

  def take(self) -> Iterator[np.ndarray]:
    """In the order in which they were added, file by file, which are gone then."""
    for path in sorted(self._folder.iterdir()):
      yield np.fromfile(path, self._dtype)
      path.unlink()


class Sketches:
  """Documents, added one at a time, then their groups. Memory: 100 bytes a document, and a 256th of all hashes.

  An address that was sent twice, or a module kept in two places, would otherwise be trained on and scored. Exact
  deduplication misses those; all pairs by edit distance take hours.
  """

  def __init__(self, folder: str | Path):
    """`folder`: for 1.5 times the bytes of the corpus, and more where its documents share much."""
    self._hashes = _Waiting(Path(folder) / 'hashes', HASHES)
    self._pairs = _Waiting(Path(folder) / 'pairs', PAIRS)
    self._first: dict[bytes, int] = {}
    self._twin: list[int] = []  # the first document with this text
    self._size: list[int] = []
    self._held: list[np.ndarray] = []
    self._n_held = 0

  def add(self, text: bytes) -> None:
    document = len(self._twin)
    twin = self._first.setdefault(hashlib.sha256(text).digest(), document)
    hashes = sketch(text) if twin == document else np.empty(0, np.uint64)  # a copy is where its first is
    self._twin.append(twin)
    self._size.append(len(hashes))
    records = np.empty(len(hashes), HASHES)
    records['hash'], records['document'] = hashes, document
    self._held.append(records)
    self._n_held += len(hashes)
    if self._n_held > HELD:
      self._spill()

  def groups(self, threshold: float = THRESHOLD) -> np.ndarray:
    """A group label per document, int32[n]: equal texts, and texts that share more than `threshold` of the smaller
    one's shingles, are in one group, transitively."""
    # Half as long as jax to import, and corpora that are already grouped do without.
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    self._spill()
    n, size_n = len(self._twin), np.array(self._size)
    edges = [(np.arange(n), np.array(self._twin, np.int64))]
    for pair, shared in self._summed(self._shared(n), n):
      i, j = np.divmod(pair, n)
      near = shared > threshold * np.minimum(size_n[i], size_n[j])
      edges.append((i[near], j[near]))
    i, j = (np.concatenate(ends) for ends in zip(*edges))
    graph = sparse.coo_array((np.ones(len(i), np.int8), (i, j)), shape=(n, n))
    return connected_components(graph, directed=False)[1]

  def _spill(self) -> None:
    records = np.concatenate([np.empty(0, HASHES), *self._held])
    self._held, self._n_held = [], 0
    self._hashes.add(records, (records['hash'] >> np.uint64(56)).astype(np.uint8))

  def _shared(self, n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(i n + j, shingles that documents i < j share), of a part of the shingles each."""
    common = n if n <= EXACT else COMMON
    for records in self._hashes.take():
      hashes = np.sort(records['hash'])
      several = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
      if not len(several):
        continue
      at = np.minimum(np.searchsorted(several, records['hash']), len(several) - 1)
      records = records[several[at] == records['hash']]
      records = records[np.argsort(records['hash'], kind='stable')]  # and by document: they came in that order
      document = records['document'].astype(np.int64)
      ends = np.concatenate([[-1], np.flatnonzero(np.diff(records['hash'])), [len(records) - 1]])
      first, count = ends[:-1] + 1, np.diff(ends)
      for k in np.unique(count).tolist():
        lists = document[first[count == k][:, None] + np.arange(k)]
        a, b = np.triu_indices(k, 1) if k <= common else (np.arange(k - 1), np.arange(1, k))
        step = max(HELD // len(a), 1)
        for some in range(0, len(lists), step):
          part = lists[some : some + step]
          pair, shared = np.unique(part[:, a] * n + part[:, b], return_counts=True)
          yield pair, shared

  def _summed(self, parts: Iterable[tuple[np.ndarray, np.ndarray]], n: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(distinct pairs, what they share in all parts): all of them where memory holds them, else in several parts."""
    held, n_held = [], 0
    spilled = False

    def merged() -> tuple[np.ndarray, np.ndarray]:
      pairs, shared = (np.concatenate(column) for column in zip(*held, tuple(NONE)))
      distinct, where = np.unique(pairs, return_inverse=True)
      return distinct, np.bincount(where, shared, minlength=len(distinct)).astype(np.int64)

    def spill(pair: np.ndarray, shared: np.ndarray) -> None:
      records = np.empty(len(pair), PAIRS)
      records['pair'], records['shared'] = pair, shared
      self._pairs.add(records, (pair // n * FILES // n).astype(np.uint8))

    for part in parts:
      held.append(part)
      n_held += len(part[0])
      if n_held > 2 * HELD:
        held = [merged()]
        n_held = len(held[0][0])
        if n_held > HELD:
          spill(*held[0])
          held, n_held, spilled = [], 0, True
    if not spilled:
      yield merged()
      return
    spill(*merged())
    for records in self._pairs.take():
      held = [(records['pair'].astype(np.int64), records['shared'])]
      yield merged()


def near_duplicate_groups(texts: Iterable[bytes], *, threshold: float = THRESHOLD) -> np.ndarray:
  """`Sketches.groups` of texts that are at hand."""
  with tempfile.TemporaryDirectory() as folder:
    sketches = Sketches(folder)
    for text in texts:
      sketches.add(text)
    return sketches.groups(threshold)

"""Which documents are trained on, watched and scored: near-duplicates together, never by the run's seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

import spec


class Tokens:
  """The ids of one document, text only, as a part of all ids of a file: read where they are asked for, as int32."""

  __slots__ = ('_first', '_ids', '_last')

  def __init__(self, ids: np.ndarray, first: int, last: int):
    self._ids, self._first, self._last = ids, first, last

  def __len__(self) -> int:
    return self._last - self._first

  def __getitem__(self, at: Any) -> Any:
    return self._ids[self._first : self._last][at].astype(np.int32)

  def copy(self) -> np.ndarray:
    return self[:]

  def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
    return self[:] if dtype is None else self[:].astype(dtype)


class TokenDocument(NamedTuple):
  name: str
  tokens: np.ndarray | Tokens  # int32[n], text only: BOS is put in where windows are cut
  n_bytes: int  # of the source text, for bits per byte


class Sized(Protocol):
  """What a split needs to know of a corpus."""

  @property
  def name(self) -> str: ...
  @property
  def sha256(self) -> str: ...
  @property
  def n_bytes(self) -> int: ...


@dataclass(frozen=True, eq=False)
class Splits:
  train: tuple[TokenDocument, ...]
  validation: tuple[TokenDocument, ...]
  test: tuple[TokenDocument, ...]


def draw_splits(
  corpus: Sized,
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

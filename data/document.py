"""What a corpus source hands over: named texts, and, where they were drawn from a known distribution, what is known."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Document(NamedTuple):
  name: str
  text: bytes


# (position, visible) -> nats, arrays of one shape: the entropy of the byte at offset `position` of its document, given
# the `visible` bytes before it. No model has a lower expected NLL.
Floor = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Drawn:
  """Documents drawn independently of one another from a distribution whose entropies are known.

  stride: windows begin at its multiples. Where they began anywhere, a floor would have to know what a reader can infer
  about where it is.
  """

  documents: list[Document]
  floor: Floor
  stride: int


@dataclass(frozen=True)
class Found:
  """Text that has been found and not yet read.

  read: yields the documents one after the other; every call begins anew.
  files: what it reads, so that their paths, sizes and times say whether the text may have changed. None where only
    reading can tell; empty where its name alone says it all.
  n_bytes: of the documents, for a progress bar; 0 where nobody knows yet.
  """

  read: Callable[[], Iterable[Document]]
  files: tuple[Path, ...] | None
  n_bytes: int = 0

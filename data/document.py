"""What a corpus source hands over: named texts, and, where they were drawn from a known distribution, what is known."""

from collections.abc import Callable
from dataclasses import dataclass
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

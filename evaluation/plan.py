"""Which tokens are scored and in what context: the plan of a sweep.

"Perplexity at length L" names at least seven different quantities. The default here, **fixed targets**, scores the same
target tokens at every length and by every method; only the context to their left grows. A curve that falls then means
that context helps, and a model that ignores far context is flat.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data import TokenDocument, cut
from data.windows import first_start, visible
from spec import SpecError, one_of


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """What a sweep does when not told otherwise. Lengths are `multiples` of train_len.

  spans: runs of targets per document. batch_tokens: tokens per evaluation batch, at least one window per device.
  non_overlapping_docs: documents of the secondary protocol, which rescores whole documents; 0 means all.
  """

  multiples: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
  protocols: tuple[str, ...] = ('fixed_targets', 'non_overlapping')
  spans: int = 16
  batch_tokens: int = 16384
  non_overlapping_docs: int = 0

  def __post_init__(self):
    for multiple in self.multiples:
      if not 0 < multiple < np.inf:
        raise ValueError(f'multiples = {self.multiples}: finite numbers above 0 are allowed')
    for protocol in self.protocols:
      if protocol not in PROTOCOLS:
        raise ValueError(one_of('protocols', protocol, PROTOCOLS))
    for field in ('multiples', 'protocols'):
      values = getattr(self, field)
      if not values or len(set(values)) != len(values):
        raise ValueError(f'{field} = {values}: at least one, and each once, is allowed')
    for field in ('spans', 'batch_tokens'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least 1 is allowed')
    if self.non_overlapping_docs < 0:
      raise ValueError(f'non_overlapping_docs = {self.non_overlapping_docs}: a whole number of at least 0 is allowed')

  @staticmethod
  def targets(train_len: int) -> int:
    """T, the last positions of a window that are scored: an eighth of the training length.

    The fake gain of a model that uses exactly k tokens of context grows with T, and vanishes for k <= L - T.
    """
    return max(8, train_len // 8)

  def min_test_tokens(self, train_len: int, max_multiple: int) -> int:
    """A test document's shortest length: every span has its full context at every length a run may ask for."""
    return max_multiple * train_len + self.spans * self.targets(train_len)


class Window(NamedTuple):
  """`length` tokens of one test document of which the last `scored` are targets that count."""

  document: int
  start: int  # offset of the first target in the document's text tokens, as `data.cut` takes it
  length: int
  scored: int


class Plan:
  """The windows of every protocol and length over the test documents, a pure function of corpus and config.

  Spans lie at document offset >= max_multiple * train_len, one in each of `spans` equal strata, where in the stratum
  drawn from a hash of (corpus, document, span) and never from the run's seed: every model is scored on the same tokens.
  Every window begins at a multiple of `stride`, as those of training do.
  """

  def __init__(
    self,
    cfg: EvalConfig,
    documents: Sequence[TokenDocument],
    *,
    train_len: int,
    max_multiple: int,
    bos: str,
    bos_id: int,
    corpus_sha256: str,
    stride: int = 1,
  ):
    self.cfg, self.documents, self.bos, self.bos_id, self.stride = cfg, documents, bos, bos_id, stride
    self.longest = max_multiple * train_len
    self.targets = cfg.targets(train_len)
    self.spans = [
      (d, offset)
      for d, document in enumerate(documents)
      for offset in _span_offsets(document, self.longest, cfg.spans, self.targets, corpus_sha256, stride)
    ]
    spans = [[documents[d].name, offset] for d, offset in self.spans]
    whole = [self.longest, cfg.non_overlapping_docs]  # what the secondary protocol covers
    digest = hashlib.sha256(json.dumps([corpus_sha256, bos, bos_id, self.targets, whole, spans]).encode())
    for d, offset in self.spans:
      digest.update(
        documents[d].tokens[offset : offset + self.targets].tobytes()
      )  # the tokenizer, whatever it is called
    self.targets_hash = digest.hexdigest()[:16]

  def windows(self, protocol: str, length: int) -> list[Window]:
    if protocol not in PROTOCOLS:
      raise SpecError(one_of('protocol', protocol, PROTOCOLS))
    if not self.targets < length <= self.longest:
      raise SpecError(f'length = {length}: {self.targets + 1} to {self.longest} tokens are allowed')
    if length % self.stride:
      raise SpecError(f"length = {length}: a multiple of the corpus's stride, {self.stride}, is allowed")
    return PROTOCOLS[protocol](self, length)

  def contexts(self, protocol: str, length: int) -> tuple[int, int]:
    """Fewest and most positions to the left of a scored one: with BOS in every window, the text tokens it has seen."""
    return length - self.windows(protocol, length)[0].scored, length - 1

  def seen(self, windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """(offset in its document, text tokens before it in its window) of every scored target, int[len(windows), T]."""
    offset = np.stack([np.arange(w.start + w.length - w.scored, w.start + w.length) for w in windows])
    return offset, np.stack([visible(w.start, w.length, self.bos)[-w.scored :] for w in windows])

  def tokens(self, windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), each int32[len(windows), length]."""
    rows = [cut(self.documents[w.document].tokens, w.start, w.length, self.bos, self.bos_id) for w in windows]
    inputs, targets = zip(*rows)
    return np.stack(inputs), np.stack(targets)


def _span_offsets(document: TokenDocument, longest: int, spans: int, targets: int, sha: str, stride: int) -> list[int]:
  """Where each span's first target stands: stratified, disjoint, fixed by what the document is.

  Spans end at multiples of `stride`: a window of a multiple of it, up to the span's end, begins at one too.
  """
  width = (len(document.tokens) - longest) // spans
  if width < targets + stride - 1:
    raise SpecError(
      f'document {document.name!r} has {len(document.tokens)} tokens, '
      f'{longest} + {spans} x {targets + stride - 1} are needed'
    )
  offsets = []
  for span in range(spans):
    digest = hashlib.sha256(f'{sha}/{document.name}/{span}'.encode()).digest()
    first, last = -(-(longest + span * width + targets) // stride), (longest + span * width + width) // stride
    end = first + int.from_bytes(digest[:8], 'big') % (last - first + 1)
    offsets.append(end * stride - targets)
  return offsets


def fixed_targets(plan: Plan, length: int) -> list[Window]:
  """Every span at the end of a window of `length`: contexts of length - T .. length - 1 tokens."""
  return [Window(d, offset + plan.targets - length, length, plan.targets) for d, offset in plan.spans]


def non_overlapping(plan: Plan, length: int) -> list[Window]:
  """The first max_multiple * train_len tokens of each document in windows side by side, every token scored.

  What most papers report. Mean context grows with the length, so it falls even for a model that ignores the far context
  (the early-token curse). Where `length` divides the region no token is dropped; otherwise the tail is.
  """
  first = first_start(plan.bos, plan.stride)
  documents = plan.cfg.non_overlapping_docs or len(plan.documents)
  return [
    Window(d, first + i * length, length, length)
    for d in range(min(documents, len(plan.documents)))
    for i in range(plan.longest // length)
  ]


PROTOCOLS = {'fixed_targets': fixed_targets, 'non_overlapping': non_overlapping}

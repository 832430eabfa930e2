"""Which tokens are scored and in what context: the plan of a sweep.

"Perplexity at length L" names at least seven different quantities. The default here, **fixed targets**, scores the same
target tokens at every length and by every method; only the context to their left grows. A curve that falls then means
that context helps, and a model that ignores far context is flat.
"""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data import Data, DataConfig, TokenDocument, cut, load_data
from data.windows import visible
from evaluation import controls, protocols
from evaluation.protocols import STREAM, Selection, Window
from evaluation.store import Place
from posenc import check_method
from spec import SpecError


class Comparison(NamedTuple):
  """'yarn - none at 4x': fixed targets, in this order, paired by seed and document."""

  method: str
  reference: str
  multiple: float

  @classmethod
  def parse(cls, text: str) -> 'Comparison':
    parts = re.fullmatch(r'(\S.*) - (\S.*) at (\d+(?:\.\d+)?)x', text)
    if not parts:
      raise SpecError(f"compare = {text!r}: a comparison such as 'yarn - none at 4x' is allowed")
    try:
      for method in parts.groups()[:2]:
        check_method(method)
    except SpecError as error:
      raise SpecError(f'compare = {text!r}: {error}') from None
    return cls(parts[1], parts[2], float(parts[3]))


@dataclasses.dataclass(frozen=True)
class EvalConfig:
  """What a sweep does when not told otherwise. Lengths are `multiples` of train_len.

  protocols: of evaluation/protocols.py. controls: of evaluation/controls.py, what far context is weighed against.
  compare: comparisons fixed before any number was seen, which are tested alone. spans: runs of targets per document.
  batch_tokens: tokens per evaluation batch, at least one window per device. non_overlapping_docs: documents of the
  secondary protocols, which rescore whole documents; 0 means all.
  """

  multiples: tuple[float, ...] = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
  protocols: tuple[str, ...] = ('fixed_targets', 'non_overlapping')
  # Whether a curve uses its context is what it is read for. `truncated` costs next to nothing; with 4 of 16 spans each
  # of the others is a quarter of the fixed targets above 1x, half as much again together.
  controls: tuple[str, ...] = ('truncated', 'shuffled', 'foreign')
  compare: tuple[str, ...] = ()
  spans: int = 16
  batch_tokens: int = 16384
  non_overlapping_docs: int = 0

  def __post_init__(self):
    for multiple in self.multiples:
      if not 0 < multiple < np.inf:
        raise ValueError(f'multiples = {self.multiples}: finite numbers above 0 are allowed')
    for protocol in self.protocols:
      protocols.check(protocol)
    for control in self.controls:
      protocols.check(control, controls.CONTROLS, 'controls')
    for comparison in self.compare:
      Comparison.parse(comparison)
    for field, least in (('multiples', 1), ('protocols', 1), ('controls', 0), ('compare', 0)):
      values = getattr(self, field)
      if len(values) < least or len(set(values)) != len(values):
        raise ValueError(f'{field} = {values}: {"at least one, and " * least}each once, is allowed')
    for field in ('spans', 'batch_tokens'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least 1 is allowed')
    if self.non_overlapping_docs < 0:
      raise ValueError(f'non_overlapping_docs = {self.non_overlapping_docs}: a whole number of at least 0 is allowed')

  @property
  def asked(self) -> tuple[str, ...]:
    """What selects windows: protocols, then controls."""
    return self.protocols + self.controls

  @staticmethod
  def targets(train_len: int) -> int:
    """T, the last positions of a window that are scored: an eighth of the training length.

    The fake gain of a model that uses exactly k tokens of context grows with T, and vanishes for k <= L - T.
    """
    return max(8, train_len // 8)

  def min_test_tokens(self, train_len: int, max_multiple: int) -> int:
    """A test document's shortest length: every span has its full context at every length a run may ask for."""
    return max_multiple * train_len + self.spans * self.targets(train_len)


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
    self.corpus_sha256 = corpus_sha256
    self.train_len, self.longest = train_len, max_multiple * train_len
    self.targets = cfg.targets(train_len)
    self.near = -(-(train_len + self.targets) // stride) * stride  # of a window's tokens, what no control replaces
    self._replaced: dict[Window, str] = {}
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

  @property
  def covered(self) -> int:
    """How many documents, the first ones, protocols other than the default read."""
    return min(self.cfg.non_overlapping_docs or len(self.documents), len(self.documents))

  @functools.cached_property
  def stream(self) -> np.ndarray:
    """int32, the covered documents' beginnings one after the other, for protocols whose windows cross their borders.

    Under the policy 'document' each has its BOS before it.
    """
    first = np.full(int(self.bos == 'document'), self.bos_id, np.int32)
    parts = (part for d in self.documents[: self.covered] for part in (first, d.tokens[: self.longest]))
    return np.concatenate(list(parts))

  def select(self, protocol: str, length: int) -> Selection:
    """What a protocol, or control, counts at a length. Unsupported where it has nothing to count."""
    table = {**protocols.PROTOCOLS, **controls.CONTROLS}
    protocols.check(protocol, table)
    if not self.targets < length <= self.longest:
      raise SpecError(f'length = {length}: {self.targets + 1} to {self.longest} tokens are allowed')
    if length % self.stride:
      raise SpecError(f"length = {length}: a multiple of the corpus's stride, {self.stride}, is allowed")
    return protocols.select(protocol, self, length, table)

  def windows(self, protocol: str, length: int) -> list[Window]:
    return [part.window for part in self.select(protocol, length).parts]

  def contexts(self, protocol: str, length: int) -> tuple[int, int]:
    """Fewest and most positions to the left of a target: with BOS in every window, the text tokens it has seen."""
    parts = self.select(protocol, length).parts
    return min(part.first for part in parts), max(part.last for part in parts) - 1

  def seen(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
    """(offset in its document, text tokens before it in its window) of every target that is kept, int[scored]."""
    end = window.start + window.length
    kept = visible(window.start, window.length, self.bos)[-window.scored :]
    return np.arange(end - window.scored, end), kept

  def place(self, window: Window) -> Place:
    """Where it lies, whatever else is in the plan."""
    if window.document == STREAM:
      return Place(self._stream_name, window.start)
    name = self.documents[window.document].name
    if window.far:  # named by what is there, not by how it was found
      if window.whole not in self._replaced:
        digest = hashlib.sha256(controls.replacement(self, window).tobytes()).hexdigest()[:16]
        self._replaced[window.whole] = f'{name} {window.far} {digest}'
      name = self._replaced[window.whole]
    return Place(name, window.start)

  @functools.cached_property
  def _stream_name(self) -> str:
    return f'stream {hashlib.sha256(self.stream.tobytes()).hexdigest()[:16]}'

  def tokens(self, windows: Sequence[Window]) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), each int32[len(windows), length]."""
    inputs, targets = zip(*(self._cut(window) for window in windows))
    return np.stack(inputs), np.stack(targets)

  def _cut(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
    if window.document == STREAM:
      bos = 'none' if self.bos == 'document' else self.bos  # which has its BOS already
      return cut(self.stream, window.start, window.length, bos, self.bos_id)
    tokens = controls.text(self, window) if window.far else self.documents[window.document].tokens
    return cut(tokens, window.start, window.length, self.bos, self.bos_id)

  def targets_of(self, window: Window, first: int, last: int) -> tuple[np.ndarray, Any]:
    """(targets first .. last - 1 of a window, the document that they belong to), in the stream each, -1 for BOS."""
    span = slice(window.start + first, window.start + last)
    if window.document != STREAM:
      return self.documents[window.document].tokens[span], window.document
    targets = self.stream[span]
    block = len(self.stream) // self.covered  # every document has as many tokens in it
    owner = np.arange(span.start, span.start + len(targets)) // block
    return targets, np.where(targets == self.bos_id, -1, owner)


def facts(data: Data, bos: str) -> dict[str, Any]:
  """What a plan has to know of a corpus besides its documents."""
  return {'bos': bos, 'bos_id': data.tokenizer.bos, 'corpus_sha256': data.sha256, 'stride': data.stride}


def load(config: Mapping[str, Any]) -> tuple[Data, Plan]:
  """Corpus and plan of a run, of what its config.json says under 'config'."""
  fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in config['eval'].items()}
  cfg, train_len, max_multiple = EvalConfig(**fields), config['train_len'], config['max_multiple']
  least = cfg.min_test_tokens(train_len, max_multiple)
  data = load_data(DataConfig(**config['data']), train_len=train_len, min_test_tokens=least, spans=cfg.spans)
  about = facts(data, config['data']['bos'])
  return data, Plan(cfg, data.splits.test, train_len=train_len, max_multiple=max_multiple, **about)


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

"""Documents, token ids, splits and training windows. `load_data` is the way in."""

from dataclasses import dataclass

import spec
from data import cache, corpora, tokenizers
from data.corpora import Corpus
from data.document import Document, Drawn, Floor, Found
from data.split import Splits, TokenDocument, draw_splits
from data.tokenizers import Tokenizer
from data.windows import BOS, TrainWindows, cut

__all__ = [
  'BOS',
  'Corpus',
  'Data',
  'DataConfig',
  'Document',
  'Floor',
  'Splits',
  'TokenDocument',
  'Tokenizer',
  'TrainWindows',
  'cut',
  'known',
  'load_data',
]


@dataclass(frozen=True)
class DataConfig:
  """`config.data`. Strings are checked here, before anything is read."""

  corpus: str = 'sotu'  # see data/corpora.py
  tokenizer: str = 'bytes'  # see data/tokenizers.py
  bos: str = 'window'  # see data/windows.py
  test_docs: int = 40
  validation_docs: int = 8

  def __post_init__(self):
    corpora.check(self.corpus)
    tokenizers.check(self.tokenizer)
    if self.bos not in BOS:
      raise spec.SpecError(spec.one_of('bos', self.bos, BOS))
    for field in ('test_docs', 'validation_docs'):
      value = getattr(self, field)
      if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise spec.SpecError(f'{field} = {value!r}: a whole number >= 1 is allowed')


@dataclass(frozen=True, eq=False)
class Data:
  """One corpus, read and split, with the facts that go into every result."""

  name: str  # the corpus string
  sha256: str
  n_documents: int
  n_tokens: int
  tokens_sha256: str  # of all token ids: changes with the corpus and with the tokenizer, whatever they are called
  tokenizer: Tokenizer
  splits: Splits
  # Of the corpus, where its bytes are the tokens; any other tokenizer has its own entropies and row lengths.
  floor: Floor | None = None
  stride: int = 1


def known(source: Found | Drawn, tokenizer: Tokenizer) -> tuple[Floor | None, int]:
  """(floor, stride) of a corpus in tokens."""
  if isinstance(source, Drawn) and isinstance(tokenizer, tokenizers.Bytes):
    return source.floor, source.stride
  return None, 1


def load_data(config: DataConfig, *, train_len: int, min_test_tokens: int, spans: int = 0) -> Data:
  """Finds the corpus, in tokens (data/cache.py), and splits it.

  Args:
    config: which corpus and tokenizer, how many documents to hold out.
    train_len: tokens in a training window. Validation documents hold one at least, under every BOS policy.
    min_test_tokens: tokens that a test document has at least, for the longest window and its targets.
    spans: runs of targets in it. Each may have to move by up to stride - 1 tokens, for which there is room then.

  Raises ValueError, in one line, where the corpus is missing or too small.
  """
  tokenizer = tokenizers.build(config.tokenizer)
  corpus, source = cache.find(config.corpus, tokenizer)
  floor, stride = known(source, tokenizer)
  if train_len % stride:
    raise spec.SpecError(
      f'config.train_len = {train_len}: a multiple of {stride}, the stride of corpus {corpus.name!r}, is allowed'
    )
  splits = draw_splits(
    corpus,
    corpus.documents,
    corpus.group_n,
    test_docs=config.test_docs,
    validation_docs=config.validation_docs,
    min_test_tokens=min_test_tokens + spans * (stride - 1),
    min_validation_tokens=train_len + 1,
  )
  facts = corpus.name, corpus.sha256, len(corpus.documents), corpus.n_tokens, corpus.tokens_sha256
  return Data(*facts, tokenizer, splits, floor, stride)

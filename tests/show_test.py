"""`python -m data.show`: what it says is counted again from the texts."""

import re
import subprocess
import sys

import numpy as np
import pytest

from data import corpora


@pytest.fixture(scope='module')
def show(root, tmp_path_factory):
  folder = tmp_path_factory.mktemp('show')
  rng = np.random.default_rng(0)
  for i in range(40):
    (folder / f'{i:02}.txt').write_bytes(rng.integers(97, 123, 20 + 12 * i, dtype=np.uint8).tobytes())
  (folder / '39b.txt').write_bytes((folder / '39.txt').read_bytes())
  (folder / 'odd.txt').write_bytes(b'\xff\x1b[31m\n' * 3)
  corpus = f'text(glob={str(folder / "*.txt")!r})'

  def run(*options, code=0):
    command = [sys.executable, '-m', 'data.show', '--config=configs/smoke.py', f'--config.data.corpus={corpus}']
    done = subprocess.run([*command, *options], cwd=root, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, done.stderr

  return corpora.load(corpus), run


def test_show_counts_what_is_there(show):
  corpus, run = show
  out, _ = run('--samples=50', '--config.train_len=32', '--config.max_multiple=8', '--config.data.test_docs=6')
  sizes = {d.name: len(d.text) for d in corpus.documents}
  assert f'42 documents, {corpus.n_bytes:,} bytes, sha256 {corpus.sha256[:16]}' in out
  assert '41 groups, the largest of 2 documents' in out
  assert f'tokens per document: 20 to {max(sizes.values())};' in out
  assert 'BOS before every window (id 256)' in out
  listed = {
    side: dict(re.findall(rf'^{side}, (\S+), (\d+) tokens: ', out, re.M)) for side in ('train', 'validation', 'test')
  }
  assert sum(map(len, listed.values())) == 42 and len(listed['test']) >= 6
  for side, documents in listed.items():
    assert all(sizes[name] == int(n) for name, n in documents.items())
    total, short = sum(map(int, documents.values())), sum(int(n) < 32 for n in documents.values())
    assert re.search(rf'^{side} +{len(documents)} +{total:,} +{total:,} +{short}$', out, re.M), side
  reach = {
    row[0]: [int(n) for n in row[1:]] for row in re.findall(r'^(\S+x) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$', out, re.M)
  }
  assert list(reach) == ['0.5x', '1x', '2x', '4x', '8x']
  for name, (tokens, every, *sides) in reach.items():
    assert tokens == float(name[:-1]) * 32
    assert every == sum(n >= tokens for n in sizes.values())
    assert sides == [sum(int(n) >= tokens for n in documents.values()) for documents in listed.values()]
  ((tokens, every, test),) = re.findall(r'^to be tested +(\d+) +(\d+) +\d+ +\d+ +(\d+)$', out, re.M)
  assert int(every) == sum(n >= int(tokens) for n in sizes.values()) and int(test) == len(listed['test'])
  assert '\x1b' not in out, "a text's control characters are not the terminal's"


def test_show_of_too_little_says_what_there_is(show):
  out, err = show[1]('--config.train_len=256', code=2)
  assert re.search(r'^0\.5x +128 +\d+$', out, re.M) and re.search(r'^8x +2,048 +0$', out, re.M)
  assert err.startswith('error: ') and err.count('\n') == 1 and 'has 0 documents of >= ' in err

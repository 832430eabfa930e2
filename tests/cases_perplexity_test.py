"""Cases E, G08 and G09 of docs/CASES.md: what a perplexity is the mean of, and the files and figures it ends in."""

import csv
import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest

import posenc
from data import TokenDocument
from evaluation import figures, results
from evaluation.plan import EvalConfig, Plan
from evaluation.points import read_curve
from evaluation.protocols import Part, Selection, Window, reduce
from evaluation.score import Scorer
from evaluation.survey import Survey
from evaluation.sweep import exp, sweep
from results_test import NON_FINITE, curve, strict, unsupported
from score_test import model
from spec import SpecError
from sweep_test import FACTS, Bar, Fake, at, run, schemes
from training.devices import make_mesh

BYTES_V = np.array([1] * 256 + [0])


def make_plan(train_len, max_multiple, *protocols, docs=2, bos='window', size=None):
  rng = np.random.default_rng(0)
  size = size or train_len * max_multiple + 40
  documents = [TokenDocument(f'd{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(docs)]
  cfg = EvalConfig(multiples=(1.0,), spans=2, protocols=protocols or ('fixed_targets',), controls=())
  sizes = {'train_len': train_len, 'max_multiple': max_multiple}
  return Plan(cfg, documents, **sizes, bos=bos, bos_id=256, corpus_sha256='a' * 64)


def measured(plan, lengths, vocab, bytes_V=BYTES_V):
  """Points of a model whose embedding, and so its head, is zero."""
  graphdef, params, _ = model(vocab=vocab, zeroed=True)
  slots = schemes('rope')
  rule = posenc.build_rule('sequential', slots, train_len=plan.train_len, layers=1)
  survey = Survey(plan, slots, ('none',), lengths, plan.train_len, rule)
  scorer = Scorer(graphdef, params, make_mesh(1), 512)
  parts = sweep(survey, lambda: scorer, bytes_per_token_V=bytes_V, facts=FACTS, progress=Bar())
  return [point for part in parts for point in part]


def test_E02():
  """1000 tokens in windows of 256: 768 count, as the protocol and every point say, or, where asked, all 1000."""
  plan = make_plan(125, 8, docs=1)
  for protocol, tokens in (('non_overlapping', 768), ('lm_eval_rolling', 1000)):
    selection = plan.select(protocol, 256)
    assert plan.longest == 1000
    uniform = reduce(plan, selection, lambda w: np.full(w.scored, math.log(257)), BYTES_V)
    assert (uniform.tokens, uniform.ppl) == (tokens, pytest.approx(257))
    places = [p.window.start + np.arange(p.first, p.last) for p in selection.parts]
    np.testing.assert_array_equal(np.sort(np.concatenate(places)), np.arange(tokens))  # each once, none dropped
    numbered = reduce(plan, selection, lambda w: np.arange(w.start, w.start + w.length)[-w.scored :] / 100, BYTES_V)
    assert numbered.nll == pytest.approx((tokens - 1) / 200)  # a tail weighs what it is long


def test_E03():
  """100 tokens of 2 nats and 10 of 4: exp(240 / 110)."""
  plan = make_plan(16, 8)
  parts = [Part(Window(0, 0, 100, 100), 0, 100), Part(Window(1, 0, 10, 10), 0, 10)]
  found = reduce(plan, Selection(parts), lambda w: np.full(w.scored, 2.0 if w.length == 100 else 4.0), BYTES_V)
  assert found.ppl == pytest.approx(8.862405, abs=1e-6)
  assert found.tokens == 110
  # Means of windows are YaRN's, and asked for by name.
  windows = reduce(plan, Selection(parts, mean='windows'), lambda w: np.full(w.scored, 400 / w.length), BYTES_V)
  assert windows.nll == pytest.approx((4 + 40) / 2)
  assert make_plan(16, 8).select('yarn(stride=8)', 32).mean == 'windows'


def test_E04(tmp_path):
  """800 nats end no sweep: the nll stays, the perplexity is infinite, and reader and figure take both."""
  points = run(Fake(lambda d, n, pos: 800.0 if n == 128 else 2.0))
  results.write(tmp_path, points)
  found = at(read_curve(tmp_path / 'curve.jsonl'))
  assert (found['nll'], found['ppl'], found['outcome']) == (800.0, math.inf, 'diverged')
  assert at(points, length=32)['ppl'] == pytest.approx(math.exp(2.0))
  assert (tmp_path / 'curve.png').stat().st_size > 1000
  assert exp(709.7) == math.exp(709.7) and exp(709.79) == math.inf
  assert exp(float(np.float32(89.0))) < math.inf  # float32 would end at 88.72


def test_E05():
  """Every window begins with one BOS, no target is BOS, and a window has as many targets as text tokens."""
  plan = make_plan(16, 8)
  windows = [plan.windows('non_overlapping', 32)[i] for i in range(4)]
  inputs, targets = plan.tokens(windows)
  assert (inputs[:, 0] == 256).all() and (inputs[:, 1:] < 256).all() and (targets < 256).all()
  for window, row, target in zip(windows, inputs, targets):
    text = plan.documents[window.document].tokens[window.start : window.start + 32]
    np.testing.assert_array_equal(target, text)
    np.testing.assert_array_equal(row[1:], text[:-1])
  assert [w.start for w in windows] == [0, 32, 64, 96]


def test_E07():
  """A zero head over 256 symbols: 5.545177 nats, perplexity 256, 8 bits per byte; with BOS among them, 257."""
  (point,) = measured(make_plan(16, 8, bos='none'), (32,), 256, np.ones(256))
  assert point['nll'] == pytest.approx(5.545177, abs=1e-6)
  assert point['ppl'] == pytest.approx(256, rel=1e-5)
  assert point['bits_per_byte'] == pytest.approx(8, abs=1e-5)
  assert 2 ** point['bits_per_byte'] == pytest.approx(point['ppl'], rel=1e-5)
  (special,) = measured(make_plan(16, 8), (32,), 257)
  assert special['ppl'] == pytest.approx(257, rel=1e-5)
  assert special['bits_per_byte'] == pytest.approx(math.log2(257), abs=1e-5)
  (longer,) = measured(make_plan(16, 8), (32,), 257, 4 * BYTES_V)  # tokens of four bytes each
  assert longer['bits_per_byte'] == pytest.approx(math.log2(257) / 4, abs=1e-5)


def test_E09():
  """A model without any text is flat at V, points say what they are of, and a length beyond the text is refused."""
  lengths = (16, 48, 512)
  protocols = ('fixed_targets', 'non_overlapping', 'sliding(stride=40)')
  points = measured(make_plan(16, 32, *protocols), lengths, 257)
  assert {(p['protocol'], p['length']) for p in points} == {(p, n) for p in protocols for n in lengths}
  for point in points:
    assert point['ppl'] == pytest.approx(257, rel=1e-5)
    assert {'tokens', 'windows', 'documents', 'context_min', 'context_max', 'protocol', 'length'} <= set(point)
  tokens = {p['length']: (p['tokens'], p['windows']) for p in points if p['protocol'] == 'non_overlapping'}
  assert tokens == {16: (1024, 64), 48: (960, 20), 512: (1024, 2)}  # 48 leaves 32 of 512 in each of 2 documents
  with pytest.raises(SpecError, match='^length = 1024: 9 to 512 tokens are allowed$'):
    make_plan(16, 32).select('fixed_targets', 1024)
  with pytest.raises(SpecError, match="^document 'd0' has 500 tokens, 512 \\+ 2 x 8 are needed$"):
    make_plan(16, 32, size=500)
  (none,) = run(Fake(lambda d, n, pos: 1.0), lengths=(128,), plan=make_plan(16, 8, 'longlora', docs=1))
  assert none['outcome'] == 'unsupported' and 'hold no window of 128' in none['reason'] and 'ppl' not in none


NO_DISPLAY = """
import pathlib, sys
from evaluation import figures
from evaluation.points import read_curve
for name in sys.argv[1:]:
  figures.plot(pathlib.Path(name).with_suffix('.png'), read_curve(pathlib.Path(name)))
assert 'matplotlib.pyplot' not in sys.modules
"""


def test_G08(tmp_path, root, monkeypatch):
  """A figure opens no window: with a backend that would and no display, of one length, of numbers that are none.

  And a figure that fails loses nothing: the numbers are on disk before it is drawn.
  """
  cases = {'one': curve(lengths=(16,)), 'none': [*curve(), *NON_FINITE, unsupported()]}
  for name, points in cases.items():
    with monkeypatch.context() as patch:
      patch.setattr(results, 'draw', lambda *_: (_ for _ in ()).throw(RuntimeError('no figure')))
      with pytest.raises(RuntimeError, match='no figure'):
        results.write(tmp_path / name, points)
    assert len(read_curve(tmp_path / name / 'curve.jsonl')) == len({(p['length'], p['method']) for p in points})
  assert not hasattr(figures, 'pyplot')
  env = {k: v for k, v in os.environ.items() if k != 'WAYLAND_DISPLAY'}
  env |= {'MPLBACKEND': 'TkAgg', 'DISPLAY': 'nowhere.invalid:0', 'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'}
  command = [sys.executable, '-c', NO_DISPLAY, *(str(tmp_path / name / 'curve.jsonl') for name in cases)]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  for name in cases:
    assert (tmp_path / name / 'curve.png').read_bytes().startswith(b'\x89PNG')


def test_G09(tmp_path):
  """curve.jsonl is strict JSON: what is not finite is a string, in curve.csv too, and a number again for the reader."""
  results.write(tmp_path, NON_FINITE)
  lines = [strict(line) for line in (tmp_path / 'curve.jsonl').read_text().splitlines()]
  assert [line['ppl'] for line in lines] == ['inf', 'nan', 'inf'] and lines[0]['nll'] == 800.0
  with pytest.raises(ValueError, match='Infinity'):
    strict(json.dumps({'ppl': math.inf}))
  back = read_curve(tmp_path / 'curve.jsonl')
  assert back[0]['ppl'] == math.inf and math.isnan(back[1]['nll'])
  with (tmp_path / 'curve.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['ppl'] for row in rows] == ['inf', 'nan', 'inf']

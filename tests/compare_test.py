"""Several runs in one figure: only where they have a common axis, and never one drawn over the other."""

import csv
import json
import math
import sys

import numpy as np
import pytest

from evaluation import points as points_of
from evaluation import results, runs
from evaluation.stats import infer
from scripts import compare
from spec import SpecError
from training import cli


def point(scheme='rope', method='none', length=16, nll=2.0, **changes):
  return {
    'scheme': scheme,
    'method': method,
    'follows_length': False,
    'train_length': 16,
    'length': length,
    'protocol': 'fixed_targets',
    'outcome': 'ok',
    'reason': None,
    'targets_hash': 'abc',
    'T': 16,
    'checkpoint_step': 100,
    'nll': nll,
    'ppl': math.exp(nll),
    'bits_per_byte': nll / math.log(2),
    'ci_low': None,
    'ci_high': None,
    'vs_none': 0.0,
    **changes,
  }


@pytest.fixture
def make(tmp_path):
  def make(name, *points):
    results.write(tmp_path / name / 'extrapolation', points)
    return tmp_path / name

  return make


def run(*workdirs, out):
  compare.main([*map(str, workdirs), f'--out={out}'])


def rows(out):
  with (out / 'curve.csv').open(newline='') as file:
    return list(csv.DictReader(file))


def refused(*workdirs, out):
  with pytest.raises(SpecError) as caught:
    run(*workdirs, out=out)
  assert '\n' not in str(caught.value) and not out.exists()
  return str(caught.value)


def test_two_runs_in_one_figure_and_one_table(make, tmp_path, capsys):
  a = make('a', point(), point(length=32, nll=3.0))
  b = make('b', point('alibi', nll=2.5), point('alibi', length=32, nll=2.25))
  run(a, b, out=tmp_path / 'out' / 'deep')
  assert (tmp_path / 'out' / 'deep' / 'curve.png').read_bytes().startswith(b'\x89PNG')
  got = {(r['scheme'], r['length']): float(r['nll']) for r in rows(tmp_path / 'out' / 'deep')}
  assert got == {('rope', '16'): 2.0, ('rope', '32'): 3.0, ('alibi', '16'): 2.5, ('alibi', '32'): 2.25}
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split() == ['fixed_targets', '1x', '2x', 'cost', 'at', '1x']
  assert [line.split() for line in lines[1:3]] == [
    ['rope', 'none', '7.389', '20.09'],
    ['alibi', 'none', '12.18', '9.488'],
  ]
  assert lines[-1] == str(tmp_path / 'out' / 'deep' / 'curve.png')


def test_a_table_per_protocol(make, tmp_path, capsys):
  a = make('a', point(), point(protocol='non_overlapping', nll=3.0))
  b = make('b', point('alibi'))
  run(a, b, out=tmp_path / 'out')
  out = capsys.readouterr().out
  assert out.count('cost at 1x') == 2 and '\nnon_overlapping' in out


def test_other_targets_are_refused(make, tmp_path):
  """Two sets of scored tokens have no common axis."""
  a, b = make('a', point()), make('b', point('alibi', targets_hash='xyz'))
  message = refused(a, b, out=tmp_path / 'out')
  assert all(part in message for part in (str(a), str(b), 'abc', 'xyz', 'targets'))


def test_other_targets_within_one_curve_are_refused(make, tmp_path):
  """A workdir swept before and after its targets changed holds points of both."""
  a = make('a', point(), point(length=32, targets_hash='xyz'))
  b = make('b', point('alibi'))
  assert 'xyz' in refused(a, b, out=tmp_path / 'out')
  assert 'xyz' in refused(b, a, out=tmp_path / 'out')


def test_the_newest_checkpoint_is_compared(make, tmp_path):
  a = make('a', point(nll=9.0), point(length=32, targets_hash='old'))
  make('a', point(nll=2.0, checkpoint_step=1000))
  assert [p['nll'] for p in runs.read(a).points] == [2.0]
  run(a, make('b', point('alibi', checkpoint_step=50)), out=tmp_path / 'out')
  assert [(r['scheme'], r['nll']) for r in rows(tmp_path / 'out')] == [('rope', '2.0'), ('alibi', '2.0')]


def test_two_runs_of_one_scheme_keep_their_own_lines(make, tmp_path, capsys):
  """Two seeds, say: under one label the second would replace the first in the table and zigzag in the figure."""
  a, b, c = make('a', point(nll=2.0)), make('b', point(nll=3.0)), make('c', point('alibi', nll=2.5))
  run(a, b, c, out=tmp_path / 'out')
  lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:4]]
  assert [line[-1] for line in lines] == ['7.389', '20.09', '12.18']
  assert lines[0][0] == lines[1][0] == 'rope' and str(a) in lines[0] and str(b) in lines[1]
  assert lines[2][:2] == ['alibi', 'none']
  assert len(rows(tmp_path / 'out')) == 3 and len({r['scheme'] for r in rows(tmp_path / 'out')}) == 3


def test_runs_that_differ_in_their_seed_alone_are_one_line(make, tmp_path, capsys):
  """Over seeds and documents; what they were trained with is read from their configs."""
  rng, text_D = np.random.default_rng(0), np.arange(12) / 10
  runs = []
  for seed in range(3):
    x_D = 2.0 + seed / 8 + text_D + 0.01 * rng.standard_normal(12)
    runs.append(make(f's{seed}', point(seed=seed, nll=float(x_D.mean()), nll_documents=x_D.tolist())))
    config = {'seed': seed, 'steps': 10, 'methods': ['none'] * seed, 'eval': {'compare': ['none - none at 1x']}}
    (runs[-1] / 'config.json').write_text(json.dumps({'config': config, 'data': {}}))
  run(*runs, out=tmp_path / 'out')
  out = capsys.readouterr().out
  assert out.count('fixed in advance, tested alone: rope, none - none at 1x: +0.0000 nats') == 1
  lines = [line.split() for line in out.splitlines()]
  x_SD = np.array([points_of.read_curve(r / 'extrapolation' / 'curve.jsonl')[0]['nll_documents'] for r in runs])
  cells = infer(x_SD[:, :, None])
  half = (math.exp(float(cells.high[0])) - math.exp(float(cells.low[0]))) / 2
  assert lines[1] == ['none', f'{math.exp(x_SD.mean()):.4g}', f'±{half:.2g}']
  assert len(rows(tmp_path / 'out')) == 3  # the csv has what each run measured
  (runs[0] / 'config.json').write_text(json.dumps({'config': {'seed': 0, 'steps': 20}, 'data': {}}))
  run(*runs, out=tmp_path / 'out')
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert [line[:3:2] for line in lines[1:4]] == [['rope', 'none']] * 3


def test_runs_share_their_floor(make, tmp_path, capsys):
  a = make('a', point(floor=1.5), point(length=32, floor=1.25))
  b = make('b', point('alibi', floor=1.5))
  run(a, b, out=tmp_path / 'out')
  lines = [line.split() for line in capsys.readouterr().out.splitlines()]
  assert lines[1][:2] == ['rope', 'none'] and lines[2][:2] == ['alibi', 'none']
  assert lines[3] == ['theoretical', 'floor', '4.482', '3.49']
  assert [float(r['floor']) for r in rows(tmp_path / 'out')] == [1.5, 1.25, 1.5]


def test_a_missing_curve_is_one_line(make, tmp_path):
  a = make('a', point())
  message = refused(a, tmp_path / 'gone', out=tmp_path / 'out')
  assert str(tmp_path / 'gone') in message and 'eval_extrapolation.py' in message


def test_the_program_ends_in_one_line(make, tmp_path, capsys, monkeypatch):
  a, b = make('a', point()), make('b', point('alibi', targets_hash='xyz'))
  monkeypatch.setattr(sys, 'argv', ['compare', str(a), str(b), f'--out={tmp_path / "out"}'])
  with pytest.raises(SystemExit) as caught:
    cli.guard(compare.main)
  out, err = capsys.readouterr()
  assert caught.value.code == 2 and out == ''
  assert err.startswith('error: ') and err.count('\n') == 1 and err.endswith('\n')

"""Turns within the training length, the nano map, and the report that prints them."""

import sys

import numpy as np
import pytest
from flax import nnx

import posenc
from posenc import rotations
from scripts import rotation_report
from spec import SpecError
from training import cli

LLAMA_2 = rotations.REFERENCES[0]


def rope(width=32, base=10000.0, train_len=128):
  shapes = {'heads': 1, 'head_dim': width, 'd_model': width, 'train_len': train_len}
  return posenc.build(f'rope(base={base!r})', rngs=nnx.Rngs(0), **shapes)


def split(method, scheme, train_len):
  """Pairs kept, blended, interpolated."""
  (call,) = posenc.check_method(method)
  share_P = posenc.kept(call, scheme, train_len)
  return (share_P == 1).sum(), ((share_P > 0) & (share_P < 1)).sum(), (share_P == 0).sum()


@pytest.mark.parametrize(('width', 'train_len', 'first', 'count'), [
  (32, 128, 5.24, 10), (64, 256, 12.88, 19), (128, 4096, 45.03, 18),
])  # fmt: skip
def test_the_first_pair_without_a_turn(width, train_len, first, count):
  """p* by the formula, and the same pairs one by one: a pair is out of range where its wave is longer than L."""
  theta_P = rope(width).inv_freq_P
  assert rotations.crossing(1, width, 1e4, train_len) == pytest.approx(first, abs=0.005)
  missing = rotations.incomplete(theta_P, train_len)
  np.testing.assert_array_equal(missing, np.arange(width // 2) > first)
  np.testing.assert_array_equal(missing, 2 * np.pi / theta_P > train_len)
  assert missing.sum() == count


def test_a_pair_that_is_not_rotated_is_not_out_of_range():
  theta_P = np.array([1.0, 0.01, 0.0])
  np.testing.assert_array_equal(rotations.incomplete(theta_P, 128), [False, True, False])
  np.testing.assert_array_equal(rotations.kept(theta_P, theta_P / [1, 2, 1], 2), [1, 0, np.nan])
  np.testing.assert_allclose(rotations.rebased(theta_P, 1e4, 1e2), [1, 0.1, 0])
  assert rotations.remarks('x', theta_P, 1e4, 8192) == []  # nothing to remark
  assert rotations.remarks('x', theta_P, 1e4, 128)[0].startswith('x: 1 of 2 ')


@pytest.mark.parametrize('reference', rotations.REFERENCES, ids=[r.name for r in rotations.REFERENCES])
@pytest.mark.parametrize(('width', 'train_len'), [(32, 128), (64, 256), (128, 1024), (256, 16384)])
def test_the_nano_map_keeps_the_shares(reference, width, train_len):
  """What it is solved for: at any number of turns, both models cut their ladder of pairs at the same share."""
  base = rotations.matched_base(train_len, reference)
  for beta in (1, 4, 32):
    ours = rotations.crossing(rotations.matched_beta(beta, base, reference), width, base, train_len) / width
    theirs = rotations.crossing(beta, reference.rot, reference.base, reference.train_len) / reference.rot
    assert ours == pytest.approx(theirs, rel=1e-12)
  large = rotations.incomplete(reference.inv_freq_P, reference.train_len).mean()
  small = rotations.incomplete(rope(width, base).inv_freq_P, train_len).mean()
  assert abs(small - large) <= 2 / width + 2 / reference.rot


def test_a_reference_is_its_own_map():
  for reference in rotations.REFERENCES:
    base = rotations.matched_base(reference.train_len, reference)
    assert base == pytest.approx(reference.base, rel=1e-12)
    assert rotations.matched_beta(32, base, reference) == pytest.approx(32, rel=1e-12)


def test_the_nano_map_in_numbers():
  assert rotations.matched_base(128, LLAMA_2) == pytest.approx(72.55, abs=0.01)
  assert rotations.matched_beta(32, 72.55, LLAMA_2) == pytest.approx(5.01, abs=0.01)
  assert rotations.incomplete(rope(32, 75.0).inv_freq_P, 128).sum() == 4
  counts = {r.name: rotations.incomplete(r.inv_freq_P, r.train_len).sum() for r in rotations.REFERENCES}
  assert counts == {'Llama 2': 18, 'Llama 3': 29, 'Pythia 6.9B': 5}


def test_a_matched_yarn_splits_as_the_large_one():
  """The default betas do not: of 16 pairs 1 is kept at base 10000, and none of the rotations ramp."""
  large = np.array(split('yarn', rope(128, 1e4, 4096), 4096)) / 64
  small = np.array(split('yarn(beta_fast=5.013)', rope(32, 72.55), 128)) / 16
  assert abs(small - large).max() <= 1 / 16
  assert split('yarn', rope(), 128) == (1, 5, 10) and split('yarn(ramp="rotations")', rope(), 128) == (0, 6, 10)


@pytest.mark.parametrize('factor', ['', '(factor=3.0)', '(factor=1.0)'])
def test_the_split_does_not_ask_for_a_factor(factor):
  assert split(f'llama31{factor}', rope(128, 1e4, 4096), 4096) == (36, 10, 18)


def run(capsys, *arguments):
  rotation_report.main(list(arguments))
  return capsys.readouterr().out


def test_the_report(capsys, tmp_path):
  """lambda_p of both ramps at s = 8, as the released code and the paper's equations give them."""
  out = run(capsys, '--train_len=128', '--head_dim=32', '--base=10000', f'--out={tmp_path / "new" / "turns.png"}')
  rows = [line.split() for line in out.splitlines()]
  table = {row[0]: row[1:] for row in rows if row and row[0].isdigit()}
  assert list(table) == [str(p) for p in range(16)]
  assert table['0'] == ['1', '6.3', '20.37', 'keep', '/1', 'blend', '/1.49']
  assert [row[4] for row in table.values()][1:7] == ['/1.17', '/1.41', '/1.78', '/2.4', '/3.69', '/8']
  assert [row[6] for row in table.values()][1:7] == ['/2.38', '/3.59', '/5.02', '/6.48', '/7.75', '/8']
  assert all(row[3] == row[5] == 'interpolate' for row in list(table.values())[6:])
  assert 'p* = 5.24' in out and '10 of 16' in out and 'warning: 128 tokens are 20.4 turns' in out
  (llama,) = [row for row in rows if row[:2] == ['Llama', '2']]
  assert llama[2:] == ['10000', '4096', '18', 'of', '64', '72.55', '4', 'of', '16', '5.013', '1.906']
  assert (tmp_path / 'new' / 'turns.png').read_bytes().startswith(b'\x89PNG')


def test_the_report_in_the_docs_is_the_one_it_prints(capsys, root):
  """Where this fails, the command of docs/figures.md is to be run again."""
  out = run(capsys, '--train_len=128', '--head_dim=32', '--base=10000')
  assert f'```text\n{out}```' in (root / 'docs' / 'figures.md').read_text()


def test_the_report_of_a_long_model(capsys):
  """Llama 2 itself: nothing to warn about; a method without a ramp has stretches alone."""
  out = run(capsys, '--train_len=4096', '--head_dim=128', '--methods=ntk(factor=8)+logn', '--methods=llama31')
  assert 'warning' not in out and 'note: llama31: of 64 frequency pairs 36 kept' in out
  last = next(line.split() for line in out.splitlines() if line.split()[:1] == ['63'])
  assert last[4:] == ['/8', 'interpolate', '/8']


@pytest.mark.parametrize(('argument', 'words'), [
  ('--train_len=6', 'train_len = 6: at least 7'),
  ('--head_dim=0', 'head_dim = 0'),
  ('--head_dim=31', 'head_dim = 31: an even'),
  ('--base=1', 'base = 1.0: a number above 1'),
  ('--methods=yarm', "did you mean 'yarn'"),
])  # fmt: skip
def test_a_mistake_is_one_line(capsys, argument, words):
  with pytest.raises(SpecError) as caught:
    rotation_report.main([argument])
  assert words in str(caught.value) and '\n' not in str(caught.value)
  assert capsys.readouterr().out == ''


def test_an_unsupported_method_is_one_line(capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['rotation_report', '--head_dim=2', '--methods=ntk'])
  with pytest.raises(SystemExit) as caught:
    cli.guard(rotation_report.main)
  out, err = capsys.readouterr()
  assert (caught.value.code, out) == (2, '') and err.startswith('error: methods: ntk') and err.count('\n') == 1

"""Surfaces side by side: the order of schemes, and whether it holds."""

import json

import numpy as np
import pytest

from evaluation import figures, stability
from evaluation.runs import Run
from report_test import point


@pytest.fixture
def make(tmp_path):
  """A run with a surface: nll[length] over checkpoints 10, 20 ..."""

  def make(scheme, nll, seed=0, **changes):
    folder = tmp_path / f'{scheme}{seed}'
    (folder / 'extrapolation').mkdir(parents=True)
    lines = [
      point(scheme, 'none', n, [x], seed=seed, checkpoint_step=10 * i, tokens_seen=160 * i, **changes)
      for n, of in nll.items()
      for i, x in enumerate(of, 1)
    ]
    (folder / 'extrapolation' / 'surface.jsonl').write_text(''.join(json.dumps(p) + '\n' for p in lines))
    return Run(folder, [point(scheme, 'none', 16, [2.0] * 12, seed=seed)], {})

  return make


def test_tau_is_of_the_last_order_with_those_before(make):
  """Three schemes. At 1x the order never changes; at 2x two of three pairs are turned over one checkpoint before."""
  runs = [
    make('rope', {16: [1.0, 1.0, 1.0], 32: [3.0, 2.0, 1.0]}),
    make('alibi', {16: [2.0, 2.0, 2.0], 32: [2.0, 1.0, 2.0]}),
    make('nope', {16: [3.0, 3.0, 3.0], 32: [1.0, 1.5, 3.0]}),
  ]
  said = stability.rank_stability(runs)
  # 2x: [3, 2, 1] against [1, 2, 3] is -1; [2, 1, 1.5] against it has one pair of three in order: -1/3.
  assert '1x 1.00 [1.00], 2x -0.67 [-1.00]' in said and 'steps 10 to 30' in said and '3 schemes' in said


def test_seeds_are_averaged_before_they_are_ranked(make):
  runs = [
    make('rope', {16: [1.0, 1.0]}),
    make('rope', {16: [4.0, 4.0]}, seed=1),  # 2.5 on average: behind alibi at the last step, before it at the first
    make('alibi', {16: [3.0, 2.0]}),
  ]
  assert '1x -1.00' in stability.rank_stability(runs)


def test_what_cannot_be_said(make):
  a, b = make('rope', {16: [1.0, 2.0]}), make('alibi', {16: [1.0, 2.0]}, targets_hash='other')
  assert 'different targets' in stability.rank_stability([a, b])
  bare = Run(a.workdir / 'gone', [point('nope', 'none', 16, [2.0] * 12)], {})
  assert 'not measured, nope trained without' in stability.rank_stability([a, bare])
  assert 'fewer than two' in stability.rank_stability([a, make('fox', {16: [1.0]})])
  even = [make('t5', {16: [1.0, 1.0]}), make('cope', {16: [1.0, 1.0]})]
  assert '1x no order' in stability.rank_stability(even)


def test_a_panel_per_scheme_and_a_line_per_length(make):
  runs = [make('rope', {16: [2.0, 1.0], 32: [2.5, np.inf]}), make('alibi', {16: [2.0, 1.5], 32: [2.0, 1.5]})]
  lines = stability.lines([{**p, 'nll': float(p['nll'])} for p in stability.points(runs)])
  figure = figures.surface(lines, 16)
  assert [ax.get_title() for ax in figure.axes] == ['rope', 'alibi']
  drawn = {line.get_label(): line for line in figure.axes[0].get_lines()}
  np.testing.assert_allclose(drawn['1x'].get_ydata(), np.exp([2.0, 1.0]))
  assert list(drawn['1x'].get_xdata()) == [160, 320] and np.isfinite(drawn['2x'].get_ydata()).all()

"""A table as a whole: what evaluation/stats.py says of its cells together, and nulls found to be what they are."""

import math

import numpy as np
import pytest

from evaluation import coverage, nulls, results, summary
from evaluation.plan import Comparison
from evaluation.stats import components, infer, min_detectable, reach, stretch
from spec import SpecError

LENGTHS = (64, 128, 256)
D = 16


def point(method, length, x_D, seed=0, scheme='rope', protocol='fixed_targets', **changes):
  x_D = np.asarray(x_D, np.float64)
  with np.errstate(over='ignore'):
    ppl = float(np.exp(x_D.mean()))
  return {
    'scheme': scheme, 'method': method, 'length': length, 'protocol': protocol, 'seed': seed, 'train_length': 128,
    'follows_length': False, 'checkpoint_step': 10, 'targets_hash': 'a', 'reason': None,
    'outcome': 'ok' if math.isfinite(ppl) else 'diverged',
    'nll': float(x_D.mean()), 'ppl': ppl, 'ci_low': None, 'ci_high': None, 'interval': 't over documents',
    'nll_documents': x_D.tolist(), **changes,
  }  # fmt: skip


def table(seeds=1, methods=('none', 'pi', 'yarn'), effect=0.0, scheme='rope', documents=D, draw=0, **changes):
  """Random levels: documents differ, methods by `effect` times their place in the list."""
  rng = np.random.default_rng(draw)
  text_D = rng.standard_normal(documents)
  return [
    point(m, n, 3 + text_D + i * effect + 0.1 * rng.standard_normal(documents), seed, scheme, **changes)
    for seed in range(seeds)
    for i, m in enumerate(methods)
    for n in LENGTHS
  ]


def x_of(points, method, length, seeds=1):
  """x[S, D]."""
  found = {p['seed']: p['nll_documents'] for p in points if (p['method'], p['length']) == (method, length)}
  return np.array([found[seed] for seed in range(seeds)])


def at(rows, method, length, **more):
  (row,) = [p for p in rows if all(p[k] == v for k, v in {'method': method, 'length': length, **more}.items())]
  return row


@pytest.mark.parametrize('seeds', [1, 3])
def test_a_line_has_a_band_over_its_lengths(seeds):
  points = table(seeds)
  rows = summary.rows(points)
  assert len(rows) == 9
  for method in ('none', 'pi', 'yarn'):
    band = infer(np.stack([x_of(points, method, n, seeds) for n in LENGTHS], -1))
    for i, n in enumerate(LENGTHS):
      row = at(rows, method, n)
      assert row['nll'] == pytest.approx(x_of(points, method, n, seeds).mean())
      assert row['ppl'] == pytest.approx(math.exp(row['nll']))
      assert (row['ci_low'], row['ci_high']) == pytest.approx((math.exp(band.low[i]), math.exp(band.high[i])))
      assert row['interval'] == f'over all lengths at once, {"this checkpoint" if seeds == 1 else "3 seeds"}'
  alone = infer(x_of(points, 'none', 64, seeds)[:, :, None], alone=True)
  assert at(rows, 'none', 64)['ci_high'] > math.exp(float(alone.high[0]))


@pytest.mark.parametrize('seeds', [1, 3])
def test_marks_are_over_the_whole_table(seeds):
  points = table(seeds, effect=0.06)
  rows = summary.rows(points)
  cells = [(m, n) for m in ('pi', 'yarn') for n in LENGTHS]
  x = np.stack([x_of(points, m, n, seeds) - x_of(points, 'none', n, seeds) for m, n in cells], -1)
  want = infer(x)
  assert 0 < (want.p < 0.05).sum() < 6  # or it would show nothing
  for i, (m, n) in enumerate(cells):
    row = at(rows, m, n)
    assert (row['vs_none'], row['vs_none_low'], row['p']) == pytest.approx((want.mean[i], want.low[i], want.p[i]))
    assert row['marked'] == (want.p[i] < 0.05) == (not want.low[i] <= 0 <= want.high[i])
  assert 'marked' not in at(rows, 'none', 64)
  text = results.table(rows)
  assert text.count('*') == sum(want.p < 0.05)


def test_protocols_are_tables_of_their_own():
  points = table(effect=0.06)
  other = [{**p, 'protocol': 'sliding'} for p in table(effect=0.06, draw=1)]
  assert summary.rows([*points, *other]) == [*summary.rows(points), *summary.rows(other)]


def test_schemes_with_as_many_seeds_are_drawn_together_and_others_share_the_error():
  """Whoever asks more questions gets wider answers."""
  rope = table(3, effect=0.06)
  one = at(summary.rows(rope), 'yarn', 128)['p']
  together = at(summary.rows([*rope, *table(3, scheme='alibi', draw=1)]), 'yarn', 128, scheme='rope')['p']
  apart = at(summary.rows([*rope, *table(1, scheme='alibi', draw=1)]), 'yarn', 128, scheme='rope')['p']
  assert one < together and apart == pytest.approx(2 * one)


def test_a_length_that_a_seed_lacks_is_no_cell():
  points = table(3)
  rows = summary.rows([p for p in points if (p['seed'], p['method'], p['length']) != (2, 'yarn', 256)])
  assert 'seeds' in at(rows, 'none', 256) and 'seeds' not in at(rows, 'yarn', 256)
  assert 'p' not in at(rows, 'yarn', 256) and at(rows, 'yarn', 128)['seeds'] == [0, 1, 2]


def test_a_method_pairs_with_the_seeds_that_it_has_in_whatever_order():
  points = [p for p in table(3, effect=0.06) if (p['seed'], p['method']) != (1, 'pi')]
  lines = [*(p for p in points if p['method'] == 'none'), *(p for p in points[::-1] if p['method'] != 'none')]
  want = np.array([np.subtract(x_of(points, 'pi', 64, 1), x_of(points, 'none', 64, 1))[0], *[
    np.subtract(p['nll_documents'], q['nll_documents'])
    for p in points for q in points
    if (p['seed'], p['method'], p['length'], q['seed'], q['method'], q['length']) == (2, 'pi', 64, 2, 'none', 64)
  ]])  # fmt: skip
  got = {(c[2], n): x for (*c, n), x in summary.differences(summary.curves(lines)).items()}
  np.testing.assert_allclose(got['pi', 64], want[::-1])
  assert got['yarn', 64].shape == (3, D)
  assert not summary.differences([c for c in summary.curves(points) if c.method != 'none'])
  few = [p for p in points if (p['seed'], p['method']) != (2, 'none')]
  assert {c[2] for *c, _ in summary.differences(summary.curves(few))} == set()


def test_a_diverged_seed_leaves_the_mean_and_is_counted():
  points = table(3)
  for p in points:
    if (p['seed'], p['method'], p['length']) == (1, 'pi', 256):
      p |= point('pi', 256, [math.inf] * D, 1)
  rows = summary.rows(points)
  row = at(rows, 'pi', 256)
  assert row['diverged'] == 1 and row['outcome'] == 'ok'
  assert row['nll'] == pytest.approx(x_of(points, 'pi', 256, 3)[[0, 2]].mean())
  assert '(1 diverged)' in results.table(rows)
  alone = summary.rows([p for p in points if p['seed'] == 1])
  assert at(alone, 'pi', 256)['outcome'] == 'diverged' and at(alone, 'pi', 256)['ci_low'] is None


@pytest.mark.parametrize('seeds', [1, 3])
def test_levels_of_few_documents_have_no_ends_and_differences_have(seeds):
  points = table(documents=8, effect=1.0, seeds=seeds)
  rows = summary.rows(points)
  want = infer(np.stack(list(summary.differences(summary.curves(points)).values()), -1), least=3)
  marks = [row for row in rows if 'vs_none' in row and row['method'] != 'none']
  assert [row['vs_none_low'] for row in marks] == pytest.approx(want.low.tolist()) and np.isfinite(want.low).all()
  assert any(row['marked'] for row in marks) and '*' in results.table(rows)
  for row in rows:
    assert row['ci_low'] is None and row['interval'] == 't over documents'
    assert row['nll_documents'] == x_of(points, row['method'], row['length'], seeds).mean(0).tolist()
  assert '±' not in summary.text(points) and '8 documents: no interval of levels below 12' in summary.text(points)


def test_two_documents_have_no_marks():
  points = table(documents=2, effect=1.0)
  assert not any(row.get('marked') for row in summary.rows(points)) and 'differs' not in summary.text(points)


def test_what_is_refused_stays_in_the_table():
  points = [*table(methods=('none',)), {**point('ntk', 64, [0.0]), 'outcome': 'unsupported', 'reason': 'no'}]
  for key in ('nll', 'ppl', 'nll_documents'):
    del points[-1][key]
  assert summary.rows(points)[-1] == points[-1]


# Controls.


def control(gain, name='foreign', seeds=1, method='none', **changes):
  rng = np.random.default_rng(1)
  return [
    point(method, n, np.zeros(D), seed, protocol=name, gain=gain,
          gain_documents=(gain + 0.01 * rng.standard_normal(D)).tolist(), **changes)
    for seed in range(seeds) for n in LENGTHS[2:]
  ]  # fmt: skip


def test_gains_are_one_family_and_no_lines():
  points = [*table(), *control(0.05), *control(0.0, 'truncated')]
  got = summary.gains(points)
  want = infer(np.array([p['gain_documents'] for p in points if 'gain' in p]).T[None])
  for i, field in enumerate((want.mean, want.low, want.high, want.p)):
    assert [cell[i] for cell in got.values()] == pytest.approx(list(field))
  assert [cell.marked for cell in got.values()] == [True, False]
  assert summary.rows(points) == summary.rows(table())
  lines = summary.text(points).splitlines()
  (head,) = [i for i, line in enumerate(lines) if line.startswith('gain of far text over')]
  assert lines[head].split()[-1] == '2x'
  assert lines[head + 1].split()[:2] == ['none', 'foreign'] and lines[head + 1].endswith('*')
  assert lines[head + 2].split()[:2] == ['none', 'truncated'] and not lines[head + 2].endswith('*')


# Comparisons fixed in advance.


@pytest.mark.parametrize('seeds', [1, 3])
def test_a_comparison_fixed_in_advance_is_tested_alone(seeds):
  points = table(seeds, effect=0.06)
  x = x_of(points, 'yarn', 256, seeds) - x_of(points, 'pi', 256, seeds)
  (got,) = summary.declared(points, {'rope': ['yarn - pi at 2x', 'yarn - pi at 4x', 'ntk - none at 2x']})
  want = infer(x[:, :, None], alone=True)
  assert got.cell[:4] == pytest.approx([float(v[0]) for v in (want.mean, want.low, want.high, want.p)])
  assert got.detectable == pytest.approx(min_detectable(components(x), seeds, D))
  text = summary.text(points, {'rope': ['yarn - pi at 2x']})
  assert f'rope, yarn - pi at 2x: {float(want.mean[0]):+.4f} nats' in text
  assert 'fixed in advance' not in summary.text(points, {'rope': ['yarn - pi at 4x']})
  assert not summary.declared(points, {'alibi': ['yarn - pi at 2x']})  # nor did this scheme's config name it


def test_how_a_comparison_is_written():
  assert Comparison.parse('yarn(factor=8)+logn - none at 0.5x') == ('yarn(factor=8)+logn', 'none', 0.5)
  for text in ('yarn', 'yarn - none', 'yarn-none at 4x', 'yarn - none at 4', 'yarn - nope at 4x', ' - none at 4x'):
    with pytest.raises(SpecError, match='compare = '):
      Comparison.parse(text)


# Stretch and reach.


def test_extents_are_of_fixed_targets():
  points = [*table(3), *[{**p, 'protocol': 'sliding'} for p in table(3)]]
  got = summary.extents(points)
  assert [e.curve.method for e in got] == ['none', 'pi', 'yarn']
  x = np.stack([x_of(table(3), 'pi', n, 3) for n in LENGTHS], -1)
  assert got[1].stretch == stretch(x, LENGTHS, 128)
  assert got[1].reach == (reach(x, LENGTHS, 0.01), reach(x, LENGTHS, 0.002))


def test_extents_are_told_in_tokens_and_in_units_of_the_slope():
  flat = [point('none', n, 3 + np.arange(D) / D, slope=1 / 256) for n in LENGTHS]
  lines = summary.text(flat).splitlines()
  assert 'none              ≥ 256 [≥ 256, ≥ 256]  ≤ 64 [≤ 64, ≤ 64]  ≤ 64 [≤ 64, ≤ 64]' in lines
  assert lines[-1].startswith('none, in 1/m = 256 tokens') and 'reach(0.01) ≤ 0.25 [≤ 0.25, ≤ 0.25]' in lines[-1]
  assert '1x was not swept' in summary.text([p for p in flat if p['length'] != 128])


SWEEP = (32, 64, 128, 256, 512, 1024, 2048)


@pytest.mark.parametrize(
  'null, stretched, reached',
  [
    (nulls.smooth(32), 2048, {0.01: 64, 0.002: 64}),
    (nulls.smooth(128), 2048, {0.01: 128, 0.002: 256}),
    (nulls.smooth(1000), 2048, {0.01: 1024, 0.002: 1024}),
    (nulls.copy(400), 2048, {0.01: 512, 0.002: 512}),
    (nulls.step(200), 2048, {0.01: 256, 0.002: 256}),
    (nulls.broken(512), 512, {0.01: 512, 0.002: 512}),
    (nulls.uniform(), 2048, {0.01: 32, 0.002: 32}),
  ],
  ids=lambda v: getattr(v, 'name', None),
)
def test_stretch_and_reach_find_the_truth_of_nulls(null, stretched, reached):
  """From windows of the real plan to the summary; documents scatter as those of our own models do."""
  trials, rng = 40, np.random.default_rng(0)
  plan = nulls.synthetic_plan(train_len=128, max_multiple=16, documents=40)
  level = {n: nulls.evaluate(null, plan, 'fixed_targets', n).nll_D for n in SWEEP}
  near = np.zeros(3)
  for _ in range(trials):
    text_D = coverage.MEASURED['level at 1x'].document ** 0.5 * rng.standard_normal(40)
    own = coverage.PAIR_SD / np.sqrt(2)
    points = [point('none', n, level[n] + text_D + own * rng.standard_normal(40)) for n in SWEEP]
    (found,) = summary.extents(points)
    truth = (stretched, *(reached[epsilon] for epsilon in summary.EPSILONS))
    near += [abs(math.log2(e.value / t)) <= 1 for e, t in zip((found.stretch, *found.reach), truth, strict=True)]
  assert (near >= 0.95 * trials).all(), near / trials


def test_a_table_of_nulls_has_no_mark():
  """Methods that change nothing but noise: a false mark in 5 % of tables (evaluation/coverage.py), here none."""
  assert not any(row.get('marked') for draw in range(3) for row in summary.rows(table(draw=draw)))

"""Intervals over seeds and documents, families of them, and the two lengths of a curve."""

import math

import numpy as np
import pytest
from scipy import stats

from evaluation import coverage
from evaluation.stats import (
  MIN_DOCUMENTS,
  Components,
  components,
  infer,
  min_detectable,
  power,
  reach,
  stretch,
  t_interval,
)


@pytest.mark.parametrize('n', [12, 13, 40])
@pytest.mark.parametrize('confidence', [0.5, 0.95, 0.99])
def test_the_ends_are_students(n, confidence):
  x_D = np.random.default_rng(n).normal(3.0, 0.4, n)
  mean, low, high = t_interval(x_D, confidence)
  want = stats.ttest_1samp(x_D, 0.0).confidence_interval(confidence)  # another path through scipy than ours
  assert mean == pytest.approx(x_D.mean(), rel=1e-15)
  assert (low, high) == (pytest.approx(want.low, rel=1e-12), pytest.approx(want.high, rel=1e-12))
  assert high - mean == pytest.approx(mean - low, rel=1e-9)


def test_by_hand():
  """12 values of mean 2 and sample variance 12/11; the 97.5 % point of t with 11 degrees of freedom is 2.200985."""
  mean, low, high = t_interval(np.array([1.0, 3.0] * 6))
  half = 2.200985 * math.sqrt(12 / 11) / math.sqrt(12)
  assert mean == 2.0
  assert (low, high) == (pytest.approx(2 - half, abs=1e-6), pytest.approx(2 + half, abs=1e-6))


def test_95_percent_is_the_default():
  x_D = np.random.default_rng(0).normal(size=20)
  assert t_interval(x_D) == t_interval(x_D, 0.95)


@pytest.mark.parametrize('n', [1, 2, 11])
def test_no_ends_below_12_documents(n):
  assert MIN_DOCUMENTS == 12
  assert t_interval(np.arange(n)) == ((n - 1) / 2, None, None)
  assert None not in t_interval(np.arange(12))


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_no_ends_where_a_value_is_not_finite(value):
  x_D = np.ones(20)
  x_D[7] = value
  mean, low, high = t_interval(x_D)
  assert not math.isfinite(mean) and low is None and high is None


def test_equal_values_have_an_interval_without_width():
  assert t_interval(np.full(12, 2.5)) == (2.5, 2.5, 2.5)


def test_float32_is_averaged_as_float64():
  x_D = np.float32([1e8, *[1.0] * 15])
  assert t_interval(x_D).mean == (1e8 + 15) / 16


def test_numbers_are_plain_floats():
  assert {type(v) for v in t_interval(np.arange(12, dtype=np.float32))} == {float}


@pytest.mark.parametrize('documents', [12, 40])
def test_coverage(documents):
  """Nominal 95 % over 4,000 draws has a standard error of 0.35 %. A normal quantile would cover 92.4 % at 12."""
  rng = np.random.default_rng(5)
  hits = 0
  for x_D in rng.normal(3.0, 0.3, (4000, documents)):
    _, low, high = t_interval(x_D)
    hits += low <= 3.0 <= high
  assert 0.94 < hits / 4000 < 0.96


# Crossed seeds and documents.


def two_way(x_SD):
  """MS_seed, MS_doc, MS_res by loops."""
  S, D = x_SD.shape
  grand = x_SD.mean()
  a = [x_SD[s].mean() - grand for s in range(S)]
  b = [x_SD[:, d].mean() - grand for d in range(D)]
  e = sum((x_SD[s, d] - grand - a[s] - b[d]) ** 2 for s in range(S) for d in range(D))
  return D * sum(v**2 for v in a) / (S - 1), S * sum(v**2 for v in b) / (D - 1), e / ((S - 1) * (D - 1))


def crossed(S, D, seed=0, sd=(0.2, 0.3, 0.1)):
  rng = np.random.default_rng(seed)
  return sd[0] * rng.normal(size=(S, 1)) + sd[1] * rng.normal(size=(1, D)) + sd[2] * rng.normal(size=(S, D))


def test_a_layout_by_hand():
  """Seed means 2 and 5, document means 1.5, 3, 6, residuals ±1, ±0.5, ±1.5: mean squares 13.5, 10.5, 3.5."""
  x_SD = np.array([[1.0, 2.0, 3.0], [2.0, 4.0, 9.0]])
  assert two_way(x_SD) == pytest.approx((13.5, 10.5, 3.5))
  cells = infer(x_SD)
  assert cells.mean == 3.5 and cells.se == pytest.approx(math.sqrt((13.5 + 10.5 - 3.5) / 6))
  assert components(x_SD) == pytest.approx((10 / 3, 3.5, 3.5))
  assert np.isnan([cells.low, cells.high, cells.p]).all()  # three documents


@pytest.mark.parametrize('S, D', [(2, 12), (3, 20), (10, 40)])
def test_the_variance_of_the_grand_mean(S, D):
  x_SD = crossed(S, D)
  seed, document, residual = two_way(x_SD)
  assert seed > residual
  assert infer(x_SD).se == pytest.approx(math.sqrt((seed + document - residual) / (S * D)), rel=1e-12)


def test_seeds_that_agree_take_nothing_off():
  """MS_seed < MS_res: a seed part of 0, not a negative one."""
  x_SD = crossed(3, 20, sd=(0, 0.1, 1.0))
  x_SD -= x_SD.mean(1, keepdims=True)
  seed, document, residual = two_way(x_SD)
  assert seed < residual
  assert infer(x_SD).se == pytest.approx(math.sqrt(document / 60), rel=1e-12)
  assert components(x_SD).seed == 0


@pytest.mark.parametrize('confidence', [0.8, 0.95])
def test_one_seed_is_students(confidence):
  x_D = crossed(1, 15)[0] + 0.1
  cells, want = infer(x_D[None], confidence=confidence), stats.ttest_1samp(x_D, 0.0)
  assert cells.p == pytest.approx(want.pvalue, rel=1e-9)
  interval = want.confidence_interval(confidence)
  assert (cells.low, cells.high) == (pytest.approx(interval.low, rel=1e-9), pytest.approx(interval.high, rel=1e-9))
  assert (cells.mean, cells.low, cells.high) == pytest.approx(tuple(t_interval(x_D, confidence)), rel=1e-9)


def test_where_seeds_are_all_there_is_it_is_students_over_seeds():
  """Every document alike: five numbers, not 100."""
  a_S = np.array([0.1, 0.4, 0.3, -0.2, 0.2])
  want = stats.ttest_1samp(a_S, 0.0)
  cells = infer(np.repeat(a_S[:, None], 20, 1))
  assert cells.p == pytest.approx(want.pvalue, rel=1e-9)
  assert cells.high == pytest.approx(want.confidence_interval(0.95).high, rel=1e-9)


def test_the_quantile_lies_between_those_of_the_parts():
  x_SD = crossed(3, 20, sd=(0.1, 0.3, 0.1))
  cells = infer(x_SD)
  quantile = float((cells.high - cells.mean) / cells.se)
  assert stats.t.ppf(0.975, 19) < quantile < stats.t.ppf(0.975, 2)
  # It is where the shares' mixture of tails is 5 %.
  seed, document, residual = two_way(x_SD)
  share = (seed - residual) / (seed - residual + document)
  assert 2 * (share * stats.t.sf(quantile, 2) + (1 - share) * stats.t.sf(quantile, 19)) == pytest.approx(0.05, rel=1e-6)


def test_methods_pair_by_seed_and_document():
  x_SD, y_SD = crossed(1, 20), crossed(1, 20, seed=1)
  assert infer(x_SD - y_SD).p == pytest.approx(stats.ttest_rel(x_SD[0], y_SD[0]).pvalue, rel=1e-9)


def test_schemes_pair_by_document_only():
  """Variance of document differences over D, and what each scheme's seeds add."""
  x_SD, y_SD = crossed(3, 20), crossed(5, 20, seed=1)
  z_D = x_SD.mean(0) - y_SD.mean(0)
  variance = z_D.var(ddof=1) / 20
  for g in (x_SD, y_SD):
    seed, _, residual = two_way(g)
    assert seed > residual
    variance += (seed - residual) / g.size
  cells = infer(x_SD, y_SD)
  assert cells.mean == pytest.approx(z_D.mean()) and cells.se == pytest.approx(math.sqrt(variance), rel=1e-12)
  # The order of seeds means nothing between schemes, and something within a method's pair.
  assert infer(x_SD[::-1], y_SD).se == pytest.approx(float(cells.se), rel=1e-12)
  assert infer(x_SD - y_SD[:3]).se != pytest.approx(float(infer(x_SD[::-1] - y_SD[:3]).se), rel=1e-3)


@pytest.mark.parametrize('law', ['normal', 't4'])
@pytest.mark.parametrize('S', [1, 3, 5, 10])
@pytest.mark.parametrize('D', [12, 20, 40])
def test_coverage_of_crossed_effects(S, D, law):
  """Nominal 95 % with the variances of our own models, and with none but the residual; standard error 0.35 %."""
  rng = np.random.default_rng(0)
  for c in (*coverage.MEASURED.values(), *coverage.UNMEASURED.values()):
    assert 0.93 <= coverage.covered(c, S, D, law, 4000, rng) <= 0.975


def test_what_covers_less():
  c, rng = coverage.MEASURED['yarn - none at 2x'], np.random.default_rng(0)
  ours, satterthwaite, percentile, documents, tokens = coverage.alternatives(c, 3, 40, 400, rng)
  assert ours > 0.92 and satterthwaite < ours
  assert percentile < 0.90 and documents < 0.65 and tokens < 0.5
  *_, percentile, _, tokens = coverage.alternatives(coverage.MEASURED['level at 1x'], 1, 12, 400, rng)
  assert percentile < 0.93 and tokens < 0.93


# Families.


def test_a_mark_is_an_interval_without_zero():
  rng = np.random.default_rng(0)
  for S in (1, 4):
    x = rng.normal(size=(S, 15, 40)) + rng.normal(0, 1.0, 40)
    x[0, 3, ::2] = math.inf
    for alone in (False, True):
      cells = infer(x, alone=alone)
      outside = (cells.low > 0) | (cells.high < 0)
      assert 0 < outside.sum() < 40
      assert np.array_equal(cells.p < 0.05, outside)


def test_equal_cells_cost_nothing_and_unequal_ones_sidaks_price():
  x_D = np.random.default_rng(1).normal(0.5, 1, (1, 30, 1))
  single = float(infer(x_D).p[0])
  same = infer(np.repeat(x_D, 6, 2), draws=20000)
  assert same.p == pytest.approx(single, rel=0.15) and 0.001 < single < 0.05
  others = np.random.default_rng(2).normal(0, 1, (1, 30, 5))
  family = infer(np.concatenate([x_D, others], 2), draws=20000)
  assert family.p[0] == pytest.approx(1 - (1 - single) ** 6, rel=0.15)


def test_seeds_of_equal_cells_are_priced_as_unequal():
  """Nothing but seeds, three of them: what they share over cells is not known, and not taken off."""
  x = np.repeat(np.array([0.3, 0.5, 0.35])[:, None, None], 20, 1)
  single = float(infer(x).p[0])
  assert 0.01 < single < 0.05
  assert infer(np.repeat(x, 6, 2), draws=20000).p == pytest.approx(1 - (1 - single) ** 6, rel=0.1)


def test_cells_apart_take_their_share_of_the_error():
  """Of four cells two have a diverged seed: the others' marks cost twice what they cost among two."""
  x = np.stack([crossed(10, 20, i, (0.03, 0.3, 0.1)) for i in range(4)], -1) + 0.15
  whole = infer(x[:, :, :2])
  x[0, 0, 2:] = math.inf
  assert infer(x).p[:2] == pytest.approx(2 * whole.p) and whole.p.max() < 0.5


def test_a_band_is_wider_than_its_points_and_one_cell_is_no_family():
  x = np.random.default_rng(0).normal(size=(3, 20, 6))
  band, points = infer(x), infer(x, alone=True)
  assert (band.low < points.low).all() and (band.high > points.high).all() and (band.p >= points.p).all()
  for v, w in zip(infer(x[:, :, :1]), infer(x[:, :, :1], alone=True), strict=True):
    assert np.array_equal(v, w)


def test_equal_data_give_equal_numbers_and_stay_as_they_are():
  x = np.random.default_rng(0).normal(size=(3, 20, 6))
  before = x.copy()
  a, b = infer(x), infer(x)
  assert all(np.array_equal(v, w) for v, w in zip(a, b, strict=True)) and np.array_equal(x, before)


@pytest.mark.parametrize('S, D', [(1, 12), (3, 12)])
def test_false_marks_of_a_table(S, D):
  """12 methods x 6 lengths without effects, 100 tables: 5 % have a mark, where single tests mark two thirds."""
  c, rng = coverage.MEASURED['yarn - none at 2x'], np.random.default_rng(0)
  marked, alone, marks = coverage.false_marks(c, S, D, coverage.table_root(12, 6), 'normal', 100, rng)
  assert 0 < marked <= 0.10 and alone > 0.5 and 2 < marks < 5


@pytest.mark.slow
def test_three_seeds_that_agree_by_chance_make_no_marks():
  """1500 tables in which seeds matter: with the variance of each cell's own seeds in the draws it was 7.2 %."""
  c, rng = coverage.MEASURED['yarn - none at 2x'], np.random.default_rng([7, 3, 20])
  assert coverage.false_marks(c, 3, 20, coverage.table_root(12, 6), 'normal', 1500, rng)[0] < 0.06


def test_a_diverged_seed_leaves_its_cell_and_is_counted():
  x = np.stack([crossed(3, 20, seed=i) for i in range(4)], -1) + 0.3
  x[1, 5, 2] = math.inf
  x[:, 0, 3] = math.nan
  cells = infer(x)
  assert cells.diverged.tolist() == [0, 0, 1, 3]
  assert cells.mean[:2] == pytest.approx(x[:, :, :2].mean((0, 1)))
  assert cells.mean[2] == pytest.approx(x[[0, 2], :, 2].mean())
  assert cells.se[2] == pytest.approx(float(infer(x[[0, 2], :, 2]).se))
  assert all(math.isnan(v[3]) for v in (cells.mean, cells.low, cells.high, cells.p, cells.se))
  # Three cells are the family, and the one apart has a third of the error. In the tail MS_seed has its weight whole.
  seed, document, _ = two_way(x[[0, 2], :, 2])
  share, t = seed / (seed + document), float((cells.high[2] - cells.mean[2]) / cells.se[2])
  assert 2 * (share * stats.t.sf(t, 1) + (1 - share) * stats.t.sf(t, 19)) == pytest.approx(0.05 / 3, rel=1e-6)
  for g in infer(np.full((2, 20), math.inf))[:5]:
    assert math.isnan(g)


def test_cells_without_spread_are_exact_and_not_counted():
  x = np.random.default_rng(0).normal(0.3, 1, (1, 20, 1))
  cells = infer(np.concatenate([x, np.zeros((1, 20, 3)), np.full((1, 20, 1), 2.5)], 2))
  assert cells.low[1:].tolist() == cells.high[1:].tolist() == [0, 0, 0, 2.5]
  assert cells.p[1:].tolist() == [1, 1, 1, 0]
  assert cells.p[0] == infer(x).p[0]


@pytest.mark.parametrize('D', [1, 2, 11])
def test_few_documents_have_a_mean_and_no_ends(D):
  x = crossed(3, D)[:, :, None]
  cells = infer(x)
  assert cells.mean == pytest.approx(x.mean()) and np.isnan([cells.low, cells.high, cells.p]).all()


def test_shapes_are_checked():
  for x, y in [(np.ones(20), None), (np.ones((2, 20, 3)), np.ones((2, 20, 4))), (np.ones((2, 20)), np.ones((2, 21)))]:
    with pytest.raises(ValueError, match='seeds, documents, cells'):
      infer(x, y)


# What could have been found.


def test_components_are_those_of_the_data():
  x_SD = crossed(400, 400, sd=(0.2, 0.3, 0.1))
  assert components(x_SD) == pytest.approx((0.04, 0.09, 0.01), rel=0.15)
  seed, document, residual = components(x_SD[:1])
  assert math.isnan(seed) and document == pytest.approx(0.10, rel=0.15) and residual == 0
  y_SD = crossed(400, 400, seed=1, sd=(0.1, 0.3, 0.2))
  assert components(x_SD, y_SD) == pytest.approx((0.05, 0.18, 0.05), rel=0.15)


@pytest.mark.parametrize('S, D, groups', [(1, 12, 1), (3, 40, 1), (3, 40, 2), (10, 20, 1)])
def test_power_is_what_a_simulation_finds(S, D, groups):
  c = Components(0.0042**2, 0.0391**2, 0.0752**2)
  effect = min_detectable(c, S, D, groups=groups)
  assert power(effect, c, S, D, groups=groups) == pytest.approx(0.8, abs=1e-6)
  assert coverage.found(c, S, D, groups, effect, 4000, np.random.default_rng(0)) == pytest.approx(0.8, abs=0.025)


def test_one_seeds_power_is_the_noncentral_t():
  c = Components(math.nan, 0.09, 0.0)
  want = stats.nct.sf(stats.t.ppf(0.975, 19), 19, 0.2 / 0.3 * math.sqrt(20))
  assert power(0.2, c, 1, 20) == pytest.approx(want, abs=0.005)
  assert min_detectable(Components(0, 0, 0), 1, 20) == 0


# Stretch and reach.

LENGTHS = (64, 128, 256, 512, 1024)


def curve(*nll, S=1, D=20, noise=0.0):
  return np.array(nll) + crossed(S, D)[:, :, None] + noise * np.random.default_rng(1).normal(size=(S, D, len(nll)))


@pytest.mark.parametrize(
  'nll, stretched, reached',
  [
    ((1.3, 1.3, 1.3, 1.3, 1.3), '≥ 8x', '≤ 0.5x'),  # flat: says nothing about context
    ((1.5, 1.4, 1.3, 1.2, 1.1), '≥ 8x', '≥ 8x'),
    ((1.5, 1.4, 1.3, 1.295, 1.296), '≥ 8x', '2x'),
    ((1.5, 1.4, 1.42, 1.3, 1.3), '≥ 8x', '4x'),
    ((1.5, 1.4, 1.42, 1.46, 1.3), '2x', '≥ 8x'),  # 4x ends the stretch, though 8x is good
    ((1.3, 1.3, 2.0, 3.0, 2.9), '1x', '≤ 0.5x'),
    ((1.4, 1.3, 1.35, 1.36, 3.0), '2x', '1x'),
    ((1.3, 1.3, math.inf, 1.3, 1.3), '1x', '≤ 0.5x'),
    ((1.4, 1.3, 1.3, 1.2, math.nan), '4x', '4x'),
    ((math.inf, 1.3, 1.3, 1.3, 1.3), '≥ 8x', '1x'),
  ],
)
def test_exact_curves(nll, stretched, reached):
  x = curve(*nll) - 1e-9  # (1.35 - 1.3 <= 0.05 is a matter of rounding, so below)
  assert stretch(x, LENGTHS, 128, delta=0.05 + 1e-6).text(128) == f'{stretched} [{stretched}, {stretched}]'
  assert reach(x, LENGTHS).text(128) == f'{reached} [{reached}, {reached}]'


def test_the_pair_takes_out_what_lengths_share():
  """Documents scatter by 0.3; a rise of 0.1 with a pair's noise of 0.02 is seen all the same."""
  x = curve(1.3, 1.3, 1.3, 1.4, 1.4, noise=0.02, S=3)
  assert stretch(x, LENGTHS, 128)[:3] == (256, 256, 256)
  assert reach(x, LENGTHS, 0.05)[:3] == (64, 64, 64)


def test_intervals_are_as_wide_as_the_doubt():
  x = curve(1.3, 1.3, 1.3, 1.36, 1.6, noise=0.2)
  assert stretch(x, LENGTHS, 128)[1:3] == (128, 512)
  near = reach(curve(1.32, 1.31, 1.30, 1.30, 1.30, noise=0.05), LENGTHS)
  assert near.low == 64 and near.high == 1024


def test_the_low_end_asks_one_length_at_a_time_and_the_high_end_all():
  x = curve(1.3, 1.3, 1.31, 1.32, 1.33, noise=0.05, S=3)
  rise = x[:, :, 2:] - x[:, :, 1:2]
  band, each = infer(rise), infer(rise, alone=True)
  assert stretch(x, LENGTHS, 128, float(each.high[0] + band.high[0]) / 2).low > 128
  delta = float(max(each.low)) - 1e-4
  assert delta > max(band.low) and stretch(x, LENGTHS, 128, delta).high == 1024


def test_the_high_end_of_the_reach_pays_for_lengths_not_for_pairs():
  x = curve(1.32, 1.31, 1.30, 1.30, 1.30, noise=0.05, S=3)
  short, long = np.triu_indices(5, 1)
  gain, pairs = x[:, :, :1] - x[:, :, 1:], x[:, :, short] - x[:, :, long]
  single, paid = (infer(gain, alone=True, confidence=c).high.max() for c in (0.95, 1 - 0.05 / 4))
  assert single < paid < infer(pairs).high[short == 0].max()
  assert reach(x, LENGTHS, float(single + paid) / 2).high > 64
  assert reach(x, LENGTHS, float(paid) + 1e-6).high == 64


def test_few_documents_and_a_diverged_start():
  x = curve(1.3, 1.3, 1.3, 1.4, 1.4, D=11)
  for extent in (stretch(x, LENGTHS, 128), reach(x, LENGTHS)):
    assert not math.isnan(extent.value) and math.isnan(extent.low) and math.isnan(extent.high)
  assert stretch(x, LENGTHS, 128).text(128) == '2x'
  x[0, 0, 1] = math.inf
  assert stretch(x, LENGTHS, 128).text(128) == '?'
  assert reach(np.full((1, 20, 5), math.inf), LENGTHS).text(128) == '?'


def test_one_length():
  x = curve(1.3)
  assert stretch(x, [128], 128).value == reach(x, [128]).value == 128


def test_lengths_rise():
  for lengths in ((128, 64, 256, 512, 1024), LENGTHS[:4]):
    with pytest.raises(ValueError, match='lengths rising'):
      reach(curve(1, 1, 1, 1, 1), lengths)


@pytest.mark.parametrize('k, broken', [(64, math.inf), (512, math.inf), (64, 512)])
def test_the_truth_of_null_models(k, broken):
  """Within one step of the grid in 95 % of trials, and inside the interval."""
  rng = np.random.default_rng(0)
  truth = coverage.null_curve(k, coverage.LENGTHS, broken=broken)
  for near, held in coverage.recovered(truth, 1, 40, coverage.PAIR_SD, 20, rng).values():
    assert near >= 0.95 and held >= 0.9

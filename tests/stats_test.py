"""Intervals over documents."""

import math

import numpy as np
import pytest
from scipy import stats

from evaluation.stats import MIN_DOCUMENTS, t_interval


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

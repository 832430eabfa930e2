"""Intervals of a curve. The unit is the document: tokens of one text are not independent."""

from typing import NamedTuple

import numpy as np
from scipy import stats

MIN_DOCUMENTS = 12  # below, no interval is given: draw every document


class Interval(NamedTuple):
  mean: float
  low: float | None
  high: float | None


def t_interval(x_D: np.ndarray, confidence: float = 0.95) -> Interval:
  """Mean of per-document values and its Student t interval, nats.

  No ends below 12 documents, or where a value is not finite.

  By simulation the t interval of document means covers 95 %; a percentile bootstrap over 20 documents covers 92 %, over
  tokens far less.
  """
  x_D = np.asarray(x_D, np.float64)
  mean = float(x_D.mean())
  if len(x_D) < MIN_DOCUMENTS or not np.isfinite(x_D).all():
    return Interval(mean, None, None)
  half = float(stats.t.ppf((1 + confidence) / 2, len(x_D) - 1) * x_D.std(ddof=1) / np.sqrt(len(x_D)))
  return Interval(mean, mean - half, mean + half)

from typing import TYPE_CHECKING

if TYPE_CHECKING:
  import pandas as pd


def load(patterns) -> 'pd.DataFrame':
  """`evaluation.load(['runs/*'])`: a tidy table of every point of those runs; see `evaluation.runs.load`."""
  from evaluation import runs  # whoever imports one module of this package need not wait for all of them

  return runs.load(patterns)

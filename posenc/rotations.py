"""Turns that frequency pairs make within the training length, and the shape of a large model given to a small one.

Pair p makes r_p = L theta_p / 2 pi turns within L tokens. With theta_p = base**(-2p/d) the pairs up to

  c(rho) = (d/2) ln(L / 2 pi rho) / ln base        (YaRN, 2309.00071, eq. 17 solved for p)

make rho turns or more. From p* = c(1) on none is completed: beyond L these pairs meet angles not seen in training.

The share c / (d/2) is free of d. So a model of another length L', whatever its width, has a reference's share of
incomplete pairs at base' = (L' / 2 pi)**(ln base / ln(L / 2 pi)), and a ramp that cuts at rho' = rho**(ln base' / ln
base) there keeps, blends and interpolates the shares that rho does in the reference. Without that, a method is tested
at a short length on another split of the pairs than the one it was made for.
"""

from typing import NamedTuple

import numpy as np


class Reference(NamedTuple):
  """A model whose shape a small one may take: rotary width d, trained length L, base."""

  name: str
  rot: int
  train_len: int
  base: float

  @property
  def inv_freq_P(self) -> np.ndarray:
    return self.base ** (-np.arange(0, self.rot, 2, dtype=np.float64) / self.rot)


# Llama 3 is also 3.1 before its extension, whose frequencies `llama31` scales. Pythia rotates a quarter of its width.
REFERENCES = (
  Reference('Llama 2', 128, 4096, 1e4),
  Reference('Llama 3', 128, 8192, 5e5),
  Reference('Pythia 6.9B', 32, 2048, 1e4),
)


def turns(inv_freq_P: np.ndarray, train_len: int) -> np.ndarray:
  """r_p, float64[P]."""
  return train_len * inv_freq_P / (2 * np.pi)


def incomplete(inv_freq_P: np.ndarray, train_len: int) -> np.ndarray:
  """Which pairs never complete a turn, bool[P]. A pair that is not rotated has seen its only angle."""
  return (inv_freq_P > 0) & (turns(inv_freq_P, train_len) < 1)


def crossing(rho: float, rot: int, base: float, train_len: int) -> float:
  """c(rho), as a real number: pairs up to it make rho turns or more within `train_len` tokens."""
  return rot * np.log(train_len / (2 * np.pi * rho)) / (2 * np.log(base))


def matched_base(train_len: int, reference: Reference) -> float:
  """base' at which the share of incomplete pairs is the reference's. `train_len` above 2 pi, or even pair 0 is one."""
  return float((train_len / (2 * np.pi)) ** (np.log(reference.base) / np.log(reference.train_len / (2 * np.pi))))


def matched_beta(beta: float, base: float, reference: Reference) -> float:
  """rho' that cuts where `beta` turns cut in the reference, for the matched `base`."""
  return float(beta ** (np.log(base) / np.log(reference.base)))


def rebased(inv_freq_P: np.ndarray, base: float, new: float) -> np.ndarray:
  """The same pairs at another base; those at 0 stay there."""
  return inv_freq_P ** (np.log(new) / np.log(base))


def kept(inv_freq_P: np.ndarray, scaled_P: np.ndarray, s: float) -> np.ndarray:
  """g_p of theta'_p = (1 - g_p) theta_p / s + g_p theta_p: 1 kept, 0 interpolated, NaN where nothing is rotated."""
  ratio = np.divide(scaled_P, inv_freq_P, out=np.full(len(inv_freq_P), np.nan), where=inv_freq_P > 0)
  return np.round((ratio - 1 / s) / (1 - 1 / s), 9)


def remarks(name: str, inv_freq_P: np.ndarray, base: float, train_len: int) -> list[str]:
  """How many pairs are out of range beyond L, and the base that would leave as many as in a large model.

  The second only where the model is shorter than the reference and its share another.
  """
  count = int(np.sum(inv_freq_P > 0))
  unseen = int(np.sum(incomplete(inv_freq_P, train_len)))
  if not unseen:
    return []
  lines = [
    f'{name}: {unseen} of {count} frequency pairs never complete a turn within {train_len} tokens; beyond it they meet '
    'angles not seen in training'
  ]
  large = REFERENCES[0]
  if not 2 * np.pi < train_len < large.train_len:
    return lines
  new = matched_base(train_len, large)
  matched = int(np.sum(incomplete(rebased(inv_freq_P, base, new), train_len)))
  if matched != unseen:
    theirs = int(np.sum(incomplete(large.inv_freq_P, large.train_len)))
    lines.append(
      f'{name}: base={new:.4g} would leave {matched} of {count}, the share of {large.name} at {large.train_len} tokens '
      f'({theirs} of {large.rot // 2}), and its beta_fast=32 would be {matched_beta(32, new, large):.4g}; '
      'see scripts/rotation_report.py'
    )
  return lines

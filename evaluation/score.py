"""Negative log-likelihoods of windows, by one compiled program per length."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evaluation.plan import Plan, Window
from models.lm import merge
from models.ring import BATCH, CONTEXT, lies, place
from posenc import Positions


class Scorer:
  """Scores windows with one set of parameters.

  Batches have one shape per length, the last one filled with dummy rows: a row's numbers are bit-equal in any company
  of one shape, so they do not depend on which windows are asked for together. Positions are arguments of the program,
  not constants in it, so that every method of one length runs the same one; `traces` counts compilations.
  """

  def __init__(self, graphdef: Any, params: Any, mesh: Mesh, batch_tokens: int):
    self.traces = 0
    self._params, self._mesh, self._batch_tokens = params, mesh, batch_tokens

    def nll(params, inputs_BT, targets_BT, pos):
      self.traces += 1
      nll_BT = merge(graphdef, params, mesh).nll(inputs_BT, targets_BT, pos)
      return lies(nll_BT, mesh) if jax.process_count() > 1 else nll_BT  # a process reads its own devices only

    self._nll = jax.jit(nll)

  def rows(self, length: int) -> int:
    """Windows per batch: a multiple of the devices that share it."""
    shares = math.prod(self._mesh.shape[axis] for axis in BATCH)
    return max(self._batch_tokens // (length * shares), 1) * shares

  def __call__(
    self,
    plan: Plan,
    windows: Sequence[Window],
    pos: tuple[Positions, ...],
    done: Callable[[int], object] = lambda tokens: None,
  ) -> np.ndarray:
    """NLL of each window's scored tokens, nats, f32[len(windows), scored]; `done(tokens)` after each batch."""
    length, scored = windows[0].length, windows[0].scored
    rows = self.rows(length)
    split = NamedSharding(self._mesh, PartitionSpec(BATCH, CONTEXT))
    pos = jax.tree.map(np.asarray, pos)  # whose copies may be on devices of other processes too
    out, waiting = [], None

    def collect(entry):
      nll, real = entry
      out.append(np.asarray(nll)[:real, -scored:])
      done(real * length)

    for i in range(0, len(windows), rows):
      part = windows[i : i + rows]
      filled = [*part, *[part[0]] * (rows - len(part))]
      arrays = place(split, (rows, length), lambda at, filled=filled: plan.tokens([filled[i] for i in at]))
      nll = self._nll(self._params, *arrays, pos)
      if waiting is not None:  # fetched one batch late: the host cuts windows while the device computes
        collect(waiting)
      waiting = (nll, len(part))
    if waiting is not None:
      collect(waiting)
    return np.concatenate(out)

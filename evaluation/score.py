"""Negative log-likelihoods of windows, by one compiled program per length."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from evaluation.plan import Plan, Window
from models.lm import merge
from models.memory import OutOfMemory, as_text, bytes_needed, bytes_there
from models.ring import BATCH, CONTEXT, lies, place
from posenc import Positions


class Program(NamedTuple):
  """`run(params, inputs_BT, targets_BT, pos)` -> f32[B, T], for batches of `rows` windows."""

  run: Callable[..., jax.Array]
  rows: int


class Scorer:
  """Scores windows with one set of parameters.

  Batches have one shape per length, the last one filled with dummy rows: a row's numbers are bit-equal in any company
  of one shape, so they do not depend on which windows are asked for together. Positions are arguments of the program,
  not constants in it, so that every method of one length runs the same one; `traces` counts compilations.

  batch_tokens: of a batch, if memory allows; at least one window per device. memory_gb: see `memory.bytes_there`.
  most: windows that are ever scored at once, where a batch of more would be dummies.
  """

  def __init__(
    self, graphdef: Any, params: Any, mesh: Mesh, batch_tokens: int, memory_gb: float = 0, most: float = math.inf
  ):
    self.traces = 0
    self._params, self._mesh, self._batch_tokens, self._memory_gb = params, mesh, batch_tokens, memory_gb
    self._most = most
    self._shares = math.prod(mesh.shape[axis] for axis in BATCH)
    self._split = NamedSharding(mesh, PartitionSpec(BATCH, CONTEXT))
    self._programs: dict[Any, Program | str] = {}

    def nll(params, inputs_BT, targets_BT, pos):
      self.traces += 1
      nll_BT = merge(graphdef, params, mesh).nll(inputs_BT, targets_BT, pos)
      return lies(nll_BT, mesh) if jax.process_count() > 1 else nll_BT  # a process reads its own devices only

    self._nll = jax.jit(nll)

  def rows(self, length: int) -> int:
    """Windows per batch where memory is no matter: a multiple of the devices that share it."""
    fit = max(self._batch_tokens // (length * self._shares), 1)
    return int(min(fit, math.ceil(self._most / self._shares) if math.isfinite(self._most) else fit)) * self._shares

  def use(self, params: Any) -> 'Scorer':
    """Itself, of other parameters of the same shapes on the same devices, without compiling anything again."""
    self._params = params
    return self

  def program(self, length: int, pos: tuple[Positions, ...]) -> Program:
    """What scores windows of `length` under all positions of the shapes of `pos`, compiled once. OutOfMemory."""
    key = length, jax.tree.structure(pos), *(np.shape(leaf) for leaf in jax.tree.leaves(pos))
    if key not in self._programs:
      self._programs[key] = self._fitting(length, pos)
    program = self._programs[key]
    if isinstance(program, str):
      raise OutOfMemory(program)
    return program

  def _fitting(self, length: int, pos: tuple[Positions, ...]) -> Program | str:
    """With half as many rows as long as XLA asks for more memory than there is; why there is none."""
    per_device, pos = self.rows(length) // self._shares, jax.tree.map(np.asarray, pos)
    while True:
      tokens_BT = jax.ShapeDtypeStruct((per_device * self._shares, length), np.int32, sharding=self._split)
      compiled = self._nll.lower(self._params, tokens_BT, tokens_BT, pos).compile()
      needed, there = bytes_needed(compiled), bytes_there(self._params, self._memory_gb)
      if needed <= there:
        return Program(compiled, per_device * self._shares)
      if per_device == 1:
        less = "more devices on the mesh's context axis, or a smaller model.tile, need less"
        return f'one window of {length} tokens: {as_text(needed, there)}; {less}'
      per_device //= 2

  def __call__(
    self,
    plan: Plan,
    windows: Sequence[Window],
    positions: Sequence[tuple[Positions, ...]],
    done: Callable[[int], object] = lambda tokens: None,
  ) -> list[list[np.ndarray]]:
    """NLL of each window's kept targets under each of `positions`, nats, f32[scored]; `done(tokens)` after each run."""
    out: list[list[np.ndarray]] = [[] for _ in positions]
    for i, part, rows in self.runs(plan, windows, positions):
      out[i] += rows
      done(sum(w.length for w in part))
    return out

  def runs(
    self, plan: Plan, windows: Sequence[Window], positions: Sequence[tuple[Positions, ...]]
  ) -> Iterator[tuple[int, Sequence[Window], list[np.ndarray]]]:
    """(i, some of the windows, their rows under positions[i]), as soon as they are fetched.

    The windows have one length. A batch is cut and sent to the devices once, and scored under all positions before the
    next one.
    """
    programs = [self.program(windows[0].length, pos) for pos in positions]
    on_host = [jax.tree.map(np.asarray, pos) for pos in positions]  # may go to devices of other processes too
    length, waiting = windows[0].length, None

    def fetched(nll_BT, i, part):
      # Copies: a view of the last positions would keep all of them.
      return i, part, [row_T[-w.scored :].copy() for w, row_T in zip(part, np.asarray(nll_BT))]

    for rows in sorted({program.rows for program in programs}):  # one, unless some methods' programs had to be halved
      for start in range(0, len(windows), rows):
        part = windows[start : start + rows]
        filled = [*part, *[part[0]] * (rows - len(part))]
        inputs_BT, targets_BT = place(
          self._split, (rows, length), lambda at, filled=filled: plan.tokens([filled[i] for i in at])
        )
        for i, program in enumerate(programs):
          if program.rows == rows:
            nll_BT = program.run(self._params, inputs_BT, targets_BT, on_host[i])
            if waiting is not None:  # fetched one run late: the host fetches and cuts while the devices compute
              yield fetched(*waiting)
            waiting = nll_BT, i, part
    if waiting is not None:
      yield fetched(*waiting)


class Together:
  """Scores windows under many positions in one run: `vmap` over `Positions`, each device with its share of them.

  One program for all positions of one shape, which are its arguments; `traces` counts compilations. Rows are bit-equal
  whatever positions share the run, the last run being filled with copies. Parameters lie whole on every device; a mesh
  that spreads one window takes `Scorer`, with the same `runs`.

  rows: windows in a run, if memory allows. kept: last positions of a window that are fetched. tokens: of a run; on CPUs
  one set of positions a device is fastest: as many as fit into 8192 tokens took 1.0 to 1.9 times the CPU time at 1024.
  """

  def __init__(
    self, graphdef: Any, params: Any, mesh: Mesh, rows: int, kept: int, tokens: int = 0, memory_gb: float = 0
  ):
    self.traces = 0
    self._params, self._mesh, self._rows, self._tokens, self._memory_gb = params, mesh, rows, tokens, memory_gb
    self._programs: dict[Any, tuple[Any, int, int]] = {}

    def nll(params, inputs_BT, targets_BT, pos):
      self.traces += 1
      return merge(graphdef, params).nll(inputs_BT, targets_BT, pos, last=kept)

    every, shared = PartitionSpec(), PartitionSpec(BATCH)
    self._lies = NamedSharding(mesh, every), NamedSharding(mesh, shared)
    many = jax.shard_map(
      jax.vmap(nll, in_axes=(None, None, None, 0)),
      mesh=mesh,
      in_specs=(every, every, every, shared),
      out_specs=shared,
      check_vma=False,
    )
    self._nll = jax.jit(many)

  def _program(self, length: int, pos: tuple[Positions, ...]) -> tuple[Any, int, int]:
    """(program, windows and positions in a run): fewer positions, then windows, where memory ends. OutOfMemory."""
    key = length, jax.tree.structure(pos), *(np.shape(leaf) for leaf in jax.tree.leaves(pos))
    if key not in self._programs:
      whole, shared = self._lies
      rows, each = self._rows, max(self._tokens // (self._rows * length * self._mesh.size), 1)
      while True:
        width = self._mesh.size * each
        tokens_BT = jax.ShapeDtypeStruct((rows, length), np.int32, sharding=whole)
        many = jax.tree.map(
          lambda leaf, n=width: jax.ShapeDtypeStruct((n, *np.shape(leaf)), np.float32, sharding=shared), pos
        )
        compiled = self._nll.lower(self._params, tokens_BT, tokens_BT, many).compile()
        needed, there = bytes_needed(compiled), bytes_there(self._params, self._memory_gb)
        if needed <= there:
          break
        if each == rows == 1:
          raise OutOfMemory(f'one window of {length} tokens: {as_text(needed, there)}')
        rows, each = (rows, each // 2) if each > 1 else (rows // 2, 1)
      self._programs[key] = compiled, rows, width
    return self._programs[key]

  def runs(
    self, plan: Plan, windows: Sequence[Window], positions: Sequence[tuple[Positions, ...]]
  ) -> Iterator[tuple[int, Sequence[Window], list[np.ndarray]]]:
    """(i, some of the windows, their rows under positions[i]), as `Scorer.runs`."""
    program, rows, width = self._program(windows[0].length, positions[0])
    on_host = [jax.tree.map(np.asarray, pos) for pos in positions]
    for start in range(0, len(windows), rows):
      part = windows[start : start + rows]
      inputs_BT, targets_BT = plan.tokens([*part, *[part[0]] * (rows - len(part))])
      for first in range(0, len(on_host), width):
        some = on_host[first : first + width]
        stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *some, *[some[0]] * (width - len(some)))
        nll_CBt = np.asarray(program(self._params, inputs_BT, targets_BT, stacked))
        for i, rows_Bt in enumerate(nll_CBt[: len(some)]):
          yield first + i, part, [row_t[-w.scored :].copy() for w, row_t in zip(part, rows_Bt)]

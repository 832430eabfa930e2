"""Several devices: the mesh's axes, where arrays lie on it, and how blocks of a sequence travel around it.

Axes `data` and `fsdp` share the batch, `context` the sequence. Parameters lie spread over `fsdp` and are whole only
while they are used (ZeRO-3). Nothing here knows about attention.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH = ('data', 'fsdp')
CONTEXT = 'context'


def lies(x: Any, mesh: Mesh | None, *axes: Any) -> Any:
  """The arrays of `x`, said to lie like this: an axis of the mesh, or None, per axis of theirs. No axes: whole."""
  if mesh is None:
    return x
  return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))


@functools.lru_cache
def held(sharding: NamedSharding, shape: tuple[int, ...], process: int) -> np.ndarray:
  """Rows of the batch, the last axis but one, that devices of `process` hold all or part of, rising."""
  held_by = sharding.devices_indices_map(shape)
  rows = {
    row
    for device, index in held_by.items()
    if device.process_index == process
    for row in range(*index[-2].indices(shape[-2]))
  }
  return np.array(sorted(rows))


def place(
  sharding: NamedSharding, shape: tuple[int, ...], cut: Callable[[np.ndarray], Sequence[np.ndarray]]
) -> list[jax.Array]:
  """Arrays of `shape`, [B, T] or [A, B, T], of which each process makes what its devices hold.

  `cut(rows)` returns the windows [len(rows), T] of each array; rows of A micro-batches are counted on, a * B + b.
  """
  batch, length = shape[-2:]
  rows = held(sharding, shape, jax.process_index())
  parts = cut((np.arange(math.prod(shape[:-2]))[:, None] * batch + rows).reshape(-1))

  def share(part):
    part = part.reshape(*shape[:-2], len(rows), length)

    def of(index):
      first, last, _ = index[-2].indices(batch)
      at = np.searchsorted(rows, first)
      return part[..., at : at + last - first, index[-1]]

    return jax.make_array_from_callback(shape, sharding, of)

  return [share(part) for part in parts]


@dataclasses.dataclass(frozen=True)
class Ring:
  """How attention's sequence lies on the devices of `context`.

  `chunks` 1: device i holds block i of n, as activations do. A causal row of blocks is then longer the further right
  it starts, and everyone waits for the last device. 2, zigzag: device i holds blocks i and 2n - 1 - i of 2n, which in
  every step of the ring makes the same work for all; what runs along a row of keys would not meet them in order.
  Each chunk is padded at its end by `pad` tokens, to whole tiles.

  heads: nothing travels. Devices of `context` share the heads, each over the whole sequence, and the compiler cuts
  whatever a scheme keeps per head.
  """

  mesh: Mesh
  chunks: int = 1
  pad: int = 0
  heads: bool = False

  @property
  def size(self) -> int:
    return 1 if self.heads else self.mesh.shape[CONTEXT]

  def everywhere(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`f` on every device with its own parts."""
    axes = {*BATCH} if self.heads else {*BATCH, CONTEXT}

    def kept(spec):
      parts = (tuple(a for a in part if a in axes) if isinstance(part, tuple) else part for part in spec)
      return PartitionSpec(*(part if isinstance(part, tuple) or part in axes else None for part in parts))

    in_specs, out_specs = jax.tree.map(kept, (in_specs, out_specs), is_leaf=lambda x: isinstance(x, PartitionSpec))
    # Unchecked: the tiles' loops start from constants, and every gradient is summed by hand.
    return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)

  def deal(self, x: jax.Array, axis: int, **pad: Any) -> jax.Array:
    """A device's block of contiguous order -> its chunks, padded. Inside `jax.shard_map`, like all that follows."""
    parts = [x]
    if self.chunks == 2:
      left, right = jnp.split(x, 2, axis)
      left = jax.lax.ppermute(left, CONTEXT, [(d, self._home(2 * d)) for d in range(self.size)])
      right = jax.lax.ppermute(right, CONTEXT, [(d, self._home(2 * d + 1)) for d in range(self.size)])
      parts = self._swap(left, right)
    if self.pad:
      widths = [(0, 0)] * x.ndim
      widths[axis] = (0, self.pad)
      parts = [jnp.pad(part, widths, **(pad or {'mode': 'edge'})) for part in parts]
    return jnp.concatenate(parts, axis)

  def collect(self, x: jax.Array, axis: int) -> jax.Array:
    """The inverse of `deal`."""
    parts = jnp.split(x, self.chunks, axis)
    if self.pad:
      parts = [jax.lax.slice_in_dim(part, 0, part.shape[axis] - self.pad, axis=axis) for part in parts]
    if self.chunks == 2:
      left, right = self._swap(*parts)
      left = jax.lax.ppermute(left, CONTEXT, [(self._home(2 * d), d) for d in range(self.size)])
      right = jax.lax.ppermute(right, CONTEXT, [(self._home(2 * d + 1), d) for d in range(self.size)])
      parts = [left, right]
    return jnp.concatenate(parts, axis)

  def _home(self, block: int) -> int:
    return min(block, 2 * self.size - 1 - block)

  @staticmethod
  def _swap(a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """(even block, odd block) <-> (earlier block, later block): device i's earlier one is block i."""
    even = jax.lax.axis_index(CONTEXT) % 2 == 0
    return [jnp.where(even, a, b), jnp.where(even, b, a)]

  def shift(self, tree: Any, by: int) -> Any:
    """Everyone's arrays to the neighbour on the right (1) or on the left (-1), around the ring."""
    pairs = [(d, (d + by) % self.size) for d in range(self.size)]
    return jax.tree.map(lambda a: jax.lax.ppermute(a, CONTEXT, pairs), tree)

  def leftwards(self, visit: Callable[[Any, Any], tuple[Any, Any]], seen: Any, block: Any) -> tuple[Any, Any]:
    """`visit(seen, block) -> seen, out` with everyone's block in turn: one's own, the left neighbour's, ... -> outs."""

    def step(at, _):
      seen, block = at
      coming = self.shift(block, 1)  # under way while this one is computed with
      seen, out = visit(seen, block)
      return (seen, coming), out

    (seen, _), outs = jax.lax.scan(step, (seen, block), None, length=self.size)
    return seen, outs

  def rightwards(self, visit: Callable[..., tuple[Any, Any]], seen: Any, block: Any, sums: Any, outs: Any):
    """The same backwards: `visit(seen, block, sums, out) -> seen, sums` ends with one's own; `sums` travel along."""

    def step(at, out):
      seen, block, sums = at
      sums, coming = self.shift(sums, -1), self.shift(block, -1)
      seen, sums = visit(seen, block, sums, out)
      return (seen, coming, sums), None

    at = (seen, self.shift(block, -1), sums)
    (seen, _, sums), _ = jax.lax.scan(step, at, outs, length=self.size, reverse=True)
    return seen, sums

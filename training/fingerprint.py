"""What tells whether a checkpoint is what was saved: two sums of each array's bits, and a checksum of each file.

The sums are of what is computed with, whatever the files look like: of uint32 words x_i, sum_i m(x_i ^ m(i + key)) mod
2**32 for two keys, with m the finalizer of MurmurHash3, which maps words one to one: one changed word always changes
them, any other damage goes unseen once in 2**64. Addition has no order: an array has the same sums on any number of
devices, each of which adds up its own share. A sha256 needs the whole array in one place. Weights without a mixed x_i,
sum_i w_i x_i, do not see two flipped signs: 2**31 (w_i + w_j) is 0.

The checksums are of what the arrays do not show: bytes that only a later program would read. They name the file.
"""

import functools
import json
import os
import pathlib
import zlib
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NAME = 'sums.json'  # in the folder of a step
PIECE = 1 << 22
KEYS = 0x9E3779B9, 0x7F4A7C15


class Damaged(Exception):
  """Files or arrays that are not what was saved. The message names them."""


def leaves(tree: Any) -> dict[str, Any]:
  """{'.path.to.leaf': leaf}; lists and tuples alike, int keys as strings: as orbax stores them."""

  def name(key):
    return str(getattr(key, 'key', getattr(key, 'idx', getattr(key, 'name', key))))

  found = jax.tree_util.tree_leaves_with_path(tree)
  return {''.join(f'.{name(key)}' for key in path): leaf for path, leaf in found}


# ---- of arrays


@functools.cache
def _program(mesh: Mesh | None) -> Any:
  """`_two`, compiled once a shape: a state has three arrays of each. Every device of `mesh` has what comes out."""
  return jax.jit(_two, out_shardings=None if mesh is None else NamedSharding(mesh, PartitionSpec()))


def _mesh(leaf: Any) -> Mesh | None:
  return leaf.sharding.mesh if isinstance(getattr(leaf, 'sharding', None), NamedSharding) else None


def _two(array: jax.Array) -> jax.Array:
  """uint32[2]."""
  if array.dtype == jnp.bool_:
    array = array.astype(jnp.uint8)
  size = min(array.dtype.itemsize, 4)  # 8 bytes become an axis of two words
  words = jax.lax.bitcast_convert_type(array, jnp.dtype(f'uint{8 * size}')).astype(jnp.uint32)
  index = jnp.zeros((), jnp.uint32)  # by axes, as the sharding cuts them: a reshape would move the array
  for axis, n in enumerate(words.shape):
    index = index * np.uint32(n % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
  return jnp.stack([jnp.sum(_mix(words ^ _mix(index + np.uint32(key))), dtype=jnp.uint32) for key in KEYS])


def _mix(h: jax.Array) -> jax.Array:
  for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
    h = (h ^ (h >> shift)) * np.uint32(factor)
  return h ^ (h >> 16)


def of_arrays(items: dict[str, Any]) -> dict[str, dict[str, str]]:
  """{item: {leaf: 'float32[64, 48] 15036927548faf76'}}. The same for any sharding."""
  named = {item: leaves(tree) for item, tree in items.items()}
  # One after the other: programs with a collective that run at once may wait for each other on CPUs, for ever.
  sums = [np.asarray(_program(_mesh(leaf))(leaf)).tolist() for tree in named.values() for leaf in tree.values()]
  words = (f'{a:08x}{b:08x}' for a, b in sums)
  return {item: {path: f'{shape(leaf)} {next(words)}' for path, leaf in tree.items()} for item, tree in named.items()}


def shape(leaf: Any) -> str:
  return f'{leaf.dtype}{list(leaf.shape)}'


def shapes(said: Any, item: str) -> dict[str, str]:
  """{leaf: 'float32[64, 48]'} of an item that `said` is of."""
  try:
    return {path: text.rpartition(' ')[0] for path, text in said[item].items()}
  except (KeyError, TypeError, AttributeError):
    raise Damaged(f'the sums of {item} are not what was written') from None


def compare(items: dict[str, Any], said: dict[str, dict[str, str]]) -> None:
  """Damaged, naming the arrays, unless `items` are what `said` was made of."""
  found = of_arrays(items)
  wrong = [f'{i}{path}' for i, tree in found.items() for path, sums in tree.items() if said[i].get(path) != sums]
  if wrong:
    more = f' and {len(wrong) - 1} more arrays are' if len(wrong) > 1 else ' is'
    raise Damaged(f'{wrong[0]}{more} not what was saved')


# ---- of files


def seal(folder: pathlib.Path) -> None:
  """Writes the checksums of all files below `folder` into it, once they are complete."""
  text = json.dumps({str(path.relative_to(folder)): _checksum(path) for path in _files(folder)}, sort_keys=True)
  temporary = folder / f'{NAME}.tmp'
  with temporary.open('w') as file:
    file.write(f'{text}\n{zlib.crc32(text.encode()):08x}\n')
    file.flush()
    os.fsync(file.fileno())
  temporary.replace(folder / NAME)


def sealed(folder: pathlib.Path) -> bool:
  return (folder / NAME).exists()


def check(folder: pathlib.Path, items: Collection[str]) -> None:
  """Damaged, naming a file, unless those of `items`, and of all items, are what they were when they were sealed."""
  text, _, said = (folder / NAME).read_bytes().partition(b'\n')
  if said != f'{zlib.crc32(text):08x}\n'.encode():
    raise Damaged(f'{NAME} is not what was written')
  want = {name: sums for name, sums in json.loads(text).items() if '/' not in name or name.split('/')[0] in items}
  missing = sorted(want.keys() - {str(path.relative_to(folder)) for path in _files(folder)})
  if missing:
    raise Damaged(f'{missing[0]} is missing')
  for name, (size, crc) in want.items():
    found = _checksum(folder / name)
    if found[0] != size:
      raise Damaged(f'{name} has {found[0]} bytes, {size} were written')
    if found[1] != crc:
      raise Damaged(f'{name} is not what was written')


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
  return sorted(path for path in folder.rglob('*') if path.is_file() and not path.name.startswith(NAME))


def _checksum(path: pathlib.Path) -> list[int]:
  """[bytes, crc32]."""
  size = crc = 0
  with path.open('rb') as file:
    while piece := file.read(PIECE):
      size, crc = size + len(piece), zlib.crc32(piece, crc)
  return [size, crc]

"""Checkpoints of a run: orbax behind one class, so that its still moving interface is met in one place."""

import functools
import pathlib
from typing import Any

import jax

from spec import SpecError


def saved(workdir: pathlib.Path) -> list[int]:
  """Complete steps, by the names of their folders: what is being written has another. Without orbax and its seconds."""
  return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if path.name.isdigit())


class Checkpoints:
  """`workdir/checkpoints/<step>/`, written in the background and complete or absent.

  Step n holds the state after n updates. Parameters and optimizer state are separate items, so that evaluation reads
  the parameters alone. Leftovers of a killed save are ignored and swept by the next writer.
  """

  def __init__(self, workdir: str | pathlib.Path, *, keep: int | None = None):
    """`keep` newest steps stay; None opens for reading and changes nothing on disk."""
    self._directory = pathlib.Path(workdir).absolute() / 'checkpoints'  # orbax refuses a relative path, but only late
    if keep is None and not self._directory.is_dir():
      raise SpecError(f'workdir = {str(workdir)!r}: holds no checkpoints; train there first')
    self._keep = keep
    self._saving: Any = None

  @functools.cached_property
  def _orbax(self) -> Any:
    from orbax.checkpoint import v1 as ocp  # half as long as jax: a new run's first step need not wait for it

    policy: Any = None if self._keep is None else ocp.training.preservation_policies.LatestN(n=self._keep)
    return ocp.training.Checkpointer(
      str(self._directory), preservation_policy=policy, cleanup_tmp_directories=self._keep is not None
    )

  @property
  def steps(self) -> list[int]:
    """Complete ones, rising; one that is still being written is waited for."""
    self.wait()
    if not self._directory.is_dir():
      return []
    return sorted(c.step for c in self._orbax.checkpoints)

  @property
  def latest(self) -> int | None:
    return max(self.steps, default=None)

  def save(self, step: int, items: dict[str, Any]) -> None:
    """Returns once the arrays are copied; a failure of the previous save is raised here, or by `close`."""
    self.wait()
    self._saving = self._orbax.save_checkpointables_async(step, items)
    if self._saving is None:
      raise RuntimeError(f'checkpoint {step} was not saved: {self._directory} holds steps {self.steps}')

  def wait(self) -> None:
    if self._saving is not None:
      self._saving.result()
      self._saving = None
      self._orbax.reload()

  def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
    """The items named in `abstract`, trees of ShapeDtypeStruct with shardings, on the devices those name."""
    if step not in self.steps:
      raise SpecError(f'checkpoint = {step}: allowed: {", ".join(map(str, self.steps)) or "none saved yet"}')
    saved = self._orbax.checkpointables_metadata(step).metadata
    for item, tree in abstract.items():
      # Orbax casts a differing dtype in silence and names no leaf when the structure differs.
      want, have = _leaves(tree), _leaves(saved[item])
      for path in sorted(set(want) | set(have)):
        if want.get(path) != have.get(path):
          found, wanted = have.get(path, 'absent'), want.get(path, 'absent')
          raise SpecError(f'checkpoint {step}: {item}{path} is {found}, this config wants {wanted}')
    return self._orbax.load_checkpointables(step, abstract)

  def close(self) -> None:
    self.wait()
    if '_orbax' in vars(self):
      self._orbax.close()


def _leaves(tree: Any) -> dict[str, str]:
  """{path: 'dtype[shape]'}, lists and tuples alike, int keys as strings, empty nodes left out: as orbax stores them."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)

  def name(key):
    return str(getattr(key, 'key', getattr(key, 'idx', getattr(key, 'name', key))))

  return {
    ''.join(f'.{name(key)}' for key in path): f'{leaf.dtype}{list(leaf.shape)}'
    for path, leaf in leaves
    if hasattr(leaf, 'shape')
  }


def as_abstract(tree: Any, sharding: Any) -> Any:
  """`sharding`: one for all arrays, or a tree of them, whatever they were saved with."""
  if isinstance(sharding, jax.sharding.Sharding):
    sharding = jax.tree.map(lambda _: sharding, tree)
  return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, sharding)

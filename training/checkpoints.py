"""Checkpoints of a run: orbax behind one class, so that its still moving interface is met in one place."""

import functools
import pathlib
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from spec import SpecError
from training import fingerprint, hosts
from training.fingerprint import Damaged
from training.hosts import Stopped

ASIDE = 'damaged'  # folder of the workdir to which damaged steps are moved


def saved(workdir: pathlib.Path) -> list[int]:
  """Complete steps, by the names of their folders: what is being written has another. Without orbax and its seconds."""
  return sorted(int(path.name) for path in (workdir / 'checkpoints').glob('*') if _holds_files(path))


def _holds_files(step: pathlib.Path) -> bool:
  """Folders alone are what a killed deletion leaves, or a copy that has just begun."""
  return step.name.isdecimal() and any(path.is_file() for path in step.rglob('*'))


class Checkpoints:
  """`workdir/checkpoints/<step>/`, written in the background and complete or absent.

  Step n holds the state after n updates. Parameters and optimizer state are separate items, so that evaluation reads
  the parameters alone. Leftovers of a killed save are ignored and swept by the next writer.

  With the arrays their sums are saved, and once a step is complete its files are sealed with checksums; whatever is
  restored is compared with both (training/fingerprint.py). orbax notices some of what is wrong, and names nothing: a
  flipped byte of an array comes back as a number.
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

    if self._keep is not None and hosts.first():
      for path in self._directory.glob('*'):
        if path.name.isdecimal() and not _holds_files(path):
          shutil.rmtree(path)  # orbax would take it for the newest step
    policy: Any = None if self._keep is None else ocp.training.preservation_policies.LatestN(n=self._keep)
    return ocp.training.Checkpointer(
      str(self._directory), preservation_policy=policy, cleanup_tmp_directories=self._keep is not None
    )

  @functools.cached_property
  def _behind(self) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, 'checkpoint')

  @property
  def steps(self) -> list[int]:
    """Complete ones, rising; one that is still being written is waited for."""
    self.wait()
    if not self._directory.is_dir():
      return []
    return sorted(c.step for c in self._orbax.checkpoints if _holds_files(self._directory / str(c.step)))

  @property
  def latest(self) -> int | None:
    return max(self.steps, default=None)

  def named(self, checkpoint: str) -> int:
    """The step that is meant by a step, or by 'latest'. SpecError where it is not there."""
    steps = self.steps
    if not steps:
      raise SpecError(f'workdir = {str(self._directory.parent)!r}: holds no checkpoint yet')
    if checkpoint == 'latest':
      return steps[-1]
    if checkpoint not in map(str, steps):
      raise SpecError(f'checkpoint = {checkpoint}: allowed: latest, {", ".join(map(str, steps))}')
    return int(checkpoint)

  def check_space(self, abstract: Any) -> None:
    """SpecError where the disk has no room for one more of `abstract`, before anything is computed for it."""
    needed = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    there = shutil.disk_usage(self._directory.parent).free
    if needed > there:
      raise SpecError(
        f'{self._directory.parent}: {there / 2**20:.3g} MiB are free, a checkpoint needs {needed / 2**20:.3g} MiB'
      )

  def save(self, step: int, items: dict[str, Any]) -> None:
    """Returns once the arrays are copied; a failure of the previous save is raised here, or by `close`."""
    self.wait()
    sums = {'sums': fingerprint.of_arrays(items)}
    saving = self._orbax.save_checkpointables_async(step, items, custom_metadata=sums)
    if saving is None:
      raise RuntimeError(f'checkpoint {step} was not saved: {self._directory} holds steps {self.steps}')
    self._saving = self._behind.submit(self._finish, step, saving)

  def _finish(self, step: int, saving: Any) -> None:
    """A step that is killed before it is sealed still has its arrays' sums, and is sealed when it is next resumed."""
    try:
      saving.result()
      if hosts.first():
        fingerprint.seal(self._directory / str(step))
    except Exception as error:
      # tensorstore's come as ValueError, and some of orbax's have no file's name.
      if isinstance(error, OSError) or 'os_error_code' in str(error):
        raise Stopped(f'checkpoint {step} cannot be written ({_words(error)}); those before it are whole') from None
      raise

  def wait(self) -> None:
    if self._saving is not None:
      saving, self._saving = self._saving, None
      saving.result()
      self._orbax.reload()

  def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
    """The items named in `abstract`, trees of ShapeDtypeStruct with shardings, on the devices those name."""
    try:
      return self._restore(step, abstract)
    except Damaged as damage:
      others = ', '.join(str(n) for n in self.steps if n != step)
      raise SpecError(
        f'{self._directory / str(step)} is damaged: {damage}; '
        + (f'there are also steps {others}; ' if others else '')
        + 'train.py, started again, goes back to the last sound one and on from there'
      ) from None

  def newest(self, abstract: dict[str, Any], warn: Callable[[str], object]) -> tuple[int, dict[str, Any] | None]:
    """The last sound step and what it holds; (0, None) where nothing was saved. For the writer.

    Damaged ones after it are moved out of the way, and `warn` is told: steps of their names will be saved again. Where
    none is sound nothing is moved: that a run of days begins again at 0 is not for this program to decide.
    """
    bad: dict[int, str] = {}
    for step in reversed(self.steps):
      try:
        state = self._restore(step, abstract, seal=True)
      except Damaged as damage:
        bad[step] = str(damage)
        continue
      for number, damage in bad.items():
        hosts.on_first(_mesh(abstract), lambda number=number: self._move_aside(number))
        warn(f'checkpoint {number} is damaged ({damage}) and now in {self._aside}; going on from step {step}')
      self._orbax.reload()
      return step, state
    if bad:
      first = max(bad)
      raise SpecError(
        f'{self._directory}: none of its steps is sound ({first}: {bad[first]}); without this folder a run starts over'
      )
    return 0, None

  @property
  def _aside(self) -> pathlib.Path:
    return self._directory.parent / ASIDE

  def _move_aside(self, step: int) -> None:
    self._aside.mkdir(exist_ok=True)
    names = (f'{step}{suffix}' for suffix in ('', *(f'.{n}' for n in range(1, 1000))))
    (self._directory / str(step)).rename(next(to for to in map(self._aside.joinpath, names) if not to.exists()))

  def _restore(self, step: int, abstract: dict[str, Any], *, seal: bool = False) -> dict[str, Any]:
    """seal: one whose arrays are what was saved, and whose writer was killed before it had sealed it."""
    if step not in self.steps:
      raise SpecError(f'checkpoint = {step}: allowed: {", ".join(map(str, self.steps)) or "none saved yet"}')
    folder, mesh = self._directory / str(step), _mesh(abstract)
    sealed = bool(hosts.agree(mesh, int(fingerprint.sealed(folder))))
    if sealed:
      self._look(mesh, lambda: fingerprint.check(folder, abstract))
    try:
      metadata = self._orbax.checkpointables_metadata(step)
      have = {item: _shapes(metadata.metadata[item]) for item in abstract}
      sums = (metadata.custom_metadata or {}).get('sums')
    except UNREADABLE as error:
      if sealed:  # its bytes are right, so something else is wrong
        raise
      raise Damaged(_words(error)) from None
    if sums is not None:
      for item, found in have.items():
        if fingerprint.shapes(sums, item) != found:
          raise Damaged(f'the arrays of {item} are others than were saved')
    for item, tree in abstract.items():
      # Orbax casts a differing dtype in silence and names no leaf when the structure differs.
      want, found = _shapes(tree), have[item]
      for path in sorted(set(want) | set(found)):
        if want.get(path) != found.get(path):
          one, other = found.get(path, 'absent'), want.get(path, 'absent')
          raise SpecError(f'checkpoint {step}: {item}{path} is {one}, this config wants {other}')
    try:
      state = self._orbax.load_checkpointables(step, abstract)
    except UNREADABLE as error:
      if sealed:
        raise
      raise Damaged(_words(error)) from None
    if sums is None and not sealed:
      print(f'note: checkpoint {step} was saved without checksums; it is taken as it is')
    elif sums is not None:
      fingerprint.compare(state, sums)
      if seal and not sealed:
        hosts.on_first(mesh, lambda: fingerprint.seal(folder))
    return state

  def _look(self, mesh: Any, check: Callable[[], None]) -> None:
    """By process 0, on behalf of all: each would read all files."""
    found: list[Damaged] = []

    def look():
      try:
        check()
      except Damaged as damage:
        found.append(damage)

    hosts.on_first(mesh, look)
    if hosts.agree(mesh, len(found)):
      raise found[0] if found else Damaged('as process 0 says')

  def close(self) -> None:
    self.wait()
    if '_behind' in vars(self):
      self._behind.shutdown()
    if '_orbax' in vars(self):
      self._orbax.close()


# What reading wrong bytes raises depends on which bytes. Memory that is short, or a device that is lost, is not here.
UNREADABLE = ValueError, KeyError, TypeError, AttributeError, IndexError, FileNotFoundError, NotADirectoryError


def _words(error: BaseException) -> str:
  return ' '.join(f'{type(error).__name__}: {error}'.split())[:300]


def _mesh(abstract: Any) -> Any:
  """Of the devices that arrays go to; only several processes ask for it."""
  return jax.tree.leaves(abstract)[0].sharding.mesh if jax.process_count() > 1 else None


def _shapes(tree: Any) -> dict[str, str]:
  """{path: 'dtype[shape]'}, empty nodes left out, as orbax stores them."""
  leaves = fingerprint.leaves(tree)
  return {path: fingerprint.shape(leaf) for path, leaf in leaves.items() if hasattr(leaf, 'shape')}


def as_abstract(tree: Any, sharding: Any) -> Any:
  """`sharding`: one for all arrays, or a tree of them, whatever they were saved with."""
  if isinstance(sharding, jax.sharding.Sharding):
    sharding = jax.tree.map(lambda _: sharding, tree)
  return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, sharding)

"""What a run begins with when it extends another: that one's parameters, under this one's way to encode positions."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from models.lm import abstract
from spec import SpecError
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import spread

# Of config.model: how it is computed, not what.
COMPUTED = ('dropout', 'dtype', 'remat', 'tile', 'loss_chunk')


class Source:
  """The newest checkpoint of the run in `config.init_from`. What does not fit is refused by name, when made.

  Nothing but the encoding of positions may differ: scheme, pattern, method, window. Documents that one of the two holds
  out are held out by the other.
  """

  def __init__(self, config: Any, data: Any):
    self.workdir = pathlib.Path(config.init_from).absolute()
    try:
      self.config = type(config).from_dict(provenance.read(self.workdir))
      self._checkpoints = Checkpoints(self.workdir)
      self.step = self._checkpoints.named('latest')
    except SpecError as error:
      raise SpecError(f'config.init_from = {config.init_from!r}: {error}') from None
    self._vocab_size, self._slots = data.tokenizer.vocab_size, len(config.posenc)
    self._here, self._there = (
      abstract(functools.partial(c.build_model, self._vocab_size))[1] for c in (config, self.config)
    )
    self._check(config, data)

  def _check(self, config: Any, data: Any) -> None:
    mine, theirs = config, self.config

    def differ(field: str, value: Any, allowed: Any, why: str = '') -> SpecError:
      return SpecError(f'config.{field} = {value!r}: {allowed!r} is allowed, as in {config.init_from}{why}')

    # One that was tuned as it is may be taken for trained at that length, and its frequencies scaled by it.
    lengths = {theirs.train_len, theirs.window} if theirs.method == 'none' else {theirs.train_len}
    if mine.train_len not in lengths:
      why = ': the length that methods scale from; tune_len sets that of the windows'
      raise differ('train_len', mine.train_len, theirs.train_len, why)
    for field in dataclasses.fields(mine.model):
      value, allowed = (getattr(c.model, field.name) for c in (mine, theirs))
      if field.name not in COMPUTED and value != allowed:
        raise differ(f'model.{field.name}', value, allowed)
    if mine.data.tokenizer != theirs.data.tokenizer:
      raise differ('data.tokenizer', mine.data.tokenizer, theirs.data.tokenizer)
    jax.eval_shape(self._fit, self._there)
    if provenance.corpus(self.workdir) != data.sha256:
      return
    held_out = ': it decides which documents are held out'
    for field in dataclasses.fields(mine.data):
      value, allowed = (getattr(c.data, field.name) for c in (mine, theirs))
      if value != allowed:
        raise differ(f'data.{field.name}', value, allowed, held_out)
    if mine.eval.spans != theirs.eval.spans:
      raise differ('eval.spans', mine.eval.spans, theirs.eval.spans, held_out)
    if mine.max_multiple * mine.train_len != theirs.max_multiple * theirs.train_len:
      raise differ(
        'max_multiple', mine.max_multiple, theirs.max_multiple * theirs.train_len // mine.train_len, held_out
      )

  def _restored(self, mesh: Mesh) -> Any:
    as_there = as_abstract(self._there, spread(mesh, self._there))
    return self._checkpoints.restore(self.step, {'params': as_there})['params']

  def facts(self, mesh: Mesh, digest: Callable[[Any], str]) -> dict[str, Any]:
    """For config.json: which parameters, by their `digest`, a run began with, whatever becomes of their folder."""
    config = json.loads(json.dumps(self.config.to_dict()))
    checkpoint = digest(self._restored(mesh))
    return {'workdir': str(self.workdir), 'step': self.step, 'checkpoint': checkpoint, 'config': config}

  def params(self, mesh: Mesh, home: Any) -> Any:
    """As a model of this run has them, on the devices that `home` says."""
    params = jax.jit(self._fit, out_shardings=home)(self._restored(mesh))
    self._checkpoints.close()
    return params

  def _fit(self, params: Any) -> Any:
    """SpecError names a parameter that one of the two has, and the other not in this shape."""
    params = {**params, 'slots': _dealt(params['slots'], self._slots)}
    have, want = (
      {_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)} for tree in (params, self._here)
    )
    for name in sorted(set(have) | set(want)):
      here, there = (f'{t[name].dtype}{list(t[name].shape)}' if name in t else 'absent' for t in (want, have))
      if here != there:
        raise SpecError(f'config.posenc: parameter {name} is {here} here, and {there} in {self.workdir}')
    return jax.tree_util.tree_map_with_path(lambda path, _: have[_name(path)], self._here)


def _dealt(slots: dict[Any, Any], count: int) -> dict[int, Any]:
  """Layers, stacked by the slots of one pattern, stacked by those of another: layer l is in slot l mod slots."""
  if len(slots) == count:
    return slots
  trees = [slots[key] for key in sorted(slots, key=int)]

  def deal(*leaves):
    layers = jnp.stack(leaves, 1).reshape(-1, *leaves[0].shape[1:])
    return layers.reshape(-1, count, *layers.shape[1:])

  whole = jax.tree.map(deal, *trees)
  return {i: jax.tree.map(lambda x, i=i: x[:, i], whole) for i in range(count)}


def _name(path: Any) -> str:
  return '.'.join(str(getattr(key, 'key', getattr(key, 'idx', key))) for key in path)

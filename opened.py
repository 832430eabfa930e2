"""A trained run as whatever scores it needs it: its parameters, its documents, and where numbers of it are kept."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from configs.schema import Config
from data import Data, TokenDocument, Tokenizer, tokenizers
from evaluation.plan import Plan, facts
from evaluation.score import Scorer
from evaluation.store import Key, Rows, Store, checkpoint_hash, remembered
from models.lm import abstract
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, spread


class Opened:
  """One checkpoint of the run in `workdir`. Parameters and documents are read when they are first asked for.

  config: the run's, with what else of evaluation this caller asks for. checkpoint: a step, or latest. SpecError where
  there is no such checkpoint, or where the corpus is no longer the one of training.
  """

  def __init__(self, workdir: pathlib.Path, config: Config, checkpoint: str = 'latest'):
    self.workdir, self.config = workdir, config
    self._checkpoints = Checkpoints(workdir)
    self.step: int = self._checkpoints.named(checkpoint)
    self.mesh: Mesh = make_mesh(0, config.mesh)  # batches are cut to fit it
    self.slots = [config.build_scheme(text) for text in config.posenc]
    self.rule = config.build_rule(self.slots)
    self.results = workdir / 'extrapolation'

  @functools.cached_property
  def tokenizer(self) -> Tokenizer:
    return tokenizers.build(self.config.data.tokenizer)

  @functools.cached_property
  def data(self) -> Data:
    data = self.config.load_data()
    provenance.check_data(self.workdir, data)
    return data

  def plan(self, documents: Sequence[TokenDocument] | None = None) -> Plan:
    """Of the test documents, or some of them."""
    c, documents = self.config, self.data.splits.test if documents is None else documents
    about = facts(self.data, c.data.bos)
    return Plan(c.eval, documents, train_len=c.train_len, max_multiple=c.max_multiple, **about)

  @functools.cached_property
  def _model(self) -> tuple[Any, Any]:
    return abstract(functools.partial(self.config.build_model, self.tokenizer.vocab_size))

  @property
  def graphdef(self) -> Any:
    return self._model[0]

  @property
  def shapes(self) -> Any:
    return self._model[1]

  @functools.cached_property
  def params(self) -> Any:
    home = spread(self.mesh, self.shapes)
    params = self._checkpoints.restore(self.step, {'params': as_abstract(self.shapes, home)})['params']
    self._checkpoints.close()
    return params

  @functools.cached_property
  def scorer(self) -> Scorer:
    return Scorer(self.graphdef, self.params, self.mesh, self.config.eval.batch_tokens, self.config.memory_gb)

  @functools.cached_property
  def checkpoint(self) -> str:
    """The parameters' hash, under which rows are kept. Remembered beside the curve: it takes longer than a rerun."""
    if jax.process_count() > 1:  # none may find what another has just written
      return checkpoint_hash(self.params)
    files = self.workdir / 'checkpoints' / str(self.step)
    return remembered(self.results / 'checkpoints.json', files, lambda: checkpoint_hash(self.params))

  def rows_in(self, store: Store) -> Callable[[str, int], Rows]:
    """(hash of the positions, length) -> where this model's windows of them are kept."""
    return lambda positions, length: store.open(Key.of(self.config, self.data, self.checkpoint, positions, length))

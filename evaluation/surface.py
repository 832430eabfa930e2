"""Checkpoint x length: how far a scheme stretches against the tokens that it has seen, measured while it is trained.

"More training tokens lead to worse extrapolation" (the authors of the Forgetting Transformer, of their own curves): an
order of schemes at one token budget is not an order of schemes.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import posenc
from evaluation.plan import EvalConfig, Plan
from evaluation.score import Scorer
from evaluation.store import Key, Store, checkpoint_hash
from evaluation.survey import Survey
from spec import SpecError


@dataclasses.dataclass(frozen=True)
class SurfaceConfig:
  """Short sweeps during training, of the model as it is trained: fixed targets, method 'none'.

  checkpoints: how many, evenly over the steps, the last one the end; 0: off. multiples: lengths in units of train_len.
  docs, spans: runs of T = max(8, train_len / 8) targets, `spans` in each of the first `docs` validation documents that
  hold the longest length. Never of the test documents, so that whoever looks at the surface and then changes a run has
  not looked at what it will be judged by. No checkpoint is chosen and no run is stopped by it.

  Cost: checkpoints x docs x spans x sum(multiples) x train_len tokens forward, of which a training step costs three
  times as much, and each length is compiled once. The quickstart's training takes 3.5 % more CPU time by ten
  checkpoints of the default, 9.3 % where the compile cache lacks them: six compilations that do not grow with steps.
  """

  checkpoints: int = 0
  multiples: tuple[float, ...] = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
  docs: int = 4
  spans: int = 1

  def __post_init__(self):
    for field, least in (('checkpoints', 0), ('docs', 1), ('spans', 1)):
      if getattr(self, field) < least:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least {least} is allowed')
    if not self.multiples or len(set(self.multiples)) != len(self.multiples):
      raise ValueError(f'multiples = {self.multiples}: at least one, and each once, is allowed')
    if not all(0 < multiple < math.inf for multiple in self.multiples):
      raise ValueError(f'multiples = {self.multiples}: finite numbers above 0 are allowed')

  def at(self, steps: int) -> frozenset[int]:
    """Of a run of so many steps, those with a sweep."""
    return frozenset(-(-steps * i // self.checkpoints) for i in range(1, self.checkpoints + 1))


class Surface:
  """Measures a run at `steps`; off, there are none. What can be wrong with a config or corpus is wrong when made."""

  def __init__(self, config: Any, data: Any, slots: Sequence[posenc.PositionScheme], rule: posenc.Rule):
    self._config, self._data = config, data
    self.steps = config.surface.at(config.steps)
    if self.steps:
      self._survey = _survey(config, data, slots, rule)

  def begin(
    self, directory: pathlib.Path, graphdef: Any, mesh: Mesh, facts: Callable[[int], dict[str, Any]]
  ) -> 'Surface':
    """directory: of surface.jsonl, and of the store that sweeps use too. facts(step): what goes into each point."""
    self._directory, self._facts = directory, facts
    if self.steps:
      cfg = self._config
      self._scorer = Scorer(graphdef, None, mesh, cfg.eval.batch_tokens, cfg.memory_gb, len(self._survey.plan.spans))
    return self

  def measure(self, step: int, params: Any, say: Callable[[str], object]) -> dict[str, float]:
    """{tag: NLL, nats, or perplexity} at each length, of the parameters after `step` updates.

    A run that was killed and comes here again with the same parameters reads what it has scored. Several processes
    score everything: what one of them finds on disk another might not.
    """
    from evaluation.points import merge, read_curve, to_line  # scipy: a run without a surface need not wait for it
    from evaluation.sweep import exp, sweep

    survey, several = self._survey, jax.process_count() > 1
    if not several:
      store, checkpoint = Store(self._directory / 'store'), checkpoint_hash(params)
      survey = dataclasses.replace(
        survey, open_rows=lambda pos, n: store.open(Key.of(self._config, self._data, checkpoint, pos, n))
      )
    parts = sweep(
      survey,
      lambda: self._scorer.use(params),
      bytes_per_token_V=np.asarray(self._data.tokenizer.bytes_per_token_V),
      facts=self._facts(step),
      progress=_Quiet(),
      floor=self._data.floor,
    )
    points = [p for part in parts for p in part]
    self._scorer.use(None)  # the next update is given these buffers
    if jax.process_index() == 0:
      path = self._directory / 'surface.jsonl'
      path.parent.mkdir(parents=True, exist_ok=True)
      merged = merge(read_curve(path) if path.exists() else [], points)
      temporary = path.with_suffix('.tmp')
      temporary.write_text(''.join(f'{to_line(p)}\n' for p in merged))
      temporary.replace(path)
    found = {p['length'] / p['train_length']: p['nll'] for p in points if 'nll' in p}
    say(f'step {step}: surface: perplexity ' + ', '.join(f'{exp(found[m]):.4g} at {m:g}x' for m in sorted(found)))
    values = {f'nll_{m:g}x': found[m] for m in sorted(found)} | {f'ppl_{m:g}x': exp(found[m]) for m in sorted(found)}
    return {f'surface/{name}': value for name, value in values.items()}


def _survey(config: Any, data: Any, slots: Sequence[posenc.PositionScheme], rule: posenc.Rule) -> Survey:
  cfg = config.surface
  asked = EvalConfig(cfg.multiples, ('fixed_targets',), (), spans=cfg.spans, batch_tokens=config.eval.batch_tokens)
  longest = math.ceil(max(cfg.multiples))
  shortest = asked.min_test_tokens(config.train_len, longest) + cfg.spans * (data.stride - 1)
  documents = [d for d in data.splits.validation if len(d.tokens) >= shortest]
  if len(documents) < cfg.docs:
    raise SpecError(
      f'config.surface.docs = {cfg.docs}: {len(documents)} of {len(data.splits.validation)} validation documents have '
      f'the {shortest} tokens of {longest}x; a smaller number, shorter surface.multiples, or more data.validation_docs '
      'are allowed'
    )
  plan = Plan(
    asked,
    documents[: cfg.docs],
    train_len=config.train_len,
    max_multiple=longest,
    bos=config.data.bos,
    bos_id=data.tokenizer.bos,
    corpus_sha256=data.sha256,
    stride=data.stride,
  )
  survey = Survey(plan, slots, ('none',), [config.tokens(m) for m in cfg.multiples], config.train_len, rule)
  survey.selected  # noqa: B018  lengths that this corpus does not allow are refused here
  return survey


class _Quiet:
  """Stands where a progress bar would."""

  def set_postfix_str(self, text: str) -> None: ...

  def update(self, n: int) -> None: ...

  def write(self, text: str) -> None: ...

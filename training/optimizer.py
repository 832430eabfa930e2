"""AdamW with warm-up and cosine decay: optax, and which parameters it decays."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from posenc import PositionScheme


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """`clip_norm` 0 is off. `accumulate` micro-batches make one update; steps, schedule and clipping count updates."""

  learning_rate: float = 1e-3
  final_fraction: float = 0.1
  warmup_steps: int = 100
  b1: float = 0.9
  b2: float = 0.95
  weight_decay: float = 0.1
  clip_norm: float = 1.0
  accumulate: int = 1

  def __post_init__(self):
    for field in ('learning_rate', 'final_fraction', 'b1', 'b2', 'weight_decay', 'clip_norm'):
      if not 0 <= getattr(self, field) < math.inf:
        raise ValueError(f'{field} = {getattr(self, field)}: a finite number of at least 0 is allowed')
    for field in ('b1', 'b2'):  # at 1 the bias correction divides by 0
      if getattr(self, field) >= 1:
        raise ValueError(f'{field} = {getattr(self, field)}: a number in [0, 1) is allowed')
    if self.final_fraction > 1:
      raise ValueError(f'final_fraction = {self.final_fraction}: a number in [0, 1] is allowed')
    if not 2**-126 <= self.learning_rate < 2**127:  # normal in float32, in which it is applied
      raise ValueError(f'learning_rate = {self.learning_rate}: a number above 0 is allowed that float32 holds')
    if self.warmup_steps < 0:
      raise ValueError(f'warmup_steps = {self.warmup_steps}: a whole number of at least 0 is allowed')
    if self.accumulate < 1:
      raise ValueError(f'accumulate = {self.accumulate}: a whole number of at least 1 is allowed')


def schedule(cfg: OptimizerConfig, steps: int) -> Callable[[Any], Any]:
  """Learning rate of update 0, 1, ...; the first is already above 0, so no update is wasted."""
  warmup = min(cfg.warmup_steps, steps)
  return optax.warmup_cosine_decay_schedule(
    init_value=cfg.learning_rate / (warmup + 1),
    peak_value=cfg.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(steps, warmup + 1),
    end_value=cfg.learning_rate * cfg.final_fraction,
  )


def decay_mask(model: nnx.Module) -> dict:
  """Pure dict of bools, True where weights decay: all but biases and the parameters of norms and of position schemes.

  By the type of the module that owns a parameter, so it is built before `nnx.to_pure_dict` drops the types; names would
  have to be kept in step with every new scheme.
  """
  kinds = nnx.RMSNorm, nnx.LayerNorm, PositionScheme
  modules = list(nnx.iter_modules(model))
  exempt = {path for path, module in modules if isinstance(module, kinds)}
  exempt |= {(*path, 'bias') for path, module in modules if isinstance(module, nnx.Linear)}

  def decays(path, _):
    keys = tuple(key.key for key in path)
    return not any(keys[:n] in exempt for n in range(len(keys) + 1))

  return jax.tree_util.tree_map_with_path(decays, nnx.to_pure_dict(nnx.state(model)))


def make_optimizer(cfg: OptimizerConfig, steps: int, mask: dict) -> optax.GradientTransformation:
  """Clips the gradient of the whole batch, then AdamW. Accumulation is the train step's, weighted by tokens:
  `optax.MultiSteps` weighs micro-batches alike and keeps a second copy of the gradient in the state."""
  clip = optax.clip_by_global_norm(cfg.clip_norm) if cfg.clip_norm else optax.identity()
  adamw = optax.adamw(schedule(cfg, steps), cfg.b1, cfg.b2, weight_decay=cfg.weight_decay, mask=mask)
  return optax.chain(clip, adamw)

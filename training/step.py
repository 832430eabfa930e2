"""The jitted steps: one update, and one validation batch. The train state is a plain tree, {params, opt}."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from models.lm import merge
from posenc import Positions
from training.devices import spread


def make_train_step(
  graphdef: Any,
  tx: optax.GradientTransformation,
  pos: tuple[Positions, ...],
  dropout_seed: int | None,
  mesh: Mesh | None = None,
) -> Callable[..., tuple[dict, dict]]:
  """step(state, inputs_ABT, targets_ABT, n, at=None, told=None) -> state, metrics: update n from A micro-batches.

  Targets below 0 are not asked for, all others weigh the same: sums over micro-batches, one division. Dropout masks are
  a function of (seed, n); None is no dropout. `at` is where tokens stand in this update, for each slot f32[T] or
  f32[repeats, T] and for all windows of
  all micro-batches alike; None is where `pos` has them, at every step, and then a constant of the program. The state
  lies on `mesh` as `devices.spread` says, before and after, gradients in between. The largest of `told`, what processes
  tell each other, int32[devices], is one of the metrics.
  """

  def at_home(tree):
    return tree if mesh is None or mesh.size == 1 else jax.lax.with_sharding_constraint(tree, spread(mesh, tree))

  def step(state, inputs_ABT, targets_ABT, n, at=None, told=None):
    params = state['params']
    here = pos if at is None else tuple(dataclasses.replace(p, at_T=a) for p, a in zip(pos, at, strict=True))
    base = None if dropout_seed is None else jax.random.fold_in(jax.random.key(dropout_seed), n)

    def batch_nll(params, inputs_BT, targets_BT, key):
      return merge(graphdef, params, mesh).nll(inputs_BT, targets_BT, here, key=key).sum()

    def micro(sums, batch):
      a, inputs_BT, targets_BT = batch
      key = None if base is None else jax.random.fold_in(base, a)
      loss, grads = jax.value_and_grad(batch_nll)(params, inputs_BT, targets_BT, key)
      return jax.tree.map(jnp.add, sums, (loss, at_home(grads))), None

    count = inputs_ABT.shape[0]
    zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
    # One micro-batch runs inline: a loop of one would hide it from the compiler.
    sums, _ = jax.lax.scan(micro, zeros, (jnp.arange(count), inputs_ABT, targets_ABT), unroll=count == 1)
    asked = jnp.maximum((targets_ABT >= 0).sum(), 1)
    loss, grads = jax.tree.map(lambda x: x / asked, sums)
    updates, opt = tx.update(grads, state['opt'], params)
    metrics = {'loss': loss, 'grad_norm': optax.tree.norm(grads)}
    if told is not None:
      metrics['told'] = told.max()
    return at_home({'params': optax.apply_updates(params, updates), 'opt': opt}), metrics

  return jax.jit(step, donate_argnums=0)


def make_validate(graphdef: Any, mesh: Mesh | None = None) -> Callable[..., jax.Array]:
  """validate(params, inputs_BT, targets_BT, pos, rows=None) -> mean NLL of the tokens, nats.

  rows: the first so many windows count. Devices share a batch equally; the others fill it up.
  """

  def validate(params, inputs_BT, targets_BT, pos, rows=None):
    nll_BT = merge(graphdef, params, mesh).nll(inputs_BT, targets_BT, pos)
    return nll_BT[:rows].sum() / jnp.maximum((targets_BT[:rows] >= 0).sum(), 1)

  return jax.jit(validate, static_argnames='rows')

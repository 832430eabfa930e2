"""A training step as one writes it in an afternoon, after nanodo's recipe: what plain JAX gives without any care.

Pre-norm LayerNorm, learned positions, dense causal attention with softmax in float32, GELU of width 4 D, tied head,
full [B, T, V] logits, global-norm clipping and AdamW; one device, donated state. 12 D**2 parameters a layer, as ours
has with SwiGLU at 8/3 D.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def init(key: jax.Array, *, vocab: int, length: int, layers: int, d_model: int) -> dict[str, Any]:
  def weight(*shape):
    nonlocal key
    key, one = jax.random.split(key)
    return jax.random.normal(one, shape) * shape[-2] ** -0.5

  def norm():
    return {'scale': jnp.ones(d_model), 'bias': jnp.zeros(d_model)}

  def block():
    return {
      'norm_attention': norm(), 'norm_mlp': norm(),
      **{name: weight(d_model, d_model) for name in ('query', 'key', 'value', 'out')},
      'up': weight(d_model, 4 * d_model), 'down': weight(4 * d_model, d_model),
    }  # fmt: skip

  return {
    'tokens': weight(vocab, d_model).T.reshape(vocab, d_model) * 0.1,
    'positions': weight(length, d_model) * 0.1,
    'blocks': [block() for _ in range(layers)],
    'norm': norm(),
  }


def _norm(x_BTD: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
  centred = x_BTD - x_BTD.mean(-1, keepdims=True)
  return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-6) * p['scale'] + p['bias']


def _attention(x_BTD: jax.Array, p: dict[str, Any], heads: int) -> jax.Array:
  b, t, d = x_BTD.shape
  q, k, v = ((x_BTD @ p[name]).reshape(b, t, heads, d // heads) for name in ('query', 'key', 'value'))
  logits_BNTT = jnp.einsum('BTNH,BSNH->BNTS', q * (d // heads) ** -0.5, k)
  logits_BNTT = jnp.where(jnp.tril(jnp.ones((t, t), bool)), logits_BNTT, jnp.finfo(jnp.float32).min)
  return jnp.einsum('BNTS,BSNH->BTNH', jax.nn.softmax(logits_BNTT), v).reshape(b, t, d) @ p['out']


def nll(params: dict[str, Any], tokens_BT: jax.Array, targets_BT: jax.Array, heads: int) -> jax.Array:
  x_BTD = params['tokens'][tokens_BT] + params['positions'][: tokens_BT.shape[1]]
  for p in params['blocks']:
    x_BTD = x_BTD + _attention(_norm(x_BTD, p['norm_attention']), p, heads)
    x_BTD = x_BTD + jax.nn.gelu(_norm(x_BTD, p['norm_mlp']) @ p['up']) @ p['down']
  logits_BTV = _norm(x_BTD, params['norm']) @ params['tokens'].T
  return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()


def make_step(heads: int) -> tuple[optax.GradientTransformation, Callable]:
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, 0.9, 0.95, weight_decay=0.1))

  def step(state, tokens_BT, targets_BT):
    loss, grads = jax.value_and_grad(nll)(state['params'], tokens_BT, targets_BT, heads)
    updates, opt = tx.update(grads, state['opt'], state['params'])
    return {'params': optax.apply_updates(state['params'], updates), 'opt': opt}, loss

  return tx, jax.jit(step, donate_argnums=0)

"""bfloat16 at 32 times the training length: positions stay apart, nothing is NaN, losses are those of float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from benchmarks import drift
from forms import SPEC, build, jit

T = 32 * 16  # bfloat16 has no odd number above 256
ALL = list(posenc.SCHEMES)
TABLE = {'learned': 'learned(oob="interpolate")'}  # its table ends; the same at 32x, by interpolation


def seen(scheme, dtype):
  """What each hook of the scheme makes of T equal tokens in this dtype, {hook: float32[T, ...]}."""
  pos = posenc.positions('none', scheme, 16, T)
  out, rng = {}, np.random.default_rng(0)
  x_BTD = jnp.broadcast_to(jnp.asarray(rng.normal(size=(1, 1, 32)), dtype), (1, T, 32))
  q_BTNH, k_BTKH = (jnp.broadcast_to(jnp.asarray(rng.normal(size=(1, 1, 4, 8)), dtype), (1, T, 4, 8)) for _ in 'qk')
  out['embed'] = scheme.embed(x_BTD.astype(jnp.float32), pos).astype(dtype)[0]
  q, k = scheme.rotate(q_BTNH, k_BTKH, pos)
  out['rotate'] = k[0]
  state = scheme.token_state(x_BTD, pos)
  last = slice(T - 1, T)  # one query, all keys: distances 511 to 0
  state_t = jax.tree.map(lambda a: a[:, last], state)
  logits_BNts = jnp.zeros((1, 4, 1, T), jnp.float32)
  carry = scheme.init_carry(q[:, last])
  logits, _ = scheme.score(logits_BNts, q[:, last], k, pos.at_T[last], pos.at_T, state_t, state, carry)
  out['score'] = jnp.moveaxis(logits[0, :, 0], 0, 1)
  return {hook: np.asarray(value.reshape(T, -1), np.float32) for hook, value in out.items()}


@pytest.mark.parametrize('name', ALL)
def test_positions_stay_apart(name):
  """As many distinct positions in bfloat16 as in float32, in every hook, and all of them where nothing is meant to be
  the same: a bias of distances that were rounded would have 259 steps for 512."""
  scheme = build(TABLE.get(name, SPEC.get(name, name)), head_dim=8, d_model=32, train_len=16)
  graphdef, params = nnx.split(scheme)
  drawn = jax.tree.map(lambda a: a if a.any() else jax.random.normal(jax.random.key(3), a.shape), params)
  scheme = nnx.merge(graphdef, drawn)  # of tables that begin at 0 nothing can be seen
  full, half = seen(scheme, jnp.float32), seen(scheme, jnp.bfloat16)
  count = {hook: [len(np.unique(of[hook], axis=0)) for of in (full, half)] for hook in full}
  for hook, (a, b) in count.items():
    assert np.isfinite(half[hook]).all()
    assert b >= 0.99 * a, f'{hook}: {a} positions in float32, {b} in bfloat16'
  apart = max(b for _, b in count.values())
  bounded = {'nope': 1, 't5': 8, 'shaw': 10, 'cope': 7}  # buckets and tables that end on purpose
  assert apart >= 0.99 * T if name not in bounded else apart >= bounded[name] - 1, count


@pytest.fixture(scope='module')
def data():
  return drift.config('rope', 1).load_data()


@pytest.mark.slow
@pytest.mark.parametrize('name', ALL)
def test_losses_are_those_of_float32(name, data):
  """After a few updates: the table in docs/GUARANTEES.md is of 300."""
  for length, (nll, mean, token) in drift.drift(name, data, steps=3, rows=1, jit=jit).items():
    assert np.isfinite(nll) and abs(mean) < 0.01 and token < 0.3, (length, nll, mean, token)

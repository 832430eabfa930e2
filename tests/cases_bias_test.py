"""Cases P and B of docs/CASES.md: precision, masked rows, and additive biases."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from attention_test import arrays, plain
from decoding import VOCAB, decode, small_lm
from forms import SPEC, build, jit, refused
from models.attention import attend
from models.lm import ModelConfig
from posenc import SCHEMES
from posenc.alibi import slopes
from posenc.base import distance
from posenc.kerple import bounded
from posenc.t5 import buckets
from spec import SpecError

# ---- P


def test_P02():
  """ALiBi's bias is formed from distances in float32, whatever the compute dtype."""
  scheme = build('alibi', heads=8, train_len=4096)
  back = jnp.arange(4096.0)
  bias = np.asarray(scheme.bias(jnp.asarray([4095.0]), 4095 - back))[0, 0]
  assert bias.dtype == np.float32
  assert (bias[300], bias[301]) == (-150.0, -150.5)
  assert len(np.unique(bias)) == 4096
  half = np.asarray(jnp.asarray(bias, jnp.bfloat16))
  assert half[300] == half[301] and len(np.unique(half)) == 769
  # In attention too: logits are float32, so that two keys next to each other weigh differently by exp(0.5).
  scores, _ = scheme.score(jnp.zeros((1, 8, 1, 4096)), *[jnp.zeros((1, 1, 8, 8), jnp.bfloat16)] * 2,
                           jnp.asarray([4095.0]), 4095 - back, (), (), ())  # fmt: skip
  assert scores.dtype == jnp.float32 and scores[0, 0, 0, 301] - scores[0, 0, 0, 300] == -0.5


def precisions(f, *args):
  """Of every matrix product in the program of `f`."""
  text = jax.jit(f).lower(*args).as_text()
  products = re.findall(r'stablehlo\.dot_general[^\n]*', text)
  assert products
  return [re.findall(r'precision = \[(\w+)', line) or ['DEFAULT'] for line in products]


def test_P04():
  """Positions never pass through a product at the platform's default precision, and `highest` reaches every product.

  An accelerator's default rounds float32 to TF32 or bfloat16, about 1e-3 of each product.
  """
  q, k, v, _ = arrays(length=16)
  for name in ('cope(npos_max=6)',):
    scheme = build(name, head_dim=8, heads=4, d_model=32, train_len=16)
    pos = posenc.positions('none', scheme, 16, 16)
    state = scheme.token_state(jnp.ones((2, 16, 32)), pos)

    def attention(q, k, v, scheme=scheme, pos=pos, state=state):
      return attend(q, k, v, scheme, pos, state, fused=False).sum()

    with jax.default_matmul_precision('highest'):
      assert {p for found in precisions(jax.grad(attention, (0, 1, 2)), q, k, v) for p in found} == {'HIGHEST'}, name
  rope = build('rope', head_dim=8)
  angles = jax.jit(rope.cos_sin).lower(posenc.positions('none', rope, 128, 128)).as_text()
  assert 'dot_general' not in angles
  for name in ('t5', 'sandwich'):
    scheme = build(name)
    bias = jax.jit(scheme.bias).lower(jnp.arange(4.0), jnp.arange(4.0)).as_text()
    assert 'dot_general' not in re.sub(r'dot_general[^\n]*HIGHEST[^\n]*', '', bias), name
  if jax.default_backend() != 'cpu':
    scheme = build('rope', head_dim=8, heads=4, d_model=32, train_len=16)
    pos = posenc.positions('none', scheme, 16, 16)
    with jax.default_matmul_precision('highest'):
      here = attend(q, k, v, scheme, pos)
      with jax.default_device(jax.devices('cpu')[0]):
        there = attend(*(jnp.asarray(np.asarray(a)) for a in (q, k, v)), scheme, pos)
    np.testing.assert_allclose(np.asarray(here), np.asarray(there), atol=1e-4)


@pytest.mark.parametrize(
  ('name', 'dtype'), [('nope', 'float16'), ('cope(npos_max=6)', 'float16'), ('alibi', 'bfloat16'), ('nope', 'float32')]
)
def test_P05(name, dtype):
  """A row that sees nothing is no NaN, in values and gradients: masks act on float32 logits and are finite.

  No batch has a padded row; a window that hides even the query's own key is the only way to an empty one. Models
  compute in float32 or bfloat16: float16 is refused.
  """
  scheme = build(name, heads=4, head_dim=8, d_model=32, train_len=10)
  pos = dataclasses.replace(plain(scheme), window_T=jnp.where(jnp.arange(25) == 7, 0.0, 5.0))
  q, k, v, do = (a.astype(dtype) for a in arrays())

  def loss(q, k, v):
    o = attend(q, k, v, scheme, pos, tile=8)
    return (o * do).astype(jnp.float32).sum(), o

  grads, o = jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
  for a in (o, *grads):
    assert np.isfinite(np.asarray(a, np.float32)).all()
  if dtype == 'float16':
    with pytest.raises(ValueError, match="^dtype = 'float16': allowed: float32, bfloat16$"):
      ModelConfig(dtype=dtype)
  elif dtype == 'float32':  # and what is masked weighs nothing: other values there, the same output elsewhere
    elsewhere = jit(lambda v: attend(q, k, v, scheme, pos, tile=8))(v.at[:, 10:].set(9.0))
    np.testing.assert_array_equal(np.delete(elsewhere[:, :10], 7, 1), np.delete(o[:, :10], 7, 1))


# ---- B


def test_B01():
  """Slopes for any number of heads, in the authors' order."""
  want = {
    1: [2**-8],
    3: [0.0625, 0.00390625, 0.25],
    6: [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125],
    8: [2.0**-n for n in range(1, 9)],
    12: [*(2.0**-n for n in range(1, 9)), 0.70710678, 0.35355339, 0.17677670, 0.08838835],
  }
  for heads, slopes_N in want.items():
    np.testing.assert_allclose(slopes(heads), slopes_N, rtol=1e-7)


def test_B02():
  """Without content the weight grows strictly towards the current token, the steeper the larger the slope."""
  scheme = build('alibi', heads=8, head_dim=10, train_len=10)
  ones, values = jnp.ones((1, 10, 8, 10)), jnp.broadcast_to(jnp.eye(10)[None, :, None], (1, 10, 8, 10))
  weights = np.asarray(jit(lambda v: attend(0 * ones, ones, v, scheme, plain(scheme, 10)))(values))[0, -1].T
  assert (np.diff(weights, axis=0) > 0).all()
  growth = np.log(weights[-1] / weights[0])
  np.testing.assert_allclose(growth, 9 * slopes(8), rtol=1e-4)
  assert (np.diff(growth) < 0).all()


def test_B05():
  """One shared row of biases is the same model: a constant per query cancels. Not a bug, unless rounded."""
  scheme = build('alibi', heads=8)
  at = jnp.arange(20.0)
  matrix = scheme.bias(at, at)
  shared = jnp.broadcast_to(jnp.asarray(slopes(8), jnp.float32)[:, None, None] * (at - 19), matrix.shape)
  logits = jax.random.normal(jax.random.key(0), matrix.shape)
  mask = jnp.where(distance(at, at) + (at[:, None] == at), 0, -jnp.inf)
  constant = 3.5 * jax.random.normal(jax.random.key(1), (8, 20, 1))
  want = jax.nn.softmax(logits + matrix + mask, -1)
  for bias in (shared, matrix + constant, shared + constant):
    np.testing.assert_allclose(jax.nn.softmax(logits + bias + mask, -1), want, atol=1e-6)
  assert not np.array_equal(shared, matrix)


def test_B07():
  """Past keys of token 20 use 17 buckets and more; their differences, the other way round, would all be bucket 0."""
  scheme = build('t5', heads=1, train_len=32)
  scheme.table[...] = jnp.arange(32.0)[:, None]
  bias = np.asarray(scheme.bias(jnp.asarray([20.0]), jnp.arange(20.0)))[0, 0]
  np.testing.assert_allclose(bias, buckets(32, 128)[np.arange(20, 0, -1)])
  assert len(np.unique(bias)) >= 17
  shaw = build('shaw(clip=32)', train_len=64)
  rows = np.asarray(shaw.row(jnp.asarray([20.0]), jnp.arange(20.0)))[0]
  np.testing.assert_array_equal(rows, 32 - np.arange(20, 0, -1))


CASE = ('t5', 'kerple_log', 'fire', 'shaw', 'cope')
DECODED = [SPEC.get(name, name) for name in CASE]
OTHERS = [SPEC.get(name, name) for name in SCHEMES if name not in (*CASE, 'learned')] + [
  'learned(rows=14)',
  'fox(rope=True)',
]


@pytest.mark.parametrize('text', [*DECODED, *(pytest.param(text, marks=pytest.mark.slow) for text in OTHERS)])
def test_B08(text):
  """There is no cache; a forward pass in chunks of 10, 3 and 1 tokens over kept keys has the logits of a whole one."""
  lm = small_lm(text, layers=1, train_len=10, loss_chunk=14)
  pos = posenc.positions('none', list(lm.schemes), 10, 14)
  tokens_BT = jax.random.randint(jax.random.key(0), (2, 14), 0, VOCAB)

  def both(tokens_BT):
    return decode(lm, tokens_BT, pos[0], (10, 3, 1)), lm.logits(lm.hidden(tokens_BT, pos, tile=4))

  chunks, whole = jit(both)(tokens_BT)
  np.testing.assert_allclose(chunks, whole, atol=1e-4)


def test_B10():
  """Scales that training has driven below 0 act as the least that is allowed, and have a gradient to come back."""
  scheme = build('kerple_log', heads=2)
  scheme.r1[...], scheme.r2[...] = jnp.asarray([1.0, -3.0]), jnp.asarray([0.5, -0.01])
  far = jnp.asarray([0.0, 1, 2, 100, 101, 4095])
  bias = np.asarray(scheme.of(far))
  np.testing.assert_allclose(bias[0, [1, 2, 3, 5]], [-0.405465, -0.693147, -3.931826, -7.624863], rtol=1e-5)
  assert (bias[:, 0] == 0).all() and (np.diff(bias, axis=1) < 0).all()  # both heads, the negative one too
  with np.errstate(invalid='ignore', divide='ignore'):
    assert np.log1p(-0.01 * 100) < -30 and np.isnan(np.log1p(-0.01 * 101))  # what it would have been
  gradient = jax.grad(lambda r: bounded(r).sum())(jnp.asarray([-3.0, 2.0]))
  np.testing.assert_array_equal(gradient, [1, 1])


def test_B12():
  """A threshold of 0 gives the first token no 0 / 0, and shares of a distance lie in [0, 1]."""
  scheme = build('fire(init_len=0, width=1)', heads=1, train_len=64)
  scheme.w1[...], scheme.b1[...], scheme.w2[...] = jnp.ones(1), jnp.zeros(1), jnp.ones((1, 1))  # the MLP is relu
  assert np.isfinite(scheme.bias(jnp.asarray([0.0]), jnp.asarray([0.0]))).all()
  gradient = jax.grad(lambda c: scheme_with(scheme, c).bias(jnp.zeros(1), jnp.zeros(1)).sum())(jnp.asarray(0.1))
  assert np.isfinite(gradient)
  longer = build('fire(init_len=32, width=1)', heads=1, train_len=64)
  longer.w1[...], longer.b1[...], longer.w2[...] = jnp.ones(1), jnp.zeros(1), jnp.ones((1, 1))
  for i, j, share in ((10, 5, 0.28253744), (100, 50, 0.74722174), (100, 0, 1.0)):
    assert float(longer.bias(jnp.asarray([float(i)]), jnp.asarray([float(j)]))[0, 0, 0]) == pytest.approx(share, 1e-5)
  every = np.asarray(longer.bias(jnp.arange(200.0), jnp.arange(200.0)))
  assert every.min() == 0 and every.max() <= 1


def scheme_with(scheme, c):
  graphdef, params = nnx.split(scheme)
  params['c'] = params['c'].replace(c)
  return nnx.merge(graphdef, params)


def test_B13():
  """Gates of 1/2 count 3.0, 2.5 ... 0.5; later tokens change nothing; the count ends at the table's last row."""
  scheme = build('cope(npos_max=6)', heads=1, head_dim=8, train_len=10)
  scheme.table[...] = jnp.broadcast_to(jnp.arange(6.0)[:, None], (6, 8))  # q . e[p] / 8 is p for q of ones
  at = jnp.arange(6.0)
  hidden = jnp.where(at <= at[:, None], 0.0, -1e30)[None, None]  # logits of zero content
  queries = jnp.full((1, 6, 1, 8), 1 / 8)
  scores, count = scheme.score(hidden, queries, queries, at, at, (), (), jnp.zeros((1, 1, 6)))
  np.testing.assert_allclose(scores[0, 0, 5], [3.0, 2.5, 2.0, 1.5, 1.0, 0.5], rtol=1e-6)
  np.testing.assert_allclose(count[0, 0], (np.arange(6) + 1) / 2, rtol=1e-6)
  q, k, v, _ = arrays(kv=1, length=320)  # 32 times the training length
  q, pos = q[:, :, :1], plain(scheme, 320)
  tiled = jit(lambda k, v: attend(q, k, v, scheme, pos, tile=64))
  o, changed, later = tiled(k, v), tiled(k, v.at[:, 200:].add(1)), tiled(k.at[:, 200:].add(1), v)
  assert np.isfinite(o).all()
  for other in (changed, later):
    np.testing.assert_array_equal(o[:, :200], other[:, :200])
    assert not np.array_equal(o[:, 200:], other[:, 200:])
  many = jnp.zeros((1, 1, 1, 320))  # 320 gates of 1/2
  row, _ = scheme.score(many, queries[:, :1], queries, jnp.asarray([319.0]), jnp.arange(320.0), (), (),
                        jnp.zeros((1, 1, 1)))  # fmt: skip
  assert float(row.max()) == pytest.approx(5.0) and np.isfinite(row).all()


def test_B14():
  """Rows and columns turn different halves, a score depends on both differences alone, and 62 channels are refused."""
  scheme = build('rope2d(width=10)', head_dim=64, train_len=100)
  pos = posenc.positions('none', scheme, 100, 100)
  q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 64))
  q, k = scheme.rotate(*(jnp.broadcast_to(x, (1, 100, 1, 64)) for x in (q, k)), pos)
  scores = np.einsum('tH,sH->ts', q[0, :, 0], k[0, :, 0]).reshape(10, 10, 10, 10)
  a = scores[3, 4, 1, 1]
  for rows, columns in ((5, 0), (0, 5), (5, 5)):
    assert scores[3 + rows, 4 + columns, 1 + rows, 1 + columns] == pytest.approx(a, abs=1e-4)
  for other in ((4, 4, 1, 1), (3, 5, 1, 1), (4, 3, 1, 1)):  # a row further, a column further, rows for columns
    assert abs(scores[other] - a) > 0.01
  moved = np.abs(np.asarray(q[0, 10, 0] - q[0, 0, 0])), np.abs(np.asarray(q[0, 1, 0] - q[0, 0, 0]))
  for one, other in (moved, moved[::-1]):  # one row on, one column on: each turns the channels that the other leaves
    assert ((one > 1e-6) != (other > 1e-6)).all()
  with refused(SpecError, 'rope2d: head_dim = 62: a multiple of 4 is allowed'):
    build('rope2d(width=10)', head_dim=62)

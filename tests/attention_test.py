"""`attend` against attention written out densely, for every hook a scheme can override."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from forms import SPEC, jit
from models.attention import attend
from models.tiles import MASKED, Masks, Side, Where, _walk, attend_tiles
from posenc import SCHEMES, Far, PositionScheme, PosParam
from posenc.base import Dims
from posenc.t5 import T5

B, T, N, K, H = 2, 25, 4, 2, 8
DIMS = Dims(heads=N, head_dim=H, d_model=N * H, train_len=10)


def arrays(seed=0, kv=K, length=T):
  keys = jax.random.split(jax.random.key(seed), 4)
  shapes = ((B, length, N, H), (B, length, kv, H), (B, length, kv, H), (B, length, N, H))
  return [jax.random.normal(key, shape) for key, shape in zip(keys, shapes)]


class Counting(PositionScheme):
  """Runs a carry along the row, as CoPE does: a bias times the sum of gates from the key to the query."""

  def __init__(self):
    super().__init__(DIMS, nnx.Rngs(0))
    self.weight = PosParam(jnp.asarray([0.3, -0.2, 0.1, 0.5]))

  def init_carry(self, q_BtNR):
    return jnp.zeros((q_BtNR.shape[0], N, q_BtNR.shape[1]))

  def score(self, logits, q, k, at_t, at_s, state_t, state_s, carry):
    gates = jax.nn.sigmoid(logits)
    counts = jnp.cumsum(gates[..., ::-1], -1)[..., ::-1] + carry[..., None]
    return logits + self.weight[...][:, None, None] * counts, carry + gates.sum(-1)


class Forgetting(PositionScheme):
  """Reads numbers per token, as FoX does: c_i - c_j of a cumulative log gate."""

  def __init__(self):
    super().__init__(DIMS, nnx.Rngs(0))

  def score(self, logits, q, k, at_t, at_s, state_t, state_s, carry):
    c_BNt, c_BNs = (jnp.moveaxis(s, -1, 1) for s in (state_t, state_s))
    return logits + c_BNt[..., None] - c_BNs[:, :, None, :], carry


class Table(PositionScheme):
  """Reads q and adds to the values, as Shaw does: a table over clipped distances."""

  def __init__(self):
    super().__init__(DIMS, nnx.Rngs(0))
    self.keys = PosParam(jax.random.normal(jax.random.key(7), (5, H)))
    self.added = PosParam(jax.random.normal(jax.random.key(8), (5, H)))

  def _index(self, at_t, at_s):
    return jnp.clip(at_t[:, None] - at_s[None, :], 0, 4).astype(jnp.int32)

  def score(self, logits, q, k, at_t, at_s, state_t, state_s, carry):
    return logits + jnp.einsum('BtNH,tsH->BNts', q, self.keys[...][self._index(at_t, at_s)]), carry

  def values(self, p_BNts, at_t, at_s):
    return jnp.einsum('BNts,tsH->BNtH', p_BNts, self.added[...][self._index(at_t, at_s)])


def dense(q, k, v, scheme, pos, state=()):
  """Softmax attention over whole T x T matrices with repeated kv heads; shares no line with `attend`."""
  n, kv = q.shape[2], k.shape[2]

  def turned(at_q, at_k):
    qr = scheme.rotate(q, k, pos.replace(at_T=at_q))[0] * scheme.query_scale(pos)[..., None]
    kr = scheme.rotate(q, k, pos.replace(at_T=at_k))[1] * pos.key_scale_T[:, None, None]
    logits = jnp.einsum('BtNH,BsNH->BNts', qr, jnp.repeat(kr, n // kv, 2))
    logits = jnp.where(visible, logits, MASKED)
    return scheme.score(logits, qr, kr, at_q, at_k, state, state, scheme.init_carry(qr))[0]

  i = jnp.arange(q.shape[1])
  back = i[:, None] - i[None, :]
  visible = (back >= 0) & ((back < pos.window_T[:, None]) | (i[None, :] < pos.sinks))
  logits = turned(pos.at_T, pos.at_T)
  if pos.far is not None:
    logits = jnp.where(back < pos.far.threshold, logits, turned(pos.far.at_q_T, pos.far.at_k_T))
  p = jax.nn.softmax(jnp.where(visible, logits, -jnp.inf), -1)
  o = jnp.einsum('BNts,BsNH->BtNH', p, jnp.repeat(v, n // kv, 2))
  if pos.far is None:
    added = scheme.values(p, pos.at_T, pos.at_T)
  else:
    # One query and key at a time would do; by where the pair's logit came from.
    near = back < pos.far.threshold
    added = scheme.values(p * near, pos.at_T, pos.at_T)
    if added is not None:
      added += scheme.values(p * ~near, pos.far.at_q_T, pos.far.at_k_T)
  return o if added is None else o + jnp.swapaxes(added, 1, 2)


def plain(scheme, length=T, method='none'):
  return posenc.positions(method, scheme, DIMS.train_len, length)


@functools.cache
def gradients(attention, graphdef, tile):
  """One program for all positions: most of these tests differ in nothing else."""
  tiles = {} if attention is dense else {'tile': tile}

  def loss(q, k, v, state, params, pos, do):
    o = attention(q, k, v, nnx.merge(graphdef, params), pos, state, **tiles)
    return (o * do).sum(), o

  return jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))


def one(attention, scheme, pos, state=(), tile=8, kv=K):
  """Gradients with respect to q, k, v, state and parameters, and values."""
  q, k, v, do = arrays(kv=kv)
  graphdef, params = nnx.split(scheme)
  return gradients(attention, graphdef, tile)(q, k, v, state, params, pos, do)


def both(scheme, pos, state=(), tile=8, kv=K):
  """The same through `attend` and through `dense`."""
  return [one(attention, scheme, pos, state, tile, kv) for attention in (attend, dense)]


def assert_same(got, want, atol=2e-5):
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for a, b in zip(got, want):
    np.testing.assert_allclose(a, b, atol=atol * max(1.0, float(jnp.abs(b).max())))


def shipped(form):
  """A scheme of the catalogue with its zeros drawn, so that every part matters."""
  scheme = posenc.build(form, **DIMS._asdict(), rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(scheme)
  drawn = jax.tree.map(lambda a: a if a.any() else jax.random.normal(jax.random.key(6), a.shape), params)
  return nnx.merge(graphdef, drawn)


FORGET_STATE = jnp.cumsum(-jnp.abs(jax.random.normal(jax.random.key(5), (B, T, N))), 1)
HAND_MADE = {'carry': (Counting, ()), 'state': (Forgetting, FORGET_STATE), 'values': (Table, ())}


def made(name):
  """(scheme, its numbers per token) of a hand-made one above or of the catalogue."""
  if name in HAND_MADE:
    make, state = HAND_MADE[name]
    return make(), state
  scheme = shipped(name)
  x_BTD = jax.random.normal(jax.random.key(5), (B, T, DIMS.d_model))
  return scheme, scheme.token_state(x_BTD, plain(scheme))


SLOW = pytest.mark.slow
# A table has no position for the last tokens, and what it adds to the embeddings is no matter here.
EVERY = [*HAND_MADE, *(SPEC.get(name, name) for name in SCHEMES if name != 'learned')]


@pytest.mark.parametrize('kv, tile', [
  pytest.param(K, 8, id='gqa-tiled'),
  pytest.param(N, 32, id='mha-dense'),
  pytest.param(K, 32, id='gqa-dense', marks=SLOW),
  pytest.param(N, 8, id='mha-tiled', marks=SLOW),
])  # fmt: skip
@pytest.mark.parametrize('name', EVERY)
def test_equals_dense_in_values_and_gradients(name, kv, tile):
  """In three tiles and one token, or in one tile: with respect to q, k, v, state and every parameter."""
  scheme, state = made(name)
  (grads, values), (want_grads, want_values) = both(scheme, plain(scheme), state, tile, kv)
  np.testing.assert_allclose(values, want_values, atol=1e-5)
  assert_same(grads, want_grads)


@pytest.mark.parametrize('tile, lasts', [(8, (3, 11, T)), (32, (5,))])
@pytest.mark.parametrize('name', EVERY)
def test_the_last_queries_alone(name, tile, lasts):
  """As in company: less than a tile, more than one, all, and in one tile of everything."""
  scheme, state = made(name)
  q, k, v, _ = arrays()
  attention = functools.partial(attend, q, k, v, scheme, plain(scheme), state, tile=tile)
  company = jit(attention)()
  for last in lasts:
    alone = jit(functools.partial(attention, last=last))()
    assert alone.shape == (B, last, N, H)
    np.testing.assert_allclose(alone, company[:, -last:], atol=1e-5)


@pytest.mark.parametrize('last', [3, 11])
def test_the_last_queries_alone_see_their_own_window_and_map(last):
  scheme = made('rope')[0]
  q, k, v, _ = arrays()
  far = Far(jnp.arange(T) // 5 * 1.0, jnp.arange(T) // 5 * 1.0, jnp.float32(6))
  uneven_T = jnp.asarray(np.random.default_rng(0).permutation(T) + 1.0, jnp.float32)
  for pos in (plain(scheme).replace(window_T=uneven_T, sinks=jnp.float32(3)), plain(scheme).replace(far=far)):
    attention = functools.partial(attend, q, k, v, scheme, pos, tile=8)
    alone = jit(functools.partial(attention, last=last))()
    np.testing.assert_allclose(alone, jit(attention)()[:, -last:], atol=1e-5)


@pytest.mark.parametrize('step', [1.0, 0.5])
@pytest.mark.parametrize(
  'form',
  [
    'shaw(clip=10)', 'shaw(clip=3, use_values=False)', 'cope(npos_max=3)', 'cope(npos_max=9)',
    't5(num_buckets=8, max_distance=6)', 't5(num_buckets=8, max_distance=10)',
  ],
)  # fmt: skip
def test_what_is_settled_far_away_is_not_looked_up(form, step):
  """Tiles in which Shaw's distances are all clipped, CoPE has counted to the end, or T5 is in its last bucket, take
  another way to the same; so many positions apart, not tokens."""
  scheme, state = made(form)
  pos = plain(scheme)
  (grads, values), (want_grads, want_values) = both(scheme, pos.replace(at_T=step * pos.at_T), state, 4)
  np.testing.assert_allclose(values, want_values, atol=1e-5)
  assert_same(grads, want_grads)


def test_a_level_speaks_for_its_own_bias_only():
  class Halved(T5):
    def of(self, distance):
      return super().of(distance) / 2

  dims = posenc.Dims(N, H, N * H, 10)
  scheme = Halved(dims, nnx.Rngs(0), num_buckets=4, max_distance=5)
  assert scheme.level() is not None and scheme.level_in_force() is None
  assert_same(*both(scheme, plain(scheme), tile=4))


def test_order_is_known_from_the_mask_alone():
  """Why the field exists: attention without positions and mask does not see the order of its tokens."""
  q, k, v, _ = arrays(kv=N)
  scheme = PositionScheme(DIMS, nnx.Rngs(0))
  shuffled = np.random.default_rng(0).permutation(T)
  inverse = np.argsort(shuffled)

  def unmasked(q, k, v):
    p = jax.nn.softmax(jnp.einsum('BtNH,BsNH->BNts', q, k) * scheme.q_scale, -1)
    return jnp.einsum('BNts,BsNH->BtNH', p, v)

  def causal(q, k, v):
    return attend(q, k, v, scheme, plain(scheme), tile=8)

  for attention, equivariant in ((unmasked, True), (causal, False)):
    back = attention(q[:, shuffled], k[:, shuffled], v[:, shuffled])[:, inverse]
    difference = float(jnp.abs(back - attention(q, k, v)).max())
    assert difference < 1e-5 if equivariant else difference > 0.1


@pytest.mark.parametrize('name', ['rope', 'carry', 'values'])
@pytest.mark.parametrize('kv', [1, 2, 4])
def test_gqa_is_mha_with_repeated_heads(name, kv):
  """`dense` repeats k and v head by head: query head n must read key head n // G, not n % K."""
  scheme = made(name)[0]
  assert_same(*both(scheme, plain(scheme), kv=kv))


def test_a_scheme_cannot_unmask():
  """One that computes its logits anew still sees no later token: equal logits give the mean of what came before."""

  class Anew(PositionScheme):
    def score(self, logits, q, k, at_t, at_s, state_t, state_s, carry):
      return jnp.zeros_like(logits), carry

  q, k, v, _ = arrays()
  o = attend(q, k, v, Anew(DIMS, nnx.Rngs(0)), plain(PositionScheme(DIMS, nnx.Rngs(0))), tile=8)
  mean = jnp.cumsum(jnp.repeat(v, N // K, 2), 1) / jnp.arange(1, T + 1)[:, None, None]
  np.testing.assert_allclose(o, mean, atol=1e-5)


@pytest.mark.parametrize('window, sinks', [(1, 0), (5, 0), (8, 0), (9, 3), (5, 9), (np.inf, 3), (100, 0), (3, 20)])
@pytest.mark.parametrize('name', ['rope', 'carry'])
def test_windows_and_sinks(name, window, sinks):
  """W keys including self, and the first keys besides; tiles outside are skipped, so every border is a case."""
  scheme = made(name)[0]
  pos = plain(scheme).replace(window_T=jnp.full(T, float(window)), sinks=jnp.float32(sinks))
  if name == 'carry':
    # A skipped tile is a masked tile only for a scheme whose masked gates are 0, which Counting's are.
    assert float(jax.nn.sigmoid(jnp.float32(MASKED))) == 0
  assert_same(*both(scheme, pos))


def test_a_window_of_its_own_for_each_query():
  """Blockwise causal attention: its own block of 10 and the one before. Tiles of 8 straddle the blocks."""
  scheme = made('rope')[0]
  pos = plain(scheme).replace(window_T=jnp.arange(T) % 10 + 11.0)
  assert_same(*both(scheme, pos))
  uneven = pos.replace(window_T=jnp.asarray(np.random.default_rng(0).permutation(T) + 1.0, jnp.float32))
  assert_same(*both(scheme, uneven))


def test_scales_multiply_content_and_never_a_bias():
  """Per-query and per-key factors go on q and k; ALiBi's bias stays what it is."""
  scheme = posenc.ALiBi(DIMS, nnx.Rngs(0))
  scale = jnp.linspace(0.5, 2, T)
  pos = plain(scheme).replace(logit_scale_T=scale, key_scale_T=scale[::-1])
  assert_same(*both(scheme, pos))
  zero = plain(scheme).replace(logit_scale_T=jnp.zeros(T))
  q, k, v, _ = arrays()
  o = attend(q, k, v, scheme, zero, tile=8)
  bias = scheme.bias(zero.at_T, zero.at_T)
  p = jax.nn.softmax(jnp.where(jnp.tri(T) > 0, bias, -jnp.inf), -1)
  np.testing.assert_allclose(o, jnp.einsum('Nts,BsNH->BtNH', p, jnp.repeat(v, N // K, 2)), atol=1e-6)


@pytest.mark.parametrize('name', ['rope', 'pope', 'alibi', 't5', 'values'])
def test_second_position_map(name):
  """`far`: the two rotations, and for a bias the two distances, chosen by tokens between: rectified at 6, or grouped.

  Grouped by 5, distances of 6 and more become 1 to 4, which `Table`, clipped at 4, tells from one another.
  """
  scheme, group_T = made(name)[0], jnp.arange(T) // 5 * 1.0
  for at_q_T, at_k_T in ((jnp.full(T, 6.0), jnp.zeros(T)), (group_T, group_T)):
    assert_same(*both(scheme, plain(scheme).replace(far=Far(at_q_T, at_k_T, jnp.float32(6)))))


def test_second_position_map_beyond_reach_changes_nothing():
  scheme = posenc.RoPE(DIMS, nnx.Rngs(0))
  q, k, v, _ = arrays()
  far = Far(jnp.full(T, 6.0), jnp.zeros(T), jnp.float32(T))
  plain_o = attend(q, k, v, scheme, plain(scheme), tile=8)
  np.testing.assert_array_equal(attend(q, k, v, scheme, plain(scheme).replace(far=far), tile=8), plain_o)


@pytest.mark.parametrize('window', [np.inf, 3])
@pytest.mark.parametrize(
  'name, leftwards', [('rope', True), ('carry', True), ('values', True), ('rope', False), ('values', False)]
)
def test_blocks_of_keys_one_after_the_other(name, leftwards, window):
  """The inner form: a block of queries sees blocks of keys, from its own leftwards, as a ring or chunked pass does.

  In any order where no carry runs along the row, also if a query sees nothing of the first blocks.
  """
  scheme = made(name)[0]
  length, block, tile = 24, 8, 4
  q, k, v, _ = arrays(length=length)
  pos = plain(scheme, length).replace(window_T=jnp.full(length, float(window)))
  whole = attend(q, k, v, scheme, pos, tile=tile)
  qr, kr = scheme.rotate(q, k, pos)
  qr = jnp.moveaxis((qr * scheme.q_scale).reshape(B, length, K, N // K, H), 1, 3)
  kr, vr = jnp.moveaxis(kr, 1, 2), jnp.moveaxis(v, 1, 2)
  masks = Masks(pos.sinks, None)
  where = Where(jnp.arange(length), pos.at_T, None, pos.window_T)
  cut = lambda i: slice(i * block, (i + 1) * block)  # noqa: E731
  for i in range(length // block):
    running = None
    for j in sorted(range(i + 1), reverse=leftwards):
      running = attend_tiles(
        scheme,
        Side(qr[..., cut(i), :], None, ()),
        Side(kr[..., cut(j), :], None, ()),
        vr[..., cut(j), :],
        Where(where.token_T[cut(i)], where.at_T[cut(i)], None, where.reach_T[cut(i)]),
        Where(where.token_T[cut(j)], where.at_T[cut(j)], None, None),
        masks,
        running,
        tile=tile,
      )
    o = jnp.swapaxes(running.o_BNTH / running.l_BNT[..., None], 1, 2)
    np.testing.assert_allclose(o, whole[:, cut(i)], atol=2e-6)


@pytest.mark.parametrize('first, window, sinks, want', [
  (24, np.inf, 0, [3, 2, 1, 0]),
  (0, np.inf, 0, [0]),
  (24, 8, 0, [3, 2]),
  (24, 1, 0, [3]),
  (24, 9, 0, [3, 2]),
  (24, 10, 0, [3, 2, 1]),
  (24, 1, 3, [3, 0]),
  (24, 1, 17, [3, 2, 1, 0]),
  (24, 17, 9, [3, 2, 1, 0]),
])  # fmt: skip
def test_tiles_visited(first, window, sinks, want):
  """Never right of the diagonal, never outside the window: that is where the speed of a window comes from."""
  token_t = first + jnp.arange(8)
  at_t = Where(token_t, token_t.astype(jnp.float32), None, jnp.full(8, float(window)))
  walk = _walk(at_t, jnp.int32(0), Masks(jnp.float32(sinks), None), 8, 5)
  assert [int(walk.tile(jnp.int32(i))) for i in range(int(walk.count))] == want


def test_memory_is_linear_in_length():
  """Bytes XLA reserves, forward and backward: 4x the length costs about 4x, where T x T would cost 16x."""
  scheme = posenc.ALiBi(DIMS, nnx.Rngs(0))

  def temporary(length):
    q, k, v, do = (jax.ShapeDtypeStruct((1, length, heads, H), jnp.float32) for heads in (N, K, K, N))
    pos = plain(scheme, length)
    loss = lambda q, k, v, do: (attend(q, k, v, scheme, pos, tile=64) * do).sum()  # noqa: E731
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v, do).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  assert temporary(2048) < 6 * temporary(512)


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
def test_low_precision_is_finite_and_near(dtype):
  """Logits, softmax and sums stay in float32; a masked logit does not overflow float16."""
  scheme = posenc.ALiBi(DIMS, nnx.Rngs(0))
  q, k, v, do = (a.astype(dtype) for a in arrays())
  pos = plain(scheme)
  loss = lambda q, k, v: (attend(q, k, v, scheme, pos, tile=8) * do).astype(jnp.float32).sum()  # noqa: E731
  grads = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)
  assert all(bool(jnp.isfinite(g).all()) and g.dtype == dtype for g in grads)
  exact = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(*(a.astype(jnp.float32) for a in (q, k, v)))
  for a, b in zip(grads, exact):
    assert float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) < 0.02
  o = attend(q, k, v, scheme, pos, tile=8)
  want = attend(*(a.astype(jnp.float32) for a in (q, k, v)), scheme, pos, tile=8)
  assert o.dtype == dtype
  np.testing.assert_allclose(o.astype(jnp.float32), want, atol=0.03)


def test_logits_are_not_rounded():
  """512 + j over sqrt(4), of bfloat16 queries and keys that are exact: in bfloat16 four keys would share a logit."""
  scheme = PositionScheme(DIMS._replace(heads=1, head_dim=4), nnx.Rngs(0))
  j = jnp.arange(8.0)
  q = jnp.tile(jnp.array([32.0, 1, 0, 0]), (8, 1))
  k = jnp.stack([16 + 0 * j, j, 0 * j, 0 * j], -1)
  q, k, unit = (x.astype(jnp.bfloat16)[None, :, None] for x in (q, k, jnp.eye(8)))
  weights = attend(q, k, unit, scheme, plain(scheme, 8), tile=4)[0, -1, 0]
  np.testing.assert_allclose(weights.astype(jnp.float32), jax.nn.softmax(j / 2), rtol=2**-7)


def test_refuses_what_does_not_fit():
  scheme = PositionScheme(DIMS, nnx.Rngs(0))
  q, k, v, _ = arrays(kv=3)
  with pytest.raises(ValueError, match='4 query heads over 3 key/value heads'):
    attend(q, k, v, scheme, plain(scheme), tile=8)
  q, k, v, _ = arrays()
  with pytest.raises(ValueError, match='positions for 7 tokens, queries for 25'):
    attend(q, k, v, scheme, plain(scheme, 7), tile=8)


@pytest.mark.parametrize('text', ['rope', 't5', 'cope', 'fox', 'shaw', 'rope(window=70)'])
def test_causal_rows_of_the_dense_path_change_nothing(text, monkeypatch):
  """128 tokens in one tile are two rows of queries; values and all gradients are those of one square."""
  from benchmarks.build import attention as both_ways
  from models import attention

  assert attention._causal_rows(128, 128) == 2 and attention._causal_rows(512, 512) == 4
  assert attention._causal_rows(96, 96) == attention._causal_rows(512, 128) == 1
  sizes = {'batch': 1, 'length': 128, 'heads': 2, 'head_dim': 8, 'tile': 128}
  f, arguments = both_ways(text, **sizes, backward=True)
  rows = jax.jit(f)(*arguments)
  monkeypatch.setattr(attention, '_causal_rows', lambda *_: 1)
  f, arguments = both_ways(text, **sizes, backward=True)
  for got, want in zip(jax.tree.leaves(rows), jax.tree.leaves(jax.jit(f)(*arguments))):
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6 * float(jnp.abs(want).max()))


def test_the_tile_follows_the_length(monkeypatch):
  from models import attention

  assert [attention.choose_tile(n) for n in (64, 512, 513, 32768)] == [512, 512, 256, 256]
  monkeypatch.setattr(jax, 'default_backend', lambda: 'gpu')
  assert attention.choose_tile(64) == 1024

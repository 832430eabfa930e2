"""Causal attention under a position scheme: `attend`, which cuts a sequence for the tiles or sends it around a mesh.

Axis letters as in `models/tiles.py`.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from models import kernels
from models.ring import BATCH, CONTEXT, Ring, lies
from models.tiles import (
  BEHIND,
  Masks,
  Running,
  Side,
  Statistics,
  Where,
  attend_tiles,
  cut,
  cut_side,
  cut_where,
  loop,
  merge_heads,
  pull_tiles,
  start_running,
  statistics_tiles,
  zeros,
)
from posenc import Positions, PositionScheme


def choose_tile(length: int) -> int:
  """Queries and keys per tile where nobody says otherwise: everything at once up to 512 tokens, else tiles of 256.

  By measurement on CPUs (docs/PERFORMANCE.md): at 8192 tokens 128 takes 1.08 times as long as 256, 512 takes 1.07, 1024
  takes 1.35. On a GPU or TPU, where nothing has been measured, larger products pay: 1024.
  """
  if jax.default_backend() != 'cpu':
    return 1024
  return 512 if length <= 512 else 256


def _causal_rows(length: int, tile: int) -> int:
  """Into how many rows of queries one tile of everything is cut, each before the keys that it can see.

  Four skip 3/8 of the square at no loop's cost; below 64 queries a row's products are too small to be worth it. Longer
  inputs walk tiles, which skip by themselves.
  """
  if length > tile:
    return 1
  return max(rows for rows in (1, 2, 4) if rows == 1 or (length % rows == 0 and length // rows >= 64))


class Row(NamedTuple):
  """Some queries, tokens `start` .. `end` - 1, and the keys before `end`."""

  start: int
  end: int
  q: Side
  k: Side
  v_BKsH: jax.Array
  at_q: Where
  at_k: Where


def _dense(tile: int, q: Side, k: Side, v_BKTH: jax.Array, at_q: Where, at_k: Where) -> Iterator[Row]:
  """`_causal_rows`; of a longer input, or where only the last queries are asked for, the one row is everything."""
  length = v_BKTH.shape[-2]
  if q.x.shape[-2] < length:
    yield Row(0, length, q, k, v_BKTH, at_q, at_k)
    return
  size = length // _causal_rows(length, tile)
  for start in range(0, length, size):
    end = start + size
    queries, keys = cut_side(q, start, size), cut_side(k, 0, end)
    yield Row(start, end, queries, keys, cut(v_BKTH, 0, end, -2), cut_where(at_q, start, size), cut_where(at_k, 0, end))


def _cut_sums(sums: tuple[Side, jax.Array], start: jax.Array | int, size: int) -> tuple[Side, jax.Array]:
  """Of the gradients of keys and values, those of `size` tokens."""
  dk, dv_BKTH = sums
  return cut_side(dk, start, size), cut(dv_BKTH, start, size, -2)


def _put_sums(sums: tuple[Side, jax.Array], part: Any, start: jax.Array | int) -> tuple[Side, jax.Array]:
  """The inverse of `_cut_sums`."""

  def put(whole, part, axis):
    return jax.tree.map(lambda w, p: jax.lax.dynamic_update_slice_in_dim(w, p, start, axis % w.ndim), whole, part)

  (dk, dv_BKTH), (dk_s, dv_BKsH) = sums, part
  dk = Side(put(dk.x, dk_s.x, -2), put(dk.far, dk_s.far, -2), put(dk.state, dk_s.state, 1))
  return dk, put(dv_BKTH, dv_BKsH, -2)


def _join(parts: Sequence[Side]) -> Side:
  def join(axis):
    return lambda *leaves: jax.tree.map(lambda *a: jnp.concatenate(a, axis), *leaves)

  x, far, state = zip(*parts)
  return Side(join(-2)(*x), join(-2)(*far), join(1)(*state))


def _blocks(ring: Ring, k: Side, v_BKTH: jax.Array, at_k: Where):
  """block(c): the keys of chunk c, which begins at token `at_k.token_T[0]` of its own."""
  size = v_BKTH.shape[-2] // ring.chunks
  return lambda c: (
    cut_side(k, c * size, size),
    cut(v_BKTH, c * size, size, -2),
    cut_where(at_k, c * size, size),
  ), size


def _seen(graphdef, tile, ring, params, q, k, v_BKTH, at_q, at_k, masks):
  """o, the log-sum-exp and, in a ring, the carries that each block of keys began with, [n, B, N, T]."""
  scheme, begun = nnx.merge(graphdef, params), None
  if ring is None or ring.size == 1:
    rows = [
      attend_tiles(scheme, r.q, r.k, r.v_BKsH, r.at_q, r.at_k, masks, None, tile=min(tile, r.end))
      for r in _dense(tile, q, k, v_BKTH, at_q, at_k)
    ]
    seen = Running(*(jax.tree.map(lambda *parts: jnp.concatenate(parts, 2), *parts) for parts in zip(*rows)))
  else:

    def visit(running, block):
      keys, _ = _blocks(ring, *block)

      def add(c, running):
        k_c, v_c, at_c = keys(ring.chunks - 1 - c)
        return attend_tiles(scheme, q, k_c, v_c, at_q, at_c, masks, running, tile=tile)

      return loop(ring.chunks, ring.chunks, add, running), running.carry

    seen, begun = ring.leftwards(visit, start_running(scheme, q, v_BKTH.shape[-1]), (k, v_BKTH, at_k))
  return seen.o_BNTH / seen.l_BNT[..., None], seen.m_BNT + jnp.log(seen.l_BNT), begun


def _pulled(graphdef, tile, ring, saved, do_BNTH):
  """Gradients of `_seen`'s o; of the parameters, [1, ...], this device's share."""
  params, q, k, v_BKTH, at_q, at_k, masks, o_BNTH, lse_BNT, begun = saved
  do_BNTH = do_BNTH.astype(jnp.float32)
  delta_BNT = (do_BNTH * o_BNTH).sum(-1)
  pull = functools.partial(pull_tiles, graphdef, params)
  # Sums over tiles are kept in float32 whatever the compute dtype.
  dparams, sums = jax.tree.map(jnp.zeros_like, params), (zeros(k), zeros(v_BKTH))
  if ring is None or ring.size == 1:
    dqs = []
    for r in _dense(tile, q, k, v_BKTH, at_q, at_k):
      do, lse, delta = (cut(a, r.start, r.end - r.start, 2) for a in (do_BNTH, lse_BNT, delta_BNT))
      begun_r = (dparams, *_cut_sums(sums, 0, r.end))
      (dparams, *part), dq_r, _ = pull(
        r.q, r.k, r.v_BKsH, r.at_q, r.at_k, masks, do, lse, delta, None, begun_r, tile=min(tile, r.end)
      )
      sums, dqs = _put_sums(sums, part, 0), [*dqs, dq_r]
    (dk, dv), dq = sums, _join(dqs)
  else:

    def visit(seen, block, sums, carry):
      keys, size = _blocks(ring, *block)

      def one(c, both):
        (dparams, dq, dcarry), sums = both
        k_c, v_c, at_c = keys(c)
        (dparams, *part), dq_c, dcarry = pull(
          q, k_c, v_c, at_q, at_c, masks, do_BNTH, lse_BNT, delta_BNT, (carry, dcarry),
          (dparams, *_cut_sums(sums, c * size, size)), tile=tile,
        )  # fmt: skip
        return (dparams, jax.tree.map(jnp.add, dq, dq_c), dcarry), _put_sums(sums, part, c * size)

      return loop(ring.chunks, ring.chunks, one, (seen, sums))

    seen = (dparams, zeros(q), jax.tree.map(lambda a: jnp.zeros_like(a[0]), begun))
    (dparams, dq, _), (dk, dv) = ring.rightwards(visit, seen, (k, v_BKTH, at_k), sums, begun)

  def like(grad, x):
    return jax.tree.map(lambda g, a: g.astype(a.dtype), grad, x)

  return jax.tree.map(lambda a: a[None], dparams), like(dq, q), like(dk, k), like(dv, v_BKTH)


# Where the arguments of `_attention` lie on a mesh: parameters and masks whole, the rest by batch and length.
_WHOLE, _PER_TOKEN, _PER_DEVICE = PartitionSpec(), PartitionSpec(CONTEXT), PartitionSpec((*BATCH, CONTEXT))
_PER_QUERY = _PER_KEY = PartitionSpec(BATCH, None, CONTEXT)  # [B, N or K, T, ...]
_STATE = PartitionSpec(BATCH, CONTEXT)
_Q: Any = Side(*[PartitionSpec(BATCH, None, None, CONTEXT)] * 2, _STATE)  # pyrefly: ignore
_K: Any = Side(_PER_KEY, _PER_KEY, _STATE)  # pyrefly: ignore
_ARGUMENTS = (_WHOLE, _Q, _K, _PER_KEY, _PER_TOKEN, _PER_TOKEN, _WHOLE)
_SEEN = (_PER_QUERY, _PER_QUERY, PartitionSpec(None, BATCH, None, CONTEXT))


def _everywhere(ring: Ring | None, f, in_specs, out_specs):
  """`f` on every device with its own parts; itself without a mesh."""
  return f if ring is None else ring.everywhere(f, in_specs, out_specs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(graphdef, tile, ring, params, q, k, v_BKTH, at_q, at_k, masks):
  return _forward(graphdef, tile, ring, params, q, k, v_BKTH, at_q, at_k, masks)[0]


def _forward(graphdef, tile, ring, *arguments):
  seen = functools.partial(_seen, graphdef, tile, ring)
  o_BNTH, lse_BNT, begun = _everywhere(ring, seen, _ARGUMENTS, _SEEN)(*arguments)
  return o_BNTH, (*arguments, o_BNTH, lse_BNT, begun)


def _backward(graphdef, tile, ring, saved, do_BNTH):
  pulled = functools.partial(_pulled, graphdef, tile, ring)
  specs = (*_ARGUMENTS, *_SEEN), _PER_QUERY
  dparams, *rest = _everywhere(ring, pulled, specs, (_PER_DEVICE, _Q, _K, _PER_KEY))(saved, do_BNTH)
  # Summed once, not in the loops over tiles, where XLA would put it.
  dparams = jax.tree.map(lambda a: a[0] if ring is None else a.sum(0), dparams)
  return dparams, *rest, None, None, None


_attention.defvjp(_forward, _backward)


def _ring(scheme: PositionScheme, mesh: Mesh | None, length: int, kv: int, tile: int) -> tuple[Ring | None, int]:
  """How sequence or heads lie on `mesh`, and the tile: a chunk of the sequence at most.

  Heads where the devices of `context` divide them: no device waits for another between the first tile and the last, and
  each holds as little as in a ring. Two cores walk 8192 tokens in 0.87 of the ring's time (docs/PERFORMANCE.md).
  """
  if mesh is None or mesh.size == 1:
    return None, min(tile, length)
  if mesh.shape[CONTEXT] > 1 and kv % mesh.shape[CONTEXT] == 0:
    tile = min(tile, length)
    return Ring(mesh, pad=-length % tile, heads=True), tile
  block = length // mesh.shape[CONTEXT]
  q_BtNR = jax.ShapeDtypeStruct((1, 1, scheme.dims.heads, 1), jnp.float32)
  runs_along = bool(jax.tree.leaves(jax.eval_shape(scheme.init_carry, q_BtNR)))
  chunks = 2 if mesh.shape[CONTEXT] > 1 and block % 2 == 0 and not runs_along else 1
  tile = min(tile, block // chunks)
  return Ring(mesh, chunks, pad=-(block // chunks) % tile), tile


def _padded(x: jax.Array, axis: int, pad: int) -> jax.Array:
  if not pad:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, pad)
  return jnp.pad(x, widths, mode='edge')


def _sides(
  q_BTNH: jax.Array, k_BTKH: jax.Array, scheme: PositionScheme, pos: Positions, state: Any, pad: int
) -> tuple[Side, Side, Where, Where, Masks]:
  """What tiles read: queries and keys as seen from their positions and scaled, `pad` tokens longer."""
  b, length, n, _ = q_BTNH.shape
  kv = k_BTKH.shape[2]
  scale_TN = scheme.query_scale(pos)

  def turned(pos_q, pos_k):
    q, k = scheme.rotate(q_BTNH, k_BTKH, pos_q)
    if pos_k is not pos_q:
      _, k = scheme.rotate(q_BTNH, k_BTKH, pos_k)
    q = (q * scale_TN[:, :, None]).astype(q_BTNH.dtype).reshape(b, length, kv, n // kv, -1)
    k = (k * pos.key_scale_T[:, None, None]).astype(k_BTKH.dtype)
    return _padded(jnp.moveaxis(q, 1, 3), -2, pad), _padded(jnp.moveaxis(k, 1, 2), -2, pad)

  q, k = turned(pos, pos)
  q_far = k_far = far_q = far_k = threshold = None
  if pos.far is not None:
    q_far, k_far = turned(*pos.afar())
    far_q, far_k = _padded(pos.far.at_q_T, 0, pad), _padded(pos.far.at_k_T, 0, pad)
    threshold = pos.far.threshold
  long_state = jax.tree.map(lambda a: _padded(a, 1, pad), state)
  token_T = jnp.arange(length + pad, dtype=jnp.int32)
  at_T = _padded(pos.at_T, 0, pad)
  return (
    Side(q, q_far, long_state),
    Side(k, k_far, long_state),
    Where(token_T, at_T, far_q, _padded(pos.window_T, 0, pad)),
    Where(token_T, at_T, far_k, None),
    Masks(pos.sinks, threshold),
  )


def statistics(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  scheme: PositionScheme,
  pos: Positions,
  state: Any = (),
  *,
  last: int,
  beyond: int,
  tile: int = 0,
) -> Statistics:
  """What the attention of `attend` is like, of the `last` queries, f32[B, N, last] each; O(T) memory, no gradient.

  beyond: tokens back from which on a key counts as beyond.
  """
  length = q_BTNH.shape[1]
  tile = max(min(tile or choose_tile(length), length), last)
  q, k, at_q, at_k, masks = _sides(q_BTNH, k_BTKH, scheme, pos, state, -length % tile)
  q, at_q = cut_side(q, length - last, last), cut_where(at_q, length - last, last)
  return statistics_tiles(scheme, q, k, at_q, at_k, masks, tile=tile, beyond=beyond)


def attend(
  q_BTNH: jax.Array,
  k_BTKH: jax.Array,
  v_BTKH: jax.Array,
  scheme: PositionScheme,
  pos: Positions,
  state: Any = (),
  *,
  tile: int = 0,
  mesh: Mesh | None = None,
  fused: bool = True,
  last: int | None = None,
) -> jax.Array:
  """Causal attention under a position scheme, [B, T, N, H], exact for every `tile` (0: `choose_tile`) and `mesh`.

  Rotates, multiplies q by `scheme.query_scale(pos)` and k by `pos.key_scale_T` (nobody else scales, so a temperature
  never touches an additive bias), then walks tiles with softmax in float32. `tile >= T` is the dense path;
  a T that is no multiple of the tile is padded on the right, where no query looks. Gradients reach q, k, v, `state`
  (the scheme's `token_state`) and the scheme's parameters; `pos` gets none.

  On a mesh B is a multiple of data x fsdp and T of context, and keys travel around `context` block by block: O(T / n)
  memory on each of its n devices.

  Where `models/kernels.py` has a fused kernel for the case, that serves it in place of tiles, unless not `fused`.

  last: only of so many queries at the end, [B, last, N, H]. Tiles of one device save the others' work.
  """
  b, length, n, _ = q_BTNH.shape
  kv = k_BTKH.shape[2]
  if n % kv:
    raise ValueError(f'{n} query heads over {kv} key/value heads: a multiple is allowed')
  if pos.at_T.shape != (length,):
    raise ValueError(f'positions for {pos.at_T.shape[0]} tokens, queries for {length}')
  ring, tile = _ring(scheme, mesh, length, kv, tile or choose_tile(length))
  pad = -length % tile if ring is None else 0
  heads = mesh if ring is not None and ring.heads else None

  def shared(x_BTNH, *axes):  # length, then heads; both said, or the compiler moves the projections instead
    return lies(x_BTNH, heads, BATCH, *axes)

  q_BTNH, k_BTKH, v_BTKH = (shared(shared(x, CONTEXT), None, CONTEXT) for x in (q_BTNH, k_BTKH, v_BTKH))
  graphdef, params = nnx.split(scheme)
  q, k, at_q, at_k, masks = _sides(q_BTNH, k_BTKH, scheme, pos, state, pad)
  kernel, _ = kernels.choose(scheme, pos, state, q.x.dtype, q.x.shape[-1], mesh) if fused else (None, '')
  if last is not None and ring is None and kernel is None:
    rows = last if last <= tile else -(-last // tile) * tile
    if rows < length:
      q, at_q = cut_side(q, length - rows, rows), cut_where(at_q, length - rows, rows)
  arguments = params, q, k, _padded(jnp.moveaxis(v_BTKH, 1, 2), -2, pad), at_q, at_k, masks

  def tiles(params, *arguments):
    if ring is None:
      o_BNTH = _attention(graphdef, tile, ring, params, *arguments)
    else:
      specs = _ARGUMENTS[1:6]
      dealt = _everywhere(ring, functools.partial(_deal, ring), specs, specs)(*arguments[:-1])
      o_BNTH = _attention(graphdef, tile, ring, params, *dealt, arguments[-1])
      o_BNTH = _everywhere(ring, functools.partial(ring.collect, axis=2), (_PER_QUERY,), _PER_QUERY)(o_BNTH)
    o_BTNH = jnp.moveaxis(o_BNTH, 1, 2)[:, :length].astype(v_BTKH.dtype)
    return shared(shared(o_BTNH, None, CONTEXT), CONTEXT)

  if kernel is None:
    return tiles(*arguments)[:, -(last or 0) :]

  def served(params, q, k, v_BKTH, at_q, *rest):
    qkv = [jnp.moveaxis(a, 1, 2)[:, :length] for a in (merge_heads(q.x), k.x, v_BKTH)]
    at_T, window_T, state = at_q.at_T[:length], at_q.reach_T[:length], jax.tree.map(lambda a: a[:, :length], q.state)
    rows = PartitionSpec(BATCH)
    everywhere = functools.partial(_everywhere, ring, in_specs=(rows,) * 3, out_specs=rows)
    whole = functools.partial(tiles, params, q, k, v_BKTH, at_q, *rest)
    return kernel(qkv, nnx.merge(graphdef, params), at_T, window_T, state, everywhere, whole)

  return (kernels.unless_differentiated(served, tiles) if kernel.forward else served)(*arguments)[:, -(last or 0) :]


def _deal(ring: Ring, q: Side, k: Side, v_BKTH: jax.Array, at_q: Where, at_k: Where):
  """To the order of the ring. Padding stands behind every token, so that no query sees it."""

  def along(axis):
    return lambda tree: jax.tree.map(lambda a: ring.deal(a, axis), tree)

  def side(x: Side) -> Side:
    return Side(along(-2)(x.x), along(-2)(x.far), along(1)(x.state))

  def where(at: Where) -> Where:
    return along(0)(at)._replace(token_T=ring.deal(at.token_T, 0, constant_values=BEHIND))

  return side(q), side(k), ring.deal(v_BKTH, -2), where(at_q), where(at_k)

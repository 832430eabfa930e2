"""Exact causal attention in tiles, for every position scheme: O(T) memory forward and backward.

Axis letters, used as name suffixes everywhere: `B` batch, `T` length, `N` query heads, `K` key/value heads, `G = N/K`,
`H` head width, `R` head width after rotation, `P` frequency pairs, `D` model, `F` mlp, `V` vocabulary; lower case `t`,
`s` = a tile of queries, a tile of keys.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from models import kernels
from models.ring import BATCH, CONTEXT, Ring
from posenc import Positions, PositionScheme

# Finite, so that a wholly masked row is uniform rather than NaN, and gates of it (CoPE's) are exactly 0.
MASKED = -1e30
# The index of a token that pads a block of keys in mid-sequence: later than any query.
BEHIND = 2**30


class Side(NamedTuple):
  """What the tiles read of the queries, or of the keys: arrays whose `axis` below is the length."""

  x: jax.Array  # queries [B, K, G, T, R], keys [B, K, T, R]
  far: Any  # the same seen from the second position map, or None
  state: Any  # the scheme's numbers per token, a tree of [B, T, E]


class Where(NamedTuple):
  """Where the tokens of one side stand. No gradient."""

  token_T: jax.Array  # i32: index in the window, what masks count in
  at_T: jax.Array
  far_T: Any  # positions of the second map, or None
  reach_T: Any  # queries: keys this many tokens back or more are masked; None for keys


class Masks(NamedTuple):
  sinks: jax.Array
  threshold: Any  # or None


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


def _tile(tree: Any, start: jax.Array | int, size: int, axis: int) -> Any:
  return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis), tree)


def _side(side: Side, start: jax.Array | int, size: int) -> Side:
  return Side(_tile(side.x, start, size, -2), _tile(side.far, start, size, -2), _tile(side.state, start, size, 1))


def _where(where: Where, start: jax.Array | int, size: int) -> Where:
  return _tile(where, start, size, 0)


def _heads(x_BKGtr: jax.Array) -> jax.Array:
  """[B, K, G, t, r] -> [B, N, t, r]: query head n reads key head n // G."""
  b, k, g, t, r = x_BKGtr.shape
  return x_BKGtr.reshape(b, k * g, t, r)


def _upright(x_BKRs: jax.Array) -> jax.Array:
  """[B, K, R, s] -> [B, K, s, R], and no way for the compiler to turn the product that made it around instead."""
  return jnp.swapaxes(jax.lax.optimization_barrier(x_BKRs), -1, -2)


@jax.custom_vjp
def _dots(q_BKGtR: jax.Array, k_BKsR: jax.Array) -> jax.Array:
  """q . k of every pair, f32[B, K, G, t, s].

  Its gradients, like those of `_mix`, are said such that what XLA for CPUs transposes first is always q or k, never the
  square of pairs.
  """
  return jnp.einsum('BKGtR,BKsR->BKGts', q_BKGtR, k_BKsR, preferred_element_type=jnp.float32)


def _dots_forward(q_BKGtR, k_BKsR):
  return _dots(q_BKGtR, k_BKsR), (q_BKGtR, k_BKsR)


def _dots_backward(saved, d_BKGts):
  q_BKGtR, k_BKsR = saved
  dq_BKGtR = jnp.einsum('BKGts,BKsR->BKGtR', d_BKGts, k_BKsR).astype(q_BKGtR.dtype)
  dk_BKRs = jnp.einsum('BKGtR,BKGts->BKRs', q_BKGtR, d_BKGts)
  return dq_BKGtR, _upright(dk_BKRs).astype(k_BKsR.dtype)


_dots.defvjp(_dots_forward, _dots_backward)


def _logits(scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, carry: Any):
  """Logits of one tile, f32[B, N, t, s], masked, and the scheme's carry. The only place that says what a logit is."""
  back_ts = at_q.token_T[:, None] - at_k.token_T[None, :]
  visible_ts = (back_ts >= 0) & ((back_ts < at_q.reach_T[:, None]) | (at_k.token_T[None, :] < masks.sinks))

  def scored(q_BKGtR, k_BKsR, at_t, at_s):
    logits_BNts = jnp.where(visible_ts, _heads(_dots(q_BKGtR, k_BKsR)), MASKED)
    q_BtNR = jnp.swapaxes(_heads(q_BKGtR), 1, 2)
    k_BsKR = jnp.swapaxes(k_BKsR, 1, 2)
    return scheme.score(logits_BNts, q_BtNR, k_BsKR, at_t, at_s, q.state, k.state, carry)

  logits_BNts, new_carry = scored(q.x, k.x, at_q.at_T, at_k.at_T)
  if masks.threshold is not None:
    far_BNts, _ = scored(q.far, k.far, at_q.far_T, at_k.far_T)
    logits_BNts = jnp.where(back_ts < masks.threshold, logits_BNts, far_BNts)
  return jnp.where(visible_ts, logits_BNts, MASKED), new_carry


def _values(scheme: PositionScheme, p_BNts: jax.Array, at_q: Where, at_k: Where, masks: Masks) -> jax.Array | None:
  """What the scheme adds to p @ v: each pair's share under the map that its logit was read from."""
  if masks.threshold is None:
    return scheme.values(p_BNts, at_q.at_T, at_k.at_T)
  near_ts = at_q.token_T[:, None] - at_k.token_T[None, :] < masks.threshold
  near_BNtH = scheme.values(jnp.where(near_ts, p_BNts, 0.0), at_q.at_T, at_k.at_T)
  far_BNtH = scheme.values(jnp.where(near_ts, 0.0, p_BNts), at_q.far_T, at_k.far_T)
  return None if near_BNtH is None or far_BNtH is None else near_BNtH + far_BNtH


def _mix(
  scheme: PositionScheme, p_BNts: jax.Array, v_BKsH: jax.Array, at_q: Where, at_k: Where, masks: Masks
) -> jax.Array:
  """p @ v and what the scheme adds to it, f32[B, N, t, H]; linear in p and in v."""
  b, n, t, s = p_BNts.shape
  kv = v_BKsH.shape[1]
  p_BKGts = p_BNts.reshape(b, kv, n // kv, t, s).astype(v_BKsH.dtype)
  o_BNtH = _heads(jnp.einsum('BKGts,BKsH->BKGtH', p_BKGts, v_BKsH, preferred_element_type=jnp.float32))
  more_BNtH = _values(scheme, p_BNts, at_q, at_k, masks)
  return o_BNtH if more_BNtH is None else o_BNtH + more_BNtH


def _mix_transposed(p_BNts: jax.Array, do_BNtH: jax.Array, v_BKsH: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Gradients of p @ v by p and by v, float32 from products in v's dtype.

  By hand: `jax.vjp` rounds d p to bfloat16 before delta is taken from it, and multiplies float32 by bfloat16.
  """
  b, n, t, s = p_BNts.shape
  kv = v_BKsH.shape[1]
  do_BKGtH = do_BNtH.reshape(b, kv, n // kv, t, -1).astype(v_BKsH.dtype)
  p_BKGts = p_BNts.reshape(b, kv, n // kv, t, s).astype(v_BKsH.dtype)
  dp_BKGts = jnp.einsum('BKGtH,BKsH->BKGts', do_BKGtH, v_BKsH, preferred_element_type=jnp.float32)
  dv_BKHs = jnp.einsum('BKGtH,BKGts->BKHs', do_BKGtH, p_BKGts, preferred_element_type=jnp.float32)
  return _heads(dp_BKGts), _upright(dv_BKHs)


class Walk(NamedTuple):
  """The key tiles that a query tile visits, from the diagonal leftwards: hi .. lo, then the sinks' tiles."""

  hi: jax.Array
  lo: jax.Array
  sinks: jax.Array  # tiles at the left end that hold sinks
  count: jax.Array

  def tile(self, step: jax.Array) -> jax.Array:
    near = self.hi - self.lo + 1
    return jnp.where(step < near, self.hi - step, jnp.minimum(self.lo, self.sinks) - 1 - (step - near))


def _walk(at_q: Where, k_start: jax.Array, masks: Masks, tile: int, k_tiles: int) -> Walk:
  """Never right of the diagonal, never outside every query's window. `tile` is that of keys; queries are at most it."""
  hi = jnp.clip((at_q.token_T[0] + tile - 1 - k_start) // tile, -1, k_tiles - 1)
  # In float32 a window may be inf; at most T, so exact.
  back_t = jnp.minimum(at_q.reach_T, at_q.token_T + 1.0).astype(jnp.int32)
  oldest = jnp.maximum((at_q.token_T - back_t).min() + 1 - k_start, 0)
  lo = jnp.minimum(oldest // tile, hi + 1)
  sink_tokens = jnp.clip(masks.sinks - k_start, 0, k_tiles * tile).astype(jnp.int32)
  sinks = jnp.minimum(-(-sink_tokens // tile), hi + 1)
  return Walk(hi, lo, sinks, hi - lo + 1 + jnp.minimum(lo, sinks))


class Running(NamedTuple):
  """An online softmax on its way through the key tiles, per query: o = sum p v, m = max logit, l = sum p."""

  o_BNTH: jax.Array
  m_BNT: jax.Array
  l_BNT: jax.Array
  carry: Any


def _loop(count: jax.Array, limit: int, body, init):
  """fori_loop; with one tile at most the body runs inline: a while loop hides its matmuls from XLA's fusions."""
  return body(0, init) if limit == 1 else jax.lax.fori_loop(0, count, body, init)


def _rows(tiles: int, row):
  """`row` for every query tile, results stacked on a new leading axis."""
  if tiles == 1:
    return jax.tree.map(lambda a: a[None], row(jnp.int32(0)))
  return jax.lax.map(row, jnp.arange(tiles))


def _unstack(tree: Any, axis: int) -> Any:
  """[tiles, ..., t, ...] -> [..., tiles * t, ...], the length at `axis` of the result."""

  def merge(a):
    axis_ = axis % (a.ndim - 1)
    a = jnp.moveaxis(a, 0, axis_)
    return a.reshape(*a.shape[:axis_], a.shape[axis_] * a.shape[axis_ + 1], *a.shape[axis_ + 2 :])

  return jax.tree.map(merge, tree)


def start_running(scheme: PositionScheme, q: Side, head_dim: int) -> Running:
  """Nothing seen yet, for the queries of `q`. The max starts at the mask's value, so it is never -inf - -inf."""
  b, k, g, t, _ = q.x.shape
  o_BNTH = jnp.zeros((b, k * g, t, head_dim), jnp.float32)
  m_BNT = jnp.full((b, k * g, t), MASKED, jnp.float32)
  return Running(o_BNTH, m_BNT, jnp.zeros_like(m_BNT), scheme.init_carry(jnp.swapaxes(_heads(q.x), 1, 2)))


def attend_tiles(
  scheme: PositionScheme,
  q: Side,
  k: Side,
  v_BKSH: jax.Array,
  at_q: Where,
  at_k: Where,
  masks: Masks,
  running: Running | None,
  *,
  tile: int,
) -> Running:
  """Adds the keys of `k` to the running softmax of every query of `q`; divide o by l when all keys have been seen.

  Queries and keys are blocks of whole tiles that start anywhere (`token_T[0]`): a ring of devices or a chunked forward
  calls this once per block of keys, from the diagonal's block leftwards, where a scheme runs a carry along the row.
  """
  head_dim = v_BKSH.shape[-1]
  k_tiles = v_BKSH.shape[-2] // tile
  q_tile = min(tile, q.x.shape[-2])  # one of `_causal_rows` is shorter than the keys before it

  def row(i):
    q_i, at_i = _side(q, i * q_tile, q_tile), _where(at_q, i * q_tile, q_tile)
    walk = _walk(at_i, at_k.token_T[0], masks, tile, k_tiles)
    if running is None:
      init = start_running(scheme, q_i, head_dim)
    else:
      init = _tile(running, i * q_tile, q_tile, 2)

    def add(step, seen: Running) -> Running:
      s = walk.tile(step) * tile
      k_s, at_s = _side(k, s, tile), _where(at_k, s, tile)
      logits, carry = _logits(scheme, q_i, k_s, at_i, at_s, masks, seen.carry)
      m = jnp.maximum(seen.m_BNT, logits.max(-1))
      p = jnp.exp(logits - m[..., None])
      shrink = jnp.exp(seen.m_BNT - m)
      o = seen.o_BNTH * shrink[..., None] + _mix(scheme, p, _tile(v_BKSH, s, tile, -2), at_i, at_s, masks)
      return Running(o, m, seen.l_BNT * shrink + p.sum(-1), carry)

    # A foreign block may hold no visible tile at all, so that a count of one is no certainty there.
    return _loop(walk.count, k_tiles if running is None else k_tiles + 1, add, init)

  out = _rows(q.x.shape[-2] // q_tile, row)
  return Running(*(_unstack(a, 2) for a in out))


def pull_tiles(
  graphdef: Any,
  params: Any,
  q: Side,
  k: Side,
  v_BKSH: jax.Array,
  at_q: Where,
  at_k: Where,
  masks: Masks,
  do_BNTH: jax.Array,
  lse_BNT: jax.Array,
  delta_BNT: jax.Array,
  running: tuple[Any, Any] | None,
  sums: tuple[Any, Side, jax.Array],
  *,
  tile: int,
) -> tuple[tuple[Any, Side, jax.Array], Side, Any]:
  """Gradients of `attend_tiles`, for every scheme: `sums` + those of (params, k, v); that of q; that of the carry.

  A tile's logits are recomputed, and `jax.vjp` of `_logits` does the rest: with p = exp(logits - lse) and
  delta = sum(do * o), d logits = p * (dp - delta). `running`: the carry that these keys began with and the gradient of
  the one they ended with, where they are not all there is. Within them a scheme's carries are run forward once per
  query row and kept for that row alone: for all rows they would be O(T**2 / tile).
  """
  tiles = v_BKSH.shape[-2] // tile
  q_tile = min(tile, q.x.shape[-2])

  def logits(params, q_i, k_s, at_i, at_s, carry):
    return _logits(nnx.merge(graphdef, params), q_i, k_s, at_i, at_s, masks, carry)

  def values(params, p, at_i, at_s):
    return _values(nnx.merge(graphdef, params), p, at_i, at_s, masks)

  def row(i, sums):
    q_i, at_i = _side(q, i * q_tile, q_tile), _where(at_q, i * q_tile, q_tile)
    do, lse, delta = (_tile(a, i * q_tile, q_tile, 2) for a in (do_BNTH, lse_BNT, delta_BNT))
    walk = _walk(at_i, at_k.token_T[0], masks, tile, tiles)
    if running is None:
      carry = nnx.merge(graphdef, params).init_carry(jnp.swapaxes(_heads(q_i.x), 1, 2))
      dcarry = jax.tree.map(jnp.zeros_like, carry)
    else:
      carry, dcarry = _tile(running, i * q_tile, q_tile, 2)
    carries = jax.tree.map(lambda a: jnp.zeros((tiles, *a.shape), a.dtype).at[0].set(a), carry)

    def key(step):
      s = walk.tile(step) * tile
      return s, _side(k, s, tile), _where(at_k, s, tile)

    if jax.tree.leaves(carry) and tiles > 1:

      def run(step, carries):
        _, k_s, at_s = key(step)
        _, carry = logits(params, q_i, k_s, at_i, at_s, jax.tree.map(lambda a: a[step], carries))
        return jax.tree.map(lambda a, c: a.at[step + 1].set(c), carries, carry)

      carries = jax.lax.fori_loop(0, walk.count - 1, run, carries)

    def pull(back, grads):
      step = walk.count - 1 - back
      dparams, dq, dk, dv, dcarry = grads
      s, k_s, at_s = key(step)
      v_s = _tile(v_BKSH, s, tile, -2)
      carry = jax.tree.map(lambda a: a[step], carries)
      (scores, _), vjp = jax.vjp(lambda w, a, b, c: logits(w, a, b, at_i, at_s, c), params, q_i, k_s, carry)
      p = jnp.exp(scores - lse[..., None])
      dp, dv_s = _mix_transposed(p, do, v_s)
      more, vjp_values = jax.vjp(lambda w, p: values(w, p, at_i, at_s), params, p)
      dparams_mix, dp_more = vjp_values(None if more is None else do)
      dp = dp if more is None else dp + dp_more
      dparams_s, dq_s, dk_s, dcarry = vjp((p * (dp - delta[..., None]), dcarry))

      def add_tile(total, part, axis):
        return jax.tree.map(
          lambda t, a: jax.lax.dynamic_update_slice_in_dim(
            t, jax.lax.dynamic_slice_in_dim(t, s, tile, axis) + a.astype(t.dtype), s, axis
          ),
          total,
          part,
        )

      dk = Side(add_tile(dk.x, dk_s.x, -2), add_tile(dk.far, dk_s.far, -2), add_tile(dk.state, dk_s.state, 1))
      dparams = jax.tree.map(lambda t, a, b: t + a + b, dparams, dparams_s, dparams_mix)
      dq = jax.tree.map(lambda t, a: t + a.astype(t.dtype), dq, dq_s)
      return dparams, dq, dk, add_tile(dv, dv_s, -2), dcarry

    dparams, dk, dv = sums
    limit = tiles if running is None else tiles + 1  # as in attend_tiles
    dparams, dq, dk, dv, dcarry = _loop(walk.count, limit, pull, (dparams, _zeros(q_i), dk, dv, dcarry))
    return (dparams, dk, dv), (dq, None if running is None else dcarry)

  rows = q.x.shape[-2] // q_tile
  if rows == 1:
    sums, (dq, dcarry) = row(jnp.int32(0), sums)
    return sums, dq, dcarry
  sums, (dq, dcarry) = jax.lax.scan(lambda sums, i: row(i, sums), sums, jnp.arange(rows))
  return sums, Side(_unstack(dq.x, -2), _unstack(dq.far, -2), _unstack(dq.state, 1)), _unstack(dcarry, 2)


def _zeros(tree: Any) -> Any:
  return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)


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
  """`_causal_rows`; of a longer input the one row is everything."""
  length = v_BKTH.shape[-2]
  size = length // _causal_rows(length, tile)
  for start in range(0, length, size):
    end = start + size
    queries, keys = _side(q, start, size), _side(k, 0, end)
    yield Row(start, end, queries, keys, _tile(v_BKTH, 0, end, -2), _where(at_q, start, size), _where(at_k, 0, end))


def _cut(sums: tuple[Side, jax.Array], start: jax.Array | int, size: int) -> tuple[Side, jax.Array]:
  """Of the gradients of keys and values, those of `size` tokens."""
  dk, dv_BKTH = sums
  return _side(dk, start, size), _tile(dv_BKTH, start, size, -2)


def _put(sums: tuple[Side, jax.Array], part: Any, start: jax.Array | int) -> tuple[Side, jax.Array]:
  """The inverse of `_cut`."""

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
  return lambda c: (_side(k, c * size, size), _tile(v_BKTH, c * size, size, -2), _where(at_k, c * size, size)), size


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

      return _loop(ring.chunks, ring.chunks, add, running), running.carry

    seen, begun = ring.leftwards(visit, start_running(scheme, q, v_BKTH.shape[-1]), (k, v_BKTH, at_k))
  return seen.o_BNTH / seen.l_BNT[..., None], seen.m_BNT + jnp.log(seen.l_BNT), begun


def _pulled(graphdef, tile, ring, saved, do_BNTH):
  """Gradients of `_seen`'s o; of the parameters, [1, ...], this device's share."""
  params, q, k, v_BKTH, at_q, at_k, masks, o_BNTH, lse_BNT, begun = saved
  do_BNTH = do_BNTH.astype(jnp.float32)
  delta_BNT = (do_BNTH * o_BNTH).sum(-1)
  pull = functools.partial(pull_tiles, graphdef, params)
  # Sums over tiles are kept in float32 whatever the compute dtype.
  dparams, sums = jax.tree.map(jnp.zeros_like, params), (_zeros(k), _zeros(v_BKTH))
  if ring is None or ring.size == 1:
    dqs = []
    for r in _dense(tile, q, k, v_BKTH, at_q, at_k):
      do, lse, delta = (_tile(a, r.start, r.end - r.start, 2) for a in (do_BNTH, lse_BNT, delta_BNT))
      begun_r = (dparams, *_cut(sums, 0, r.end))
      (dparams, *part), dq_r, _ = pull(
        r.q, r.k, r.v_BKsH, r.at_q, r.at_k, masks, do, lse, delta, None, begun_r, tile=min(tile, r.end)
      )
      sums, dqs = _put(sums, part, 0), [*dqs, dq_r]
    (dk, dv), dq = sums, _join(dqs)
  else:

    def visit(seen, block, sums, carry):
      keys, size = _blocks(ring, *block)

      def one(c, both):
        (dparams, dq, dcarry), sums = both
        k_c, v_c, at_c = keys(c)
        (dparams, *part), dq_c, dcarry = pull(
          q, k_c, v_c, at_q, at_c, masks, do_BNTH, lse_BNT, delta_BNT, (carry, dcarry),
          (dparams, *_cut(sums, c * size, size)), tile=tile,
        )  # fmt: skip
        return (dparams, jax.tree.map(jnp.add, dq, dq_c), dcarry), _put(sums, part, c * size)

      return _loop(ring.chunks, ring.chunks, one, (seen, sums))

    seen = (dparams, _zeros(q), jax.tree.map(lambda a: jnp.zeros_like(a[0]), begun))
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
  if ring is None:
    return f
  # Unchecked: the tiles' loops start from constants, and every gradient is summed by hand.
  return jax.shard_map(f, mesh=ring.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


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


def _ring(scheme: PositionScheme, mesh: Mesh | None, length: int, tile: int) -> tuple[Ring | None, int]:
  """How the sequence lies on `mesh`, and the tile: a chunk of it at most."""
  if mesh is None or mesh.size == 1:
    return None, min(tile, length)
  block = length // mesh.shape[CONTEXT]
  q_BtNR = jax.ShapeDtypeStruct((1, 1, scheme.dims.heads, 1), jnp.float32)
  runs_along = bool(jax.tree.leaves(jax.eval_shape(scheme.init_carry, q_BtNR)))
  chunks = 2 if mesh.shape[CONTEXT] > 1 and block % 2 == 0 and not runs_along else 1
  tile = min(tile, block // chunks)
  return Ring(mesh, chunks, pad=-(block // chunks) % tile), tile


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
) -> jax.Array:
  """Causal attention under a position scheme, [B, T, N, H], exact for every `tile` (0: `choose_tile`) and `mesh`.

  Rotates, multiplies q by `scheme.query_scale(pos)` and k by `pos.key_scale_T` (nobody else scales, so a temperature
  never touches an additive bias), then walks tiles with softmax in float32. `tile >= T` is the dense path;
  a T that is no multiple of the tile is padded on the right, where no query looks. Gradients reach q, k, v, `state`
  (the scheme's `token_state`) and the scheme's parameters; `pos` gets none.

  On a mesh B is a multiple of data x fsdp and T of context, and keys travel around `context` block by block: O(T / n)
  memory on each of its n devices.

  Where `models/kernels.py` has a fused kernel for the case, that serves it in place of tiles, unless not `fused`.
  """
  b, length, n, _ = q_BTNH.shape
  kv = k_BTKH.shape[2]
  if n % kv:
    raise ValueError(f'{n} query heads over {kv} key/value heads: a multiple is allowed')
  if pos.at_T.shape != (length,):
    raise ValueError(f'positions for {pos.at_T.shape[0]} tokens, queries for {length}')
  ring, tile = _ring(scheme, mesh, length, tile or choose_tile(length))
  pad = -length % tile if ring is None else 0
  scale_TN = scheme.query_scale(pos)

  def turned(pos_q, pos_k):
    q, k = scheme.rotate(q_BTNH, k_BTKH, pos_q)
    if pos_k is not pos_q:
      _, k = scheme.rotate(q_BTNH, k_BTKH, pos_k)
    q = (q * scale_TN[:, :, None]).astype(q_BTNH.dtype).reshape(b, length, kv, n // kv, -1)
    k = (k * pos.key_scale_T[:, None, None]).astype(k_BTKH.dtype)
    return padded(jnp.moveaxis(q, 1, 3), -2), padded(jnp.moveaxis(k, 1, 2), -2)

  def padded(x, axis):
    if not pad:
      return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, pad)
    return jnp.pad(x, widths, mode='edge')

  q, k = turned(pos, pos)
  q_far = k_far = far_q = far_k = threshold = None
  if pos.far is not None:
    q_far, k_far = turned(dataclasses.replace(pos, at_T=pos.far.at_q_T), dataclasses.replace(pos, at_T=pos.far.at_k_T))
    far_q, far_k, threshold = padded(pos.far.at_q_T, 0), padded(pos.far.at_k_T, 0), pos.far.threshold
  long_state = jax.tree.map(lambda a: padded(a, 1), state)
  token_T = jnp.arange(length + pad, dtype=jnp.int32)
  at_T = padded(pos.at_T, 0)
  graphdef, params = nnx.split(scheme)
  sides = (
    Side(q, q_far, long_state),
    Side(k, k_far, long_state),
    padded(jnp.moveaxis(v_BTKH, 1, 2), -2),
    Where(token_T, at_T, far_q, padded(pos.window_T, 0)),
    Where(token_T, at_T, far_k, None),
  )
  arguments = params, *sides, Masks(pos.sinks, threshold)

  def tiles(params, *arguments):
    if ring is None:
      o_BNTH = _attention(graphdef, tile, ring, params, *arguments)
    else:
      specs = _ARGUMENTS[1:6]
      dealt = _everywhere(ring, functools.partial(_deal, ring), specs, specs)(*arguments[:-1])
      o_BNTH = _attention(graphdef, tile, ring, params, *dealt, arguments[-1])
      o_BNTH = _everywhere(ring, functools.partial(ring.collect, axis=2), (_PER_QUERY,), _PER_QUERY)(o_BNTH)
    return jnp.moveaxis(o_BNTH, 1, 2)[:, :length].astype(v_BTKH.dtype)

  kernel, _ = kernels.choose(scheme, pos, state, q.dtype, q.shape[-1], mesh) if fused else (None, '')
  if kernel is None:
    return tiles(*arguments)

  def served(params, q, k, v_BKTH, at_q, *rest):
    qkv = [jnp.moveaxis(a, 1, 2)[:, :length] for a in (_heads(q.x), k.x, v_BKTH)]
    at_T, window_T, state = at_q.at_T[:length], at_q.reach_T[:length], jax.tree.map(lambda a: a[:, :length], q.state)
    rows = PartitionSpec(BATCH)
    everywhere = functools.partial(_everywhere, ring, in_specs=(rows,) * 3, out_specs=rows)
    whole = functools.partial(tiles, params, q, k, v_BKTH, at_q, *rest)
    return kernel(qkv, nnx.merge(graphdef, params), at_T, window_T, state, everywhere, whole)

  return (kernels.unless_differentiated(served, tiles) if kernel.forward else served)(*arguments)


def _deal(ring: Ring, q: Side, k: Side, v_BKTH: jax.Array, at_q: Where, at_k: Where):
  """To the order of the ring. Padding stands behind every token, so that no query sees it."""

  def along(axis):
    return lambda tree: jax.tree.map(lambda a: ring.deal(a, axis), tree)

  def side(x: Side) -> Side:
    return Side(along(-2)(x.x), along(-2)(x.far), along(1)(x.state))

  def where(at: Where) -> Where:
    return along(0)(at)._replace(token_T=ring.deal(at.token_T, 0, constant_values=BEHIND))

  return side(q), side(k), ring.deal(v_BKTH, -2), where(at_q), where(at_k)

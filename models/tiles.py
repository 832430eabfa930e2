"""Exact causal attention in tiles, for every position scheme: O(T) memory forward and backward.

Axis letters, used as name suffixes everywhere: `B` batch, `T` length, `N` query heads, `K` key/value heads, `G = N/K`,
`H` head width, `R` head width after rotation, `P` frequency pairs, `D` model, `F` mlp, `V` vocabulary; lower case `t`,
`s` = a tile of queries, a tile of keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from posenc import PositionScheme

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


def cut(tree: Any, start: jax.Array | int, size: int, axis: int) -> Any:
  return jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, axis), tree)


def cut_side(side: Side, start: jax.Array | int, size: int) -> Side:
  return Side(cut(side.x, start, size, -2), cut(side.far, start, size, -2), cut(side.state, start, size, 1))


def cut_where(where: Where, start: jax.Array | int, size: int) -> Where:
  return cut(where, start, size, 0)


def merge_heads(x_BKGtr: jax.Array) -> jax.Array:
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


def _logits(
  scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, carry: Any, open: bool = False
):
  """Logits of one tile, f32[B, N, t, s], masked, and the scheme's carry. The only place that says what a logit is.

  open: every pair of the tile is known to be visible, so that nothing is masked.
  """
  back_ts = at_q.token_T[:, None] - at_k.token_T[None, :]
  visible_ts = (back_ts >= 0) & ((back_ts < at_q.reach_T[:, None]) | (at_k.token_T[None, :] < masks.sinks))

  def masked(logits_BNts):
    return logits_BNts if open else jnp.where(visible_ts, logits_BNts, MASKED)

  def scored(q_BKGtR, k_BKsR, at_t, at_s):
    logits_BNts = masked(merge_heads(_dots(q_BKGtR, k_BKsR)))
    q_BtNR = jnp.swapaxes(merge_heads(q_BKGtR), 1, 2)
    k_BsKR = jnp.swapaxes(k_BKsR, 1, 2)
    return scheme.score(logits_BNts, q_BtNR, k_BsKR, at_t, at_s, q.state, k.state, carry)

  logits_BNts, new_carry = scored(q.x, k.x, at_q.at_T, at_k.at_T)
  if masks.threshold is not None:
    far_BNts, _ = scored(q.far, k.far, at_q.far_T, at_k.far_T)
    logits_BNts = jnp.where(back_ts < masks.threshold, logits_BNts, far_BNts)
  return masked(logits_BNts), new_carry


def _open_logits(scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, carry: Any):
  """`_logits` of an open tile as (x, y, carry): logits x[B, N, t, s] + y[B, N, t].

  The scheme's columns ride on the product of q and k, where they are nearly free. They are counted from the tile's last
  key, and y is the bias from there to the query: both of one sign, so that nothing cancels as it would on the diagonal.
  """
  mine, theirs = scheme.columns_in_force(at_q.at_T, q.state), scheme.columns_in_force(at_k.at_T, k.state)
  if (
    mine is None or theirs is None or masks.threshold is not None
    or q.x.dtype != jnp.float32 or theirs[1].shape[2] not in (1, k.x.shape[1])
  ):  # fmt: skip
    x_BNts, carry = _logits(scheme, q, k, at_q, at_k, masks, carry, open=True)
    return x_BNts, jnp.float32(0), carry
  (a_BtNE, b_BtNE), (_, b_BsNE) = mine, theirs
  last_B1NE = b_BsNE[:, -1:]

  def beside(x, columns_BTNE):
    columns = jnp.swapaxes(columns_BTNE, 1, 2)
    return jnp.concatenate([x, jnp.broadcast_to(columns, (*x.shape[:-1], columns.shape[-1]))], -1)

  # [B, N, t, R], as one group each: a column of q has a number for each of its heads.
  b, kv, groups, t, _ = q.x.shape
  q_BKGtR = beside(merge_heads(q.x), a_BtNE).reshape(b, kv, groups, t, -1)
  x_BNts = merge_heads(_dots(q_BKGtR, beside(k.x, b_BsNE - last_B1NE)))
  return x_BNts, jnp.swapaxes((a_BtNE * (last_B1NE - b_BtNE)).sum(-1), 1, 2), carry


def _level_logits(
  level_N: jax.Array, scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, carry: Any
):
  """`_open_logits` where the scheme's bias has levelled off for every pair of the tile: it is all in y."""
  return merge_heads(_dots(q.x, k.x)), level_N[:, None], carry


def _masked_logits(scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, carry: Any):
  x_BNts, carry = _logits(scheme, q, k, at_q, at_k, masks, carry)
  return x_BNts, jnp.float32(0), carry


def _programs(scheme: PositionScheme, masks: Masks) -> tuple[list[Any], Any]:
  """Ways to the logits of a tile as (x, y, carry), x[B, N, t, s] + y[B, N, t], and which of them a pair of tiles takes.

  Masks cost 7 % of the forward pass, and most tiles need none; T5's bias costs 25 %, and all but the tiles next to the
  diagonal have one number of it.
  """

  def opened(at_q: Where, at_k: Where) -> jax.Array:
    return _open(at_q, at_k).astype(jnp.int32)

  level = scheme.level_in_force()
  if level is None or masks.threshold is not None:
    return [_masked_logits, _open_logits], opened
  distance, level_N = level

  def levelled(at_q: Where, at_k: Where) -> jax.Array:
    return opened(at_q, at_k) * (1 + (at_q.at_T[0] - at_k.at_T[-1] >= distance))

  return [_masked_logits, _open_logits, functools.partial(_level_logits, level_N)], levelled


def _open(at_q: Where, at_k: Where) -> jax.Array:
  """Whether every query of a tile sees every key of it, bool[]: all but the diagonal and a window's edge."""
  farthest = at_q.token_T[-1] - at_k.token_T[0]
  return (at_q.token_T[0] >= at_k.token_T[-1]) & (farthest < at_q.reach_T.min())


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
  o_BNtH = merge_heads(jnp.einsum('BKGts,BKsH->BKGtH', p_BKGts, v_BKsH, preferred_element_type=jnp.float32))
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
  return merge_heads(dp_BKGts), _upright(dv_BKHs)


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


def loop(count: jax.Array, limit: int, body, init):
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
  return Running(o_BNTH, m_BNT, jnp.zeros_like(m_BNT), scheme.init_carry(jnp.swapaxes(merge_heads(q.x), 1, 2)))


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
  # A foreign block may hold no visible tile at all, so that a count of one is no certainty there.
  limit = k_tiles if running is None else k_tiles + 1

  def row(i):
    q_i, at_i = cut_side(q, i * q_tile, q_tile), cut_where(at_q, i * q_tile, q_tile)
    walk = _walk(at_i, at_k.token_T[0], masks, tile, k_tiles)
    if running is None:
      init = start_running(scheme, q_i, head_dim)
    else:
      init = cut(running, i * q_tile, q_tile, 2)

    def add(step, seen: Running) -> Running:
      s = walk.tile(step) * tile
      k_s, at_s = cut_side(k, s, tile), cut_where(at_k, s, tile)

      def add_tile(logits, seen):
        x, y, carry = logits(scheme, q_i, k_s, at_i, at_s, masks, seen.carry)
        m = jnp.maximum(seen.m_BNT, x.max(-1) + y)
        p = jnp.exp(x - (m - y)[..., None])
        shrink = jnp.exp(seen.m_BNT - m)
        o = seen.o_BNTH * shrink[..., None] + _mix(scheme, p, cut(v_BKSH, s, tile, -2), at_i, at_s, masks)
        return Running(o, m, seen.l_BNT * shrink + p.sum(-1), carry)

      if limit == 1:
        return add_tile(_masked_logits, seen)
      programs, which = _programs(scheme, masks)
      return jax.lax.switch(which(at_i, at_s), [functools.partial(add_tile, logits) for logits in programs], seen)

    return loop(walk.count, limit, add, init)

  out = _rows(q.x.shape[-2] // q_tile, row)
  return Running(*(_unstack(a, 2) for a in out))


class Statistics(NamedTuple):
  """Of one query's attention p over its keys, each f32[B, N, t]."""

  entropy: jax.Array  # - sum p log p, nats
  largest: jax.Array  # logit
  first: jax.Array  # p of the window's first token
  beyond: jax.Array  # p of all keys that lie `beyond` tokens back or more


class _Summed(NamedTuple):
  """On its way through the key tiles: m = max logit, and sums over keys of e = exp(x - m)."""

  m_BNt: jax.Array
  l_BNt: jax.Array  # e
  u_BNt: jax.Array  # e (x - m)
  first_BNt: jax.Array
  beyond_BNt: jax.Array
  carry: Any


def statistics_tiles(
  scheme: PositionScheme, q: Side, k: Side, at_q: Where, at_k: Where, masks: Masks, *, tile: int, beyond: int
) -> Statistics:
  """Of all queries of `q`, at most `tile` of them, over the tiles of `k`, one after the other from the diagonal."""
  k_tiles = k.x.shape[-2] // tile
  walk = _walk(at_q, at_k.token_T[0], masks, tile, k_tiles)

  def add(step, seen: _Summed) -> _Summed:
    s = walk.tile(step) * tile
    k_s, at_s = cut_side(k, s, tile), cut_where(at_k, s, tile)
    x, carry = _logits(scheme, q, k_s, at_q, at_s, masks, seen.carry)
    m = jnp.maximum(seen.m_BNt, x.max(-1))
    shrink, above = jnp.exp(seen.m_BNt - m), x - m[..., None]
    e = jnp.exp(above)
    far_ts = at_q.token_T[:, None] - at_s.token_T[None, :] >= beyond
    return _Summed(
      m,
      seen.l_BNt * shrink + e.sum(-1),
      # Counted from the new max; what is masked has e = 0 and a finite logit.
      (seen.u_BNt + (seen.m_BNt - m) * seen.l_BNt) * shrink + (e * above).sum(-1),
      seen.first_BNt * shrink + jnp.where(at_s.token_T == 0, e, 0.0).sum(-1),
      seen.beyond_BNt * shrink + jnp.where(far_ts, e, 0.0).sum(-1),
      carry,
    )

  start = start_running(scheme, q, 1)
  none = jnp.zeros_like(start.l_BNT)
  seen = loop(walk.count, k_tiles, add, _Summed(start.m_BNT, none, none, none, none, start.carry))
  l_BNt = seen.l_BNt
  return Statistics(jnp.log(l_BNt) - seen.u_BNt / l_BNt, seen.m_BNt, seen.first_BNt / l_BNt, seen.beyond_BNt / l_BNt)


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
    q_i, at_i = cut_side(q, i * q_tile, q_tile), cut_where(at_q, i * q_tile, q_tile)
    do, lse, delta = (cut(a, i * q_tile, q_tile, 2) for a in (do_BNTH, lse_BNT, delta_BNT))
    walk = _walk(at_i, at_k.token_T[0], masks, tile, tiles)
    if running is None:
      carry = nnx.merge(graphdef, params).init_carry(jnp.swapaxes(merge_heads(q_i.x), 1, 2))
      dcarry = jax.tree.map(jnp.zeros_like, carry)
    else:
      carry, dcarry = cut(running, i * q_tile, q_tile, 2)
    carries = jax.tree.map(lambda a: jnp.zeros((tiles, *a.shape), a.dtype).at[0].set(a), carry)

    def key(step):
      s = walk.tile(step) * tile
      return s, cut_side(k, s, tile), cut_where(at_k, s, tile)

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
      v_s = cut(v_BKSH, s, tile, -2)
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
    dparams, dq, dk, dv, dcarry = loop(walk.count, limit, pull, (dparams, zeros(q_i), dk, dv, dcarry))
    return (dparams, dk, dv), (dq, None if running is None else dcarry)

  rows = q.x.shape[-2] // q_tile
  if rows == 1:
    sums, (dq, dcarry) = row(jnp.int32(0), sums)
    return sums, dq, dcarry
  sums, (dq, dcarry) = jax.lax.scan(lambda sums, i: row(i, sums), sums, jnp.arange(rows))
  return sums, Side(_unstack(dq.x, -2), _unstack(dq.far, -2), _unstack(dq.state, 1)), _unstack(dcarry, 2)


def zeros(tree: Any) -> Any:
  return jax.tree.map(lambda a: jnp.zeros(a.shape, jnp.float32), tree)

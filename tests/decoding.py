"""What a decoder with a cache computes, built of the parts that are here: chunks of queries over the keys kept so far.

The product has no cache: a row of a sweep is one forward pass at its own length. Cases of caches are met by this.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.lm import LM, ModelConfig, abstract
from models.tiles import Masks, Side, Where, attend_tiles

VOCAB = 29


def small_lm(text, *, train_len, layers=2, **model):
  """A model of one scheme, its weights from sines: no generator to be compiled, and every part matters."""
  cfg = ModelConfig(**{'layers': layers, 'd_model': 32, 'heads': 4, 'kv_heads': 2, **model})
  graphdef, shapes = abstract(lambda: LM(cfg, (text,), vocab_size=VOCAB, train_len=train_len, rngs=nnx.Rngs(0)))
  leaves, tree = jax.tree.flatten(shapes)
  waves = [np.sin(np.arange(a.size) * (i + 2.5)).reshape(a.shape).astype(np.float32) for i, a in enumerate(leaves)]
  norms = [path[-1].key == 'scale' for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
  params = [np.ones_like(w) if norm else 0.5 * w for w, norm in zip(waves, norms)]
  return nnx.merge(graphdef, jax.tree.unflatten(tree, [jnp.asarray(a) for a in params]))


def cut_positions(pos, start, end):
  """Those of tokens start .. end - 1; what is not per token stays."""
  fields = {name: getattr(pos, name)[start:end] for name in ('at_T', 'logit_scale_T', 'key_scale_T', 'window_T')}
  return dataclasses.replace(pos, **fields)


def _layer(module, index):
  graphdef, params = nnx.split(module)
  return nnx.merge(graphdef, jax.tree.map(lambda a: a[index], params))


def decode(lm, tokens_BT, pos, sizes):
  """f32[B, T, V]: logits of chunks of these sizes, one after the other, of a model of one slot.

  The queries of each meet its keys and those that earlier ones left by `attend_tiles`' offsets. Of schemes that read
  the layer's input (FoX) that is kept too.
  """
  (slot,), (shared,), cfg = lm.slots, lm.schemes, lm.cfg
  caches = [[] for _ in range(cfg.layers)]
  logits, start = [], 0
  for size in sizes:
    end = start + size
    here = cut_positions(pos, start, end)
    x_BtD = shared.embed(lm.embedding(tokens_BT[:, start:end]), here)
    for i, cache in enumerate(caches):
      block = _layer(slot, i)
      scheme = _layer(shared, i) if shared.per_layer else shared
      x_BtD = x_BtD + _attend(block, scheme, block.norm_attention(x_BtD), cache, pos, start, end)
      x_BtD = x_BtD + block.mlp(block.norm_mlp(x_BtD))
    logits.append(lm.logits(lm.norm(x_BtD)))
    start = end
  return jnp.concatenate(logits, 1)


def _attend(block, scheme, h_BtD, cache, pos, start, end):
  at, cfg = block.attention, block.cfg
  b, t, _ = h_BtD.shape

  def heads(linear, n):
    x_BtNH = linear(h_BtD).reshape(b, t, n, cfg.width)
    return jnp.pad(x_BtNH, ((0, 0), (start, pos.at_T.shape[0] - end), (0, 0), (0, 0)))

  # As tokens start .. end - 1 of the whole: a rotation may read its middle (xPos) or count its tokens (LongRoPE).
  q_BTNR, k_BTKR = scheme.rotate(heads(at.query, cfg.heads), heads(at.key, cfg.kv), pos)
  q_BtNR = (q_BTNR * scheme.query_scale(pos)[:, :, None])[:, start:end]
  k_BtKR = (k_BTKR * pos.key_scale_T[:, None, None])[:, start:end]
  cache.append((h_BtD, k_BtKR, heads(at.value, cfg.kv)[:, start:end]))
  h_BsD, k_BsKR, v_BsKH = (jnp.concatenate(parts, 1) for parts in zip(*cache))
  state = scheme.token_state(h_BsD, cut_positions(pos, 0, end))
  q_BKGtR = jnp.moveaxis(q_BtNR.reshape(b, t, cfg.kv, cfg.heads // cfg.kv, -1), 1, 3)
  token_T = jnp.arange(end, dtype=jnp.int32)
  running = attend_tiles(
    scheme,
    Side(q_BKGtR, None, jax.tree.map(lambda a: a[:, start:], state)),
    Side(jnp.moveaxis(k_BsKR, 1, 2), None, state),
    jnp.moveaxis(v_BsKH, 1, 2),
    Where(token_T[start:], pos.at_T[start:end], None, pos.window_T[start:end]),
    Where(token_T, pos.at_T[:end], None, None),
    Masks(pos.sinks, None),
    None,
    tile=end,
  )
  o_BNtH = running.o_BNTH / running.l_BNT[..., None]
  return at.out(jnp.moveaxis(o_BNtH, 1, 2).reshape(b, t, -1))

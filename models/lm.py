"""A decoder-only language model with any position scheme: by default pre-norm RMSNorm, SwiGLU, grouped-query attention.

What released models do otherwise is a field of `ModelConfig` each; models/pretrained.py fills them in.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import posenc
from models.attention import Statistics, attend, statistics
from models.ring import BATCH, CONTEXT, lies
from posenc import Positions, PositionScheme

DTYPES = {'float32': jnp.float32, 'bfloat16': jnp.bfloat16}
NORMS = ('rms', 'layer')
BIASED = ('qkv', 'out', 'mlp', 'norm')
# What stands between an MLP's matrices, and whether it is a gate: f(gate x) * (up x), Shazeer 2020 (2002.05202).
ACTIVATIONS = {
  'swiglu': (jax.nn.silu, True),
  'geglu': (functools.partial(jax.nn.gelu, approximate=True), True),
  'gelu': (functools.partial(jax.nn.gelu, approximate=False), False),
  'gelu_tanh': (functools.partial(jax.nn.gelu, approximate=True), False),
}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Shapes of the LM, and how it is computed.

  `kv_heads` 0 means `heads`, `head_dim` 0 means d_model / heads, `d_mlp` 0 means 8/3 d_model, or 4 d_model without a
  gate. `tied`: the embedding is also the head. `dtype` is that of activations; parameters, positions, softmax and loss
  stay float32. `remat` computes each layer again in the backward pass. `tile`: queries and keys per attention tile, 0
  for what suits the length; `loss_chunk`: positions per chunk of logits. Both are a matter of speed and memory, not of
  values.

  The rest is how released models differ. vocab: rows of the embedding, where there are more than the tokenizer has
  ids; 0: as many. biases: which of BIASED have one. qk_norm: RMSNorm over the width of each head of q and k, before
  they are rotated (Qwen3, Gemma 3). post_norm: a norm after attention and MLP too, before they are added (Gemma).
  parallel: the MLP reads what attention reads, x + attention(x) + mlp(x) (GPT-J, NeoX). embedding_scale, embedding_norm
  (Gemma's sqrt(D), BLOOM): of what enters the first layer, not of the head.
  """

  layers: int = 4
  d_model: int = 128
  heads: int = 4
  kv_heads: int = 0
  head_dim: int = 0
  d_mlp: int = 0
  tied: bool = True
  vocab: int = 0
  norm: str = 'rms'
  norm_eps: float = 1e-6
  activation: str = 'swiglu'
  biases: tuple[str, ...] = ()
  qk_norm: bool = False
  post_norm: bool = False
  parallel: bool = False
  embedding_scale: float = 1.0
  embedding_norm: bool = False
  dropout: float = 0.0
  dtype: str = 'float32'
  remat: bool = False
  tile: int = 0
  loss_chunk: int = 128

  def __post_init__(self):
    for field in ('layers', 'd_model', 'heads', 'loss_chunk'):
      if getattr(self, field) < 1:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at least 1 is allowed')
    for field in ('kv_heads', 'head_dim', 'd_mlp', 'vocab', 'tile'):
      if getattr(self, field) < 0:
        raise ValueError(f'{field} = {getattr(self, field)}: a positive whole number is allowed, or 0 for the default')
    for field in ('layers', 'd_model', 'heads', 'head_dim', 'd_mlp', 'vocab'):
      if getattr(self, field) > 2**20:
        raise ValueError(f'{field} = {getattr(self, field)}: a whole number of at most {2**20} is allowed')
    if not self.head_dim and self.d_model % self.heads:
      raise ValueError(f'heads = {self.heads}: a divisor of d_model = {self.d_model} is allowed, or set head_dim')
    if self.heads % self.kv:
      raise ValueError(f'kv_heads = {self.kv_heads}: a divisor of heads = {self.heads} is allowed')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'dropout = {self.dropout}: a number in [0, 1) is allowed')
    for field, allowed in (('dtype', DTYPES), ('norm', NORMS), ('activation', ACTIVATIONS)):
      if getattr(self, field) not in allowed:
        raise ValueError(f'{field} = {getattr(self, field)!r}: allowed: {", ".join(allowed)}')
    if unknown := set(self.biases) - set(BIASED):
      raise ValueError(f'biases = {self.biases}: {", ".join(sorted(unknown))} is none of {", ".join(BIASED)}')
    if self.norm == 'rms' and 'norm' in self.biases:
      raise ValueError(f"biases = {self.biases}: 'norm' is allowed with norm = 'layer' only")
    for field in ('norm_eps', 'embedding_scale'):
      if not 0 < getattr(self, field) < math.inf:
        raise ValueError(f'{field} = {getattr(self, field)}: a finite number above 0 is allowed')

  @property
  def kv(self) -> int:
    return self.kv_heads or self.heads

  @property
  def width(self) -> int:
    return self.head_dim or self.d_model // self.heads

  @property
  def mlp(self) -> int:
    """8/3 D keeps a gate's three matrices at the size of the classic two; rounded up to a multiple of 32."""
    return self.d_mlp or (-(-8 * self.d_model // 3 // 32) * 32 if self.gated else 4 * self.d_model)

  @property
  def gated(self) -> bool:
    return ACTIVATIONS[self.activation][1]


@jax.custom_vjp
def _product(x_BTD: jax.Array, w_DF: jax.Array) -> jax.Array:
  """x @ w, with the weights' gradient said as x^T dy.

  By itself JAX says (dy^T x)^T, and XLA for CPUs then writes dy out transposed and multiplies at half speed: forward
  and backward of an MLP (64, 128, 128) took 1.5 times as long. Flattening to [B * T, D] would do as well on one device,
  and gather the sequence from all devices that share it.
  """
  return jnp.einsum('...D,DF->...F', x_BTD, w_DF)


def _product_forward(x_BTD, w_DF):
  return _product(x_BTD, w_DF), (x_BTD, w_DF)


def _product_backward(saved, dy_BTF):
  x_BTD, w_DF = saved
  return jnp.einsum('...F,DF->...D', dy_BTF, w_DF), jnp.einsum('...D,...F->DF', x_BTD, dy_BTF)


_product.defvjp(_product_forward, _product_backward)


def _dot_general(x: jax.Array, w: jax.Array, *_: Any, **__: Any) -> jax.Array:
  """`_product` as `nnx.Linear` calls it. One function: two lambdas would make two graphdefs."""
  return _product(x, w)


def _linear(d_in: int, d_out: int, cfg: ModelConfig, rngs: nnx.Rngs, part: str = '', shrink: float = 1.0) -> nnx.Linear:
  """part: of BIASED, which says whether there is a bias; the head has none."""
  init = nnx.initializers.variance_scaling(shrink, 'fan_in', 'truncated_normal')
  return nnx.Linear(
    d_in,
    d_out,
    use_bias=part in cfg.biases,
    dtype=DTYPES[cfg.dtype],
    kernel_init=init,
    dot_general=_dot_general,
    rngs=rngs,
  )


def _norm(cfg: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
  shared: dict[str, Any] = {'epsilon': cfg.norm_eps, 'dtype': DTYPES[cfg.dtype], 'rngs': rngs}
  if cfg.norm == 'rms':
    return nnx.RMSNorm(cfg.d_model, **shared)
  # The fast variance, E[x^2] - E[x]^2, cancels where the mean is large, as it is in GPT-2's last layers.
  return nnx.LayerNorm(cfg.d_model, use_bias='norm' in cfg.biases, use_fast_variance=False, **shared)


def _maybe(module: nnx.Module | None, x: jax.Array) -> jax.Array:
  return x if module is None else module(x)


class Attention(nnx.Module):
  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.cfg = cfg
    self.query = _linear(cfg.d_model, cfg.heads * cfg.width, cfg, rngs, 'qkv')
    self.key = _linear(cfg.d_model, cfg.kv * cfg.width, cfg, rngs, 'qkv')
    self.value = _linear(cfg.d_model, cfg.kv * cfg.width, cfg, rngs, 'qkv')
    # Both writers into the residual stream start small, so that its variance does not grow with depth (GPT-2).
    self.out = _linear(cfg.heads * cfg.width, cfg.d_model, cfg, rngs, 'out', shrink=0.5 / cfg.layers)
    head_norm = functools.partial(nnx.RMSNorm, cfg.width, epsilon=cfg.norm_eps, dtype=DTYPES[cfg.dtype], rngs=rngs)
    self.norm_query, self.norm_key = (head_norm(), head_norm()) if cfg.qk_norm else (None, None)

  def __call__(
    self,
    x_BTD: jax.Array,
    scheme: PositionScheme,
    pos: Positions,
    tile: int,
    mesh: Mesh | None = None,
    last: int | None = None,
  ) -> jax.Array:
    """[B, T, D]; of the `last` tokens alone, [B, last, D]."""
    b, t, _ = x_BTD.shape
    q_BTNH, k_BTKH = self.query_key(x_BTD)
    v_BTKH = self.value(x_BTD).reshape(b, t, self.cfg.kv, self.cfg.width)
    # Of the whole sequence, also where it lies on many devices: it may run along it.
    state = scheme.token_state(x_BTD, pos)
    o_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, scheme, pos, state, tile=tile, mesh=mesh, last=last)
    return self.out(o_BTNH.reshape(b, o_BTNH.shape[1], -1))

  def query_key(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    b, t, _ = x_BTD.shape
    q_BTNH = self.query(x_BTD).reshape(b, t, self.cfg.heads, self.cfg.width)
    k_BTKH = self.key(x_BTD).reshape(b, t, self.cfg.kv, self.cfg.width)
    return _maybe(self.norm_query, q_BTNH), _maybe(self.norm_key, k_BTKH)


class MLP(nnx.Module):
  def __init__(self, cfg: ModelConfig, *, rngs: nnx.Rngs):
    self.activation = cfg.activation
    self.gate = _linear(cfg.d_model, cfg.mlp, cfg, rngs, 'mlp') if cfg.gated else None
    self.up = _linear(cfg.d_model, cfg.mlp, cfg, rngs, 'mlp')
    self.down = _linear(cfg.mlp, cfg.d_model, cfg, rngs, 'mlp', shrink=0.5 / cfg.layers)

  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    f, _ = ACTIVATIONS[self.activation]
    if self.gate is None:
      return self.down(f(self.up(x_BTD)))
    return self.down(f(self.gate(x_BTD)) * self.up(x_BTD))


def _dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  if key is None or not rate:
    return x
  return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0).astype(x.dtype)


class Block(nnx.Module):
  def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
    self.cfg = cfg
    self.norm_attention, self.norm_mlp = _norm(cfg, rngs), _norm(cfg, rngs)
    self.attention = Attention(cfg, rngs=rngs)
    self.mlp = MLP(cfg, rngs=rngs)
    self.post_attention, self.post_mlp = (_norm(cfg, rngs), _norm(cfg, rngs)) if cfg.post_norm else (None, None)

  def __call__(
    self,
    x_BTD: jax.Array,
    scheme: PositionScheme,
    pos: Positions,
    tile: int,
    key: jax.Array | None,
    mesh: Mesh | None = None,
    last: int | None = None,
  ) -> jax.Array:
    keys = (None, None) if key is None else jax.random.split(key)
    mixed_BTD = self.attention(self.norm_attention(x_BTD), scheme, pos, tile, mesh, last)
    mixed_BTD, x_BTD = _maybe(self.post_attention, mixed_BTD), x_BTD[:, -(last or 0) :]
    sum_BTD = x_BTD + _dropout(mixed_BTD, self.cfg.dropout, keys[0])
    read_BTD = x_BTD if self.cfg.parallel else sum_BTD
    mixed_BTD = _maybe(self.post_mlp, self.mlp(self.norm_mlp(read_BTD)))
    return sum_BTD + _dropout(mixed_BTD, self.cfg.dropout, keys[1])

  def statistics(
    self, x_BTD: jax.Array, scheme: PositionScheme, pos: Positions, tile: int, last: int, beyond: int
  ) -> Statistics:
    """Of this block's attention, see `models.attention.statistics`."""
    x_BTD = self.norm_attention(x_BTD)
    state = scheme.token_state(x_BTD, pos)
    return statistics(*self.attention.query_key(x_BTD), scheme, pos, state, last=last, beyond=beyond, tile=tile)


def check_pattern(cfg: ModelConfig, schemes: Sequence[PositionScheme]) -> None:
  """Raises unless these schemes, one per slot, can share `cfg.layers` layers."""
  names = tuple(scheme.name for scheme in schemes)
  if cfg.layers % len(names):
    raise ValueError(
      f'model.layers = {cfg.layers}: a multiple of the {len(names)} slots of posenc = {names} is allowed'
    )
  for scheme in schemes[1:]:
    if type(scheme).embed is not PositionScheme.embed:
      raise ValueError(f'posenc = {names}: {scheme.name} adds to the embeddings; it is allowed in the first slot only')


class LM(nnx.Module):
  """Token ids in, negative log-likelihoods out.

  `pattern` names the schemes of a repeating pattern of layers, each name a **slot**: `('rope', 'rope', 'nope')`; one
  name is the plain case. Blocks of a slot are stacked on a leading axis and scanned over the repeats of the pattern, so
  that the checkpoint does not depend on how layers are run. The LM owns the schemes: one per slot, for all its layers,
  or, where the scheme says `per_layer`, one for each, stacked and scanned like the slot's blocks.

  `mesh`, which `merge` sets, spreads a call over devices: batch and sequence, and one layer's parameters at a time.
  """

  mesh: Mesh | None = None

  def __init__(self, cfg: ModelConfig, pattern: Sequence[str], *, vocab_size: int, train_len: int, rngs: nnx.Rngs):
    self.cfg = cfg
    std = cfg.d_model**-0.5  # logits of unit variance where the embedding is also the head
    init = nnx.initializers.normal(std)
    self.embedding = nnx.Embed(vocab_size, cfg.d_model, embedding_init=init, rngs=rngs)
    repeats = cfg.layers // len(pattern)

    def stacked(make):
      return nnx.vmap(make, in_axes=0, out_axes=0)(rngs.split(repeats))

    def build(text):
      shapes = {'heads': cfg.heads, 'head_dim': cfg.width, 'd_model': cfg.d_model, 'train_len': train_len}

      def make(rngs):
        return posenc.build(text, rngs=rngs, **shapes)

      scheme = make(rngs)  # says whether it is one for all layers
      return stacked(make) if scheme.per_layer else scheme

    self.schemes = nnx.List(build(text) for text in pattern)
    check_pattern(cfg, self.schemes)
    self.slots = nnx.List(stacked(functools.partial(Block, cfg)) for _ in pattern)
    self.norm_embedding = _norm(cfg, rngs) if cfg.embedding_norm else None
    self.norm = _norm(cfg, rngs)
    self.head = None if cfg.tied else _linear(cfg.d_model, vocab_size, cfg, rngs)

  def hidden(
    self,
    tokens_BT: jax.Array,
    pos: Sequence[Positions],
    *,
    tile: int | None = None,
    key: jax.Array | None = None,
    last: int | None = None,
  ) -> jax.Array:
    """Final states, [B, T, D]. `pos` has one `Positions` per slot. Dropout acts only where a `key` is given.

    last: of so many tokens at the end alone, [B, last, D], for which the last layer is computed. On one device.
    """
    return self._through(tokens_BT, pos, tile, key, last=last)[0]

  def statistics(
    self, tokens_BT: jax.Array, pos: Sequence[Positions], *, last: int, beyond: int, tile: int | None = None
  ) -> Statistics:
    """Of the attention of every layer, f32[layers, B, N, last] each: see `models.attention.statistics`."""

    def look(block, x_BTD, scheme, here):
      return block.statistics(x_BTD, scheme, here, tile or self.cfg.tile, last, beyond)

    slots = self._through(tokens_BT, pos, tile, None, look)[1]
    return jax.tree.map(lambda *of: jnp.stack(of, 1).reshape(-1, *of[0].shape[1:]), *slots)

  def _through(
    self,
    tokens_BT: jax.Array,
    pos: Sequence[Positions],
    tile: int | None,
    key: jax.Array | None,
    look: Any = None,
    last: int | None = None,
  ) -> tuple[jax.Array, Any]:
    """Final states, and what `look(block, x_BTD, scheme, pos)` says of each layer's input: by slot, [repeats, ...]."""
    tile = tile or self.cfg.tile
    # Positions of each layer, [repeats, T], are scanned with the layers; the embeddings read those of the first.
    at_layers = [p.at_T if p.at_T.ndim == 2 else None for p in pos]
    first = pos[0] if at_layers[0] is None else dataclasses.replace(pos[0], at_T=at_layers[0][0])
    # Ids that are none make NaN. `nnx.Embed` would read those below 0 from the table's end.
    table_VD = self.embedding.embedding[...].astype(jnp.float32)
    x_BTD = table_VD.at[tokens_BT].get(mode='fill', fill_value=jnp.nan, wrap_negative_indices=False)
    x_BTD = _maybe(self.norm_embedding, x_BTD * self.cfg.embedding_scale)
    x_BTD = self._lies(self.schemes[0].embed(x_BTD, first).astype(DTYPES[self.cfg.dtype]))
    graphdefs, stacks = zip(*(nnx.split(slot) for slot in self.slots))
    scheme_stacks = [nnx.state(scheme) if scheme.per_layer else None for scheme in self.schemes]
    repeats = self.cfg.layers // len(stacks)
    keys = None if key is None else jax.random.split(key, (repeats, len(stacks)))

    def repeat(last, x_BTD, slice_of):
      layers, params, at, slot_keys = slice_of
      seen = []
      for i, (graphdef, layer) in enumerate(zip(graphdefs, layers)):
        block = nnx.merge(graphdef, lies(layer, self.mesh))
        scheme = self.schemes[i] if params[i] is None else nnx.merge(nnx.graphdef(self.schemes[i]), params[i])
        here = pos[i] if at[i] is None else dataclasses.replace(pos[i], at_T=at[i])
        if look is not None:
          seen.append(look(block, x_BTD, scheme, here))
        slot_key, cut = None if slot_keys is None else slot_keys[i], last if i == len(layers) - 1 else None
        x_BTD = self._lies(block(x_BTD, scheme, here, tile, slot_key, self.mesh, cut))
      return x_BTD, tuple(seen)

    if self.cfg.remat:
      repeat = jax.checkpoint(repeat, prevent_cse=False, static_argnums=0)
    # Unrolled while that is cheap to compile: on CPUs the loop costs 10-40 %. The parameters are stacked either way.
    # Not where memory is to be saved: XLA merges an unrolled layer's recomputation with the layer itself.
    unroll = repeats if repeats <= 8 and not self.cfg.remat else 1
    each = stacks, scheme_stacks, at_layers, keys
    if last is None:
      x_BTD, seen = jax.lax.scan(functools.partial(repeat, None), x_BTD, each, unroll=unroll)
      return self.norm(x_BTD), seen
    before, final = (jax.tree.map(lambda a, part=part: a[part], each) for part in (slice(-1), -1))
    x_BTD, _ = jax.lax.scan(functools.partial(repeat, None), x_BTD, before, unroll=max(min(unroll, repeats - 1), 1))
    return self.norm(repeat(last, x_BTD, final)[0]), None

  def _lies(self, x_BTD: jax.Array) -> jax.Array:
    return lies(x_BTD, self.mesh, BATCH, CONTEXT)

  def logits(self, x_BTD: jax.Array) -> jax.Array:
    """f32[B, T, V], never rounded to the compute dtype."""
    table_DV = self.embedding.embedding[...].T if self.head is None else self.head.kernel[...]
    return jnp.einsum('BTD,DV->BTV', x_BTD, table_DV.astype(x_BTD.dtype), preferred_element_type=jnp.float32)

  def nll(
    self,
    tokens_BT: jax.Array,
    targets_BT: jax.Array,
    pos: Sequence[Positions],
    *,
    tile: int | None = None,
    chunk: int | None = None,
    key: jax.Array | None = None,
    last: int | None = None,
  ) -> jax.Array:
    """-log p(target), nats, f32[B, T], 0 for targets below 0, which are not asked for; of the `last` T alone.

    Chunk by chunk of T, and again in the backward pass: [B, T, V] never exists.
    """
    x_BTD = self.hidden(tokens_BT, pos, tile=tile, key=key, last=last)
    targets_BT = targets_BT[:, -(last or 0) :]
    rows, length = targets_BT.shape
    blocks = 1 if self.mesh is None else self.mesh.shape[CONTEXT]
    block = length // blocks  # each device's own part of the sequence is cut into chunks, so that none travels
    chunk = min(chunk or self.cfg.loss_chunk, block)

    @jax.checkpoint
    def loss(xs):
      x_BcD, targets_Bc = xs
      nll_Bc = optax.softmax_cross_entropy_with_integer_labels(self.logits(x_BcD), jnp.maximum(targets_Bc, 0))
      return jnp.where(targets_Bc < 0, 0, nll_Bc)

    if chunk == block:
      return loss((x_BTD, targets_BT))
    pad = -block % chunk

    def chunks(x_BT):
      """[chunks, B, blocks * chunk, ...]"""
      rest = x_BT.shape[2:]
      x_Bnb = jnp.pad(x_BT.reshape(rows, blocks, block, *rest), ((0, 0), (0, 0), (0, pad), *[(0, 0)] * len(rest)))
      x_cBnc = jnp.moveaxis(x_Bnb.reshape(rows, blocks, -1, chunk, *rest), 2, 0)
      return lies(x_cBnc.reshape(-1, rows, blocks * chunk, *rest), self.mesh, None, BATCH, CONTEXT)

    nll_cBc = jax.lax.map(loss, (chunks(x_BTD), chunks(targets_BT)))
    nll_Bnb = jnp.moveaxis(nll_cBc.reshape(-1, rows, blocks, chunk), 0, 2).reshape(rows, blocks, -1)
    return nll_Bnb[..., :block].reshape(rows, length)


def merge(graphdef: Any, params: Any, mesh: Mesh | None = None) -> Any:
  """The model of these parameters, to run on `mesh`. All but its layers, which `hidden` uses one by one, is made whole
  here, once: the table that is embedding and head is read in every chunk of the loss."""
  if mesh is None or mesh.size == 1:
    return nnx.merge(graphdef, params)
  model = nnx.merge(graphdef, {name: x if name == 'slots' else lies(x, mesh) for name, x in params.items()})
  model.mesh = mesh
  return model


def abstract(make) -> tuple[Any, Any]:
  """(graphdef, pure dict of ShapeDtypeStructs) of the model that `make()` would build, without building it."""
  graphdef, state = nnx.split(nnx.eval_shape(make))
  return graphdef, nnx.to_pure_dict(state)

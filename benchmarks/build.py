"""What the benchmarks run of ours: attention alone, and a whole model's loss, under any scheme at any length."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import posenc
from models.attention import attend
from models.lm import LM, ModelConfig, abstract

# Schemes whose defaults do not fit any length.
SPEC = {'rope2d': 'rope2d(width={width})'}


def spec(scheme: str, length: int) -> str:
  return SPEC.get(scheme, scheme).format(width=max(2, round(length**0.5)))


def attention(
  scheme: str,
  *,
  batch: int,
  length: int,
  heads: int,
  head_dim: int,
  tile: int,
  backward: bool,
  fused: bool = True,
  dtype: Any = jnp.float32,
) -> tuple[Callable, tuple[Any, ...]]:
  """f(qkv_B3TNH, x_BTD, params), and arguments for it."""
  d_model = heads * head_dim
  sizes = {'heads': heads, 'head_dim': head_dim, 'd_model': d_model, 'train_len': length}
  made = posenc.build(spec(scheme, length), rngs=nnx.Rngs(0), **sizes)
  pos = posenc.positions('none', [made], length, length)[0]
  graphdef, params = nnx.split(made)

  def forward(qkv, x_BTD, params):
    scheme = nnx.merge(graphdef, params)
    q, k, v = (qkv[:, i] for i in range(3))
    return attend(q, k, v, scheme, pos, scheme.token_state(x_BTD, pos), tile=tile, fused=fused)

  def both(qkv, x_BTD, params):
    return jax.value_and_grad(lambda *a: jnp.square(forward(*a).astype(jnp.float32)).sum(), argnums=(0, 1, 2))(
      qkv, x_BTD, params
    )

  qkv = jax.random.normal(jax.random.key(0), (batch, 3, length, heads, head_dim))
  x_BTD = jax.random.normal(jax.random.key(1), (batch, length, d_model))
  return both if backward else forward, (qkv.astype(dtype), x_BTD.astype(dtype), params)


def temporary_bytes(compiled: Any) -> int:
  """Peak of what the program allocates beside its arguments and results, per device."""
  memory = compiled.memory_analysis()
  if memory is None:
    raise SystemExit('this backend does not say what it allocates')
  return memory.temp_size_in_bytes


def initial(make: Callable[[], LM]) -> Any:
  """Parameters of the model that `make` builds, as a plain tree."""
  return jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()


def evaluation(
  scheme: str, length: int, cfg: ModelConfig, vocab: int, *, run: bool = False
) -> tuple[Callable, tuple[Any, ...]]:
  """A model's losses on one window, as a sweep asks for them, and the shapes of its arguments; `run`: arguments."""

  def make():
    return LM(cfg, (spec(scheme, length),), vocab_size=vocab, train_len=length, rngs=nnx.Rngs(0))

  graphdef, shapes = abstract(make)
  sizes = {'heads': cfg.heads, 'head_dim': cfg.width, 'd_model': cfg.d_model, 'train_len': length}
  made = posenc.build(spec(scheme, length), rngs=nnx.Rngs(0), **sizes)
  pos = posenc.positions('none', [made], length, length)

  def nll(params, tokens_BT, pos):
    return nnx.merge(graphdef, params).nll(tokens_BT, tokens_BT, pos)

  if run:
    return nll, (initial(make), jax.random.randint(jax.random.key(0), (1, length), 0, vocab), pos)
  return nll, (shapes, jax.ShapeDtypeStruct((1, length), jnp.int32), pos)

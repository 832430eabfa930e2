"""Fused kernels behind `models.attention.attend`: which one serves what, and the calls. Everything else is tiles.

| device | kernel | serves |
|---|---|---|
| NVIDIA, compute capability 8.0 | cuDNN, by `jax.nn.dot_product_attention` | bfloat16, q and k of <= 128 channels |
| NVIDIA, 9.0 | the same | bfloat16, <= 256 |
| TPU | splash, of `jax.experimental.pallas.ops.tpu` | bfloat16 |

On either: schemes whose logits are q . k alone (NoPE, sinusoidal, learned, RoPE, xPos, PoPE), with whatever scales a
method puts on them; and those that declare `PositionScheme.columns` (ALiBi, FoX), as more columns of q and k. Not: any
other `score`, `values`, a second position map, sinks, windows that differ between queries, a sequence spread over
devices. A window of one size serves where its number is known when the program is made, as in training.

Columns that are trained or computed from the tokens (FoX) serve without gradients only: their gradient is that of the
columns, which kernels round to bfloat16, and summed over a row as FoX sums it, it is mostly rounding.

float32 is left to tiles on purpose: cuDNN has none, and a float32 run is there to be exact.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.ring import CONTEXT
from posenc import Positions, PositionScheme

# Tokens up to which columns serve. Logits are summed in float32, of numbers as large as m j: at 2**17 tokens and slopes
# below 1 a logit is off by at most 2**-7, as much as bfloat16 queries and keys are wrong by themselves.
LONGEST = 2**17
DTYPE = jnp.bfloat16
LANES = 128  # of a TPU
BLOCK = 512  # of splash's queries and keys
SCORES = ('score', 'bias')  # hooks that a bias is written in


def cudnn(q_BTNR: jax.Array, k_BTKR: jax.Array, v_BTKH: jax.Array, window: int | None) -> jax.Array:
  """Values padded to the width of q and k, which `jax.nn` wants; the width to a multiple of 8, which cuDNN wants."""
  width = v_BTKH.shape[-1]
  q, k, v = _as_wide((q_BTNR, k_BTKR, v_BTKH), 8)
  local = None if window is None else (window - 1, 0)
  o = jax.nn.dot_product_attention(q, k, v, scale=1.0, is_causal=True, local_window_size=local, implementation='cudnn')
  return o[..., :width]


def splash(
  q_BTNR: jax.Array, k_BTKR: jax.Array, v_BTKH: jax.Array, window: int | None, *, interpret: bool = False
) -> jax.Array:
  """Lengths padded to whole blocks, on the right, where no query looks; widths to whole lanes."""
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
  from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

  length, width = q_BTNR.shape[1], v_BTKH.shape[-1]
  block = min(BLOCK, -(-length // LANES) * LANES)
  pad = -length % block
  q, k, v = (
    jnp.pad(jnp.swapaxes(a, 1, 2), ((0, 0), (0, 0), (0, pad), (0, 0)))
    for a in _as_wide((q_BTNR, k_BTKR, v_BTKH), LANES)
  )
  shape = (length + pad, length + pad)
  mask = masks.CausalMask(shape) if window is None else masks.LocalMask(shape, (window - 1, 0), 0)
  sizes = kernel.BlockSizes(
    block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
    block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
  )  # fmt: skip
  heads = masks.MultiHeadMask([mask] * q.shape[1])
  attend = kernel.make_splash_mha(heads, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=interpret)
  o = jax.vmap(attend)(q, k, v)
  return jnp.swapaxes(o, 1, 2)[:, :length, :, :width]  # pyrefly: ignore


def _as_wide(arrays: tuple[jax.Array, ...], multiple: int) -> list[jax.Array]:
  """Zeros on the right of the last axis, up to one width of which `multiple` is a divisor."""
  width = -(-max(a.shape[-1] for a in arrays) // multiple) * multiple
  return [jnp.pad(a, ((0, 0),) * (a.ndim - 1) + ((0, width - a.shape[-1]),)) for a in arrays]


# ---- columns


def terms(x: Any, dtype: Any) -> list[Any]:
  """Numbers of `dtype`, as float32, that sum to x: three of bfloat16, 8 bits each, for the 24 of a float32.

  Fewer where x is known, a numpy array, and fewer will do: one for the slopes of 8 heads. No gradient.
  """
  finfo = jnp.finfo(dtype)
  most = -(-24 // (finfo.nmant + 1))
  if isinstance(x, np.ndarray):
    parts, rest = [], x.astype(np.float32)
    while not parts or rest.any() and len(parts) < most:
      parts.append(rest.astype(dtype).astype(np.float32))
      rest = rest - parts[-1]
    return parts
  # Not astype(dtype).astype(float32): XLA holds that for a no-op, and the second term would be 0.
  rounded = functools.partial(jax.lax.reduce_precision, exponent_bits=finfo.nexp, mantissa_bits=finfo.nmant)
  rest = jax.lax.stop_gradient(x)
  parts = []
  for _ in range(most):
    parts.append(rounded(rest))
    rest = rest - parts[-1]
  return parts


def pairs(columns: tuple[Any, Any], dtype: Any) -> list[tuple[Any, Any]]:
  """(a, b) of `PositionScheme.columns` as columns of `dtype`, whose products sum to sum_E a b to a relative 2**-24."""
  a, b = columns
  found = []
  for e in range(a.shape[-1]):
    of_a, of_b = (terms(x[..., e : e + 1], dtype) for x in (a, b))
    # Products of later terms are below 2**-24 of the whole.
    last = max(len(of_a), len(of_b)) - 1
    found += [(x, y) for i, x in enumerate(of_a) for j, y in enumerate(of_b) if i + j <= last]
  return found


def widen(qkv: Sequence[jax.Array], columns: list[tuple[Any, Any]]) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The columns beside q and k; heads of k and v repeated where a column of k has a number for each query head."""
  q_BTNR, k_BTKR, v_BTKH = qkv
  if not columns:
    return q_BTNR, k_BTKR, v_BTKH
  n = q_BTNR.shape[2]
  if k_BTKR.shape[2] < n and any(b.shape[2] > 1 for _, b in columns):
    k_BTKR, v_BTKH = (jnp.repeat(x, n // x.shape[2], 2) for x in (k_BTKR, v_BTKH))

  def joined(x, more):
    return jnp.concatenate([x, *(jnp.broadcast_to(m, (*x.shape[:-1], 1)).astype(x.dtype) for m in more)], -1)

  return joined(q_BTNR, [a for a, _ in columns]), joined(k_BTKR, [b for _, b in columns]), v_BTKH


# ---- the choice


@dataclasses.dataclass(frozen=True)
class Fused:
  """A kernel for one call of `attend`.

  window: of every query, or None. asks: masks are arguments of the program, to be looked at when it runs; the kernel
  serves where they hide nothing, tiles elsewhere. forward: tiles where a gradient is taken.
  """

  kernel: Callable[..., jax.Array]
  window: int | None = None
  asks: bool = False
  forward: bool = False

  def __call__(
    self,
    qkv: Sequence[jax.Array],
    scheme: PositionScheme,
    at_T: jax.Array,
    window_T: jax.Array,
    state: Any,
    everywhere: Callable[[Callable[..., jax.Array]], Callable[..., jax.Array]],
    tiles: Callable[[], jax.Array],
  ) -> jax.Array:
    """[B, T, N, H], of one dtype with `tiles()`, from q_BTNR, k_BTKR, v_BTKH.

    `everywhere(f)` is f on every device with its share of the batch.
    """
    dtype, length = qkv[0].dtype, at_T.shape[0]

    def fused():
      factors = None if _owner(scheme, 'score') is PositionScheme else scheme.columns(at_T, state)
      wide = widen(qkv, [] if factors is None else pairs(factors, dtype))
      return everywhere(functools.partial(self.kernel, window=self.window))(*wide)

    return jax.lax.cond(jnp.all(window_T >= jnp.arange(1, length + 1)), fused, tiles) if self.asks else fused()


def unless_differentiated(f: Callable, g: Callable) -> Callable:
  """f; but g where a gradient is taken, and its gradient."""
  h = jax.custom_vjp(lambda *arguments: f(*arguments))
  h.defvjp(lambda *arguments: jax.vjp(g, *arguments), lambda pull, d: pull(d))
  return h


def choose(
  scheme: PositionScheme, pos: Positions, state: Any, dtype: Any, width: int, mesh: Any = None, device: Any = None
) -> tuple[Fused | None, str]:
  """The fused kernel for a call of `attend`, and its name; or None, and why it is tiles.

  width: of rotated queries and keys. device: where it runs, if not on the mesh's or on jax's first.

  What a program is made of is settled here: device, dtype, shapes, the scheme's hooks, the structure of `pos`. Its
  numbers may be arguments, so that one program serves every method, and some methods have windows: such a program holds
  the kernel and the tiles, and looks at the numbers when it runs.
  """
  device = device or _device(mesh)
  length = pos.at_T.shape[0]
  if device.platform not in ('gpu', 'tpu'):
    return None, f'no fused kernel for {device.platform}'
  if dtype != DTYPE:
    return None, f'{jnp.dtype(dtype).name}: fused kernels are for bfloat16'
  if mesh is not None and mesh.shape[CONTEXT] > 1:
    return None, 'the sequence lies on several devices'
  if pos.far is not None:
    return None, 'a second position map'
  if _owner(scheme, 'values') is not PositionScheme:
    return None, f'{scheme.name} adds to the values'
  columns, forward = 0, False
  if _owner(scheme, 'score') is not PositionScheme:
    # Columns speak for the score that was there when they were written, not for one that overrides it.
    declares = _owner(scheme, 'columns')
    stale = any(_owner(scheme, hook) is not declares and issubclass(_owner(scheme, hook), declares) for hook in SCORES)
    factors = None if stale else scheme.columns(pos.at_T, state)
    if factors is None:
      return None, f'{scheme.name} has a score of its own'
    if length > LONGEST:
      return None, f'{length} tokens: columns serve up to {LONGEST}'
    columns = len(pairs(factors, dtype))
    trained = set(nnx.to_pure_dict(nnx.state(scheme))) - {'ssmax'}  # which is in q
    forward = bool(trained or jax.tree.leaves(state))
  kernel = splash
  if device.platform == 'gpu':
    kernel, capability = cudnn, str(getattr(device, 'compute_capability', ''))
    if not capability.replace('.', '', 1).isdigit() or float(capability) < 8:
      return None, f'compute capability {capability or "unknown"}: cuDNN attention wants 8.0 or more'
    widest = 256 if float(capability) >= 9 else 128
    if width + columns > widest:
      return None, f'q and k of {width} channels and {columns} columns: at most {widest}'
  window, asks = None, any(isinstance(a, jax.core.Tracer) for a in (pos.window_T, pos.sinks))
  if not asks:
    window_T, sinks = np.asarray(pos.window_T), np.asarray(pos.sinks)
    if not (window_T >= np.arange(1, length + 1)).all():
      if sinks > 0 or window_T.min() < 1 or window_T.min() != window_T.max():
        return None, 'sinks, or windows of several sizes'
      window = int(window_T[0])
  return Fused(kernel, window, asks, forward), kernel.__name__


def _device(mesh: Any) -> Any:
  if mesh is not None:
    return mesh.devices.flat[0]
  default = jax.config.jax_default_device  # pyrefly: ignore
  return default if isinstance(default, jax.Device) else jax.devices(default)[0]


def _owner(scheme: PositionScheme, hook: str) -> type:
  """The class that a scheme has this hook from."""
  return next((cls for cls in type(scheme).__mro__ if hook in vars(cls)), PositionScheme)

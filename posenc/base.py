"""The two types everything positional is made of: `Positions`, which a scaling method builds and a scheme reads.

Axis letters as everywhere: `B` batch, `T` length, `N` query heads, `K` key/value heads, `H` head width, `R` its width
after rotation, `P` frequency pairs, `D` model; lower case `t`, `s` = a tile of queries, a tile of keys.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct


class Unsupported(Exception):
  """A combination that has no meaning, with the reason. A sweep records it as that point's outcome."""


class PosParam(nnx.Param):
  """A parameter of a position scheme: trained, but never decayed towards zero."""


class Dims(NamedTuple):
  """The shapes a scheme is built for."""

  heads: int
  head_dim: int
  d_model: int
  train_len: int


@struct.dataclass
class Far:
  """A second position map, read where a key lies `threshold` tokens or more behind its query."""

  at_q_T: Any
  at_k_T: Any
  threshold: Any  # []


@struct.dataclass
class Positions:
  """Where tokens are said to stand and how that is read: arrays only, of one shape for every method at one length.

  So that one compiled program serves every method. `window`, `sinks`, `onset` and `far.threshold` count tokens,
  everything else speaks of positions. Methods compute in numpy float64; `posenc.positions` casts to float32 once.
  """

  at_T: Any  # position of each token; integers in every shipped rule
  inv_freq_P: Any  # frequencies in force, radians per position
  onset: Any  # []: tokens before it keep the trained frequencies (LongRoPE's n-hat)
  logit_scale_T: Any  # factor on the logits, per query (YaRN: attention factor squared)
  key_scale_T: Any  # the same, per key
  window: Any  # []: keys this many tokens back or more are masked; inf: none
  sinks: Any  # []: first keys that stay visible outside the window
  far: Far | None = None


def distance(at_t: jax.Array, at_s: jax.Array) -> jax.Array:
  """How far each key lies behind each query, f32[t, s].

  Clipped at 0: a logarithm of the masked triangle would be NaN, and NaN times the mask's 0 reaches the gradients.
  """
  return jnp.maximum(at_t[:, None] - at_s[None, :], 0.0)


class PositionScheme(nnx.Module):
  """No positional encoding, and the interface: every hook is the identity here, a scheme overrides what it needs.

  NoPE: Haviv et al. 2022 (2203.16634), Kazemnejad et al. 2023 (2305.19466). Order is known from the causal mask alone.

  A constructor takes `dims` and `rngs`, then the keyword-only arguments a config may set. Attributes are plain Python
  numbers and strings, or `PosParam`: NNX turns an array attribute, a numpy one included, into state, and it would be
  trained. Constants are therefore properties.
  """

  name = 'nope'  # its key in SCHEMES; `posenc.build` sets it
  rot = 0  # rotary width: channels of a head that are rotated
  base = 0.0  # frequency base, where there is one
  max_len: int | None = None  # longest length with defined positions; None: any
  relative = True  # adding a constant to every position changes nothing
  per_layer = False  # parameters for each layer, stacked by the model; else one scheme for all layers of its slot

  def __init__(self, dims: Dims, rngs: nnx.Rngs):
    del rngs
    self.dims = dims
    self.q_scale = dims.head_dim**-0.5  # what `attend` multiplies q by

  @property
  def inv_freq_P(self) -> np.ndarray:
    """theta_p = base**(-2p/rot) for p < rot/2, float64: the trained frequencies. Empty without a rotation."""
    return np.float64(self.base) ** (-np.arange(0, self.rot, 2, dtype=np.float64) / max(self.rot, 1))

  def remarks(self) -> list[str]:
    """What a reader of the curve should know about this scheme at this training length, one line each."""
    return []

  def embed(self, x_BTD: jax.Array, pos: Positions) -> jax.Array:
    """Adds to the token embeddings. Called once, for the first slot of the layer pattern."""
    return x_BTD

  def token_state(self, x_BTD: jax.Array, pos: Positions) -> Any:
    """Numbers per token computed from a layer's input, a tree of [B, T, E] arrays; () for most schemes."""
    return ()

  def rotate(self, q_BTNH: jax.Array, k_BTKH: jax.Array, pos: Positions) -> tuple[jax.Array, jax.Array]:
    """Queries and keys as seen from their positions; R may differ from H."""
    return q_BTNH, k_BTKH

  def init_carry(self, q_BtNR: jax.Array) -> Any:
    """State that runs along a row of key tiles, from the diagonal leftwards; () for most schemes."""
    return ()

  def score(
    self,
    logits_BNts: jax.Array,
    q_BtNR: jax.Array,
    k_BsKR: jax.Array,
    at_t: jax.Array,
    at_s: jax.Array,
    state_t: Any,
    state_s: Any,
    carry: Any,
  ) -> tuple[jax.Array, Any]:
    """Logits of a tile, scaled and causally masked with a large negative number -> logits, carry."""
    return logits_BNts, carry

  def values(self, p_BNts: jax.Array, at_t: jax.Array, at_s: jax.Array) -> jax.Array | None:
    """What is added to p @ v, [B, N, t, H], linear in p; None for nothing."""
    return None


class Bias(PositionScheme):
  """A scheme that adds a number per head and pair of positions to the logits."""

  def bias(self, at_t: jax.Array, at_s: jax.Array) -> jax.Array:
    """f32[N, t, s], not scaled by 1/sqrt(H) nor by a method's temperature."""
    raise NotImplementedError(f'{type(self).__name__} is a Bias without a bias()')

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    return logits_BNts + self.bias(at_t, at_s), carry

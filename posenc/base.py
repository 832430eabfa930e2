"""The two types everything positional is made of: `Positions`, which a scaling method builds and a scheme reads.

Axis letters as everywhere: `B` batch, `T` length, `N` query heads, `K` key/value heads, `H` head width, `R` its width
after rotation, `P` frequency pairs, `D` model; lower case `t`, `s` = a tile of queries, a tile of keys.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from spec import SpecError


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
  # Of no method, but of evaluation/diagnosis.py, which holds the angle of some pairs alone.
  inv_freq_P: Any = None  # this map's frequencies; None: those in force
  phase_P: Any = None  # radians by which this map turns its queries besides; None: not


@struct.dataclass
class Positions:
  """Where tokens are said to stand and how that is read: arrays only, of one shape for every method at one length.

  So that one compiled program serves every method. `window_T`, `sinks`, `onset` and `far.threshold` count tokens,
  everything else speaks of positions. Methods compute in numpy float64; `posenc.positions` casts to float32 once.
  """

  # Position of each token, never less than the one before; integers in every shipped rule. [repeats, T]: of each layer
  # of a slot.
  at_T: Any
  inv_freq_P: Any  # frequencies in force, radians per position
  onset: Any  # []: tokens before it keep the trained frequencies (LongRoPE's n-hat)
  logit_scale_T: Any  # factor on the logits, per query (YaRN: attention factor squared)
  key_scale_T: Any  # the same, per key
  window_T: Any  # per query: keys this many tokens back or more are masked; inf: none
  sinks: Any  # []: first keys that stay visible outside the window
  far: Far | None = None
  phase_P: Any = None  # radians added to every angle; None: not

  def afar(self) -> tuple['Positions', 'Positions']:
    """How the second position map reads queries, and keys."""
    assert self.far is not None
    inv_freq_P = self.inv_freq_P if self.far.inv_freq_P is None else self.far.inv_freq_P
    keys = dataclasses.replace(self, at_T=self.far.at_k_T, inv_freq_P=inv_freq_P)
    return dataclasses.replace(keys, at_T=self.far.at_q_T, phase_P=self.far.phase_P), keys


def distance(at_t: jax.Array, at_s: jax.Array) -> jax.Array:
  """How far each key lies behind each query, f32[t, s].

  Clipped at 0: a logarithm of the masked triangle would be NaN, and NaN times the mask's 0 reaches the gradients.
  """
  return jnp.maximum(at_t[:, None] - at_s[None, :], 0.0)


class PositionScheme(nnx.Module):
  """No positional encoding (Haviv et al. 2022, 2203.16634; Kazemnejad et al. 2023, 2305.19466): order is known from the
  causal mask alone. And the interface: every hook is the identity here, a scheme overrides what it needs.

  A constructor takes `dims` and `rngs`, then the keyword-only arguments a config may set. Attributes are plain Python
  numbers and strings, or `PosParam`: NNX turns an array attribute, a numpy one included, into state, and it would be
  trained. Constants are therefore properties.
  """

  name = 'nope'  # its key in SCHEMES; `posenc.build` sets it
  rot = 0  # rotary width: channels of a head that are rotated
  base = 0.0  # frequency base, where there is one
  max_len: int | None = None  # longest length with defined positions; None: any
  max_len_why = ''  # where it is not a table that ends there
  relative = True  # adding a constant to every position changes nothing
  per_layer = False  # parameters for each layer, stacked by the model; else one scheme for all layers of its slot
  window = np.inf  # tokens a query sees, itself included, in training and, where no method says otherwise, after it
  ssmax: PosParam | None = None

  def __init__(self, dims: Dims, rngs: nnx.Rngs):
    del rngs
    self.dims = dims
    self.q_scale = dims.head_dim**-0.5  # what `attend` multiplies q by

  @property
  def inv_freq_P(self) -> np.ndarray:
    """theta_p = base**(-2p/rot) for p < rot/2, float64: the trained frequencies. Empty without a rotation."""
    return np.float64(self.base) ** (-np.arange(0, self.rot, 2, dtype=np.float64) / max(self.rot, 1))

  @property
  def reads_distance(self) -> bool:
    """Whether attention depends on where the tokens stand, so that a second position map changes something.

    A scheme whose `score` reads the text alone sets it to False; a contract test compares the claim with what happens.
    """
    cls = type(self)
    return cls.rotate is not PositionScheme.rotate or cls.score is not PositionScheme.score

  @property
  def reads_positions(self) -> bool:
    """Whether where the tokens stand changes anything: attention, or what is added to the embeddings."""
    return self.reads_distance or type(self).embed is not PositionScheme.embed

  def plain(self, length: int) -> Positions:
    """Positions 0, 1, 2 ... as trained, float64: what scaling methods start from."""
    return Positions(
      at_T=np.arange(length, dtype=np.float64),
      inv_freq_P=self.inv_freq_P,
      onset=0.0,
      logit_scale_T=np.ones(length),
      key_scale_T=np.ones(length),
      window_T=np.full(length, self.window),
      sinks=0.0,
    )

  def query_scale(self, pos: Positions) -> jax.Array:
    """What `attend` multiplies queries by, f32[T, N or 1]: q_scale, the method's factor, and SSMax's if trained."""
    scale_T1 = (pos.logit_scale_T * self.q_scale)[:, None]
    if self.ssmax is None:
      return scale_T1
    seen_T = jnp.minimum(jnp.arange(1.0, pos.at_T.shape[0] + 1), pos.window_T + pos.sinks)
    return scale_T1 * self.ssmax[...] * jnp.log(seen_T)[:, None]

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

  def columns(self, at_T: jax.Array, state: Any) -> tuple[Any, Any] | None:
    """(a, b), f32, broadcastable to [B, T, N, E], where `score` is logits + sum_E a[t] (b[s] - b[t]); None otherwise.

    Such a bias rides on the product of q and k as more columns: in fused kernels (`models/kernels.py`) without
    the number per query, which softmax does not see; in tiles with it, since those on the diagonal add `score` itself.
    So one that is not 0 from a token to itself must not be declared. Read through `columns_in_force`.
    """
    return None

  def columns_in_force(self, at_T: jax.Array, state: Any) -> tuple[Any, Any] | None:
    return self.columns(at_T, state) if self._speaks('columns') else None

  def level(self) -> tuple[float, jax.Array] | None:
    """(distance, f32[N]) where `score` adds these numbers, one a head, to all pairs that far apart or further, and is
    None otherwise. Read through `level_in_force`."""
    return None

  def level_in_force(self) -> tuple[float, jax.Array] | None:
    return self.level() if self._speaks('level') else None

  def _speaks(self, hook: str) -> bool:
    """Whether `hook` speaks for the bias in force: no longer where a subclass of who wrote it overrides that."""
    wrote = owner(self, hook)
    newer = (cls for cls in (owner(self, of) for of in ('score', 'bias', 'of')) if cls is not wrote)
    return not any(issubclass(cls, wrote) for cls in newer)

  def values(self, p_BNts: jax.Array, at_t: jax.Array, at_s: jax.Array) -> jax.Array | None:
    """What is added to p @ v, [B, N, t, H], linear in p; None for nothing."""
    return None


def owner(scheme: PositionScheme, hook: str) -> type:
  """The class that a scheme has this hook from."""
  return next((cls for cls in type(scheme).__mro__ if hook in vars(cls)), PositionScheme)


def with_options(
  scheme: PositionScheme, rngs: nnx.Rngs, *, window: int | None = None, ssmax: bool = False
) -> PositionScheme:
  """The options that every scheme has, whichever it is: `rope(window=128)`, `nope(ssmax=True)`.

  window: sliding-window attention, trained and evaluated: a query sees this many keys, itself included.
  ssmax: scalable softmax (Nakanishi 2025, 2501.19399): logits q . k times s ln n, n the keys that the query sees, s
    learned per head, and per layer unless the scheme shares its own parameters among layers. s starts at 1 / mean(ln n)
    over the training length. Biases are left alone, like by any temperature here.
  """
  if window is not None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
      raise SpecError(f'{scheme.name}: window = {window!r}: a whole number of at least 1 is allowed, or None')
    scheme.window = window
  if ssmax:
    if scheme.dims.train_len < 2:
      raise SpecError(f'{scheme.name}: ssmax = True: a training length of at least 2 is allowed')
    scheme.per_layer = scheme.per_layer or not jax.tree.leaves(nnx.state(scheme))
    log_n = np.log(np.minimum(np.arange(1, scheme.dims.train_len + 1), scheme.window))
    scheme.ssmax = PosParam(jnp.full(scheme.dims.heads, 1 / log_n.mean(), jnp.float32))
  return scheme


class Bias(PositionScheme):
  """A scheme that adds a number per head and pair of positions to the logits."""

  def bias(self, at_t: jax.Array, at_s: jax.Array) -> jax.Array:
    """f32[N, t, s], not scaled by 1/sqrt(H) nor by a method's temperature."""
    raise NotImplementedError(f'{type(self).__name__} is a Bias without a bias()')

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    return _add_bias(logits_BNts, self.bias(at_t, at_s)), carry


@jax.custom_vjp
def _add_bias(logits_BNts: jax.Array, bias_Nts: jax.Array) -> jax.Array:
  return logits_BNts + bias_Nts


def _sum_over_batch(_, d_BNts: jax.Array) -> tuple[jax.Array, jax.Array]:
  # A product with ones, at memory's speed. XLA for CPUs sums over a first axis 5 to 30 times slower: as long as
  # attention itself.
  ones_B = jnp.ones(d_BNts.shape[0])
  return d_BNts, jnp.einsum('B,BNts->Nts', ones_B, d_BNts, precision=jax.lax.Precision.HIGHEST)


_add_bias.defvjp(lambda logits_BNts, bias_Nts: (_add_bias(logits_BNts, bias_Nts), None), _sum_over_batch)


class DistanceBias(Bias):
  """A bias of the distance alone, `of(distance)`.

  Where the positions of a tile are consecutive, it is computed once per diagonal: t + s - 1 numbers for t s, and the
  same for its gradient, which is summed along diagonals before the parameters see it.
  """

  def of(self, distance: jax.Array) -> jax.Array:
    """f32[N, ...] of distances of any shape, none negative."""
    raise NotImplementedError(f'{type(self).__name__} is a DistanceBias without an of()')

  def bias(self, at_t, at_s):
    t, s = len(at_t), len(at_s)

    def by_diagonal():
      # From the corner of the farthest pair to that of the nearest.
      return along_diagonals(self.of(distance(at_t[0] + jnp.arange(t - 1.0, -s, -1), at_s[:1])[:, 0]), t)

    consecutive = jnp.all(at_t == at_t[0] + jnp.arange(t)) & jnp.all(at_s == at_s[0] + jnp.arange(s))
    return jax.lax.cond(consecutive, by_diagonal, lambda: self.of(distance(at_t, at_s)))


def along_diagonals(x_NU: jax.Array, t: int) -> jax.Array:
  """[N, t + s - 1] -> [N, t, s]: row a is x[t - 1 - a : t - 1 - a + s].

  Rows one apart in a sequence whose period is one longer than they are: a broadcast and two reshapes, which XLA does at
  the speed of memory. A slice per row takes twice as long, a gather of every number three times.
  """
  n, u = x_NU.shape
  rows = jnp.broadcast_to(jnp.pad(x_NU, ((0, 0), (0, 1)))[:, None], (n, t, u + 1)).reshape(n, -1)
  return rows[:, t - 1 : t - 1 + t * u].reshape(n, t, u)[:, :, : u + 1 - t]

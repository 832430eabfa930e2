"""Models whose use of context is known by construction: what a protocol makes of them is the protocol's own doing.

  python -m evaluation.certify

A mock is a function of a target's context alone, the number of positions to its left in the window. A real network
that reads at most so many tokens back checks the rest of the way, from tokens to curve.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

import posenc
from data import TokenDocument
from evaluation.plan import EvalConfig, Plan
from evaluation.protocols import STREAM, Numbers, Window, reduce
from models.lm import LM, ModelConfig

VOCAB = 257


class Null(NamedTuple):
  """nll(context_t) -> nats. `truth(L)`, its loss at length L, is that of a target with a whole window before it.

  scatter: standard deviation of what a target's loss is off by, nats, drawn anew for every window.
  """

  name: str
  nll: Callable[[np.ndarray], np.ndarray]
  scatter: float = 0.0

  def truth(self, length: int) -> float:
    return float(self.nll(np.array([length - 1]))[0])

  def row(self, window: Window) -> np.ndarray:
    nll = self.nll(np.arange(window.length - window.scored, window.length)).astype(np.float64)
    if not self.scatter:
      return nll
    rng = np.random.default_rng([window.document - STREAM, window.start, window.length])
    return nll + self.scatter * rng.standard_normal(window.length)[-window.scored :]


def smooth(k: int) -> Null:
  """Uses at most k tokens, each a little less than the one before: 2.9 + 2.6 (min(t, k) + 1)^-0.45."""
  return Null(f'uses at most {k} tokens', lambda t: 2.9 + 2.6 * (np.minimum(t, k) + 1.0) ** -0.45)


def step(k: int) -> Null:
  """Uses all of its last k tokens or, where it has fewer, none."""
  return Null(f'needs {k} tokens', lambda t: np.where(t >= k, 3.0, 4.0))


def copy(distance: int) -> Null:
  """Knows a target from the token `distance` before it, and is uniform where that is not in the window."""
  return Null(f'copies from {distance} back', lambda t: np.where(t >= distance, 0.0, math.log(VOCAB)))


def uniform() -> Null:
  return Null('uniform', lambda t: np.full(np.shape(t), math.log(VOCAB)))


def broken(limit: int) -> Null:
  """`smooth(limit)` as far as it was trained, and worse than uniform beyond."""
  near = smooth(limit).nll
  return Null(f'breaks beyond {limit} tokens', lambda t: np.where(t < limit, near(t), 8.0))


def flicker(k: int, scatter: float = 1.0) -> Null:
  """`smooth(k)` whose losses differ from length to length without a gain: what key tokens are chosen from by chance."""
  return Null(f'uses at most {k} tokens and flickers by {scatter:g} nat', smooth(k).nll, scatter)


def catalogue(train_len: int) -> list[Null]:
  t = EvalConfig.targets(train_len)
  return [
    smooth(train_len),
    smooth(train_len - t),
    smooth(train_len // 4),
    step(train_len - t),
    copy(train_len // 2),
    copy(4 * train_len),
    uniform(),
    broken(train_len),
    flicker(train_len),
  ]


class Verdict(NamedTuple):
  """bias: reported minus true NLL at 1x and at the longest length, nats.

  gain: by what share the reported perplexity falls from 1x to there. fake: what share of it the model did not give, 0
  where the reported ratio is the true one; below 0 a gain that the protocol hides.
  """

  bias: tuple[float, float]
  gain: float
  fake: float


def evaluate(null: Null, plan: Plan, protocol: str, length: int) -> Numbers:
  return reduce(plan, plan.select(protocol, length), null.row, np.ones(VOCAB))


def judge(null: Null, plan: Plan, protocol: str, short: int, long: int) -> Verdict:
  near, far = (evaluate(null, plan, protocol, length) for length in (short, long))
  bias = near.nll - null.truth(short), far.nll - null.truth(long)
  return Verdict(bias, 1 - math.exp(far.nll - near.nll), 1 - math.exp(bias[1] - bias[0]))


def fake_gain(plan: Plan, protocol: str, train_len: int, short: int, long: int) -> float:
  """By what share perplexity falls from `short` to `long` for a model that uses at most train_len tokens."""
  return judge(smooth(train_len), plan, protocol, short, long).gain


class Keys(NamedTuple):
  """Of a null that flickers, as `key_tokens` with its defaults reports it; none of the gains is one."""

  targets: int
  keys: int
  mirrored: int
  seen: float  # by what share perplexity falls from 1x to 4x, of which the judge has chosen
  unseen: float  # and from 2x to the longest length


def key_tokens(train_len: int, max_multiple: int, scatter: float = 1.0) -> Keys:
  plan = synthetic_plan(('key_tokens',), train_len=train_len, max_multiple=max_multiple, documents=40)
  null = flicker(train_len, scatter)
  at = {n: evaluate(null, plan, 'key_tokens', n * train_len) for n in (1, 2, 4, max_multiple)}
  chosen = at[1].chosen
  assert chosen is not None
  gains = [1 - math.exp(at[far].nll - at[near].nll) for near, far in ((1, 4), (2, max_multiple))]
  return Keys(sum(map(len, chosen.keys)), at[1].tokens, chosen.mirrored, *gains)


def residual(k: int, length: int, targets: int) -> float:
  """Perplexity of a model that uses at most k tokens at `length`, over that at any length beyond k + T, less 1.

  In closed form, of fixed targets: the smooth null's mean over contexts length - T .. length - 1.
  """
  nll = smooth(k).nll
  return math.exp(float(nll(np.arange(length - targets, length)).mean()) - float(nll(np.array([k]))[0])) - 1


def synthetic_plan(
  protocols: Sequence[str] = ('fixed_targets',),
  *,
  train_len: int = 512,
  max_multiple: int = 32,
  documents: int = 2,
  spans: int = 4,
  bos: str = 'window',
) -> Plan:
  """A plan over random tokens."""
  cfg = EvalConfig(protocols=tuple(protocols), spans=spans)
  size, rng = cfg.min_test_tokens(train_len, max_multiple) + 7 * spans, np.random.default_rng(0)
  texts = [TokenDocument(f'd{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(documents)]
  return Plan(
    cfg,
    texts,
    train_len=train_len,
    max_multiple=max_multiple,
    bos=bos,
    bos_id=VOCAB - 1,
    corpus_sha256='null',
  )


def network(scheme: str, window: int, plan: Plan, lengths: Sequence[int], *, train_len: int) -> dict[int, np.ndarray]:
  """length -> f32[spans, T], NLL of the fixed targets by a random LM of two layers that attend to `window` tokens.

  A layer reads window - 1 tokens back, two read 2 (window - 1): from length 2 window + T on only rounding changes.
  """
  text = f'{scheme}(window={window})'
  cfg = ModelConfig(layers=2, d_model=32, heads=2, tile=64)
  lm = LM(cfg, (text,), vocab_size=VOCAB, train_len=train_len, rngs=nnx.Rngs(0))
  lm.embedding.embedding[...] *= 2.0  # at init attention is near uniform and hardly anything is read
  graphdef, state = nnx.split(lm)

  @jax.jit
  def nll(state: Any, inputs_BT: Any, targets_BT: Any, pos: Any) -> jax.Array:
    return nnx.merge(graphdef, state).nll(inputs_BT, targets_BT, pos)

  out = {}
  for length in lengths:
    pos = posenc.positions('none', list(lm.schemes), train_len, length)
    windows = plan.windows('fixed_targets', length)
    out[length] = np.asarray(nll(state, *plan.tokens(windows), pos))[:, -plan.targets :]
  return out

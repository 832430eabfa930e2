"""Cases M of docs/CASES.md: positions that are out of range or padded, masks, chunks of a forward pass, dropout."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import data
import posenc
from attention_test import arrays
from data import TokenDocument, TrainWindows, cut
from decoding import VOCAB, cut_positions, decode, small_lm
from evaluation.plan import EvalConfig, Plan
from evaluation.score import Scorer
from forms import build, jit, refused
from models.attention import attend
from models.lm import LM
from models.tiles import Masks, Side, Where, attend_tiles
from posenc import Unsupported
from training.devices import make_mesh

TOKENS = jax.random.randint(jax.random.key(0), (2, 14), 0, VOCAB)


def positions(lm, length, method='none'):
  (scheme,) = lm.schemes
  return posenc.positions(method, [scheme], scheme.dims.train_len, length)


def test_M01():
  """A length beyond the table is refused with the reason, which a sweep records; a row that is not there is NaN."""
  scheme = build('learned', d_model=8, train_len=16)
  for multiple in (2, 4, 32):
    length = 16 * multiple
    with refused(Unsupported, f'learned has positions for 16 tokens, asked for {length}'):
      posenc.positions('none', scheme, 16, length)
  inside = posenc.positions('none', scheme, 16, 16)
  beyond = inside.replace(at_T=jnp.arange(16.0) + 1)
  embedded = scheme.embed(jnp.zeros((1, 16, 8)), beyond)
  assert np.isfinite(embedded[:, :15]).all() and np.isnan(embedded[:, 15]).all()


def test_M04():
  """No row is ever padded: there is no way to say so. What stands behind a row's tokens changes none of them."""
  for f in (LM.hidden, LM.nll, attend):
    assert not [name for name in inspect.signature(f).parameters if 'pad' in name or 'mask' in name]
  scheme = build('rope', head_dim=8, train_len=10)
  q, k, v, _ = arrays(length=8)
  pos = posenc.positions('none', scheme, 10, 8)
  own = pos.replace(at_T=jnp.stack([pos.at_T, jnp.maximum(pos.at_T - 3, 0)]))  # of each row, as left padding needs
  with refused(ValueError, 'positions for 2 tokens, queries for 8'):
    attend(q, k, v, scheme, own)
  document = np.arange(5, dtype=np.int32)
  with refused(ValueError, 'start = 0 of a window of 8 in 5 tokens', 'allowed: none'):
    cut(document, 0, 8, 'window', 256)
  with refused(ValueError, 'none of 1 train documents has the 8 tokens of one window'):
    TrainWindows([TokenDocument('d', document, 5)], 8, 'window', 256, 0)
  lm = small_lm('rope', layers=1, train_len=16)

  def logits(tokens_BT):
    return lm.logits(lm.hidden(tokens_BT, positions(lm, tokens_BT.shape[1])))

  alone, beside = jit(logits)(TOKENS[:1, :5]), jit(logits)(TOKENS[:, :8])
  np.testing.assert_allclose(alone, beside[:1, :5], atol=1e-5)


@pytest.mark.parametrize('text', ['rope', 'alibi'])
def test_M06(text):
  """10 tokens, then 3, then 1, over kept keys: row r of a chunk sees start + r + 1 keys, as in a whole pass."""
  lm = small_lm(text, layers=1, train_len=16, loss_chunk=14)
  (pos,) = positions(lm, 14)
  chunks, whole = jit(lambda: (decode(lm, TOKENS, pos, (10, 3, 1)), lm.logits(lm.hidden(TOKENS, [pos]))))()
  np.testing.assert_allclose(chunks, whole, atol=1e-4)
  nope = posenc.PositionScheme(posenc.Dims(1, 4, 4, 16), nnx.Rngs(0))
  for start, size, seen in ((10, 3, [11, 12, 13]), (13, 1, [14])):
    end = start + size
    at, token_T = pos.at_T, jnp.arange(14, dtype=jnp.int32)
    running = attend_tiles(
      nope, Side(jnp.zeros((1, 1, 1, size, 4)), None, ()), Side(jnp.zeros((1, 1, end, 4)), None, ()),
      jnp.ones((1, 1, end, 4)), Where(token_T[start:end], at[start:end], None, jnp.full(size, jnp.inf)),
      Where(token_T[:end], at[:end], None, None), Masks(jnp.float32(0), None), None, tile=end,
    )  # fmt: skip
    np.testing.assert_allclose(running.l_BNT[0, 0], seen)  # sums of exp(0)


def test_M07():
  """The last token changes no earlier logit, to the bit: in training, in evaluation, and in chunks over kept keys."""
  lm = small_lm('rope', layers=1, train_len=16, dropout=0.3, loss_chunk=14)
  (pos,) = positions(lm, 14)
  changed = TOKENS.at[:, -1].set((TOKENS[:, -1] + 1) % VOCAB)
  prefilled = cut_positions(pos, 0, 14)

  def paths(tokens_BT):
    trained = lm.logits(lm.hidden(tokens_BT, [pos], key=jax.random.key(1)))
    tiled = lm.logits(lm.hidden(tokens_BT, [pos], tile=4))
    return trained, tiled, lm.logits(lm.hidden(tokens_BT, [pos])), decode(lm, tokens_BT, prefilled, (14,))

  run = jit(paths)
  for a, b in zip(run(TOKENS), run(changed)):
    np.testing.assert_array_equal(a[:, :-1], b[:, :-1])
    assert not np.array_equal(a[:, -1], b[:, -1])


def test_M08():
  """A window is of one document: what another says changes neither a window of training nor a target.

  Documents are not packed. Protocols that cross borders, because a paper's code does, say so in docs/protocols.md,
  and never have the BOS between them for a target.
  """
  rng = np.random.default_rng(0)
  a, b, other = (TokenDocument(n, rng.integers(0, 256, 200, dtype=np.int32), 200) for n in ('a', 'b', 'a'))
  for bos in data.BOS:
    windows = TrainWindows([a, b], 32, bos, 256, 0), TrainWindows([other, b], 32, bos, 256, 0)
    (inputs, targets), (inputs2, targets2) = (w.batch(0, 64) for w in windows)
    views = (np.lib.stride_tricks.sliding_window_view(d.tokens, 32) for d in (a, b))
    of_a, of_b = (np.array([(view == row).all(1).any() for row in targets]) for view in views)
    assert (of_a != of_b).all() and 0 < of_b.sum() < 64  # each row is of one of them
    np.testing.assert_array_equal(inputs[of_b], inputs2[of_b])
    np.testing.assert_array_equal(targets[of_b], targets2[of_b])
    assert (targets[~of_b] != targets2[~of_b]).any(1).all()
    assert (targets < 256).all()
  docs = [TokenDocument(f'd{i}', np.full(400, i, np.int32), 400) for i in range(3)]
  cfg = EvalConfig(multiples=(1.0,), spans=2, protocols=('fixed_targets', 'non_overlapping'), controls=())
  plan = Plan(cfg, docs, train_len=32, max_multiple=8, bos='window', bos_id=256, corpus_sha256='a' * 64)
  for protocol in ('fixed_targets', 'non_overlapping', 'sliding(stride=8)', 'lm_eval_rolling'):
    for window in plan.windows(protocol, 64):
      inputs, targets = plan.tokens([window])
      assert set(targets[0]) == {window.document} and set(inputs[0, 1:]) == {window.document} and inputs[0, 0] == 256


def test_M09():
  """A model with dropout scores the same to the bit, again and with another training seed: evaluation has no key."""
  rng = np.random.default_rng(0)
  docs = [TokenDocument(f'd{i}', rng.integers(0, VOCAB, 60, dtype=np.int32), 60) for i in range(3)]
  cfg = EvalConfig(multiples=(1.0,), spans=1, controls=())
  plan = Plan(cfg, docs, train_len=16, max_multiple=2, bos='none', bos_id=0, corpus_sha256='a' * 64)
  scores = []
  for dropout in (0.5, 0.5, 0.0):
    lm = small_lm('rope', layers=1, train_len=16, dropout=dropout, loss_chunk=14)
    graphdef, state = nnx.split(lm)
    score = Scorer(graphdef, nnx.to_pure_dict(state), make_mesh(1), 28)
    scores.append(score(plan, plan.windows('fixed_targets', 14), [positions(lm, 14)])[0])
  np.testing.assert_array_equal(scores[0], scores[1])
  np.testing.assert_array_equal(scores[0], scores[2])
  lm = small_lm('rope', layers=1, train_len=16, dropout=0.5, loss_chunk=14)
  wet = jit(lambda seed: lm.nll(TOKENS, TOKENS, positions(lm, 14), key=jax.random.key(seed)))
  assert not np.array_equal(wet(0), wet(1))

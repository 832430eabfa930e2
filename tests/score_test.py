"""The scorer on a tiny LM: numbers that do not depend on company, one program per length, exact nulls."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import posenc
from data import TokenDocument
from evaluation import score as scoring
from evaluation.plan import EvalConfig, Plan
from evaluation.score import Scorer
from forms import method_of
from models.lm import LM, ModelConfig
from models.memory import GIB, OutOfMemory, bytes_needed
from training.devices import make_mesh

TRAIN_LEN, MAX_MULTIPLE, VOCAB = 16, 8, 257
LENGTHS = (12, 16, 24, 32, 64, 128)
METHODS = ('none', 'pi', 'pi(factor=4)', 'ntk', 'dynamic_ntk_hf', 'yarn', 'yarn(factor=8)', 'ntk+logn')


def documents(n=2, size=MAX_MULTIPLE * TRAIN_LEN + 40):
  rng = np.random.default_rng(0)
  return [TokenDocument(f'd{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(n)]


def model(scheme='rope', vocab=VOCAB, zeroed=False):
  """(graphdef, params, LM). Embeddings are larger than at init, so that attention is not near uniform."""
  cfg = ModelConfig(layers=1, d_model=16, heads=2, tile=32)
  lm = LM(cfg, (scheme,), vocab_size=vocab, train_len=TRAIN_LEN, rngs=nnx.Rngs(0))
  lm.embedding.embedding[...] *= 0.0 if zeroed else 4.0
  graphdef, state = nnx.split(lm)
  return graphdef, nnx.to_pure_dict(state), lm


def make_plan(spans=5, bos='window'):
  return Plan(
    EvalConfig(spans=spans),
    documents(),
    train_len=TRAIN_LEN,
    max_multiple=MAX_MULTIPLE,
    bos=bos,
    bos_id=256,
    corpus_sha256='a',
  )


@pytest.fixture(scope='module')
def plan():
  return make_plan()


@pytest.fixture(scope='module')
def rope():
  return model()


def scorer(model, batch_tokens=4 * 32):
  return Scorer(*model[:2], make_mesh(1), batch_tokens)


def positions(model, length, method='none'):
  return posenc.positions(method, list(model[2].schemes), TRAIN_LEN, length)


def one(score, plan, windows, pos):
  """f32[len(windows), scored] under one set of positions."""
  (rows,) = score(plan, windows, [pos])
  return np.stack(rows)


def test_one_program_per_length_serves_every_method(rope, plan):
  """6 lengths x 8 methods, full batches and a partial last one: 6 compilations, and none the second time."""
  score = scorer(rope)
  for again in (False, True):
    for length in LENGTHS if not again else reversed(LENGTHS):
      for method in METHODS:
        for protocol in ('fixed_targets', 'non_overlapping'):
          one(score, plan, plan.windows(protocol, length), positions(rope, length, method))
    assert score.traces == 6


def test_two_programs_per_length_serve_the_whole_catalogue(rope, plan):
  """All methods, windows included, are arrays in one program; those with a second position map share another."""
  score, programs = scorer(rope), set()
  pairs = len(rope[2].schemes[0].inv_freq_P)
  for length in LENGTHS:
    for name in posenc.METHODS:
      pos = positions(rope, length, method_of(name, pairs))
      one(score, plan, plan.windows('fixed_targets', length), pos)
      programs.add((length, pos[0].far is None))
  assert score.traces == len(programs) <= 12
  assert len({length for length, plain in programs if not plain}) >= 4  # or the second one would not be tried


@pytest.mark.parametrize('scheme', ['nope', 'alibi', 't5', 'sinusoidal'])
def test_one_program_per_length_for_other_schemes(scheme, plan):
  tiny = model(scheme)
  score = scorer(tiny)
  for method in ('none', 'logn', 'none'):
    one(score, plan, plan.windows('fixed_targets', 32), positions(tiny, 32, method))
  assert score.traces == 1


def test_windows_are_cut_and_sent_once_for_all_methods(rope, monkeypatch):
  """And methods of both programs: as many cuts as batches, and as many times sent to the devices."""
  plan, score = make_plan(), scorer(rope)
  windows = [w for protocol in ('fixed_targets', 'non_overlapping') for w in plan.windows(protocol, 32)]
  many = [positions(rope, 32, m) for m in ('none', 'pi', 'ntk', 'logn', 'rerope(w=8)')]
  want = [one(score, plan, windows[:10], pos) for pos in many]
  cuts, sent, cut, place = [], [], plan.tokens, scoring.place
  monkeypatch.setattr(plan, 'tokens', lambda part: cuts.append(len(part)) or cut(part))
  monkeypatch.setattr(scoring, 'place', lambda *arguments: sent.append(arguments) or place(*arguments))
  done = []
  got = score(plan, windows, many, done.append)
  assert len(windows) == 10 + 8 and cuts == [4] * 5  # the two protocols share the third batch
  assert len(sent) == 5 and len(done) == 5 * len(many)
  assert [rows.shape for rows in got[0]] == [(8,)] * 10 + [(32,)] * 8
  for rows, alone in zip(got, want):
    np.testing.assert_array_equal(np.stack(rows[:10]), alone)
  assert all(row.base is None for rows in got for row in rows)  # no view that keeps a whole batch
  assert score.traces == 2


def needs(model, rows, length=32, method='none'):
  """GiB, as `memory_gb` counts them."""
  score = scorer(model, rows * length)
  return bytes_needed(score.program(length, positions(model, length, method)).run) / GIB


def test_a_batch_is_halved_until_it_fits(rope, plan):
  """To the byte; the numbers stay those of one window, and nothing is compiled twice."""
  graphdef, params, _ = rope
  windows, pos = plan.windows('fixed_targets', 32), positions(rope, 32)
  four, two, single = (needs(rope, rows) for rows in (4, 2, 1))
  assert four > two > single
  want = one(scorer(rope), plan, windows, pos)
  for memory_gb, rows, traces in ((four, 4, 1), (four - 1 / GIB, 2, 2), (two - 1 / GIB, 1, 3)):
    score = Scorer(graphdef, params, make_mesh(1), 4 * 32, memory_gb)
    assert score.program(32, pos).rows == rows and score.traces == traces
    np.testing.assert_allclose(one(score, plan, windows, pos), want, rtol=2e-6, atol=2e-6)
    assert score.traces == traces


def test_what_fits_nowhere_is_refused_with_its_numbers_and_only_once(rope):
  graphdef, params, _ = rope
  least = needs(rope, 1)
  score = Scorer(graphdef, params, make_mesh(1), 2 * 32, least * 0.75)
  for _ in range(2):
    with pytest.raises(OutOfMemory, match='^one window of 32 tokens: .* GiB needed of .* GiB per device; ') as error:
      score.program(32, positions(rope, 32, 'pi'))
    assert '\n' not in str(error.value)
    said = [float(word) for word in str(error.value).split() if word[0].isdigit() and '.' in word]
    assert said == pytest.approx([least, least * 0.75], rel=1e-2)
    assert score.traces == 2


def test_methods_whose_programs_have_other_batches_are_scored_apart(rope, plan):
  """A second position map takes more memory: its batch is halved, the others' is not."""
  graphdef, params, _ = rope
  windows, methods = plan.windows('fixed_targets', 32), ('none', 'rerope(w=8)', 'pi')
  memory_gb = needs(rope, 4)
  assert needs(rope, 2, method=methods[1]) < memory_gb < needs(rope, 4, method=methods[1])
  score = Scorer(graphdef, params, make_mesh(1), 4 * 32, memory_gb)
  many = [positions(rope, 32, m) for m in methods]
  assert [score.program(32, pos).rows for pos in many] == [4, 2, 4]
  for rows, pos in zip(score(plan, windows, many), many):
    np.testing.assert_array_equal(np.stack(rows), one(score, plan, windows, pos))
    np.testing.assert_allclose(np.stack(rows), one(scorer(rope), plan, windows, pos), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize('batch_tokens, length, rows', [(128, 32, 4), (127, 32, 3), (31, 32, 1), (1, 128, 1)])
def test_rows_of_a_batch(rope, batch_tokens, length, rows):
  """As many windows as fit into `batch_tokens`, one at least."""
  assert scorer(rope, batch_tokens).rows(length) == rows


def test_a_window_scores_the_same_in_any_company(rope, plan):
  """Bit for bit: alone, with others, in another order, in a partial last batch. Else a resumed sweep would differ."""
  score, pos = scorer(rope), positions(rope, 32)
  windows = plan.windows('fixed_targets', 32)
  assert len(windows) == 10 and score.rows(32) == 4  # the last batch holds two
  want = one(score, plan, windows, pos)
  alone = np.concatenate([one(score, plan, [w], pos) for w in windows])
  np.testing.assert_array_equal(alone, want)
  np.testing.assert_array_equal(one(score, plan, windows[::-1], pos), want[::-1])
  order = np.random.default_rng(1).permutation(10)
  np.testing.assert_array_equal(one(score, plan, [windows[i] for i in order], pos), want[order])
  for n in (3, 4, 5, 8):
    np.testing.assert_array_equal(one(score, plan, windows[:n], pos), want[:n])
  assert score.traces == 1
  assert len(np.unique(want[:, 0])) == 10  # and windows do differ


@pytest.mark.parametrize('protocol, length, scored', [('fixed_targets', 64, 8), ('non_overlapping', 64, 64)])
@pytest.mark.parametrize('method', ['none', 'yarn(factor=4)'])
def test_the_last_positions_of_a_direct_call(rope, plan, protocol, length, scored, method):
  windows, pos = plan.windows(protocol, length), positions(rope, length, method)
  got = one(scorer(rope), plan, windows, pos)
  inputs, targets = plan.tokens(windows)
  nll = np.asarray(rope[2].nll(inputs, targets, pos))
  assert got.shape == (len(windows), scored) and got.dtype == np.float32
  np.testing.assert_allclose(got, nll[:, -scored:], rtol=2e-6, atol=2e-6)
  logits = np.asarray(rope[2].logits(rope[2].hidden(inputs, pos)), np.float64)
  logits -= logits.max(-1, keepdims=True)
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  want = -np.take_along_axis(log_p, targets[..., None], -1)[..., 0]
  np.testing.assert_allclose(got, want[:, -scored:], rtol=1e-5, atol=1e-5)


def test_only_the_text_before_a_target_is_read(rope):
  """Of a window, and of it only as far as the attention is causal: the targets' own values move nothing before."""
  plan, other = make_plan(), make_plan()
  windows, pos = plan.windows('fixed_targets', 64), positions(rope, 64)
  last = [w.start + w.length - 1 for w in windows if w.document == 0]
  tokens = other.documents[0].tokens
  outside = np.ones(len(tokens), bool)
  for w in windows[:1]:
    outside[w.start : w.start + w.length] = False
  tokens[outside] = 7
  tokens[last[0]] = (tokens[last[0]] + 1) % 256
  a, b = (one(scorer(rope), p, windows[:1], pos) for p in (plan, other))
  np.testing.assert_array_equal(a[0, :-1], b[0, :-1])
  assert a[0, -1] != b[0, -1]


def test_methods_reach_the_program(rope, plan):
  """Positions are arguments: were they constants of the first call, every method would score alike."""
  score, windows = scorer(rope), plan.windows('fixed_targets', 128)
  rows = [one(score, plan, windows, positions(rope, 128, m)) for m in ('none', 'pi', 'ntk', 'yarn', 'none')]
  np.testing.assert_array_equal(rows[0], rows[4])
  for i in range(4):
    for j in range(i):
      assert np.abs(rows[i] - rows[j]).max() > 1e-4


@pytest.mark.parametrize('scheme, vocab', [('nope', 257), ('rope', 300)])
def test_a_zeroed_model_is_uniform_at_every_length(scheme, vocab, plan):
  """E07, E09: ln V nats per token, exactly flat, whatever the text and the length."""
  tiny = model(scheme, vocab, zeroed=True)
  score = scorer(tiny)
  values = set()
  for length in LENGTHS:
    for protocol in ('fixed_targets', 'non_overlapping'):
      values |= set(np.unique(one(score, plan, plan.windows(protocol, length), positions(tiny, length))).tolist())
  assert len(values) == 1
  assert values.pop() == pytest.approx(np.log(vocab), abs=1e-6)


def test_progress_counts_the_tokens_of_real_windows(rope, plan):
  done = []
  windows = plan.windows('fixed_targets', 32)
  scorer(rope)(plan, windows, [positions(rope, 32)], done.append)
  assert done == [4 * 32, 4 * 32, 2 * 32]  # dummy rows do not count


def test_parameters_are_arguments_too(rope, plan):
  """A scorer of other parameters gives other numbers; nothing of the first model is kept."""
  windows, pos = plan.windows('fixed_targets', 32), positions(rope, 32)
  graphdef, params, _ = rope
  moved = jax.tree.map(lambda a: a * 1.1, params)
  a = one(Scorer(graphdef, params, make_mesh(1), 128), plan, windows, pos)
  b = one(Scorer(graphdef, moved, make_mesh(1), 128), plan, windows, pos)
  assert np.abs(a - b).max() > 1e-3


def test_two_devices_give_the_numbers_of_one(rope, plan, root):
  """In the order of the windows, and a multiple of two rows a batch. Rows of another shape differ by rounding only."""
  code = """
import sys; sys.path.insert(0, 'tests')
import jax, numpy, score_test as s
from training.devices import make_mesh, whole
assert jax.device_count() == 2
graphdef, params, lm = tiny = s.model()
score = s.Scorer(graphdef, jax.device_put(params, whole(make_mesh(2))), make_mesh(2), 3 * 32)
plan = s.make_plan()
windows = plan.windows('fixed_targets', 32)
print(score.rows(32), score.rows(128), s.one(score, plan, windows, s.positions(tiny, 32)).tolist())
assert score.traces == 1
"""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '2', 'PYTHONPATH': str(root)}
  done = subprocess.run([sys.executable, '-c', code], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  rows, long_rows, numbers = done.stdout.split(maxsplit=2)
  assert (rows, long_rows) == ('2', '2')
  want = one(scorer(rope), plan, plan.windows('fixed_targets', 32), positions(rope, 32))
  np.testing.assert_allclose(np.array(eval(numbers)), want, rtol=2e-6, atol=2e-6)

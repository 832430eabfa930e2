"""Points of a sweep, with scorers whose numbers are known and with a tiny LM."""

import functools
import json
import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from flax import nnx

import posenc
from data import TokenDocument
from evaluation import points as points_of
from evaluation import results, summary
from evaluation.plan import EvalConfig, Plan
from evaluation.score import Scorer
from evaluation.stats import t_interval
from evaluation.store import Key, Store
from evaluation.survey import Survey, costs, positions_hash, rate, rest, status
from evaluation.sweep import exp, sweep
from models.lm import LM, ModelConfig
from models.memory import OutOfMemory
from training.devices import make_mesh

TRAIN_LEN, MAX_MULTIPLE, DOCS, T = 16, 8, 12, 8
LENGTHS = (12, 16, 32, 128)
BYTES_V = np.array([1] * 256 + [0])
FACTS = {
  'posenc': ['rope'],
  'checkpoint_step': 100,
  'seed': 3,
  'tokens_seen': 51200,
  'params': 1234,
  'learning_rate': 1e-3,
  'bos': 'window',
  'corpus_sha256': 'a' * 64,
}
# Everything needed to repeat a point, and to refuse to compare it with another.
FIELDS = {
  'scheme', 'positions', 'method', 'train_length', 'length', 'protocol', 'nll', 'ppl', 'bits_per_byte', 'tokens',
  'documents', 'ci_low', 'ci_high', 'interval', 'seed', 'tokens_seen', 'params', 'learning_rate', 'context_min',
  'context_max', 'T', 'bos', 'targets_hash', 'positions_hash', 'corpus_sha256', 'checkpoint_step',
}  # fmt: skip
DIFFERENCES = {f'vs_{a}{b}' for a in ('none', '1x') for b in ('', '_low', '_high')}


class Bar:
  """A progress bar that only counts."""

  def __init__(self):
    self.n = 0

  def update(self, n):
    self.n += n

  def write(self, text):
    assert '\n' not in text

  def set_postfix_str(self, text):
    pass


class Fake:
  """A scorer whose NLL is `nll(document, length, pos)` for every target; it keeps what it was called with.

  `refuses(length, pos)`: what does not fit into memory.
  """

  def __init__(self, nll, refuses=lambda length, pos: False):
    self.nll, self.refuses, self.calls, self.windows = nll, refuses, [], []

  def program(self, length, pos):
    if self.refuses(length, pos):
      raise OutOfMemory(f'{length} tokens are too many')

  def runs(self, plan, windows, positions):
    (length,) = {w.length for w in windows}
    self.windows.append([(w.document, w.start, w.scored) for w in windows])
    for i, pos in enumerate(positions):
      self.calls.append((length, positions_hash(pos)))
      yield i, windows, [self.row(plan, w, pos) for w in windows]

  def row(self, plan, window, pos):
    return np.float32([self.nll(window.document, window.length, pos)] * window.scored)


def documents(n=DOCS):
  rng = np.random.default_rng(0)
  size = MAX_MULTIPLE * TRAIN_LEN + 40
  return [TokenDocument(f'd{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(n)]


def make_plan(docs=None, protocols=('fixed_targets',), **cfg):
  return Plan(
    EvalConfig(**{'spans': 2, 'protocols': protocols, 'controls': (), **cfg}),
    documents() if docs is None else docs,
    train_len=TRAIN_LEN,
    max_multiple=MAX_MULTIPLE,
    bos='window',
    bos_id=256,
    corpus_sha256='a' * 64,
  )


def schemes(*texts):
  return [posenc.build(t, heads=2, head_dim=8, d_model=16, train_len=TRAIN_LEN, rngs=nnx.Rngs(0)) for t in texts]


def make_survey(methods=('none',), lengths=LENGTHS, slots=('rope',), plan=None, rule='sequential', stored=None):
  """`stored`: a store that outlives the sweep."""
  made = posenc.build_rule(rule, schemes(*slots), train_len=TRAIN_LEN, layers=len(slots))
  survey = Survey(plan or make_plan(), schemes(*slots), methods, lengths, TRAIN_LEN, made)
  if stored is not None:
    key = Key('c', 'm', ' '.join(slots), 'p', 't', survey.plan.bos, 'float32', 0)
    survey.open_rows = lambda positions, length: stored.open(replace(key, positions=positions, length=length))
  return survey


def run(
  scorer, methods=('none',), lengths=LENGTHS, slots=('rope',), plan=None, bytes_V=BYTES_V, bar=None, floor=None,
  rule='sequential', stored=None, **facts
):  # fmt: skip
  survey = make_survey(methods, lengths, slots, plan, rule, stored)
  plan = survey.plan
  parts = sweep(
    survey,
    lambda: scorer,
    bytes_per_token_V=bytes_V,
    facts={**FACTS, 'posenc': list(slots), **facts},
    progress=bar or Bar(),
    floor=floor,
  )
  points = [p for part in parts for p in part]
  return sorted(points, key=lambda p: (plan.cfg.protocols.index(p['protocol']), p['length']))


def at(points, method='none', length=128, protocol='fixed_targets'):
  (point,) = [p for p in points if (p['method'], p['length'], p['protocol']) == (method, length, protocol)]
  return point


def slowest(pos):
  """What a method did to the last frequency: 1 for none, 8 for a factor of 8."""
  return float(_trained() / np.float64(pos[0].inv_freq_P[-1]))


@functools.cache
def _trained():
  return schemes('rope')[0].inv_freq_P[-1]


# What is in a point.


def test_a_point_holds_every_documented_field():
  points = run(Fake(lambda d, n, pos: 2.0), ('none', 'pi'))
  for point in points:
    assert point.keys() >= FIELDS | DIFFERENCES
  point = at(points, 'pi', 32)
  want = {'scheme': 'rope', 'train_length': 16, 'T': T, 'tokens': DOCS * 2 * T, 'documents': DOCS, **FACTS}
  assert {k: point[k] for k in want} == want
  assert (point['context_min'], point['context_max']) == (24, 31)
  assert point['outcome'] == 'ok' and point['reason'] is None
  assert point['targets_hash'] == make_plan().targets_hash


def test_a_point_holds_no_time():
  """So that a repeated sweep is byte-identical."""
  points = run(Fake(lambda d, n, pos: 2.0))
  assert not [k for k in points[0] if any(word in k for word in ('time', 'date', 'second', 'host', 'user'))]
  assert json.dumps(points) == json.dumps(run(Fake(lambda d, n, pos: 2.0)))


def test_a_pattern_of_schemes_is_one_scheme():
  assert at(run(Fake(lambda d, n, pos: 2.0), slots=('rope', 'rope', 'nope')))['scheme'] == 'rope rope nope'


def test_points_come_by_protocol_length_and_method_and_only_once():
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping'))
  points = run(Fake(lambda d, n, pos: 2.0), ('none', 'yarn', 'pi'), (128, 16, 32), plan=plan)
  assert [(p['protocol'], p['length'], p['method']) for p in points] == [
    (protocol, length, method)
    for protocol in ('fixed_targets', 'non_overlapping')
    for length in (16, 32, 128)
    for method in ('none', 'yarn', 'pi')
  ]


def test_the_order_of_lengths_changes_nothing():
  """R01: no state leaks from one length to the next. Through a real model, method by method."""
  lm = LM(ModelConfig(layers=1, d_model=16, heads=2, tile=32), ('rope',), vocab_size=257, train_len=TRAIN_LEN,
          rngs=nnx.Rngs(0))  # fmt: skip
  graphdef, state = nnx.split(lm)
  scorer = Scorer(graphdef, nnx.to_pure_dict(state), make_mesh(1), 128)
  methods, plan = ('none', 'dynamic_ntk', 'yarn'), make_plan(protocols=('fixed_targets', 'non_overlapping'))
  rising = run(scorer, methods, (12, 16, 32, 128), plan=plan)
  falling = run(scorer, methods, (128, 32, 16, 12), plan=plan)
  assert json.dumps(rising) == json.dumps(falling)
  assert at(rising, 'dynamic_ntk', 16)['nll'] == at(rising, 'none', 16)['nll']  # within 1x it is plain RoPE
  assert at(rising, 'dynamic_ntk', 128)['nll'] != at(rising, 'none', 128)['nll']
  alone = run(scorer, ('none', 'dynamic_ntk'), (16,), plan=plan)
  assert at(alone, 'dynamic_ntk', 16)['nll_documents'] == at(falling, 'dynamic_ntk', 16)['nll_documents']


def test_the_rule_of_training_places_the_tokens_of_every_point():
  rule = 'randomized(max_len=64)'
  fake = Fake(lambda d, n, pos: float(pos[0].at_T[-1]))
  points = run(fake, ('none', 'pi'), (16, 32, 128), rule=rule)
  assert {p['positions'] for p in points} == {rule}
  placed = posenc.build_rule(rule, schemes('rope'), train_len=TRAIN_LEN, layers=1)
  for length in (16, 32):
    last = placed.evaluate(length)[0][-1]
    assert last > length - 1
    assert at(points, 'none', length)['nll'] == at(points, 'pi', length)['nll'] == last
    assert at(points, 'none', length)['follows_length']
  assert (at(points)['outcome'], at(points)['reason']) == ('unsupported', 'randomized has 64 positions, asked for 128')
  assert at(run(fake))['positions'] == 'sequential'


def test_followers_of_the_length_are_marked():
  points = run(Fake(lambda d, n, pos: 2.0), ('none', 'yarn', 'yarn(factor=8)'), (16,))
  assert [at(points, m, 16)['follows_length'] for m in ('none', 'yarn', 'yarn(factor=8)')] == [False, True, False]


@pytest.mark.parametrize('protocol', ['fixed_targets', 'non_overlapping'])
def test_a_point_holds_the_floor_of_its_own_targets(protocol):
  """Their mean, target by target, whatever was scored; and without a floor a point says nothing of one."""
  plan = make_plan(protocols=(protocol,))

  def floor(position, visible):
    assert position.shape == visible.shape and (visible <= position).all()
    return np.where(position % 3 == 0, 2.0, 0.5) + visible / 7

  points = run(Fake(lambda d, n, pos: 5.0), ('none', 'ntk'), slots=('alibi',), plan=plan, floor=floor)
  for length in LENGTHS:
    terms = [
      (2.0 if (w.start + i) % 3 == 0 else 0.5) + i / 7
      for w in plan.windows(protocol, length)
      for i in range(length - w.scored, length)
    ]
    for method in ('none', 'ntk'):  # unsupported points have it too: it is the targets'
      assert at(points, method, length, protocol)['floor'] == pytest.approx(np.mean(terms), rel=1e-12)
  plain = run(Fake(lambda d, n, pos: 5.0), ('none', 'ntk'), slots=('alibi',), plan=plan)
  assert [{k: v for k, v in p.items() if k != 'floor'} for p in points] == plain
  assert not [p for p in plain if 'floor' in p]


# Numbers.


def test_numbers_of_a_point_by_hand():
  """E03: the mean over tokens, not of exponentials. Documents have equally many targets, so it is their mean too."""
  point = at(run(Fake(lambda d, n, pos: 2.0 if d else 4.0)))
  nll = (2.0 * 11 + 4.0) / 12
  assert point['nll'] == pytest.approx(nll, rel=1e-12)
  assert point['ppl'] == pytest.approx(math.exp(nll), rel=1e-12)
  assert point['bits_per_byte'] == pytest.approx(nll / math.log(2), rel=1e-12)
  assert point['nll_documents'] == [4.0] + [2.0] * 11
  _, low, high = t_interval(np.array(point['nll_documents']))
  assert (point['ci_low'], point['ci_high']) == (pytest.approx(math.exp(low)), pytest.approx(math.exp(high)))
  assert point['interval'] == 't over documents, this checkpoint'


class PerToken(Fake):
  """Every target has a number of its own: a mean over anything but tokens shows."""

  def __init__(self):
    super().__init__(None)

  def row(self, plan, window, pos):
    return (plan.tokens([window])[1][0, -window.scored :] / 64).astype(np.float32)


@pytest.mark.parametrize('protocol', ['fixed_targets', 'non_overlapping'])
def test_the_mean_over_documents_is_the_mean_over_tokens(protocol):
  plan = make_plan(protocols=(protocol,))
  for length in LENGTHS:
    windows = plan.windows(protocol, length)
    nll = np.stack([PerToken().row(plan, w, None) for w in windows]).astype(np.float64)
    point = at(run(PerToken(), plan=plan), length=length, protocol=protocol)
    assert point['tokens'] == nll.size
    assert point['nll'] == pytest.approx(nll.mean(), rel=1e-12)
    by_document = [nll[[w.document == d for w in windows]].mean() for d in range(DOCS)]
    np.testing.assert_allclose(point['nll_documents'], by_document, rtol=1e-12)


def test_bits_per_byte_are_nats_over_ln_2_times_bytes():
  """E07: 8 bits for a uniform byte model. With tokens of several bytes, by the bytes of the scored tokens alone."""
  uniform = Fake(lambda d, n, pos: math.log(256))
  point = at(run(uniform))
  assert point['nll'] == pytest.approx(5.545177, abs=1e-6)
  assert point['ppl'] == pytest.approx(256, rel=1e-6)
  assert point['bits_per_byte'] == pytest.approx(8.0, rel=1e-6)
  bytes_V = np.arange(1, 258)
  plan = make_plan()
  windows = plan.windows('fixed_targets', 128)
  n_bytes = bytes_V[plan.tokens(windows)[1][:, -T:]].sum()
  point = at(run(uniform, plan=plan, bytes_V=bytes_V))
  assert point['bits_per_byte'] == pytest.approx(8.0 * DOCS * 2 * T / n_bytes, rel=1e-6)


def test_a_uniform_model_is_flat():
  """E09."""
  points = run(Fake(lambda d, n, pos: math.log(257)), plan=make_plan(protocols=('fixed_targets', 'non_overlapping')))
  assert len(points) == 2 * len(LENGTHS)
  assert len({p['nll'] for p in points}) == 1
  assert points[0]['ppl'] == pytest.approx(257, rel=1e-6)


def test_no_interval_below_12_documents():
  points = run(Fake(lambda d, n, pos: 2.0 + d), plan=make_plan(documents(11)))
  for point in points:
    assert point['ci_low'] is None and point['ci_high'] is None and 'fewer than 12' in point['interval']
    assert point['vs_1x_low'] == point['vs_none_high'] == 0.0  # of differences there is one
    assert point['documents'] == 11 and point['nll'] == 7.0


# Paired differences.


def test_differences_from_none_pair_by_document():
  """Documents differ by far more than methods do; only the paired interval sees it. Positive is worse."""
  step = np.arange(DOCS) / 64  # exact in float32

  def nll(d, n, pos):
    return 2.0 + d + (0.25 + step[d] if slowest(pos) > 1.1 else 0.0)

  points = run(Fake(nll), ('none', 'pi'))
  point = at(points, 'pi', 128)
  want = t_interval(0.25 + step)
  assert want.mean == 0.25 + 5.5 / 64
  assert [point[f'vs_none{k}'] for k in ('', '_low', '_high')] == pytest.approx(list(want), rel=1e-9)
  assert point['vs_none_low'] > 0 and point['ci_low'] < at(points)['ppl'] < point['ci_high']
  for length in LENGTHS:
    assert [at(points, 'none', length)[f'vs_none{k}'] for k in ('', '_low', '_high')] == [0, 0, 0]
  assert at(points, 'pi', 16)['vs_none'] == 0  # pi is nothing at 1x


def test_differences_from_1x_are_a_methods_own():
  step = np.arange(DOCS) / 64

  def nll(d, n, pos):
    return 2.0 + d + step[d] * (n / 16 - 1) + slowest(pos)

  points = run(Fake(nll), ('none', 'pi(factor=4)'))
  for method in ('none', 'pi(factor=4)'):
    assert at(points, method, 16)['vs_1x'] == 0
    want = t_interval(step * 7)
    got = [at(points, method, 128)[f'vs_1x{k}'] for k in ('', '_low', '_high')]
    assert got == pytest.approx(list(want), rel=1e-5)
  below = at(points, 'none', 12)  # the price below 1x counts as well
  assert below['vs_1x'] == pytest.approx(-0.25 * step.mean(), rel=1e-5)


def test_only_the_same_targets_pair_with_1x():
  """Non-overlapping windows of two lengths score their tokens in other contexts and, in the tail, other tokens."""
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping'))
  points = run(Fake(lambda d, n, pos: n / 16), plan=plan)
  assert 'vs_1x' in at(points) and 'vs_1x' not in at(points, protocol='non_overlapping')
  assert 'vs_none' in at(points, protocol='non_overlapping')


def test_protocols_are_compared_with_their_own_none():
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping'))

  def nll(d, n, pos):
    return 1.0 if slowest(pos) > 1.1 else 0.5

  class Scaled(Fake):
    def row(self, plan, window, pos):
      return super().row(plan, window, pos) * (1 if window.scored == T else 4)

  points = run(Scaled(nll), ('none', 'pi'), plan=plan)
  assert at(points, 'pi')['vs_none'] == 0.5
  assert at(points, 'pi', protocol='non_overlapping')['vs_none'] == 2.0


def test_without_1x_there_is_no_difference_from_it():
  points = run(Fake(lambda d, n, pos: 2.0), lengths=(32, 128))
  assert not [k for p in points for k in p if k.startswith('vs_1x')]


# Scored once.


def test_methods_with_equal_positions_are_scored_once():
  """At 8x yarn is yarn(factor=8); at 1x everything that follows the length is none."""
  methods = ('none', 'pi', 'yarn', 'yarn(factor=8)')
  for protocols in (('fixed_targets',), ('fixed_targets', 'non_overlapping')):
    fake, bar, plan = Fake(lambda d, n, pos: slowest(pos)), Bar(), make_plan(protocols=protocols)
    points = run(fake, methods, (16, 128), plan=plan, bar=bar)
    assert len(fake.calls) == 2 + 3  # 1x: none, yarn(factor=8); 8x: none, pi, yarn
    assert len(set(fake.calls)) == len(fake.calls)
    assert bar.n == make_survey(methods, (16, 128), plan=plan).tokens  # the bar ends at its end all the same
  same = ('nll', 'ppl', 'nll_documents', 'positions_hash', 'vs_none')
  assert [at(points, 'yarn')[k] for k in same] == [at(points, 'yarn(factor=8)')[k] for k in same]
  assert at(points, 'yarn')['vs_1x'] != at(points, 'yarn(factor=8)')['vs_1x']  # their own 1x differ
  assert at(points, 'none', 16)['positions_hash'] == at(points, 'yarn', 16)['positions_hash']
  assert len({at(points, m)['positions_hash'] for m in ('none', 'pi', 'yarn')}) == 3


def test_protocols_share_batches_and_no_score():
  """Where T happens to be the whole length the windows still differ: the key holds the protocol."""
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping'))
  fake = Fake(lambda d, n, pos: 2.0)
  points = run(fake, ('none',), (16,), plan=plan)
  assert len(fake.calls) == 1
  assert [scored for _, _, scored in fake.windows[0]] == [8] * DOCS * 2 + [16] * DOCS * 8
  assert [p['tokens'] for p in points] == [DOCS * 2 * 8, DOCS * 128]
  assert [p['context_min'] for p in points] == [8, 0]


def test_none_is_scored_before_what_is_compared_with_it():
  fake = Fake(lambda d, n, pos: slowest(pos))
  run(fake, ('none', 'pi'), (32,))
  plain = positions_hash(posenc.positions('none', schemes('rope'), TRAIN_LEN, 32))
  assert [c[1] == plain for c in fake.calls] == [True, False]


def test_positions_hash_sees_every_leaf():
  base = posenc.positions('none', schemes('rope', 'nope'), TRAIN_LEN, 32)
  assert positions_hash(base) == positions_hash(posenc.positions('none', schemes('rope', 'nope'), TRAIN_LEN, 32))
  leaves, tree = jax.tree.flatten(base)
  hashes = {positions_hash(base)}
  for i, leaf in enumerate(leaves):
    if leaf.size:
      changed = np.array(leaf)
      changed.flat[-1] += 1
      changed.flat[-1] = 7 if not np.isfinite(changed.flat[-1]) else changed.flat[-1]
      hashes.add(positions_hash(jax.tree.unflatten(tree, [*leaves[:i], changed, *leaves[i + 1 :]])))
  assert len(hashes) == 1 + sum(bool(leaf.size) for leaf in leaves)


# What cannot be scored.


def test_learned_positions_past_their_table_are_unsupported():
  fake, bar, plan = Fake(lambda d, n, pos: 2.0), Bar(), make_plan()
  points = run(fake, ('none', 'logn'), (12, 16, 32, 128), slots=('learned',), plan=plan, bar=bar)
  assert [at(points, 'none', n)['outcome'] for n in (12, 16, 32, 128)] == ['ok', 'ok', 'unsupported', 'unsupported']
  point = at(points, 'none', 32)
  assert point['reason'] == 'learned has positions for 16 tokens, asked for 32'
  assert point['positions_hash'] is None and not {'nll', 'ppl', 'tokens'} & point.keys()
  assert {c[0] for c in fake.calls} == {12, 16}
  assert bar.n == make_survey(('none', 'logn'), (12, 16, 32, 128), plan=plan).tokens


def test_a_method_that_means_nothing_for_a_scheme_is_unsupported():
  points = run(Fake(lambda d, n, pos: 2.0), ('none', 'ntk'), slots=('alibi',))
  for length in LENGTHS:
    assert at(points, 'ntk', length)['outcome'] == 'unsupported'
    assert 'alibi has no frequencies' in at(points, 'ntk', length)['reason']
    assert at(points, 'none', length)['outcome'] == 'ok'


def test_what_does_not_fit_is_an_outcome_and_the_sweep_goes_on(tmp_path):
  """One method at one length; and where 'none' does not fit, there is nothing to be compared with."""
  plan, bar = make_plan(protocols=('fixed_targets', 'non_overlapping')), Bar()
  fake = Fake(lambda d, n, pos: 2.0, lambda n, pos: n == 128 or (n == 32 and slowest(pos) < 1.1))
  points = run(fake, ('none', 'pi'), plan=plan, bar=bar)
  outcome = {(p['length'], p['method']): (p['outcome'], p['reason']) for p in points}
  assert outcome == {
    **{(n, m): ('ok', None) for n in LENGTHS for m in ('none', 'pi')},
    **{(128, m): ('out of memory', '128 tokens are too many') for m in ('none', 'pi')},
    (32, 'none'): ('out of memory', '32 tokens are too many'),
  }
  assert all(('nll' in p) == (p['outcome'] == 'ok') for p in points)
  assert 'vs_none' in at(points, 'pi', 16) and 'vs_none' not in at(points, 'pi', 32)
  assert {c[0] for c in fake.calls} == {12, 16, 32} and bar.n == make_survey(('none', 'pi'), LENGTHS, plan=plan).tokens
  results.write(tmp_path, points)
  assert results.table(points).count('out of memory') == 3
  assert points_of.read_curve(tmp_path / 'curve.jsonl') == points_of.merge([], points)


def test_800_nats_end_no_sweep():
  """E04: exp overflows at 709.78. The NLL is kept, the perplexity is inf and the point has diverged."""
  points = run(Fake(lambda d, n, pos: 800.0 if n == 128 else 2.0))
  point = at(points)
  assert (point['nll'], point['ppl'], point['outcome']) == (800.0, math.inf, 'diverged')
  assert point['nll_documents'] == [800.0] * DOCS and point['vs_1x'] == 798.0
  assert point['bits_per_byte'] == pytest.approx(800 / math.log(2))
  assert at(points, length=32)['outcome'] == 'ok'


def test_exp_ends_at_inf():
  assert exp(709.0) == math.exp(709.0) and exp(710.0) == math.inf and exp(-1e9) == 0.0 and math.isnan(exp(math.nan))


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_diverged_method_leaves_the_others_alone(value):
  def nll(d, n, pos):
    return value if n == 128 and d == 5 and slowest(pos) > 1.1 else 2.0 + d / 64

  alone = run(Fake(nll))
  points = run(Fake(nll), ('none', 'pi'))
  bad = at(points, 'pi')
  assert bad['outcome'] == 'diverged' and not math.isfinite(bad['ppl']) and bad['ci_low'] is None
  assert math.isnan(bad['vs_none']) == math.isnan(value) and bad['vs_none_low'] is None
  assert [p for p in points if p['method'] == 'none'] == alone
  assert at(points, 'pi', 32)['outcome'] == 'ok'


@pytest.mark.parametrize('value', [math.nan, math.inf])
def test_a_diverged_reference_leaves_numbers_without_a_difference(value):
  """inf - inf is no number and no warning either."""
  points = run(Fake(lambda d, n, pos: value if slowest(pos) < 1.1 else 2.0), ('none', 'pi'), (128,))
  assert at(points)['outcome'] == 'diverged' and math.isnan(at(points)['vs_none'])
  point = at(points, 'pi')
  assert (point['outcome'], point['nll']) == ('ok', 2.0) and point['ci_low'] is not None
  assert not math.isfinite(point['vs_none']) and point['vs_none_low'] is None


def test_the_reason_of_a_missing_interval_is_the_true_one():
  points = run(Fake(lambda d, n, pos: math.nan if d == 0 else 2.0))
  assert at(points)['interval'] == 'none: diverged'


def test_cost_is_what_the_scorer_is_given():
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping'))
  assert make_survey(('none', 'yarn'), (16, 128), plan=plan).tokens == 2 * DOCS * (2 * 16 + 2 * 128 + 128 + 128)


# From the store.

PROTOCOLS = ('fixed_targets', 'non_overlapping', 'sliding(stride=8)', 'yarn(stride=12)', 'longlora(stride=24)',
             'fairseq(context_window=-8)', 'lm_eval_rolling', 'position_wise')  # fmt: skip


class Batches(PerToken):
  """Twelve windows a run, as a scorer fetches them; dies in run `left`, and counts what it has handed over."""

  def __init__(self, left=math.inf):
    super().__init__()
    self.left, self.scored = left, []

  def runs(self, plan, windows, positions):
    for start in range(0, len(windows), 12):
      part = windows[start : start + 12]
      for i, pos in enumerate(positions):
        self.left -= 1
        if self.left < 0:
          raise KeyboardInterrupt
        self.scored += [(positions_hash(pos), plan.place(w), w.length) for w in part]
        yield i, part, [self.row(plan, w, pos) + np.float32(slowest(pos)) for w in part]


def nobody():
  raise AssertionError('something is scored again')


def finished(survey, make_scorer):
  facts = {**FACTS, 'posenc': ['rope']}
  parts = sweep(survey, make_scorer, bytes_per_token_V=BYTES_V, facts=facts, progress=Bar())
  return [p for part in parts for p in part]


def test_a_finished_sweep_scores_nothing(tmp_path):
  """Neither for its points again nor for those of other protocols with the same windows."""
  store, methods = Store(tmp_path), ('none', 'pi', 'yarn')
  first, plan = Batches(), make_plan(protocols=PROTOCOLS)
  points = run(first, methods, plan=plan, stored=store)
  assert len(set(first.scored)) == len(first.scored)
  again = finished(make_survey(methods, plan=plan, stored=Store(tmp_path)), nobody)
  assert sorted(map(json.dumps, again)) == sorted(map(json.dumps, points))
  others = make_plan(protocols=('yarn_truncate', 'dape_last256', 'non_overlapping'))
  assert len(finished(make_survey(methods, plan=others, stored=store), nobody)) == 3 * 3 * len(LENGTHS)


def test_what_is_new_alone_is_scored(tmp_path):
  store, plan = Store(tmp_path), make_plan(protocols=('fixed_targets',))
  run(Batches(), ('none', 'pi'), (16, 128), plan=plan, stored=store)
  for methods, lengths, protocols, want in (
    (('none', 'pi', 'yarn'), (16, 128), ('fixed_targets',), {128: 24}),  # at 16 tokens yarn is none
    (('none', 'pi', 'yarn'), (16, 32, 128), ('fixed_targets',), {32: 3 * 24}),
    (('none', 'pi'), (16, 128), ('fixed_targets', 'non_overlapping'), {16: DOCS * 8, 128: 2 * DOCS}),
  ):
    more = Batches()
    plan = make_plan(protocols=protocols)
    points = run(more, methods, lengths, plan=plan, stored=store)
    assert {n: sum(c[2] == n for c in more.scored) for n in {c[2] for c in more.scored}} == want
    assert points == run(Batches(), methods, lengths, plan=plan)  # as if it had never been interrupted


@pytest.mark.parametrize('life', [1, 2, 5, 20])
def test_an_interrupted_sweep_scores_nothing_twice(tmp_path, life):
  methods, plan = ('none', 'pi', 'yarn'), make_plan(protocols=('fixed_targets', 'sliding(stride=8)'))
  want, store, handed = run(Batches(), methods, plan=plan), Store(tmp_path), []
  while True:
    scorer = Batches(life)
    try:
      points = run(scorer, methods, plan=plan, stored=store)
      break
    except KeyboardInterrupt:
      handed += scorer.scored
      life += 8
  handed += scorer.scored
  assert json.dumps(points) == json.dumps(want)
  assert len(set(handed)) == len(handed)


def test_a_damaged_file_is_scored_again_and_nothing_else(tmp_path):
  said, plan = [], make_plan()
  store = Store(tmp_path, said.append)
  points = run(Batches(), ('none', 'pi'), plan=plan, stored=store)
  path = sorted(tmp_path.glob('*/*.npz'))[3]
  path.write_bytes(path.read_bytes()[:-50])
  again = Batches()
  assert run(again, ('none', 'pi'), plan=plan, stored=store) == points
  assert len(said) == 1 and str(path) in said[0]
  assert len(again.scored) == 2 * DOCS and len({c[0] for c in again.scored}) == 1
  assert run(Fake(None), ('none', 'pi'), plan=plan, stored=store) == points


def test_two_models_share_nothing(tmp_path):
  store, plan = Store(tmp_path), make_plan()
  run(Batches(), plan=plan, stored=store)
  other = Fake(lambda d, n, pos: 2.0)
  run(other, plan=plan, stored=store, slots=('alibi',))
  assert [len(windows) for windows in other.windows] == [2 * DOCS] * len(LENGTHS)


def test_every_length_is_a_forward_pass_of_its_own():
  """Never part of a longer one, which a method that follows the length encodes otherwise; partial windows as well."""
  methods = ('none', 'dynamic_ntk', 'dynamic_ntk_hf', 'dynamic_yarn', 'yarn', 'logn')
  plan = make_plan(protocols=('fixed_targets', 'yarn(stride=12)', 'non_overlapping'))
  fake = Fake(lambda d, n, pos: n + slowest(pos) + float(np.mean(pos[0].logit_scale_T)) / 8)
  points = run(fake, methods, plan=plan)
  asked = plan_lengths(plan)
  assert asked > set(LENGTHS), 'no partial window: nothing is tested'
  assert {n for n, _ in fake.calls} == asked

  def of(method, n):
    pos = posenc.positions(method, schemes('rope'), TRAIN_LEN, n)
    return np.float32(n + slowest(pos) + float(np.mean(pos[0].logit_scale_T)) / 8)

  for method in methods:
    for length in LENGTHS:
      for protocol in ('fixed_targets', 'non_overlapping'):
        assert at(points, method, length, protocol)['nll'] == pytest.approx(of(method, length), rel=1e-7)
      parts = plan.select('yarn(stride=12)', length).parts
      want = np.mean([of(method, p.window.length) for p in parts])
      assert at(points, method, length, 'yarn(stride=12)')['nll'] == pytest.approx(want, rel=1e-6)
  values = {at(points, 'dynamic_ntk_hf', n)['nll'] - n for n in (16, 32, 128)}
  assert len(values) == 3  # and the method does follow it


def plan_lengths(plan):
  return {w.length for p in plan.cfg.protocols for n in LENGTHS for w in plan.windows(p, n)}


def test_every_number_says_what_it_is_of():
  """Windows, tokens, documents, contexts; and what a model without far context would read."""
  plan = make_plan(protocols=PROTOCOLS)
  points = run(PerToken(), plan=plan)
  for point in points:
    parts = plan.select(point['protocol'], point['length']).parts
    assert point['windows'] == len({p.window[:3] for p in parts}) and point['documents'] == DOCS
    assert point['tokens'] == sum(p.last - p.first for p in parts)
    assert (point['context_min'], point['context_max']) == plan.contexts(point['protocol'], point['length'])
    assert ('buckets' in point) == (point['protocol'] == 'position_wise')
    assert point['ci_low'] < point['ppl'] < point['ci_high']
  point = at(points, protocol='position_wise')
  assert sum(tokens for *_, tokens in point['buckets']) == point['tokens']
  null = {(p, n): at(points, 'none', n, p)['null'] for p in ('fixed_targets', 'non_overlapping') for n in (16, 128)}
  fixed, side_by_side = (null[p, 16] - null[p, 128] for p in ('fixed_targets', 'non_overlapping'))
  assert 0 < fixed < side_by_side
  assert points_of.fake_gain([p for p in points if p['protocol'] == 'fixed_targets']) is None
  gain = points_of.fake_gain([p for p in points if p['protocol'] == 'non_overlapping'])
  assert gain == pytest.approx(1 - math.exp(null['non_overlapping', 128] - null['non_overlapping', 16]))
  assert f'falls by {100 * gain:.0f} % here' in results.table(points, 'non_overlapping')
  assert 'falls by' not in results.table(points)


def test_a_protocol_without_windows_at_a_length_is_unsupported(tmp_path):
  plan = make_plan(protocols=('fixed_targets', 'fairseq(context_window=20)'))
  points = run(PerToken(), ('none', 'pi'), plan=plan)
  for method in ('none', 'pi'):
    got = [at(points, method, n, 'fairseq(context_window=20)') for n in LENGTHS]
    assert [p['outcome'] for p in got] == ['unsupported', 'unsupported', 'ok', 'ok']
    assert got[0]['reason'] == 'fairseq: context_window = 20 leaves none of 12 tokens to score'
    assert at(points, method, 12)['outcome'] == 'ok'
  assert points[0].keys() >= {'T', 'context_min', 'context_max'} and got[0]['T'] is None
  results.write(tmp_path, points)
  assert results.table(points, 'fairseq(context_window=20)').count('unsupported') == 4


def test_the_longlora_interval_is_about_its_number():
  """Documents weigh a little less at the ends of the stream; perplexity has the protocol's own base."""
  point = at(run(PerToken(), plan=make_plan(protocols=('longlora(stride=24)',))), protocol='longlora(stride=24)')
  assert point['ppl'] == 2.71828 ** point['nll'] != math.exp(point['nll'])
  low, high = math.log(point['ci_low']), math.log(point['ci_high'])
  assert (low + high) / 2 / math.log(2.71828) == pytest.approx(point['nll'], rel=1e-9)


# Key tokens.


class Moody(PerToken):
  """Every method and length has losses of its own, 0 to 3 nats more."""

  def row(self, plan, window, pos):
    seed = int(positions_hash(pos)[:8], 16) + window.length + window.start + 1000 * window.document
    return super().row(plan, window, pos) + np.random.default_rng(seed).random(window.scored, np.float32) * 3


KEYS = 'key_tokens(judge="yarn", long=8.0, alpha=1.0, beta=-9.0)'


@pytest.mark.parametrize('protocols', [(KEYS,), ('fixed_targets', KEYS)])
def test_key_tokens_are_the_judge_s_for_every_method_and_length(tmp_path, monkeypatch, protocols):
  monkeypatch.setattr('evaluation.protocols.BROKEN', 9.0)
  scorer, plan = Moody(), make_plan(protocols=protocols)
  points = [p for p in run(scorer, ('none', 'yarn'), plan=plan) if p['protocol'] == KEYS]
  pos = {n: posenc.positions('yarn', schemes('rope'), TRAIN_LEN, n) for n in LENGTHS}
  none = {n: posenc.positions('none', schemes('rope'), TRAIN_LEN, n) for n in LENGTHS}

  def of(positions, n):
    return np.concatenate([scorer.row(plan, w, positions[n]) for w in plan.windows('fixed_targets', n)])

  keys = of(pos, 16) - of(pos, 128) > 1
  assert len(points) == 8 and 20 < keys.sum() < 100 and len({p['keys_hash'] for p in points}) == 1
  for p in points:
    assert p['nll'] == pytest.approx(of(none if p['method'] == 'none' else pos, p['length'])[keys].mean(), rel=1e-6)
    assert (p['tokens'], p['mirrored']) == (keys.sum(), (of(pos, 128) - of(pos, 16) > 1).sum())
    assert p['judged_at'] == [16, 128] and ('vs_none' in p) == (p['length'] in (12, 32)) and 'null' not in p
  # Where the judge has looked nothing is marked, not even what it has chosen for itself.
  judge = at(points, 'yarn', 128, KEYS)['nll'], at(points, 'none', 128, KEYS)['nll']
  assert judge[1] - judge[0] > 0.5
  rows = summary.rows(points)
  assert {(p['method'], p['length']) for p in rows if 'marked' in p} == {('yarn', 12), ('yarn', 32)}
  results.write(tmp_path, points)
  assert f'note: {keys.sum()} key tokens, {points[0]["mirrored"]} with the two contexts' in results.table(rows, KEYS)


def test_a_judge_is_not_scored_for_its_own_sake(tmp_path):
  """From another sweep's rows it judges, without them it is unsupported; no window is scored for it."""
  store, long = Store(tmp_path), 'key_tokens(long=2.0, alpha=0.5, beta=-9.0)'
  plan, scorer = make_plan(protocols=(long,)), Moody()
  (point,) = run(scorer, lengths=(128,), plan=plan, stored=store)
  assert point['reason'] == 'key_tokens: their judge, none, has not been scored at 16 tokens'
  assert {n for n, _ in scorer.calls} == {128}
  run(scorer, lengths=(16, 32), plan=make_plan(), stored=store)
  calls = list(scorer.calls)
  (point,) = run(scorer, lengths=(128,), plan=plan, stored=store)
  assert point['outcome'] == 'ok' and scorer.calls == calls and 0 < point['tokens'] < DOCS * 2 * T
  learned = run(PerToken(), lengths=(16, 32), slots=('learned',), plan=make_plan(protocols=('fixed_targets', long)))
  assert [p['outcome'] for p in learned] == ['ok', 'unsupported', 'unsupported', 'unsupported']


def test_seeds_and_schemes_with_key_tokens_of_their_own_are_not_compared():
  rng = np.random.default_rng(0)

  def made(scheme, seed, keys):
    more = {'scheme': scheme, 'seed': seed, 'keys_hash': keys, 'protocol': KEYS, 'judged_at': [16, 128]}
    point = {'method': 'none', 'train_length': 16, 'outcome': 'ok', 'tokens': 9, 'mirrored': 1, **more}
    return [{**point, 'length': n, 'nll_documents': rng.random(12).tolist(), 'ppl': 2.0} for n in (16, 32)]

  points = [*made('rope', 0, 'a'), *made('rope', 1, 'b'), *made('alibi', 0, 'c')]
  lines = summary.curves(points)
  assert [(c.scheme, c.seeds) for c in lines] == [('rope seed 0', (0,)), ('rope seed 1', (1,)), ('alibi', (0,))]
  assert len(summary.rows(points)) == 6 and not summary.between(lines)
  points = [{**p, 'keys_hash': 'a'} for p in points]
  assert [c.seeds for c in summary.curves(points)] == [(0, 1), (0,)] and summary.between(summary.curves(points))


# What it costs.


def test_status_and_rest_say_what_is_there(tmp_path):
  store, plan = Store(tmp_path), make_plan(protocols=('fixed_targets', 'non_overlapping'))
  survey = make_survey(('none', 'yarn', 'ntk'), (16, 128), plan=plan, stored=store)
  lines = [line.split() for line in status(survey).splitlines()]
  assert lines[0] == ['windows', 'there', '16', '128']
  assert lines[1] == ['none', '0', 'of', '120', '0', 'of', '36']
  left = rest(survey, lambda n: 2.0 * n)
  # At 16 tokens the three are one.
  assert [(r.length, r.missing, r.needed, r.tokens, r.flops, r.seconds) for r in left] == [
    (16, 120, 120, 1920, 2 * 1920.0, None),
    (128, 3 * 36, 3 * 36, 128 * 108, 256.0 * 108, None),
  ]
  with pytest.raises(KeyboardInterrupt):
    run(Batches(10 + 4), ('none', 'yarn', 'ntk'), (16, 128), plan=plan, stored=store)
  survey = make_survey(('none', 'yarn', 'ntk'), (16, 128), plan=plan, stored=store)
  lines = [line.split()[1:] for line in status(survey).splitlines()[1:]]
  assert lines == [['120', 'of', '120', there, 'of', '36'] for there in ('24', '12', '12')]
  done, left = rest(survey, lambda n: 2.0 * n)
  assert (done.missing, done.flops, done.seconds) == (0, 0.0, None)
  assert left.missing == 12 + 24 + 24 and left.seconds > 0
  run(Batches(), ('none', 'yarn', 'ntk'), (16, 128), plan=plan, stored=store)
  assert all(r.missing == 0 for r in rest(survey, lambda n: 1.0))
  learned = make_survey(('none',), (16, 32), slots=('learned',))
  assert status(learned).splitlines()[1].split() == ['none', '0', 'of', '24', 'unsupported']


def test_costs_count_shared_windows_once():
  plan = make_plan(protocols=('fixed_targets', 'non_overlapping', 'yarn_truncate', 'sliding(stride=8)'))
  survey = make_survey(lengths=(16, 32), plan=plan)
  assert costs(survey) == [
    ('fixed_targets', 48, DOCS * 2 * (16 + 32), DOCS * 2 * (16 + 32)),
    ('non_overlapping', DOCS * 12, DOCS * 256, DOCS * 256),
    ('yarn_truncate', DOCS * 2, DOCS * 48, 0),
    ('sliding(stride=8)', DOCS * (15 + 13), DOCS * (15 * 16 + 13 * 32), DOCS * (7 * 16 + 9 * 32)),
  ]
  total = sum(extra for *_, extra in costs(survey))
  assert survey.tokens == total


def test_the_rate_is_of_a_batch_and_nothing_is_kept(tmp_path):
  class Timed(PerToken):
    def program(self, length, pos):
      return type('Program', (), {'rows': 4})

  store, scorer = Store(tmp_path), Timed()
  survey = make_survey(plan=make_plan(), stored=store)
  assert rate(survey, lambda n: 1e9 * n, lambda: scorer) > 1e9
  assert [len(w) for w in scorer.windows] == [4, 4] and {n for n, _ in scorer.calls} == {16}
  assert not store.keys()

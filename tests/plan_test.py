"""Which tokens a sweep scores: the same ones at every length, whatever the run, and what a null model makes of them."""

import dataclasses

import numpy as np
import pytest

from data import TokenDocument
from evaluation.plan import EvalConfig, Plan
from spec import SpecError

BOS_ID = 256
TRAIN_LEN, MAX_MULTIPLE = 64, 8
LENGTHS = (16, 32, 64, 128, 256, 512)
LONGEST = TRAIN_LEN * MAX_MULTIPLE


def documents(n=3, size=900, first=0):
  """Every token of every document is a number of its own, so that a token says where it comes from."""
  return [TokenDocument(f'd{i}', np.arange(size, dtype=np.int32) + 10_000 * (i + 1), size) for i in range(first, n)]


def make(docs=None, train_len=TRAIN_LEN, max_multiple=MAX_MULTIPLE, bos='window', sha='a' * 64, stride=1, **cfg):
  return Plan(
    EvalConfig(**{'spans': 4, **cfg}),
    documents() if docs is None else docs,
    train_len=train_len,
    max_multiple=max_multiple,
    bos=bos,
    bos_id=BOS_ID,
    corpus_sha256=sha,
    stride=stride,
  )


def scored(plan, length, protocol='fixed_targets'):
  """int32[windows, scored], the tokens that count."""
  windows = plan.windows(protocol, length)
  return plan.tokens(windows)[1][:, -windows[0].scored :]


def one_line(call, *args, **kwargs):
  with pytest.raises(ValueError) as caught:
    call(*args, **kwargs)
  assert '\n' not in str(caught.value)
  return str(caught.value)


# Fixed targets.


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
def test_the_same_tokens_are_scored_at_every_length(bos):
  plan = make(bos=bos)
  want = [plan.documents[d].tokens[o : o + plan.targets] for d, o in plan.spans]
  for length in LENGTHS:
    np.testing.assert_array_equal(scored(plan, length), want)


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
def test_every_window_is_full_of_the_text_before_its_targets(bos):
  """No min(): a shorter context at a longer length would be another population."""
  plan = make(bos=bos)
  for length in LENGTHS:
    inputs, targets = plan.tokens(plan.windows('fixed_targets', length))
    assert inputs.shape == targets.shape == (12, length)
    assert inputs.dtype == targets.dtype == np.int32
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    np.testing.assert_array_equal(np.diff(targets, axis=1), 1)  # consecutive tokens of one document
    np.testing.assert_array_equal(inputs[:, 0], BOS_ID if bos == 'window' else targets[:, 0] - 1)


def test_spans_are_disjoint_stratified_and_beyond_the_longest_window():
  plan = make(spans=5)
  width = (900 - LONGEST) // 5
  assert [d for d, _ in plan.spans] == [d for d in range(3) for _ in range(5)]  # as many in each document
  for i, (_, offset) in enumerate(plan.spans):
    stratum = LONGEST + i % 5 * width
    assert stratum <= offset <= stratum + width - plan.targets
  assert len({o - LONGEST - i % 5 * width for i, (_, o) in enumerate(plan.spans)}) > 10  # anywhere in the stratum
  tokens = scored(plan, 64)
  assert len(np.unique(tokens)) == tokens.size


def test_a_stratum_is_used_from_its_first_to_its_last_place():
  offsets = {(make(documents(40, LONGEST + 4 * 10), spans=4).spans[i][1] - LONGEST) % 10 for i in range(160)}
  assert offsets == {0, 1, 2}  # 10 tokens wide, 8 targets


def test_targets_depend_on_corpus_and_document_and_on_nothing_else():
  """The plan takes no seed; another corpus, and another document, draw other offsets."""
  spans = make().spans
  assert make().spans == spans
  assert 'seed' not in {f.name for f in dataclasses.fields(EvalConfig)}
  np.random.seed(1)
  assert make(batch_tokens=1, multiples=(1.0,), protocols=('fixed_targets',)).spans == spans
  assert make(sha='b' * 64).spans != spans
  by_document = [[o for d, o in spans if d == i] for i in range(3)]
  assert by_document[0] != by_document[1] != by_document[2]
  fewer = make(documents(3, first=1)).spans  # a document's spans do not depend on its company
  assert [o for d, o in fewer] == by_document[1] + by_document[2]


def test_targets_hash_names_what_is_scored():
  base = make().targets_hash
  assert len(base) == 16
  same = (make(), make(multiples=(1.0, 3.0)), make(batch_tokens=1), make(protocols=('fixed_targets',)))
  assert {p.targets_hash for p in same} == {base}
  others = (
    make(bos='none'),
    make(sha='b' * 64),
    make(documents(2)),
    make(documents(4, first=1)),
    make(documents(size=904)),
    make(spans=3),
    make(max_multiple=7),
    make(train_len=128, max_multiple=4),  # T = 16, and nothing else
    make(non_overlapping_docs=2),
  )
  assert make(train_len=128, max_multiple=4).longest == LONGEST
  hashes = {p.targets_hash for p in others}
  assert len(hashes) == len(others) and base not in hashes


def test_targets_hash_tells_two_sets_of_the_same_offsets_apart():
  """T, bos, corpus and the documents' names are in the hash themselves, not only through the offsets they draw."""
  docs = documents(1, LONGEST + 8)  # one place for one span of 8: no freedom at all
  plans = [make(docs, spans=1), make(docs, spans=1, bos='none'), make(docs, spans=1, sha='b' * 64)]
  longer = make(documents(1, LONGEST + 16), train_len=128, max_multiple=4, spans=1)
  plans.append(make([docs[0]._replace(name='other')], spans=1))
  assert [p.spans for p in plans] == [[(0, LONGEST)]] * 4 and longer.spans == [(0, LONGEST)]
  assert len({p.targets_hash for p in (*plans, longer)}) == 5


def test_the_plan_stays_what_it_was():
  """Golden: a change of the draw moves every published number, so it must be meant."""
  plan = make()
  offsets = [577, 695, 754, 887, 565, 684, 786, 884, 575, 609, 791, 888]
  assert plan.spans == [(i // 4, offset) for i, offset in enumerate(offsets)]
  assert plan.targets_hash == '9d8a90a424ca089c'


@pytest.mark.parametrize('train_len, targets', [(1, 8), (32, 8), (64, 8), (71, 8), (72, 9), (128, 16), (512, 64)])
def test_an_eighth_of_the_training_length_is_scored(train_len, targets):
  assert EvalConfig.targets(train_len) == targets


def test_min_test_tokens_is_exactly_enough():
  cfg = EvalConfig(spans=4)
  need = cfg.min_test_tokens(TRAIN_LEN, MAX_MULTIPLE)
  assert need == LONGEST + 4 * 8
  plan = make(documents(1, need))
  scored(plan, LONGEST)
  message = one_line(make, documents(1, need - 1))
  assert "'d0'" in message and str(need - 1) in message
  with pytest.raises(SpecError):
    make(documents(1, need - 1))


def test_contexts_count_the_positions_to_the_left():
  plan = make()
  assert plan.contexts('fixed_targets', 64) == (56, 63)
  assert plan.contexts('fixed_targets', 512) == (504, 511)
  assert plan.contexts('non_overlapping', 64) == (0, 63)


def test_an_unknown_protocol_is_an_error():
  assert 'fixed_targets' in one_line(make().windows, 'fixed', 64)


@pytest.mark.parametrize('length', [0, 8, LONGEST + 1, LONGEST + 300])
@pytest.mark.parametrize('protocol', ['fixed_targets', 'non_overlapping'])
def test_a_length_without_full_windows_is_an_error(protocol, length):
  """Neither an empty list of windows nor shorter ones; 8 tokens are no more than the targets themselves."""
  assert f'length = {length}' in one_line(make().windows, protocol, length)


# Strides.


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
@pytest.mark.parametrize('train_len, stride', [(68, 17), (64, 2), (64, 16), (60, 5)])
def test_every_window_begins_at_a_multiple_of_the_stride(bos, train_len, stride):
  """Where a token's index says its row and column, a window of evaluation must lie as those of training do."""
  docs = documents(4, 8 * train_len + 4 * (8 + stride - 1))  # just enough
  plan = make(docs, train_len=train_len, bos=bos, stride=stride)
  assert EvalConfig(spans=4).min_test_tokens(train_len, 8) + 4 * (stride - 1) == len(docs[0].tokens)
  for protocol in ('fixed_targets', 'non_overlapping'):
    for length in range(stride * (8 // stride + 1), 8 * train_len + 1, 3 * stride):
      assert all(w.start % stride == 0 for w in plan.windows(protocol, length))
      plan.tokens(plan.windows(protocol, length))  # none is outside its document
  tokens = scored(plan, train_len)
  assert tokens.shape == (16, 8) and len(np.unique(tokens)) == tokens.size  # spans are still disjoint
  assert all(offset >= 8 * train_len for _, offset in plan.spans)
  assert f"a multiple of the corpus's stride, {stride}, is allowed" in one_line(plan.windows, protocol, train_len + 1)
  assert 'are needed' in one_line(make, documents(1, len(docs[0].tokens) - 1), train_len=train_len, stride=stride)


def test_a_stride_leaves_more_than_one_place():
  spans = make(documents(40, 1200), train_len=68, stride=17).spans
  ends = {(o + 8 - 544) // 17 for _, o in spans}
  assert len(ends) > 30 and all((o + 8) % 17 == 0 for _, o in spans)


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
def test_seen_says_where_a_target_stands_and_how_much_text_is_before_it(bos):
  plan = make(bos=bos)
  for protocol, length in (('fixed_targets', 16), ('fixed_targets', 64), ('non_overlapping', 128)):
    windows = plan.windows(protocol, length)
    inputs, targets = plan.tokens(windows)
    offset, visible = (np.stack(part) for part in zip(*map(plan.seen, windows)))
    want = [[(inputs[i, : j + 1] != BOS_ID).sum() for j in range(length)] for i in range(len(windows))]
    np.testing.assert_array_equal(visible, np.array(want)[:, -windows[0].scored :])
    document = np.array([w.document for w in windows])
    np.testing.assert_array_equal(offset + 10_000 * (document[:, None] + 1), targets[:, -windows[0].scored :])


# Non-overlapping windows.


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
@pytest.mark.parametrize('length', LENGTHS)
def test_non_overlapping_windows_tile_the_region_once(bos, length):
  plan = make(bos=bos)
  first = 1 if bos == 'none' else 0  # without BOS nothing stands before a document's first token
  tokens = scored(plan, length, 'non_overlapping')
  assert tokens.shape == (3 * LONGEST // length, length)
  want = np.concatenate([d.tokens[first : first + LONGEST] for d in plan.documents])
  np.testing.assert_array_equal(tokens.ravel(), want)


def test_non_overlapping_drops_the_tail_where_the_length_does_not_divide():
  tokens = scored(make(), 192, 'non_overlapping')
  assert tokens.shape == (3 * 2, 192)  # 384 of 512 tokens: the points' `tokens` says so
  np.testing.assert_array_equal(tokens[:2].ravel(), make().documents[0].tokens[:384])


@pytest.mark.parametrize('docs, want', [(0, 3), (1, 1), (2, 2), (3, 3), (9, 3)])
def test_non_overlapping_docs(docs, want):
  plan = make(non_overlapping_docs=docs)
  windows = plan.windows('non_overlapping', 128)
  assert {w.document for w in windows} == set(range(want))
  assert len(windows) == want * 4
  assert len(plan.windows('fixed_targets', 128)) == 12  # the secondary protocol only


# BOS.


@pytest.mark.parametrize('protocol', ['fixed_targets', 'non_overlapping'])
def test_each_window_starts_with_one_bos(protocol):
  """E05. And BOS is never a target: N text tokens are N targets."""
  plan = make()
  for length in LENGTHS:
    inputs, targets = plan.tokens(plan.windows(protocol, length))
    np.testing.assert_array_equal(inputs[:, 0], BOS_ID)
    assert (inputs == BOS_ID).sum() == len(inputs)
    assert not (targets == BOS_ID).any()


@pytest.mark.parametrize('bos, count', [('document', 3), ('none', 0)])
def test_bos_by_document_or_not_at_all(bos, count):
  plan = make(bos=bos)
  for length in LENGTHS:
    inputs, targets = plan.tokens(plan.windows('non_overlapping', length))
    assert (inputs == BOS_ID).sum() == count and not (targets == BOS_ID).any()
    assert (inputs[:: LONGEST // length, 0] == BOS_ID).all() == bool(count)
    inputs, _ = plan.tokens(plan.windows('fixed_targets', length))
    assert not (inputs == BOS_ID).any()  # late tokens: no window reaches the document's start


# The law that makes fixed targets the default.


def null_nll(context, uses=512):
  """A model that by construction uses at most `uses` tokens."""
  return 2.9 + 2.6 * (np.minimum(context, uses) + 1.0) ** -0.45


def null_curve(protocol, lengths):
  size = 32 * 512
  plan = make(documents(2, size + 16 * 64), train_len=512, max_multiple=32, spans=16)
  out = []
  for length in lengths:
    window = plan.windows(protocol, length)[0]
    low, high = plan.contexts(protocol, length)
    context = np.arange(low, high + 1)
    assert len(context) == window.scored
    out.append(null_nll(context).mean())
  return np.array(out)


def test_fixed_targets_are_flat_for_a_model_without_far_context():
  lengths = [512 * 2**i for i in range(6)]
  curve = null_curve('fixed_targets', lengths)
  np.testing.assert_allclose(curve[1:], null_nll(512), rtol=0, atol=1e-6)  # from 512 + T on
  assert np.ptp(null_curve('fixed_targets', [512 + 64, 600, 16384])) < 1e-6
  assert 0 < 1 - np.exp(curve[-1] - curve[0]) < 0.005  # T = 64 of k = L = 512: 0.48 %


def test_non_overlapping_windows_fake_a_gain_for_the_same_model():
  """The early-token curse: perplexity falls by a tenth though nothing farther than 512 tokens is read."""
  curve = np.exp(null_curve('non_overlapping', [512 * 2**i for i in range(6)]))
  np.testing.assert_allclose(curve[[0, 2, 5]], [24.02, 21.92, 21.34], atol=0.02)
  assert (np.diff(curve) < 0).all() and curve[-1] / curve[0] < 0.95


# What a config may say.


@pytest.mark.parametrize(
  'field, value',
  [
    ('multiples', (0.0,)),
    ('multiples', (-1.0,)),
    ('multiples', (float('nan'),)),
    ('multiples', (float('inf'),)),
    ('multiples', (1.0, 2.0, 1.0)),
    ('multiples', ()),
    ('protocols', ('fixed_targets', 'slide')),
    ('protocols', ('fixed_targets', 'fixed_targets')),
    ('protocols', ()),
    ('spans', 0),
    ('batch_tokens', 0),
    ('non_overlapping_docs', -1),
  ],
)
def test_a_bad_value_is_one_line_that_names_its_field(field, value):
  message = one_line(EvalConfig, **{field: value})
  assert message.startswith(f'{field} = ') and 'allowed' in message

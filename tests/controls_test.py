"""Far text and what is put in its place: nothing near is touched, and a model that reads no further gains nothing."""

import numpy as np
import pytest

import sweep_test
from data import TokenDocument
from evaluation import controls
from evaluation.nulls import smooth
from evaluation.plan import EvalConfig, Plan
from evaluation.protocols import reduce
from evaluation.store import Store
from posenc import Unsupported
from spec import SpecError

TRAIN_LEN, MAX_MULTIPLE, T, VOCAB = 64, 16, 8, 257
LENGTHS = (128, 256, 512, 1024)
CONTROLS = ('truncated', 'shuffled(block=32, spans=0)', 'foreign(spans=0)')


def make(texts=None, bos='window', stride=1, **cfg):
  if texts is None:  # every token a number of its own, so that it says where it comes from
    texts = [np.arange(1300 + 40 * i, dtype=np.int32) + 10_000 * (i + 1) for i in range(5)]
  documents = [TokenDocument(f'd{i}', text, len(text)) for i, text in enumerate(texts)]
  cfg = EvalConfig(**{'spans': 4, 'controls': CONTROLS, **cfg})
  return Plan(cfg, documents, train_len=TRAIN_LEN, max_multiple=MAX_MULTIPLE, bos=bos, bos_id=VOCAB - 1,
              corpus_sha256='a' * 64, stride=stride)  # fmt: skip


def pairs(plan, control, length):
  """(window, true window) of each span."""
  selection = plan.select(control, length)
  return [(p.window, t.window) for p, t in zip(selection.parts, selection.true, strict=True)]


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
@pytest.mark.parametrize('stride', [1, 16, 48])
@pytest.mark.parametrize('control', CONTROLS[1:])
def test_only_what_is_farther_than_train_len_is_replaced(bos, stride, control):
  plan = make(bos=bos, stride=stride, spans=2)
  for length in (-(-n // stride) * stride for n in (180, 300, 900)):
    for window, true in pairs(plan, control, length):
      (inputs,), (targets,) = plan.tokens([window])
      (want,), (labels,) = plan.tokens([true])
      first = length - T  # the first target, at 0 tokens from itself
      distance = first + 1 - np.arange(length)  # input i holds the token before target i
      changed = inputs != want
      assert changed.any() and distance[changed].min() > TRAIN_LEN
      np.testing.assert_array_equal(targets[first:], labels[first:])
      is_text = np.arange(length) >= (bos == 'window')
      beyond = (distance > TRAIN_LEN + stride) & is_text  # up to a stride more is kept, so that windows stay on it
      if control.startswith('foreign'):
        assert changed[beyond].all()
      assert inputs[0] == want[0] or bos != 'window'


def test_shuffled_keeps_the_words_and_their_neighbours():
  plan = make()
  for length in LENGTHS:
    for window, true in pairs(plan, CONTROLS[1], length):
      far = slice(1, length - plan.near + 1)  # after BOS
      got, want = plan.tokens([window])[0][0, far], plan.tokens([true])[0][0, far]
      np.testing.assert_array_equal(np.sort(got), want)
      assert (got != want).any()
      breaks = np.flatnonzero(np.diff(got) != 1)
      assert len(breaks) <= -(-len(got) // 32) - 1
      assert sorted(np.diff([0, *breaks + 1, len(got)]))[-1] < len(got)
  orders = {tuple(plan.tokens([w])[0][0, 1:]) for w, _ in pairs(plan, CONTROLS[1], 1024)}
  assert len(orders) == 5 * 4


def test_foreign_is_one_other_document_from_the_same_place():
  plan, others = make(), set()
  for length in LENGTHS:
    for window, true in pairs(plan, CONTROLS[2], length):
      got = plan.tokens([window])[0][0, 1 : length - plan.near + 1]
      assert (np.diff(got) == 1).all()
      other = got[0] // 10_000 - 1
      assert other != window.document
      assert got[0] % 10_000 == min(true.start, len(plan.documents[other].tokens) - len(got))
      others.add(other)
  assert others == set(range(5))


def test_truncated_is_one_set_of_windows_that_end_there():
  plan = make()
  assert plan.near == TRAIN_LEN + T
  windows = [w for w, _ in pairs(plan, 'truncated', 128)]
  assert windows == [w for w, _ in pairs(plan, 'truncated', 1024)]
  for window, true in pairs(plan, 'truncated', 1024):
    np.testing.assert_array_equal(plan.tokens([window])[0][0, 1:], plan.tokens([true])[0][0, -plan.near + 1 :])
    assert plan.tokens([window])[0][0, 0] == VOCAB - 1


def test_a_window_is_named_by_what_is_in_it():
  """Its row is no other's: of the true text, of another length, of another replacement."""
  plan = make()
  windows = [w for control in CONTROLS for n in LENGTHS for pair in pairs(plan, control, n) for w in pair]
  places = {(plan.place(w), w.length) for w in windows}
  assert len(places) == len({w.whole for w in windows})
  assert places == {(make().place(w), w.length) for w in windows}
  (window, true), *_ = pairs(plan, CONTROLS[2], 256)
  others = [d.tokens + (i > 0) for i, d in enumerate(plan.documents)]
  assert make(others).place(window) != plan.place(window) and make(others).place(true) == plan.place(true)


def test_spans_are_spread_and_a_subset_of_the_fixed_targets():
  plan = make(spans=8)
  fixed = set(plan.windows('fixed_targets', 256))
  for control, offsets in (('foreign(spans=2)', (0, 4)), ('foreign', (0, 2, 4, 6)), ('foreign(spans=99)', range(8))):
    true = [t for _, t in pairs(plan, control, 256)]
    assert set(true) <= fixed and len(true) == 5 * len(offsets)
    kept = {(d, o) for d, o in plan.spans if (d, o + T - 256) in {(t.document, t.start) for t in true}}
    each = [[o for e, o in plan.spans if e == d] for d in range(5)]
    assert kept == {(d, each[d][i]) for d in range(5) for i in offsets}


@pytest.mark.parametrize(
  'control, length, says',
  [
    *((c, 72, 'nothing in 72 tokens is farther than train_len') for c in ('truncated', 'foreign')),
    ('shuffled', 104, 'at most one block of 32'),
  ],
)
def test_where_nothing_is_far_there_is_no_gain(control, length, says):
  with pytest.raises(Unsupported, match=says):
    make().select(control, length)
  assert make().select(control, length + 1).parts


def test_one_document_has_no_other():
  with pytest.raises(Unsupported, match='one test document has no other'):
    make([np.arange(1300, dtype=np.int32)]).select('foreign', 256)


@pytest.mark.parametrize('control', ['near', 'foreign(spans=-1)', 'shuffled(block=0)', 'fixed_targets'])
def test_what_a_config_may_ask_for(control):
  with pytest.raises(SpecError, match='controls'):
    EvalConfig(controls=(control,))
  assert EvalConfig(controls=()).asked == EvalConfig().protocols


# Models of known truth.


def reader(plan, k):
  """NLL from the last k tokens before a target, whatever they are, and from no other."""

  def row(window):
    inputs, _ = (x[0].astype(np.uint64) for x in plan.tokens([window]))
    weight = np.random.default_rng(0).integers(1, 2**60, k + 1, dtype=np.uint64) | np.uint64(1)
    out = []
    for i in range(window.length - window.scored, window.length):
      seen = inputs[max(i + 1 - k, 0) : i + 1][::-1]
      out.append(float((seen * weight[: len(seen)]).sum() >> np.uint64(40)) / 2**24)
    return np.array(out)

  return row


def copier(plan, distance):
  """0 where the token `distance` before a target is in the window and is the target, else uniform."""

  def row(window):
    inputs, targets = (x[0] for x in plan.tokens([window]))
    at = np.arange(window.length - window.scored, window.length)
    found = inputs[np.maximum(at + 1 - distance, 0)] == targets[at]
    return np.where((at + 1 >= distance) & found, 0.0, np.log(VOCAB))

  return row


def gains(plan, row, control, length):
  selection = plan.select(control, length)
  mine, true = (reduce(plan, s, row, np.ones(VOCAB)) for s in (selection, selection._replace(parts=selection.true)))
  return mine.nll_D - true.nll_D


def texts(period=None):
  rng = np.random.default_rng(0)
  tokens = [rng.integers(0, VOCAB - 1, 1400, dtype=np.int32) for _ in range(4)]
  return [np.resize(t[:period], 1400) for t in tokens] if period else tokens


@pytest.mark.parametrize('bos', ['window', 'document', 'none'])
@pytest.mark.parametrize('k', [1, 7, TRAIN_LEN])
def test_a_model_of_at_most_train_len_tokens_gains_nothing(k, bos):
  plan = make(texts(), bos=bos)
  for control in CONTROLS:
    for length in LENGTHS:
      assert (gains(plan, reader(plan, k), control, length) == 0).all()
      assert (gains(plan, smooth(k).row, control, length) == 0).all()


@pytest.mark.parametrize('control', CONTROLS)
def test_and_one_that_reads_further_is_told(control):
  """The nearest token that a control replaces is the first that counts."""
  plan = make(texts())
  assert (gains(plan, reader(plan, TRAIN_LEN + 1), control, 512) != 0).all()


def test_a_copy_from_far_is_worth_all_of_it():
  plan = make(texts(period=200))
  for control in CONTROLS:
    assert (gains(plan, copier(plan, 200), control, 128) == 0).all()  # not in the window
    assert gains(plan, copier(plan, 200), control, 512).min() > 0.9 * np.log(VOCAB)
  near = make(texts(period=40))
  for control in CONTROLS:
    assert (gains(near, copier(near, 40), control, 512) == 0).all()


# In a sweep.


def swept(protocols=('fixed_targets',), methods=('none', 'pi'), stored=None, slots=('rope',)):
  plan = sweep_test.make_plan(protocols=protocols, controls=('truncated', 'shuffled(block=4)', 'foreign'))

  class Fake(sweep_test.Fake):
    def row(self, plan, window, pos):
      worse = {'': 0.0, 'shuffled 4': 0.25, 'foreign': 0.5}[window.far]
      return np.float32([2.0 + window.document + worse + (window.length == plan.near)] * window.scored)

  survey = sweep_test.make_survey(methods, (12, 16, 32, 128), slots, plan, stored=stored)
  fake = Fake(None)
  facts = {**sweep_test.FACTS, 'posenc': list(slots)}
  parts = sweep_test.sweep(survey, lambda: fake, bytes_per_token_V=sweep_test.BYTES_V, facts=facts,
                           progress=sweep_test.Bar())  # fmt: skip
  return [p for part in parts for p in part], fake


@pytest.mark.parametrize('protocols', [('fixed_targets',), ('non_overlapping',)])
def test_a_sweep_tells_gains_where_there_are_some(protocols):
  """Against the true text of the same spans, which is scored for them where no protocol asks for it."""
  points, _ = swept(protocols)
  found = {(p['protocol'], p['method'], p['length']): p for p in points if 'gain' in p}
  want = {'truncated': 1.0, 'shuffled(block=4)': 0.25, 'foreign': 0.5}
  assert set(found) == {(c, m, n) for c in want for m in ('none', 'pi') for n in (32, 128)}
  for (control, _, _), point in found.items():
    assert point['gain'] == pytest.approx(want[control])
    assert point['gain_documents'] == pytest.approx([want[control]] * sweep_test.DOCS)
    assert point['nll'] == pytest.approx(np.mean(2 + np.arange(sweep_test.DOCS)) + want[control])
    assert 'vs_none' not in point and 'floor' not in point
  assert {p['protocol'] for p in points if 'gain' not in p} == set(protocols)


def test_a_method_that_is_refused_has_its_reason_once():
  points, _ = swept(methods=('none', 'ntk'), slots=('alibi',))
  assert {p['protocol'] for p in points if p['method'] == 'ntk'} == {'fixed_targets'}
  assert {p['protocol'] for p in points if p['method'] == 'none'} == {
    'fixed_targets', 'truncated', 'shuffled(block=4)', 'foreign'
  }  # fmt: skip


def test_windows_of_controls_are_stored_like_any(tmp_path):
  first, fake = swept(stored=Store(tmp_path))
  again, idle = swept(stored=Store(tmp_path))
  assert fake.calls and not idle.calls and again == first
  lengths = [n for n, _ in fake.calls]
  assert lengths.count(24) == 2  # truncated, once for each set of positions, whatever the lengths it is compared at


def test_the_far_text_is_where_it_is_said_to_be():
  plan = make(bos='none')
  (window, _), *_ = pairs(plan, CONTROLS[2], 256)
  span = controls.span(plan, window)
  assert (span.start, span.stop) == (window.start - 1, window.start + 256 - plan.near)
  changed = np.flatnonzero(controls.text(plan, window) != plan.documents[window.document].tokens)
  assert (changed[0], changed[-1] + 1) == (span.start, span.stop)

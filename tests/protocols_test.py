"""Each peer's way to a perplexity, written again as its own loop over a model, against the selections here."""

import math

import numpy as np
import pytest

from data import TokenDocument
from evaluation import protocols
from evaluation.plan import EvalConfig, Plan
from evaluation.protocols import PROTOCOLS, STREAM, Window, needed, reduce
from posenc import Unsupported
from spec import SpecError

BOS_ID, TRAIN_LEN, MAX_MULTIPLE = 256, 32, 8
LONGEST = TRAIN_LEN * MAX_MULTIPLE
BYTES_V = np.arange(1, 258)
POLICIES = ('window', 'document', 'none')
LENGTHS = (16, 32, 48, 100, 256)


def documents(n=3, size=LONGEST + 40):
  rng = np.random.default_rng(0)
  return [TokenDocument(f'd{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(n)]


def make(bos='window', docs=None, stride=1, **cfg):
  facts = {'train_len': TRAIN_LEN, 'max_multiple': MAX_MULTIPLE, 'bos_id': BOS_ID, 'corpus_sha256': 'a' * 64}
  return Plan(EvalConfig(spans=2, **cfg), documents() if docs is None else docs, bos=bos, stride=stride, **facts)


def model(inputs, targets, told=True):
  """NLL of each target: a number of all inputs up to it, in their order, and, `told`, of how many there are."""
  inputs, targets = np.asarray(inputs, np.int64), np.asarray(targets, np.int64)
  mixed = np.cumsum(inputs * np.arange(1, len(inputs) + 1)) * 31 + targets * 7 + 13 * len(inputs) * told
  return np.float32(mixed % 1009 / 200)


def loss(ids, scored=None, told=True):
  """The mean of a causal LM called with its inputs as labels: each but the first is a target, of the last `scored`."""
  nll = model(ids, [*ids[1:], 0], told)[:-1]
  return nll.astype(np.float64)[-min(scored or len(nll), len(nll)) :]


def row(plan, told=True):
  def of(window):
    inputs, targets = plan.tokens([window])
    return model(inputs[0], targets[0], told)[-window.scored :]

  return of


def number(plan, text, length, told=True):
  return reduce(plan, plan.select(text, length), row(plan, told), BYTES_V)


def text(plan):
  """A document as a peer would hold it, cut to `longest` inputs with its BOS, and what a window begins with."""
  for document in plan.documents:
    tokens = document.tokens.tolist()
    yield {'window': tokens[: LONGEST - 1], 'document': [BOS_ID, *tokens[: LONGEST - 1]], 'none': tokens[:LONGEST]}[
      plan.bos
    ]


def targets(plan):
  """(inputs, targets) of a document's first `longest` targets, as a stream of next tokens."""
  for document in plan.documents:
    tokens = document.tokens.tolist()
    ids = tokens[: LONGEST + 1] if plan.bos == 'none' else [BOS_ID, *tokens[:LONGEST]]
    yield ids[:-1], ids[1:]


def stream(plan):
  """All documents one after the other, as LongLoRA's test.bin or fairseq's dataset has them."""
  first = [BOS_ID] if plan.bos == 'document' else []
  return [token for d in plan.documents for token in [*first, *d.tokens[:LONGEST].tolist()]]


def begin(plan):
  return [BOS_ID] if plan.bos == 'window' else []


def next_tokens(plan, ids, want, told=True):
  """Of a window of `ids` with `want` after them; BOS first where every window has one."""
  if plan.bos == 'window':
    ids = [BOS_ID, *ids[1:]]
  return model(ids, want, told).astype(np.float64)


# The peers.


def yarn(plan, length, stride, truncate=False):
  longest = length - len(begin(plan))
  means = []
  for ids in text(plan):
    step = stride
    if truncate:
      ids, step = ids[:longest], longest
    before = 0
    for at in range(0, len(ids), step):
      upto = min(at + longest, len(ids))
      nll = loss([*begin(plan), *ids[at:upto]], upto - before)
      if len(nll):
        means.append(nll.mean())
      before = upto
      if upto == len(ids):
        break
  return np.mean(means), math.exp(np.mean(means)), len(means)


def longlora(plan, length, stride):
  """Batches of one window."""
  data = stream(plan)
  starts = list(range(0, len(data) - length, stride))
  starts.pop()
  content = length - len(begin(plan))
  means = []
  for at in starts:
    ids = [*begin(plan), *data[at : at + content]]
    nll = loss(ids)
    means.append(np.mean([x for x, token in zip(nll, ids[1:]) if token != BOS_ID]))
  return np.mean(means), 2.71828 ** np.mean(means), len(means)


def fairseq(plan, length, context_window):
  """Blocks of length - context_window targets, before each at most context_window tokens of the ones before it."""
  data, block = stream(plan), length - context_window
  ids, want = ([BOS_ID, *data[:-1]], data) if plan.bos == 'window' else (data[:-1], data[1:])
  nll = []
  previous = []  # inputs carried over; where every window has a BOS it stands in for the first of them
  for at in range(0, len(want), block):
    new = ids[at : at + block]
    previous = previous[max(len(previous) + len(new) - length, 0) :]
    inputs = [*previous, *new]
    scored = next_tokens(plan, inputs, [*want[at - len(previous) : at], *want[at : at + block]], told=False)
    nll += [x for x, token in zip(scored[len(previous) :], want[at : at + block]) if token != BOS_ID]
    previous = inputs[-context_window:] if context_window else []
  return np.mean(nll), math.exp(np.mean(nll)), len(nll)


def blocks(plan, length, last=None):
  """Side by side; the last targets of each, as GPT-NeoX's labels are shifted already."""
  for ids, want in targets(plan):
    for at in range(0, LONGEST - length + 1, length):
      nll = next_tokens(plan, ids[at : at + length], want[at : at + length])
      yield nll[-min(last or length, length) :]


def lm_eval(plan, length):
  """A window predicts at most `length` tokens, each once; the last one's inputs reach further back."""
  nll = n_bytes = 0
  for ids, want in targets(plan):
    done = 0
    while done < LONGEST:
      new = min(LONGEST - done, length)
      upto = done + new
      at = 0 if not done else upto - length
      scored = next_tokens(plan, ids[at:upto], want[at:upto])[-new:]
      nll += scored.sum()
      n_bytes += sum(token + 1 for token in want[done:upto])
      done = upto
  tokens = LONGEST * len(plan.documents)
  return nll / tokens, math.exp(nll / tokens), tokens, nll / n_bytes / math.log(2)


def pi(plan, length, stride):
  total, tokens = 0.0, 0
  stride = min(stride, length)
  for ids, want in targets(plan):
    for at in range(0, LONGEST - length + 1, stride):
      nll = next_tokens(plan, ids[at : at + length], want[at : at + length])
      nll = nll[-stride:] if at else nll
      total, tokens = total + nll.sum(), tokens + len(nll)
  return total / tokens, math.exp(total / tokens), tokens


def same(got, want):
  assert got.nll == pytest.approx(want[0], rel=1e-6)
  assert got.ppl == pytest.approx(want[1], rel=1e-6)


@pytest.mark.parametrize('length', LENGTHS)
@pytest.mark.parametrize('bos', POLICIES)
class TestPeers:
  @pytest.mark.parametrize('stride', [16, 24, 64])
  def test_yarn(self, bos, length, stride):
    """Partial last windows (24 never divides), and with 64 gaps between the windows of 16, are as they are there."""
    plan = make(bos)
    got, want = number(plan, f'yarn(stride={stride})', length), yarn(plan, length, stride)
    same(got, want)
    assert got.windows == want[2]

  def test_yarn_truncate(self, bos, length):
    plan = make(bos)
    got = number(plan, 'yarn_truncate', length)
    same(got, yarn(plan, length, 256, truncate=True))
    assert (got.windows, got.tokens) == (3, 3 * (length - 1))

  @pytest.mark.parametrize('stride', [24, 64])
  def test_longlora(self, bos, length, stride):
    plan = make(bos)
    got, want = number(plan, f'longlora(stride={stride})', length), longlora(plan, length, stride)
    same(got, want)
    assert got.windows == want[2] and got.documents == 3

  @pytest.mark.parametrize('context_window', [0, 8, 15, -1, -5, -16])
  def test_fairseq(self, bos, length, context_window):
    """A model that is not told its length: the stream's first blocks, whose windows are short, are read in one."""
    plan = make(bos)
    got = number(plan, f'fairseq(context_window={context_window})', length, told=False)
    want = fairseq(plan, length, context_window if context_window >= 0 else length + context_window)
    same(got, want)
    assert got.tokens == want[2] == 3 * LONGEST - (bos == 'none')

  def test_dape(self, bos, length):
    plan = make(bos)
    want = np.concatenate(list(blocks(plan, length, 256)))
    got = number(plan, 'dape_last256', length)
    same(got, (want.mean(), math.exp(want.mean())))
    assert got.tokens == len(want)

  def test_lm_eval(self, bos, length):
    plan = make(bos)
    got, want = number(plan, 'lm_eval_rolling', length), lm_eval(plan, length)
    same(got, want)
    assert got.tokens == want[2] == 3 * LONGEST
    assert got.nll * got.tokens / (got.bytes * math.log(2)) == pytest.approx(want[3], rel=1e-6)

  @pytest.mark.parametrize('stride', [16, 24, 64])
  def test_sliding(self, bos, length, stride):
    plan = make(bos)
    got, want = number(plan, f'sliding(stride={stride})', length), pi(plan, length, stride)
    same(got, want)
    assert got.tokens == want[2]

  def test_non_overlapping(self, bos, length):
    plan = make(bos)
    want = np.concatenate(list(blocks(plan, length)))
    got = number(plan, 'non_overlapping', length)
    same(got, (want.mean(), math.exp(want.mean())))
    assert (got.tokens, got.windows) == (len(want), len(want) / length)

  def test_position_wise(self, bos, length):
    plan = make(bos)
    nll = np.stack(list(blocks(plan, length)))
    got = number(plan, 'position_wise', length)
    assert got.nll == number(plan, 'non_overlapping', length).nll
    assert [b[:2] for b in got.buckets][:4] == [(0, 1), (1, 2), (2, 4), (4, 8)] and got.buckets[-1].end == length
    assert sum(b.tokens for b in got.buckets) == got.tokens
    for bucket in got.buckets:
      want = nll[:, bucket.first : bucket.end]
      assert bucket.tokens == want.size
      assert bucket.nll == pytest.approx(want.mean(), rel=1e-6)


def test_dape_counts_256_of_a_longer_window():
  docs = documents(2, 2000)
  plan = Plan(EvalConfig(spans=2), docs, train_len=128, max_multiple=8, bos='window', bos_id=BOS_ID, corpus_sha256='a')
  assert number(plan, 'dape_last256', 1024).tokens == 2 * 256
  selection = plan.select('dape_last256', 512)
  assert {part[1:] for part in selection.parts} == {(256, 512)} and len(selection.parts) == 4


def test_a_telltale_model_would_notice_a_row_of_a_longer_window():
  """The mock is told its length, as dynamic methods are: the peers' loops above agree only with passes of their own."""
  plan = make()
  short, long = Window(0, 0, 32, 32), Window(0, 0, 64, 64)
  assert (row(plan)(short) != row(plan)(long)[:32]).all()
  np.testing.assert_array_equal(row(plan, told=False)(short), row(plan, told=False)(long)[:32])


# What they share and say.

PLAIN = [name if name != 'longlora' else 'longlora(stride=24)' for name in PROTOCOLS if name != 'key_tokens']


@pytest.mark.parametrize('bos', POLICIES)
@pytest.mark.parametrize('name', PLAIN)
def test_every_protocol_counts_what_it_says(name, bos):
  plan = make(bos)
  for length in LENGTHS:
    selection = plan.select(name, length)
    got = number(plan, name, length)
    assert got.tokens == sum((plan.targets_of(*p)[0] != BOS_ID).sum() for p in selection.parts)
    assert got.documents == len(got.nll_D) == 3
    for p in selection.parts:
      assert p.window.document == STREAM or plan.targets_of(*p)[1] == p.window.document
    assert got.windows == len(set(selection.parts))
    assert got.nll == pytest.approx((got.nll_D * got.weight_D).sum(), rel=1e-12)
    assert all(0 <= p.first < p.last <= p.window.length <= length for p in selection.parts)
    assert all(p.window.length - p.window.scored <= p.first for p in selection.parts)
    assert plan.contexts(name, length) == (
      min(p.first for p in selection.parts),
      max(p.last for p in selection.parts) - 1,
    )


@pytest.mark.parametrize('name', ['longlora(stride=24)', 'fairseq(context_window=8)'])
@pytest.mark.parametrize('bos', POLICIES)
def test_a_targets_document_is_its_own_where_windows_cross_borders(name, bos):
  """A model that is bad at one document: only that document's mean is."""
  docs = [TokenDocument(f'd{i}', np.full(LONGEST + 40, i, np.int32), 1) for i in range(3)]
  plan = make(bos, docs)

  def of(window):
    _, want = plan.tokens([window])
    return np.where(want[0] == 1, 5.0, 2.0).astype(np.float32)[-window.scored :]

  got = reduce(plan, plan.select(name, 32), of, BYTES_V)
  np.testing.assert_allclose(got.nll_D, [2.0, 5.0, 2.0], rtol=1e-12)
  assert 2.5 < got.nll < 3.5


def test_protocols_share_their_windows():
  plan = make()
  names = ('non_overlapping', 'yarn_truncate', 'lm_eval_rolling', 'dape_last256', 'position_wise')
  alone = needed([plan.select('non_overlapping', 32)])
  assert len(alone) == 3 * 8
  assert needed(plan.select(name, 32) for name in names) == alone
  more = needed([*(plan.select(name, 32) for name in names), plan.select('sliding(stride=16)', 32)])
  assert len(more) == 3 * 15  # every second one is new
  assert {w.scored for w in more} == {16, 32}
  assert {w.length for w in needed([plan.select('yarn(stride=24)', 48)])} == {48, 40}


def test_the_same_window_is_kept_as_far_as_any_protocol_reads():
  plan = make()
  for names in (('sliding(stride=16)', 'non_overlapping'), ('non_overlapping', 'sliding(stride=16)')):
    kept = {w[:3]: w.scored for w in needed(plan.select(name, 32) for name in names)}
    assert kept[0, 0, 32] == kept[0, 32, 32] == 32 and kept[0, 16, 32] == 16


def test_windows_of_the_stream_know_their_text():
  plan = make('document')
  part = next(p for p in plan.select('longlora(stride=24)', 48).parts if p.window.start == 1 + 240)
  inputs, want = plan.tokens([part.window])
  assert part.window.document == STREAM
  border = LONGEST + 1 - 240
  assert inputs[0, border] == BOS_ID and want[0, border - 1] == BOS_ID
  np.testing.assert_array_equal(inputs[0, border + 1 :], plan.documents[1].tokens[: 47 - border])
  _, owner = plan.targets_of(part.window, 0, 48)
  assert owner.tolist() == [0] * (border - 1) + [-1] + [1] * (48 - border)


def test_a_grid_s_windows_begin_at_rows():
  """Strides are rounded up to the corpus's."""
  plan = Plan(
    EvalConfig(spans=2),
    documents(3, 1000),
    train_len=34,
    max_multiple=8,
    bos='window',
    bos_id=BOS_ID,
    corpus_sha256='a',
    stride=17,
  )
  for name in ('sliding(stride=16)', 'yarn(stride=16)', 'longlora(stride=20)'):
    starts = {w.start for w in plan.windows(name, 68)}
    assert all(start % 17 == 0 for start in starts) and len(starts) > 3


# What cannot be.


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ('slide', "protocols = 'slide': did you mean 'sliding'? allowed: dape_last256, "),
    ('sliding(step=3)', 'protocols sliding: unknown argument step = 3'),
    ('sliding(stride=0)', 'protocols sliding: stride = 0: a whole number of at least 1 is allowed'),
    ('yarn(stride=2.5)', 'protocols yarn: stride = 2.5: a whole number is allowed'),
    ('fixed_targets(stride=3)', 'allowed: none'),
    ('sliding(64)', 'arguments are named'),
  ],
)
def test_a_bad_string_is_one_line(text, says):
  for call in (lambda: protocols.check(text), lambda: EvalConfig(protocols=(text,))):
    with pytest.raises(SpecError) as caught:
      call()
    assert says in str(caught.value) and '\n' not in str(caught.value)


@pytest.mark.parametrize('context_window', [32, 100, -32, -33])
def test_a_context_without_room_for_a_target_is_unsupported(context_window):
  plan = make()
  text = f'fairseq(context_window={context_window})'
  if context_window == -32:
    assert plan.select(text, 32) == plan.select('fairseq', 32)
    return
  with pytest.raises(Unsupported, match=f'context_window = {context_window} leaves none of 32 tokens'):
    plan.select(text, 32)


def test_longlora_needs_more_than_its_last_window():
  with pytest.raises(Unsupported, match='no window of 256 but the last'):
    make(docs=documents(1)).select('longlora', LONGEST)


# Key tokens.


def judged(plan, text, length, of=None):
  of = of or row(plan)
  return reduce(plan, plan.select(text, length), of, BYTES_V, of)


def level(value):
  """A model whose loss is value(document, offset of the target, length of the window)."""

  def of(window):
    at = np.arange(window.start + window.length - window.scored, window.start + window.length)
    return np.float32([value(window.document, t, window.length) for t in at])

  return of


def test_key_tokens_are_longppl_s():
  """LSD > alpha and LCL > beta, target by target, told by the judge's two contexts; averaged at any length alike."""
  plan = make()
  rng = np.random.default_rng(0)
  loss = {
    (d, t, n): rng.exponential(1.5) for d in range(3) for t in range(LONGEST, LONGEST + 40) for n in LENGTHS + (128,)
  }
  # A judge that is broken would be refused: its long context is a little better on the whole.
  judge, mine = level(lambda *key: loss[key] - 0.3 * (key[2] == 128)), level(lambda *key: loss[key])
  kept = [(d, t) for d, offset in plan.spans for t in range(offset, offset + plan.targets)]
  for alpha, beta in ((2.0, -2.0), (0.5, -2.0), (2.0, -0.5)):
    want = [
      (d, t) for d, t in kept
      if loss[d, t, 32] - (loss[d, t, 128] - 0.3) > alpha and -(loss[d, t, 128] - 0.3) > beta
    ]  # fmt: skip
    mirrored = [k for k in kept if (loss[*k, 128] - 0.3) - loss[*k, 32] > alpha and -loss[*k, 32] > beta]
    text = f'key_tokens(alpha={alpha}, beta={beta})'
    for length in (16, 100, 256):
      got = reduce(plan, plan.select(text, length), mine, BYTES_V, judge)
      assert got.nll == pytest.approx(np.mean([loss[d, t, length] for d, t in want]), rel=1e-6)
      assert (got.tokens, got.chosen.mirrored) == (len(want), len(mirrored)) and 0 < len(want) < len(kept) / 2
      assert got.bytes == sum(int(plan.documents[d].tokens[t]) + 1 for d, t in want)
      assert got.documents == len({d for d, _ in want}) == len(got.nll_D)
  assert plan.select('key_tokens', 48).parts == plan.select('fixed_targets', 48).parts


def test_the_windows_of_key_tokens_are_the_default_s():
  plan = make()
  text = "key_tokens(judge='yarn', long=8.0)"
  assert needed([plan.select(text, 48)]) == needed([plan.select('fixed_targets', 48)])
  assert plan.select(text, 48).judge.lengths == (32, 256) and plan.select(text, 48).judge.method == 'yarn'


def test_a_judge_that_is_broken_or_finds_nothing_is_refused():
  plan = make()
  with pytest.raises(Unsupported, match='none is 1 nats worse at 128 tokens than at 32, and cannot judge'):
    judged(plan, 'key_tokens', 48, level(lambda d, t, n: 3.0 + (n == 128)))
  with pytest.raises(Unsupported, match='nan nats worse'):
    judged(plan, 'key_tokens', 48, level(lambda d, t, n: math.nan))
  with pytest.raises(Unsupported, match='none finds none among 48 targets'):
    judged(plan, 'key_tokens', 48, level(lambda d, t, n: 3.0))
  with pytest.raises(Unsupported, match='no windows of 512 tokens'):
    plan.select('key_tokens(long=16.0)', 48)


@pytest.mark.parametrize(
  ('text', 'says'),
  [
    ("key_tokens(judge='yam')", "protocols key_tokens: judge = 'yam': "),
    ('key_tokens(long=1.0)', 'protocols key_tokens: short = 1, long = 1: a short one below the long is allowed'),
    ('key_tokens(gamma=1.0)', 'protocols key_tokens: unknown argument gamma = 1.0'),
  ],
)
def test_a_judge_that_cannot_be_is_one_line(text, says):
  with pytest.raises(SpecError) as caught:
    EvalConfig(protocols=(text,))
  assert says in str(caught.value) and '\n' not in str(caught.value)

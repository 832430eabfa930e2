"""Seven and more quantities are called "perplexity at length L": each is here a choice of targets and a way to average.

A protocol is a function of a plan and a length: which positions of which windows count, and how they are averaged. What
it needs scored follows from that, and one function, `reduce`, makes the number. So protocols share windows, and a new
one is one function and one line in PROTOCOLS.

Of all of them: BOS is the model's own policy (`data.bos`) in every window and never a target, whatever a peer's code
does with it; a row of NLLs is one forward pass at its own length, never part of a longer one; all but `fixed_targets`
read the first max_multiple * train_len tokens of each document, the first `non_overlapping_docs` of them.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from data.windows import first_start
from posenc import Unsupported, check_method
from spec import Call, SpecError, choose

STREAM = -1  # as a window's document: the documents one after the other
BROKEN = 0.05  # nats, by which a judge of key tokens may be worse with the long context than with the short one


class Window(NamedTuple):
  """`length` tokens of one test document, or of the stream, of which the NLL of the last `scored` is kept.

  far: what stands where the document's text far from the targets did, see evaluation/controls.py; '' for that text.
  """

  document: int
  start: int  # offset of the first target in the document's text tokens, as `data.cut` takes it
  length: int
  scored: int
  far: str = ''

  @property
  def whole(self) -> 'Window':
    """The same for every window of these tokens, however much of it is kept."""
    return self._replace(scored=0)


class Part(NamedTuple):
  """Targets first .. last - 1 of a window count; they have as many positions to their left as their index says."""

  window: Window
  first: int
  last: int


class Judge(NamedTuple):
  """Who says which targets count, from what two contexts make of each: parts of the same targets, in their order."""

  method: str
  short: Sequence[Part]
  long: Sequence[Part]
  alpha: float
  beta: float

  @property
  def lengths(self) -> tuple[int, int]:
    return self.short[0].window.length, self.long[0].window.length


class Selection(NamedTuple):
  """What counts, and how it is averaged.

  mean: 'tokens', every target alike, or 'windows', the mean of the windows' means. base: perplexity is base ** nll.
  edges: also the mean of the targets at positions edges[i] .. edges[i + 1] - 1 of their window. true: of a control, the
  same targets with their true text before them. judge: only the targets that it chooses count, of any model.
  """

  parts: list[Part]
  mean: str = 'tokens'
  base: float = math.e
  edges: tuple[int, ...] = ()
  true: Sequence[Part] = ()
  judge: Judge | None = None


class Bucket(NamedTuple):
  """Targets at positions first .. end - 1 of their windows."""

  first: int
  end: int
  nll: float  # nats
  tokens: int


class Chosen(NamedTuple):
  """By a judge. mirrored: targets that it would have chosen with its two contexts exchanged; so many are chance."""

  keys: tuple[np.ndarray, ...]  # bool, of the targets of each part
  mirrored: int

  @property
  def digest(self) -> str:
    return hashlib.sha256(np.packbits(np.concatenate(self.keys)).tobytes()).hexdigest()[:16]


class Numbers(NamedTuple):
  """A protocol's number at one length, nats, and what it is made of. nll = sum(weight_D * nll_D)."""

  nll: float
  ppl: float
  windows: int
  tokens: int
  bytes: int
  documents: int
  nll_D: np.ndarray  # float64, of the documents that have targets
  weight_D: np.ndarray  # float64, sums to 1
  buckets: tuple[Bucket, ...]
  chosen: Chosen | None = None


def fixed_targets(plan: Any, length: int) -> Selection:
  """Every span at the end of a window of `length`: contexts of length - T .. length - 1 tokens. The default.

  The same targets at every length. No window crosses a document's border, none is partial, no target counts twice.
  """
  windows = (Window(d, offset + plan.targets - length, length, plan.targets) for d, offset in plan.spans)
  return Selection([Part(w, length - plan.targets, length) for w in windows])


def non_overlapping(plan: Any, length: int) -> Selection:
  """Windows side by side from each document's start, every token scored: ALiBi, KERPLE, most papers (A).

  Mean context grows with the length, so it falls even for a model that ignores the far context (the early-token curse).
  Inside documents. Where `length` divides the region no token is dropped; otherwise the tail is.
  """
  return Selection([_whole(d, start, length) for d, start in _side_by_side(plan, length)])


def sliding(plan: Any, length: int, *, stride: int = 256) -> Selection:
  """All targets of a document's first window, then the last `stride` of windows moved by as many: PI, section 3.2 (C).

  Mean over tokens. The first window's early targets stay in, and the larger the length the more they weigh. Inside
  documents; what lies after the last full window is dropped. A stride above the length moves by the length.
  """
  step = min(_step(plan, stride), length)
  parts = []
  for d in _documents(plan):
    parts.append(_whole(d, _first(plan), length))
    parts += [
      Part(Window(d, _first(plan) + start, length, step), length - step, length)
      for start in range(step, plan.longest - length + 1, step)
    ]
  return Selection(parts)


def yarn(plan: Any, length: int, *, stride: int = 256) -> Selection:
  """Sliding windows whose means are averaged, each alike: YaRN's eval/perplexity.py (D).

  The first window's length - 1 targets weigh as much as the `stride` of a later one, or as the few of a partial last
  one. A window of L inputs has L - 1 targets: labels are inputs, shifted. With a stride above the length tokens between
  windows are never scored. Inside documents, cut to max_multiple * train_len tokens, BOS included.
  """
  step = _step(plan, stride)
  bos = 1 if plan.bos == 'window' else 0  # stands before every window's text, and is no part of it
  end, parts = plan.longest - bos, []
  for d in _documents(plan):
    scored_to = 0
    for begin in range(0, end, step):
      upto = min(begin + length - bos, end)
      inputs, new = upto - begin + bos, upto - scored_to
      first = max(inputs - 1 - new, 0)
      if first < inputs - 1:  # one token alone has no target: theirs is 0 / 0 there
        parts.append(Part(Window(d, _first(plan) + begin, inputs, inputs - first), first, inputs - 1))
      scored_to = upto
      if upto == end:
        break
  return Selection(parts, mean='windows')


def yarn_truncate(plan: Any, length: int) -> Selection:
  """One window a document, its first `length` tokens: YaRN's eval.sh, which its tables and figure 1 come from (D').

  Other tokens at every length, early ones at the short. length - 1 targets a window; means of windows, all alike.
  """
  return Selection([Part(_whole(d, _first(plan), length)[0], 0, length - 1) for d in _documents(plan)], mean='windows')


def longlora(plan: Any, length: int, *, stride: int = 256) -> Selection:
  """Windows moved by `stride`, all length - 1 targets of each scored again and again: LongLoRA's and LCEG's eval (E).

  `non_overlapping` at many offsets, with its early tokens; not `sliding`. Windows cross the borders of documents, which
  stand one after the other; the last of them is left out, as theirs is. Perplexity is 2.71828 ** nll.
  """
  first = 0 if plan.bos == 'window' else 1
  starts = list(range(0, len(plan.stream) - length, _step(plan, stride)))[:-1]
  if not starts:
    raise Unsupported(f'longlora: {len(plan.stream)} tokens hold no window of {length} but the last')
  parts = [Part(Window(STREAM, first + start, length, length), 0, length - 1) for start in starts]
  return Selection(parts, mean='windows', base=2.71828)


def fairseq(plan: Any, length: int, *, context_window: int = 0) -> Selection:
  """The last length - context_window targets of windows moved by as many: fairseq-eval-lm --context-window (B).

  tokens_per_sample = length. The flag is the context, not the stride. Below 0 it counts from the length: -1 is ALiBi's
  L - 1, stride 1. Contexts run across the borders of documents. Blocks at the very start, whose context is still short,
  are the first window's targets; a partial last block has its whole context. Every token counts once.
  """
  context = context_window if context_window >= 0 else length + context_window
  step = length - context
  if not 0 < step <= length:
    raise Unsupported(f'fairseq: context_window = {context_window} leaves none of {length} tokens to score')
  first = 0 if plan.bos == 'window' else 1
  end = len(plan.stream) - first
  begin = (context // step + 1) * step  # blocks before this one see the stream's start
  parts = [Part(_whole(STREAM, first, length)[0], 0, begin)]
  for block in range(begin, end, step):
    new = min(step, end - block)
    parts.append(Part(Window(STREAM, first + block - context, context + new, new), context, context + new))
  return Selection(parts)


def dape_last256(plan: Any, length: int) -> Selection:
  """The last 256 targets of windows side by side, or all of a shorter one: DAPE's training.py, after FIRE (F).

  Few targets at long lengths, and others at every length. Theirs are packed across documents, these are not.
  """
  parts = [_whole(d, start, length) for d, start in _side_by_side(plan, length)]
  return Selection([part._replace(first=max(length - 256, 0)) for part in parts])


def lm_eval_rolling(plan: Any, length: int) -> Selection:
  """`non_overlapping`, and the tail in a last full window that borrows its context: lm-eval's rolling windows (G).

  context_len = 1: no other window shares a token with the one before it. Inside documents, every token counts once;
  what it is compared by is bits per byte.
  """
  parts = non_overlapping(plan, length).parts
  rest = plan.longest % length
  for d in _documents(plan) if rest else ():
    window = Window(d, _first(plan) + plan.longest - length, length, rest)
    parts.append(Part(window, length - rest, length))
  return Selection(sorted(parts))


def position_wise(plan: Any, length: int) -> Selection:
  """`non_overlapping` taken apart: also the mean of the targets at positions 0, 1, 2-3, 4-7 ... of their window."""
  edges = (0, *(2**i for i in range(math.ceil(math.log2(length)))), length)
  return non_overlapping(plan, length)._replace(edges=edges)


def key_tokens(
  plan: Any,
  length: int,
  *,
  judge: str = 'none',
  short: float = 1.0,
  long: float = 4.0,
  alpha: float = 2.0,
  beta: float = -2.0,
) -> Selection:
  """`fixed_targets`, of those alone that need long context: LongPPL (Fang et al. 2024, arXiv 2410.23771).

  A target is a key token if its long-short difference LSD = log p_long - log p_short > alpha and its long-context
  likelihood LCL = log p_long > beta, nats, alpha and beta theirs; key tokens are averaged alike. In the paper another,
  larger model tells, with 4096 tokens and more against the whole text; here it is the checkpoint itself, read by the
  method `judge` in windows of `short` and of `long` times train_len, once for all methods and lengths.

  The judge's own numbers are biased by the choice: high at `short` and low at `long`, as those of every method that is
  the same there. Any scatter between two lengths is chosen as a gain (`evaluation.certify`). So methods compare, and
  curves fall, only where the judge has not looked; and as many keys as are `mirrored` (the contexts exchanged) are
  chance. Checkpoints have key tokens of their own: neither seeds nor schemes are compared on them. A judge that is
  worse with the long context, by more than 0.05 nats over all targets, is refused.
  """
  parts = fixed_targets(plan, length).parts
  lengths = [round(multiple * plan.train_len) for multiple in (short, long)]
  for n in lengths:
    if not plan.targets < n <= plan.longest or n % plan.stride:
      raise Unsupported(f'key_tokens: no windows of {n} tokens')
  looks = [fixed_targets(plan, n).parts for n in lengths]
  return Selection(parts, judge=Judge(judge, looks[0], looks[1], alpha, beta))


def choose_targets(judge: Judge, row: Callable[[Window], np.ndarray]) -> Chosen:
  """Unsupported where the judge is broken, or finds none. row: see `reduce`, of the judge."""
  short, long = ([_nll(part, row(part.window)) for part in parts] for parts in (judge.short, judge.long))
  worse = float(np.concatenate(long).mean() - np.concatenate(short).mean())
  who, (first, second) = judge.method, judge.lengths
  if not worse <= BROKEN:
    raise Unsupported(
      f'key_tokens: {who} is {worse:.3g} nats worse at {second} tokens than at {first}, and cannot judge'
    )

  def keys(near, far):
    return tuple((n - f > judge.alpha) & (-f > judge.beta) for n, f in zip(near, far, strict=True))

  chosen = Chosen(keys(short, long), sum(int(k.sum()) for k in keys(long, short)))
  if not any(k.any() for k in chosen.keys):
    raise Unsupported(f'key_tokens: {who} finds none among {sum(map(len, chosen.keys))} targets')
  return chosen


PROTOCOLS: dict[str, Callable[..., Selection]] = {
  'fixed_targets': fixed_targets,
  'non_overlapping': non_overlapping,
  'sliding': sliding,
  'yarn': yarn,
  'yarn_truncate': yarn_truncate,
  'longlora': longlora,
  'fairseq': fairseq,
  'dape_last256': dape_last256,
  'lm_eval_rolling': lm_eval_rolling,
  'position_wise': position_wise,
  'key_tokens': key_tokens,
}


Table = Mapping[str, Callable[..., Selection]]


def check(text: str, table: Table = PROTOCOLS, what: str = 'protocols') -> Call:
  """Parses a protocol's string; SpecError unless it names one of the table's with arguments that it takes."""
  call = choose(what, text, table)
  for name, least in (('stride', 1), ('block', 1), ('spans', 0)):
    if call.kwargs.get(name, least) < least:
      given = f'{what} {call.name}: {name} = {call.kwargs[name]}'
      raise SpecError(f'{given}: a whole number of at least {least} is allowed')
  if call.name == 'key_tokens':
    try:
      check_method(call.kwargs.get('judge', 'none'))
    except SpecError as error:
      raise SpecError(f'{what} {call.name}: judge = {call.kwargs["judge"]!r}: {error}') from None
    short, long = call.kwargs.get('short', 1.0), call.kwargs.get('long', 4.0)
    if not 0 < short < long:
      raise SpecError(f'{what} key_tokens: short = {short:g}, long = {long:g}: a short one below the long is allowed')
  return call


def select(text: str, plan: Any, length: int, table: Table = PROTOCOLS) -> Selection:
  """What the protocol that `text` names counts at this length; Unsupported where there is nothing to count."""
  call = check(text, table)
  return table[call.name](plan, length, **call.kwargs)


def needed(selections: Iterable[Selection]) -> list[Window]:
  """The windows that these need, each once, with as many positions kept as any of them reads; by length, then place."""
  kept: dict[Window, int] = {}
  for window in (part.window for selection in selections for part in (*selection.parts, *selection.true)):
    kept[window.whole] = max(kept.get(window.whole, 0), window.scored)
  windows = (window._replace(scored=scored) for window, scored in kept.items())
  return sorted(windows, key=lambda w: (w.length, w.scored, w.far, w.document, w.start))


def _nll(part: Part, row: np.ndarray) -> np.ndarray:
  """float64, of the part's targets."""
  kept = part.window.length - part.window.scored  # the index of the row's first entry
  return row[part.first - kept : part.last - kept].astype(np.float64)


def reduce(
  plan: Any,
  selection: Selection,
  row: Callable[[Window], np.ndarray],
  bytes_V: np.ndarray,
  judge: Callable[[Window], np.ndarray] | None = None,
) -> Numbers:
  """The number. `row(window)` has the NLL of its last `scored` positions, nats; bytes_V: bytes of each token.

  judge: the rows of the selection's judge; the model itself, if it has one and this is not told.
  """
  chosen = choose_targets(selection.judge, judge or row) if selection.judge else None
  count = len(plan.documents)
  sum_D, weight_D, tokens, n_bytes = np.zeros(count), np.zeros(count), 0, 0
  buckets = np.zeros((2, max(len(selection.edges) - 1, 0)))
  for i, part in enumerate(selection.parts):
    window, first, last = part
    nll = _nll(part, row(window))
    targets, owner = plan.targets_of(window, first, last)
    if chosen:
      nll, targets = nll[chosen.keys[i]], targets[chosen.keys[i]]
    if window.document == STREAM:
      text = owner >= 0  # BOS is no target, wherever a stream has one
      nll, targets, owner = nll[text], targets[text], owner[text]
    weight = 1.0 if selection.mean == 'tokens' else 1.0 / len(nll)
    if window.document == STREAM:
      sum_D += weight * np.bincount(owner, nll, count)
      weight_D += weight * np.bincount(owner, minlength=count)
    else:
      sum_D[owner] += weight * nll.sum()
      weight_D[owner] += weight * len(nll)
    tokens += len(nll)
    n_bytes += int(bytes_V[targets].sum())
    for j, (low, high) in enumerate(zip(selection.edges, selection.edges[1:])):
      at = slice(max(low - first, 0), max(high - first, 0))
      buckets[:, j] += nll[at].sum(), len(nll[at])
  used = weight_D > 0
  sum_D, weight_D = sum_D[used], weight_D[used]
  nll = float(sum_D.sum() / weight_D.sum())
  return Numbers(
    nll=nll,
    ppl=power(selection.base, nll),
    windows=len({part.window.whole for part in selection.parts}),
    tokens=tokens,
    bytes=n_bytes,
    documents=int(used.sum()),
    nll_D=sum_D / weight_D,
    weight_D=weight_D / weight_D.sum(),
    buckets=tuple(
      Bucket(low, high, float(total / n), int(n))
      for low, high, (total, n) in zip(selection.edges, selection.edges[1:], buckets.T)
    ),
    chosen=chosen,
  )


def power(base: float, x: float) -> float:
  """base ** x that ends at inf: a model that blew up at 32x loses no run."""
  try:
    return math.exp(x) if base == math.e else base**x
  except OverflowError:
    return math.inf


def _documents(plan: Any) -> range:
  return range(plan.covered)


def _first(plan: Any) -> int:
  return first_start(plan.bos, plan.stride)


def _step(plan: Any, stride: int) -> int:
  """Windows begin at multiples of the corpus's stride, as those of training do."""
  return -(-stride // plan.stride) * plan.stride


def _side_by_side(plan: Any, length: int) -> Sequence[tuple[int, int]]:
  return [(d, _first(plan) + i * length) for d in _documents(plan) for i in range(plan.longest // length)]


def _whole(document: int, start: int, length: int) -> Part:
  return Part(Window(document, start, length, length), 0, length)

"""Does a curve use far text, or does it merely not explode? The fixed targets again, with other text far from them.

A control replaces what lies farther than train_len from the first target of a window, and nothing else: BOS, the near
text and the targets stay. Its gain is NLL(control) - NLL(true text) of the same targets, nats: positive where the true
far text is of use. It is selected like a protocol, so its windows live in the store beside all others.

spans: how many of each document's are scored, evenly spread; 0: all. They are a subset of those of `fixed_targets`,
against whose rows the gain is taken: it costs no other windows than the replaced ones.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np

from evaluation.protocols import Part, Selection, Window
from posenc import Unsupported


def truncated(plan: Any, length: int, *, spans: int = 0) -> Selection:
  """(a) No far text: windows of `plan.near` tokens, at every length the same, by a method that is told plan.near.

  So it costs one length slightly above 1x, and where a method follows the length its gain is also the method's.
  """
  return _select(plan, length, spans, plan.near, '')


def shuffled(plan: Any, length: int, *, block: int = 32, spans: int = 4) -> Selection:
  """(b) The far text itself, in blocks of `block` tokens, counted from the near end, in another order."""
  if length - plan.near <= block:
    raise Unsupported(f'shuffled: of {length} tokens at most one block of {block} is farther than train_len')
  return _select(plan, length, spans, length, f'shuffled {block}')


def foreign(plan: Any, length: int, *, spans: int = 4) -> Selection:
  """(c) As much text of another test document, from the same place in it."""
  if len(plan.documents) < 2:
    raise Unsupported('foreign: one test document has no other')
  return _select(plan, length, spans, length, 'foreign')


CONTROLS: dict[str, Callable[..., Selection]] = {'truncated': truncated, 'shuffled': shuffled, 'foreign': foreign}


def picked(plan: Any, spans: int) -> set[int]:
  """Which of each document's spans, of `spans` evenly spread ones; 0: of all."""
  each = plan.cfg.spans
  kept = min(spans or each, each)
  return {i * each // kept for i in range(kept)}


def _select(plan: Any, length: int, spans: int, control_length: int, far: str) -> Selection:
  if length <= plan.near:
    raise Unsupported(f'nothing in {length} tokens is farther than train_len from the targets')
  each, chosen = plan.cfg.spans, picked(plan, spans)

  def parts(n: int, far: str) -> list[Part]:
    kept = (span for i, span in enumerate(plan.spans) if i % each in chosen)
    windows = (Window(d, offset + plan.targets - n, n, plan.targets, far) for d, offset in kept)
    return [Part(window, n - plan.targets, n) for window in windows]

  return Selection(parts(control_length, far), true=parts(length, ''))


def text(plan: Any, window: Window) -> np.ndarray:
  """int32, the window's document, in which its far text is replaced as `window.far` says."""
  tokens = plan.documents[window.document].tokens.copy()
  far = span(plan, window)
  tokens[far] = replacement(plan, window)
  return tokens


def span(plan: Any, window: Window) -> slice:
  """Where in its document the far text lies: what stands before the first target is part of the input, or BOS is."""
  return slice(window.start - (plan.bos != 'window'), window.start + window.length - plan.near)


def replacement(plan: Any, window: Window) -> np.ndarray:
  """int32, what stands there instead: drawn from a hash of what the window is, never from a run's seed."""
  document, far = plan.documents[window.document], span(plan, window)
  kind, _, block = window.far.partition(' ')

  def drawn(i: int) -> bytes:
    return hashlib.sha256(f'{plan.corpus_sha256}/{document.name}/{window.start}/{window.length}/{i}'.encode()).digest()

  if kind == 'foreign':
    others = len(plan.documents) - 1
    other = (window.document + 1 + int.from_bytes(drawn(0)[:8], 'big') % others) % (others + 1)
    theirs = plan.documents[other].tokens
    size, lead = far.stop - window.start, window.start - far.start
    start = min(window.start, (len(theirs) - size) // plan.stride * plan.stride)
    return theirs[start - lead : start + size]
  near_first = range(far.stop, far.start, -int(block))
  blocks = [slice(max(end - int(block), far.start), end) for end in near_first]
  order = sorted(range(len(blocks)), key=drawn)
  if order == sorted(order, reverse=True):  # as it was
    order = [*order[1:], order[0]]
  return np.concatenate([document.tokens[blocks[i]] for i in order])

"""Windows of tokens: how one is cut, in training and evaluation alike, and which ones a step sees."""

from collections.abc import Sequence
from typing import Any

import numpy as np

import spec
from data.split import TokenDocument, Tokens

# What stands before a window's first target. A window's first token is the model's attention sink at every
# length, so training and evaluation share one policy:
#   window    BOS in every window, then length - 1 text tokens
#   document  BOS once, before the document's first token; windows are cut from that stream
#   none      the text token before it; no BOS anywhere
BOS = ('window', 'document', 'none')

UNASKED = -1  # a target that counts nothing; see `LM.nll`


def first_start(bos: str, stride: int = 1) -> int:
  """The smallest multiple of `stride` that `cut` accepts as `start`: without BOS the document's first token has nothing
  before it."""
  if bos not in BOS:
    raise spec.SpecError(spec.one_of('bos', bos, BOS))
  return stride if bos == 'none' else 0


def visible(start: int, length: int, bos: str) -> np.ndarray:
  """int[length]: how many text tokens stand before each target of the window that `cut` makes of these arguments."""
  return np.arange(length) + (0 if bos == 'window' or start == 0 else 1)


def cut(tokens_n: np.ndarray | Tokens, start: int, length: int, bos: str, bos_id: int) -> tuple[np.ndarray, np.ndarray]:
  """(inputs int32[length], targets int32[length]) of one document's text tokens.

  targets[i] = tokens_n[start + i] and inputs[i] is what stands before it: the text token, or BOS as the
  policy says. BOS is never a target, so that N text tokens are N targets under every policy. Raises
  ValueError rather than return a short or shifted window.
  """
  first, last = first_start(bos), len(tokens_n) - length
  if length < 1:
    raise spec.SpecError(f'length = {length}: a length >= 1 is allowed')
  if not first <= start <= last:
    allowed = f'{first} to {last}' if first <= last else 'none'
    raise spec.SpecError(
      f'start = {start} of a window of {length} in {len(tokens_n)} tokens, bos = {bos!r}: allowed: {allowed}'
    )
  targets = tokens_n[start : start + length].astype(np.int32)
  inputs = np.empty_like(targets)
  inputs[0] = bos_id if bos == 'window' or start == 0 else tokens_n[start - 1]
  inputs[1:] = targets[:-1]
  return inputs, targets


class TrainWindows:
  """Training batches as a pure function of (seed, step).

  Starts are uniform over all places of all documents where a window fits, drawn with replacement: no epochs
  exist. A permutation of fixed blocks would see each block once, but always at the same offsets; random ones
  make every mid-document start, which evaluation asks for, part of training. A resumed run asks for its step
  and needs no state.

  Args:
    documents: the train split. Those shorter than one window are left out: `left_out` documents, together
      `left_out_tokens` tokens.
    length: tokens in a window.
    bos, bos_id: the policy and its token, see `cut`.
    seed: >= 0.
    stride: windows start at its multiples, such as the rows of a grid.
  """

  def __init__(
    self, documents: Sequence[TokenDocument], length: int, bos: str, bos_id: int, seed: int, stride: int = 1
  ):
    if length < 1 or seed < 0:
      raise spec.SpecError(f'length = {length}, seed = {seed}: length >= 1 and seed >= 0 are allowed')
    self.length, self.bos, self.bos_id, self.seed, self._stride = length, bos, bos_id, seed, stride
    self._first = first_start(bos, stride)
    fits = [d.tokens for d in documents if len(d.tokens) >= length + self._first]
    self.left_out = len(documents) - len(fits)
    self.left_out_tokens = sum(len(d.tokens) for d in documents) - sum(len(t) for t in fits)
    if not fits:
      raise spec.SpecError(
        f'none of {len(documents)} train documents has the {length + self._first} tokens of one window; '
        'shorten train_len'
      )
    # The documents' own arrays and a running count of starts: one joined array would hold the corpus twice.
    self._tokens = fits
    self._names = [d.name for d in documents if len(d.tokens) >= length + self._first]
    self._answers = [d.answer_n for d in documents if len(d.tokens) >= length + self._first]
    self._starts = np.cumsum([(len(t) - length - self._first) // stride + 1 for t in fits])

  def batch(self, step: int, batch: int, rows: Any = slice(None)) -> tuple[np.ndarray, np.ndarray]:
    """(inputs int32[batch, length], targets int32[batch, length]) of step >= 0, or these `rows` of them.

    Targets that are not trained on are `UNASKED`.
    """
    places = self._places(step, batch, rows)
    inputs, targets = zip(*(cut(self._tokens[d], s, self.length, self.bos, self.bos_id) for d, s in places))
    for targets_n, (d, s) in zip(targets, places):
      if (answer_n := self._answers[d]) is not None:
        targets_n[~answer_n[s : s + self.length]] = UNASKED
    return np.stack(inputs), np.stack(targets)

  def places(self, step: int, batch: int) -> list[tuple[str, int]]:
    """(document, start) of each window of a step."""
    return [(self._names[document], start) for document, start in self._places(step, batch, slice(None))]

  def _places(self, step: int, batch: int, rows: Any) -> list[tuple[int, int]]:
    if step < 0:
      raise spec.SpecError(f'step = {step}: a step >= 0 is allowed')
    # Philox is keyed: each (seed, step) is a stream of its own. seed + step would give seed 1 the batches of
    # seed 0, one step late.
    rng = np.random.Generator(np.random.Philox(key=np.array([self.seed, step], np.uint64)))
    place_B = rng.integers(self._starts[-1], size=batch)[rows]  # all are drawn, whoever cuts which
    document_B = np.searchsorted(self._starts, place_B, side='right')
    start_B = (place_B - np.concatenate([[0], self._starts])[document_B]) * self._stride + self._first
    return list(zip(document_B.tolist(), start_B.tolist()))

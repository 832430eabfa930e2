"""Training-time positions: rules that say where tokens stand while a model is trained, and where afterwards.

A rule draws for a training step, as a pure function of (seed, step): a resumed run needs no state. One draw serves the
whole batch, every window and every micro-batch of it: positions are shared by the batch here. The released code of
PoSE draws for each example, that of Ruoss et al. for each batch.
"""

import numpy as np

from posenc.base import Unsupported
from spec import SpecError, one_of

# Streams of their own: training windows (data/windows.py) are keyed by (seed, step), and a seed is below 2**32.
_TRAIN, _EVALUATE = 1 << 32, 2 << 32


def _generator(key: int, number: int) -> np.random.Generator:
  return np.random.Generator(np.random.Philox(key=np.array([key, number], np.uint64)))


def _whole(what: str, value: object, least: int, why: str = '') -> int:
  """`value`, if it is a whole number from `least` to 2**24: beyond, float32 skips positions."""
  if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 2**24:
    raise SpecError(f'{what} = {value!r}: a whole number from {least}{why} to {2**24} is allowed')
  return value


def skip(lengths: np.ndarray, skips: np.ndarray) -> np.ndarray:
  """Positions of chunks side by side in the text, chunk i moved on by skips[i] (PoSE eq. 5), float64[sum(lengths)]."""
  return np.arange(np.sum(lengths), dtype=np.float64) + np.repeat(skips, lengths)


class Rule:
  """Positions 0, 1, 2 ... at every step and in evaluation; and the interface.

  A constructor takes the training length and the model's layers and slots, then the keyword-only arguments that a
  config may set. Positions are given per slot of the layer pattern, float64: [T], or [repeats, T] where each of the
  slot's layers has a draw of its own.
  """

  text = 'sequential'  # of a curve: as the config names it, and what else `posenc.build_rule` is told
  method = 'none'  # in force in training
  sampled = False  # whether training steps differ
  per_layer = False

  def __init__(self, train_len: int, layers: int, slots: int):
    self.train_len, self.layers, self.slots = train_len, layers, slots

  @property
  def largest(self) -> int:
    """The largest position that training can meet."""
    return self.train_len - 1

  def train(self, seed: int, step: int) -> tuple[np.ndarray, ...] | None:
    """Where the tokens of update `step`, counted from 0, stand; None: at 0, 1, 2 ... whatever the step."""
    return None

  def evaluate(self, length: int) -> tuple[np.ndarray, ...] | None:
    """Where `length` tokens stand in evaluation; None: where the scheme says. Unsupported where they have no place."""
    return None

  def remarks(self) -> list[str]:
    """What a reader of the curve should know about this rule, one line each."""
    return []


class Randomized(Rule):
  """Randomized positional encodings, Ruoss et al. 2023 (2305.16843): T of the positions 0 .. max_len - 1, in order.

  Drawn without replacement and sorted, so that a short window meets positions and distances of a long one. Order is
  kept, exact distances are not.

  max_len: L in the paper, at least the longest length that is to be evaluated; longer ones are unsupported.
  per_layer: a draw for each attention layer, as the authors' RoPE, ALiBi and relative encodings have. What is added to
    the embeddings is added once, with the draw of the first layer.
  eval: 'random' draws in evaluation too, as the authors' code does: one draw for each length, the same in every run;
    'arange' is 0, 1, 2 ...; 'evenly_spaced' is floor(i max_len / T). All but 'arange' are told the length: the same
    tokens stand closer together in a longer input.
  """

  sampled = True

  def __init__(
    self, train_len: int, layers: int, slots: int, *, max_len: int, per_layer: bool = False, eval: str = 'random'
  ):
    super().__init__(train_len, layers, slots)
    self.max_len = _whole('randomized: max_len', max_len, train_len, ' (train_len)')
    if eval not in ('random', 'arange', 'evenly_spaced'):
      raise SpecError(one_of('randomized: eval', eval, ('random', 'arange', 'evenly_spaced')))
    self.per_layer, self.eval = per_layer, eval

  @property
  def largest(self):
    return self.max_len - 1

  def _draw(self, rng: np.random.Generator, length: int) -> tuple[np.ndarray, ...]:
    if not self.per_layer:
      return (np.sort(rng.choice(self.max_len, length, replace=False)).astype(np.float64),) * self.slots
    rows = [np.sort(rng.choice(self.max_len, length, replace=False)) for _ in range(self.layers)]
    at_LT = np.stack(rows).astype(np.float64)
    return tuple(at_LT[slot :: self.slots] for slot in range(self.slots))  # layer l is in slot l mod slots

  def train(self, seed, step):
    return self._draw(_generator(_TRAIN | seed, step), self.train_len)

  def evaluate(self, length):
    if length > self.max_len:
      raise Unsupported(f'randomized has {self.max_len} positions, asked for {length}')
    if self.eval == 'random':
      # Not the run's seed: runs of several seeds are compared on the same positions.
      return self._draw(_generator(_EVALUATE, length), length)
    step = self.max_len if self.eval == 'evenly_spaced' else length
    return ((np.arange(length) * step // length).astype(np.float64),) * self.slots

  def remarks(self):
    if self.eval == 'arange':
      return []
    how = 'drawn once for each length' if self.eval == 'random' else 'spread evenly over them'
    return [
      f'{self.text}: evaluated at positions 0..{self.largest}, {how}; they follow the length, so every curve is dashed'
    ]


class PoSE(Rule):
  """Positional skip-wise training, Zhu et al. 2023 (2309.10400) eq. 3-5: a window posing as a piece of target_len.

  The window is cut into chunks of random lengths; chunk i stands u_i further than it would, u_0 = 0, u_i uniform on
  u_{i-1} .. target_len - T. Evaluation is sequential. Not a scaling method: the paper fine-tunes with one in force.

  Two chunks are cut as in the released code, the first U{1 .. (T+1)//2} tokens; more, which it has not, by the same
  rule on what is left: U{1 .. (left+1) // (chunks left)}. Unlike there, the text has no gaps (v_i = 0): windows are
  contiguous, only positions are skipped.

  target_len: L_t, positions 0 .. target_len - 1 are met in training.
  chunks: N.
  """

  sampled = True

  def __init__(self, train_len: int, layers: int, slots: int, *, target_len: int, chunks: int = 2):
    super().__init__(train_len, layers, slots)
    self.target_len = _whole('pose: target_len', target_len, train_len, ' (train_len)')
    if not 2 <= chunks <= train_len:
      raise SpecError(f'pose: chunks = {chunks}: a whole number from 2 to {train_len} (train_len) is allowed')
    self.chunks = chunks

  @property
  def largest(self):
    return self.target_len - 1

  def train(self, seed, step):
    rng = _generator(_TRAIN | seed, step)
    lengths, skips, left = [], [0], self.train_len
    for chunks_left in range(self.chunks, 1, -1):
      lengths.append(int(rng.integers(1, (left + 1) // chunks_left, endpoint=True)))
      left -= lengths[-1]
      skips.append(int(rng.integers(skips[-1], self.target_len - self.train_len, endpoint=True)))
    return (skip(np.array([*lengths, left]), np.array(skips)),) * self.slots

  def remarks(self):
    return [f'{self.text}: positions up to {self.largest} are met in training, in windows of {self.train_len} tokens']


RULES: dict[str, type[Rule]] = {
  'sequential': Rule,
  'randomized': Randomized,
  'pose': PoSE,
}

"""Trials of tasks that need context, and whether a model answers them: teacher-forced, without generation.

Greedy generation gives an answer if, and only if, each of its tokens is the most likely one after the true tokens
before it. So one forward pass says whether it would, whatever number of tokens a key has and however they split it. A
key is also ranked among others of its kind by the log-likelihood of all of its tokens: a model that knows it, but would
say something else first, has it at rank 1, and one that does not has it there by chance.
"""

import hashlib
import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import spec
from data import Tokenizer, corpora, tasks
from data.tokenizers import Bytes
from models.lm import merge
from models.memory import OutOfMemory, as_text, bytes_needed, bytes_there
from models.ring import BATCH, CONTEXT, place
from posenc import Positions, Unsupported

Point = dict[str, Any]


class Trial(NamedTuple):
  """A text with an answer in it, and other endings of it. All have the same tokens up to the answer."""

  texts: tuple[np.ndarray, ...]  # int32[<= length] each, without BOS
  answers: tuple[np.ndarray, ...]  # int[<= K] each: offsets of the answer's tokens in the text
  true: int  # which of them is asked for


# ---- tasks


class Task:
  """What an evaluation asks: trial `i`, the same key and text for every model, method and length."""

  depths = False  # whether a key lies at a depth
  candidates = 1

  def __init__(self, text: str, tokenizer: Tokenizer):
    self.text, self.tokenizer = text, tokenizer

  def rng(self, i: int, *more: int) -> np.random.Generator:
    return np.random.default_rng([zlib.crc32(self.text.encode()), i, *more])

  def trial(self, i: int, length: int, depth: float) -> Trial:
    raise NotImplementedError

  def size(self, length: int) -> int | None:
    """Of the episode at this length, where it has one."""
    return None


class Hidden(Task):
  """A key in a text: 'The pass key is 71432.', at `depth` of the room that is left, and at the end 'The pass key is'.

  The answer is ' 71432'. Text, claim, key and question are encoded apart, so that their tokens are the same wherever
  the key lies; before a space a byte-level BPE splits anyway. Depth 0 is the beginning, 1 right before the question.

  digits: of the key. candidates: as many keys, the true one among them, are ranked.
  """

  depths = True
  claim: bytes

  def __init__(self, text: str, tokenizer: Tokenizer, *, digits: int, candidates: int):
    super().__init__(text, tokenizer)
    for key, value, least, most in (('digits', digits, 1, 64), ('candidates', candidates, 1, 10**digits)):
      if not least <= value <= most:
        raise spec.SpecError(f'task {text}: {key} = {value}: a whole number from {least} to {most} is allowed')
    self.digits, self.candidates = digits, candidates

  def filler(self, i: int, tokens: int) -> np.ndarray:
    """int32[tokens], as long as one likes: that of a shorter length is its beginning."""
    raise NotImplementedError

  def keys(self, i: int) -> list[bytes]:
    """Different ones, the true one first."""
    rng, keys = self.rng(i), {}
    while len(keys) < self.candidates:
      keys[tasks.draw_key(rng, self.digits)] = None
    return list(keys)

  def trial(self, i, length, depth):
    encode = self.tokenizer.encode
    true, *others = (encode(key) for key in self.keys(i))
    claim_n, stop_n = encode(self.claim), encode(b'.')
    longest = max(len(key) for key in (true, *others))
    room = length - 2 * len(claim_n) - len(true) - len(stop_n) - longest
    if room < 0:
      raise Unsupported(f'{self.text}: key and question take {length - room} tokens')
    said = np.concatenate([claim_n, true, stop_n])
    asked = np.concatenate([tasks.hide(self.filler(i, room), [round(depth * room)], said), claim_n])
    place = int(self.rng(i, 1).integers(self.candidates))  # among equals the first would win
    keys = [*others[:place], true, *others[place:]]
    texts = tuple(np.concatenate([asked, key]) for key in keys)
    return Trial(texts, tuple(len(asked) + np.arange(len(key)) for key in keys), place)


class Passkey(Hidden):
  """In a paragraph said again and again (Mohtashami and Jaggi 2023, 2305.16300)."""

  claim = tasks.CLAIM['passkey']

  def __init__(self, text: str, tokenizer: Tokenizer, *, digits: int = 5, candidates: int = 10):
    super().__init__(text, tokenizer, digits=digits, candidates=candidates)

  def filler(self, i, tokens):
    said_n = self.tokenizer.encode(tasks.GRASS)
    start = int(self.rng(i, 2).integers(len(said_n)))
    return np.resize(said_n, start + tokens)[start:]


class Needle(Hidden):
  """In prose: `corpus`, from a place drawn for each trial, documents one after the other."""

  claim = tasks.CLAIM['needle']

  def __init__(self, text: str, tokenizer: Tokenizer, *, digits: int = 5, candidates: int = 10, corpus: str = 'sotu'):
    super().__init__(text, tokenizer, digits=digits, candidates=candidates)
    self._prose = b''.join(d.text for d in corpora.load(corpus).documents)

  def filler(self, i, tokens):
    prose = self._prose
    start, size = int(self.rng(i, 2).integers(len(prose))), 8 * tokens + 64
    while True:
      piece = (prose[start:] + prose * (size // len(prose) + 1))[:size]
      found = self.tokenizer.encode(piece.decode(errors='ignore').encode())
      if len(found) >= tokens:
        return found[:tokens]
      size *= 2


class Made(Task):
  """The largest episode of a task of data/tasks.py that fits."""

  def __init__(self, text: str, tokenizer: Tokenizer):
    super().__init__(text, tokenizer)
    if not isinstance(tokenizer, Bytes):
      raise spec.SpecError(f"task {text} marks bytes: a run with config.data.tokenizer = 'bytes' is allowed")

  def size(self, length):
    return tasks.largest(self.text, length)

  def trial(self, i, length, depth):
    size = self.size(length)
    if not size:
      raise Unsupported(f'{self.text}: no episode has {length} tokens or fewer')
    episode = tasks.TASKS[self.text](self.rng(i, size), size)
    return Trial((self.tokenizer.encode(episode.text),), (np.flatnonzero(episode.answer_n),), 0)


TASKS: dict[str, type[Task]] = {'passkey': Passkey, 'needle': Needle, **dict.fromkeys(tasks.TASKS, Made)}


def build(text: str, tokenizer: Tokenizer) -> Task:
  call = spec.choose('task', text, TASKS)
  return TASKS[call.name](text, tokenizer, **call.kwargs)


# ---- a model's answers


class Grades(NamedTuple):
  """Of each text's answer, tokens beyond its own padded: nats, and whether greedy generation would say the token."""

  nll_NK: np.ndarray
  hit_NK: np.ndarray
  asked_NK: np.ndarray


class Grader:
  """Reads texts with one set of parameters: one compiled program per length, as `evaluation.score.Scorer`.

  Logits are made of the answers alone. `traces` counts compilations.
  """

  def __init__(self, graphdef: Any, params: Any, mesh: Mesh, batch_tokens: int, memory_gb: float = 0):
    self.traces = 0
    self._params, self._mesh, self._batch_tokens, self._memory_gb = params, mesh, batch_tokens, memory_gb
    self._shares = math.prod(mesh.shape[axis] for axis in BATCH)
    self._programs: dict[Any, tuple[Any, int]] = {}

    def grade(params, inputs_BT, targets_BK, at_BK, pos):
      self.traces += 1
      lm = merge(graphdef, params, mesh)
      x_BKD = jnp.take_along_axis(lm.hidden(inputs_BT, pos), at_BK[..., None], axis=1)
      logits_BKV = lm.logits(x_BKD)
      nll_BK = optax.softmax_cross_entropy_with_integer_labels(logits_BKV, targets_BK)
      return nll_BK, logits_BKV.argmax(-1) == targets_BK

    self._grade = jax.jit(grade)

  def _program(self, length: int, k: int, pos: tuple[Positions, ...]) -> tuple[Any, int]:
    """(what reads batches of `rows`, rows), with half as many as long as XLA asks for more memory than there is."""
    key = length, k, jax.tree.structure(pos), *(np.shape(leaf) for leaf in jax.tree.leaves(pos))
    per_device = max(self._batch_tokens // (length * self._shares), 1)
    while key not in self._programs:
      tokens, few = (
        jax.ShapeDtypeStruct((per_device * self._shares, n), np.int32, sharding=sharding)
        for n, sharding in ((length, self._split(CONTEXT)), (k, self._split()))
      )
      compiled = self._grade.lower(self._params, tokens, few, few, pos).compile()
      needed, there = bytes_needed(compiled), bytes_there(self._params, self._memory_gb)
      if needed <= there:
        self._programs[key] = compiled, per_device * self._shares
      elif per_device == 1:
        raise OutOfMemory(f'one window of {length} tokens: {as_text(needed, there)}')
      per_device = max(per_device // 2, 1)
    return self._programs[key]

  def _split(self, *axes: str) -> NamedSharding:
    return NamedSharding(self._mesh, PartitionSpec(BATCH, *axes))

  def __call__(
    self,
    texts: Sequence[np.ndarray],
    answers: Sequence[np.ndarray],
    length: int,
    bos_id: int,
    pos: tuple[Positions, ...],
  ) -> Grades:
    """Of texts of at most `length` tokens, with BOS before each, and after what is shorter."""
    k = max(len(a) for a in answers)
    inputs_NT = np.full((len(texts), length), bos_id, np.int32)
    targets_NK, at_NK = np.zeros((2, len(texts), k), np.int32)
    for n, (text, answer) in enumerate(zip(texts, answers)):
      inputs_NT[n, 1 : len(text)] = text[:-1]
      at_NK[n, : len(answer)], targets_NK[n, : len(answer)] = answer, text[answer]
    asked_NK = np.arange(k) < np.array([len(a) for a in answers])[:, None]
    pos = jax.tree.map(np.asarray, pos)
    run, rows = self._program(length, k, pos)
    parts = []
    for first in range(0, len(texts), rows):
      of = np.arange(first, first + rows) % len(texts)  # the first ones once more to fill the last batch
      (inputs,) = place(self._split(CONTEXT), (rows, length), lambda at, of=of: (inputs_NT[of[at]],))
      targets, at = place(self._split(), (rows, k), lambda at, of=of: (targets_NK[of[at]], at_NK[of[at]]))
      parts.append(run(self._params, inputs, targets, at, pos))
    nll_NK, hit_NK = (np.concatenate([np.asarray(part[i]) for part in parts])[: len(texts)] for i in range(2))
    return Grades(nll_NK, hit_NK, asked_NK)


# ---- numbers


def interval(hits: int, trials: int, level: float = 0.95) -> tuple[float, float]:
  """Clopper and Pearson's for a share: covers at least `level` whatever the true one, at 0 and all of them too."""
  from scipy.special import betaincinv  # scipy.stats takes longer to import than jax

  tail = (1 - level) / 2
  low = betaincinv(hits, trials - hits + 1, tail) if hits else 0.0
  high = betaincinv(hits + 1, trials - hits, 1 - tail) if hits < trials else 1.0
  return float(low), float(high)


def share(name: str, hits: np.ndarray) -> Point:
  low, high = interval(int(hits.sum()), len(hits))
  return {name: float(hits.mean()), f'{name}_low': low, f'{name}_high': high}


def rank(total_C: np.ndarray, true: int) -> int:
  """1 for the most likely; of equals the first one is before the others, and where the true one stands is drawn."""
  return 1 + int((total_C < total_C[true]).sum() + (total_C[:true] == total_C[true]).sum())


def numbers(trials: Sequence[Trial], grades: Grades) -> Point:
  """exact: whether a whole answer would be generated. token: of its tokens, by teacher forcing, without an interval:
  those of one answer are not independent. nll: nats per token of the true answer. first, rank: among the candidates."""
  counts = [len(t.texts) for t in trials]
  start_n = np.cumsum([0, *counts[:-1]])
  true_n = start_n + [t.true for t in trials]
  hit_nK = np.where(grades.asked_NK, grades.hit_NK, True)[true_n]
  asked_nK, nll_nK = grades.asked_NK[true_n], grades.nll_NK[true_n]
  point = {
    'trials': len(trials),
    **share('exact', hit_nK.all(1)),
    'token': float(hit_nK[asked_nK].mean()),
    'tokens': int(asked_nK.sum()),
    'nll': float(nll_nK[asked_nK].mean(dtype=np.float64)),
  }
  if max(counts) > 1:
    total_N = np.where(grades.asked_NK, grades.nll_NK, 0.0).sum(1, dtype=np.float64)
    ranks = np.array([rank(total_N[s : s + c], t.true) for s, c, t in zip(start_n, counts, trials)])
    point |= {'candidates': counts[0], **share('first', ranks == 1), 'rank': float(ranks.mean())}
  return point


def ask(
  task: Task,
  length: int,
  depths: Sequence[float],
  trials: int,
  bos_id: int,
  methods: dict[str, tuple[Positions, ...]],
  grader: Grader,
) -> list[Point]:
  """A point per method and depth, in this order. Unsupported where the task does not fit into `length`."""
  depths = depths if task.depths else (math.nan,)
  # Other keys at each depth: trials of one length are independent, and an interval over all of its depths holds.
  asked = [task.trial(d * trials + i, length, depth) for d, depth in enumerate(depths) for i in range(trials)]
  texts, answers = [x for t in asked for x in t.texts], [x for t in asked for x in t.answers]
  digest = hashlib.sha256(b''.join(text.tobytes() for text in texts)).hexdigest()[:16]
  points = []
  for method, pos in methods.items():
    grades = grader(texts, answers, length, bos_id, pos)
    first = 0
    for i, depth in enumerate(depths):
      mine = asked[i * trials : (i + 1) * trials]
      last = first + sum(len(t.texts) for t in mine)
      found = numbers(mine, Grades(*(x[first:last] for x in grades)))
      place = {'depth': depth} if task.depths else {'size': task.size(length)}
      points.append({'task': task.text, 'method': method, 'length': length, **place, **found, 'trials_hash': digest})
      first = last
  return points


def pooled(points: Sequence[Point]) -> Point:
  """Points of one line and length, over their depths."""
  trials = sum(p['trials'] for p in points)
  out = {k: v for k, v in points[0].items() if k not in ('depth', 'exact', 'first', 'rank', 'nll', 'token')}
  out |= {'trials': trials, 'tokens': sum(p['tokens'] for p in points)}
  for name in ('exact', 'first'):
    if name in points[0]:
      hits = sum(round(p[name] * p['trials']) for p in points)
      low, high = interval(hits, trials)
      out |= {name: hits / trials, f'{name}_low': low, f'{name}_high': high}
  for name, weight in (('token', 'tokens'), ('nll', 'tokens'), ('rank', 'trials')):
    if name in points[0]:
      out[name] = sum(p[name] * p[weight] for p in points) / out[weight]
  return out

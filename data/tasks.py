"""Tasks that need context: what is asked for, and where it stands, is known of every episode.

An episode is a text and a mark at every byte that a reader of what stands before can know: the **answer**. The table
`TASKS` makes episodes of a size, for the corpora of this file and for evaluation/tasks.py, which asks a trained model
for longer ones. Everything follows from the arguments.

A corpus of a task has an episode in every row of `length` bytes, of a size drawn uniformly from 1 to the largest that
fits, then newlines. Rows are its stride, so that a training window of `length` tokens is one episode, and only answers
are trained on: the rest is drawn and teaches nothing.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import spec
from data.document import Document, Drawn
from data.synthetic import check, names

LETTERS = np.frombuffer(b'abcdefghijklmnopqrstuvwxyz', np.uint8)
DIGITS = np.frombuffer(b'0123456789', np.uint8)
KEYS = np.array([c for c in range(33, 127) if not chr(c).isdigit() and c != ord('>')], np.uint8)
PAD = ord('\n')


class Episode(NamedTuple):
  text: bytes
  answer_n: np.ndarray  # bool[len(text)]

  @classmethod
  def of(cls, *parts: tuple[bytes, bool]) -> 'Episode':
    """Of (text, whether it is answer), one after the other."""
    return cls(b''.join(text for text, _ in parts), np.concatenate([np.full(len(t), a) for t, a in parts]))


def copy(rng: np.random.Generator, size: int) -> Episode:
  """`size` letters, '>', the same letters."""
  word = rng.choice(LETTERS, size).tobytes()
  return Episode.of((word + b'>', False), (word, True))


def reverse(rng: np.random.Generator, size: int) -> Episode:
  """`size` letters, '>', the letters from the last to the first."""
  word = rng.choice(LETTERS, size).tobytes()
  return Episode.of((word + b'>', False), (word[::-1], True))


def parity(rng: np.random.Generator, size: int) -> Episode:
  """`size` bits, '>', whether the number of ones is odd."""
  bits = rng.integers(2, size=size)
  return Episode.of((DIGITS[bits].tobytes() + b'>', False), (b'%d' % (bits.sum() % 2), True))


def flip_flop(rng: np.random.Generator, size: int) -> Episode:
  """A pair of an instruction and a bit, then `size` more: w writes, i is to be ignored, r has what was written last.

  Liu et al. 2023 (2306.00946), FFL(0.8): the first instruction is w, the last r, the others w, i, r with probability
  0.1, 0.8, 0.1. Bits but those of r are fair coins.
  """
  kinds = rng.choice(np.frombuffer(b'wir', np.uint8), size + 1, p=(0.1, 0.8, 0.1))
  kinds[0], kinds[-1] = ord('w'), ord('r')
  bits = rng.integers(2, size=size + 1)
  written = np.maximum.accumulate(np.where(kinds == ord('w'), np.arange(size + 1), 0))  # where it was, for every pair
  bits = np.where(kinds == ord('r'), bits[written], bits)
  text = np.stack([kinds, DIGITS[bits]], 1).astype(np.uint8)
  return Episode(text.tobytes(), np.stack([np.zeros(size + 1, bool), kinds == ord('r')], 1).ravel())


def selective_copy(rng: np.random.Generator, size: int) -> Episode:
  """`size` letters at random places among three times as many dots, '>', the letters alone (Gu and Dao 2023)."""
  text = np.full(4 * size, ord('.'), np.uint8)
  word = rng.choice(LETTERS, size)
  text[np.sort(rng.choice(4 * size, size, replace=False))] = word
  return Episode.of((text.tobytes() + b'>', False), (word.tobytes(), True))


def addition(rng: np.random.Generator, size: int) -> Episode:
  """Two numbers of `size` digits with leading zeros, their sum in size + 1, all written from the ones up: '21+43=550'.

  The other way around the first digit of the sum would depend on every carry.
  """
  a_n, b_n = rng.integers(10, size=(2, size))
  total_n, carry = np.empty(size + 1, int), 0
  for i in range(size):
    carry, total_n[i] = divmod(int(a_n[i] + b_n[i]) + carry, 10)
  total_n[size] = carry
  asked = DIGITS[a_n].tobytes() + b'+' + DIGITS[b_n].tobytes() + b'='
  return Episode.of((asked, False), (DIGITS[total_n].tobytes(), True))


def mqar(rng: np.random.Generator, size: int) -> Episode:
  """`size` pairs of a key and a digit, '>', all pairs again in another order; a digit is known from its key.

  Multi-query associative recall, Arora et al. 2023 (2312.04927). Keys are distinct.
  """
  if size > len(KEYS):
    raise spec.SpecError(f'task mqar: {size} pairs: at most {len(KEYS)}, of one key each, are allowed')
  pairs = np.stack([rng.choice(KEYS, size, replace=False), rng.choice(DIGITS, size)], 1)
  again = rng.permutation(pairs)
  first = pairs.tobytes() + b'>'
  answer_n = np.concatenate([np.zeros(len(first), bool), np.tile([False, True], size)])
  return Episode(first + again.tobytes(), answer_n)


TASKS: dict[str, Callable[[np.random.Generator, int], Episode]] = {
  f.__name__: f for f in (copy, reverse, parity, flip_flop, selective_copy, addition, mqar)
}


def largest(task: str, length: int) -> int:
  """The largest size of which an episode has at most `length` bytes; 0 if there is none. Lengths rise with the size."""
  size = 0
  while len(TASKS[task](np.random.default_rng(0), size + 1).text) <= length:
    size += 1
  return size


def _rows(task: str, *, length: int, rows: int, documents: int, seed: int) -> tuple[list[Document], list[np.ndarray]]:
  """Documents of rows as the head of this file has them, and the marks of their answers."""
  check(task, 'rows', rows, rows >= 1, 'a whole number >= 1')
  check(task, 'documents', documents, documents >= 1, 'a whole number >= 1')
  check(task, 'seed', seed, seed >= 0, 'a whole number >= 0')
  top = largest(task, length)
  check(task, 'length', length, top >= 1, 'a length of at least one episode')
  rng = np.random.default_rng([seed, *task.encode()])
  text = np.full((documents, rows, length), PAD, np.uint8)
  answer = np.zeros(text.shape, bool)
  for row, mark in zip(text.reshape(-1, length), answer.reshape(-1, length)):
    episode = TASKS[task](rng, int(rng.integers(1, top, endpoint=True)))
    row[: len(episode.text)] = np.frombuffer(episode.text, np.uint8)
    mark[: len(episode.text)] = episode.answer_n
  found = [Document(name, t.tobytes()) for name, t in zip(names(documents), text)]
  return found, [a.ravel() for a in answer]


def _corpus(task: str) -> Callable[..., Drawn]:
  def corpus(*, length: int = 64, rows: int = 32, documents: int = 1000, seed: int = 0) -> Drawn:
    found, answers = _rows(task, length=length, rows=rows, documents=documents, seed=seed)
    return Drawn(found, stride=length, answers=answers)

  corpus.__name__, corpus.__doc__ = task, TASKS[task].__doc__
  return corpus


# The corpus of each task: `rows` episodes in each document, `length` bytes a row.
CORPORA = {task: _corpus(task) for task in TASKS}


# ---- a key among text

CLAIM = {'passkey': b' The pass key is', 'needle': b' The magic number is'}  # what stands before the key, ' 71432'
GRASS = b' The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.'


def draw_key(rng: np.random.Generator, digits: int) -> bytes:
  return b' ' + rng.choice(DIGITS, digits).tobytes()


def hide(filler_n: np.ndarray, places: list[int], said_n: np.ndarray) -> np.ndarray:
  """`said` before each of these offsets, rising, of the filler."""
  return np.concatenate([x for part in np.split(filler_n, places) for x in (part, said_n)][:-1])


def recall(texts: list[Document], *, length: int, rows: int, seed: int) -> Drawn:
  """Rows of `length` bytes, of five kinds, an episode each but for the first; what is trained on in brackets.

  Prose, a tenth [all of it]. A key of 5 digits claimed several times in prose, a quarter, or in a sentence said again
  and again, a quarter [the key, from the second time on]. Pairs of one of 8 letters and its digit, a fifth [digits of
  letters that were there before]. A word of random letters over and over, a fifth [from the second time on].

  Prose is the texts', each piece used once and by the document of its name alone: none of it is in two documents.
  """
  least = 2 * max(len(claim) for claim in CLAIM.values()) + 32
  check('recall', 'length', length, length >= least, f'a whole number >= {least}')
  check('recall', 'rows', rows, rows >= 1, 'a whole number >= 1')
  check('recall', 'seed', seed, seed >= 0, 'a whole number >= 0')
  found, answers = [], []
  for i, document in enumerate(texts):
    rng, prose, at = np.random.default_rng([seed, i]), np.frombuffer(document.text, np.uint8), 0
    made = []
    for kind in rng.choice(5, rows, p=(0.1, 0.25, 0.25, 0.2, 0.2)):
      if at + length > len(prose):
        break
      if kind == 0:
        made.append((prose[at : at + length], np.ones(length, bool)))
        at += length
      elif kind == 1:
        made.append(_claims(rng, 'needle', prose[at : at + length], length))
        at += length
      elif kind == 2:
        start = rng.integers(len(GRASS))
        filler = np.frombuffer(GRASS * (length // len(GRASS) + 2), np.uint8)
        made.append(_claims(rng, 'passkey', filler[start : start + length], length))
      elif kind == 3:
        letters, digits = rng.choice(LETTERS, 8, replace=False), rng.choice(DIGITS, 8)
        which = rng.integers(8, size=-(-length // 2))
        known = np.array([w in which[:n] for n, w in enumerate(which)])
        text, mark = np.stack([letters[which], digits[which]], 1), np.stack([np.zeros_like(known), known], 1)
        made.append((text.ravel()[:length], mark.ravel()[:length]))
      else:
        word = rng.choice(LETTERS, int(rng.integers(8, length // 2)))
        made.append((np.resize(word, length), np.arange(length) >= len(word)))
    if made:
      found.append(Document(document.name, np.concatenate([text for text, _ in made]).tobytes()))
      answers.append(np.concatenate([mark for _, mark in made]))
  return Drawn(found, stride=length, answers=answers)


def _claims(rng: np.random.Generator, name: str, filler_n: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
  key = draw_key(rng, 5)
  said = np.frombuffer(CLAIM[name] + key + b'.', np.uint8)
  times = int(rng.integers(2, length // len(said)))
  room = length - times * len(said)
  places = np.sort(rng.integers(room, size=times, endpoint=True))
  text, mark = hide(filler_n[:room], places.tolist(), said), np.zeros(length, bool)
  for n, place in enumerate(places[1:], 1):
    at = place + n * len(said) + len(CLAIM[name])
    mark[at : at + len(key)] = True
  return text, mark

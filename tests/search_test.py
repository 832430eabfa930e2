"""The search of factors for a model: what a candidate is worth, races, resuming, what is carried away. Tiny random LMs.

The optimisers by themselves are in factors_test.py.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import golden_test
import posenc
from configs import smoke
from configs.schema import Config
from data.split import TokenDocument
from evaluation import factors, nulls, score, search
from evaluation.factors import Candidate, Optimizer, Paper, Sizes
from evaluation.plan import Plan
from evaluation.score import Scorer, Together
from evaluation.search import Counted, Races, Score, all_targets, factors_of, method_of
from evaluation.store import Rows
from evaluation.survey import positions_hash
from faults.harness import KILLER
from models.lm import LM, ModelConfig, merge
from models.memory import OutOfMemory
from scripts import search_longrope
from spec import SpecError, parse_one
from training import provenance
from training.checkpoints import Checkpoints
from training.devices import make_mesh

L, LENGTH = 16, 64
PAIRS = 4  # of a head of 8


@pytest.fixture(scope='module')
def model():
  """(graphdef, parameters, schemes) of a random LM whose logits are large enough to differ."""
  lm = LM(
    ModelConfig(layers=2, d_model=32, heads=2, head_dim=8), ('rope',), vocab_size=257, train_len=L, rngs=nnx.Rngs(0)
  )
  graphdef, params = nnx.split(lm)
  return graphdef, jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a, params), list(lm.schemes)


@pytest.fixture(scope='module')
def plan():
  return nulls.synthetic_plan(train_len=L, max_multiple=4, documents=4, spans=2)


def made_by(schemes):
  def made(method, length):
    pos = posenc.positions(method, schemes, L, length)
    return positions_hash(pos), pos

  return made


METHODS = ('none', 'pi', 'yarn', 'longrope(long=(1.0, 1.5, 2.0, 4.0), onset=4, attention=1.2)', 'ntk+logn')


# One program.


def test_all_candidates_run_the_same_program_and_each_has_the_numbers_of_its_own(model, plan):
  graphdef, params, schemes = model
  made = made_by(schemes)
  positions = [made(method, LENGTH)[1] for method in METHODS]
  windows = all_targets(plan, LENGTH).windows
  together = Together(graphdef, params, make_mesh(0, (1, 1, 1)), 3, plan.targets, tokens=2 * 3 * LENGTH)
  found = {(i, w): row for i, part, rows in together.runs(plan, windows, positions) for w, row in zip(part, rows)}
  assert len(found) == len(METHODS) * len(windows) and together.traces == 1
  plain = Scorer(graphdef, params, make_mesh(1, (1, 1, 1)), 1024)
  for i, rows in enumerate(plain(plan, windows, positions)):
    np.testing.assert_allclose([found[i, w] for w in windows], rows, atol=2e-5)
  # Whatever shares the run: alone, in another order, in another company.
  for order in ([3], [4, 3, 0], [3, 3]):
    again = together.runs(plan, windows[1:2], [positions[i] for i in order])
    for at, _, (row,) in again:
      np.testing.assert_array_equal(row, found[order[at], windows[1]])
  assert together.traces == 1 and not np.allclose(found[0, windows[0]], found[1, windows[0]], atol=1e-3)


def test_less_memory_is_fewer_at_once(model, plan, monkeypatch):
  """Positions first, then windows, and the numbers stay; one window under one set of positions is the least."""
  graphdef, params, schemes = model
  positions = [made_by(schemes)(method, LENGTH)[1] for method in METHODS[:3]]
  windows = all_targets(plan, LENGTH).windows[:3]
  want = {}
  for too_large in range(4):
    asked = []
    monkeypatch.setattr(
      score, 'bytes_needed', lambda _, asked=asked, n=too_large: asked.append(1) or 2**60 * (len(asked) <= n)
    )
    together = Together(graphdef, params, make_mesh(1, (1, 1, 1)), 2, plan.targets, tokens=2 * 2 * LENGTH)
    if too_large == 3:
      with pytest.raises(OutOfMemory, match='one window of 64 tokens'):
        list(together.runs(plan, windows, positions))
      continue
    runs = list(together.runs(plan, windows, positions))
    assert max(len(part) for _, part, _ in runs) == (2, 2, 1)[too_large] and together.traces == too_large + 1
    found = {(i, w): row for i, part, rows in runs for w, row in zip(part, rows)}
    want = want or found
    assert len(found) == 9 and all(np.allclose(found[at], want[at], atol=2e-5) for at in want)


# Races.


class Fake:
  """A scorer whose NLL is `nll(document, start, frequencies)`; it dies in the run after `lives`."""

  def __init__(self, nll, lives=10**9):
    self.nll, self.lives, self.windows = nll, lives, []

  def runs(self, plan, windows, positions):
    for start in range(0, len(windows), 2):
      part = windows[start : start + 2]
      for i, pos in enumerate(positions):
        self.lives -= 1
        if self.lives < 0:
          raise KeyboardInterrupt
        self.windows += [(positions_hash(pos), plan.place(w)) for w in part]
        row = [self.nll(w.document, w.start, np.asarray(pos[0].inv_freq_P, np.float64)) for w in part]
        yield i, part, [np.full(w.scored, x, np.float32) for w, x in zip(part, row)]


def store_of():
  """An `open_rows` that keeps what was put, and is told again by whoever asks for the same positions."""
  kept = {}
  return lambda key, length: kept.setdefault((key, length), Rows())


def races_of(plan, schemes, scorer, open_rows=None, **kwargs):
  counted = kwargs.pop('counted', None) or all_targets(plan, LENGTH)
  return Races(plan, counted, made_by(schemes), open_rows or store_of(), lambda: scorer, **kwargs)


def bumpy(document, start, freq_P):
  """A bowl in log frequency, whose level and place depend on the text."""
  theta_P = 10000.0 ** (-np.arange(PAIRS) / PAIRS)
  wanted_P = np.log([1.0, 1.5, 2.5, 3.0])
  return 2 + document + start % 7 / 10 + ((np.log(theta_P / freq_P) - wanted_P) ** 2).sum() * (1 + document / 8)


def name_of(candidate):
  return method_of(candidate, 1.1)


def members():
  return [Candidate((4.0,) * PAIRS), Candidate((1.0, 1.6, 2.5, 4.0)), Candidate((1.0, 1.2, 3.0, 4.0))]


def test_a_race_gives_the_true_number_to_who_ends_it_and_drops_the_rest(plan, model):
  scorer = Fake(bumpy)
  races = races_of(plan, model[2], scorer)
  assert races.stages == [4, 8] and search.race_stages(16) == [4, 8, 16] and search.race_stages(5) == [5]
  good, bad = members()[1], Candidate((5.0,) * PAIRS)
  methods = [name_of(c) for c in (good, bad, members()[2])]
  scores = races(methods, share=0.5)

  def true(candidate):
    theta_P = model[2][0].inv_freq_P
    freq_P = np.asarray(theta_P / np.asarray(candidate.factors), np.float32).astype(np.float64)
    return np.mean([np.float32(bumpy(w.document, w.start, freq_P)) for w in races.windows], dtype=np.float64)

  assert scores[0] == Score(pytest.approx(true(good), abs=1e-6), 8, True)
  assert not scores[1].whole and scores[1].windows == 4 and scores[1].nll > scores[0].nll + 1
  assert scores[1].nll == pytest.approx(true(bad), rel=0.25)  # what its first windows say
  # Now with a best one to compare with: the estimate is of the difference from it, paired.
  (late,) = races([name_of(Candidate((3.0, 3.0, 3.0, 3.0)))], bar=scores[0].nll)
  assert not late.whole and late.windows == 4 and late.nll > scores[0].nll
  (close,) = races([name_of(Candidate((1.0, 1.6, 2.5, 3.9)))], bar=scores[0].nll)
  assert close.whole and close.nll < scores[0].nll
  np.testing.assert_allclose(races.documents(methods[0]).mean(), scores[0].nll)


def test_a_diverged_candidate_is_the_worst(plan, model):
  theirs = made_by(model[2])(name_of(members()[0]), LENGTH)[1][0].inv_freq_P

  def nll(document, start, freq_P):
    return np.nan if np.allclose(freq_P, theirs) else bumpy(document, start, freq_P)

  races = races_of(plan, model[2], Fake(nll))
  scores = races([name_of(c) for c in members()], share=0.5)
  assert scores[0].nll == np.inf and not scores[0].whole and scores[1].whole
  told = [search.Told(c, name_of(c), s) for c, s in zip(members(), scores)]
  assert search.best(told).candidate in members()[1:]


def test_the_same_arrays_are_scored_once(plan, model):
  scorer = Fake(bumpy)
  races = races_of(plan, model[2], scorer)
  one, two = races(['pi', 'longrope(long=(4.0, 4.0, 4.0, 4.0), attention=1)'])
  assert one == two and len(set(scorer.windows)) == len(scorer.windows) == races.scored == 8


def test_only_targets_that_count_count(plan, model):
  counted = all_targets(plan, LENGTH)
  counts_WT = np.zeros_like(counted.counts_WT)
  counts_WT[0, :3], counts_WT[1, 5] = True, True

  class Ramp(Fake):
    def runs(self, plan, windows, positions):
      for i, part, rows in super().runs(plan, windows, positions):
        yield i, part, [np.arange(len(row), dtype=np.float32) for row in rows]

  races = races_of(plan, model[2], Ramp(bumpy), counted=Counted(counted.windows[:2], counts_WT[:2]))
  (score,) = races(['pi'])
  assert score.nll == (0 + 1 + 2 + 5) / 4
  np.testing.assert_allclose(races.documents('pi'), [1.0, 5.0])


def spent(races, optimizer, evaluations):
  told = [one for batch in search.spend(optimizer, races, name_of, evaluations) for one in batch]
  return search.best(told), told


def small(seed=0):
  return Paper(factors.Box(PAIRS, 5.0), members(), seed, Sizes(12, 4, 4, parents=6))


def test_races_find_what_scoring_everything_finds_for_less(plan, model):
  race, every = (Fake(bumpy) for _ in range(2))
  winner, told = spent(races_of(plan, model[2], race), small(), 120)
  slow, _ = spent(races_of(plan, model[2], every, stages=[8]), small(), 120)
  assert len(told) == 120 and all(one.score.whole or one.score.nll > winner.score.nll for one in told)
  assert len(race.windows) < 0.8 * len(every.windows)
  assert winner.score.nll < slow.score.nll + 0.01
  assert len(set(race.windows)) == len(race.windows)


@pytest.mark.parametrize('optimizer', [small, lambda: factors.cma(factors.Box(PAIRS, 5.0), members())])
def test_a_killed_search_goes_on_to_the_same_winner_and_repeats_nothing(plan, model, optimizer):
  whole = Fake(bumpy)
  want = spent(races_of(plan, model[2], whole), optimizer(), 60)
  open_rows, scored = store_of(), []
  for lives in (1, 7, 20, 10**9):
    scorer = Fake(bumpy, lives)
    try:
      found = spent(races_of(plan, model[2], scorer, open_rows), optimizer(), 60)
    except KeyboardInterrupt:
      assert lives < 10**9
    scored += scorer.windows
  assert found == want and sorted(scored) == sorted(whole.windows) and len(set(scored)) == len(scored)


def test_a_budget_is_kept_to_the_candidate(plan, model):
  asked = []

  class Counting(Optimizer):
    def ask(self):
      asked.append([Candidate((1.0 + len(asked) / 10,) * PAIRS)] * 4)
      return asked[-1]

    def tell(self, told):
      assert len(told) == 4

  _, told = spent(races_of(plan, model[2], Fake(bumpy)), Counting(), 10)
  assert len(told) == 10 and len(asked) == 3
  assert spent(races_of(plan, model[2], Fake(bumpy)), Counting(), 0)[1] == []


def test_a_real_model_is_searched_by_one_program_and_goes_on_bit_for_bit(plan, model, tmp_path):
  graphdef, params, schemes = model
  mesh = make_mesh(0, (1, 1, 1))

  def go(open_rows, lives):
    together = Together(graphdef, params, mesh, 2, plan.targets)
    runs, left = together.runs, lives

    def counted(*args):
      nonlocal left
      for part in runs(*args):
        left -= 1
        if left < 0:
          raise KeyboardInterrupt
        yield part

    together.runs = counted
    races = races_of(plan, schemes, together, open_rows)
    return spent(races, small(), 40), races.scored, together.traces

  want, all_windows, traces = go(store_of(), 10**9)
  assert traces == 1 and len({one.method for one in want[1]}) == 40
  open_rows = store_of()
  with pytest.raises(KeyboardInterrupt):
    go(open_rows, 60)
  found, rest, _ = go(open_rows, 10**9)
  assert found == want and 0 < rest < all_windows


# Search documents, and key tokens.


def document(name, n):
  return TokenDocument(name, np.random.default_rng(len(name)).integers(0, 256, n, dtype=np.int32), n)


FACTS = {'bos': 'window', 'bos_id': 256, 'corpus_sha256': 'x', 'stride': 1}


def test_search_documents_are_of_validation_first_and_long_enough():
  valid, train = [document('v', 90), document('short', 60), document('vv', 200)], [document('train', 300)] * 2
  plan = search.search_plan(valid, train, 64, 16, docs=0, spans=2, **FACTS)
  assert [d.name for d in plan.documents] == ['v', 'vv'] and plan.targets == 8 and len(plan.spans) == 4
  plan = search.search_plan(valid, train, 64, 16, docs=3, spans=2, **FACTS)
  assert [d.name for d in plan.documents] == ['v', 'vv', 'train']
  with pytest.raises(SpecError, match='docs = 5: 2 validation and 2 training documents have the 80 tokens'):
    search.search_plan(valid, train, 64, 16, docs=5, spans=2, **FACTS)
  windows = all_targets(plan, 64).windows
  assert [w.document for w in windows] == [0, 1, 2, 0, 1, 2] and all(w.scored == 8 for w in windows)
  short = search.search_plan(valid, train, 8, 16, docs=2, spans=2, **FACTS)  # within the trained length
  assert short.targets == 4 and len(all_targets(short, 8).windows) == 4


def test_key_tokens_are_those_of_the_protocol(plan, model):
  """Found by a judge that is scored for it, once."""
  graphdef, params, schemes = model
  scorer, calls = Scorer(graphdef, params, make_mesh(1, (1, 1, 1)), 1024), []

  def make():
    calls.append(1)
    return scorer

  bar = type('Bar', (), {'update': lambda self, n: None})()
  open_rows, made = store_of(), made_by(schemes)
  protocol = 'key_tokens(judge="pi", short=1.0, long=2.0, alpha=0.05, beta=-20.0)'
  found = [search.key_targets(plan, LENGTH, protocol, made, open_rows, make, bar) for _ in range(2)]
  assert len(calls) == 2  # two lengths
  by_length = {
    n: scorer(plan, [p.window for p in plan.select('fixed_targets', n).parts], [made('pi', n)[1]])[0] for n in (16, 32)
  }
  gain = np.array(by_length[16], np.float64) - np.array(by_length[32], np.float64) > 0.05
  assert 0 < gain.sum() < gain.size and found[0].counts_WT.sum() == gain.sum()
  np.testing.assert_array_equal(found[0].counts_WT, found[1].counts_WT)
  with pytest.raises(SpecError, match='all, or key_tokens'):
    search.key_targets(plan, LENGTH, 'fixed_targets', made, open_rows, make, bar)


# Factors and strings.


def test_factors_of_methods():
  scheme = golden_test.build('rope')
  np.testing.assert_allclose(factors_of('pi', scheme, 128, 1024).factors, 8, rtol=1e-12)
  np.testing.assert_allclose(factors_of('ntk', scheme, 128, 1024).factors, 8.0 ** (np.arange(16) / 15), rtol=1e-11)
  assert factors_of('none', scheme, 128, 1024) == Candidate((1.0,) * 16)
  text = f'longrope(long={tuple(range(1, 17))}, onset=4, attention=1.3)'
  assert factors_of(text, scheme, 128, 1024) == Candidate(tuple(map(float, range(1, 17))), 4)
  still = golden_test.build('rope(proportion=0.5)')
  assert factors_of('ntk', still, 128, 1024).factors[8:] == (factors_of('ntk', still, 128, 1024).factors[7],) * 8
  for bad, says in (('rerope', 'writes far'), ('yarn+logn', 'a single name'), ('longrope', 'needs a tuple')):
    with pytest.raises(SpecError, match=says):
      factors_of(bad, scheme, 128, 1024)


def test_a_method_string_is_read_back_to_the_bit():
  scheme = golden_test.build('rope')
  for name in ('ntk', 'yarn'):
    candidate = factors_of(name, scheme, 128, 1024)._replace(onset=2)
    assert factors_of(method_of(candidate, 1.2), scheme, 128, 1024) == candidate
    theirs, ours = (posenc.positions(m, scheme, 128, 1024) for m in (name, method_of(candidate, 1.2)))
    np.testing.assert_allclose(theirs.inv_freq_P, ours.inv_freq_P, rtol=1e-7)
  short, long = (1.0,) * 16, (2.0,) * 16
  text = method_of(Candidate(long), 1.2, short=short)
  assert text == method_of(Candidate(short), 1.2, long=long)


def test_the_frequencies_of_a_pattern_are_one_set():
  rope, nope, other = (golden_test.build(text) for text in ('rope', 'nope', 'rope(base=500.0)'))
  assert search.scheme_of([nope, rope, rope]) is rope
  for bad in ([nope], [rope, other]):
    with pytest.raises(SpecError, match='posenc'):
      search.scheme_of(bad)


def test_yarns_betas_are_searched_over_all_its_ramps():
  """Its first candidate is the default; where another ramp is best, it is found, and the name has the betas."""
  scheme = golden_test.build('rope')
  wanted = factors_of('yarn(beta_fast=9.0, beta_slow=2.5, truncate=False)', scheme, 128, 1024)
  betas = search.Betas(scheme, 128, 1024)
  asked = []
  while len(asked) < 150:
    batch = betas.ask()
    told = [(c, float(np.sum((np.log(c.factors) - np.log(wanted.factors)) ** 2))) for c in batch]
    betas.tell(told)
    asked += told
  assert asked[0][0] == factors_of('yarn', scheme, 128, 1024) and betas.names[asked[0][0]] == 'yarn'
  best, value = min(asked, key=lambda at: at[1])
  kwargs = parse_one(betas.names[best]).kwargs
  assert value < 1e-3 and kwargs['beta_slow'] < kwargs['beta_fast'] and kwargs['truncate'] is False
  assert kwargs['beta_fast'] == pytest.approx(9.0, rel=0.1) and kwargs['beta_slow'] == pytest.approx(2.5, rel=0.1)
  for candidate, _ in asked:  # every ramp is YaRN's, and in LongRoPE's box
    assert factors_of(betas.names[candidate], scheme, 128, 1024) == candidate
    assert factors.Box(16, 10.0).holds(candidate)


def inv_freq(config, dim, length, train_len):
  """Hugging Face's `_compute_longrope_parameters`, its arithmetic: what a configuration comes to at a length."""
  scaling = config['rope_scaling']
  stretch = scaling['long_factor' if length > train_len else 'short_factor']
  exponent = np.arange(0, dim, 2) / dim
  return 1.0 / (np.asarray(stretch) * config['rope_theta'] ** exponent), scaling['attention_factor']


@pytest.mark.parametrize(
  'case', [pytest.param(c, id=c['id']) for c in golden_test.load('rope_inv_freq_hf') if 'longrope/len' in c['id']]
)
def test_the_exported_dictionary_is_what_hugging_face_was_given(case):
  """Their golden inputs, through our method string, come out as their dictionary; its numbers are theirs and ours."""
  inputs, outputs = case['inputs'], case['outputs']
  theirs = inputs.get('rope_parameters', inputs)
  train_len = theirs['original_max_position_embeddings']
  long = Candidate(tuple(theirs['long_factor']))
  method = method_of(long, outputs['attention_factor'], short=tuple(theirs['short_factor']))
  scheme = golden_test.build(
    f'rope(base={float(inputs["rope_theta"])})', head_dim=inputs['head_dim'], train_len=train_len
  )
  found = search.hugging_face(method, scheme, train_len, inputs['max_position_embeddings'])
  assert json.loads(json.dumps(found)) == found
  for key in ('short_factor', 'long_factor', 'original_max_position_embeddings'):
    assert found['rope_scaling'][key] == theirs[key]
  assert found['max_position_embeddings'] == inputs['max_position_embeddings']
  length = inputs['seq_len'] or train_len
  freq_P, attention = inv_freq(found, inputs['head_dim'], length, train_len)
  pos = posenc.positions(method, scheme, train_len, length)
  np.testing.assert_allclose(freq_P, outputs['inv_freq'], rtol=1e-6)
  np.testing.assert_allclose(pos.inv_freq_P, outputs['inv_freq'], rtol=1e-6)
  np.testing.assert_allclose([attention, pos.key_scale_T[-1]], outputs['attention_factor'], rtol=1e-6)


def test_n_hat_is_not_dropped_in_silence():
  scheme = golden_test.build('rope')
  with pytest.raises(SpecError, match='Hugging Face has no form for it with onset = 4'):
    search.hugging_face(method_of(Candidate((2.0,) * 16, 4), 1.2), scheme, 128, 1024)


# The program.


TEXTS = 30


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """A run whose checkpoint is a random model: what is searched need not have been trained."""
  folder = tmp_path_factory.mktemp('search')
  (folder / 'books').mkdir()
  rng = np.random.default_rng(0)
  for i in range(TEXTS):
    words = rng.choice(['tide', 'moor', 'elm', 'quartz', 'yonder', 'vex', 'blithe'], 60 + i)
    (folder / 'books' / f'{i:02d}.txt').write_text(' '.join(words))
  values = smoke.get_config().to_dict()
  values |= {'train_len': L, 'max_multiple': 4}
  values['data'] |= {'corpus': f"text(glob='{folder}/books/*.txt')", 'test_docs': 12, 'validation_docs': 5}
  values['eval'] |= {'multiples': (1.0, 4.0), 'spans': 2}
  values['log'] |= {'validate_multiples': (1.0,)}
  values['model'] |= {'head_dim': 8}
  config = Config.from_dict(values)
  data = config.load_data()
  provenance.claim(folder / 'run', config, data)
  params = nnx.to_pure_dict(nnx.state(config.build_model(data.tokenizer.vocab_size)))
  params = jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a, params)
  checkpoints = Checkpoints(folder / 'run', keep=1)
  checkpoints.save(1, {'params': params})
  checkpoints.close()
  return folder / 'run'


OPTIONS = ('--target_len=64', '--evaluations=30', '--attentions=1.0,1.3')


def searched(run, *options):
  assert search_longrope.main([f'--workdir={run}', *OPTIONS, *options]) == 0


@pytest.fixture(scope='module')
def found(run):
  searched(run)
  return run / 'search' / '64-paper-0'


def lines_of(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_it_writes(run, found):
  method = (found / 'method.txt').read_text().strip()
  kwargs = parse_one(method).kwargs
  scheme = golden_test.build('rope', head_dim=8, train_len=L)
  posenc.positions(method, scheme, L, LENGTH)  # as a sweep would use it
  assert kwargs['attention'] == pytest.approx(np.sqrt(1 + np.log(4) / np.log(16)), abs=1e-6)
  assert factors.Box(PAIRS, 5.0).holds(Candidate(kwargs['long'], kwargs.get('onset', 0)))
  told = lines_of(found / 'search.jsonl')
  assert len(told) == len(lines_of(found / 'yarn.jsonl')) == 30
  whole = [line['nll'] for line in told if line['whole']]
  read = EventAccumulator(str(found / 'tensorboard'))
  read.Reload()
  assert [e.step for e in read.Scalars('search/best')] == [30]
  assert read.Scalars('search/best')[-1].value == pytest.approx(min(whole))
  assert [e.step for e in read.Scalars('yarn/median')][-1] == 30
  assert (found / 'factors.png').stat().st_size > 1000
  report = (found / 'report.md').read_text()
  for label in ('longrope, this search', 'none', 'pi', 'ntk', 'dynamic_ntk', 'yarn', 'tuned'):
    assert report.count(f'| {label} |') == 2 or label == 'tuned'
  (by_onset,) = (line.split('documents: ')[1] for line in report.splitlines() if line.startswith('n-hat of the winner'))
  apart = dict(part.split(': ') for part in by_onset.split(', '))
  assert [int(n) for n in apart] == [n for n in factors.ONSETS if n < LENGTH]
  assert min(map(float, apart.values())) == 0 == float(apart[str(kwargs.get('onset', 0))])
  assert method in report and '12 test documents' in report and '5 documents, 5 of validation' in report


def test_held_out_is_what_a_sweep_measures(run, found):
  """Of the fixed targets of every test document, and none of them is a search document."""
  config = Config.from_dict(provenance.read(run))
  data = config.load_data()
  plan = Plan(
    config.eval, data.splits.test, train_len=L, max_multiple=4, bos='window', bos_id=256, corpus_sha256=data.sha256
  )
  tests = {d.name for d in data.splits.test}
  assert not tests & {d.name for d in (*data.splits.validation, *data.splits.train)}
  lm = config.build_model(257)
  graphdef, params = nnx.split(lm)
  params = jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a, params)
  method = (found / 'method.txt').read_text().strip()
  nll = {}
  for name in (method, 'none'):
    pos = posenc.positions(name, list(lm.schemes), L, LENGTH)
    inputs_BT, targets_BT = plan.tokens(plan.windows('fixed_targets', LENGTH))
    nll[name] = np.asarray(merge(graphdef, params).nll(inputs_BT, targets_BT, pos))[:, -plan.targets :]
  first = next(line for line in (found / 'report.md').read_text().splitlines() if line.startswith('| longrope, this'))
  second = next(line for line in (found / 'report.md').read_text().splitlines() if line.startswith('| none'))
  assert float(first.split('|')[5]) == pytest.approx(nll[method].mean(), abs=1e-4)
  worse_D = (nll['none'].mean(1) - nll[method].mean(1)).reshape(12, -1).mean(1)
  cell = second.split('|')[6].split()
  assert float(cell[0]) == pytest.approx(worse_D.mean(), abs=2e-4) and cell[1].startswith('±')
  places = {key for path in (run / 'search' / 'store').glob('*/*.npz') for key in np.load(path)['document'].tolist()}
  assert places and not places & tests


def test_a_second_call_scores_nothing_and_a_larger_budget_goes_on(run, found, capsys):
  told = {part: lines_of(found / f'{part}.jsonl') for part in ('yarn', 'search')}
  method = (found / 'method.txt').read_text()
  rows = sorted((run / 'search' / 'store').glob('*/*.npz'))
  searched(run)
  said = capsys.readouterr().out
  assert said.count('; 0 windows scored now') == 4  # two lines, twice
  assert sorted((run / 'search' / 'store').glob('*/*.npz')) == rows
  assert (found / 'method.txt').read_text() == method
  assert {part: lines_of(found / f'{part}.jsonl') for part in told} == told
  copy = run.parent / 'longer'
  shutil.copytree(run, copy)
  searched(copy, '--evaluations=70')
  longer = lines_of(copy / 'search' / '64-paper-0' / 'search.jsonl')
  assert len(longer) == 70
  yarn = lines_of(copy / 'search' / '64-paper-0' / 'yarn.jsonl')
  assert [line['method'] for line in yarn[:30]] == [line['method'] for line in told['yarn']]


def test_another_search_in_the_same_folder_is_refused(run, found):
  with pytest.raises(SpecError, match='holds another search .*spans: 2 -> 1'):
    searched(run, '--spans=1')
  with pytest.raises(SpecError, match='attention'):
    searched(run, '--attention=yarn')


@pytest.mark.parametrize(('options', 'says'), [
  (['--target_len=16'], 'target_len = 16: 17 to 64'),
  (['--target_len=128'], 'target_len = 128: 17 to 64'),
  (['--algorithm=cmaes'], "did you mean 'cma'"),
  (['--short', '--target_len=16'], "one --init='longrope"),
  (['--init=rerope'], 'a method of frequencies'),
  (['--init=dynamic_ntk_hf(factor=8.0)'], 'init: 4 factors'),
  (['--onsets=1.5'], 'onsets'),
  (['--evaluations=0'], 'evaluations = 0'),
  (['--seconds=0'], 'seconds = 0'),
  (['--fitness=fixed_targets'], 'all, or key_tokens'),
  (['--fitness=key_tokens(alpha=50.0)'], 'fitness = .key_tokens'),
  (['--attention=hot'], "attention = 'hot'"),
])  # fmt: skip
def test_what_cannot_be_searched_is_said_in_one_line(run, options, says, tmp_path):
  with pytest.raises(SpecError, match=says.replace('(', r'\(')) as refused:
    searched(run, *options, f'--out={tmp_path}')
  assert '\n' not in str(refused.value)


def test_without_n_hat_the_dictionary_is_written_and_is_what_was_found(run, tmp_path):
  """The whole way: a search, its dictionary, the frequencies Hugging Face would compute of it, ours."""
  searched(run, '--algorithm=cma', '--onsets=0', f'--out={tmp_path}')
  method = (tmp_path / 'method.txt').read_text().strip()
  parameters = json.loads((tmp_path / 'longrope.json').read_text())
  scheme = golden_test.build('rope', head_dim=8, train_len=L)
  for length in (L, L + 1, LENGTH):
    freq_P, attention = inv_freq(parameters, 8, length, L)
    pos = posenc.positions(method, scheme, L, length)
    np.testing.assert_allclose(pos.inv_freq_P, freq_P, rtol=1e-6)
    np.testing.assert_allclose([pos.key_scale_T[-1], pos.logit_scale_T[-1]], attention, rtol=1e-6)
  assert (
    parameters['rope_scaling']['factor'] == 4 and 'longrope.json is written' in (tmp_path / 'report.md').read_text()
  )


def test_with_n_hat_there_is_no_dictionary_and_the_reason_is_said(run, tmp_path):
  (tmp_path / 'longrope.json').write_text('of a search before')
  searched(run, '--onsets=4', f'--out={tmp_path}')
  report = (tmp_path / 'report.md').read_text()
  assert not (tmp_path / 'longrope.json').exists()
  assert report.count('| the same, n-hat 0 |') == report.count('| tuned YaRN, n-hat 4 |') == 2
  assert 'form for it with onset = 4' in report and 'onset=4' in (tmp_path / 'method.txt').read_text()


def test_second_stages(run, found, tmp_path):
  """From the factors of a search before, and then the short list beside them."""
  before = (found / 'method.txt').read_text().strip()
  nll = min(line['nll'] for line in lines_of(found / 'search.jsonl') if line['whole'])
  searched(run, f'--init={before}', '--seed=1', f'--out={tmp_path / "again"}')
  first = lines_of(tmp_path / 'again' / 'search.jsonl')[0]
  assert first['whole'] and first['nll'] <= nll + 1e-12  # the first member
  searched(run, '--short', f'--init={before}', '--target_len=16', f'--out={tmp_path / "short"}')
  kwargs = parse_one((tmp_path / 'short' / 'method.txt').read_text().strip()).kwargs
  was = parse_one(before).kwargs
  assert kwargs['long'] == was['long'] and kwargs['attention'] == was['attention']
  assert kwargs.get('onset', 0) == was.get('onset', 0) and len(kwargs['short']) == PAIRS
  report = (tmp_path / 'short' / 'report.md').read_text()
  assert '| trained frequencies |' in report and '| long list |' in report and 'tuned' not in report
  assert not (tmp_path / 'short' / 'yarn.jsonl').exists()


def test_seconds_are_a_budget_too(run, tmp_path):
  assert (
    search_longrope.main(
      [f'--workdir={run}', '--target_len=64', '--seconds=0.5', '--attentions=', '--seed=5', f'--out={tmp_path}']
    )
    == 0
  )
  assert 'temperature of each method' not in (tmp_path / 'report.md').read_text()
  assert len(lines_of(tmp_path / 'search.jsonl')) >= 64


def test_key_tokens_are_a_fitness(run, found, tmp_path):
  """Chosen by the run itself."""
  judge = 'key_tokens(judge="none", short=1.0, long=2.0, alpha=0.05, beta=-99.0)'
  searched(run, f'--fitness={judge}', '--attentions=', '--evaluations=8', f'--out={tmp_path}')
  settings = json.loads((tmp_path / 'settings.json').read_text())
  assert settings['fitness'] == judge and judge in (tmp_path / 'report.md').read_text()
  told = lines_of(tmp_path / 'search.jsonl')
  of_all = lines_of(found / 'search.jsonl')[0]
  assert told[0]['method'] == of_all['method'] and told[0]['nll'] != pytest.approx(of_all['nll'], abs=1e-3)


@pytest.mark.faults
def test_a_search_that_is_killed_ends_with_the_same_winner(root, run, found, tmp_path):
  """SIGKILL as the n-th batch of rows is put away: the same factors, bit for bit, and no window scored twice."""
  copy = tmp_path / 'run'
  shutil.copytree(run, copy)
  for folder in ('search', 'extrapolation'):
    shutil.rmtree(copy / folder, ignore_errors=True)
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(root)}
  options = ['scripts/search_longrope.py', f'--workdir={copy}', *OPTIONS]
  for n in (0, 25, 60):
    kill = [sys.executable, '-c', KILLER, 'evaluation.store', 'Shelf', 'put', str(n), *options]
    done = subprocess.run(kill, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
  done = subprocess.run([sys.executable, *options], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  there = copy / 'search' / '64-paper-0'
  assert (there / 'method.txt').read_bytes() == (found / 'method.txt').read_bytes()
  for part in ('yarn', 'search'):
    ours, theirs = (
      [{k: v for k, v in line.items() if k not in ('seconds', 'cpu')} for line in lines_of(f / f'{part}.jsonl')]
      for f in (there, found)
    )
    assert ours == theirs
  places = [
    (path.parent.name, *place)
    for path in (copy / 'search' / 'store').glob('*/*.npz')
    for place in zip(np.load(path)['document'].tolist(), np.load(path)['start'].tolist())
  ]
  assert len(set(places)) == len(places) > 100

"""LongRoPE's optimisers on fitnesses whose optimum is known: no model here."""

import numpy as np
import pytest
from scipy.optimize import isotonic_regression

import golden_test
import posenc
from evaluation import factors
from evaluation.factors import ALGORITHMS, ONSETS, Box, Candidate, Paper, Released, Sizes, cma, isotonic, linear
from spec import SpecError

PAIRS, SCALE = 16, 8.0
BOX = Box(PAIRS, 1.25 * SCALE)
STUB = {case['id']: case for case in golden_test.load('longrope_search')}


def members():
  """PI, NTK and YaRN at 8 times 128 tokens."""
  scheme = golden_test.build('rope')
  made = [posenc.METHODS[name](scheme.plain(1024), scheme, 128, 1024)['inv_freq_P'] for name in ('pi', 'ntk', 'yarn')]
  return [Candidate(tuple(np.clip(np.round(scheme.inv_freq_P / x, 12), 1, None).tolist())) for x in made]


def planted(seed):
  """(lambda of the best, its n-hat, fitness): one term per number."""
  rng = np.random.default_rng(seed)
  best_P, onset = np.sort(np.exp(rng.uniform(0, np.log(SCALE), PAIRS))), int(rng.choice(ONSETS))

  def fitness(candidate):
    apart = abs(ONSETS.index(candidate.onset) - ONSETS.index(onset))
    return float(np.sum((np.log(candidate.factors) - np.log(best_P)) ** 2) + 0.05 * apart)

  return best_P, onset, fitness


def spend(optimizer, fitness, evaluations):
  """The best of so many, all of which the optimiser asked for, in its own order."""
  asked = []
  while len(asked) < evaluations:
    batch = optimizer.ask()
    told = [(candidate, fitness(candidate)) for candidate in batch]
    asked += told[: evaluations - len(asked)]
    optimizer.tell(told)
  return min(asked, key=lambda at: at[1])[0], [candidate for candidate, _ in asked]


def best_onset(winner, fitness):
  return min((winner._replace(onset=onset) for onset in ONSETS), key=fitness)


def test_the_budget_is_the_papers():
  theirs = STUB['default_hyper_params']['outputs']['dim_mono']
  sizes = Sizes()
  assert (theirs['population_size'], theirs['mutation_numbers'], theirs['crossover_size']) == (64, 16, 16)
  assert (sizes.population, sizes.mutants, sizes.children, sizes.parents) == (64, 16, 16, theirs['parents_size'])
  assert (sizes.iterations, sizes.tries) == (theirs['max_time_budget'], theirs['max_crossover_try'])
  assert theirs['list_step'] == factors.STEP and sizes.evaluations == 1344 and len(ONSETS) == 14


@pytest.mark.parametrize('target', [0, 1])
def test_the_papers_search_closes_nine_tenths_of_the_gap(target):
  """Of the fitness, between the best initial member and the optimum; it lands within no grid step of lambda."""
  _, onset, fitness = planted(target)
  closed, exact = [], []
  for seed in range(10):
    winner, asked = spend(Paper(BOX, members(), seed), fitness, 1344)
    assert asked[:3] == members() and len(set(asked)) > 1300
    winner = best_onset(winner, fitness)
    closed.append(1 - fitness(winner) / min(map(fitness, members())))
    exact.append(winner.onset == onset)
  assert all(exact) and sum(share >= 0.9 for share in closed) >= 9, closed


@pytest.mark.parametrize('target', [0, 1])
def test_cma_es_finds_every_lambda(target):
  best_P, onset, fitness = planted(target)
  for seed in range(5):
    winner, _ = spend(cma(BOX, members(), seed), fitness, 1344)
    assert np.abs(best_P - winner.factors).max() < 0.05 and best_onset(winner, fitness).onset == onset


def test_a_search_that_has_converged_begins_again():
  """With twice the population, from the best so far: budgets are spent, not waited for."""
  _, _, fitness = planted(0)
  optimizer, sizes = cma(BOX, members()), []
  while len(set(sizes)) < 3 and len(sizes) < 300:
    batch = optimizer.ask()
    optimizer.tell([(candidate, fitness(candidate)) for candidate in batch])
    sizes.append(len(batch))
  assert list(dict.fromkeys(sizes)) == [3, 12, 24]


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_nothing_leaves_the_box(algorithm):
  """Whatever the fitness rewards: random numbers, factors that fall, and ever larger ones."""
  rng = np.random.default_rng(0)
  rewards = (
    lambda c: rng.random(),
    lambda c: float(np.diff(c.factors).max()),
    lambda c: -sum(c.factors),
    lambda c: c.factors[-1] - c.factors[0],
  )
  for trial, reward in enumerate(rewards):
    pairs, s = (1, 2, 16, 33)[trial], (1.0, 2.0, 8.0, 32.0)[trial]
    top = 1 + s if algorithm == 'released' else 1.25 * s
    box = Box(pairs, top)
    ramp = tuple(np.geomspace(1, s, pairs).tolist())
    start = [Candidate((s,) * pairs), Candidate(ramp)]
    onsets = (0,) if algorithm == 'released' else ONSETS
    optimizer = factors.optimizer(algorithm, pairs, s, start, start[1], ONSETS, trial)
    for candidate in spend(optimizer, reward, 600)[1]:
      assert box.holds(candidate) and candidate.onset in onsets, candidate


def test_mutants_and_children_of_mutants_and_children():
  """A random walk of 3000 steps through both operators, from factors that are equal, or differ by a rounding error."""
  optimizer = Paper(BOX, members(), 3)
  rounded = Candidate((*[float(np.nextafter(4, 0))] * 8, *[4.0] * 8))
  first = pool = [*members(), rounded, Candidate((10.0,) * 16)]
  changed = np.zeros(PAIRS + 1)
  for step in range(3000):
    a, b = (pool[int(optimizer.rng.integers(len(pool)))] for _ in range(2))
    child = optimizer.mutated(a) if step % 2 else optimizer.crossed(a, b)
    if child is None:
      continue
    assert BOX.holds(child), child
    if step % 2:
      steps_P = np.asarray(child.factors) / factors.STEP
      drawn_P = np.asarray(child.factors) != a.factors
      on_grid = np.abs(steps_P - np.round(steps_P)) < 1e-6
      assert np.all(on_grid | ~drawn_P | np.isin(child.factors, [*a.factors, *child.factors[1:], *child.factors[:-1]]))
      changed += [*drawn_P, child.onset != a.onset]
    else:
      assert all(x in (p, q) for x, p, q in zip(child.factors, a.factors, b.factors))
      assert child.onset in (a.onset, b.onset)
    pool = [*first, *pool[-5:], child]
  assert (changed > 50).all()


def test_a_step_is_a_hundredth():
  optimizer = Paper(BOX, members())
  drawn = {optimizer._between(2.005, 2.05) for _ in range(300)}
  assert drawn == {2.01, 2.02, 2.03, 2.04, 2.05}
  assert optimizer._between(2.001, 2.009) == 2.001 and optimizer._between(3.0, 3.0) == 3.0


def stub(candidate):
  """The golden runs' objective."""
  return float(np.sum((np.log(candidate.factors) - np.linspace(0, np.log(8), 16)) ** 2))


def test_the_released_search_does_as_the_released_code():
  """Its own run on a stub: how many it evaluates, from where, within what, and about how far it comes."""
  case = STUB['stub_run/dim_mono']
  theirs, sizes = case['outputs'], Sizes(16, 6, 6, 6, parents=8)
  start = Candidate(linear(members()[2].factors, SCALE))
  np.testing.assert_allclose(start.factors, case['inputs']['init_factors'], atol=1e-6)
  assert stub(start) == pytest.approx(theirs['first_objective'], abs=1e-5)
  found, changed = [], []
  for seed in range(20):
    winner, asked = spend(Released(Box(PAIRS, 1 + SCALE, (0,)), [start], seed, sizes), stub, sizes.evaluations)
    assert asked[0] == start and len(asked) == theirs['evaluated'] == 88 and len(set(asked)) == 88
    x_NP = np.array([candidate.factors for candidate in asked])
    assert (np.diff(x_NP) >= 0).all() and x_NP.min() == theirs['min_factor'] and x_NP.max() <= 9
    changed.append((x_NP != x_NP[0]).any(0))
    assert {candidate.onset for candidate in asked} == {0}
    found.append(stub(winner))
  assert np.all(changed, 1).any() and all(theirs['dims_ever_changed'])
  assert min(found) < theirs['best_objective'] < max(found) < theirs['first_objective']


def test_the_released_start_is_not_yarn():
  yarn = members()[2].factors
  ratio = np.asarray(linear(yarn, SCALE)) / yarn
  assert ratio[0] == 1 and ratio[-1] == 1 and ratio.max() > 1.8
  assert linear((1.0, 1.0), 1.0) == (1.0, 1.0)


@pytest.mark.parametrize('algorithm', ALGORITHMS)
def test_a_seed_is_a_search(algorithm):
  _, _, fitness = planted(0)

  def asked(seed):
    made = members()
    return spend(factors.optimizer(algorithm, PAIRS, SCALE, made, made[2], ONSETS, seed), fitness, 200)[1]

  assert asked(0) == asked(0) and asked(0) != asked(1)


def test_isotonic_is_the_nearest_that_rises():
  rng = np.random.default_rng(0)
  for n in (1, 2, 7, 30):
    x = rng.normal(size=n)
    np.testing.assert_allclose(isotonic(x), isotonic_regression(x).x, atol=1e-12)


def test_what_is_outside_the_box_is_refused():
  for bad in ((0.5,) * 16, (2.0,) * 15, (11.0,) * 16, (3.0, *[2.0] * 15)):
    with pytest.raises(SpecError, match='16 from 1 to 10'):
      Paper(BOX, [Candidate(bad)])
  with pytest.raises(SpecError, match='onset = 3'):
    cma(BOX, [Candidate((2.0,) * 16, 3)])

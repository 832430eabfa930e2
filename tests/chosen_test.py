"""Which setting of a scheme is compared: by validation text at 1x, and by nothing else."""

import json

import pytest

from evaluation import chosen, report
from evaluation.runs import Run, together
from report_test import Page, point
from spec import SpecError


@pytest.fixture
def make(tmp_path):
  """A run of a scheme at a learning rate, with the validation NLL that it told; None: it told nothing."""

  def make(scheme, rate, seed, nll, steps=100, **changes):
    folder = tmp_path / f'{scheme},{rate},{seed}'
    folder.mkdir()
    config = {
      'posenc': [scheme],
      'seed': seed,
      'steps': 100,
      'optimizer': {'learning_rate': rate, 'b1': 0.9},
      **changes,
    }
    told = [{'step': 50, 'validation/nll_1x': 0.0}, {'step': steps, 'validation/nll_2x': 0.0}]
    if nll is not None:
      told.append({'step': steps, 'validation/nll_1x': nll})
    (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in told) + '{"step": 1')
    return Run(folder, [point(scheme, 'none', 16, [2.0] * 12, seed=seed)], {'config': config})

  return make


def test_the_lowest_mean_over_seeds_is_chosen_for_each_scheme(make):
  """Seed by seed 0.003 wins once: the mean decides. Earlier steps and other lengths say 0, and are not asked."""
  nll = {
    ('rope', 0.001): (2.0, 2.4),
    ('rope', 0.003): (1.9, 2.6),
    ('alibi', 0.001): (2.2, 2.2),
    ('alibi', 0.003): (2, 2),
  }
  runs = [make(scheme, rate, seed, x[seed]) for (scheme, rate), x in nll.items() for seed in (0, 1)]
  settings = chosen.choose(runs)
  found = {(s.scheme, s.values['optimizer.learning_rate']): s for s in settings}
  assert {key: s.mean for key, s in found.items()} == {key: pytest.approx(sum(x) / 2) for key, x in nll.items()}
  assert [key for key, s in found.items() if s.chosen] == [('rope', 0.001), ('alibi', 0.003)]
  assert [len(s.runs) for s in settings] == [2] * 4 and set(settings[0].values) == {'optimizer.learning_rate'}
  assert found['rope', 0.003].said == '0.0500 worse'


def test_a_setting_that_lacks_a_seed_is_not_compared(make):
  """It is the better one by what is there; what is not may have diverged."""
  runs = [make('rope', 0.001, 0, 2.0), make('rope', 0.001, 1, 2.0), make('rope', 0.003, 0, 1.0)]
  kept, lacking = chosen.choose(runs)
  assert kept.chosen and not lacking.chosen and lacking.said == '1 of 2 seeds: not compared'


def test_of_a_tie_the_first_is_taken_and_it_is_said(make):
  settings = chosen.choose([make('rope', rate, 0, 2.0) for rate in (0.003, 0.001)])
  assert [(s.chosen, s.said) for s in settings] == [(True, 'chosen, a tie'), (False, 'not chosen, a tie')]


def test_nothing_is_chosen_where_one_has_told_nothing(make):
  settings = chosen.choose([make('rope', 0.001, 0, None), make('rope', 0.003, 0, 2.0)])
  assert all(s.chosen and 'none is chosen' in s.said for s in settings)


@pytest.mark.parametrize('first', [float('nan'), float('inf')])
def test_a_setting_that_diverged_is_not_chosen(make, first):
  lost, kept = chosen.choose([make('rope', 0.003, 0, first), make('rope', 0.001, 0, 2.0)])
  assert kept.chosen and kept.said == 'chosen' and not lost.chosen and lost.said.endswith('worse')
  told = chosen.choose([make('alibi', rate, 0, float('nan')) for rate in (0.003, 0.001)])
  assert all('none is chosen' in s.said for s in told)


def test_other_differences_are_other_recipes_unless_asked_for(make):
  runs = [make('rope', 0.001, 0, 2.0), make('rope', 0.003, 0, 3.0, model={'layers': 4})]
  assert [s.chosen for s in chosen.choose(runs)] == [True, True]
  assert [s.chosen for s in chosen.choose(runs, ['optimizer', 'model.layers'])] == [True, False]
  with pytest.raises(SpecError, match="--choose = 'model.layer': did you mean 'model.layers'"):
    chosen.choose(runs, ['model.layer'])


def test_the_report_is_of_what_was_chosen_and_says_from_what(make, tmp_path):
  from evaluation import results

  nll = {('rope', 0.001): 2.0, ('rope', 0.003): 1.5, ('alibi', 0.001): 2.5, ('alibi', 0.003): 2.75}
  for (scheme, rate), x in nll.items():
    for seed in (0, 1):
      run = make(scheme, rate, seed, x + seed)
      points = [point(scheme, 'none', n, [x + d / 10 for d in range(12)], seed=seed) for n in (16, 32)]
      results.write(run.workdir / 'extrapolation', points)
      (run.workdir / 'config.json').write_text(json.dumps(run.record))
  gone = make('rope', 0.01, 0, None)
  (gone.workdir / 'config.json').write_text(json.dumps(gone.record))
  folders = sorted(map(str, tmp_path.glob('*,*')))
  assert report.main([*folders, f'--out={tmp_path / "out"}']) == 0
  text = (tmp_path / 'out' / 'report.html').read_text()
  shown = Page(text)
  assert 'optimizer.learning_rate = 0.003' in shown.text and '2.0000' in shown.text  # (1.5 + 2.5) / 2
  assert f'{gone.workdir}: a run that was not swept, left out' in shown.text
  table = (tmp_path / 'out' / 'report.csv').read_text().splitlines()
  rows = [line.split(',') for line in table if line.startswith('validation at 1x')]
  assert len(rows) == 4 and sum('True' in row for row in rows) == 2
  levels = {line.split(',')[2]: line for line in table if line.startswith('perplexity,') and ',16,' in line}
  assert set(levels) == {'rope', 'alibi'}  # one line of two seeds each, no folder in its name
  assert 'Rank stability: not measured, alibi, rope trained without config.surface.checkpoints' in shown.text
  assert report.main([*folders, f'--out={tmp_path / "all"}', '--choose=none']) == 0
  everything = (tmp_path / 'all' / 'report.csv').read_text()
  assert 'validation at 1x' not in everything and 'rope,0.001,0' in everything
  assert len(together(list(tmp_path.glob('*,0.001,*')))) == 4

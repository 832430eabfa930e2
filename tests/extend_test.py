"""The recipe of scale, fine-tune, sweep again: which runs there are, and what is made of their curves."""

import argparse
import json

import numpy as np
import pytest

from configs.extend import ARMS
from scripts import extend
from spec import SpecError

# ml_collections loads a config file by a method that importlib has deprecated.
pytestmark = pytest.mark.filterwarnings(r'ignore:the load_module\(\) method:DeprecationWarning')


@pytest.fixture
def runs(tmp_path, root, monkeypatch):
  """(sources, tuned) of two seeds and three budgets below tmp_path."""
  monkeypatch.chdir(root)
  args = argparse.Namespace(workdir=tmp_path, smoke=False, seeds=[0, 1], budgets=[0.0, 1.0, 10.0], options=())
  of = extend.sources(args)
  return of, extend.arms(args, of)


def sweep(cell, values):
  """A curve of a cell: NLL of document d is values[method][length] + d / 100."""
  path = cell.workdir / 'extrapolation' / 'curve.jsonl'
  path.parent.mkdir(parents=True)
  points = [
    {'method': method, 'length': length, 'checkpoint_step': cell.config.steps}
    | {'nll_documents': [nll + d / 100 + d % 3 / 1000 for d in range(12)]}
    for method, by_length in values.items()
    for length, nll in by_length.items()
  ]
  path.write_text(''.join(json.dumps(p) + '\n' for p in points))


def everything(runs, value):
  """value(arm, budget, length) -> NLL, the same for both seeds but for 0.001."""
  of, tuned = runs
  for seed, cell in of.items():
    by_method = {
      str(f.get('method', 'none')): {n: value(arm, 0.0, n) + seed / 1000 for n in (128, 512)}
      for arm, f in ARMS.items()
      if 'posenc' not in f
    }
    sweep(cell, by_method)
  for (arm, budget, seed), cell in tuned.items():
    sweep(cell, {'none': {n: value(arm, budget, n) + seed / 1000 for n in (128, 512)}})


def nll(arm, budget, length):
  """PI falls from 3 by its tokens, all else is 2; one more at 4x."""
  return (3 - budget / 100 if arm == 'pi' else 2.0) + (length == 512)


def test_all_arms_see_the_same_tokens(runs):
  of, tuned = runs
  assert len(tuned) == 2 * (len(ARMS) * 3 - 5)  # five arms' zero is in the source's sweep
  for (arm, budget, seed), cell in tuned.items():
    assert cell.config.batch * cell.config.window == of[seed].config.batch * of[seed].config.window == 4096
    assert cell.config.steps == round(budget / 100 * of[seed].config.steps)
    assert cell.config.init_from == str(of[seed].workdir)
    assert (cell.config.window, cell.config.train_len) == (128 * ARMS[arm].get('windows', 1), 128)
  assert set(of[0].config.methods) == {'none', *(c.config.method for c in tuned.values())}


def test_what_was_swept_becomes_a_table(runs):
  everything(runs, nll)
  found = extend.collect(*runs)
  assert found['pi'].budgets == (0.0, 1.0, 10.0) and found['pi'].x_SDBL.shape == (2, 12, 3, 2)
  x = found['pi'].x_SDBL - found['short'].x_SDBL
  np.testing.assert_allclose(x, np.array([1.0, 0.99, 0.9])[:, None] + np.zeros((2, 12, 3, 2)), atol=1e-9)
  text = extend.report(found, (128, 512), 2_457_600)
  # Every text has its own level, which cancels; 4x is compared with 1x too.
  assert '| `pi` | +1.000 ±0.000* | +0.990 ±0.000* | +0.900 ±0.000* |' in text
  assert '| `pi` | +2.000 ±0.000* | +1.990 ±0.000* | +1.900 ±0.000* |' in text
  assert '| `short` | +1.000 ±0.000 | +1.000' in text and 'the source has 2.056 ±' in text
  assert 'worst at 0 % (held); 1 % of the tokens change it by -0.010 [-0.010, -0.010] (held)' in text
  assert '`long` less `pi` at 512: -1.000, -0.990, -0.900; ahead at 0, 1, 10 %' in text
  assert '`long` less `yarn` at 512: +0.000, +0.000, +0.000; neither' in text


def test_a_prediction_that_failed_is_said_to_have(runs):
  everything(runs, lambda arm, budget, length: 2 + budget / 100)
  text = extend.report(extend.collect(*runs), (128, 512), 2_457_600)
  assert 'worst at 10 % (failed); 1 % of the tokens change it by +0.010 [+0.010, +0.010] (failed)' in text


def test_a_seed_that_is_not_whole_is_left_out(runs):
  everything(runs, nll)
  of, tuned = runs
  curve = tuned['abf', 10.0, 1].workdir / 'extrapolation' / 'curve.jsonl'
  curve.unlink()
  assert extend.collect(of, tuned)['pi'].x_SDBL.shape[0] == 1
  (tuned['abf', 10.0, 0].workdir / 'extrapolation' / 'curve.jsonl').unlink()
  with pytest.raises(SpecError, match='no seed has been swept'):
    extend.collect(of, tuned)


def test_the_figure_is_drawn(runs, tmp_path):
  everything(runs, nll)
  extend.draw(tmp_path / 'extend.png', extend.collect(*runs), (128, 512), 2_457_600)
  assert (tmp_path / 'extend.png').stat().st_size > 10_000


@pytest.mark.parametrize('option', ['--seeds=a', '--budgets=1,1', '--budgets=-1'])
def test_numbers_that_are_none_are_refused(option, tmp_path):
  with pytest.raises(SpecError, match=option.split('=')[0]):
    extend.main([f'--workdir={tmp_path}', option])

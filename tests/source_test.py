"""A run that goes on from another one's parameters: what it begins with, under which positions, and what it refuses."""

import functools
import json
import os
import re
import shutil
import signal

import jax
import numpy as np
import pytest
from flax import nnx

import data
import posenc
from configs import extend
from configs.schema import Config
from evaluation.points import read_metrics
from evaluation.runs import Run, apart
from evaluation.store import checkpoint_hash
from models.lm import abstract
from posenc import build_rule, positions
from train_test import finished, program, train  # noqa: F401
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole
from training.source import Source, _dealt

YARN = {'method': 'yarn(factor=4)', 'tune_len': 128, 'batch': 4, 'steps': 4}


def params(workdir, step=None):
  """(model, parameters) of a checkpoint, the newest."""
  config = Config.from_dict(provenance.read(workdir))
  graphdef, shapes = abstract(functools.partial(config.build_model, 257))
  checkpoints = Checkpoints(workdir)
  found = checkpoints.restore(step or checkpoints.latest, {'params': as_abstract(shapes, whole(make_mesh(1)))})[
    'params'
  ]
  checkpoints.close()
  return nnx.merge(graphdef, found), found


def leaves(tree):
  return {jax.tree_util.keystr(p): np.asarray(a) for p, a in jax.tree_util.tree_leaves_with_path(tree)}


def equal(a, b):
  a, b = leaves(a), leaves(b)
  return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.fixture
def begin(train, finished, tmp_path):  # noqa: F811
  """begin(fields) -> (exit code, workdir): goes on from `finished`."""

  def run(fields, name='run', **more):
    return train(tmp_path / name, {'batch': 4, 'init_from': str(finished), **fields}, **more), tmp_path / name

  return run


# ---- what it begins with


def test_no_steps_are_the_sources_parameters(begin, finished):  # noqa: F811
  code, workdir = begin({'steps': 0, 'posenc': 'nope'})
  assert code == 0
  (model, mine), (_, theirs) = params(workdir), params(finished)
  assert equal(mine, theirs) and model.schemes[0].name == 'nope'
  source = json.loads((workdir / 'config.json').read_text())['source']
  assert (source['workdir'], source['step'], source['checkpoint']) == (str(finished), 20, checkpoint_hash(theirs))
  assert source['config']['posenc'] == ['rope']


def test_another_pattern_is_the_same_layers(begin, finished):  # noqa: F811
  """Stacked by slot: layer l is in slot l mod slots, whatever the pattern was."""
  code, workdir = begin({'steps': 0, 'posenc': ('rope', 'rope')})
  assert code == 0
  (model, mine), (before, theirs) = params(workdir), params(finished)
  assert set(mine['slots']) == {0, 1} and set(theirs['slots']) == {0}
  for name, stacked in leaves(theirs['slots'][0]).items():
    for layer in range(2):
      assert np.array_equal(leaves(mine['slots'][layer])[name][0], stacked[layer]), name
  tokens = np.arange(24).reshape(1, 24) * 7 % 257
  nll = [m.nll(tokens, tokens, positions('none', list(m.schemes), 32, 24)) for m in (model, before)]
  np.testing.assert_allclose(*nll, rtol=1e-5)
  again, folder = begin({'steps': 0, 'init_from': str(workdir)}, 'again')
  assert again == 0 and equal(params(folder)[1], theirs)


@pytest.mark.parametrize(('slots', 'others'), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4)])
def test_layers_are_dealt_in_their_order(slots, others):
  def pattern(count):
    return {i: {'kernel': np.arange(8.0)[i::count, None] + np.zeros(3)} for i in range(count)}

  assert equal(_dealt(pattern(slots), others), pattern(others))


def test_it_trains_on_long_windows_with_the_method_in_force(begin, finished):  # noqa: F811
  """The loss of its first update is the source's on that batch, with those positions."""
  code, workdir = begin({**YARN, 'steps': 1})
  assert code == 0
  config = Config.from_dict(provenance.read(workdir))
  corpus = config.load_data()
  cut = {'bos': config.data.bos, 'bos_id': corpus.tokenizer.bos, 'stride': corpus.stride}
  windows = data.TrainWindows(corpus.splits.train, 128, **cut, seed=config.seed)
  inputs, targets = windows.batch(0, 4)
  model, _ = params(finished)
  told = next(line['train/loss'] for line in read_metrics(workdir) if 'train/loss' in line)
  want, other = (
    float(model.nll(inputs, targets, positions(method, list(model.schemes), 32, 128)).mean())
    for method in ('yarn(factor=4)', 'none')
  )
  assert told == pytest.approx(want, abs=1e-5) and abs(want - other) > 1e-3
  facts = provenance.facts(config, corpus, params(workdir)[1], 1)
  assert facts['tokens_seen'] == 4 * 128


def test_a_stopped_one_goes_on_without_its_source(begin, train, finished, tmp_path):  # noqa: F811
  shutil.copytree(finished, tmp_path / 'source')
  asked = {**YARN, 'init_from': str(tmp_path / 'source')}
  code, whole_run = begin(asked)
  assert code == 0

  class Stopping(data.TrainWindows):
    def batch(self, step, batch, *rows):
      if (step, self.length) == (2, 128):
        os.kill(os.getpid(), signal.SIGTERM)
      return super().batch(step, batch, *rows)

  code, workdir = begin(asked, 'stopped', TrainWindows=Stopping)
  assert code == 143
  shutil.rmtree(tmp_path / 'source')
  assert begin(asked, 'stopped')[0] == 0
  assert equal(params(workdir)[1], params(whole_run)[1])
  assert begin(asked, 'stopped')[0] == 0  # finished


def test_the_recipe_takes_any_run(finished):  # noqa: F811
  config = Config.from_dict(extend.get_config(f'yarn,{finished}').to_dict())
  assert (config.train_len, config.tune_len, config.method, config.batch) == (32, 128, 'yarn(factor=4)', 1)
  assert config.init_from == str(finished) and config.model.d_model == 32
  Source(config, config.load_data())  # which would refuse what does not fit
  assert Config.from_dict(extend.get_config(f'drope,{finished}').to_dict()).posenc == ('nope',)
  with pytest.raises(ValueError, match='pi, ntk'):
    extend.get_config(f'source,{finished}')


# ---- what it refuses


REFUSED = {
  't5': ({'posenc': 't5'}, 'parameter schemes.0.table'),
  'another width': ({'model.d_mlp': 64}, 'config.model.d_mlp = 64: 0 is allowed'),
  'untied': ({'model.tied': False}, 'config.model.tied'),
  'another 1x': ({'train_len': 64, 'max_multiple': 4, 'eval.multiples': (1.0, 2.0)}, 'config.train_len = 64: 32 is'),
  'other test documents': ({'data.test_docs': 14}, 'config.data.test_docs = 14: 12 is allowed'),
  'a longer longest': ({'max_multiple': 16}, 'config.max_multiple = 16: 8 is allowed'),
  'other spans': ({'eval.spans': 1}, 'config.eval.spans'),
  'nothing there': ({'init_from': '/nowhere'}, "config.init_from = '/nowhere'"),
  'no such method': ({'method': 'yran(factor=4)'}, "config.method: .*did you mean 'yarn'"),
  'no frequencies': ({'posenc': 'nope', 'method': 'pi(factor=4)'}, 'config.method: pi: nope has no frequencies'),
  'no steps from nothing': ({'init_from': '', 'steps': 0}, 'config.steps = 0'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_does_not_fit_is_refused_by_name(begin, capsys, case):
  fields, named = REFUSED[case]
  code, workdir = begin({'steps': 1, **fields})
  err = capsys.readouterr().err
  assert code == 2 and err.startswith('error: ') and err.count('\n') == 1
  assert re.search(named, err), err
  assert not (workdir / 'config.json').exists()


def test_a_source_that_has_changed_is_refused(begin, train, finished, tmp_path, capsys):  # noqa: F811
  """Before the first checkpoint of its own a run needs its source again, and that one only."""
  shutil.copytree(finished, tmp_path / 'source')
  asked = {**YARN, 'init_from': str(tmp_path / 'source')}

  class Dying(data.TrainWindows):
    def batch(self, step, batch, *rows):
      raise KeyboardInterrupt

  assert begin(asked, TrainWindows=Dying)[0] == 130
  shutil.rmtree(tmp_path / 'source' / 'checkpoints' / '20')
  assert begin(asked)[0] == 2
  assert 'began with other parameters (checkpoint: ' in capsys.readouterr().err


# ---- positions of a model that was trained with a method in force


def made(method, rule, length=256, scheme='rope'):
  slot = posenc.build(scheme, heads=1, head_dim=32, d_model=8, train_len=64, rngs=nnx.Rngs(0))
  return positions(method, slot, 64, length, rule=rule and build_rule('sequential', [slot], layers=1, **rule))


TUNED = {'train_len': 256, 'method': 'yarn(factor=4)', 'base_len': 64}
PLAIN = {'train_len': 256, 'base_len': 64}


@pytest.mark.parametrize(
  ('asked', 'rule', 'is_', 'of'),
  [
    ('none', TUNED, 'yarn(factor=4)', 64),
    ('pi(factor=16)', TUNED, 'pi(factor=16)', 64),
    ('yarn(factor=16)+logn', {**TUNED, 'train_len': 64}, 'yarn(factor=16)+logn', 64),
    ('resonance', TUNED, 'yarn(factor=4)+resonance', 64),
    ('ntk(factor=8)', PLAIN, 'ntk(factor=8)', 256),
    ('yarn(factor=8)', PLAIN, 'yarn(factor=8)', 256),
    ('none', PLAIN, 'none', 64),
  ],
)
def test_what_a_method_means_after_one(asked, rule, is_, of):
  got = made(asked, rule, 1024)
  slot = posenc.build('rope', heads=1, head_dim=32, d_model=8, train_len=64, rngs=nnx.Rngs(0))
  want = positions(is_, slot, of, 1024)
  for field in ('inv_freq_P', 'logit_scale_T', 'window_T'):
    np.testing.assert_array_equal(getattr(got, field), getattr(want, field), field)


def test_a_window_and_log_n_join_it_at_the_longest_window_trained_on():
  yarn, both = made('none', TUNED, 1024), made('logn+sliding_window', TUNED, 1024)
  np.testing.assert_array_equal(both.inv_freq_P, yarn.inv_freq_P)
  assert (np.asarray(both.window_T) == 256).all()
  scale = np.asarray(both.logit_scale_T) / np.asarray(yarn.logit_scale_T)
  np.testing.assert_allclose(scale[[0, 255, 1023]], [1, 1, np.log(1024) / np.log(256)], rtol=1e-6)


def test_seeds_that_go_on_from_seeds_are_one_scheme(tmp_path):
  def seed(n, source_steps=600):
    config = {'posenc': ['rope'], 'seed': n, 'steps': 30, 'init_from': f'runs/source,seed={n}'}
    source = {'workdir': config['init_from'], 'step': 600, 'checkpoint': f'{n}', 'config': {'seed': n}}
    source['config']['steps'] = source_steps
    point = {'scheme': 'rope', 'seed': n, 'checkpoint_step': 30}
    return Run(tmp_path / f'{n}', [point], {'config': config, 'source': source})

  assert {run.scheme for run in apart([seed(0), seed(1)])} == {'rope'}
  assert len({run.scheme for run in apart([seed(0), seed(1, source_steps=300)])}) == 2


def test_the_curve_says_how_it_was_trained():
  texts = [build_rule('sequential', [], layers=1, **rule).text for rule in ({'train_len': 64}, PLAIN, TUNED)]
  assert texts == ['sequential', 'tuned at 256', 'tuned at 256, yarn(factor=4)']

"""A trained run, opened: nothing is read before it is asked for, and all programs mean the same checkpoint and rows."""

import dataclasses
import re
import shutil

import jax
import pytest

from configs.schema import Config
from evaluation.plan import load
from evaluation.store import Key, Store, checkpoint_hash
from opened import Opened
from spec import SpecError
from train_test import finished, program, train  # noqa: F401
from training import provenance
from training.checkpoints import Checkpoints


@pytest.fixture
def workdir(finished):  # noqa: F811  pytest finds a fixture by the name under which it was imported
  return finished


def opened(workdir, checkpoint='latest'):
  return Opened(workdir, Config.from_dict(provenance.read(workdir)), checkpoint)


def test_nothing_is_read_before_it_is_asked_for(workdir, monkeypatch):
  """--status of a sweep on a machine that cannot hold the model; a task of random tokens without the corpus."""

  def refuse(*args, **kwargs):
    raise AssertionError('read')

  monkeypatch.setattr(Checkpoints, 'restore', refuse)
  monkeypatch.setattr(Config, 'load_data', refuse)
  run = opened(workdir)
  assert run.step == 20 and [scheme.name for scheme in run.slots] == ['rope'] and run.tokenizer.vocab_size == 257
  assert jax.tree.leaves(run.shapes) and not run.results.exists()
  for name in ('params', 'data'):
    with pytest.raises(AssertionError, match='read'):
      getattr(run, name)


def test_windows_are_of_the_runs_own_plan_and_rows_of_its_parameters(workdir, tmp_path):
  run = opened(workdir)
  _, theirs = load(run.config.to_dict())
  plan = run.plan()
  assert plan.targets_hash == theirs.targets_hash
  some = run.plan(run.data.splits.test[:1])
  assert [d.name for d in some.documents] == [run.data.splits.test[0].name] and some.targets == plan.targets
  assert run.checkpoint == checkpoint_hash(run.params)

  store, want = Store(tmp_path, print), Key.of(run.config, run.data, checkpoint_hash(run.params), 'positions', 32)
  assert run.rows_in(store)('positions', 32).key == want


def test_a_checkpoint_is_a_step_or_the_latest(workdir, tmp_path):
  for name, step in (('latest', 20), ('20', 20), ('12', 12)):
    assert opened(workdir, name).step == step
  for name in ('15', 'newest', '-1', '20.0', ''):
    with pytest.raises(SpecError, match=f'^checkpoint = {re.escape(name)}: allowed: latest, .*20$'):
      opened(workdir, name)
  shutil.copytree(workdir, tmp_path / 'run', ignore=lambda folder, names: [n for n in names if n.isdecimal()])
  with pytest.raises(SpecError, match='holds no checkpoint yet$'):
    opened(tmp_path / 'run')


def test_another_corpus_than_that_of_training_is_refused(workdir, monkeypatch):
  other = dataclasses.replace(opened(workdir).data, sha256='0' * 64)
  monkeypatch.setattr(Config, 'load_data', lambda self: other)
  with pytest.raises(SpecError, match=r"is not what this run began with \(corpus_sha256: .* -> '0+'\)"):
    opened(workdir).plan()

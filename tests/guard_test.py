"""What is watched while a run trains, and ids that are none."""

import numpy as np
import pytest
from flax import nnx

import posenc
from data import cache, tokenizers
from data.document import Document
from forms import jit
from models.lm import LM, ModelConfig
from spec import SpecError
from training import guard


def lines(losses):
  spikes = guard.Spikes()
  return {step: line for step, loss in enumerate(losses, 1) if (line := spikes.look(step, loss))}


def test_a_spike_is_told_and_scatter_is_not():
  rng = np.random.default_rng(0)
  falling = 5 - np.linspace(0, 3, 2000) + rng.normal(scale=0.05, size=2000)
  assert lines(falling) == {}
  falling[[500, 501, 1200]] += [1.0, 3.0, 0.9]
  told = lines(falling)
  assert sorted(told) == [501, 502, 1201]
  assert told[502].startswith(f'step 502: loss {falling[501]:.4f}, ') and told[502].endswith('of the 64 before it')


def test_a_converged_run_is_not_told_of_its_last_digits():
  losses = 1 + 1e-6 * np.random.default_rng(0).standard_t(2, size=1000)
  assert lines(losses) == {}
  assert list(lines([*losses, 1.2])) == [1001]


def test_the_first_steps_have_nothing_to_be_compared_with():
  assert lines([5.0] * 31 + [9.0]) == {} and list(lines([5.0] * 32 + [9.0])) == [33]


def test_a_dump_that_cannot_be_written_does_not_hide_why(tmp_path):
  said = guard.dump(tmp_path / 'gone', 7, [('a', 3)], np.zeros((1, 4)), np.zeros((1, 4)))
  assert said == 'its windows could not be written: No such file or directory'
  assert (
    guard.dump(tmp_path, 7, [('a', 3)], np.zeros((1, 4)), np.ones((1, 4)))
    == f'its windows are in {tmp_path}/batch_7.npz'
  )
  with np.load(tmp_path / 'batch_7.npz') as found:
    assert (found['document'].tolist(), found['start'].tolist(), found['targets'].sum()) == (['a'], [3], 4)


@pytest.fixture(scope='module')
def nll():
  cfg = ModelConfig(layers=1, d_model=16, heads=2, d_mlp=32)
  model = LM(cfg, ['nope'], vocab_size=17, train_len=8, rngs=nnx.Rngs(0))
  pos = posenc.positions('none', list(model.schemes), 8, 8)
  return jit(lambda inputs, targets: model.nll(inputs, targets, pos))


@pytest.mark.parametrize('odd', [17, 99, -1, -17, -18, 2**31 - 1])
def test_ids_that_are_none_make_no_number(odd, nll):
  """Which stops a run. A plain lookup reads -1, the mark of a target that is not asked for, as the last id."""
  inputs, targets = np.arange(8)[None], np.arange(1, 9)[None]
  assert np.isfinite(nll(inputs, targets)).all()
  inputs[0, 3] = odd
  assert np.isnan(nll(inputs, targets)[0, 3:]).all()
  inputs[0, 3], targets[0, 3] = 3, odd
  found = nll(inputs, targets)[0, 3]
  assert found == 0 if odd < 0 else np.isnan(found)


@pytest.mark.parametrize('odd', [257, -1])
def test_a_tokenizer_that_gives_ids_it_does_not_have_is_refused(odd, monkeypatch):
  monkeypatch.setattr(tokenizers.Bytes, 'encode', lambda self, text: np.array([0, odd, 256], np.int32))
  with pytest.raises(SpecError, match=rf"corpus 'x', document 'd': its tokenizer gives id {odd}, and has 257$"):
    list(cache._encode('x', Document('d', b'abc'), tokenizers.build('bytes')))

"""A run that goes on on other devices."""

import numpy as np
import pytest
from harness import FIELDS, begin, curves, restored, run

pytestmark = pytest.mark.faults


def test_a_run_goes_on_on_other_devices(finished, tmp_path):
  """Stopped on two that share the batch, gone on on four of which two share the parameters, ended on one: the same but
  for rounding; the text of every step is the same to the byte."""
  workdir = tmp_path / 'run'
  for devices, mesh, seen in (('2', '(0,1,1)', 5), ('4', '(0,2,1)', 7), ('1', '(0,1,1)', None)):
    process = begin('train', f'--workdir={workdir}', *FIELDS, f'--config.mesh={mesh}', JAX_NUM_CPU_DEVICES=devices)
    steps = 0
    while seen and steps < seen:
      line = process.stdout.readline()
      assert line, process.communicate()
      steps += line.startswith('step ') and 'loss' in line
    if seen:
      process.terminate()
    out, err = process.communicate()
    assert process.returncode == (143 if seen else 0), err
  ours, theirs = restored(workdir), restored(finished[0])
  assert ours.keys() == theirs.keys()
  for name in ours:
    np.testing.assert_allclose(ours[name], theirs[name], atol=1e-4, err_msg=name)
  ours, theirs = curves(workdir), curves(finished[0])
  assert [line['step'] for line in ours] == [line['step'] for line in theirs]
  for mine, other in zip(ours, theirs):
    assert mine.get('train/loss') == pytest.approx(other.get('train/loss'), abs=1e-4)
  code, _, err = run('train', f'--workdir={workdir}', *FIELDS, '--config.optimizer.learning_rate=1.0', code=None)
  assert code == 2 and '(config.optimizer.learning_rate: 0.001 -> 1.0)' in err

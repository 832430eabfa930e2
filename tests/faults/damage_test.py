"""Files that are not what was written, met by the real programs: seen, told in a line, and made up for.

Every byte of every kind of file is flipped and every length truncated in this process, where 200 of them take seconds:
checkpoints in integrity_test.py, the store in store_test.py, the token cache in cache_test.py.
"""

import json

import pytest
from harness import FIELDS, SWEEP, copy_of, curves, digest, one_line, run

pytestmark = pytest.mark.faults


def flip(path, rng):
  content = bytearray(path.read_bytes())
  content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
  path.write_bytes(content)


def files(folder):
  return sorted(path for path in folder.rglob('*') if path.is_file())


def test_a_run_goes_back_to_its_last_sound_step_and_ends_the_same(finished, tmp_path, rng):
  """The last of five is flipped, the one before truncated, one is empty: from the third on, to the same bits."""
  workdir = copy_of(finished[0], tmp_path / 'run')
  steps = workdir / 'checkpoints'
  flip(rng.choice(files(steps / '20' / 'params')), rng)
  victim = rng.choice(files(steps / '16' / 'opt'))
  victim.write_bytes(victim.read_bytes()[: rng.randrange(victim.stat().st_size)])
  (steps / '30').mkdir()
  (steps / '24.orbax-checkpoint-tmp').mkdir()
  out, err = run('train', f'--workdir={workdir}', *FIELDS)
  warnings = [line for line in out.splitlines() if line.startswith('warning: ')]
  assert [line.split(' is damaged (')[0] for line in warnings] == ['warning: checkpoint 20', 'warning: checkpoint 16']
  assert all(line.endswith('going on from step 12') for line in warnings) and 'resuming at step 12' in out
  assert digest(workdir) == digest(finished[0]) and curves(workdir) == curves(finished[0])
  assert sorted(p.name for p in (workdir / 'damaged').iterdir()) == ['16', '20']
  assert sorted(int(p.name) for p in steps.iterdir()) == [4, 8, 12, 16, 20]


def test_a_finished_run_whose_end_is_damaged_is_not_finished(finished, tmp_path, rng):
  workdir = copy_of(finished[0], tmp_path / 'run')
  flip(rng.choice(files(workdir / 'checkpoints' / '20')), rng)
  out, _ = run('train', f'--workdir={workdir}', *FIELDS)
  assert 'nothing to do' not in out and 'resuming at step 16' in out
  assert digest(workdir) == digest(finished[0])
  assert 'nothing to do' in run('train', f'--workdir={workdir}', *FIELDS)[0]


@pytest.mark.parametrize('flag', [[], ['--checkpoint=20']], ids=['latest', 'named'])
def test_a_sweep_of_a_damaged_step_is_refused(finished, tmp_path, rng, flag):
  """Also where it is only the latest: points of another step would be another curve. What there is is named."""
  workdir = copy_of(finished[0], tmp_path / 'run')
  flip(rng.choice(files(workdir / 'checkpoints' / '20' / 'params')), rng)
  _, err = run('eval_extrapolation', f'--workdir={workdir}', *SWEEP, *flag, code=2)
  said = one_line(err)
  assert '/20 is damaged: params/' in said and 'there are also steps 4, 8, 12, 16; train.py, started again' in said
  run('eval_extrapolation', f'--workdir={workdir}', *SWEEP, '--checkpoint=16')
  points = [json.loads(line) for line in (workdir / 'extrapolation' / 'curve.jsonl').read_text().splitlines()]
  assert {point['checkpoint_step'] for point in points} == {16}


def test_a_damaged_store_is_scored_again_and_the_curve_is_the_same(finished, curve, tmp_path, rng):
  workdir = copy_of(finished[0], tmp_path / 'run')
  run('eval_extrapolation', f'--workdir={workdir}', *SWEEP)
  stored = sorted((workdir / 'extrapolation' / 'store').glob('*/*.npz'))
  flip(rng.choice(stored), rng)
  (workdir / 'extrapolation' / 'curve.jsonl').unlink()
  out, _ = run('eval_extrapolation', f'--workdir={workdir}', *SWEEP)
  assert out.count('is damaged (') == 1 and 'its windows are computed again' in out
  assert (workdir / 'extrapolation' / 'curve.jsonl').read_bytes() == (curve[0] / 'curve.jsonl').read_bytes()

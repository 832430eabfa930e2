"""Two at once: one of them is refused, or both end as one alone would have."""

import pytest
from harness import FIELDS, begin, copy_of, curves, digest, one_line, run

pytestmark = pytest.mark.faults


def test_two_sweeps_share_a_store(rope, tmp_path):
  """Copies of a run are one checkpoint. Both end with the curve of a sweep of its own."""
  alone = copy_of(rope, tmp_path / 'alone')
  run('eval_extrapolation', f'--workdir={alone}')
  both = [copy_of(rope, tmp_path / name) for name in 'ab']
  started = [begin('eval_extrapolation', f'--workdir={run}', f'--store={tmp_path}/store') for run in both]
  for process in started:
    out, err = process.communicate()
    assert process.returncode == 0, f'{out}\n{err}'
  for workdir in both:
    for name in ('curve.jsonl', 'curve.csv'):
      assert (workdir / 'extrapolation' / name).read_bytes() == (alone / 'extrapolation' / name).read_bytes()
    assert not (workdir / 'extrapolation' / 'store').exists()
  assert len(list(tmp_path.glob('store/*/*.npz'))) == len(list(alone.glob('extrapolation/store/*/*.npz')))


@pytest.mark.parametrize('program', ['train', 'eval_extrapolation'])
def test_the_second_on_one_workdir_is_refused_and_the_first_not_disturbed(finished, rope, tmp_path, program):
  """With the first one's pid and host, whichever of them that is."""
  workdir = tmp_path / 'run'
  if program == 'eval_extrapolation':
    copy_of(rope, workdir)
  options = FIELDS if program == 'train' else []
  started = [begin(program, f'--workdir={workdir}', *options) for _ in range(2)]
  ended = sorted((process.communicate() + (process,) for process in started), key=lambda end: end[2].returncode)
  assert [process.returncode for *_, process in ended] == [0, 2], ended
  refused = one_line(ended[1][1])
  assert f'in use by another {"run" if program == "train" else "sweep"} (pid {ended[0][2].pid} on ' in refused
  if program == 'train':
    assert digest(workdir) == digest(finished[0]) and curves(workdir) == curves(finished[0])


def test_two_trainings_tokenize_one_corpus(tmp_path):
  """Both read it at once, from an empty cache; one file comes of it, and both train on the same tokens."""
  for i in range(40):
    (tmp_path / f'{i:02}.txt').write_text(f'{i} etaoin shrdlu ' * 400)
  options = [*FIELDS, f'--config.data.corpus=text(glob={str(tmp_path / "*.txt")!r})', '--config.steps=4']
  started = [
    begin('train', f'--workdir={tmp_path / name}', *options, LONGCURVE_CACHE=str(tmp_path / 'cache')) for name in 'ab'
  ]
  for process in started:
    out, err = process.communicate()
    assert process.returncode == 0, f'{out}\n{err}'
  assert digest(tmp_path / 'a', 4) == digest(tmp_path / 'b', 4)
  assert sorted(path.suffix for path in (tmp_path / 'cache').iterdir()) == ['.lock', '.seen', '.tokens']

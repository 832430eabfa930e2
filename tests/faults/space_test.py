"""Disks that are full, read-only, or not there: one line, exit code not 0, and what was good before is good after."""

import os
import shutil
import subprocess

import pytest
from harness import FIELDS, SWEEP, digest, one_line, run

from training.checkpoints import saved

pytestmark = pytest.mark.faults

# Files end at so many bytes, as on a full disk, once the first checkpoint is complete.
FULL_LATER = """
import resource, runpy, sys
limit, *sys.argv = sys.argv[1:]
from training import fingerprint
seal = fingerprint.seal

def sealed(folder):
  seal(folder)
  resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))

fingerprint.seal = sealed
runpy.run_path(sys.argv[0], run_name='__main__')
"""


def test_a_full_disk_ends_the_run_and_leaves_the_last_good_step(finished, tmp_path):
  """With keep = 1 too: the step before goes once the next one is complete. Given room, the run goes on from there."""
  workdir = tmp_path / 'run'
  options = [f'--workdir={workdir}', *FIELDS[:-1], '--config.log.keep=1']
  before = ['-c', FULL_LATER, 60_000, 'train.py']
  out, err = run('', *options, before=before, code=1, JAX_ENABLE_COMPILATION_CACHE='false')
  assert 'finished, step 20' not in out
  said = one_line(err.splitlines(keepends=True)[-1])  # orbax has told of it too
  assert said.startswith('checkpoint 8 cannot be written (') and 'File too large' in said
  assert said.endswith('; those before it are whole') and saved(workdir) == [4]
  run('train', *options)
  assert digest(workdir) == digest(finished[0]) and saved(workdir) == [20]


@pytest.fixture
def disk(tmp_path):
  """A file system of 1 MB, and what makes it read-only; where mounting is not allowed there is none."""
  folder = tmp_path / 'disk'
  folder.mkdir()
  mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=1m', 'none', str(folder)], capture_output=True)
  if mounted.returncode:
    pytest.skip('mounting is not permitted')
  yield folder, lambda: subprocess.run(['mount', '-o', 'remount,ro', str(folder)], check=True)
  subprocess.run(['umount', str(folder)], check=True)


def test_no_room_for_a_checkpoint_is_said_before_anything_is_computed(disk):
  _, err = run('train', f'--workdir={disk[0]}/run', *FIELDS, '--config.model.d_model=64', code=2)
  said = one_line(err)
  assert 'MiB are free, a checkpoint needs 1.' in said
  _, err = run('train', f'--workdir={disk[0]}/other', *FIELDS, '--config.steps=4')
  assert saved(disk[0] / 'other')


def test_a_disk_without_a_byte_is_said_in_one_line(disk):
  with pytest.raises(OSError), (disk[0] / 'filler').open('wb') as file:
    file.write(bytes(2 << 20))
  _, err = run('train', f'--workdir={disk[0]}/run', *FIELDS, code=2)
  assert 'No space left on device' in one_line(err)


def test_a_read_only_disk_is_said_in_one_line_and_changes_nothing(finished, disk):
  workdir = disk[0] / 'run'
  shutil.copytree(finished[0], workdir, ignore=shutil.ignore_patterns('extrapolation', '[48]', '1[26]', 'tensorboard'))
  disk[1]()
  _, err = run('train', f'--workdir={workdir}', *FIELDS, code=2)
  assert 'Read-only file system' in one_line(err)
  _, err = run('eval_extrapolation', f'--workdir={workdir}', *SWEEP, code=2)
  assert 'Read-only file system' in one_line(err)
  assert digest(workdir) == digest(finished[0])


def test_without_permission_nothing_is_begun(tmp_path):
  """Root is not kept out of anything; a folder of the kernel's keeps it out too."""
  folder = tmp_path / 'closed'
  folder.mkdir(mode=0o500)
  workdir = folder / 'run' if os.geteuid() else '/proc/longcurve/run'
  _, err = run('train', f'--workdir={workdir}', *FIELDS, code=2)
  assert one_line(err).startswith(('/proc', str(folder)))


@pytest.mark.parametrize('platform', ['cuda', 'tpu', 'abacus'])
def test_a_backend_that_is_not_there_is_named(tmp_path, platform):
  _, err = run('train', f'--workdir={tmp_path}/run', *FIELDS, code=2, JAX_PLATFORMS=platform)
  assert f'JAX_PLATFORMS = {platform!r}: jax has no such device here (' in err.splitlines()[-1]
  assert not (tmp_path / 'run').exists()


def test_too_few_devices_are_named_before_anything_is_written(tmp_path):
  _, err = run('train', f'--workdir={tmp_path}/run', *FIELDS, '--config.mesh=(8,1,1)', code=2, JAX_NUM_CPU_DEVICES='2')
  assert 'config.mesh = (8, 1, 1): at most the 2 devices at hand are allowed, not 8' in one_line(err)
  assert not (tmp_path / 'run').exists()


def test_a_state_that_no_memory_holds_is_refused_before_anything_is_written(tmp_path):
  huge = ['--config.posenc=cope(npos_max=2147483647)', '--config.memory_gb=8']
  _, err = run('train', f'--workdir={tmp_path}/run', *FIELDS[:1], *huge, code=2)
  assert 'parameters, gradients and optimizer state: ' in one_line(err) and not (tmp_path / 'run').exists()

"""Checkpoints that are not what was saved: seen, named, never used; the run goes on from the last sound one."""

import json
import os
import shutil
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints_test import assert_same, plus
from spec import SpecError
from training import fingerprint
from training.checkpoints import Checkpoints, as_abstract
from training.checkpoints import saved as steps_by_name
from training.devices import make_mesh, whole
from training.fingerprint import Damaged

STATE = {
  'params': {'table': np.float32(np.random.default_rng(0).normal(size=(64, 48))), 'slots': [{'scale': np.ones(16)}]},
  'opt': (np.int32(3), {'mu': np.float32(np.random.default_rng(1).normal(size=(64, 48)))}, jnp.ones(5, jnp.bfloat16)),
}
STATE = jax.tree.map(jnp.asarray, STATE)


def shapes():
  return as_abstract(STATE, whole(make_mesh(1)))


@pytest.fixture(scope='module')
def original(tmp_path_factory):
  """Steps 4 and 8; step n holds STATE + n."""
  workdir = tmp_path_factory.mktemp('original')
  checkpoints = Checkpoints(workdir, keep=3)
  for step in (4, 8):
    checkpoints.save(step, plus(STATE, step))
  checkpoints.close()
  return workdir


@pytest.fixture
def workdir(original, tmp_path):
  return shutil.copytree(original, tmp_path / 'run')


def seeded():
  seed = int(os.environ.get('FAULTS_SEED', time.time()))
  print(f'FAULTS_SEED={seed}')
  return np.random.default_rng(seed)


def damage(path, rng, how):
  """One bit flipped, or the file truncated; what the file was."""
  before = path.read_bytes()
  if how == 'flip' and before:
    at, bit = int(rng.integers(len(before))), 1 << int(rng.integers(8))
    path.write_bytes(before[:at] + bytes([before[at] ^ bit]) + before[at + 1 :])
  else:
    path.write_bytes(before[: int(rng.integers(len(before)))])
  return before


def newest(workdir):
  """(step, state, warnings) of a trainer that is started again."""
  checkpoints, said = Checkpoints(workdir, keep=3), []
  step, state = checkpoints.newest(shapes(), said.append)
  checkpoints.close()
  return step, state, said


@pytest.mark.parametrize('n', [12, pytest.param(80, marks=pytest.mark.faults)])
def test_flips_and_truncations_are_seen_named_and_never_used(original, workdir, n):
  """In any file of a step, whoever reads it; every tenth time the trainer goes back to the step before."""
  rng, checkpoints = seeded(), Checkpoints(workdir)
  folder = workdir / 'checkpoints' / '8'
  files = sorted(p for p in folder.rglob('*') if p.is_file())
  sizes = np.array([p.stat().st_size for p in files])
  assert checkpoints.restore(8, shapes())  # it reads as well as writes
  for i in range(n):
    # By bytes, so that arrays are hit; and by files, so that small ones are.
    path = files[int(rng.choice(len(files), p=None if i % 2 else sizes / sizes.sum()))]
    before = damage(path, rng, 'truncate' if i % 4 == 3 else 'flip')
    with pytest.raises(SpecError) as refused:
      checkpoints.restore(8, shapes())
    said = str(refused.value)
    name = str(path.relative_to(folder))
    assert '\n' not in said and said.startswith(f'{folder} is damaged: {name} ') and 'also steps 4;' in said, said
    if i % 10 == 0:
      step, state, warned = newest(shutil.copytree(workdir, workdir.parent / f'copy{i}'))
      assert step == 4 and len(warned) == 1 and f'checkpoint 8 is damaged ({name} ' in warned[0]
      assert_same(state, plus(STATE, 4))
    path.write_bytes(before)
  assert_same(checkpoints.restore(8, shapes()), plus(STATE, 8))
  checkpoints.close()


@pytest.mark.faults
def test_without_the_files_checksums_the_arrays_are_still_compared(workdir, root):
  """As a kill between a save and its seal leaves it. What is restored is what was saved, or it is refused.

  In a process of its own: threads of a load that has failed come back to what is closed, in whatever test then runs.
  """
  code = f'import integrity_test, pathlib; integrity_test.unsealed(pathlib.Path({str(workdir)!r}), 60)'
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': f'{root}:{root}/tests'}
  done = subprocess.run([sys.executable, '-c', code], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def unsealed(workdir, n):
  rng, checkpoints = seeded(), Checkpoints(workdir)
  folder, refused = workdir / 'checkpoints' / '8', 0
  (folder / fingerprint.NAME).unlink()
  files = [p for p in sorted(folder.rglob('*')) if p.is_file()]
  arrays = [p for p in files if p.parent.name == 'd' and p.stat().st_size > 2000]
  assert arrays
  for i in range(n):
    path = files[int(rng.integers(len(files)))] if i % 2 else arrays[int(rng.integers(len(arrays)))]
    before = damage(path, rng, 'truncate' if i % 4 == 3 else 'flip')
    try:
      assert_same(checkpoints._restore(8, shapes()), plus(STATE, 8))
    except Damaged as reason:
      assert '\n' not in str(reason)
      refused += 1
    path.write_bytes(before)
  checkpoints.close()
  assert refused >= n // 4


def test_a_wrong_number_is_named_by_its_array(workdir):
  """Whatever the files say: as if the array had been wrong in memory already when it was written."""
  path = workdir / 'checkpoints' / '8' / '_CHECKPOINT_METADATA'
  record = json.loads(path.read_text())
  sums = record['custom_metadata']['sums']
  assert {f'{i}{leaf}' for i in sums for leaf in sums[i]} == {
    'params.table', 'params.slots.0.scale', 'opt.0', 'opt.1.mu', 'opt.2'
  }  # fmt: skip
  sums['opt']['.1.mu'] = 'float32[64, 48] ' + '0' * 16
  path.write_text(json.dumps(record))
  fingerprint.seal(path.parent)
  checkpoints = Checkpoints(workdir)
  with pytest.raises(SpecError, match=r'/8 is damaged: opt\.1\.mu is not what was saved; there are also steps 4; '):
    checkpoints.restore(8, shapes())
  assert_same(checkpoints.restore(8, {'params': shapes()['params']}), {'params': plus(STATE['params'], 8)})
  checkpoints.close()


def test_sums_see_what_has_changed():
  """Every bit of every dtype that a state may have, two signs, numbers exchanged; and are what their formula says."""
  rng = np.random.default_rng(0)
  for dtype in (np.float32, jnp.bfloat16, np.int32, np.bool_):
    a = np.asarray(rng.integers(0, 2, (2, 3)), dtype)
    bits = 1 if dtype is np.bool_ else 8 * a.itemsize
    others = np.repeat(a[None].view(f'u{a.itemsize}'), a.size * bits, 0)
    for n, (row, column, bit) in enumerate(np.ndindex(*a.shape, bits)):
      others[n, row, column] ^= 1 << bit
    assert len(set(sums(a, *others.view(a.dtype)))) == 1 + len(others)
  a = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
  signs, exchanged = a * np.float32([-1, 1, 1, -1]), a.copy()
  exchanged[0, 1], exchanged[2, 3] = a[2, 3], a[0, 1]
  assert len(set(sums(a, signs, exchanged, a[::-1], -a, a * np.float32(np.nan), a * 0, a * -0.0))) == 8
  want = [sum(mix((i + 1) ^ mix((i + key) % 2**32)) for i in range(4)) % 2**32 for key in (0x9E3779B9, 0x7F4A7C15)]
  assert sums(np.uint32([[1, 2], [3, 4]])) == [tuple(want)]
  said = fingerprint.of_arrays({'x': [jnp.uint32([[1, 2], [3, 4]])]})
  assert said == {'x': {'.0': f'uint32[2, 2] {want[0]:08x}{want[1]:08x}'}}


def sums(*arrays):
  """Of arrays of one shape and dtype."""
  return [tuple(two) for two in jax.jit(jax.vmap(fingerprint._two))(jnp.asarray(np.stack(arrays))).tolist()]


def mix(h):
  h = (h ^ h >> 16) * 0x85EBCA6B % 2**32
  h = (h ^ h >> 13) * 0xC2B2AE35 % 2**32
  return h ^ h >> 16


@pytest.mark.parametrize('gone', ['params/_METADATA', 'opt/manifest.ocdbt', '_CHECKPOINT_METADATA', 'opt'])
def test_a_missing_file_is_named(workdir, gone):
  path = workdir / 'checkpoints' / '8' / gone
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  step, _, (warned,) = newest(workdir)
  assert step == 4 and f'checkpoint 8 is damaged ({gone}' in warned and ' is missing)' in warned
  assert steps_by_name(workdir) == [4]


def test_damaged_steps_are_moved_aside_and_saved_again(workdir):
  """Two lives that both find step 8 damaged; what they found is kept beside the checkpoints."""
  for life in range(2):
    table = next(p for p in (workdir / 'checkpoints' / '8' / 'params').rglob('d/*') if p.stat().st_size > 2000)
    table.write_bytes(table.read_bytes()[:-1])
    checkpoints, said = Checkpoints(workdir, keep=3), []
    step, state = checkpoints.newest(shapes(), said.append)
    assert step == 4 and said == [
      f'checkpoint 8 is damaged ({table.relative_to(workdir / "checkpoints" / "8")} has {table_size(said)} bytes, '
      f'{table_size(said) + 1} were written) and now in {workdir / "damaged"}; going on from step 4'
    ]
    checkpoints.save(8, plus(state, 4))
    checkpoints.close()
    assert newest(workdir)[0] == 8
    assert sorted(p.name for p in (workdir / 'damaged').iterdir()) == ['8', '8.1'][: life + 1]
  assert_same(newest(workdir)[1], plus(plus(STATE, 4), 4))


def table_size(said):
  return int(said[0].split(' has ')[1].split()[0])


def test_where_no_step_is_sound_nothing_is_begun_or_moved(workdir):
  for step in '48':
    (workdir / 'checkpoints' / step / 'opt' / '_METADATA').write_text('{}')
  with pytest.raises(SpecError, match=r'none of its steps is sound \(8: opt/_METADATA has 2 bytes, \d+ were written\)'):
    newest(workdir)
  assert steps_by_name(workdir) == [4, 8] and not (workdir / 'damaged').exists()


def test_another_config_is_no_damage(workdir):
  wider = as_abstract({**STATE, 'params': {**STATE['params'], 'table': jnp.ones((64, 49))}}, whole(make_mesh(1)))
  checkpoints = Checkpoints(workdir, keep=3)
  with pytest.raises(SpecError, match=r'^checkpoint 8: params\.table is float32\[64, 48\], this config wants'):
    checkpoints.newest(wider, pytest.fail)
  checkpoints.close()
  assert steps_by_name(workdir) == [4, 8]


def test_parameters_alone_do_not_ask_for_the_rest(workdir):
  (workdir / 'checkpoints' / '8' / 'opt' / '_METADATA').write_text('{}')
  checkpoints = Checkpoints(workdir)
  assert_same(checkpoints.restore(8, {'params': shapes()['params']}), {'params': plus(STATE['params'], 8)})
  checkpoints.close()


def test_a_killed_seal_is_made_up_for_by_the_next_writer(workdir):
  seal = workdir / 'checkpoints' / '8' / fingerprint.NAME
  whole_seal = seal.read_bytes()
  seal.rename(seal.with_name(f'{seal.name}.tmp'))  # as a kill leaves it
  reader = Checkpoints(workdir)
  assert_same(reader.restore(8, shapes()), plus(STATE, 8))
  reader.close()
  assert not seal.exists()
  assert newest(workdir)[::2] == (8, [])
  assert seal.read_bytes() == whole_seal


def test_a_checkpoint_from_before_there_were_checksums_is_taken_with_a_note(tmp_path, capsys):
  from orbax.checkpoint import v1 as ocp

  with ocp.training.Checkpointer(str(tmp_path / 'checkpoints')) as old:
    old.save_checkpointables(4, STATE)
  step, state, said = newest(tmp_path)
  assert (step, said) == (4, [])
  assert_same(state, STATE)
  assert capsys.readouterr().out == 'note: checkpoint 4 was saved without checksums; it is taken as it is\n'
  assert not (tmp_path / 'checkpoints' / '4' / fingerprint.NAME).exists(), 'sealed though nobody knows what it was'


def test_empty_steps_are_none(workdir):
  """What a killed deletion or a copy leaves; orbax takes it for the newest."""
  empty = workdir / 'checkpoints' / '30'
  (empty / 'params').mkdir(parents=True)
  reader = Checkpoints(workdir)
  assert (reader.latest, steps_by_name(workdir)) == (8, [4, 8])
  reader.close()
  assert empty.exists()
  writer = Checkpoints(workdir, keep=2)
  writer.save(12, plus(STATE, 12))
  writer.close()
  assert steps_by_name(workdir) == [8, 12] and not empty.exists()


def test_no_room_for_one_checkpoint_is_said_before_training(workdir, monkeypatch):
  checkpoints = Checkpoints(workdir, keep=3)
  monkeypatch.setattr(shutil, 'disk_usage', lambda _: shutil._ntuple_diskusage(10**9, 10**9, 24_000))
  with pytest.raises(SpecError, match=r'run: 0\.0229 MiB are free, a checkpoint needs 0\.0235 MiB$'):
    checkpoints.check_space(shapes())
  monkeypatch.undo()
  checkpoints.check_space(shapes())

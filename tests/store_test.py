"""The store: what is put is read back, once, by anyone, whatever was killed or damaged in between."""

import dataclasses
import functools
import inspect
import json
import os
import random
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.schema import Config
from evaluation import store
from evaluation.store import Key, Place, Store, checkpoint_hash, remembered
from models.lm import ModelConfig, abstract

KEY = Key('c' * 64, 'heads 2', 'rope', 'p' * 16, 't' * 64, 'window', 'float32', 32)


@pytest.fixture
def shelf(tmp_path):
  return Store(tmp_path, warn=pytest.fail).open(KEY)


def again(shelf, warn=pytest.fail):
  """As another process, or a later one, finds it."""
  return store.Shelf(shelf.directory, shelf.key, warn)


def rows(places, scored=8):
  """A window's numbers, known from its place."""
  return [np.float32(np.arange(scored) + 1000 * len(place.document) + place.start / 7) for place in places]


def places(n, first=0):
  return [Place('d' * (1 + i % 3), 10 * i) for i in range(first, first + n)]


def equal(shelf, asked, scored=8):
  assert all(shelf.has(place, scored) for place in asked)
  np.testing.assert_array_equal([shelf.row(place, scored) for place in asked], rows(asked, scored))


def files(shelf):
  return sorted(shelf.directory.glob('*.npz'))


def test_what_is_put_is_read_back_to_the_bit(shelf):
  assert not shelf.directory.exists() and not shelf.has(Place('d', 0), 1)
  shelf.put(places(4), rows(places(4)))
  shelf.put(places(3, 4), rows(places(3, 4)), seconds=2.8)
  for seen in (shelf, again(shelf)):
    equal(seen, places(7))
    assert len(seen) == 7 and not seen.has(Place('d', 70), 1)
    assert seen.row(Place('d', 0), 8).dtype == np.float32
    assert seen.seconds == pytest.approx(0.4)


def test_numbers_that_are_none_are_kept(shelf):
  shelf.put([Place('d', 0)], [np.float32([np.nan, np.inf, -np.inf, 800.0, 1e-30])])
  np.testing.assert_array_equal(again(shelf).row(Place('d', 0), 5), np.float32([np.nan, np.inf, -np.inf, 800.0, 1e-30]))


def test_a_row_serves_whoever_asks_for_less_of_it(shelf):
  """Protocols keep different ends of one window; the longest end is all of them."""
  whole = np.float32(np.arange(32))
  shelf.put([Place('d', 0)], [whole[-8:]])
  assert shelf.has(Place('d', 0), 3) and not shelf.has(Place('d', 0), 9)
  shelf.put([Place('d', 0)], [whole])
  shelf.put([Place('d', 0)], [whole[-16:]])  # which takes nothing away
  for seen in (shelf, again(shelf)):
    np.testing.assert_array_equal(seen.row(Place('d', 0), 32), whole)
    np.testing.assert_array_equal(seen.row(Place('d', 0), 5), whole[-5:])
    assert len(seen) == 1


@pytest.mark.parametrize('field', [f.name for f in dataclasses.fields(Key)])
def test_every_field_of_the_key_is_in_the_address(field, tmp_path):
  other = dataclasses.replace(KEY, **{field: 64 if field == 'length' else 'other'})
  assert other.address != KEY.address == dataclasses.replace(KEY).address
  held = Store(tmp_path)
  held.open(KEY).put([Place('d', 0)], [np.zeros(3)])
  assert not held.open(other).has(Place('d', 0), 1)
  held.open(other).put([Place('d', 0)], [np.ones(3)])
  assert held.open(KEY).row(Place('d', 0), 3).sum() == 0
  assert sorted(held.keys(), key=str) == sorted([KEY, other], key=str)


def test_the_address_stays_what_it_was():
  """Golden: with another one every store there is would be computed again."""
  assert KEY.address == 'b373e6e37edda2a23d91c2e8fee57338'


OTHER = {
  'layers': 4, 'd_model': 64, 'heads': 4, 'kv_heads': 1, 'head_dim': 8, 'd_mlp': 48, 'vocab': 9, 'tied': False,
  'norm': 'layer', 'norm_eps': 1e-5, 'activation': 'geglu', 'biases': ('qkv',), 'qk_norm': True, 'post_norm': True,
  'parallel': True, 'embedding_scale': 2.0, 'embedding_norm': True, 'dtype': 'bfloat16',
}  # fmt: skip
NO_MATTER = {'dropout', 'remat', 'tile', 'loss_chunk'}  # of training, or of speed and memory


def test_every_field_of_a_model_is_in_its_parameters_or_in_the_key():
  """Two models of the same numbers that compute otherwise, such as an exact and an approximate GELU, share no row."""
  assert OTHER.keys() | NO_MATTER == {field.name for field in dataclasses.fields(ModelConfig)}

  def told(**fields):
    config = dataclasses.replace(Config(), model=ModelConfig(**{'layers': 2, 'd_model': 32, 'heads': 2, **fields}))
    tree = jax.tree_util.tree_leaves_with_path(abstract(functools.partial(config.build_model, 7))[1])
    data = types.SimpleNamespace(tokens_sha256='t')
    return [(path, leaf.shape) for path, leaf in tree], Key.of(config, data, 'c', 'p', 32)

  plain = told()
  for field, value in OTHER.items():
    assert told(**{field: value}) != plain, field
  assert json.loads(plain[1].model) == {'heads': 2, 'kv': 2, 'width': 16, 'tied': True, 'train_len': 512}


def test_the_same_windows_are_one_file(shelf):
  other = again(shelf)  # opened before anything was there
  shelf.put(places(4), rows(places(4)))
  before = files(shelf)[0].read_bytes()
  other.put(places(4), rows(places(4)))
  assert len(files(shelf)) == 1 and files(shelf)[0].read_bytes() == before
  equal(again(shelf), places(4))


def test_others_windows_are_seen(shelf):
  other = again(shelf)
  shelf.put(places(2), rows(places(2)))
  assert not len(other)
  other.refresh()
  equal(other, places(2))


# Damage.


def damaged(shelf, path, content):
  """(lines of warning, what is left) after the file has become this."""
  said = []
  path.write_bytes(content)
  return said, again(shelf, said.append)


@pytest.mark.parametrize('n', [150, pytest.param(1000, marks=pytest.mark.faults)])
def test_flips_and_truncations_are_seen_and_never_used(shelf, n):
  """Every byte of a file, the archive's own too."""
  shelf.put(places(4), rows(places(4)))
  shelf.put(places(4, 4), rows(places(4, 4)))
  path, other = files(shelf)
  sound, seed = path.read_bytes(), int(os.environ.get('FAULTS_SEED', time.time()))
  print(f'FAULTS_SEED={seed}')
  rng = random.Random(seed)
  names = {p for p in places(8) if store.Shelf(shelf.directory, KEY).has(p, 8)}
  path.write_bytes(b'')
  mine = names - set(again(shelf, [].append)._rows)
  for i in range(n):
    at, bit = rng.randrange(len(sound)), 1 << rng.randrange(8)
    content = sound[:at] if i % 3 == 2 else sound[:at] + bytes([sound[at] ^ bit]) + sound[at + 1 :]
    said, left = damaged(shelf, path, content)
    equal(left, names - mine)
    assert len(said) == 1 and str(path) in said[0] and 'damaged' in said[0], (seed, at, bit)
    assert not any(left.has(place, 1) for place in mine)


def test_an_archive_that_seems_to_be_encrypted_is_damaged(shelf):
  """One bit, for which zipfile has a RuntimeError of its own; 7 of 16776 in a file of 2 kB."""
  shelf.put(places(4), rows(places(4)))
  (path,) = files(shelf)
  content = bytearray(path.read_bytes())
  content[content.index(b'PK\x01\x02') + 8] ^= 1
  said, left = damaged(shelf, path, bytes(content))
  assert len(said) == 1 and 'damaged' in said[0] and not len(left)


def test_a_file_from_before_there_was_a_checksum_of_all_of_it_is_read(shelf):
  shelf.put(places(4), rows(places(4)))
  (path,) = files(shelf)
  with np.load(path) as file:
    arrays = {name: file[name] for name in file.files if name != 'sealed'}
  np.savez(path, **arrays)
  equal(again(shelf), places(4))


@pytest.mark.parametrize('content', [b'', b'PK', b'x' * 500, None, 0.5, 0.99])
def test_a_file_that_is_no_file_of_ours_is_left_out(shelf, content):
  shelf.put(places(4), rows(places(4)))
  (path,) = files(shelf)
  sound = path.read_bytes()
  if not isinstance(content, bytes):
    content = sound + b'tail' * 30000 if content is None else sound[: int(content * len(sound))]
  said, left = damaged(shelf, path, content)
  assert len(said) == 1 and str(path) in said[0] and not len(left)
  left.put(places(4), rows(places(4)))  # computed again
  assert path.read_bytes() == sound
  equal(again(shelf), places(4))


def test_an_array_of_objects_is_not_unpickled(shelf, tmp_path):
  shelf.put(places(1), rows(places(1)))
  np.savez(files(shelf)[0], document=np.array([print], object))
  said, left = [], None
  left = again(shelf, said.append)
  assert len(said) == 1 and not len(left)


def test_numbers_under_a_wrong_checksum_are_not_believed(shelf):
  shelf.put(places(4), rows(places(4)))
  with np.load(files(shelf)[0]) as file:
    arrays = dict(file)
  arrays['nll'][0] += 1
  np.savez(files(shelf)[0], **arrays)
  said = []
  assert not len(again(shelf, said.append))
  assert 'checksum' in said[0]


def test_compacting_removes_the_damaged(shelf):
  for i in range(3):
    shelf.put(places(2, 2 * i), rows(places(2, 2 * i)))
  files(shelf)[1].write_bytes(b'')
  said = []
  left = again(shelf, said.append)
  left.put(places(6), rows(places(6)))
  left.compact()
  assert len(files(shelf)) == 1
  equal(again(shelf), places(6))


@pytest.mark.parametrize('step', ['fsync', 'replace'])
def test_a_failed_write_leaves_nothing(shelf, step, monkeypatch):
  shelf.put(places(2), rows(places(2)))

  def fail(*args):
    raise OSError(28, 'No space left on device')

  monkeypatch.setattr(os, step, fail)
  with pytest.raises(OSError, match='No space'):
    shelf.put(places(2, 2), rows(places(2, 2)))
  monkeypatch.undo()
  assert sorted(p.suffix for p in shelf.directory.iterdir()) == ['.json', '.npz']
  assert not shelf.has(places(2, 2)[0], 1)


# Compacting.


def test_compacting_changes_no_number(shelf):
  for i in range(20):
    shelf.put(places(3, 3 * i), rows(places(3, 3 * i)), seconds=0.6)
  shelf.put(places(1), rows(places(1), 4))
  shelf.compact()
  assert len(files(shelf)) == 1
  for seen in (shelf, again(shelf)):
    equal(seen, places(60))
    assert seen.seconds == pytest.approx(0.2)
  before = files(shelf)[0].stat().st_mtime_ns
  again(shelf).compact()  # nothing to do
  assert files(shelf)[0].stat().st_mtime_ns == before
  shelf.put(places(1, 60), rows(places(1, 60)))
  equal(again(shelf), places(61))


def test_compacting_keeps_what_it_has_not_read(shelf):
  shelf.put(places(2), rows(places(2)))
  shelf.put(places(2, 2), rows(places(2, 2)))
  again(shelf).put(places(2, 4), rows(places(2, 4)))
  shelf.compact()
  assert len(files(shelf)) == 2
  equal(again(shelf), places(6))


def test_a_reader_survives_a_merge_between_listing_and_reading(shelf, monkeypatch):
  for i in range(3):
    shelf.put(places(2, 2 * i), rows(places(2, 2 * i)))
  load = store._load

  def merged_first(path):
    monkeypatch.setattr(store, '_load', load)
    shelf.compact()
    return load(path)

  monkeypatch.setattr(store, '_load', merged_first)
  equal(again(shelf), places(6))


def test_old_temporary_files_are_swept_and_young_ones_left(shelf):
  shelf.put(places(2), rows(places(2)))
  shelf.put(places(2, 2), rows(places(2, 2)))
  old, young = shelf.directory / '.a.tmp', shelf.directory / '.b.tmp'
  for path in (old, young):
    path.touch()
  os.utime(old, (time.time() - 2 * store.STALE,) * 2)
  again(shelf).compact()
  assert young.exists() and not old.exists()


# Processes.

WRITER = f"""
import sys
import numpy as np
from evaluation.store import Key, Place, Store
{inspect.getsource(rows)}
{inspect.getsource(places)}
shelf = Store(sys.argv[1]).open({KEY!r})
print('ready', flush=True)
first, last, step = map(int, sys.argv[2:])
for i in range(first, last, step):
  shelf.refresh()
  if not all(shelf.has(place, 8) for place in places(3, 3 * i)):
    shelf.put(places(3, 3 * i), rows(places(3, 3 * i)), seconds=1.0)
  if i % 7 == 0:
    shelf.compact()
"""


def writer(root, directory, *numbers):
  env = {**os.environ, 'PYTHONPATH': str(root)}
  command = [sys.executable, '-c', WRITER, str(directory), *map(str, numbers)]
  process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
  assert process.stdout.readline() == 'ready\n'
  return process


@pytest.mark.parametrize('kills', [pytest.param(3), pytest.param(20, marks=pytest.mark.faults)])
def test_a_killed_writer_leaves_whole_files_and_goes_on(root, tmp_path, kills):
  rng = random.Random(time.time())
  for _ in range(kills):
    process = writer(root, tmp_path, 0, 10**6, 1)
    time.sleep(rng.random() / 3)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    held = Store(tmp_path, warn=pytest.fail).open(KEY)
    equal(held, places(len(held)))
  assert len(held) > 3


def test_two_writers_share_a_store(root, tmp_path):
  """Both merge while the other writes; in the end every window is there, and right."""
  both = [writer(root, tmp_path, 0, 60, 1), writer(root, tmp_path, 59, -1, -1)]
  for process in both:
    assert process.wait(60) == 0
    process.stdout.close()
  held = Store(tmp_path, warn=pytest.fail).open(KEY)
  assert len(held) == 180
  equal(held, places(180))
  held.compact()
  assert len(files(held)) == 1


# What names a checkpoint.


def test_checkpoint_hash_is_of_what_is_computed_with():
  params = {'a': {'w': jnp.arange(6.0).reshape(2, 3)}, 'b': jnp.zeros(3)}
  base = checkpoint_hash(params)
  assert checkpoint_hash({'b': np.zeros(3, np.float32), 'a': params['a']}) == base
  others = [
    checkpoint_hash({**params, 'b': jnp.zeros(3).at[2].set(1e-7)}),
    checkpoint_hash({**params, 'b': jnp.zeros((3, 1))}),
    checkpoint_hash({**params, 'b': jnp.zeros(3, jnp.int32)}),
    checkpoint_hash({'a': params['a'], 'c': params['b']}),
    checkpoint_hash({**params, 'a': {'w': params['a']['w'].T.reshape(2, 3)}}),
  ]
  assert len({base, *others}) == 1 + len(others)


def test_a_hash_is_remembered_until_the_files_change(tmp_path):
  source, calls = tmp_path / '20', []
  (source / 'params').mkdir(parents=True)
  (source / 'params' / 'data').write_bytes(b'one')

  def compute():
    calls.append(1)
    return f'hash {len(calls)}'

  kept = tmp_path / 'kept.json'
  assert [remembered(kept, source, compute) for _ in range(3)] == ['hash 1'] * 3
  (source / 'params' / 'data').write_bytes(b'more')
  assert [remembered(kept, source, compute) for _ in range(2)] == ['hash 2'] * 2
  other = tmp_path / '40'
  other.mkdir()
  assert remembered(kept, other, compute) == 'hash 3' and remembered(kept, source, compute) == 'hash 2'
  kept.write_text('{broken')
  assert remembered(kept, source, compute) == 'hash 4'

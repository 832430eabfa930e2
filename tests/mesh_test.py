"""Meshes of 8 devices against one device: losses, updates, evaluation, checkpoints, memory."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import posenc
from attention_test import DIMS, N, shipped
from configs.schema import Config
from evaluation.score import Scorer
from forms import SPEC
from models.attention import attend
from models.lm import LM, ModelConfig, abstract
from models.ring import Ring, place
from models.tiles import Masks, Where, _walk
from posenc import SCHEMES, Far
from score_test import VOCAB, make_plan
from spec import SpecError
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, split_tokens, spread, whole, whole_shares
from training.step import make_train_step, make_validate

BATCH, TRAIN_LEN, EVAL_LEN = 8, 80, 128
MESHES = ((8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2))
SLOW = pytest.mark.slow

# ---- what a child process with 8 devices computes: {case: largest difference from one device, by quantity}


class Run:
  """A model that trains and evaluates on `mesh`. Tiles and chunks fit no device's part of the sequence."""

  def __init__(self, scheme, mesh, train_len=TRAIN_LEN, **model):
    cfg = ModelConfig(d_model=32, heads=4, kv_heads=2, **{'layers': 1, 'tile': 3, 'loss_chunk': 7, **model})
    make = lambda: LM(cfg, (scheme,), vocab_size=VOCAB, train_len=train_len, rngs=nnx.Rngs(0))  # noqa: E731
    self.mesh, self.train_len = mesh, train_len
    self.graphdef, _ = abstract(make)
    shapes = {'heads': cfg.heads, 'head_dim': cfg.width, 'd_model': cfg.d_model, 'train_len': train_len}
    self.slots = [posenc.build(scheme, **shapes, rngs=nnx.Rngs(0))]
    # Adam's own eps would make a step of the rounding of a gradient that is nearly 0.
    tx = optax.adam(1e-3, eps=1e-3)

    def init():
      params = nnx.to_pure_dict(nnx.state(make()))
      return {'params': params, 'opt': tx.init(params)}

    self.abstract = as_abstract(jax.eval_shape(init), spread(mesh, jax.eval_shape(init)))
    self.init = jax.jit(init, out_shardings=spread(mesh, jax.eval_shape(init)))
    pos = jax.device_put(self.positions(train_len), whole(mesh))
    self.step = make_train_step(self.graphdef, tx, pos, 0 if cfg.dropout else None, mesh)

  def positions(self, length):
    return posenc.positions('none', self.slots, self.train_len, length)

  def train(self, steps=3):
    rng, state, losses = np.random.default_rng(0), self.init(), []
    for n in range(steps):
      tokens = rng.integers(0, 256, (1, BATCH, self.train_len + 1), dtype=np.int32)
      batch = [jax.device_put(a, split_tokens(self.mesh, axis=1)) for a in (tokens[..., :-1], tokens[..., 1:])]
      state, metrics = self.step(state, *batch, n)
      losses.append(float(metrics['loss']))
    assert self.step._cache_size() == 1, 'the state came back from a step lying elsewhere'
    return losses, state

  def evaluate(self, params):
    plan = make_plan()
    score = Scorer(self.graphdef, params, self.mesh, 8 * EVAL_LEN)
    (rows,) = score(plan, plan.windows('non_overlapping', EVAL_LEN), [self.positions(EVAL_LEN)])
    return np.stack(rows)


def difference(got, want, relative=False):
  """The largest of all arrays; relative to the largest number of each, and to 1 or more unless that is asked for."""

  def of(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30 if relative else 1.0))

  return max(map(of, jax.tree.leaves(got), jax.tree.leaves(want)))


def trained(scheme, meshes, **model):
  """Three updates and a sweep's windows, on each mesh and on one device."""
  out, one = {}, Run(scheme, make_mesh(1), **model)
  losses, state = one.train()
  nll = one.evaluate(state['params'])
  first = one.init()['params']
  for shape in meshes:
    many = Run(scheme, make_mesh(BATCH, shape), **model)
    their_losses, theirs = many.train()
    out[f'{scheme} {shape}'] = {
      'loss': difference(their_losses, losses),
      'params': difference(theirs['params'], state['params']),
      'moved': difference(first, state['params']),
      'moments': difference(theirs['opt'], state['opt'], relative=True),  # Adam's step hides a gradient's scale
      'nll': difference(many.evaluate(theirs['params']), nll),
      'spread': max(len({str(s.index) for s in a.addressable_shards}) for a in jax.tree.leaves(theirs)),
    }
  return out


def attended(form, shape, length, tile, method='none'):
  """Values and gradients of `attend` by q, k, v, what the scheme's numbers per token are computed from, parameters."""
  scheme = shipped(form)
  pos = posenc.positions('none', scheme, DIMS.train_len, length)
  if method == 'window':
    pos = pos.replace(window_T=jnp.full(length, 9.0), sinks=jnp.float32(3))
  elif method == 'far':
    pos = pos.replace(far=Far(jnp.full(length, 6.0), jnp.zeros(length), jnp.float32(6)))
  graphdef, params = nnx.split(scheme)
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = [(BATCH, length, heads, DIMS.head_dim) for heads in (N, 2, 2, N)] + [(BATCH, length, DIMS.d_model)]
  q, k, v, do, x = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes))

  def run(mesh):
    def loss(q, k, v, x, params):
      scheme = nnx.merge(graphdef, params)
      o = attend(q, k, v, scheme, pos, scheme.token_state(x, pos), tile=tile, mesh=mesh)
      return (o * do).sum(), o

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True))(q, k, v, x, params)

  return {'attend': difference(run(make_mesh(BATCH, shape)), run(None))}


def temporary_bytes(scheme, shape, length=32768):
  """Per device, of one update. Compiled, not run."""
  run = Run(scheme, make_mesh(1, shape), length, tile=256, loss_chunk=128)
  tokens = jax.ShapeDtypeStruct((1, 1, length), jnp.int32, sharding=split_tokens(run.mesh, axis=1))
  return run.step.lower(run.abstract, tokens, tokens, 0).compile().memory_analysis().temp_size_in_bytes


def checkpoints_there_and_back(theirs, ours):
  """Saves a state spread over 8 devices, with its bytes beside it, and restores one that was saved on one device."""
  run = Run('rope', make_mesh(BATCH, (2, 2, 2)))
  state = run.init()
  checkpoints = Checkpoints(theirs, keep=1)
  checkpoints.save(1, state)
  checkpoints.close()
  run = Run('rope', make_mesh(BATCH, (1, 8, 1)))
  checkpoints = Checkpoints(ours)
  restored = checkpoints.restore(1, run.abstract)
  checkpoints.close()
  kernel = restored['opt'][0].mu['slots'][0]['mlp']['up']['kernel']
  return {
    'restored': difference(restored, jax.tree.map(lambda a: np.asarray(a) + 1, state)),
    'share': kernel.addressable_shards[0].data.size / kernel.size,
  }


def odd_validation():
  """3 windows on 8 devices: the mean of three."""
  rng = np.random.default_rng(0)
  batch = [rng.integers(0, 256, (3, TRAIN_LEN), dtype=np.int32) for _ in range(2)]

  def validated(run):
    size = whole_shares(run.mesh, 3)
    arrays = place(split_tokens(run.mesh), (size, TRAIN_LEN), lambda rows: [a[rows % 3] for a in batch])
    return make_validate(run.graphdef, run.mesh)(run.init()['params'], *arrays, run.positions(TRAIN_LEN), 3)

  runs = [Run('rope', mesh) for mesh in (make_mesh(1), make_mesh(BATCH, (4, 2, 1)))]
  a, b = map(validated, runs)
  return {'validation': difference(a, b)}


def main():
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  for call in sys.argv[1:]:
    print(json.dumps({call: eval(call)}), flush=True)


# ---- the same seen from here


def child(root, *calls):
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8', 'PYTHONPATH': f'{root}:{root / "tests"}'}
  env.setdefault('JAX_COMPILATION_CACHE_DIR', str(jax.config.jax_compilation_cache_dir))
  command = [sys.executable, '-c', 'import mesh_test; mesh_test.main()', *calls]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert 'Involuntary full rematerialization' not in done.stderr
  return {call: out for line in done.stdout.splitlines() for call, out in json.loads(line).items()}


def assert_trained(cases):
  for case, got in cases.items():
    assert max(got[name] for name in ('loss', 'params', 'nll')) < 1e-5, (case, got)
    assert got['moments'] < 1e-4 and got['moved'] > 5e-4, (case, got)
    assert (got['spread'] > 1) == (', 8, ' in case or ', 2, ' in case), case


@pytest.fixture(scope='module')
def small(root, tmp_path_factory):
  """A state saved here, and what eight devices make of it and of some small cases."""
  theirs, ours = (tmp_path_factory.mktemp(name) for name in ('theirs', 'ours'))
  state = Run('rope', make_mesh(1)).init()
  checkpoints = Checkpoints(ours, keep=1)
  checkpoints.save(1, jax.tree.map(lambda a: a + 1, state))
  checkpoints.close()
  calls = {
    'trained': 'trained("fox", [(2, 2, 2)])',
    'ring': 'attended("cope(npos_max=6)", (1, 1, 8), 80, 4, "window")',
    'heads': 'attended("fire", (2, 2, 2), 78, 4, "window")',
    'checkpoints': f'checkpoints_there_and_back({str(theirs)!r}, {str(ours)!r})',
  }
  out = child(root, *calls.values())
  return {name: out[call] for name, call in calls.items()} | {'theirs': theirs, 'state': state}


def test_updates_and_evaluation_are_those_of_one_device(small):
  assert_trained(small['trained'])


def test_attention_in_a_ring_is_attention(small):
  """Values and gradients by q, k, v and parameters, with a carry, a window, sinks and padded blocks."""
  assert small['ring']['attend'] < 1e-5


def test_attention_by_heads_is_attention(small):
  """The same where two devices share the heads, with parameters that all heads share, of half a batch's sum each."""
  assert small['heads']['attend'] < 1e-5


def test_eight_devices_to_one_and_back(small):
  """Spread over fsdp, moments included; restored whole here, and there from one device onto another mesh."""
  assert small['checkpoints'] == {'restored': 0.0, 'share': 1 / 8}
  checkpoints = Checkpoints(small['theirs'])
  run = Run('rope', make_mesh(1))
  restored = checkpoints.restore(1, run.abstract)
  checkpoints.close()
  assert difference(restored, small['state']) < 1e-6


@SLOW
@pytest.mark.parametrize('scheme', ['rope', 'alibi', 't5', 'cope', 'fox', 'kerple_log', 'shaw(clip=9)', 'sinusoidal'])
def test_every_mesh_trains_and_evaluates_like_one_device(root, scheme):
  (cases,) = child(root, f'trained({scheme!r}, MESHES)').values()
  assert len(cases) == 4
  assert_trained(cases)


@SLOW
def test_remat_and_dropout_on_a_mesh(root):
  call = 'trained("cope", [(2, 2, 2)], remat=True, dropout=0.1, layers=4)'
  assert_trained(child(root, call)[call])


@SLOW
def test_every_scheme_by_heads(root):
  """Two key heads on two devices, four shares of the batch; tokens that no tile divides, second position maps."""
  forms = [SPEC.get(name, name) for name in SCHEMES if name != 'learned']
  calls = [f'attended({form!r}, (2, 2, 2), 70, 4)' for form in forms]
  calls += [f'attended({form!r}, (4, 1, 2), 70, 4, "far")' for form in ('rope', 'shaw(clip=9)', 'alibi')]
  for call, got in child(root, *calls).items():
    assert got['attend'] < 2e-5, call


@SLOW
def test_every_scheme_in_a_ring(root):
  """Zigzag where nothing runs along the row, odd blocks in contiguous order, second position maps."""
  forms = [SPEC.get(name, name) for name in SCHEMES if name != 'learned']
  calls = [f'attended({form!r}, (1, 2, 4), 72, 4)' for form in [*forms, 'xpos(bca=True)', 'rope(ssmax=True)']]
  calls += [f'attended({form!r}, (1, 1, 8), 72, 4, "far")' for form in ('rope', 'shaw(clip=9)', 'alibi')]
  calls += [f'attended({form!r}, (1, 1, 8), 96, 5, "window")' for form in ('rope', 'cope(npos_max=6)', 'shaw(clip=9)')]
  for call, got in child(root, *calls).items():
    assert got['attend'] < 2e-5, call


@SLOW
def test_validation_of_any_number_of_windows(root):
  assert child(root, 'odd_validation()')['odd_validation()']['validation'] < 1e-6


@SLOW
@pytest.mark.parametrize('scheme', ['rope', 'fox', 'cope'])
def test_memory_of_a_device_falls_with_the_context_axis(root, scheme):
  one, eight = child(root, *(f'temporary_bytes({scheme!r}, {shape})' for shape in ((1, 1, 1), (1, 1, 8)))).values()
  assert one > 5 * eight


@SLOW
def test_programs_on_a_mesh(root, tmp_path):
  """Trained on 8 devices, swept on 8 others and on one: one curve. Another mesh is no other config."""
  env = {**os.environ, 'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': '8'}

  def run(*command):
    done = subprocess.run([sys.executable, *command], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout

  def curve():
    lines = (tmp_path / 'run' / 'extrapolation' / 'curve.jsonl').read_text().splitlines()
    return [[p['method'], p['length'], p['protocol']] for p in map(json.loads, lines)], [
      json.loads(line)['nll'] for line in lines
    ]

  train = ('train.py', '--config=configs/smoke.py:alibi', f'--workdir={tmp_path / "run"}')
  assert 'data 2 x fsdp 2 x context 2' in run(*train, '--config.mesh=(2, 2, 2)')
  assert 'nothing to do' in run(*train, '--config.mesh=(0, 1, 4)')
  sweep = ('eval_extrapolation.py', f'--workdir={tmp_path / "run"}', '--method=none')
  run(*sweep)
  points, nll = curve()
  for mesh in ('1,1,8', '1,1,1'):
    run(*sweep, f'--mesh={mesh}')
    again, theirs = curve()
    assert again == points
    np.testing.assert_allclose(theirs, nll, atol=1e-5)


# ---- without other devices


@pytest.mark.parametrize('n', [2, 4])
def test_zigzag_makes_the_same_work_for_everyone(n):
  """Tiles that a device visits, per step of the ring: equal on all devices, and half of what contiguous blocks need."""
  tile, chunk = 4, 8
  masks = Masks(jnp.float32(0), None)

  def visited(device_q, device_k, size, held):
    count = 0
    for q in held(device_q):
      for t in range(0, size, tile):
        token_t = q * size + t + jnp.arange(tile)
        at_t = Where(token_t, token_t.astype(jnp.float32), None, jnp.full(tile, jnp.inf))
        count += sum(int(_walk(at_t, jnp.int32(k * size), masks, tile, size // tile).count) for k in held(device_k))
    return count

  def steps(size, held):
    return np.array([[visited(i, (i - r) % n, size, held) for i in range(n)] for r in range(n)])

  zigzag = steps(chunk, lambda i: (i, 2 * n - 1 - i))
  contiguous = steps(2 * chunk, lambda i: (i,))
  assert (zigzag == zigzag[:, :1]).all()
  assert zigzag.sum() == contiguous.sum()  # both visit each causal tile once
  assert (contiguous[1:].max(1) == 2 * zigzag[1:, 0]).all()
  ring = Ring.__new__(Ring)
  object.__setattr__(ring, 'mesh', jax.sharding.AbstractMesh((n,), ('context',)))
  assert [ring._home(block) for block in range(2 * n)] == [*range(n), *range(n)[::-1]]


@pytest.mark.parametrize('mesh, message', [
  ((2, 2), r'mesh = \(2, 2\): three whole numbers \(data, fsdp, context\) of at least 1 are allowed, data also 0'),
  ((1, 0, 1), r'mesh = \(1, 0, 1\): three whole numbers'),
  ((-1, 1, 1), r'mesh = \(-1, 1, 1\): three whole numbers'),
  ((2, 4, 1), r'mesh = \(2, 4, 1\): a data x fsdp that divides batch = 4 is allowed'),
  ((0, 3, 1), r'mesh = \(0, 3, 1\): a data x fsdp that divides batch = 4 is allowed'),
  ((1, 1, 3), r'mesh = \(1, 1, 3\): a context that divides train_len = 64 is allowed'),
  ((1, 1, 32), r'mesh = \(1, 1, 32\): a context that divides the 16 tokens of eval.multiples: 0.25 is allowed'),
])  # fmt: skip
def test_a_mesh_that_does_not_fit_the_config(mesh, message):
  with pytest.raises(SpecError, match=f'^config.{message}') as error:
    Config.from_dict(dataclasses.asdict(Config()) | {'batch': 4, 'train_len': 64, 'mesh': mesh})
  assert '\n' not in str(error.value)


def test_a_mesh_that_does_not_fit_the_devices():
  with pytest.raises(SpecError, match=r'^config.mesh = \(0, 2, 4\): at most the 1 devices at hand .*, not 8$'):
    make_mesh(8, (0, 2, 4))
  assert dict(make_mesh(7).shape) == {'data': 1, 'fsdp': 1, 'context': 1}

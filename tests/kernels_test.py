"""The fused branches of `attend`: which calls they serve, values and gradients against tiles, and the calls' own form.

No accelerator is needed: columns are fed to a dense attention, splash runs interpreted, and programs for NVIDIA and TPU
are lowered here, though not compiled. What cuDNN and splash compute on their chips is not tested here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo

import posenc
from forms import FORMS, METHODS, jit
from models import attention, kernels
from models.attention import attend
from models.kernels import Fused, choose, pairs, terms
from models.lm import LM, ModelConfig
from models.ring import Ring
from posenc import ALiBi, PositionScheme
from posenc.fox import FoX
from training.devices import make_mesh

B, T, K, H = 2, 300, 2, 16
BF16, F32 = jnp.bfloat16, jnp.float32


class Device:
  def __init__(self, platform='gpu', compute_capability='9.0'):
    self.platform, self.compute_capability = platform, compute_capability


def dense(q, k, v, *, window=None):
  """Any width of v, any dtype: what a fused kernel computes, written out by jax."""
  q, k, v_wide = kernels._as_wide((q, k, v), 1)
  local = None if window is None else (window - 1, 0)
  o = jax.nn.dot_product_attention(q, k, v_wide, scale=1.0, is_causal=True, local_window_size=local)
  return o[..., : v.shape[-1]]


def build(form, heads=4, train_len=T):
  return posenc.build(form, heads=heads, head_dim=H, d_model=32, train_len=train_len, rngs=nnx.Rngs(0))


def arrays(heads=4, kv=K, length=T, dtype=F32):
  keys = jax.random.split(jax.random.key(0), 5)
  shapes = [(B, length, n, H) for n in (heads, kv, kv, heads)] + [(B, length, 32)]
  return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes)]


def run(scheme, pos, heads=4, dtype=F32, backward=True, **kwargs):
  """Values, and with `backward` gradients by q, k, v, the layer's input through `token_state` and the parameters; of
  bfloat16 inputs, computed in `dtype`."""
  q, k, v, do, x = (a.astype(dtype) for a in arrays(heads, length=pos.at_T.shape[0], dtype=BF16))
  graphdef, params = nnx.split(scheme)

  def attention(q, k, v, x, params):
    scheme = nnx.merge(graphdef, params)
    return attend(q, k, v, scheme, pos, scheme.token_state(x, pos), tile=128, **kwargs)

  def loss(*arguments):
    o = attention(*arguments)
    return (o.astype(F32) * do).sum(), o

  f = jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True) if backward else attention)
  return jax.tree.map(lambda a: np.asarray(a, np.float64), f(q, k, v, x.astype(F32), params))


def apart(got, want):
  """The largest difference of each array, relative to its largest number."""
  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return [np.abs(a - b).max() / max(np.abs(b).max(), 1e-6) for a, b in leaves]


@pytest.fixture
def on_gpu(monkeypatch):
  """`attend` takes this machine for an NVIDIA GPU, whose kernel is `dense`. Returns the windows it was asked for."""
  asked = []

  def cudnn(q, k, v, window):
    asked.append(window)
    return dense(q, k, v, window=window)

  monkeypatch.setattr(kernels, '_device', lambda mesh: Device())
  monkeypatch.setattr(kernels, 'cudnn', cudnn)
  return asked


# ---- columns


@pytest.mark.parametrize('dtype', [F32, BF16])
def test_terms_sum_to_the_number(dtype):
  x = (np.random.default_rng(0).uniform(-1, 1, 1000) * 2.0 ** np.arange(1000) ** 0.4).astype(np.float32)
  for found in (terms(x, dtype), jax.jit(functools.partial(terms, dtype=dtype))(x)):
    assert len(found) == {F32: 1, BF16: 3}[dtype]
    for part in found:
      np.testing.assert_array_equal(part, jnp.asarray(part, dtype).astype(F32))
    np.testing.assert_array_equal(sum(np.asarray(part, np.float64) for part in reversed(found)), x)
  assert len(terms(np.float32([0.5, 0.125]), dtype)) == 1
  # What XLA may drop on an accelerator, though not on a CPU.
  assert 'convert' not in str(jax.make_jaxpr(functools.partial(terms, dtype=dtype))(x))


def declaring():
  return [form for form in FORMS if kernels._owner(build(form), 'columns') is not PositionScheme]


def test_who_declares_columns():
  assert declaring() == ['alibi', 'fox', 'fox(rope=True)']


@pytest.mark.parametrize('form', declaring())
@pytest.mark.parametrize('dtype', [F32, BF16])
def test_columns_are_the_score(form, dtype):
  """As sums of products of numbers of that dtype, up to a number per query: at every distance up to 5000 tokens."""
  length, heads = 5000, 6
  scheme = build(form, heads, train_len=64)
  pos = posenc.positions('none', scheme, 64, length)
  state = scheme.token_state(jax.random.normal(jax.random.key(0), (1, length, 32)), pos)
  at = np.arange(0, length, 37)
  pick = lambda tree: jax.tree.map(lambda a: a[:, at], tree)  # noqa: E731
  zeros_BNts = jnp.zeros((1, heads, len(at), len(at)))
  q_BtNR = jnp.zeros((1, len(at), heads, H))
  want, _ = scheme.score(zeros_BNts, q_BtNR, q_BtNR, pos.at_T[at], pos.at_T[at], pick(state), pick(state), ())
  got = 0.0
  for a, b in pairs(scheme.columns(pos.at_T, state), dtype):
    a, b = (np.broadcast_to(np.asarray(x, np.float64), (1, length, heads, 1))[0, at, :, 0].T for x in (a, b))
    for x in (a, b):
      np.testing.assert_array_equal(x, jnp.asarray(x, dtype).astype(F32))
    got = got + a[:, :, None] * b[:, None, :]
  want = np.asarray(want[0], np.float64)
  causal = np.tril(np.ones((len(at), len(at)), bool))
  off = np.where(causal, got - want, np.nan)
  assert np.nanmax(np.nanmax(off, -1) - np.nanmin(off, -1)) <= 4 * 2.0**-24 * np.abs(got).max()
  assert np.abs(got).max() > 20  # there is something to be off by


@pytest.mark.parametrize('form', ['rope', 'pope', 'rope(ssmax=True)', 'rope(window=20)', 'alibi'])
def test_a_fused_branch_is_the_tiles(form, on_gpu, monkeypatch):
  """Values and gradients by q, k, v and the parameters, with grouped heads."""
  monkeypatch.setattr(kernels, 'DTYPE', F32)
  scheme = build(form)
  pos = posenc.positions('none', scheme, T, T)
  got = run(scheme, pos)
  assert on_gpu == [20 if 'window' in form else None]
  assert max(apart(got, run(scheme, pos, fused=False))) < 2e-5


@pytest.mark.parametrize('form', ['rope', 'alibi', 'fox', 'fox(rope=True)'])
def test_a_fused_branch_in_bfloat16(form, on_gpu):
  """Values are off by as much as those of tiles, from tiles in float32."""
  scheme = build(form, heads=12)
  pos = posenc.positions('none', scheme, T, T)
  got, tiles, exact = (
    run(scheme, pos, 12, dtype, backward=False, fused=fused)
    for dtype, fused in ((BF16, True), (BF16, False), (F32, False))
  )
  assert on_gpu and not np.array_equal(got, tiles)
  assert apart(got, exact)[0] < 2 * apart(tiles, exact)[0] < 0.02


def test_columns_from_tokens_are_differentiated_by_tiles(on_gpu):
  """Bit for bit; the kernel's gradient of FoX's gates would be rounding."""
  scheme = build('fox')
  pos = posenc.positions('none', scheme, T, T)
  got, tiles = (run(scheme, pos, dtype=BF16, fused=fused) for fused in (True, False))
  assert on_gpu == []
  jax.tree.map(np.testing.assert_array_equal, got, tiles)


def test_far_from_the_start_in_bfloat16(on_gpu):
  """Twelve heads, positions up to 100,000 and between whole numbers: two bfloat16 columns would be off by dozens."""
  scheme = build('alibi', heads=12)
  pos = posenc.positions('none', scheme, T, T)
  pos = pos.replace(at_T=pos.at_T * 333.3 / 7)
  pos = pos.replace(at_T=pos.at_T + 1e5 - pos.at_T[-1])
  fused, tiles = (run(scheme, pos, 12, BF16, backward=False, fused=fused) for fused in (True, False))
  assert on_gpu and not np.array_equal(fused, tiles)
  np.testing.assert_allclose(fused, tiles, atol=0.05)


@pytest.mark.parametrize('form', ['rope', 'fox'])
def test_in_a_model(form, on_gpu):
  """Through scanned layers that are computed again in the backward pass."""
  cfg = ModelConfig(layers=2, d_model=32, heads=4, dtype='bfloat16', remat=True, tile=T, loss_chunk=T)
  lm = LM(cfg, (form,), vocab_size=29, train_len=T, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(lm)
  pos = posenc.positions('none', list(lm.schemes), T, T)
  tokens = jax.random.randint(jax.random.key(0), (1, T), 0, 29)
  f = jit(lambda params, pos: nnx.merge(graphdef, params).nll(tokens, tokens, pos).sum())
  evaluated = f(params, pos)
  assert on_gpu
  trained, grads = jit(jax.value_and_grad(lambda params: nnx.merge(graphdef, params).nll(tokens, tokens, pos).sum()))(
    params
  )
  np.testing.assert_allclose(evaluated, trained, rtol=1e-3)
  assert all(np.isfinite(a).all() and a.any() for a in jax.tree.leaves(grads))


# ---- the choice


def chosen(form, method='none', device=None, dtype=BF16, mesh=None, length=T, heads=4, width=H):
  scheme = build(form, heads, train_len=100) if isinstance(form, str) else form
  pos = posenc.positions(method, scheme, 100, length)
  state = scheme.token_state(jnp.zeros((1, length, 32)), pos)
  return choose(scheme, pos, state, dtype, width, mesh, device or Device())


def test_which_kernel_serves_what():
  tpu = Device('tpu')
  assert chosen('rope')[1] == 'cudnn' and chosen('rope', device=tpu)[1] == 'splash'
  for form in (
    'nope',
    'sinusoidal',
    'rope',
    'rope2d(width=20)',
    'xpos',
    'pope',
    'rope(ssmax=True)',
    'alibi(ssmax=True)',
  ):
    assert chosen(form, 'logn')[0] == Fused(kernels.cudnn), form
  assert chosen('fox')[0] == Fused(kernels.cudnn, forward=True)
  assert chosen('rope(window=20)')[0] == Fused(kernels.cudnn, window=20)
  reasons = {
    chosen('rope', device=Device('cpu'))[1]: 'no fused kernel for cpu',
    chosen('rope', dtype=F32)[1]: 'float32: fused kernels are for bfloat16',
    chosen('rope', 'rerope')[1]: 'a second position map',
    chosen('rope', 'sink_window(window=20)')[1]: 'sinks, or windows of several sizes',
    chosen('t5')[1]: 't5 has a score of its own',
    chosen('cope')[1]: 'cope has a score of its own',
    chosen('shaw')[1]: 'shaw adds to the values',
    chosen('rope', device=Device('gpu', '7.5'))[1]: 'compute capability 7.5: cuDNN attention wants 8.0 or more',
    chosen('rope', device=Device('gpu', 'gfx942'))[1]: 'compute capability gfx942: cuDNN attention wants 8.0 or more',
    chosen('alibi', width=126, heads=8, device=Device('gpu', '8.0'))[1]: '126 channels and 3 columns: at most 128',
    chosen('alibi', width=251, heads=12)[1]: '251 channels and 6 columns: at most 256',
    chosen('alibi', length=2**17 + 1)[1]: '131073 tokens: columns serve up to 131072',
  }
  for said, reason in reasons.items():
    assert said.endswith(reason)
  assert chosen('rope', width=128, device=Device('gpu', '8.0'))[0] and chosen('rope', length=2**17 + 1)[0]


def test_columns_speak_for_their_own_score_only():
  class Halved(ALiBi):
    def bias(self, at_t, at_s):
      return super().bias(at_t, at_s) / 2

  class Twice(FoX):
    def score(self, logits, *rest):
      logits, carry = super().score(logits, *rest)
      return super().score(logits, *rest[:-1], carry)

  class Both(Halved):
    def columns(self, at_T, state):
      a, b = super().columns(at_T, state)
      return a / 2, b

  class Renamed(FoX):
    pass

  dims = posenc.Dims(4, H, 32, 100)
  found = {cls: chosen(cls(dims, nnx.Rngs(0)))[0] for cls in (Halved, Twice, Both, Renamed)}
  assert [cls.__name__ for cls, fused in found.items() if fused] == ['Both', 'Renamed']


def test_one_program_serves_methods_with_and_without_windows(on_gpu, monkeypatch):
  """Masks are arguments: the program holds both branches and looks at the numbers when it runs."""
  scheme = build('alibi', train_len=100)
  q, k, v, *_ = arrays(dtype=BF16)
  ran = []

  def counted(q, k, v, window):
    jax.debug.callback(lambda: ran.append(window))
    return dense(q, k, v, window=window)

  monkeypatch.setattr(kernels, 'cudnn', counted)
  both = [jit(lambda q, k, v, pos, f=f: attend(q, k, v, scheme, pos, tile=128, fused=f)) for f in (True, False)]
  for method, runs in {'none': 1, 'sliding_window': 0, 'sink_window(window=20)': 0, 'logn': 1}.items():
    ran.clear()
    pos = posenc.positions(method, scheme, 100, T)
    fused, tiles = (np.asarray(f(q, k, v, pos), np.float32) for f in both)
    assert len(ran) == runs, method
    np.testing.assert_allclose(fused, tiles, atol=0.03)
  assert both[0]._cache_size() == 1


def test_on_a_mesh(on_gpu, monkeypatch):
  """Inside `shard_map`; here of one device, as `attend` would make it of several."""
  scheme = build('fox')
  pos = posenc.positions('none', scheme, T, T)
  q, k, v, _, x = arrays(dtype=BF16)
  state = scheme.token_state(x, pos)
  ring = Ring(make_mesh(B), 1, 0)
  monkeypatch.setattr(attention, '_ring', lambda *_: (ring, 128))
  spread = jax.jit(lambda q, k, v: attend(q, k, v, scheme, pos, state, tile=128))(q, k, v)
  assert len(on_gpu) == 1
  monkeypatch.undo()
  np.testing.assert_allclose(
    *(np.asarray(o, np.float32) for o in (spread, attend(q, k, v, scheme, pos, state, tile=128))), atol=0.03
  )


def test_positions_never_decrease():
  """What columns rely on: ALiBi's distance is clipped at 0."""
  scheme = build('alibi', train_len=100)
  for name in METHODS:
    try:
      pos = posenc.positions(name, scheme, 100, 800)
    except (posenc.Unsupported, posenc.SpecError):
      continue
    assert (np.diff(pos.at_T) >= 0).all(), name


# ---- the calls


def lowered(form, platform, monkeypatch, heads=4, length=256, width=64, capability='9.0'):
  """The program of `attend`'s gradients for a platform that is not here."""
  monkeypatch.setattr(kernels, '_device', lambda mesh: Device(platform.replace('cuda', 'gpu'), capability))
  # jax asks the chip and its library while tracing.
  monkeypatch.setattr(fused_attention_stablehlo, 'check_cudnn_version', lambda: 91500)
  scheme = posenc.build(form, heads=heads, head_dim=width, d_model=32, train_len=length, rngs=nnx.Rngs(0))
  pos = posenc.positions('none', scheme, length, length)
  q, k, x = (jax.ShapeDtypeStruct((B, length, *shape), BF16) for shape in ((heads, width), (K, width), (32,)))

  def loss(q, k, v, x):
    return attend(q, k, v, scheme, pos, scheme.token_state(x.astype(F32), pos), tile=128).astype(F32).sum()

  f = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
  # Columns of FoX are for the forward pass.
  f = jax.jit(lambda *a: loss(*a)) if form == 'fox' else f
  return f.trace(q, k, k, x).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize(
  'form, width', [('rope', 64), ('rope(window=20)', 64), ('alibi', 72), ('fox', 72), ('pope', 128)]
)
def test_the_call_of_cudnn(form, width, monkeypatch):
  """One kernel forward, one backward, on q and k of a width that cuDNN takes; and no score in memory."""
  text = lowered(form, 'cuda', monkeypatch)
  calls = [line for line in text.splitlines() if 'fmhaSoftmax' in line]
  assert len(calls) == 1 if form == 'fox' else '__cudnn$fmhaSoftmaxBackward' in calls[1]
  for line in calls:
    assert r'\22mask_type\22: \22CAUSAL\22' in line and r'\22fmha_scale\22: 1.0' in line
    window = 20 if 'window' in form else 0
    assert rf'\22sliding_window_length\22: \22{window}\22' in line or rf'\22sliding_window_length\22: {window}' in line
  kv = 4 if form == 'fox' else K  # a gate for each query head
  assert f'(tensor<2x256x4x{width}xbf16>, tensor<2x256x{kv}x{width}xbf16>, tensor<2x256x{kv}x{width}xbf16>)' in calls[0]
  assert '256x256xf32' not in text and '256x256xbf16' not in text


@pytest.mark.parametrize('form', ['rope', 'alibi'])
def test_splash_compiles_for_a_tpu(form, monkeypatch):
  text = lowered(form, 'tpu', monkeypatch)
  assert text.count('tpu_custom_call') == 3  # forward, and backward by q and by k and v
  assert '256x256xf32' not in text


@pytest.mark.parametrize('form, window', [('rope', None), ('rope(window=20)', 20), ('fox', None)])
def test_splash_interpreted_is_the_tiles(form, window, monkeypatch):
  """A length that fills no block, grouped heads, a width that fills no lanes: values and gradients in float32."""
  asked = []

  def splash(q, k, v, window):
    asked.append(window)
    return interpreted(q, k, v, window, interpret=True)

  interpreted = kernels.splash
  monkeypatch.setattr(kernels, 'splash', splash)
  monkeypatch.setattr(kernels, '_device', lambda mesh: Device('tpu'))
  monkeypatch.setattr(kernels, 'DTYPE', F32)
  scheme = build(form)
  pos = posenc.positions('none', scheme, T, T)
  got = run(scheme, pos, backward=form != 'fox')
  assert asked == [window]
  assert max(apart(got, run(scheme, pos, backward=form != 'fox', fused=False))) < 2e-5

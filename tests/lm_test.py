"""The LM: shapes, precision, chunks, patterns, dropout, and what it refuses."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from forms import jit
from models.lm import LM, ModelConfig, abstract
from posenc import PositionScheme

VOCAB, T = 29, 21


def build(pattern=('rope',), **kwargs):
  defaults = {'layers': 2, 'd_model': 32, 'heads': 4, 'kv_heads': 2}
  cfg = ModelConfig(**(defaults | kwargs))
  lm = LM(cfg, pattern, vocab_size=VOCAB, train_len=T, rngs=nnx.Rngs(0))
  return lm, posenc.positions('none', list(lm.schemes), T, T)


TOKENS = jax.random.randint(jax.random.key(0), (2, T), 0, VOCAB)
TARGETS = jax.random.randint(jax.random.key(1), (2, T), 0, VOCAB)


def nll(lm, pos, **kwargs):
  """As one program: called as it is, each of its operations would be compiled by itself."""
  graphdef, params = nnx.split(lm)
  return jit(lambda params: nnx.merge(graphdef, params).nll(TOKENS, TARGETS, pos, **kwargs))(params)


def hidden(lm, pos, **kwargs):
  graphdef, params = nnx.split(lm)
  return jit(lambda params: nnx.merge(graphdef, params).hidden(TOKENS, pos, **kwargs))(params)


def by_hand(lm, pos, repeats, per_layer=()):
  """The last hidden states, block after block: layer i has the parameters at i // n of slot i mod n.

  per_layer: slots whose scheme has parameters of its own in each layer.
  """

  def layer(module, i):
    graphdef, stack = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda a: a[i], stack))

  def run(params):
    lm = nnx.merge(whole, params)
    x = lm.embedding(TOKENS)
    for i in range(repeats):
      for slot, scheme in enumerate(lm.schemes):
        x = layer(lm.slots[slot], i)(x, layer(scheme, i) if slot in per_layer else scheme, pos[slot], 64, None)
    return lm.norm(x)

  whole, params = nnx.split(lm)
  return jit(run)(params)


def nll_and_gradient(lm, pos, **kwargs):
  """NLL of each token, and the gradient of their sum."""
  graphdef, params = nnx.split(lm)

  def loss(params):
    nll_BT = nnx.merge(graphdef, params).nll(TOKENS, TARGETS, pos, **kwargs)
    return nll_BT.sum(), nll_BT

  grads, nll_BT = jit(jax.grad(loss, has_aux=True))(params)
  return nll_BT, grads


@functools.cache
def at_once():
  return nll_and_gradient(*build(), chunk=T)


@pytest.mark.parametrize('chunk', [1, 4, 7, 20, 21, 100])
def test_nll_by_chunks_is_nll_at_once(chunk):
  """Values and gradients, also where the chunk does not divide T."""
  want, want_grad = at_once()
  got, got_grad = nll_and_gradient(*build(), chunk=chunk)
  np.testing.assert_allclose(got.sum(), want.sum(), rtol=1e-6)
  np.testing.assert_allclose(got, want, atol=1e-5)
  for a, b in zip(jax.tree.leaves(got_grad), jax.tree.leaves(want_grad)):
    np.testing.assert_allclose(a, b, atol=2e-5)


def test_nll_is_cross_entropy_of_the_logits():
  lm, pos = build()
  logp = jax.nn.log_softmax(lm.logits(lm.hidden(TOKENS, pos)), -1)
  want = -jnp.take_along_axis(logp, TARGETS[..., None], -1)[..., 0]
  np.testing.assert_allclose(lm.nll(TOKENS, TARGETS, pos), want, atol=1e-5)


@pytest.mark.parametrize(
  'pattern, fields',
  [
    (('rope',), {'layers': 1}),
    (('rope', 'nope'), {'layers': 4, 'tied': False}),
    (('cope',), {'layers': 3}),
    (('alibi',), {'parallel': True, 'post_norm': True, 'tile': 4}),
    (('rope',), {'remat': True}),
  ],
)  # fmt: skip
def test_nll_of_the_last_tokens_alone(pattern, fields):
  lm, pos = build(pattern, **fields)
  want = nll(lm, pos)
  for last in (1, 8, T):
    np.testing.assert_allclose(nll(lm, pos, last=last, chunk=5), want[:, -last:], atol=1e-5)


def test_the_last_tokens_alone_save_a_layers_work():
  lm, pos = build(layers=2, kv_heads=0)

  def flops(last):
    return (
      jax.jit(lambda tokens: lm.nll(tokens, tokens, pos, last=last)).lower(TOKENS).compile().cost_analysis()['flops']
    )

  # Of two layers, the keys and values of the second are left, and its queries, which are not worth a program's lines.
  assert flops(1) < 0.7 * flops(None)


@pytest.mark.parametrize('tied', [True, False])
def test_zeroed_head_is_uniform(tied):
  """ln V at every position: the value a broken loss would miss first."""
  lm, pos = build(tied=tied)
  if tied:
    lm.embedding.embedding[...] = jnp.zeros_like(lm.embedding.embedding[...])
  else:
    lm.head.kernel[...] = jnp.zeros_like(lm.head.kernel[...])
  np.testing.assert_allclose(lm.nll(TOKENS, TARGETS, pos), math.log(VOCAB), rtol=1e-6)


def test_starts_near_uniform():
  """The initialisation neither saturates nor favours a token: the loss of an untrained model is near ln V.

  With a tied head a token's own id is favoured at first, by sqrt(D) standard deviations at any scale; among the others
  the logits are as flat.
  """
  for pattern in [('rope',), ('sinusoidal',), ('learned',)]:
    lm, pos = build(pattern, layers=4, d_model=64, tied=False)
    assert abs(float(nll(lm, pos).mean()) - math.log(VOCAB)) < 1.0
    lm, pos = build(pattern, layers=4, d_model=64)
    logits = jit(lambda lm=lm, pos=pos: lm.logits(lm.hidden(TOKENS, pos)))()
    others = jnp.where(jax.nn.one_hot(TOKENS, VOCAB) > 0, jnp.nan, logits)
    assert float(jnp.nanstd(others)) < 1.5


def test_bfloat16_compute_keeps_float32_parameters_and_loss():
  lm, pos = build(dtype='bfloat16')
  assert {a.dtype for a in jax.tree.leaves(nnx.to_pure_dict(nnx.state(lm)))} == {jnp.dtype('float32')}
  assert lm.hidden(TOKENS, pos).dtype == jnp.bfloat16
  nll = lm.nll(TOKENS, TARGETS, pos)
  assert nll.dtype == jnp.float32
  exact, _ = build()
  np.testing.assert_allclose(nll, exact.nll(TOKENS, TARGETS, pos), atol=0.1)


def test_explicit_head_width_and_query_groups():
  """head_dim need not be d_model / heads (case: hidden 64, 4 heads of 32)."""
  lm, pos = build(d_model=64, heads=4, kv_heads=1, head_dim=32)
  params = nnx.to_pure_dict(nnx.state(lm))['slots'][0]['attention']
  assert params['query']['kernel'].shape == (2, 64, 128)
  assert params['key']['kernel'].shape == (2, 64, 32)
  assert params['out']['kernel'].shape == (2, 128, 64)
  assert lm.schemes[0].q_scale == 32**-0.5
  assert jnp.isfinite(nll(lm, pos)).all()


def test_pattern_runs_its_schemes_in_order():
  """Layer i uses slot i mod n: equal to running the blocks by hand."""
  lm, pos = build(('rope', 'nope'), layers=4)
  got = hidden(lm, pos)
  np.testing.assert_allclose(got, by_hand(lm, pos, 2), atol=2e-5)
  other, _ = build(('nope', 'rope'), layers=4)
  assert float(jnp.abs(hidden(other, pos[::-1]) - got).max()) > 1e-3


def test_schemes_with_parameters_for_each_layer():
  """Stacked like the blocks of their slot, drawn layer by layer, each layer with its own: equal to a run by hand."""
  lm, pos = build(('shaw(clip=4)', 't5', 'cope(npos_max=5)', 'fire(per_layer=False)'), layers=8)
  assert lm.schemes[0].key_table[...].shape == (2, 5, 8) and lm.schemes[1].table[...].shape == (32, 4)
  assert lm.schemes[3].w1[...].shape == (32,)
  assert not np.allclose(*lm.schemes[0].key_table[...])
  lm.schemes[2].table[...] = jax.random.normal(jax.random.key(2), (2, 5, 8))
  want = by_hand(lm, pos, 2, per_layer=(0, 2))
  np.testing.assert_allclose(hidden(lm, pos), want, atol=3e-5)
  np.testing.assert_allclose(hidden(lm, pos, tile=5), want, atol=3e-5)


def test_pattern_must_divide_the_layers():
  with pytest.raises(ValueError, match='model.layers = 2: a multiple of the 3 slots'):
    build(('rope', 'rope', 'nope'))


def backward_bytes(length=128, vocab=VOCAB, batch=2, **kwargs):
  """(bytes XLA reserves for the gradient of the loss, the gradient itself) at this length."""
  lm = LM(ModelConfig(heads=4, **kwargs), ('rope',), vocab_size=vocab, train_len=length, rngs=nnx.Rngs(0))
  graphdef, params = nnx.split(lm)
  pos = posenc.positions('none', list(lm.schemes), length, length)
  tokens = jnp.zeros((batch, length), jnp.int32)
  grad = jit(jax.grad(lambda p: nnx.merge(graphdef, p).nll(tokens, tokens, pos).sum())).lower(params).compile()
  return grad.memory_analysis().temp_size_in_bytes, grad(params)


def test_remat_saves_memory_and_changes_nothing_else():
  """Both halves: unrolled layers would be merged with their recomputation and save nothing, in silence."""
  (full, grads), (less, again) = (backward_bytes(layers=6, d_model=64, remat=remat) for remat in (False, True))
  assert less < 0.6 * full
  for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(again)):
    np.testing.assert_allclose(a, b, atol=1e-4 * max(1.0, float(jnp.abs(a).max())))


def test_logits_of_the_whole_window_never_exist():
  """f32[B, T, V] is 64 MB here; forward and backward together stay below one of it."""
  logits = 4 * 8 * 256 * 8192
  assert backward_bytes(length=256, vocab=8192, batch=8, layers=1, d_model=32, loss_chunk=16)[0] < logits


@pytest.mark.parametrize('tied', [True, False])
def test_bfloat16_logits_are_not_rounded(tied):
  """Softmax in float32 of logits that went through bfloat16 would be none: NLL off by 0.1 nats at large logits."""
  lm, pos = build(dtype='bfloat16', tied=tied)
  logits = lm.logits(lm.hidden(TOKENS, pos))
  assert logits.dtype == jnp.float32
  assert not np.array_equal(logits, logits.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize('scheme', [n for n, s in posenc.SCHEMES.items() if s.embed is not PositionScheme.embed])
def test_schemes_that_embed_stand_first(scheme):
  """`embed` is called for slot 0 alone: anywhere else the scheme would silently be nothing."""
  build((scheme, 'rope'))
  with pytest.raises(ValueError, match=f'{scheme} adds to the embeddings; it is allowed in the first slot only'):
    build(('rope', scheme))


def test_dropout_acts_with_a_key_only_and_repeats_with_it():
  lm, pos = build(dropout=0.5)
  plain, _ = build()
  run = lambda key: lm.nll(TOKENS, TARGETS, pos, key=key)  # noqa: E731
  np.testing.assert_array_equal(run(None), plain.nll(TOKENS, TARGETS, pos))
  a, b, c = (run(jax.random.key(seed)) for seed in (0, 0, 1))
  np.testing.assert_array_equal(a, b)
  assert not np.array_equal(a, c) and not np.array_equal(a, run(None))


def test_abstract_builds_nothing_and_matches():
  make = lambda: build()[0]  # noqa: E731
  graphdef, shapes = abstract(make)
  real_graphdef, state = nnx.split(make())
  assert graphdef == real_graphdef
  assert jax.tree.map(lambda a: (a.shape, a.dtype), shapes) == jax.tree.map(
    lambda a: (a.shape, a.dtype), nnx.to_pure_dict(state)
  )


@pytest.mark.parametrize('field, value, message', [
  ('layers', 0, 'layers = 0: a whole number of at least 1'),
  ('heads', 3, 'heads = 3: a divisor of d_model = 128'),
  ('kv_heads', 3, 'kv_heads = 3: a divisor of heads = 4'),
  ('kv_heads', -1, 'kv_heads = -1: a positive whole number'),
  ('dropout', 1.0, r'dropout = 1.0: a number in \[0, 1\)'),
  ('dtype', 'float8', "dtype = 'float8': allowed: float32, bfloat16"),
  ('tile', -1, 'tile = -1: a positive whole number is allowed, or 0'),
  ('vocab', -1, 'vocab = -1: a positive whole number is allowed, or 0'),
  ('norm', 'batch', "norm = 'batch': allowed: rms, layer"),
  ('activation', 'relu', "activation = 'relu': allowed: swiglu, geglu, gelu, gelu_tanh"),
  ('biases', ('qkv', 'head'), 'head is none of qkv, out, mlp, norm'),
  ('biases', ('norm',), "'norm' is allowed with norm = 'layer' only"),
  ('norm_eps', 0.0, 'norm_eps = 0.0: a finite number above 0'),
  ('embedding_scale', -1.0, 'embedding_scale = -1.0: a finite number above 0'),
])  # fmt: skip
def test_config_names_what_is_wrong(field, value, message):
  with pytest.raises(ValueError, match=message) as error:
    ModelConfig(**{field: value})
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_gradients_of_a_product_are_those_of_matmul(dtype):
  from models.lm import _product

  x, w, dy = (
    jax.random.normal(jax.random.key(i), s).astype(dtype) for i, s in enumerate([(2, 3, 5), (5, 4), (2, 3, 4)])
  )
  got, want = (jax.vjp(f, x, w)[1](dy) for f in (_product, jnp.matmul))
  for a, b in zip(got, want, strict=True):
    assert a.dtype == b.dtype == dtype and a.shape == b.shape
    np.testing.assert_allclose(
      a.astype(jnp.float32), b.astype(jnp.float32), rtol=1e-6 if dtype == jnp.float32 else 0.02
    )


# What released models do otherwise; that each is what they do, pretrained_test.py compares with transformers.
OTHERWISE = [
  {'norm': 'layer'},
  {'norm': 'layer', 'biases': ('norm',)},
  {'norm_eps': 0.5},
  {'activation': 'geglu'},
  {'activation': 'gelu'},
  {'activation': 'gelu_tanh'},
  {'biases': ('qkv',)},
  {'biases': ('out', 'mlp')},
  {'qk_norm': True},
  {'post_norm': True},
  {'parallel': True},
  {'embedding_scale': 3.0},
  {'embedding_norm': True},
]


@pytest.mark.parametrize('fields', OTHERWISE, ids=str)
def test_every_field_changes_the_model_and_learns(fields):
  """Its NLL, once biases are not 0; every parameter gets a gradient, and statistics see what attention sees."""
  lm, pos = build(**fields)
  rng = np.random.default_rng(0)
  state = jax.tree_util.tree_map_with_path(
    lambda path, x: x + 0.3 * rng.normal(size=x.shape).astype(np.float32) if 'bias' in str(path[-2]) else x,
    nnx.state(lm),
  )
  nnx.update(lm, state)
  nll_BT, grads = nll_and_gradient(lm, pos)
  assert float(jnp.abs(nll_BT - at_once()[0]).max()) > 1e-4
  for path, grad in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(grads)):
    size = float(jnp.abs(grad).max())
    # A constant added to every key turns no softmax but through the rotation, and RoPE's slow pairs hardly turn it.
    assert np.isfinite(size) and size > 1e-6, jax.tree_util.keystr(path)
  seen = jit(lambda: lm.statistics(TOKENS, pos, last=4, beyond=8))()
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(seen))

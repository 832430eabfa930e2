"""Cases W of docs/CASES.md: weights of other projects, and what our model does with its own."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from checkpoints_test import abstract_of
from configs import smoke
from configs.schema import Config
from forms import build, jit, refused
from models import pretrained
from models.architectures import read_config
from models.attention import attend
from models.lm import LM, ModelConfig, abstract
from pretrained_test import config_of, tensors_of, write
from pretrained_test import read as read_source
from spec import SpecError
from training import provenance
from training.checkpoints import Checkpoints


def test_W02():
  """Query head h reads key and value head h // 4, in blocks: 8 over 2."""
  scheme = build('nope', heads=8, head_dim=2, train_len=4)
  pos = posenc.positions('none', scheme, 4, 4)
  v_BTKH = jnp.broadcast_to(jnp.arange(2.0)[None, None, :, None], (1, 4, 2, 2))
  attention = jit(lambda q, k, v: attend(q, k, v, scheme, pos))
  o_BTNH = attention(jnp.zeros((1, 4, 8, 2)), jnp.zeros((1, 4, 2, 2)), v_BTKH)
  np.testing.assert_array_equal(o_BTNH[0, -1, :, 0], [0, 0, 0, 0, 1, 1, 1, 1])
  k_BTKH = (
    9 * jax.nn.one_hot(jnp.asarray([[0, 3]]), 4)[:, :, :].swapaxes(1, 2)[..., None]
  )  # of head 0 token 0, of 1 token 3
  k_BTKH = jnp.broadcast_to(k_BTKH, (1, 4, 2, 2))
  v_BTKH = jnp.broadcast_to(jnp.arange(4.0)[None, :, None, None], (1, 4, 2, 2))
  o_BTNH = attention(jnp.ones((1, 4, 8, 2)), k_BTKH, v_BTKH)
  np.testing.assert_allclose(o_BTNH[0, -1, :, 0], [0] * 4 + [3] * 4, atol=0.01)


def shapes(**model):
  cfg = ModelConfig(layers=1, **model)
  return abstract(lambda: LM(cfg, ('rope',), vocab_size=17, train_len=8, rngs=nnx.Rngs(0)))[1]['slots'][0]['attention']


def test_W03():
  """A head width that is given counts, whatever hidden / heads is; 0 means to compute it."""
  attention = shapes(d_model=64, heads=4, head_dim=32)
  assert attention['query']['kernel'].shape == (1, 64, 128)  # torch's 128 x 64 the other way round
  assert attention['out']['kernel'].shape == (1, 128, 64)
  assert build('rope', head_dim=ModelConfig(d_model=64, heads=4, head_dim=32).width).q_scale == 32**-0.5
  assert ModelConfig(d_model=64, heads=4).width == 16
  assert shapes(d_model=60, heads=8, head_dim=8)['query']['kernel'].shape == (1, 60, 64)
  with refused(ValueError, 'heads = 8: a divisor of d_model = 60 is allowed, or set head_dim'):
    ModelConfig(d_model=60, heads=8)
  values = smoke.get_config().to_dict()
  values['model']['head_dim'] = None
  with refused(SpecError, 'config.model.head_dim = None: a value of type int is allowed'):
    Config.from_dict(values)
  theirs = config_of('llama') | {'hidden_size': 64, 'num_attention_heads': 4}
  assert [read_config(theirs | {'head_dim': width}).model.width for width in (32, None)] == [32, 16]


def model(tied):
  cfg = ModelConfig(layers=1, d_model=16, heads=2, d_mlp=32, tied=tied)
  return lambda: LM(cfg, ('nope',), vocab_size=17, train_len=8, rngs=nnx.Rngs(0))


def params_of(tied):
  return lambda: {'params': nnx.to_pure_dict(nnx.state(model(tied)()))}


def test_W04(tmp_path):
  """Tied: no head is stored, and the embedding is it. Untied without a head, or tied with one, is an error."""
  params = jit(params_of(True))()['params']
  table_VD, x_BTD = params['embedding']['embedding'], jax.random.normal(jax.random.key(0), (1, 3, 16))
  lm = nnx.merge(nnx.graphdef(nnx.eval_shape(model(True))), params)
  np.testing.assert_allclose(lm.logits(x_BTD), x_BTD @ table_VD.T, atol=1e-5)
  for tied, wanted, says in (
    (True, False, r'params\.head\.kernel is absent, this config wants float32\[16, 17\]$'),
    (False, True, r'params\.head\.kernel is float32\[16, 17\], this config wants absent$'),
  ):
    assert ('head' in jax.eval_shape(params_of(tied))['params']) != tied
    checkpoints = Checkpoints(tmp_path / str(tied), keep=1)
    checkpoints.save(1, jit(params_of(tied))())
    with pytest.raises(SpecError, match=says):
      checkpoints.restore(1, abstract_of(params_of(wanted)))
    read = checkpoints.restore(1, abstract_of(params_of(tied)))['params']
    np.testing.assert_array_equal(read['embedding']['embedding'], table_VD)  # drawn alike
    checkpoints.close()
  # A file of another project: tied with a head is tied, what is said to be untied and has none is an error.
  config, tensors = config_of('llama'), tensors_of('llama')
  source = pretrained.open_source(str(write(tmp_path / 'both', config | {'tie_word_embeddings': True}, tensors)))
  assert 'head' not in read_source(source)[2]
  del tensors['lm_head.weight']
  with refused(SpecError, 'no tensor for head.kernel', '1 are missing'):
    read_source(pretrained.open_source(str(write(tmp_path / 'none', config, tensors))))


def test_W05():
  """A norm has the epsilon that is asked for, 1e-6 where none is, by our name for it or theirs."""

  def norms(**fields):
    cfg = ModelConfig(layers=1, d_model=16, heads=2, qk_norm=True, post_norm=True, **fields)
    lm = nnx.eval_shape(lambda: LM(cfg, ('nope',), vocab_size=17, train_len=8, rngs=nnx.Rngs(0)))
    return [module for _, module in nnx.iter_modules(lm) if isinstance(module, nnx.RMSNorm)]

  for fields, value in (({}, 0.70710678), ({'norm_eps': 1e-5}, 0.30151134)):
    assert len(norms(**fields)) == 7
    for norm in norms(**fields):
      with_eps = nnx.RMSNorm(16, epsilon=norm.epsilon, rngs=nnx.Rngs(0))
      np.testing.assert_allclose(with_eps(jnp.full(16, 1e-3)), value, rtol=1e-5)
  assert read_config(config_of('llama') | {'rms_norm_eps': 1e-5}).model.norm_eps == 1e-5
  values = smoke.get_config().to_dict()
  assert Config.from_dict(values | {'model': values['model'] | {'norm_eps': 1e-5}}).model.norm_eps == 1e-5
  values['model']['rms_norm_eps'] = 1e-5
  with refused(SpecError, "config.model: field = 'rms_norm_eps': ", 'norm_eps'):
    Config.from_dict(values)


def test_W07(tmp_path):
  """A folder of safetensors is no run, and is said to be none; imported, bfloat16 is exact, a missing shard named."""
  index = {'weight_map': {'a': 'model-00001-of-00002.safetensors', 'b': 'model-00002-of-00002.safetensors'}}
  (tmp_path / 'model.safetensors.index.json').write_text(json.dumps(index))
  (tmp_path / 'model-00001-of-00002.safetensors').write_bytes(b'\0' * 16)  # the other shard is missing
  with refused(SpecError, 'holds no run (no config.json); train there first'):
    provenance.read(tmp_path)
  (tmp_path / 'config.json').write_text(json.dumps({'model_type': 'llama', 'rope_theta': 10000.0}))
  with refused(SpecError, 'config.json: not a config written by train.py'):
    provenance.read(tmp_path)
  with refused(SpecError, 'holds no checkpoints; train there first'):
    Checkpoints(tmp_path)
  bits = np.arange(2**16, dtype=np.uint16)
  wide = np.asarray(jnp.asarray(bits.view(jnp.bfloat16)).astype(jnp.float32))
  finite = np.isfinite(wide) & ((bits & 0x7F80) != 0)  # XLA may flush subnormals
  np.testing.assert_array_equal(wide.view(np.uint32)[finite], bits[finite].astype(np.uint32) << 16)
  tensors = tensors_of('llama') | {'every.weight': bits.view(jnp.bfloat16)}
  assert tensors['model.norm.weight'].dtype == jnp.bfloat16
  for shards in (1, 2):
    folder = write(tmp_path / str(shards), config_of('llama'), tensors, shards)
    read = pretrained.open_source(str(folder)).tensors['every.weight']()
    assert read.dtype == np.float32
    np.testing.assert_array_equal(
      read.view(np.uint32)[~np.isnan(read)], (bits.astype(np.uint32) << 16)[~np.isnan(read)]
    )
  (folder / 'model-00002-of-00002.safetensors').unlink()
  with refused(SpecError, 'model-00002-of-00002.safetensors: is missing'):
    pretrained.open_source(str(folder))

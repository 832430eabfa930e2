"""A run as a Hugging Face folder: read again it is the same bits, and transformers has the same logits."""

import functools
import json
import os
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from configs import smoke
from configs.schema import Config
from data import tokenizers
from exchange_test import peer
from models import pretrained
from pretrained_test import read
from scripts import export_hf
from spec import SpecError
from training.checkpoints import Checkpoints

pytest.importorskip('safetensors')


def run(folder, **fields):
  """A run that nobody trained: the parameters are drawn, and sharp enough for logits to say something."""
  recipe = smoke.get_config()
  recipe.model.kv_heads = 1
  for name, value in fields.items():
    *path, last = name.split('.')
    functools.reduce(lambda group, part: group[part], path, recipe)[last] = value
  config = Config.from_dict(recipe.to_dict())
  graphdef, params = nnx.split(config.build_model(tokenizers.build(config.data.tokenizer).vocab_size))
  rng = np.random.default_rng(0)
  params = jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape).astype(np.float32), nnx.to_pure_dict(params))
  folder.mkdir()
  (folder / 'config.json').write_text(json.dumps({'config': config.to_dict(), 'data': {}}))
  checkpoints = Checkpoints(folder, keep=1)
  checkpoints.save(7, {'params': params})
  checkpoints.close()
  return config, graphdef, params


def export(workdir, out, *options):
  export_hf.main([f'--workdir={workdir}', f'--out={out}', *options])
  return pretrained.open_source(str(out))


TOKENS = np.random.default_rng(1).integers(0, 257, (2, 96)).astype(np.int32)  # three times the training length


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, tokens_BT, pos):
  lm = nnx.merge(graphdef, params)
  return lm.logits(lm.hidden(tokens_BT, pos))


def logits(config, graphdef, params, method):
  slots = [config.build_scheme(text) for text in config.posenc]
  pos = posenc.positions(method, slots, config.train_len, 96, rule=config.build_rule(slots))
  return np.asarray(logits_of(graphdef, jax.tree.map(jnp.asarray, params), TOKENS, pos))


MODELS = {
  'plain': {},
  'untied, biases': {'model.tied': False, 'model.biases': ('qkv', 'out', 'mlp'), 'model.norm_eps': 1e-4},
  'wide heads': {'model.head_dim': 24, 'model.d_mlp': 40, 'posenc': 'rope(base=500.0)'},
}


@pytest.mark.parametrize('case', MODELS)
def test_read_again_it_is_the_same_bits(case, tmp_path):
  config, _, params = run(tmp_path / 'run', **MODELS[case])
  form, _, again = read(export(tmp_path / 'run', tmp_path / 'out'))
  jax.tree.map(np.testing.assert_array_equal, again, params)
  assert form.method == 'none' and form.train_len == 32 and form.model.vocab == 257
  theirs = posenc.build(form.pattern[0], heads=1, head_dim=16, d_model=8, train_len=32, rngs=nnx.Rngs(0))
  assert theirs.base == config.build_scheme(config.posenc[0]).base


def test_another_pairing_and_a_pattern_are_the_same_model(tmp_path):
  """Channels 2p and 2p + 1 become p and p + H/2; layers of two slots those of one."""
  fields = {'posenc': ("rope(pairing='interleaved')",) * 2, 'model.layers': 4, 'model.biases': ('qkv', 'out')}
  config, graphdef, params = run(tmp_path / 'run', **fields)
  form, theirs, again = read(export(tmp_path / 'run', tmp_path / 'out'))
  slots = [posenc.build(t, heads=2, head_dim=16, d_model=32, train_len=32, rngs=nnx.Rngs(0)) for t in form.pattern]
  assert [slot.pairing for slot in slots] == ['half_split']
  got = logits_of(theirs, jax.tree.map(jnp.asarray, again), TOKENS, posenc.positions('none', slots, 32, 96))
  want = logits(config, graphdef, params, 'none')
  np.testing.assert_allclose(got, want, atol=5e-5)
  assert want.std() > 0.3


METHODS = ('none', 'pi(factor=4)', 'yarn(factor=4)', 'llama31(factor=4)', 'dynamic_ntk', 'ntk(factor=4)')
LONGROPE = f'longrope(long={tuple(1.0 + p for p in range(8))}, factor=3.0)'


@pytest.mark.parametrize('method', [*METHODS, LONGROPE])
def test_the_method_in_force_is_in_the_config(method, tmp_path):
  run(tmp_path / 'run')
  form, _, _ = read(export(tmp_path / 'run', tmp_path / 'out', f'--method={method}'))
  made = []
  for text, m in ((form.pattern[0], form.method), ('rope', method)):
    slot = posenc.build(text, heads=2, head_dim=16, d_model=32, train_len=32, rngs=nnx.Rngs(0))
    made.append(posenc.positions(m, slot, 32, 96))
  np.testing.assert_allclose(made[0].inv_freq_P, made[1].inv_freq_P, rtol=1e-6)
  np.testing.assert_allclose(*(p.logit_scale_T * p.key_scale_T for p in made), rtol=1e-6)


def test_a_run_trained_with_a_method_has_it_in_force(tmp_path):
  run(tmp_path / 'tuned', method='yarn(factor=4)', tune_len=128)
  run(tmp_path / 'plain', tune_len=128)
  tuned, other, plain = (
    export(tmp_path / name, tmp_path / f'{name}{i}', *options).config
    for i, (name, options) in enumerate((('tuned', ()), ('tuned', ['--method=pi(factor=8)']), ('plain', ())))
  )
  assert tuned['rope_scaling'] == {'rope_type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 32}
  assert (tuned['max_position_embeddings'], plain['max_position_embeddings']) == (128, 128)
  assert other['rope_scaling'] == {'rope_type': 'linear', 'factor': 8.0} and plain['rope_scaling'] is None


REFUSED = {
  'alibi': ({'posenc': 'alibi'}, 'none', 'posenc alibi: .*rope in every layer'),
  'a layer without': ({'posenc': ('rope', 'nope')}, 'none', 'posenc nope'),
  'two bases': ({'posenc': ('rope', 'rope(base=100.0)')}, 'none', 'one for all layers'),
  'partial': ({'posenc': 'rope(fraction=0.5)'}, 'none', 'fraction = 0.5'),
  'a window': ({'posenc': 'rope(window=8)'}, 'none', 'window = 8'),
  'ssmax': ({'posenc': 'rope(ssmax=True)'}, 'none', 'ssmax'),
  'hope': ({'posenc': "rope(cut='incomplete')"}, 'none', "cut = 'incomplete'"),
  'layer norm': ({'model.norm': 'layer'}, 'none', "model.norm = 'layer'"),
  'gelu': ({'model.activation': 'gelu'}, 'none', "model.activation = 'gelu'"),
  'biases of qkv': ({'model.biases': ('qkv',)}, 'none', 'model.biases'),
  'drawn positions': ({'positions': 'randomized(max_len=64)'}, 'none', 'config.positions'),
  'log-n': ({}, 'logn', 'logn.*no form'),
  'follows the length': ({}, 'yarn', 'yarn.*follows the length'),
  'first tokens': ({}, 'longrope(long=(1.0, 2.0), factor=4, onset=4)', 'onset = 4'),
  'other pairs': ({}, 'longrope(long=(1.0, 2.0), factor=4)', 'long of 2 numbers'),
  'no such method': ({}, 'yran', "did you mean 'yarn'"),
}


@pytest.mark.parametrize('case', REFUSED)
def test_what_a_llama_cannot_be_is_refused_by_name(case, tmp_path):
  fields, method, named = REFUSED[case]
  run(tmp_path / 'run', **fields)
  with pytest.raises(SpecError, match=named) as told:
    export(tmp_path / 'run', tmp_path / 'out', f'--method={method}')
  assert '\n' not in str(told.value)
  assert sorted(p.name for p in tmp_path.iterdir()) == ['run']  # nor half of a folder


def test_nothing_is_written_over(tmp_path, monkeypatch):
  run(tmp_path / 'run')
  (tmp_path / 'out').mkdir()
  with pytest.raises(SpecError, match='is there already'):
    export(tmp_path / 'run', tmp_path / 'out')
  (tmp_path / 'out').rmdir()

  def full(*_):
    raise OSError(28, 'No space left on device', 'tokenizer.json')

  monkeypatch.setattr(export_hf, '_tokenizer', full)
  with pytest.raises(OSError, match='No space'):
    export(tmp_path / 'run', tmp_path / 'out')
  assert sorted(p.name for p in tmp_path.iterdir()) == ['run']


def test_a_missing_package_is_named(tmp_path, monkeypatch):
  import sys

  monkeypatch.setitem(sys.modules, 'safetensors.numpy', None)
  with pytest.raises(SpecError, match=r'safetensors is not installed: ./scripts/setup.sh pretrained'):
    export(tmp_path, tmp_path / 'out')


TEXT = 'Fellow citizens: naïve “quotes”, 2026\r\n\ttabs  and\x00 all ☃'


def test_bytes_are_a_tokenizer_json(tmp_path):
  from tokenizers import Tokenizer

  run(tmp_path / 'run')
  export(tmp_path / 'run', tmp_path / 'out')
  found = Tokenizer.from_file(str(tmp_path / 'out' / 'tokenizer.json'))
  ours = tokenizers.Bytes()
  assert found.encode(TEXT, add_special_tokens=False).ids == ours.encode(TEXT.encode()).tolist()
  assert found.encode(TEXT).ids == [ours.bos, *ours.encode(TEXT.encode())]
  assert found.decode(found.encode(TEXT).ids) == TEXT
  assert tokenizers.BPE(path=str(tmp_path / 'out' / 'tokenizer.json')).encode(TEXT.encode()).tolist() == list(
    TEXT.encode()
  )


@pytest.mark.parametrize('own', [True, False], ids=['its own BOS', 'one more id'])
def test_a_bpe_goes_along(own, tmp_path):
  from tokenizers import Tokenizer

  path = tmp_path / 'bpe.json'
  made = tokenizers.train_bpe([b'the tide the moor'] * 4, 270)
  text = made.to_str()
  if not own:  # without BOS, ids moved down by one
    plain = json.loads(text)
    plain['added_tokens'] = []
    plain['model']['vocab'] = {piece: i - 1 for piece, i in plain['model']['vocab'].items() if i}
    text = json.dumps(plain)
  path.write_text(text)
  run(tmp_path / 'run', **{'data.tokenizer': f'bpe(path={str(path)!r})'})
  export(tmp_path / 'run', tmp_path / 'out')
  ours = tokenizers.BPE(path=str(path))
  found = Tokenizer.from_file(str(tmp_path / 'out' / 'tokenizer.json'))
  assert found.encode('the moor', add_special_tokens=False).ids == ours.encode(b'the moor').tolist()
  said = json.loads((tmp_path / 'out' / 'tokenizer_config.json').read_text())
  assert found.token_to_id(said['bos_token']) == ours.bos
  assert json.loads((tmp_path / 'out' / 'config.json').read_text())['bos_token_id'] == ours.bos
  assert ((tmp_path / 'out' / 'tokenizer.json').read_text() == text) == own


# With torch: in this interpreter, or in that of LONGCURVE_PEER_PYTHON.

PEER = """
import json, sys, numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokens, text = np.load('tokens.npy'), json.load(open('text.json'))
out = {}
for folder in json.load(open('folders.json')):
  model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True,
                                                     attn_implementation='eager')
  assert not any(told[key] for key in ('missing_keys', 'unexpected_keys', 'mismatched_keys')), told
  with torch.no_grad():
    out[folder] = model(torch.from_numpy(tokens).long(), use_cache=False).logits.numpy()
tokenizer = AutoTokenizer.from_pretrained(folder)
np.savez('logits.npz', **out, ids=np.array(tokenizer(text)['input_ids']))
"""


def test_transformers_has_the_same_logits(tmp_path):
  """Of every method with a form there, three times the training length; and the ids of a text."""
  python = peer()
  want = {}
  for i, method in enumerate((*METHODS, LONGROPE)):
    fields = {'posenc': "rope(pairing='interleaved')"} if i % 2 else {'model.tied': False}
    config, graphdef, params = run(tmp_path / f'run{i}', **fields)
    export(tmp_path / f'run{i}', tmp_path / f'out{i}', f'--method={method}')
    want[f'out{i}'] = logits(config, graphdef, params, method)
  np.save(tmp_path / 'tokens.npy', TOKENS)
  (tmp_path / 'folders.json').write_text(json.dumps(list(want)))
  (tmp_path / 'text.json').write_text(json.dumps(TEXT))
  subprocess.run([python, '-c', PEER], cwd=tmp_path, check=True, env={**os.environ, 'PYTHONPATH': ''})
  got = np.load(tmp_path / 'logits.npz')
  for name, mine in want.items():
    print(f'{name}: {np.abs(got[name] - mine).max():.1e} of {mine.std():.2f}')
    np.testing.assert_allclose(got[name], mine, atol=1e-4)
  plain = next(iter(want.values()))
  assert all(np.abs(mine - plain).max() > 1e-2 for mine in list(want.values())[1:])
  assert got['ids'].tolist() == [256, *TEXT.encode()]

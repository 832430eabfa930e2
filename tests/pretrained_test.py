"""Released models: what transformers says of tiny ones of every architecture, and of SmolLM2 whole."""

import collections
import functools
import hashlib
import json
import pathlib
import subprocess

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import posenc
from data import corpora, tokenizers
from exchange_test import peer
from models import pretrained
from models.architectures import ARCHITECTURES, read_config
from models.lm import LM, abstract
from spec import SpecError
from training import provenance

GOLDEN = np.load(pathlib.Path(__file__).parent / 'golden' / 'pretrained.npz')
CASES = [name.removesuffix('/config') for name in GOLDEN.files if name.endswith('/config')]


def config_of(case):
  return json.loads(str(GOLDEN[f'{case}/config']))


def tensors_of(case):
  start = f'{case}/tensor/'
  names = [name for name in GOLDEN.files if name.startswith(start)]
  return {name.removeprefix(start): GOLDEN[name].view(ml_dtypes.bfloat16) for name in names}


def write(folder, config, tensors, shards=1):
  """As save_pretrained lays a model out."""
  save_file = pytest.importorskip('safetensors.numpy').save_file
  folder.mkdir(exist_ok=True)
  (folder / 'config.json').write_text(json.dumps(config))
  names = sorted(tensors)
  files = {f'model-{i + 1:05d}-of-{shards:05d}.safetensors': names[i::shards] for i in range(shards)}
  if shards == 1:
    files = {'model.safetensors': names}
  else:
    weight_map = {name: file for file, part in files.items() for name in part}
    (folder / 'model.safetensors.index.json').write_text(json.dumps({'metadata': {}, 'weight_map': weight_map}))
  for file, part in files.items():
    save_file({name: np.ascontiguousarray(tensors[name]) for name in part}, folder / file)
  return folder


def read(source):
  """(form, graphdef, parameters) of a source."""
  form = read_config(source.config)

  def make():
    return LM(form.model, form.pattern, vocab_size=form.model.vocab, train_len=form.train_len, rngs=nnx.Rngs(0))

  graphdef, shapes = abstract(make)
  return form, graphdef, pretrained.read_params(source, form, shapes)


def positions(form, length, method='none', train_len=0):
  """As a run of it would have them, or one that had been trained at `train_len`."""
  shapes = {'heads': form.model.heads, 'head_dim': form.model.width, 'd_model': form.model.d_model}
  shapes['train_len'] = train_len or form.train_len
  slots = [posenc.build(text, rngs=nnx.Rngs(0), **shapes) for text in form.pattern]
  return posenc.positions(method, slots, shapes['train_len'], length)


@functools.partial(jax.jit, static_argnums=0)
def logits_of(graphdef, params, tokens_BT, pos):
  lm = nnx.merge(graphdef, params)
  return lm.logits(lm.hidden(tokens_BT, pos))


def logits(source, tokens):
  form, graphdef, params = read(source)
  return np.asarray(logits_of(graphdef, params, jnp.asarray(tokens), positions(form, tokens.shape[1])))


@pytest.mark.parametrize('case', CASES)
def test_logits_are_those_of_transformers(case, tmp_path):
  source = pretrained.open_source(str(write(tmp_path / 'x', config_of(case), tensors_of(case))))
  want = GOLDEN[f'{case}/logits']
  got = logits(source, GOLDEN[f'{case}/tokens'])
  print(f'{case}: {np.abs(got - want).max():.1e}')
  np.testing.assert_allclose(got, want, atol=1e-4)

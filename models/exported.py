"""An LM of ours as Hugging Face has a Llama: config.json and tensors, the way back of models/pretrained.py.

What a Llama cannot be is refused by the field that makes it another model.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from models.architectures import LLAMA, LLAMA_BLOCK
from models.lm import ModelConfig
from posenc import PositionScheme, interchange
from posenc.rope import RoPE
from spec import SpecError

# Fields of ModelConfig, and what they are in a Llama.
_IS = {
  'norm': 'rms', 'activation': 'swiglu', 'qk_norm': False, 'post_norm': False, 'parallel': False,
  'embedding_scale': 1.0, 'embedding_norm': False,
}  # fmt: skip
_BIASES = {
  (): (False, False),
  ('qkv', 'out'): (True, False),
  ('mlp',): (False, True),
  ('qkv', 'out', 'mlp'): (True, True),
}


def config(
  cfg: ModelConfig, slots: Sequence[PositionScheme], method: str, original: int, *, vocab_size: int, bos: int | None
) -> dict[str, Any]:
  """config.json of LlamaForCausalLM with `method` in force, of `original` tokens. vocab_size: rows of the embedding."""
  rope = _rope(slots)
  for field, value in _IS.items():
    if getattr(cfg, field) != value:
      raise SpecError(f'config.model.{field} = {getattr(cfg, field)!r}: a Llama has {value!r}')
  biases = tuple(part for part in ('qkv', 'out', 'mlp') if part in cfg.biases)
  if biases not in _BIASES:
    raise SpecError(f'config.model.biases = {cfg.biases}: a Llama has those of qkv and out, or neither')
  attention, mlp = _BIASES[biases]
  settings = interchange.write(rope._replace(method=method, original=original), cfg.width)
  longrope = (settings['rope_scaling'] or {}).get('long_factor')
  if longrope is not None and len(longrope) != cfg.width // 2:
    raise SpecError(f'method longrope: long of {len(longrope)} numbers: {cfg.width // 2}, one per pair, are allowed')
  return {
    'architectures': ['LlamaForCausalLM'],
    'model_type': 'llama',
    'vocab_size': vocab_size,
    'hidden_size': cfg.d_model,
    'intermediate_size': cfg.mlp,
    'num_hidden_layers': cfg.layers,
    'num_attention_heads': cfg.heads,
    'num_key_value_heads': cfg.kv,
    'head_dim': cfg.width,
    'hidden_act': 'silu',
    'rms_norm_eps': cfg.norm_eps,
    'tie_word_embeddings': cfg.tied,
    'attention_bias': attention,
    'mlp_bias': mlp,
    'attention_dropout': 0.0,
    **settings,
    'bos_token_id': bos,
    'eos_token_id': None,  # nothing here ends a text
    'torch_dtype': 'float32',
  }


def _rope(slots: Sequence[PositionScheme]) -> interchange.Rope:
  """What all layers share; SpecError where one of them is no plain RoPE."""
  found = []
  for slot in slots:
    name = f'posenc {slot.name}'
    if type(slot) is not RoPE:
      raise SpecError(f'{name}: a Llama encodes positions by rope in every layer')
    for option, value, plain in (
      ('window', slot.window, np.inf),
      ('ssmax', slot.ssmax is not None, False),
      ('cut', slot.cut, 'none'),
      ('fraction', slot.rot / slot.dims.head_dim, 1.0),
    ):
      if value != plain:
        raise SpecError(f'{name}: {option} = {value!r}: a Llama has none of that in it')
    found.append(interchange.Rope(base=slot.base, proportion=slot.proportion))
  if len(set(found)) > 1:
    raise SpecError(
      f'posenc: {" and ".join(dict.fromkeys(rope.scheme for rope in found))}: a Llama has one for all layers'
    )
  return found[0]


def tensors(params: Any, cfg: ModelConfig, slots: Sequence[PositionScheme]) -> Iterator[tuple[str, np.ndarray]]:
  """(Hugging Face's name, float32[out, in]) one after the other.

  Rows of q and k of a model that turns channels 2p and 2p + 1 are put so that p and p + H/2 are turned.
  """
  turned = ('attention.query', 'attention.key')
  for their, ours in LLAMA.items():
    assert isinstance(ours, str)
    if ours == 'head' and cfg.tied:
      continue
    for layer in range(cfg.layers) if their.startswith(LLAMA_BLOCK) else (None,):
      slot = slots[0 if layer is None else layer % len(slots)]
      for kind, x in _leaves(params, ours, layer, len(slots)):
        if ours in turned and isinstance(slot, RoPE) and slot.pairing == 'interleaved':
          x = x.reshape(-1, cfg.width // 2, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        yield f'{their.replace("#", str(layer))}.{kind}', np.ascontiguousarray(x, np.float32)


def _leaves(params: Any, path: str, layer: int | None, slots: int) -> Iterator[tuple[str, np.ndarray]]:
  """('weight' or 'bias', array as torch has it) of a module of ours."""
  node = params if layer is None else params['slots'][layer % slots]
  for key in path.split('.'):
    node = node[key]
  arrays = node if isinstance(node, dict) else {'embedding': node}
  for name, x in arrays.items():
    x = np.asarray(x if layer is None else x[layer // slots])
    yield ('bias' if name == 'bias' else 'weight'), x.T if name == 'kernel' else x

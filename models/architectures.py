"""What the config.json of a released model says, and which module of ours each of theirs is.

`ARCHITECTURES` has a function per `model_type`; a new architecture is one function and one line. Nothing is guessed: a
key that no function has asked for is an error that names it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from models.lm import ModelConfig
from posenc import interchange
from spec import SpecError, one_of


class Fused(NamedTuple):
  """Several modules of ours in one of theirs; `split` cuts its last axis, the outputs."""

  parts: tuple[str, ...]
  split: Callable[[np.ndarray, ModelConfig], Sequence[np.ndarray]]


class Form(NamedTuple):
  """What a config.json says: shapes, positions of each layer, and where its modules go.

  names: {their module: ours}, `#` for the layer. Of a plain module `weight` and `bias` follow by themselves.
  """

  model: ModelConfig
  posenc: tuple[str, ...]  # one per layer
  method: str  # scaling in force when it was trained
  train_len: int
  names: Mapping[str, str | Fused]
  unused: tuple[str, ...] = ()  # endings of tensors that hold no weights: masks, frequencies
  transposed: bool = True  # matrices are [out, in], as torch's Linear; GPT-2's Conv1D are [in, out]
  adjust: Callable[[str, np.ndarray], np.ndarray] = lambda path, x: x

  @property
  def pattern(self) -> tuple[str, ...]:
    """The shortest one that the layers repeat; all of them where there is none (26 layers, every sixth global)."""
    n = len(self.posenc)
    return next(self.posenc[:p] for p in range(1, n + 1) if n % p == 0 and self.posenc == self.posenc[:p] * (n // p))


# ---- config.json

# Keys that change nothing in a forward pass without dropout.
SILENT = {
  '_attn_implementation_autoset', '_name_or_path', 'architectures', 'attention_dropout', 'attn_implementation',
  'attn_pdrop', 'auto_map', 'bos_token_id', 'cache_implementation', 'chunk_size_feed_forward', 'classifier_dropout',
  'dtype', 'emb_pdrop', 'embd_dropout', 'embd_pdrop', 'eos_token_id', 'gradient_checkpointing', 'hidden_dropout',
  'id2label', 'initializer_range', 'is_decoder', 'is_encoder_decoder', 'label2id', 'model_type',
  'output_attentions', 'output_hidden_states', 'pad_token_id', 'problem_type', 'resid_dropout', 'resid_pdrop',
  'return_dict', 'sep_token_id', 'task_specific_params', 'torch_dtype', 'transformers.js_config',
  'transformers_version', 'unk_token_id', 'use_bfloat16', 'use_cache',
}  # fmt: skip
_REQUIRED: Any = object()


class Keys:
  """A config.json, read key by key."""

  def __init__(self, values: Mapping[str, Any]):
    self._values = values
    self._asked: set[str] = {*SILENT}

  def __call__(self, *keys: str, default: Any = _REQUIRED) -> Any:
    """The value of the first of these names that is there; null is as good as absent."""
    self._asked.update(keys)
    value = next((self._values[key] for key in keys if self._values.get(key) is not None), default)
    if value is _REQUIRED:
      raise SpecError(f'config.json: {keys[0]} is missing')
    return value

  def only(self, key: str, *allowed: Any) -> None:
    """Refuses a value that the LM has nothing for; the first one is the default."""
    value = self(key, default=allowed[0])
    if value not in allowed:
      raise SpecError(f'config.json: {key} = {value!r}: {" or ".join(map(repr, allowed))} is allowed')

  def choose(self, *keys: str, default: Any = _REQUIRED, among: Mapping[Any, Any]) -> Any:
    value = self(*keys, default=default)
    if value not in among:
      raise SpecError(one_of(f'config.json: {keys[0]}', value, among))
    return among[value]

  @property
  def names(self) -> Iterable[str]:
    return self._values

  def close(self, at: str = 'config.json: ') -> None:
    left = sorted(key for key, value in self._values.items() if key not in self._asked and value is not None)
    if left:
      raise SpecError(f'{at}{left[0]} = {self._values[left[0]]!r}: not understood, so not ignored')


GATED = {'silu': 'swiglu', 'swish': 'swiglu', 'gelu_pytorch_tanh': 'geglu', 'gelu_new': 'geglu'}
PLAIN = {'gelu': 'gelu', 'gelu_new': 'gelu_tanh', 'gelu_fast': 'gelu_tanh', 'gelu_pytorch_tanh': 'gelu_tanh'}
FULL, SLIDING = 'full_attention', 'sliding_attention'
LENGTHS = ('original_max_position_embeddings', 'max_position_embeddings')


ROPE = ('rope_scaling', 'rope_parameters', 'rope_theta', 'partial_rotary_factor', *LENGTHS)


def _rope(
  c: Keys, *, base: float = 10000.0, local_base: float | None = None, fraction: float = 1.0, length: int = 2048
) -> tuple[dict[str, str], str, int]:
  """RoPE: the scheme of each layer type, the scaling method in force, and the context that it was trained at.

  base, local_base, fraction: where the config does not say. What it says of scaling is read by posenc/interchange.py.
  """
  said = {key: value for key in ROPE if (value := c(key, default=None)) is not None}
  settings = said.get('rope_parameters') or said.get('rope_scaling') or {}
  nested = any(isinstance(value, Mapping) for value in settings.values())
  for key, value in (('rope_theta', base), ('partial_rotary_factor', fraction)):
    if key not in said and key not in settings and (key, value) != ('partial_rotary_factor', 1.0):
      said[key] = value
  if local_base is not None and not nested:
    said['rope_local_base_freq'] = local_base
  try:
    found = interchange.read(said)
  except SpecError as error:
    raise SpecError(f'config.json: {error}') from None
  kinds = {kind: found.get('', found.get(kind)) for kind in (FULL, SLIDING)}
  for kind, rope in kinds.items():
    if rope is None:
      raise SpecError(f'config.json: rope_parameters.{kind} is missing')
  full, sliding = (kinds[kind] for kind in (FULL, SLIDING))
  assert full is not None and sliding is not None
  if (local_base is not None or nested) and full.method != sliding.method:
    raise SpecError(
      f'config.json: rope_parameters: {full.method} in layers of type {FULL}, {sliding.method} in others: '
      'one for all layers is allowed'
    )
  return {FULL: full.scheme, SLIDING: sliding.scheme}, full.method, full.original or length


def _windowed(schemes: Mapping[str, str], kinds: Iterable[str], window: int | None) -> tuple[str, ...]:
  """The scheme of each layer, where those of type SLIDING see `window` keys."""
  seen = {FULL: schemes[FULL], SLIDING: schemes[SLIDING]}
  if window is not None:
    seen[SLIDING] = f'{seen[SLIDING][:-1]}, window={window})'
  return tuple(seen[kind] for kind in kinds)


def _kinds(c: Keys, layers: int, otherwise: Callable[[int], bool]) -> list[str]:
  """Each layer's type: as the config lists them, or SLIDING where `otherwise(layer)`."""
  kinds = c('layer_types', default=[SLIDING if otherwise(i) else FULL for i in range(layers)])
  if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
    raise SpecError(f'config.json: layer_types = {kinds}: one of {FULL}, {SLIDING} per layer is allowed')
  return kinds


def _llama_model(c: Keys, **changes: Any) -> ModelConfig:
  """The shapes of all that descend from Llama."""
  heads, d_model = c('num_attention_heads'), c('hidden_size')
  fields: dict[str, Any] = {
    'layers': c('num_hidden_layers'),
    'd_model': d_model,
    'heads': heads,
    'kv_heads': c('num_key_value_heads', default=heads),
    'head_dim': c('head_dim', default=d_model // heads),
    'd_mlp': c('intermediate_size'),
    'vocab': c('vocab_size'),
    'tied': c('tie_word_embeddings', default=False),
    'norm_eps': c('rms_norm_eps', default=1e-6),
    'activation': c.choose('hidden_act', 'hidden_activation', default='silu', among=GATED),
  }
  return ModelConfig(**{**fields, **changes})


def _biases(c: Keys) -> tuple[str, ...]:
  attention = ('qkv', 'out') if c('attention_bias', default=False) else ()
  return attention + (('mlp',) if c('mlp_bias', default=False) else ())


LLAMA_BLOCK = 'model.layers.#.'
LLAMA: dict[str, str | Fused] = {
  'model.embed_tokens': 'embedding.embedding',
  LLAMA_BLOCK + 'input_layernorm': 'norm_attention',
  LLAMA_BLOCK + 'self_attn.q_proj': 'attention.query',
  LLAMA_BLOCK + 'self_attn.k_proj': 'attention.key',
  LLAMA_BLOCK + 'self_attn.v_proj': 'attention.value',
  LLAMA_BLOCK + 'self_attn.o_proj': 'attention.out',
  LLAMA_BLOCK + 'post_attention_layernorm': 'norm_mlp',
  LLAMA_BLOCK + 'mlp.gate_proj': 'mlp.gate',
  LLAMA_BLOCK + 'mlp.up_proj': 'mlp.up',
  LLAMA_BLOCK + 'mlp.down_proj': 'mlp.down',
  'model.norm': 'norm',
  'lm_head': 'head',
}
QK_NORM: dict[str, str | Fused] = {
  LLAMA_BLOCK + 'self_attn.q_norm': 'attention.norm_query',
  LLAMA_BLOCK + 'self_attn.k_norm': 'attention.norm_key',
}
FREQUENCIES = ('rotary_emb.inv_freq',)  # buffers of old checkpoints


def _llama(c: Keys) -> Form:
  """Llama 1 to 3, SmolLM2, TinyLlama, Yi."""
  c('pretraining_tp', default=1)  # how the released weights were once multiplied, not what they are
  c('is_llama_config', default=True)
  c.only('rope_interleaved', False)
  model = _llama_model(c, biases=_biases(c))
  schemes, method, length = _rope(c)
  return Form(model, (schemes[FULL],) * model.layers, method, length, LLAMA, FREQUENCIES)


def _mistral(c: Keys) -> Form:
  model = _llama_model(c)
  schemes, method, length = _rope(c)
  kinds = _kinds(c, model.layers, lambda i: True)
  posenc = _windowed(schemes, kinds, c('sliding_window', default=None))
  return Form(model, posenc, method, length, LLAMA, FREQUENCIES)


def _qwen_layers(c: Keys, layers: int) -> tuple[tuple[str, ...], str, int]:
  schemes, method, length = _rope(c)
  window = c('sliding_window', default=None) if c('use_sliding_window', default=False) else None
  c('sliding_window', default=None)
  first = c('max_window_layers', default=28)
  kinds = _kinds(c, layers, lambda i: window is not None and i >= first)
  return _windowed(schemes, kinds, window), method, length


def _qwen2(c: Keys) -> Form:
  """Qwen2 and 2.5."""
  model = _llama_model(c, biases=('qkv',))
  c.only('use_mrope', False)
  return Form(model, *_qwen_layers(c, model.layers), LLAMA, FREQUENCIES)


def _qwen3(c: Keys) -> Form:
  model = _llama_model(c, biases=_biases(c), qk_norm=True)
  return Form(model, *_qwen_layers(c, model.layers), {**LLAMA, **QK_NORM}, FREQUENCIES)


def _smollm3(c: Keys) -> Form:
  """NoPE in every fourth layer."""
  c('pretraining_tp', default=1)
  model = _llama_model(c, biases=_biases(c), tied=c('tie_word_embeddings', default=True))
  posenc, method, length = _qwen_layers(c, model.layers)
  every = c('no_rope_layer_interval', default=4)
  rotated = c('no_rope_layers', default=[int((i + 1) % every != 0) for i in range(model.layers)])
  if len(rotated) != model.layers:
    raise SpecError(f'config.json: no_rope_layers has {len(rotated)} entries: num_hidden_layers = {model.layers}')
  if any('window' in scheme for scheme in posenc):
    raise SpecError('config.json: use_sliding_window = True: False is allowed')
  posenc = tuple(scheme if yes else 'nope' for scheme, yes in zip(posenc, rotated))
  return Form(model, posenc, method, length, LLAMA, FREQUENCIES)


def _in_turn(x: np.ndarray, cfg: ModelConfig) -> Sequence[np.ndarray]:
  """All of q, all of k, all of v."""
  return np.split(x, [cfg.heads * cfg.width, (cfg.heads + cfg.kv) * cfg.width], -1)


def _by_group(x: np.ndarray, cfg: ModelConfig) -> Sequence[np.ndarray]:
  """Of each key/value head its queries, its key, its value: [K, N/K + 2, H]."""
  x = x.reshape(*x.shape[:-1], cfg.kv, -1, cfg.width)
  parts = x[..., :-2, :], x[..., -2, :], x[..., -1, :]
  return [part.reshape(*x.shape[:-3], -1) for part in parts]


QKV = 'attention.query', 'attention.key', 'attention.value'


def _phi3(c: Keys) -> Form:
  """Phi-3 and Phi-4-mini."""
  for key in ('attention_bias', 'mlp_bias', 'lm_head_bias'):
    c.only(key, False)
  for key in ('full_attn_mod', 'interpolate_factor'):
    c.only(key, 1)
  model = _llama_model(c)
  schemes, method, length = _rope(c)
  kinds = _kinds(c, model.layers, lambda i: True)
  posenc = _windowed(schemes, kinds, c('sliding_window', default=None))
  names = {
    their: ours for their, ours in LLAMA.items() if not their.endswith(('q_proj', 'k_proj', 'v_proj', 'up_proj'))
  }
  names[LLAMA_BLOCK + 'self_attn.qkv_proj'] = Fused(QKV, _in_turn)
  names[LLAMA_BLOCK + 'mlp.gate_up_proj'] = Fused(('mlp.gate', 'mlp.up'), lambda x, cfg: np.split(x, 2, -1))
  return Form(model, posenc, method, length, names, FREQUENCIES)


def _gemma3(c: Keys) -> Form:
  """Norms multiply by 1 + weight; queries are scaled by a number of the config, which here goes into their norm."""
  model = _llama_model(
    c, qk_norm=True, post_norm=True, biases=_biases(c), embedding_scale=c('hidden_size') ** 0.5,
    tied=c('tie_word_embeddings', default=True), head_dim=c('head_dim', default=256),
    activation=c.choose('hidden_activation', default='gelu_pytorch_tanh', among=GATED),
  )  # fmt: skip
  for key in ('attn_logit_softcapping', 'final_logit_softcapping', 'use_bidirectional_attention'):
    c.only(key, None, False)
  every = c('sliding_window_pattern', '_sliding_window_pattern', default=6)
  schemes, method, length = _rope(c, base=1e6, local_base=c('rope_local_base_freq', default=1e4))
  kinds = _kinds(c, model.layers, lambda i: (i + 1) % every != 0)
  stretch = np.float32((model.width / c('query_pre_attn_scalar', default=256)) ** 0.5)
  names: dict[str, str | Fused] = {
    **LLAMA,
    **QK_NORM,
    LLAMA_BLOCK + 'post_attention_layernorm': 'post_attention',
    LLAMA_BLOCK + 'pre_feedforward_layernorm': 'norm_mlp',
    LLAMA_BLOCK + 'post_feedforward_layernorm': 'post_mlp',
  }

  def adjust(path: str, x: np.ndarray) -> np.ndarray:
    scale = stretch if path.endswith('norm_query.scale') else np.float32(1)
    return (1 + x) * scale if path.endswith('.scale') else x

  posenc = _windowed(schemes, kinds, c('sliding_window', default=4096))
  return Form(model, posenc, method, length, names, FREQUENCIES, adjust=adjust)


def _classic(c: Keys, heads: int, d_model: int, activation: str, **fields: Any) -> ModelConfig:
  """LayerNorm and an MLP without a gate; biases everywhere unless said otherwise."""
  shared: dict[str, Any] = {
    'biases': ('qkv', 'out', 'mlp', 'norm'), 'd_mlp': 4 * d_model, 'vocab': c('vocab_size'), 'norm': 'layer',
  }  # fmt: skip
  return ModelConfig(heads=heads, d_model=d_model, activation=activation, **{**shared, **fields})


def _gpt2(c: Keys) -> Form:
  """Learned positions, the table's rows the longest length."""
  d_model, rows = c('n_embd'), c('n_positions')
  for key, value in (('scale_attn_weights', True), ('scale_attn_by_inverse_layer_idx', False)):
    c.only(key, value)
  for key in ('n_ctx', 'reorder_and_upcast_attn', 'add_cross_attention', *(k for k in c.names if 'summary_' in k)):
    c(key, default=None)
  model = _classic(
    c, c('n_head'), d_model, c.choose('activation_function', default='gelu_new', among=PLAIN),
    layers=c('n_layer'), d_mlp=c('n_inner', default=4 * d_model), tied=c('tie_word_embeddings', default=True),
    norm_eps=c('layer_norm_epsilon', default=1e-5),
  )  # fmt: skip
  block = 'transformer.h.#.'
  names: dict[str, str | Fused] = {
    'transformer.wte': 'embedding.embedding',
    'transformer.wpe': 'schemes.0.table',
    block + 'ln_1': 'norm_attention',
    block + 'attn.c_attn': Fused(QKV, _in_turn),
    block + 'attn.c_proj': 'attention.out',
    block + 'ln_2': 'norm_mlp',
    block + 'mlp.c_fc': 'mlp.up',
    block + 'mlp.c_proj': 'mlp.down',
    'transformer.ln_f': 'norm',
    'lm_head': 'head',
  }
  posenc = (f'learned(rows={rows})',) * model.layers
  return Form(model, posenc, 'none', rows, names, ('.attn.bias', '.attn.masked_bias'), transposed=False)


def _blocks(block: str, norms: tuple[str, str], attention: str) -> dict[str, str | Fused]:
  """The names that GPT-NeoX gave a block's modules; BLOOM and Falcon kept most."""
  return {
    block + norms[0]: 'norm_attention',
    block + attention + '.query_key_value': Fused(QKV, _by_group),
    block + attention + '.dense': 'attention.out',
    block + norms[1]: 'norm_mlp',
    block + 'mlp.dense_h_to_4h': 'mlp.up',
    block + 'mlp.dense_4h_to_h': 'mlp.down',
  }


BOTH_NORMS = 'input_layernorm', 'post_attention_layernorm'


def _gpt_neox(c: Keys) -> Form:
  """GPT-NeoX and Pythia: part of each head rotates, MLP and attention read the same."""
  biases = ('qkv', 'out') if c('attention_bias', default=True) else ()
  model = _classic(
    c, c('num_attention_heads'), c('hidden_size'), c.choose('hidden_act', default='gelu', among=PLAIN),
    layers=c('num_hidden_layers'), d_mlp=c('intermediate_size'), tied=c('tie_word_embeddings', default=False),
    norm_eps=c('layer_norm_eps', default=1e-5), parallel=c('use_parallel_residual', default=True),
    biases=(*biases, 'mlp', 'norm'),
  )  # fmt: skip
  base, fraction = c('rotary_emb_base', default=1e4), c('rotary_pct', default=0.25)
  schemes, method, length = _rope(c, base=base, fraction=fraction)
  names = {
    'gpt_neox.embed_in': 'embedding.embedding',
    **_blocks('gpt_neox.layers.#.', BOTH_NORMS, 'attention'),
    'gpt_neox.final_layer_norm': 'norm',
    'embed_out': 'head',
  }
  unused = ('.attention.bias', '.attention.masked_bias', *FREQUENCIES)
  return Form(model, (schemes[FULL],) * model.layers, method, length, names, unused)


def _bloom(c: Keys) -> Form:
  for key in ('skip_bias_add', 'skip_bias_add_qkv', 'slow_but_exact', 'offset_alibi', 'bias_dropout_fusion',
              'masked_softmax_fusion', 'attention_softmax_in_fp32', 'pretraining_tp', 'n_inner'):  # fmt: skip
    c(key, default=None)
  c.only('apply_residual_connection_post_layernorm', False)
  model = _classic(
    c, c('n_head', 'num_attention_heads'), c('hidden_size', 'n_embed'), 'gelu_tanh', layers=c('n_layer'),
    tied=c('tie_word_embeddings', default=True), norm_eps=c('layer_norm_epsilon', default=1e-5), embedding_norm=True,
  )  # fmt: skip
  names = {
    'transformer.word_embeddings': 'embedding.embedding',
    'transformer.word_embeddings_layernorm': 'norm_embedding',
    **_blocks('transformer.h.#.', BOTH_NORMS, 'self_attention'),
    'transformer.ln_f': 'norm',
    'lm_head': 'head',
  }
  return Form(model, ('alibi',) * model.layers, 'none', c('seq_length', default=2048), names)


def _mpt(c: Keys) -> Form:
  """ALiBi, no bias anywhere."""
  attention = Keys(c('attn_config', default={}))
  attention.only('alibi', True)
  attention.only('alibi_bias_max', 8)
  attention.only('attn_type', 'multihead_attention')
  for key in ('clip_qkv', 'softmax_scale', 'qk_ln', 'prefix_lm', 'attn_uses_sequence_id'):
    attention.only(key, None, False)
  for key in ('attn_impl', 'attn_pdrop'):
    attention(key, default=None)
  attention.close('config.json: attn_config.')
  c.only('no_bias', True)
  c.only('logit_scale', None)
  for key in ('embedding_fraction', 'init_config', 'init_device', 'learned_pos_emb', 'norm_type', 'verbose',
              'tokenizer_name'):  # fmt: skip
    c(key, default=None)
  d_model = c('d_model')
  model = _classic(
    c, c('n_heads'), d_model, 'gelu', layers=c('n_layers'), d_mlp=c('expansion_ratio', default=4) * d_model,
    norm_eps=c('layer_norm_epsilon', default=1e-5), tied=c('tie_word_embeddings', default=True), biases=(),
  )  # fmt: skip
  block = 'transformer.blocks.#.'
  names: dict[str, str | Fused] = {
    'transformer.wte': 'embedding.embedding',
    block + 'norm_1': 'norm_attention',
    block + 'attn.Wqkv': Fused(QKV, _in_turn),
    block + 'attn.out_proj': 'attention.out',
    block + 'norm_2': 'norm_mlp',
    block + 'ffn.up_proj': 'mlp.up',
    block + 'ffn.down_proj': 'mlp.down',
    'transformer.norm_f': 'norm',
    'lm_head': 'head',
  }
  return Form(model, ('alibi',) * model.layers, 'none', c('max_seq_len', default=2048), names)


def _falcon(c: Keys) -> Form:
  """Three layouts: 40B's groups of heads with two norms, 7B's one key head and one norm, and one key head per query."""
  if c('alibi', default=False):
    raise SpecError('config.json: alibi = True: False is allowed; Falcon divides its ALiBi by sqrt(H), no other does')
  heads, groups = c('num_attention_heads', 'n_head'), c('new_decoder_architecture', default=False)
  one, parallel = c('multi_query', default=True), c('parallel_attn', default=True) or groups
  kv = c('num_kv_heads', 'n_head_kv', default=heads)
  kv = kv if groups else 1 if one else heads
  two_norms = not parallel or (groups and c('num_ln_in_parallel_attn', default=2) == 2)
  d_model, biases = c('hidden_size'), ('qkv', 'out', 'mlp') if c('bias', default=False) else ()
  model = _classic(
    c, heads, d_model, c.choose('activation', default='gelu', among=PLAIN), layers=c('num_hidden_layers', 'n_layer'),
    kv_heads=kv, d_mlp=c('ffn_hidden_size', default=4 * d_model), norm_eps=c('layer_norm_epsilon', default=1e-5),
    tied=c('tie_word_embeddings', default=True), parallel=bool(parallel), biases=(*biases, 'norm'),
  )  # fmt: skip
  c.only('apply_residual_connection_post_layernorm', False)
  schemes, method, length = _rope(c)
  block, shared = 'transformer.h.#.', Fused(('norm_attention', 'norm_mlp'), lambda x, cfg: (x, x))
  names = {
    'transformer.word_embeddings': 'embedding.embedding',
    **_blocks(block, ('ln_attn', 'ln_mlp') if groups else BOTH_NORMS, 'self_attention'),
    'transformer.ln_f': 'norm',
    'lm_head': 'head',
  }
  if not two_norms:
    names[block + 'input_layernorm'] = shared
  if one and not groups:
    names[block + 'self_attention.query_key_value'] = Fused(QKV, _in_turn)
  return Form(model, (schemes[FULL],) * model.layers, method, length, names, FREQUENCIES)


ARCHITECTURES: dict[str, Callable[[Keys], Form]] = {
  'llama': _llama,
  'mistral': _mistral,
  'qwen2': _qwen2,
  'qwen3': _qwen3,
  'smollm3': _smollm3,
  'phi3': _phi3,
  'gemma3_text': _gemma3,
  'gpt2': _gpt2,
  'gpt_neox': _gpt_neox,
  'bloom': _bloom,
  'mpt': _mpt,
  'falcon': _falcon,
}


def read_config(config: Mapping[str, Any]) -> Form:
  """What a config.json says, every key of it understood."""
  kind = config.get('model_type')
  if kind not in ARCHITECTURES:
    raise SpecError(one_of('config.json: model_type', kind, ARCHITECTURES))
  keys = Keys(config)
  try:
    form = ARCHITECTURES[kind](keys)
  except SpecError:
    raise
  except (TypeError, ValueError) as error:  # a value of another kind, or shapes that do not fit each other
    raise SpecError(f'config.json: {error}') from None
  keys.close()
  return form

"""Makes pretrained.npz: tiny models of every architecture, drawn at random, and their logits by transformers.

  python tests/golden/pretrained.py tests/golden/pretrained.npz     # a Python with torch, transformers and safetensors

Of each case: config.json, the tensors as save_pretrained names them, tokens, logits. Weights are bfloat16, kept as 16
bits; the logits are float32 of those weights. Norms and biases are drawn too: at 1 and 0 a swap would not show.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.torch import load_file

SHAPE = {
  'vocab_size': 32, 'hidden_size': 16, 'intermediate_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 4,
  'num_key_value_heads': 2, 'head_dim': 8, 'max_position_embeddings': 64,
  'bos_token_id': 0, 'eos_token_id': 1, 'pad_token_id': None,
}  # fmt: skip
PLAIN = {key: SHAPE[key] for key in ('vocab_size', 'hidden_size', 'bos_token_id', 'eos_token_id')}
FALCON = {**PLAIN, 'num_hidden_layers': 2, 'num_attention_heads': 4, 'max_position_embeddings': 64, 'alibi': False}
NEOX = {
  **PLAIN, 'hidden_size': 32, 'intermediate_size': 48, 'num_hidden_layers': 2, 'num_attention_heads': 4,
  'max_position_embeddings': 64,
}  # fmt: skip
CASES = {
  'llama': ('Llama', {**SHAPE, 'rms_norm_eps': 1e-3, 'rope_theta': 500.0}),
  'llama-biased': ('Llama', {**SHAPE, 'attention_bias': True, 'mlp_bias': True, 'tie_word_embeddings': True}),
  'mistral': ('Mistral', {**SHAPE, 'sliding_window': 6}),
  'qwen2': ('Qwen2', {**{k: v for k, v in SHAPE.items() if k != 'head_dim'}, 'tie_word_embeddings': True}),
  'qwen2-windowed': (
    'Qwen2', {**SHAPE, 'head_dim': 4, 'use_sliding_window': True, 'sliding_window': 6, 'max_window_layers': 1},
  ),
  'qwen3': ('Qwen3', SHAPE),
  'smollm3': ('SmolLM3', {**SHAPE, 'num_hidden_layers': 4}),
  'phi3': ('Phi3', {**{k: v for k, v in SHAPE.items() if k != 'head_dim'}, 'sliding_window': 6}),
  'gemma3': (
    'Gemma3', {**SHAPE, 'num_hidden_layers': 3, 'sliding_window': 6, 'query_pre_attn_scalar': 5,
               'layer_types': ['sliding_attention', 'sliding_attention', 'full_attention']},
  ),
  'gpt2': ('GPT2', {'vocab_size': 32, 'n_embd': 16, 'n_layer': 2, 'n_head': 4, 'n_positions': 32}),
  'gpt_neox': ('GPTNeoX', NEOX),
  'gpt_neox-sequential': ('GPTNeoX', {**NEOX, 'use_parallel_residual': False, 'rotary_pct': 0.5}),
  'bloom': ('Bloom', {'vocab_size': 32, 'hidden_size': 24, 'n_layer': 2, 'n_head': 3}),
  'mpt': ('Mpt', {'vocab_size': 32, 'd_model': 24, 'n_layers': 2, 'n_heads': 6, 'max_seq_len': 64}),
  'falcon-7b': ('Falcon', {**FALCON, 'multi_query': True}),
  'falcon-40b': ('Falcon', {**FALCON, 'new_decoder_architecture': True, 'num_kv_heads': 2}),
  'falcon-1b': ('Falcon', {**FALCON, 'multi_query': False, 'parallel_attn': False, 'bias': True}),
  # A case's place is its seed: new ones come last. Scaling in force, read beyond the original length.
  'llama-llama3': (
    'Llama', {**SHAPE, 'rope_scaling': {'rope_type': 'llama3', 'factor': 4.0, 'low_freq_factor': 1.0,
                                        'high_freq_factor': 4.0, 'original_max_position_embeddings': 8}},
  ),
  'llama-yarn': (
    'Llama', {**SHAPE, 'rope_scaling': {'type': 'yarn', 'factor': 4.0, 'original_max_position_embeddings': 8}},
  ),
  'llama-dynamic': (
    'Llama', {**SHAPE, 'max_position_embeddings': 8, 'rope_scaling': {'rope_type': 'dynamic', 'factor': 2.0}},
  ),
  'phi3-longrope': (
    'Phi3', {**{k: v for k, v in SHAPE.items() if k != 'head_dim'}, 'sliding_window': None,
             'original_max_position_embeddings': 8,
             'rope_scaling': {'type': 'longrope', 'short_factor': [1.0, 1.5], 'long_factor': [1.25, 6.0]}},
  ),
}  # fmt: skip


def config_of(name, fields):
  kind = 'Gemma3Text' if name == 'Gemma3' else name
  return getattr(transformers, f'{kind}Config')(**fields, attn_implementation='eager')


def model_of(name, fields):
  model = getattr(transformers, 'GPT2LMHeadModel' if name == 'GPT2' else f'{name}ForCausalLM')(config_of(name, fields))
  centred = 0.0 if name == 'Gemma3' else 1.0
  with torch.no_grad():
    for path, x in model.named_parameters():
      if x.ndim > 1:
        fan_in = x.shape[0] if name == 'GPT2' and '.h.' in path else x.shape[1]
        drawn = torch.randn(x.shape) * 1.5 / fan_in**0.5
      else:
        drawn = 0.3 * torch.randn(x.shape) + (centred if path.endswith('weight') else 0.0)
      x.copy_(drawn.bfloat16())
  return model.eval()


def main(path):
  out = {'versions': f'torch {torch.__version__}, transformers {transformers.__version__}'}
  for seed, (case, (name, fields)) in enumerate(CASES.items()):
    torch.manual_seed(seed)
    model = model_of(name, fields).float()
    tokens = torch.randint(0, fields['vocab_size'], (2, 24))
    with torch.no_grad():
      logits = model(tokens, use_cache=False).logits
    with tempfile.TemporaryDirectory() as folder:
      model.save_pretrained(folder)
      config = json.loads(pathlib.Path(folder, 'config.json').read_text())
      tensors = load_file(pathlib.Path(folder, 'model.safetensors'))
    config['torch_dtype'] = config.pop('dtype', 'float32')
    out[f'{case}/config'] = json.dumps(config, sort_keys=True)
    out[f'{case}/tokens'], out[f'{case}/logits'] = tokens.numpy().astype(np.int32), logits.numpy()
    for tensor, x in tensors.items():
      assert torch.equal(x, x.bfloat16().float()), tensor
      out[f'{case}/tensor/{tensor}'] = x.bfloat16().view(torch.int16).numpy().view(np.uint16)
    print(f'{case}: {sum(x.numel() for x in tensors.values())} parameters, logits {logits.std():.2f}')
  np.savez_compressed(path, **out)


if __name__ == '__main__':
  main(sys.argv[1])

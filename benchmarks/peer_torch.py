"""The torch side of the benchmarks: Hugging Face's Llama for a training step, fused SDPA for attention.

Run by the parent with the interpreter that has requirements-bench.txt; needs neither jax nor anything of ours but the
race's protocol.
"""

import argparse
import json
import sys

from benchmarks import race


def train_step(shape: dict, threads: int) -> None:
  import torch
  import transformers

  torch.set_num_threads(threads)
  torch.manual_seed(0)
  config = transformers.LlamaConfig(
    vocab_size=shape['vocab'], hidden_size=shape['d_model'], intermediate_size=shape['d_mlp'],
    num_hidden_layers=shape['layers'], num_attention_heads=shape['heads'], num_key_value_heads=shape['heads'],
    max_position_embeddings=shape['length'], tie_word_embeddings=True, use_cache=False,
  )  # fmt: skip
  model = transformers.LlamaForCausalLM(config).train()
  decayed = [p for p in model.parameters() if p.ndim > 1]
  rest = [p for p in model.parameters() if p.ndim <= 1]
  groups = [{'params': decayed, 'weight_decay': 0.1}, {'params': rest, 'weight_decay': 0.0}]
  optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
  tokens = torch.randint(shape['vocab'], (shape['batch'], shape['length'] + 1))
  inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

  def once():
    optimizer.zero_grad(set_to_none=True)
    logits = model(input_ids=inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.reshape(-1, shape['vocab']).float(), targets.reshape(-1))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()

  about = {
    'loss': once(),
    'parameters': sum(p.numel() for p in model.parameters()),
    'attention': config._attn_implementation,
    'versions': race.versions('torch', 'transformers'),
  }
  race.serve(about, once)


def attention(shape: dict, threads: int) -> None:
  import torch

  torch.set_num_threads(threads)
  torch.manual_seed(0)
  size = (shape['batch'], shape['heads'], shape['length'], shape['head_dim'])
  q, k, v, d = (torch.randn(size) for _ in range(4))
  sdpa = torch.nn.functional.scaled_dot_product_attention

  def forward():
    with torch.no_grad():
      return sdpa(q, k, v, is_causal=True)

  def both():
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(sdpa(*inputs, is_causal=True), inputs, d)

  race.serve({'versions': race.versions('torch')}, both if shape['backward'] else forward)


def main() -> None:
  parser = argparse.ArgumentParser()
  parser.add_argument('what', choices=('train_step', 'attention'))
  parser.add_argument('shape', type=json.loads)
  parser.add_argument('--threads', type=int, default=0)
  args = parser.parse_args()
  threads = race.pin(args.threads)
  try:
    {'train_step': train_step, 'attention': attention}[args.what](args.shape, threads)
  except ModuleNotFoundError as error:
    race.absent(f'{error.name} is not installed in {sys.executable} (pip install -r requirements-bench.txt)')


if __name__ == '__main__':
  main()

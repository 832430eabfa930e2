"""A run as a Hugging Face folder: config.json, model.safetensors, tokenizer.json of a Llama.

  python -m scripts.export_hf --workdir=runs/yarn --out=exported
  python -m scripts.export_hf --workdir=runs/smollm2 --out=exported --method='yarn(factor=2)'

Only of models whose every layer is RoPE. --method puts a scaling method in force, by default the one that the run was
trained with. --out appears whole or not at all, and is never written over.
"""

import argparse
import functools
import importlib
import json
import os
import pathlib
import shutil
import tempfile
from typing import Any

import jax
import numpy as np

import posenc
from configs.schema import Config
from data import tokenizers
from models import exported
from models.lm import abstract
from posenc import interchange
from spec import SpecError
from training import cli, provenance
from training.checkpoints import Checkpoints, as_abstract

BOS = '<s>'  # of tokenizers that have none of their own


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='folder of the run')
  parser.add_argument('--out', type=pathlib.Path, required=True, help='folder to make')
  parser.add_argument('--method', default='none', help="a scaling method, such as 'yarn(factor=8)'")
  parser.add_argument('--checkpoint', default='latest', help='a step, or latest')
  args = parser.parse_args(argv)
  jax.config.update('jax_platforms', 'cpu')
  if args.out.exists():
    raise SpecError(f'--out={args.out}: is there already; another folder is allowed')
  try:
    save_file = importlib.import_module('safetensors.numpy').save_file
  except ImportError:
    raise SpecError('safetensors is not installed: ./scripts/setup.sh pretrained') from None

  # ---- what it is, before any parameter is read
  config = Config.from_dict(provenance.read(args.workdir))
  slots = [config.build_scheme(text) for text in config.posenc]
  at = config.build_rule(slots).evaluate(config.train_len)
  if at is not None and not all(np.array_equal(at_T, np.arange(config.train_len)) for at_T in at):
    raise SpecError(f'config.positions = {config.positions!r}: a Llama counts 0, 1, 2 ...')
  tokenizer = tokenizers.build(config.data.tokenizer)
  ids = tokenizer.ids(bos=config.data.bos != 'none')
  _, shapes = abstract(functools.partial(config.build_model, tokenizer.vocab_size))
  rows = shapes['embedding']['embedding'].shape[0]
  method, original = _in_force(args.method, config)
  bos = tokenizer.bos if config.data.bos != 'none' else None
  written = exported.config(config.model, slots, method, original, vocab_size=rows, bos=bos)
  try:
    posenc.positions(method, slots, original, original)  # what is wrong with its arguments is said here
  except posenc.Unsupported as reason:
    raise SpecError(f'--method={args.method}: {reason}') from None

  # ---- its parameters
  checkpoints = Checkpoints(args.workdir)
  step = checkpoints.named(args.checkpoint)
  here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  params = checkpoints.restore(step, {'params': as_abstract(shapes, here)})['params']
  checkpoints.close()

  # ---- the folder
  args.out.parent.mkdir(parents=True, exist_ok=True)
  temporary = pathlib.Path(tempfile.mkdtemp(prefix=f'.{args.out.name}.', dir=args.out.parent))
  try:
    temporary.chmod(0o755)
    tensors = dict(exported.tensors(params, config.model, slots))
    save_file(tensors, temporary / 'model.safetensors', metadata={'format': 'pt'})
    (temporary / 'model.safetensors').chmod(0o644)  # the library's is for nobody else, and so is a temporary folder
    _write(temporary / 'config.json', written)
    said = _tokenizer(temporary, tokenizer, bos)
    if args.out.exists():
      raise SpecError(f'--out={args.out}: is there by now; another folder is allowed')
    os.rename(temporary, args.out)
  finally:
    shutil.rmtree(temporary, ignore_errors=True)
  scaling = written['rope_scaling'] or 'none'
  print(
    f'{args.out}: LlamaForCausalLM, step {step}, {sum(x.size for x in tensors.values()):,} parameters, rope_scaling '
    f'{scaling}, rope_theta {written["rope_theta"]:g}, {written["max_position_embeddings"]} tokens\n{said}'
    + (f'\nnote: {rows} rows for {ids} ids of the tokenizer' if rows != ids else '')
  )


def _in_force(asked: str, config: Config) -> tuple[str, int]:
  """The method, and its L: as `posenc.positions` has them after tuning."""
  method = interchange.ours(asked)
  posenc.check_method(method)
  original = config.train_len if config.method != 'none' else max(config.train_len, config.window)
  return (config.method if method == 'none' else method), original


def _write(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n')


def _tokenizer(folder: pathlib.Path, tokenizer: tokenizers.Tokenizer, bos: int | None) -> str:
  """Writes it, and says what it is."""
  from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

  if isinstance(tokenizer, tokenizers.BPE):
    found, plain = Tokenizer.from_file(tokenizer.path), pathlib.Path(tokenizer.path).read_bytes()
    name = found.id_to_token(bos) if bos is not None else None
    said = f'tokenizer: {tokenizer.path}'
    if bos is None or name is not None:
      (folder / 'tokenizer.json').write_bytes(plain)
    else:  # it has no BOS of its own: ours is the id after its last
      name = BOS
      found.add_special_tokens([AddedToken(name, special=True, normalized=False)])
      if found.token_to_id(name) != bos:
        raise SpecError(
          f'config.data.tokenizer: {tokenizer.path} has a {name} that is not BOS; no tokenizer.json says so'
        )
      found.save(str(folder / 'tokenizer.json'))
      said += f', and {name} = {bos}'
  else:
    # Every byte as the character that GPT-2 writes for it, under its own number; no merges.
    found = Tokenizer(models.BPE(vocab=tokenizers.characters(), merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    name, said = BOS, 'tokenizer: bytes of UTF-8, one id each'
    found.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    if bos is not None:
      found.post_processor = processors.TemplateProcessing(f'{name} $A', special_tokens=[(name, bos)])
      said += f', {name} = {bos} before a text'
    found.save(str(folder / 'tokenizer.json'))
  named = {} if name is None else {'bos_token': name}
  _write(folder / 'tokenizer_config.json', {'tokenizer_class': 'PreTrainedTokenizerFast', **named})
  return said


if __name__ == '__main__':
  cli.guard(main)

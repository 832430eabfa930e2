"""Sweeps a trained model over lengths and scaling methods: perplexity against length, with intervals.

  python eval_extrapolation.py --workdir=runs/rope --method=none --method='yarn(factor=8)' --multiples=1,2,4,8

Writes workdir/extrapolation/: curve.jsonl, curve.csv, curve.png and event files. A second sweep adds to the curve.
"""

import functools
import pathlib
from typing import Any

import tqdm
from absl import flags

import posenc
from configs.schema import Config
from evaluation import report
from evaluation.plan import Plan
from evaluation.score import Scorer
from evaluation.sweep import cost, sweep
from models.lm import abstract
from spec import SpecError
from training import cli, provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, spread

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run of train.py.', required=True)
METHOD = flags.DEFINE_multi_string('method', None, "A scaling method, such as 'yarn(factor=8)+logn'. Repeat for more.")
MULTIPLES = flags.DEFINE_list('multiples', None, 'Lengths in units of train_len, such as 0.5,1,2,4.')
MESH = flags.DEFINE_list('mesh', None, "data,fsdp,context of this sweep, such as 0,1,8; the config's by default.")
MEMORY_GB = flags.DEFINE_float('memory_gb', None, "GiB for this sweep, 0: what is free; the config's by default.")
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'A step, or latest.')


def main() -> int:
  # ---- what is asked for
  workdir = pathlib.Path(WORKDIR.value).absolute()
  config = Config.from_dict(provenance.read(workdir))
  asked = config.to_dict()
  if METHOD.value:
    asked['methods'] = tuple(METHOD.value)
  if MULTIPLES.value:
    asked['eval']['multiples'] = tuple(_number('multiples', text) for text in MULTIPLES.value)
  if MESH.value:
    asked['mesh'] = tuple(_number('mesh', text, int) for text in MESH.value)
  if MEMORY_GB.value is not None:
    asked['memory_gb'] = MEMORY_GB.value
  config = Config.from_dict(asked)  # checked like any config
  methods = ('none', *(m for m in config.methods if m != 'none'))  # what every method is compared with
  lengths = [config.tokens(m) for m in config.eval.multiples]
  checkpoints = Checkpoints(workdir)
  step = checkpoints.latest if CHECKPOINT.value == 'latest' else _number('checkpoint', CHECKPOINT.value, int)
  if step is None:
    raise SpecError(f'workdir = {str(workdir)!r}: holds no checkpoint yet')
  report.check_writable(workdir / 'extrapolation')
  mesh = make_mesh(0, config.mesh)  # batches are cut to fit it

  # ---- data, model
  data = config.load_data()
  provenance.check_data(workdir, data)
  plan = Plan(
    config.eval,
    data.splits.test,
    train_len=config.train_len,
    max_multiple=config.max_multiple,
    bos=config.data.bos,
    bos_id=data.tokenizer.bos,
    corpus_sha256=data.sha256,
    stride=data.stride,
  )
  make = functools.partial(config.build_model, data.tokenizer.vocab_size)
  graphdef, shapes = abstract(make)
  params = checkpoints.restore(step, {'params': as_abstract(shapes, spread(mesh, shapes))})['params']
  checkpoints.close()

  # ---- the sweep
  slots = [config.build_scheme(text) for text in config.posenc]
  rule = config.build_rule(slots)
  for remark in (*posenc.remarks(methods, slots, config.train_len), *rule.remarks()):
    print(f'note: {remark}')
  facts = {
    'posenc': list(config.posenc),
    'checkpoint_step': step,
    'seed': config.seed,
    'tokens_seen': step * config.optimizer.accumulate * config.batch * config.train_len,
    'params': provenance.count(shapes),
    'learning_rate': config.optimizer.learning_rate,
    'bos': config.data.bos,
    'corpus': data.name,
    'corpus_sha256': data.sha256,
    'corpus_documents': data.n_documents,
    'corpus_tokens': data.n_tokens,
  }
  tokens = cost(plan, lengths, methods)
  per_document = f'{config.eval.spans} spans of {plan.targets} targets'
  print(
    f'{len(plan.documents)} test documents x {per_document}; {len(methods)} methods x {len(lengths)} lengths, at most '
    f'{tokens / 1e6:.1f} M tokens, each set of positions once'
  )
  scorer = Scorer(graphdef, params, mesh, config.eval.batch_tokens, config.memory_gb)
  points, kept = [], None
  with tqdm.tqdm(total=tokens, unit='token', unit_scale=True, disable=None) as bar:
    parts = sweep(
      scorer,
      plan,
      slots,
      methods,
      lengths,
      train_len=config.train_len,
      rule=rule,
      bytes_per_token_V=data.tokenizer.bytes_per_token_V,
      facts=facts,
      progress=bar,
      floor=data.floor,
    )
    for part in parts:  # written as it comes: a killed sweep keeps the lengths that it has measured
      points, differed = report.write(workdir / 'extrapolation', part, keep=kept is None)
      kept = kept or differed

  # ---- what it found
  for protocol in config.eval.protocols:
    print(f'\n{report.table(points, protocol)}')
  refused: dict[tuple[str, str], str] = {}
  for point in points:
    if point['reason']:
      refused.setdefault((point['method'], point['outcome']), f'{point["outcome"]}: {point["reason"]}')
  for line in dict.fromkeys(refused.values()):
    print(line)
  if kept:
    print(f'\nthe previous curve differed and is kept as {workdir / "extrapolation" / kept}')
  print(f'\n{workdir / "extrapolation" / "curve.png"}')
  return 0


def _number(flag: str, text: str, kind: type = float) -> Any:
  try:
    return kind(text)
  except ValueError:
    allowed = {'checkpoint': 'a whole number, or latest,', 'mesh': 'a whole number'}.get(flag, 'a number')
    raise SpecError(f'--{flag}: {text!r}: {allowed} is allowed') from None


if __name__ == '__main__':
  cli.run(main)

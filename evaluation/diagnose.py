"""Why a run's curve broke: what comes back where frequency pairs are kept within the range of training, and attention.

  python -m evaluation.diagnose --workdir=runs/rope --method=none --multiples=1,2,4,8

Writes workdir/diagnosis/: pairs.jsonl, attention.jsonl, pictures of both, event files; evaluation.report shows them.
What is done to a pair, and what is counted: evaluation/diagnosis.py. What was scored is kept in the run's store.
"""

import pathlib

import jax
import tqdm
from absl import flags

from configs.schema import Config
from evaluation import diagnosis, events, figures, results
from evaluation.store import Store
from opened import Opened
from posenc import check_method
from spec import SpecError
from training import cli, hosts, provenance

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run of train.py.', required=True)
METHOD = flags.DEFINE_string('method', 'none', "The scaling method under which to look, such as 'yarn(factor=8)'.")
MULTIPLES = flags.DEFINE_list('multiples', ['1', '2', '4', '8'], 'Lengths in units of train_len, such as 1,2,4,8.')
SPANS = flags.DEFINE_integer('spans', 2, 'Spans of targets per document, evenly spread; 0: all.', lower_bound=0)
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'A step, or latest.')


def main() -> int:
  workdir = pathlib.Path(WORKDIR.value).absolute()
  asked = Config.from_dict(provenance.read(workdir)).to_dict()
  try:
    asked['eval']['multiples'] = tuple(dict.fromkeys((1.0, *map(float, MULTIPLES.value))))
  except ValueError as error:
    raise SpecError(f'--multiples: numbers are allowed ({error})') from None
  check_method(METHOD.value)
  config = Config.from_dict(asked)
  if jax.process_count() > 1:
    raise SpecError('evaluation.diagnose: one process is allowed')
  lengths = [config.tokens(m) for m in config.eval.multiples]
  run, directory = Opened(workdir, config, CHECKPOINT.value), workdir / 'diagnosis'
  results.check_writable(directory)
  found = diagnosis.Diagnosis(
    plan=run.plan(),
    texts=config.posenc,
    schemes=run.slots,
    method=METHOD.value,
    train_len=config.train_len,
    rule=run.rule,
    spans=SPANS.value,
    facts={'run': ' '.join(config.posenc), 'checkpoint_step': run.step, 'seed': config.seed},
    open_rows=run.rows_in(Store(run.results / 'store', lambda line: print(f'note: {line}'))),
  )
  said: dict[str, None] = {}
  pairs, attention = [], []
  with tqdm.tqdm(unit='token', unit_scale=True, disable=hosts.quiet()) as bar:
    for part in found.pairs(lengths, lambda: run.scorer, bar, lambda line: said.setdefault(line)):
      pairs = diagnosis.write(directory / 'pairs.jsonl', part)
    for part in found.attention(lengths, run.graphdef, run.params, run.mesh, config.eval.batch_tokens, bar):
      attention = diagnosis.write(directory / 'attention.jsonl', part)
  for line in said:
    print(f'note: {line}')
  pictures = {}
  for name, points, draw in (('pairs', pairs, figures.pairs), ('attention', attention, figures.attention)):
    if points:
      pictures[name] = directory / f'{name}.png'
      draw(points).savefig(pictures[name], dpi=150)
  if pairs:
    print(f'\n{diagnosis.table(pairs)}')
  if attention:
    print(f'\n{diagnosis.attention_table(attention)}')
  tables = {'pairs': diagnosis.table(pairs)} if pairs else {}
  name = f'{" ".join(config.posenc)} {METHOD.value} seed {config.seed}'
  events.write_diagnosis(directory / 'tensorboard', name, pairs, attention, tables, pictures)
  print('', *pictures.values(), sep='\n')
  return 0


if __name__ == '__main__':
  cli.run(main)

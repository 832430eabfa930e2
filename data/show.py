"""What a config's data are: documents, lengths, splits, how many documents reach each length, samples.

  python -m data.show --config=configs/base.py --config.data.corpus="jsonl(glob='books/*.jsonl.gz')"

Where the corpus is too small for the config, everything up to the splits is shown, and what is missing is the error.
"""

from collections.abc import Sequence

import numpy as np
from absl import flags
from ml_collections import config_flags

from configs.schema import Config
from data import cache, known, tokenizers
from data.split import TokenDocument
from training import cli

CONFIG = config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True)
SAMPLES = flags.DEFINE_integer('samples', 1, 'Documents of each side whose beginning is shown.', lower_bound=0)
flags.mark_flag_as_required('config')

SHOWN = 64  # tokens of a sample
# What stands between documents: nothing is ever joined.
SEPARATED = {
  'window': 'BOS before every window',
  'document': "BOS before a document's first token",
  'none': 'no BOS, a window sees the token before it',
}


def lengths(documents: Sequence[TokenDocument]) -> np.ndarray:
  return np.array([len(d.tokens) for d in documents], np.int64)


def table(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join(
    '  '.join([row[0].ljust(widths[0]), *(cell.rjust(n) for cell, n in zip(row[1:], widths[1:]))]).rstrip()
    for row in rows
  )


def main() -> int:
  config = Config.from_dict(CONFIG.value.to_dict())
  tokenizer = tokenizers.build(config.data.tokenizer)
  corpus, source = cache.find(config.data.corpus, tokenizer)
  n, length_n = corpus.n_tokens, lengths(corpus.documents)
  print(f'corpus {corpus.name}: {len(length_n):,} documents, {corpus.n_bytes:,} bytes, sha256 {corpus.sha256[:16]}')
  print(
    f'tokenizer {config.data.tokenizer}: {tokenizer.vocab_size:,} ids, {n:,} tokens, '
    f'{corpus.n_bytes / n:.3f} bytes each'
  )
  print(
    f'bos {config.data.bos}: {SEPARATED[config.data.bos]} (id {tokenizer.bos}); no window of training crosses documents'
  )
  _, sizes = np.unique(corpus.group_n, return_counts=True)
  print(f'near-duplicates: {len(sizes):,} groups, the largest of {sizes.max():,} documents, on one side each')
  low, *middle, high = (f'{q:,.0f}' for q in np.quantile(length_n, [0, 0.05, 0.5, 0.95, 1]))
  print(f'tokens per document: {low} to {high}; 5 %, half and 95 % have at most {", ".join(middle)}\n')

  multiples = sorted({*config.eval.multiples, *(2.0**i for i in range(config.max_multiple.bit_length()))})
  asked = {f'{multiple:g}x': config.tokens(multiple) for multiple in multiples if multiple <= config.max_multiple}
  room = config.eval.spans * (known(source, tokenizer)[1] - 1)
  asked['to be tested'] = config.eval.min_test_tokens(config.train_len, config.max_multiple) + room

  def reach(columns: dict[str, np.ndarray]) -> str:
    rows = [
      [name, f'{tokens:,}', *(f'{np.sum(length_n >= tokens):,}' for length_n in columns.values())]
      for name, tokens in asked.items()
    ]
    return table([['documents that reach', 'tokens', *columns], *rows])

  try:
    data = config.load_data()
  except ValueError:
    print(reach({'all': length_n}))
    raise
  sides = {'train': data.splits.train, 'validation': data.splits.validation, 'test': data.splits.test}
  rows = [
    [
      name,
      f'{len(side):,}',
      f'{sum(d.n_bytes for d in side):,}',
      f'{lengths(side).sum():,}',
      f'{np.sum(lengths(side) < config.train_len):,}',
    ]
    for name, side in sides.items()
  ]
  print(table([['', 'documents', 'bytes', 'tokens', 'shorter than a window'], *rows]) + '\n')
  print(reach({'all': length_n, **{name: lengths(side) for name, side in sides.items()}}))
  for name, side in sides.items():
    for document in side[: SAMPLES.value]:
      text = tokenizer.decode(document.tokens[:SHOWN].tolist()).decode(errors='replace')
      print(f'\n{name}, {document.name}, {len(document.tokens):,} tokens: {text!r}')
  return 0


if __name__ == '__main__':
  cli.run(main)

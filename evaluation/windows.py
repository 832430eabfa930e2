"""Writes the windows of a sweep to a file, for a model of any framework to score.

  python -m evaluation.windows --config=configs/quickstart.py --out=windows.npz --multiples=1,2,4
  python -m evaluation.windows --workdir=runs/rope --out=windows.npz --protocol=fixed_targets

What is in it and what comes back: docs/bring_your_own.md. Those of a run have the targets of its own curve.
"""

import pathlib

from absl import flags
from ml_collections import config_flags

from configs.schema import Config
from evaluation import exchange
from spec import SpecError
from training import cli, provenance

CONFIG = config_flags.DEFINE_config_file('config', None, 'A recipe whose corpus and lengths are asked for.')
WORKDIR = flags.DEFINE_string('workdir', None, 'A run whose targets are asked for, instead of a recipe.')
OUT = flags.DEFINE_string('out', 'windows.npz', 'The file.')
PROTOCOL = flags.DEFINE_multi_string('protocol', None, "Such as 'sliding(stride=64)'. Repeat for more; the config's.")
CONTROL = flags.DEFINE_multi_string('control', None, "Such as 'foreign(spans=16)', or '' for none; the config's.")
MULTIPLES = flags.DEFINE_list('multiples', None, 'Lengths in units of train_len, such as 0.5,1,2,4.')


def main() -> int:
  if (CONFIG.value is None) == (WORKDIR.value is None):
    raise SpecError('--config, --workdir: one of the two is needed')
  if WORKDIR.value is not None:
    asked = Config.from_dict(provenance.read(pathlib.Path(WORKDIR.value))).to_dict()
  else:
    asked = Config.from_dict(CONFIG.value.to_dict()).to_dict()
  if PROTOCOL.value:
    asked['eval']['protocols'] = tuple(PROTOCOL.value)
  if CONTROL.value:
    asked['eval']['controls'] = tuple(control for control in CONTROL.value if control)
  if MULTIPLES.value:
    try:
      asked['eval']['multiples'] = tuple(map(float, MULTIPLES.value))
    except ValueError:
      raise SpecError(f'--multiples: {",".join(MULTIPLES.value)!r}: numbers are allowed') from None
  config = Config.from_dict(asked).to_dict()  # checked like any config
  path = pathlib.Path(OUT.value)
  file = exchange.write(path, config)
  for length, windows in sorted(file.windows.items()):
    print(f'{length} tokens: {len(windows)} windows, {sum(w.scored for w in windows)} targets')
  print(f'tokens of {file.config["data"]["tokenizer"]}, targets {file.plan.targets_hash}: {path}')
  return 0


if __name__ == '__main__':
  cli.run(main)

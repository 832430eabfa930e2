"""What configs/quickstart.py predicted, checked on the curves that came out.

python -m scripts.quickstart_claims runs/quickstart
"""

import argparse
import pathlib

from evaluation.runs import read
from spec import SpecError
from training import cli


def claims(rope: list[dict], alibi: list[dict]) -> list[tuple[str, bool, str]]:
  """(claim, whether it holds, the numbers), on the fixed-target curves."""

  def at(points, method, multiple):
    for p in points:
      if (p['protocol'], p['method'], p['length']) == ('fixed_targets', method, multiple * p['train_length']):
        return p
    raise SpecError(f'the curve of {points[0]["scheme"]} has no {method} at {multiple}x; sweep it with the defaults')

  rising = [at(rope, 'none', m)['ppl'] for m in (1, 2, 4, 8, 16, 32)]
  flat = [at(alibi, 'none', m)['ppl'] for m in (1, 32)]
  paired = at(rope, 'yarn', 4)
  steps = all(a < b for a, b in zip(rising, rising[1:]))
  return [
    (
      'a. RoPE, no method: rises at every doubling past 1x, and 8x is at least 1.5 times 1x',
      steps and rising[3] >= 1.5 * rising[0],
      f'{" -> ".join(f"{y:.2f}" for y in rising)}; 8x is {rising[3] / rising[0]:.2f} times 1x',
    ),
    (
      'b. ALiBi at 32x is at most 1.02 times its 1x',
      flat[1] <= 1.02 * flat[0],
      f'{flat[0]:.3f} -> {flat[1]:.3f}, {flat[1] / flat[0]:.3f} times',
    ),
    (
      'c. yarn beats none at 4x, paired 95 % interval excluding 0',
      paired['vs_none_high'] is not None and paired['vs_none_high'] < 0,
      f'{paired["vs_none"]:.3f} nats [{paired["vs_none_low"]:.3f}, {paired["vs_none_high"]:.3f}]',
    ),
  ]


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('out', type=pathlib.Path)
  out = parser.parse_args(argv).out
  print('Predicted in configs/quickstart.py (one seed: a statement about these two checkpoints):')
  for claim, holds, numbers in claims(read(out / 'rope').points, read(out / 'alibi').points):
    print(f'  {"holds" if holds else "FAILS"}  {claim}: {numbers}')


if __name__ == '__main__':
  cli.guard(main)

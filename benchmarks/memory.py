"""Temporary bytes of one evaluation window at 4,096 .. 32,768 tokens, for every scheme, and the power they grow with.

  python -m benchmarks.memory

What XLA says it will allocate (`compiled.memory_analysis()`): nothing runs, so no noise. A model of 4 layers, d_model
128, batch 1. The exponent is the slope of log bytes on log tokens: 1 is linear; a table [T, T] would give 2.
"""

import math
from collections.abc import Sequence

from benchmarks import race

LENGTHS = (4096, 8192, 16384, 32768)
TINY = (16, 32, 64)


def exponent(lengths: tuple[int, ...], values: Sequence[float]) -> float:
  """Least-squares slope of log value on log length."""
  x = [math.log(length) for length in lengths]
  y = [math.log(value) for value in values]
  mx, my = sum(x) / len(x), sum(y) / len(y)
  return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--schemes', default=None, help='comma-separated; default: all')
  args = parser.parse_args(argv)
  import jax

  import posenc
  from benchmarks.build import evaluation, temporary_bytes
  from models.lm import ModelConfig
  from training.devices import start_jax

  start_jax()
  lengths = TINY if args.tiny else LENGTHS
  cfg = ModelConfig(layers=1, d_model=16, heads=2, tile=8, loss_chunk=8) if args.tiny else ModelConfig()
  rows, found = [], []
  for scheme in list(posenc.SCHEMES) if args.schemes is None else args.schemes.split(','):
    sizes = []
    for length in lengths:
      f, arguments = evaluation(scheme, length, cfg, vocab=256)
      sizes.append(temporary_bytes(jax.jit(f).lower(*arguments).compile()))
    slope = exponent(lengths, sizes)
    rows.append([scheme, *(f'{size / 2**20:.1f}' for size in sizes), f'{slope:.2f}'])
    found.append({'name': scheme, 'temporary_bytes': sizes, 'exponent': slope})
  print('\ntemporary MiB of one window')
  race.table(['', *(str(length) for length in lengths), 'exponent'], rows)
  race.record(args.out, 'memory', args, {'lengths': lengths, 'runs': found})


if __name__ == '__main__':
  main()

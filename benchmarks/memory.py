"""Temporary bytes of one evaluation window at 4,096 .. 32,768 tokens, for every scheme, and the power they grow with.

  python -m benchmarks.memory

What XLA says it will allocate (`compiled.memory_analysis()`): nothing runs, so no noise. A model of 4 layers, d_model
128, batch 1. The exponent is the slope of log bytes on log tokens: 1 is linear; a table [T, T] would give 2. Then the
same window of 16,384 tokens is run, each scheme in a process of its own, and the kernel says how much memory it had at
most (peak RSS): Python, jax and the compiler included.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

from benchmarks import race
from benchmarks.race import Contestant

LENGTHS = (4096, 8192, 16384, 32768)
RUN = 16384
TINY = (16, 32, 64)


def exponent(lengths: tuple[int, ...], values: Sequence[float]) -> float:
  """Least-squares slope of log value on log length."""
  x = [math.log(length) for length in lengths]
  y = [math.log(value) for value in values]
  mx, my = sum(x) / len(x), sum(y) / len(y)
  return sum((a - mx) * (b - my) for a, b in zip(x, y)) / sum((a - mx) ** 2 for a in x)


def run(scheme: str, length: int, model: dict) -> None:
  import jax

  from benchmarks.build import evaluation
  from models.lm import ModelConfig
  from training.devices import start_jax

  start_jax()
  f, arguments = evaluation(scheme, length, ModelConfig(**model), vocab=256, run=True)
  program = jax.jit(f)
  nll = float(program(*arguments).mean())
  race.serve({'nll': nll}, lambda: None, warm_up=0)


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--schemes', default=None, help='comma-separated; default: all')
  parser.add_argument('--contestant', nargs=3, metavar=('SCHEME', 'LENGTH', 'MODEL'), help='what the parent starts')
  args = parser.parse_args(argv)
  if args.contestant:
    race.pin(args.threads)
    scheme, length, model = args.contestant
    run(scheme, int(length), json.loads(model))
    return
  import jax

  import posenc
  from benchmarks.build import evaluation, temporary_bytes
  from models.lm import ModelConfig
  from training.devices import start_jax

  start_jax()
  lengths = TINY if args.tiny else LENGTHS
  model: dict[str, Any] = {'layers': 1, 'd_model': 16, 'heads': 2, 'tile': 8, 'loss_chunk': 8} if args.tiny else {}
  run_length, cfg = lengths[-1] if args.tiny else RUN, ModelConfig(**model)
  rows, found = [], []
  for scheme in list(posenc.SCHEMES) if args.schemes is None else args.schemes.split(','):
    sizes = []
    for length in lengths:
      f, arguments = evaluation(scheme, length, cfg, vocab=256)
      sizes.append(temporary_bytes(jax.jit(f).lower(*arguments).compile()))
    slope = exponent(lengths, sizes)
    command = race.ours('benchmarks.memory', f'--threads={args.threads}', '--contestant', scheme, str(run_length))
    c = Contestant(scheme, [*command, json.dumps(model)], race.allocator())
    c.start()
    c.stop()
    peak = c.about['peak_rss']
    rows.append([scheme, *(f'{size / 2**20:.1f}' for size in sizes), f'{slope:.2f}', f'{peak / 2**20:.0f}'])
    found.append({'name': scheme, 'temporary_bytes': sizes, 'exponent': slope, 'nll': c.about['nll'], 'peak_rss': peak})
  print('\ntemporary MiB of one window, and peak RSS')
  race.table(['', *(str(length) for length in lengths), 'exponent', f'peak RSS at {run_length}'], rows)
  race.record(args.out, 'memory', args, {'lengths': lengths, 'run': run_length, 'runs': found})


if __name__ == '__main__':
  main()

"""A sweep of 6 lengths x 12 methods against itself with nothing kept between methods, and time against length.

  python -m benchmarks.sweep

One sweep compiles a program per length, or two where methods read a second position map, cuts and sends its windows
once, and scores positions that two methods share once. The other is made of one sweep per (method, length), each with
a scorer of its own and `jax.clear_caches()` before it. Neither has the persistent compile cache; every run is a new
process, measured from its first program on. Then one window of 4,096 .. 32,768 tokens through a model of 4 layers,
d_model 128: seconds, and the power of the length that they grow with.
"""

import argparse
import json
import statistics
import time
from typing import Any

from benchmarks import race
from benchmarks.memory import exponent
from benchmarks.race import Contestant

METHODS = (
  'none', 'pi', 'ntk', 'dynamic_ntk', 'dynamic_ntk_hf', 'ntk_by_parts', 'yarn', 'yarn(factor=8)', 'llama31', 'logn',
  'sliding_window', 'rerope',
)  # fmt: skip
MULTIPLES = (1, 2, 4, 8, 16, 32)
SWEEP: dict[str, Any] = {
  'train_len': 64, 'multiples': MULTIPLES, 'methods': METHODS, 'documents': 2, 'spans': 2, 'batch_tokens': 4096,
  'model': {'d_model': 64, 'heads': 2},
}  # fmt: skip
SMALL = {'layers': 1, 'd_model': 16, 'heads': 2, 'tile': 8, 'loss_chunk': 8}
TINY_SWEEP: dict[str, Any] = {
  **SWEEP, 'multiples': (1, 2), 'methods': ('none', 'pi', 'rerope'), 'documents': 1, 'model': SMALL,
}  # fmt: skip
LENGTHS = (4096, 8192, 16384, 32768)
TINY_LENGTHS = (16, 32, 64)
SCHEMES = 'nope,rope,alibi,t5,fire,cope'


class Silent:
  """A progress bar that shows nothing."""

  def update(self, n):
    pass

  def write(self, text):
    pass

  def set_postfix_str(self, text):
    pass


def run_sweep(setting: dict, apart: bool) -> None:
  import jax
  import numpy as np
  from flax import nnx

  import posenc
  from benchmarks.build import initial
  from data import TokenDocument
  from evaluation.plan import EvalConfig, Plan
  from evaluation.score import Scorer
  from evaluation.survey import Survey
  from evaluation.sweep import sweep
  from models.lm import LM, ModelConfig, abstract
  from training.devices import make_mesh, spread, start_jax

  start_jax()
  train_len, longest, cfg = setting['train_len'], max(setting['multiples']), ModelConfig(**setting['model'])
  config = EvalConfig(
    multiples=tuple(setting['multiples']), controls=(), spans=setting['spans'], batch_tokens=setting['batch_tokens']
  )
  rng, size = np.random.default_rng(0), config.min_test_tokens(train_len, longest)
  tokens = rng.integers(0, 256, (setting['documents'], size), dtype=np.int32)
  plan = Plan(
    config, [TokenDocument(f'{i}', row, size) for i, row in enumerate(tokens)], train_len=train_len,
    max_multiple=longest, bos='window', bos_id=256, corpus_sha256='',
  )  # fmt: skip
  make = lambda: LM(cfg, ('rope',), vocab_size=257, train_len=train_len, rngs=nnx.Rngs(0))  # noqa: E731
  graphdef, shapes = abstract(make)
  mesh = make_mesh(0)
  params = jax.device_put(initial(make), spread(mesh, shapes))
  slots = [posenc.build('rope', heads=cfg.heads, head_dim=cfg.width, d_model=cfg.d_model, train_len=train_len,
                        rngs=nnx.Rngs(0))]  # fmt: skip
  rule = posenc.build_rule('sequential', slots, train_len=train_len, layers=cfg.layers)
  jax.block_until_ready(params)
  compiles, compiling, points = 0, 0.0, []

  class Timed(Scorer):
    def program(self, length, pos):
      nonlocal compiling
      began = time.perf_counter()
      made = super().program(length, pos)
      compiling += time.perf_counter() - began
      return made

  def part(methods, multiples):
    nonlocal compiles
    scorer = Timed(graphdef, params, mesh, config.batch_tokens)
    survey = Survey(plan, slots, methods, [m * train_len for m in multiples], train_len, rule)  # nothing is kept
    told = {'bytes_per_token_V': np.ones(257, np.int64), 'facts': {'posenc': ['rope']}, 'progress': Silent()}
    for found in sweep(survey, lambda: scorer, **told):
      points.extend(found)
    compiles += scorer.traces

  wall, cpu = time.perf_counter(), time.process_time()
  if apart:
    for method in setting['methods']:
      for multiple in setting['multiples']:
        jax.clear_caches()
        part((method,), (multiple,))
  else:
    jax.clear_caches()
    part(setting['methods'], setting['multiples'])
  about = {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}
  about |= {'compiles': compiles, 'compiling': compiling}
  nll = {f'{p["protocol"]} {p["method"]} {p["length"]}': p['nll'] for p in points}
  race.serve({**about, 'nll': nll}, lambda: None, warm_up=0)


def run_lengths(scheme: str, lengths: list[int], model: dict, repeats: int) -> None:
  import jax

  from benchmarks.build import evaluation
  from models.lm import ModelConfig
  from training.devices import start_jax

  start_jax()
  programs = {}
  for length in lengths:
    f, arguments = evaluation(scheme, length, ModelConfig(**model), vocab=256, run=True)
    programs[length] = jax.jit(f), arguments
    jax.block_until_ready(programs[length][0](*arguments))
  wall, cpu = ({length: [] for length in lengths} for _ in range(2))
  for _ in range(repeats):
    for length, (program, arguments) in programs.items():
      began = time.perf_counter(), time.process_time()
      jax.block_until_ready(program(*arguments))
      wall[length].append(time.perf_counter() - began[0])
      cpu[length].append(time.process_time() - began[1])
  race.serve({'wall': list(wall.values()), 'cpu': list(cpu.values())}, lambda: None, warm_up=0)


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--schemes', default=SCHEMES, help='comma-separated, of the second table; empty: none')
  parser.add_argument('--sweep', action=argparse.BooleanOptionalAction, default=True, help='the first table')
  parser.add_argument('--contestant', nargs=2, metavar=('WHICH', 'SETTING'), help='what the parent starts')
  args = parser.parse_args(argv)
  if args.contestant:
    race.pin(args.threads)
    which, setting = args.contestant[0], json.loads(args.contestant[1])
    run_sweep(setting, which == 'apart') if which in ('together', 'apart') else run_lengths(which, **setting)
    return

  def mine(which, setting):
    command = race.ours('benchmarks.sweep', f'--threads={args.threads}', '--contestant', which, json.dumps(setting))
    return Contestant(which, command, {**race.allocator(), 'JAX_ENABLE_COMPILATION_CACHE': 'false'})

  if args.sweep:
    setting = TINY_SWEEP if args.tiny else SWEEP
    together, apart = both = [mine(which, setting) for which in ('together', 'apart')]
    compiling: dict[str, list[float]] = {c.name: [] for c in both}
    for i in range(args.repeats):
      for c in both if i % 2 == 0 else both[::-1]:
        c.start()
        c.stop()
        c.wall.append(c.about['wall'])
        c.cpu.append(c.about['cpu'])
        compiling[c.name].append(c.about['compiling'])
    assert together.about['nll'] == apart.about['nll'], 'the two sweeps differ'
    print(f'\na sweep of {len(setting["multiples"])} lengths x {len(setting["methods"])} methods')
    race.table(
      ['', 'compiles', 'seconds', 'compiling', 'CPU seconds', 'time', 'cpu'],
      [
        [
          name, c.about['compiles'], f'{c.median:.1f}', f'{statistics.median(compiling[c.name]):.1f}',
          f'{statistics.median(c.cpu):.1f}', race.ratio(c, together), race.ratio(c, together, 'cpu'),
        ]
        for name, c in (('one sweep', together), ('nothing kept', apart))
      ],
    )  # fmt: skip
    runs = [
      {
        'name': c.name, 'compiles': c.about['compiles'], 'wall': c.wall, 'cpu': c.cpu, 'compiling': compiling[c.name],
      }
      for c in both
    ]  # fmt: skip
    race.record(args.out, 'sweep', args, {'setting': setting, 'runs': runs})

  schemes = [scheme for scheme in args.schemes.split(',') if scheme]
  if not schemes:
    return
  lengths, model = (TINY_LENGTHS, SMALL) if args.tiny else (LENGTHS, {})
  rows, found = [], []
  for scheme in schemes:
    c = mine(scheme, {'lengths': lengths, 'model': model, 'repeats': args.repeats})
    c.start()
    c.stop()
    wall, cpu = ([statistics.median(times) for times in c.about[of]] for of in ('wall', 'cpu'))
    slopes = {'exponent': exponent(lengths, wall), 'cpu_exponent': exponent(lengths, cpu)}
    rows.append([scheme, *(f'{t:.3g}' for t in wall), *(f'{slope:.2f}' for slope in slopes.values())])
    found.append({'name': scheme, 'wall': c.about['wall'], 'cpu': c.about['cpu'], **slopes})
  print('\nseconds of one window')
  race.table(['', *(str(length) for length in lengths), 'exponent', 'of CPU time'], rows)
  race.record(args.out, 'lengths', args, {'lengths': lengths, 'runs': found})


if __name__ == '__main__':
  main()

"""Candidates per second of a search for LongRoPE's factors, against one that compiles or starts again for each.

  python -m benchmarks.search

All score the same windows of random tokens under the same candidates, every window, without races. *one program* has
compiled and takes positions as arguments; *compiled again* forgets its program between candidates, as a search does
whose factors are in the code; *started again* is a new process for each, with the compile cache of jax filled: what a
search is that calls an evaluation script. Models are random, of the quickstart's shapes at 8 times 128 tokens.
"""

import json
import resource
import tempfile
import time
from typing import Any

from benchmarks import race
from benchmarks.race import Contestant

SETTING: dict[str, Any] = {
  'train_len': 128, 'length': 1024, 'documents': 8, 'spans': 2, 'model': {'layers': 3, 'd_model': 96, 'heads': 3},
}  # fmt: skip
TINY: dict[str, Any] = {
  'train_len': 16, 'length': 64, 'documents': 4, 'spans': 1, 'model': {'layers': 1, 'd_model': 16, 'heads': 2},
}  # fmt: skip
NAMES = ('one program', 'compiled again', 'started again')


def contest(name: str, setting: dict[str, Any], candidates: int, threads: int) -> None:
  race.pin(threads)
  import jax
  import numpy as np
  from flax import nnx

  import posenc
  from benchmarks.build import initial
  from data import TokenDocument
  from evaluation import search
  from evaluation.factors import Candidate
  from evaluation.score import Together
  from evaluation.store import Rows
  from evaluation.survey import positions_hash
  from models.lm import LM, ModelConfig, abstract
  from training.devices import make_mesh, spread, start_jax

  start_jax()
  L, length, cfg = setting['train_len'], setting['length'], ModelConfig(**setting['model'])
  rng, size = np.random.default_rng(0), 2 * length + setting['spans'] * L
  texts = [TokenDocument(f'{i}', rng.integers(0, 256, size, dtype=np.int32), size) for i in range(setting['documents'])]
  plan = search.search_plan(
    texts, (), length, L, docs=0, spans=setting['spans'], stride=1, bos='window', bos_id=256, corpus_sha256=''
  )

  def make():
    return LM(cfg, ('rope',), vocab_size=257, train_len=L, rngs=nnx.Rngs(0))

  graphdef, shapes = abstract(make)
  mesh = make_mesh(0)
  params = jax.device_put(initial(make), spread(mesh, shapes))
  dims = {'heads': cfg.heads, 'head_dim': cfg.width, 'd_model': cfg.d_model, 'train_len': L}
  slots = [posenc.build('rope', rngs=nnx.Rngs(0), **dims)]
  counted = search.all_targets(plan, length)
  rows, made = search.race_stages(len(counted.windows))[0], []

  def scorer():
    made.append(Together(graphdef, params, mesh, rows, plan.targets))
    return made[-1]

  def positions(method: str, n: int):
    pos = posenc.positions(method, slots, L, n)
    return positions_hash(pos), pos

  def races(one):
    everything = [len(counted.windows)]
    return search.Races(plan, counted, positions, lambda key, n: Rows(), lambda: one, everything)

  s, pairs = length / L, cfg.width // 2
  ramps = [Candidate(tuple(np.geomspace(1 + 0.01 * i, s, pairs).tolist())) for i in range(candidates + 2)]
  methods = [search.method_of(candidate, 1.2) for candidate in ramps]
  shared = races(scorer()) if name == NAMES[0] else None
  if shared:
    shared(methods[-2:])  # compiles
  wall, cpu, found = time.perf_counter(), time.process_time(), []
  if shared:
    found = shared(methods[:-2])
  else:
    for method in methods[:candidates]:
      jax.clear_caches()
      found += races(scorer())([method])
  about = {'wall': time.perf_counter() - wall, 'cpu': time.process_time() - cpu}
  about |= {'compiles': sum(one.traces for one in made), 'nll': [score.nll for score in found]}
  race.serve(about, lambda: None, warm_up=0)


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--spans', type=int, default=2, help='windows in each of 8 documents')
  parser.add_argument('--candidates', type=int, default=32, help='of the one program; the others take two a round')
  parser.add_argument(
    '--contestant', nargs=3, metavar=('WHICH', 'SETTING', 'CANDIDATES'), help='what the parent starts'
  )
  args = parser.parse_args(argv)
  if args.contestant:
    name, setting, candidates = args.contestant
    contest(name, json.loads(setting), int(candidates), args.threads)
    return
  setting = TINY if args.tiny else {**SETTING, 'spans': args.spans}
  with tempfile.TemporaryDirectory() as cache:

    def of(name: str, candidates: int) -> Contestant:
      options = f'--threads={args.threads}', '--contestant', name, json.dumps(setting), str(candidates)
      keeps = {'JAX_COMPILATION_CACHE_DIR': cache} if name == NAMES[2] else {'JAX_ENABLE_COMPILATION_CACHE': 'false'}
      return Contestant(name, race.ours('benchmarks.search', *options), {**race.allocator(), **keeps})

    counts = dict(zip(NAMES, (args.candidates, 2, 1)))
    all_of = [of(name, count) for name, count in counts.items()]
    fill = not args.tiny  # a first round that is not counted fills the cache
    for i in range(args.repeats + fill):
      for c in all_of[i % 3 :] + all_of[: i % 3]:
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        c.start()
        c.stop()
        after, wall, cpu = resource.getrusage(resource.RUSAGE_CHILDREN), c.about['wall'], c.about['cpu']
        if c.name == NAMES[2]:  # all of the process is the candidate's
          wall = time.perf_counter() - began
          cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        if i >= fill:
          c.wall.append(wall / counts[c.name])
          c.cpu.append(cpu / counts[c.name])
  one = all_of[0]
  assert all(c.about['nll'] == one.about['nll'][: counts[c.name]] for c in all_of), 'the searches differ'
  print(f'\na candidate of {setting["documents"] * setting["spans"]} windows of {setting["length"]} tokens')
  race.table(
    ['', 'compiles', 'candidates/s', 'seconds', 'CPU seconds', 'time', 'cpu'],
    [
      [
        c.name, c.about['compiles'], 1 / c.median, c.median, sorted(c.cpu)[len(c.cpu) // 2],
        race.ratio(c, one), race.ratio(c, one, 'cpu'),
      ]
      for c in all_of
    ],
  )  # fmt: skip
  race.record(args.out, 'search', args, {'setting': setting, 'runs': race.as_record(all_of)})


if __name__ == '__main__':
  main()

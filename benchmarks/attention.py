"""Attention alone, forward (1, 8192, 8, 32) and forward + backward (16, 512, 8, 32): every scheme against torch's SDPA.

  python -m benchmarks.attention --peer_python=/path/to/python   # one with requirements-bench.txt

Float32, causal; SDPA carries no bias. `of SDPA` is our time over its time (below 1: ours is faster), `of NoPE` what a
scheme costs, each by the clock and in CPU time. Gradients are by q, k, v, the scheme's parameters and what it reads of
the tokens.
"""

import json

from benchmarks import race
from benchmarks.race import Contestant

FORWARD = {'batch': 1, 'length': 8192, 'heads': 8, 'head_dim': 32, 'backward': False}
BOTH = {'batch': 16, 'length': 512, 'heads': 8, 'head_dim': 32, 'backward': True}
CASES = {'forward (1, 8192, 8, 32)': FORWARD, 'forward + backward (16, 512, 8, 32)': BOTH}
TINY = {
  'forward, tiny': {**FORWARD, 'length': 16, 'heads': 2, 'head_dim': 8},
  'forward + backward, tiny': {**BOTH, 'batch': 2, 'length': 8, 'heads': 2, 'head_dim': 8},
}


def run_ours(shape: dict, scheme: str, tile: int) -> None:
  import jax

  from benchmarks.build import attention, temporary_bytes
  from training.devices import make_mesh, start_jax

  start_jax()
  sizes = {key: shape[key] for key in ('batch', 'length', 'heads', 'head_dim')}
  # As an evaluation would: devices share the windows of a batch, or one long window.
  mesh = make_mesh(shape['batch'], (0, 1, len(jax.devices()) if shape['batch'] == 1 else 1))
  f, arguments = attention(scheme, **sizes, tile=tile, backward=shape['backward'], mesh=mesh)
  compiled = jax.jit(f).lower(*arguments).compile()

  def once():
    jax.block_until_ready(compiled(*arguments))

  about = {'devices': mesh.size, 'temporary_bytes': temporary_bytes(compiled) * mesh.size}
  race.serve(about, once)


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--schemes', default=None, help='comma-separated; default: all')
  parser.add_argument('--tile', type=int, default=0, help='0: what the model would take')
  parser.add_argument('--contestant', nargs=2, metavar=('SCHEME', 'SHAPE'), help='what the parent starts')
  args = parser.parse_args(argv)
  if args.contestant:
    race.pin(args.threads)
    run_ours(json.loads(args.contestant[1]), args.contestant[0], args.tile)
    return
  import posenc

  schemes = list(posenc.SCHEMES) if args.schemes is None else args.schemes.split(',')
  others = [scheme for scheme in schemes if scheme != 'nope']
  pinned = f'--threads={args.threads}'
  for label, shape in (TINY if args.tiny else CASES).items():

    def mine(scheme, shape=shape):
      command = race.ours(
        'benchmarks.attention', pinned, f'--tile={args.tile}', '--contestant', scheme, json.dumps(shape)
      )
      return Contestant(scheme, command, race.allocator())

    rows, records = [], []
    for start in range(0, max(len(others), 1), 4):
      sdpa = Contestant('torch SDPA', race.peer(args.peer_python, 'attention', json.dumps(shape), pinned))
      nope = mine('nope')
      runners = [sdpa, nope, *(mine(scheme) for scheme in others[start : start + 4])]
      race.race(runners, args.repeats)
      shown = runners if start == 0 else runners[2:]
      records += race.as_record(shown)
      for c in shown:
        if c.absent:
          rows.append([c.name, *[None] * 6])
          continue
        memory = c.about.get('temporary_bytes')
        rows.append([
          c.name, f'{c.median * 1e3:.1f}', race.ratio(c, sdpa), race.ratio(c, sdpa, 'cpu'), race.ratio(c, nope),
          race.ratio(c, nope, 'cpu'),
          None if memory is None else f'{memory / 2**20:.1f}',
        ])  # fmt: skip
    print(f'\nattention, {label}')
    race.table(['', 'ms', 'of SDPA', 'cpu', 'of NoPE', 'cpu', 'temporary MiB'], rows)
    race.record(args.out, 'attention', args, {'shape': shape, 'label': label, 'runs': records})


if __name__ == '__main__':
  main()

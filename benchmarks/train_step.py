"""Training steps per second: ours, Hugging Face's Llama in torch and a plain JAX step; then every scheme against NoPE.

  python -m benchmarks.train_step --peer_python=/path/to/python   # one with requirements-bench.txt

Float32, the same shape and number of parameters, gradient clipping and AdamW in all. `tokens/s` is from the median of
the wall clock; `time` and `cpu` are ratios of times to ours (above 1: slower than ours).
"""

import json

from benchmarks import race
from benchmarks.race import Contestant

SHAPES = {
  '0.8M 64x128': {'layers': 4, 'd_model': 128, 'heads': 4, 'd_mlp': 352, 'batch': 64, 'length': 128, 'vocab': 256},
  '4.9M 16x512': {'layers': 6, 'd_model': 256, 'heads': 8, 'd_mlp': 704, 'batch': 16, 'length': 512, 'vocab': 256},
}
TINY = {'tiny': {'layers': 1, 'd_model': 16, 'heads': 2, 'd_mlp': 32, 'batch': 2, 'length': 8, 'vocab': 16}}


# ---- contestants, each in its own process


def run_ours(shape: dict, scheme: str) -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np
  from flax import nnx

  import posenc
  from benchmarks.build import spec, temporary_bytes
  from models.lm import LM, ModelConfig, abstract
  from training.devices import make_mesh, split_batch, start_jax, whole
  from training.optimizer import OptimizerConfig, decay_mask, make_optimizer
  from training.provenance import count
  from training.step import make_train_step

  start_jax()
  cfg = ModelConfig(**{key: shape[key] for key in ('layers', 'd_model', 'heads', 'd_mlp')})

  def make():
    return LM(
      cfg, (spec(scheme, shape['length']),), vocab_size=shape['vocab'], train_len=shape['length'], rngs=nnx.Rngs(0)
    )

  graphdef, shapes = abstract(make)
  tx = make_optimizer(OptimizerConfig(), 1000, decay_mask(nnx.eval_shape(make)))
  mesh = make_mesh(shape['batch'])

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(params)}

  state = jax.jit(init, out_shardings=whole(mesh))()
  slots = list(make().schemes)
  pos = jax.device_put(posenc.positions('none', slots, shape['length'], shape['length']), whole(mesh))
  tokens = np.random.default_rng(0).integers(shape['vocab'], size=(1, shape['batch'], shape['length'] + 1))
  batch = [jax.device_put(a.astype(np.int32), split_batch(mesh, 1)) for a in (tokens[..., :-1], tokens[..., 1:])]
  # Ahead of time, for its memory analysis.
  step = (
    jax.jit(make_train_step(graphdef, tx, pos, None), donate_argnums=0).lower(state, *batch, jnp.int32(0)).compile()
  )
  state, metrics = step(state, *batch, jnp.int32(0))

  def once():
    nonlocal state
    state, metrics = step(state, *batch, jnp.int32(0))
    jax.block_until_ready((state, metrics))

  about = {
    'loss': float(metrics['loss']),
    'parameters': count(shapes),
    'devices': mesh.size,
    'temporary_bytes': temporary_bytes(step) * mesh.size,
  }
  race.serve(about, once)


def run_plain(shape: dict) -> None:
  import jax
  import numpy as np

  from benchmarks import plain_jax

  tx, step = plain_jax.make_step(shape['heads'])
  sizes = {'vocab': shape['vocab'], 'length': shape['length'], 'layers': shape['layers'], 'd_model': shape['d_model']}

  @jax.jit
  def init(key):
    params = plain_jax.init(key, **sizes)
    return {'params': params, 'opt': tx.init(params)}

  state = init(jax.random.key(0))
  tokens = np.random.default_rng(0).integers(shape['vocab'], size=(shape['batch'], shape['length'] + 1))
  batch = [jax.device_put(a.astype(np.int32)) for a in (tokens[:, :-1], tokens[:, 1:])]
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state['params']))
  state, loss = step(state, *batch)

  def once():
    nonlocal state
    state, loss = step(state, *batch)
    jax.block_until_ready((state, loss))

  race.serve({'loss': float(loss), 'parameters': parameters, 'devices': 1}, once)


# ---- the race


def main(argv: list[str] | None = None) -> None:
  parser = race.flags(__doc__)
  parser.add_argument('--steps', type=int, default=5, help='steps per round')
  parser.add_argument('--schemes', default=None, help='comma-separated; default: all; empty: only the peers')
  parser.add_argument('--contestant', nargs=2, metavar=('SCHEME', 'SHAPE'), help='what the parent starts')
  args = parser.parse_args(argv)
  if args.contestant:
    race.pin(args.threads)
    scheme, shape = args.contestant
    run_plain(json.loads(shape)) if scheme == 'plain' else run_ours(json.loads(shape), scheme)
    return
  shapes = TINY if args.tiny else SHAPES
  pinned = f'--threads={args.threads}'
  allocator = race.allocator()

  def mine(name, scheme, shape, env):
    return Contestant(name, race.ours('benchmarks.train_step', pinned, '--contestant', scheme, json.dumps(shape)), env)

  for label, shape in shapes.items():
    tokens = shape['batch'] * shape['length']
    command = race.peer(args.peer_python, 'train_step', json.dumps(shape), pinned)
    runners = [
      mine('ours', 'rope', shape, allocator),
      Contestant('HF Llama', command),
      # Not what anybody runs, but fair: the same allocator for both.
      Contestant('HF Llama, our allocator', command, allocator),
      mine('plain JAX', 'plain', shape, {}),
      mine('ours, default allocator', 'rope', shape, {}),
    ]
    race.race(runners, args.repeats, args.steps)
    print(f'\ntrain step, {label}')
    race.table(
      ['', 'parameters', 'tokens/s', 'ms', 'time', 'cpu'],
      [
        [
          c.name,
          *(
            [None] * 5
            if c.absent
            else [
              f'{c.about["parameters"]:,}', f'{tokens / c.median:.0f}', f'{c.median * 1e3:.1f}',
              race.ratio(c, runners[0]), race.ratio(c, runners[0], 'cpu'),
            ]
          ),
        ]
        for c in runners
      ],
    )  # fmt: skip
    race.record(args.out, 'train_step', args, {'shape': shape, 'label': label, 'runs': race.as_record(runners)})

  import posenc

  schemes = list(posenc.SCHEMES) if args.schemes is None else [s for s in args.schemes.split(',') if s]
  if not schemes:
    return
  for label, shape in shapes.items():
    rows, records = [], []
    # Few at a time beside NoPE: all at once would not fit in memory.
    others = [scheme for scheme in schemes if scheme != 'nope']
    for start in range(0, max(len(others), 1), 4):
      part = ['nope', *others[start : start + 4]]
      runners = [mine(scheme, scheme, shape, allocator) for scheme in part]
      race.race(runners, args.repeats, args.steps)
      records += race.as_record(runners if start == 0 else runners[1:])
      nope = runners[0]
      for c in runners if start == 0 else runners[1:]:
        rows.append([
          c.name, f'{tokens_per_second(c, shape):.0f}', race.ratio(nope, c), race.ratio(c, nope, 'cpu'),
          f'{c.about["temporary_bytes"] / 2**20:.1f}',
          c.about['temporary_bytes'] / nope.about['temporary_bytes'],
        ])  # fmt: skip
    print(f'\nschemes, {label}')
    race.table(['', 'tokens/s', 'of NoPE', 'cpu', 'temporary MiB', 'of NoPE'], rows)
    race.record(args.out, 'train_step_schemes', args, {'shape': shape, 'label': label, 'runs': records})


def tokens_per_second(c: Contestant, shape: dict) -> float:
  return shape['batch'] * shape['length'] / c.median


if __name__ == '__main__':
  main()

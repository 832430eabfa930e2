"""One accelerator in under five minutes: parity, MFU of a train step, fused attention against tiles, a sweep to 32x.

  benchmarks/accelerator.sh            # installs what it needs, then runs this

Each part works down its list until its share of `--seconds` is gone and says what it left out; a part that fails says
why, and the others run. Times are medians after a warm-up and include no compilation. Exit code 1: parity failed.
"""

import functools
import statistics
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benchmarks import race

# bfloat16 FLOP/s with float32 sums, dense, from the makers' data sheets, by a part of jax's name of the device. The
# first that fits.
PEAK = {
  'H100 PCIe': 756e12, 'H100 NVL': 835e12, 'H100': 989e12, 'H200': 989e12, 'B200': 2250e12,
  'A100': 312e12, 'A10G': 70e12, 'L40S': 362e12, 'L40': 181e12, 'L4': 121e12, 'RTX 4090': 165e12, 'TPU v4': 275e12,
  'TPU v5 lite': 197e12, 'TPU v5': 459e12, 'TPU v6 lite': 918e12,
}  # fmt: skip
TOLERANCE = 1e-4

FULL = SimpleNamespace(
  models={  # GPT-2 small and medium with SwiGLU
    '125M': {'layers': 12, 'd_model': 768, 'heads': 12},
    '350M': {'layers': 24, 'd_model': 1024, 'heads': 16},
  },
  vocab=50304, train=(8, 2048), heads=12, head_dim=64, lengths=(2048, 8192, 32768, 131072), both=8192,
  tokens=131072, tile=512, train_len=4096, multiples=(1, 2, 4, 8, 16, 32),
  small={'layers': 4, 'd_model': 128, 'heads': 4}, parity=(2, 512),
  parity_of=('rope', 'alibi', 't5', 'cope'), branches_of=('rope', 'rope(window=100)', 'alibi', 'fox', 't5'),
  attention_of=('rope', 'alibi', 't5'),
)  # fmt: skip
TINY = SimpleNamespace(
  models={'tiny': {'layers': 1, 'd_model': 16, 'heads': 2}},
  vocab=32, train=(2, 16), heads=2, head_dim=8, lengths=(16,), both=16, tokens=32, tile=16, train_len=16,
  multiples=(1, 2), small={'layers': 1, 'd_model': 16, 'heads': 2}, parity=(1, 16),
  parity_of=('rope',), branches_of=('alibi',), attention_of=('rope', 't5'),
)  # fmt: skip


def peak_flops(kind: str) -> float | None:
  return next((flops for name, flops in PEAK.items() if name in kind), None)


def seconds(f: Callable[[], Any], repeats: int) -> float:
  """Median of `repeats` runs after one that compiles and one that warms up."""
  import jax

  times = []
  for _ in range(repeats + 2):
    start = time.perf_counter()
    jax.block_until_ready(f())
    times.append(time.perf_counter() - start)
  return statistics.median(times[2:])


def apart(got: Any, want: Any) -> float:
  """The largest difference of all arrays, each relative to its largest number."""
  import jax
  import numpy as np

  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  pairs = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
  return float(max(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs))


def model(shapes: dict, scheme: str, length: int, vocab: int, dtype: str, tile: int):
  """(config, function that makes the LM, its slots)."""
  from flax import nnx

  import posenc
  from models.lm import LM, ModelConfig

  cfg = ModelConfig(**shapes, dtype=dtype, tile=tile, loss_chunk=min(512, length))
  sizes = {'heads': cfg.heads, 'head_dim': cfg.width, 'd_model': cfg.d_model, 'train_len': length}
  make = functools.partial(LM, cfg, (scheme,), vocab_size=vocab, train_len=length)
  return cfg, lambda: make(rngs=nnx.Rngs(0)), [posenc.build(scheme, rngs=nnx.Rngs(0), **sizes)]


# ---- the parts: each yields (row of its table, record)


def parity(shape: Any, repeats: int):
  """Losses and gradients in float32 at the highest matmul precision, on this device and on the CPU beside it."""
  import jax
  from flax import nnx

  import posenc
  from models.lm import abstract, merge

  cpu = jax.devices('cpu')[0]
  batch, length = shape.parity
  for scheme in shape.parity_of:
    with jax.default_device(cpu):
      _, make, slots = model(shape.small, scheme, length, shape.vocab, 'float32', shape.tile // 4)
      params = nnx.to_pure_dict(nnx.state(make()))
      tokens = jax.random.randint(jax.random.key(1), (batch, length), 0, shape.vocab)
      pos = posenc.positions('none', slots, length, length)
    graphdef, _ = abstract(make)
    with jax.default_matmul_precision('highest'):
      f = jax.jit(jax.value_and_grad(lambda p, t, pos, g=graphdef: merge(g, p).nll(t, t, pos).mean()))
      here, there = (f(*jax.device_put((params, tokens, pos), device)) for device in (jax.devices()[0], cpu))
    loss, grads = apart(here[0], there[0]), apart(here[1], there[1])
    ok = max(loss, grads) <= TOLERANCE
    yield (
      [scheme, f'{loss:.1e}', f'{grads:.1e}', 'ok' if ok else f'above {TOLERANCE}'],
      {'name': scheme, 'loss': loss, 'gradients': grads, 'ok': ok},
    )


def branches(shape: Any, repeats: int):
  """Fused kernels and tiles in bfloat16, values and gradients, against tiles in float32 on the same numbers."""
  import jax
  import jax.numpy as jnp

  from benchmarks.build import attention

  batch, length = shape.parity
  for scheme in shape.branches_of:
    sizes = {'batch': batch, 'length': length, 'heads': shape.heads, 'head_dim': shape.head_dim, 'tile': shape.tile}
    for backward in (False, True):
      of = functools.partial(attention, scheme, **sizes, backward=backward)
      rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), of()[1][:2])
      with jax.default_matmul_precision('highest'):
        exact = jax.jit(of(fused=False)[0])(*rounded, of()[1][2])
      found = {}
      for fused in (True, False):
        f, arguments = of(fused=fused, dtype=jnp.bfloat16)
        found['fused' if fused else 'tiles'] = apart(jax.jit(f)(*arguments), exact)
      kernel = which(scheme, length, shape)
      what = 'gradients' if backward else 'values'
      yield [scheme, what, kernel, *(f'{v:.1e}' for v in found.values())], {
        'name': scheme, 'what': what, 'kernel': kernel, **found,
      }  # fmt: skip


def which(scheme: str, length: int, shape: Any) -> str:
  """The kernel's name, or why it is tiles."""
  import jax.numpy as jnp
  from flax import nnx

  import posenc
  from models.kernels import choose

  d_model = shape.heads * shape.head_dim
  sizes = {'heads': shape.heads, 'head_dim': shape.head_dim, 'd_model': d_model, 'train_len': length}
  made = posenc.build(scheme, rngs=nnx.Rngs(0), **sizes)
  pos = posenc.positions('none', made, length, length)
  state = made.token_state(jnp.zeros((1, length, d_model)), pos)
  return choose(made, pos, state, jnp.bfloat16, shape.head_dim)[1]


def train_step(shape: Any, repeats: int):
  """A whole update in bfloat16, as `train.py` makes it, and its share of the peak (model FLOPs, nothing recomputed)."""
  import jax
  import numpy as np
  from flax import nnx

  import posenc
  from models.lm import abstract
  from training import provenance
  from training.optimizer import OptimizerConfig, decay_mask, make_optimizer
  from training.step import make_train_step

  batch, length = shape.train
  peak = peak_flops(jax.devices()[0].device_kind)
  for name, shapes in shape.models.items():
    cfg, make, slots = model(shapes, 'rope', length, shape.vocab, 'bfloat16', shape.tile)
    graphdef, described = abstract(make)
    tx = make_optimizer(OptimizerConfig(), 1000, decay_mask(nnx.eval_shape(make)))

    def init(make=make, tx=tx):
      params = nnx.to_pure_dict(nnx.state(make()))
      return {'params': params, 'opt': tx.init(params)}

    state = jax.jit(init)()
    step = make_train_step(graphdef, tx, posenc.positions('none', slots, length, length), None)
    tokens = np.random.default_rng(0).integers(shape.vocab, size=(1, batch, length + 1), dtype=np.int32)
    arrays = jax.device_put((tokens[..., :-1], tokens[..., 1:]))

    def once(step=step, arrays=arrays):
      nonlocal state
      state, metrics = step(state, *arrays, 0)
      return metrics

    took = seconds(once, repeats)
    rate = batch * length / took
    flops = rate * provenance.train_flops_per_token(SimpleNamespace(model=cfg, window=length), described)
    mfu = None if peak is None else flops / peak
    kernel = which('rope', length, SimpleNamespace(heads=cfg.heads, head_dim=cfg.width))
    yield (
      [name, f'{provenance.count(described):,}', f'{batch} x {length}', f'{took * 1e3:.1f}', f'{rate:,.0f}',
       f'{flops / 1e12:.1f}', None if mfu is None else f'{mfu:.1%}', kernel],
      {'name': name, 'seconds': took, 'tokens_per_second': rate, 'flops': flops, 'mfu': mfu, 'kernel': kernel},
    )  # fmt: skip
    del state, step


def attention_lengths(shape: Any, repeats: int):
  """`attend` in bfloat16 with the fused kernel, where there is one, and with tiles; backward at one length."""
  import jax
  import jax.numpy as jnp

  from benchmarks.build import attention

  cases = [(length, length == shape.both) for length in shape.lengths] + [(shape.both, False)]
  for length, backward in dict.fromkeys(cases):
    for scheme in shape.attention_of:
      kernel, took = which(scheme, length, shape), {}
      sizes = {'batch': max(shape.tokens // length, 1), 'length': length, 'heads': shape.heads}
      for fused in (True, False) if kernel in ('cudnn', 'splash') else (False,):
        f, arguments = attention(
          scheme, **sizes, head_dim=shape.head_dim, tile=shape.tile, backward=backward, fused=fused, dtype=jnp.bfloat16
        )
        f = jax.jit(f)
        took['fused' if fused else 'tiles'] = seconds(lambda f=f, arguments=arguments: f(*arguments), repeats)
      # Two products forward, five more backward, of the causal half.
      flops = (7 if backward else 2) * sizes['batch'] * length**2 * shape.heads * shape.head_dim
      both = ['fused', 'tiles']
      yield (
        [length, scheme, 'both' if backward else 'forward', kernel,
         *(f'{took[k] * 1e3:.2f}' if k in took else None for k in both),
         *(f'{flops / took[k] / 1e12:.1f}' if k in took else None for k in both)],
        {'length': length, 'name': scheme, 'backward': backward, 'kernel': kernel, 'flops': flops, **took},
      )  # fmt: skip


def sweep(shape: Any, repeats: int):
  """The first model's losses on one window at 1x .. 32x, as a sweep takes them: a program for each length, methods as
  its arguments."""
  import jax
  from flax import nnx

  import posenc
  from models.lm import abstract, merge

  name, shapes = next(iter(shape.models.items()))
  _, make, slots = model(shapes, 'rope', shape.train_len, shape.vocab, 'bfloat16', shape.tile)
  graphdef, _ = abstract(make)
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
  f = jax.jit(lambda params, tokens, pos: merge(graphdef, params).nll(tokens, tokens, pos))
  for multiple in shape.multiples:
    length = multiple * shape.train_len
    tokens = jax.random.randint(jax.random.key(0), (1, length), 0, shape.vocab)
    start, took = time.perf_counter(), {}
    pos = posenc.positions('none', slots, shape.train_len, length)
    compiled = f.lower(params, tokens, pos).compile()
    compiling = time.perf_counter() - start
    for method in ('none', 'yarn', 'sliding_window'):
      pos = posenc.positions(method, slots, shape.train_len, length)
      took[method] = seconds(lambda pos=pos, tokens=tokens, c=compiled: c(params, tokens, pos), min(repeats, 3))
    found = compiled.memory_analysis()
    memory = 0 if found is None else found.temp_size_in_bytes  # not every backend says
    yield (
      [f'{multiple}x', length, f'{compiling:.1f}', *(f'{length / t:,.0f}' for t in took.values()),
       f'{memory / 2**20:.0f}'],
      {'name': name, 'length': length, 'compile': compiling, 'temporary_bytes': memory, **took},
    )  # fmt: skip


PARTS = {
  'parity': (parity, 0.2, ['this device against the CPU, float32', 'loss', 'gradients', '']),
  'branches': (branches, 0.2, ['bfloat16 against tiles in float32', '', 'kernel', 'fused', 'tiles']),
  'train step': (
    train_step, 0.2, ['bfloat16', 'parameters', 'tokens', 'ms', 'tokens/s', 'TFLOP/s', 'MFU', 'attention'],
  ),
  'attention': (
    attention_lengths, 0.25, ['length', '', '', 'kernel', 'fused ms', 'tiles ms', 'fused TFLOP/s', 'tiles TFLOP/s'],
  ),
  'sweep': (sweep, 0.15, ['', 'tokens', 'compile s', 'none, tokens/s', 'yarn', 'sliding_window', 'temporary MiB']),
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
  parser = race.flags(__doc__)
  parser.add_argument('--seconds', type=float, default=280, help='for all parts; what does not fit is left out')
  parser.add_argument('--parts', default=','.join(PARTS), help='comma-separated')
  args = parser.parse_args(argv)
  import jax

  from training.devices import start_jax

  start_jax()
  device, shape = jax.devices()[0], TINY if args.tiny else FULL
  began, share, records, errors, left_out = time.monotonic(), 0.0, {}, {}, []
  print(
    f'{device.device_kind}, jax {jax.__version__}, peak {peak_flops(device.device_kind)} bfloat16 FLOP/s', flush=True
  )
  for name in args.parts.split(','):
    part, fraction, header = PARTS[name]
    share += fraction  # time that a part leaves is the next one's
    rows, records[name] = [], []
    try:
      for row, record in part(shape, args.repeats):
        rows.append(row)
        records[name].append(record)
        if time.monotonic() - began > args.seconds * share:
          left_out.append(name)
          break
    except Exception as error:  # unattended: what one part cannot do says nothing about the others
      errors[name] = f'{type(error).__name__}: {error}'
      traceback.print_exc()
    why = errors.get(name, 'out of time' if name in left_out else '')
    print(f'\n{name}' + (f', not to its end: {why}' if why else ''))
    race.table(header, rows)
  total = time.monotonic() - began
  about = {'device': device.device_kind, 'platform': device.platform, 'count': len(jax.devices()), 'seconds': total}
  race.record(args.out, 'accelerator', args, {**about, 'parts': records, 'errors': errors, 'left_out': left_out})
  ok = 'parity' not in errors and all(record['ok'] for record in records.get('parity', []))
  print(f'\n{total:.0f} s' + ('' if ok else '; parity failed'), flush=True)
  return 0 if ok else 1


if __name__ == '__main__':
  raise SystemExit(main())

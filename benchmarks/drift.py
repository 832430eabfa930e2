"""float32 against bfloat16 at 32 times the training length, for every scheme.

  python -m benchmarks.drift

A tiny model of each scheme is trained in float32 on Python's own library (train_len 32, 2 layers, d_model 32) and its
loss computed in both, of the same windows of 32 and 1024 tokens: bfloat16 activations, everything else as the model has
it. Drift: NLL in bfloat16 less that in float32, nats; `token`: the largest of one token.
"""

import argparse
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx

import posenc
from configs import smoke
from configs.schema import Config
from data import TrainWindows
from models.lm import abstract, merge
from training.devices import start_jax
from training.optimizer import decay_mask, make_optimizer
from training.step import make_train_step

FACTOR = 32
# What stands for schemes that are not defined there: a table that ends, a grid that is none.
SPEC = {'learned': 'learned(oob="interpolate")', 'rope2d': 'rope2d(width=16)'}


def config(scheme: str, steps: int, dtype: str = 'float32') -> Config:
  values = smoke.get_config(SPEC.get(scheme, scheme)).to_dict()
  values |= {'steps': steps, 'max_multiple': FACTOR}
  values['model']['dtype'] = dtype
  return Config.from_dict(values)


def trained(cfg: Config, data: Any, jit: Any = jax.jit) -> Any:
  """Parameters after `cfg.steps` updates."""
  make = functools.partial(cfg.build_model, data.tokenizer.vocab_size)
  tx = make_optimizer(cfg.optimizer, cfg.steps, decay_mask(nnx.eval_shape(make)))
  slots = [cfg.build_scheme(text) for text in cfg.posenc]
  pos = posenc.positions('none', slots, cfg.train_len, cfg.train_len)
  step = make_train_step(abstract(make)[0], tx, jax.tree.map(np.asarray, pos), None)
  params = jit(lambda: nnx.to_pure_dict(nnx.state(make())))()
  state = {'params': params, 'opt': jit(tx.init)(params)}
  windows = TrainWindows(data.splits.train, cfg.train_len, cfg.data.bos, data.tokenizer.bos, seed=0)
  for n in range(cfg.steps):
    state, _ = step(state, *(x[None] for x in windows.batch(n, cfg.batch)), n)
  return state['params']


def losses(cfg: Config, data: Any, params: Any, length: int, rows: int, jit: Any = jax.jit) -> np.ndarray:
  """nats, [rows, length], of windows of test documents."""
  graphdef, _ = abstract(functools.partial(cfg.build_model, data.tokenizer.vocab_size))
  slots = [cfg.build_scheme(text) for text in cfg.posenc]
  pos = posenc.positions('none', slots, cfg.train_len, length)
  batch = TrainWindows(data.splits.test, length, cfg.data.bos, data.tokenizer.bos, seed=0).batch(0, rows)
  return np.asarray(jit(lambda params, *xs: merge(graphdef, params).nll(*xs, pos))(params, *batch), np.float64)


def drift(scheme: str, data: Any, steps: int, rows: int, jit: Any = jax.jit) -> dict[int, tuple[float, float, float]]:
  """{length: (NLL in float32, drift of its mean, largest drift of a token)}."""
  full, half = config(scheme, steps), config(scheme, steps, 'bfloat16')
  params = trained(full, data, jit)
  out = {}
  for length in (full.train_len, FACTOR * full.train_len):
    a, b = (losses(cfg, data, params, length, rows, jit) for cfg in (full, half))
    out[length] = (a.mean(), (b - a).mean(), np.abs(b - a).max())
  return out


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--schemes', default=','.join(posenc.SCHEMES))
  parser.add_argument('--steps', type=int, default=300)
  parser.add_argument('--rows', type=int, default=8, help='windows a length')
  args = parser.parse_args()
  start_jax()
  data = config('rope', args.steps).load_data()
  print('| scheme | NLL at 1x | drift | token | NLL at 32x | drift | token |\n|---|---|---|---|---|---|---|')
  for scheme in args.schemes.split(','):
    cells = [
      f'{nll:.3f} | {mean:+.5f} | {token:.3f}'
      for nll, mean, token in drift(scheme, data, args.steps, args.rows).values()
    ]
    print(f'| `{SPEC.get(scheme, scheme)}` | {" | ".join(cells)} |', flush=True)


if __name__ == '__main__':
  main()

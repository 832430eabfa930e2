"""What bias schemes add to the logits, per head, over the distance of the key: as they start, or as a run learned them.

  python -m scripts.plot_bias --scheme=alibi --scheme=kerple_log --out=runs/bias.png
  python -m scripts.plot_bias --workdir=runs/fire --out=runs/fire/bias.png

Drawn for the last query of `length` tokens: where the bias depends on the query's position (fire), another query has
another. A scheme with parameters for each layer has a panel for each.
"""

import argparse
import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc
from configs.schema import Config
from models.lm import abstract
from spec import SpecError
from training import cli, provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole

Panel = tuple[str, np.ndarray]  # title, bias of the last query by head and distance, float64[N, T]


def bias(scheme: Any, length: int) -> np.ndarray:
  """Of query length - 1, by head and distance 0 .. length - 1, float64[N, T]."""
  at_T = jnp.arange(length, dtype=jnp.float32)
  return np.asarray(scheme.bias(at_T[-1:], at_T), np.float64)[:, 0, ::-1]


def is_bias(text: str) -> bool:
  return issubclass(posenc.SCHEMES[posenc.check_scheme(text).name], posenc.Bias)


def refuse(field: str, value: str) -> NoReturn:
  names = ', '.join(name for name, scheme in posenc.SCHEMES.items() if issubclass(scheme, posenc.Bias))
  raise SpecError(f'{field} = {value}: adds no bias; allowed: {names}')


def untrained(texts: Sequence[str], length: int, train_len: int, heads: int, seed: int) -> Iterator[Panel]:
  """Each scheme as it starts, in one layer. Of the widths only the model's matters, to t5: its table is N(0, 1/D)."""
  shapes = {'heads': heads, 'head_dim': 32, 'd_model': 32 * heads, 'train_len': train_len}
  for text in texts:
    if not is_bias(text):
      refuse('scheme', repr(text))
    yield text, bias(posenc.build(text, rngs=nnx.Rngs(seed), **shapes), length)


def trained(workdir: pathlib.Path, config: Config, length: int) -> Iterator[Panel]:
  """The slots of the run's newest checkpoint that are biases, by layer where the scheme has parameters for each."""
  if not any(is_bias(text) for text in config.posenc):
    refuse(f'{workdir}: posenc', str(config.posenc))
  checkpoints = Checkpoints(workdir)
  step = checkpoints.named('latest')
  vocab_size = config.load_data().tokenizer.vocab_size
  graphdef, shapes = abstract(functools.partial(config.build_model, vocab_size))
  params = checkpoints.restore(step, {'params': as_abstract(shapes, whole(make_mesh(1)))})['params']
  checkpoints.close()
  schemes: Any = nnx.merge(graphdef, params).schemes
  for i, (text, scheme) in enumerate(zip(config.posenc, schemes)):
    if not is_bias(text):
      continue
    if not scheme.per_layer:
      yield f'{text}, step {step}', bias(scheme, length)
      continue
    definition, stack = nnx.split(scheme)
    leaves, tree = jax.tree.flatten(stack)
    for repeat in range(config.model.layers // len(schemes)):
      layer = nnx.merge(definition, jax.tree.unflatten(tree, [leaf[repeat] for leaf in leaves]))
      yield f'{text}, layer {repeat * len(schemes) + i}, step {step}', bias(layer, length)


def plot(path: pathlib.Path, panels: Sequence[Panel], train_len: int) -> None:
  """A panel each, at most three a row, a line per head; distances that training did not have are right of the mark."""
  import matplotlib
  import matplotlib.figure  # no pyplot: it would look for a display

  columns = min(len(panels), 3)
  rows = -(-len(panels) // columns)
  figure = matplotlib.figure.Figure(figsize=(4.2 * columns, 3.4 * rows), layout='constrained')
  axes = figure.subplots(rows, columns, squeeze=False).ravel()
  for ax, (title, bias_NT) in zip(axes, panels):
    colours = matplotlib.colormaps['viridis'](np.linspace(0, 0.9, len(bias_NT)))
    for head, (bias_T, colour) in enumerate(zip(bias_NT, colours)):
      ax.plot(bias_T, color=colour, lw=1, label=f'head {head}')
    ax.axvline(train_len, color='0.5', lw=1, ls=':')
    above = {'transform': ax.get_xaxis_transform(), 'ha': 'center', 'va': 'bottom'}  # no curve runs there
    ax.text(train_len, 1.01, 'training length', fontsize=7, color='0.4', **above)
    ax.set_xscale('symlog', base=2, linthresh=1)
    ax.set_xlim(0, bias_NT.shape[1] - 1)
    ax.set_title(title, fontsize=9, loc='left', pad=14)
    ax.set_xlabel(f'distance from query {bias_NT.shape[1] - 1}, tokens')
    ax.grid(alpha=0.25)
  for ax in axes[len(panels) :]:
    ax.remove()
  axes[0].set_ylabel('bias on the logit')
  axes[0].legend(fontsize=7)
  figure.savefig(path, dpi=110)


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  source = parser.add_mutually_exclusive_group(required=True)
  source.add_argument('--scheme', action='append', help='drawn as it starts; repeat for more')
  source.add_argument('--workdir', type=pathlib.Path, help='a run of train.py, drawn from its newest checkpoint')
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--train_len', type=int, help='128; a run has its own')
  parser.add_argument('--heads', type=int, help='8; a run has its own')
  parser.add_argument('--length', type=int, help='4 times the training length')
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  config = None
  if args.workdir:
    config = Config.from_dict(provenance.read(args.workdir))
    for field, own in (('train_len', config.train_len), ('heads', config.model.heads)):
      if getattr(args, field) not in (None, own):
        raise SpecError(f'{field} = {getattr(args, field)}: the run in {args.workdir} has {own}')
  train_len = config.train_len if config else 128 if args.train_len is None else args.train_len
  heads = 8 if args.heads is None else args.heads
  length = 4 * train_len if args.length is None else args.length
  for field, value in (('train_len', train_len), ('heads', heads), ('length', length)):
    least = 2 if field == 'length' else 1
    if value < least:
      raise SpecError(f'{field} = {value}: a whole number of at least {least} is allowed')
  if config:
    panels = list(trained(args.workdir, config, length))
  else:
    panels = list(untrained(args.scheme, length, train_len, heads, args.seed))
  args.out.parent.mkdir(parents=True, exist_ok=True)
  plot(args.out, panels, train_len)
  print(args.out)


if __name__ == '__main__':
  cli.guard(main)

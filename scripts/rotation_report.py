"""Which frequency pairs turn how often within the training length, what by-parts methods do to them, and the nano map.

  python -m scripts.rotation_report --train_len=128 --head_dim=32 --base=10000

A method made for thousands of tokens splits the pairs of a short model differently, and its curve is then about the
split. The nano map is the base and the betas with which this length has the shape of a published model
(posenc/rotations.py). --out draws turns and stretches.
"""

import argparse
import pathlib
from collections.abc import Sequence

import numpy as np
from flax import nnx

import posenc
from posenc import rotations
from spec import SpecError
from training import cli

SHORT = 256  # tokens up to which the published betas are warned about even where a pair makes beta_fast turns
METHODS = ('yarn(factor=8)', 'yarn(factor=8, ramp="rotations")')


def stretch(method: str, scheme: posenc.PositionScheme, train_len: int) -> np.ndarray:
  """lambda_p = theta_p / theta'_p of a pass of 8 times the training length, NaN for a pair that is not rotated."""
  scaled_P = np.asarray(posenc.positions(method, scheme, train_len, 8 * train_len).inv_freq_P, np.float64)
  theta_P = scheme.inv_freq_P
  return np.divide(theta_P, scaled_P, out=np.full(len(theta_P), np.nan), where=theta_P > 0)


def doing(method: str, scheme: posenc.PositionScheme, train_len: int) -> list[str]:
  """What the method does to each pair: keep, blend or interpolate, where it has a ramp, and the stretch."""
  shares = [posenc.kept(call, scheme, train_len) for call in posenc.check_method(method)]
  share_P = next((share_P for share_P in shares if share_P is not None), None)
  out = []
  for p, by in enumerate(stretch(method, scheme, train_len)):
    word = '' if share_P is None else 'keep ' if share_P[p] == 1 else 'blend ' if share_P[p] > 0 else 'interpolate '
    out.append('not rotated' if np.isnan(by) else f'{word}/{by:.3g}')
  return out


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return ['  '.join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows]


def pairs(scheme: posenc.PositionScheme, methods: Sequence[str], train_len: int) -> list[str]:
  """A line per pair: theta_p in radians per token, w_p in tokens, r_p."""
  theta_P = scheme.inv_freq_P
  wave_P = np.divide(2 * np.pi, theta_P, out=np.full(len(theta_P), np.inf), where=theta_P > 0)
  rows = [['pair', 'frequency', 'wavelength', 'turns', *methods]]
  does = [doing(method, scheme, train_len) for method in methods]
  for p, (theta, wave, turn) in enumerate(zip(theta_P, wave_P, rotations.turns(theta_P, train_len))):
    rows.append([f'{p}', f'{theta:.4g}', f'{wave:.1f}', f'{turn:.4g}', *(column[p] for column in does)])
  return _columns(rows)


def nano_map(scheme: posenc.PositionScheme, train_len: int) -> list[str]:
  """A line per reference model: the base and betas that give `train_len` its shares of incomplete and of fast pairs."""
  rows = [['reference', 'base', 'tokens', 'incomplete', 'here: base', 'incomplete', 'yarn beta_fast', 'llama31 high']]
  for model in rotations.REFERENCES:
    theirs = rotations.incomplete(model.inv_freq_P, model.train_len)
    base = rotations.matched_base(train_len, model)
    ours = rotations.incomplete(rotations.rebased(scheme.inv_freq_P, scheme.base, base), train_len)
    fast, high = (rotations.matched_beta(beta, base, model) for beta in (32, 4))
    rows.append([
      model.name, f'{model.base:g}', f'{model.train_len}', f'{theirs.sum()} of {len(theirs)}',
      f'{base:.4g}', f'{ours.sum()} of {len(ours)}', f'{fast:.4g}', f'{high:.4g}',
    ])  # fmt: skip
  return _columns(rows)


def plot(path: pathlib.Path, scheme: posenc.PositionScheme, methods: Sequence[str], train_len: int) -> None:
  """Turns of each pair, and the stretch that each method gives it."""
  import matplotlib.figure  # no pyplot: it would look for a display

  figure = matplotlib.figure.Figure(figsize=(10, 4), layout='constrained')
  left, right = figure.subplots(1, 2)
  turns_P = rotations.turns(scheme.inv_freq_P, train_len)
  p = np.arange(len(turns_P))
  left.semilogy(p, np.where(turns_P > 0, turns_P, np.nan), 'o-', ms=3, color='C0')
  left.axhline(1, color='0.5', lw=1, ls=':')
  left.axhline(32, color='0.5', lw=1, ls='--')
  left.text(0, 1, 'one turn', fontsize=8, color='0.4', va='bottom')
  left.text(p[-1], 32, 'beta_fast = 32', fontsize=8, color='0.4', va='bottom', ha='right')
  left.set_ylabel(f'turns within {train_len} tokens')
  for method in methods:
    right.plot(p, stretch(method, scheme, train_len), 'o-', ms=3, label=method)
  right.set_yscale('log', base=2)
  right.set_ylabel('trained frequency / scaled frequency')
  if methods:
    right.legend(fontsize=8)
  for ax in (left, right):
    ax.set_xlabel(f'frequency pair, base {scheme.base:g}')
    ax.grid(alpha=0.25)
  figure.savefig(path, dpi=150)


def main(argv: list[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--train_len', type=int, default=128)
  parser.add_argument('--head_dim', type=int, default=32)
  parser.add_argument('--base', type=float, default=10000.0)
  parser.add_argument('--methods', action='append', help='a method, such as yarn(factor=8); repeat for more')
  parser.add_argument('--out', type=pathlib.Path)
  args = parser.parse_args(argv)
  methods = args.methods or METHODS
  if args.train_len < 7:
    raise SpecError(f'train_len = {args.train_len}: at least 7 is allowed, one turn of the fastest pair')
  if args.head_dim < 2:
    raise SpecError(f'head_dim = {args.head_dim}: an even number of at least 2 is allowed')
  shapes = {'heads': 1, 'head_dim': args.head_dim, 'd_model': args.head_dim, 'train_len': args.train_len}
  scheme = posenc.build(f'rope(base={args.base!r})', rngs=nnx.Rngs(0), **shapes)
  try:
    table = pairs(scheme, methods, args.train_len)
  except posenc.Unsupported as reason:
    raise SpecError(f'methods: {reason}') from None
  first = rotations.crossing(1, scheme.rot, scheme.base, args.train_len)
  print(f'rope(base={args.base:g}), head_dim {args.head_dim}, trained at {args.train_len} tokens: p* = {first:.2f}\n')
  print('\n'.join(table), end='\n\n')
  for remark in posenc.remarks(methods, [scheme], args.train_len):
    print(f'note: {remark}')
  if args.train_len <= SHORT:
    print(
      f'warning: {args.train_len} tokens are {args.train_len / (2 * np.pi):.1f} turns of the fastest pair; base 10000, '
      'beta_fast = 32 and high = 4 were made for thousands of tokens'
    )
  print(f'\nnano map: the shares of a published model at {args.train_len} tokens, beta_slow = low = 1')
  print('\n'.join(nano_map(scheme, args.train_len)))
  if args.out:
    args.out.parent.mkdir(parents=True, exist_ok=True)
    plot(args.out, scheme, methods, args.train_len)
    print(f'\n{args.out}')


if __name__ == '__main__':
  cli.guard(main)

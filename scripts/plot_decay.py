"""q.k against distance, RoPE and sinusoidal: what decays, what does not, and what the usual figure of it shows.

  python -m scripts.plot_decay --out=runs/decay.png

a. The usual recipe, the mean of q.k over independent random q and k: noise around 0 at every distance, 0 included. The
   rms stays at sqrt(d): nothing decays.
b. Matched: the product of two sinusoidal vectors over d/2, and RoPE with q = k over |q|**2. One curve, the kernel
   sum_p cos(theta_p delta) / (d/2): at equal width and base neither scheme decays more smoothly than the other.
c. What RoFormer (2104.09864) proves in section 3.4.3: a bound falls. |q.k| in the same units is far below it, and flat.
d. Where a decay does come from: a mean mu that q and k share puts |mu|**2 times the kernel into E[q.k], and a scaling
   method stretches the kernel (yarn also multiplies it, by its temperature).
"""

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc
from spec import SpecError
from training import cli

METHODS = ('pi(factor=8)', 'ntk(factor=8)', 'yarn(factor=8)', 'llama31(factor=8)')
MEANS = (0.0, 0.25, 1.0)  # |mu|**2 / d of panel d
SHOWN = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # distances of the printed table


def build(text: str, head_dim: int, train_len: int = 128) -> Any:
  return posenc.build(text, heads=1, head_dim=head_dim, d_model=head_dim, train_len=train_len, rngs=nnx.Rngs(0))


def products(scheme: Any, q_SH: np.ndarray, k_SH: np.ndarray, pos: posenc.Positions) -> np.ndarray:
  """q.k of S queries at each position of `pos` with their keys at position 0, not over sqrt(H), float64[S, T]."""

  def everywhere(x_SH):
    return jnp.broadcast_to(jnp.asarray(x_SH, jnp.float32)[:, None, None], (len(x_SH), len(pos.at_T), 1, x_SH.shape[1]))

  q_STNH, k_STKH = (np.asarray(x, np.float64) for x in scheme.rotate(everywhere(q_SH), everywhere(k_SH), pos))
  return np.einsum('STH,SH->ST', q_STNH[:, :, 0], k_STKH[:, 0, 0]) * np.asarray(pos.logit_scale_T, np.float64)


def kernel(scheme: Any, pos: posenc.Positions) -> np.ndarray:
  """q.k / |q|**2 of q = k = (1, ..., 1), float64[T]: its mean over all directions of q = k."""
  ones = np.ones((1, scheme.rot))
  return products(scheme, ones, ones, pos)[0] / scheme.rot


def sinusoidal(scheme: Any, length: int) -> np.ndarray:
  """PE_i . PE_0 for i < length, float64[T]."""
  table_TD = np.asarray(scheme.table(np.arange(length)), np.float64)
  return table_TD @ table_TD[0]


def bound(scheme: Any, pos: posenc.Positions) -> np.ndarray:
  """(1/(d/2)) sum_j |S_j|, S_j = sum of exp(i theta_p delta) over p < j, j = 1 .. d/2, float64[T]: RoFormer, figure 2.

  The exponentials are what `rotate` (half_split) makes of a unit vector in every pair.
  """
  unit = jnp.repeat(jnp.asarray([1.0, 0.0]), scheme.rot // 2) * jnp.ones((1, len(pos.at_T), 1, 1))
  cos_TP, sin_TP = np.split(np.asarray(scheme.rotate(unit, unit, pos)[0], np.float64)[0, :, 0], 2, -1)
  return np.abs(np.cumsum(cos_TP + 1j * sin_TP, -1)).mean(-1)


def roughness(q_SH: np.ndarray, k_SH: np.ndarray) -> np.ndarray:
  """What `bound` is to be multiplied by to bound |q.k|, float64[S]: max_p |h_{p+1} - h_p| d/2.

  h_p = q_p conj(k_p) of pair p as a complex number, h_{d/2} = 0.
  """
  q_SP, k_SP = (a + 1j * b for a, b in (np.split(x, 2, -1) for x in (q_SH, k_SH)))
  return np.abs(np.diff(q_SP * k_SP.conj(), append=0)).max(-1) * q_SP.shape[1]


def mean_and_error(x_ST: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  return x_ST.mean(0), x_ST.std(0, ddof=1) / len(x_ST) ** 0.5


def table(length: int, columns: dict[str, np.ndarray]) -> str:
  at = [n for n in SHOWN if n < length]
  rows = [['distance', *columns], *([f'{n}', *(f'{y[n]:.3f}' for y in columns.values())] for n in at)]
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join('  '.join(cell.rjust(width) for cell, width in zip(row, widths)) for row in rows)


def draw(path: pathlib.Path, args: argparse.Namespace) -> str:
  """The figure, and its numbers as a table."""
  import matplotlib.figure  # no pyplot: it would look for a display

  d, length = args.head_dim, args.max_distance + 1
  rope = build(f'rope(base={args.base!r})', d, args.train_len)

  def positions(method):
    try:
      return posenc.positions(method, rope, args.train_len, length)
    except posenc.Unsupported as reason:
      raise SpecError(f'methods: {reason}') from None

  trained, scaled = positions('none'), {method: positions(method) for method in args.methods}
  rng = np.random.default_rng(args.seed)
  q_SH, k_SH = rng.standard_normal((2, args.samples, d))
  independent_ST = products(rope, q_SH, k_SH, trained)
  mean_T, error_T = mean_and_error(independent_ST)
  rms_T = (independent_ST**2).mean(0) ** 0.5
  pe_T = sinusoidal(build('sinusoidal', d), length) / (d / 2)
  kernel_T, bound_T = kernel(rope, trained), bound(rope, trained)
  same_ST = products(rope, q_SH, q_SH, trained) / (q_SH**2).sum(-1, keepdims=True)
  under_ST = np.abs(independent_ST) / roughness(q_SH, k_SH)[:, None]

  figure = matplotlib.figure.Figure(figsize=(12, 8), layout='constrained')
  axes = figure.subplots(2, 2).ravel()
  delta = np.arange(length)

  def band(ax, x_ST, label, colour):
    mean, error = mean_and_error(x_ST)
    ax.plot(delta, mean, color=colour, lw=1, label=label)
    ax.fill_between(delta, mean - error, mean + error, color=colour, alpha=0.25, lw=0)

  ax = axes[0]
  band(ax, independent_ST, f'RoPE, mean of {args.samples} ±1 s.e.', 'C0')
  ax.plot(delta, rms_T, color='C1', lw=1, label='their rms')
  ax.axhline(d**0.5, color='0.5', lw=1, ls=':', label='sqrt(d)')
  ax.set_title('a. independent random q and k: noise, no decay', fontsize=10)
  ax.set_ylabel('q.k')

  ax = axes[1]
  ax.plot(delta, pe_T, color='C2', lw=4, alpha=0.5, label='sinusoidal PE.PE / (d/2), base 10000')
  ax.plot(delta, kernel_T, '--', color='k', lw=1, label=f'RoPE, q = k = 1, over |q|², base {args.base:g}')
  band(ax, same_ST, f'RoPE, q = k random, over |q|², mean of {args.samples} ±1 s.e.', 'C0')
  ax.set_title('b. matched: one curve', fontsize=10)

  ax = axes[2]
  ax.plot(delta, bound_T, color='C3', lw=1, label='RoFormer: (1/(d/2)) sum |S_j|')
  band(ax, under_ST, f'|q.k| in the same units, mean of {args.samples} ±1 s.e.', 'C0')
  ax.set_yscale('log')
  ax.set_title('c. a bound decays, what it bounds does not', fontsize=10)

  ax = axes[3]
  for share, shade in zip(MEANS, ('0.75', '0.5', '0')):
    band(ax, products(rope, q_SH + share**0.5, k_SH + share**0.5, trained) / d, f'|mu|² = {share:g} d', shade)
  for i, (method, pos) in enumerate(scaled.items()):
    ax.plot(delta, kernel(rope, pos), color=f'C{i}', lw=1, label=f'mu alone, {method}')
  ax.axvline(args.train_len, color='0.5', lw=1, ls=':')
  ax.text(
    args.train_len, 1.01, 'training length', fontsize=8, color='0.4', transform=ax.get_xaxis_transform(), ha='center'
  )
  ax.set_title('d. a mean mu in q and k decays, by |mu|²', fontsize=10, loc='left')
  ax.set_ylabel('q.k / d')
  ax.set_ylim(top=1.5 * ax.get_ylim()[1])  # room for the names

  for ax in axes:
    ax.set_xscale('symlog', base=2, linthresh=1)
    ax.set_xlim(0, args.max_distance)
    ax.set_xlabel('distance, tokens')
    ax.grid(alpha=0.25)
    ax.legend(fontsize=7, ncols=1 + (ax is axes[3]))
  figure.suptitle(f'RoPE, width d = {d}, base {args.base:g}', fontsize=11)
  figure.savefig(path, dpi=110)
  return table(
    length, {'mean': mean_T, 's.e.': error_T, 'rms': rms_T, 'PE.PE': pe_T, 'q = k': kernel_T, 'bound': bound_T}
  )


def main(argv: Sequence[str] | None = None) -> None:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--head_dim', type=int, default=64)
  parser.add_argument('--base', type=float, default=10000.0)
  parser.add_argument('--train_len', type=int, default=128, help='what the methods scale from')
  parser.add_argument('--max_distance', type=int, default=1024)
  parser.add_argument('--samples', type=int, default=80)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--methods', action='append', help='a method drawn in panel d; repeat for more')
  args = parser.parse_args(argv)
  args.methods = args.methods or METHODS
  for field, least in (('head_dim', 2), ('train_len', 1), ('max_distance', 1), ('samples', 2), ('seed', 0)):
    if getattr(args, field) < least:
      raise SpecError(f'{field} = {getattr(args, field)}: a whole number of at least {least} is allowed')
  args.out.parent.mkdir(parents=True, exist_ok=True)
  print(draw(args.out, args))
  print(f'\n{args.out}')


if __name__ == '__main__':
  cli.guard(main)

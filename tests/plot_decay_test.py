"""The curves of the decay figure: what they must be whatever the seed, and that the figure is drawn from them."""

import sys

import numpy as np
import pytest

import posenc
from scripts import plot_decay
from spec import SpecError
from training import cli

D = 32


@pytest.fixture(scope='module')
def rope():
  return plot_decay.build('rope', D)


def positions(rope, method='none', length=257):
  return posenc.positions(method, rope, train_len=128, eval_len=length)


def test_products_are_those_of_queries_after_keys(rope):
  """Against rotations written out as complex numbers, in float64."""
  q, k = np.random.default_rng(1).standard_normal((2, 3, D))
  want = np.empty((3, 257))
  for s in range(3):
    (qa, qb), (ka, kb) = np.split(q[s], 2), np.split(k[s], 2)
    turn = np.exp(1j * np.arange(257)[:, None] * rope.inv_freq_P)
    want[s] = ((qa + 1j * qb) * (ka - 1j * kb) * turn).real.sum(-1)
  np.testing.assert_allclose(plot_decay.products(rope, q, k, positions(rope)), want, atol=3e-4)


def test_one_kernel_for_both_schemes(rope):
  """Panel b: at equal width and base RoPE of q = k and the sinusoids' product are one curve, random q in the mean."""
  kernel = plot_decay.kernel(rope, positions(rope))
  pe = plot_decay.sinusoidal(plot_decay.build('sinusoidal', D), 257)
  np.testing.assert_allclose(pe / (D / 2), kernel, atol=1e-5)
  assert kernel[0] == pytest.approx(1) and kernel.min() < 0.5
  other = plot_decay.kernel(plot_decay.build('rope(base=100.0)', D), positions(plot_decay.build('rope(base=100.0)', D)))
  assert abs(pe / (D / 2) - other).max() > 0.1
  q = np.random.default_rng(0).standard_normal((4000, D))
  mean, error = plot_decay.mean_and_error(plot_decay.products(rope, q, q, positions(rope, length=9)) / D)
  assert (abs(mean - kernel[:9]) < 4 * error + 1e-6).all()


def test_independent_products_are_noise(rope):
  """Panel a: no mean at any distance, 0 included, and an rms of sqrt(d) at all of them."""
  q, k = np.random.default_rng(0).standard_normal((2, 4000, D))
  products = plot_decay.products(rope, q, k, positions(rope, length=65))
  mean, error = plot_decay.mean_and_error(products)
  assert (abs(mean) < 4.5 * error).all() and error[0] == pytest.approx((D / 4000) ** 0.5, rel=0.1)
  np.testing.assert_allclose((products**2).mean(0), D, rtol=0.1)


def test_the_bound_holds_and_is_no_product(rope):
  """Panel c: at distance 0 it is (d/2 + 1)/2, |q.k| stays below it, and it falls where |q.k| does not."""
  pos = positions(rope)
  bound = plot_decay.bound(rope, pos)
  assert bound[0] == pytest.approx((D / 2 + 1) / 2) and bound[256] < 0.5 * bound[0]
  q, k = np.random.default_rng(0).standard_normal((2, 200, D))
  products, rough = abs(plot_decay.products(rope, q, k, pos)), plot_decay.roughness(q, k)[:, None]
  assert (products <= bound * rough).all()
  assert (products / rough)[:, 256].mean() > 0.8 * (products / rough)[:, 0].mean()
  # With one pair the bound is the product of aligned vectors: S_1 = exp(i delta), h_1 = q conj(k).
  pair = plot_decay.build('rope', 2)
  assert plot_decay.roughness(np.array([[3.0, 4.0]]), np.array([[3.0, 4.0]])) == pytest.approx([25])
  np.testing.assert_allclose(plot_decay.bound(pair, positions(pair)), 1, rtol=1e-6)


def test_a_mean_decays_in_proportion(rope):
  """Panel d: E[q.k] of q and k around mu is |mu|**2 times the kernel; yarn's temperature multiplies it."""
  q, k = np.random.default_rng(0).standard_normal((2, 4000, D))
  kernel = plot_decay.kernel(rope, positions(rope))
  for share in plot_decay.MEANS:
    mean, error = plot_decay.mean_and_error(
      plot_decay.products(rope, q + share**0.5, k + share**0.5, positions(rope, length=33))
    )
    assert (abs(mean - share * D * kernel[:33]) < 4.5 * error).all()
  np.testing.assert_allclose(plot_decay.kernel(rope, positions(rope, 'pi(factor=8)'))[::8], kernel[:33], atol=1e-5)
  yarn = plot_decay.kernel(rope, positions(rope, 'yarn(factor=8)'))
  assert yarn[0] == pytest.approx((0.1 * np.log(8) + 1) ** 2)


def test_the_program_draws_and_prints(tmp_path, capsys):
  out = tmp_path / 'deep' / 'decay.png'
  arguments = ['--head_dim=16', '--max_distance=16', '--samples=8', '--methods=pi(factor=2)', '--methods=logn']
  plot_decay.main([f'--out={out}', *arguments])
  assert out.read_bytes().startswith(b'\x89PNG')
  lines = capsys.readouterr().out.splitlines()
  rows = [line.split() for line in lines[1:7]]
  assert [row[0] for row in rows] == ['0', '1', '2', '4', '8', '16'] and lines[-1] == str(out)
  assert rows[0][4:] == ['1.000', '1.000', '4.500'] and all(row[4] == row[5] for row in rows)


@pytest.mark.parametrize(('argument', 'words'), [
  ('--samples=1', 'samples = 1: a whole number of at least 2'),
  ('--head_dim=31', 'head_dim = 31: an even'),
  ('--base=0.5', 'base = 0.5'),
  ('--methods=yarm', "did you mean 'yarn'"),
  ('--max_distance=0', 'max_distance = 0'),
])  # fmt: skip
def test_a_mistake_is_one_line(tmp_path, argument, words):
  with pytest.raises(SpecError) as caught:
    plot_decay.main([f'--out={tmp_path / "decay.png"}', argument])
  assert words in str(caught.value) and '\n' not in str(caught.value) and not any(tmp_path.iterdir())


def test_the_program_ends_in_one_line(tmp_path, capsys, monkeypatch):
  monkeypatch.setattr(sys, 'argv', ['plot_decay', f'--out={tmp_path / "x.png"}', '--head_dim=2', '--methods=ntk'])
  with pytest.raises(SystemExit) as caught:
    cli.guard(plot_decay.main)
  out, err = capsys.readouterr()
  assert (caught.value.code, out) == (2, '') and err.startswith('error: methods: ntk') and err.count('\n') == 1

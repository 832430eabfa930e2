"""Every scheme and every method as small tests want them: one string each; how tests build them and compare."""

import functools
import re

import jax
import numpy as np
import pytest
from flax import nnx

import posenc
from posenc import METHODS, SCHEMES

# A scheme's string where its defaults do not fit ten tokens of training and heads of width 8. A new one needs no line.
SPEC = {
  't5': 't5(num_buckets=8, max_distance=16)',
  'fire': 'fire(init_len=9)',
  'shaw': 'shaw(clip=9)',
  'cope': 'cope(npos_max=6)',
  'rope2d': 'rope2d(width=5)',
}

# Forms that are as good as schemes of their own.
FORMS = [SPEC.get(name, name) for name in SCHEMES] + [
  'rope(window=7)', 'rope(ssmax=True)', 'rope(fraction=0.5)', 'rope(proportion=0.5)',
  'fox(rope=True)', 'xpos(bca=True)', 'learned(oob="interpolate")',
]  # fmt: skip


# For tests that compile for seconds and run for milliseconds: half of the time to compile, the same mathematics.
jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}
)


def method_of(name: str, pairs: int) -> str:
  """The method's string for a scheme of so many frequency pairs: some have no meaning without numbers."""
  needed = {
    'longrope': f'long={(1.5,) * pairs}, onset=3',
    'longrope_dynamic': f'long={(1.5,) * pairs}, factor=4',
  }
  return f'{name}({needed[name]})' if name in needed else name


COMBINATIONS = [(form, method) for form in FORMS for method in METHODS]

FREQUENCY = (
  'pi', 'dynamic_pi', 'ntk', 'dynamic_ntk', 'dynamic_ntk_hf', 'dynamic_ntk_qwen', 'ntk_mixed_su',
  'ntk_by_parts', 'ntk_by_parts_v0', 'yarn', 'dynamic_yarn', 'llama31',
)  # fmt: skip
FACTORED = [name for name in FREQUENCY if name != 'dynamic_ntk_qwen']
REMAPPED = ('rerope', 'leaky_rerope', 'self_extend', 'lm_infinite')
ONE_OF_EACH = (
  'nope', 'sinusoidal', 'learned', 'rope', 'alibi', 't5',
  'kerple_log', 'kerple_power', 'fire', 'sandwich', 'shaw', 'cope', 'fox', 'pope', 'dape',
)  # fmt: skip
SHAPES = (
  (32, 10000.0, 128),
  (64, 10000.0, 256),
  (128, 10000.0, 4096),
  (128, 500000.0, 8192),
)  # width, base, L


def build(text, head_dim=32, heads=4, d_model=128, train_len=128):
  rngs = nnx.Rngs(0)
  return posenc.build(text, heads=heads, head_dim=head_dim, d_model=d_model, train_len=train_len, rngs=rngs)


def rope(width=32, base=10000.0, train_len=128):
  return build(f'rope(base={base!r})', head_dim=width, train_len=train_len)


def same(a, b):
  """Bit for bit, structure and types included."""
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(x, y)


def differs(a, b):
  return bool((np.asarray(a) != np.asarray(b)).any())


def refused(error, *words):
  """One line that holds all the words."""
  return pytest.raises(error, match='(?s)' + ''.join(f'(?=.*{re.escape(w)})' for w in words) + r'\A[^\n]*\Z')

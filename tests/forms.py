"""Every scheme and every method as small tests want them: one string each."""

import functools

import jax

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

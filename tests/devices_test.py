"""What jax is told before its first program; meshes are in mesh_test.py."""

import os
import subprocess
import sys

import pytest

# The flags that start_jax leaves, and what XLA made of them: widths that it sees are attributes of its functions.
CODE = """
import os, pathlib, sys
from training.devices import start_jax
start_jax()
import jax, jax.numpy as jnp
jax.jit(lambda x: jnp.exp(x) * 2)(jnp.ones(4096)).block_until_ready()
seen = {part for path in pathlib.Path(sys.argv[1]).glob('*.ll')
        for part in path.read_text().split() if part.startswith('"prefer-vector-width"')}
print(os.environ['XLA_FLAGS'], *seen, sep='\\n')
"""


@pytest.mark.parametrize('given, width', [('', 512), ('--xla_cpu_prefer_vector_width=128', 128)])
def test_vectors_are_as_wide_as_a_core_has_them_unless_told_otherwise(root, tmp_path, given, width):
  flags = f'--xla_dump_to={tmp_path} {given}'.strip()
  env = {**os.environ, 'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': flags}
  env['JAX_ENABLE_COMPILATION_CACHE'] = 'false'
  done = subprocess.run([sys.executable, '-c', CODE, tmp_path], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  told, *seen = done.stdout.splitlines()
  assert told.split() == [*flags.split(), *(['--xla_cpu_prefer_vector_width=512'] if not given else [])]
  assert seen and all(f'"{width}"' in part for part in seen)


def test_a_file_of_flags_is_left_alone(root, tmp_path):
  (tmp_path / 'flags').write_text('--xla_cpu_enable_fast_math=false')
  env = {**os.environ, 'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': str(tmp_path / 'flags')}
  done = subprocess.run([sys.executable, '-c', CODE, tmp_path], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.splitlines() == [str(tmp_path / 'flags')]

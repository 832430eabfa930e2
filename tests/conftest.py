"""One JAX setup for the whole suite: CPU, one device, compile cache on."""

import os
import pathlib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import jax
import pytest

CACHE = os.environ.get('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path.home() / '.cache' / 'longcurve' / 'jax'))
jax.config.update('jax_compilation_cache_dir', CACHE)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


@pytest.fixture(scope='session')
def root() -> pathlib.Path:
  """The project's folder, from which its programs are started."""
  return pathlib.Path(__file__).parent.parent

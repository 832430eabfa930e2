"""One JAX setup for the whole suite: CPU, one device, compile cache on."""

import atexit
import os
import pathlib
import shutil
import tempfile

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
if 'LONGCURVE_CACHE' not in os.environ:  # workers and programs that tests start inherit it
  os.environ['LONGCURVE_CACHE'] = tempfile.mkdtemp(prefix='longcurve-tokens-')
  atexit.register(shutil.rmtree, os.environ['LONGCURVE_CACHE'], ignore_errors=True)

import jax
import pytest

CACHE = os.environ.get('JAX_COMPILATION_CACHE_DIR', str(pathlib.Path.home() / '.cache' / 'longcurve' / 'jax'))
jax.config.update('jax_compilation_cache_dir', CACHE)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)


def pytest_terminal_summary(terminalreporter):
  """What tests counted, `record_property('counted', ...)`: a worker's own output would not be shown."""
  for report in terminalreporter.stats.get('passed', []):
    for name, value in report.user_properties:
      if name == 'counted':
        terminalreporter.write_line(f'{report.nodeid.split("::")[-1]}: {value}')


@pytest.fixture(scope='session')
def root() -> pathlib.Path:
  """The project's folder, from which its programs are started."""
  return pathlib.Path(__file__).parent.parent

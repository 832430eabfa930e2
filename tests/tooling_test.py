"""The tools that guard the code, guarded: a checker that cannot fail is no checker."""

import subprocess
import sys
import tomllib


def test_a_planted_type_error_fails(root, tmp_path):
  """Without the interpreter it names, pyrefly reports 0 errors for anything."""
  settings = tomllib.loads((root / 'pyrefly.toml').read_text())
  bad = tmp_path / 'bad.py'
  bad.write_text('import jax\n\nx: int = jax.devices()\n')
  config = tmp_path / 'pyrefly.toml'
  config.write_text(
    f'project-includes = ["*.py"]\npython-interpreter-path = "{root / settings["python-interpreter-path"]}"\n'
  )
  command = [sys.executable, '-m', 'pyrefly', 'check', '--config', str(config)]
  found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert found.returncode != 0 and 'bad-assignment' in found.stdout + found.stderr


def test_every_pin_serves_both_python_lines(root):
  """3.11 keeps the last jax and flax that support it; newer lines go on."""
  pins = (root / 'requirements.txt').read_text()
  for package in ('jax', 'jaxlib', 'flax'):
    assert f'\n{package}==' in '\n' + pins
    assert sum(line.startswith(f'{package}==') for line in pins.splitlines()) == 2
  assert all('==' in line for line in pins.splitlines() if line and not line.lstrip().startswith('#'))
  assert '://' not in pins  # no registry's address

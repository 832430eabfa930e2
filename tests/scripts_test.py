"""The shell scripts a newcomer runs first, and the check of what the quickstart predicted."""

import os
import shutil
import subprocess

import pytest

from scripts.quickstart_claims import claims


@pytest.fixture
def bare(root, tmp_path):
  """A checkout with the setup alone, to be broken."""
  (tmp_path / 'scripts').mkdir()
  for name in ('scripts/setup.sh', 'requirements.txt', 'requirements-dev.txt'):
    shutil.copy(root / name, tmp_path / name)
  return tmp_path


def setup(folder, *args, **env):
  return subprocess.run(
    [folder / 'scripts' / 'setup.sh', *args], env={**os.environ, **env}, capture_output=True, text=True, timeout=120
  )


def test_setup_names_an_old_python_in_one_line(bare):
  old = bare / 'python3.9'
  old.write_text('#!/bin/sh\ncase "$*" in *print*) echo 3.9;; *) exit 1;; esac\n')
  old.chmod(0o755)
  done = setup(bare, PYTHON=str(old))
  assert done.returncode == 1 and done.stdout == ''
  assert done.stderr.strip().splitlines() == [
    'setup: Python 3.9 is too old; 3.11 or newer is needed (PYTHON=python3.11 ./scripts/...)'
  ]


def test_setup_names_a_missing_python_in_one_line(bare):
  done = setup(bare, PYTHON='python9.9')
  assert done.returncode == 1
  assert done.stderr.strip() == 'setup: python9.9 is not installed; Python 3.11 or newer is needed'


def test_setup_names_a_registry_out_of_reach(bare):
  """Port 9 of this machine answers nobody; with uv or with pip the last line says what is wrong."""
  nowhere = 'http://127.0.0.1:9/simple'
  done = setup(
    bare,
    UV_DEFAULT_INDEX=nowhere,
    UV_CACHE_DIR=str(bare / 'cache'),
    PIP_INDEX_URL=nowhere,
    PIP_RETRIES='0',
    PIP_FIND_LINKS='',
  )
  assert done.returncode == 1
  assert done.stderr.strip().splitlines()[-1].startswith('setup: the package registry is out of reach: ')


def test_setup_does_nothing_twice(root):
  """The environment these tests run in is installed: setting it up again says and changes nothing."""
  if not (root / '.venv' / '.requirements.txt').exists():
    pytest.skip('the tests run in an environment that scripts/setup.sh did not make')
  done = setup(root, 'dev')
  assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


@pytest.mark.parametrize('name', ['setup', 'quickstart', 'test', 'lock'])
def test_scripts_parse_and_may_be_run(root, name):
  script = root / 'scripts' / f'{name}.sh'
  assert os.access(script, os.X_OK)
  assert subprocess.run(['bash', '-n', script]).returncode == 0


def points(method, ppls, vs_none=None):
  """A fixed-target curve with these perplexities at 1x, 2x ... 32x."""
  return [
    {
      'protocol': 'fixed_targets',
      'method': method,
      'train_length': 128,
      'length': 128 * 2**i,
      'ppl': ppl,
      'vs_none': -0.5,
      'vs_none_low': -0.6,
      'vs_none_high': vs_none,
    }
    for i, ppl in enumerate(ppls)
  ]


RISING = [4.0, 5.0, 5.5, 6.0, 7.0, 8.0]


@pytest.mark.parametrize('rope, alibi, high, want', [
  (RISING, [4.0] * 6, -0.4, [True, True, True]),
  ([4.0, 5.0, 4.9, 6.0, 7.0, 8.0], [4.0] * 6, -0.4, [False, True, True]),
  ([4.0, 5.0, 5.5, 5.9, 7.0, 8.0], [4.0] * 6, -0.4, [False, True, True]),
  (RISING, [4.0, 4, 4, 4, 4, 4.08], -0.4, [True, True, True]),
  (RISING, [4.0, 4, 4, 4, 4, 4.09], -0.4, [True, False, True]),
  (RISING, [4.0] * 6, 0.01, [True, True, False]),
])  # fmt: skip
def test_claims_of_the_quickstart(rope, alibi, high, want):
  out = claims(points('none', rope) + points('yarn', rope, high), points('none', alibi))
  assert [holds for _, holds, _ in out] == want

"""The promise of the README, kept for strangers: a scheme is one file and one line, a method one function and one line.

Throw-away schemes and a throw-away method are written as files, registered, and the contract suite is run on them as it
stands: it must pick them up by their names alone.
"""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

BIAS = '''
"""A bias per head that falls with the square root of the distance, its weight learned."""

import jax.numpy as jnp

from posenc.base import Bias, PosParam, distance


class Root(Bias):
  """logit - c_h sqrt(i - j)."""

  def __init__(self, dims, rngs, *, start: float = 0.5):
    super().__init__(dims, rngs)
    self.weight = PosParam(jnp.full(dims.heads, start, jnp.float32))

  def bias(self, at_t, at_s):
    return -self.weight[...][:, None, None] * jnp.sqrt(distance(at_t, at_s) + 1e-3)
'''

STATE = '''
"""Reads the hidden state: each token says how loudly it wants to be heard, per head, layer by layer."""

import jax
import jax.numpy as jnp

from posenc.base import PositionScheme, PosParam


class Loud(PositionScheme):
  """logit + w_h . x_j: a key's own offer, whoever asks."""

  per_layer = True
  reads_distance = False  # what its score reads is the text

  def __init__(self, dims, rngs):
    super().__init__(dims, rngs)
    self.w = PosParam(0.1 * jax.random.normal(rngs.params(), (dims.d_model, dims.heads)))

  def token_state(self, x_BTD, pos):
    return jnp.einsum('BTD,DN->BTN', x_BTD.astype(jnp.float32), self.w[...])

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    return logits_BNts + jnp.swapaxes(state_s, 1, 2)[:, :, None, :], carry
'''

WIDE = '''
"""Widens queries and keys: two copies of a head, the second turned, so that R = 2H; values keep their width."""

import jax.numpy as jnp

from posenc.base import PositionScheme


class Twice(PositionScheme):
  """q . k + q . R(n - m) k over halves: part of every head knows distances, part does not."""

  def __init__(self, dims, rngs):
    super().__init__(dims, rngs)
    self.base, self.rot = 100.0, dims.head_dim

  def rotate(self, q_BTNH, k_BTKH, pos):
    angle_TP = pos.at_T[:, None] * pos.inv_freq_P
    cos, sin = jnp.cos(angle_TP)[:, None, :], jnp.sin(angle_TP)[:, None, :]

    def turned(x):
      a, b = jnp.split(x.astype(jnp.float32), 2, -1)
      return jnp.concatenate([x, a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    return turned(q_BTNH), turned(k_BTKH)
'''

METHOD = '''
"""A method: one function."""

from posenc.scaling import _frequencies, _scale


def halfway(pos, scheme, train_len, eval_len, *, factor: float | None = None):
  """Every frequency divided by sqrt(s)."""
  s = _scale(factor, train_len, eval_len)
  return {'inv_freq_P': _frequencies(scheme) / s**0.5}
'''

REGISTER = """
import posenc
from loud import Loud
from halfway import halfway
from root import Root
from twice import Twice

posenc.SCHEMES['throwaway_root'] = Root
posenc.SCHEMES['throwaway_loud'] = Loud
posenc.SCHEMES['throwaway_twice'] = Twice
posenc.METHODS['throwaway_halfway'] = halfway
"""

FILES = {'root.py': BIAS, 'loud.py': STATE, 'twice.py': WIDE, 'halfway.py': METHOD}


def contract(root, folder, chosen):
  """(number of tests, failed ids) of the contract suite with the files of `folder` registered first."""
  report = folder / 'report.xml'
  run = subprocess.run(
    [sys.executable, '-m', 'pytest', '-p', 'register', 'tests/contract_test.py', '-k', chosen, f'--junitxml={report}'],
    cwd=root,
    env={**os.environ, 'PYTHONPATH': f'{folder}{os.pathsep}{root}', 'JAX_PLATFORMS': 'cpu'},
    capture_output=True,
    text=True,
  )
  assert run.returncode in (0, 1), run.stdout[-2000:] + run.stderr[-2000:]
  cases = list(ET.parse(report).iter('testcase'))
  return len(cases), [case.get('name') for case in cases if case.find('failure') is not None]


@pytest.fixture
def folder(tmp_path):
  for name, text in {**FILES, 'register.py': REGISTER}.items():
    (tmp_path / name).write_text(text.lstrip())
  return tmp_path


def test_each_is_short():
  for name, text in FILES.items():
    assert len(text.strip().splitlines()) <= 40, name


@pytest.mark.slow
def test_the_contract_suite_picks_them_up(root, folder):
  """All of it, on each scheme with every method, and on the method with plain RoPE and NoPE."""
  count, failed = contract(
    root, folder, 'throwaway and (root or loud or twice) or throwaway_halfway and (nope or rope-)'
  )
  assert not failed
  assert count > 3 * 60


@pytest.mark.slow
@pytest.mark.parametrize('name, old, new, broken', [
  ('root.py', 'distance(at_t, at_s)', '(at_t[:, None] + at_s[None, :])', 'test_4'),
  ('loud.py', 'jnp.swapaxes(state_s, 1, 2)[:, :, None, :]', 'state_s.mean()', 'test_1'),
  ('twice.py', 'turned(k_BTKH)', 'jnp.concatenate([k_BTKH, k_BTKH], -1)', 'test_4'),
])  # fmt: skip
def test_the_contract_suite_refuses_a_wrong_one(root, folder, name, old, new, broken):
  """It would be no proof if it passed whatever is written."""
  text = (folder / name).read_text()
  assert text.count(old) == 1
  (folder / name).write_text(text.replace(old, new))
  scheme = f'throwaway_{name.removesuffix(".py")}'
  _, failed = contract(root, folder, f'{scheme} and none and (test_1 or test_2) or test_4 and {scheme}')
  assert any(re.match(broken, test) for test in failed), failed

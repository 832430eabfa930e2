"""Starts the real programs as subprocesses, and what kills, damages, fills and races them."""

import functools
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
from flax import nnx

from configs.schema import Config
from training import provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, whole
from training.optimizer import decay_mask, make_optimizer

ROOT = pathlib.Path(__file__).parent.parent.parent
KILLS = 3, 100  # at random moments of trainings and sweeps: by default, and with --all

# Runs a program as __main__ and kills its process, as a power cut would, when a method has been called n times.
KILLER = """
import importlib, os, runpy, signal, sys
module, cls, method, n, program, *arguments = sys.argv[1:]
cls, left = getattr(importlib.import_module(module), cls), int(n)
original = getattr(cls, method)

def counted(*args, **kwargs):
  global left
  left -= 1
  if left < 0:
    os.kill(os.getpid(), signal.SIGKILL)
  return original(*args, **kwargs)

setattr(cls, method, counted)
sys.argv = [program, *arguments]
runpy.run_path(program, run_name='__main__')
"""

# Slot 0 knows no position past its table, slot 1 no frequencies: two kinds of unsupported points in one curve.
PATTERN = "('learned', 'alibi')"
FIELDS = [
  '--config=configs/smoke.py',
  f'--config.posenc={PATTERN}',
  '--config.log.every=1',
  '--config.log.checkpoint_every=4',
  '--config.log.keep=9',
]
SWEEP = ['--method=none', '--method=ntk', '--method=logn', '--multiples=0.5,1,2']


# The same, so many seconds after the first call of a method, wherever it then is; a file is told how many it lived.
TIMED = """
import importlib, os, runpy, signal, sys, threading, time
module, cls, method, seconds, lived, *sys.argv = sys.argv[1:]
cls = getattr(importlib.import_module(module), cls)
original = getattr(cls, method)
began = time.monotonic()  # one that has nothing left to do never calls it

def first(*args, **kwargs):
  global began
  setattr(cls, method, original)
  began = time.monotonic()
  timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
  timer.daemon = True
  timer.start()
  return original(*args, **kwargs)

setattr(cls, method, first)
try:
  runpy.run_path(sys.argv[0], run_name='__main__')
finally:
  with open(lived, 'w') as file:
    file.write(str(time.monotonic() - began))
"""


def environment(**more):
  return {**os.environ, 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT), **more}


def begin(program, *arguments, before=(), **env):
  """A program that runs; `before`: what `python` is given before it."""
  command = [sys.executable, *map(str, before), *([f'{program}.py'] if program else []), *map(str, arguments)]
  return subprocess.Popen(
    command, cwd=ROOT, env=environment(**env), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
  )


def run(program, *arguments, code=0, before=(), **env):
  """What a program says, stdout and stderr, once it has ended with this code; None: with any."""
  process = begin(program, *arguments, before=before, **env)
  out, err = process.communicate(timeout=600)
  assert code is None or process.returncode == code, f'{process.returncode}: {out}\n{err}'
  return (out, err) if code is not None else (process.returncode, out, err)


def restored(workdir, step=20):
  """{name: array} of parameters and optimizer state."""
  config = Config.from_dict(provenance.read(workdir))
  make = functools.partial(config.build_model, 257)
  tx = make_optimizer(config.optimizer, config.steps, decay_mask(nnx.eval_shape(make)))

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(params)}

  checkpoints = Checkpoints(workdir)
  state = checkpoints.restore(step, as_abstract(jax.eval_shape(init), whole(make_mesh(1))))
  checkpoints.close()
  return {jax.tree_util.keystr(path): np.asarray(a) for path, a in jax.tree_util.tree_leaves_with_path(state)}


def digest(workdir, step=20):
  return hashlib.sha256(b''.join(a.tobytes() for a in restored(workdir, step).values())).hexdigest()


def curves(workdir):
  """metrics.jsonl without the clock's numbers."""
  lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
  return [{tag: value for tag, value in line.items() if not tag.endswith('per_second')} for line in lines]


def copy_of(run, to):
  shutil.copytree(run, to, ignore=shutil.ignore_patterns('extrapolation'))
  return to


def one_line(err):
  """The line that a program ends with where its input or disk is at fault."""
  assert err.startswith('error: ') and err.count('\n') == 1, err
  return err.removeprefix('error: ').rstrip('\n')

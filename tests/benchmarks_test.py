"""The benchmarks at tiny shapes: that they run, what they write, what they count. Never how long anything took."""

import ast
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest

import posenc
from benchmarks import accelerator, attention, memory, race, search, startup, sweep, train_step
from benchmarks.build import evaluation
from models import kernels
from models.lm import ModelConfig
from training import devices

# Ours run in this interpreter, peers in one that has neither torch nor transformers: their columns stay empty.
NAMES = {
  train_step: ['ours', 'HF Llama', 'HF Llama, our allocator', 'plain JAX', 'ours, default allocator'],
  attention: ['torch SDPA', 'nope', 'alibi'],
}


@pytest.fixture
def no_peer(tmp_path):
  """An interpreter without packages."""
  script = tmp_path / 'python'
  script.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
  script.chmod(0o755)
  return script


def lines(folder, name):
  return [json.loads(line) for line in (folder / f'{name}.jsonl').read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize('module', NAMES, ids=lambda module: module.__name__)
def test_races_write_what_ran_on_what(module, no_peer, tmp_path, capfd):
  schemes = '' if module is train_step else 'nope,alibi'
  module.main([
    '--tiny', '--repeats=2', f'--schemes={schemes}', f'--peer_python={no_peer}', '--threads=1', f'--out={tmp_path}',
  ])  # fmt: skip
  out, err = capfd.readouterr()
  name = module.__name__.split('.')[1]
  written = lines(tmp_path, name)
  assert len(written) == (1 if module is train_step else 2)
  for line in written:
    assert line['hardware']['cores'] and line['versions']['jax'] != 'absent'
    runs = {run['name']: run for run in line['runs']}
    assert list(runs) == NAMES[module]
    for run in line['runs']:
      missing = 'HF' in run['name'] or 'SDPA' in run['name']
      assert len(run['wall']) == len(run['cpu']) == (0 if missing else 2)
      assert ('absent' in run) == missing
      assert f'| {run["name"]} ' in out
    if module is train_step:  # the allocator changes no number
      assert runs['ours']['loss'] == pytest.approx(runs['ours, default allocator']['loss'], rel=1e-6)
  assert 'torch is not installed' in err and 'requirements-bench.txt' in err


@pytest.mark.parametrize('shape', train_step.SHAPES.values(), ids=lambda shape: f'{shape["d_model"]}')
def test_mlps_are_of_one_size(shape):
  """SwiGLU's three matrices are as large as the classic two at width 4 D, which the plain step has."""
  assert abs(3 * shape['d_mlp'] / (8 * shape['d_model']) - 1) < 0.05


def test_memory_counts_bytes_and_an_exponent(tmp_path, root):
  # A process of its own, as it is run: it says how many devices there are, which has to come before their first use.
  flags = ['--tiny', '--schemes=nope,t5', f'--out={tmp_path}']
  command = [sys.executable, '-m', 'benchmarks.memory', *flags]
  printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
  (line,) = lines(tmp_path, 'memory')
  assert [run['name'] for run in line['runs']] == ['nope', 't5']
  assert all(size > 0 for run in line['runs'] for size in run['temporary_bytes'])
  assert 'exponent' in printed and 'peak RSS at 64' in printed
  nope, t5 = line['runs']
  for run in (nope, t5):  # a model has run, in a process that holds at least the interpreter
    assert 0 < run['nll'] < 2 * math.log(256) and 2**26 < run['peak_rss'] < 2**31
  assert nope['nll'] != t5['nll']


def test_sweeps_count_their_programs(tmp_path, capfd):
  """One program per length and one more where a method has a second map, against one for each method at each length."""
  sweep.main(['--tiny', '--repeats=1', '--schemes=alibi', f'--out={tmp_path}'])
  (line,) = lines(tmp_path, 'sweep')
  assert [(run['name'], run['compiles']) for run in line['runs']] == [('together', 4), ('apart', 6)]
  assert all(len(run['wall']) == len(run['cpu']) == 1 for run in line['runs'])
  assert line['setting']['methods'] == ['none', 'pi', 'rerope'] and len(line['setting']['multiples']) == 2
  (line,) = lines(tmp_path, 'lengths')
  (run,) = line['runs']
  assert [len(times) for times in run['wall']] == [1, 1, 1] and 'exponent' in run
  out = capfd.readouterr().out
  assert '| nothing kept ' in out and '| alibi ' in out


def test_the_sweep_that_is_timed_has_6_lengths_and_12_methods():
  assert (len(sweep.MULTIPLES), len(set(sweep.METHODS)), max(sweep.MULTIPLES)) == (6, 12, 32)
  assert sum('rerope' in method for method in sweep.METHODS) == 1  # a second program per length


def test_searches_count_their_programs(tmp_path, capfd):
  """One program for all candidates, one each for those that forget it; and all find the same numbers."""
  search.main(['--tiny', '--repeats=1', '--candidates=4', f'--out={tmp_path}'])
  (line,) = lines(tmp_path, 'search')
  assert [(run['name'], run['compiles'], len(run['nll'])) for run in line['runs']] == [
    ('one program', 1, 4), ('compiled again', 2, 2), ('started again', 1, 1),
  ]  # fmt: skip
  assert all(len(run['wall']) == len(run['cpu']) == 1 for run in line['runs'])
  assert '| started again ' in capfd.readouterr().out


@pytest.fixture
def one_gpu(monkeypatch):
  """This machine taken for one with an NVIDIA GPU, whose kernel is a dense attention."""
  monkeypatch.setattr(devices, 'start_jax', lambda: None)  # too late for it here
  monkeypatch.setattr(kernels, '_device', lambda mesh: SimpleNamespace(platform='gpu', compute_capability='9.0'))
  monkeypatch.setattr(kernels, 'cudnn', cudnn)


def cudnn(q, k, v, window):
  q, k, wide = kernels._as_wide((q, k, v), 1)
  local = None if window is None else (window - 1, 0)
  o = jax.nn.dot_product_attention(q, k, wide, scale=1.0, is_causal=True, local_window_size=local)
  return o[..., : v.shape[-1]]


def test_the_accelerator_script_runs_unattended(tmp_path, one_gpu, capsys):
  """All of it, small: every part has its rows, fused and tiled."""
  flags = [f'--out={tmp_path}', '--tiny', '--repeats=1', '--seconds=600']
  assert accelerator.main(flags) == 0
  (line,) = lines(tmp_path, 'accelerator')
  parts = line['parts']
  assert line['errors'] == {} and line['left_out'] == [] and list(parts) == list(accelerator.PARTS)
  assert all(run['ok'] for run in parts['parity'])
  for run in parts['branches']:
    assert run['kernel'] == 'cudnn' and 0 < run['fused'] < 0.05 and 0 < run['tiles'] < 0.05
    assert run['fused'] != run['tiles']
  assert {(run['name'], run['kernel'], 'fused' in run) for run in parts['attention']} == {
    ('rope', 'cudnn', True), ('t5', 't5 has a score of its own', False),
  }  # fmt: skip
  assert [run['length'] for run in parts['sweep']] == [16, 32]
  assert all(run[method] > 0 for run in parts['sweep'] for method in ('none', 'yarn', 'sliding_window'))
  assert parts['train step'][0]['mfu'] is None  # a CPU has no entry
  printed = capsys.readouterr().out
  assert all(f'\n{name}\n|' in printed for name in parts)


def test_the_accelerator_script_goes_on_after_a_failure_and_says_what_it_left_out(tmp_path, one_gpu, monkeypatch):
  def part(of, fails):
    def rows(shape, repeats):
      yield [of], {'name': of, 'ok': of != 'wrong'}
      if fails:
        raise RuntimeError('no such kernel')
      yield ['second'], {'name': 'second', 'ok': True}

    return rows, 0.5, ['']

  monkeypatch.setattr(accelerator, 'PARTS', {'parity': part('right', False), 'sweep': part('any', True)})
  flags = [f'--out={tmp_path}', '--tiny', '--parts=parity,sweep']
  assert accelerator.main(flags) == 0
  assert accelerator.main([*flags, '--seconds=0']) == 0
  monkeypatch.setitem(accelerator.PARTS, 'parity', part('wrong', False))
  assert accelerator.main(flags) == 1
  monkeypatch.setitem(accelerator.PARTS, 'parity', part('right', True))
  assert accelerator.main(flags) == 1
  first, hurried, _, broken = lines(tmp_path, 'accelerator')
  assert first['errors'] == {'sweep': 'RuntimeError: no such kernel'} and first['left_out'] == []
  assert [run['name'] for run in first['parts']['parity']] == ['right', 'second']
  assert hurried['left_out'] == ['parity', 'sweep'] and len(hurried['parts']['parity']) == 1
  assert 'parity' in broken['errors']


def test_peaks_of_devices():
  names = {'NVIDIA H100 80GB HBM3': 989e12, 'NVIDIA H100 PCIe': 756e12, 'NVIDIA H200': 989e12, 'NVIDIA L4': 121e12}
  names |= {'NVIDIA A100-SXM4-40GB': 312e12, 'NVIDIA L40S': 362e12, 'TPU v5 lite': 197e12, 'cpu': None}
  assert {name: accelerator.peak_flops(name) for name in names} == names


def test_exponent_is_a_slope():
  assert memory.exponent((1, 2, 4, 8), [3, 12, 48, 192]) == pytest.approx(2)
  assert memory.exponent((1, 2, 4), [5, 10, 20]) == pytest.approx(1)


@pytest.mark.parametrize('scheme', posenc.SCHEMES)
def test_every_scheme_has_a_spec_that_fits(scheme):
  """One missing line in SPEC would end a benchmark of an hour half-way."""
  evaluation(scheme, 48, ModelConfig(layers=1, d_model=16, heads=2), vocab=8)


def test_ratios_are_taken_within_rounds():
  """A machine that gets three times slower half-way changes no ratio."""
  a = race.Contestant('a', [], wall=[1.0, 1.0, 3.0, 3.0])
  b = race.Contestant('b', [], wall=[2.0, 2.0, 6.0, 6.0])
  assert race.ratio(b, a) == 2.0
  assert race.ratio(a, race.Contestant('absent', [])) is None


def test_a_contestant_that_fails_ends_the_race_with_its_reason(tmp_path):
  broken = race.Contestant('broken', [sys.executable, '-c', 'raise RuntimeError("no such kernel")'])
  with pytest.raises(SystemExit, match='(?s)broken: .*no such kernel'):
    race.race([broken], repeats=1)


def test_a_program_is_timed_up_to_a_line_and_stopped():
  code = 'import time; print("step 1", flush=True); time.sleep(600)'
  wall, cpu = startup.seconds([sys.executable, '-c', code], dict(os.environ), until='step 1')
  assert wall < 60 and 0 < cpu < 60
  with pytest.raises(SystemExit, match='no '):
    startup.seconds([sys.executable, '-c', 'print("hello")'], dict(os.environ), until='step 1')


def test_benchmarks_import_nothing_heavy(root):
  """Peers live in their own environment: no module of ours needs torch to be read, and none its parent jax."""
  for path in (root / 'benchmarks').glob('*.py'):
    for node in ast.parse(path.read_text()).body:
      names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
      names += [node.module or ''] if isinstance(node, ast.ImportFrom) else []
      assert not {name.split('.')[0] for name in names} & {'torch', 'transformers'}, path.name
  code = 'import sys, benchmarks.train_step, benchmarks.attention, benchmarks.memory, benchmarks.startup, '
  code += 'benchmarks.sweep, benchmarks.accelerator, '
  code += 'benchmarks.peer_torch; assert not {"jax", "torch", "numpy"} & set(sys.modules)'
  subprocess.run([sys.executable, '-c', code], cwd=root, check=True)


def test_scripts_set_the_allocator_before_python_starts(root):
  """glibc reads its tunables when a process begins: later is without effect."""
  assert 'hugetlb=1' in race.allocator()['GLIBC_TUNABLES']
  lines = (root / 'scripts' / 'quickstart.sh').read_text().splitlines()
  assert lines.index('source scripts/allocator.sh') < next(i for i, line in enumerate(lines) if 'train.py' in line)

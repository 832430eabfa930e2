"""How long until something happens: imports, and `train.py` up to its first step, with a cold and a warm compile cache.

  python -m benchmarks.startup

Each measurement is a new process; cold is an empty cache folder, warm the same folder again.
"""

import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks import race

IMPORTS = {
  'import jax': 'import jax',
  'import posenc, models': 'import posenc, models.lm',
  'import train': 'import train',
}


def seconds(command: list[str], env: dict[str, str], until: str | None = None) -> tuple[float, float]:
  """Wall clock and CPU time until the process ends, or until a line of its output begins with `until`, when it is
  stopped."""
  start, before, said = time.perf_counter(), _children(), []
  with subprocess.Popen(
    command, cwd=race.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    for line in process.stdout or ():
      said.append(line)
      if until and line.startswith(until):
        took = time.perf_counter() - start
        process.kill()
        break
    else:
      process.wait()
      took = time.perf_counter() - start
      if process.returncode or until:
        raise SystemExit(f'{" ".join(command)}: no {until!r}\n{"".join(said)}')
  return took, _children() - before


def _children() -> float:
  """CPU time of the processes that have ended."""
  used = resource.getrusage(resource.RUSAGE_CHILDREN)
  return used.ru_utime + used.ru_stime


def main(argv: list[str] | None = None) -> None:
  args = race.flags(__doc__).parse_args(argv)
  repeats = 1 if args.tiny else args.repeats
  times: dict[str, list[tuple[float, float]]] = {
    name: [] for name in (*IMPORTS, 'first step, cold', 'first step, warm')
  }
  env = {**os.environ, **race.allocator(), 'PYTHONPATH': str(race.ROOT)}
  for _ in range(repeats):
    for name, code in IMPORTS.items():
      times[name].append(seconds([sys.executable, '-c', code], env))
    with tempfile.TemporaryDirectory() as folder:
      for name in ('cold', 'warm'):
        workdir = pathlib.Path(folder) / name
        command = [sys.executable, 'train.py', '--config=configs/smoke.py', f'--workdir={workdir}']
        command += ['--config.log.every=1']
        cached = {**env, 'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache'}
        times[f'first step, {name}'].append(seconds(command, cached, until='step 1'))
  print('\nseconds, new process')
  runs = {name: list(zip(*pairs)) for name, pairs in times.items()}  # (wall, cpu)
  race.table(
    ['', 'median', 'least', 'cpu'],
    [
      [name, f'{statistics.median(wall):.2f}', f'{min(wall):.2f}', f'{statistics.median(cpu):.2f}']
      for name, (wall, cpu) in runs.items()
    ],
  )
  record = [{'name': name, 'wall': wall, 'cpu': cpu} for name, (wall, cpu) in runs.items()]
  race.record(args.out, 'startup', args, {'runs': record})


if __name__ == '__main__':
  main()

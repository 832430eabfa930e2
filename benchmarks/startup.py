"""How long until something happens: imports, and `train.py` up to its first step, with a cold and a warm compile cache.

  python -m benchmarks.startup

Each measurement is a new process; cold is an empty cache folder, warm the same folder again.
"""

import os
import pathlib
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


def seconds(command: list[str], env: dict[str, str], until: str | None = None) -> float:
  """Wall clock until the process ends, or until a line of its output begins with `until`, when it is stopped."""
  start, said = time.perf_counter(), []
  with subprocess.Popen(
    command, cwd=race.ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
  ) as process:
    for line in process.stdout or ():
      said.append(line)
      if until and line.startswith(until):
        took = time.perf_counter() - start
        process.kill()
        return took
  if process.returncode or until:
    raise SystemExit(f'{" ".join(command)}: no {until!r}\n{"".join(said)}')
  return time.perf_counter() - start


def main(argv: list[str] | None = None) -> None:
  args = race.flags(__doc__).parse_args(argv)
  repeats = 1 if args.tiny else args.repeats
  times: dict[str, list[float]] = {name: [] for name in (*IMPORTS, 'first step, cold', 'first step, warm')}
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
  race.table(
    ['', 'median', 'least'], [[name, f'{statistics.median(t):.2f}', f'{min(t):.2f}'] for name, t in times.items()]
  )
  race.record(args.out, 'startup', args, {'runs': [{'name': name, 'wall': t} for name, t in times.items()]})


if __name__ == '__main__':
  main()

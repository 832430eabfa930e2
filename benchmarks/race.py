"""Contestants in processes of their own, timed in turns: a ratio is taken between neighbours in time, or not at all.

A machine is shared, throttles and warms up, so times of different minutes say nothing about each other. Every
contestant is built and warmed up first; then each round runs all of them, from another one each time, and a ratio is
the median over rounds of the ratio within a round. Beside the wall clock stands CPU time, which neighbours of
another user move less. Standard library only: a peer's interpreter need not have jax.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / 'benchmarks' / 'results'


def flags(doc: str | None) -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=(doc or '').splitlines()[0])
  parser.add_argument('--repeats', type=int, default=7, help='rounds, after the warm-up')
  parser.add_argument('--threads', type=int, default=0, help='cores that every contestant is pinned to; 0: all')
  parser.add_argument(
    '--peer_python', default=os.environ.get('LONGCURVE_PEER_PYTHON', sys.executable), help='has requirements-bench.txt'
  )
  parser.add_argument('--tiny', action='store_true', help='shapes for a test: the numbers mean nothing')
  parser.add_argument('--out', type=pathlib.Path, default=RESULTS, help='folder of the JSON lines')
  return parser


# ---- a contestant's side


def pin(threads: int) -> int:
  """Keeps this process on `threads` cores; before a library makes its threads. Returns how many there are."""
  if not hasattr(os, 'sched_setaffinity'):  # macOS
    return threads or os.cpu_count() or 1
  cores = sorted(os.sched_getaffinity(0))
  if threads:
    os.sched_setaffinity(0, cores[:threads])
  return len(os.sched_getaffinity(0))


def serve(about: Mapping[str, Any], once: Callable[[], Any], warm_up: int = 2) -> None:
  """Says what it is, then runs `once` as many times as each line from the parent asks for."""
  for _ in range(warm_up):
    once()
  _say({**about, 'peak_rss': resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024})
  for line in sys.stdin:
    count = int(line)
    once()  # caches and clocks were another contestant's a moment ago
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
      once()
    _say({'wall': (time.perf_counter() - wall) / count, 'cpu': (time.process_time() - cpu) / count})


def absent(reason: str) -> None:
  _say({'absent': reason})


def _say(message: Mapping[str, Any]) -> None:
  print('@' + json.dumps(message), flush=True)


# ---- the parent's side


@dataclasses.dataclass
class Contestant:
  """`about` is what it said of itself, `rounds` its seconds per run; `absent` why it does not take part."""

  name: str
  command: Sequence[str]
  env: Mapping[str, str] = dataclasses.field(default_factory=dict)
  about: dict[str, Any] = dataclasses.field(default_factory=dict)
  wall: list[float] = dataclasses.field(default_factory=list)
  cpu: list[float] = dataclasses.field(default_factory=list)
  absent: str = ''
  process: Any = None

  def start(self) -> None:
    self.process = subprocess.Popen(
      self.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
      env={**os.environ, 'PYTHONPATH': str(ROOT), **self.env},
    )  # fmt: skip
    self.about = self._hear()
    self.absent = self.about.get('absent', '')
    if self.absent:
      self.stop()

  def run(self, count: int) -> None:
    self.process.stdin.write(f'{count}\n')
    self.process.stdin.flush()
    times = self._hear()
    self.wall.append(times['wall'])
    self.cpu.append(times['cpu'])

  def stop(self) -> None:
    if self.process is not None:
      self.process.communicate()
      self.process = None

  def _hear(self) -> dict[str, Any]:
    for line in self.process.stdout:
      if line.startswith('@'):
        return json.loads(line[1:])
    _, errors = self.process.communicate()
    raise SystemExit(f'{self.name}: {" ".join(self.command)} failed\n{errors}')

  @property
  def median(self) -> float:
    return statistics.median(self.wall)


def ours(module: str, *args: str) -> list[str]:
  return [sys.executable, '-m', module, *args]


def peer(python: str, *args: str) -> list[str]:
  return [python, '-m', 'benchmarks.peer_torch', *args]


def race(contestants: Sequence[Contestant], repeats: int, count: int = 1) -> None:
  """All built and warm at once, so that a round takes no longer than its runs."""
  try:
    for contestant in contestants:
      contestant.start()
      if contestant.absent:
        print(f'{contestant.name}: {contestant.absent}; its column is empty', file=sys.stderr)
    present = [c for c in contestants if not c.absent]
    for i in range(repeats):
      shift = i % len(present)
      for contestant in present[shift:] + present[:shift]:
        contestant.run(count)
  finally:
    for contestant in contestants:
      contestant.stop()


def ratio(a: Contestant, b: Contestant, of: str = 'wall') -> float | None:
  """How many times as long `a` takes as `b`: the median over rounds of the ratio within a round."""
  pairs = list(zip(getattr(a, of), getattr(b, of)))
  return statistics.median(x / y for x, y in pairs) if pairs else None


# ---- tables and records


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
  """A Markdown table, as docs/PERFORMANCE.md has it; None is an empty cell."""

  def text(cell):
    return '' if cell is None else f'{cell:.3g}' if isinstance(cell, float) else str(cell)

  cells = [list(header), *([text(cell) for cell in row] for row in rows)]
  widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
  lines = ['| ' + ' | '.join(cell.ljust(w) for cell, w in zip(row, widths)) + ' |' for row in cells]
  lines.insert(1, '|' + '|'.join('-' * (w + 2) for w in widths) + '|')
  print('\n'.join(lines), flush=True)


def record(out: pathlib.Path, benchmark: str, args: argparse.Namespace, result: Mapping[str, Any]) -> None:
  """Appends one line to `out/<benchmark>.jsonl`: what ran, where, on what, when."""
  out.mkdir(parents=True, exist_ok=True)
  line = {
    'benchmark': benchmark,
    'when': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
    'hardware': hardware(),
    'versions': versions('jax', 'jaxlib', 'flax', 'optax', 'numpy'),
    'flags': {key: str(value) for key, value in vars(args).items() if key not in ('out', 'peer_python')},
    **result,
  }
  with open(out / f'{benchmark}.jsonl', 'a') as file:
    file.write(json.dumps(line) + '\n')


def as_record(contestants: Sequence[Contestant]) -> list[dict[str, Any]]:
  return [{'name': c.name, **c.about, 'wall': c.wall, 'cpu': c.cpu} for c in contestants]


def hardware() -> dict[str, Any]:
  model = platform.processor() or platform.machine()
  info = pathlib.Path('/proc/cpuinfo')
  if info.exists():
    names = [line.split(':', 1)[1].strip() for line in info.read_text().splitlines() if line.startswith('model name')]
    model = names[0] if names else model
  cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()
  load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
  return {
    'cpu': model,
    'cores': cores,
    'load': load,
    'system': platform.platform(),
    'python': platform.python_version(),
  }


def versions(*names: str) -> dict[str, str]:
  found = {}
  for name in names:
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = 'absent'
  return found


def allocator() -> dict[str, str]:
  """The environment that the scripts give to our programs, from the file they read it from."""
  script = 'source scripts/allocator.sh && echo "$GLIBC_TUNABLES"'
  done = subprocess.run(['bash', '-c', script], cwd=ROOT, capture_output=True, text=True, check=True)
  return {'GLIBC_TUNABLES': done.stdout.strip()}

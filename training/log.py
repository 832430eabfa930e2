"""What a run says: scalars to metrics.jsonl and TensorBoard, a bar on a terminal, plain lines elsewhere."""

import json
import math
import os
import pathlib
import sys
import time
from collections.abc import Mapping
from typing import Any

import tqdm
from tensorboardX import SummaryWriter

from training import hosts


class RunLog:
  """Writes scalars to `workdir`/metrics.jsonl, a line each time they are given, and to event files under
  `workdir`/tensorboard/train, on process 0 alone; steps count updates done. A resumed run purges what its predecessor
  wrote past the step it resumes from, so that a curve shows each step once."""

  def __init__(self, workdir: pathlib.Path, *, start: int, total: int, unit: str = 'step'):
    self._metrics = workdir / 'metrics.jsonl'
    if hosts.first() and self._metrics.exists():
      _purge(self._metrics, start)
    directory = str(workdir / 'tensorboard' / 'train')
    # Event files are named by the second: the suffix keeps a quick restart from overwriting its predecessor's.
    suffix = f'.{start}.{os.getpid()}'
    self._writer = SummaryWriter(directory, purge_step=start + 1, filename_suffix=suffix, write_to_disk=hosts.first())
    self._bar = tqdm.tqdm(total=total, initial=start, unit=unit, disable=hosts.quiet(), dynamic_ncols=True)
    self._total, self._start, self._began = total, start, time.monotonic()
    self._last = (start, self._began)

  def update(self, n: int = 1) -> None:
    self._bar.update(n)

  def restart(self, step: int) -> None:
    """The clock of `rate` starts again: what came before (compiling, validating, saving) was no training."""
    self._last = (step, time.monotonic())

  def rate(self, step: int) -> float:
    """Steps per second since this was last asked, or since `restart`; 0 where no step has been timed yet."""
    now = time.monotonic()
    (before, then), self._last = self._last, (step, now)
    return (step - before) / max(now - then, 1e-9)

  def scalars(self, step: int, values: Mapping[str, Any]) -> None:
    """Whatever `float` takes, jax's and bfloat16 too. The rest is said and left out: no reason to end a run of days."""
    numbers = {}
    for tag, value in values.items():
      try:
        numbers[tag] = float(value)
      except (TypeError, ValueError):
        self.say(f'note: step {step}: {tag} = {value!r} is no number and is not logged')
        continue
      self._writer.add_scalar(tag, numbers[tag], step)
    try:
      if hosts.first():
        finite = {tag: value if math.isfinite(value) else str(value) for tag, value in numbers.items()}  # strict JSON
        with self._metrics.open('a') as file:
          file.write(json.dumps({'step': step, **finite}) + '\n')
      # On disk now: a killed run's curve reaches as far as its log lines do.
      self._writer.flush()
    except OSError as error:
      self._abandon()
      raise OSError(error.errno, error.strerror, str(self._metrics.parent)) from None  # Python names no file

  def _abandon(self) -> None:
    """tensorboardX would try again at exit, and end in three tracebacks of its own."""
    writer = getattr(self._writer.file_writer, 'event_writer', None)
    if writer is not None:
      writer._worker.stop()
      writer._closed = True

  def line(self, step: int, shown: str) -> None:
    """`shown` behind the bar, or as a line of its own with the time that is left."""
    if not self._bar.disable:
      self._bar.set_postfix_str(shown)
      return
    pace = (time.monotonic() - self._began) / max(step - self._start, 1)
    left = time.strftime('%H:%M:%S', time.gmtime(pace * (self._total - step)))
    print(f'step {step}/{self._total}  {shown}  left {left}', flush=True)

  def say(self, message: str) -> None:
    tqdm.tqdm.write(message, file=sys.stdout)
    sys.stdout.flush()

  def close(self) -> None:
    self._bar.close()
    self._writer.close()


def _purge(path: pathlib.Path, step: int) -> None:
  """Lines of later steps go, and one that a kill has cut short."""
  kept = [line for line in path.read_text().split('\n')[:-1] if json.loads(line)['step'] <= step]
  temporary = path.with_suffix('.tmp')
  temporary.write_text(''.join(f'{line}\n' for line in kept))
  temporary.replace(path)

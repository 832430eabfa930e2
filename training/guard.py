"""What is watched while a run trains: numbers that are none, and losses that jump."""

import collections
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np

from training import hosts

WINDOW = 64  # losses of the last steps that the next one is compared with, half of them at least
SPIKE = 10.0  # robust standard deviations above their median; a Gaussian's would come once in 1e23
LEAST = 0.1  # nats: a run that has converged has a scatter of next to nothing


class Spikes:
  """Tells losses that jump from those that scatter.

  By median and median absolute deviation, which a spike that is in the window itself does not move. In memory: a
  resumed run needs half a window of steps until it looks again, and nothing of the training depends on it.
  """

  def __init__(self):
    self._losses: collections.deque[float] = collections.deque(maxlen=WINDOW)

  def look(self, step: int, loss: float) -> str | None:
    """A line about `loss`, where it is one."""
    line = None
    if 2 * len(self._losses) >= WINDOW:
      median = statistics.median(self._losses)
      scatter = 1.4826 * statistics.median(abs(x - median) for x in self._losses)  # of a Gaussian: its deviation
      if loss - median > max(SPIKE * scatter, LEAST):
        line = (
          f'step {step}: loss {loss:.4f}, {loss - median:.4f} above the median of the {len(self._losses)} before it'
        )
    self._losses.append(loss)
    return line


def dump(
  workdir: pathlib.Path, step: int, places: Sequence[tuple[str, int]], inputs_BT: np.ndarray, targets_BT: np.ndarray
) -> str:
  """Writes the windows of update `step` to `workdir`; where to, for the message that ends the run.

  document, start: of each window; inputs, targets int32[B, T]. The step itself is again whatever it was: (seed, step)
  and the last checkpoint determine it.
  """
  path = workdir / f'batch_{step}.npz'
  if hosts.first():
    names, starts = zip(*places)
    arrays = {'document': np.array(names), 'start': np.array(starts), 'inputs': inputs_BT, 'targets': targets_BT}
    try:
      np.savez_compressed(path, **arrays)
    except OSError as error:  # the run ends all the same, for its own reason
      return f'its windows could not be written: {error.strerror}'
  return f'its windows are in {path}'

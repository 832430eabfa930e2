"""Points: what a sweep measured, a line each of a curve.jsonl. Their names, their floor, what a protocol adds."""

import hashlib
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

from evaluation.sweep import Point, exp

# A point's identity: a second sweep replaces what it measures again and leaves the rest.
KEY = ('protocol', 'length', 'method', 'checkpoint_step', 'targets_hash')
FLOOR = 'theoretical floor'
DRAWN = '.drawn'  # beside a curve: the hash of the one that was drawn last


def plain(value: Any) -> Any:
  """Strict JSON has no Infinity and no NaN: they become the strings "inf", "-inf", "nan"."""
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  if isinstance(value, (list, tuple)):
    return [plain(v) for v in value]
  return value


def _number(value: Any) -> Any:
  if isinstance(value, list):
    return [_number(v) for v in value]
  return float(value) if value in ('inf', '-inf', 'nan') else value


def to_line(point: Point) -> str:
  return json.dumps({k: plain(v) for k, v in point.items()}, allow_nan=False)


def read_curve(path: pathlib.Path) -> list[Point]:
  """The points of a curve.jsonl; non-finite numbers are floats again."""
  points = [json.loads(line) for line in path.read_text().splitlines() if line]
  return [{k: _number(v) for k, v in p.items()} for p in points]


def is_drawn(directory: pathlib.Path) -> bool:
  """Whether table, picture and event files are of the curve.jsonl that is there, all of them."""
  drawn = directory / DRAWN
  return drawn.exists() and drawn.read_text() == _curve_hash(directory)


def mark_drawn(directory: pathlib.Path) -> None:
  (directory / DRAWN).write_text(_curve_hash(directory))


def _curve_hash(directory: pathlib.Path) -> str:
  return hashlib.sha256((directory / 'curve.jsonl').read_bytes()).hexdigest()


def read_metrics(workdir: pathlib.Path) -> list[dict[str, Any]]:
  """What a run said while it was trained: {'step': updates done, tag: value ...} a line. [] where it said nothing."""
  path = workdir / 'metrics.jsonl'
  whole = path.read_text().split('\n')[:-1] if path.exists() else []  # the last one may be half written
  return [{k: _number(v) for k, v in json.loads(line).items()} for line in whole]


def merge(old: Sequence[Point], new: Sequence[Point]) -> list[Point]:
  """`old` with what `new` measured again replaced; points of another checkpoint or target set stay.

  Sorted by what a point is, not by when it was measured: a sweep made again leaves the same bytes.
  """
  merged = {tuple(p[k] for k in KEY): p for p in (*old, *new)}

  def order(p):
    method = p['method']
    return p['checkpoint_step'], p['targets_hash'], p['protocol'], p['length'], method != 'none', method

  return sorted(merged.values(), key=order)


def floors(points: Sequence[Point]) -> dict[int, float]:
  """Length -> nats, where the corpus's entropy is known. It belongs to the targets: one line for all methods."""
  return {p['length']: p['floor'] for p in sorted(points, key=lambda p: p['length']) if 'floor' in p}


def trained(point: Point) -> str:
  """The scheme, and how it was trained where that is not at positions 0, 1, 2 ..."""
  rule = point.get('positions', 'sequential')  # curves of before there were rules have none
  return point['scheme'] if rule == 'sequential' else f'{point["scheme"]} {rule}'


def line_name(point: Point, several: bool) -> str:
  return f'{trained(point)} {point["method"]}' if several else point['method']


def chance(points: Sequence[Point]) -> str | None:
  """What to know of key tokens, of one protocol's points: how many there are, and would be by chance."""
  found = dict.fromkeys((p['tokens'], p['mirrored']) for p in points if 'mirrored' in p)
  if not found:
    return None
  counts = '; '.join(f'{n} key tokens, {mirrored} with the two contexts exchanged (chance)' for n, mirrored in found)
  return (
    f"{counts}. They were chosen by two of these lengths: a fall between those, and the judge's own gain, are of it"
  )


def fake_gain(points: Sequence[Point]) -> float | None:
  """By what share perplexity falls from 1x to the longest length for a model that uses at most 1x tokens.

  Of one protocol's points; None for the default, which leaves less than one per cent of it, and where it is next to
  nothing or points do not tell.
  """
  null = {p['length']: p['null'] for p in points if 'null' in p}
  one = points[0]['train_length']
  if points[0]['protocol'] == 'fixed_targets' or one not in null:
    return None
  gain = 1 - exp(null[max(null)] - null[one])
  return gain if gain > 0.005 else None

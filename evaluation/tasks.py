"""Asks a trained model what needs context: a key in a text by depth and length, or longer episodes of a task.

  python -m evaluation.tasks --workdir=runs/recall/rope --task=passkey --multiples=1,2,4,8 --method=none --method=yarn
  python -m evaluation.tasks --workdir=runs/copy --task=copy --multiples=1,1.5,2,3,4

Tasks: evaluation/answers.py, and those of data/tasks.py. Writes workdir/extrapolation/tasks.jsonl, a line per task,
method, length and depth, tasks-<task>.png and event files. What is asked again is replaced, the rest stays.
"""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

import posenc
from configs.schema import Config
from evaluation import heat
from evaluation.answers import Grader, Point, Task, ask, build
from evaluation.points import plain
from models.memory import OutOfMemory
from opened import Opened
from spec import SpecError
from training import cli, provenance
from training.devices import start_jax

KEY = ('task', 'method', 'length', 'checkpoint_step')  # all depths of a line and length are asked together


def points_of(
  task: Task, methods: Sequence[str], lengths: Sequence[int], opened: Opened, grader: Grader, *, depths, trials
) -> list[Point]:
  """Of one task; methods or lengths without meaning are points too, with the reason."""
  slots, rule, train_len = opened.slots, opened.rule, opened.config.train_len
  bos_id = task.tokenizer.bos
  out = []
  for length in lengths:
    ways: dict[str, Any] = {}
    for method in methods:
      try:
        ways[method] = posenc.positions(method, slots, train_len, length, rule=rule)
      except posenc.Unsupported as reason:
        out.append(_nothing(task, method, length, 'unsupported', reason))
    if not ways:
      continue
    try:
      found = ask(task, length, depths, trials, bos_id, ways, grader)
    except (posenc.Unsupported, OutOfMemory) as reason:
      outcome = 'out of memory' if isinstance(reason, OutOfMemory) else 'unsupported'
      out += [_nothing(task, method, length, outcome, reason) for method in ways]
      continue
    out += [{**point, 'outcome': 'ok', 'reason': None} for point in found]
  return out


def _nothing(task: Task, method: str, length: int, outcome: str, reason: Exception) -> Point:
  return {'task': task.text, 'method': method, 'length': length, 'outcome': outcome, 'reason': str(reason)}


def write(directory: pathlib.Path, new: Sequence[Point]) -> list[Point]:
  """Merges `new` into tasks.jsonl: whole or not at all. Returns all points."""
  path = directory / 'tasks.jsonl'
  old = heat.read(path) if path.exists() else []

  def cells(p):
    return tuple(p[k] for k in KEY)

  def order(p):
    return p['checkpoint_step'], p['task'], p['method'] != 'none', p['method'], p['length'], p.get('depth', 0)

  again = {cells(p) for p in new}
  points = sorted([*(p for p in old if cells(p) not in again), *new], key=order)
  temporary = path.with_suffix('.tmp')
  temporary.write_text(''.join(f'{json.dumps({k: plain(v) for k, v in p.items()})}\n' for p in points))
  temporary.replace(path)
  return points


def run(args: argparse.Namespace) -> int:
  workdir = args.workdir.absolute()
  config = Config.from_dict(provenance.read(workdir))
  methods = list(dict.fromkeys(args.method or ('none',)))
  for method in methods:
    posenc.check_method(method)
  lengths = [_tokens(config, multiple) for multiple in args.multiples]
  opened = Opened(workdir, config, args.checkpoint)
  asked = [build(text, opened.tokenizer) for text in args.task or ('passkey', 'needle')]
  if jax.process_count() > 1:
    raise SpecError('evaluation.tasks runs as one process: JAX_NUM_PROCESSES=1 is allowed')
  for length in lengths:
    if length % opened.mesh.shape['context']:
      raise SpecError(f'config.mesh = {config.mesh}: a context that divides the {length} tokens of a length is allowed')
  grader = Grader(opened.graphdef, opened.params, opened.mesh, config.eval.batch_tokens, config.memory_gb)
  follows = {m: posenc.follows_length(m, opened.slots, config.train_len, rule=opened.rule) for m in methods}
  facts = {
    'scheme': ' '.join(config.posenc),
    'positions': config.positions,
    'seed': config.seed,
    'checkpoint_step': opened.step,
    'train_length': config.train_len,
  }
  directory = opened.results
  directory.mkdir(parents=True, exist_ok=True)
  for task in asked:
    found = points_of(task, methods, lengths, opened, grader, depths=args.depths, trials=args.trials)
    new = [{**p, 'follows_length': follows[p['method']], **facts} for p in found]
    points = [p for p in write(directory, new) if p['checkpoint_step'] == opened.step]
    mine = [p for p in points if p['task'] == task.text]
    print(f'\n{heat.table(mine)}')
    picture = directory / f'tasks-{heat.file_name(task.text)}.png'
    heat.draw(mine).savefig(picture, dpi=150)
    heat.events_of(directory / 'tensorboard_tasks' / heat.file_name(task.text), mine, picture)
    print(picture)
  return 0


def _tokens(config: Config, multiple: float) -> int:
  length = config.tokens(multiple)
  if length < 1 or abs(multiple * config.train_len - length) > 1e-6:
    raise SpecError(f'--multiples: {multiple:g} x train_len = {config.train_len}: a whole number of tokens is allowed')
  return length


def _numbers(text: str) -> list[float]:
  return [float(part) for part in text.split(',')]


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(prog='evaluation.tasks', description=__doc__.split('\n')[0])
  parser.add_argument('--workdir', type=pathlib.Path, required=True, help='folder of a run of train.py')
  parser.add_argument('--task', action='append', help="such as 'passkey(digits=7)' or copy; repeat for more")
  parser.add_argument('--method', action='append', help="a scaling method, such as 'yarn(factor=8)'; repeat for more")
  parser.add_argument('--multiples', type=_numbers, default=[1, 2, 4, 8], help='lengths in units of train_len')
  parser.add_argument('--depths', type=_numbers, default=[0, 0.25, 0.5, 0.75, 1], help='0 the beginning, 1 the end')
  parser.add_argument('--trials', type=int, default=20, help='of each cell, at least 1')
  parser.add_argument('--checkpoint', default='latest', help='a step, or latest')
  args = parser.parse_args(argv)
  if args.trials < 1 or not args.depths or not all(0 <= d <= 1 for d in args.depths):
    parser.error(f'--trials={args.trials} --depths={args.depths}: at least 1, and numbers from 0 to 1, are allowed')
  return run(args)


if __name__ == '__main__':
  start_jax()
  cli.guard(main)

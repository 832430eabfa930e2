"""Trains and sweeps a recipe over schemes, seeds and values of its fields, as plain processes.

  python -m scripts.grid --config=configs/smoke.py --workdir=runs/grid --posenc='rope;alibi;nope' --seeds=0,1,2 \\
    --set optimizer.learning_rate=1e-3,3e-3

--config.field=value is for all runs; --set field=value,value makes cells of it. A cell is a folder of --workdir, named
by what it is, with one run of train.py, its sweep, and what both said in cell.log. Run the same command again to go on:
what is finished is skipped, and a cell that another process has in hand is waited for. A cell that fails does not stop
the others. SIGTERM and SIGINT let the runs save. --status shows where all of it stands; --print, one command a line, is
for an array of SLURM jobs or for xargs.
"""

import argparse
import dataclasses
import itertools
import pathlib
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import tqdm

from configs.schema import Config
from evaluation.points import is_drawn, read_curve, read_metrics
from spec import SpecError, one_of
from training import checkpoints, cli, lock, provenance

ROOT = pathlib.Path(__file__).parent.parent
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclasses.dataclass(frozen=True)
class Cell:
  """A run that is to be. options: of train.py, besides --workdir."""

  name: str
  workdir: pathlib.Path
  config: Config
  options: tuple[str, ...]

  def command(self, program: str) -> list[str]:
    script = f'{program}.py' if pathlib.Path.cwd() == ROOT else str(ROOT / f'{program}.py')
    options = self.options if program == 'train' else ()
    return [sys.executable, script, *options, f'--workdir={self.workdir}']

  @property
  def log(self) -> pathlib.Path:
    return self.workdir / 'cell.log'

  @property
  def step(self) -> int:
    """Of its newest checkpoint."""
    return max(checkpoints.saved(self.workdir), default=0)

  @property
  def next(self) -> str | None:
    """The program that it needs; None where it is finished."""
    if self.step < self.config.steps or not checkpoints.saved(self.workdir):
      return 'train'
    return None if self._swept() else 'eval_extrapolation'

  def _swept(self) -> bool:
    """Whether its curve has every point of the last checkpoint, and all that follows from a curve has been drawn."""
    curve = self.workdir / 'extrapolation' / 'curve.jsonl'
    if not (curve.exists() and is_drawn(curve.parent)):
      return False
    there = {(p['protocol'], p['length'], p['method']) for p in read_curve(curve) if p['checkpoint_step'] == self.step}
    lengths = [self.config.tokens(m) for m in self.config.eval.multiples]
    return there >= set(itertools.product(self.config.eval.protocols, lengths, ('none', *self.config.methods)))

  @property
  def holder(self) -> str | None:
    """Who trains or sweeps it now."""
    return lock.holder(self.workdir) or lock.holder(self.workdir / 'extrapolation')

  @property
  def said(self) -> tuple[int, float] | None:
    """(step, loss) that its training has told last."""
    told = [line for line in read_metrics(self.workdir) if 'train/loss' in line]
    return (told[-1]['step'], told[-1]['train/loss']) if told else None

  @property
  def state(self) -> str:
    program, holder = self.next, self.holder
    if holder:
      return f'{"training" if program == "train" else "being swept"} ({holder})'
    if program is None:
      return 'done'
    last = ['', *(self.log.read_text(errors='replace').splitlines() if self.log.exists() else [])][-1]
    ended = re.fullmatch(r'== \w+ ended with exit code (\d+)', last)
    if ended and int(ended[1]) not in (0, *(128 + number for number in STOPS)):
      return f'failed: {self.why()}'
    if program == 'train':
      return 'stopped' if self.step else 'not begun'
    return 'trained'

  def why(self) -> str:
    """The last thing that its program said."""
    lines = [line.strip() for line in self.log.read_text(errors='replace').splitlines()]
    said = [line for line in lines if line and not line.startswith('== ')]
    errors = [line.removeprefix('error: ') for line in said if line.startswith('error: ')]
    return (errors or said or ['it said nothing'])[-1]


def cells(args: argparse.Namespace) -> list[Cell]:
  """All of them, checked; SpecError where one could not be run."""
  axes, known = {}, _fields(Config().to_dict())
  for text in args.set:
    field, _, values = text.partition('=')
    if not field or not split(values) or field in axes:
      raise SpecError(f'--set {text}: field=value,value is allowed, each field once')
    if field not in known:
      raise SpecError(one_of('--set', field, known))
    if field in ('posenc', 'seed'):
      raise SpecError(f'--set {text}: --{"seeds" if field == "seed" else field} sets it')
    axes[field] = split(values)
  schemes = [part.strip() for part in args.posenc.split(';') if part.strip()]
  out: dict[str, Cell] = {}
  for scheme, *values, seed in itertools.product(schemes, *axes.values(), split(args.seeds)):
    fields = {'posenc': scheme, **dict(zip(axes, values)), 'seed': seed}
    options = [f'--config={args.config}', *args.rest, *(f'--config.{field}={value}' for field, value in fields.items())]
    config = Config.from_dict(cli.read_config(options).to_dict())
    name = _name(config, list(fields))
    if name in out:
      raise SpecError(f'{name}: each scheme, seed and value once is allowed')
    out[name] = Cell(name, args.workdir / name, config, tuple(options))
    if (args.workdir / name / 'config.json').exists():
      provenance.check_config(args.workdir / name, config)
  if not out:
    raise SpecError(f'--posenc={args.posenc!r} --seeds={args.seeds!r}: at least one of each is allowed')
  return list(out.values())


def split(text: str) -> list[str]:
  """At commas outside brackets and quotes: '1,2' are two values, '(1,2),(3,4)' are too."""
  parts = re.findall(r"""(?:[^,()\[\]'"]|'[^']*'|"[^"]*"|\([^()]*\)|\[[^\[\]]*\])+""", text)
  return [part.strip() for part in parts if part.strip()]


def _fields(tree: dict[str, Any]) -> list[str]:
  """Of a config, such as 'optimizer.learning_rate'."""
  below = {k: _fields(v) if isinstance(v, dict) else None for k, v in tree.items()}
  return [name for k, v in below.items() for name in ([k] if v is None else [f'{k}.{name}' for name in v])]


def _name(config: Config, fields: Sequence[str]) -> str:
  """By the values as they were understood: 1e-3 and 0.001 are one cell, whatever else is in the grid."""
  parts = []
  for field in fields:
    value: Any = config
    for part in field.split('.'):
      value = getattr(value, part)
    text = '+'.join(map(str, value)) if isinstance(value, tuple) else str(value)
    parts.append(text if field == 'posenc' else f'{field}={text}')
  return ','.join(re.sub(r'[^\w.=+-]+', '_', part).strip('_') for part in parts)


class Child(NamedTuple):
  cell: Cell
  program: str
  process: subprocess.Popen
  began: float


class Grid:
  """Runs cells, `jobs` at a time. failed: why, by name. stopped: the signal that ended it early."""

  def __init__(self, todo: Sequence[Cell], jobs: int):
    self._cells, self._jobs = todo, jobs
    self._children: list[Child] = []
    self._left = [cell for cell in todo if cell.next]
    self.failed: dict[str, str] = {}
    self.stopped = 0

  def run(self) -> None:
    before = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
      if before[number] is not signal.SIG_IGN:  # nohup
        signal.signal(number, self._stop)
    try:
      done = len(self._cells) - len(self._left)
      with tqdm.tqdm(total=len(self._cells), initial=done, unit='cell', dynamic_ncols=True, disable=None) as bar:
        while self._children or (self._left and not self.stopped):
          for child in [c for c in self._children if c.process.poll() is not None]:
            self._ended(child)
          self._begin()
          bar.update(self._done - bar.n)
          if not bar.disable:
            bar.set_postfix_str(self._shown())
          time.sleep(0.5)
    finally:
      for child in self._children:
        child.process.terminate()
      for number, handler in before.items():
        signal.signal(number, handler)

  @property
  def _done(self) -> int:
    return len(self._cells) - len(self._left) - len(self._children) - len(self.failed)

  def _begin(self) -> None:
    for cell in list(self._left):
      if self.stopped or len(self._children) == self._jobs:
        return
      if cell.holder:
        continue  # the orphan of a grid that was killed, or a job of another machine
      self._left.remove(cell)
      program = cell.next
      if program is None:  # by then
        continue
      cell.workdir.mkdir(parents=True, exist_ok=True)
      command = cell.command(program)
      with cell.log.open('a') as file:
        file.write(f'== {shlex.join(command)}\n')
        file.flush()
        # A session of its own: ctrl-C would reach it as well, and a second signal ends a run before it has saved.
        process = subprocess.Popen(
          command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
      self._children.append(Child(cell, program, process, time.monotonic()))

  def _ended(self, child: Child) -> None:
    self._children.remove(child)
    cell, code = child.cell, child.process.returncode
    code = 128 - code if code < 0 else code
    with cell.log.open('a') as file:
      file.write(f'== {child.program} ended with exit code {code}\n')
    needs = cell.next
    if self.stopped and code:
      self._left.insert(0, cell)
    elif code or needs == child.program:  # which would be run for ever
      self.failed[cell.name] = f'{child.program}: {cell.why()}, exit code {code}'
    elif needs:
      self._left.insert(0, cell)
    what = f'FAILED: {self.failed[cell.name]}' if cell.name in self.failed else child.program
    seconds = time.monotonic() - child.began
    count = f'{self._done}/{len(self._cells)} done' + (f', {len(self.failed)} failed' if self.failed else '')
    tqdm.tqdm.write(f'{count}  {cell.name}: {what}, {seconds:.0f} s', file=sys.stdout)
    sys.stdout.flush()

  def _stop(self, number: int, _: Any) -> None:
    self.stopped = number
    for child in self._children:
      child.process.send_signal(signal.SIGTERM if number == signal.SIGHUP else number)

  def _shown(self) -> str:
    parts = [f'{len(self.failed)} failed'] if self.failed else []
    for cell, program, *_ in self._children:
      told = cell.said if program == 'train' else None
      parts.append(f'{cell.name} {f"step {told[0]} loss {told[1]:.3f}" if told else program}')
    if not self._children and self._left:
      parts.append(f'{self._left[0].name}: waiting for {self._left[0].holder}')
    return '; '.join(parts)


def status(todo: Sequence[Cell]) -> str:
  rows = [('cell', 'step', 'loss', 'state')]
  for cell in todo:
    step, loss = cell.said or (cell.step, None)
    rows.append((cell.name, f'{step}/{cell.config.steps}', '' if loss is None else f'{loss:.4f}', cell.state))
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  lines = ['  '.join([*(text.ljust(width) for text, width in zip(row, widths)), row[3]]) for row in rows]
  return '\n'.join([*lines, f'{sum(row[3] == "done" for row in rows)} of {len(todo)} cells are done'])


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(
    description=__doc__.split('\n')[0],
    epilog='--config.field=value is for all cells.',
  )
  parser.add_argument('--config', required=True, help='the recipe, such as configs/smoke.py')
  parser.add_argument('--workdir', required=True, type=pathlib.Path, help='folder of the cells')
  parser.add_argument('--posenc', required=True, help="schemes, such as 'rope;alibi'")
  parser.add_argument('--seeds', default='0', help='such as 0,1,2')
  parser.add_argument('--set', action='append', default=[], help='field=value,value of the config; repeat for more')
  parser.add_argument('--jobs', type=int, default=1, help='cells at a time')
  parser.add_argument('--status', action='store_true', help='show where each cell stands, and run nothing')
  parser.add_argument('--print', action='store_true', help='print a command for each cell that is not finished')
  args, args.rest = parser.parse_known_args(argv)
  for text in args.rest:
    if not re.match(r'--config\.[\w.]+=', text):
      parser.error(f'{text!r}: options are written --name=value, fields of all cells --config.field=value')
  if args.jobs < 1:
    raise SpecError(f'--jobs={args.jobs}: a whole number of at least 1 is allowed')
  jax.config.update('jax_platforms', 'cpu')  # configs build their schemes; the accelerator is the runs'
  todo = cells(args)
  if args.status:
    print(status(todo))
    return 0
  if args.print:
    for cell in todo:
      if cell.next:
        print(' && '.join(shlex.join(cell.command(program)) for program in ('train', 'eval_extrapolation')))
    return 0
  lock.take(args.workdir, 'grid')
  grid = Grid(todo, args.jobs)
  grid.run()
  if grid.stopped:
    print(f'{signal.Signals(grid.stopped).name}: stopped; run the same command to go on')
    return 128 + grid.stopped
  print(f'\n{len(todo) - len(grid.failed)} of {len(todo)} cells are done')
  for name, why in grid.failed.items():
    print(f'{name}: {why}; all of it in {args.workdir / name / "cell.log"}')
  choose = ''.join(f' --choose={text.partition("=")[0]}' for text in args.set)
  folders = shlex.quote(str(args.workdir)) + '/*seed=*'
  print(f'report: python -m evaluation.report {folders} --out={shlex.quote(str(args.workdir))}-report{choose}')
  return 1 if grid.failed else 0


if __name__ == '__main__':
  cli.guard(main)

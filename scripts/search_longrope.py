"""Searches LongRoPE's factors for a trained model, and says what they are worth on documents the search never saw.

  python -m scripts.search_longrope --workdir=runs/rope --target_len=1024 --evaluations=300
  python eval_extrapolation.py --workdir=runs/rope --method="$(cat runs/rope/search/1024-paper-0/method.txt)"

First YaRN's betas are searched, as long as the factors, on the same documents: YaRN with these is a member of the first
population, and what the factors have to beat. Run the same command again to go on: nothing is scored twice. More
--evaluations lengthen a search that has ended. Writes workdir/search/NAME/: method.txt, longrope.json (what a
config.json of Hugging Face says), report.md, factors.png, what each candidate was told, event files.
"""

import argparse
import functools
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import tqdm
from tensorboardX import SummaryWriter

import posenc
from configs.schema import Config
from evaluation import factors, figures, search
from evaluation.factors import ALGORITHMS, ONSETS, Candidate, Optimizer, Sizes
from evaluation.plan import facts
from evaluation.points import plain
from evaluation.score import Scorer, Together
from evaluation.search import Line, Races, Told
from evaluation.store import Store
from evaluation.survey import positions_hash
from opened import Opened
from spec import SpecError, one_of, parse_one
from training import cli, hosts, lock, provenance
from training.devices import start_jax

WINNER = 'longrope, this search'
ATTENTIONS = (1.0, 1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4)
KEPT = (
  'out',
  'evaluations',
  'seconds',
  'test_docs',
  'test_spans',
  'attentions',
  'workdir',
)  # may change from call to call


class Log:
  """PART.jsonl of a folder: what was told, in its order, with the seconds and CPU seconds that the part took so far.

  A search that goes on asks and is told the same; its lines are there, and their times with them. Where it does not,
  because another YaRN is in its first population, the file goes on from there.
  """

  def __init__(self, path: pathlib.Path):
    text = path.read_text() if path.exists() else ''
    self._lines = text[: text.rfind('\n') + 1].splitlines()  # a kill may have cut the last one short
    self._path, self._at = path, 0
    self.seconds, self.cpu = 0.0, 0.0
    self._clock = time.monotonic(), cpu_seconds()

  def tell(self, told: Sequence[Told]) -> None:
    now = time.monotonic(), cpu_seconds()
    took, self._clock = [a - b for a, b in zip(now, self._clock)], now
    mine = [{'method': one.method, **one.score._asdict(), 'nll': plain(one.score.nll)} for one in told]
    there = [json.loads(line) for line in self._lines[self._at : self._at + len(mine)]]
    self._at += len(mine)
    if [{key: line[key] for key in mine[0]} for line in there] == mine:
      self.seconds, self.cpu = there[-1]['seconds'], there[-1]['cpu']
      return
    self.seconds, self.cpu = self.seconds + took[0], self.cpu + took[1]
    times = {'seconds': round(self.seconds, 3), 'cpu': round(self.cpu, 3)}
    self._lines[self._at - len(mine) :] = [json.dumps({**line, **times}) for line in mine]
    temporary = self._path.with_suffix('.tmp')
    temporary.write_text(''.join(f'{line}\n' for line in self._lines))
    temporary.replace(self._path)


def cpu_seconds() -> float:
  return sum(os.times()[:2])


def main(argv: list[str] | None = None) -> int:
  args = _arguments(argv)
  workdir = args.workdir.absolute()
  config = Config.from_dict(provenance.read(workdir))
  L, length = config.train_len, args.target_len
  if jax.process_count() > 1:
    raise SpecError('scripts.search_longrope: one process is allowed')
  _check(args, config)
  opened = Opened(workdir, config)

  # ---- data
  data, slots, rule = opened.data, opened.slots, opened.rule
  if length % data.stride:
    raise SpecError(f"target_len = {length}: a multiple of the corpus's stride, {data.stride}, is allowed")
  splits, about = data.splits, facts(data, config.data.bos)
  plan = search.search_plan(splits.validation, splits.train, length, L, docs=args.docs, spans=args.spans, **about)
  tests = splits.test[: args.test_docs or len(splits.test)]
  test_plan = opened.plan(tests)
  scheme = search.scheme_of(slots)
  name = f'{length}-{args.algorithm}-{args.seed}' + '-short' * args.short + '-key_tokens' * (args.fitness != 'all')
  out = pathlib.Path(args.out or workdir / 'search' / name)
  lock.take(out, 'search')
  kept, tried = (
    Store(path, lambda line: print(f'note: {line}'))
    for path in (opened.results / 'store', workdir / 'search' / 'store')
  )

  def made(method: str, n: int):
    pos = posenc.positions(method, slots, L, n, rule=rule)
    return positions_hash(pos), pos

  _claim(out / 'settings.json', {**vars(args), 'checkpoint': opened.checkpoint, 'tokens': data.tokens_sha256})

  # ---- what a candidate is worth
  quiet = functools.partial(tqdm.tqdm, disable=hosts.quiet(), dynamic_ncols=True)
  if args.fitness == 'all':
    counted = search.all_targets(plan, length)
  else:
    with quiet(unit='token', unit_scale=True, desc='judge') as bar:
      try:
        counted = search.key_targets(
          plan, length, args.fitness, made, opened.rows_in(tried), lambda: opened.scorer, bar
        )
      except posenc.Unsupported as reason:
        raise SpecError(f'fitness = {args.fitness!r}: {reason}') from None
  stages = search.race_stages(len(counted.windows))

  @functools.cache
  def many():
    rows = min(stages[0], max(config.eval.batch_tokens // length, 1))
    mesh = opened.mesh
    if mesh.shape['fsdp'] * mesh.shape['context'] > 1:
      return Scorer(opened.graphdef, opened.params, mesh, rows * length, config.memory_gb)
    tokens = 0 if jax.default_backend() == 'cpu' else config.eval.batch_tokens
    return Together(opened.graphdef, opened.params, mesh, rows, plan.targets, tokens, config.memory_gb)

  races = Races(plan, counted, made, opened.rows_in(tried), many, stages)
  known = {d.name for d in splits.validation}
  where = f'{len(plan.documents)} documents, {sum(d.name in known for d in plan.documents)} of validation'
  print(f'search: {where}; {len(counted.windows)} windows of {length}, {counted.counts_WT.sum()} targets; {out}')

  # ---- the search
  shutil.rmtree(out / 'tensorboard', ignore_errors=True)  # told again below
  attention = _attention(args, scheme, L)
  budget = args.evaluations or (math.inf if args.seconds else Sizes().evaluations)
  pairs, s = len(scheme.inv_freq_P), length / L
  spent: list[str] = []

  def run(part: str, optimizer: Optimizer, name: Callable[[Candidate], str]) -> Told:
    winner, told = None, []
    log, before = Log(out / f'{part}.jsonl'), races.scored

    def late() -> bool:
      return args.seconds is not None and log.seconds >= args.seconds / (1 if args.short else 2)

    with (
      SummaryWriter(str(out / 'tensorboard'), filename_suffix=f'.{part}') as writer,
      quiet(total=None if budget == math.inf else budget, unit='candidate', desc=part) as bar,
    ):
      for batch in search.spend(optimizer, races, name, budget, late):
        log.tell(batch)
        winner, told = search.best(batch, winner), told + batch
        bar.update(len(batch))
        _curves(writer, part, winner, told, len(batch))
        shown = f'best {winner.score.nll:.4f}' if winner else ''
        bar.set_postfix_str(shown)
        if bar.disable and len(told) // 100 > (len(told) - len(batch)) // 100:  # no terminal: a line now and then
          print(f'{part}: {len(told)} candidates, {shown}, {log.seconds:.0f} s', flush=True)
    assert winner is not None  # the first batch has one that ran to the end
    spent.append(_spent(part, winner, told, log, races.scored - before))
    print(spent[-1])
    return winner

  init = [search.factors_of(text, scheme, L, max(length, L + 1)) for text in args.init]
  short = parse_one(args.init[0]).kwargs.get('short') if args.init else None
  if args.short:
    extended = parse_one(args.init[0]).kwargs
    long, onset = tuple(extended['long']), extended.get('onset', 0)

    def name_of(candidate: Candidate) -> str:
      return search.method_of(candidate, attention, long=long)

    starts = [(1.0,) * pairs, short, tuple(x**0.5 for x in long), long]
    members = [Candidate(tuple(x), onset) for x in starts if x]
    yarn, onsets, s = members[-1], (onset,), max(long)
    lines = {'trained frequencies': members[0], 'long list': yarn}
    if short:
      lines['short list before'] = members[1]
    labels = {label: name_of(c) for label, c in lines.items()}
  else:

    def name_of(candidate: Candidate) -> str:
      return search.method_of(candidate, attention, short=short)

    betas = search.Betas(scheme, L, length, args.seed)
    tuned = run('yarn', betas, name_of)
    plain = {text: search.factors_of(text, scheme, L, length) for text in ('pi', 'ntk', 'dynamic_ntk', 'yarn')}
    yarn, onsets = tuned.candidate, args.onsets
    first = [c._replace(onset=0 if 0 in onsets else onsets[0]) for c in (plain['pi'], plain['ntk'], yarn)]
    members = [*init, *first]
    lines = {**plain, f'{betas.names[yarn]}, tuned': yarn}
    labels = {'none': 'none', **{label: name_of(c) for label, c in lines.items()}}
  winner = run('search', factors.optimizer(args.algorithm, pairs, s, members, yarn, onsets, args.seed), name_of)

  # ---- n-hat of the winner, and the temperature of all
  def among(candidates: Sequence[Candidate], methods: Sequence[str], share: float = 1.0) -> list[Told]:
    return [Told(*one) for one in zip(candidates, methods, races(methods, share=share))]

  same = [winner.candidate._replace(onset=onset) for onset in onsets]
  by_onset = among(same, [name_of(c) for c in same])
  winner = search.best(by_onset, winner) or winner
  lines, found = {WINNER: winner.candidate, **lines}, winner.candidate.onset
  drawn = {label: c.factors for label, c in lines.items() if label != 'dynamic_ntk'}  # `ntk`, at one length
  if found and not args.short:  # what of the gain is n-hat's: YaRN can have one too
    apart = {'the same, n-hat 0': winner.candidate._replace(onset=0)}
    apart[f'tuned YaRN, n-hat {found}'] = yarn._replace(onset=found)
    lines, labels = {**lines, **apart}, {**labels, **{label: name_of(c) for label, c in apart.items()}}
  labels = {WINNER: winner.method, **labels}
  chosen: dict[str, tuple[float, str]] = {}
  if args.attentions and not args.short:
    values = list(dict.fromkeys((attention, *args.attentions)))
    for label, candidate in lines.items():
      named = [search.method_of(candidate, a, short=short) for a in values]
      told = among([candidate] * len(named), named, share=0.5)
      one = search.best(told) or told[0]
      chosen[label] = values[named.index(one.method)], one.method
    chosen['none'] = 1.0, 'none'

  # ---- held out, once
  methods = list(dict.fromkeys([*labels.values(), *(method for _, method in chosen.values())]))
  races(methods)
  with quiet(unit='token', unit_scale=True, desc='held out') as bar:
    scored = opened.rows_in(kept), lambda: opened.scorer
    tested = search.held_out(test_plan, length, args.test_spans, methods, made, *scored, bar)
  tables = {
    'fixed': [
      Line(label, method, 1.0 if method == 'none' else attention, races.documents(method), tested[method])
      for label, method in labels.items()
    ]
  }
  if chosen:
    tables['searched'] = [
      Line(label, chosen[label][1], chosen[label][0], races.documents(chosen[label][1]), tested[chosen[label][1]])
      for label in labels
    ]

  # ---- what it found
  (out / 'method.txt').write_text(f'{winner.method}\n')
  exported = _export(out / 'longrope.json', winner, by_onset, scheme, L, args)
  figure = figures.factors(drawn, f'{" ".join(config.posenc)}, {length} tokens; n-hat = {found}')
  figure.savefig(out / 'factors.png', dpi=150)
  text = _report(args, config, winner, by_onset, tables, spent, exported, where, len(tests))
  (out / 'report.md').write_text(text)
  print(f'\n{text}\n{out / "report.md"}\n{out / "factors.png"}\n{out / "method.txt"}')
  return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  add = parser.add_argument
  add('--workdir', required=True, type=pathlib.Path, help='folder of a run of train.py')
  add('--target_len', required=True, type=int, help='tokens for which factors are searched')
  add(
    '--evaluations', type=int, help="candidates, of YaRN's betas and of the factors alike; the paper's 1344 by default"
  )
  add('--seconds', type=float, help="instead, or besides: half of it for YaRN's betas, half for the factors")
  add('--algorithm', default='paper', help=', '.join(ALGORITHMS))
  add('--seed', type=int, default=0)
  add(
    '--docs', type=int, default=0, help='search documents, validation ones first, then of training; 0: all validation'
  )
  add('--spans', type=int, default=2, help='windows in each of them')
  add('--fitness', default='all', help='all targets, or such as \'key_tokens(judge="yarn", long=2)\'')
  add('--attention', default='su', help='the temperature of all candidates: su, yarn or a number')
  add('--attentions', type=_numbers, default=ATTENTIONS, help='those tried on every method afterwards; empty: none')
  add('--onsets', type=_numbers, default=ONSETS, help='n-hats; 0 alone for factors that Hugging Face can hold')
  add('--init', action='append', default=[], help='a method of the first population, such as the search before')
  add('--short', action='store_true', help='the short list of the --init, at target_len within the trained length')
  add('--test_docs', type=int, default=0, help='held-out documents that are scored; 0: all')
  add('--test_spans', type=int, default=0, help='spans in each of them; 0: all')
  add('--out', type=pathlib.Path, help='folder, workdir/search/NAME by default')
  return parser.parse_args(argv)


def _numbers(text: str) -> tuple[float, ...]:
  """'0,1.05': whole ones as ints. What is wrong with one is argparse's to say."""
  return tuple(int(part) if part.strip().isdigit() else float(part) for part in text.split(',') if part.strip())


def _check(args: argparse.Namespace, config: Config) -> None:
  L, length = config.train_len, args.target_len
  if args.algorithm not in ALGORITHMS:
    raise SpecError(one_of('algorithm', args.algorithm, ALGORITHMS))
  longest = config.max_multiple * L
  low, high = (1 + config.eval.targets(L), L) if args.short else (L + 1, longest)
  if not low <= length <= high:
    raise SpecError(f'target_len = {length}: {low} to {high} tokens are allowed{" with --short" * args.short}')
  counts = {'evaluations': 1, 'docs': 0, 'spans': 1, 'test_docs': 0, 'test_spans': 0, 'seed': 0}
  for field, least in counts.items():
    if (value := getattr(args, field)) is not None and value < least:
      raise SpecError(f'{field} = {value}: a whole number of at least {least} is allowed')
  if args.seconds is not None and not args.seconds > 0:
    raise SpecError(f'seconds = {args.seconds:g}: a number above 0 is allowed')
  if not args.onsets or any(not isinstance(n, int) for n in args.onsets):
    raise SpecError(f'onsets = {args.onsets}: whole numbers, at least one, are allowed')
  args.onsets = tuple(n for n in dict.fromkeys(args.onsets) if n < length)
  for method in args.init:
    posenc.check_method(method)
  if args.short:
    kwargs = parse_one(args.init[0]).kwargs if len(args.init) == 1 else {}
    if not isinstance(kwargs.get('attention'), (int, float)) or 'long' not in kwargs:
      raise SpecError(
        "short: one --init='longrope(long=..., attention=...)' with a number for its temperature is allowed"
      )
    args.onsets = (kwargs.get('onset', 0),)


def _attention(args: argparse.Namespace, scheme: posenc.PositionScheme, train_len: int) -> float:
  """a, of queries and keys each."""
  if args.short:
    return float(parse_one(args.init[0]).kwargs['attention'])  # one number serves both lists
  try:
    value: Any = float(args.attention)
  except ValueError:
    value = args.attention
  ones, length = (1.0,) * len(scheme.inv_freq_P), args.target_len
  writes = posenc.METHODS['longrope'](scheme.plain(length), scheme, train_len, length, long=ones, attention=value)
  return round(float(writes['key_scale_T'][-1]), 6) if writes else 1.0


def _claim(path: pathlib.Path, settings: dict[str, Any]) -> None:
  """Writes what a folder's search is of, or refuses another one. A budget may grow, and what is held out change."""
  mine = json.loads(json.dumps({k: v for k, v in settings.items() if k not in KEPT}, default=str))
  if not path.exists():
    path.write_text(json.dumps(mine, indent=2) + '\n')
    return
  theirs = json.loads(path.read_text())
  changed = [f'{k}: {theirs.get(k)!r} -> {mine.get(k)!r}' for k in {**theirs, **mine} if theirs.get(k) != mine.get(k)]
  if changed:
    raise SpecError(f'{path.parent} holds another search ({"; ".join(changed)}); --out names another folder')


def _curves(writer: SummaryWriter, part: str, winner: Told | None, told: Sequence[Told], new: int) -> None:
  """Step: candidates so far. The median is of the batch, and what was dropped counts with its estimate."""
  finite = sorted(one.score.nll for one in told[-new:])
  writer.add_scalar(f'{part}/median', finite[len(finite) // 2], len(told))
  writer.add_scalar(f'{part}/windows', sum(one.score.windows for one in told[-new:]) / new, len(told))
  if winner is not None:
    writer.add_scalar(f'{part}/best', winner.score.nll, len(told))
  writer.flush()


def _spent(part: str, winner: Told, told: Sequence[Told], log: Log, scored: int) -> str:
  whole = sum(one.score.whole for one in told)
  windows = sum(one.score.windows for one in told) / len(told)
  pace = f', {len(told) / log.seconds:.3g} candidates/s' if log.seconds else ''
  return (
    f'{part}: {len(told)} candidates, {whole} to the end, {windows:.1f} windows each, {log.seconds:.0f} s '
    f'({log.cpu:.0f} s of CPU time){pace}; {scored} windows scored now; best {winner.score.nll:.4f}'
  )


def _export(
  path: pathlib.Path, winner: Told, by_onset: Sequence[Told], scheme: Any, train_len: int, args: argparse.Namespace
) -> str:
  """The dictionary of Hugging Face, or why there is none."""
  path.unlink(missing_ok=True)
  try:
    found = search.hugging_face(winner.method, scheme, train_len, args.target_len)
  except SpecError as reason:
    worse = [one.score.nll - winner.score.nll for one in by_onset if one.candidate.onset == 0]
    cost = f'; with onset = 0 the same factors are {worse[0]:.4f} nats worse on the search documents' if worse else ''
    return f'{path.name} is not written: {reason}{cost}; --onsets=0 searches without'
  path.write_text(json.dumps(found, indent=2) + '\n')
  return f'{path.name} is written'


def _report(
  args: argparse.Namespace,
  config: Config,
  winner: Told,
  by_onset: Sequence[Told],
  tables: dict[str, list[Line]],
  spent: Sequence[str],
  exported: str,
  where: str,
  tested: int,
) -> str:
  values = ', '.join(f'{one.candidate.onset}: {one.score.nll - winner.score.nll:+.4f}' for one in by_onset)
  fixed = f'One temperature for all, a = {tables["fixed"][0].attention:g}:'
  lines = [
    f'# {" ".join(config.posenc)}: factors for {args.target_len} tokens, {args.target_len / config.train_len:g}x',
    f'{args.algorithm}, seed {args.seed}, fitness {args.fitness}. On {where}; held out: {tested} test documents.',
    *spent,
    '## Search set and held out',
    'Nats per token; worse: than the winner, by document, 95 % where there are 3 documents, one comparison at a time.',
    'Gaps on the search documents are what the winner was chosen by: those held out are what it is worth.',
    fixed,
    search.table(tables['fixed']),
  ]
  if 'searched' in tables:
    lines += ['The temperature of each method searched on the search documents:', search.table(tables['searched'])]
  lines += [f'n-hat of the winner, nats on the search documents: {values}', exported, f'```\n{winner.method}\n```']
  return '\n\n'.join(lines) + '\n'


if __name__ == '__main__':
  start_jax()
  cli.guard(main)

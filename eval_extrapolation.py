"""Sweeps a trained model over lengths and scaling methods: perplexity against length, with intervals.

  python eval_extrapolation.py --workdir=runs/rope --method=none --method='yarn(factor=8)' --multiples=1,2,4,8

Writes workdir/extrapolation/: curve.jsonl, curve.csv, curve.png and event files. A second sweep adds to the curve. The
NLL of every token that was scored is kept in workdir/extrapolation/store, or --store: only what is missing there is
scored. --status shows what is there, --dry_run what the rest costs.
"""

import functools
import pathlib
from typing import Any

import jax
import tqdm
from absl import flags

import posenc
from configs.schema import Config
from evaluation import expect, results, summary
from evaluation.points import is_drawn, trained
from evaluation.store import Store, remember_store
from evaluation.survey import Survey, costs, rate, rest, status
from evaluation.sweep import sweep
from opened import Opened
from posenc.alibi import ALiBi, slopes
from spec import SpecError
from training import cli, hosts, lock, provenance

WORKDIR = flags.DEFINE_string('workdir', None, 'Folder of a run of train.py.', required=True)
METHOD = flags.DEFINE_multi_string('method', None, "A scaling method, such as 'yarn(factor=8)+logn'. Repeat for more.")
PROTOCOL = flags.DEFINE_multi_string('protocol', None, "Such as 'sliding(stride=64)'. Repeat for more; the config's.")
CONTROL = flags.DEFINE_multi_string('control', None, "Such as 'foreign(spans=16)', or '' for none; the config's.")
MULTIPLES = flags.DEFINE_list('multiples', None, 'Lengths in units of train_len, such as 0.5,1,2,4.')
MESH = flags.DEFINE_list('mesh', None, "data,fsdp,context of this sweep, such as 0,1,8; the config's by default.")
MEMORY_GB = flags.DEFINE_float('memory_gb', None, "GiB for this sweep, 0: what is free; the config's by default.")
CHECKPOINT = flags.DEFINE_string('checkpoint', 'latest', 'A step, or latest.')
STORE = flags.DEFINE_string('store', None, 'Folder of scored windows; sweeps may share one. In the workdir by default.')
STATUS = flags.DEFINE_bool('status', False, 'Show what has been scored, and score nothing.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Show what is missing and what it costs, and score nothing.')


def main() -> int:
  # ---- what is asked for
  workdir = pathlib.Path(WORKDIR.value).absolute()
  config = Config.from_dict(provenance.read(workdir))
  asked = config.to_dict()
  if METHOD.value:
    asked['methods'] = tuple(METHOD.value)
  if PROTOCOL.value:
    asked['eval']['protocols'] = tuple(PROTOCOL.value)
  if CONTROL.value:
    asked['eval']['controls'] = tuple(control for control in CONTROL.value if control)
  if MULTIPLES.value:
    asked['eval']['multiples'] = tuple(_number('multiples', text) for text in MULTIPLES.value)
  if MESH.value:
    asked['mesh'] = tuple(_number('mesh', text, int) for text in MESH.value)
  if MEMORY_GB.value is not None:
    asked['memory_gb'] = MEMORY_GB.value
  config = Config.from_dict(asked)  # checked like any config
  methods = ('none', *(m for m in config.methods if m != 'none'))  # what every method is compared with
  lengths = [config.tokens(m) for m in config.eval.multiples]
  run = Opened(workdir, config, CHECKPOINT.value)
  mesh, slots, directory = run.mesh, run.slots, run.results
  hosts.on_first(mesh, lambda: results.check_writable(directory))
  if not (STATUS.value or DRY_RUN.value):
    hosts.on_first(mesh, lambda: lock.take(directory, 'sweep'))

  # ---- the sweep
  data, plan = run.data, run.plan()
  several = jax.process_count() > 1
  store = Store(STORE.value or directory / 'store', lambda line: print(f'note: {line}'), writes=hosts.first())
  open_rows = functools.cache(run.rows_in(store)) if several else run.rows_in(store)
  survey = Survey(plan, slots, methods, lengths, config.train_len, run.rule, open_rows)
  _check_context(survey, mesh)
  if several:
    # All score the same batches or wait for each other for ever. So what is there is read once, before any of it is
    # written, and must be the same for all; from here on each has its own.
    told = int(survey.missing_hash()[:7], 16)
    if {hosts.agree(mesh, told), -hosts.agree(mesh, -told)} != {told}:
      raise hosts.Stopped(f'{store.directory} is being written, or not the same for all processes; start again')
  if STATUS.value or DRY_RUN.value:
    print(status(survey))
    if DRY_RUN.value:
      print(f'\n{_forecast(survey, lambda n: n * provenance.forward_flops_per_token(config, run.shapes, n), run)}')
      print(f'\n{expect.text(survey)}')
    return 0
  hosts.on_first(mesh, lambda: remember_store(directory, store))
  for remark in (*posenc.remarks((*methods, config.method), slots, config.train_len), *run.rule.remarks()):
    print(f'note: {remark}')
  facts = provenance.facts(config, data, run.shapes, run.step)
  if all(isinstance(scheme, ALiBi) for scheme in slots):
    facts['slope'] = min(slopes(config.model.heads))  # what a reach is measured in
  per_document = f'{config.eval.spans} spans of {plan.targets} targets'
  print(
    f'{len(plan.documents)} test documents x {per_document}; {len(methods)} methods x {len(lengths)} lengths, at most '
    f'{survey.tokens / 1e6:.1f} M tokens, each set of positions once'
  )
  points, kept = [], None
  with tqdm.tqdm(total=survey.tokens, unit='token', unit_scale=True, disable=hosts.quiet()) as bar:
    parts = sweep(
      survey,
      lambda: run.scorer,
      bytes_per_token_V=data.tokenizer.bytes_per_token_V,
      facts=facts,
      progress=bar,
      floor=data.floor,
    )
    for part in parts:  # written as it comes: a killed sweep keeps the lengths that it has measured
      if hosts.first():
        points, differed = results.write(directory, part, keep=kept is None, redraw=False)
        kept = kept or differed
  if not hosts.first():
    return 0
  if not is_drawn(directory):
    results.draw(directory, points)

  # ---- what it found
  rows = summary.rows(points)
  for protocol in config.eval.protocols:
    print(f'\n{results.table(rows, protocol)}')
  print(f'\n{summary.text(points, {trained(points[0]): config.eval.compare})}')
  refused: dict[tuple[str, str], str] = {}
  for point in points:
    if point['reason']:
      refused.setdefault((point['method'], point['outcome']), f'{point["outcome"]}: {point["reason"]}')
  for line in dict.fromkeys(refused.values()):
    print(line)
  if kept:
    print(f'\nthe previous curve differed and is kept as {directory / kept}')
  print(f'\n{directory / "curve.png"}')
  return 0


def _check_context(survey: Survey, mesh: Any) -> None:
  """A protocol's partial windows have lengths that no config names."""
  for n in sorted(survey.window_lengths):
    if n % mesh.shape['context']:
      raise SpecError(f'config.mesh: a context that divides the {n} tokens of a partial window is allowed')


def _forecast(survey: Survey, flops: Any, run: Opened) -> str:
  """What is missing and what it costs, by length; the time by what windows took, or by a batch run for it."""
  left = rest(survey, flops)
  lines = [
    f'{protocol}: {windows} windows, {tokens / 1e6:.2f} M tokens a method, {extra / 1e6:.2f} M of them for it alone'
    for protocol, windows, tokens, extra in costs(survey)
  ]
  known = sum(part.seconds for part in left if part.seconds is not None)
  unknown = sum(part.flops for part in left if part.seconds is None)
  speed = rate(survey, flops, lambda: run.scorer) if unknown else 0.0
  for part in left:
    seconds = part.flops / speed if part.seconds is None and speed else part.seconds or 0.0
    how = 'measured' if part.seconds is not None else 'estimated'
    time = f', {seconds / 60:.2f} minutes ({how})' if part.missing else ''
    lines.append(
      f'{part.length} tokens: {part.missing} of {part.needed} windows missing, {part.tokens / 1e6:.2f} M tokens, '
      f'{part.flops / 1e12:.3g} TFLOP{time}'
    )
  minutes = (known + (unknown / speed if speed else 0.0)) / 60
  lines.append(
    f'in all {sum(part.missing for part in left)} windows, {sum(part.tokens for part in left) / 1e6:.2f} M tokens, '
    f'{sum(part.flops for part in left) / 1e12:.3g} TFLOP, {minutes:.2f} minutes and compilation'
  )
  return '\n'.join(lines)


def _number(flag: str, text: str, kind: type = float) -> Any:
  try:
    return kind(text)
  except ValueError:
    raise SpecError(f'--{flag}: {text!r}: a {"whole " * (kind is int)}number is allowed') from None


if __name__ == '__main__':
  cli.run(main)

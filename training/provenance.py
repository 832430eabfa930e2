"""What a run was: config.json, and the lines it opens with."""

import json
import math
import pathlib
import platform
import subprocess
from importlib import metadata
from typing import Any

import jax

from spec import SpecError

PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy', 'datasets', 'ml_collections')
ALLOWED = 'config.mesh', 'config.memory_gb', 'config.log.'  # what a run may go on with changed


def claim(workdir: pathlib.Path, config: Any, data: Any, source: dict[str, Any] | None = None) -> None:
  """Writes `workdir/config.json`, or, where there is one, refuses another config and prints the difference.

  The data are part of it: a config names a corpus, whose files may have changed since. The mesh, the memory and what is
  logged, validated and saved when are not: they change no update. config.json keeps what the run began with.
  source: of parameters from elsewhere, which they are; None where a run goes on from its own checkpoint.
  """
  workdir.mkdir(parents=True, exist_ok=True)
  path = workdir / 'config.json'
  if path.exists():
    for line in check_config(workdir, config):
      print(f'note: {line}, from here on')
    check_data(workdir, data)
    theirs = _record(workdir).get('source')
    if theirs != source and not (source is None and config.init_from):
      fields = sorted(set(theirs or {}) | set(source or {}))
      pairs = [(key, *((told or {}).get(key) for told in (theirs, source))) for key in fields if key != 'config']
      changed = '; '.join(f'{key}: {old!r} -> {new!r}' for key, old, new in pairs if old != new)
      raise SpecError(f'{workdir} holds a run that began with other parameters ({changed}); use another workdir')
    return
  record = {
    'config': config.to_dict(),
    'data': _data_facts(data),
    **({'source': source} if source else {}),
    'git_commit': _git_commit(),
    'python': platform.python_version(),
    'versions': {name: metadata.version(name) for name in PACKAGES},
    'devices': f'{jax.device_count()} x {jax.devices()[0].device_kind} ({platform.machine()})',
  }
  temporary = path.with_suffix('.tmp')
  temporary.write_text(json.dumps(record, indent=2) + '\n')
  temporary.replace(path)


def check_config(workdir: pathlib.Path, config: Any) -> list[str]:
  """Refuses a config other than that of the run in `workdir`, with the difference; differences that are allowed."""
  # Through JSON and back, so that tuples and lists compare as they will when read. A run from before a field was added
  # ran with what is the field's default now.
  mine, defaults = (json.loads(json.dumps(c.to_dict())) for c in (config, type(config)()))
  ours, theirs = _flat(mine), {**_flat(defaults), **_flat(read(workdir))}
  both = {**theirs, **ours}
  changed = {
    key: f'{key}: {theirs.get(key, "absent")!r} -> {ours.get(key, "absent")!r}'
    for key in both
    if theirs.get(key, both) != ours.get(key, both)
  }
  refused = [line for key, line in changed.items() if not key.startswith(ALLOWED)]
  if refused:
    raise SpecError(f'{workdir} holds a run with another config ({"; ".join(refused)}); use another workdir')
  return list(changed.values())


def read(workdir: pathlib.Path) -> dict[str, Any]:
  """The config of the run in `workdir`, as plain dicts."""
  return _record(workdir)['config']


def corpus(workdir: pathlib.Path) -> str:
  """sha256 of the corpus of the run in `workdir`."""
  return _record(workdir)['data'].get('corpus_sha256', '')


def check_data(workdir: pathlib.Path, data: Any) -> None:
  """Refuses data other than the run in `workdir` was started with.

  The split is a function of the corpus: with one file more, documents that were trained on would be scored.
  """
  theirs, mine = _record(workdir)['data'], _data_facts(data)
  changed = [f'{key}: {theirs.get(key)!r} -> {mine[key]!r}' for key in mine if theirs.get(key) != mine[key]]
  if changed:
    raise SpecError(
      f'{workdir}: corpus {data.name!r} or its tokenizer is not what this run began with ({"; ".join(changed)})'
    )


def _data_facts(data: Any) -> dict[str, Any]:
  return {'corpus_sha256': data.sha256, 'documents': data.n_documents, 'tokens_sha256': data.tokens_sha256}


def _record(workdir: pathlib.Path) -> dict[str, Any]:
  path = workdir / 'config.json'
  if not path.exists():
    raise SpecError(f'workdir = {str(workdir)!r}: holds no run (no config.json); train there first')
  try:
    record = json.loads(path.read_text())
  except json.JSONDecodeError:
    record = {}
  if not isinstance(record, dict) or not {'config', 'data'} <= set(record):
    raise SpecError(f'{path}: not a config written by train.py')
  return record


def _flat(tree: Any, prefix: str = 'config') -> dict[str, Any]:
  if isinstance(tree, dict):
    return {k: v for key, value in tree.items() for k, v in _flat(value, f'{prefix}.{key}').items()}
  return {prefix: tree}


def _git_commit() -> str | None:
  root = pathlib.Path(__file__).parent.parent
  try:
    out = subprocess.run(
      ['git', 'describe', '--always', '--dirty', '--abbrev=40'], cwd=root, capture_output=True, text=True
    )
  except OSError:
    return None
  return out.stdout.strip() or None


def count(params: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params))


def facts(config: Any, data: Any, params: Any, step: int) -> dict[str, Any]:
  """What every point of a sweep says of the run, of checkpoint `step`."""
  return {
    'posenc': list(config.posenc),
    'checkpoint_step': step,
    'seed': config.seed,
    'tokens_seen': step * config.optimizer.accumulate * config.batch * config.window,
    'params': count(params),
    'learning_rate': config.optimizer.learning_rate,
    'bos': config.data.bos,
    'corpus': data.name,
    'corpus_sha256': data.sha256,
    'corpus_documents': data.n_documents,
    'corpus_tokens': data.n_tokens,
  }


def forward_flops_per_token(config: Any, params: Any, length: int) -> float:
  """Model FLOPs in a window of `length`.

  2 per weight of a matmul, and 2 x 2 x heads x width x mean context T/2 for the two products of causal attention.
  """
  table = math.prod(params['embedding']['embedding'].shape)
  matmul = count(params) - (0 if config.model.tied else table)
  return 2.0 * matmul + config.model.layers * 2 * config.model.heads * config.model.width * length


def train_flops_per_token(config: Any, params: Any) -> float:
  """Model FLOPs of forward and backward (three times the forward), recomputation not counted."""
  return 3.0 * forward_flops_per_token(config, params, config.window)


def describe(config: Any, data: Any, windows: Any, params: Any, mesh: jax.sharding.Mesh, start: int) -> str:
  """A parameter table, then what is trained on what, where."""
  rows = [
    ('.'.join(str(key.key) for key in path), f'{list(leaf.shape)}', f'{math.prod(leaf.shape):,}')
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
  ]
  rows.append(('total', '', f'{count(params):,}'))
  widths = [max(len(row[i]) for row in rows) for i in range(3)]
  lines = [f'{a.ljust(widths[0])}  {b.ljust(widths[1])}  {c.rjust(widths[2])}' for a, b, c in rows]
  splits = data.splits
  lines += [
    '',
    f'scheme {" ".join(config.posenc)}, {config.window} tokens at {config.positions} positions, '
    + (f'{config.method} of {config.train_len}, ' if config.method != 'none' else '')
    + (f'parameters of {config.init_from}, ' if config.init_from else '')
    + f'{config.batch} x {config.optimizer.accumulate} windows a step on {mesh.size} x '
    f'{mesh.devices.flat[0].device_kind}, ' + ' x '.join(f'{name} {size}' for name, size in mesh.shape.items()),
    f'corpus {data.name}: {data.n_documents} documents, {data.n_tokens:,} tokens, sha256 {data.sha256[:16]}; '
    f'train {len(splits.train)}, validation {len(splits.validation)}, test {len(splits.test)}',
  ]
  if windows.left_out:
    lines.append(
      f'{windows.left_out} training documents ({windows.left_out_tokens:,} tokens) are shorter than a window'
    )
  lines.append(f'resuming at step {start}' if start else f'{config.steps} steps')
  return '\n'.join(lines)

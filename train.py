"""Trains one model with one position scheme at one short length.

  python train.py --config=configs/quickstart.py:rope --workdir=runs/rope

With config.init_from it goes on from another run's parameters, at config.tune_len tokens and with config.method in
force. Run the same command again to resume; a finished run is left as it is. SIGTERM and SIGINT save and exit.
"""

import functools
import math
import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import config_flags

import posenc
from configs.schema import Config
from data import TrainWindows
from evaluation.store import checkpoint_hash
from evaluation.surface import Surface
from models.lm import abstract
from models.memory import check_state, fitted
from models.ring import place
from training import cli, guard, hosts, lock, provenance
from training.checkpoints import Checkpoints, as_abstract, saved
from training.devices import make_mesh, split_tokens, spread, whole_shares
from training.log import RunLog
from training.optimizer import decay_mask, make_optimizer, schedule
from training.source import Source
from training.step import make_train_step, make_validate

CONFIG = config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of this run: config.json, checkpoints/, metrics.jsonl, tensorboard/.', required=True
)
flags.mark_flag_as_required('config')


def main() -> int:
  # ---- config and data: what can be wrong is wrong here, before anything is compiled or written
  config = Config.from_dict(CONFIG.value.to_dict())
  workdir = pathlib.Path(WORKDIR.value).absolute()
  data = config.load_data()
  cut_as = {'bos': config.data.bos, 'bos_id': data.tokenizer.bos, 'stride': data.stride}
  windows = TrainWindows(data.splits.train, config.window, **cut_as, seed=config.seed)
  slots = [config.build_scheme(text) for text in config.posenc]
  rule = config.build_rule(slots)
  remarks = [*posenc.remarks((config.method,), slots, config.train_len), *rule.remarks()]
  train_pos = posenc.positions(config.method, slots, config.train_len, config.window)
  surface = Surface(config, data, slots, rule)
  held_out = {}
  for multiple in config.log.validate_multiples:
    length = config.tokens(multiple)
    try:
      pos = posenc.positions('none', slots, config.train_len, length, rule=rule)
    except posenc.Unsupported as reason:
      remarks.append(f'no validation at {multiple:g}x: {reason}')
    else:
      held_out[multiple] = (TrainWindows(data.splits.validation, length, **cut_as, seed=0), pos)
  mesh = make_mesh(config.batch, config.mesh)

  # ---- model, optimizer, state
  make = functools.partial(config.build_model, data.tokenizer.vocab_size)
  graphdef, shapes = abstract(make)
  tx = make_optimizer(config.optimizer, config.steps, decay_mask(nnx.eval_shape(make)))

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(params)}

  like = jax.eval_shape(init)
  home = spread(mesh, like)
  check_state(like, home, config.memory_gb)
  hosts.on_first(mesh, lambda: lock.take(workdir))
  # Asked for only before there is a checkpoint of this run: from then on it needs the other one no more.
  source = Source(config, data) if config.init_from and not saved(workdir) else None
  whence = source.facts(mesh, checkpoint_hash) if source else None
  hosts.on_first(mesh, lambda: provenance.claim(workdir, config, data, whence))
  provenance.check_data(workdir, data)  # by every process: it has the same folder and the same text
  checkpoints = Checkpoints(workdir, keep=config.log.keep)
  start, there = checkpoints.newest(as_abstract(like, home), lambda line: print(f'warning: {line}'))
  if there is not None and start >= config.steps:
    print(f'{workdir}: finished, step {start} of {config.steps}; nothing to do')
    return 0
  hosts.on_first(mesh, lambda: checkpoints.check_space(like))
  if there is not None:
    state = there
  elif source:
    params = source.params(mesh, home['params'])
    state = {'params': params, 'opt': jax.jit(tx.init, out_shardings=home['opt'])(params)}
  else:
    state = jax.jit(init, out_shardings=home)()

  # ---- steps
  train_pos = jax.tree.map(np.asarray, train_pos)  # a constant of the program on every process
  train_step = make_train_step(graphdef, tx, train_pos, config.seed if config.model.dropout else None, mesh)
  validate_step = make_validate(graphdef, mesh)
  surface.begin(workdir / 'extrapolation', graphdef, mesh, functools.partial(provenance.facts, config, data, shapes))
  lr = schedule(config.optimizer, config.steps)
  tokens_per_step = config.optimizer.accumulate * config.batch * config.window
  flops_per_step = tokens_per_step * provenance.train_flops_per_token(config, shapes)

  def batch_at(step):
    shape = (config.optimizer.accumulate, config.batch, config.window)
    cut = functools.partial(windows.batch, step, config.optimizer.accumulate * config.batch)
    inputs, targets = place(split_tokens(mesh, axis=1), shape, cut)
    at = rule.train(config.seed, step)
    return inputs, targets, step, None if at is None else tuple(a.astype(np.float32) for a in at)

  bytes_per_token_V = np.asarray(data.tokenizer.bytes_per_token_V)

  @jax.jit
  def count(targets_ABT):
    """(targets that are asked for, their bytes)."""
    asked_ABT = targets_ABT >= 0
    bytes_ABT = jnp.asarray(bytes_per_token_V)[jnp.maximum(targets_ABT, 0)]
    return asked_ABT.sum(), jnp.where(asked_ABT, bytes_ABT, 0).sum()

  # ---- what the run says
  log = RunLog(workdir, start=start, total=config.steps)
  log.say(provenance.describe(config, data, windows, shapes, mesh, start))
  for remark in remarks:
    log.say(f'note: {remark}')

  spikes = guard.Spikes()

  def broken(name, value, step):
    """The end of a run whose update `step` has left something that is no number."""
    drawn = config.optimizer.accumulate * config.batch
    where = guard.dump(workdir, step, windows.places(step - 1, drawn), *windows.batch(step - 1, drawn))
    return cli.Stopped(f'{name} = {value} at step {step}; {where}; last checkpoint: {checkpoints.latest or "none"}')

  def report(step, metrics, targets_ABT):
    """The numbers of update `step`, counted from 1; called once the next update is on its way. Returns `told`."""
    metrics = {name: float(value) for name, value in metrics.items()}
    told = int(metrics.pop('told', 0))
    for name, value in metrics.items():
      if not math.isfinite(value):
        raise broken(name, value, step)
    if line := spikes.look(step, metrics['loss']):
      log.say(f'note: {line}')
    if step % config.log.every and step != config.steps:
      return told
    rate = log.rate(step)
    asked, n_bytes = (int(n) for n in count(targets_ABT))
    metrics['bits_per_byte'] = metrics['loss'] * asked / max(n_bytes, 1) / math.log(2)
    metrics['learning_rate'] = float(lr(step - 1))  # the one this update was made with
    metrics['bytes'] = needed
    if rate:
      metrics |= {'tokens_per_second': rate * tokens_per_step, 'model_flops_per_second': rate * flops_per_step}
    log.scalars(step, {f'train/{name}': value for name, value in metrics.items()})
    log.line(step, f'loss {metrics["loss"]:.4f}  {rate * tokens_per_step:.0f} tokens/s')
    return told

  def validate(step):
    rows = config.log.validation_windows
    for multiple, (source, pos) in held_out.items():
      shape = (whole_shares(mesh, rows), source.length)  # the first ones once more to fill it
      batch = place(split_tokens(mesh), shape, lambda at, source=source: source.batch(0, rows, at % rows))
      nll = float(validate_step(state['params'], *batch, jax.tree.map(np.asarray, pos), rows))
      if multiple <= 1 and not math.isfinite(nll):  # beyond, it is a finding about the scheme
        raise broken('validation nll', nll, step)
      ppl = math.exp(min(nll, 700.0))  # e**709 is the last float
      log.scalars(step, {f'validation/ppl_{multiple:g}x': ppl, f'validation/nll_{multiple:g}x': nll})
      log.say(f'step {step}: validation perplexity {ppl:.4f} at {multiple:g}x')

  # ---- the loop
  stop: list[int] = []

  def note(received, _):
    stop.append(received)
    signal.signal(received, signal.SIG_DFL)  # a second one ends the program, should the save hang

  def received():
    return stop[0] if stop else 0

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
  several = jax.process_count() > 1
  if not config.steps:
    checkpoints.save(0, state)
  done, pending, stopping, needed = start, None, 0, 0
  while done < config.steps and not stopping:
    # All processes stop at one step: what one was told goes to all with the step. A launch of its own every step would
    # cost time, and its collective could meet those of the step in another order.
    batch = batch_at(done)
    arguments = (state, *batch, hosts.told(mesh, received()) if several else None)
    if done == start:
      train_step, needed, memory = fitted(train_step, *arguments, memory_gb=config.memory_gb)
      log.say(f'memory: {memory}')
    state, metrics = train_step(*arguments)
    done += 1
    told = report(*pending) if pending else 0
    pending = (done, metrics, batch[1])
    log.update()
    finished, stopping = done == config.steps, told if several else received()
    if (
      finished
      or stopping
      or done % config.log.checkpoint_every == 0
      or done % config.log.validate_every == 0
      or done in surface.steps
    ):
      # Nothing is saved or validated before its numbers have been looked at.
      stopping = report(*pending) or stopping
      pending = None
    if finished or done % config.log.validate_every == 0:
      validate(done)
    if done in surface.steps:
      log.scalars(done, surface.measure(done, state['params'], log.say))
    if finished or stopping or done % config.log.checkpoint_every == 0:
      checkpoints.save(done, state)
    if pending is None or done == start + 1:
      jax.block_until_ready(state)
      log.restart(done)
  checkpoints.close()
  log.close()
  if done < config.steps:
    print(f'{signal.Signals(stopping).name}: saved step {done} of {config.steps}; run the same command to go on')
    return 128 + stopping
  print(f'{workdir}: finished, step {done}')
  return 0


if __name__ == '__main__':
  cli.run(main)

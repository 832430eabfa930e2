"""Trains one model with one position scheme at one short length.

  python train.py --config=configs/quickstart.py:rope --workdir=runs/rope

Run the same command again to resume; a finished run is left as it is. SIGTERM and SIGINT save and exit.
"""

import functools
import math
import pathlib
import signal

import jax
import numpy as np
from absl import flags
from flax import nnx
from ml_collections import config_flags

import posenc
from configs.schema import Config
from data import TrainWindows
from models.lm import abstract
from models.memory import fitted
from training import cli, provenance
from training.checkpoints import Checkpoints, as_abstract
from training.devices import make_mesh, split_tokens, spread, whole
from training.log import RunLog
from training.optimizer import decay_mask, make_optimizer, schedule
from training.step import make_train_step, make_validate

CONFIG = config_flags.DEFINE_config_file('config', None, 'The recipe.', lock_config=True)
WORKDIR = flags.DEFINE_string(
  'workdir', None, 'Folder of this run: config.json, checkpoints/, tensorboard/.', required=True
)
flags.mark_flag_as_required('config')


def main() -> int:
  # ---- config and data: everything that can be wrong is wrong here, before anything is compiled or written
  config = Config.from_dict(CONFIG.value.to_dict())
  workdir = pathlib.Path(WORKDIR.value).absolute()
  data = config.load_data()
  cut_as = {'bos': config.data.bos, 'bos_id': data.tokenizer.bos, 'stride': data.stride}
  windows = TrainWindows(data.splits.train, config.train_len, **cut_as, seed=config.seed)
  slots = [config.build_scheme(text) for text in config.posenc]
  rule = config.build_rule(slots)
  remarks = [*posenc.remarks((), slots, config.train_len), *rule.remarks()]
  train_pos = posenc.positions('none', slots, config.train_len, config.train_len)
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
  provenance.claim(workdir, config, data)
  checkpoints = Checkpoints(workdir, keep=config.log.keep)
  start = checkpoints.latest or 0
  if start >= config.steps:
    print(f'{workdir}: finished, step {start} of {config.steps}; nothing to do')
    return 0

  # ---- model, optimizer, state
  make = functools.partial(config.build_model, data.tokenizer.vocab_size)
  graphdef, shapes = abstract(make)
  tx = make_optimizer(config.optimizer, config.steps, decay_mask(nnx.eval_shape(make)))

  def init():
    params = nnx.to_pure_dict(nnx.state(make()))
    return {'params': params, 'opt': tx.init(params)}

  home = spread(mesh, jax.eval_shape(init))
  if start:
    state = checkpoints.restore(start, as_abstract(jax.eval_shape(init), home))
  else:
    state = jax.jit(init, out_shardings=home)()

  # ---- steps
  train_pos = jax.device_put(train_pos, whole(mesh))
  train_step = make_train_step(graphdef, tx, train_pos, config.seed if config.model.dropout else None, mesh)
  validate_step = make_validate(graphdef, mesh)
  lr = schedule(config.optimizer, config.steps)
  tokens_per_step = config.optimizer.accumulate * config.batch * config.train_len
  flops_per_step = tokens_per_step * provenance.train_flops_per_token(config, shapes)

  def batch_at(step):
    arrays = windows.batch(step, config.optimizer.accumulate * config.batch)
    shape = (config.optimizer.accumulate, config.batch, config.train_len)
    batch = [jax.device_put(a.reshape(shape), split_tokens(mesh, axis=1)) for a in arrays]
    at = rule.train(config.seed, step)
    if at is not None:
      at = jax.device_put(tuple(a.astype(np.float32) for a in at), whole(mesh))
    return (*batch, step, at), int(data.tokenizer.bytes_per_token_V[arrays[1]].sum())

  # ---- what the run says
  log = RunLog(str(workdir / 'tensorboard' / 'train'), start=start, total=config.steps)
  log.say(provenance.describe(config, data, windows, shapes, mesh, start))
  for remark in remarks:
    log.say(f'note: {remark}')

  def report(step, metrics, n_bytes):
    """The numbers of update `step`, counted from 1; called once the next update is on its way."""
    metrics = {name: float(value) for name, value in metrics.items()}
    for name, value in metrics.items():
      if not math.isfinite(value):
        raise cli.Stopped(f'{name} = {value} at step {step}; last checkpoint: {checkpoints.latest or "none"}')
    if step % config.log.every and step != config.steps:
      return
    rate = log.rate(step)
    metrics['bits_per_byte'] = metrics['loss'] * tokens_per_step / n_bytes / math.log(2)
    metrics['learning_rate'] = float(lr(step - 1))  # the one this update was made with
    if rate:
      metrics |= {'tokens_per_second': rate * tokens_per_step, 'model_flops_per_second': rate * flops_per_step}
    log.scalars(step, {f'train/{name}': value for name, value in metrics.items()})
    log.line(step, f'loss {metrics["loss"]:.4f}  {rate * tokens_per_step:.0f} tokens/s')

  def validate(step):
    for multiple, (source, pos) in held_out.items():
      batch = source.batch(0, config.log.validation_windows)
      nll = float(validate_step(state['params'], *batch, jax.device_put(pos, whole(mesh))))
      if multiple <= 1 and not math.isfinite(nll):  # beyond, it is a finding about the scheme
        raise cli.Stopped(f'validation nll = {nll} at step {step}; last checkpoint: {checkpoints.latest or "none"}')
      ppl = math.exp(min(nll, 700.0))  # e**709 is the last float
      log.scalars(step, {f'validation/ppl_{multiple:g}x': ppl, f'validation/nll_{multiple:g}x': nll})
      log.say(f'step {step}: validation perplexity {ppl:.4f} at {multiple:g}x')

  # ---- the loop
  stop: list[int] = []

  def note(received, _):
    stop.append(received)
    signal.signal(received, signal.SIG_DFL)  # a second one ends the program, should the save hang

  for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
  done, pending, stopping = start, None, False
  while done < config.steps and not stopping:
    batch, n_bytes = batch_at(done)
    if done == start:
      train_step, memory = fitted(train_step, state, *batch, memory_gb=config.memory_gb)
      log.say(f'memory: {memory}')
    state, metrics = train_step(state, *batch)
    done += 1
    if pending:
      report(*pending)
    pending = (done, metrics, n_bytes)
    log.update()
    finished, stopping = done == config.steps, bool(stop)  # read once: a signal may come between any two lines
    if finished or stopping or done % config.log.checkpoint_every == 0 or done % config.log.validate_every == 0:
      report(*pending)  # nothing is saved or validated before its numbers have been looked at
      pending = None
    if finished or done % config.log.validate_every == 0:
      validate(done)
    if finished or stopping or done % config.log.checkpoint_every == 0:
      checkpoints.save(done, state)
    if pending is None or done == start + 1:
      jax.block_until_ready(state)
      log.restart(done)
  checkpoints.close()
  log.close()
  if done < config.steps:
    print(f'{signal.Signals(stop[0]).name}: saved step {done} of {config.steps}; run the same command to go on')
    return 128 + stop[0]
  print(f'{workdir}: finished, step {done}')
  return 0


if __name__ == '__main__':
  cli.run(main)

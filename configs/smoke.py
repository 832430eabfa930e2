"""Everything the real recipes do, in seconds, on Python's own library: for tests and for looking around.

COMMAND   python train.py --config=configs/smoke.py:alibi --workdir=runs/smoke
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'yarn')
  config.train_len = 32
  config.max_multiple = 8
  config.steps = 20
  config.batch = 8
  config.data.corpus = 'stdlib'
  config.data.test_docs = 12
  config.data.validation_docs = 2
  config.model.layers = 2
  config.model.d_model = 32
  config.model.heads = 2
  config.optimizer.warmup_steps = 5
  config.eval.multiples = (0.5, 1.0, 2.0, 8.0)
  config.eval.spans = 2
  config.eval.batch_tokens = 2048
  config.log.every = 5
  config.log.validate_every = 10
  config.log.validate_multiples = (1.0, 2.0)
  config.log.validation_windows = 8
  config.log.checkpoint_every = 10
  return config

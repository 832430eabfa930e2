"""Two-dimensional text with a known answer.

COMMAND   python train.py --config=configs/grid.py:rope2d --workdir=runs/grid/rope2d
THEN      python eval_extrapolation.py --workdir=runs/grid/rope2d
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'pi', 'ntk', 'yarn')
  config.train_len = 16 * 17
  config.max_multiple = 4
  config.steps = 800
  config.batch = 16
  config.data.corpus = 'grid'
  config.data.test_docs = 40
  config.model.layers = 2
  config.model.d_model = 64
  config.model.heads = 2
  config.model.tile = 16 * 17  # the training length at once
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 60
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0)
  config.eval.spans = 4
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 100
  config.log.checkpoint_every = 200
  return config

"""x

COMMAND   python train.py --config=configs/length_generalisation.py:nope --workdir=runs/copy/nope
"""

from configs import schema


def get_config(scheme: str = 'nope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none',)
  config.train_len = 20
  config.max_multiple = 4
  config.steps = 3000
  config.batch = 32
  config.data.corpus = 'copy(length=20)'
  config.data.test_docs = 40
  config.model.layers = 3
  config.model.d_model = 64
  config.model.heads = 4
  config.model.d_mlp = 64
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 100
  config.eval.multiples = (1.0, 2.0, 4.0)
  config.eval.spans = 4
  config.eval.controls = ()
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 500
  config.log.checkpoint_every = 1000
  return config

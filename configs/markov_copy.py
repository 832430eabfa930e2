"""Context that is worth something only from a known distance on: half of the tokens copy the one 32 before.

COMMAND   python train.py --config=configs/markov_copy.py:alibi --workdir=runs/markov_copy/alibi
THEN      python eval_extrapolation.py --workdir=runs/markov_copy/alibi
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'ntk', 'yarn')
  config.train_len = 128
  config.max_multiple = 8
  config.steps = 400
  config.batch = 32
  config.data.corpus = 'markov_copy(distance=32, tokens=2048)'
  config.data.test_docs = 40
  config.model.layers = 2
  config.model.d_model = 96
  config.model.heads = 3
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 60
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
  config.eval.spans = (
    16  # copies that fail are few and cost 6 nats each: with 4 spans the floor itself is known to 3 % only
  )
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 200
  config.log.checkpoint_every = 200
  return config

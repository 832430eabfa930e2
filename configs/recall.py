"""A small model that remembers: keys, pairs and words said before, among prose, in windows of 128 bytes.

COMMAND   python train.py --config=configs/recall.py:rope --workdir=runs/recall/rope
          python -m evaluation.tasks --workdir=runs/recall/rope --task=passkey --task=needle
ALL       python -m scripts.compare_tasks runs/recall/* --task=passkey --out=runs/passkey.png

Episodes are trained on their answers alone (data/tasks.py); what works and what did not is in docs/LOG.md.

MEASURED, 2026-11-30, one seed, 3 minutes of CPU time each (FoX 5): passkey exact at 1x and 2x, 100 trials: rope 99 and
0 %, alibi 100 and 90, nope 26 and 14 (first of 10 keys in 100 and 99), fox 0. Heat maps: docs/tasks.md.
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'yarn')
  config.train_len = 128
  config.max_multiple = 8
  config.steps = 4000
  config.batch = 16
  config.data.corpus = 'recall'
  config.data.test_docs = 40
  config.model.layers = 3
  config.model.d_model = 64
  config.model.heads = 4
  config.model.d_mlp = 64
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 100
  config.eval.multiples = (1.0, 2.0, 4.0, 8.0)
  config.eval.spans = 4
  config.eval.controls = ('truncated',)
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 500
  config.log.checkpoint_every = 500
  return config

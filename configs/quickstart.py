"""The main job on a laptop: a 0.36M-parameter byte-level LM on English prose, trained at 128 tokens, swept to 4096.

COMMAND   ./scripts/quickstart.sh   (rope, then alibi; both swept; at most 10 minutes on 2 cores)
ONE RUN   python train.py --config=configs/quickstart.py:alibi --workdir=runs/alibi
          python eval_extrapolation.py --workdir=runs/alibi

PREDICTED, before the first full run, of the fixed-target curves (one seed: a statement about these two checkpoints):
  a. RoPE without a method rises at every doubling past 1x, and is at least 1.5 times its 1x perplexity at 8x.
  b. ALiBi at 32x is at most 1.02 times its 1x. A fall would be context at work, not an error.
  c. yarn beats none at 4x, the paired 95 % interval excluding 0.
`python -m scripts.quickstart_claims runs/quickstart` prints what became of them.

Why so small: at 32x a window costs as much as 32 training windows and is quadratic in attention; 160 of them per method
are most of the ten minutes.
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'pi', 'ntk', 'yarn', 'yarn(factor=8)')
  config.train_len = 128
  config.steps = 600
  config.batch = 32
  config.data.test_docs = 40
  config.model.layers = 3
  config.model.d_model = 96
  config.model.heads = 3
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 60
  config.eval.spans = 4
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 200
  config.log.checkpoint_every = 200
  return config

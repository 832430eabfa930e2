"""Context that is worth something from one known distance on: half of the bytes copy the one 32 before.

COMMAND   python train.py --config=configs/markov_copy.py:alibi --workdir=runs/markov_copy/alibi
          python eval_extrapolation.py --workdir=runs/markov_copy/alibi
ALL       python -m scripts.compare runs/markov_copy/rope runs/markov_copy/alibi --out=runs/markov_copy

The floor steps from perplexity 8.569 (31 bytes of context at most) to 2.509 (32 or more) between 0.25x and 0.5x, and is
flat from there: a scheme that finds the byte 32 back within the training length has nothing left to learn, and what it
loses beyond is its own.

MEASURED, 2026-11-30, `rope`, one seed, on 2 cores of an AMD EPYC (4 minutes of CPU time for the training, 1.3 for the
sweep, while other programs ran): fixed targets at 0.25x, 0.5x, 1x, 2x, 4x, 8x: none 8.60 2.52 2.52 2.59 2.74 4.53, ntk
8.60 2.52 2.52 5.77 20.6 19.0, yarn 8.60 2.52 2.52 24.5 22.3 25.2 (half widths 0.05 at 1x, 0.2 at 8x). Methods that
rescale frequencies move the angle of distance 32, and the copy is lost; plain RoPE keeps it.
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'ntk', 'yarn')
  config.train_len = 128
  config.max_multiple = 8
  config.steps = 1000
  config.batch = 32
  config.data.corpus = 'markov_copy(distance=32, tokens=2048)'
  config.data.test_docs = 40
  config.model.layers = 2
  config.model.d_model = 96
  config.model.heads = 3
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 60
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
  # A copy that fails costs 6 nats, and few do: with 4 spans the floor's own scatter is 3 %.
  config.eval.spans = 16
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 200
  config.log.checkpoint_every = 200
  return config

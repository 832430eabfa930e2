"""Text in two dimensions with a known answer: what predicts a cell stands next door in the row above, 16 bytes back.

COMMAND   python train.py --config=configs/grid.py:rope --workdir=runs/grid/rope
          python eval_extrapolation.py --workdir=runs/grid/rope
ROW, COL  --config=configs/grid.py:rope2d, where the scheme is there: its width of 17 is a row and its newline
HARDER    --config.data.corpus='grid(rule=150)': all three neighbours, not two

Trained on windows of 16 rows. BOS stands in the column of the newline before, so that a token's index is its row x 17 +
its column in every window.

MEASURED, 2026-11-30, `rope`, one seed, on 2 cores of an AMD EPYC shared with other work (2.2 minutes of CPU time for
the training, 0.4 for the sweep of these two): fixed targets at 0.25x, 0.5x, 1x, 2x, 4x: none 1.215 1.215 1.215 2.27
5.90, yarn 1.215 1.215 1.215 6.67 6.97, floor 1.205 (half widths 0.02 at 1x, 0.25 at 4x).
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'pi', 'ntk', 'yarn')
  config.train_len = 16 * 17
  config.max_multiple = 4
  config.steps = 600
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

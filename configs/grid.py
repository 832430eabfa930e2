"""Text in two dimensions with a known answer: what predicts a cell stands next door in the row above, 16 bytes back.

COMMAND   python train.py --config=configs/grid.py:rope --workdir=runs/automata/rope
          python eval_extrapolation.py --workdir=runs/automata/rope
ROW, COL  python train.py --config=configs/grid.py --config.posenc='rope2d(width=17)' --workdir=runs/automata/rope2d
BASES     --config.posenc='rope(base=100.0)' and --config.posenc='rope2d(width=17, base=100.0)'
HARDER    --config.data.corpus='grid(rule=150)': all three neighbours, not two

Trained on windows of 16 rows. BOS stands in the column of the newline before, so that a token's index is its row x 17 +
its column in every window.

MEASURED, 2026-11-30, one seed each, on 2 cores of an AMD EPYC (2.2 minutes of CPU time for a training, 0.4
for a sweep, while other programs ran), fixed targets, perplexity; the floor is 1.205 at every length:
                        16 rows (1x)     32 rows        64 rows
  rope2d                1.215 +-0.019    1.597 +-0.046  3.73 +-0.14
  rope                  1.215 +-0.019    2.267 +-0.036  5.90 +-0.24
  rope2d(base=100.0)    1.215 +-0.019    1.225 +-0.020  3.28 +-0.15
  rope(base=100.0)      1.215 +-0.019    1.270 +-0.023  1.758 +-0.055
  rope, yarn            1.215 +-0.019    6.67 +-0.19    6.97 +-0.26
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
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 60
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0)
  config.eval.spans = 4
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 100
  config.log.checkpoint_every = 200
  return config

"""The main job on a laptop: a 0.36M-parameter byte-level LM on English prose, trained at 128 tokens, swept to 4096.

COMMAND   ./scripts/quickstart.sh   (rope, then alibi; both swept; at most 10 minutes on 2 cores)
ONE RUN   python train.py --config=configs/quickstart.py:alibi --workdir=runs/alibi
          python eval_extrapolation.py --workdir=runs/alibi
MATCHED   --config=configs/quickstart.py:rope_matched   RoPE with the shape of Llama 2 (below)

PREDICTED, before the first full run, of the fixed-target curves (one seed: a statement about these two checkpoints):
  a. RoPE without a method rises at every doubling past 1x, and is at least 1.5 times its 1x perplexity at 8x.
  b. ALiBi at 32x is at most 1.02 times its 1x. A fall would be context at work, not an error.
  c. yarn beats none at 4x, the paired 95 % interval excluding 0: `eval.compare`, so that it is tested alone.
`python -m scripts.quickstart_claims runs/quickstart` prints what became of them.

MEASURED, 2026-11-30, 2 cores of an AMD EPYC, 7.0 minutes in all (training 1.1 minutes a scheme): fixed targets at
1x, 2x, 4x, 8x, 16x, 32x: rope none 3.71 7.40 18.9 39.5 42.1 42.9, rope yarn 3.71 3.85 4.45 5.49 9.25 13.2, alibi none
3.95 3.95 3.96 3.96 3.96 3.96. All three held; docs/LOG.md tells of a run whose (a) did not.

rope_matched: at 128 tokens base 10000 leaves 10 of 16 frequency pairs without a complete turn, where Llama 2 has 18 of
64, and no pair makes the 32 turns from which YaRN keeps one. Base 72.5 leaves 4 of 16, and beta_fast = 5 then keeps 6
of 16 (Llama 2: 21 of 64): posenc/rotations.py, `python -m scripts.rotation_report`. MEASURED, 2026-11-30, one seed,
fixed targets at 1x, 2x, 4x, 8x, 16x: none 3.72 7.81 9.56 14.1 17.9, yarn(beta_fast=5.0) 3.72 3.85 3.97 4.51 5.62.

Why so small: at 32x a window costs as much as 32 training windows and is quadratic in attention; 160 of them per method
are most of the ten minutes.
"""

from configs import schema


def get_config(scheme: str = 'rope'):
  """`scheme`: a scheme, or rope_matched."""
  config = schema.default()
  if scheme == 'rope_matched':
    config.posenc = 'rope(base=72.5)'
    config.methods = ('none', 'pi', 'ntk', 'yarn(beta_fast=5.0)', 'yarn(factor=8, beta_fast=5.0)')
    config.eval.compare = ('yarn(beta_fast=5.0) - none at 4x',)
  else:
    config.posenc = scheme
    config.methods = ('none', 'pi', 'ntk', 'yarn', 'yarn(factor=8)')
    config.eval.compare = ('yarn - none at 4x',)
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
  config.eval.controls = ('truncated', 'foreign(spans=1)')  # all of them, of all spans, would double the sweep
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  config.log.validate_every = 200
  config.log.checkpoint_every = 200
  return config

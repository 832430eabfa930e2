"""Does a model that copies words of up to 9 letters copy longer ones? After Kazemnejad et al. 2023 (2305.19466).

COMMAND   python train.py --config=configs/length_generalisation.py:nope --workdir=runs/copy/nope-0
          python -m evaluation.tasks --workdir=runs/copy/nope-0 --task=copy --multiples=0.5,1,1.25,1.5,2 --trials=100
SEEDS     --config.seed=1 ...; python -m scripts.compare_tasks runs/copy/* --task=copy --out=runs/copy.png
OTHERS    --config.data.corpus='reverse(length=20)', or any other task of data/tasks.py; train_len is its row's length
          --config.positions='randomized(max_len=80)' (Ruoss et al. 2023), with :sinusoidal or another scheme that
          reads positions: nope does not

MEASURED, 2026-11-30, five seeds each, 45 seconds of CPU time a run: exact at 1x and 1.25x, median and range, nope 94
(63 to 99) and 31 (5 to 56), sinusoidal 100 (97 to 100) and 0 (0 to 0). All of it: docs/tasks.md.
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

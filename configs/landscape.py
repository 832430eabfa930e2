"""Every scheme of the catalogue on one recipe, for the overview table: the quickstart's model, swept to 8x.

COMMAND   python -m scripts.landscape --workdir=runs/landscape            (about two hours on 2 cores)
SMOKE     python -m scripts.landscape --workdir=runs/smoke --smoke        (minutes)
ONE RUN   python train.py --config=configs/landscape.py --config.posenc=fire --workdir=runs/fire

Not to 32x: at 8x every scheme that breaks has broken, and a sweep costs a tenth. Frequency methods alone: they apply to
rotary schemes, and are recorded as unsupported by the others at no cost.
"""

from configs import quickstart


def get_config(size: str = 'nano'):
  """`size`: nano or smoke."""
  config = quickstart.get_config('rope')
  config.methods = ('none', 'pi', 'ntk', 'dynamic_ntk', 'yarn', 'yarn(factor=8)', 'llama31')
  config.max_multiple = 8
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
  config.eval.protocols = ('fixed_targets',)
  config.eval.controls = ()
  config.surface.checkpoints = 10
  if size == 'smoke':
    config.steps = 10
    config.train_len = 32
    config.eval.multiples = (0.5, 1.0, 2.0, 8.0)
    config.batch = 8
    config.data.corpus = 'stdlib'
    config.data.test_docs = 12
    config.model.layers = 1
    config.model.d_model = 48
    config.optimizer.warmup_steps = 2
    config.surface.checkpoints = 2
  return config

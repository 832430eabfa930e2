"""Every scheme of the catalogue on one recipe, for the overview table: the quickstart's model, swept to 8x.

COMMAND   python -m scripts.landscape --workdir=runs/landscape            (1.6 hours on 2 cores: docs/landscape.md)
SMOKE     python -m scripts.landscape --workdir=runs/smoke --smoke        (minutes)
ONE RUN   python train.py --config=configs/landscape.py:fire --workdir=runs/fire

Not to 32x: at 8x every scheme that breaks has broken, and a sweep costs a tenth. Frequency methods alone: they apply to
rotary schemes, and are recorded as unsupported by the others at no cost.
"""

from configs import quickstart


def get_config(scheme: str = 'rope'):
  config = quickstart.get_config(scheme)
  config.methods = ('none', 'pi', 'ntk', 'dynamic_ntk', 'yarn', 'yarn(factor=8)', 'llama31')
  config.max_multiple = 8
  config.eval.multiples = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
  config.eval.protocols = ('fixed_targets',)
  config.eval.controls = ()
  config.surface.checkpoints = 10
  return config

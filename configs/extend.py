"""Scale, fine-tune, sweep again: what each way to windows of 4x costs, on the quickstart's RoPE model.

COMMAND   python -m scripts.extend --workdir=runs/extend    (all arms, budgets and three seeds; --smoke: minutes)
          114 runs, 24 minutes on 2 cores with --jobs=2
ONE RUN   python train.py --config=configs/extend.py:source --workdir=runs/source
          python train.py --config=configs/extend.py:yarn --config.init_from=runs/source --workdir=runs/yarn
          python eval_extrapolation.py --workdir=runs/yarn
ANY RUN   --config=configs/extend.py:yarn,runs/smollm2 takes model, data, train_len and the rest from the config.json of
          a run, a released model's too; --config.method, --config.tune_len and --config.batch change the arm

ARMS, all of which see as many tokens a step as the source did, 4096:
  pi, ntk, yarn   factor 4 in force, windows of 512 tokens (4x)
  long            the same windows, nothing scaled
  abf             the same windows, base 500000 (Xiong et al. 2023)
  drope           windows of 128 tokens (1x), no positions: DroPE (Gelberg et al. 2025)
  short           windows of 128 tokens, nothing changed: what as many tokens do without being longer. The control
BUDGETS   0, 0.5, 1, 2, 5 and 10 % of the source's 2.5 M tokens, each a run with a schedule of its own. PI's own was
          less than 0.1 %

PREDICTED, before the first run, of fixed targets at 4x:
  a. PI without tuning is the worst point of its own curve, and 1 % of the tokens make it better.
Where tuning without scaling (long) is no longer behind pi, ntk and yarn is reported, whatever it is; so is the price,
NLL at 1x less the control's.

MEASURED, 2026-11-30, three seeds, NLL at 512 less the source's 1.319 at 128, after 0, 1 and 10 % of the tokens:
  pi 2.017 0.988 0.252, ntk 0.859 0.162 0.012, yarn 0.177 0.066 0.012, long 1.626 0.505 0.022, abf 0.314 0.076 0.008,
  drope 2.292 1.218 1.085, short 1.626 1.614 1.635
(a) held. `long` was ahead of pi from 1 % on, no longer behind ntk at 10 %, and still behind yarn there, by 0.010.
At 128 all but pi (+0.250) and drope (+1.070) were within 0.02 at 10 %. All of it: docs/extend.md.
"""

import pathlib

import ml_collections

from configs import quickstart
from configs.schema import Config
from training import provenance

LONG = 4  # times train_len
ARMS = {
  'pi': {'method': f'pi(factor={LONG})', 'windows': LONG},
  'ntk': {'method': f'ntk(factor={LONG})', 'windows': LONG},
  'yarn': {'method': f'yarn(factor={LONG})', 'windows': LONG},
  'long': {'windows': LONG},
  'abf': {'posenc': 'rope(base=500000.0)', 'windows': LONG},
  'drope': {'posenc': 'nope'},
  'short': {},
}
SCALED = [fields['method'] for fields in ARMS.values() if 'method' in fields]


def get_config(arm: str = 'source'):
  """`arm`: one of ARMS, or the source of all of them; after a comma the folder of the run that it goes on from."""
  arm, _, folder = arm.partition(',')
  if folder:
    theirs = Config.from_dict(provenance.read(pathlib.Path(folder)))
    config = ml_collections.ConfigDict(theirs.to_dict(), type_safe=False)
    config.init_from, config.method, config.tune_len = folder, 'none', 0
  else:
    config = quickstart.get_config('rope')
  config.eval.multiples = (1.0, float(LONG))
  config.eval.protocols = ('fixed_targets',)
  config.eval.controls = ()
  config.eval.compare = ()
  if arm == 'source' and not folder:
    config.methods = ('none', *SCALED)  # what they do without tuning
    return config
  if arm not in ARMS:
    raise ValueError(f'{arm!r}: {"" if folder else "source, "}{", ".join(ARMS)} are allowed')
  config.methods = ('none',)  # as trained
  times = LONG if 'windows' in ARMS[arm] else 1
  for field in ('posenc', 'method'):
    if field in ARMS[arm]:
      config[field] = ARMS[arm][field]
  config.tune_len = times * config.train_len if times > 1 else 0
  config.batch = max(config.batch // times, 1)  # as many tokens a step
  config.steps = 30
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 3
  return config

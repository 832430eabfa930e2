"""Scale, fine-tune, sweep again: what each way to windows of 4x costs, on the quickstart's RoPE model.

COMMAND   python -m scripts.extend --workdir=runs/extend    (all arms, budgets and three seeds; --smoke: minutes)
ONE RUN   python train.py --config=configs/extend.py:source --workdir=runs/source
          python train.py --config=configs/extend.py:yarn --config.init_from=runs/source --workdir=runs/yarn
          python eval_extrapolation.py --workdir=runs/yarn
A MODEL   --config.init_from names any run, an imported one too; model, data and train_len are then that one's

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
"""

from configs import quickstart

ARMS = {
  'pi': {'method': 'pi(factor=4)', 'tune_len': 512},
  'ntk': {'method': 'ntk(factor=4)', 'tune_len': 512},
  'yarn': {'method': 'yarn(factor=4)', 'tune_len': 512},
  'long': {'tune_len': 512},
  'abf': {'posenc': 'rope(base=500000.0)', 'tune_len': 512},
  'drope': {'posenc': 'nope'},
  'short': {},
}
SCALED = [fields['method'] for fields in ARMS.values() if 'method' in fields]


def get_config(arm: str = 'source'):
  """`arm`: one of ARMS, or the source of all of them."""
  config = quickstart.get_config('rope')
  config.eval.multiples = (1.0, 4.0)
  config.eval.protocols = ('fixed_targets',)
  config.eval.controls = ()
  config.eval.compare = ()
  if arm == 'source':
    config.methods = ('none', *SCALED)  # what they do without tuning
    return config
  if arm not in ARMS:
    raise ValueError(f'{arm!r}: source, {", ".join(ARMS)} are allowed')
  config.methods = ('none',)  # as trained
  for field, value in ARMS[arm].items():
    config[field] = value
  config.batch = 32 * config.train_len // (config.tune_len or config.train_len)
  config.steps = 30
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 3
  return config

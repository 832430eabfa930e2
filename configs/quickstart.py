"""draft"""

from configs import schema


def get_config(scheme: str = 'rope'):
  config = schema.default()
  config.posenc = scheme
  config.methods = ('none', 'pi', 'ntk', 'dynamic_ntk', 'yarn', 'yarn(factor=8)')
  config.train_len = 128
  config.steps = 800
  config.batch = 32
  config.data.test_docs = 40
  config.model.layers = 3
  config.model.d_model = 128
  config.model.heads = 4
  config.optimizer.learning_rate = 3e-3
  config.optimizer.warmup_steps = 80
  config.eval.spans = 4
  config.eval.batch_tokens = 8192
  config.eval.non_overlapping_docs = 12
  return config

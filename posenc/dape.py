"""Data-adaptive positional encoding: Zheng et al. 2024 (2405.14722)."""

import jax
import jax.numpy as jnp
from flax import nnx

from posenc.alibi import ALiBi
from posenc.base import Dims, PositionScheme, PosParam
from posenc.fire import FIRE
from posenc.kerple import KerpleLog
from spec import SpecError, one_of

BIASES = {'kerple_log': KerpleLog, 'alibi': ALiBi, 'fire': FIRE}  # under their names in SCHEMES
VISIBLE = -1e20  # masked logits lie below


class DAPE(PositionScheme):
  """logit + bias + f(logits, biases): an MLP over the heads of one query and key, 2N -> width -> N, leaky ReLU (0.01).

  It sees the scaled logits, so a method's temperature acts on its input too. Drawn as the authors' library does,
  within 1/sqrt(fan in) of 0. The second layer has no bias, unlike the authors': see FIRE. Their version on FIRE has
  a leaky ReLU inside FIRE as well; here FIRE is as in its own paper.

  bias: the additive bias it starts from, with its own defaults, and parameters if it has any.
  per_layer: an MLP and a bias for each layer, as in the authors' code.
  """

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, bias: str = 'kerple_log', width: int = 32, per_layer: bool = True):
    super().__init__(dims, rngs)
    if bias not in BIASES:
      raise SpecError(one_of('dape: bias', bias, BIASES))
    if width < 1:
      raise SpecError(f'dape: width = {width}: a whole number of at least 1 is allowed')
    self.bias, self.per_layer = BIASES[bias](dims, rngs), per_layer
    self.relative = self.bias.relative

    def uniform(shape, fan_in):
      return PosParam(jax.random.uniform(rngs.params(), shape, minval=-1, maxval=1) * fan_in**-0.5)

    both = 2 * dims.heads
    self.w1, self.b1 = uniform((both, width), both), uniform((width,), both)  # rows: logits, then biases
    self.w2 = uniform((width, dims.heads), width)

  def remarks(self):
    return self.bias.remarks()

  def score(self, logits_BNts, q_BtNR, k_BsKR, at_t, at_s, state_t, state_s, carry):
    bias_Nts = self.bias.bias(at_t, at_s)
    # A masked logit is 1e30 times too large for a matmul's weights to be learned from.
    seen_BNts = jnp.where(logits_BNts > VISIBLE, logits_BNts, 0.0)
    w_logits_NF, w_bias_NF = jnp.split(self.w1[...], 2)
    by_bias_Fts = jnp.einsum('NF,Nts->Fts', w_bias_NF, bias_Nts) + self.b1[...][:, None, None]
    hidden_FBts = jnp.einsum('NF,BNts->FBts', w_logits_NF, seen_BNts) + by_bias_Fts[:, None]
    more_NBts = jnp.einsum('FN,FBts->NBts', self.w2[...], jax.nn.leaky_relu(hidden_FBts, 0.01))
    return logits_BNts + bias_Nts + jnp.swapaxes(more_NBts, 0, 1), carry

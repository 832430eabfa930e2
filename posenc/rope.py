"""Rotary positions: Su et al. 2021, RoFormer (2104.09864), sections 3.2-3.4."""

import jax.numpy as jnp
from flax import nnx

from posenc import rotations
from posenc.base import Dims, Positions, PositionScheme
from spec import SpecError, one_of


class RoPE(PositionScheme):
  """Rotates pair p of a query at m by m theta_p and of a key at n by n theta_p; q.k then depends on m - n alone.

  theta_p = base**(-2p/H), p = 0 .. H/2 - 1, so theta_0 = 1 and the lowest is base**(-(H-2)/H), not 1/base.

  base: trained with this base throughout. A large one (500000: Xiong et al. 2023, Llama 3) is a training choice;
    changed after training it is the method `ntk`.
  pairing: 'half_split' pairs channel p with p + H/2 (Hugging Face Llama, GPT-NeoX); 'interleaved' pairs 2p with 2p + 1
    (RoFormer, Meta's Llama). The same model up to a fixed permutation of channels.
  """

  name = 'rope'

  def __init__(self, dims: Dims, rngs: nnx.Rngs, *, base: float = 10000.0, pairing: str = 'half_split'):
    super().__init__(dims, rngs)
    if pairing not in ('half_split', 'interleaved'):
      raise SpecError(one_of(f'{self.name}: pairing', pairing, ('half_split', 'interleaved')))
    if base <= 1:
      raise SpecError(f'{self.name}: base = {base!r}: a number above 1 is allowed')
    if dims.head_dim % 2:
      raise SpecError(f'{self.name}: head_dim = {dims.head_dim}: an even rotary width is allowed')
    self.base, self.rot, self.pairing = float(base), dims.head_dim, pairing

  def remarks(self):
    return rotations.remarks(f'{self.name}(base={self.base:g})', self.inv_freq_P, self.base, self.dims.train_len)

  def rotate(self, q_BTNH, k_BTKH, pos: Positions):
    trained_P = jnp.asarray(self.inv_freq_P, jnp.float32)
    token_T = jnp.arange(pos.at_T.shape[0])
    freq_TP = jnp.where(token_T[:, None] < pos.onset, trained_P, pos.inv_freq_P)
    # An elementwise product, not a matmul, whose default precision on GPU and TPU would round the positions.
    angle_TP = pos.at_T[:, None] * freq_TP
    cos, sin = jnp.cos(angle_TP)[:, None, :], jnp.sin(angle_TP)[:, None, :]

    def turn(x_BTNH):
      x = x_BTNH.astype(jnp.float32)
      if self.pairing == 'half_split':
        a, b = jnp.split(x, 2, -1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)
      else:
        a, b = x[..., 0::2], x[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
      return turned.astype(x_BTNH.dtype)

    return turn(q_BTNH), turn(k_BTKH)

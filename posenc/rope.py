"""Rotary positions: Su et al. 2021, RoFormer (2104.09864), sections 3.2-3.4, and the ways to rotate less of a head."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from posenc import rotations
from posenc.base import Dims, Positions, PositionScheme
from spec import SpecError, one_of

PAIRINGS = ('half_split', 'interleaved')


def turn(x_BTNH: jax.Array, cos_TP: jax.Array, sin_TP: jax.Array, pairing: str) -> jax.Array:
  """Rotates the P pairs among the first 2P channels; the rest pass. In float32, cast once."""
  rot = 2 * cos_TP.shape[-1]
  cos, sin = cos_TP[:, None, :], sin_TP[:, None, :]
  x, rest = jnp.split(x_BTNH.astype(jnp.float32), [rot], -1)
  if pairing == 'half_split':
    a, b = jnp.split(x, 2, -1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)
  else:
    a, b = x[..., 0::2], x[..., 1::2]
    turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], -1).reshape(x.shape)
    turned = jnp.concatenate([turned, rest], -1)
  return turned.astype(x_BTNH.dtype)


class RoPE(PositionScheme):
  """Rotates pair p of a query at m by m theta_p and of a key at n by n theta_p; q.k then depends on m - n alone.

  theta_p = base**(-2p/d), p = 0 .. d/2 - 1, d the rotary width, so theta_0 = 1 and the lowest is base**(-(d-2)/d), not
  1/base.

  base: trained with this base throughout. A large one (500000: Xiong et al. 2023, Llama 3) is a training choice;
    changed after training it is the method `ntk`.
  pairing: 'half_split' pairs channel p with p + d/2 (Hugging Face Llama, GPT-NeoX); 'interleaved' pairs 2p with 2p + 1
    (RoFormer, Meta's Llama). The same model up to a fixed permutation of channels.
  fraction: partial rotary (GPT-J, GPT-NeoX; Pythia 0.25): d = int(fraction H), the first d channels rotate, with the
    whole range of frequencies; the rest carry no position.
  proportion: p-RoPE (Barbero et al. 2024, 2410.06205; Gemma's global layers): the first int(proportion d / 2) pairs
    keep their theta_p, the slower ones get 0. Not `fraction`: there the low frequencies stay. 1 is RoPE, 0 is NoPE.
  cut: 'incomplete' gives 0 to the pairs that never complete a turn within the training length, theta_p < 2 pi / L
    (HoPE, Chen et al. 2024, 2410.21216; two later papers use that name for other things), so that no angle is new
    beyond it.
  """

  name = 'rope'
  proportion, cut = 1.0, 'none'

  def __init__(
    self,
    dims: Dims,
    rngs: nnx.Rngs,
    *,
    base: float = 10000.0,
    pairing: str = 'half_split',
    fraction: float = 1.0,
    proportion: float = 1.0,
    cut: str = 'none',
  ):
    super().__init__(dims, rngs)
    for option, value, allowed in (('pairing', pairing, PAIRINGS), ('cut', cut, ('none', 'incomplete'))):
      if value not in allowed:
        raise SpecError(one_of(f'{self.name}: {option}', value, allowed))
    if base <= 1:
      raise SpecError(f'{self.name}: base = {base!r}: a number above 1 is allowed')
    if dims.head_dim % 2:
      raise SpecError(f'{self.name}: head_dim = {dims.head_dim}: an even rotary width is allowed')
    rot = int(dims.head_dim * fraction) if 0 < fraction <= 1 else 0
    if rot < 2 or rot % 2:
      raise SpecError(
        f'{self.name}: fraction = {fraction!r}: a share in (0, 1] is allowed that makes the rotary width even and '
        f'at least 2; of head_dim = {dims.head_dim} it is {rot}'
      )
    if not 0 <= proportion <= 1:
      raise SpecError(f'{self.name}: proportion = {proportion!r}: a number from 0 to 1 is allowed')
    self.base, self.rot, self.pairing = float(base), rot, pairing
    self.proportion, self.cut = float(proportion), cut

  @property
  def inv_freq_P(self):
    theta_P = super().inv_freq_P
    rotates_P = np.arange(len(theta_P)) < int(self.proportion * self.rot // 2)
    if self.cut == 'incomplete':
      rotates_P &= ~rotations.incomplete(theta_P, self.dims.train_len)
    return np.where(rotates_P, theta_P, 0.0)

  def remarks(self):
    return rotations.remarks(f'{self.name}(base={self.base:g})', self.inv_freq_P, self.base, self.dims.train_len)

  def cos_sin(self, pos: Positions) -> tuple[jax.Array, jax.Array]:
    """Of every pair's angle, f32[T, P]."""
    trained_P = jnp.asarray(self.inv_freq_P, jnp.float32)
    token_T = jnp.arange(pos.at_T.shape[0])
    freq_TP = jnp.where(token_T[:, None] < pos.onset, trained_P, pos.inv_freq_P)
    # An elementwise product, not a matmul, whose default precision on GPU and TPU would round the positions.
    angle_TP = pos.at_T[:, None] * freq_TP
    if pos.phase_P is not None:
      angle_TP = angle_TP + pos.phase_P
    return jnp.cos(angle_TP), jnp.sin(angle_TP)

  def rotate(self, q_BTNH, k_BTKH, pos: Positions):
    cos_TP, sin_TP = self.cos_sin(pos)
    return turn(q_BTNH, cos_TP, sin_TP, self.pairing), turn(k_BTKH, cos_TP, sin_TP, self.pairing)

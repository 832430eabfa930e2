"""Numbers computed by running other people's code: papers' own repositories, Hugging Face, lucidrains.

Each case in `golden/*.json` names the peer, its version and the function that was run. A case that fails here
is a change of meaning, not of taste: find out which side moved before touching a tolerance.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import posenc
from forms import jit
from models.attention import attend
from models.tiles import MASKED
from posenc.alibi import slopes
from posenc.kerple import bounded
from posenc.t5 import buckets
from scripts import plot_decay

GOLDEN = Path(__file__).parent / 'golden'


@functools.cache
def load(name):
  return json.loads((GOLDEN / f'{name}.json').read_text())['cases']


def each(name, *parts):
  """One test per case of the file whose id holds one of `parts` (all without)."""
  chosen = [case for case in load(name) if not parts or any(part in case['id'] for part in parts)]
  return pytest.mark.parametrize('case', [pytest.param(case, id=case['id']) for case in chosen])


def attended(q, k, v, scheme, pos, tile):
  """Attention as one program: called as it is, each of its operations would be compiled by itself."""
  return jit(lambda *qkv: attend(*qkv, scheme, pos, tile=tile))(q, k, v)


def close(case, field, ours, theirs, rtol=0.0, atol=0.0):
  message = f'{case["id"]}: {field} is not what {case["peer"]} {case["version"]} {case["function"]} computes'
  ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
  assert ours.shape == theirs.shape, f'{message}: shape {ours.shape}, theirs {theirs.shape}'
  np.testing.assert_allclose(ours, theirs, rtol, atol, equal_nan=False, err_msg=message)


def build(text, head_dim=32, heads=1, d_model=8, train_len=128):
  rngs = nnx.Rngs(0)
  return posenc.build(text, heads=heads, head_dim=head_dim, d_model=d_model, train_len=train_len, rngs=rngs)


def call(name, kwargs):
  return f'{name}({", ".join(f"{key}={value!r}" for key, value in kwargs.items())})'


def test_no_case_is_lost():
  """A file that shrinks, or an id that no longer matches a filter below, would otherwise pass silently."""
  kinds = {}
  for case in load('rope_inv_freq_hf'):
    kind = 'longrope' if 'long_factor' in case['inputs'] else 'partial'
    kind = case['inputs'].get('rope_parameters', {'rope_type': kind})['rope_type']
    kinds[kind] = kinds.get(kind, 0) + 1
  assert kinds == {
    'default': 4, 'linear': 16, 'dynamic': 42, 'yarn': 61, 'llama3': 17, 'partial': 2, 'longrope': 9, 'proportional': 4,
  }  # fmt: skip
  counts = {path.stem: len(load(path.stem)) for path in GOLDEN.glob('*.json') if path.stem in COUNTS}
  assert counts == {name: sum(parts.values()) for name, parts in COUNTS.items()}
  for name, parts in COUNTS.items():
    for part, count in parts.items():
      assert sum(part in case['id'] for case in load(name)) == count, (name, part)


COUNTS = {
  'rope_inv_freq_hf': {'': 155},
  'rope_inv_freq_official': {
    'tiny32/yarn/': 4, 'llama2/yarn/': 4, 'llama3/yarn/': 4, '/ntk_aware/': 12, '/ntk/': 6, '/dynamic/': 24,
    '/dynamic_yarn/': 10, 'apply_scaling': 1, '/part_ntk_old/': 12, '/longrope/': 3, '/longrope_dynamic/': 4,
    '/longrope_mixed/': 1, '/longrope_search_init/': 3, '/ntk_mixed_su/': 1,
  },
  'attn_modifiers': {
    'plain_rope': 1, 'rerope/w8/L': 2, 'leaky_rerope/': 2, 'self_extend/legacy/': 2,
    'self_extend/group_distance/': 2, 'lm_infinite/': 2, 'streaming_llm/': 1, 'sliding_window/': 2, 'logn/': 2,
    'pose/': 1,
  },
  'rope_rotate': {
    'half_split/': 1, 'interleaved/': 4, 'permutation/': 1, 'partial_rotary_0.5/': 1, 'p_rope_0.5/': 1, 'yarn_f4/': 1,
    'xpos/torchscale/': 2, 'xpos/x_transformers/': 2, 'cos_sin/': 2,
  },
  'rope2d': {'naver_axial/': 2, 'pixtral': 1, 'qwen2_vl': 1, 'rotary_embedding_torch': 1},
  'alibi_slopes': {'slopes/': 20, 'bias/': 4},
  't5_buckets': {'causal/': 8, 'bidirectional/': 1},
  'bias_kerple_fire_sandwich': {'kerple_log': 1, 'kerple_power': 1, 'fire/c': 3, 'fire/dape': 1, 'sandwich/': 2},
  'shaw': {'index/': 2, 'attention/': 1},
  'cope': {'ram/': 4, 'x_transformers/': 2, 'dape/': 2, 'x_transformers_unmasked_gates/': 2},
  'fox_pope_dape': {'fox/fla': 1, 'fox/x_transformers': 1, 'fox/decay_time/': 2, 'pope/': 2, 'dape/': 3},
  'decay_curves': {'d64': 1, 'd128': 1},
  'longrope_search': {'default_hyper_params': 1, 'stub_run/': 2},
  'sinusoidal': {'fairseq/': 2, 'tensor2tensor/': 2, 'xlm_': 2, 'gptj_': 1, 'deepmind_': 1},
}  # fmt: skip


# Frequencies and temperatures. 2e-6 relative: the peers work in float32, and a pair near a ramp's slow end
# keeps a share of 1 - 0.999, formed there with an error of 2**-24. Most cases agree to 5e-7.


def check_frequencies(case, method, base, head_dim, train_len, eval_len, attention_factor=1.0, **options):
  scheme = build(call('rope', {'base': float(base), **options}), head_dim=head_dim, train_len=train_len)
  assert scheme.rot == case['outputs'].get('rotary_dim', head_dim)
  pos = posenc.positions(method, scheme, train_len=train_len, eval_len=eval_len)
  close(case, f'inv_freq, our {method},', pos.inv_freq_P, case['outputs']['inv_freq'], rtol=2e-6)
  squared, ours = np.full(eval_len, attention_factor**2), pos.logit_scale_T * pos.key_scale_T
  close(case, f'attention factor, squared, our {method},', ours, squared, rtol=1e-6)
  np.testing.assert_array_equal(pos.at_T, np.arange(eval_len), err_msg='positions stay integers')


HF_METHODS = {
  'default': 'none',
  'linear': 'pi',
  'dynamic': 'dynamic_ntk_hf',
  'yarn': 'yarn',
  'llama3': 'llama31',
  'longrope': 'longrope',
  'proportional': 'none',
}
HF_ARGUMENTS = {
  'low_freq_factor': 'low',
  'high_freq_factor': 'high',
  'short_factor': 'short',
  'long_factor': 'long',
}


@each('rope_inv_freq_hf')
def test_hugging_face(case):
  """L is the original length where the config has one; a dynamic pass of unknown length is one within L."""
  inputs = case['inputs']
  parameters = dict(inputs.get('rope_parameters', {'rope_type': 'default'}))
  if 'long_factor' in inputs:  # as old configs hold them
    old = ('short_factor', 'long_factor', 'original_max_position_embeddings')
    parameters = {'rope_type': 'longrope', **{key: inputs[key] for key in old}}
  # One key, two meanings: GPT-NeoX's width of the rotation, and the share of pairs with a frequency.
  options = {'fraction': inputs['partial_rotary_factor']} if 'partial_rotary_factor' in inputs else {}
  if parameters['rope_type'] == 'proportional':
    options = {'proportion': parameters.pop('partial_rotary_factor')}
  name = HF_METHODS[parameters.pop('rope_type')]
  train_len = parameters.pop('original_max_position_embeddings', inputs.get('max_position_embeddings', 128))
  if name == 'longrope':
    # Theirs takes s of the temperature from the two lengths, unless the config says otherwise, and at any length.
    parameters.setdefault('factor', inputs['max_position_embeddings'] / train_len)
  # Any key we do not know is refused by the method itself, so none is dropped here.
  method = call(name, {HF_ARGUMENTS.get(key, key): value for key, value in parameters.items()})
  eval_len = inputs.get('seq_len') or train_len
  factor = case['outputs']['attention_factor']
  check_frequencies(case, method, inputs['rope_theta'], inputs['head_dim'], train_len, eval_len, factor, **options)


@each('rope_inv_freq_official', 'tiny32/yarn/', 'llama2/yarn/', 'llama3/yarn/')
def test_yarn_authors(case):
  inputs = case['inputs']
  betas = {key: inputs[key] for key in ('beta_fast', 'beta_slow')}
  method = call('yarn', {'factor': inputs['scale'], **betas})
  train_len = inputs['original_max_position_embeddings']
  eval_len = 2 * train_len
  check_frequencies(case, method, inputs['base'], inputs['dim'], train_len, eval_len, case['outputs']['mscale'])


@each('rope_inv_freq_official', '/dynamic_yarn/')
def test_yarn_that_follows_the_length(case):
  """The authors' dynamic YaRN is `yarn` without a factor too; with one, ours is capped at it."""
  inputs, mscale = case['inputs'], case['outputs']['mscale']
  train_len, length = inputs['original_max_position_embeddings'], inputs['seq_len']
  for method in ('yarn', 'dynamic_yarn', 'dynamic_yarn(factor=64)'):
    check_frequencies(case, method, inputs['base'], inputs['dim'], train_len, length, mscale)


@each('rope_inv_freq_official', '/ntk_aware/', '/ntk/')
def test_ntk(case):
  inputs = case['inputs']
  (factor,) = (inputs[k] for k in ('alpha', 'base_rescale_factor', 'theta_rescale_factor') if k in inputs)
  base = inputs.get('base', 10000)
  check_frequencies(case, f'ntk(factor={factor!r})', base, inputs['dim'], 128, 256)
  if 'new_base' in case['outputs']:
    rebased = build(f'rope(base={case["outputs"]["new_base"]!r})', head_dim=inputs['dim'])
    close(case, 'inv_freq of the new base', rebased.inv_freq_P, case['outputs']['inv_freq'], rtol=2e-6)


@each('rope_inv_freq_official', '/dynamic/')
def test_dynamic(case):
  """ntk = 1 is the paper's `dynamic_ntk`, 2 the form Hugging Face kept, False dynamic PI, on positions."""
  inputs, outputs = case['inputs'], case['outputs']
  ntk, length, train_len = inputs['ntk'], inputs['seq_len'], inputs['max_position_embeddings']
  methods = ['pi', 'dynamic_pi', 'dynamic_pi(factor=64)'] if ntk is False else [f'dynamic_ntk_hf(factor={ntk})']
  methods += ['dynamic_ntk'] if ntk == 1 else []
  scheme = build(f'rope(base={float(inputs["base"])!r})', head_dim=inputs['dim'], train_len=train_len)
  for method in methods:
    if ntk is not False:
      check_frequencies(case, method, inputs['base'], inputs['dim'], train_len, length)
    pos = posenc.positions(method, scheme, train_len=train_len, eval_len=length)
    cos, sin = cos_sin(scheme, pos, [3, length - 1])
    close(case, 'cos_at_pos3', cos[0], outputs['cos_at_pos3'], atol=1e-6)
    close(case, 'sin_at_pos3', sin[0], outputs['sin_at_pos3'], atol=1e-6)
    close(case, 'cos_at_last', cos[1], outputs['cos_at_last'], atol=1e-6 + 2**-23 * length)


@each('rope_inv_freq_official', 'apply_scaling')
def test_llama31_meta(case):
  base, dim = case['inputs']['theta'], case['inputs']['dim']
  check_frequencies(case, 'llama31(factor=8)', base, dim, 8192, 16384)
  plain = build(f'rope(base={base!r})', head_dim=dim).inv_freq_P
  close(case, 'inv_freq_unscaled', plain, case['outputs']['inv_freq_unscaled'], rtol=2e-6)


@each('rope_inv_freq_official', '/part_ntk_old/')
def test_by_parts_before_the_paper(case):
  inputs = case['inputs']
  train_len = inputs['original_max_position_embeddings']
  method = f'ntk_by_parts_v0(factor={inputs["scale"]!r})'
  check_frequencies(case, method, inputs['base'], inputs['dim'], train_len, 2 * train_len)


@each('rope_inv_freq_official', '/ntk_mixed_su/')
def test_mixed_ntk(case):
  """His pair 0 is slowed down too: 0.733, where `ntk` keeps 1."""
  inputs = case['inputs']
  method = call('ntk_mixed_su', {'factor': inputs['k'], 'power': inputs['b']})
  check_frequencies(case, method, inputs['base'], inputs['dim'], 128, 256)


@each('rope_inv_freq_official', '/longrope/', '/longrope_dynamic/')
def test_longrope_authors(case):
  inputs = case['inputs']
  train_len = inputs['original_max_position_embeddings']
  arguments = {'long': tuple(inputs['rescale_factors']), 'factor': inputs['max_position_embeddings'] / train_len}
  if 'magnitude_scaling_policy' in inputs:
    policy = inputs['magnitude_scaling_policy']
    arguments['attention'] = float(policy) if policy[0].isdigit() else policy
  method = call('longrope_dynamic' if 'seq_len' in inputs else 'longrope', arguments)
  length = inputs.get('seq_len', inputs['max_position_embeddings'])
  check_frequencies(case, method, 10000.0, inputs['dim'], train_len, length, case['outputs']['mscale'])


@each('rope_inv_freq_official', '/longrope_mixed/')
def test_longrope_first_tokens(case):
  """Tokens below n-hat: the trained angles, without the temperature. Theirs has it in the tables, ours beside them."""
  inputs, outputs = case['inputs'], case['outputs']
  train_len = inputs['original_max_position_embeddings']
  factor, onset = inputs['max_position_embeddings'] / train_len, inputs['start_token_idx']
  method = call('longrope', {'long': tuple(inputs['rescale_factors']), 'factor': factor, 'onset': onset})
  scheme = build('rope', head_dim=inputs['dim'], train_len=train_len)
  pos = posenc.positions(method, scheme, train_len, 2 * train_len)
  cos, sin = cos_sin(scheme, pos, inputs['positions'])
  assert inputs['positions'] == list(range(len(cos)))
  for a_T in (pos.logit_scale_T, pos.key_scale_T):
    a = np.asarray(a_T)[: len(cos), None]
    close(case, 'cos', a * cos, outputs['cos'], atol=2e-6)
    close(case, 'sin', a * sin, outputs['sin'], atol=2e-6)


@each('rope_inv_freq_official', '/longrope_search_init/')
def test_longrope_search_does_not_start_from_yarn(case):
  """Asserted different: the search's start is linear in lambda where YaRN is linear in frequency."""
  inputs, outputs = case['inputs'], case['outputs']
  train_len = inputs['original_max_position_embeddings']
  scheme = build(f'rope(base={float(inputs["base"])!r})', head_dim=inputs['dim'], train_len=train_len)
  pos = posenc.positions(f'yarn(factor={inputs["scale"]!r})', scheme, train_len, 2 * train_len)
  stretch = scheme.inv_freq_P / np.asarray(pos.inv_freq_P, np.float64)
  close(case, 'lambda of yarn', stretch, outputs['effective_lambda_of_yarn_inv_freq'], rtol=1e-5)
  assert (np.asarray(outputs['init_factors']) / stretch).max() > 1.8


# Rotations. The peers hold [batch, heads, time, head_dim], we [B, T, N, H].


def at(pos, where):
  """`pos` with its tokens standing at `where`."""
  where = jnp.asarray(np.asarray(where, np.float32))
  return pos.replace(at_T=where, logit_scale_T=pos.logit_scale_T[: len(where)])


def swap(array):
  return np.swapaxes(np.asarray(array, np.float32), 1, 2)


def rotated(case, text, method='none', train_len=128):
  inputs = case['inputs']
  q, k = swap(inputs['q']), swap(inputs.get('k', inputs['q']))
  scheme = build(text, head_dim=q.shape[3], heads=q.shape[2], train_len=train_len)
  pos = posenc.positions(method, scheme, train_len=train_len, eval_len=q.shape[1])
  if 'positions' in inputs:
    pos = at(pos, np.ravel(inputs['positions']))
  q, k = scheme.rotate(jnp.asarray(q), jnp.asarray(k), pos)
  return swap(q), swap(k), np.asarray(pos.logit_scale_T)


def cos_sin(scheme, pos, where):
  """cos and sin of every pair at `where`, taken from the turn of a unit vector per pair (half_split)."""
  half = scheme.rot // 2
  unit = jnp.concatenate([jnp.ones((1, len(where), 1, half)), jnp.zeros((1, len(where), 1, half))], -1)
  turned, _ = scheme.rotate(unit, unit, at(pos, where))
  return np.split(np.asarray(turned)[0, :, 0], 2, -1)


@each('rope_rotate', 'half_split/', 'interleaved/')
def test_rotate(case):
  pairing = case['id'].split('/')[0]
  q, k, scale_T = rotated(case, f'rope(base={case["inputs"]["base"]!r}, pairing={pairing!r})')
  close(case, 'q_rot', q, case['outputs']['q_rot'], atol=1e-5)
  close(case, 'k_rot', k, case['outputs']['k_rot'], atol=1e-5)
  np.testing.assert_array_equal(scale_T, 1)
  if 'logits' in case['outputs']:
    close(case, 'logits', q @ np.swapaxes(k, 2, 3), case['outputs']['logits'], atol=1e-5)
  else:
    assert 'x_transformers' in case['id'] or 'rotary_embedding_torch' in case['id']


@each('rope_rotate', 'partial_rotary_0.5/', 'p_rope_0.5/')
def test_rotate_a_part(case):
  option = {'partial_rotary_0.5': 'fraction=0.5', 'p_rope_0.5': 'proportion=0.5'}[case['id'].split('/')[0]]
  q, k, _ = rotated(case, f'rope(base={case["inputs"]["base"]!r}, {option})')
  close(case, 'q_rot', q, case['outputs']['q_rot'], atol=1e-5)
  close(case, 'k_rot', k, case['outputs']['k_rot'], atol=1e-5)
  if 'inv_freq' in case['outputs']:
    close(case, 'inv_freq', build(f'rope({option})', head_dim=8).inv_freq_P, case['outputs']['inv_freq'], rtol=2e-6)


@each('rope_rotate', 'xpos/')
def test_xpos(case):
  """Logits, in which the centre cancels, and vectors, in which it shows: of 6 tokens all three put it at the fourth."""
  inputs, outputs = case['inputs'], case['outputs']
  shape = (1, 2, 6, 8)
  q, k = (np.reshape(inputs[name], shape) for name in 'qk')
  text = f'xpos(scale_base={float(inputs["scale_base"])}, pairing="interleaved")'
  q, k, _ = rotated({'inputs': {**inputs, 'q': q, 'k': k}}, text)
  if 'zeta' in outputs:
    close(case, 'zeta', build(text, head_dim=8).zeta_P, outputs['zeta'], rtol=1e-6)
  close(case, 'q_rot', q, np.reshape(outputs['q_rot'], shape), atol=1e-5)
  close(case, 'k_rot', k, np.reshape(outputs['k_rot'], shape), atol=1e-5)
  logits = (q @ np.swapaxes(k, 2, 3)).reshape(np.shape(outputs['logits']))
  close(case, 'logits', logits, outputs['logits'], atol=1e-5)


ROPE2D = {
  'naver_axial/theta100': "rope2d(width=3, order='xy', pairing='interleaved', base=100.0)",
  'naver_axial/theta10000': "rope2d(width=3, order='xy', pairing='interleaved')",
  'pixtral_mistral': "rope2d(width=3, freqs='alternating', pairing='interleaved')",
  'qwen2_vl_vision': 'rope2d(width=3)',
  'rotary_embedding_torch_axial_lang': "rope2d(width=3, pairing='interleaved')",
}


@each('rope2d')
def test_rope2d(case):
  """Four conventions on a grid of 2 by 3, row by row; the other three are not the one that is asked for."""
  outputs = case['outputs']
  q, k, _ = rotated(case, ROPE2D[case['id']])
  close(case, 'q_rot', q, np.reshape(outputs['q_rot'], q.shape), atol=1e-5)
  if 'k_rot' in outputs:
    close(case, 'k_rot', k, np.reshape(outputs['k_rot'], k.shape), atol=1e-5)
  if 'logits' in outputs:
    close(case, 'logits', q @ np.swapaxes(k, 2, 3), outputs['logits'], atol=1e-5)
  for text in set(ROPE2D.values()) - {ROPE2D[case['id']]}:
    assert abs(rotated(case, text)[0] - np.reshape(outputs['q_rot'], q.shape)).max() > 1e-3, text


@each('rope_rotate', 'permutation/')
def test_pairings_are_one_model_up_to_a_permutation(case):
  """half_split(x[perm]) == interleaved(x)[perm], to the last bit."""
  perm = case['inputs']['perm']
  source = {c['id']: c for c in load('rope_rotate')}['half_split/hf_llama']
  mixed = {name: np.asarray(source['inputs'][name])[..., perm] for name in ('q', 'k')}
  half = rotated({'inputs': {**source['inputs'], **mixed}}, 'rope(pairing="half_split")')
  inter = rotated(source, 'rope(pairing="interleaved")')
  for name, a, b in zip('qk', half, inter):
    close(case, f'{name}, largest difference', abs(a - b[..., perm]).max(), case['outputs']['max_abs_diff'])
  assert abs(inter[0] - half[0]).max() > 0.1


@each('rope_rotate', 'yarn_f4/')
def test_yarn_logits(case):
  """The peer multiplies cos and sin by a, on both sides; we the logits by a squared, once."""
  outputs, a = case['outputs'], case['outputs']['attention_factor']
  train_len = case['inputs']['original_max_position_embeddings']
  q, k, scale_T = rotated(case, 'rope', call('yarn', {'factor': case['inputs']['factor']}), train_len)
  close(case, 'q_rot', a * q, outputs['q_rot'], atol=1e-5)
  close(case, 'k_rot', a * k, outputs['k_rot'], atol=1e-5)
  close(case, 'logits', scale_T[:, None] * (q @ np.swapaxes(k, 2, 3)), outputs['logits'], atol=1e-5)


@each('rope_rotate', 'cos_sin/')
def test_cos_and_sin_far_out(case):
  """Rounding a frequency to float32 turns position n by n 2**-24 radians: no float32 table does better."""
  inputs = case['inputs']
  parameters = dict(inputs['rope_parameters'])
  name = HF_METHODS[parameters.pop('rope_type')]
  train_len = parameters.pop('original_max_position_embeddings', 128)
  method = call(name, {HF_ARGUMENTS.get(key, key): value for key, value in parameters.items()})
  scheme = build(f'rope(base={inputs["base"]!r})', head_dim=inputs['head_dim'], train_len=train_len)
  (where,) = inputs['positions']
  pos = posenc.positions(method, scheme, train_len=train_len, eval_len=len(where))
  for n, cos, sin, *theirs in zip(where, *cos_sin(scheme, pos, where), case['outputs']['cos'], case['outputs']['sin']):
    close(case, f'cos at position {n}', cos, theirs[0], atol=2**-24 * n + 1e-7)
    close(case, f'sin at position {n}', sin, theirs[1], atol=2**-24 * n + 1e-7)


# Attention under a method: the weights of one head, as the output of unit values. To 1e-5.


def attention(case, method, train_len, text='rope'):
  """f32[T, T]: the weights, in tiles that the diagonal, the window and the threshold cut."""
  q, k = (jnp.asarray(np.asarray(case['inputs'][name], np.float32))[None, :, None] for name in 'qk')
  length, width = q.shape[1], q.shape[3]
  scheme = build(text, head_dim=width, train_len=train_len)
  pos = posenc.positions(method, scheme, train_len, length)
  unit = jnp.eye(length)[None, :, None]
  weights = [np.asarray(attended(q, k, unit, scheme, pos, tile=tile))[0, :, 0] for tile in (5, 64)]
  np.testing.assert_allclose(*weights, atol=1e-6)
  return weights[0]


ATTENTION = {
  'plain_rope': [('none', 16), ('rerope(w=24)', 16), ('self_extend(group=1)', 16), ('leaky_rerope(k=1)', 16),
                 ('sliding_window(window=24)', 16), ('lm_infinite(n_local=24)', 16), ('sink_window(window=24)', 16)],
  'rerope/w8/L16': [('rerope(w=8)+logn', 16)],
  'rerope/w8/L1000000': [('rerope(w=8)', 16), ('logn+rerope(w=8)', 1000000), ('leaky_rerope(w=8, k=1e6)', 16)],
  'leaky_rerope/w8/k4/L16': [('leaky_rerope(w=8, k=4)+logn', 16)],
  'leaky_rerope/w8/k4/L1000000': [('leaky_rerope(w=8, k=4)', 16)],
  'self_extend/legacy/G4/W8': [('self_extend(group=4, window=8)', 16)],
  'self_extend/legacy/G3/W8': [('self_extend(group=3, window=8)', 16)],
  'lm_infinite/local8/global3/limit8': [('lm_infinite(n_local=8, n_global=3)', 16), ('lm_infinite(n_global=3)', 8)],
}  # fmt: skip


@pytest.mark.parametrize('case', [
  pytest.param(case, id=case['id']) for case in load('attn_modifiers') if case['id'] in ATTENTION
])  # fmt: skip
def test_attention_methods(case):
  """The authors' ReRoPE and leaky ReRoPE hold log-n: at a training length of 1000000 it is 1, at 16 it is not."""
  for method, train_len in ATTENTION[case['id']]:
    # k = 1e6 is ReRoPE to 24 / 1e6 of a position.
    atol = 5e-5 if 'k=1e6' in method else 1e-5
    close(case, f'attn, our {method},', attention(case, method, train_len), case['outputs']['attn'], atol=atol)
  if 'L16' in case['id']:
    without = attention(case, ATTENTION[case['id']][0][0].removesuffix('+logn'), 16)
    assert abs(without - np.asarray(case['outputs']['attn'])).max() > 1e-3


@each('attn_modifiers', 'lm_infinite/local8/global3/limit6')
def test_lm_infinite_counts_once(case):
  """Asserted different: where its limit is below n_local, the released code adds two logits. Ours has one number."""
  theirs = np.asarray(case['outputs']['attn'])
  for n_local in (6, 8):
    ours = attention(case, f'lm_infinite(n_local={n_local}, n_global=3)', 16)
    assert abs(ours - theirs).max() > 0.01
  back = np.subtract.outer(np.arange(24), np.arange(24))
  twice = (back >= 6) & (back < 8)
  rows = ~twice.any(1)  # the first six queries have no such key
  np.testing.assert_allclose(ours[rows], theirs[rows], atol=1e-5)


@each('attn_modifiers', 'self_extend/group_distance/')
def test_self_extend_distances(case):
  """Between groups; not a function of i - j alone."""
  inputs, length = case['inputs'], case['inputs']['T']
  method = call('self_extend', {'group': inputs['group_size'], 'window': inputs['neighbor_window']})
  far = posenc.positions(method, build('rope'), 16, length).far
  distance = np.asarray(far.at_q_T)[:, None] - np.asarray(far.at_k_T)[None, :]
  theirs = np.asarray(case['outputs']['group_distance'])
  close(case, 'group_distance', lower(distance), lower(theirs))
  assert float(far.threshold) == inputs['neighbor_window']


def visible(method, length, train_len=16):
  """bool[T, T]: which keys a query gives weight to."""
  scheme = build('nope', head_dim=4)
  flat, unit = jnp.ones((1, length, 1, 4)), jnp.eye(length)[None, :, None]
  pos = posenc.positions(method, scheme, train_len, length)
  return np.asarray(attended(flat, flat, unit, scheme, pos, tile=4))[0, :, 0] > 0


@each('attn_modifiers', 'sliding_window/hf')
def test_window(case):
  inputs = case['inputs']
  ours = visible(f'sliding_window(window={inputs["W"]})', inputs['T'])
  close(case, 'mask', ours, case['outputs']['mask'])
  close(case, 'mask of a trained window', visible('none', inputs['T']) & ours, case['outputs']['mask'])


@each('attn_modifiers', 'sliding_window/mistral')
def test_window_that_sees_one_key_more(case):
  """Asserted different: Mistral's reference mask keeps W + 1 keys."""
  window, length = case['inputs']['W'], case['inputs']['T']
  theirs = np.asarray(case['outputs']['mask'], bool)
  assert (visible(f'sliding_window(window={window})', length) != theirs).any()
  close(case, 'mask of W + 1', visible(f'sliding_window(window={window + 1})', length), theirs)


@each('attn_modifiers', 'streaming_llm/')
def test_streaming_cache_is_another_method(case):
  """Asserted different: the cache holds one key more than S + R, and numbers its keys anew; ours keeps their places."""
  sinks, recent = case['inputs']['start_size'], case['inputs']['recent_size']
  steps = case['outputs']['steps']
  ours = visible(f'sink_window(sinks={sinks}, window={recent})', len(steps))
  one_more = visible(f'sink_window(sinks={sinks}, window={recent + 1})', len(steps))
  for step in steps:
    kept = np.flatnonzero(one_more[step['t']])
    assert kept.tolist() == step['kept_token_ids']
    assert step['key_positions_used'] == list(range(len(kept)))
  last = steps[-1]
  assert ours[-1].sum() == sinks + recent == len(last['kept_token_ids']) - 1
  pos = posenc.positions(f'sink_window(sinks={sinks}, window={recent})', build('rope'), 16, len(steps))
  assert pos.at_T[-1] == last['t'] > last['query_position_used'] and pos.far is None


@each('attn_modifiers', 'logn/')
def test_logn(case):
  """Su counts positions from 0, Qwen from 1 and without its i <= L."""
  inputs = case['inputs']
  where = np.asarray(inputs['positions'][0]) if 'positions' in inputs else np.asarray(inputs['i']) - 1
  train_len = inputs.get('training_length', inputs.get('seq_length'))
  pos = posenc.positions('logn', build('nope', train_len=train_len), train_len, int(where.max()) + 1)
  close(case, 'q_scale', np.asarray(pos.logit_scale_T)[where], case['outputs']['q_scale'], rtol=2e-7)


# Biases.


@each('alibi_slopes', 'slopes/')
def test_alibi_slopes(case):
  """Value and order, for powers of two and other numbers of heads: five implementations agree."""
  heads = case['inputs']['n_heads']
  assert len(case['outputs']) == 5
  for peer, theirs in case['outputs'].items():
    float32 = peer in ('bloom_hf', 'mpt_llm_foundry')
    close(case, f'slopes of {peer}', slopes(heads), theirs, rtol=1e-6 if float32 else 1e-12)


@each('alibi_slopes', 'bias/')
def test_alibi_bias(case):
  """BLOOM and MPT add slope times key index, a form that softmax cannot tell from ours.

  So theirs is compared after subtracting each row's diagonal. The others are symmetric: we compare
  keys up to the query.
  """
  heads, length = case['inputs']['H'], case['inputs']['T']
  at_T = jnp.arange(length, dtype=jnp.float32)
  ours = np.asarray(build('alibi', heads=heads).bias(at_T, at_T))
  theirs = np.asarray(case['outputs']['alibi'])
  if theirs.shape == (heads, 1, length):
    theirs = theirs - np.swapaxes(theirs, 1, 2)
  causal = np.tril(np.ones((length, length), bool))
  close(case, 'bias', ours[:, causal], theirs.reshape(ours.shape)[:, causal], atol=1e-6)
  assert (ours[:, ~causal] == 0).all()


@each('t5_buckets', 'causal/')
def test_t5_buckets(case):
  """From the table, and where there is a full list through `bias`, with the bucket's number for its value."""
  num, longest = case['inputs']['num_buckets'], case['inputs']['max_distance']
  table = buckets(num, longest)
  first = [int(np.argmax(table == b)) if (table == b).any() else None for b in range(num)]
  theirs = case['outputs']['first_distance_of_bucket']
  assert first == theirs, f'{case["id"]}: first distances of the buckets, {case["peer"]} {case["version"]}'
  between = np.searchsorted(theirs, np.arange(longest + 1), side='right') - 1
  close(case, 'bucket of a distance, from the first distances,', table, between)
  if 'bucket_of_distance_0_to_4096' in case['outputs']:
    scheme = build(f't5(num_buckets={num}, max_distance={longest})', heads=2)
    scheme.table[...] = jnp.asarray(np.arange(num, dtype=np.float32)[:, None] * [1, -1], jnp.float32)
    plus, minus = np.asarray(scheme.bias(jnp.arange(4097.0), jnp.zeros(1)))[..., 0]
    np.testing.assert_array_equal(plus, -minus)
    close(case, 'bucket_of_distance_0_to_4096', plus, case['outputs']['bucket_of_distance_0_to_4096'])


@each('t5_buckets', 'bidirectional/')
def test_t5_buckets_both_ways(case):
  """Half of the buckets for each direction, later keys in the upper half: the causal table serves both."""
  half, longest = case['inputs']['num_buckets'] // 2, case['inputs']['max_distance']
  rel = np.arange(-300, 301)
  ours = buckets(half, longest)[np.minimum(abs(rel), longest)] + half * (rel > 0)
  close(case, 'bucket', ours, case['outputs']['bucket'])


def lower(array):
  """Keys up to their query, as a list: what peers compute in the other triangle is masked, and differs."""
  array = np.asarray(array, np.float64)
  return array[..., np.tril(np.ones(array.shape[-2:], bool))]


def bias(scheme, length):
  at_T = jnp.arange(length, dtype=jnp.float32)
  return np.asarray(scheme.bias(at_T, at_T))


def put(scheme, **params):
  for name, value in params.items():
    param = getattr(scheme, name)
    assert np.shape(value) == param[...].shape, name
    param[...] = jnp.asarray(np.asarray(value, np.float32))
  return scheme


@each('bias_kerple_fire_sandwich', 'kerple_')
def test_kerple(case):
  """With a parameter on each side of its bounds. r1 and r2 are `bias_p` and `bias_a`; in the power form they swap."""
  inputs, outputs = case['inputs'], case['outputs']
  r1, r2, most = ('bias_p', 'bias_a', None) if case['id'] == 'kerple_log' else ('bias_a', 'bias_p', 2.0)
  scheme = put(build(case['id'], heads=3), r1=inputs[r1], r2=inputs[r2])
  close(case, 'r1 in force', bounded(scheme.r1[...]), outputs[f'{r1}_after'], rtol=1e-7)
  close(case, 'r2 in force', bounded(scheme.r2[...], most), outputs[f'{r2}_after'], rtol=1e-7)
  close(case, 'bias', lower(bias(scheme, inputs['T'])), lower(outputs['bias']), rtol=1e-6, atol=1e-6)


@each('bias_kerple_fire_sandwich', 'fire/')
def test_fire(case):
  """Theirs ends in a bias per head, which softmax cannot see and ours leaves out. DAPE's threshold is init_L // 2."""
  inputs, outputs = case['inputs'], case['outputs']
  weights = {c['id']: c for c in load('bias_kerple_fire_sandwich')}['fire/c0.1/L4/mult1']['inputs']
  width, heads = np.shape(weights['w1'])[0], np.shape(weights['w2'])[0]
  scheme = build(f'fire(init_len={inputs.get("effective_L", inputs["init_L"])}, width={width})', heads=heads)
  put(
    scheme,
    w1=np.asarray(weights['w1'])[:, 0],
    b1=weights['b1'],
    w2=np.transpose(weights['w2']),
    c=inputs['c'],
    l_mult=inputs.get('L_multiplier', 1.0),
  )
  ours = bias(scheme, inputs['T']) + np.asarray(weights['b2'])[:, None, None]
  theirs = outputs.get('bias', outputs.get('bias_lower_triangle'))
  close(case, 'bias', lower(ours), lower(theirs), atol=2e-6)


@each('bias_kerple_fire_sandwich', 'sandwich/')
def test_sandwich(case):
  """To 1e-6 of d/2 waves over the first head's ratio: float32 keeps little more (theirs is 1.3e-5 from float64)."""
  inputs, theirs = case['inputs'], np.asarray(case['outputs']['bias_by_distance'])
  scheme = build(f'sandwich(d={inputs["d_bar"]})', heads=inputs['H'])
  ours = bias(scheme, theirs.shape[1])
  atol = 1e-6 * inputs['d_bar'] / 2 * inputs['H'] / 8
  close(case, 'bias of the last query', ours[:, -1, ::-1], theirs, atol=atol)
  by_column = scheme.bias(jnp.arange(64.0) + 4032, jnp.full(1, 4032.0))[..., 0]
  close(case, 'bias, one key, far out,', by_column, theirs, atol=atol)
  from_0 = bias(build(f'sandwich(d={inputs["d_bar"]}, first_index=0)', heads=inputs['H']), 64)
  assert abs(from_0[:, -1, ::-1] - theirs).max() > 0.1


# Schemes that read the queries.


@each('shaw', 'index/')
def test_shaw_rows(case):
  """Key minus query, clipped, plus k. Rows above k are for later keys: a causal table has none."""
  length, clip = case['inputs']['T'], case['inputs']['max_relative_position']
  at_T = jnp.arange(length, dtype=jnp.float32)
  rows = build(f'shaw(clip={clip})').row(at_T, at_T)
  theirs = np.asarray(case['outputs']['index'])
  close(case, 'index', lower(rows), lower(theirs))
  assert (theirs[np.triu_indices(length, 1)] > clip).all()


@each('shaw', 'attention/')
def test_shaw_attention(case):
  """Logits, probabilities and outputs with both tables; their q comes scaled."""
  inputs, outputs = case['inputs'], case['outputs']
  q, k, v = (jnp.asarray(swap(inputs[name])) for name in 'qkv')
  clip, length = inputs['k_clip'], q.shape[1]
  scheme = build(f'shaw(clip={clip})', head_dim=4, heads=2)
  put(scheme, **{name: np.asarray(inputs[name])[: clip + 1] for name in ('key_table', 'value_table')})
  scheme.q_scale = 1.0
  pos = posenc.positions('none', scheme, 128, length)
  raw = jnp.einsum('BtNH,BsNH->BNts', q, k)
  logits, _ = scheme.score(raw, q, k, pos.at_T, pos.at_T, (), (), ())
  close(case, 'logits', lower(logits), lower(outputs['logits']), atol=1e-5)
  p = np.tril(np.exp(np.asarray(logits, np.float64)))
  close(case, 'attn_causal', p / p.sum(-1, keepdims=True), outputs['attn_causal'], atol=1e-5)
  for tile in (2, 4, 8):
    close(case, f'out, tile {tile}', swap(attended(q, k, v, scheme, pos, tile=tile)), outputs['out'], atol=1e-5)


def cope(case, table, div):
  scheme = build(f'cope(npos_max={case["inputs"]["npos"]}, div={div})', head_dim=4)
  return put(scheme, table=table)


def cope_score(scheme, q, logits):
  """Of whole matrices [B, T, T] of one head, with the scaled queries that `attend` would hand over."""
  q = jnp.asarray(q)[:, :, None] * scheme.q_scale
  at_T = jnp.arange(q.shape[1], dtype=jnp.float32)
  return np.asarray(scheme.score(logits[:, None], q, q, at_T, at_T, (), (), scheme.init_carry(q))[0])[:, 0]


@each('cope', 'ram/')
def test_cope_authors(case):
  """Probabilities (as the output of unit values) and outputs; tiles cut the sum over keys."""
  inputs, outputs = case['inputs'], case['outputs']
  q, k, v = (jnp.asarray(inputs[name])[:, :, None] for name in 'qkv')
  scheme = cope(case, np.asarray(inputs['pos_emb'])[0].T, div=not inputs['cope_nodiv'])
  pos = posenc.positions('none', scheme, 128, 7)
  unit = jnp.broadcast_to(jnp.eye(7)[None, :, None], (2, 7, 1, 7))
  for tile in (2, 3, 8):
    attn, out = (attended(q, k, values, scheme, pos, tile=tile)[:, :, 0] for values in (unit, v))
    close(case, f'attn, tile {tile}', attn, outputs['attn'], atol=1e-5)
    close(case, f'out, tile {tile}', out, outputs['out'], atol=1e-5)


@each('cope', 'x_transformers/', 'dape/')
def test_cope_others(case):
  """Both add q.e[p] undivided, to scaled logits; x-transformers hands it back alone."""
  inputs, outputs = case['inputs'], case['outputs']
  theirs = 'cope_logits' if 'cope_logits' in outputs else 'attn_logits_plus_cope'
  table = np.asarray(inputs['pos_emb'])
  scheme = cope(case, table if table.ndim == 2 else table[0].T, div=False)
  sim = np.asarray(inputs['sim'], np.float32)
  logits = jnp.where(np.tri(7) > 0, sim, MASKED)
  ours = cope_score(scheme, inputs['q'], logits) - (sim if theirs == 'cope_logits' else 0)
  close(case, theirs, lower(ours), lower(outputs[theirs]), atol=1e-5)


@each('cope', 'x_transformers_unmasked_gates/')
def test_cope_that_leaks(case):
  """Asserted different: unmasked, keys after the query are counted. Given the same logits, so would ours."""
  inputs = case['inputs']
  source = {c['id']: c for c in load('cope')}[f'x_transformers/npos{inputs["npos"]}']
  scheme = cope(case, source['inputs']['pos_emb'], div=False)
  sim = jnp.einsum('BtH,BsH->Bts', *(jnp.asarray(inputs[name]) for name in 'qk')) / 2
  leaking = cope_score(scheme, inputs['q'], sim) - np.asarray(sim)
  close(case, 'cope_logits', lower(leaking), lower(case['outputs']['cope_logits']), atol=1e-5)
  masked = jnp.where(np.tri(7) > 0, sim, MASKED)
  ours = cope_score(scheme, inputs['q'], masked) - np.asarray(sim)
  assert abs(lower(ours) - lower(case['outputs']['cope_logits'])).max() > 0.5


# Schemes that learn where to look from the text.


@each('fox_pope_dape', 'fox/fla')
def test_fox_attention(case):
  """Gates, output and the gates' gradients, of grouped heads; theirs is a plain cumulative sum, good at 9 tokens."""
  inputs, outputs = case['inputs'], case['outputs']
  x, q, k, v, do = (jnp.asarray(inputs[name], jnp.float32) for name in ('x', 'q', 'k', 'v', 'do'))
  scheme = build('fox', head_dim=4, heads=4, d_model=16)
  put(scheme, w=np.transpose(inputs['w']), b=inputs['b'])
  pos = posenc.positions('none', scheme, 128, 9)
  log_f = np.diff(sum(scheme.token_state(x, pos)), axis=1, prepend=0)
  close(case, 'log_f', log_f, outputs['log_f'], atol=2e-6)
  graphdef, params = nnx.split(scheme)

  def loss(params, tile):
    scheme = nnx.merge(graphdef, params)
    o = attend(q, k, v, scheme, pos, scheme.token_state(x, pos), tile=tile)
    return (o * do).sum(), o

  for tile in (2, 4, 16):
    grads, o = jit(jax.grad(loss, has_aux=True), static_argnums=1)(params, tile)
    close(case, f'o, tile {tile}', o, outputs['o'], atol=5e-6)
    close(case, f'gradient of w, tile {tile}', np.transpose(grads['w'][...]), outputs['dw'], atol=2e-5)
    close(case, f'gradient of b, tile {tile}', grads['b'][...], outputs['db'], atol=2e-5)


@each('fox_pope_dape', 'fox/x_transformers')
def test_fox_bias(case):
  """c_i - c_j, what is added to logits of 0. It starts from b = 5, the authors from 0."""
  inputs = case['inputs']
  x = jnp.asarray(inputs['x'], jnp.float32)
  scheme = build('fox', heads=3, d_model=6)
  put(scheme, w=np.transpose(inputs['w']), b=inputs['b'])
  pos = posenc.positions('none', scheme, 128, 7)
  state, q = scheme.token_state(x, pos), jnp.zeros((2, 7, 3, 32))
  ours, _ = scheme.score(jnp.zeros((2, 3, 7, 7)), q, q, pos.at_T, pos.at_T, state, state, ())
  close(case, 'bias', lower(ours), lower(case['outputs']['bias']), atol=5e-6)


@each('fox_pope_dape', 'fox/decay_time/')
def test_fox_decay_time(case):
  inputs = case['inputs']
  arguments = {'decay_time': (inputs['decay_time_min'], inputs['decay_time_max'])}
  scheme = build(call('fox', arguments), heads=inputs['num_heads'])
  close(case, 'bias', scheme.b[...], case['outputs']['bias'], rtol=2e-6, atol=2e-6)
  close(case, 'log f', jax.nn.log_sigmoid(scheme.b[...]), case['outputs']['log_f'], rtol=2e-6)


@each('fox_pope_dape', 'pope/')
def test_pope(case):
  """Logits and outputs. The phase is on their keys and on our queries, so rotated vectors agree where it is 0."""
  inputs, outputs = case['inputs'], case['outputs']
  q, k, v = (jnp.asarray(swap(inputs[name])) for name in 'qkv')
  heads, length, width = q.shape[2], q.shape[1], inputs['dim']
  scheme = put(build(f'pope(base={float(inputs["base"])!r})', head_dim=width, heads=heads), phase=inputs['bias'])
  close(case, 'inv_freq', scheme.inv_freq_P, outputs['inv_freq'], rtol=1e-6)
  in_force = bounded(scheme.phase[...], 0.0, -2 * np.pi)
  close(case, 'bias in force', in_force, outputs['bias_in_force'], rtol=1e-7)
  pos = posenc.positions('none', scheme, 128, length)
  turned = [swap(x) for x in scheme.rotate(q, k, pos)]
  close(case, 'logits', turned[0] @ np.swapaxes(turned[1], 2, 3) * scheme.q_scale, outputs['logits'], atol=5e-6)
  for tile in (2, 4, 8):
    close(case, f'o, tile {tile}', swap(attended(q, k, v, scheme, pos, tile=tile)), outputs['o'], atol=5e-6)
  assert ('q_rot' in outputs) == (not np.any(inputs['bias']))
  for name, ours in zip(('q_rot', 'k_rot'), turned):
    if name in outputs:
      close(case, name, ours, outputs[name], atol=2e-6)


@each('fox_pope_dape', 'dape/')
def test_dape(case):
  """Their last bias is one number per head, which softmax cannot see and ours leaves out; FIRE's becomes part of b1."""
  inputs, outputs = case['inputs'], case['outputs']
  x, name = jnp.asarray(inputs['x'], jnp.float32), case['id'].split('/')[1]
  heads, length, width = x.shape[1], x.shape[2], np.shape(inputs['b1'])[0]
  scheme = build(f'dape(bias={name!r}, width={width})', heads=heads)
  w1, b1, last = np.transpose(inputs['w1']), np.asarray(inputs['b1']), np.asarray(inputs['b2'])
  if name == 'kerple_log':
    put(scheme.bias, r1=inputs['bias_p'], r2=inputs['bias_a'])
  if name == 'fire':
    scheme.bias = build(f'fire(init_len={inputs["init_L"]}, width={width})', heads=heads)
    fire_w1 = np.asarray(inputs['fire_w1'])[:, 0]
    put(scheme.bias, w1=fire_w1, b1=inputs['fire_b1'], w2=np.transpose(inputs['fire_w2']), c=inputs['c'])
    b1, last = b1 + np.asarray(inputs['fire_b2']) @ w1[heads:], last + np.asarray(inputs['fire_b2'])
  put(scheme, w1=w1, b1=b1, w2=np.transpose(inputs['w2']))
  at_T, q = jnp.arange(length, dtype=jnp.float32), jnp.zeros((2, length, heads, 32))
  ours, _ = scheme.score(jnp.where(np.tri(length) > 0, x, MASKED), q, q, at_T, at_T, (), (), ())
  close(case, 'logits', lower(ours) + last[:, None], lower(outputs['logits']), atol=5e-6)


# Sinusoids.

SINUSOIDAL = {
  'xlm_interleaved': 'sinusoidal(layout="interleaved", exponent="paper")',
  'gptj_concat': 'sinusoidal(layout="concat", exponent="paper")',
  'deepmind_concat': 'sinusoidal(layout="concat", exponent="paper")',
  'fairseq': 'sinusoidal(layout="concat", exponent="t2t")',
  'tensor2tensor': 'sinusoidal(layout="concat", exponent="t2t")',
}


@each('sinusoidal')
def test_sinusoidal(case):
  """The table is what `embed` adds to zeros. An odd width ends in a column of zeros in the released code."""
  inputs = case['inputs']
  where = inputs.get('rows', list(range(inputs.get('n', 0))))
  scheme = build(SINUSOIDAL[case['id'].split('/')[0]], d_model=inputs['d'])
  pos = at(posenc.positions('none', scheme, train_len=128, eval_len=len(where)), where)
  added = scheme.embed(jnp.zeros((1, len(where), inputs['d'])), pos)[0]
  for n, ours, theirs in zip(where, np.asarray(added), case['outputs']['table']):
    close(case, f'row of position {n}', ours, theirs, atol=2e-7 + 2**-24 * n)


# Products over distance.


def torch_randn(state, shape):
  """`torch.randn` of at least 16 float32 on a CPU: Box-Muller on Mersenne Twister, eight radii, then eight angles."""
  u = (state.randint(0, 2**32, np.prod(shape), np.uint32) % 2**24).astype(np.float32) / 2**24
  radius, angle = np.sqrt(-2 * np.log1p(-u.reshape(-1, 2, 8)[:, 0])), 2 * np.pi * u.reshape(-1, 2, 8)[:, 1]
  return np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).reshape(shape)


@each('decay_curves')
def test_decay(case):
  """The curves of scripts/plot_decay.py, on the same 80 random q and k.

  Their key stands `distance` after their query: our query after our key is theirs with the two swapped. An angle in
  float32 is off by 2**-14 rad at position 1024, and a curve sums d/2 pairs: 2e-6 d is ten times what they show.
  """
  inputs, outputs = case['inputs'], case['outputs']
  d, where = inputs['d'], inputs['distances']
  state = np.random.RandomState(0)
  q, k = (torch_randn(state, (80, d)) for _ in range(2))
  close(case, 'random_q', q[:2], outputs['random_q'], atol=1e-6)
  close(case, 'random_k', k[:2], outputs['random_k'], atol=1e-6)

  rope = build(f'rope(base={float(inputs["base"])!r})', head_dim=d)
  pos = posenc.positions('none', rope, train_len=128, eval_len=1025)
  independent = plot_decay.products(rope, k, q, pos)[:, where]
  close(case, 'mean of 80', independent.mean(0), outputs['rope_independent_qk_mean80'], atol=2e-6 * d)
  close(case, 'rms of 80', (independent**2).mean(0) ** 0.5, outputs['rope_independent_qk_rms80'], atol=2e-6 * d)
  same = plot_decay.products(rope, q, q, pos)[:, where]
  close(case, 'mean of 80, q = k', same.mean(0), outputs['rope_same_qk_mean80'], atol=2e-6 * d)

  ours = plot_decay.sinusoidal(build('sinusoidal', d_model=d), 1025)
  close(case, 'PE.PE', ours, outputs['sinusoidal_pe_dot'], atol=2e-6 * d)
  apart = np.abs(plot_decay.kernel(rope, pos) * d - 2 * np.asarray(outputs['sinusoidal_pe_dot'])).max()
  assert apart < 2 * outputs['rope_ones_dot_equals_2x_of_that_max_abs_diff'], 'RoPE of q = k = 1 is twice PE.PE'

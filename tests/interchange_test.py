"""Hugging Face's rope settings: what they say is what transformers computes, and what we write says the same."""

import json

import numpy as np
import pytest
from flax import nnx

import posenc
from configs import smoke
from configs.schema import Config
from golden_test import close, each, load
from posenc import interchange
from posenc.interchange import Rope, ours, read, write
from spec import SpecError


def build(rope, head_dim, train_len):
  return posenc.build(rope.scheme, heads=1, head_dim=head_dim, d_model=8, train_len=train_len, rngs=nnx.Rngs(0))


def config_of(inputs):
  """As a config.json has it: everything beside the dict but the dict."""
  config = {k: v for k, v in inputs.items() if k not in ('seq_len', 'head_dim')}
  factors = {k: config.pop(k) for k in ('short_factor', 'long_factor') if k in config}  # Phi-3, its first form
  return config | {'rope_scaling': {'type': 'su', **factors}} if factors else config


def check(case, rope):
  inputs, outputs = case['inputs'], case['outputs']
  length = rope.original or 128
  scheme = build(rope, inputs['head_dim'], length)
  pos = posenc.positions(rope.method, scheme, train_len=length, eval_len=inputs.get('seq_len') or length)
  close(case, f'inv_freq, our {rope.method},', pos.inv_freq_P, outputs['inv_freq'], rtol=2e-6, atol=0)
  close(case, f'inv_freq, our {rope.method},', pos.inv_freq_P, outputs['inv_freq'], atol=1e-6)
  squared = np.asarray(pos.logit_scale_T * pos.key_scale_T)
  close(case, 'attention factor', np.sqrt(squared[0]), outputs['attention_factor'], rtol=1e-6)


@each('rope_inv_freq_hf')
def test_a_dict_says_what_transformers_computes_from_it(case):
  (rope,) = read(config_of(case['inputs'])).values()
  check(case, rope)
  # And back, in the old form; which says the same again, to the last bit.
  written = json.loads(json.dumps(write(rope, case['inputs']['head_dim'])))
  (again,) = read(written).values()
  assert again == rope
  check(case, again)


def test_all_types_are_there():
  kinds = {c['inputs'].get('rope_parameters', {}).get('rope_type', 'none') for c in load('rope_inv_freq_hf')}
  assert kinds - {'none'} == set(interchange._TYPES)


def test_old_and_new_keys_say_the_same():
  new = read(
    {'rope_parameters': {'rope_type': 'linear', 'factor': 2.0, 'rope_theta': 5e5}, 'max_position_embeddings': 64}
  )
  old = read({'rope_scaling': {'type': 'linear', 'factor': 2}, 'rope_theta': 500000, 'max_position_embeddings': 64})
  assert new == old == {'': Rope(base=500000.0, method='pi(factor=2.0)', original=64)}
  assert read({}) == read({'rope_scaling': None, 'hidden_size': 64}) == {'': Rope()}
  neox = read({'rotary_pct': 0.25, 'rotary_emb_base': 1000})['']
  assert neox == Rope(base=1000.0, fraction=0.25) and neox.scheme == 'rope(base=1000.0, fraction=0.25)'


@pytest.mark.parametrize('kind', ['yarn', 'longrope'])
def test_a_factor_is_implied_by_two_lengths_and_one_that_is_given_is_used(kind):
  lists = {'short_factor': [1.0, 1.0], 'long_factor': [1.0, 2.0]} if kind == 'longrope' else {}
  dict_ = {'rope_type': kind, 'original_max_position_embeddings': 32, **lists}
  (implied,) = read({'rope_parameters': dict_, 'max_position_embeddings': 128}).values()
  (given,) = read({'rope_parameters': {**dict_, 'factor': 3.0}, 'max_position_embeddings': 128}).values()
  assert 'factor=4.0' in implied.method and 'factor=3.0' in given.method and implied.original == given.original == 32


def test_a_dict_for_each_kind_of_layer():
  """Gemma 3's, in both forms, and layers without rotation."""
  full = {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6}
  new = {'sliding_attention': {'rope_type': 'default', 'rope_theta': 1e4}, 'full_attention': full}
  old = {'rope_theta': 1e6, 'rope_local_base_freq': 1e4, 'rope_scaling': {'rope_type': 'linear', 'factor': 8.0}}
  told = read({'rope_parameters': new, 'max_position_embeddings': 1024})
  assert told == read({**old, 'max_position_embeddings': 1024})
  assert told['full_attention'] == Rope(base=1e6, method='pi(factor=8.0)', original=1024)
  assert told['sliding_attention'] == Rope(original=1024)
  assert read({'rope_parameters': {**new, 'chunked_attention': None}})['chunked_attention'] is None


YARN = {'rope_type': 'yarn', 'factor': 4.0}
LISTS = {'short_factor': [1.0, 1.0], 'long_factor': [1.0, 2.0], 'factor': 4.0}
BAD = {
  'unknown key': ({**YARN, 'beta_fats': 32}, 'beta_fats'),
  'key of another type': ({'rope_type': 'linear', 'factor': 2.0, 'beta_fast': 32}, 'beta_fast'),
  'attn_factor of llama.cpp': ({**YARN, 'attn_factor': 1.0}, 'attn_factor'),
  'unknown type': ({'rope_type': 'yran', 'factor': 2.0}, "'yran'.*did you mean 'yarn'"),
  'two types': ({'rope_type': 'yarn', 'type': 'linear', 'factor': 2.0}, 'rope_type, type'),
  'no type': ({'factor': 4.0}, 'rope_type'),
  'no factor': ({'rope_type': 'linear'}, 'factor'),
  'no factor implied': ({'rope_type': 'yarn'}, 'factor'),
  'factor is a string': ({'rope_type': 'linear', 'factor': '2'}, 'factor'),
  'factor is a bool': ({'rope_type': 'linear', 'factor': True}, 'factor'),
  'factor is no float': ({'rope_type': 'linear', 'factor': 10**400}, 'factor'),
  'factor below 1': ({'rope_type': 'linear', 'factor': 0.5}, 'factor'),
  'factor is NaN': ({'rope_type': 'dynamic', 'factor': float('nan')}, 'factor'),
  'betas the other way': ({**YARN, 'beta_fast': 1, 'beta_slow': 32}, 'beta_fast'),
  'beta of 0': ({**YARN, 'beta_slow': 0}, 'beta_slow'),
  'one mscale': ({**YARN, 'mscale': 0.707}, 'mscale'),
  'truncate is a number': ({**YARN, 'truncate': 0}, 'truncate'),
  'attention factor of 0': ({**YARN, 'attention_factor': 0.0}, 'attention_factor'),
  'original is a float': ({**YARN, 'original_max_position_embeddings': 4096.0}, 'original_max_position_embeddings'),
  'llama3 lacks high': ({'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0}, 'high_freq_factor'),
  'llama3 the other way': (
    {'rope_type': 'llama3', 'factor': 8.0, 'low_freq_factor': 4.0, 'high_freq_factor': 1.0}, 'low_freq_factor'),
  'longrope lacks long': ({'rope_type': 'longrope', 'factor': 4.0, 'short_factor': [1.0]}, 'long_factor'),
  'longrope of two lengths': ({'rope_type': 'su', **LISTS, 'long_factor': [1.0]}, 'long_factor'),
  'longrope below 1': ({'rope_type': 'su', **LISTS, 'long_factor': [1.0, 0.5]}, 'long_factor'),
  'longrope of strings': ({'rope_type': 'su', **LISTS, 'long_factor': ['1', '2']}, 'long_factor'),
  'short_mscale of Phi-3-small': ({'rope_type': 'su', **LISTS, 'short_mscale': 1.2}, 'short_mscale'),
  'base of 1': ({'rope_type': 'default', 'rope_theta': 1.0}, 'rope_theta'),
  'a share above 1': ({'rope_type': 'default', 'partial_rotary_factor': 1.5}, 'partial_rotary_factor'),
  'sections': ({'rope_type': 'default', 'mrope_section': [16, 24, 24]}, 'mrope_section'),
  'a number among dicts': ({'full_attention': YARN, 'factor': 2.0}, 'factor'),
  'a bad dict of a kind': ({'full_attention': {'rope_type': 'linear'}}, 'full_attention.*factor'),
}  # fmt: skip


@pytest.mark.parametrize('case', BAD)
def test_a_malformed_dict_is_refused_by_name(case):
  settings, named = BAD[case]
  with pytest.raises(SpecError, match=named) as told:
    read({'rope_parameters': settings})
  assert '\n' not in str(told.value)


BESIDE = {
  'two bases': ({'rope_theta': 1e4, 'rope_parameters': {'rope_theta': 1e6}}, 'rope_theta'),
  'two originals': (
    {'original_max_position_embeddings': 64, 'rope_scaling': {**YARN, 'original_max_position_embeddings': 32}},
    'original_max_position_embeddings'),
  'two dicts': ({'rope_scaling': YARN, 'rope_parameters': {'rope_type': 'default'}}, 'rope_parameters, rope_scaling'),
  'no dict': ({'rope_scaling': 'yarn'}, 'rope_scaling'),
  'false': ({'rope_scaling': False}, 'rope_scaling'),
  'dynamic with an original': (
    {'max_position_embeddings': 64, 'rope_scaling': {'type': 'dynamic', 'factor': 2.0,
     'original_max_position_embeddings': 32}}, 'original_max_position_embeddings'),
  'a key nobody knows': ({'rope_ratio': 2.0}, 'rope_ratio'),
  'gemma in both forms': ({'rope_local_base_freq': 1e4, 'rope_parameters': {'full_attention': {}}}, 'rope_local_base'),
}  # fmt: skip


@pytest.mark.parametrize('case', BESIDE)
def test_what_is_said_twice_is_refused_by_name(case):
  config, named = BESIDE[case]
  with pytest.raises(SpecError, match=named):
    read(config)


def test_a_method_by_its_dict():
  assert ours('hf:{"rope_type": "yarn", "factor": 4, "beta_fast": 32}') == 'yarn(factor=4.0)'
  assert ours('yarn(factor=4)') == 'yarn(factor=4)'
  (yarn, logn) = posenc.check_method('hf:{"type": "yarn", "factor": 4.0}@rope + logn')
  assert (yarn.name, yarn.at, logn.name) == ('yarn', 'rope', 'logn')
  scheme = build(Rope(), 32, 128)
  told = 'hf:{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 10000}'
  got, want = (posenc.positions(m, scheme, 128, 512) for m in (told, 'yarn(factor=4.0)'))
  np.testing.assert_array_equal(got.inv_freq_P, want.inv_freq_P)
  np.testing.assert_array_equal(got.logit_scale_T, want.logit_scale_T)


@pytest.mark.parametrize(
  ('text', 'named'),
  [
    ('hf:{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}', 'original_max_position'),
    ('hf:{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}', 'rope_theta'),
    ('hf:{"rope_type": "linear", "factor": 4.0, "partial_rotary_factor": 0.5}', 'partial_rotary_factor'),
    ('hf:{"rope_type": "linear", "factor": 4.0, "factor": 8.0}', 'factor: given twice'),
    ('hf:{"rope_type": "linear", factor: 4.0}', 'no JSON'),
    ('hf:{"rope_type": "linear", "factor": 4.0} logn', "'logn'"),
    ('hf:["linear"]', 'a dict such as'),
    ('hf:{"full_attention": {"rope_type": "linear", "factor": 4.0}}', 'full_attention'),
  ],
)
def test_a_dict_that_is_no_method_is_refused(text, named):
  with pytest.raises(SpecError, match=named):
    posenc.positions(text, build(Rope(), 32, 128), 128, 512)


def test_a_config_keeps_our_name_of_it():
  recipe = smoke.get_config()
  recipe.methods = ('none', 'hf:{"rope_type": "linear", "factor": 2}', 'pi(factor=2.0)')
  config = Config.from_dict(recipe.to_dict())
  assert config.methods == ('none', 'pi(factor=2.0)')
  recipe.methods = ('hf:{"rope_type": "linear"}',)
  with pytest.raises(SpecError, match='^config.methods: .*factor'):
    Config.from_dict(recipe.to_dict())


FORMS = {
  'ntk(factor=4)': 'default', 'dynamic_ntk': 'dynamic', 'ntk_by_parts(factor=8)': 'yarn', 'pi(factor=2)': 'linear',
  'ntk_by_parts(factor=8, ramp="rotations")': 'llama3', 'yarn(factor=4, mscale=1.0, mscale_all_dim=0.5)': 'yarn',
  'longrope(long=(1.0, 2.0), factor=4, attention="yarn")': 'longrope',
  'longrope(long=(1.0, 2.0), factor=4, attention=1.5)': 'longrope',
}  # fmt: skip


@pytest.mark.parametrize('method', FORMS)
def test_a_method_of_ours_by_their_form_is_the_same_arrays(method):
  """Also where the form goes by another name there."""
  width = 4 if 'longrope' in method else 32
  written = write(Rope(method=method, original=128), width)
  assert (written['rope_scaling'] or {}).get('rope_type', 'default') == FORMS[method]
  (back,) = read(written).values()
  for length in (64, 512):
    got, want = (
      posenc.positions(m, build(r, width, 128), 128, length) for m, r in ((back.method, back), (method, Rope()))
    )
    np.testing.assert_allclose(got.inv_freq_P, want.inv_freq_P, rtol=1e-6)
    scales = [p.logit_scale_T * p.key_scale_T for p in (got, want)]
    np.testing.assert_allclose(*scales, rtol=1e-6)


@pytest.mark.parametrize(
  'method',
  [
    'logn', 'pi', 'ntk', 'yarn', 'dynamic_pi', 'dynamic_yarn', 'dynamic_ntk(factor=8)', 'yarn(factor=4)+logn', 'rerope',
    'sliding_window', 'yarn(factor=4, ramp="rotations")', 'longrope(long=(1.0, 2.0), factor=4, onset=4)', 'resonance',
    'ntk_mixed_su(factor=4)', 'dynamic_ntk_qwen', 'ntk_by_parts_v0(factor=4)',
  ],
)  # fmt: skip
def test_a_method_without_a_form_is_refused_by_name(method):
  with pytest.raises(SpecError, match=rf'method .?{posenc.check_method(method)[0].name}.*no form'):
    write(Rope(method=method, original=128), 32)
  with pytest.raises(SpecError, match='proportion'):
    write(Rope(method='yarn(factor=2)', original=128, proportion=0.5), 32)

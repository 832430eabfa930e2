"""Wrong versions of the shipped code, each of which must turn the tests that it names red.

A golden file or an invariant proves something only if it can fail. The errors below were made in released libraries and
in tutorials, or are one keystroke away from what is shipped here. The wrong source is imported in place of the right
one, in a process of its own, and every test named beside it must fail by an assertion. A survivor is a hole in the
tests, not in the code.
"""

import contextlib
import functools
import importlib
import io
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
TIMEOUT = 600  # seconds for one mutant's tests


class Mutant(NamedTuple):
  """`old`, which stands in `file` exactly once, replaced by `new`. A new mutant is one entry of MUTANTS.

  why: who made the error, or what it does. tests: 'golden::name[case]' is that test of tests/golden_test.py; without a
  case, any of its cases may be the one that fails. more: further edits of the file, where one does not make the error.
  """

  name: str
  why: str
  file: str
  old: str
  new: str
  tests: tuple[str, ...]
  more: tuple[tuple[str, str], ...] = ()

  @property
  def edits(self) -> tuple[tuple[str, str], ...]:
    return ((self.old, self.new), *self.more)

  def source(self) -> str:
    text = (ROOT / self.file).read_text()
    for old, new in self.edits:
      text = text.replace(old, new)
    return text


def _logits(*cases: str) -> tuple[str, ...]:
  return tuple(f'pretrained::test_logits_are_those_of_transformers[{case}]' for case in cases)


MUTANTS = [
  # Frequencies.
  Mutant('rope_lowest_is_one_over_base', 'tutorials: the lowest is 1/base, 2p/(d - 2) for 2p/d', 'posenc/base.py',
         'max(self.rot, 1))', 'max(self.rot - 2, 1))',
         ('golden::test_hugging_face[tiny32/default]', 'scaling::test_lowest_frequency_is_not_one_over_base')),
  Mutant('rope_exponent_halved', 'p/d for 2p/d: the slower half of the frequencies is missing', 'posenc/base.py',
         'np.arange(0, self.rot, 2, dtype=np.float64)', 'np.arange(self.rot // 2, dtype=np.float64)',
         ('golden::test_hugging_face[tiny32/default]', 'scaling::test_lowest_frequency_is_not_one_over_base')),
  Mutant('rope_bf16_positions', 'the first wrong integer is 257', 'posenc/rope.py',
         'pos.at_T[:, None] * freq_TP', 'pos.at_T.astype(jnp.bfloat16).astype(jnp.float32)[:, None] * freq_TP',
         ('golden::test_cos_and_sin_far_out[cos_sin/tiny32]', 'posenc::test_rotations_do_not_end_with_a_table[none]')),
  Mutant('rope_bf16_angles', 'angles in the type of the activations', 'posenc/rope.py',
         'pos.at_T[:, None] * freq_TP', '(pos.at_T[:, None] * freq_TP).astype(jnp.bfloat16).astype(jnp.float32)',
         ('golden::test_rotate[half_split/hf_llama]', 'posenc::test_rotations_do_not_end_with_a_table[none]')),
  Mutant('rope_pairings_swapped', 'another permutation of channels than its name says', 'posenc/rope.py',
         "pairing == 'half_split':", "pairing != 'half_split':",
         ('golden::test_rotate[half_split/hf_llama]', 'golden::test_rotate[interleaved/meta_llama]')),
  Mutant('rope_turns_backwards', 'R(m - n) where R(n - m) is meant', 'posenc/rope.py',
         'jnp.concatenate([a * cos - b * sin, b * cos + a * sin',
         'jnp.concatenate([a * cos + b * sin, b * cos - a * sin',
         ('golden::test_rotate[half_split/hf_llama]',)),
  Mutant('rope_key_turns_backwards', 'q.k then depends on m + n', 'models/attention.py',
         'q, k = scheme.rotate(q_BTNH, k_BTKH, pos_q)\n',
         'q, _ = scheme.rotate(q_BTNH, k_BTKH, pos_q)\n'
         '    _, k = scheme.rotate(q_BTNH, k_BTKH, pos_q.replace(at_T=-pos_q.at_T))\n',
         ('golden::test_attention_methods[plain_rope]', 'contract::test_4_shift_of_all_positions[rope]')),
  Mutant('rope_on_values', 'V is never rotated', 'models/attention.py',
         '_padded(jnp.moveaxis(v_BTKH, 1, 2), -2, pad)',
         '_padded(jnp.moveaxis(scheme.rotate(q_BTNH, v_BTKH, pos)[1], 1, 2), -2, pad)',
         ('attention::test_equals_dense_in_values_and_gradients[rope-gqa-tiled]',
          'contract::test_4_shift_of_all_positions[rope]')),
  Mutant('scale_below_1', 'l/L inside the training length: frequencies sped up', 'posenc/scaling.py',
         'return max(1.0, eval_len / train_len)', 'return eval_len / train_len',
         ('scaling::test_nothing_changes_up_to_the_training_length',
          'contract::test_6_identity_within_the_training_length[rope-pi]')),
  Mutant('rope_onset_inclusive', 'n-hat itself is the first token that is scaled', 'posenc/rope.py',
         'token_T[:, None] < pos.onset', 'token_T[:, None] <= pos.onset',
         ('golden::test_longrope_first_tokens', 'posenc::test_tokens_before_the_onset_keep_the_trained_frequencies')),
  Mutant('partial_rotary_of_the_head_width', 'exponents over H, for the rotary width', 'posenc/base.py',
         '/ max(self.rot, 1))', '/ max(self.dims.head_dim, 1))',
         ('golden::test_rotate_a_part', 'posenc::test_part_of_a_head_rotates')),
  Mutant('partial_rotary_at_the_end', 'the first channels of a head rotate', 'posenc/rope.py',
         'x, rest = jnp.split(x_BTNH.astype(jnp.float32), [rot], -1)',
         'rest, x = jnp.split(x_BTNH.astype(jnp.float32), [x_BTNH.shape[-1] - rot], -1)',
         ('golden::test_rotate_a_part',)),
  Mutant('proportion_keeps_the_slowest', 'p-RoPE keeps the fastest pairs', 'posenc/rope.py',
         'np.arange(len(theta_P)) < int(self.proportion * self.rot // 2)',
         'np.arange(len(theta_P))[::-1] < int(self.proportion * self.rot // 2)',
         ('golden::test_hugging_face[tiny32/proportional/p0.25]',)),
  Mutant('ntk_wakes_what_stands', 'a pair of frequency 0 gets one from the new base', 'posenc/scaling.py',
         'np.where(theta > 0, base ** (-np.arange(0, d, 2) / d), 0.0)', 'base ** (-np.arange(0, d, 2) / d)',
         ('posenc::test_a_pair_without_a_frequency_never_gets_one',)),
  Mutant('xpos_on_one_side', 'keys must shrink by what queries grow', 'posenc/xpos.py',
         'cos_TP * shrink_TP, sin_TP * shrink_TP', 'cos_TP, sin_TP',
         ('golden::test_xpos', 'contract::test_4_shift_of_all_positions[xpos]')),
  Mutant('xpos_grows_with_the_distance', 'zeta**((j - i) / B)', 'posenc/xpos.py',
         'grow_TP, shrink_TP = jnp.exp(log_TP), jnp.exp(-log_TP)',
         'shrink_TP, grow_TP = jnp.exp(log_TP), jnp.exp(-log_TP)',
         ('golden::test_xpos',)),
  Mutant('xpos_zeta_of_the_pair', 'p + 0.4 d for 2p + 0.4 d', 'posenc/xpos.py',
         'np.arange(0, self.rot, 2) + 0.4', 'np.arange(self.rot // 2) + 0.4', ('golden::test_xpos',)),
  Mutant('xpos_sees_one_block', 'its own and the one before', 'posenc/xpos.py',
         'np.arange(length) % block + block + 1.0', 'np.arange(length) % block + 1.0',
         ('posenc::test_blockwise_causal_attention',)),
  Mutant('rope2d_axes_swapped', 'hw gives the first half to the row', 'posenc/rope2d.py',
         "if self.order == 'hw'", "if self.order != 'hw'", ('golden::test_rope2d',)),
  Mutant('rope2d_one_axis', 'both halves turn by the row', 'posenc/rope2d.py',
         'jnp.stack([first_T, second_T], -1)', 'jnp.stack([first_T, first_T], -1)', ('golden::test_rope2d',)),
  Mutant('rope2d_alternating_halves', 'freqs[::2] and freqs[1::2]', 'posenc/rope2d.py',
         "(2.0 if self.freqs == 'alternating' else 0.0)", "(0.0 if self.freqs == 'alternating' else 2.0)",
         ('golden::test_rope2d',)),
  Mutant('pi_multiplies', 'frequencies are divided by s, wavelengths multiplied', 'posenc/scaling.py',
         "s = _scale(factor, train_len, eval_len)\n  return {'inv_freq_P': _frequencies(scheme) / s}",
         "s = _scale(factor, train_len, eval_len)\n  return {'inv_freq_P': _frequencies(scheme) * s}",
         ('golden::test_hugging_face[tiny32/linear/f8]', 'scaling::test_linear_scaling_touches_every_pair_once')),
  Mutant('ntk_without_its_power', 'base s: the last pair falls short of s', 'posenc/scaling.py',
         's ** (d / (d - 2))', 's', ('golden::test_ntk', 'scaling::test_ntk_is_rope_with_a_larger_base')),
  Mutant('ntk_times_its_power', 'a tutorial: base alpha * (d/(d - 2))', 'posenc/scaling.py',
         's ** (d / (d - 2))', 's * (d / (d - 2))', ('golden::test_ntk',
         'scaling::test_ntk_is_geometric_over_all_pairs')),
  Mutant('ntk_squared', 'a tutorial: an unnamed further power', 'posenc/scaling.py',
         's ** (d / (d - 2))', 's ** (2 * d / (d - 2))', ('golden::test_ntk', 'golden::test_dynamic')),
  Mutant('dynamic_ntk_with_the_bracket_of_hf', 'three methods share the name', 'posenc/scaling.py',
         '_ntk(scheme, _capped(factor, train_len, eval_len))', '_ntk(scheme, max(1.0, 2 * eval_len / train_len - 1))',
         ('golden::test_dynamic', 'scaling::test_dynamic_factors')),
  Mutant('dynamic_without_its_cap', 'a factor is the largest s', 'posenc/scaling.py',
         'np.inf if factor is None else _scale(factor, train_len, eval_len))', 'np.inf)',
         ('scaling::test_dynamic_factors',)),
  Mutant('dynamic_ntk_hf_without_its_bracket', 'f l/L', 'posenc/scaling.py',
         'f * eval_len / train_len - (f - 1)', 'f * eval_len / train_len',
         ('golden::test_hugging_face[tiny32/dynamic/f2/len256]', 'scaling::test_dynamic_factors')),
  Mutant('dynamic_ntk_hf_below_its_length', 'vLLM PR 52675: frequencies sped up, or NaN', 'posenc/scaling.py',
         'max(1.0, f * eval_len / train_len - (f - 1))', 'f * eval_len / train_len - (f - 1)',
         ('golden::test_hugging_face[tiny32/dynamic/f1/len64]',)),
  Mutant('dynamic_ntk_qwen_without_its_step', 'ceil(log2 l/L) for ceil(log2 l/L + 1)', 'posenc/scaling.py',
         'np.ceil(np.log2(eval_len / train_len) + 1)', 'np.ceil(np.log2(eval_len / train_len))',
         ('scaling::test_qwen_extends_in_steps',)),
  Mutant('ntk_mixed_su_from_pair_0', 'his pairs count from 1', 'posenc/scaling.py',
         'pair = np.arange(1, len(theta) + 1, dtype=np.float64)', 'pair = np.arange(len(theta), dtype=np.float64)',
         ('golden::test_mixed_ntk',)),
  Mutant('yarn_half_width_in_the_correction', 'Levanter 9263f81, first of three', 'posenc/rotations.py',
         'return rot * np.log(', 'return rot / 2 * np.log(',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'golden::test_yarn_authors[llama2/yarn/s8]')),
  Mutant('yarn_divides_positions_too', 'Levanter 9263f81, second: slower by s**2', 'posenc/scaling.py',
         "    'logit_scale_T': np.full(eval_len, np.float64(a) ** 2),",
         "    'at_T': pos.at_T / s,\n    'logit_scale_T': np.full(eval_len, np.float64(a) ** 2),",
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'golden::test_yarn_authors[llama2/yarn/s8]')),
  Mutant('yarn_root_of_its_temperature', 'Levanter 9263f81, third: 1.10 for 1.21 at s = 8', 'posenc/scaling.py',
         'return 0.1 * c * np.log(s) + 1.0 if s > 1', 'return np.sqrt(0.1 * c * np.log(s) + 1.0) if s > 1',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'scaling::test_attention_factor')),
  Mutant('yarn_ramp_from_the_extended_length', 'Megatron-LM issue 1418', 'posenc/scaling.py',
         'keep = _kept(scheme, train_len, beta_fast', 'keep = _kept(scheme, train_len * s, beta_fast',
         ('golden::test_hugging_face[tiny64/yarn/f8/trunc1]', 'scaling::test_ramp_starts_from_the_training_length')),
  Mutant('yarn_betas_swapped', 'torchtitan PR 3787', 'posenc/scaling.py',
         'for beta in (beta_fast, beta_slow))', 'for beta in (beta_slow, beta_fast))',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'scaling::test_two_ramps')),
  Mutant('yarn_takes_swapped_betas', 'a config that compensates for the error above', 'posenc/scaling.py',
         'np.isfinite(beta_slow) and beta_fast > beta_slow > 0', 'np.isfinite(beta_slow) and beta_fast > 0 < beta_slow',
         ('scaling::test_refused_methods',)),
  Mutant('yarn_ramp_inverted', 'the fast pairs interpolated, the slow ones kept', 'posenc/scaling.py',
         'return 1 - np.clip((np.arange(d // 2) - low)', 'return np.clip((np.arange(d // 2) - low)',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]',)),
  Mutant('yarn_rounds_to_the_nearest_pair', 'low is rounded down, high up', 'posenc/scaling.py',
         'low, high = np.floor(low), np.ceil(high)', 'low, high = np.round(low), np.round(high)',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'scaling::test_two_ramps')),
  Mutant('yarn_bounds_unclamped', 'at L = 128 the ramp would begin at pair -1', 'posenc/scaling.py',
         'low, high = max(low, 0.0), min(high, d - 1.0)', 'low, high = low, high',
         ('golden::test_hugging_face[tiny32/yarn/f8/trunc1]', 'scaling::test_two_ramps')),
  Mutant('yarn_blends_wavelengths', "LongRoPE's start of its search: linear in lambda, not in frequency",
         'posenc/scaling.py',
         'return (1 - keep) * scheme.inv_freq_P / s + keep * scheme.inv_freq_P',
         'return scheme.inv_freq_P / ((1 - keep) * s + keep)',
         ('golden::test_hugging_face[llama2/yarn/f8/trunc1]', 'golden::test_llama31_meta',
          'golden::test_longrope_search_does_not_start_from_yarn[tiny32/longrope_search_init/s8]')),
  Mutant('by_parts_ramp_in_the_wavelength', 'a tutorial: a third ramp, that nobody ships', 'posenc/scaling.py',
         'return np.clip((train_len * theta / (2 * np.pi) - beta_slow) / (beta_fast - beta_slow), 0, 1)',
         'return np.clip((train_len / beta_slow - 2 * np.pi / theta)\n'
         '                   / (train_len / beta_slow - train_len / beta_fast), 0, 1)',
         ('golden::test_hugging_face[llama2/ntk_by_parts_paper_ramp(alpha1,beta32) via llama3/f8]',
          'scaling::test_two_ramps')),
  Mutant('by_parts_keeps_below_32_lengths', 'the same tutorial: w < beta L kept, for w < L / beta', 'posenc/scaling.py',
         'return np.clip((train_len * theta / (2 * np.pi) - beta_slow) / (beta_fast - beta_slow), 0, 1)',
         'return np.where(2 * np.pi / theta < beta_fast * train_len, 1.0, 0.0)',
         ('golden::test_hugging_face[tiny32/ntk_by_parts_paper_ramp(alpha1,beta32) via llama3/f8]',
          'scaling::test_two_ramps')),
  Mutant('ntk_by_parts_v0_ramps_swapped', 'PI to NTK first, then that to the trained frequency', 'posenc/scaling.py',
         'return {\'inv_freq_P\': (1 - to_trained) * mixed + to_trained * theta}',
         'return {\'inv_freq_P\': (1 - to_ntk) * mixed + to_ntk * theta}',
         ('golden::test_by_parts_before_the_paper',)),
  Mutant('llama31_with_the_index_ramp', 'a tutorial calls it "YaRN-style"', 'posenc/scaling.py',
         "s, high, low, 'rotations', True)", "s, high, low, 'index', True)",
         ('golden::test_llama31_meta', 'scaling::test_llama31_is_the_rotations_ramp_from_1_to_4')),
  Mutant('llama31_with_a_temperature', 'a tutorial calls it "YaRN-style"', 'posenc/scaling.py',
         "return {'inv_freq_P': _by_parts(scheme, train_len, s, high, low, 'rotations', True)}",
         "return {'inv_freq_P': _by_parts(scheme, train_len, s, high, low, 'rotations', True),\n"
         "          'logit_scale_T': np.full(eval_len, _mscale(s) ** 2)}",
         ('golden::test_llama31_meta', 'golden::test_hugging_face[Llama-3.1-8B real]')),
  Mutant('longrope_multiplies', 'a tutorial: freqs * rescale_factors', 'posenc/scaling.py',
         "'inv_freq_P': scheme.inv_freq_P / stretch,\n    'onset'",
         "'inv_freq_P': scheme.inv_freq_P * stretch,\n    'onset'",
         ('golden::test_hugging_face[phi3-vision-128k/longrope/len4097]', 'scaling::test_longrope_divides')),
  Mutant('longrope_takes_shrinking_factors', 'lambda-hat = 1 / lambda, which the paper uses too', 'posenc/scaling.py',
         '1 <= v < np.inf for v in value', '0 < v < np.inf for v in value', ('scaling::test_refused_methods',)),
  Mutant('longrope_long_at_the_training_length', 'the short list is for all that was trained', 'posenc/scaling.py',
         'beyond if eval_len > train_len', 'beyond if eval_len >= train_len',
         ('golden::test_hugging_face[tiny32/longrope/len128]',
          'scaling::test_longrope_switches_at_the_training_length')),
  Mutant('longrope_dynamic_by_the_share_of_the_length', 'lambda - 1 is in proportion to l/L - 1', 'posenc/scaling.py',
         '(eval_len / train_len - 1) / (s - 1)', 'eval_len / train_len / s',
         ('golden::test_longrope_authors[tiny32/longrope_dynamic/len256]',)),
  Mutant('resonance_rounds_down', 'Wang et al. round', 'posenc/scaling.py', 'np.round(wavelength)',
         'np.floor(wavelength)',
         ('scaling::test_resonance_makes_wavelengths_whole',)),

  # Temperatures.
  Mutant('yarn_root_of_one_over_s', 'a tutorial: attention times sqrt(1/scale), 0.35 for 1.46', 'posenc/scaling.py',
         'a = _mscale(s)\n', 'a = np.sqrt(1 / s)\n',
         ('golden::test_hugging_face[tiny32/yarn/f8/trunc1]', 'scaling::test_attention_factor')),
  Mutant('yarn_temperature_on_one_side', 'a is on queries and on keys', 'posenc/scaling.py',
         'np.float64(a) ** 2', 'np.float64(a)', ('golden::test_yarn_logits', 'scaling::test_attention_factor')),
  Mutant('yarn_attention_factor_dropped', 'loaders that do not read the key', 'posenc/scaling.py',
         'if attention_factor is not None:', 'if attention_factor is None and False:',
         ('golden::test_hugging_face[tiny32/yarn/f8/attention_factor1 (= NTK-by-parts)]',)),
  Mutant('yarn_mscales_inverted', 'a = m(s, mscale) / m(s, mscale_all_dim)', 'posenc/scaling.py',
         '_mscale(s, mscale) / _mscale(s, mscale_all_dim)', '_mscale(s, mscale_all_dim) / _mscale(s, mscale)',
         ('scaling::test_deepseek_mscale',)),
  Mutant('longrope_misread_root', 'microsoft/LongRoPE issue 21: sqrt((1 + ln s) / ln L)', 'posenc/scaling.py',
         'np.sqrt(1 + np.log(s) / np.log(train_len))', 'np.sqrt((1 + np.log(s)) / np.log(train_len))',
         ('golden::test_longrope_authors[tiny32/longrope/su]',)),
  Mutant('longrope_temperature_on_the_first_tokens', 'the released code gives them none', 'posenc/scaling.py',
         'np.where(np.arange(eval_len) < onset, 1.0, a)', 'np.full(eval_len, a)',
         ('golden::test_longrope_first_tokens', 'scaling::test_longrope_leaves_the_first_tokens_alone')),
  Mutant('longrope_temperature_on_one_side', 'a is on queries and on keys', 'posenc/scaling.py',
         "    'logit_scale_T': scale_T,\n    'key_scale_T': scale_T,", "    'logit_scale_T': scale_T,",
         ('golden::test_longrope_authors[tiny32/longrope/su]',)),
  Mutant('logn_counts_from_0', 'the query itself is a key that it sees', 'posenc/scaling.py',
         'scale_T = np.log(np.arange(1, eval_len + 1))', 'scale_T = np.log(np.maximum(np.arange(eval_len), 1))',
         ('golden::test_logn', 'scaling::test_logn')),
  Mutant('logn_without_its_max', 'a model that was not trained so', 'posenc/scaling.py',
         'scale_T if trained else np.maximum(1.0, scale_T)', 'scale_T', ('golden::test_logn', 'scaling::test_logn')),
  Mutant('temperatures_replace_one_another', 'yarn + logn multiply', 'posenc/__init__.py',
         'writes[field] = getattr(out[i], field) * value', 'writes[field] = value', ('scaling::test_scales_multiply',)),
  Mutant('two_writers_of_a_field', 'pi + ntk: the last one wins, silently', 'posenc/__init__.py',
         'elif field in writers[i] and METHODS', 'elif field in () and METHODS',
         ('scaling::test_a_field_has_one_writer', 'scaling::test_refused_methods')),
  Mutant('oracle_unlabelled', 'one that follows the length up to its cap', 'posenc/__init__.py',
         'for length, short in made[:-1]:', 'for length, short in made[-2:-1]:',
         ('scaling::test_label_of_an_oracle',)),
  Mutant('temperature_on_the_bias', 'on the logits as a whole, for on q.k', 'models/attention.py',
         'at_T = _padded(pos.at_T, 0, pad)', 'at_T = _padded(pos.at_T * pos.logit_scale_T, 0, pad)',
         ('attention::test_scales_multiply_content_and_never_a_bias',)),
  Mutant('key_temperature_dropped', "LongRoPE's, beyond the onset", 'models/attention.py',
         'k * pos.key_scale_T[:, None, None]', 'k * 1.0',
         ('attention::test_scales_multiply_content_and_never_a_bias',)),
  Mutant('logits_over_the_width', '1/H for 1/sqrt(H)', 'posenc/base.py', 'dims.head_dim**-0.5', 'dims.head_dim**-1.0',
         ('golden::test_attention_methods[plain_rope]',)),
  Mutant('ssmax_of_n_plus_1', 'one key alone has ln 1 = 0', 'posenc/base.py', 'jnp.log(seen_T)', 'jnp.log1p(seen_T)',
         ('posenc::test_ssmax_multiplies_queries_by_s_ln_n',)),
  Mutant('ssmax_beyond_its_window', 'n counts keys that are seen', 'posenc/base.py',
         'jnp.minimum(jnp.arange(1.0, pos.at_T.shape[0] + 1), pos.window_T + pos.sinks)',
         'jnp.arange(1.0, pos.at_T.shape[0] + 1)', ('posenc::test_ssmax_multiplies_queries_by_s_ln_n',)),
  Mutant('ssmax_blind_to_sinks', 'n counts keys that are seen', 'posenc/base.py',
         'pos.window_T + pos.sinks)', 'pos.window_T)', ('posenc::test_ssmax_multiplies_queries_by_s_ln_n',)),

  # Windows and second position maps.
  Mutant('window_sees_one_key_more', "Mistral's reference mask: i - W <= j", 'models/tiles.py',
         'back_ts < at_q.reach_T[:, None]', 'back_ts <= at_q.reach_T[:, None]',
         ('golden::test_window', 'attention::test_windows_and_sinks')),
  Mutant('window_method_one_key_more', 'the same, in the method', 'posenc/scaling.py',
         'np.full(eval_len, width * 1.0)', 'np.full(eval_len, width + 1.0)',
         ('golden::test_window', 'golden::test_attention_methods[lm_infinite/local8/global3/limit8]')),
  Mutant('one_sink_more', 'key 0 always visible', 'models/tiles.py',
         'at_k.token_T[None, :] < masks.sinks', 'at_k.token_T[None, :] <= masks.sinks',
         ('golden::test_window', 'attention::test_windows_and_sinks')),
  Mutant('no_token_sees_itself', 'a strict mask', 'models/tiles.py', '(back_ts >= 0)', '(back_ts > 0)',
         ('golden::test_attention_methods[plain_rope]',
          'attention::test_equals_dense_in_values_and_gradients[nope-gqa-tiled]')),
  Mutant('the_next_token_is_visible', 'the loss falls, generation is garbage', 'models/tiles.py',
         '(back_ts >= 0)', '(back_ts >= -1)',
         ('contract::test_1_causal[nope-none]',
          'attention::test_equals_dense_in_values_and_gradients[nope-gqa-tiled]')),
  Mutant('a_scheme_may_unmask', 'one that computes its logits anew', 'models/tiles.py',
         'return masked(logits_BNts), new_carry', 'return logits_BNts, new_carry',
         ('attention::test_a_scheme_cannot_unmask',)),
  Mutant('lm_infinite_one_too_far', 'sinks at distance n_local + 1', 'posenc/scaling.py',
         "'far': _rectified(eval_len, local)", "'far': _rectified(eval_len, local + 1)",
         ('golden::test_attention_methods[lm_infinite/local8/global3/limit8]', 'scaling::test_rectified_distances')),
  Mutant('rerope_one_too_near', 'min(i - j, w - 1)', 'posenc/scaling.py',
         "{'far': _rectified(eval_len, w)}", "{'far': _rectified(eval_len, w - 1)}",
         ('golden::test_attention_methods[rerope/w8/L1000000]', 'scaling::test_rectified_distances')),
  Mutant('leaky_rerope_with_a_jump', 'w / k for w at distance w', 'posenc/scaling.py',
         '(token_T + w * (k - 1)) / k', '(token_T + w) / k',
         ('golden::test_attention_methods[leaky_rerope/w8/k4/L1000000]', 'scaling::test_rectified_distances')),
  Mutant('leaky_rerope_short_of_its_length', 'k = l / L leaves distances of L and more', 'posenc/scaling.py',
         '(eval_len - 1 - w) / max(train_len - 1 - w, 1)', 'eval_len / train_len',
         ('scaling::test_no_distance_is_new',)),
  Mutant('self_extend_without_its_shift', 'groups begin at distance W // G, for W', 'posenc/scaling.py',
         '(token_T // group + width - width // group) * 1.0', '(token_T // group) * 1.0',
         ('golden::test_attention_methods[self_extend/legacy/G4/W8]', 'golden::test_self_extend_distances')),
  Mutant('self_extend_with_a_fraction', 'LongLM today: W / G, when G does not divide W', 'posenc/scaling.py',
         '(token_T // group + width - width // group) * 1.0', '(token_T // group + width - width / group) * 1.0',
         ('golden::test_self_extend_distances[self_extend/group_distance/G3/W8]',)),
  Mutant('second_map_one_token_late', 'a key W tokens back is grouped', 'models/tiles.py',
         'jnp.where(back_ts < masks.threshold, logits_BNts, far_BNts)',
         'jnp.where(back_ts <= masks.threshold, logits_BNts, far_BNts)',
         ('golden::test_attention_methods[self_extend/legacy/G3/W8]',)),
  Mutant('values_under_the_first_map', "Shaw's, of a key that is read from the second", 'models/tiles.py',
         'scheme.values(jnp.where(near_ts, 0.0, p_BNts), at_q.far_T, at_k.far_T)',
         'scheme.values(jnp.where(near_ts, 0.0, p_BNts), at_q.at_T, at_k.at_T)',
         ('attention::test_second_position_map[values]',)),

  # Absolute positions.
  Mutant('learned_table_clamps', 'jax issue 9839: the last row again and again', 'posenc/learned.py',
         ".get(mode='fill', fill_value=jnp.nan)", ".get(mode='clip')",
         ('posenc::test_learned_positions_end_with_their_table',)),
  Mutant('learned_one_row_too_many', 'the refusal comes a token late', 'posenc/__init__.py',
         'int(pos.at_T.max()) + 1) > slot.max_len', 'int(pos.at_T.max())) > slot.max_len',
         ('posenc::test_learned_positions_end_with_their_table',)),
  Mutant('learned_stretched_past_its_table', 'l - 1 tokens span rows - 1', 'posenc/learned.py',
         'np.arange(length) * (self.rows - 1) / (length - 1)', 'np.arange(length) * self.rows / length',
         ('posenc::test_learned_positions_between_rows',)),
  Mutant('sinusoidal_without_its_root', 'embeddings not multiplied by sqrt(D)', 'posenc/sinusoidal.py',
         'self.dims.d_model**0.5 if self.embed_scale else 1.0', '1.0',
         ('posenc::test_sinusoids_are_added_to_scaled_embeddings',)),
  Mutant('sinusoidal_t2t_as_the_paper', 'the released exponent is i / (D/2 - 1)', 'posenc/sinusoidal.py',
         'i / max(half - 1, 1)', 'i / half',
         ('golden::test_sinusoidal[tensor2tensor/n8/d16]',
          'posenc::test_sinusoids_turn_by_a_matrix_that_does_not_know_the_position')),
  Mutant('sinusoidal_cosines_first', 'even channels are sines', 'posenc/sinusoidal.py',
         'sin, cos = jnp.sin(angle), jnp.cos(angle)', 'cos, sin = jnp.sin(angle), jnp.cos(angle)',
         ('golden::test_sinusoidal[xlm_interleaved/n8/d16]', 'golden::test_sinusoidal[fairseq/n8/d16]')),
  Mutant('sinusoidal_layouts_swapped', 'interleaved as printed', 'posenc/sinusoidal.py',
         "if self.layout == 'concat':", "if self.layout != 'concat':",
         ('golden::test_sinusoidal[xlm_interleaved/n8/d16]', 'golden::test_sinusoidal[gptj_concat/n8/d16]')),

  # Biases.
  Mutant('distance_of_the_wrong_sign', 'gluon-nlp PR 1470: all earlier keys at distance 0', 'posenc/base.py',
         'jnp.maximum(at_t[:, None] - at_s[None, :], 0.0)', 'jnp.maximum(at_s[None, :] - at_t[:, None], 0.0)',
         ('golden::test_t5_buckets[causal/nb32/md128]', 'golden::test_shaw_rows[index/T6/k16]', 'golden::test_kerple')),
  Mutant('distance_unclipped', 'ln of the masked triangle: NaN in the gradients', 'posenc/base.py',
         'jnp.maximum(at_t[:, None] - at_s[None, :], 0.0)', '(at_t[:, None] - at_s[None, :])',
         ('contract::test_5_every_position_parameter_learns[kerple_log]',)),
  Mutant('alibi_sign', 'attention-gym PR 86: far keys favoured; a tutorial: negative slopes', 'posenc/alibi.py',
         'return -jnp', 'return jnp',
         ('golden::test_alibi_bias[bias/bloom/H4/T6]', 'posenc::test_alibi_favours_near_keys')),
  Mutant('alibi_slopes_from_1', 'h from 0, as it has been shipped', 'posenc/alibi.py', 'np.arange(1, power + 1)',
         'np.arange(power)',
         ('golden::test_alibi_slopes[slopes/H8]', 'posenc::test_alibi_slopes')),
  Mutant('alibi_one_series', '12 heads as one geometric series, as it has been shipped', 'posenc/alibi.py',
         'power = 2 ** int(np.log2(heads))', 'power = heads',
         ('golden::test_alibi_slopes[slopes/H12]', 'posenc::test_alibi_slopes')),
  Mutant('alibi_the_other_half', 'slopes that the first heads have already', 'posenc/alibi.py',
         '[0::2][: heads - power]', '[1::2][: heads - power]', ('golden::test_alibi_slopes[slopes/H12]',)),
  Mutant('alibi_per_key_head', 'grouped queries: one slope per key head', 'posenc/alibi.py',
         'jnp.asarray(slopes(self.dims.heads), jnp.float32)',
         'jnp.repeat(jnp.asarray(slopes(self.dims.heads // 2), jnp.float32), 2)',
         ('golden::test_alibi_bias[bias/bloom/H4/T6]', 'posenc::test_alibi_favours_near_keys')),
  Mutant('alibi_in_bf16', '4096 distances, 769 biases', 'posenc/alibi.py',
         '* distance(at_t, at_s)', '* distance(at_t, at_s).astype(jnp.bfloat16)',
         ('posenc::test_alibi_in_a_bfloat16_model',)),
  Mutant('t5_logarithmic_from_1', 'a tutorial: buckets 0, 1-2, 3-4, 5-7', 'posenc/t5.py',
         'exact = num_buckets // 2\n', 'exact = 1\n',
         ('golden::test_t5_buckets[causal/nb32/md128]', 'posenc::test_t5_buckets')),
  Mutant('t5_scales_the_other_way', 'T5 itself has no 1/sqrt(H)', 'posenc/t5.py', 'if not scale_logits:',
         'if scale_logits:',
         ('posenc::test_t5_bias',)),
  Mutant('kerple_log_roles_swapped', 'names swap roles between its two forms', 'posenc/kerple.py',
         'return -r1 * jnp.log1p(r2 *', 'return -r2 * jnp.log1p(r1 *',
         ('golden::test_kerple[kerple_log]', 'posenc::test_kerple_by_numbers')),
  Mutant('kerple_power_roles_swapped', 'names swap roles between its two forms', 'posenc/kerple.py',
         'return -r1 * distance**r2', 'return -r2 * distance**r1',
         ('golden::test_kerple[kerple_power]', 'posenc::test_kerple_by_numbers')),
  Mutant('kerple_sign', 'far keys favoured', 'posenc/kerple.py', 'return -r1 * jnp.log1p', 'return r1 * jnp.log1p',
         ('golden::test_kerple[kerple_log]',)),
  Mutant('kerple_unbounded', 'KERPLE issue 3: NaN from distance 101', 'posenc/kerple.py',
         'return jax.lax.stop_gradient(jnp.clip(x, least, most)) + (x - jax.lax.stop_gradient(x))', 'return x',
         ('golden::test_kerple[kerple_log]', 'posenc::test_kerple_out_of_bounds')),
  Mutant('kerple_clip_without_a_gradient', 'a head that stepped over the bound stays there', 'posenc/kerple.py',
         'return jax.lax.stop_gradient(jnp.clip(x, least, most)) + (x - jax.lax.stop_gradient(x))',
         'return jnp.clip(x, least, most)',
         ('posenc::test_kerple_out_of_bounds', 'posenc::test_pope_phases_out_of_bounds')),
  Mutant('fire_normalised_by_the_key', 'psi(j) for psi(i)', 'posenc/fire.py',
         '(psi(last_t) + EPS)[:, None]',
         '(psi(jnp.maximum(at_s, jnp.abs(self.l_mult[...] * self.init_len))) + EPS)[None, :]',
         ('golden::test_fire[fire/c0.1/L4/mult1]', 'posenc::test_fire_interpolates')),
  Mutant('fire_without_its_threshold', 'psi(i) for psi(max(i, tau))', 'posenc/fire.py',
         'last_t = jnp.maximum(at_t, jnp.abs(self.l_mult[...] * self.init_len))', 'last_t = at_t',
         ('golden::test_fire[fire/c0.1/L4/mult1]',
          'contract::test_5_every_position_parameter_learns[fire(init_len=9)]')),
  Mutant('fire_without_eps', '0/0 at query 0 once the threshold is 0', 'posenc/fire.py',
         '(psi(last_t) + EPS)', 'psi(last_t)', ('posenc::test_fire_stays_within_0_and_1',)),
  Mutant('fire_without_its_logarithm', 'distances interpolated linearly', 'posenc/fire.py',
         'jnp.log(jnp.abs(self.c[...] * x) + 1)', 'jnp.abs(self.c[...] * x)',
         ('golden::test_fire[fire/c0.1/L4/mult1]', 'posenc::test_fire_interpolates')),
  Mutant('sandwich_without_its_cosine', 'a copy that circulates: linear in the distance', 'posenc/sandwich.py',
         "jnp.einsum('ti,si->ts', waves(at_t), waves(at_s), precision=jax.lax.Precision.HIGHEST)",
         '((at_s - at_t[:, None])[..., None] * freq).sum(-1)', ('golden::test_sandwich[sandwich/nemo/d16/H4]',)),
  Mutant('sandwich_from_index_0', "the paper's snippet, not NeMo's code", 'posenc/sandwich.py',
         'first_index: int = 1', 'first_index: int = 0', ('golden::test_sandwich[sandwich/nemo/d16/H4]',)),
  Mutant('sandwich_ratio_of_8_heads', '8 h / N', 'posenc/sandwich.py',
         '8 * np.arange(1, self.dims.heads + 1) / self.dims.heads', 'np.arange(1.0, self.dims.heads + 1)',
         ('golden::test_sandwich[sandwich/nemo/d16/H4]',)),

  # Schemes that read more than distances.
  Mutant('shaw_query_minus_key', 'tutorials: a_{i-j}', 'posenc/shaw.py', 'return self.clip - jnp.minimum',
         'return jnp.minimum',
         ('golden::test_shaw_rows', 'golden::test_shaw_attention')),
  Mutant('shaw_without_values', 'many re-implementations: key side only', 'posenc/shaw.py',
         'if not self.use_values:', 'if self.use_values:', ('golden::test_shaw_attention',)),
  Mutant('shaw_one_table_for_both', 'a_K and a_V are two', 'posenc/shaw.py',
         '@ self.value_table[...]', '@ self.key_table[...]', ('golden::test_shaw_attention',)),
  Mutant('cope_counts_the_future', 'x-transformers given unmasked logits: gates after the query', 'models/tiles.py',
         'logits_BNts = masked(merge_heads(_dots(q_BKGtR, k_BKsR)))',
         'logits_BNts = merge_heads(_dots(q_BKGtR, k_BKsR))',
         ('golden::test_cope_authors', 'contract::test_1_causal[cope(npos_max=6)-none]')),
  Mutant('cope_starts_from_0', 'p_ii = 0 for g_ii', 'posenc/cope.py',
         'count_BNts = carry[..., None] +', 'count_BNts = -gate_BNts + carry[..., None] +',
         ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_capped_too_late', 'a row past the table', 'posenc/cope.py',
         'jnp.minimum(count_BNts, self.npos_max - 1.0)', 'jnp.minimum(count_BNts, self.npos_max * 1.0)',
         ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_floor_plus_1', 'a row past the table, of weight 0: NaN, or a silent clamp', 'posenc/cope.py',
         'jnp.ceil(p_BNts)', 'floor + 1', ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_weights_swapped', 'the nearer row gets the smaller share', 'posenc/cope.py',
         '(p_BNts - floor) * (upper - lower)', '(1 - p_BNts + floor) * (upper - lower)',
         ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_counts_from_the_left', 'from key 0 to j, for from j to i', 'posenc/cope.py',
         'jnp.cumsum(gate_BNts[..., ::-1], -1)[..., ::-1]', 'jnp.cumsum(gate_BNts, -1)',
         ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_forgets_the_last_tile', 'gates between a tile and the query', 'posenc/cope.py',
         'carry + gate_BNts.sum(-1)', 'carry', ('golden::test_cope_authors', 'posenc::test_cope_counts_gates')),
  Mutant('cope_divides_the_other_form', 'q.e[p] over sqrt(H) where it is not', 'posenc/cope.py',
         'if not self.div:', 'if self.div:', ('golden::test_cope_authors', 'golden::test_cope_others')),
  Mutant('fox_counts_the_key_not_the_query', 'the sum is over j < l <= i', 'posenc/fox.py',
         'return split_cumsum(jax.nn.log_sigmoid(gate_BTN))',
         'return split_cumsum(jnp.pad(jax.nn.log_sigmoid(gate_BTN), ((0, 0), (1, 0), (0, 0)))[:, :-1])',
         ('golden::test_fox_bias', 'golden::test_fox_attention')),
  Mutant('fox_counts_both_ends', 'j <= l <= i: a key forgets itself', 'posenc/fox.py',
         'c_BNs[..., None, :])', 'jnp.pad(c_BNs, ((0, 0), (0, 0), (1, 0)))[..., None, :-1])',
         ('golden::test_fox_bias', 'posenc::test_fox_starts_half_open_or_where_it_is_told')),
  Mutant('fox_in_one_float32', 'a plain sum: 1e-3 off at 16k tokens', 'posenc/fox.py',
         'for c_BtN, c_BsN in zip(state_t, state_s):', 'for c_BtN, c_BsN in [(sum(state_t), sum(state_s))]:',
         ('posenc::test_fox_sums_what_float32_cannot',)),
  Mutant('fox_sums_gates', 'f for log f', 'posenc/fox.py', 'jax.nn.log_sigmoid(gate_BTN)', 'jax.nn.sigmoid(gate_BTN)',
         ('golden::test_fox_bias', 'golden::test_fox_attention')),
  Mutant('fox_sign', 'the past is amplified', 'posenc/fox.py',
         '(c_BNt[..., None] - c_BNs[..., None, :])', '(c_BNs[..., None, :] - c_BNt[..., None])',
         ('golden::test_fox_bias', 'golden::test_fox_attention')),
  Mutant('pope_without_softplus', 'magnitudes may be negative: RoPE of pairs (x, 0)', 'posenc/pope.py',
         '(jax.nn.softplus(x.astype(jnp.float32)) for x', '(x.astype(jnp.float32) for x',
         ('golden::test_pope[pope/bias0]', 'posenc::test_pope_depends_on_the_distance_alone[none]')),
  Mutant('pope_phase_sign', "the keys' phase, on the queries", 'posenc/pope.py',
         '-q_BTNH_ * jnp.sin(phase_NH)', 'q_BTNH_ * jnp.sin(phase_NH)',
         ('golden::test_pope[pope/bias]', 'posenc::test_pope_depends_on_the_distance_alone[none]')),
  Mutant('pope_scaled_by_its_rotated_width', '1/sqrt(2 H)', 'posenc/pope.py',
         'dims, dims.head_dim**-0.5, per_layer', 'dims, (2 * dims.head_dim) ** -0.5, per_layer',
         ('golden::test_pope[pope/bias0]',)),
  Mutant('pope_clip_without_a_gradient', 'phases start on a bound', 'posenc/pope.py',
         'bounded(self.phase[...], 0.0, -2 * np.pi)', 'jnp.clip(self.phase[...], -2 * np.pi, 0.0)',
         ('posenc::test_pope_phases_out_of_bounds',)),
  Mutant('dape_reads_the_mask', 'logits of -1e30 in the gradient of its MLP', 'posenc/dape.py',
         'jnp.where(logits_BNts > VISIBLE, logits_BNts, 0.0)', 'logits_BNts',
         ('posenc::test_dape_does_not_learn_from_the_mask',)),
  Mutant('dape_inputs_swapped', 'logits come first', 'posenc/dape.py',
         'w_logits_NF, w_bias_NF = jnp.split', 'w_bias_NF, w_logits_NF = jnp.split', ('golden::test_dape',)),
  Mutant('dape_without_its_leak', 'ReLU', 'posenc/dape.py',
         'jax.nn.leaky_relu(hidden_FBts, 0.01)', 'jax.nn.relu(hidden_FBts)', ('golden::test_dape',)),
  Mutant('dape_in_place_of_its_bias', 'f(logits, biases) comes on top of the bias', 'posenc/dape.py',
         'logits_BNts + bias_Nts + jnp', 'logits_BNts + jnp',
         ('golden::test_dape', 'posenc::test_dape_with_its_mlp_silent_is_its_bias[alibi]')),

  # Attention in tiles.
  Mutant('gqa_by_the_remainder', 'query head n reads key head n % K, for n // G', 'models/attention.py',
         'ring, tile = _ring(scheme, mesh, length, kv, tile or choose_tile(length))\n',
         'ring, tile = _ring(scheme, mesh, length, kv, tile or choose_tile(length))\n'
         '  q_BTNH = q_BTNH.reshape(b, length, n // kv, kv, -1).swapaxes(2, 3).reshape(q_BTNH.shape)\n',
         ('attention::test_gqa_is_mha_with_repeated_heads[2-rope]',
          'contract::test_3_gqa_is_mha_with_repeated_heads[rope]'),
         (('o_BTNH = jnp.moveaxis(o_BNTH, 1, 2)[:, :length].astype(v_BTKH.dtype)\n',
           'o_BTNH = jnp.moveaxis(o_BNTH, 1, 2)[:, :length].astype(v_BTKH.dtype)\n'
           '    o_BTNH = o_BTNH.reshape(b, length, kv, n // kv, -1).swapaxes(2, 3).reshape(o_BTNH.shape)\n'),)),
  Mutant('output_not_rescaled', "online softmax: o keeps an older tile's maximum", 'models/tiles.py',
         'o = seen.o_BNTH * shrink[..., None] +', 'o = seen.o_BNTH +',
         ('attention::test_equals_dense_in_values_and_gradients[rope-gqa-tiled]',
          'contract::test_2_tile_invariance[rope-none]')),
  Mutant('sum_not_rescaled', "online softmax: l keeps an older tile's maximum", 'models/tiles.py',
         'seen.l_BNT * shrink + p.sum(-1)', 'seen.l_BNT + p.sum(-1)',
         ('attention::test_equals_dense_in_values_and_gradients[rope-gqa-tiled]',
          'contract::test_2_tile_invariance[rope-none]')),
  Mutant('tiles_right_of_the_diagonal', 'all masked: right, and twice as slow', 'models/tiles.py',
         'jnp.clip((at_q.token_T[0] + tile - 1 - k_start) // tile, -1, k_tiles - 1)',
         'jnp.clip((at_q.token_T[0] + tile - 1 - k_start) // tile, k_tiles - 1, k_tiles - 1)',
         ('attention::test_tiles_visited',)),
  Mutant('tiles_outside_every_window', 'all masked: right, and a window saves nothing', 'models/tiles.py',
         'lo = jnp.minimum(oldest // tile, hi + 1)', 'lo = jnp.minimum(0 * oldest, hi + 1)',
         ('attention::test_tiles_visited',)),
  Mutant('tile_of_the_window_skipped', 'the leftmost, where the window begins inside it', 'models/tiles.py',
         'lo = jnp.minimum(oldest // tile, hi + 1)', 'lo = jnp.minimum(-(-oldest // tile), hi + 1)',
         ('attention::test_tiles_visited', 'attention::test_windows_and_sinks')),
  Mutant('tile_of_the_sinks_skipped', 'that which is not full of sinks', 'models/tiles.py',
         'jnp.minimum(-(-sink_tokens // tile), hi + 1)', 'jnp.minimum(sink_tokens // tile, hi + 1)',
         ('attention::test_tiles_visited', 'attention::test_windows_and_sinks')),
  Mutant('logits_in_the_type_of_the_activations', 'rounded before the softmax', 'models/tiles.py',
         "'BKGtR,BKsR->BKGts', q_BKGtR, k_BKsR, preferred_element_type=jnp.float32)",
         "'BKGtR,BKsR->BKGts', q_BKGtR, k_BKsR)",
         ('attention::test_logits_are_not_rounded',)),
  Mutant('mask_of_infinity', 'a row that sees nothing is NaN', 'models/tiles.py',
         'MASKED = -1e30', 'MASKED = -jnp.inf', ('attention::test_blocks_of_keys_one_after_the_other',)),
  Mutant('backward_without_delta', 'd logits = p (dp - delta)', 'models/tiles.py',
         'vjp((p * (dp - delta[..., None]), dcarry))', 'vjp((p * dp, dcarry))',
         ('attention::test_equals_dense_in_values_and_gradients[rope-gqa-tiled]',)),
  Mutant('parameters_of_the_logits_untrained', "Levanter's tiled attention: gradients for q, k, v only",
         'models/tiles.py',
         'lambda t, a, b: t + a + b, dparams', 'lambda t, a, b: t + b, dparams',
         ('attention::test_equals_dense_in_values_and_gradients[t5(num_buckets=8, max_distance=16)-gqa-tiled]',
          'contract::test_5_every_position_parameter_learns[t5(num_buckets=8, max_distance=16)]')),
  Mutant('parameters_of_the_values_untrained', "Shaw's a_V", 'models/tiles.py',
         'lambda t, a, b: t + a + b, dparams', 'lambda t, a, b: t + a, dparams',
         ('attention::test_equals_dense_in_values_and_gradients[shaw(clip=9)-gqa-tiled]',
          'contract::test_5_every_position_parameter_learns[shaw(clip=9)]')),
  Mutant('gradient_of_the_carry_dropped', "CoPE's gates of other tiles", 'models/tiles.py',
         'vjp((p * (dp - delta[..., None]), dcarry))',
         'vjp((p * (dp - delta[..., None]), jax.tree.map(jnp.zeros_like, dcarry)))',
         ('attention::test_equals_dense_in_values_and_gradients[cope(npos_max=6)-gqa-tiled]',)),
  Mutant('gradient_through_the_values_dropped', "of p, through Shaw's a_V", 'models/tiles.py',
         'dp if more is None else dp + dp_more', 'dp',
         ('attention::test_equals_dense_in_values_and_gradients[shaw(clip=9)-gqa-tiled]',)),
  Mutant('gradient_of_the_state_dropped', "FoX's gates, on the side of the keys", 'models/tiles.py',
         'add_tile(dk.state, dk_s.state, 1)', 'dk.state',
         ('attention::test_equals_dense_in_values_and_gradients[state-gqa-tiled]', 'golden::test_fox_attention')),
  # Short cuts of the forward pass: what is visible, settled or straight is said once for a tile.
  Mutant('open_tile_on_the_diagonal', 'its first query does not see its last key', 'models/tiles.py',
         'at_q.token_T[0] >= at_k.token_T[-1]', 'at_q.token_T[-1] >= at_k.token_T[-1]',
         ('attention::test_equals_dense_in_values_and_gradients[rope-gqa-tiled]',)),
  Mutant('open_tile_beyond_a_window', 'its last query does not see its first key', 'models/tiles.py',
         '(farthest < at_q.reach_T.min())', '(farthest < jnp.inf)', ('attention::test_windows_and_sinks',)),
  Mutant('columns_from_nowhere', 'each tile would count from its own end', 'models/tiles.py',
         '(a_BtNE * (last_B1NE - b_BtNE)).sum(-1)', '(a_BtNE * (last_B1NE - last_B1NE - 0.0 * b_BtNE)).sum(-1)',
         ('attention::test_equals_dense_in_values_and_gradients[alibi-gqa-tiled]',
          'attention::test_equals_dense_in_values_and_gradients[fox-mha-tiled]')),
  Mutant('diagonals_one_off', 'the bias of distance n + 1', 'posenc/base.py',
         'jnp.arange(t - 1.0, -s, -1)', 'jnp.arange(t * 1.0, 1 - s, -1)',
         ('posenc::test_a_bias_by_its_diagonals_is_that_of_every_pair', 'golden::test_kerple[kerple_log]')),
  Mutant('diagonals_where_there_are_none', 'positions a step of 3 or of 1/2 apart', 'posenc/base.py',
         'consecutive = jnp.all(at_t == at_t[0] + jnp.arange(t)) &', 'consecutive = jnp.array(True) |',
         ('posenc::test_a_bias_by_its_diagonals_is_that_of_every_pair',)),
  Mutant('bias_of_the_first_text', 'its gradient is summed over the batch', 'posenc/base.py',
         'ones_B = jnp.ones(d_BNts.shape[0])', 'ones_B = jnp.zeros(d_BNts.shape[0]).at[0].set(1)',
         ('posenc::test_a_bias_learns_from_every_text',)),
  Mutant('shaw_clipped_one_early', 'the nearest pair of the tile is clip - 1 apart', 'posenc/shaw.py',
         'at_t[0] - at_s[-1] >= self.clip', 'at_t[0] - at_s[-1] >= self.clip - 1',
         ('attention::test_what_is_settled_far_away_is_not_looked_up',)),
  Mutant('t5_level_one_early', 'the nearest pair of the tile is max_distance - 1 apart', 'models/tiles.py',
         'at_q.at_T[0] - at_k.at_T[-1] >= distance', 'at_q.at_T[0] - at_k.at_T[-1] >= distance - 1',
         ('attention::test_what_is_settled_far_away_is_not_looked_up',)),
  Mutant('t5_level_of_tokens', 'positions may be half as far apart', 'models/tiles.py',
         'at_q.at_T[0] - at_k.at_T[-1] >= distance', 'at_q.token_T[0] - at_k.token_T[-1] >= distance',
         ('attention::test_what_is_settled_far_away_is_not_looked_up',)),
  Mutant('cope_full_one_early', 'the last row but one may still be met', 'posenc/cope.py',
         'carry >= self.npos_max - 1', 'carry >= self.npos_max - 2',
         ('attention::test_what_is_settled_far_away_is_not_looked_up',)),
  Mutant('fire_bends_are_straight', 'units that bend within the tile left out', 'posenc/fire.py',
         'jax.lax.fori_loop(0, count, add, line_Nts)', 'line_Nts',
         ('posenc::test_fire_in_straight_pieces_is_fire[0.3-0.31]',)),
  # What a sceptic would ask of a curve.
  Mutant('control_touches_the_near_text', 'a window of train_len is taken for the text before the first target',
         'evaluation/plan.py', '-(-(train_len + self.targets) // stride) * stride', '-(-train_len // stride) * stride',
         ('controls::test_only_what_is_farther_than_train_len_is_replaced',
          'controls::test_a_model_of_at_most_train_len_tokens_gains_nothing')),
  Mutant('shuffle_that_keeps_the_order', 'the far text as it was: no gain for anyone', 'evaluation/controls.py',
         'return np.concatenate([document.tokens[blocks[i]] for i in order])', 'return document.tokens[far]',
         ('controls::test_shuffled_keeps_the_words_and_their_neighbours',)),
  Mutant('foreign_is_the_same_document', 'no gain for anyone', 'evaluation/controls.py',
         '% (others + 1)', '% (others + 1) * 0 + window.document',
         ('controls::test_foreign_is_one_other_document_from_the_same_place',)),
  Mutant('replaced_text_under_the_name_of_the_true', 'a store answers with the row of another window',
         'evaluation/plan.py', 'if window.far:  # named', 'if False:  # named',
         ('controls::test_a_window_is_named_by_what_is_in_it',)),
  Mutant('marks_one_cell_at_a_time', '3 to 5 false stars in an empty table', 'evaluation/summary.py',
         '*groups, confidence=1 - LEVEL * share, least', '*groups, alone=True, least',
         ('summary::test_marks_are_over_the_whole_table',)),
  Mutant('two_families_have_all_of_the_error_each', 'a table of two schemes is wrong twice as often',
         'evaluation/summary.py', 'share = len(keys) / len(x)', 'share = 1',
         ('summary::test_schemes_with_as_many_seeds_are_drawn_together_and_others_share_the_error',)),
  Mutant('comparison_in_the_other_direction', 'reference less method', 'evaluation/summary.py',
         'return x_SD - y_SD', 'return y_SD - x_SD', ('summary::test_a_comparison_fixed_in_advance_is_tested_alone',)),
  # Released models.
  Mutant('gguf_rows_left_permuted', "llama.cpp's order of q and k kept: every pair rotates with another's angle",
         'models/pretrained.py', 'return _unpermuted(x, rows_of) if rows_of else x', 'return x',
         ('pretrained::test_gguf_is_the_same_model',)),
  Mutant('gguf_digits_in_runs', "Hugging Face's reader of GGUF: byte level without the digits", 'models/pretrained.py',
         '[pre.Digits(individual_digits=True), level]', '[level]',
         ('pretrained::test_gguf_tokenizer_cuts_digits_one_by_one',)),
  Mutant('fused_heads_in_turn', "NeoX's q, k and v as if they stood one after the other", 'models/architectures.py',
         "attention + '.query_key_value': Fused(QKV, _by_group)",
         "attention + '.query_key_value': Fused(QKV, _in_turn)",
         _logits('gpt_neox', 'bloom', 'falcon-40b', 'falcon-1b')),
  Mutant('gemma_norm_without_one', 'weights for 1 + weights', 'models/architectures.py',
         '(1 + x) * scale if', 'x * scale if', _logits('gemma3')),
  Mutant('gemma_query_scale_is_the_width', '1/sqrt(H) for query_pre_attn_scalar', 'models/architectures.py',
         "scale = stretch if path.endswith('norm_query.scale') else np.float32(1)", 'scale = np.float32(1)',
         _logits('gemma3')),
  Mutant('qk_norm_without_keys', 'the norm of queries alone', 'models/lm.py',
         '_maybe(self.norm_key, k_BTKH)', 'k_BTKH', _logits('qwen3', 'gemma3')),
  Mutant('factor_of_the_lengths_wins', 'yarn in transformers up to 4.55: a factor that is given is not used',
         'posenc/interchange.py', "kind in _IMPLIED and 'factor' not in values and None", 'kind in _IMPLIED and None',
         ('interchange::test_a_factor_is_implied_by_two_lengths_and_one_that_is_given_is_used',)),
  Mutant('one_of_two_bases', 'transformers: the one inside the dict, in silence', 'posenc/interchange.py',
         'if any(value != values[0] for value in values[1:]):', 'if False:',
         ('interchange::test_what_is_said_twice_is_refused_by_name[two bases]',)),
  Mutant('neighbours_exported_as_they_are', 'a Llama turns p with p + H/2', 'models/exported.py',
         "slot.pairing == 'interleaved'", 'False', ('export::test_another_pairing_and_a_pattern_are_the_same_model',)),
  # Runs that go on from others.
  Mutant('layers_dealt_in_blocks', 'the first half of the layers to the first slot', 'training/source.py',
         'layers.reshape(-1, count, *layers.shape[1:])',
         'layers.reshape(count, -1, *layers.shape[1:]).swapaxes(0, 1)',
         ('source::test_layers_are_dealt_in_their_order',)),
  Mutant('tuned_length_forgotten', 'L stays what it was before the run was tuned as it is', 'posenc/__init__.py',
         'longest = train_len if rule is None else max(train_len, rule.train_len)', 'longest = train_len',
         ('source::test_what_a_method_means_after_one',
          'source::test_a_window_and_log_n_join_it_at_the_longest_window_trained_on')),
  Mutant('nope_layers_shifted', 'the first of every four for the last', 'models/architectures.py',
         'int((i + 1) % every != 0)', 'int(i % every != 0)',
         ('pretrained::test_patterns_are_the_shortest_that_the_layers_repeat',)),
  Mutant('parallel_residual_ignored', 'the MLP reads what attention has added', 'models/lm.py',
         'x_BTD if self.cfg.parallel else sum_BTD', 'sum_BTD', _logits('gpt_neox', 'falcon-7b', 'falcon-40b')),
  Mutant('gelu_exact_for_tanh', 'two functions of one name, 5e-4 apart', 'models/lm.py',
         "'gelu_tanh': (functools.partial(jax.nn.gelu, approximate=True), False)",
         "'gelu_tanh': (functools.partial(jax.nn.gelu, approximate=False), False)", _logits('gpt2', 'bloom')),
  Mutant('norm_eps_fixed', '1e-6 whatever the config says', 'models/lm.py',
         "{'epsilon': cfg.norm_eps, 'dtype'", "{'epsilon': 1e-6, 'dtype'", _logits('llama')),
  Mutant('embedding_scale_forgotten', 'Gemma without sqrt(D)', 'models/lm.py',
         'x_BTD * self.cfg.embedding_scale)', 'x_BTD)', _logits('gemma3')),
  Mutant('window_one_too_short', 'the query itself not counted', 'models/architectures.py',
         'window={window})', 'window={window - 1})', _logits('mistral', 'phi3', 'qwen2-windowed')),
]  # fmt: skip


def test_names_are_unique():
  names = [mutant.name for mutant in MUTANTS]
  assert sorted(names) == sorted(set(names))


def node(test: str) -> str:
  file, name = test.split('::', 1)
  return f'tests/{file}_test.py::{name}'


@pytest.mark.parametrize('mutant', MUTANTS, ids=lambda mutant: mutant.name)
def test_the_table_fits_the_code(mutant):
  """Each `old` names one place in today's source, and what comes of it is Python."""
  text = (ROOT / mutant.file).read_text()
  for old, new in mutant.edits:
    assert text.count(old) == 1 and old != new, f'{mutant.file} holds {old!r} {text.count(old)} times'
  compile(mutant.source(), mutant.file, 'exec')
  assert mutant.tests


def test_the_tests_of_the_table_exist():
  """Cases included: their names change with the parameters of a test."""
  tests = sorted({node(test) for mutant in MUTANTS for test in mutant.tests})
  command = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '--collect-only', '-q', *tests]
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  lost = '\n'.join(line for line in (done.stdout + done.stderr).splitlines() if line.startswith('ERROR'))
  assert done.returncode == 0, lost or done.stderr


class Endings:
  """pytest plugin: how the body of each test ended, {id: 'passed' or the name of what it raised}."""

  def __init__(self):
    self.ended: dict[str, str] = {}

  @pytest.hookimpl(wrapper=True)
  def pytest_runtest_makereport(self, item, call):
    report = yield
    if report.when == 'call' or report.outcome == 'failed':
      raised = call.excinfo and call.excinfo.type
      if raised and issubclass(raised, (AssertionError, pytest.fail.Exception)) and report.when == 'call':
        self.ended[item.nodeid] = 'failed'
      else:
        self.ended[item.nodeid] = raised.__name__ if raised else report.outcome
    return report


def run_tests(out, folder: str, tests: list[str]) -> None:
  """In a child: the tests with the packages in `folder` in place of the project's. Sends (exit code, endings, text)."""
  os.chdir(ROOT)
  sys.path[:0] = [folder, str(ROOT)]
  endings, text = Endings(), io.StringIO()
  for package in os.listdir(folder):
    # Not from `folder`: a kill or a survivor would say nothing.
    assert Path(importlib.import_module(package).__file__).is_relative_to(folder)
  with contextlib.redirect_stdout(text):
    code = pytest.main(['-p', 'no:cacheprovider', '--tb=line', *tests], plugins=[endings])
  for name, module in sys.modules.items():
    if name.split('.')[0] in os.listdir(folder):
      assert Path(module.__file__).is_relative_to(folder)
  out.send((int(code), endings.ended, text.getvalue()))


@functools.cache
def context():
  """Children are forked from a server that has imported the libraries, but not started JAX, and none of the project."""
  made = multiprocessing.get_context('forkserver')
  made.set_forkserver_preload(['jax', 'flax.nnx', 'optax', 'numpy', 'pytest'])
  return made


def verdict(mutant: Mutant, scratch: Path) -> tuple[str, float]:
  """'' if every test that it names fails by an assertion, else what happened instead; and the seconds it took."""
  start = time.perf_counter()
  package = mutant.file.split('/')[0]
  folder = scratch / mutant.name
  shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns('__pycache__'))
  (folder / mutant.file).write_text(mutant.source())
  tests = [node(test) for test in mutant.tests]
  receive, send = context().Pipe(duplex=False)
  child = context().Process(target=run_tests, args=(send, str(folder), tests), daemon=True)
  child.start()
  send.close()
  try:
    if not receive.poll(TIMEOUT):
      return f'no end within {TIMEOUT} s', TIMEOUT
    code, ended, text = receive.recv()
  except EOFError:
    return 'its process died', time.perf_counter() - start
  finally:
    child.kill()
    child.join()
    receive.close()
  wrong = []
  for test in tests:
    endings = {ending for id_, ending in ended.items() if id_ == test or id_.startswith(f'{test}[')}
    if 'failed' not in endings:
      wrong.append(f'{test}: {", ".join(sorted(endings)) or "not run"}')
  if not wrong and code != pytest.ExitCode.TESTS_FAILED:
    wrong.append(f'pytest ended with {code}')
  if wrong and not ended:
    wrong.append(text[-500:])
  return '; '.join(wrong), time.perf_counter() - start


def slopes(name: str, old: str, new: str) -> Mutant:
  return Mutant(name, '', 'posenc/alibi.py', old, new, ('golden::test_alibi_slopes[slopes/H8]',))


def test_what_counts_as_a_kill(tmp_path):
  """A failed assertion. Not a version that is right, nor one that crashes, nor a test that is not there."""
  right = slopes('right', 'return -jnp', 'return -1.0 * jnp')
  crash = slopes('crash', 'power = 2 ** int', 'power = 2 ** into')
  broken = slopes('broken', 'import numpy as np', 'import numpie as np')
  wrong = slopes('wrong', 'np.arange(1, power + 1)', 'np.arange(power)')
  missing = wrong._replace(name='missing', tests=(*wrong.tests, 'golden::test_alibi_slopes[slopes/H0]'))
  mutants = [right, crash, broken, wrong, missing]
  with ThreadPoolExecutor(2) as pool:
    got = dict(zip((mutant.name for mutant in mutants), pool.map(lambda mutant: verdict(mutant, tmp_path)[0], mutants)))
  test = node(right.tests[0])
  assert got['wrong'] == '' and got['right'] == f'{test}: passed' and got['crash'] == f'{test}: NameError'
  assert got['broken'] == 'its process died' and 'slopes/H0]: not run' in got['missing']


@pytest.mark.slow
def test_every_mutant_is_killed(tmp_path):
  """And the tests that kill them pass on what is shipped. With -s it prints what each one took."""
  tests = tuple(sorted({test for mutant in MUTANTS for test in mutant.tests}))
  everything = [Mutant('shipped', 'as it is', 'posenc/__init__.py', '', '', tests), *MUTANTS]
  reasons = []
  with ThreadPoolExecutor(os.cpu_count()) as pool:
    for mutant, (reason, seconds) in zip(everything, pool.map(lambda mutant: verdict(mutant, tmp_path), everything)):
      print(f'{seconds:6.1f} s  {mutant.name}: {reason or "killed"}', flush=True)
      reasons.append(reason)
  passed = [f'{node(test)}: passed' for test in tests]
  assert reasons[0].split('; ') == passed, 'a test that kills fails on the source as it is, too'
  survivors = [
    f'{mutant.name} ({mutant.why}): {reason}' for mutant, reason in zip(everything[1:], reasons[1:]) if reason
  ]
  assert not survivors, '\n'.join(['survivors:', *survivors])

"""A model of another framework through files: the numbers of a sweep of ours come out, or one line says why not."""

import functools
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx

import evaluation
from configs import smoke
from configs.schema import Config
from evaluation import exchange, ingest, report, results, runs, tokens
from evaluation.plan import load
from evaluation.score import Scorer
from evaluation.survey import Survey
from evaluation.sweep import sweep
from spec import SpecError
from training.devices import make_mesh

LENGTHS = (16, 32, 64)


@pytest.fixture(scope='module')
def config(tmp_path_factory):
  """As config.json holds it: a recipe over files of its own, whose model is a tiny Llama."""
  folder = tmp_path_factory.mktemp('books')
  rng = np.random.default_rng(0)
  for i in range(24):
    words = rng.choice(['tide', 'moor', 'elm', 'quartz', 'yonder', 'vex', 'blithe'], 100 + 5 * i)
    (folder / f'{i:02d}.txt').write_text(' '.join(words))
  recipe = smoke.get_config()
  recipe.train_len, recipe.data.corpus = 16, f"text(glob='{folder}/*.txt')"
  recipe.eval.multiples, recipe.eval.controls = (1.0, 2.0, 4.0), ('truncated',)
  recipe.log.validate_multiples = (1.0,)
  recipe.model.kv_heads = 1
  return Config.from_dict(recipe.to_dict())


@pytest.fixture(scope='module')
def file(config, tmp_path_factory):
  path = tmp_path_factory.mktemp('windows') / 'windows.npz'
  return path, exchange.write(path, config.to_dict())


@pytest.fixture(scope='module')
def lm(config):
  return config.build_model(257)


@pytest.fixture(scope='module')
def ours(config, lm):
  """(points of a sweep, NLL of all targets by length)."""
  data, plan = load(config.to_dict())
  slots = [config.build_scheme(text) for text in config.posenc]
  graphdef, params = nnx.split(lm)
  scorer = Scorer(graphdef, params, make_mesh(1, (1, 1, 1)), 2048)
  survey = Survey(plan, slots, ('none',), LENGTHS, 16, config.build_rule(slots))
  facts = {'posenc': ['rope'], 'checkpoint_step': 0, 'seed': 0}
  parts = sweep(
    survey,
    lambda: scorer,
    bytes_per_token_V=data.tokenizer.bytes_per_token_V,
    facts=facts,
    progress=exchange._Silent(),
  )
  points = [p for part in parts for p in part]
  nll = {}
  for length, windows in survey.windows.items():
    pos = survey.made('none', length)[1]
    whole = [w._replace(scored=length) for w in windows]
    nll[length] = np.stack(scorer(plan, whole, [pos])[0])
  return points, nll


def scores(path, file, ours, **changes):
  """scores.npz of our own model; a change of None leaves an array out."""
  arrays = {'sha256': file[1].arrays['sha256'], **{f'nll_{n}': x for n, x in ours[1].items()}, **changes}
  np.savez(path, **{name: x for name, x in arrays.items() if x is not None})
  return path


def take(tmp_path, file, ours, *options, name='theirs', **changes):
  path = scores(tmp_path / 'scores.npz', file, ours, **changes)
  argv = [str(path), f'--windows={file[0]}', f'--name={name}', f'--workdir={tmp_path / "run"}', *options]
  return ingest.main(argv)


def test_the_file_holds_what_a_sweep_scores(file):
  path, made = file
  arrays = np.load(path)
  plan = made.plan
  for length, windows in made.windows.items():
    inputs, targets = plan.tokens(windows)
    np.testing.assert_array_equal(arrays[f'inputs_{length}'], inputs)
    np.testing.assert_array_equal(arrays[f'targets_{length}'], targets)
    np.testing.assert_array_equal(inputs[:, 1:], targets[:, :-1])
    places = zip(arrays[f'document_{length}'].tolist(), arrays[f'start_{length}'].tolist())
    assert list(places) == [plan.place(w) for w in windows]
  assert set(made.windows) == {*LENGTHS, plan.near}  # what the control reads, too
  (fixed,) = {int(n) for n in arrays[f'scored_{plan.near}']}
  assert fixed == plan.targets == 8


def test_its_numbers_are_those_of_our_own_sweep(tmp_path, file, ours, capsys):
  assert take(tmp_path, file, ours) == 0
  assert 'theirs' not in capsys.readouterr().err
  read = runs.read(tmp_path / 'run')
  same = ('nll', 'ppl', 'bits_per_byte', 'ci_low', 'ci_high', 'vs_1x', 'gain', 'windows', 'tokens', 'nll_documents')
  at = {(p['protocol'], p['length']): p for p in read.points}
  assert len(at) == len(ours[0]) == 2 * 3 + 2  # both protocols at three lengths, the control above 1x
  for p in ours[0]:
    got = at[p['protocol'], p['length']]
    assert got['scheme'] == 'theirs' and got['targets_hash'] == p['targets_hash'] and got['method'] == 'none'
    for field in same:
      assert got.get(field) == p.get(field), (field, p['protocol'], p['length'])


def test_what_reads_a_run_reads_it(tmp_path, file, ours, config):
  """Report, table, tokens, and a curve of ours beside it."""
  assert take(tmp_path, file, ours) == 0
  slower = {f'nll_{n}': x + np.float32(0.25) for n, x in ours[1].items()}
  assert take(tmp_path, file, ours, '--method=pi(factor=8)', **slower) == 0
  results.write(tmp_path / 'own' / 'extrapolation', ours[0])
  out = tmp_path / 'out'
  folders = [str(tmp_path / 'own'), str(tmp_path / 'run')]
  assert report.main([*folders, f'--out={out}', '--tokens=pi(factor=8) - none at 4x']) == 0
  text = (out / 'report.html').read_text()
  assert 'theirs none' in text and 'rope none' in text
  table = evaluation.load(folders)
  both = table[table.protocol == 'fixed_targets'].pivot(index='length', columns=['scheme', 'method'], values='nll')
  np.testing.assert_array_equal(both['theirs', 'none'], both['rope', 'none'])
  mine = table[(table.method == 'pi(factor=8)') & (table.protocol == 'fixed_targets')]
  np.testing.assert_allclose(mine.vs_none, 0.25, atol=1e-6)
  none, pi = tokens.lines([runs.read(tmp_path / 'run')])
  found = tokens.changes(tokens.Pair(pi, none, 64))
  assert found.n_worse == found.targets == 12 * 2 * 8


def test_other_protocols_follow_from_what_is_there(tmp_path, file, ours, capsys):
  assert take(tmp_path, file, ours) == 0
  assert ingest.main([f'--workdir={tmp_path / "run"}', '--protocol=position_wise']) == 0
  points = {p['length']: p for p in runs.read(tmp_path / 'run').points if p['protocol'] == 'position_wise'}
  _, made = file
  whole = [i for i, w in enumerate(made.windows[32]) if w.scored == 32]
  first = ours[1][32][whole][:, 0].astype(np.float64).mean()
  assert points[32]['buckets'][0][2] == pytest.approx(first, abs=1e-9)
  capsys.readouterr()
  assert ingest.main([f'--workdir={tmp_path / "run"}', '--protocol=sliding(stride=4)']) == 2
  assert 'windows of 16 tokens were not scored' in one_line(capsys)


def test_a_length_that_was_not_scored_is_said_to_be_unsupported(tmp_path, file, ours):
  assert take(tmp_path, file, ours, nll_64=None) == 0
  points = {(p['protocol'], p['length']): p for p in runs.read(tmp_path / 'run').points}
  assert points['fixed_targets', 64]['outcome'] == 'unsupported'
  assert points['fixed_targets', 32]['outcome'] == 'ok'
  assert take(tmp_path, file, ours) == 0  # and is filled in
  points = {(p['protocol'], p['length']): p for p in runs.read(tmp_path / 'run').points}
  assert points['fixed_targets', 64]['outcome'] == 'ok'


def test_a_diverged_target_is_no_error(tmp_path, file, ours):
  nll = ours[1][64].copy()
  nll[3, -1] = np.inf
  assert take(tmp_path, file, ours, nll_64=nll) == 0
  points = {(p['protocol'], p['length']): p for p in runs.read(tmp_path / 'run').points}
  assert points['fixed_targets', 64]['outcome'] == 'diverged'


def one_line(capsys):
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and 'Traceback' not in err, err
  return err


def changed(ours, length, at, value):
  x = ours[1][length].copy()
  x[at] = value
  return {f'nll_{length}': x}


BAD = {
  'NaN': (lambda o: changed(o, 64, (2, -1), np.nan), r'nll_64\[2, 63\] is NaN'),
  'log p': (lambda o: changed(o, 32, (0, -2), -3.0), r'nll_32\[0, 30\] is below 0'),
  'another tokenizer': (lambda o: {'nll_64': o[1][64][:, :50]}, r'nll_64 has shape \(\d+, 50\).*another tokenizer'),
  'fewer windows': (lambda o: {'nll_16': o[1][16][1:]}, r'nll_16 has shape'),
  'a row for all': (lambda o: {'nll_16': o[1][16].mean(1)}, r'nll_16 has shape'),
  'integers': (lambda o: {'nll_16': o[1][16].astype(int)}, 'nll_16 is of int64'),
  'other windows': (lambda o: {'sha256': np.array('0' * 64)}, 'scores other windows'),
  'no hash': (lambda o: {'sha256': None}, 'no sha256'),
  'a stray array': (lambda o: {'nll_48': o[1][16]}, 'nll_48: nll_'),
  'objects': (lambda o: {'nll_16': np.array([None, 1])}, 'no file of arrays'),
}


@pytest.mark.parametrize('case', BAD)
def test_what_is_wrong_is_one_line(case, tmp_path, file, ours, capsys):
  make, message = BAD[case]
  assert take(tmp_path, file, ours, **make(ours)) == 2
  assert re.search(message, one_line(capsys))
  assert not (tmp_path / 'run').exists()


def test_only_what_counts_is_looked_at(tmp_path, file, ours):
  _, made = file
  nll = ours[1][made.plan.near].copy()
  nll[:, : -made.plan.targets] = np.nan
  assert take(tmp_path, file, ours, **{f'nll_{made.plan.near}': nll}) == 0


def test_a_window_of_infinite_losses_comes_again(tmp_path, file, ours):
  """inf less inf is no number, and no difference; numpy warns of a row that is all of it, and warnings are errors."""
  all_inf = changed(ours, 32, 4, np.inf)
  for _ in range(2):
    assert take(tmp_path, file, ours, **all_inf) == 0


def test_two_models_in_one_folder_are_refused(tmp_path, file, ours, capsys):
  assert take(tmp_path, file, ours) == 0
  capsys.readouterr()
  assert take(tmp_path, file, ours, name='another') == 2
  assert "holds the numbers of name 'theirs'" in one_line(capsys)
  assert take(tmp_path, file, ours, **changed(ours, 32, (4, -1), 20.0)) == 2
  assert 'has other numbers at 32 tokens already' in one_line(capsys)
  (tmp_path / 'run' / 'config.json').write_text(json.dumps({'config': {}, 'data': {}}))
  assert take(tmp_path, file, ours) == 2
  assert 'holds a run that was trained there' in one_line(capsys)


def test_windows_that_are_not_what_they_were_are_refused(tmp_path, file, ours, config):
  path, made = file
  altered = {**made.arrays, 'inputs_16': made.arrays['inputs_16'] + 1}
  np.savez(tmp_path / 'altered.npz', **altered)
  with pytest.raises(SpecError, match='not those that its sha256 is of'):
    exchange.read_windows(tmp_path / 'altered.npz')
  np.savez(tmp_path / 'other.npz', record=np.array('{}'), sha256=np.array(''))
  with pytest.raises(SpecError, match='not written by'):
    exchange.read_windows(tmp_path / 'other.npz')
  record = json.loads(str(made.arrays['record']))
  moved = {**made.arrays, 'record': np.array(json.dumps({**record, 'tokens_sha256': 'f' * 64}))}
  moved['sha256'] = np.array(exchange._digest(moved))
  np.savez(tmp_path / 'moved.npz', **moved)
  with pytest.raises(SpecError, match='the corpus or its tokenizer has changed since'):
    exchange.read_windows(tmp_path / 'moved.npz')
  with pytest.raises(SpecError, match='no such file'):
    exchange.read_windows(tmp_path / 'gone.npz')


def test_the_program_writes_the_same_file(root, tmp_path, config, file):
  (tmp_path / 'config.json').write_text(json.dumps({'config': config.to_dict(), 'data': {}}))
  command = [sys.executable, '-m', 'evaluation.windows', f'--workdir={tmp_path}', f'--out={tmp_path / "w.npz"}']
  env = {**os.environ, 'PYTHONPATH': str(root)}
  done = subprocess.run([*command, '--multiples=1,2,4'], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert str(np.load(tmp_path / 'w.npz')['sha256']) == str(file[1].arrays['sha256'])
  done = subprocess.run([*command, '--config=configs/smoke.py'], cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 2 and done.stderr == 'error: --config, --workdir: one of the two is needed\n'


# With torch: in this interpreter, or in that of LONGCURVE_PEER_PYTHON.


PEER = """
import sys, numpy as np, torch
from transformers import LlamaConfig, LlamaForCausalLM
saved = np.load('llama.npz')
shapes = {k: int(saved[k]) for k in saved.files if not saved[k].shape}
model = LlamaForCausalLM(LlamaConfig(
  **shapes, vocab_size=257, rms_norm_eps=1e-6, tie_word_embeddings=True, attention_bias=False, mlp_bias=False,
  rope_parameters={'rope_type': 'default', 'rope_theta': 10000.0}, attn_implementation='eager'))
state = {k: torch.from_numpy(saved[k]) for k in saved.files if saved[k].shape}
missing, unexpected = model.load_state_dict(state, strict=False)
assert set(missing) <= {'lm_head.weight'} and not unexpected, (missing, unexpected)
model.eval()
exec(open('example.py').read())
"""


def as_llama(lm, cfg):
  """Our parameters under Hugging Face's names."""
  slot = nnx.to_pure_dict(nnx.state(lm.slots[0]))
  state = {'model.embed_tokens.weight': lm.embedding.embedding[...], 'model.norm.weight': lm.norm.scale[...]}
  names = {('attention', 'query'): 'self_attn.q_proj', ('attention', 'key'): 'self_attn.k_proj'}
  names |= {('attention', 'value'): 'self_attn.v_proj', ('attention', 'out'): 'self_attn.o_proj'}
  names |= {('mlp', part): f'mlp.{part}_proj' for part in ('gate', 'up', 'down')}
  for i in range(cfg.layers):
    for (block, part), theirs in names.items():
      state[f'model.layers.{i}.{theirs}.weight'] = slot[block][part]['kernel'][i].T
    for part, theirs in (('norm_attention', 'input_layernorm'), ('norm_mlp', 'post_attention_layernorm')):
      state[f'model.layers.{i}.{theirs}.weight'] = slot[part]['scale'][i]
  shapes = {
    'hidden_size': cfg.d_model, 'intermediate_size': cfg.mlp, 'num_hidden_layers': cfg.layers, 'head_dim': cfg.width,
    'num_attention_heads': cfg.heads, 'num_key_value_heads': cfg.kv, 'max_position_embeddings': 16,
  }  # fmt: skip
  return {k: np.asarray(v) for k, v in {**state, **shapes}.items()}


@functools.cache
def peer():
  """A Python with torch and transformers; skips without."""
  python = os.environ.get('LONGCURVE_PEER_PYTHON', sys.executable)
  if subprocess.run([python, '-c', 'import torch, transformers'], capture_output=True).returncode:
    pytest.skip('no torch and transformers; LONGCURVE_PEER_PYTHON names a Python that has them')
  return python


def example(root):
  (code,) = re.findall(r'```python\n(.*?)```', (root / 'docs' / 'bring_your_own.md').read_text(), re.S)
  return code


def test_the_example_of_the_docs_is_short_and_python(root):
  code = example(root)
  compile(code, 'docs/bring_your_own.md', 'exec')
  assert len([line for line in code.splitlines() if line]) <= 17


def test_the_same_weights_in_torch_by_the_example_of_the_docs(root, tmp_path, config, file, lm, ours):
  python = peer()
  # A model whose logits say something: the random ones are within 0.1 of uniform.
  sharp = nnx.merge(*nnx.split(lm))
  nnx.update(sharp, jax.tree.map(lambda a: 3 * a if a.ndim > 2 else a, nnx.state(sharp)))
  np.savez(tmp_path / 'llama.npz', **as_llama(sharp, config.model))
  (tmp_path / 'example.py').write_text(example(root))
  (tmp_path / 'windows.npz').write_bytes(file[0].read_bytes())
  subprocess.run([python, '-c', PEER], cwd=tmp_path, check=True, env={**os.environ, 'PYTHONPATH': ''})
  graphdef, params = nnx.split(sharp)
  scorer = Scorer(graphdef, params, make_mesh(1, (1, 1, 1)), 2048)
  data, plan = load(config.to_dict())
  slots = [config.build_scheme(text) for text in config.posenc]
  survey = Survey(plan, slots, ('none',), LENGTHS, 16, config.build_rule(slots))
  facts = {'posenc': ['rope'], 'checkpoint_step': 0, 'seed': 0}
  bytes_V = data.tokenizer.bytes_per_token_V
  parts = sweep(survey, lambda: scorer, bytes_per_token_V=bytes_V, facts=facts, progress=exchange._Silent())
  mine = {(p['protocol'], p['length']): p['nll'] for part in parts for p in part}
  argv = [str(tmp_path / 'scores.npz'), f'--windows={file[0]}', '--name=torch', f'--workdir={tmp_path / "run"}']
  assert ingest.main(argv) == 0
  theirs = {(p['protocol'], p['length']): p['nll'] for p in runs.read(tmp_path / 'run').points}
  apart = max(abs(theirs[key] - mine[key]) for key in mine)
  scored = np.load(tmp_path / 'scores.npz')
  pos = survey.made('none', 64)[1]
  rows = np.stack(scorer(plan, [w._replace(scored=64) for w in survey.windows[64]], [pos])[0])
  token = float(np.abs(rows - scored['nll_64']).max())
  print(f'points at most {apart:.1e} nats apart, tokens {token:.1e}; NLL {min(mine.values()):.3f} nats')
  assert apart < 1e-4 and token < 1e-4 and rows.std() > 0.3

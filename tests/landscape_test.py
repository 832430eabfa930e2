"""The overview table: what of a scheme is looked up, what is measured, and in which order it stands."""

import json

import pytest
from flax import nnx

import posenc
from evaluation.runs import together
from forms import SPEC, build
from report_test import make  # noqa: F401
from scripts import landscape
from spec import SpecError


@pytest.mark.parametrize('scheme, kind, where', [
  ('nope', 'none', 'nothing'),
  ('sinusoidal', 'absolute', 'embeddings'),
  ('learned', 'absolute', 'embeddings'),
  ('rope', 'relative', 'queries, keys'),
  ('rope2d', 'absolute', 'queries, keys'),
  ('pope', 'relative', 'queries, keys'),
  ('alibi', 'relative', 'logits'),
  ('fire', 'absolute', 'logits'),
  ('shaw', 'relative', 'logits, values'),
  ('shaw(use_values=False)', 'relative', 'logits'),
  ('cope', 'of the text', 'logits'),
  ('fox', 'of the text', 'logits'),
  ('fox(rope=True)', 'relative', 'queries, keys, logits'),
])  # fmt: skip
def test_what_a_scheme_changes(scheme, kind, where):
  made = nnx.eval_shape(lambda: build(SPEC.get(scheme, scheme)))  # as a config makes it
  assert (landscape.kind(made), landscape.where(made)) == (kind, where)


def test_every_scheme_is_in_it():
  args = [landscape.FORMS.get(name, name) for name in posenc.SCHEMES]
  for text in args:  # none lacks a number
    made = nnx.eval_shape(lambda text=text: build(text))
    assert landscape.kind(made) and landscape.where(made), text


@pytest.fixture
def runs(make):  # noqa: F811
  """nope, which breaks, alibi, learned, which ends at 1x, and rope, of two seeds each."""
  folders = []
  for seed in (0, 1):
    for i, scheme in enumerate(('nope', 'alibi', 'learned', 'rope')):
      folder = make(f'{scheme},seed={seed}', scheme, seed, ('none', 'yarn'), params=200 + 10 * i)
      config = {'posenc': [scheme], 'seed': seed, 'train_len': 16, 'eval': {'multiples': (1, 2, 4)}}
      (folder / 'config.json').write_text(json.dumps({'config': config}))
      curve = folder / 'extrapolation' / 'curve.jsonl'
      points = [p for p in map(json.loads, curve.read_text().splitlines()) if p['protocol'] == 'fixed_targets']
      for p in points:
        flat = {'nope': 0.1, 'alibi': 0.0, 'learned': 0.0, 'rope': 0.3}[scheme]
        p['nll_documents'] = [1 + d / 10 + seed / 100 + flat * (p['length'] - 16) for d in range(12)]
        if p['method'] == 'yarn':
          p['nll_documents'] = [x + 0.25 for x in p['nll_documents']]
          p['nll'] += 0.25
      if scheme == 'learned':
        points = [p for p in points if p['length'] == 16]
      curve.write_text(''.join(json.dumps(p) + '\n' for p in points))
      told = [{'step': 0, 'train/bytes': 1000 * (1 + i)}]
      told += [{'step': s, 'train/tokens_per_second': v / (1 + i)} for s, v in ((5, 100.0), (10, 300.0), (15, 110.0))]
      (folder / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in told))
      folders.append(folder)
  return folders


def test_the_table(runs):
  text = landscape.table(together(runs))
  rows = [[cell.strip() for cell in line.split('|')[1:-1]] for line in text.splitlines() if line.startswith('| `')]
  by_name = {row[0]: dict(zip(landscape.HEAD, row)) for row in rows}
  assert rows[0][0] == '`alibi`' and [row[0] for row in rows][-1] == '`rope` `yarn`' and len(rows) == 5
  alibi, nope, rope = (by_name[f'`{scheme}`'] for scheme in ('alibi', 'nope', 'rope'))
  assert alibi['stretch'].startswith('≥ 4x') and rope['stretch'].startswith('1x') and nope['stretch'].startswith('1x')
  assert by_name['`learned`']['stretch'].endswith(', ends at 1x')
  assert (nope['learned'], alibi['learned'], rope['learned']) == ('0', '10', '30')
  assert (nope['tokens/s'], alibi['tokens/s'], rope['tokens/s']) == ('1.00', '0.50', '0.25')
  assert (nope['bytes'], rope['bytes']) == ('1.00', '4.00')
  level = 1 + 5.5 / 10 + 0.005  # both seeds
  assert alibi['NLL at 1x'].startswith(f'{level:.3f} ±')
  assert by_name['`rope` `yarn`']['NLL at 1x'].startswith(f'{level + 0.25:.3f} ±')
  assert '(+0.250' in by_name['`rope` `yarn`']['NLL at 1x']  # what it costs
  assert 'seeds 0, 1' in text and 'no scheme has one of its own' in text and 'Rank stability: not measured' in text


def test_without_nope_nothing_is_relative_to_it(runs):
  text = landscape.table(together([folder for folder in runs if 'nope' not in folder.name]))
  row = next(line for line in text.splitlines() if line.startswith('| `alibi`'))
  assert [cell.strip() for cell in row.split('|')][-3:-1] == ['?', '?'] and '| ? |' in row


def test_an_empty_folder(tmp_path):
  with pytest.raises(SpecError, match='no run that was swept'):
    landscape.main([f'--workdir={tmp_path}', '--table'])


def test_the_folder_keeps_its_table(runs, tmp_path, capsys):
  assert landscape.main([f'--workdir={tmp_path}', '--table']) == 0
  written = (tmp_path / 'landscape.md').read_text()
  assert written.strip() in capsys.readouterr().out and '| `alibi` |' in written

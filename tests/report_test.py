"""The report: every number on its page is the statistics' own, and nothing that a file says becomes markup."""

import csv
import html.parser
import json
import math
import re

import numpy as np
import pytest

import evaluation
import posenc
from evaluation import figures, gather, report, results, sections, summary, tokens
from evaluation.runs import side_by_side
from evaluation.stats import infer
from spec import SpecError

HOSTILE = '<script src="http://x.y/z">alert(1)</script>&"\'$\\frac$'


def point(scheme, method, length, x_D, **changes):
  nll = float(np.mean(x_D))
  return {
    'scheme': scheme, 'positions': 'sequential', 'method': method, 'follows_length': False, 'train_length': 16,
    'length': length, 'protocol': 'fixed_targets', 'outcome': 'ok', 'reason': None, 'T': 8, 'targets_hash': 'abc',
    'positions_hash': 'def', 'posenc': [scheme], 'checkpoint_step': 100, 'seed': 0, 'params': 200, 'tokens_seen': 500,
    'nll': nll, 'ppl': math.exp(nll), 'bits_per_byte': nll, 'ci_low': None, 'ci_high': None, 'windows': 12,
    'tokens': 96, 'documents': len(x_D), 'nll_documents': list(map(float, x_D)), 'corpus': 'sotu', **changes,
  }  # fmt: skip


@pytest.fixture
def make(tmp_path):
  """A run as train.py and a sweep leave it, its corpus apart."""

  def make(name, scheme='rope', seed=0, methods=('none', 'yarn'), **changes):
    rng, text_D = np.random.default_rng(seed + len(scheme)), np.arange(12) / 10
    points = []
    for i, method in enumerate(methods):
      for n in (16, 32, 64):
        x_D = 2 + text_D + i * n / 128 + seed / 50 + 0.05 * rng.standard_normal(12)
        points.append(point(scheme, method, n, x_D, seed=seed, **changes))
        null = {'null': 3.0 - 0.002 * n, 'protocol': 'non_overlapping', 'buckets': [[0, 1, 3.0, 9], [1, n, 2.0, 9]]}
        points.append({**points[-1], **null})
        if n > 16:
          gain = {'protocol': 'truncated', 'gain': 0.1, 'gain_documents': list(map(float, x_D - 2 - text_D))}
          points.append({**points[-2], **gain})
    folder = tmp_path / name
    results.write(folder / 'extrapolation', points, redraw=False)
    config = {'posenc': [scheme], 'seed': seed, 'eval': {'compare': ['yarn - none at 4x']}}
    (folder / 'config.json').write_text(json.dumps({'config': config, 'data': {}, 'git_commit': 'fee1dead'}))
    return folder

  return make


class Page(html.parser.HTMLParser):
  """Titles of cells, tags, attributes, text."""

  def __init__(self, text):
    super().__init__()
    self.titles, self.tags, self.attributes, self.text = [], [], [], ''
    self.feed(text)

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs
    if tag == 'td':
      self.titles += [value for name, value in attrs if name == 'title']

  def handle_data(self, data):
    self.text += data


def test_the_page_has_the_numbers_of_the_statistics(make, tmp_path):
  folders = [make('a0'), make('a1', seed=1), make('a2', seed=2), make('b', 'alibi', methods=('none',))]
  assert report.main([*map(str, folders), f'--out={tmp_path / "out"}']) == 0
  text = (tmp_path / 'out' / 'report.html').read_text()
  found = Page(text)
  points = [p for run in side_by_side(folders) for p in run.points]
  rows = summary.rows(points)
  said = [f'{r["ppl"]!r}, 95 % {r["ci_low"]!r} to {r["ci_high"]!r}' for r in rows if r.get('seeds')]
  marks = [r for r in rows if 'marked' in r]
  said += [f'{r["vs_none"]!r}, 95 % {r["vs_none_low"]!r} to {r["vs_none_high"]!r}, p = {r["p"]!r}' for r in marks]
  cells = [
    *summary.gains(points).values(),
    *(d.cell for d in summary.declared(points, {'rope': ['yarn - none at 4x']})),
  ]
  lines = [c for c in summary.curves(points) if c.protocol == 'fixed_targets' and 'gain_documents' not in c.point]
  cells += summary.between(lines).values()
  said += [f'{c.mean!r}, 95 % {c.low!r} to {c.high!r}' for c in cells]
  said += [f'{e.value!r}, 95 % {e.low!r} to {e.high!r}' for x in summary.extents(points) for e in (x.stretch, *x.reach)]
  assert len(marks) == 6 and len(cells) == 6 + 1 + 3
  for one in said:
    assert any(title.startswith(one) for title in found.titles), one
  with (tmp_path / 'out' / 'report.csv').open(newline='') as file:
    table = list(csv.DictReader(file))
  assert {float(r['value']) for r in table if r['table'] == 'less none'} == {r['vs_none'] for r in marks}
  assert {float(r['value']) for r in table if r['table'] == 'perplexity'} == {r['ppl'] for r in rows}
  assert '"gains" 9.2 %' in found.text  # 1 - exp(-0.002 * 48)
  assert 'Press et al. 2021' in found.text and 'YaRN' in found.text and 'fee1dead' in found.text
  assert (tmp_path / 'out' / 'report.pdf').read_bytes().startswith(b'%PDF')
  assert report.main([*map(str, folders), f'--out={tmp_path / "again"}']) == 0
  assert (tmp_path / 'again' / 'report.html').read_text() == text


def test_what_is_drawn_and_has_no_table_is_in_the_csv(make, tmp_path):
  """Means over seeds by position in the window, and floors."""
  folders = [make('a0', floor=1.5), make('a1', seed=1, floor=1.5)]
  for folder, nll in zip(folders, (3.0, 4.0)):
    path = folder / 'extrapolation' / 'curve.jsonl'
    path.write_text(path.read_text().replace('[0, 1, 3.0, 9]', f'[0, 1, {nll}, 9]'))
  assert report.main([*map(str, folders), f'--out={tmp_path / "out"}']) == 0
  with (tmp_path / 'out' / 'report.csv').open(newline='') as file:
    table = list(csv.DictReader(file))

  def of(name):
    found = [r for r in table if r['table'] == name]
    assert {r['unit'] for r in found} == {'perplexity' if name == 'theoretical floor' else 'nats'}
    return {(r['method'], r['protocol'], int(r['length'])): float(r['value']) for r in found}

  everywhere = [('none', n) for n in (16, 32, 64)] + [('yarn', n) for n in (16, 32, 64)]
  assert of('at positions 0 to 0') == {(m, 'non_overlapping', n): 3.5 for m, n in everywhere}
  assert of('at positions 1 to 31') == {(m, 'non_overlapping', 32): 2.0 for m in ('none', 'yarn')}
  protocols = ('fixed_targets', 'non_overlapping')
  assert of('theoretical floor') == {('', p, n): math.exp(1.5) for p in protocols for n in (16, 32, 64)}


def test_every_figure_is_on_the_page_and_in_the_pdf(make, tmp_path, monkeypatch):
  folders = [make('a0'), make('a1', seed=1), make('b', 'alibi', methods=('none',), positions='randomized(max_len=64)')]
  found = report.Report(side_by_side(folders))
  assert set(found.pictures) == {'fixed_targets', 'non_overlapping', 'plane', 'position'}
  assert sections.html(found).count('<svg') == len(found.pictures)
  plane = found.pictures['plane'].figure.axes[0]
  assert {line.get_label() for line in plane.lines} >= {'rope none', 'rope yarn'}
  sheets, drawn = figures.sheets, []
  monkeypatch.setattr(figures, 'sheets', lambda lines: drawn.extend(lines) or sheets(lines))
  report.write_pdf(found, tmp_path / 'report.pdf')
  pages = len(re.findall(rb'/Type /Page\b', (tmp_path / 'report.pdf').read_bytes()))
  assert pages == len(found.pictures) + len(sheets(drawn)) > len(found.pictures)
  assert {line.split(': ')[0] for line in drawn[1:]} == {'rope', 'alibi', 'randomized', 'none', 'yarn'}


def test_position_panels_show_where_a_scheme_breaks():
  """The shortest length does not break; its panel does not set the others' limits."""
  points = [
    point('rope', 'none', n, [2.0], buckets=[[0, 16, 2.0, 9], *([[16, n, 4.0, 9]] if n > 16 else [])]) for n in (16, 32)
  ]
  figure = figures.by_position(points, figures.looks(points))
  assert all(ax.get_ylim()[0] < 2.0 and 4.0 < ax.get_ylim()[1] < 4.5 for ax in figure.axes[:2])


@pytest.mark.parametrize('name', [*posenc.SCHEMES, *posenc.METHODS, *posenc.RULES])
def test_every_reference_names_its_source(name):
  """A paper's year or number, a release, or what of ours it derives from."""
  text = gather.source(name)
  assert text.endswith(('.', ')')) and 'everything positional' not in text
  if name not in ('none', 'sequential'):
    assert re.search(r'\b(19|20)\d\d\b|\b\d{4}\.\d{4,5}\b|`\w+`', text), text


def test_nothing_from_elsewhere_and_no_strangers_markup(make, tmp_path):
  folder = make('a', HOSTILE, corpus=HOSTILE, reason=None)
  (folder / 'config.json').write_text(json.dumps({'config': {HOSTILE: HOSTILE}, 'git_commit': HOSTILE}))
  text = sections.html(report.Report(side_by_side([folder])))
  found = Page(text)
  assert HOSTILE in found.text and 'http' not in text.replace('http://x.y/', '')
  assert not {'script', 'link', 'img', 'iframe', 'object'} & set(found.tags)
  assert not [a for a in found.attributes if a[0] == 'src' or a[0].startswith('on')]
  assert all(value.startswith('#') for name, value in found.attributes if name.endswith('href'))


def test_what_is_missing_is_said_and_not_invented(make):
  folder = make('a', methods=('none',))
  points = [p for p in side_by_side([folder])[0].points if p['protocol'] == 'fixed_targets']
  for file in folder.rglob('*.json*'):
    file.unlink()
  results.write(folder / 'extrapolation', [{k: v for k, v in p.items() if k != 'params'} for p in points])
  text = Page(sections.html(report.Report(side_by_side([folder])))).text
  for part in ('no config.json', 'no control was swept', '--protocol=position_wise', 'not told', 'no method but none'):
    assert part in text, part
  assert 'gains"' not in text


@pytest.mark.parametrize(
  ('text', 'want'),
  [
    (
      'yarn - none at 4x',
      ['rope yarn - rope none at 4x, means of seeds 0, 1', 'alibi yarn - alibi none at 4x, seed 0'],
    ),
    ('alibi none - rope yarn at 2x', ['alibi none - rope yarn at 2x, means of seeds 0 and of 0, 1']),
    ('t5 none - alibi yarn at 1x', ['t5 none - alibi yarn at 1x, seed 0']),
    ('ntk - alibi none at 1x', ['t5 ntk - alibi none at 1x, seed 0']),
    ('alibi yarn - none at 1x', "'none' is several of the lines: 'rope none', 'alibi none', 't5 none' are allowed"),
    ('fire none - rope none at 1x', "'fire none' is none of the lines: 'rope none', 'rope yarn', 'alibi none'"),
    ('yarn at 4x', "a comparison such as 'yarn - none at 4x' or 'alibi none - rope yarn at 4x' is allowed"),
  ],
)
def test_whose_tokens_are_compared(make, text, want):
  folders = [make('a'), make('a1', seed=1), make('b', 'alibi'), make('c', 't5', methods=('none', 'ntk'))]
  runs = side_by_side(folders)
  if isinstance(want, list):
    pairs = tokens.pairs(text, runs)
    assert [pair.title for pair in pairs] == want
    assert {pair.length for pair in pairs} == {int(text[-2]) * 16}
    return
  with pytest.raises(SpecError) as caught:
    tokens.pairs(text, runs)
  assert want in str(caught.value) and '\n' not in str(caught.value)


def test_two_runs_of_a_scheme_are_named_by_their_folders(make):
  runs = side_by_side([make('a'), make('b', lr=1)])
  with pytest.raises(SpecError, match="'rope none' is several of the lines: 'rope .*a none', 'rope .*b none' are"):
    tokens.pairs('rope none - rope yarn at 1x', runs)
  (pair,) = tokens.pairs(f'{runs[0].scheme} none - {runs[1].scheme} none at 1x', runs)
  assert [line.runs for line in pair[:2]] == [(runs[0],), (runs[1],)]


def test_tokens_are_shown_between_schemes_unasked(make):
  """Of each scheme what its config fixed; then the best line of each against that of the first."""
  folders = [make('a'), make('a1', seed=1), make('b', 'alibi'), make('c', 't5', methods=('none', 'ntk'))]
  found = report.Report(side_by_side(folders))
  assert [pair.title for pair in found.comparisons()] == [
    'rope yarn - rope none at 4x, means of seeds 0, 1',
    'alibi yarn - alibi none at 4x, seed 0',
    't5 ntk - t5 none at 4x, seed 0',  # its config's comparison was not swept
    'alibi none - rope none at 4x, means of seeds 0 and of 0, 1',
    't5 none - rope none at 4x, means of seeds 0 and of 0, 1',
  ]
  assert 'alibi none - rope none at 4x' in Page(sections.html(found)).text


def test_what_was_fixed_in_advance_is_a_section_of_its_own(make):
  """Tested alone, over the seeds; by the scheme whose config named it; and what was not swept is said."""
  folders = [make('a'), make('a1', seed=1), make('b', 'alibi'), make('c', 't5', methods=('none',))]
  for folder, compare in zip(folders, (['yarn - none at 4x'], ['yarn - none at 4x'], [], ['yarn - none at 4x'])):
    record = json.loads((folder / 'config.json').read_text())
    record['config']['eval']['compare'] = compare
    (folder / 'config.json').write_text(json.dumps(record))
  found = report.Report(side_by_side(folders))
  (declared,) = found.declared
  lines = {c[:3]: c.x_SDL for c in found.lines if c.protocol == 'fixed_targets'}
  x_SD = (lines['rope', 'sequential', 'yarn'] - lines['rope', 'sequential', 'none'])[:, :, -1]
  want = infer(x_SD[:, :, None], alone=True)
  assert (declared.seeds, declared.cell.p) == ((0, 1), pytest.approx(float(want.p[0])))
  section = sections._declared(found)
  text = Page(section).text
  assert f'ropeyarn - none at 4x0, 1{float(want.mean[0]):+.3f}' in text and 'alibi' not in text
  assert f'{declared.detectable:.2g}t5: yarn - none at 4x: not both were swept there' in text


def test_load_is_a_tidy_table(make, tmp_path):
  make('a'), make('b', seed=1)
  (tmp_path / 'no_run').mkdir()
  table = evaluation.load([str(tmp_path / '*')])
  key = ['run', 'scheme', 'seed', 'method', 'protocol', 'length']
  assert list(table.columns[:6]) == key and len(table) == 2 * 2 * (3 + 3 + 2)
  assert not table.duplicated(key).any() and 'nll_documents' not in table
  run = side_by_side([tmp_path / 'b'])[0]
  mine = table[(table.run == str(tmp_path / 'b')) & (table.method == 'yarn') & (table.protocol == 'fixed_targets')]
  want = [p for p in run.points if (p['method'], p['protocol']) == ('yarn', 'fixed_targets')]
  assert dict(zip(mine.length, mine.nll)) == {p['length']: p['nll'] for p in want}
  with pytest.raises(SpecError):
    evaluation.load(str(tmp_path / 'gone*'))

"""The files a sweep leaves: they read back equal, survive infinities, and lose nothing in silence."""

import csv
import json
import math
import os
import subprocess
import sys

import matplotlib.figure
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from evaluation import figures, results
from evaluation import points as points_of
from evaluation.sweep import exp

TRAIN_LEN = 16
LENGTHS = (8, 16, 32, 128)


def point(method='none', length=16, nll=2.0, **changes):
  """A point as `sweep` makes it; `outcome` follows from the NLL as there."""
  diverged = not math.isfinite(exp(nll))
  ends = (None, None) if diverged else (exp(nll - 0.1), exp(nll + 0.1))
  return {
    'scheme': 'rope',
    'method': method,
    'follows_length': method == 'yarn',
    'train_length': TRAIN_LEN,
    'length': length,
    'protocol': 'fixed_targets',
    'outcome': 'diverged' if diverged else 'ok',
    'reason': None,
    'T': 8,
    'targets_hash': 'abc',
    'positions_hash': 'def',
    'posenc': ['rope'],
    'checkpoint_step': 100,
    'nll': nll,
    'ppl': exp(nll),
    'bits_per_byte': nll / math.log(2),
    'ci_low': ends[0],
    'ci_high': ends[1],
    'nll_documents': [nll, nll],
    'vs_none': 0.0 if method == 'none' else 0.25,
    **changes,
  }


def unsupported(method='ntk', length=16, **changes):
  full = point(method, length, outcome='unsupported', reason='no frequencies', positions_hash=None, **changes)
  return {k: v for k, v in full.items() if k not in ('nll', 'ppl', 'bits_per_byte', 'ci_low', 'ci_high', 'vs_none')}


def curve(methods=('none', 'yarn'), lengths=LENGTHS, **changes):
  return [point(m, n, 2.0 + i + n / 128, **changes) for n in lengths for i, m in enumerate(methods)]


def strict(text):
  """As a reader of another language parses: no NaN, no Infinity."""

  def refuse(constant):
    raise ValueError(constant)

  return json.loads(text, parse_constant=refuse)


def same(a, b):
  """Equal, NaN equal to itself."""
  assert repr(a) == repr(b)


NON_FINITE = [
  point(nll=800.0),
  point(length=32, nll=math.nan, vs_none=math.nan),
  point(length=128, nll=math.inf, nll_documents=[1.0, math.nan, math.inf, -math.inf], vs_none=-math.inf),
]


# curve.jsonl


def test_lines_are_strict_json_and_read_back_equal(tmp_path):
  """G09, E04: inf, -inf and nan are strings in the file and floats for the reader, in lists too."""
  same_points, _ = results.write(tmp_path, NON_FINITE)
  text = (tmp_path / 'curve.jsonl').read_text()
  raw = [strict(line) for line in text.splitlines()]
  assert (raw[0]['nll'], raw[0]['ppl'], raw[1]['nll']) == (800.0, 'inf', 'nan')
  assert raw[2]['nll_documents'] == [1.0, 'nan', 'inf', '-inf'] and raw[2]['vs_none'] == '-inf'
  same(points_of.read_curve(tmp_path / 'curve.jsonl'), NON_FINITE)
  same(same_points, NON_FINITE)


def test_finite_floats_keep_every_digit(tmp_path):
  nll = 1 / 3 + 1e-16
  results.write(tmp_path, [point(nll=nll)])
  (back,) = points_of.read_curve(tmp_path / 'curve.jsonl')
  same(back, point(nll=nll))


def test_the_same_sweep_again_leaves_the_same_bytes(tmp_path):
  assert results.write(tmp_path, [*curve(), *NON_FINITE])[1] is None
  before = {f: (tmp_path / f).read_bytes() for f in ('curve.jsonl', 'curve.csv', 'curve.png')}
  assert results.write(tmp_path, [*curve(), *NON_FINITE])[1] is None
  assert {f: (tmp_path / f).read_bytes() for f in before} == before
  assert sorted(p.name for p in tmp_path.iterdir()) == ['.drawn', *sorted(before), 'tensorboard']


def test_what_was_not_drawn_to_the_end_is_told_from_what_was(tmp_path, monkeypatch):
  results.write(tmp_path, curve(('none',)))
  assert points_of.is_drawn(tmp_path)
  results.write(tmp_path, curve(('none', 'yarn')), redraw=False)
  assert not points_of.is_drawn(tmp_path)

  def killed(*args):
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(results.events, 'write', killed)  # picture and table are of the new curve by now
    with pytest.raises(KeyboardInterrupt):
      results.draw(tmp_path, curve(('none', 'yarn')))
  assert not points_of.is_drawn(tmp_path)
  results.draw(tmp_path, curve(('none', 'yarn')))
  assert points_of.is_drawn(tmp_path)


def test_the_order_of_sweeps_leaves_the_same_bytes(tmp_path):
  """Methods come by name after none, not in the order in which a history of sweeps first met them."""
  sweeps = [curve(('none', 'yarn')), curve(('none', 'pi'), (8, 16)), curve(('none', 'ntk'), checkpoint_step=200)]
  files = []
  for i, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2, 1, 0])):
    for j in order:
      results.write(tmp_path / str(i), sweeps[j])
    files.append((tmp_path / str(i) / 'curve.jsonl').read_bytes())
  assert files[0] == files[1] == files[2]
  first = points_of.read_curve(tmp_path / '0' / 'curve.jsonl')[:3]
  assert [(p['length'], p['method']) for p in first] == [(8, 'none'), (8, 'pi'), (8, 'yarn')]


def test_a_second_sweep_adds_its_methods_and_lengths(tmp_path):
  results.write(tmp_path, curve(('none', 'yarn'), (16, 32)))
  points, kept = results.write(tmp_path, [point('none', 16, 2.125), point('pi', 64)])
  assert kept is None and len(points) == 5
  assert {(p['method'], p['length']) for p in points} == {
    ('none', 16), ('none', 32), ('yarn', 16), ('yarn', 32), ('pi', 64)
  }  # fmt: skip


@pytest.mark.parametrize('field, value', [('checkpoint_step', 200), ('targets_hash', 'xyz')])
def test_points_of_another_checkpoint_or_target_set_stay_but_are_not_drawn(tmp_path, field, value):
  results.write(tmp_path, curve())
  points, kept = results.write(tmp_path, curve(('none',), **{field: value}))
  assert kept is None and points == curve(('none',), **{field: value})
  everything = points_of.read_curve(tmp_path / 'curve.jsonl')
  assert len(everything) == 12
  for p in (*curve(), *points):
    assert p in everything
  assert len((tmp_path / 'curve.csv').read_text().splitlines()) == 1 + 12
  assert set(runs(tmp_path)) == {'rope none seed 0'}  # the other checkpoint's yarn is no curve of this one


@pytest.mark.parametrize('field', points_of.KEY)
def test_each_part_of_the_key_tells_points_apart(field):
  other = {'protocol': 'non_overlapping', 'length': 32, 'method': 'pi', 'checkpoint_step': 1, 'targets_hash': 'x'}
  assert len(points_of.merge([point()], [{**point(), field: other[field]}])) == 2
  assert points_of.merge([point()], [{**point(nll=3.0)}]) == [point(nll=3.0)]


def test_a_changed_curve_is_kept_under_another_name(tmp_path):
  """Nothing that was measured is overwritten in silence; and nothing is kept when nothing changed."""
  results.write(tmp_path, curve())
  before = (tmp_path / 'curve.jsonl').read_bytes()
  points, kept = results.write(tmp_path, [point('yarn', 32, 9.0)])
  assert kept == 'curve-001.jsonl'
  assert (tmp_path / kept).read_bytes() == before
  assert len(points) == 8 and point('yarn', 32, 9.0) in points and point('yarn', 32, 3.25) not in points
  assert results.write(tmp_path, [point('yarn', 32, 9.0)])[1] is None
  second = (tmp_path / 'curve.jsonl').read_bytes()
  assert results.write(tmp_path, [point('yarn', 32, 9.5)])[1] == 'curve-002.jsonl'
  assert (tmp_path / 'curve-001.jsonl').read_bytes() == before
  assert (tmp_path / 'curve-002.jsonl').read_bytes() == second


def test_a_sweep_killed_while_writing_leaves_the_previous_curve(tmp_path, monkeypatch):
  results.write(tmp_path, curve())
  before = (tmp_path / 'curve.jsonl').read_bytes()

  def killed(*args):
    raise KeyboardInterrupt

  monkeypatch.setattr(type(tmp_path), 'replace', killed)
  with pytest.raises(KeyboardInterrupt):
    results.write(tmp_path, [point('pi')])
  assert (tmp_path / 'curve.jsonl').read_bytes() == before


def test_a_figure_that_fails_loses_no_numbers(tmp_path, monkeypatch):
  """G08."""

  def fail(*args):
    raise RuntimeError

  monkeypatch.setattr(figures, 'plot', fail)
  with pytest.raises(RuntimeError):
    results.write(tmp_path, curve())
  assert points_of.read_curve(tmp_path / 'curve.jsonl') == curve()
  assert (tmp_path / 'curve.csv').exists()


# curve.csv


def test_the_csv_reads_back(tmp_path):
  points = [*NON_FINITE, unsupported('ntk', 256)]
  results.write(tmp_path, points)
  with (tmp_path / 'curve.csv').open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 4 and 'nll_documents' not in rows[0]
  assert [float(r['ppl']) for r in rows[:3]] == pytest.approx([math.inf, math.nan, math.inf], nan_ok=True)
  assert [float(r['nll']) for r in rows[:3]] == pytest.approx([800.0, math.nan, math.inf], nan_ok=True)
  assert [r['outcome'] for r in rows] == ['diverged'] * 3 + ['unsupported']
  assert (rows[3]['ppl'], rows[3]['reason']) == ('', 'no frequencies')
  assert set(rows[0]) == {k for p in points for k in p} - {'nll_documents'}


# The table.


def test_the_table():
  """Half widths as they are printed, an empty cell where nothing was measured, the cost at 1x of methods."""
  points = [
    point('none', 16, math.log(10), ci_low=9.5, ci_high=10.75),
    point('none', 128, math.log(123456), ci_low=None, ci_high=None),
    point('yarn', 16, math.log(12.5), ci_low=12.0, ci_high=13.0, vs_none=math.log(1.25)),
    point('pi', 16, 2.0, vs_none=math.log(0.5)),
    point('pi', 128, 800.0),
    unsupported('ntk', 16),
  ]
  assert results.table(points).splitlines() == [
    'fixed_targets           1x         8x  cost at 1x',
    'none              10 ±0.62  1.235e+05            ',
    'yarn             12.5 ±0.5                +25.0 %',
    'pi             7.389 ±0.74   diverged     -50.0 %',
    'ntk            unsupported                       ',
  ]


def test_the_table_of_several_schemes_names_them():
  points = [point(), point(scheme='alibi', nll=3.0)]
  assert [line.split('  ')[0] for line in results.table(points).splitlines()[1:]] == ['rope none', 'alibi none']


def test_the_table_names_the_positions_of_training():
  points = [point(positions='sequential'), point(positions='pose(target_len=64)', scheme='alibi')]
  labels = ['rope none', 'alibi pose(target_len=64) none']
  assert [line.split('  ')[0] for line in results.table(points).splitlines()[1:]] == labels


def test_the_table_is_of_one_protocol():
  points = [point(), point(protocol='non_overlapping', nll=3.0)]
  assert '7.389' in results.table(points) and '20.09' in results.table(points, 'non_overlapping')
  assert '20.09' not in results.table(points)


@pytest.mark.parametrize('difference', [800.0, math.inf, math.nan, -math.inf])
def test_a_method_that_blew_up_at_1x_has_a_line(difference):
  """E04: the numbers are on disk by then, but a traceback would hide the table."""
  lines = results.table([point(), point('pi', nll=800.0, vs_none=difference)]).splitlines()
  assert len(lines) == 3 and 'diverged' in lines[2]


def test_the_table_ends_with_the_floor_of_its_protocol():
  points = [point(floor=math.log(2.5)), point('yarn', floor=math.log(2.5)), point(length=128, floor=math.log(1.25))]
  other = point(protocol='non_overlapping', nll=3.0, floor=math.log(4.0))
  plain = [{k: v for k, v in p.items() if k != 'floor'} for p in points]
  lines = results.table([*points, other]).splitlines()
  assert [line.split() for line in lines[:-1]] == [line.split() for line in results.table(plain).splitlines()]
  assert lines[-1].split() == ['theoretical', 'floor', '2.5', '1.25']
  assert results.table([*points, other], 'non_overlapping').splitlines()[-1].split() == ['theoretical', 'floor', '4']


# The figure.


@pytest.fixture
def drawn(tmp_path, monkeypatch):
  """Draws points and returns the figure; the file is a PNG of some size."""
  saved = []
  save = matplotlib.figure.Figure.savefig

  def keep(figure, *args, **kwargs):
    saved.append(figure)
    save(figure, *args, **kwargs)

  monkeypatch.setattr(matplotlib.figure.Figure, 'savefig', keep)

  def draw(points):
    figures.plot(tmp_path / 'curve.png', points)
    data = (tmp_path / 'curve.png').read_bytes()
    assert data.startswith(b'\x89PNG') and len(data) > 5000
    return saved[-1]

  return draw


def lines(ax, label):
  return [line for line in ax.get_lines() if line.get_label() == label]


def test_a_line_per_method_with_its_band_and_the_training_length(drawn):
  figure = drawn(curve())
  (ax,) = figure.axes
  for i, method in enumerate(('none', 'yarn')):
    (line,) = lines(ax, method)
    np.testing.assert_array_equal(line.get_xdata(), LENGTHS)
    np.testing.assert_allclose(line.get_ydata(), [math.exp(2 + i + n / 128) for n in LENGTHS])
    assert line.get_linestyle() == ('--' if method == 'yarn' else '-')  # told its length: an oracle
  bands = ax.collections
  assert len(bands) == 2
  vertices = bands[0].get_paths()[0].vertices
  assert {round(v, 9) for v in vertices[:, 1]} == {
    round(math.exp(2 + n / 128 + s), 9) for n in LENGTHS for s in (-0.1, 0.1)
  }
  assert [t.get_text() for t in ax.get_xticklabels()] == ['8\n0.5x', '16\n1x', '32\n2x', '128\n8x']
  assert any(np.array_equal(line.get_xdata(), [16, 16]) for line in ax.get_lines())
  assert (ax.get_xscale(), ax.get_yscale()) == ('log', 'log')
  assert 'document' in figure.legends[0].get_title().get_text()


def test_of_too_few_documents_each_is_drawn(drawn):
  """In their method's colour, cut where the means are cut, and none changes what the axis spans above."""
  nll_D = [0.5, 2.0, 3.0, 600.0, math.inf]
  points = [{**p, 'ci_low': None, 'ci_high': None, 'nll_documents': [x + p['nll'] - 2 for x in nll_D]} for p in curve()]
  figure = drawn(points)
  (ax,) = figure.axes
  found = [c for c in ax.collections if isinstance(c, matplotlib.collections.LineCollection)]
  for i, (method, each) in enumerate(zip(('none', 'yarn'), found, strict=True)):
    (mean,) = lines(ax, method)
    assert matplotlib.colors.same_color(each.get_edgecolor()[0][:3], mean.get_color())
    xy = np.array([path.vertices for path in each.get_paths()])
    assert xy.shape == (len(nll_D), len(LENGTHS), 2) and (xy[..., 0] == LENGTHS).all()
    ceiling = drawn(curve()).axes[0].get_ylim()[1] / 1.04
    want = [[min(math.exp(x + i + n / 128), ceiling) for n in LENGTHS] for x in nll_D[:3]]
    np.testing.assert_allclose(xy[:3, :, 1], want, rtol=1e-6)
    np.testing.assert_allclose(xy[3:, :, 1], ceiling, rtol=1e-6)
  assert '5 documents, a faint line each' in figure.legends[0].get_title().get_text()


def test_the_floor_is_one_grey_line_for_all_methods(drawn):
  """Per protocol, at the lengths of all points, and inside the panel though far below every curve."""
  floors = {n: 0.5 + n / 256 for n in (8, 16, 32, 64, 128)}
  points = [{**p, 'floor': floors[p['length']]} for p in curve()]
  points += [{**p, 'floor': 0.25} for p in curve(protocol='non_overlapping', lengths=(16, 128))]
  figure = drawn([*points, unsupported('ntk', 64, floor=floors[64])])
  for ax, want in zip(figure.axes, (floors, {16: 0.25, 128: 0.25})):
    (line,) = lines(ax, points_of.FLOOR)
    np.testing.assert_array_equal(line.get_xdata(), list(want))
    np.testing.assert_allclose(line.get_ydata(), np.exp(list(want.values())))
    assert line.get_color() == '0.5' and line.get_linewidth() < 1
    assert ax.get_ylim()[0] < math.exp(0.25)
  assert [t.get_text() for t in figure.legends[0].get_texts()].count(points_of.FLOOR) == 1
  (ax,) = drawn(curve()).axes
  assert not lines(ax, points_of.FLOOR)


def test_the_legend_names_the_positions_of_training(drawn):
  titles = [
    drawn(curve(**rule)).legends[0].get_title().get_text() for rule in ({}, {'positions': 'pose(target_len=64)'})
  ]
  assert [title.split('\n')[0] for title in titles] == ['checkpoint 100', 'rope pose(target_len=64)']


def test_no_two_lines_look_alike(drawn):
  """More methods than colours, and one that is not drawn and takes none."""
  methods = ('none', *(f'pi(factor={i + 2})' for i in range(23)))
  (ax,) = drawn([unsupported('ntk', 64), *curve(methods)]).axes
  looks = [(x.get_color(), x.get_marker()) for x in ax.get_lines() if x.get_label().startswith(('none', 'pi('))]
  assert len(looks) == len(set(looks)) == 24


def test_failures_sit_on_the_edge_as_triangles(drawn):
  """inf and nan are no gaps that look like the end of a sweep."""
  points = [point('none', n, 2.0) for n in LENGTHS]
  points += [point('pi', 8, 2.0), point('pi', 16, 6.0), point('pi', 32, 800.0), point('pi', 128, math.nan)]
  (ax,) = drawn(points).axes
  ceiling = 15 * math.exp(2.0)
  (line,) = lines(ax, 'pi')
  np.testing.assert_allclose(line.get_ydata(), [math.exp(2.0), ceiling, ceiling, ceiling])
  (marks,) = [line for line in ax.get_lines() if line.get_marker() == '^']
  np.testing.assert_array_equal(marks.get_xdata(), [16, 32, 128])
  assert marks.get_color() == line.get_color()
  assert ax.get_ylim()[1] > ceiling and np.isfinite(ax.get_ylim()).all()


def test_a_panel_per_protocol(drawn):
  figure = drawn([*curve(), *curve(protocol='non_overlapping')])
  assert [ax.get_title(loc='right') for ax in figure.axes] == ['fixed targets', 'non overlapping']
  assert len(figure.legends[0].get_texts()) == 2


@pytest.mark.parametrize(
  'points',
  [
    [point()],
    [point(ci_low=None, ci_high=None)],
    [point('none', n, 2.0, ci_low=None, ci_high=None) for n in LENGTHS],
    [point(nll=800.0)],
    [point(nll=math.nan), point(length=32, nll=math.inf)],
    [unsupported('none', n) for n in LENGTHS],
    [point(), unsupported('ntk', 16), unsupported('ntk', 32)],
    [point(nll=700.0), point(length=32, nll=690.0, ci_high=math.inf)],
    [point(nll=1e-9), point(length=32, nll=1e-9)],
    [point(f'yarn(factor={f}.0, beta_fast=16.0)+logn', n, 2.0 + f / 8) for f in range(1, 13) for n in LENGTHS],
    [point('none', 4096 * n, 3.0) for n in (1, 2, 3, 5, 7, 64)],
    [point('none', n, math.log(2.1)) for n in LENGTHS],
  ],
  ids=['one', 'no-ends', 'no-ends-at-all', 'inf', 'nan', 'unsupported', 'partly-unsupported', 'huge', 'ppl-1',
       'many-long-names', 'odd-lengths', 'flat'],
)  # fmt: skip
def test_whatever_came_out_is_drawn_without_a_warning(drawn, points):
  """G08. The suite turns warnings into errors."""
  figure = drawn(points)
  assert len(figure.axes[0].get_yticks()) >= 3
  assert len(figure.legends[0].get_texts()) == len({p['method'] for p in points})


def test_an_unsupported_method_is_named(drawn):
  names = [t.get_text() for t in drawn([point(), unsupported('ntk')]).legends[0].get_texts()]
  assert names == ['none', 'ntk (unsupported)']


def test_a_method_of_one_protocol_is_not_called_unsupported_under_the_other(drawn):
  figure = drawn([point(), point('pi', protocol='non_overlapping')])
  assert [t.get_text() for t in figure.legends[0].get_texts()] == ['none', 'pi']


def test_a_figure_needs_no_display(tmp_path, root):
  """G08: a backend that wants a window, and no display to open it on."""
  code = """
import json, pathlib, sys, warnings
from evaluation import figures
warnings.simplefilter('error')
figures.plot(pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]))
assert 'matplotlib.pyplot' not in sys.modules
"""
  env = {k: v for k, v in os.environ.items() if k not in ('DISPLAY', 'WAYLAND_DISPLAY')}
  env |= {'MPLBACKEND': 'TkAgg', 'PYTHONPATH': str(root), 'JAX_PLATFORMS': 'cpu'}
  path = tmp_path / 'curve.png'
  command = [sys.executable, '-c', code, str(path), json.dumps(curve())]
  done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stderr
  assert path.read_bytes().startswith(b'\x89PNG')


# Event files.


def runs(directory):
  """run -> tag -> [(step, value)], read as TensorBoard reads, every event kept."""
  out = {}
  for run in sorted((directory / 'tensorboard').iterdir()):
    events = EventAccumulator(str(run), size_guidance={'scalars': 0}, purge_orphaned_data=False)
    events.Reload()
    tags = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()['scalars']}
    if tags:
      out[run.name] = tags
  return out


def test_a_run_per_method_with_the_length_as_its_step(tmp_path):
  points = [*curve(), *curve(protocol='non_overlapping', lengths=(16, 128))]
  results.write(tmp_path, points[::-1])
  found = runs(tmp_path)
  assert set(found) == {'rope none seed 0', 'rope yarn seed 0'}
  assert set(found['rope none seed 0']) == {
    f'{protocol}/{tag}'
    for protocol in ('fixed_targets', 'non_overlapping')
    for tag in ('ppl', 'nll', 'bits_per_byte', 'ppl_low', 'ppl_high')
  }
  for i, method in enumerate(('none', 'yarn')):
    tags = found[f'rope {method} seed 0']
    assert tags['fixed_targets/nll'] == [(n, pytest.approx(2 + i + n / 128)) for n in LENGTHS]  # rising, each once
    assert tags['non_overlapping/nll'] == [(n, pytest.approx(2 + i + n / 128)) for n in (16, 128)]
    assert tags['fixed_targets/ppl'][0] == (8, pytest.approx(math.exp(2 + i + 8 / 128)))


def test_a_second_sweep_shows_each_length_once(tmp_path):
  """G05: even where it adds lengths between those of the first, or replaces some."""
  results.write(tmp_path, curve(('none', 'yarn'), (16, 128)))
  results.write(tmp_path, curve(('none', 'yarn'), (16, 128)))
  results.write(tmp_path, [*curve(('none',), (8, 32)), point('none', 128, 5.0)])
  found = runs(tmp_path)
  assert [s for s, _ in found['rope none seed 0']['fixed_targets/nll']] == [8, 16, 32, 128]
  assert found['rope none seed 0']['fixed_targets/nll'][-1] == (128, 5.0)
  assert [s for s, _ in found['rope yarn seed 0']['fixed_targets/nll']] == [16, 128]
  assert len(list((tmp_path / 'tensorboard' / 'rope none seed 0').iterdir())) == 1


def test_events_hold_infinities_and_skip_the_unsupported(tmp_path):
  """G07: what diverged is stored as such, not as 0 and not left out."""
  results.write(tmp_path, [*NON_FINITE, unsupported('ntk', 16), point('pi', 16, 690.0)])
  found = runs(tmp_path)
  assert set(found) == {'rope none seed 0', 'rope pi seed 0'}
  ppl = [(s, v) for s, v in found['rope none seed 0']['fixed_targets/ppl']]
  assert [s for s, _ in ppl] == [16, 32, 128]
  assert ppl[0][1] == math.inf and math.isnan(ppl[1][1]) and ppl[2][1] == math.inf
  assert found['rope none seed 0']['fixed_targets/nll'][0] == (16, 800.0)
  assert found['rope pi seed 0']['fixed_targets/ppl'] == [(16, math.inf)]  # event files are float32


def test_a_method_with_a_slash_is_one_folder(tmp_path):
  results.write(tmp_path, [point("longrope(path='a/b.json')")])
  assert [p.name for p in (tmp_path / 'tensorboard').iterdir()] == ["rope longrope(path='a_b.json') seed 0"]


# Disks.


def test_check_writable_leaves_nothing(tmp_path):
  results.check_writable(tmp_path / 'a' / 'b')
  assert list((tmp_path / 'a' / 'b').iterdir()) == []


def test_what_cannot_be_written_is_an_error_with_its_name(tmp_path):
  """Before an hour of scoring: the programs turn it into one line."""
  (tmp_path / 'file').write_text('')
  for directory in (tmp_path / 'file', tmp_path / 'file' / 'extrapolation'):
    with pytest.raises(OSError) as caught:
      results.check_writable(directory)
    assert caught.value.filename is not None and 'file' in str(caught.value.filename)


@pytest.mark.skipif(os.geteuid() == 0, reason='root writes anywhere')
def test_a_read_only_directory_is_an_error_with_its_name(tmp_path):
  tmp_path.chmod(0o555)
  with pytest.raises(PermissionError) as caught:
    results.check_writable(tmp_path)
  assert caught.value.filename is not None
  with pytest.raises(PermissionError) as caught:
    results.check_writable(tmp_path / 'extrapolation')
  assert caught.value.filename is not None


def test_a_run_has_its_hyperparameters_once_and_none_the_figure_and_the_table(tmp_path):
  report_of = [*curve(), point('none', 128, gain=0.5, protocol='shuffled(block=8)', gain_documents=[0.5])]
  results.write(tmp_path, report_of)
  results.write(tmp_path, report_of)
  for method in ('none', 'yarn'):
    (folder,) = (tmp_path / 'tensorboard').glob(f'rope {method} *')
    events = EventAccumulator(str(folder)).Reload()
    tensors = set(events.Tags()['tensors'])
    assert 'custom_scalars__config__' in tensors
    assert len([tag for tag in events.summary_metadata if tag.startswith('_hparams_')]) == 3
    assert ('table/fixed_targets/text_summary' in tensors) == (method == 'none')
    assert bool(events.Tags()['images']) == (method == 'none')
    layout = events.Tensors('custom_scalars__config__')[0].tensor_proto.string_val[0]
    for tag in events.Tags()['scalars']:  # what the layout names is there
      assert tag.endswith('nll') or tag.encode() in layout.replace(b'\\', b''), tag

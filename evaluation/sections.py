"""How a report looks: the sections of its page."""

import inspect
import json
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from evaluation import diagnosis, figures, summary, tokens
from evaluation.controls import CONTROLS
from evaluation.gather import GAIN, LESS_FIRST, LESS_NONE, PERPLEXITY, VALIDATION, Number, Report, counted
from evaluation.page import Markup, figure, join, missing, number, page, table, tag
from evaluation.points import FLOOR, chance, fake_gain, floors, line_name, trained
from evaluation.protocols import PROTOCOLS
from evaluation.runs import compared
from evaluation.stats import MIN_DOCUMENTS, Extent
from evaluation.sweep import Point, exp


def html(report: Report) -> str:
  title = f'Longcurve: {", ".join(dict.fromkeys(trained(p) for p in report.rows))}'
  parts = [
    _runs(report),
    _settings(report),
    _curves(report),
    _plane(report),
    _differences(report),
    _schemes(report),
    _gains(report),
  ]
  parts += [_surface(report), _positions(report), _diagnosis(report)]
  return page(title, *parts, _declared(report), _tokens(report), _provenance(report))


def _runs(report: Report) -> Markup:
  head = ('run', 'scheme', 'seed', 'checkpoint', 'parameters', 'tokens seen', 'tokens / parameter', 'git')
  body = []
  for run in report.runs:
    p = run.points[0]
    params, seen = p.get('params'), p.get('tokens_seen')
    ratio = number(f'{seen / params:.3g}', seen / params) if params and seen else 'not told'
    git = run.record.get('git_commit') or 'not told'
    sizes = (f'{v:,}' if v else 'not told' for v in (params, seen))
    body.append([str(run.workdir), trained(p), run.seed, p['checkpoint_step'], *sizes, ratio, str(git)[:12]])
  p = report.points[0]
  corpus = f'corpus {p.get("corpus", "not told")}, sha256 {p.get("corpus_sha256", "not told")}'
  seeds = sorted({len(row.get('seeds', [0])) for row in report.rows if 'nll' in row})
  who = {
    1: 'One seed of a scheme: what is said is about the checkpoint, not about the scheme.',
    2: 'Two seeds of a scheme: one degree of freedom, so that intervals are as wide as they look.',
  }.get(seeds[0], '')
  return join(
    [
      tag('p', f'Trained at {report.train_len} tokens (1x); {corpus}. {who}', class_='note'),
      table(head, body),
      *(
        missing(f'{run.workdir}: no config.json, so no config and no versions') for run in report.runs if not run.record
      ),
      *(missing(f'{folder}: a run that was not swept, left out') for folder in report.unswept),
    ]
  )


def _settings(report: Report) -> Markup:
  """What every scheme was given to choose from."""
  found = [n for n in report.numbers if n.table == VALIDATION]
  schemes = {(n.scheme, n.positions) for n in found}
  if len(found) == len(schemes):
    alone = 'one setting of each scheme: an order of schemes at one learning rate is not an order of schemes'
    return missing(alone) if len(schemes) > 1 else Markup('')
  note = (
    'Of each scheme the setting with the lowest NLL of validation text at 1x, the mean over seeds at the checkpoint '
    'that was swept, is what the rest of this page is about. Test text and other lengths have no say.'
  )
  body = [
    [
      trained({'scheme': n.scheme, 'positions': n.positions}),
      n.line,
      number(f'{n.value:.4f}', n.value) if math.isfinite(n.value) else 'not told',
      n.said,
      tag('td', 'yes' if n.marked else 'no', class_='better' if n.marked else None),
    ]
    for n in found
  ]
  head = 'scheme', 'setting', 'validation NLL at 1x, nats', '', 'compared below'
  return join([tag('h2', 'Settings'), tag('p', note, class_='note'), table(head, body)])


def _curves(report: Report) -> Markup:
  out = [tag('h2', 'Perplexity against length')]
  note = 'Numbers under the pointer have all their digits. ± is half of a 95 % band over all lengths of a line at once.'
  first, *others = (_curve(report, protocol) for protocol in report.protocols)
  out += [tag('p', note, class_='note'), first, tag('div', *others, class_='pair')]
  if not any('floor' in p for p in report.rows):
    out.append(missing('no floor: the entropy of this text is not known'))
  return join(out)


def _curve(report: Report, protocol: str) -> Markup:
  rows, out = report.of(protocol), [tag('h3', protocol)]
  if protocol in report.pictures:
    picture = report.pictures[protocol]
    out += [figure(figures.svg(picture.figure), picture.caption), _artefact(report, rows)]
  fewest = min((p['documents'] for p in rows if 'documents' in p), default=MIN_DOCUMENTS)
  if fewest < MIN_DOCUMENTS:
    out.append(missing(f'{fewest} documents, each drawn: no interval of levels is given below {MIN_DOCUMENTS}'))
  floor = floors(rows)
  entropy = [number(f'{exp(floor[n]):.4g}', exp(floor[n])) if n in floor else '' for n in report.lengths(protocol)]
  shown = _pivot(report, PERPLEXITY, protocol, _level, [[FLOOR, *entropy]] if floor else [])
  out.append(shown if protocol == 'fixed_targets' else _details('the numbers', shown))
  reasons = dict.fromkeys(f'{p["method"]}: {p["outcome"]}: {p["reason"]}' for p in rows if p.get('reason'))
  return tag('div', *out, *map(missing, reasons))


def _plane(report: Report) -> Markup:
  out = [tag('h2', 'Does it hold, and is it of use?')]
  if not report.extents:
    return join([*out, missing('fixed_targets was not swept: neither stretch nor reach')])
  if 'plane' in report.pictures:
    picture = report.pictures['plane']
    out.append(figure(figures.svg(picture.figure), picture.caption))
  head = ['tokens', f'stretch({summary.DELTA:g})', *(f'reach({e:g})' for e in summary.EPSILONS)]
  body, slopes = [], []
  for curve, far, used in report.extents:
    line = line_name({'scheme': curve.scheme, 'positions': curve.positions, 'method': curve.method}, report.several)
    cells = [_extent(e, report.train_len) if e else '1x was not swept' for e in (far, *used)]
    body.append([line, *cells])
    slope = curve.point.get('slope')
    if slope:
      scaled = ', '.join(f'reach({e:g}) {x.text(report.train_len, slope)}' for e, x in zip(summary.EPSILONS, used))
      slopes.append(tag('p', f'{line}, in 1/m = {1 / slope:g} tokens, m the smallest slope: {scaled}', class_='note'))
  return join([*out, table(head, body), *slopes])


def _differences(report: Report) -> Markup:
  out = [tag('h2', 'Methods less none')]
  out.append(_legend('of the same checkpoints, paired by seed and document; all cells of a table are one family'))
  shown = _tables(report, LESS_NONE)
  return join([*out, *(shown or [missing('no method but none has numbers')])])


def _schemes(report: Report) -> Markup:
  shown = _tables(report, LESS_FIRST)
  first = next((c.point for c in report.lines if c.method == 'none'), None)
  if not shown or first is None:  # one scheme
    return Markup('')
  family = 'paired by document, seeds of each; all cells of a table are one family'
  return join([tag('h2', f'Schemes less {line_name(first, True)}'), _legend(family), *shown])


def _tables(report: Report, name: str) -> list[Markup]:
  """The default's in sight."""
  found = [(protocol, _pivot(report, name, protocol, _difference)) for protocol in report.protocols]
  shown = [(protocol, rows) for protocol, rows in found if rows]
  return [
    join([tag('h3', protocol), rows]) if protocol == report.protocols[0] else _details(protocol, rows)
    for protocol, rows in shown
  ]


def _gains(report: Report) -> Markup:
  out = [tag('h2', 'Gain of far text')]
  controls = dict.fromkeys(n.protocol for n in report.numbers if n.table == GAIN)
  if not controls:
    return join([*out, missing('no control was swept (config.eval.controls)')])
  text = (
    f'What lies farther than {report.train_len} tokens before the targets, against other text in its place: nats by '
  )
  out.append(tag('p', f'{text}which the true text is better. * over all controls and lengths at once.', class_='note'))
  for control in controls:
    out += [tag('h3', f'over {control}'), _pivot(report, GAIN, control, _gain)]
  return join(out)


def _surface(report: Report) -> Markup:
  out = [tag('h2', 'While it was trained')]
  if 'surface' not in report.pictures:
    return join([*out, missing('not measured: train.py --config.surface.checkpoints=10')])
  picture = report.pictures['surface']
  return join([*out, figure(figures.svg(picture.figure), picture.caption)])


def _positions(report: Report) -> Markup:
  out = [tag('h2', 'By position in the window')]
  if 'position' not in report.pictures:
    return join([*out, missing('not swept: eval_extrapolation.py --protocol=position_wise')])
  picture = report.pictures['position']
  return join([*out, figure(figures.svg(picture.figure), picture.caption)])


def _diagnosis(report: Report) -> Markup:
  out = [tag('h2', 'Why it broke')]
  if not any(report.diagnoses.values()):
    return join([*out, missing('not diagnosed: python -m evaluation.diagnose --workdir=...')])
  for name, found in report.diagnoses.items():
    for run, points in found:
      picture = report.pictures[f'{name} {run.workdir} {points[0]["method"]}']
      out += [tag('h3', picture.title), figure(figures.svg(picture.figure), picture.caption)]
      if name == 'pairs':
        out.append(_details('the numbers', _recovered(points)))
  return join(out)


def _recovered(points: Sequence[Point]) -> Markup:
  lengths, train_len = sorted({p['length'] for p in points}), points[0]['train_length']
  at = {(p['length'], diagnosis.line(p)): p for p in points}
  nothing = {p['length']: p for p in points if p['what'] == 'none'}

  def cell(point: Point | None, field: str) -> Markup:
    if point is None:
      return Markup('')
    x, low, high = (math.nan if (v := point[f]) is None else v for f in (field, f'{field}_low', f'{field}_high'))
    return number(f'{x:+.3f}', x, low, high)

  body = [['damage: rise over 1x', *(cell(nothing.get(n), 'damage') for n in lengths)]]
  body += [[name, *(cell(at.get((n, name)), 'recovered') for n in lengths)] for name in diagnosis.lines(points)]
  return table(['nats recovered', *(f'{n} = {n / train_len:g}x' for n in lengths)], body)


def _declared(report: Report) -> Markup:
  out = [tag('h2', 'Fixed in advance')]
  asked = [(scheme, text) for scheme, texts in compared(report.runs).items() for text in texts]
  if not asked:
    return join([*out, missing('no config names a comparison (config.eval.compare)')])
  numbers = [n for n in report.numbers if n.table == 'fixed in advance']
  body, found = [], set()
  for n, declared in zip(numbers, report.declared, strict=True):
    scheme = trained({'scheme': n.scheme, 'positions': n.positions})
    found.add((scheme, n.method))
    seeds = ', '.join(map(str, declared.seeds))
    least = '' if math.isnan(declared.detectable) else number(f'{declared.detectable:.2g}', declared.detectable)
    body.append([scheme, n.method, seeds, _difference(n), f'{n.p:.2g}' if n.p == n.p else '', least])
  if body:
    out.append(_legend('each tested alone, since the configs named it before there were numbers'))
    head = ('scheme', 'comparison', 'seeds', 'difference', 'p', 'found 4 in 5 times, if true')
    out.append(table(head, body))
  left = [f'{scheme}: {text}: not both were swept there' for scheme, text in asked if (scheme, text) not in found]
  return join([*out, *map(missing, left)])


def _provenance(report: Report) -> Markup:
  out = [tag('h2', 'Where it comes from')]
  records = [_flat(run.record) for run in report.runs]
  keys = list(dict.fromkeys(k for r in records for k in r))
  differ = [k for k in keys if len({json.dumps(r.get(k, 'absent'), sort_keys=True) for r in records}) > 1]
  if differ:
    body = [[k, *(_short(r.get(k, 'absent')) for r in records)] for k in differ]
    out += [
      tag('h3', 'What differs between the runs'),
      table(('', *(run.workdir for run in report.runs)), body, 'left'),
    ]
  same = [[k, _short(records[0][k])] for k in keys if k not in differ]
  if same:
    out.append(_details('what they have in common', table(('', ''), same, 'left wide')))
  p = report.points[0]
  kept = ('corpus', 'corpus_sha256', 'corpus_documents', 'corpus_tokens', 'bos', 'targets_hash', 'T')
  out.append(_details('what was scored', table(('', ''), [[k, str(p.get(k, 'not told'))] for k in kept], 'left wide')))
  definitions = []
  for protocol in dict.fromkeys(p['protocol'] for p in report.points):
    name = protocol.split('(')[0]
    what = {**PROTOCOLS, **CONTROLS}.get(name)
    of = counted([p for p in report.points if p['protocol'] == protocol])
    definitions.append([protocol, inspect.getdoc(what) if what else 'no protocol of this version', of])
  out += [tag('h3', 'Protocols'), table(('', 'what counts', ''), definitions, 'left wide')]
  out += [tag('h3', 'References'), table(('', ''), report.references, 'left wide')]
  return join(out)


def _tokens(report: Report) -> Markup:
  out = [tag('h2', 'Tokens that got better and worse')]
  wanted = report.comparisons()
  if not wanted:
    return join([*out, missing('one line only: --tokens names two that have numbers, as in "yarn - none at 4x"')])
  for pair in wanted:
    out.append(tag('h3', pair.title))
    try:
      found = tokens.changes(pair)
    except tokens.Missing as reason:
      out.append(missing(str(reason)))
      continue
    share = [f'{100 * n / found.targets:.3g} %' for n in (found.n_better, found.n_worse)]
    text = f'{share[0]} of {found.targets} targets are better by {tokens.SPREAD:g} nats or more, {share[1]} worse.'
    out.append(tag('p', text, class_='note'))
    for side, class_ in ((found.better, 'better'), (found.worse, 'worse')):
      if side:
        body = [
          [
            number(f'{t.nll[0] - t.nll[1]:+.2f}', t.nll[0] - t.nll[1], class_=class_),
            number(f'{t.nll[1]:.2f} → {t.nll[0]:.2f}', t.nll[0]),
            f'{t.document}, {t.offset}',
            tag('td', _seen(t.before), tag('mark', _seen(t.text)), _seen(t.after)),
          ]
          for t in side
        ]
        out.append(table((class_, 'NLL, nats', 'document, offset', 'text'), body, 'left text'))
  return join(out)


def _pivot(
  report: Report, name: str, protocol: str, cell: Callable[[Number], Markup], last: Iterable[Sequence[object]] = ()
) -> Markup:
  """A line each, a column per length."""
  found = [n for n in report.numbers if (n.table, n.protocol) == (name, protocol)]
  if not found:
    return Markup('')
  lengths = report.lengths(protocol)
  at = {(n.line, n.length): n for n in found}
  head = [found[0].unit, *(f'{n} = {n / report.train_len:g}x' for n in lengths)]
  lines = dict.fromkeys(n.line for n in found)
  body = [[line, *(cell(at[line, n]) if (line, n) in at else '' for n in lengths)] for line in lines]
  return table(head, [*body, *last])


def _artefact(report: Report, rows: Sequence[Point]) -> Markup:
  keys = chance(rows)
  if keys is not None:
    return tag('div', f'{keys}.', class_='warn')
  fake = fake_gain(rows)
  if fake is None:
    return Markup('')
  lengths = [p['length'] for p in rows]
  text = (
    f'A model that uses at most 1x tokens of context "gains" {100 * fake:.1f} % of perplexity here, from 1x to '
    f"{max(lengths) / report.train_len:g}x (python -m evaluation.certify): so much of any fall is this protocol's own."
  )
  return tag('div', text, class_='warn', title=repr(fake))


def _level(n: Number) -> Markup:
  if n.said:
    return tag('td', n.said, title=repr(n.value))
  if math.isnan(n.low):
    return tag('td', f'{n.value:.4g}', title=repr(n.value))
  half = (n.high - n.low) / 2
  # exp() of a wide band is lopsided
  ends = f' ±{half:.2g}' if half < n.value / 4 else f' [{n.low:.3g}, {n.high:.3g}]'
  return tag('td', f'{n.value:.4g}', tag('small', ends), title=f'{n.value!r}, 95 % {n.low!r} to {n.high!r}')


def _difference(n: Number) -> Markup:
  """Below 0 is better."""
  return _signed(n, 'better' if n.value < 0 else 'worse')


def _gain(n: Number) -> Markup:
  return _signed(n, 'better' if n.value > 0 else 'worse')


def _signed(n: Number, class_: str) -> Markup:
  if not math.isfinite(n.value):
    return tag('td', 'diverged', title=repr(n.value))
  ends = tag('small', f' [{n.low:+.3f}, {n.high:+.3f}]') if n.low == n.low else Markup('')
  more = f', 95 % {n.low!r} to {n.high!r}, p = {n.p!r}' if ends else ''
  said = f', {n.said}' if n.said else ''
  if n.value == n.low == n.high == 0:
    return tag('td', 'the same', title=f'{n.value!r}{more}')
  shown = f'{n.value:+.3f}{"*" if n.marked else ""}'
  return tag('td', shown, ends, title=f'{n.value!r}{more}{said}', class_=class_ if n.marked else None)


def _extent(e: Extent, train_len: int) -> Markup:
  shown = f'{e.text(train_len, 1)} = {Extent(e.value, math.nan, math.nan, e.shortest, e.longest).text(train_len)}'
  return tag('td', shown, title=f'{e.value!r}, 95 % {e.low!r} to {e.high!r}')


def _legend(family: str) -> Markup:
  text = 'nats per token, below 0 is better, with 95 % intervals; *: p < 0.05, '
  return tag('p', f'{text}{family}.', class_='note')


def _details(title: str, content: Markup) -> Markup:
  return tag('details', tag('summary', title), content)


def _seen(text: str) -> str:
  """Line ends and what else has no shape, as something to see."""
  return ''.join('⏎' if c == '\n' else c if c.isprintable() else '�' for c in text)


def _short(value: Any) -> Markup:
  text = value if isinstance(value, str) else json.dumps(value)
  return tag('td', f'{text[:24]}…', title=text) if len(text) > 40 else tag('td', text)


def _flat(tree: Any, prefix: str = '') -> dict[str, Any]:
  if isinstance(tree, dict):
    parts = ((f'{prefix}.{key}' if prefix else str(key), value) for key, value in tree.items())
    return {k: v for key, value in parts for k, v in _flat(value, key).items()}
  return {prefix: tree}

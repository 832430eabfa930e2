"""Event files of a curve: `tensorboard --logdir=runs` lays curves of several runs over each other, without setup."""

import pathlib
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from tensorboardX import SummaryWriter
from tensorboardX.proto.summary_pb2 import Summary  # pyrefly: ignore[missing-module-attribute]
from tensorboardX.summary import hparams

from evaluation.points import trained
from evaluation.sweep import Point

SCALARS = ('ppl', 'nll', 'bits_per_byte')
ENDS = {'ci_low': 'ppl_low', 'ci_high': 'ppl_high'}
HPARAMS = (
  'scheme', 'positions', 'method', 'seed', 'train_length', 'checkpoint_step', 'tokens_seen', 'params', 'learning_rate',
  'bos', 'corpus', 'targets_hash',
)  # fmt: skip


def write(
  directory: pathlib.Path, points: Sequence[Point], tables: Mapping[str, str], picture: pathlib.Path | None = None
) -> None:
  """One run per (scheme, method, seed), step = length in rising order: a step back hides what came before.

  `points` are of one checkpoint. What was there is replaced, or the server would see the lengths start over, and runs
  of another checkpoint among these. Each run has its hyperparameters once and the layout of the custom charts, which
  the server merges; that of 'none', with which every sweep begins, also has the figure and the tables.
  """
  shutil.rmtree(directory, ignore_errors=True)
  for method in dict.fromkeys(p['method'] for p in points):
    mine = sorted((p for p in points if p['method'] == method), key=lambda p: p['length'])
    name = f'{trained(mine[0])} {method} seed {mine[0].get("seed", 0)}'
    with SummaryWriter(str(directory / name.replace('/', '_'))) as writer:
      for point in mine:
        _point(writer, point)
      writer.add_custom_scalars(_layout(points))
      of_run = {k: v if isinstance(v := mine[0][k], (int, float)) else str(v) for k in HPARAMS if k in mine[0]}
      metrics = dict.fromkeys(_tag(p['protocol'], 'ppl') for p in mine if 'gain' not in p)
      file: Any = writer.file_writer
      for summary in hparams(of_run, metrics):
        file.add_summary(summary)
      if method == 'none':
        for protocol, text in tables.items():
          writer.add_text(_tag('table', protocol), f'```\n{text}\n```')
        if picture is not None:
          file.add_summary(_image('curve', picture.read_bytes()))


def write_diagnosis(
  directory: pathlib.Path,
  name: str,
  pairs: Sequence[Point],
  attention: Sequence[Point],
  tables: Mapping[str, str],
  pictures: Mapping[str, pathlib.Path],
) -> None:
  """One run, step = length: what each set of pairs and each pair recovers, statistics of each layer and head."""
  folder = directory / name.replace('/', '_')
  shutil.rmtree(folder, ignore_errors=True)
  with SummaryWriter(str(folder)) as writer:
    for p in sorted(pairs, key=lambda p: p['length']):
      if p['what'] == 'none':
        writer.add_scalar('pairs/damage', p['damage'], p['length'])
      else:
        which = f'pair {p["pairs"][0]:03d}' if p['which'] == 'pair' else p['which']
        writer.add_scalar(_tag('recovered', p['scheme'], p['what'], which), p['recovered'], p['length'])
    for p in sorted(attention, key=lambda p: p['length']):
      for statistic in ('entropy', 'largest', 'first', 'beyond'):
        writer.add_scalar(_tag(statistic, f'layer {p["layer"]} head {p["head"]}'), p[statistic], p['length'])
    for table, text in tables.items():
      writer.add_text(_tag('table', table), f'```\n{text}\n```')
    file: Any = writer.file_writer
    for picture, path in pictures.items():
      file.add_summary(_image(picture, path.read_bytes()))


def _point(writer: SummaryWriter, point: Point) -> None:
  if 'gain' in point:
    writer.add_scalar(_tag('gain', point['protocol']), point['gain'], point['length'])
  elif 'ppl' in point:
    values = {tag: point[tag] for tag in SCALARS}
    values |= {tag: point[end] for end, tag in ENDS.items() if point[end] is not None}
    for tag, value in values.items():
      writer.add_scalar(_tag(point['protocol'], tag), value, point['length'])


def _layout(points: Sequence[Point]) -> dict[str, dict[str, Any]]:
  """A group of charts per protocol: perplexity with its interval, bits per byte. And one of gains."""
  asked = dict.fromkeys((p['protocol'], 'gain' in p) for p in points)
  layout: dict[str, dict[str, Any]] = {
    protocol: {
      'perplexity, 95 %': ['Margin', [_tag(protocol, tag) for tag in ('ppl', *ENDS.values())]],
      'bits per byte': ['Multiline', [re.escape(_tag(protocol, 'bits_per_byte'))]],
    }
    for protocol, gain in asked
    if not gain
  }
  gains = [_tag('gain', protocol) for protocol, gain in asked if gain]
  if gains:
    layout['gain of far text, nats'] = {tag: ['Multiline', [re.escape(tag)]] for tag in gains}
  return layout


def _tag(*parts: str) -> str:
  """As tensorboardX would write it, or the layout would name tags that are not there."""
  return '/'.join(re.sub(r'[^-\w.]+', '_', part).strip('_') for part in parts)


def _image(tag: str, png: bytes) -> Summary:
  width, height = (int.from_bytes(png[i : i + 4], 'big') for i in (16, 20))
  image = Summary.Image(height=height, width=width, colorspace=4, encoded_image_string=png)
  return Summary(value=[Summary.Value(tag=tag, image=image)])

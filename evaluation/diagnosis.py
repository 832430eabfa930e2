"""Why a curve broke: which frequency pairs carry the damage, and what becomes of attention, of the fixed targets.

**Pairs.** A logit under RoPE is a sum over pairs p of a_p cos(theta_p d) + b_p sin(theta_p d), d = i - j how far back
the key is, of which training showed d <= L - 1. Of one pair, or of a set of them, the angle is kept within what
training showed, and the NLL that comes back is measured:

  held   theta_p min(d, L - 1): farther keys are seen under the angle of the farthest distance in training. Exactly
         that, and of these pairs alone: in a second position map that begins at d = L they have frequency 0 and their
         queries are turned by theta_p (L - 1). Distances below L, and with them all of 1x, are untouched.
  pi     theta_p d L / l: `pi` on these pairs alone, which squeezes every distance, the near ones too.

All are arrays in `Positions` of one shape, so that one program of a length serves every candidate, and their rows lie
in the store like those of any method. What is recovered is no sum of parts: softmax and layers are not linear.

**Attention**, by layer and head: entropy, the largest logit, the mass on the window's first token and on the keys L
tokens back or more, of the queries that predict the targets.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import posenc
from evaluation.controls import picked
from evaluation.plan import Plan
from evaluation.points import plain
from evaluation.protocols import Selection, Window
from evaluation.score import Scorer
from evaluation.stats import MIN_PAIRS, t_interval
from evaluation.store import Rows
from evaluation.survey import Stage, fill, positions_hash
from models.lm import merge
from models.ring import BATCH, CONTEXT, place
from models.tiles import Statistics
from posenc import Far, Positions, PositionScheme, Unsupported, rotations

Point = dict[str, Any]
SETS = ('incomplete', 'complete', 'all')
STATISTICS = Statistics._fields
FILES = ('pairs.jsonl', 'attention.jsonl')


class Candidate(NamedTuple):
  """`what` is done to the `pairs` of every slot of `scheme`. which: 'pair', or what set they are; see `candidates`."""

  scheme: str
  what: str
  which: str
  pairs: tuple[int, ...]


NONE = Candidate('', 'none', '', ())


def candidates(texts: Sequence[str], schemes: Sequence[PositionScheme], largest: int) -> list[Candidate]:
  """NONE, then of every scheme that rotates: each pair; those that never completed a turn in training; those that did;
  all. largest: the farthest distance in training. A pair of frequency 0 meets no new angle and is in none."""
  out = [NONE]
  for text, scheme in {text: scheme for text, scheme in zip(texts, schemes) if scheme.rot}.items():
    theta_P = scheme.inv_freq_P
    turning_P, unseen_P = theta_P > 0, rotations.incomplete(theta_P, largest + 1)
    sets = dict(zip(SETS, (unseen_P, turning_P & ~unseen_P, turning_P)))
    chosen = [('pair', (int(p),)) for p in np.flatnonzero(turning_P)]
    chosen += [(which, tuple(np.flatnonzero(of_P).tolist())) for which, of_P in sets.items() if of_P.any()]
    out += [Candidate(text, what, which, pairs) for what in ('held', 'pi') for which, pairs in chosen]
  return out


def positions(
  candidate: Candidate,
  texts: Sequence[str],
  schemes: Sequence[PositionScheme],
  made: Sequence[Positions],
  largest: int,
  length: int,
) -> tuple[Positions, ...]:
  """`made`, what a method makes of the slots at `length`, changed as the candidate says; Unsupported."""
  out = []
  for text, scheme, pos in zip(texts, schemes, made):
    if scheme.rot:
      mine = candidate.pairs if text == candidate.scheme else ()
      pos = _changed(candidate.what, np.array(mine, int), scheme, pos, largest, length)
    out.append(pos)
  return tuple(out)


def _changed(
  what: str, pairs: np.ndarray, scheme: PositionScheme, pos: Positions, largest: int, length: int
) -> Positions:
  if pos.far is not None or np.any(pos.onset) or not np.array_equal(pos.at_T, np.arange(length)):
    raise Unsupported('pairs are told apart where a logit is of the distance alone, at positions 0, 1, 2 ...')
  theta_P, freq_P = scheme.inv_freq_P, np.asarray(pos.inv_freq_P, np.float64)
  threshold, far_P, phase_P = np.inf, freq_P.copy(), np.zeros(len(freq_P))
  if what == 'pi' and len(pairs):
    if not np.allclose(freq_P, theta_P, rtol=1e-6):
      raise Unsupported('pi, of pairs whose frequencies a method has changed')
    freq_P = freq_P.copy()
    freq_P[pairs] /= max(1.0, length / (largest + 1))
    far_P = freq_P
  elif what == 'held':
    # The farthest distance at which the angle is one of training's; beyond it the pair is held.
    with np.errstate(divide='ignore'):
      last = np.floor(theta_P[pairs] * largest / freq_P[pairs] + 1e-4)
    leaves = last < length - 1
    if leaves.any():
      if np.ptp(last[leaves]):
        raise Unsupported('pairs that leave the range of training at several distances: one second map holds one')
      pairs, threshold = pairs[leaves], last[leaves][0] + 1
      far_P[pairs], phase_P[pairs] = 0.0, theta_P[pairs] * largest
  # Always there, if only beyond every distance: so that all candidates are of one shape.
  at_T = np.asarray(pos.at_T)
  far = jax.tree.map(np.float32, Far(at_T, at_T, threshold, far_P, phase_P))
  return dataclasses.replace(pos, inv_freq_P=freq_P.astype(np.float32), far=far)


def select(plan: Plan, length: int, spans: int) -> Selection:
  """The fixed targets, of `spans` spans a document, evenly spread; 0: of all."""
  chosen, each = picked(plan, spans), plan.cfg.spans
  parts = plan.select('fixed_targets', length).parts
  return Selection([part for i, part in enumerate(parts) if i % each in chosen])


@dataclasses.dataclass
class Diagnosis:
  """Of one checkpoint under one method. facts: go into every point. open_rows: as a survey's."""

  plan: Plan
  texts: Sequence[str]
  schemes: Sequence[PositionScheme]
  method: str
  train_len: int
  rule: posenc.Rule
  spans: int
  facts: dict[str, Any]
  open_rows: Callable[[str, int], Rows] = lambda positions, length: Rows()

  def made(self, length: int) -> tuple[Positions, ...]:
    return posenc.positions(self.method, self.schemes, self.train_len, length, rule=self.rule)

  def pairs(
    self, lengths: Sequence[int], make_scorer: Callable[[], Scorer], progress: Any, say: Callable[[str], object]
  ) -> Iterator[list[Point]]:
    """What each candidate recovers, of one length after the other, 1x first: damage is the rise over it."""
    asked = candidates(self.texts, self.schemes, self.rule.largest)
    if len(asked) == 1:
      say(f'{" ".join(self.texts)}: no frequencies along the sequence, so no pairs')
      return
    first = None
    for length in sorted({*lengths, self.train_len}, key=lambda n: (n != self.train_len, n)):
      windows = [part.window for part in select(self.plan, length, self.spans).parts]
      made, keys, told = {}, {}, dict.fromkeys(asked)
      for candidate in asked:
        try:
          pos = positions(candidate, self.texts, self.schemes, self.made(length), self.rule.largest, length)
        except Unsupported as reason:
          say(f'{length} tokens, {_name(candidate)}: {reason}')
          del told[candidate]
          continue
        keys[_name(candidate)] = {length: positions_hash(pos)}
        made[length, positions_hash(pos)] = pos
      if NONE not in told:
        return
      shelves = {(n, key): self.open_rows(key, n) for n, key in made}
      stage = Stage(length, {}, {}, {length: windows}, made, keys, {}, shelves, self.plan)
      fill(stage, make_scorer, progress)
      if _name(NONE) in stage.refused:
        say(f'{length} tokens: {stage.refused[_name(NONE)][1]}')
        continue
      nll_D = {c: self._documents(stage, windows, _name(c)) for c in told if _name(c) in stage.keys}
      none_D = nll_D[NONE]
      first = none_D if first is None else first
      with np.errstate(invalid='ignore'):
        points = []
        for candidate, mine_D in nll_D.items():
          pi_D = nll_D.get(candidate._replace(what='pi')) if candidate.what == 'held' else None
          points.append(
            {
              **self._facts(length, len(windows)),
              'scheme': candidate.scheme,
              'what': candidate.what,
              'which': candidate.which,
              'pairs': list(candidate.pairs),
              'turns': self._turns(candidate),
              'nll': float(mine_D.mean()),
              **_interval('damage', none_D - first),
              **_interval('recovered', none_D - mine_D),
              **({} if pi_D is None else _interval('over_pi', pi_D - mine_D)),  # by how much held is better than pi
            }
          )
      yield points

  def attention(
    self, lengths: Sequence[int], graphdef: Any, params: Any, mesh: Mesh, batch_tokens: int, progress: Any
  ) -> Iterator[list[Point]]:
    """Statistics of every layer and head, one length after the other. Unsupported lengths are left out."""
    watch = _watch(graphdef, mesh, self.plan.targets, self.train_len)
    for length in sorted(lengths):
      try:
        pos = jax.tree.map(np.asarray, self.made(length))
      except Unsupported:
        continue
      windows = [part.window for part in select(self.plan, length, self.spans).parts]
      shares = math.prod(mesh.shape[axis] for axis in BATCH)
      rows = max(batch_tokens // (length * shares), 1) * shares
      split = NamedSharding(mesh, PartitionSpec(BATCH, CONTEXT))
      found: list[list[np.ndarray]] = [[] for _ in STATISTICS]
      for start in range(0, len(windows), rows):
        part = windows[start : start + rows]
        filled = [*part, *[part[0]] * (rows - len(part))]
        (inputs_BT,) = place(
          split, (rows, length), lambda at, filled=filled: self.plan.tokens([filled[i] for i in at])[:1]
        )
        for into, x_LBNt in zip(found, watch(params, inputs_BT, pos)):
          into.append(np.asarray(x_LBNt)[:, : len(part)])
        progress.update(length * len(part))
      whole = dict(zip(STATISTICS, (np.concatenate(parts, 1) for parts in found)))
      yield [
        {
          **self._facts(length, len(windows)),
          'scheme': self.texts[layer % len(self.texts)],
          'layer': layer,
          'head': head,
          **{name: float(x[layer, :, head].mean(dtype=np.float64)) for name, x in whole.items()},
          'largest_of_all': float(whole['largest'][layer, :, head].max()),
        }
        for layer in range(whole['entropy'].shape[0])
        for head in range(whole['entropy'].shape[2])
      ]

  def _facts(self, length: int, windows: int) -> Point:
    return {
      **self.facts,
      'method': self.method,
      'train_length': self.train_len,
      'length': length,
      'targets_hash': self.plan.targets_hash,
      'windows': windows,
      'targets': windows * self.plan.targets,
      'documents': len(self.plan.documents),
    }

  def _documents(self, stage: Stage, windows: Sequence[Window], name: str) -> np.ndarray:
    """Mean of each document's targets, which are as many in all, float64[D]."""
    shelf = stage.shelves[stage.length, stage.keys[name][stage.length]]
    x_NT = np.stack([shelf.row(self.plan.place(w), w.scored) for w in windows])
    return x_NT.astype(np.float64).reshape(len(self.plan.documents), -1).mean(1)

  def _turns(self, candidate: Candidate) -> list[float]:
    if candidate is NONE:
      return []
    theta_P = self.schemes[list(self.texts).index(candidate.scheme)].inv_freq_P
    return rotations.turns(theta_P, self.rule.largest + 1)[list(candidate.pairs)].tolist()


def _interval(name: str, x_D: np.ndarray) -> Point:
  mean, low, high = t_interval(x_D, least=MIN_PAIRS)
  return {name: mean, f'{name}_low': low, f'{name}_high': high}


def _name(candidate: Candidate) -> str:
  which = f'pair {candidate.pairs[0]}' if candidate.which == 'pair' else candidate.which
  return f'{candidate.scheme} {candidate.what} {which}'.strip()


def _watch(graphdef: Any, mesh: Mesh, last: int, beyond: int) -> Callable[..., Statistics]:
  @jax.jit
  def watch(params, inputs_BT, pos):
    return merge(graphdef, params, mesh).statistics(inputs_BT, pos, last=last, beyond=beyond)

  return watch


# What is on disk.


def _key(point: Point) -> tuple[Any, ...]:
  """A point's identity: a second diagnosis replaces what it measures again and leaves the rest."""
  of = ('checkpoint_step', 'targets_hash', 'method', 'length', 'scheme', 'what', 'which', 'pairs', 'layer', 'head')
  return tuple(json.dumps(point.get(field)) for field in of)


def write(path: pathlib.Path, new: Sequence[Point]) -> list[Point]:
  """Merges into a file of points, a line each; returns those of the checkpoint, targets and method of `new`."""
  old = read(path)
  points = list({_key(p): p for p in (*old, *new)}.values())
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_suffix('.tmp')
  lines = (json.dumps({k: plain(v) for k, v in p.items()}, allow_nan=False) for p in points)
  temporary.write_text('\n'.join(lines) + '\n')
  temporary.replace(path)
  same = ('checkpoint_step', 'targets_hash', 'method')
  return [p for p in points if new and all(p[k] == new[0][k] for k in same)]


def read(path: pathlib.Path) -> list[Point]:
  if not path.exists():
    return []
  points = [json.loads(line) for line in path.read_text().splitlines() if line]
  return [{k: float(v) if v in ('inf', '-inf', 'nan') else v for k, v in p.items()} for p in points]


def table(points: Sequence[Point]) -> str:
  """Nats recovered, a line per candidate, a column per length; of `pairs`."""
  lengths = sorted({p['length'] for p in points})
  one = {p['length']: p for p in points if p['what'] == 'none'}
  rows = [['nats', 'turns', *(f'{n} = {n / points[0]["train_length"]:g}x' for n in lengths)]]
  rows.append(['damage, over 1x', '', *(f'{one[n]["damage"]:.3f}' if n in one else '' for n in lengths)])
  for name in lines(points):
    at = {p['length']: p for p in points if line(p) == name}
    some = next(iter(at.values()))
    turns = f'{some["turns"][0]:.3g}' if some['which'] == 'pair' else f'{len(some["pairs"])} pairs'
    rows.append([f'recovered: {name}', turns, *(_signed(at[n], 'recovered') if n in at else '' for n in lengths)])
    if some['which'] != 'pair' and 'over_pi' in some:
      both = [at[n] if 'over_pi' in at.get(n, {}) else None for n in lengths]
      rows.append([f'  more than by pi: {name}', turns, *(_signed(p, 'over_pi') if p else '' for p in both)])
  return _aligned(rows)


def attention_table(points: Sequence[Point]) -> str:
  """Means over heads, a line per layer and statistic, a column per length."""
  lengths, layers = sorted({p['length'] for p in points}), sorted({p['layer'] for p in points})
  rows = [['attention', *(f'{n} = {n / points[0]["train_length"]:g}x' for n in lengths)]]
  for name in STATISTICS:
    for layer in layers:
      of = [[p[name] for p in points if (p['layer'], p['length']) == (layer, n)] for n in lengths]
      rows.append([f'{name}, layer {layer}', *(f'{np.mean(x):.3g}' if x else '' for x in of)])
  return _aligned(rows)


def line(point: Point) -> str:
  """Of what a point speaks, whatever its length."""
  return _name(Candidate(point['scheme'], point['what'], point['which'], tuple(point['pairs'])))


def lines(points: Sequence[Point]) -> list[str]:
  """Of candidates, sets first."""
  shown = [p for p in points if p['what'] != 'none']
  return list(dict.fromkeys(line(p) for p in sorted(shown, key=lambda p: p['which'] == 'pair')))


def _signed(point: Point, field: str) -> str:
  x, low, high = (point[f] for f in (field, f'{field}_low', f'{field}_high'))
  return f'{x:+.3f}' if low is None else f'{x:+.3f} ±{(high - low) / 2:.3f}'


def _aligned(rows: Sequence[Sequence[str]]) -> str:
  widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
  return '\n'.join(
    '  '.join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:]))]) for row in rows
  )

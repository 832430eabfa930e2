"""What each protocol reports of models whose use of context is known.

  python -m evaluation.certify --train_len=512 --protocol=fixed_targets --protocol='sliding(stride=64)'

Without --protocol all of them. A falling curve of a model that uses no more context than it was trained with is the
protocol's own doing: its fake gain. Then what is left of it in the default, and real networks that read so far back.
"""

import argparse
import math

import numpy as np

from evaluation import nulls
from evaluation.plan import EvalConfig
from evaluation.protocols import PROTOCOLS
from posenc import Unsupported
from spec import SpecError

NETWORKS = ('nope', 'rope', 'alibi')


def table(null: nulls.Null, plan, protocols, short: int, long: int) -> str:
  """One null: a line per protocol."""
  true = 1 - math.exp(null.truth(long) - null.truth(short))
  width = max(map(len, protocols))
  lines = [
    f'{null.name}: true gain {short} -> {long} tokens {100 * true:.2f} %',
    f'  {"":{width}}  bias at {short:<6} at {long:<6}  reported    fake',
  ]
  for protocol in protocols:
    try:
      verdict = nulls.judge(null, plan, protocol, short, long)
    except Unsupported as reason:
      lines.append(f'  {protocol:{width}}  {reason}')
      continue
    cells = (
      f'{verdict.bias[0]:+14.6f} {verdict.bias[1]:+9.6f} {100 * verdict.gain:+8.2f} % {100 * verdict.fake:+8.2f} %'
    )
    lines.append(f'  {protocol:{width}}  {cells}')
  return '\n'.join(lines)


def residuals(train_len: int) -> str:
  """What the default's T targets leave of a model that uses exactly train_len tokens."""
  default = EvalConfig.targets(train_len)
  sizes = sorted({default, *(t for t in (8, 16, 32, 64, 128) if t < train_len)})
  cells = ', '.join(
    f'{100 * nulls.residual(train_len, train_len, t):.2f} % (T = {t}{", the default" * (t == default)})' for t in sizes
  )
  return f'fixed_targets, of a model that uses all of {train_len} tokens: higher at 1x than beyond by {cells}'


def keys(train_len: int, max_multiple: int) -> str:
  """What choosing targets by their losses makes of a model that gains nothing."""
  k = nulls.key_tokens(train_len, max_multiple)
  return (
    f'key_tokens, of a model without a gain whose losses flicker by 1 nat: {k.keys} of {k.targets} targets, '
    f'{k.mirrored} with its two contexts exchanged; perplexity falls by {100 * k.seen:.1f} % from {train_len} to '
    f'{4 * train_len} tokens, where the judge has chosen, and by {100 * k.unseen:.1f} % from {2 * train_len} to '
    f'{max_multiple * train_len}, where it has not'
  )


def networks(window: int = 16, train_len: int = 32) -> list[str]:
  plan = nulls.synthetic_plan(train_len=train_len, max_multiple=8)
  reach = 2 * window + plan.targets
  lengths = [reach - window, reach, 8 * train_len]
  lines = []
  for scheme in NETWORKS:
    nll = nulls.network(scheme, window, plan, lengths, train_len=train_len)
    short, first, last = (nll[length] for length in lengths)
    near, far = (float(np.abs(row - first).max()) for row in (short, last))
    lines.append(
      f'{scheme}(window={window}), 2 random layers: a target moves by at most {far:.1e} nats from {reach} to '
      f'{lengths[-1]} tokens (and by {near:.1e} from {lengths[0]}, which is less than it reads)'
    )
  return lines


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('--train_len', type=int, default=512, help='1x, in tokens; 512 by default')
  parser.add_argument('--max_multiple', type=int, default=32, help='the longest length in units of it; 32 by default')
  parser.add_argument('--protocol', action='append', help='repeat for more; all by default')
  args = parser.parse_args(argv)
  if args.train_len <= EvalConfig.targets(args.train_len) or args.max_multiple < 2:
    parser.error(f'--train_len={args.train_len} --max_multiple={args.max_multiple}: at least 9 and 2 are allowed')
  protocols = args.protocol or [*PROTOCOLS, 'fairseq(context_window=-64)']
  try:
    plan = nulls.synthetic_plan(protocols, train_len=args.train_len, max_multiple=args.max_multiple)
    for null in nulls.catalogue(args.train_len):
      print(f'{table(null, plan, protocols, args.train_len, args.train_len * args.max_multiple)}\n')
  except (SpecError, ValueError) as error:
    parser.error(str(error))
  print(residuals(args.train_len), end='\n\n')
  if args.max_multiple > 4 and any(protocol.startswith('key_tokens') for protocol in protocols):
    print(keys(args.train_len, args.max_multiple), end='\n\n')
  for line in networks():
    print(line)
  return 0


if __name__ == '__main__':
  raise SystemExit(main())

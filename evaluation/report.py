"""Several runs, side by side, on one page that works offline.

  python -m evaluation.report runs/rope runs/alibi --out=runs/report

Of a scheme with several settings of the optimizer (--choose: of other fields) the one with the lowest validation NLL at
1x is compared. Writes report.html, the same numbers as report.csv and the same figures as report.pdf, to --out. Runs
that differ in nothing but their seed are one scheme over seeds. All of it follows from curve.jsonl, config.json,
metrics.jsonl, surface.jsonl and the store of the runs; what they do not hold is said to be missing.
"""

import argparse
import pathlib

from evaluation import figures, sections
from evaluation.chosen import choose
from evaluation.gather import Report
from evaluation.runs import apart, curve_of, together
from spec import SpecError


def write_pdf(report: Report, path: pathlib.Path) -> None:
  """A figure a page, then the references of every scheme and method that is drawn."""
  from matplotlib.backends.backend_pdf import PdfPages

  with PdfPages(path, metadata={'CreationDate': None}) as pdf:
    for picture in report.pictures.values():
      picture.figure.set_layout_engine('none')  # as the page has laid it out
      pdf.savefig(picture.figure)
    under = [report.stability] if report.several else []
    for sheet in figures.sheets([*under, *(f'{name}: {text}' for name, text in report.references)]):
      pdf.savefig(sheet)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('.'), help='folder of report.*; here by default')
  parser.add_argument(
    '--choose',
    action='append',
    default=[],
    help='a field or group of the config, such as model.d_model: of its settings the best one on validation text at 1x '
    'is compared; repeat for more, none for none; optimizer by default',
  )
  parser.add_argument(
    '--tokens', action='append', default=[], help="'yarn - none at 4x', 'alibi none - rope yarn at 4x'; repeat for more"
  )
  args = parser.parse_args(argv)
  try:
    unswept = [w for w in args.workdirs if (w / 'config.json').exists() and not curve_of(w).exists()]
    runs = together([w for w in args.workdirs if w not in unswept] or unswept)
    settings = [] if args.choose == ['none'] else choose(runs, args.choose)
    kept = [run.workdir for s in settings if s.chosen for run in s.runs]
    chosen = apart([run for run in runs if not settings or run.workdir in kept])
    report = Report(chosen, args.tokens, settings, unswept)
    report.comparisons()
  except SpecError as error:
    parser.error(str(error))
  args.out.mkdir(parents=True, exist_ok=True)
  (args.out / 'report.html').write_text(sections.html(report))
  report.write_csv(args.out / 'report.csv')
  write_pdf(report, args.out / 'report.pdf')
  print(args.out / 'report.html')
  return 0


if __name__ == '__main__':
  raise SystemExit(main())

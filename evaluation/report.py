"""Several runs, side by side, on one page that works offline.

  python -m evaluation.report runs/rope runs/alibi --out=runs/report

Writes report.html, the same numbers as report.csv and the same figures as report.pdf, to --out. Runs that differ in
nothing but their seed are one scheme over seeds. All of it follows from curve.jsonl, config.json and the store of the
runs; what they do not hold is said to be missing.
"""

import argparse
import pathlib

from evaluation import figures, sections
from evaluation.gather import Report
from evaluation.runs import side_by_side
from spec import SpecError


def write_pdf(report: Report, path: pathlib.Path) -> None:
  """A figure a page, then the references of every scheme and method that is drawn."""
  from matplotlib.backends.backend_pdf import PdfPages

  with PdfPages(path, metadata={'CreationDate': None}) as pdf:
    for picture in report.pictures.values():
      picture.figure.set_layout_engine('none')  # as the page has laid it out
      pdf.savefig(picture.figure)
    for sheet in figures.sheets([f'{name}: {text}' for name, text in report.references]):
      pdf.savefig(sheet)


def main(argv: list[str] | None = None) -> int:
  parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
  parser.add_argument('workdirs', nargs='+', type=pathlib.Path)
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('.'), help='folder of report.*; here by default')
  parser.add_argument(
    '--tokens', action='append', default=[], help="'yarn - none at 4x', 'alibi none - rope yarn at 4x'; repeat for more"
  )
  args = parser.parse_args(argv)
  try:
    report = Report(side_by_side(args.workdirs), args.tokens)
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

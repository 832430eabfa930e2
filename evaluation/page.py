"""A page of HTML that holds all it shows: no script, no font, no address of anything elsewhere.

Whatever is no `Markup` is escaped: names of runs, schemes, methods and the text of a corpus are strangers' strings.
"""

import html
import math
from collections.abc import Iterable, Sequence

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 78rem; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.6rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; border-top: 1px solid #ddd;
padding-top: .8rem } h3 { font-size: 1rem; margin: 1.2rem 0 .3rem }
p { max-width: 60rem; margin: .4rem 0 } .note { color: #666 } .missing { color: #855 }
.missing::before { content: "— " } .warn { background: #fff4d6; padding: .3rem .6rem; border-left: 3px solid #e0a800 }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(34rem, 1fr)); gap: 0 2rem }
figure { margin: .8rem 0 1.4rem } figcaption { color: #555; font-size: .85rem; max-width: 60rem }
svg { max-width: 100%; height: auto; display: block }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; margin: .4rem 0 }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
thead th { border-bottom: 1px solid #999 } td small { color: #777 } .left td, .left th { text-align: left }
.wide td { white-space: normal; vertical-align: top; overflow-wrap: anywhere }
.wide td:first-child { white-space: nowrap }
.better { background: #e3f4e6 } .worse { background: #fbe4e1 } .note td { color: #666 }
.text td { font-family: ui-monospace, monospace; font-size: .8rem } .text td:nth-child(-n+3) { font-family: inherit }
mark { background: #ffe08a; padding: 0 .1em } pre { font-size: .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
details { margin: .5rem 0 } summary { cursor: pointer; color: #357 }
"""


class Markup(str):
  """Text that is HTML already."""


def tag(name: str, *children: object, **attributes: object) -> Markup:
  """<name key="value">children</name>; class_ for class; an attribute of None is left out."""
  written = ''.join(f' {k.rstrip("_")}="{html.escape(str(v))}"' for k, v in attributes.items() if v is not None)
  return Markup(f'<{name}{written}>{join(children)}</{name}>')


def join(children: Iterable[object]) -> Markup:
  return Markup(''.join(c if isinstance(c, Markup) else html.escape(str(c)) for c in children))


def table(head: Sequence[object], rows: Iterable[Sequence[object]], class_: str | None = None) -> Markup:
  """Cells that are <td> already stay what they are."""

  def cell(value: object) -> Markup:
    return value if isinstance(value, Markup) and value.startswith('<td') else tag('td', value)

  body = tag('tbody', *(tag('tr', *map(cell, row)) for row in rows))
  return tag(
    'div', tag('table', tag('thead', tag('tr', *(tag('th', h) for h in head))), body, class_=class_), class_='scroll'
  )


def number(shown: str, value: float, low: float = math.nan, high: float = math.nan, **more: object) -> Markup:
  """A <td> that shows a rounded number and, under the pointer, all its digits and those of its 95 % interval."""
  ends = '' if math.isnan(low) else f', 95 % {low!r} to {high!r}'
  return tag('td', shown, title=f'{value!r}{ends}{more.pop("said", "")}', **more)


def figure(svg: str, *caption: object) -> Markup:
  return tag('figure', Markup(svg), tag('figcaption', *caption))


def missing(text: str) -> Markup:
  """What the report would hold, and why it does not."""
  return tag('p', text, class_='missing')


def page(title: str, *body: object) -> str:
  head = tag('head', Markup('<meta charset="utf-8">'), tag('title', title), Markup(f'<style>{STYLE}</style>'))
  return f'<!DOCTYPE html>\n<html lang="en">{head}{tag("body", tag("h1", title), *body)}</html>\n'

"""A drawing in SVG, light or dark as the screen is, and a page of drawings. It loads nothing.

Knows no traces.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from html import escape

# By name: on a light and on a dark ground.
COLOURS = {
    "ground": ("#ffffff", "#14161a"),
    "ink": ("#1d2127", "#e4e7ec"),
    "faint": ("#6a727d", "#98a1ad"),
    "rule": ("#d4d9df", "#363c45"),
    "prompt": ("#a9bdd6", "#4d6482"),
    "canonical": ("#2f6fbf", "#5b9bea"),
    "dark": ("#1d2127", "#14161a"),
    "draft": ("#f2b632", "#d99b1c"),
    "accepted": ("#2e9a62", "#3fb97a"),
    "rejected": ("#d0453f", "#ea6a62"),
    "bonus": ("#8457c7", "#ae88ee"),
    "riding": ("#9aa3ae", "#7b8592"),
    "plain": ("#c9cfd6", "#4a525d"),
    "fast": ("#e9ecef", "#272c33"),
}


@dataclass
class Drawing:
    """SVG elements from back to front; lengths in pixels, colours by name. title: said where a
    pointer rests."""

    width: float = 0.0
    height: float = 0.0
    elements: list[str] = field(default_factory=list)

    def rect(
        self,
        x: float,
        y: float,
        w: float,
        h: float,
        colour: str,
        title: str = "",
        round: float = 0.0,
    ) -> None:
        """x, y: top left."""
        corner = f' rx="{round:g}"' if round else ""
        inside = f"<title>{shielded(title)}</title>" if title else ""
        where = f'x="{_at(x)}" y="{_at(y)}" width="{_at(w)}" height="{_at(h)}"{corner}'
        self.elements.append(f'<rect class="{colour}" {where}>{inside}</rect>')

    def line(self, x: float, y: float, w: float, h: float, colour: str, size: float = 1.0) -> None:
        """To x + w, y + h."""
        where = f'x1="{_at(x)}" y1="{_at(y)}" x2="{_at(x + w)}" y2="{_at(y + h)}"'
        self.elements.append(f'<line class="{colour}" {where} stroke-width="{size:g}"/>')

    def text(
        self,
        x: float,
        y: float,
        text: str,
        size: float = 10,
        colour: str = "ink",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        """x, y: the baseline at ``anchor``."""
        more = f' text-anchor="{anchor}"' if anchor != "start" else ""
        more += ' font-weight="600"' if bold else ""
        where = f'class="{colour}" x="{_at(x)}" y="{_at(y)}" font-size="{size:g}"{more}'
        self.elements.append(f"<text {where}>{shielded(text)}</text>")

    def stack(self, other: Drawing) -> None:
        """Put another drawing below this one."""
        y = self.height + (16 if self.height else 0)
        self.elements += [f'<g transform="translate(0 {_at(y)})">', *other.elements, "</g>"]
        self.width, self.height = max(self.width, other.width), y + other.height


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def printable(text: str) -> str:
    """``text`` with what cannot be printed escaped: no file may hold a lone surrogate, and no SVG a
    control character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shielded(text: object) -> str:
    """Text for a file of markup."""
    return escape(printable(str(text)))


def shown(text: str, longest: int = 14) -> str:
    """A token's text in one line: spaces and line feeds visible, what cannot be printed escaped."""
    line = printable(text).replace(" ", "\N{MIDDLE DOT}")
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _rules(column: int) -> str:
    fills = (f".{name}{{fill:{both[column]}}}" for name, both in COLOURS.items())
    lines = (f"line.{name}{{stroke:{both[column]}}}" for name, both in COLOURS.items())
    return "".join((*fills, *lines))


STYLE = (
    "text{font-family:system-ui,'DejaVu Sans',sans-serif;white-space:pre}.none{fill:transparent}"
    f"{_rules(0)}@media(prefers-color-scheme:dark){{{_rules(1)}}}"
)


def svg(drawing: Drawing, style: bool = True) -> str:
    """A drawing as a file; ``style``: with its colours, which a page has once."""
    size = f'width="{drawing.width:.0f}" height="{drawing.height:.0f}"'
    box = f'viewBox="0 0 {drawing.width:.0f} {drawing.height:.0f}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} {size}>'
    colours = f"<style>{STYLE}</style>" if style else ""
    ground = f'<rect class="ground" {size}/>'
    return "".join((head, colours, ground, *drawing.elements, "</svg>"))


PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<style>{style}
body{{font-family:system-ui,'DejaVu Sans',sans-serif;margin:1.5rem;background:#fff;color:#1d2127}}
.wide{{overflow-x:auto;margin:0 0 1.5rem}} table{{border-collapse:collapse;font-size:.8rem}}
th,td{{text-align:right;padding:.15rem .6rem;border-bottom:1px solid #d4d9df}}
@media(prefers-color-scheme:dark){{body{{background:#14161a;color:#e4e7ec}}
th,td{{border-color:#363c45}}}}
</style></head><body><h1>{title}</h1>
<p>Rest the pointer on a cell or on the head of a column to read what it is.</p>
{pictures}
<details><summary>Every pass</summary><div class="wide"><table>{table}</table></div></details>
</body></html>
"""


def html(drawings: list[Drawing], title: str, table: Iterable[Iterable[object]]) -> str:
    """A page of drawings, and a table below them whose first row is its head."""
    rows: list[str] = []
    for row in table:
        cell = "td" if rows else "th"
        rows.append("".join(f"<{cell}>{shielded(value)}</{cell}>" for value in row))
    return PAGE.format(
        title=shielded(title),
        style=STYLE,
        pictures="\n".join(f'<div class="wide">{svg(d, style=False)}</div>' for d in drawings),
        table="".join(f"<tr>{row}</tr>" for row in rows),
    )

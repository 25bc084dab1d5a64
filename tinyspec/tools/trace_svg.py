"""A picture as shapes with names of colours, and as SVG, light or dark as the screen is.

Knows no traces.
"""

from __future__ import annotations

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
MONOSPACE, SANS = "mono", "sans"


@dataclass
class Shape:
    """kind: "rect" (x, y: top left), "line" (to x + w, y + h) or "text" (x, y: the baseline at the
    left, or at ``anchor``). colour: a name of COLOURS. title: said where a pointer rests on it."""

    kind: str
    x: float
    y: float
    w: float = 0.0
    h: float = 0.0
    colour: str = "ink"
    text: str = ""
    size: float = 11.0
    anchor: str = "start"
    bold: bool = False
    font: str = SANS
    title: str = ""
    round: float = 0.0


@dataclass
class Drawing:
    """Shapes from back to front; lengths in pixels."""

    width: float = 0.0
    height: float = 0.0
    shapes: list[Shape] = field(default_factory=list)

    def rect(self, x: float, y: float, w: float, h: float, colour: str, **more: object) -> None:
        self.shapes.append(Shape("rect", x, y, w, h, colour, **more))  # type: ignore[arg-type]

    def line(self, x: float, y: float, w: float, h: float, colour: str, size: float = 1.0) -> None:
        self.shapes.append(Shape("line", x, y, w, h, colour, size=size))

    def text(self, x: float, y: float, text: str, **more: object) -> None:
        self.shapes.append(Shape("text", x, y, text=text, **more))  # type: ignore[arg-type]

    def add(self, other: Drawing, x: float, y: float) -> None:
        """Put another drawing at a place; this one grows to hold it."""
        for shape in other.shapes:
            moved = Shape(**{**vars(shape), "x": shape.x + x, "y": shape.y + y})
            self.shapes.append(moved)
        self.width = max(self.width, x + other.width)
        self.height = max(self.height, y + other.height)


def printable(text: str) -> str:
    """``text`` with what cannot be printed escaped: no file may hold a lone surrogate, and no SVG a
    control character."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def shown(text: str, longest: int = 14) -> str:
    """A token's text in one line: spaces and line feeds visible, what cannot be printed escaped."""
    line = printable(text).replace(" ", "\N{MIDDLE DOT}")
    return line if len(line) <= longest else line[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"


FONTS = {
    "sans": "system-ui, 'DejaVu Sans', sans-serif",
    "mono": "ui-monospace, 'DejaVu Sans Mono', monospace",
}


def _rules(column: int) -> str:
    fills = (f".{name}{{fill:{both[column]}}}" for name, both in COLOURS.items())
    lines = (f"line.{name}{{stroke:{both[column]}}}" for name, both in COLOURS.items())
    return "".join((*fills, *lines))


STYLE = (
    f"text{{font-family:{FONTS['sans']};white-space:pre}}"
    f".mono{{font-family:{FONTS['mono']}}}.none{{fill:transparent}}"
    f"{_rules(0)}@media(prefers-color-scheme:dark){{{_rules(1)}}}"
)


def svg(drawing: Drawing, style: bool = True) -> str:
    """A picture in text; ``style``: with its colours, which a page has once."""
    width, height = f"{drawing.width:.0f}", f"{drawing.height:.0f}"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
    )
    parts = [head, f"<style>{STYLE}</style>" if style else ""]
    parts.append(f'<rect class="ground" width="{width}" height="{height}"/>')
    parts += map(_element, drawing.shapes)
    parts.append("</svg>")
    return "".join(parts)


def _element(shape: Shape) -> str:
    title = f"<title>{escape(printable(shape.title))}</title>" if shape.title else ""
    if shape.kind == "rect":
        corner = f' rx="{shape.round:g}"' if shape.round else ""
        start = f'<rect class="{shape.colour}" x="{_at(shape.x)}" y="{_at(shape.y)}"'
        sides = f' width="{_at(shape.w)}" height="{_at(shape.h)}"{corner}'
        return f"{start}{sides}>{title}</rect>" if title else f"{start}{sides}/>"
    if shape.kind == "line":
        ends = f'x2="{_at(shape.x + shape.w)}" y2="{_at(shape.y + shape.h)}"'
        where = f'x1="{_at(shape.x)}" y1="{_at(shape.y)}" {ends}'
        return f'<line class="{shape.colour}" {where} stroke-width="{shape.size:g}"/>'
    font = " mono" if shape.font == MONOSPACE else ""
    anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
    bold = ' font-weight="600"' if shape.bold else ""
    where = f'x="{_at(shape.x)}" y="{_at(shape.y)}" font-size="{shape.size:g}"'
    words = f'<text class="{shape.colour}{font}" {where}{anchor}{bold}>'
    return f"{words}{escape(printable(shape.text))}</text>"


def _at(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")

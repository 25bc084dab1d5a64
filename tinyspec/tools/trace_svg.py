"""A drawing as SVG, light or dark as the reader's screen is, and as a page around it."""

from __future__ import annotations

from html import escape

from tinyspec.tools.drawing import COLOURS, MONOSPACE, Drawing, Shape, printable

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

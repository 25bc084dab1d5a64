"""A drawing by matplotlib, for PNG: the same shapes, light or dark. Knows no traces."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from tinyspec.errors import TinyspecError, refuse
from tinyspec.tools.drawing import COLOURS, MONOSPACE, Drawing, Shape, printable

DOTS = 100  # an inch
LARGEST = 2**16  # dots each way, of matplotlib


class NoMatplotlib(TinyspecError):
    """matplotlib is not installed."""


def save_png(drawing: Drawing, path: Path, dark: bool = False, scale: float = 2.0) -> None:
    """Write a PNG file, ``scale`` dots a pixel. Raises NoMatplotlib, OSError, ValueError for a
    drawing that is too large."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        what = 'a PNG needs matplotlib: pip install "tinyspec[plot]"; .svg and .html do without'
        raise NoMatplotlib(what) from error
    if max(drawing.width, drawing.height) * scale >= LARGEST:
        given = f"{drawing.width:.0f} x {drawing.height:.0f} pixels"
        most = f"less than {LARGEST / scale:.0f} each way for a PNG: fewer cells, or .svg, .html"
        raise refuse("picture", given, most)
    colours = {name: both[dark] for name, both in COLOURS.items()}
    size = drawing.width / DOTS, drawing.height / DOTS
    figure = Figure(figsize=size, facecolor=colours["ground"])
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, drawing.width)
    axes.set_ylim(drawing.height, 0)
    axes.axis("off")
    for n, shape in enumerate(drawing.shapes):
        if shape.colour != "none":
            _draw(axes, shape, colours[shape.colour], n)
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(path, dpi=DOTS * scale, facecolor=colours["ground"])


def _draw(axes: Any, shape: Shape, colour: str, order: int) -> None:
    from matplotlib.patches import FancyBboxPatch, Rectangle

    points = 72 / DOTS  # of a pixel
    if shape.kind == "text":
        families = ["DejaVu Sans Mono" if shape.font == MONOSPACE else "DejaVu Sans"]
        axes.text(
            shape.x,
            shape.y,
            # No mathematics in a token's dollar signs.
            printable(shape.text).replace("$", r"\$"),
            color=colour,
            fontsize=shape.size * points,
            family=families,
            weight="bold" if shape.bold else "normal",
            ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            va="baseline",
            zorder=order,
        )
    elif shape.kind == "line":
        ends = [shape.x, shape.x + shape.w], [shape.y, shape.y + shape.h]
        axes.plot(*ends, color=colour, linewidth=shape.size * points, zorder=order)
    elif shape.round and shape.w > 2 * shape.round and shape.h > 2 * shape.round:
        r = shape.round
        inner = (shape.x + r, shape.y + r), shape.w - 2 * r, shape.h - 2 * r
        style = f"round,pad={r},rounding_size={r}"
        box = FancyBboxPatch(*inner, boxstyle=style, fc=colour, ec="none", lw=0, zorder=order)
        axes.add_patch(box)
    else:
        where = (shape.x, shape.y), shape.w, shape.h
        axes.add_patch(Rectangle(*where, fc=colour, ec="none", lw=0, zorder=order))

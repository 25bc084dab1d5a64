"""The views of a trace: its timeline, and one verify close up."""

from __future__ import annotations

from tinyspec.errors import refuse
from tinyspec.tools.close_up import close_up
from tinyspec.tools.close_up_picture import picture
from tinyspec.tools.drawing import Drawing
from tinyspec.tools.timeline import timeline
from tinyspec.tools.trace_run import Run


def views(run: Run, view: str, most_cells: int | None = None) -> list[Drawing]:
    """ "timeline", "verify", or "both", where a trace without a verify has the first alone.

    Raises ValueError for "verify" where nothing was verified.
    """
    found = [timeline(run, most_cells)] if view != "verify" else []
    one = close_up(run) if view != "timeline" else None
    if one is not None:
        found.append(picture(one))
    elif view == "verify":
        raise refuse("view", view, "timeline: no pass of this trace verified drafts")
    return found


def stacked(drawings: list[Drawing]) -> Drawing:
    """One below the other."""
    whole = Drawing()
    for drawing in drawings:
        whole.add(drawing, 0, whole.height + (16 if whole.height else 0))
    return whole

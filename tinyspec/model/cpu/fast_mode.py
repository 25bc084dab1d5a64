"""Fast mode: whether the pass that runs may use the fastest operators of a CPU.

Rows of a canonical pass must have the same bits in every canonical bucket, so its operators are
fixed. Rows of any other pass need not, and stand-ins then choose by the number of rows. The runner
switches fast mode on for those passes; the fast operators change no deterministic bit.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class FastMode:
    """One switch, shared by the runner and all CPU stand-ins of a model.

    on: the pass that runs is not canonical.
    """

    on: bool = False

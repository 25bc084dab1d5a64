"""Seeds of rows where a call's arguments name none: from a config, or from ``patch``.

Trainers and evaluation harnesses pass settings on in a ``GenerationConfig`` and nothing else, and
their calls repeat prompts within a call and from call to call. So a seed that comes that way is the
base of the rows' seeds. Knows numbers and prompts only.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from tinyspec.errors import refuse
from tinyspec.scalars import plain
from tinyspec.scheduler.request import noise_key

_MASK = (1 << 63) - 1


@dataclass(frozen=True)
class Defaults:
    """Of calls that do not say otherwise. seed: the base of their rows' seeds."""

    deterministic: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, plain(value))
        if not isinstance(self.deterministic, bool):
            raise refuse("deterministic", self.deterministic, "True or False")
        if self.seed is not None:
            check_base(self.seed)


def check_base(seed: object) -> None:
    """Raise ValueError unless ``seed`` may be a base."""
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise refuse("seed", seed, "None or an integer in [0, 2**64)")


class RowSeeds:
    """The rows' seeds of one call after the other.

    A row's seed is mixed from the base, how often its prompt stood earlier in the call, and the
    number of calls before since the base changed. So equal prompts have samples of their own, in a
    call and from call to call, and a script that is run again repeats them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: set[int] = set()
        self._calls = 0

    def of(self, bases: Sequence[int | None], prompts: Iterable[Hashable]) -> list[int | None]:
        """Of one call's rows; None where a row has no base."""
        distinct = {base for base in bases if base is not None}
        with self._lock:
            self._calls = self._calls + 1 if distinct == self._bases else 0
            self._bases, number = distinct, self._calls
        earlier: Counter[Hashable] = Counter()
        found: list[int | None] = []
        for base, prompt in zip(bases, prompts, strict=True):
            seed = None if base is None else noise_key(noise_key(base, earlier[prompt]), number)
            found.append(None if seed is None else seed & _MASK)
            earlier[prompt] += 1
        return found

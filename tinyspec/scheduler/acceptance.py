"""How often drafts of one source are right. Host only."""

from __future__ import annotations

# Drafts that count, the latest most, as other requests may have others.
REMEMBERED = 200.0
# However many drafts in a row were accepted, the next one may not be.
SUREST = 1 - 1e-6


class Acceptance:
    """good, bad: drafts that were accepted, and sequences with one that was not; at first what
    ``begins`` says."""

    def __init__(self, begins: tuple[float, float]):
        self._most = sum(begins)
        self.good, self.bad = begins

    def observe(self, accepted: int, rejected: int) -> None:
        """A pass verified drafts: so many were accepted, and so many sequences had one that was
        not."""
        good, bad = self.good + accepted, self.bad + rejected
        part = min(1.0, REMEMBERED / (good + bad))
        self.good, self.bad = good * part, bad * part

    def chance(self, accepted: int = 0, rejected: int = 0) -> float:
        """That a draft is accepted, if those before it were, less than 1: where so many of some
        sequences' own were, beside no more of all than it began with."""
        part = min(1.0, self._most / (self.good + self.bad))
        good, bad = self.good * part + accepted, self.bad * part + rejected
        return min(good / (good + bad), SUREST)

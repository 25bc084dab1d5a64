"""A session: the time in which an engine is in its model and runs batches of rows.

Further batches may begin while others run. Knows one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from transformers.generation.continuous_batching.requests import GenerationOutput

from tinyspec.drop_in.access import Access
from tinyspec.drop_in.rows import Batch, Row
from tinyspec.engine.engine import Engine
from tinyspec.scheduler.request import Request


class Session:
    """Runs rows in ``engine``, which is in the model meanwhile."""

    def __init__(self, engine: Engine, access: Access):
        self._engine, self._access = engine, access
        self._most = engine.config.max_sequences
        self.rows: list[Row] = []
        engine.core.drafter = access.drafter

    def reserve(self, batches: Iterable[Batch]) -> None:
        """Before the first: pages for as many rows as may run at once."""
        self._engine.reserve(self._most * max(map(self._pages, batches)))

    def has_room(self, batch: Batch) -> bool:
        """Whether ``batch`` may begin beside the rows that run."""
        return len(self.rows) < self._most and self._pages(batch) <= self._engine.pool.num_pages

    def _pages(self, batch: Batch) -> int:
        """Pages of its longest row."""
        pairs = zip(batch.call.prompts, batch.call.params, strict=True)
        return max(self._engine.pool.pages_for(len(p) + s.max_new_tokens) for p, s in pairs)

    def begin(self, batch: Batch) -> None:
        """Queue its rows. Raises what is wrong with the requests."""
        requests = self._access.requests(self._engine, batch.call)
        if (drafter := batch.call.drafter()) is not None:
            self._engine.core.drafter = drafter
        self._engine.tracker.add(requests)
        batch.begin(requests)
        self.rows += batch.rows

    def step(self) -> list[tuple[Row, GenerationOutput]]:
        """Run one step; what there is to tell of rows that are not cancelled."""
        self._drop_cancelled()
        if self.rows:
            self._engine.tracker.advance()
        looks = ((row, row.look()) for row in self.rows if not row.cancelled)
        found = [(row, output) for row, output in looks if output is not None]
        self.rows = [row for row in self.rows if not row.ended]
        return found

    def _drop_cancelled(self) -> None:
        """Abort the requests of which no row is wanted any more."""
        if any(row.cancelled for row in self.rows):
            wanted = {
                row.sequence.request for row in self.rows if row.sequence and not row.cancelled
            }
            requests = [request for request in self._requests() if request not in wanted]
            self._engine.tracker.cancel(requests)
            self.rows = [row for row in self.rows if not row.ended]

    def _requests(self) -> list[Request]:
        found = (row.sequence.request for row in self.rows if row.sequence is not None)
        return list(dict.fromkeys(found))

    def abort(self) -> None:
        """End the rows that are left; they keep what they have got."""
        self._engine.tracker.cancel(self._requests())

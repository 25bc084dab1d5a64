"""Index of pages by their tokens, so that a prompt can start from KV computed before. Host only.

Full pages of committed tokens are indexed under a 128-bit hash of all tokens up to the page's end,
with the weights' version and whether the KV is canonical. Canonical pages serve every request,
others only plain ones. Prompts that are thought about, or given as embeddings, share none. Moves no
data: an indexed page is read-only. Where a model has recurrent layers as well, a prompt starts
behind tokens whose pages are indexed and whose states are kept.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from tinyspec.scheduler.checkpoints import Checkpoints, Key
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.step import Step

_Key = tuple[int, bool, bytes]


class PrefixCache:
    """The index over one page pool. on: whether there is one; else nothing is indexed."""

    def __init__(self, pool: PagePool, checkpoints: Checkpoints, on: bool = True):
        self.pool, self.checkpoints, self.on = pool, checkpoints, on
        self._version = 0
        self.pages: dict[_Key, int] = {}
        self.keys: dict[int, _Key] = {}
        self._by_plain: set[int] = set()
        pool.on_evict = self.forget

    def __len__(self) -> int:
        return len(self.pages)

    def match(self, sequence: Sequence) -> tuple[list[int], int]:
        """The pages that hold its first tokens, and how many of them, from the first, are
        canonical; for a deterministic request all are."""
        pages: list[int] = []
        canonical = 0
        if not self.pages or sequence.recompute:
            return pages, canonical
        for digest in self._digests(sequence):
            page = self.pages.get((self._version, True, digest))
            if page is not None:
                if canonical == len(pages):
                    canonical += 1
            elif not sequence.deterministic:
                page = self.pages.get((self._version, False, digest))
            if page is None:
                break
            pages.append(page)
        if self.checkpoints.on:
            while pages and (
                len(pages) * self.pool.page_size >= sequence.length
                or self._state(sequence, len(pages)) is None
            ):
                pages.pop()
        return pages, min(canonical, len(pages))

    def _state(self, sequence: Sequence, pages: int) -> Key | None:
        """Of the state that is kept after the sequence's first pages; for a deterministic one
        canonical."""
        digest = self._digests(sequence)[pages - 1]
        kinds = (True,) if sequence.deterministic else (True, False)
        keys = ((digest, canonical) for canonical in kinds)
        return next((key for key in keys if key in self.checkpoints.kept), None)

    def begin(self, sequence: Sequence, pages: int) -> None:
        """Let a sequence that runs start behind so many pages that ``match`` found."""
        if self.checkpoints.on and pages and (key := self._state(sequence, pages)) is not None:
            self.checkpoints.begin(sequence.row, key, pages * self.pool.page_size)

    def keep_states(self, step: Step) -> None:
        """Keep states that sequences have before a pass, each once."""
        table = step.table
        at = table.state_at[step.rows]
        found = (at > table.state_kept[step.rows]) & (at % self.checkpoints.step == 0) & self.on
        rows, ends = step.rows[found], at[found]
        table.state_kept[rows] = ends
        for row, tokens in zip(rows.tolist(), ends.tolist(), strict=True):
            sequence: Sequence = table.sequences[row]
            pages = tokens // self.pool.page_size
            if len(digests := self._digests(sequence, pages)) >= pages:
                self.checkpoints.keep(row, (digests[pages - 1], sequence.deterministic))

    def discard(self, sequence: Sequence) -> None:
        """A sequence failed: no other starts from what it leaves."""
        self.drop(sequence.pages)
        for digest in sequence.digests:
            self._forget_states(digest)

    def _forget_states(self, digest: bytes) -> None:
        for canonical in (True, False):
            self.checkpoints.forget((digest, canonical))

    def first(self, sequence: Sequence) -> bytes | None:
        """Digest of the tokens of its first page; None if they do not fill one, or may not be
        shared."""
        return next(iter(self._digests(sequence)), None) if self.on else None

    def insert(self, sequence: Sequence) -> None:
        """Index pages that have filled up with committed tokens since the last call."""
        full = sequence.computed // self.pool.page_size
        if full <= sequence.indexed:
            return
        digests = self._digests(sequence) if self.on else []
        for number in range(sequence.indexed, min(full, len(digests))):
            page = sequence.pages[number]
            canonical = sequence.canonical >= (number + 1) * self.pool.page_size
            key = (self._version, canonical, digests[number])
            # One page is enough for the same tokens.
            if page not in self.keys and key not in self.pages:
                self.pages[key] = page
                self.keys[page] = key
                if not sequence.deterministic:
                    self._by_plain.add(page)
                self.pool.keep(page)
        sequence.indexed = full

    def drop(self, pages: list[int]) -> None:
        """Forget pages whose values may be wrong."""
        for page in pages:
            if page in self.keys:
                self.forget(page)
                self.pool.drop(page)

    def drop_plain(self) -> None:
        """Forget pages that plain sequences computed, canonical or not: which passes of theirs were
        canonical is chance."""
        self.drop(list(self._by_plain))

    def clear(self) -> None:
        """Forget everything: the weights changed, or the pool's memory was given back."""
        self.drop(list(self.keys))
        self.checkpoints.clear()
        self._version += 1

    def forget(self, page: int) -> None:
        key = self.keys.pop(page)
        del self.pages[key]
        self._by_plain.discard(page)
        self._forget_states(key[-1])

    def _digests(self, sequence: Sequence, most: int | None = None) -> list[bytes]:
        """One digest per full page of its tokens, or of the first pages, each over all tokens up to
        the page's end."""
        size, digests = self.pool.page_size, sequence.digests
        request = sequence.request
        if request.embeds is not None or request.thoughts is not None:  # more than tokens
            return digests
        for number in range(len(digests), sequence.length // size if most is None else most):
            tokens = array("q", sequence.ids(number * size, (number + 1) * size))
            before = digests[-1] if digests else b""
            digests.append(blake2b(before + tokens.tobytes(), digest_size=16).digest())
        return digests

"""Index of pages by their tokens, so that a prompt can start from KV computed before. Host only.

Full pages of committed tokens are indexed under a 128-bit hash of all tokens up to the page's end,
with the weights' version and whether the KV is canonical. Canonical pages serve every request,
others only plain ones. Of what is thought about, only pages of the prompt are indexed, under hashes
of their own, and with what was thought in them; they serve only such prompts. Moves no data: an
indexed page is read-only.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b

from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Sequence
from tinyspec.scheduler.thoughts import Made

_Key = tuple[int, bool, bytes]


class PrefixCache:
    """The index over one page pool. on: whether there is one; else nothing is indexed."""

    def __init__(self, pool: PagePool, on: bool = True):
        self.pool, self.on = pool, on
        self._version = 0
        self.pages: dict[_Key, int] = {}
        self.keys: dict[int, _Key] = {}
        self._by_plain: set[int] = set()
        self._thoughts: dict[int, list[Made]] = {}
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
        return pages, canonical

    def first(self, sequence: Sequence) -> bytes | None:
        """Digest of the tokens of its first page, None if they do not fill one; and for a prompt
        that is thought about, which takes many passes, so that nobody waits for it."""
        if not self.on or sequence.request.thoughts is not None:
            return None
        return next(iter(self._digests(sequence)), None)

    def insert(self, sequence: Sequence) -> None:
        """Index pages that have filled up with committed tokens since the last call."""
        full = sequence.computed // self.pool.page_size
        if full <= sequence.indexed:
            return
        digests = self._digests(sequence) if self.on else []
        for number in range(sequence.indexed, min(full, len(digests))):
            page = sequence.pages[number]
            end, thoughts = (number + 1) * self.pool.page_size, sequence.request.thoughts
            canonical = sequence.canonical >= end
            # So are the thoughts that positions up to there, and their chunks, hang on.
            canonical &= thoughts is None or thoughts.canonical_up_to(end)
            key = (self._version, canonical, digests[number])
            # One page is enough for the same tokens.
            if page not in self.keys and key not in self.pages:
                self.pages[key] = page
                self.keys[page] = key
                if not sequence.deterministic:
                    self._by_plain.add(page)
                if thoughts is not None:
                    self._thoughts[page] = thoughts.made(end - self.pool.page_size, end)
                self.pool.keep(page)
        sequence.indexed = full

    def thoughts(self, pages: list[int]) -> list[Made]:
        """Those of the chunks that end in ``pages``, the first of a prompt with thoughts."""
        return [made for page in pages for made in self._thoughts[page]]

    def drop(self, pages: list[int]) -> None:
        """Forget pages whose values may be wrong."""
        for page in pages:
            if page in self.keys:
                self.forget(page)
                self.pool.drop(page)

    def drop_plain(self) -> None:
        """Forget pages that plain sequences computed, canonical or not."""
        self.drop(list(self._by_plain))

    def clear(self) -> None:
        """Forget everything: the weights changed, or the pool's memory was given back."""
        self.drop(list(self.keys))
        self._version += 1

    def forget(self, page: int) -> None:
        del self.pages[self.keys.pop(page)]
        self._by_plain.discard(page)
        self._thoughts.pop(page, None)

    def _digests(self, sequence: Sequence) -> list[bytes]:
        """One digest per full page of its tokens, each over all tokens up to the page's end."""
        size, digests = self.pool.page_size, sequence.digests
        if sequence.request.embeds is not None:  # its tokens are placeholders
            return digests
        # No states are added to what is decoded, nor in prompts that are not thought about.
        thoughts, length, root = sequence.request.thoughts, sequence.length, b""
        if thoughts is not None:
            length, root = thoughts.num_prompt, thoughts.root
        for number in range(len(digests), length // size):
            tokens = array("q", sequence.ids(number * size, (number + 1) * size))
            before = digests[-1] if digests else root
            digests.append(blake2b(before + tokens.tobytes(), digest_size=16).digest())
        return digests

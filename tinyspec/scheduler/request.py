"""A request and its sequences: what is committed, drafted and computed.

State only; the scheduler and the engine change it. Host only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from time import monotonic
from typing import Any

from tinyspec.outputs import CompletionStats
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.sequence_table import SequenceTable, column
from tinyspec.scheduler.thoughts import Thoughts

# Of a sequence's number in order of arrival: those of its index.
INDEX_BITS = 20
_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def noise_key(seed: int, index: int) -> int:
    """64-bit noise key of completion ``index`` under ``seed``, as a signed integer.

    splitmix64's finaliser (Steele et al., 2014) over the seed, moved on by the index.
    """
    x = (seed + (index + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x


@dataclass(eq=False)
class Sequence:
    """One completion of a request. While it runs, a row of ``table`` holds what passes need of it
    and explains the other properties; table, row: None and -1 while it does not run.

    params: the request's, with processors of its own where these are made for each completion.
    pages: page table. digests: of full pages, one each. draft_free: verify the next token without
    drafts. given_tokens: the expected continuation (replay, scoring), used as drafts; the sequence
    ends where the canonical tokens diverge from it. teacher_forced: commit it whatever the logits
    say. stop_string: that ended it. error: why it ended early. cause: the exception behind it.
    scores, logits: per committed token [V] fp32, processed and raw, where the request keeps them.
    next_logits: [V] fp32 of its next token, where that is supplied from outside: it waits for it,
    and needs no pages meanwhile. grammar: tells which tokens may follow, where not all may.
    """

    request: Request
    index: int
    _tokens: list[int]
    params: SamplingParams
    table: SequenceTable | None = None
    row: int = -1
    pages: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    draft_free: bool = False
    given_tokens: list[int] | None = None
    teacher_forced: bool = False
    finish_reason: str | None = None
    stop_string: str | None = None
    error: str | None = None
    cause: Exception | None = None
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    next_logits: Any = None
    grammar: Any = None
    _logprobs: list[float] = field(default_factory=list)
    _stats: CompletionStats = field(default_factory=CompletionStats)

    computed = column("computed")
    canonical = column("canonical")
    frozen = column("frozen")
    indexed = column("indexed")
    num_drafts = column("num_drafts")
    proposed = column("proposed")
    draft_ended = column("draft_ended")

    @property
    def deterministic(self) -> bool:
        return self.request.params.deterministic

    @property
    def length(self) -> int:
        """Committed tokens, the prompt's included."""
        return len(self._tokens) if self.table is None else int(self.table.length[self.row])

    @property
    def tokens(self) -> list[int]:
        """Committed tokens, the prompt's included; a copy."""
        return self.ids(0, self.length)

    def ids(self, first: int, end: int) -> list[int]:
        """Tokens at places ``first`` to ``end - 1``, drafts behind the committed ones."""
        if self.table is None:
            return self._tokens[first:end]
        found: list[int] = self.table.ids[self.row, first:end].tolist()
        return found

    @property
    def drafts(self) -> list[int]:
        """Tokens proposed after the committed ones, not yet canonical; a copy."""
        return self.ids(self.length, self.length + self.num_drafts)

    @drafts.setter
    def drafts(self, drafts: list[int]) -> None:
        if self.table is not None:
            self.table.set_ids(self.row, self.length, drafts)
            self.num_drafts = len(drafts)

    @property
    def logprobs(self) -> list[float]:
        """Of the committed tokens behind the prompt, where they are wanted; a copy."""
        return self.last_logprobs(self.num_generated) if self.params.logprobs else []

    def last_logprobs(self, count: int) -> list[float]:
        """Of the newest ``count`` committed tokens."""
        if self.table is None:
            return self._logprobs[len(self._logprobs) - count :]
        end = self.length
        return list(self.table.logprobs[self.row, end - count : end].tolist())

    @property
    def stats(self) -> CompletionStats:
        """Its counts so far."""
        if self.table is not None:
            for name in self.table.STATS:
                column = getattr(self.table, name)
                setattr(self._stats, name, getattr(self._stats, name) + int(column[self.row]))
                column[self.row] = 0
        return self._stats

    @property
    def stop_reason(self) -> str | int | None:
        """The stop string or token that ended it; None for the model's own EOS, criteria, and
        whatever is no stop."""
        if self.finish_reason != "stop":
            return None
        (newest,) = self.ids(self.length - 1, self.length)
        if newest in self.params.stop_ids:
            return None if newest in self.params.eos_ids else newest
        return self.stop_string

    @property
    def history(self) -> list[int]:
        """Committed tokens that have ids: all but the embeddings of a prompt."""
        return self.before(self.length)

    def before(self, position: int) -> list[int]:
        """Tokens with ids before ``position``, drafts included."""
        return self.ids(self.request.num_hidden, position)

    @property
    def generated(self) -> list[int]:
        """Committed tokens behind the prompt; a copy."""
        return self.ids(self.request.num_prompt, self.length)

    @property
    def num_generated(self) -> int:
        return self.length - self.request.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens it may still commit."""
        return self.params.most_new_tokens - self.num_generated

    @property
    def most_tokens(self) -> int:
        """Most positions that can have KV: the last token needs none."""
        return self.request.num_prompt + self.params.most_new_tokens - 1

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def running(self) -> bool:
        return self.table is not None

    @property
    def recompute(self) -> bool:
        """Whether all rows of its prompt must run, cached or not."""
        return self.request.recompute or None in self.request.prompt_logprobs[1:]

    @property
    def diverged(self) -> bool:
        """Whether the newest token differs from ``given_tokens``."""
        if self.given_tokens is None:
            return False
        place = self.num_generated - 1
        return self.ids(self.length - 1, self.length) != self.given_tokens[place : place + 1]

    def supply(self, token: int) -> None:
        """Commit the token that it waits for, whether it runs or not."""
        self.next_logits = None
        if self.table is None:
            self._tokens.append(token)
            return
        place = self.length
        self.table.set_ids(self.row, place, [token])
        self.table.length[self.row] = place + 1

    def set_pages(self, pages: list[int]) -> None:
        """Its page table; also to call after a change of ``pages``."""
        assert self.table is not None
        self.pages = pages
        self.table.set_pages(self.row, pages)

    def forbid_drafts(self, forbid: bool = True) -> None:
        """Verify the next tokens without drafts, or with drafts again."""
        self.draft_free = forbid
        if self.table is not None:
            self.table.draft_free[self.row] = forbid

    @cached_property
    def sampling(self) -> dict[str, Any]:
        """Temperature, noise key and filters, in numbers; its row of the table has them."""
        params, seed = self.params, self.params.seed
        return {
            "temperature": params.temperature,
            "key": 0 if seed is None else noise_key(seed, self.index),
            "top_k": (params.filtered and params.top_k) or 0,
            "top_p": 1.0 if params.top_p is None or not params.filtered else params.top_p,
            "min_p": (params.filtered and params.min_p) or 0.0,
        }

    def enter(self, table: SequenceTable, window: int) -> None:
        """Take a row of ``table``; nothing is computed yet. window: most drafts that may wait."""
        request, params = self.request, self.params
        self._stats.queue_seconds = self._stats.queue_seconds or monotonic() - request.queued
        prompt, given = request.num_prompt, self.given_tokens is not None
        raw = params.logprobs and params.logprobs_mode == "raw"
        early = params.min_new_tokens > 0 and bool(params.stop_ids)
        special = params.changes_logits or early or raw or params.top_logprobs > 0
        kept = bool(request.keeps) or request.supplied
        drafts = params.draftable and not request.supplied
        self.row = table.add(
            self,
            self._tokens,
            () if self.teacher_forced else params.stop_ids,
            priority=request.priority,
            order=request.arrival << INDEX_BITS | self.index,
            deterministic=params.deterministic,
            most=prompt + params.most_new_tokens,
            **self.sampling,
            logprobs_wanted=params.logprobs or params.top_logprobs > 0,
            special_sampling=special or kept or self.teacher_forced,
            special_commit=given or kept or params.checks_text,
            given=given,
            # Its id is no other's while the request runs.
            drafter=0 if given or not drafts or request.drafter is None else id(request.drafter),
            has_embeds=request.embeds is not None,
            scores_prompt=params.prompt_logprobs,
            thinking=request.thoughts is not None,
            supplied=request.supplied,
            # All of the tokens that are given.
            window=drafts and (params.most_new_tokens if given else window),
        )
        if self._logprobs:
            table.logprobs[self.row, prompt : len(self._tokens)] = self._logprobs
        self.table = table
        self.thought()
        self.forbid_drafts(self.draft_free)

    def thought(self) -> None:
        """To call after a change of its request's thoughts."""
        if self.table is not None and (thoughts := self.request.thoughts) is not None:
            self.table.unthought[self.row] = thoughts.unthought
            self.table.reach[self.row] = thoughts.reach

    def leave(self) -> None:
        """Give the row back; nothing is computed any more, and committed tokens stay."""
        assert self.table is not None and not self.pages
        self._tokens, self._logprobs, self._stats = self.tokens, self.logprobs, self.stats
        self.table.remove(self.row)
        self.table, self.row = None, -1

    def forget(self) -> None:
        """Once it has left: what it has got is not to be kept."""
        del self._tokens[self.request.num_prompt :]
        for got in (self._logprobs, self.top_logprobs, self.scores, self.logits):
            got.clear()


@dataclass(eq=False)
class Request:
    """A prompt and its sampling parameters, and the sequences that complete it.

    arrival: number in order of arrival. priority: of those that wait the lowest starts first.
    prompt_logprobs: filled in as prompt rows run. recompute: use no cached page. embeds: the
    model's input in place of the prompt's tokens, [num_prompt, hidden]. num_hidden: leading prompt
    tokens that are placeholders then. keeps: of scores, logits. supplied: whether its tokens come
    from outside (``Sequence.supply``). fingerprint: that it runs under, with its parts. thread:
    whose code its processors and criteria are; 0: none that steps. thoughts: of the prompt, where
    it is thought about. tokenizer: parts of the fingerprint, where its tokens depend on it.
    drafter: proposes tokens for it. queued: when, in seconds.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    arrival: int
    sequences: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[float | None] = field(default_factory=list)
    recompute: bool = False
    embeds: Any = None
    num_hidden: int = 0
    keeps: frozenset[str] = frozenset()
    supplied: bool = False
    fingerprint: Any = None
    thread: int = 0
    thoughts: Thoughts | None = None
    tokenizer: Any = None
    priority: float = 0
    drafter: Any = None
    queued: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        assert self.params.seed is not None or self.params.temperature == 0
        for n in range(self.params.num_return_sequences):
            self.sequences.append(Sequence(self, n, [*self.prompt], self.params.of_one()))
        self.prompt_logprobs = [None] * (len(self.prompt) if self.params.prompt_logprobs else 0)

    def forget_prompt(self) -> None:
        """The model changed: what was found of the prompt is found again."""
        self.prompt_logprobs = [None] * len(self.prompt_logprobs)
        if self.thoughts is not None:
            self.thoughts.forget()

    @property
    def begun(self) -> bool:
        """Whether anything of it is committed: tokens, log-probabilities of the prompt, or thoughts
        about it."""
        found = self.thoughts is not None and bool(self.thoughts.found)
        scored = any(value is not None for value in self.prompt_logprobs)
        return found or scored or any(s.num_generated for s in self.sequences)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def prompt_ids(self) -> list[int]:
        """Tokens of the prompt that are no placeholders."""
        return self.prompt[self.num_hidden :]

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

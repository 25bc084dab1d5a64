"""A request and its sequences: what is committed, drafted and computed.

State only; the scheduler and the engine change it. Host only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tinyspec.outputs import CompletionStats
from tinyspec.sampling_params import SamplingParams

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
    """One completion of a request: its tokens and how far they have been computed.

    tokens: prompt and committed tokens. drafts: tokens proposed after them, not yet canonical.
    computed: leading positions whose KV is final. canonical: those of them whose KV is canonical
    (all, for a deterministic request).
    pages: page table. frozen: leading positions in shared pages, which must not be written.
    indexed: leading pages that the prefix cache has seen. digests: of full pages, one each.
    proposed: the drafts came from a drafter, so they have no KV.
    draft_ended: the last draft is a stop token or failed. draft_free: verify the next token without
    drafts.
    given_tokens: the expected continuation (replay, scoring), used as drafts; the sequence ends
    where the canonical tokens diverge from it. teacher_forced: commit it whatever the logits say.
    error: why it ended early. cause: the exception behind that, if there was one.
    scores, logits: per committed token [V] fp32, processed and raw, where the request keeps them.
    siblings: completions that start from this one's prompt as soon as it is computed.
    """

    request: Request
    index: int
    tokens: list[int]
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    canonical: int = 0
    pages: list[int] = field(default_factory=list)
    frozen: int = 0
    indexed: int = 0
    digests: list[bytes] = field(default_factory=list)
    proposed: bool = False
    draft_ended: bool = False
    draft_free: bool = False
    given_tokens: list[int] | None = None
    teacher_forced: bool = False
    finish_reason: str | None = None
    error: str | None = None
    cause: Exception | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    stats: CompletionStats = field(default_factory=CompletionStats)
    key: int = 0
    siblings: list[Sequence] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def deterministic(self) -> bool:
        return self.request.params.deterministic

    @property
    def history(self) -> list[int]:
        """Committed tokens that have ids: all but the embeddings of a prompt."""
        return self.tokens[self.request.num_hidden :]

    def before(self, position: int) -> list[int]:
        """Tokens with ids before ``position``, drafts included."""
        return (self.tokens + self.drafts)[self.request.num_hidden : position]

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.request.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens it may still commit."""
        return self.params.max_new_tokens - self.num_generated

    @property
    def most_tokens(self) -> int:
        """Most positions that can have KV: the last token needs none."""
        return self.request.num_prompt + self.params.max_new_tokens - 1

    @property
    def pending(self) -> int:
        """Committed tokens whose KV is not final: 1 while decoding, more during the prompt."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

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
        return self.tokens[-1:] != self.given_tokens[place : place + 1]

    def drop_drafts(self) -> None:
        self.drafts = []
        self.proposed = self.draft_ended = False

    def reset(self) -> None:
        """Nothing is computed any more; committed tokens stay."""
        assert not self.pages
        self.drop_drafts()
        self.computed = self.canonical = self.frozen = self.indexed = 0


@dataclass(eq=False)
class Request:
    """A prompt and its sampling parameters, and the sequences that complete it.

    arrival: number in order of arrival. prompt_logprobs: filled in as prompt rows run. recompute:
    use no cached page. embeds: the model's input in place of the prompt's tokens, [num_prompt,
    hidden]. num_hidden: leading prompt tokens that are placeholders then. keeps_scores,
    keeps_logits: every completion keeps them, token by token.
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
    keeps_scores: bool = False
    keeps_logits: bool = False

    def __post_init__(self) -> None:
        assert self.params.seed is not None or self.params.temperature == 0
        self.sequences = [
            Sequence(self, index, list(self.prompt), key=noise_key(self.params.seed or 0, index))
            for index in range(self.params.num_return_sequences)
        ]
        self.sequences[0].siblings = self.sequences[1:]
        if self.params.prompt_logprobs:
            self.prompt_logprobs = [None] * len(self.prompt)

    def forget_prompt_logprobs(self) -> None:
        """The model changed: those of the prompt are computed again."""
        self.prompt_logprobs = [None] * len(self.prompt_logprobs)

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

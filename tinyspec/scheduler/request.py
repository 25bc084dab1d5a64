"""A request and its sequences: what is committed, what is drafted, what has been computed.

Host only. Says nothing of when or how rows are run; the scheduler and the engine move the state.
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
    """One completion in the making.

    tokens: prompt and committed tokens. drafts: proposed behind them, not yet canonical.
    computed: leading positions whose KV is final. canonical: those of them whose KV is canonical
    (all, for a deterministic request).
    pages: page table. frozen: leading positions in pages that it shares and must not write.
    indexed: leading pages that the prefix cache knows. digests: of its full pages, as they fill.
    proposed: the drafts came from a drafter, so they have no KV of their own.
    draft_ended: the drafts end in a stop token; nothing can follow. undrafted: the next token comes
    from a verify without drafts.
    script: a continuation known beforehand, drafted as it stands; the sequence ends where the
    canonical tokens leave it. forced: its tokens are taken as given, whatever the model prefers.
    error: why it ended early. cause: the exception behind that, if there was one.
    scores, logits: per committed token [V] fp32, processed and raw, where the request keeps them.
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
    undrafted: bool = False
    script: list[int] | None = None
    forced: bool = False
    finish_reason: str | None = None
    error: str | None = None
    cause: Exception | None = None
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    stats: CompletionStats = field(default_factory=CompletionStats)
    key: int = 0
    # Completions that start from this one's prompt as soon as it is computed.
    siblings: list[Sequence] = field(default_factory=list)

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def deterministic(self) -> bool:
        return self.request.params.deterministic

    @property
    def history(self) -> list[int]:
        """Its committed tokens as far as they have ids: all, but for a prompt of embeddings."""
        return self.tokens[self.request.num_hidden :]

    def before(self, position: int) -> list[int]:
        """Its tokens before ``position``, drafts included, as far as they have ids."""
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
        """Positions that it may come to have KV of: its last token needs none."""
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
        """Whether all rows of its prompt must run, be it for their own logits."""
        return self.request.recompute or None in self.request.prompt_logprobs[1:]

    @property
    def off_script(self) -> bool:
        """Whether its newest token is not the one that its script has there."""
        if self.script is None:
            return False
        place = self.num_generated - 1
        return place >= len(self.script) or self.tokens[-1] != self.script[place]

    def drop_drafts(self) -> int:
        """Forget the drafts; returns how many there were."""
        dropped = len(self.drafts)
        self.drafts = []
        self.proposed = self.draft_ended = False
        return dropped

    def reset(self) -> None:
        """Back to nothing computed; what is committed stays committed."""
        assert not self.pages
        self.drop_drafts()
        self.computed = self.canonical = self.frozen = self.indexed = 0


@dataclass(eq=False)
class Request:
    """A prompt and its sampling parameters, and the sequences that complete it.

    arrival: order of arrival, the engine-wide age. prompt_logprobs: filled in as prompt rows run.
    recompute: start from no cached page. embeds: what enters the model in place of the prompt's
    tokens, [num_prompt, hidden]; these may then be stand-ins. num_hidden: how many of them are.
    keeps_scores, keeps_logits: every completion keeps them, token by token.
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

    @property
    def num_prompt(self) -> int:
        return len(self.prompt)

    @property
    def finished(self) -> bool:
        return all(sequence.finished for sequence in self.sequences)

"""The engine's outputs: finished requests and streamed events, as plain data.

Floats are Python floats with fp32 values, so that JSON keeps every bit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from tinyspec.sampling_params import SamplingParams


@dataclass
class CompletionStats:
    """Tokens and passes of one completion.

    drafted: drafts proposed. accepted: drafts committed. rolled_back: drafts dropped because an
    earlier one was wrong. rollbacks: how often that happened. verify_passes: passes that verified
    its drafts. cached_prompt_tokens: prompt tokens taken from the prefix cache.
    preemptions: how often its pages were taken and recomputed. thinking_passes: passes after which
    thoughts of the prompt were looked for. queue_seconds: until it first ran.
    """

    drafted: int = 0
    accepted: int = 0
    rolled_back: int = 0
    rollbacks: int = 0
    verify_passes: int = 0
    cached_prompt_tokens: int = 0
    preemptions: int = 0
    thinking_passes: int = 0
    queue_seconds: float = field(default=0.0, compare=False)


@dataclass
class Completion:
    """One generated sequence.

    token_ids: generated tokens, the stop token included. text: decoded without special tokens, or
    None where the engine has no tokenizer. logprobs: one per token, if asked for. top_logprobs: per
    token, (token id, log-probability) of the best, if asked for. finish_reason: "stop", "length" or
    "abort"; ``error`` then says why. stop_reason: the stop string or token that ended it; None for
    the model's own EOS token and a stopping criterion. stats: what it cost.
    """

    token_ids: list[int]
    text: str | None = None
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str | None = None
    error: str | None = None
    stats: CompletionStats = field(default_factory=CompletionStats)
    stop_reason: str | int | None = None

    def to_json(self) -> str:
        """One line of JSON; ``from_json`` restores every bit."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: str) -> Completion:
        """The inverse of ``to_json``."""
        return _completion(json.loads(line, object_pairs_hook=no_name_twice))


@dataclass
class Thought:
    """What was thought behind one chunk of a prompt.

    chunk: its number, from 0. token_ids: the end token included. text: decoded without special
    tokens, or None where the engine has no tokenizer. cut: it had no end token when it was as long
    as a thought may be.
    """

    chunk: int
    token_ids: list[int]
    text: str | None = None
    cut: bool = False


@dataclass
class RequestOutput:
    """A finished request: its prompt, its parameters as resolved (seed included) and completions.

    fingerprint: of the engine, if it has been computed (always for deterministic requests). Outputs
    can be compared bit for bit if their fingerprints are equal. That of a deterministic request
    with stop strings or structured output has parts more than the engine's: the tokenizer, and
    llguidance with the latter.
    prompt_logprobs: one per prompt token, None for the first, if asked for.
    fingerprint_parts: what the fingerprint is the digest of, by name (device, versions, threads,
    weights, ...), long ones as digests; 2 KB of JSON at most.
    thoughts: one for each whole chunk of the prompt, with ``SamplingParams(thinking=True)``.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    fingerprint: str | None = None
    prompt_logprobs: list[float | None] | None = None
    fingerprint_parts: dict[str, str | int | bool | None] | None = None
    thoughts: list[Thought] | None = None

    def to_json(self, stats: bool = True) -> str:
        """One line of JSON; ``from_json`` restores every bit. stats: those of completions too,
        which depend on what ran beside them."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        data["params"] = self.params.to_dict()
        data["completions"] = [asdict(completion) for completion in self.completions]
        data["thoughts"] = self.thoughts and [asdict(thought) for thought in self.thoughts]
        for completion in data["completions"] if not stats else ():
            del completion["stats"]
        return json.dumps(data)

    @classmethod
    def from_json(cls, line: str) -> RequestOutput:
        """The inverse of ``to_json``."""
        data: dict[str, Any] = json.loads(line, object_pairs_hook=no_name_twice)
        data["params"] = SamplingParams.from_dict(data["params"])
        data["completions"] = [_completion(c) for c in data["completions"]]
        if isinstance(data.get("thoughts"), list):
            data["thoughts"] = [Thought(**thought) for thought in data["thoughts"]]
        return cls(**data)


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are all different: of two values, readers take one or the other."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError(f"a name stands twice among {[name for name, _ in pairs]}")
    return data


def _pairs(row: Any) -> Any:
    """A row of lists as tuples; anything else stays what it is, for ``audit`` to report."""
    if not isinstance(row, list):
        return row
    return [tuple(pair) if isinstance(pair, list) else pair for pair in row]


def _completion(data: dict[str, Any]) -> Completion:
    if isinstance(data["top_logprobs"], list):
        data["top_logprobs"] = [_pairs(row) for row in data["top_logprobs"]]
    data["stats"] = CompletionStats(**data.get("stats", {}))
    return Completion(**data)


@dataclass
class StreamEvent:
    """Tokens that one completion committed in one step.

    request_id, index: which completion of which request. text: what these tokens add to its text
    (it may lag while a character is incomplete). logprobs, top_logprobs: of these tokens, if asked
    for. finish_reason: set on a completion's last event; stop_reason: which string or token, where
    that is "stop", as in ``Completion``; error: why, where it is "abort".
    thoughts: of the prompt, made since the last event, in those of completion 0. fingerprint,
    prompt_logprobs: as in ``RequestOutput``; the latter in a completion's first event with tokens.
    num_prompt_tokens, cached_prompt_tokens: the prompt's, and those taken from the prefix cache.
    prompt: which of the call's prompts, from 0. queue_seconds: until the completion first ran.
    accepted, rolled_back: drafts of the completion, in its last event.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str | None = None
    logprobs: list[float] | None = None
    finish_reason: str | None = None
    thoughts: list[Thought] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    error: str | None = None
    stop_reason: str | int | None = None
    fingerprint: str | None = None
    prompt_logprobs: list[float | None] | None = None
    num_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    prompt: int = 0
    accepted: int = 0
    rolled_back: int = 0
    queue_seconds: float = field(default=0.0, compare=False)

"""What users see of a request: an event while it grows, its output at the end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tinyspec.engine.tokenization import decode
from tinyspec.outputs import Completion, RequestOutput, StreamEvent, Thought
from tinyspec.scheduler.request import Request, Sequence


def output_of(request: Request, tokenizer: Any) -> RequestOutput:
    """A finished request."""
    known = request.fingerprint and request.fingerprint.with_tokenizer(request.tokenizer)
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt,
        params=request.params,
        completions=[_completion_of(sequence, tokenizer) for sequence in request.sequences],
        fingerprint=known and known.digest,
        prompt_logprobs=request.prompt_logprobs or None,
        fingerprint_parts=known and dict(known.parts),
        thoughts=thoughts_of(request, tokenizer),
    )


def thoughts_of(request: Request, tokenizer: Any, first: int = 0) -> list[Thought] | None:
    """Those made so far, from chunk ``first`` on; None where the prompt is not thought about."""
    if request.thoughts is None:
        return None
    found = request.thoughts.found[first:]
    return [replace(thought, text=decode(tokenizer, thought.token_ids)) for thought in found]


def event_of(sequence: Sequence, committed: int) -> StreamEvent:
    """The event of a sequence's newest ``committed`` tokens."""
    end = sequence.length
    return StreamEvent(
        request_id=sequence.request.request_id,
        index=sequence.index,
        token_ids=sequence.ids(end - committed, end),
        logprobs=sequence.last_logprobs(committed) if sequence.params.logprobs else None,
        finish_reason=sequence.finish_reason,
    )


def _completion_of(sequence: Sequence, tokenizer: Any) -> Completion:
    token_ids = sequence.ids(sequence.request.num_prompt, sequence.length)
    return Completion(
        token_ids=token_ids,
        text=decode(tokenizer, token_ids),
        logprobs=sequence.logprobs if sequence.params.logprobs else None,
        top_logprobs=sequence.top_logprobs if sequence.params.top_logprobs else None,
        finish_reason=sequence.finish_reason,
        error=sequence.error,
        stats=sequence.stats,
    )

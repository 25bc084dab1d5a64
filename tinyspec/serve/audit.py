"""Audit: does this engine give a response again? It is replayed along its own tokens, in a few
canonical passes, and rendered as it was; whatever it says is compared, but for ids and times.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from tinyspec.engine.async_engine import AsyncEngine
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.serve.replies import Reply, events_of

# No functions of the request.
NEVER = {"id", "call_id", "created", "created_at", "completed_at"}
NEVER |= {"prompt_tokens_details", "input_tokens_details"}


async def audit(
    engine: AsyncEngine, reply: Reply, params: SamplingParams, response: dict[str, Any]
) -> dict[str, Any]:
    """The verdict: "same", "differs", or "not comparable" for a request that was plain or another
    engine's, and the reason. reply: to the same request, as yet without events.

    Raises ValueError for a response without the token ids of each completion.
    """
    count = params.num_return_sequences
    choices = response.get("choices", [response])
    choices = choices if isinstance(choices, list) else [choices]
    given = [choice.get("token_ids") if isinstance(choice, dict) else None for choice in choices]
    most = vocab_size(engine.engine.model)
    for tokens in given:
        if not isinstance(tokens, list) or not all(
            type(token) is int and 0 <= token < most for token in tokens
        ):
            raise refuse("response", tokens, "token_ids, by a request with return_token_ids=true")
    if len(given) != len(reply.prompts) * count:
        raise refuse("response", f"{len(given)} choices", f"{len(reply.prompts) * count}")
    verdict, reason = "not comparable", "the request was not deterministic"
    if params.deterministic:
        outputs = [
            RequestOutput("", prompt, params, [Completion(tokens) for tokens in own])
            for prompt, *own in zip(reply.prompts, *[iter(given)] * count, strict=True)
        ]
        again = reply.whole(events_of(await engine.replay(outputs, reply.body.priority)))
        said, own_fingerprint = response.get("system_fingerprint"), again["system_fingerprint"]
        difference = first_difference(response, again)
        verdict, reason = "same" if difference is None else "differs", difference or ""
        if said != own_fingerprint:
            verdict, reason = "not comparable", f"system_fingerprint: {said} -> {own_fingerprint}"
    return {
        "object": "audit",
        "verdict": verdict,
        "reason": reason or None,
        "model": reply.body.model,
    }


def first_difference(said: Any, found: Any, place: str = "") -> str | None:
    """Where two values differ first, and how; null is as if it were not there."""
    if isinstance(said, dict) and isinstance(found, dict):
        names = [name for name in {**said, **found} if name not in NEVER]
        pairs = [(said.get(n), found.get(n), f"{place}.{n}".lstrip(".")) for n in names]
    elif isinstance(said, list) and isinstance(found, list):
        both = enumerate(zip_longest(said, found))
        pairs = [(*values, f"{place}[{number}]") for number, values in both]
    else:
        return None if said == found else f"{place}: {said!r:.80} -> {found!r:.80}"
    return next(filter(None, (first_difference(*pair) for pair in pairs)), None)

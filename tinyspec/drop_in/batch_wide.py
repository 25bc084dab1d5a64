"""Processors and criteria that a call is given for all its rows at once, as transformers calls
them. Found among the parameters of its rows, and put where all rows meet.
"""

from __future__ import annotations

from typing import Any

from transformers.generation import PrefixConstrainedLogitsProcessor

from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.settings import PreparedRequest
from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.lock_step import BatchWide, LockStep

_HOW = "with processors or criteria for all rows, which may also be a list for each prompt"


def lock_step(
    arguments: dict[str, Any],
    prepared: list[PreparedRequest],
    params: list[SamplingParams],
    padded: list[list[int]],
    spare: int,
) -> LockStep | None:
    """What all rows of a call share, and ``params`` [B] changed to it; None where each row is by
    itself: one row without pads, or code that is transformers' own, ``stateless``, or a prompt's.

    padded: ids of all completions as the call was given them. spare: pads of the longest prompt.
    Raises ValueError for values that would have to be one for all.
    """
    wide, criteria = _wide(arguments, params), _criteria(arguments, params)
    if not (wide or criteria) or (len(padded) == 1 and not spare):
        return None
    _one_for_all("deterministic", [p.deterministic for p in params])
    if prepared[0].config.max_new_tokens is not None:
        _one_for_all("max_new_tokens", [p.max_new_tokens for p in params])
        spare = 0
    most = max(min(p.max_new_tokens for p in params) - spare, 1)
    for index, one in enumerate(params):
        places = iter(wide)
        params[index] = one.resolve(
            max_new_tokens=most,
            min_new_tokens=min(one.min_new_tokens, most),
            logits_processors=[
                next(places) if wide and _is_wide(p) else p for p in one.logits_processors
            ],
            stopping_criteria=[c for c in one.stopping_criteria if c not in criteria],
        )
    first = prepared[0]
    pad = first.pad if first.eos and first.pad is not None else -1
    return LockStep(padded, pad, criteria)


def _wide(arguments: dict[str, Any], params: list[SamplingParams]) -> list[BatchWide]:
    """A processor for each of the user's."""
    if is_per_request("logits_processor", arguments.get("logits_processor")):
        return []
    return [BatchWide(p) for p in params[0].logits_processors if _is_wide(p)]


def _is_wide(processor: Any) -> bool:
    own = isinstance(processor, PrefixConstrainedLogitsProcessor)
    return not own and not getattr(processor, "stateless", False)


def _criteria(arguments: dict[str, Any], params: list[SamplingParams]) -> list[Any]:
    if is_per_request("stopping_criteria", arguments.get("stopping_criteria")):
        return []
    return [
        criterion
        for criterion in params[0].stopping_criteria
        if not type(criterion).__module__.startswith("transformers.")
        and not getattr(criterion, "stateless", False)
    ]


def _one_for_all(name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        raise refuse(name, values, f"one value {_HOW}")

"""Diff: two files of outputs, request by request: the first token and bit that differ, and why.

Knows outputs alone: neither a model nor an engine is needed, and no library is imported.
"""

from __future__ import annotations

import json
import struct
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tinyspec.determinism.fingerprint_parts import are_parts, differences
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.tools.comparison import (
    DIFFERS,
    NOT_COMPARABLE,
    SAME,
    Entry,
    Report,
    first_place,
    identical,
    shown,
)

ONLY_FIRST, ONLY_SECOND = "only in the first", "only in the second"
WHOLE = ("finish_reason", "error", "text")


@dataclass(frozen=True)
class DiffReport(Report):
    """Verdicts on every completion, in the order of the first file; truthy when all are the same.

    Verdicts: "same"; "differs"; "not comparable" (another request, or another fingerprint); "only
    in the first" or "second". A token differs in itself or in the bits of its log-probabilities.
    """

    entries: list[Entry]

    def __bool__(self) -> bool:
        return all(entry.verdict == SAME for entry in self.entries)


def diff(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> DiffReport:
    """Compare outputs of the same requests, in any order.

    The same request is one of the same prompt and parameters, seed included; of what is left, those
    of the same ``request_id`` are not comparable, and what differs between them is told. Values are
    compared in type and in every bit; ``request_id`` and ``stats`` are not.
    """
    partners = _partners(first, second)
    entries: list[Entry] = []
    for place, output in enumerate(first):
        if place in partners:
            entries += _entries(output, second[partners[place]])
        else:
            entries.append(Entry(output.request_id, 0, ONLY_FIRST))
    rest = set(range(len(second))) - set(partners.values())
    entries += [Entry(second[place].request_id, 0, ONLY_SECOND) for place in sorted(rest)]
    return DiffReport(entries)


def _partners(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> dict[int, int]:
    """By place in ``first``, the place of the same request in ``second``; equal ones in order."""
    partners: dict[int, int] = {}
    for key in (_request, lambda output: str(output.request_id)):
        left: dict[str, deque[int]] = defaultdict(deque)
        taken = set(partners.values())
        for place, output in enumerate(second):
            if place not in taken:
                left[key(output)].append(place)
        for place, output in enumerate(first):
            if place not in partners and (same := left[key(output)]):
                partners[place] = same.popleft()
    return partners


def _request(output: RequestOutput) -> str:
    return json.dumps([output.prompt_token_ids, output.params.to_dict()], sort_keys=True)


def _entries(one: RequestOutput, other: RequestOutput) -> Iterator[Entry]:
    name = one.request_id
    obstacles = [*_other_request(one, other), *_other_engine(one, other)]
    counts = len(one.completions), len(other.completions)
    if counts[0] != counts[1]:
        obstacles.append(f"{counts[0]} completions -> {counts[1]}")
    for index, pair in enumerate(zip(one.completions, other.completions, strict=False)):
        position, reason = _first_difference(*pair)
        if reason == "" and not identical(one.prompt_logprobs, other.prompt_logprobs):
            reason = "prompt_logprobs differ"
        if reason == "" and one.thoughts != other.thoughts:
            reason = "thoughts differ"
        verdict = NOT_COMPARABLE if obstacles else DIFFERS if reason else SAME
        told = [*obstacles, reason or "the bits are the same"] if obstacles else [reason]
        yield Entry(name, index, verdict, position, "; ".join(told))
    if 0 in counts and counts != (0, 0):
        yield Entry(name, 0, NOT_COMPARABLE, None, "; ".join(obstacles))


def _other_request(one: RequestOutput, other: RequestOutput) -> Iterator[str]:
    """What makes the second another request."""
    place = first_place(one.prompt_token_ids, other.prompt_token_ids)
    if place is not None:
        yield f"prompts differ at token {place}"
    params, others = one.params.to_dict(), other.params.to_dict()
    for name, value in params.items():
        if not identical(value, others[name]):
            yield f"{name} {shown(value)} -> {shown(others[name])}"


def _other_engine(one: RequestOutput, other: RequestOutput) -> Iterator[str]:
    """What makes the second an output of another engine, part by part where these are known."""
    if identical(one.fingerprint, other.fingerprint):
        return
    parts = one.fingerprint_parts, other.fingerprint_parts
    found = differences(*parts) if all(map(are_parts, parts)) else []  # type: ignore[arg-type]
    yield ", ".join(found) or f"fingerprint {one.fingerprint} -> {other.fingerprint}"


def _first_difference(one: Completion, other: Completion) -> tuple[int | None, str]:
    """Position and description: the first log-probability whose bits differ, the first token."""
    found: list[tuple[int, str]] = []
    for name, label in (("logprobs", "log-probability"), ("token_ids", "token")):
        values, others = getattr(one, name), getattr(other, name)
        place = first_place(values, others)
        if place is None:
            continue
        pair = [
            (v[place : place + 1] or [None])[0] if type(v) is list else v for v in (values, others)
        ]
        before, after = ("(absent)" if v is None else shown(v) for v in pair)
        told = f"{label} {before} -> {after}{_bit(*pair)}"
        found.append((place, f"{told} at {place}" if found and found[0][0] != place else told))
    if found:
        return found[0][0], ", ".join(text for _, text in found)
    place = first_place(one.top_logprobs, other.top_logprobs)
    if place is not None:
        return place, "top_logprobs differ"
    for name in WHOLE:
        value, theirs = getattr(one, name), getattr(other, name)
        if not identical(value, theirs):
            return None, f"{name} {shown(value)} -> {shown(theirs)}"
    return None, ""


def _bit(one: Any, other: Any) -> str:
    """Of two floats the highest bit that differs, of 32 where both are fp32 values; of anything
    else nothing."""
    if type(one) is not float or type(other) is not float:
        return ""
    width, code = (32, ">f") if all(map(_is_fp32, (one, other))) else (64, ">d")
    bits = [int.from_bytes(struct.pack(code, value), "big") for value in (one, other)]
    return f" (bit {(bits[0] ^ bits[1]).bit_length() - 1} of {width})"


def _is_fp32(value: float) -> bool:
    try:
        return identical(struct.unpack(">f", struct.pack(">f", value))[0], value)
    except OverflowError:
        return False

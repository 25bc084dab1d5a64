"""What deterministic requests came to, by fingerprint; two that differ under one are a finding.

Only what the promise covers is compared: of a request that was aborted the tokens that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinyspec import RequestOutput
from tinyspec.outputs import Completion
from tinyspec.runner.sampler import NOT_FINITE

# Errors that are nobody's notice of a change: an engine broke down.
FAILURES = ("the pass raised", "logits processor", "a stopping criterion", "the drafter raised")


@dataclass(frozen=True)
class Witness:
    """One completion: every bit as text, token by token. whole: not aborted from outside."""

    where: str
    tokens: tuple[str, ...]
    end: str
    whole: bool


def failure(output: RequestOutput) -> str:
    """The error of an output whose engine broke down; empty: none did."""
    errors = (completion.error or "" for completion in output.completions)
    return next((error for error in errors if error.startswith(FAILURES)), "")


def noticed(output: RequestOutput) -> bool:
    """Whether a request was ended because something had changed."""
    errors = [c.error for c in output.completions if c.error not in (None, NOT_FINITE)]
    return bool(errors) and not failure(output)


def _witness(completion: Completion, where: str) -> Witness:
    tokens = []
    for place, token in enumerate(completion.token_ids):
        told = [repr(token)]
        for values in (completion.logprobs, completion.top_logprobs):
            told.append(repr(values[place]) if values is not None else "")
        tokens.append(" ".join(told))
    whole = completion.finish_reason != "abort" or completion.error == NOT_FINITE
    end = f"{completion.finish_reason} {completion.error}"
    return Witness(where, tuple(tokens), end, whole)


def _differ(a: Witness, b: Witness) -> str:
    """Where two completions of one request differ; empty: nowhere as far as both go."""
    for place, (mine, theirs) in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if mine != theirs:
            return f"token {place}: {mine} {a.where}, {theirs} {b.where}"
    for longer, shorter in ((a, b), (b, a)):
        if shorter.whole and len(longer.tokens) > len(shorter.tokens):
            return (
                f"{shorter.end} after {len(shorter.tokens)} tokens {shorter.where}, more "
                f"{longer.where}"
            )
    if a.whole and b.whole and a.end != b.end:
        return f"{a.end} {a.where}, {b.end} {b.where}"
    return ""


def _prompts_differ(a: Sequence[float | None] | None, b: Sequence[float | None] | None) -> bool:
    """Whether log-probabilities of a prompt differ where both are known."""
    pairs = zip(a or (), b or (), strict=False)
    return any(repr(x) != repr(y) for x, y in pairs if x is not None and y is not None)


class Ledger:
    """Outputs of numbered requests, by fingerprint."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[list[Witness], list[float | None]]] = {}

    def knows(self, number: int, output: RequestOutput) -> bool:
        """Whether there is an output of this request under the same fingerprint."""
        return (str(output.fingerprint), number) in self._known

    def add(self, number: int, output: RequestOutput, where: str) -> str:
        """Add an output of request ``number``; what differs from an earlier one with the same
        fingerprint, or empty. Failed outputs are not to be added."""
        key = str(output.fingerprint), number
        witnesses = [_witness(completion, where) for completion in output.completions]
        prompt = list(output.prompt_logprobs or ())
        known = self._known.get(key)
        if known is None:
            if all(witness.whole for witness in witnesses):
                self._known[key] = witnesses, prompt
            return ""
        if _prompts_differ(known[1], prompt):
            return f"log-probabilities of the prompt of request {number} {where}"
        for index, (first, later) in enumerate(zip(known[0], witnesses, strict=True)):
            if found := _differ(first, later):
                return f"request {number}, completion {index}, {found}"
        return ""

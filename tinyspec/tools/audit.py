"""Audit: does this engine produce the same outputs, token for token and bit for bit?

An output is replayed along its own tokens, in a few canonical passes, with its parameters and its
seed, without the prefix cache. Knows outputs and an engine's ``replay``, not how passes run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from tinyspec.determinism.fingerprint_parts import are_parts, digest_of, explained
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.outputs import Completion, RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.tools.comparison import (
    DIFFERS,
    NOT_COMPARABLE,
    PER_TOKEN,
    SAME,
    VERDICTS,
    Entry,
    Finding,
    Report,
    compare,
    identical,
    shown,
    wrong,
)


@dataclass(frozen=True)
class AuditEntry(Entry):
    """The verdict on one completion.

    verdict: "same"; "differs"; "partial" if all that can be compared is the same, but not all can
    (an aborted request's end, text without a tokenizer); "not comparable" if this engine cannot
    repeat the request. position: 0 also for the prompt's log-probabilities. tokens: leading tokens
    that are the same, as are their log-probabilities. verified: the fields that were compared as a
    whole and are the same.
    """

    tokens: int = 0
    verified: tuple[str, ...] = ()


@dataclass(frozen=True)
class AuditReport(Report):
    """Verdicts on every completion, in the order of the outputs; truthy when there are some and all
    are the same. fingerprint: of the engine that replayed them."""

    fingerprint: str
    entries: list[AuditEntry] = field(default_factory=list)
    columns = (
        *(("request", "request_id"), ("index", "index"), ("tokens", "tokens")),
        *(("verdict", "verdict"), ("verified", "verified")),
    )

    def __bool__(self) -> bool:
        return bool(self.entries) and all(entry.verdict == SAME for entry in self.entries)

    def __str__(self) -> str:
        return f"{super().__str__()}; engine {self.fingerprint}"


def audit(engine: Engine, outputs: Iterable[RequestOutput], progress: bool = False) -> AuditReport:
    """Replay finished ``outputs``, sampling included, and compare everything that they say.

    Compared in type and in every bit: tokens, the log-probabilities that the parameters ask for
    (missing and surplus ones differ), finish reasons, errors, the number of completions and, where
    the engine has a tokenizer, texts. Never compared, as they are no functions of the request:
    ``request_id`` and ``stats``. progress: show a bar of replayed completions.

    Malformed outputs differ, and so do parts that do not give their fingerprint. Plain outputs,
    those of another fingerprint, with functions that JSON did not keep, or that this engine refuses
    are not comparable. No output changes the verdict on another. Raises DeterminismError if the
    engine cannot serve ``deterministic=True``, ValueError if ``outputs`` are not RequestOutputs.
    """
    outputs = list(outputs)
    for output in outputs:
        if not isinstance(output, RequestOutput):
            raise refuse("outputs", output, "RequestOutputs")
    engine.check_model()
    fingerprint = engine.fingerprint
    inputs = engine.ready()
    obstacles = [next(_obstacles(output, engine, inputs), None) for output in outputs]
    sound = [o for o, obstacle in zip(outputs, obstacles, strict=True) if obstacle is None]
    replayed = iter(engine.replay(list(map(_replayable, sound)), progress) if sound else [])
    entries = []
    for output, obstacle in zip(outputs, obstacles, strict=True):
        again = next(replayed) if obstacle is None else None
        for index in range(_count(output.completions) or 1):
            findings = [obstacle] if obstacle is not None else []
            if again is not None:
                findings = compare(output, again, index, engine.tokenizer)
            entries.append(_entry(output, index, findings))
    return AuditReport(fingerprint, entries)


def _obstacles(output: RequestOutput, engine: Engine, inputs: Any) -> Iterator[Finding]:
    """What keeps an output from being replayed: no engine writes it, another one did, or this one
    does not take its request. inputs: the engine's maker of requests."""
    params, prompt = output.params, output.prompt_token_ids
    yield from _malformed_params(params)
    if type(prompt) is not list or not prompt:
        yield wrong("prompt_token_ids", f"is {shown(prompt)}, not a list of tokens")
    for token in prompt:
        if type(token) is not int:
            yield wrong("prompt_token_ids", f"has {shown(token)}, which is no token id")
    yield from _malformed_completions(output.completions, params)
    yield from _other_fingerprint(output, engine, inputs)
    if not params.deterministic:
        yield Finding("params", NOT_COMPARABLE, "it is plain: it was not asked to be deterministic")
    for function in (*params.logits_processors, *params.stopping_criteria):
        if not callable(function):
            said = f"only the name of the function {function} is known"
            yield Finding("params", NOT_COMPARABLE, said)
    vocab_size = engine.runner.vocab_size
    for token in prompt:
        if not 0 <= token < vocab_size:
            said = f"has {shown(token)}, not in a vocabulary of {vocab_size}"
            yield wrong("prompt_token_ids", said)
    yield from _refused(output, inputs)


def _other_fingerprint(output: RequestOutput, engine: Engine, inputs: Any) -> Iterator[Finding]:
    stated, parts, own = output.fingerprint, output.fingerprint_parts, engine.contract.fingerprint
    if parts is not None and not (are_parts(parts) and identical(stated, digest_of(parts))):
        reason = f"its fingerprint_parts do not give its fingerprint {shown(stated)}"
        yield Finding("fingerprint_parts", DIFFERS, reason)
    if stated is None:
        yield Finding("fingerprint", NOT_COMPARABLE, "it has no fingerprint")
    if output.params.needs_tokenizer or "tokenizer" in (parts or ()):
        own = own.with_tokenizer(inputs.tokenizer_digest())
    if not identical(stated, own.digest):
        reason = "its fingerprint is " + shown(stated).strip("'")
        if why := explained(parts, own.parts):
            reason += f": {why}"
        yield Finding("fingerprint", NOT_COMPARABLE, reason)


def _malformed_params(params: Any) -> Iterator[Finding]:
    if not isinstance(params, SamplingParams):
        yield wrong("params", f"is {shown(params)}, not SamplingParams")
    try:
        replace(params)
    except (ValueError, TypeError) as error:
        yield Finding("params", DIFFERS, str(error))
    if params.seed is None and params.temperature > 0:
        yield Finding("params", DIFFERS, "seed is None: every sampled output has one")
    if params.eos_token_id is None:
        yield Finding("params", DIFFERS, "eos_token_id is None: every output has its tokens")


def _malformed_completions(completions: Any, params: SamplingParams) -> Iterator[Finding]:
    count, asked = _count(completions), params.num_return_sequences
    if count != asked:
        yield Finding("completions", DIFFERS, f"it has {count} of {asked} completions")
    for completion in completions:
        if not isinstance(completion, Completion):
            yield wrong("completions", f"has {shown(completion)}, which is no Completion")


def _count(completions: Any) -> int:
    return len(completions) if type(completions) is list else 0


def _refused(output: RequestOutput, inputs: Any) -> Iterator[Finding]:
    try:
        inputs.requests([output.prompt_token_ids], [output.params])
    except ValueError as error:
        yield Finding("params", NOT_COMPARABLE, f"this engine refuses it: {error}")


def _replayable(output: RequestOutput) -> RequestOutput:
    """The output with the tokens of each completion up to the first that is no integer."""

    def sound(tokens: Any) -> list[int]:
        known = tokens if type(tokens) is list else []
        return list(takewhile(lambda token: type(token) is int, known))

    completions = [replace(c, token_ids=sound(c.token_ids)) for c in output.completions]
    return replace(output, completions=completions)


def _entry(output: RequestOutput, index: int, findings: list[Finding]) -> AuditEntry:
    """The gravest verdict, and the earliest reason for it."""
    verdict = max((finding.verdict for finding in findings), key=VERDICTS.index)
    decisive = [f for f in findings if f.verdict == verdict and f.reason]
    position, reason = None, "; ".join(f.reason for f in decisive)
    if verdict == DIFFERS:
        first = min(decisive, key=lambda f: math.inf if f.position is None else f.position)
        position, reason = first.position, first.reason
    compared = [finding for finding in findings if finding.field in PER_TOKEN]
    places = [finding.position for finding in compared if finding.position is not None]
    if compared and not places:
        places = [len(output.completions[index].token_ids)]
    name = output.request_id if isinstance(output.request_id, str) else shown(output.request_id)
    verified = tuple(finding.field for finding in findings if finding.verdict == SAME)
    return AuditEntry(name, index, verdict, position, reason, min(places, default=0), verified)

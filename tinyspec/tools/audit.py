"""Audit: does this engine produce the same outputs, token for token and bit for bit?

An output is replayed along its own tokens, in a few canonical passes, with its parameters and its
seed, without the prefix cache. Knows outputs and an engine's ``replay``, not how passes run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Any

from tinyspec.determinism.fingerprint_parts import are_parts, digest_of, explained
from tinyspec.engine.engine import Engine
from tinyspec.engine.input_processor import InputProcessor
from tinyspec.errors import refuse
from tinyspec.outputs import Completion, RequestOutput, Thought
from tinyspec.sampling_params import SamplingParams
from tinyspec.text.decoding import text_of
from tinyspec.tools.diff import (
    DIFFERS,
    NOT_COMPARABLE,
    PER_TOKEN,
    SAME,
    Entry,
    Report,
    compare,
    first_place,
    identical,
    shown,
    summed_up,
)

PARTIAL = "partial"
# A verdict, and the reason for it.
Obstacle = tuple[str, str]


@dataclass(frozen=True)
class AuditEntry(Entry):
    """The verdict on one completion.

    verdict: "same"; "differs"; "partial" if all that can be compared is the same, but not all can
    (an aborted request's end, text without a tokenizer); "not comparable" if this engine cannot
    repeat the request. reason: what the output says -> what the engine has. tokens: leading tokens
    that are the same, as are their log-probabilities.
    """

    tokens: int = 0


@dataclass(frozen=True)
class AuditReport(Report):
    """Verdicts on every completion, in the order of the outputs; truthy when there are some and all
    are the same. fingerprint: of the engine that replayed them."""

    fingerprint: str
    entries: list[AuditEntry] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.entries) and super().__bool__()

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
    with engine.driver.turn("audit"):
        inputs, fingerprint = engine.ready(), engine.contract.fingerprint.digest
        obstacles = [next(_obstacles(output, engine, inputs), None) for output in outputs]
    sound = [o for o, obstacle in zip(outputs, obstacles, strict=True) if obstacle is None]
    replayed = iter(engine.replay(list(map(_replayable, sound)), progress) if sound else [])
    entries: list[AuditEntry] = []
    for output, obstacle in zip(outputs, obstacles, strict=True):
        places = range(_count(output.completions) or 1)
        if obstacle is None:
            again = next(replayed)
            entries += [_entry(output, again, n, engine.tokenizer) for n in places]
        else:
            verdict, reason = obstacle
            entries += [AuditEntry(_name(output), n, verdict, None, reason) for n in places]
    return AuditReport(fingerprint, entries)


def _obstacles(output: RequestOutput, engine: Engine, inputs: InputProcessor) -> Iterator[Obstacle]:
    """What keeps an output from being replayed: no engine writes it, another one did, or this one
    does not take its request."""
    params, prompt, parts = output.params, output.prompt_token_ids, output.fingerprint_parts
    yield from _malformed(params, prompt, output.completions)
    if parts is not None and not (
        are_parts(parts) and identical(output.fingerprint, digest_of(parts))
    ):
        lie = f"its fingerprint_parts do not give its fingerprint {shown(output.fingerprint)}"
        yield DIFFERS, lie
    if (reason := other_engine(output, engine, inputs)) is not None:
        yield NOT_COMPARABLE, reason
    if not params.deterministic:
        yield NOT_COMPARABLE, "it is plain: it was not asked to be deterministic"
    for function in chain(*params.functions.values()):
        if not callable(function):
            yield NOT_COMPARABLE, f"only the name of the function {function} is known"
    try:
        inputs.requests([prompt], [params])
    except ValueError as error:
        yield NOT_COMPARABLE, f"this engine refuses it: {error}"


def other_engine(output: RequestOutput, engine: Engine, inputs: InputProcessor) -> str | None:
    """Why this engine would give the output another fingerprint; None where it gives this one."""
    stated, parts, own = output.fingerprint, output.fingerprint_parts, engine.contract.fingerprint
    if output.params.needs_tokenizer or "tokenizer" in (parts or ()):
        own = own.with_tokenizer(inputs.tokenizer_parts(output.params))
    if identical(stated, own.digest):
        return None
    if stated is None:
        return "it has no fingerprint"
    reason = "its fingerprint is " + shown(stated).strip("'")
    return ": ".join(filter(None, (reason, explained(parts, own.parts))))


def _malformed(params: Any, prompt: Any, completions: Any) -> Iterator[Obstacle]:
    """What no engine writes."""
    if not isinstance(params, SamplingParams):
        yield DIFFERS, f"params is {shown(params)}, not SamplingParams"
    try:
        replace(params)
    except (ValueError, TypeError) as error:
        yield DIFFERS, str(error)
    if params.seed is None and params.temperature > 0:
        yield DIFFERS, "seed is None: every sampled output has one"
    if params.max_new_tokens is None:
        yield DIFFERS, "max_new_tokens is None: every output has a number"
    if params.eos_token_id is None:
        yield DIFFERS, "eos_token_id is None: every output has its tokens"
    if type(prompt) is not list or not prompt or any(type(token) is not int for token in prompt):
        yield DIFFERS, f"prompt_token_ids is {shown(prompt)}, not a list of token ids"
    if _count(completions) != params.num_return_sequences:
        yield DIFFERS, f"it has {_count(completions)} of {params.num_return_sequences} completions"
    for completion in completions:
        if not isinstance(completion, Completion):
            yield DIFFERS, f"completions has {shown(completion)}, which is no Completion"


def _count(completions: Any) -> int:
    return len(completions) if type(completions) is list else 0


def _name(output: RequestOutput) -> str:
    return output.request_id if isinstance(output.request_id, str) else shown(output.request_id)


def _replayable(output: RequestOutput) -> RequestOutput:
    """The output with the tokens of each completion up to the first that is no integer."""

    def sound(tokens: Any) -> list[int]:
        known = tokens if type(tokens) is list else []
        return list(takewhile(lambda token: type(token) is int, known))

    completions = [replace(c, token_ids=sound(c.token_ids)) for c in output.completions]
    return replace(output, completions=completions)


def _entry(output: RequestOutput, again: RequestOutput, index: int, tokenizer: Any) -> AuditEntry:
    """The verdict on one completion. again: its replay, which follows the output's tokens, and ends
    at the first that differs or one token later."""
    name, theirs, mine = _name(output), output.completions[index], again.completions[index]
    aborted = identical(theirs.finish_reason, "abort")
    count = _count(theirs.token_ids)
    if mine.error is not None and not (aborted and count == len(mine.token_ids)):
        return AuditEntry(name, index, NOT_COMPARABLE, None, mine.error)
    expected, gaps = _of_prompt(output, again)
    if aborted and (mine.error is not None or len(mine.token_ids) > count):
        gaps.append("it was aborted: its tokens are verified, its end cannot be")
        # What the user was told of the end may come from outside.
        error = theirs.error if type(theirs.error) is str else None
        lists = {name: getattr(mine, name) for name in PER_TOKEN}
        cut = {name: values and values[:count] for name, values in lists.items()}
        mine = replace(mine, **cut, finish_reason="abort", error=error, stop_reason=None)
    if first_place(theirs.token_ids, mine.token_ids) is None:
        text = text_of(tokenizer, output.prompt_token_ids, theirs.token_ids, output.params)
        if (text is None) != (theirs.text is None) and type(theirs.text) in (str, type(None)):
            gaps.append("text is not verified: the engine or the output has none")
            text = theirs.text
        mine = replace(mine, text=text)
    expected = replace(expected, completions=_with(expected.completions, index, mine))
    found = compare(output, expected, index)
    position, reason = summed_up(found.values())
    verdict = DIFFERS if reason else PARTIAL if gaps else SAME
    reason = reason or "; ".join(gaps)
    places = [d.position for d in found.values() if d is not None and d.position is not None]
    return AuditEntry(name, index, verdict, position, reason, tokens=min(places, default=count))


def _of_prompt(output: RequestOutput, again: RequestOutput) -> tuple[RequestOutput, list[str]]:
    """The replay with what it has of the prompt, as far as neither had ended before; what is
    missing, and why. Texts of thoughts count where both have some."""
    began = not all(identical(completion.token_ids, []) for completion in output.completions)
    gaps = list[str]()
    found, logprobs = output.prompt_logprobs, again.prompt_logprobs
    if type(found) is list and logprobs is not None and len(found) == len(logprobs):
        pairs = zip(found[1:], logprobs[1:], strict=True)
        known = [f if own is None or (f is None and not began) else own for f, own in pairs]
        if None in known or None in logprobs[1:]:
            gaps.append("not all of its prompt's log-probabilities were known")
        logprobs = logprobs[:1] + known
    theirs, thoughts = output.thoughts, again.thoughts
    if type(theirs) is list and thoughts is not None:
        for n, (thought, own) in enumerate(zip(theirs, thoughts, strict=False)):
            if type(thought) is Thought and None in (thought.text, own.text):
                thoughts = _with(thoughts, n, replace(own, text=thought.text))
        if not began and len(theirs) < len(thoughts):
            gaps.append("it was aborted before all of its prompt was thought about")
            thoughts = thoughts[: len(theirs)]
    return replace(again, prompt_logprobs=logprobs, thoughts=thoughts), gaps


def _with(values: list[Any], place: int, value: Any) -> list[Any]:
    return [*values[:place], value, *values[place + 1 :]]

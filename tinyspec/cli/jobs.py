"""Jobs of the command line: prompts with their parameters, from arguments, options and lines."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeVar

from tinyspec.cli.common import Line, json_object
from tinyspec.errors import refuse
from tinyspec.sampling_params import LOGPROBS_MODES, OTHER_NAMES, SamplingParams

Result = TypeVar("Result")


def _number(kind: type, metavar: str, text: str) -> dict[str, Any]:
    return {"type": kind, "metavar": metavar, "help": text}


def _several(kind: type, metavar: str, text: str) -> dict[str, Any]:
    return {"type": kind, "action": "append", "metavar": metavar, "help": f"{text}; repeatable"}


def _flag(text: str) -> dict[str, Any]:
    # None where it is not given, like the others.
    return {"action": "store_true", "default": None, "help": text}


OPTIONS: dict[str, dict[str, Any]] = {
    "deterministic": _flag("the same bits whatever else runs"),
    "max_new_tokens": _number(int, "N", "default: 128"),
    "min_new_tokens": _number(int, "N", "no stop token before"),
    "temperature": _number(float, "T", "0 (default) is greedy"),
    "top_k": _number(int, "K", "sample from the K likeliest"),
    "top_p": _number(float, "P", "sample from the likeliest that have P together"),
    "min_p": _number(float, "P", "sample from those with P times the likeliest's probability"),
    "repetition_penalty": _number(float, "X", "of tokens already seen (default: 1, none)"),
    "seed": _number(int, "N", "makes a sampled request repeatable"),
    "num_return_sequences": _number(int, "N", "completions of each prompt"),
    "eos_token_id": _several(int, "ID", "instead of the model's"),
    "ignore_eos": _flag("run to --max-new-tokens"),
    "stop_strings": _several(str, "TEXT", "ends a completion, which includes it"),
    "stop_token_ids": _several(int, "ID", "ends a completion, which includes it"),
    "logprobs": _flag("of the chosen tokens, in JSON"),
    "top_logprobs": _number(int, "N", "those of so many best tokens too, in JSON"),
    "prompt_logprobs": _flag("of the prompt's tokens, in JSON"),
    "thinking": _flag("read prompts with thoughts, by a model that has learnt to"),
    "logprobs_mode": {
        "choices": LOGPROBS_MODES,
        "help": "of the distribution sampled from (default), or of the model's own",
    },
}
# That change the log-probability of a given token.
OF_THE_DISTRIBUTION = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "logprobs_mode"),
    "thinking",
)
SHORT = {"stop_strings": ("--stop",)}


def add_sampling(parser: argparse.ArgumentParser, names: Collection[str] = tuple(OPTIONS)) -> None:
    """An option for each of the fields."""
    group = parser.add_argument_group("sampling")
    for name in names:
        spelled = f"--{name.replace('_', '-')}", *SHORT.get(name, ())
        group.add_argument(*spelled, dest=name, **OPTIONS[name])


def given(options: argparse.Namespace) -> dict[str, Any]:
    """The fields that were given as options."""
    values = {name: getattr(options, name, None) for name in OPTIONS}
    return {name: value for name, value in values.items() if value is not None}


def params_of(values: dict[str, Any], names: Collection[str] = tuple(OPTIONS)) -> SamplingParams:
    """Raises ValueError naming the field for one that is not among ``names``, or a bad value."""
    # Of names that others have for fields SamplingParams says what they are called here.
    for name in sorted(values.keys() - OTHER_NAMES.keys() - set(names)):
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise refuse(name, values[name], f"one of {', '.join(names)}{hint}")
    return SamplingParams(**values)


@dataclass(frozen=True)
class Job:
    """A prompt, its parameters, and for a score what continues it. source: the kind of input,
    "line" or "argument", and ``number`` its place there; place: the same for messages."""

    source: str
    number: int
    place: str
    params: SamplingParams
    prompt: Any
    continuation: Any = None

    @property
    def place_id(self) -> str:
        return f"{self.source}-{self.number}"

    @cached_property
    def job_id(self) -> str:
        """Its place, and a digest of prompt and parameters as they were given."""
        text = json.dumps([self.prompt, self.params.to_dict()], sort_keys=True)
        return f"{self.place_id}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def job_of_json(
    line: Line,
    shared: dict[str, Any],
    texts: Collection[str] = ("prompt",),
    names: Collection[str] = tuple(OPTIONS),
) -> Job:
    """Of a line with a JSON object: its ``texts``, and parameters that override those shared.
    Raises ValueError naming file, line, field, value, what is allowed."""
    values = json_object(line, texts)
    found = {name: values.pop(name) for name in texts}
    try:
        for name, value in found.items():
            if not (isinstance(value, str) or (isinstance(value, list) and value)):
                allowed = "text, a list of token ids, or a list of chat messages"
                raise refuse(name, value, allowed)
        params = params_of(shared | values, names)
    except ValueError as error:
        raise ValueError(f"{line.place}: {error}") from error
    return Job("line", line.number, line.place, params, **found)


def by_place(
    jobs: list[Job],
    run: Callable[[list[Job]], list[Result]],
    errors: type[Exception] = Exception,  # chat templates raise any
) -> list[Result]:
    """``run(jobs)``. Raises ValueError naming the place of the first job that it refuses."""
    try:
        return run(jobs)
    except errors:
        for job in jobs:
            try:
                run([job])
            except errors as error:
                raise ValueError(f"{job.place}: {error}") from error
        raise

"""SamplingParams from the shell: an option for every field that can be written there."""

from __future__ import annotations

import argparse
from collections.abc import Collection
from typing import Any

from tinyspec.cli.inputs import refuse_others
from tinyspec.sampling_params import LOGPROBS_MODES, OTHER_NAMES, SamplingParams


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
    refuse_others(values.keys() - OTHER_NAMES.keys(), values, names)
    return SamplingParams(**values)

"""Every request of a call, prepared by transformers itself.

The model's own ``generate`` prepares each alone and without pads, through its ``custom_generate``
hook, and runs nothing: merging, defaults, checks, warnings, the order of processors and the
criteria are transformers'. Knows nothing of engines.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import StopStringCriteria

from tinyspec.drop_in.prompts import Prompt
from tinyspec.drop_in.settings import SERVED, WARPING, Prepared
from tinyspec.errors import refuse

# Arguments that transformers takes as lists, by how deep: deeper ones hold one value per request.
_LISTS = {
    "eos_token_id": 1,
    "stop_strings": 1,
    "suppress_tokens": 1,
    "begin_suppress_tokens": 1,
    "forced_eos_token_id": 1,
    "exponential_decay_length_penalty": 1,
    "logits_processor": 1,
    "stopping_criteria": 1,
    "bad_words_ids": 2,
    "sequence_bias": 3,
}
SHARED = {"output_scores", "output_logits", "return_dict_in_generate", "pad_token_id"}
_FIELDS = SERVED | WARPING | set(_LISTS)
_FIELDS |= {"seed", "deterministic", "generation_config", "prefix_allowed_tokens_fn"}


def per_request(settings: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """``settings`` of each of ``count`` requests: lists deeper than transformers takes them hold
    one value for each.

    Raises ValueError naming the argument where there are not as many.
    """
    each: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, value in settings.items():
        values: Iterable[Any] = [value] * count
        if is_listed(name, value):
            if name in SHARED:
                raise refuse(name, value, "the same for all requests of a call")
            values = value.tolist() if hasattr(value, "tolist") else list(value)
            if len(values) != count:
                raise refuse(name, f"{len(values)} values", f"one, or one for each of {count}")
        for own, part in zip(each, values, strict=True):
            own[name] = part
    return each


def is_listed(name: str, value: Any) -> bool:
    """Whether an argument holds one value for each request."""
    if name not in _FIELDS:
        return False
    if getattr(value, "ndim", 0) == 1 and name not in _LISTS:
        return True
    if name == "sequence_bias" and isinstance(value, (list, tuple)):
        return any(isinstance(part, dict) or part is None for part in value) or _depth(value) > 3
    return isinstance(value, (list, tuple)) and _depth(value) > _LISTS.get(name, 0)


def _depth(value: Any) -> int:
    if not isinstance(value, (list, tuple)):
        return 0
    return 1 + max(map(_depth, value), default=0)


def prepare(
    generate: Callable[..., Any], row: Prompt | None, device: torch.device, settings: dict[str, Any]
) -> Prepared:
    """One request, prepared by a model's own ``generate``, which runs nothing.

    row: without pads; None where no prompt was given: ``generate`` then begins with a token of its
    own. settings: the arguments of the call that concern this request. Raises what ``generate``
    raises for them.
    """
    found: list[Prepared] = []

    def take(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        own = settings.get("logits_processor")
        own = list(own) if isinstance(own, (list, tuple)) else []
        found.append(
            Prepared(
                generation_config, list(logits_processor), list(stopping_criteria), input_ids, own
            )
        )
        return input_ids

    inputs: dict[str, Any] = {}
    if row is not None:
        if row.embeds is not None:
            inputs["inputs_embeds"] = row.embeds[None]
        if row.ids or row.embeds is None:
            inputs["input_ids"] = torch.tensor([row.ids], dtype=torch.long, device=device)
        inputs["attention_mask"] = torch.ones(1, len(row), dtype=torch.long, device=device)
    generate(**inputs, **settings, custom_generate=take)
    return found[0]


def take_stop_strings(settings: dict[str, Any], own: GenerationConfig, tokenizer: Any) -> None:
    """Make the criterion here: the hook through which requests are prepared loses tokenizers.

    own: the model's. Without a tokenizer transformers refuses stop strings itself.
    """
    config: Any = settings.get("generation_config")
    found = [getattr(c, "stop_strings", None) for c in (config, own)]
    strings = next((value for value in found if value is not None), None)
    strings = settings.get("stop_strings", strings)
    if tokenizer is None or strings is None:
        return
    if found[0] is not None:
        config = settings["generation_config"] = copy.deepcopy(config)
        config.stop_strings = None
    if "stop_strings" in settings or found[1] is not None:
        settings["stop_strings"] = None
    criteria = list(settings.get("stopping_criteria") or ())
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(tokenizer, strings))
    settings["stopping_criteria"] = criteria


# What transformers' own processors take from the length of the prompts that they were made for.
_LENGTHS = {"prompt_length_to_skip", "min_length", "begin_index", "regulation_start", "max_length"}


def own_processors(given: list[Any], made: list[Any]) -> list[Any]:
    """Of the processors ``given`` those of the user, where transformers makes ``made`` by itself.

    Its warpers come last; of the others it makes none that the user brings.
    """

    def numbers(processor: Any) -> dict[str, Any]:
        found = {k: v for k, v in vars(processor).items() if isinstance(v, (bool, int, float))}
        return {k: v for k, v in found.items() if k not in _LENGTHS}

    theirs: set[int] = set()
    for one in made:
        alike = [p for p in given if type(p) is type(one) and numbers(p) == numbers(one)]
        theirs |= {id(p) for p in alike[-1:]}
    return [p for p in given if id(p) not in theirs]


def for_row(allowed: Callable[..., Any], number: int) -> Callable[[int, Tensor], Any]:
    """``prefix_allowed_tokens_fn`` of a row that is prepared alone: it knows its place."""
    return lambda _, ids: allowed(number, ids)


@contextmanager
def each_line_once() -> Iterator[None]:
    """What transformers logs while it prepares one request after the other, once."""
    said: set[str] = set()

    def new(record: logging.LogRecord) -> bool:
        line = record.getMessage()
        fresh = line not in said
        said.add(line)
        return fresh

    loggers = [
        logging.getLogger(f"transformers.generation.{name}")
        for name in ("utils", "configuration_utils")
    ]
    for one in loggers:
        one.addFilter(new)
    try:
        yield
    finally:
        for one in loggers:
            one.removeFilter(new)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings that the first request of a call has had already."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""transformers' own ``generate`` as the judge of a patched model's: the same call to both.

A batch is judged by its rows, each by itself and without pads. Knows nothing of the engine.
"""

import copy
import logging
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import warning_once

import tinyspec
from tests.support import tolerances
from tests.support.tiny import VOCAB, tiny
from tests.support.tolerances import LOGITS

PAD = 0
NEW = 12
FAMILIES = ("llama", "qwen3", "gpt2")
Settings = Callable[[list[list[int]]], dict[str, Any]]


def _rows() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(2, VOCAB) for _ in range(length)] for length in (5, 17, 1, 9, 5)]


ROWS = _rows()


@cache
def pair(family: str = "llama") -> tuple[PreTrainedModel, PreTrainedModel]:
    """A patched model, and a copy of it that transformers serves."""
    model = tiny(family)
    own = copy.deepcopy(model)
    tinyspec.patch(model)
    return model, own


@cache
def greedy(family: str = "llama") -> list[list[int]]:
    """What follows ``ROWS``, by transformers."""
    _, own = pair(family)
    return [
        own.generate(one(row), max_new_tokens=NEW, pad_token_id=PAD)[0, len(row) :].tolist()
        for row in ROWS
    ]


def one(row: list[int]) -> Tensor:
    """A row as a batch of itself."""
    return torch.tensor([row])


def padded(rows: list[list[int]], side: str = "left", pad: int = PAD) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of a batch."""
    longest = max(map(len, rows))

    def filled(given: list[list[int]], value: int) -> Tensor:
        fills = [(longest - len(row)) * [value] for row in given]
        pairs = zip(fills, given, strict=True)
        return torch.tensor([f + row if side == "left" else row + f for f, row in pairs])

    return filled(rows, pad), filled([[1] * len(row) for row in rows], 0)


BASE = {"max_new_tokens": NEW, "pad_token_id": PAD}
BLOCK, MASK = padded(ROWS)


def by_row(
    own: PreTrainedModel, rows: list[list[int]], settings: Callable[[], dict[str, Any]]
) -> list[Any]:
    """What transformers makes of each row by itself; ``settings`` are made anew for each."""
    return [own.generate(one(row), **settings()) for row in rows]


def joined(block: Tensor, rows: list[list[int]], outputs: list[Any], pad: int = PAD) -> Tensor:
    """The batch that begins with ``block`` and goes on with what each row's output generated."""
    new = [
        tokens[len(row) :].tolist()
        for row, output in zip(rows, outputs, strict=True)
        for tokens in getattr(output, "sequences", output)
    ]
    longest = max(map(len, new))
    block = block.repeat_interleave(len(new) // len(rows), dim=0)
    return torch.cat(
        [block, torch.tensor([tokens + [pad] * (longest - len(tokens)) for tokens in new])], dim=1
    )


@dataclass
class Heard:
    """What a call came to, and what transformers said of it."""

    result: Any = None
    error: BaseException | None = None
    lines: list[str] = field(default_factory=list)

    @property
    def complaint(self) -> tuple[type, str]:
        return type(self.error), str(self.error)


def listen(generate: Callable[..., Any], *args: Any, **settings: Any) -> Heard:
    """Call ``generate`` and keep its result or error, and all log lines and warnings."""
    heard = Heard()
    handler = logging.Handler()
    handler.emit = lambda record: heard.lines.append(record.getMessage())
    logger = logging.getLogger("transformers")
    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_warning()
    logger.addHandler(handler)
    warning_once.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                heard.result = generate(*args, **settings)
            except Exception as error:
                heard.error = error
        heard.lines += [str(warning.message) for warning in warned]
    finally:
        logger.removeHandler(handler)
        transformers.logging.set_verbosity(before)
    return heard


def close(given: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> bool:
    """Whether steps of logits agree: the same tokens excluded, the others nearly equal."""
    return len(given) == len(expected) and all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a == -torch.inf, b == -torch.inf)
        and tolerances.close(a, b, LOGITS)
        for a, b in zip(given, expected, strict=True)
    )


@contextmanager
def defaults(models: tuple[PreTrainedModel, ...], **fields: Any) -> Iterator[None]:
    """Fields of the models' own generation configs, set while the block runs."""
    before = [copy.deepcopy(model.generation_config) for model in models]
    try:
        for model in models:
            for name, value in fields.items():
                setattr(model.generation_config, name, value)
        yield
    finally:
        for model, config in zip(models, before, strict=True):
            model.generation_config = config

"""What the tests of ``model.generate`` have in common: models with and without it, and what
transformers itself answers for one row alone.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel, StoppingCriteria

import tinyspec
from tests.support.tiny import VOCAB, tiny
from tinyspec import EngineConfig

PAD = 0
# Of few sizes, so that proofs are short.
SMALL = EngineConfig(reference_rows=16, max_rows=32, page_size=8)


class AfterEven(LogitsProcessor):
    """Behind an even token only odd ones are allowed, row by row."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        even = torch.arange(scores.shape[-1]) % 2 == 0
        return scores.masked_fill(even & (input_ids[:, -1:] % 2 == 0), -torch.inf)


class AtMultiples(StoppingCriteria):
    """Ends a row behind a token that 7 divides."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] % 7 == 0


@contextmanager
def patched(
    model: PreTrainedModel, config: EngineConfig | None = SMALL, **settings: Any
) -> Iterator[PreTrainedModel]:
    """``model`` while tinyspec serves its ``generate``. settings: as for ``patch``."""
    tinyspec.patch(model, config, **settings)
    try:
        yield model
    finally:
        tinyspec.unpatch(model)


def prepared(model: Any, mixed_precision: str = "bf16") -> Any:
    """``model`` as accelerate's ``prepare`` gives it back; accelerate holds one state a process."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state()
    return accelerate.Accelerator(mixed_precision=mixed_precision, cpu=True).prepare_model(model)


@cache
def own(family: str = "llama") -> PreTrainedModel:
    """A tiny model that nobody patches: transformers' own answers."""
    return tiny(family)


def ids_of(prompt: list[int]) -> Tensor:
    return torch.tensor([prompt])


def alone(model: PreTrainedModel, prompt: list[int], **settings: Any) -> list[int]:
    """What an unpatched model's ``generate`` adds to one prompt without pads."""
    ids = ids_of(prompt)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), **{"pad_token_id": PAD, **settings}
    )
    return out[0, len(prompt) :].tolist()


def processors_of(model: PreTrainedModel, prompt: list[int], **settings: Any) -> Any:
    """The logits processors that transformers makes of ``settings``."""
    found = []

    def take(model, input_ids, logits_processor, **others):
        found.append(logits_processor)
        return input_ids

    ids = ids_of(prompt)
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        custom_generate=take,
        **{"pad_token_id": PAD, **settings},
    )
    return found[0]


def random_ids(length: int, seed: int = 0) -> list[int]:
    """Random tokens, none of them PAD."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (length,), generator=generator).tolist()


def greedy(
    model: PreTrainedModel, prompt: list[int], tokens: int = 8, **settings: Any
) -> list[int]:
    """Greedy tokens for one prompt, by whatever ``generate`` the model has."""
    return alone(model, prompt, do_sample=False, max_new_tokens=tokens, **settings)


def portrait(model: PreTrainedModel) -> dict[str, Any]:
    """All there is to see of a model from outside: every module and everything it holds."""
    seen: dict[str, Any] = {"config": copy.deepcopy(model.config.to_dict())}
    seen["implementation"] = model.config._attn_implementation
    seen["generation_config"] = copy.deepcopy(model.generation_config.to_dict())
    seen["generation_config is"] = id(model.generation_config)
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, dict) and attribute.startswith("_"):
                value = [(key, id(part)) for key, part in value.items()]
            elif not isinstance(value, (int, float, str, bool, type(None))):
                value = id(value)
            seen[f"{name}.{attribute}"] = value
        seen[f"{name} is"] = id(module), type(module)
    for name, parameter in model.named_parameters():
        seen[f"{name} lies at"] = parameter.data_ptr(), parameter.requires_grad
    return seen

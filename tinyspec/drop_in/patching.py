"""The drop-in: ``model.generate`` is for old code what it was, on tinyspec's engine, and takes
parameters, seeds and ``deterministic`` for every request by itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    PrefixConstrainedLogitsProcessor,
)

from tinyspec.config import EngineConfig
from tinyspec.drop_in.call import INPUTS
from tinyspec.drop_in.patched_generate import PatchedGenerate, own_generate
from tinyspec.drop_in.prepare import own_processors, prepare
from tinyspec.drop_in.prompts import Prompt
from tinyspec.model.wrappers import unwrap


def patch(model: PreTrainedModel, config: EngineConfig | None = None) -> None:
    """Let tinyspec serve ``model.generate``; everything else of the model stays as it is.

    model: as for an Engine; in a wrapper, the model inside is patched, and its ``generate`` is the
    wrapper's.

    ``generate`` keeps the arguments, defaults, results and errors that it has. Besides, every
    sampling parameter may be a list of one value per prompt, prompts may be lists of different
    lengths, and there are ``seed`` and ``deterministic`` (scalars or lists). What tinyspec does not
    serve goes to the model's own ``generate``, with a line in the log; together with what only
    tinyspec has it raises NotImplementedError.

    ``model.generate`` has ``release()``, ``stats()``, ``weights_changed()`` and ``fingerprint``
    besides. Raises UnsupportedModelError naming what is in the way, and ValueError if the model is
    patched already or served by an Engine.
    """
    inside = unwrap(model)
    inside.__dict__["generate"] = PatchedGenerate(inside, config, synonym=generate)


def unpatch(model: PreTrainedModel) -> None:
    """Give ``model`` its own ``generate`` back; a model that is not patched is left alone."""
    door = vars(unwrap(model)).get("generate")
    if isinstance(door, PatchedGenerate):
        door.close()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list[Any],
    stopping_criteria: list[Any],
    generation_config: GenerationConfig,
    seed: Any = None,
    deterministic: Any = False,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=tinyspec.generate)``, patched or not.

    transformers has prepared the arguments by then, for the batch as it is: ``max_length`` counts
    padding, there are no values per request but ``seed`` and ``deterministic``, and a streamer is
    not handed on. A model that is not patched gets an engine for this call alone.

    Raises NotImplementedError naming what is not served.
    """
    if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in logits_processor):
        raise NotImplementedError(
            "prefix_allowed_tokens_fn through custom_generate; use tinyspec.patch(model)"
        )
    past = model_kwargs.pop("past_key_values", None)
    if past is not None and past.get_seq_length() > 0:
        raise NotImplementedError("past_key_values is not supported by tinyspec")
    for name in ("use_cache", "logits_to_keep"):
        model_kwargs.pop(name, None)
    if generation_config.num_beams > 1:
        raise NotImplementedError(f"num_beams={generation_config.num_beams} is not supported")
    config = copy.deepcopy(generation_config)
    length = input_ids.shape[1]
    if config.min_new_tokens is None:
        config.min_new_tokens = max((config.min_length or 0) - length, 0) or None
    config.max_new_tokens = config.max_length - length
    config.max_length = config.min_length = config.stop_strings = config.max_time = None
    # What transformers will make of the config once more is left out here.
    made = prepare(own_generate(model), Prompt([0]), model.device, {"generation_config": config})

    def made_anew(criterion: Any) -> bool:
        if type(criterion) is MaxLengthCriteria:
            return criterion.max_length == generation_config.max_length
        return type(criterion) is EosTokenCriteria and criterion.eos_token_id.tolist() == made.eos

    embeds = model_kwargs.get("inputs_embeds")
    if model_kwargs.get("attention_mask") is None:  # all ones, which transformers leaves out
        like = input_ids if embeds is None else embeds[..., 0]
        model_kwargs["attention_mask"] = torch.ones_like(like, dtype=torch.long)
    given = {
        "input_ids": None if embeds is not None and length == 0 else input_ids,
        **model_kwargs,
        "generation_config": config,
        "logits_processor": own_processors(logits_processor, made.processors),
        "stopping_criteria": [c for c in stopping_criteria if not made_anew(c)],
        "seed": seed,
        "deterministic": deterministic,
    }
    # transformers has written every prompt down once for each of its completions.
    for name in INPUTS:
        if isinstance(given.get(name), Tensor):
            given[name] = given[name][:: max(config.num_return_sequences, 1)]
    door = vars(model).get("generate")
    if isinstance(door, PatchedGenerate):
        return door.serve(given)
    door = PatchedGenerate(model)
    try:
        return door.serve(given)
    finally:
        door.close()

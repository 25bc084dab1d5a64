"""The drop-in: ``model.generate`` on tinyspec's engine, for code that calls transformers' own."""

from __future__ import annotations

import copy
from contextlib import closing
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
from tinyspec.drop_in.original import own_method
from tinyspec.drop_in.patched_generate import PatchedGenerate
from tinyspec.drop_in.prepare import prepare, user_processors
from tinyspec.drop_in.prompts import Prompt
from tinyspec.drop_in.seeds import Defaults
from tinyspec.drop_in.served import PROMPT_ARGUMENTS
from tinyspec.engine.lock import between_steps, flush
from tinyspec.model.supported import CACHE
from tinyspec.model.wrappers import unwrap


@between_steps()
def patch(
    model: PreTrainedModel,
    config: EngineConfig | None = None,
    *,
    deterministic: bool = False,
    seed: int | None = None,
    release: bool = False,
) -> None:
    """Let tinyspec serve ``model.generate``; everything else of the model stays as it is.

    model: as for an Engine; in a wrapper, the model inside is patched, and its ``generate`` is the
    wrapper's.

    ``generate`` keeps its arguments, defaults, results and errors. Besides, every sampling
    parameter may be a list of one value per prompt, prompts may be lists of different lengths, and
    there are ``seed`` and ``deterministic`` (scalars or lists), which may also stand in a
    ``GenerationConfig``, the call's or the model's. A call that tinyspec does not serve goes to the
    model's own ``generate``, with a line in the log; together with what only tinyspec has it raises
    NotImplementedError.

    ``generate_batch`` is served too, with the tokens of ``generate``; what tinyspec does not serve
    it refuses. Managers of continuous batching stay transformers' own.

    deterministic, seed: of calls that do not say otherwise. A seed that is an argument of
    ``generate`` is every row's; one that stands here or in a config is a base: a row's own is mixed
    from it, how often its prompt stood earlier in the call, and the number of calls before since
    ``patch`` or since another base. So equal prompts have different samples, which repeat when the
    script is run again.

    release: free the page pool's memory after each call, for a trainer that needs it; the next call
    allocates it anew, and no prompt is found in the prefix cache.

    ``model.generate`` also has ``release()``, ``stats()``, ``weights_changed()``, ``fingerprint``
    and ``seeds``, those of the rows of the latest call, which a returned dict has as an attribute.
    Raises UnsupportedModelError naming what is in the way, ValueError naming a bad value or if the
    model is patched already, and RuntimeError if transformers' ``generate``
    has no ``custom_generate``.
    """
    inside = unwrap(model)
    patched_generate = PatchedGenerate(
        inside,
        config,
        custom_generate=generate,
        defaults=Defaults(deterministic, seed),
        releases=release,
    )
    try:
        patched_generate.put_in()
        flush()
    except BaseException:
        patched_generate.close()
        raise


@between_steps()
def unpatch(model: PreTrainedModel) -> None:
    """Give ``model`` its own ``generate`` back, once no call of it is served any more. A model that
    is not patched is left alone; engines that serve it go on."""
    patched_generate = vars(unwrap(model)).get("generate")
    if isinstance(patched_generate, PatchedGenerate):
        patched_generate.close()


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: list[Any],
    stopping_criteria: list[Any],
    generation_config: GenerationConfig,
    seed: Any = None,
    deterministic: Any = None,
    **model_kwargs: Any,
) -> Any:
    """For ``model.generate(..., custom_generate=tinyspec.generate)``, patched or not.

    transformers has prepared the arguments for the batch by then: ``max_length`` counts padding,
    only ``seed`` and ``deterministic`` may have a value per request, and a streamer is not passed
    on. A model that is not patched gets an engine for this call alone.

    Raises NotImplementedError naming what is not served.
    """
    unserved = _unserved(logits_processor, generation_config, model_kwargs)
    if unserved is not None:
        raise NotImplementedError(
            f"{unserved} is not supported by custom_generate=tinyspec.generate; "
            "call tinyspec.patch(model) and leave custom_generate out"
        )
    config = _new_token_limits(generation_config, input_ids.shape[1])
    # What transformers makes of the config a second time is left out of the arguments.
    original, settings = own_method(model, "generate"), {"generation_config": config}
    made = prepare(original, Prompt([0]), model.device, settings)

    def is_made(criterion: Any) -> bool:
        if type(criterion) is MaxLengthCriteria:
            return criterion.max_length == generation_config.max_length
        return type(criterion) is EosTokenCriteria and criterion.eos_token_id.tolist() == made.eos

    arguments = {
        **_prompt_arguments(input_ids, model_kwargs, max(config.num_return_sequences, 1)),
        "generation_config": config,
        "logits_processor": user_processors(logits_processor, made.processors),
        "stopping_criteria": [c for c in stopping_criteria if not is_made(c)],
        "seed": seed,
        "deterministic": deterministic,
    }
    patched_generate = vars(model).get("generate")
    if isinstance(patched_generate, PatchedGenerate):
        return patched_generate.serve(arguments)
    with closing(PatchedGenerate(model)) as patched_generate:
        return patched_generate.serve(arguments)


def _unserved(
    processors: list[Any], config: GenerationConfig, model_kwargs: dict[str, Any]
) -> str | None:
    """What transformers has prepared for its own decoding alone, if there is anything."""
    if any(isinstance(processor, PrefixConstrainedLogitsProcessor) for processor in processors):
        return "prefix_allowed_tokens_fn"
    past = model_kwargs.get(CACHE)
    if past is not None and past.get_seq_length() > 0:
        return CACHE
    return f"num_beams={config.num_beams}" if config.num_beams > 1 else None


def _new_token_limits(config: GenerationConfig, length: int) -> GenerationConfig:
    """A copy of ``config`` whose limits count new tokens, behind prompts of ``length`` tokens.

    What has become a stopping criterion is taken out of it.
    """
    config = copy.deepcopy(config)
    if config.min_new_tokens is None:
        config.min_new_tokens = max((config.min_length or 0) - length, 0) or None
    config.max_new_tokens = config.max_length - length
    config.max_length = config.min_length = config.stop_strings = config.max_time = None
    return config


def _prompt_arguments(
    input_ids: Tensor, model_kwargs: dict[str, Any], copies: int
) -> dict[str, Any]:
    """The prompts and what else goes to the model, without what transformers adds to it: the cache
    settings, and ``copies`` of every prompt, one for each completion."""
    added = (CACHE, "use_cache", "logits_to_keep")
    arguments = {name: value for name, value in model_kwargs.items() if name not in added}
    embeds = arguments.get("inputs_embeds")
    if embeds is None or input_ids.shape[1] > 0:
        arguments["input_ids"] = input_ids
    if arguments.get("attention_mask") is None:  # transformers leaves out a mask of ones
        like = input_ids if embeds is None else embeds[..., 0]
        arguments["attention_mask"] = torch.ones_like(like, dtype=torch.long)
    for name in PROMPT_ARGUMENTS:
        if isinstance(arguments.get(name), Tensor):
            arguments[name] = arguments[name][::copies]
    return arguments

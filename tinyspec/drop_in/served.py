"""Which arguments and settings of ``generate`` tinyspec serves; every other one is named.

Knows names and values, and nothing of engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    GenerationMode,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from tinyspec.model.supported import vocab_size

# Arguments that tinyspec adds to those of transformers.
ADDED_ARGUMENTS = ("seed", "deterministic")
PROMPT_ARGUMENTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")
# These concern a call as a whole.
CALL_ARGUMENTS = ("tokenizer", "assistant_tokenizer", "synced_gpus", "streamer")
UNSERVED_ARGUMENTS = (
    *("custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask"),
    "assistant_tokenizer",
)
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
# Types of models, besides those with an embedding of token types, for which type 0 is the default.
TEXT_IS_ZERO = {"gemma3", "gemma4", "gemma4_unified", "hrm_text"}
UNSERVED_PROCESSORS = (
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

# Fields of GenerationConfig that become SamplingParams, or the processors and criteria that
# transformers makes of them.
SERVED_FIELDS = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "num_return_sequences", "output_scores", "output_logits"),
    *("top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "renormalize_logits"),
    *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"),
    "prompt_lookup_num_tokens",
}
# Fields without effect in the modes served: of beams, encoder-decoders, compilation, the pace of
# prompts and of drafts; use_cache, as the KV cache is always used.
INERT_FIELDS = {
    *("num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty"),
    *("decoder_start_token_id", "use_cache", "disable_compile", "compile_config"),
    *("low_memory", "prefill_chunk_size"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    "transformers_version",
}
# Fields without effect where no dict is returned.
DICT_FIELDS = {"output_attentions", "output_hidden_states"}
# Values of other fields that are served; None and False, which switch a field off, are for all.
SERVED_VALUES = {"guidance_scale": (1,), "cache_implementation": ("dynamic", "static")}
# logits_to_keep: of a prompt the last position's are kept, as they are by default.
_KNOWN_ARGUMENTS = {*PROMPT_ARGUMENTS, *CALL_ARGUMENTS, *ADDED_ARGUMENTS}
_KNOWN_ARGUMENTS |= {"generation_config", "logits_processor", "stopping_criteria", "kwargs"}
_KNOWN_ARGUMENTS |= {"prefix_allowed_tokens_fn", "assistant_model", "logits_to_keep"}
_KNOWN_FIELDS = {*SERVED_FIELDS, *INERT_FIELDS, *ADDED_ARGUMENTS}
SERVED_MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)


def unserved_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[str]:
    """Arguments of a call that only transformers' own ``generate`` serves."""
    yield from (name for name in UNSERVED_ARGUMENTS if name in arguments)
    yield from _unserved_prompts(arguments)
    if arguments.get("cache_implementation") == "paged":
        yield "cache_implementation='paged'"
    if arguments.get("synced_gpus"):
        yield "synced_gpus=True"
    processors = arguments.get("logits_processor")
    for processor in processors if isinstance(processors, (list, tuple)) else ():
        if isinstance(processor, UNSERVED_PROCESSORS):
            yield f"a {type(processor).__name__} in logits_processor"
    assistant = arguments.get("assistant_model")
    if isinstance(assistant, PreTrainedModel):
        size, expected = vocab_size(assistant), vocab_size(model)
        if size != expected:
            yield f"an assistant_model with a vocabulary of {size} tokens, not {expected}"
    known = {*vars(model.generation_config), *_KNOWN_ARGUMENTS, *UNSERVED_ARGUMENTS}
    others = [n for n, value in arguments.items() if n not in known and value is not None]
    forward = inspect.signature(model.forward).parameters if others else {}
    yield from (f"{n} (an argument of the model's forward)" if n in forward else n for n in others)


def default_token_types(model: PreTrainedModel, arguments: dict[str, Any]) -> list[str]:
    """Names of token types among the arguments that are what the model has without them: all zero,
    which tokenizers give for a text, and not looked up among the words (as by gpt2)."""
    zeros = [
        name
        for name in TOKEN_TYPES
        if isinstance(arguments.get(name), torch.Tensor) and not arguments[name].any()
    ]
    config = model.config
    if not hasattr(config, "type_vocab_size") and config.model_type not in TEXT_IS_ZERO:
        return []
    forward = inspect.signature(model.forward).parameters if zeros else {}
    return [name for name in zeros if name in forward]


def _unserved_prompts(arguments: dict[str, Any]) -> Iterator[str]:
    mask = arguments.get("attention_mask")
    if getattr(mask, "ndim", 2) > 2 or isinstance(mask, dict):
        yield "an attention_mask of more than two dimensions"
    prompts = {"inputs", "input_ids", "inputs_embeds"} & arguments.keys()
    if mask is not None and not prompts:
        yield "an attention_mask without input_ids"
    if {"inputs", "input_ids"} <= prompts:
        yield "inputs beside input_ids"
    ids, embeds = (
        arguments.get("inputs", arguments.get("input_ids")),
        arguments.get("inputs_embeds"),
    )
    if ids is not None and embeds is not None and ids.shape[:2] != embeds.shape[:2]:
        yield "input_ids beside inputs_embeds of another length"
    if "position_ids" in arguments and not _default_positions(arguments["position_ids"], mask):
        yield "position_ids other than 0, 1, 2, ... in every prompt"


def _default_positions(position_ids: Any, attention_mask: Any) -> bool:
    """Whether ``position_ids`` are what they are by default."""
    positions = torch.as_tensor(position_ids)
    mask = torch.ones_like(positions) if attention_mask is None else torch.as_tensor(attention_mask)
    if mask.shape != positions.shape:
        return False
    real = mask.to(positions.device) != 0
    return bool(((real.long().cumsum(-1) - 1) == positions)[real].all())


def unserved_settings(config: GenerationConfig, assistant: Any = None) -> Iterator[str]:
    """Settings of one request that only transformers' own ``generate`` serves."""
    mode = config.get_generation_mode(assistant)
    if mode not in SERVED_MODES:
        yield f"generation mode {mode.value} (num_beams={config.num_beams})"
    if config.prompt_lookup_num_tokens is not None and config.prompt_lookup_num_tokens < 1:
        yield f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}"
    for name, value in vars(config).items():
        if value is None or value is False or name in _KNOWN_FIELDS or name.startswith("_"):
            continue
        of_dicts = name in DICT_FIELDS and not config.return_dict_in_generate
        if not (of_dicts or value in SERVED_VALUES.get(name, ())):
            yield f"{name}={value!r}"

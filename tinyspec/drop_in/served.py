"""Which arguments and settings of ``generate`` tinyspec serves; every other one is named.

Knows names and values, and nothing of engines.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
)

from tinyspec.drafts.drafter import assistant_refusal

# Arguments that tinyspec adds to those of transformers.
ADDED_ARGUMENTS = ("seed", "deterministic")
PROMPT_ARGUMENTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask")
# These concern a call as a whole.
CALL_ARGUMENTS = ("tokenizer", "synced_gpus", "streamer")
UNSERVED_ARGUMENTS = (
    *("custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask"),
    *("assistant_tokenizer", "position_ids"),
)
# What tokenizers give beside ids, and types of models, besides those with an embedding of token
# types, for which type 0 is the default.
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
TEXT_IS_ZERO = {"gemma3", "gemma4", "gemma4_unified", "hrm_text"}
UNSERVED_PROCESSORS = (
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
    WatermarkLogitsProcessor,
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
_KNOWN_ARGUMENTS = {*PROMPT_ARGUMENTS, *CALL_ARGUMENTS, *ADDED_ARGUMENTS, *UNSERVED_ARGUMENTS}
_KNOWN_ARGUMENTS |= {"generation_config", "logits_processor", "stopping_criteria", "kwargs"}
_KNOWN_ARGUMENTS |= {"prefix_allowed_tokens_fn", "assistant_model", "logits_to_keep"}
_KNOWN_FIELDS = {*SERVED_FIELDS, *INERT_FIELDS, *ADDED_ARGUMENTS}
SERVED_MODES = ("greedy_search", "sample", "assisted_generation")


def unserved_arguments(model: PreTrainedModel, arguments: dict[str, Any]) -> Iterator[str]:
    """Arguments of a call that only transformers' own ``generate`` serves."""
    yield from (name for name in UNSERVED_ARGUMENTS if name in arguments)
    prompts = [n for n in ("inputs", "input_ids", "inputs_embeds") if n in arguments]
    mask = arguments.get("attention_mask")
    if getattr(mask, "ndim", 2) > 2 or isinstance(mask, dict):
        yield "an attention_mask of more than two dimensions"
    if len(prompts) != 1:
        yield " beside ".join(prompts) or "no prompt (input_ids)"
    if arguments.get("synced_gpus"):
        yield "synced_gpus=True"
    processors = arguments.get("logits_processor")
    for processor in processors if isinstance(processors, (list, tuple)) else ():
        if isinstance(processor, UNSERVED_PROCESSORS):
            yield f"a {type(processor).__name__} in logits_processor"
    assistant = arguments.get("assistant_model")
    if isinstance(assistant, PreTrainedModel) and assistant is not model:
        has = assistant_refusal(assistant, model)
        yield from () if has is None else (f"an assistant_model that has {has}",)
    known = {*vars(model.generation_config), *_KNOWN_ARGUMENTS}
    yield from (name for name in arguments if name not in known)


def says_nothing(model: PreTrainedModel, name: str, value: Any) -> bool:
    """Whether an argument is token types that are what the model has without them: all zero, which
    tokenizers give for a text, and not looked up among the words (as by gpt2)."""
    if name not in TOKEN_TYPES or not isinstance(value, Tensor) or value.any():
        return False
    config = model.config
    if not hasattr(config, "type_vocab_size") and config.model_type not in TEXT_IS_ZERO:
        return False
    return name in inspect.signature(model.forward).parameters


def unserved_settings(config: GenerationConfig, assistant: Any = None) -> Iterator[str]:
    """Settings of one request that only transformers' own ``generate`` serves."""
    mode = config.get_generation_mode(assistant)
    if mode.value not in SERVED_MODES:
        yield f"generation mode {mode.value} (num_beams={config.num_beams})"
    if config.prompt_lookup_num_tokens is not None and config.prompt_lookup_num_tokens < 1:
        yield f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}"
    for name, value in vars(config).items():
        if value is None or value is False or name in _KNOWN_FIELDS or name.startswith("_"):
            continue
        of_dicts = name in DICT_FIELDS and not config.return_dict_in_generate
        if not (of_dicts or value in SERVED_VALUES.get(name, ())):
            yield f"{name}={value!r}"

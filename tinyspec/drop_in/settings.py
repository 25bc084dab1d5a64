"""What transformers prepared for one request of its ``generate``, put into SamplingParams.

What has no place there is named, never dropped. Knows nothing of engines and batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    GenerationMode,
    MaxLengthCriteria,
    MaxTimeCriteria,
    logits_process,
)

from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams

# Fields of GenerationConfig that are honoured: as SamplingParams, or as the processors and the
# criteria that transformers makes of them.
SERVED = {
    *("max_length", "max_new_tokens", "min_length", "min_new_tokens", "max_time", "stop_strings"),
    *("do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty"),
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
    *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
    *("sequence_bias", "num_return_sequences", "output_scores", "output_logits"),
    *("return_dict_in_generate", "pad_token_id", "bos_token_id", "eos_token_id"),
    "prompt_lookup_num_tokens",
}
# Fields that change nothing in the modes served: of beams and encoder-decoders, of how fast drafts
# come, of compilation, and use_cache, as nothing but pages is ever used.
INERT = {
    *("num_beams", "num_beam_groups", "early_stopping", "length_penalty", "diversity_penalty"),
    *("decoder_start_token_id", "use_cache", "disable_compile"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *("max_matching_ngram_size", "assistant_lookbehind", "target_lookbehind"),
    "transformers_version",
}
# Fields that only matter when sampling.
WARPING = {"top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
MODES = (
    GenerationMode.GREEDY_SEARCH,
    GenerationMode.SAMPLE,
    GenerationMode.ASSISTED_GENERATION,
)

# These become parameters where transformers made them; all others are called as they are.
_WARPERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
)
_LEAST = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
)
_PENALTY = logits_process.RepetitionPenaltyLogitsProcessor
# Of transformers' own processors these keep something from call to call.
_STATEFUL = (
    logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
    logits_process.SynthIDTextWatermarkLogitsProcessor,
    logits_process.WatermarkLogitsProcessor,
)
# And these hold one request's prompt.
_OF_PROMPT = (
    logits_process.EncoderRepetitionPenaltyLogitsProcessor,
    logits_process.EncoderNoRepeatNGramLogitsProcessor,
    logits_process.PrefixConstrainedLogitsProcessor,
)


# Temperatures beyond these give the same probabilities, as far as fp32 tells.
_COLDEST, _HOTTEST = 1e-6, 1e30


class _Stateless:
    """A processor that may be called for tokens that are not committed."""

    stateless = True

    def __init__(self, processor: Callable[..., torch.Tensor]):
        self._processor = processor
        self.__qualname__ = type(processor).__qualname__

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self._processor(input_ids, scores)


@dataclass
class Prepared:
    """One request as transformers prepared it.

    length: tokens that its own input_ids have, 0 for embeddings alone.
    """

    config: GenerationConfig
    processors: list[Any]
    criteria: list[Any]
    input_ids: torch.Tensor
    own: list[Any]

    @property
    def length(self) -> int:
        return self.input_ids.shape[1]

    @property
    def knows_prompt(self) -> bool:
        """Whether a processor is for this prompt alone, however long others are."""
        return any(isinstance(processor, _OF_PROMPT) for processor in self.processors)

    @property
    def eos(self) -> list[int]:
        """Tokens that end it."""
        ids = [c.eos_token_id.tolist() for c in self.criteria if type(c) is EosTokenCriteria]
        return [token for some in ids for token in some]

    @property
    def pad(self) -> int | None:
        """What fills up behind an end; transformers takes the stop token where there is none."""
        own = self.config.pad_token_id
        return own if own is not None else next(iter(self.eos), None)

    def unserved(self, assistant: Any = None) -> Iterator[str]:
        """What it asks that only transformers' own ``generate`` does."""
        config = self.config
        mode = config.get_generation_mode(assistant)
        if mode not in MODES:
            yield f"generation mode {mode.value} (num_beams={config.num_beams})"
        if config.prompt_lookup_num_tokens is not None and config.prompt_lookup_num_tokens < 1:
            yield f"prompt_lookup_num_tokens={config.prompt_lookup_num_tokens}"
        defaults = _defaults()
        skipped = SERVED | INERT | (set() if config.do_sample else WARPING)
        for name, value in config.to_dict().items():
            if name.startswith("_") or name in skipped or value is None or value is False:
                continue
            if name == "guidance_scale" and value == 1:
                continue
            if value != defaults.get(name):
                yield f"{name}={value!r}"

    def params(self, seed: int | None, deterministic: bool, vocab_size: int) -> SamplingParams:
        """The same in SamplingParams. Raises ValueError as these do."""
        config = self.config
        most = min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria)
        if deterministic and any(type(c) is MaxTimeCriteria for c in self.criteria):
            raise refuse("max_time", config.max_time, "None beside deterministic=True")
        settings: dict[str, Any] = {}
        if config.do_sample:
            heat, top_p, top_k = config.temperature, config.top_p, config.top_k
            settings = {
                "temperature": min(max(float(heat or 1.0), _COLDEST), _HOTTEST),
                "top_k": None if top_k is None else int(top_k),
                "top_p": None if top_p is None or top_p >= 1 else float(top_p),
                "min_p": None if config.min_p is None else float(config.min_p),
            }
        penalty, processors = self._kept()
        new = max(math.ceil(most - self.length), 1)
        least = math.ceil(max((config.min_length or 0) - self.length, config.min_new_tokens or 0))
        return SamplingParams(
            max_new_tokens=new,
            min_new_tokens=min(max(least, 0), new),
            repetition_penalty=min(float(penalty), _HOTTEST),
            seed=seed,
            deterministic=deterministic,
            num_return_sequences=max(int(config.num_return_sequences), 1),
            eos_token_id=[token for token in self.eos if 0 <= token < vocab_size],
            logits_processors=processors,
            stopping_criteria=[
                c for c in self.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)
            ],
            **settings,
        )

    def _kept(self) -> tuple[float, list[Callable[..., Any]]]:
        """The repetition penalty, where it comes first, and the processors that are called."""
        penalty = 1.0
        kept: list[Callable[..., Any]] = []
        for processor in self.processors:
            kind = type(processor)
            if not any(processor is own for own in self.own):
                if kind in _WARPERS or kind in _LEAST:
                    continue
                if kind is _PENALTY and not kept:
                    penalty = processor.penalty
                    continue
            built_in = kind.__module__ == logits_process.__name__ and kind not in _STATEFUL
            if built_in:
                processor = _Stateless(processor)
            elif _takes_more(processor):  # the list says what is missing, in transformers' words
                processor = logits_process.LogitsProcessorList([processor])
            kept.append(processor)
        return penalty, kept


def _takes_more(processor: Any) -> bool:
    """Whether it wants more than input_ids and scores."""
    return callable(processor) and len(inspect.signature(processor).parameters) > 2


def _defaults() -> dict[str, Any]:
    """What the fields are where nobody sets them."""
    own = GenerationConfig().to_dict()
    return own | getattr(GenerationConfig, "_get_default_generation_params", dict)()

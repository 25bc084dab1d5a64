"""One request as transformers' ``generate`` prepared it, put into SamplingParams.

Knows nothing of engines and batches.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    logits_process,
)

from tinyspec.errors import refuse
from tinyspec.sampling_params import SamplingParams

_LENGTHS = (
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
)
# These become parameters where transformers made them; all others are called as they are.
_PARAMETERS = (
    logits_process.TemperatureLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.MinPLogitsWarper,
    *_LENGTHS,
)
# Where transformers made one of these, the order of all counts, and all that change or leave out
# logits are called.
_ORDERED = (
    logits_process.TopHLogitsWarper,
    logits_process.TypicalLogitsWarper,
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.LogitNormalization,
)
_PENALTY = logits_process.RepetitionPenaltyLogitsProcessor
# Of transformers' own processors these keep state from call to call.
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
# In fp32, temperatures beyond these give the same probabilities.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 1e-6, 1e30
_MAX_PENALTY = 1e30


class _Stateless:
    """A processor that may be called for tokens that are not committed."""

    stateless = True

    def __init__(self, processor: Callable[..., Tensor]):
        self._processor = processor
        self.__qualname__ = type(processor).__qualname__

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self._processor(input_ids, scores)


@dataclass
class PreparedRequest:
    """What transformers' ``generate`` made of the arguments for one request.

    input_ids [1, L]: without what is given as embeddings. user_processors: those of
    ``processors`` that are the user's.
    """

    config: GenerationConfig
    processors: list[Any]
    criteria: list[Any]
    input_ids: Tensor
    user_processors: list[Any]

    @property
    def holds_prompt(self) -> bool:
        """Whether a processor holds this prompt, and fits no other of the same length."""
        return any(isinstance(processor, _OF_PROMPT) for processor in self.processors)

    @cached_property
    def eos(self) -> list[int]:
        """Token ids that end the request."""
        ids = [c.eos_token_id.tolist() for c in self.criteria if type(c) is EosTokenCriteria]
        return [token for some in ids for token in some]

    @property
    def pad(self) -> int | None:
        """The pad token; as in transformers a stop token where none is set."""
        pad = self.config.pad_token_id
        return pad if pad is not None else next(iter(self.eos), None)

    def params(self, seed: int | None, deterministic: bool, vocab_size: int) -> SamplingParams:
        """The same in SamplingParams. Raises ValueError as these do."""
        config = self.config
        length = self.input_ids.shape[1]
        if deterministic and any(type(c) is MaxTimeCriteria for c in self.criteria):
            raise refuse("max_time", config.max_time, "None with deterministic=True")
        settings: dict[str, Any] = {}
        if config.do_sample and self._ordered:
            settings = {"temperature": 1.0}
        elif config.do_sample:
            temperature, top_p, top_k = float(config.temperature or 1), config.top_p, config.top_k
            settings = {
                "temperature": min(max(temperature, _MIN_TEMPERATURE), _MAX_TEMPERATURE),
                "top_k": None if top_k is None else int(top_k),
                "top_p": None if top_p is None or top_p >= 1 else float(top_p),
                "min_p": None if config.min_p is None else float(config.min_p),
            }
        penalty, processors = self._called_processors()
        longest = min(c.max_length for c in self.criteria if type(c) is MaxLengthCriteria)
        most = max(math.ceil(longest - length), 1)
        least = math.ceil(max((config.min_length or 0) - length, config.min_new_tokens or 0))
        return SamplingParams(
            max_new_tokens=most,
            min_new_tokens=min(max(least, 0), most),
            repetition_penalty=min(float(penalty), _MAX_PENALTY),
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

    @property
    def _ordered(self) -> bool:
        """Whether the warpers are called, one behind the other."""
        return any(isinstance(p, _ORDERED) and not self._is_users(p) for p in self.processors)

    def _is_users(self, processor: Any) -> bool:
        return any(processor is user for user in self.user_processors)

    def _called_processors(self) -> tuple[float, list[Callable[..., Any]]]:
        """The repetition penalty, where it comes first, and the processors that are called."""
        penalty = 1.0
        called: list[Callable[..., Any]] = []
        parameters = _LENGTHS if self._ordered else _PARAMETERS
        for processor in self.processors:
            kind = type(processor)
            if not self._is_users(processor):
                if kind in parameters:
                    continue
                if kind is _PENALTY and not called:
                    penalty = processor.penalty
                    continue
            if kind.__module__ == logits_process.__name__ and kind not in _STATEFUL:
                processor = _Stateless(processor)
            elif callable(processor) and len(inspect.signature(processor).parameters) > 2:
                # It takes more than input_ids and scores: the list says what, as in transformers.
                processor = logits_process.LogitsProcessorList([processor])
            called.append(processor)
        return penalty, called

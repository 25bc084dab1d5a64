"""From what a user asks to a Request: everything that can be refused is refused here, by name.

Knows the model's limits; nothing has run yet and nothing is queued here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence as Many
from typing import Any

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.errors import refuse
from tinyspec.params import SamplingParams
from tinyspec.patch import vocab_size
from tinyspec.request import Request
from tinyspec.text import as_prompts, to_token_ids


class Intake:
    """Checks prompts and parameters against one model and one pool, and numbers the requests."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, config: EngineConfig):
        self._tokenizer = tokenizer
        self._config = config
        self._vocab_size = vocab_size(model)
        self._model = model
        self._numbers = itertools.count()
        self._seeds = torch.Generator()
        self._seeds.manual_seed(secrets.randbits(63) if config.seed is None else config.seed)

    def requests(self, prompts: Any, params: Any) -> list[Request]:
        """One request per prompt; ``params`` is one for all, or a list of as many.

        Raises ValueError naming field, value and what is allowed; then none was made.
        """
        given = as_prompts(prompts)
        if not given:
            raise refuse("prompts", prompts, "at least one prompt")
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(given)
        elif isinstance(params, Many) and all(isinstance(p, SamplingParams) for p in params):
            each = list(params)
        else:
            raise refuse("params", params, "SamplingParams, or a list of them")
        if len(each) != len(given):
            raise refuse("params", f"{len(each)} SamplingParams", f"one, or {len(given)}")
        ids = [self._token_ids(prompt) for prompt in given]
        for prompt, wanted in zip(ids, each, strict=True):
            self._check(prompt, wanted)
        return [self._request(p, wanted) for p, wanted in zip(ids, each, strict=True)]

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        number = next(self._numbers)
        own = _default_eos(self._model, self._vocab_size)
        resolved = params.resolve(
            eos_token_id=own if params.eos_token_id is None else params.eos_token_id,
            seed=self._draw_seed()
            if params.temperature > 0 and params.seed is None
            else params.seed,
        )
        return Request(f"request-{number}", prompt, resolved, number)

    def _draw_seed(self) -> int:
        return int(torch.randint(2**62, (1,), generator=self._seeds, device="cpu"))

    def _token_ids(self, prompt: Any) -> list[int]:
        ids = to_token_ids(prompt, self._tokenizer)
        if not ids:
            raise refuse("prompt", prompt, "at least one token")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise refuse("prompt", prompt, "token ids, integers")
            if not 0 <= token < self._vocab_size:
                allowed = f"token ids of the vocabulary, 0 to {self._vocab_size - 1}"
                raise refuse("prompt token id", token, allowed)
        return ids

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        config = self._config
        assert config.num_pages and config.page_size and config.max_model_len
        total = len(prompt) + params.max_new_tokens
        if total > config.max_model_len:
            allowed = f"at most {config.max_model_len - len(prompt)} behind {len(prompt)} prompt "
            allowed += f"tokens (max_model_len={config.max_model_len})"
            raise refuse("max_new_tokens", params.max_new_tokens, allowed)
        pages = -(-total // config.page_size)
        if pages > config.num_pages:
            allowed = f"prompt and output need {pages} pages of {config.page_size} tokens, and "
            allowed += f"there are {config.num_pages}"
            raise refuse("max_new_tokens", params.max_new_tokens, allowed)
        for field in ("stop_token_ids", "eos_token_id"):
            for token in getattr(params, field) or ():
                if token >= self._vocab_size:
                    allowed = f"token ids of the vocabulary, 0 to {self._vocab_size - 1}"
                    raise refuse(field, token, allowed)
        if params.top_logprobs > self._vocab_size:
            raise refuse("top_logprobs", params.top_logprobs, f"at most {self._vocab_size}")
        if params.stop_strings and self._tokenizer is None:
            raise refuse("stop_strings", params.stop_strings, "none without a tokenizer")
        for field in ("logits_processors", "stopping_criteria"):
            for function in getattr(params, field):
                if not callable(function):
                    raise refuse(field, function, "functions")


def _default_eos(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """The model's own end-of-sequence tokens, as its ``generate`` would take them now."""
    settings = getattr(model, "generation_config", None) or model.config
    eos = settings.eos_token_id
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(token for token in ids if token < vocab_size)

"""From what a user asks to a Request: everything that can be refused is refused here, by name.

Knows the model's limits; nothing has run yet and nothing is queued here.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from tinyspec.config import EngineConfig
from tinyspec.engine.tokenization import as_prompts, continuation_ids, to_token_ids
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Request


class InputProcessor:
    """Checks prompts and parameters against one model and one pool, and numbers the requests."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: Any, config: EngineConfig, pool: PagePool
    ):
        self._pool = pool
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
        each = self._params(params, len(given))
        ids = [self._token_ids("prompt", to_token_ids(p, self._tokenizer)) for p in given]
        for prompt, wanted in zip(ids, each, strict=True):
            self._check(prompt, wanted)
        return [self._request(p, wanted) for p, wanted in zip(ids, each, strict=True)]

    def scored(self, prompts: Any, continuations: Any, params: Any) -> list[Request]:
        """Requests whose tokens are given: only their log-probabilities are wanted."""
        given, follow = as_prompts(prompts), as_prompts(continuations)
        if len(given) != len(follow):
            raise refuse("continuations", f"{len(follow)} of them", f"one a prompt, {len(given)}")
        texts = [continuation_ids(text, self._tokenizer) for text in follow]
        scripts = [self._token_ids("continuation", ids) for ids in texts]
        each = [
            replace(
                wanted,
                deterministic=True,
                logprobs=True,
                num_return_sequences=1,
                max_new_tokens=len(script),
                min_new_tokens=min(wanted.min_new_tokens, len(script)),
            )
            for wanted, script in zip(self._params(params, len(given)), scripts, strict=True)
        ]
        requests = self.requests(given, each)
        for request, script in zip(requests, scripts, strict=True):
            request.sequences[0].given_tokens = script
            request.sequences[0].teacher_forced = True
        return requests

    def replayed(self, outputs: Many[RequestOutput]) -> list[Request]:
        """Finished requests once more, their tokens as scripts; nothing cached is trusted."""
        params = [replace(output.params, deterministic=True) for output in outputs]
        requests = self.requests([output.prompt_token_ids for output in outputs], params)
        for request, output in zip(requests, outputs, strict=True):
            request.recompute = True
            for sequence, completion in zip(request.sequences, output.completions, strict=True):
                sequence.given_tokens = completion.token_ids
        return requests

    @staticmethod
    def _params(params: Any, count: int) -> list[SamplingParams]:
        """One for each of ``count`` prompts."""
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * count
        elif isinstance(params, Many) and all(isinstance(p, SamplingParams) for p in params):
            each = list(params)
        else:
            raise refuse("params", params, "SamplingParams, or a list of them")
        if len(each) != count:
            raise refuse("params", f"{len(each)} SamplingParams", f"one, or {count}")
        return each

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

    def _token_ids(self, field: str, ids: list[Any]) -> list[int]:
        """``ids``, once they are known to be tokens of the model."""
        if not ids:
            raise refuse(field, ids, "at least one token")
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int):
                raise refuse(field, ids, "token ids, integers")
            if not 0 <= token < self._vocab_size:
                allowed = f"token ids of the vocabulary, 0 to {self._vocab_size - 1}"
                raise refuse(f"{field} token id", token, allowed)
        return ids

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        config, pool = self._config, self._pool
        assert config.max_model_len
        total = len(prompt) + params.max_new_tokens
        if total > config.max_model_len:
            allowed = f"at most {config.max_model_len - len(prompt)} behind {len(prompt)} prompt "
            allowed += f"tokens (max_model_len={config.max_model_len})"
            raise refuse("max_new_tokens", params.max_new_tokens, allowed)
        pages = pool.pages_for(total)
        if pages > pool.num_pages:
            allowed = f"prompt and output need {pages} pages of {pool.page_size} tokens, and "
            allowed += f"there are {pool.num_pages}"
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

"""From prompts and parameters to Requests: all invalid input is refused here, naming the field.

Knows the model's limits; runs and queues nothing.
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
from tinyspec.engine.tokenization import as_prompts, continuation_ids, text_digest, to_token_ids
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Request
from tinyspec.scheduler.thoughts import Thoughts
from tinyspec.thinking.thinker import Thinker


class InputProcessor:
    """Checks prompts and parameters against one model and one pool, and numbers the requests."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        config: EngineConfig,
        pool: PagePool,
        thinker: Thinker | None = None,
    ):
        if isinstance(tokenizer, EngineConfig):
            raise refuse("tokenizer", tokenizer, "a tokenizer or None; did you mean config=?")
        if isinstance(tokenizer, str):
            raise refuse("tokenizer", tokenizer, "a tokenizer or None; AutoTokenizer loads one")
        self._pool, self._thinker = pool, thinker
        self._tokenizer = tokenizer
        self._digests: dict[int, str] = {}
        self._config = config
        self._model = model
        self._numbers = itertools.count()
        self._seeds = torch.Generator()
        self._seeds.manual_seed(secrets.randbits(63) if config.seed is None else config.seed)

    @property
    def _vocab_size(self) -> int:
        """Of the model as it is now."""
        return vocab_size(self._model)

    def requests(self, prompts: Any, params: Any) -> list[Request]:
        """One request per prompt; ``params`` is one for all, or a list of as many.

        Raises ValueError naming field, value and what is allowed; then none was made.
        """
        given = as_prompts(prompts)
        if not given:
            raise refuse("prompts", prompts, "at least one prompt")
        return self.of_ids([to_token_ids(p, self._tokenizer) for p in given], params)

    def of_ids(self, prompts: list[list[int]], params: Any) -> list[Request]:
        """As ``requests``, for the token ids of each prompt."""
        each = self._params(params, len(prompts))
        ids = [self._token_ids("prompt", prompt) for prompt in prompts]
        for prompt, wanted in zip(ids, each, strict=True):
            self._check(prompt, wanted)
        if self._thinker is not None and any(p.thinking and p.deterministic for p in each):
            self._thinker.prove()
        return [self._request(p, wanted) for p, wanted in zip(ids, each, strict=True)]

    def scored(self, prompts: Any, continuations: Any, params: Any) -> list[Request]:
        """Requests for the log-probabilities of given continuations."""
        given, follow = as_prompts(prompts), as_prompts(continuations)
        if len(given) != len(follow):
            raise refuse("continuations", f"{len(follow)} of them", f"one a prompt, {len(given)}")
        texts = [continuation_ids(text, self._tokenizer) for text in follow]
        targets = [self._token_ids("continuation", ids) for ids in texts]
        each = [
            replace(
                wanted,
                deterministic=True,
                logprobs=True,
                num_return_sequences=1,
                max_new_tokens=len(target),
                min_new_tokens=min(wanted.min_new_tokens, len(target)),
            )
            for wanted, target in zip(self._params(params, len(given)), targets, strict=True)
        ]
        requests = self.requests(given, each)
        for request, target in zip(requests, targets, strict=True):
            request.sequences[0].given_tokens = target
            request.sequences[0].teacher_forced = True
        return requests

    def replayed(self, outputs: Many[RequestOutput]) -> list[Request]:
        """Finished requests once more, with their tokens given; no cached page is used."""
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
        number, eos, seed = next(self._numbers), params.eos_token_id, params.seed
        if eos is None:
            eos = _default_eos(self._model, self._vocab_size)
        if seed is None and params.temperature > 0:
            seed = int(torch.randint(2**62, (1,), generator=self._seeds, device="cpu"))
        resolved = params.resolve(eos_token_id=eos, seed=seed)
        request = Request(f"request-{number}", prompt, resolved, number)
        if params.needs_tokenizer:
            request.tokenizer = self.tokenizer_digest()
        if params.thinking:
            assert self._thinker is not None
            size, root = self._thinker.config.chunk_size, self._thinker.root
            window = self._config.thinking_window
            request.thoughts = Thoughts(size, len(prompt), window, root=root)
        return request

    def tokenizer_digest(self) -> str | None:
        """Of the tokenizer with as many tokens as it has now; None where there is none."""
        tokenizer = self._tokenizer
        size = len(tokenizer) if hasattr(tokenizer, "__len__") else 0
        if size not in self._digests and tokenizer is not None:
            self._digests[size] = text_digest(tokenizer, self._vocab_size)
        return self._digests.get(size)

    def _token_ids(self, field: str, ids: list[Any]) -> list[int]:
        """``ids``, checked to be tokens of the model."""
        if not ids:
            raise refuse(field, ids, "at least one token")
        size = self._vocab_size  # asked of the model once, not for every token
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise refuse(f"{field}[{place}]", token, "token ids, integers")
            _check_token(f"{field} token id", token, size)
        return ids

    def _check(self, prompt: list[int], params: SamplingParams) -> None:
        config, pool = self._config, self._pool
        assert config.max_model_len
        limit = config.max_model_len - len(prompt)
        pages = pool.pages_for(len(prompt) + params.max_new_tokens)
        if limit < 1:
            fewer = f"fewer than max_model_len={config.max_model_len}"
            raise refuse("prompt", f"{len(prompt)} tokens", fewer)
        allowed = None
        if params.max_new_tokens > limit:
            allowed = f"at most {limit} after {len(prompt)} prompt tokens"
            allowed += f" (max_model_len={config.max_model_len})"
        elif pages > pool.num_pages:
            allowed = f"prompt and output need {pages} pages of {pool.page_size} tokens, and "
            allowed += f"there are {pool.num_pages}"
        if allowed is not None:
            raise refuse("max_new_tokens", params.max_new_tokens, allowed)
        size = self._vocab_size
        for field in ("stop_token_ids", "eos_token_id"):
            for token in getattr(params, field) or ():
                _check_token(field, token, size)
        if params.top_logprobs > size:
            raise refuse("top_logprobs", params.top_logprobs, f"at most {size}")
        if params.thinking and self._thinker is None:
            allowed = "False with a model without thinking blocks (tinyspec.thinking.model)"
            raise refuse("thinking", True, allowed)
        if params.stop_strings and self._tokenizer is None:
            raise refuse("stop_strings", params.stop_strings, "none without a tokenizer")
        for field in ("logits_processors", "stopping_criteria"):
            for function in getattr(params, field):
                if not callable(function):
                    raise refuse(field, function, "functions")


def _check_token(field: str, token: int, size: int) -> None:
    """size: of the vocabulary."""
    if not 0 <= token < size:
        raise refuse(field, token, f"token ids of the vocabulary, 0 to {size - 1}")


def _default_eos(model: PreTrainedModel, vocab_size: int) -> tuple[int, ...]:
    """The model's end-of-sequence tokens, as its ``generate`` would use now."""
    settings = getattr(model, "generation_config", None) or model.config
    eos = settings.eos_token_id
    ids = () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)
    return tuple(token for token in ids if token < vocab_size)

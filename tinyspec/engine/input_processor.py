"""From prompts and parameters to Requests, and from a name to a model: all invalid input is refused
here, naming the field.

Knows the model's limits; runs and queues nothing.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_files

from tinyspec.config import NAMED, EngineConfig
from tinyspec.determinism.fingerprint_parts import Parts
from tinyspec.drafts.drafter import Drafter
from tinyspec.engine.prompts import as_prompts, continuation_ids, to_token_ids
from tinyspec.errors import refuse, refuse_other_names
from tinyspec.model.supported import checked_device, default_eos, vocab_size
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.scalars import plain
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Request
from tinyspec.scheduler.thoughts import Thoughts
from tinyspec.structured.grammars import Grammars
from tinyspec.thinking.config import FILE as THINKING
from tinyspec.thinking.model import ThinkingModel
from tinyspec.thinking.thinker import Thinker

DTYPES = "auto, float32, bfloat16, float16, or a dtype of torch"
# What of transformers' from_pretrained is handed on: to the tokenizer's too, and in all.
SHARED = {"revision", "trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder"}
LOADING = {"attn_implementation", "quantization_config", "use_safetensors", "variant", "lora"}
LOADING |= SHARED
# One of these files is there where a tokenizer was saved.
TOKENIZERS = [
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "sentencepiece.bpe.model"),
]


@dataclass(eq=False)
class InputProcessor:
    """Checks prompts and parameters against one model and one pool, and numbers the requests.
    drafter: theirs."""

    model: PreTrainedModel
    tokenizer: Any
    config: EngineConfig
    pool: PagePool
    thinker: Thinker | None = None
    drafter: Drafter | PreTrainedModel | None = None

    def __post_init__(self) -> None:
        hints = {EngineConfig: "did you mean config=?", str: "AutoTokenizer loads one"}
        for kind, hint in hints.items():
            if isinstance(self.tokenizer, kind):
                raise refuse("tokenizer", self.tokenizer, f"a tokenizer or None; {hint}")
        self._grammars = Grammars(self.tokenizer, self.config.max_sequences)
        self._numbers = itertools.count()
        self._seeds, seed = torch.Generator(), self.config.seed
        self._seeds.manual_seed(secrets.randbits(63) if seed is None else seed)

    @property
    def _vocab_size(self) -> int:
        """Of the model as it is now."""
        return vocab_size(self.model)

    def requests(self, prompts: Any, params: Any) -> list[Request]:
        """One request per prompt; ``params`` is one for all, or a list of as many.

        Raises ValueError naming field, value and what is allowed; then none was made.
        """
        given = as_prompts(prompts)
        if not given:
            raise refuse("prompts", prompts, "at least one prompt")
        return self.of_ids([to_token_ids(p, self.tokenizer) for p in given], params)

    def of_ids(self, prompts: list[list[int]], params: Any) -> list[Request]:
        """As ``requests``, for the token ids of each prompt."""
        given = self._params(params, len(prompts))
        each = [self._checked(p, wanted) for p, wanted in zip(prompts, given, strict=True)]
        if self.thinker is not None and any(p.thinking and p.deterministic for p in each):
            self.thinker.prove()
        return [self._request(p, wanted) for p, wanted in zip(prompts, each, strict=True)]

    def scored(self, prompts: Any, continuations: Any, params: Any) -> list[Request]:
        """Requests for the log-probabilities of given continuations."""
        given, follow = as_prompts(prompts), as_prompts(continuations)
        if len(given) != len(follow):
            raise refuse("continuations", f"{len(follow)} of them", f"one a prompt, {len(given)}")
        targets = [continuation_ids(text, self.tokenizer) for text in follow]
        for target in targets:
            self._check_ids("continuation", target)
        own: dict[str, Any] = {"deterministic": True, "logprobs": True, "num_return_sequences": 1}
        each = []
        for wanted, target in zip(self._params(params, len(given)), targets, strict=True):
            least = min(wanted.min_new_tokens, len(target))
            each.append(replace(wanted, **own, max_new_tokens=len(target), min_new_tokens=least))
        requests = self.requests(given, each)
        for request, target in zip(requests, targets, strict=True):
            request.sequences[0].given_tokens = target
            request.sequences[0].teacher_forced = True
        return requests

    def replayed(self, outputs: Sequence[RequestOutput]) -> list[Request]:
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
        elif isinstance(params, Sequence) and all(isinstance(p, SamplingParams) for p in params):
            each = list(params)
        else:
            raise refuse("params", params, "SamplingParams, or a list of them")
        if len(each) != count:
            raise refuse("params", f"{len(each)} SamplingParams", f"one, or {count}")
        return each

    def _request(self, prompt: list[int], params: SamplingParams) -> Request:
        number, seed = next(self._numbers), params.seed
        if seed is None and params.temperature > 0:
            seed = int(torch.randint(2**62, (1,), generator=self._seeds, device="cpu"))
        request = Request(f"request-{number}", prompt, params.resolve(seed=seed), number)
        request.drafter = self.drafter
        grammar = self._grammars.of(params)
        for sequence in request.sequences:
            sequence.grammar = grammar and replace(grammar)
        if params.needs_tokenizer:
            request.tokenizer = self.tokenizer_parts(params)
        if params.thinking:
            assert self.thinker is not None
            size, window = self.thinker.config.chunk_size, self.config.thinking_window
            request.thoughts = Thoughts(size, len(prompt), window)
        return request

    def tokenizer_parts(self, params: SamplingParams) -> Parts:
        """Of the fingerprint of a request whose tokens depend on the tokenizer as it is now."""
        return self._grammars.parts(params, self._vocab_size)

    def _check_ids(self, field: str, ids: list[Any]) -> None:
        """Raise ValueError unless they are tokens of the model."""
        if not ids:
            raise refuse(field, ids, "at least one token")
        size = self._vocab_size  # asked of the model once, not for every token
        for place, token in enumerate(ids):
            if isinstance(token, bool) or not isinstance(token, int):
                raise refuse(f"{field}[{place}]", token, "token ids, integers")
            _check_token(f"{field} token id", token, size)

    def _checked(self, prompt: list[int], params: SamplingParams) -> SamplingParams:
        """With the model's end tokens where none are given and, where their number is not, as many
        new tokens as ``max_model_len`` leaves: not as the pool has pages for, which the fingerprint
        does not tell. Raises ValueError."""
        self._check_ids("prompt", prompt)
        config, pool, size = self.config, self.pool, self._vocab_size
        assert config.max_model_len
        limit = config.max_model_len - len(prompt)
        if params.eos_token_id is None:
            params = params.resolve(eos_token_id=default_eos(self.model, size))
        if params.max_new_tokens is None:
            params = replace(params, max_new_tokens=max(1, limit))
        pages = pool.pages_for(len(prompt) + params.most_new_tokens)
        if limit < 1:
            fewer = f"fewer than max_model_len={config.max_model_len}"
            raise refuse("prompt", f"{len(prompt)} tokens", fewer)
        allowed = None
        if params.most_new_tokens > limit:
            allowed = f"at most {limit} after {len(prompt)} prompt tokens"
            allowed += f" (max_model_len={config.max_model_len})"
        elif pages > pool.num_pages:
            allowed = f"prompt and output need {pages} pages of {pool.page_size} tokens, and "
            allowed += f"there are {pool.num_pages} (num_pages, max_model_len)"
        if allowed is not None:
            raise refuse("max_new_tokens", params.max_new_tokens, allowed)
        for field in ("stop_token_ids", "eos_token_id", "logit_bias", "allowed_token_ids"):
            for token in getattr(params, field) or ():
                _check_token(field, token, size)
        for token in itertools.chain(*params.bad_words_ids or ()):
            _check_token("bad_words_ids", token, size)
        if params.top_logprobs > size:
            raise refuse("top_logprobs", params.top_logprobs, f"at most {size}")
        if params.thinking and self.thinker is None:
            allowed = "False with a model without thinking blocks (tinyspec.thinking.model)"
            raise refuse("thinking", True, allowed)
        if params.stop_strings and self.tokenizer is None:
            raise refuse("stop_strings", params.stop_strings, "none without a tokenizer")
        self._grammars.of(params)
        for field, functions in params.functions.items():
            for function in functions:
                if not callable(function):
                    raise refuse(field, function, "functions")
        return params


def checked_priority(priority: Any) -> int:
    """An integer; those of a lower one begin first."""
    own = plain(priority)
    if not isinstance(own, int) or isinstance(own, bool) or own.bit_length() > 63:
        raise refuse("priority", priority, "an integer of 64 bits")
    return own


def _check_token(field: str, token: int, size: int) -> None:
    """size: of the vocabulary."""
    if not 0 <= token < size:
        raise refuse(field, token, f"token ids of the vocabulary, 0 to {size - 1}")


def load(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = "auto",
    device: str | torch.device = "auto",
    **given: Any,
) -> tuple[Any, Any]:
    """Model and tokenizer, from the hub or a folder; None where there are no files of a tokenizer.
    A folder that a ThinkingModel was saved to gives one. given: see ``Engine.from_pretrained``.

    Raises ValueError naming the field, before anything is loaded where that can be known.
    """
    refuse_other_names(given)
    for name in given.keys() - LOADING:
        there = "one of " + ", ".join(sorted(LOADING))
        if name in EngineConfig.__dataclass_fields__:
            there = f"EngineConfig({name}=...) as config"
        raise refuse(name, given[name], there)
    place = checked_device(device)
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise refuse("dtype", dtype, DTYPES)
        dtype = found
    if given.get("quantization_config") is not None:  # quantized as it is loaded, so on the device
        given["device_map"] = {"": place}
    lora = given.pop("lora", None)
    shared: dict[str, Any] = {name: given[name] for name in given.keys() & SHARED}
    try:
        thinks = (Path(name_or_path) / THINKING).is_file()
        kind: Any = ThinkingModel if thinks else AutoModelForCausalLM
        model: Any = kind.from_pretrained(name_or_path, dtype=dtype, **given)
        # Without files transformers makes an empty tokenizer for some types of models.
        asked = shared | {"_raise_exceptions_for_missing_entries": False}
        files = cached_files(name_or_path, TOKENIZERS, **asked)
        tokenizer = AutoTokenizer.from_pretrained(name_or_path, **shared) if files else None
    except (ImportError, OSError, ValueError) as error:
        reason, attention = " ".join(str(error).split()), given.get("attn_implementation")
        named = isinstance(error, ImportError) or "attn_implementation" in reason
        if attention is not None and named:
            allowed = f"one that transformers has here ({reason})"
            raise refuse("attn_implementation", attention, allowed) from error
        allowed = "a folder with a model, or the name of one on the hub"
        raise refuse("model", str(name_or_path), f"{allowed} ({reason})") from error
    if lora is not None:
        try:
            model.load_adapter(str(lora))
        except (AttributeError, ImportError, OSError, ValueError) as error:
            reason = " ".join(str(error).split())
            allowed = f"an adapter that PEFT has saved for this model ({reason})"
            raise refuse("lora", str(lora), allowed) from error
    moves = model.device.type != place.type or place.index not in (None, model.device.index)
    return model.to(place) if moves else model, tokenizer


def loaded(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None,
    device: str | torch.device,
    config: EngineConfig | None,
    drafter: str | Path | None = None,
    **given: Any,
) -> tuple[Any, Any, EngineConfig | None]:
    """As ``load``, and ``config``, with a ``drafter`` where one is given: "ngram", "mtp", or the
    name or folder of a model, which gets the other's dtype and device. Raises ValueError for one
    with other tokens."""
    model, tokenizer = load(name_or_path, dtype, device, **given)
    if drafter is None:
        return model, tokenizer, config
    found: Any = drafter
    if drafter not in NAMED:
        found, own = load(drafter, model.dtype, model.device)
        if own is not None and tokenizer is not None:
            size = vocab_size(model)
            known, wanted = (
                {token: n for token, n in each.get_vocab().items() if n < size}
                for each in (own, tokenizer)
            )
            if known != wanted:
                raise refuse("drafter", str(drafter), "a model with the tokens of the one served")
    return model, tokenizer, replace(config or EngineConfig(), drafter=found)

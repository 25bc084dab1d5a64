"""From prompts and parameters to Requests, and from a name to a model: all invalid input is refused
here, naming the field.

Knows the model's limits; runs and queues nothing.
"""

from __future__ import annotations

import itertools
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils.hub import cached_files

from tinyspec.config import EngineConfig
from tinyspec.determinism.fingerprint_parts import Parts
from tinyspec.engine.grammars import Grammars
from tinyspec.errors import refuse, refuse_other_names
from tinyspec.model.supported import checked_device, default_eos, vocab_size
from tinyspec.outputs import RequestOutput
from tinyspec.sampling_params import SamplingParams
from tinyspec.scalars import is_array, plain, plain_list
from tinyspec.scheduler.page_pool import PagePool
from tinyspec.scheduler.request import Request
from tinyspec.scheduler.thoughts import Thoughts
from tinyspec.thinking.config import FILE as THINKING
from tinyspec.thinking.model import ThinkingModel
from tinyspec.thinking.thinker import Thinker

logger = logging.getLogger("tinyspec")
Prompt = str | list[int] | list[dict[str, Any]]
DTYPES = "auto, float32, bfloat16, float16, or a dtype of torch"
# What of transformers' from_pretrained is handed on: to the tokenizer's too, and in all.
SHARED = {"revision", "trust_remote_code", "token", "cache_dir", "local_files_only", "subfolder"}
LOADING = {"attn_implementation", "device_map", "quantization_config", "torch_dtype", "variant"}
LOADING |= {"use_safetensors"} | SHARED
# Values of device_map that mean one device where there is but one.
SPREADS = {"auto", "balanced", "balanced_low_0", "sequential"}
# One of these files is there where a tokenizer was saved.
TOKENIZERS = [
    *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "spiece.model"),
    *("vocab.json", "vocab.txt", "sentencepiece.bpe.model"),
]


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
        self._grammars = Grammars(tokenizer)
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
        eos, asked = default_eos(self._model, self._vocab_size), self._params(params, len(prompts))
        each = [p.resolve(eos_token_id=eos) if p.eos_token_id is None else p for p in asked]
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
        for sequence in request.sequences:
            sequence.grammar = self._grammars.of(params)
        if params.needs_tokenizer:
            request.tokenizer = self.tokenizer_parts(params)
        if params.thinking:
            assert self._thinker is not None
            size, root = self._thinker.config.chunk_size, self._thinker.root
            window = self._config.thinking_window
            request.thoughts = Thoughts(size, len(prompt), window, root=root)
        return request

    def tokenizer_parts(self, params: SamplingParams) -> Parts:
        """Of the fingerprint of a request whose tokens depend on the tokenizer as it is now."""
        return self._grammars.parts(params, self._vocab_size)

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
        for field in ("stop_token_ids", "eos_token_id", "logit_bias"):
            for token in getattr(params, field) or ():
                _check_token(field, token, size)
        for token in itertools.chain(*params.bad_words_ids or ()):
            _check_token("bad_words_ids", token, size)
        if params.top_logprobs > size:
            raise refuse("top_logprobs", params.top_logprobs, f"at most {size}")
        if params.thinking and self._thinker is None:
            allowed = "False with a model without thinking blocks (tinyspec.thinking.model)"
            raise refuse("thinking", True, allowed)
        if params.stop_strings and self._tokenizer is None:
            raise refuse("stop_strings", params.stop_strings, "none without a tokenizer")
        self._grammars.of(params)
        for field, functions in params.functions.items():
            for function in functions:
                if not callable(function):
                    raise refuse(field, function, "functions")


def _check_token(field: str, token: int, size: int) -> None:
    """size: of the vocabulary."""
    if not 0 <= token < size:
        raise refuse(field, token, f"token ids of the vocabulary, 0 to {size - 1}")


def as_prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts, from one prompt or several: a str, token ids, chat messages, or what a
    tokenizer returned; token ids may be tensors or arrays, one prompt a row."""
    if isinstance(prompts, str):
        return [prompts]
    if (rows := _rows(prompts)) is not None:
        return rows
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise refuse("prompts", prompts, "a str, token ids, chat messages, or a list of these")
    if prompts and (isinstance(plain(prompts[0]), int) or _is_message(prompts[0])):
        return [list(prompts)]
    return list(prompts)


def _is_message(value: Any) -> bool:
    """Whether it is a message of a chat."""
    return isinstance(value, dict) and "input_ids" not in value


def _rows(prompts: Any) -> list[Prompt] | None:
    """Token ids of each prompt of a tensor, an array or what a tokenizer returned, without padding;
    None for anything else."""
    if not isinstance(prompts, Mapping):
        return _lists("prompts", prompts) if is_array(prompts) else None
    if "input_ids" not in prompts:
        raise refuse("prompts", prompts, "input_ids, as a tokenizer returns them")
    rows = _lists("input_ids", prompts["input_ids"])
    if (mask := prompts.get("attention_mask")) is None:
        return rows
    masks = _lists("attention_mask", mask)
    if [len(row) for row in rows] != [len(row) for row in masks]:
        raise refuse("attention_mask", mask, "of the shape of input_ids")
    return [_unpadded(row, own) for row, own in zip(rows, masks, strict=True)]


def _lists(field: str, values: Any) -> list[Any]:
    """A list for each row of ``values``, one row or several."""
    rows = plain_list(values)
    if rows and isinstance(rows[0], Iterable):
        rows = [plain_list(row) for row in rows]
        if not any(row and isinstance(row[0], list) for row in rows):
            return rows
        raise refuse(field, values, "one or two dimensions")
    return [rows]


def _unpadded(row: list[int], mask: list[int]) -> list[int]:
    """The tokens of ``row`` whose ``mask`` is not 0, which are side by side."""
    there = [place for place, kept in enumerate(mask) if kept]
    if there and there[-1] - there[0] != len(there) - 1:
        raise refuse("attention_mask", mask, "0 before and after the prompt alone")
    return [row[place] for place in there]


def to_token_ids(prompt: Any, tokenizer: Any) -> list[int]:
    """Token ids of one prompt. Raises ValueError where that needs a tokenizer and there is none."""
    if (rows := None if isinstance(prompt, str) else _rows(prompt)) is not None:
        if len(rows) != 1:
            raise refuse("prompt", prompt, "one prompt")
        return rows[0]  # type: ignore[return-value]
    if not isinstance(prompt, (str, Sequence)) or isinstance(prompt, bytes):
        raise refuse("prompt", prompt, "a str, token ids, or chat messages")
    if not isinstance(prompt, str) and not (prompt and isinstance(prompt[0], dict)):
        return plain_list(prompt)
    if tokenizer is None:
        raise refuse("prompt", prompt, "token ids, as the engine has no tokenizer")
    if isinstance(prompt, str):
        return _text_ids("prompt", prompt, tokenizer)
    if not getattr(tokenizer, "chat_template", None):
        raise refuse("prompt", prompt, "text or token ids, as the tokenizer has no chat template")
    told = [_with_text(message) for message in prompt]
    chat = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True)
    return _text_ids("prompt", chat, tokenizer, add_special_tokens=False)


def _with_text(message: Any) -> Any:
    """A message of a chat whose content, if it is in parts as OpenAI has them, is their text."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, (list, tuple)):
        return message
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or "text" not in part:
            raise refuse("content", part, '{"type": "text", "text": ...} in a message')
    return {**message, "content": "".join(part["text"] for part in parts)}


def _text_ids(field: str, text: str, tokenizer: Any, **settings: Any) -> list[int]:
    """Token ids of a text; a warning names the words that the tokenizer does not know. Raises
    ValueError where half of a surrogate pair stands alone, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise refuse(f"{field}[{e.start}]", text[e.start], "no lone surrogates in text") from None
    encoded, unknown = tokenizer(text, **settings), getattr(tokenizer, "unk_token_id", None)
    ids = list(encoded["input_ids"])
    if unknown in ids:
        if getattr(encoded, "is_fast", False):
            spans = [encoded.token_to_chars(n) for n, token in enumerate(ids) if token == unknown]
            words = [text[span.start : span.end] for span in spans if span]
        else:
            words = [word for word in text.split() if unknown in tokenizer(word)["input_ids"]]
        known = {"", tokenizer.unk_token}  # it may be the end token as well, written on purpose
        if words := [word for word in dict.fromkeys(words) if word not in known]:
            logger.warning("%s: unknown to the tokenizer (%d): %s", field, len(words), words[:9])
    return ids


def continuation_ids(text: Prompt, tokenizer: Any) -> list[int]:
    """Token ids of a text that continues another, without special tokens."""
    if isinstance(text, str):
        if tokenizer is None:
            raise refuse("continuation", text, "token ids, as the engine has no tokenizer")
        return _text_ids("continuation", text, tokenizer, add_special_tokens=False)
    return to_token_ids(text, None)


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
    place = _one_device(device, given.pop("device_map", None))
    if "torch_dtype" in given and dtype != "auto":
        raise refuse("torch_dtype", given["torch_dtype"], f"left out beside dtype={dtype!r}")
    dtype = given.pop("torch_dtype", dtype)
    if isinstance(dtype, str) and dtype != "auto":
        found = getattr(torch, dtype, None)
        if not isinstance(found, torch.dtype):
            raise refuse("dtype", dtype, DTYPES)
        dtype = found
    if given.get("quantization_config") is not None:  # quantized as it is loaded, so on the device
        given["device_map"] = {"": place}
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
    moves = model.device.type != place.type or place.index not in (None, model.device.index)
    return model.to(place) if moves else model, tokenizer


def _one_device(device: str | torch.device, device_map: Any) -> torch.device:
    """What ``device`` says, or in its place transformers' ``device_map``, where it means one."""
    if device_map is None:
        return checked_device(device)
    if device != "auto":
        raise refuse("device_map", device_map, f"left out beside device={device!r}")
    places = {*device_map.values()} if isinstance(device_map, dict) else {device_map}
    if places <= SPREADS and torch.cuda.device_count() < 2:
        return checked_device("auto")
    if len(places) != 1 or places & SPREADS:
        raise refuse("device_map", device_map, "one device for the whole model, as 'cuda:0'")
    (place,) = places
    return checked_device(f"cuda:{place}" if isinstance(place, int) else place, "device_map")

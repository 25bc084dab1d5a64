"""One call of ``generate``: arguments in, requests' rows and parameters out, and the result.

What tinyspec does not serve is collected by name. Knows transformers' arguments and no engine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import (
    GenerateDecoderOnlyOutput,
    PrefixConstrainedLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)

from tinyspec.drop_in import prompts
from tinyspec.drop_in.prepare import (
    SHARED,
    each_line_once,
    for_row,
    is_listed,
    per_request,
    prepare,
    quiet,
    take_stop_strings,
)
from tinyspec.drop_in.prompts import Prompt, Prompts
from tinyspec.drop_in.settings import Prepared
from tinyspec.drop_in.streamers import Streamers
from tinyspec.engine.drafter import Drafter, NgramDrafter, make_drafter
from tinyspec.errors import refuse
from tinyspec.model.supported import max_positions, vocab_size
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.request import Sequence, noise_key

OURS = ("seed", "deterministic")
INPUTS = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids")
_CALL = ("tokenizer", "assistant_tokenizer", "synced_gpus", "streamer")
_ARGUMENTS = (
    "generation_config",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "assistant_model",
)
_UNSERVED = ("custom_generate", "negative_prompt_ids", "negative_prompt_attention_mask")


class Call:
    """The arguments of one call, taken apart.

    given: by name. original: the model's own ``generate``.
    rows, params: one of each per prompt. unserved: what only transformers' own does; then there is
    nothing else. Raises what ``original`` raises for bad arguments, and ValueError.
    """

    def __init__(self, model: PreTrainedModel, original: Callable[..., Any], given: dict[str, Any]):
        self._model = model
        self._original = original
        # None says something of a setting; elsewhere it is as good as nothing.
        named = (*INPUTS, *_CALL, *_UNSERVED, *OURS, *_ARGUMENTS)
        self._given = given = {
            name: value for name, value in given.items() if value is not None or name not in named
        }
        self._listed = any(is_listed(name, value) for name, value in given.items())
        self._prepared: list[Prepared] = []
        self.params: list[SamplingParams] = []
        self.unserved = list(self._foreign())
        if self.unserved:
            return
        ids = given.get("inputs", given.get("input_ids"))
        self._rows: Prompts | None = None
        if ids is not None or "inputs_embeds" in given:
            mask = given.get("attention_mask")
            self._rows = Prompts.of(ids, mask, given.get("inputs_embeds"))
        self._prepare()
        if not self.unserved:
            self._parameters()

    @property
    def rows(self) -> list[Prompt]:
        assert self._rows is not None
        return self._rows.rows

    @property
    def asks_for_more(self) -> str | None:
        """An argument that transformers does not have, if there is one."""
        for name in OURS:
            value = self._given.get(name)
            if value is not None and value is not False:
                return f"{name}={value!r}"
        return "a value for each request" if self._listed else None

    @property
    def arguments(self) -> dict[str, Any]:
        """For transformers' own ``generate``."""
        return {name: value for name, value in self._given.items() if name not in OURS}

    def _foreign(self) -> Iterator[str]:
        """Arguments that only transformers' own ``generate`` can make something of."""
        given = self._given
        yield from (name for name in _UNSERVED if name in given)
        mask = given.get("attention_mask")
        if getattr(mask, "ndim", 2) > 2 or isinstance(mask, dict):
            yield "an attention_mask of more than two dimensions"
        if (
            "attention_mask" in given
            and not {"inputs", "input_ids", "inputs_embeds"} & given.keys()
        ):
            yield "an attention_mask without input_ids"
        if given.get("cache_implementation") == "paged":
            yield "cache_implementation='paged'"
        if given.get("synced_gpus"):
            yield "synced_gpus=True"
        if "inputs" in given and len({"input_ids", "inputs_embeds"} & given.keys()):
            yield "inputs beside input_ids or inputs_embeds"
        if "input_ids" in given and "inputs_embeds" in given:
            shapes = [tuple(given[name].shape[:2]) for name in ("input_ids", "inputs_embeds")]
            if shapes[0] != shapes[1]:
                yield "input_ids beside inputs_embeds of another length"
        processors = given.get("logits_processor")
        listed = processors if isinstance(processors, (list, tuple)) else ()
        if any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in listed):
            yield "a PrefixConstrainedLogitsProcessor (prefix_allowed_tokens_fn is served)"
        if any(isinstance(p, UnbatchedClassifierFreeGuidanceLogitsProcessor) for p in listed):
            yield "an UnbatchedClassifierFreeGuidanceLogitsProcessor"
        if "assistant_tokenizer" in given:
            yield "assistant_tokenizer"
        assistant = given.get("assistant_model")
        if isinstance(assistant, PreTrainedModel):
            sizes = vocab_size(assistant), vocab_size(self._model)
            if sizes[0] != sizes[1]:
                yield f"an assistant_model of {sizes[0]} tokens, not {sizes[1]}"
        if "position_ids" in given and not self._counts_on():
            yield "position_ids that do not count the tokens"
        settings = self._model.generation_config.to_dict()
        known = {*settings, *INPUTS, *_CALL, *OURS, "kwargs"}
        for name in inspect.signature(self._model.forward).parameters.keys() - known:
            if given.get(name) is not None:
                yield f"{name} (an argument of the model's forward)"

    def _counts_on(self) -> bool:
        """Whether ``position_ids`` are what they would be anyway."""
        places = torch.as_tensor(self._given["position_ids"])
        mask = self._given.get("attention_mask")
        mask = torch.ones_like(places) if mask is None else torch.as_tensor(mask)
        if mask.shape != places.shape:
            return False
        real = mask.to(places.device) != 0
        return bool(((real.long().cumsum(-1) - 1) == places)[real].all())

    def _settings(self, count: int) -> list[dict[str, Any]]:
        """What concerns each request."""
        given = {k: v for k, v in self._given.items() if k not in (*INPUTS, *_CALL)}
        each = per_request(given, count)
        for number, settings in enumerate(each):
            allowed = settings.get("prefix_allowed_tokens_fn")
            if allowed is not None:
                settings["prefix_allowed_tokens_fn"] = for_row(allowed, number)
            take_stop_strings(settings, self._model.generation_config, self._given.get("tokenizer"))
        return each

    def _prepare(self) -> None:
        """Let transformers prepare every request by itself."""
        with each_line_once():
            if self._rows is None:
                first = self._prepare_row(None, self._settings(1)[0])
                self._rows = Prompts.of(first.input_ids[:1], None)
            self._each = self._settings(len(self._rows))
            # Requests of one length and the same settings share processors, as they do there.
            shared: dict[tuple[object, ...], Prepared] = {}
            for number, settings in enumerate(self._each):
                self._prepared.append(self._prepare_number(number, settings, shared))
        for name in SHARED:
            values = [getattr(one.config, name) for one in self._prepared]
            if any(value != values[0] for value in values):
                raise refuse(name, values, "the same for all requests of a call")

    def _prepare_number(
        self,
        number: int,
        settings: dict[str, Any],
        shared: dict[tuple[object, ...], Prepared],
    ) -> Prepared:
        assert self._rows is not None

        # What is one object in two requests is the same setting; numbers are by value.
        plain = (bool, int, float, str)
        asked = [(k, v) for k, v in settings.items() if k not in OURS]
        same = [(k, v if isinstance(v, plain) else id(v)) for k, v in asked]

        def by_length() -> Prepared:
            row = self.rows[number]
            if len(row) == 0:
                raise refuse("input_ids", f"no token in row {number}", "at least one per prompt")
            key = len(row), len(row.ids), *same
            found = shared.get(key)
            if found is None:
                found = self._prepare_row(row, settings)
                if not found.knows_prompt:
                    shared[key] = found
            return found

        prepared = by_length()
        before = len(self.rows[number])
        self._rows.strip(number, prepared.config.pad_token_id, prepared.eos)
        if len(self.rows[number]) < before:
            prepared = by_length()
        if settings.get("prefix_allowed_tokens_fn") and prepared.config.num_return_sequences > 1:
            self.unserved.append("prefix_allowed_tokens_fn with num_return_sequences above 1")
        return prepared

    def _prepare_row(self, row: Prompt | None, settings: dict[str, Any]) -> Prepared:
        plain = {name: value for name, value in settings.items() if name not in OURS}
        with quiet() if self._prepared else nullcontext():
            prepared = prepare(self._original, row, self._model.device, plain)
        self.unserved += prepared.unserved(self._given.get("assistant_model"))
        return prepared

    def _parameters(self) -> None:
        """SamplingParams of every request; seeds from torch's generator where none are given."""
        positions = max_positions(self._model)
        for row, settings, one in zip(self.rows, self._each, self._prepared, strict=True):
            flag, seed = settings.get("deterministic", False), settings.get("seed")
            params = one.params(seed, flag, vocab_size(self._model))
            if len(row) + params.max_new_tokens > positions:
                self.unserved.append(f"a length beyond the model's {positions} positions")
            self.params.append(params)
        unsown = [p.temperature > 0 and p.seed is None for p in self.params]
        if self.unserved or not any(unsown):
            return
        base = int(torch.randint(2**62, (1,)))
        for number, params in enumerate(self.params):
            if unsown[number]:
                seed = noise_key(base, number) & (2**63 - 1)
                self.params[number] = params.resolve(seed=seed)

    @property
    def keeps(self) -> tuple[bool, bool]:
        """Whether scores, and logits, are wanted."""
        config = self._prepared[0].config
        wanted = bool(config.return_dict_in_generate)
        return wanted and bool(config.output_scores), wanted and bool(config.output_logits)

    @property
    def pad(self) -> int:
        """What fills up behind the end of a completion."""
        return next((one.pad for one in self._prepared if one.pad is not None), 0)

    def drafter(self) -> Drafter | None:
        """Who proposes tokens in this call, where it says."""
        assistant = self._given.get("assistant_model")
        if assistant is self._model:
            return None
        if assistant is not None:
            return make_drafter(assistant, self._model, "assistant_model")
        config = self._prepared[0].config
        if config.prompt_lookup_num_tokens is None:
            return None
        longest = config.max_matching_ngram_size or 2
        return NgramDrafter(longest=longest, most=config.prompt_lookup_num_tokens)

    def _prompts(self) -> Tensor:
        """What the returned sequences begin with, a row per completion."""
        assert self._rows is not None
        counts = torch.tensor([params.num_return_sequences for params in self.params])
        prompts = self._rows.prompts(self.pad)
        return prompts.repeat_interleave(counts.to(prompts.device), dim=0)

    def streamers(self) -> Streamers:
        """Who is told of tokens as they come; they have been told of the prompts."""
        pairs = zip(self.rows, self.params, strict=True)
        alone = [row.ids for row, params in pairs for _ in range(params.num_return_sequences)]
        return Streamers(self._given.get("streamer"), self._prompts(), alone)

    def output(self, sequences: list[Sequence]) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` returns for finished ``sequences``."""
        generated = [s.tokens[s.request.num_prompt :] for s in sequences]
        ids = prompts.sequences(self._prompts(), generated, self.pad)
        if not self._prepared[0].config.return_dict_in_generate:
            return ids
        scores, logits = self.keeps
        steps: Any = lambda kept: prompts.steps(kept, self.pad)  # noqa: E731
        return GenerateDecoderOnlyOutput(
            sequences=cast(torch.LongTensor, ids),
            scores=steps([s.scores for s in sequences]) if scores else None,
            logits=steps([s.logits for s in sequences]) if logits else None,
        )

"""One call of ``generate``: from its arguments to prompts and parameters of requests, and back.

Knows transformers' arguments and no engine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import compress
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from tinyspec.drop_in import prepare, served
from tinyspec.drop_in.batch_wide import WideRows, wide_rows
from tinyspec.drop_in.prepare import Generate
from tinyspec.drop_in.prompts import Prompt, Prompts, append, ends_in_pads, mask_of, stack_steps
from tinyspec.drop_in.seeds import Defaults, RowSeeds, check_base
from tinyspec.drop_in.served import ADDED_ARGUMENTS, CALL_ARGUMENTS, PROMPT_ARGUMENTS
from tinyspec.drop_in.settings import PreparedRequest
from tinyspec.drop_in.streamers import Streamers
from tinyspec.engine.drafter import Drafter, NgramDrafter, make_drafter
from tinyspec.errors import refuse
from tinyspec.model.supported import max_positions, vocab_size
from tinyspec.sampling_params import SamplingParams
from tinyspec.scalars import plain
from tinyspec.scheduler.request import Sequence, noise_key

KEPT = ("scores", "logits")
# None unsets a generation setting; of these arguments it means "not given".
_OPTIONAL = {
    *(*PROMPT_ARGUMENTS, *CALL_ARGUMENTS, *ADDED_ARGUMENTS, *served.UNSERVED_ARGUMENTS),
    *("generation_config", "logits_processor", "stopping_criteria"),
    *("prefix_allowed_tokens_fn", "assistant_model"),
}


class Call:
    """The arguments of one call, taken apart.

    arguments: by name. original: the model's own ``generate``. defaults, row_seeds: for what the
    arguments do not say. given: all prompts. prompts, params: one of each per prompt. wide: the
    rows in step, where code of the user's is called for all of them at once. unserved: what only
    ``original`` serves; where there is any, none is set. transformers_arguments: for ``original``.
    Raises what it raises for bad arguments, ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original: Generate,
        arguments: dict[str, Any],
        defaults: Defaults,
        row_seeds: RowSeeds,
    ):
        self._model, self._original = model, original
        self._defaults, self._row_seeds = defaults, row_seeds
        not_given = [n for n, value in arguments.items() if value is None and n in _OPTIONAL]
        by_default = served.default_token_types(model, arguments)
        self._arguments = _without(arguments, (*not_given, *by_default))
        self.transformers_arguments = _without(self._arguments, ADDED_ARGUMENTS)
        self._prepared: list[PreparedRequest] = []
        self._shared: dict[tuple[object, ...], PreparedRequest] = {}
        self.params: list[SamplingParams] = []
        self.wide: WideRows | None = None
        self.unserved = list(served.unserved_arguments(model, self._arguments))
        if ends_in_pads(mask_of(self._arguments, model.generation_config)):
            self.unserved.append("a batch with rows that end in pads (pad on the left instead)")
        if not self.unserved:
            self._prepare()
        if not self.unserved:
            self._set_params()

    @property
    def tinyspec_only(self) -> str | None:
        """What the call asks for that transformers does not have, if there is such a thing."""
        given = self._arguments.get("generation_config")
        for config in given if isinstance(given, (list, tuple)) else (given,):
            settings = {**self._arguments, "generation_config": config}
            for name in ADDED_ARGUMENTS:
                value = self._asked(name, settings)
                if value is not None and value is not False:
                    return f"{name}={value!r}"
                if value is None and name == "deterministic" and self._defaults.deterministic:
                    return "patch(..., deterministic=True)"
        if any(prepare.is_per_request(name, value) for name, value in self._arguments.items()):
            return "a value for each request"
        return None

    def _asked(self, name: str, settings: dict[str, Any]) -> Any:
        """``seed`` or ``deterministic`` as an argument or a config gives it; None: neither does."""
        configs = (settings.get("generation_config"), self._model.generation_config)
        values = (settings.get(name), *(getattr(config, name, None) for config in configs))
        return plain(next((value for value in values if value is not None), None))

    def _prepare(self) -> None:
        """Let transformers prepare every request alone."""
        with prepare.log_lines_once():
            self.given = self._given_prompts()
            self.prompts = self.given.prompts
            self._settings = self._per_request(len(self.prompts))
            for index, settings in enumerate(self._settings):
                prepared = self._prepare_prompt(index, settings)
                if self.given.strip(index, prepared.config.pad_token_id, prepared.eos):
                    prepared = self._prepare_prompt(index, settings)
                self._prepared.append(prepared)
                several = prepared.config.num_return_sequences > 1
                if several and settings.get("prefix_allowed_tokens_fn"):
                    self.unserved.append("prefix_allowed_tokens_fn with num_return_sequences > 1")
        self.config = self._prepared[0].config  # for what is the same in all
        for name in prepare.SHARED_FIELDS:
            values = [getattr(prepared.config, name) for prepared in self._prepared]
            if any(value != values[0] for value in values):
                raise refuse(name, values, "one value for all requests of a call")

    def _given_prompts(self) -> Prompts:
        ids = self._arguments.get("inputs", self._arguments.get("input_ids"))
        embeds = self._arguments.get("inputs_embeds")
        if ids is None and embeds is None:  # transformers begins with the BOS token
            return Prompts(self._prepare_alone(None, self._per_request(1)[0]).input_ids[:1])
        return Prompts(ids, self._arguments.get("attention_mask"), embeds)

    def _per_request(self, count: int) -> list[dict[str, Any]]:
        """The settings of each request."""
        arguments = _without(self._arguments, (*PROMPT_ARGUMENTS, *CALL_ARGUMENTS))
        each = prepare.per_request(arguments, count)
        config, tokenizer = self._model.generation_config, self._arguments.get("tokenizer")
        for index, settings in enumerate(each):
            allowed = settings.get("prefix_allowed_tokens_fn")
            if allowed is not None:  # prepared alone, every prompt has index 0
                settings["prefix_allowed_tokens_fn"] = _at_index(allowed, index)
            prepare.add_stop_strings(settings, config, tokenizer)
        return each

    def _prepare_prompt(self, index: int, settings: dict[str, Any]) -> PreparedRequest:
        """Requests of one length with the same settings share processors, as in transformers."""
        prompt = self.prompts[index]
        if len(prompt) == 0:
            raise refuse(f"input_ids[{index}]", [], "at least one token for each prompt")
        # Objects are compared by identity, numbers and text by value.
        items = _without(settings, ADDED_ARGUMENTS).items()
        values = ((n, v if isinstance(v, (bool, int, float, str)) else id(v)) for n, v in items)
        key = len(prompt), len(prompt.ids), *values
        if key in self._shared:
            return self._shared[key]
        prepared = self._prepare_alone(prompt, settings)
        if not prepared.holds_prompt:
            self._shared[key] = prepared
        return prepared

    def _prepare_alone(self, prompt: Prompt | None, settings: dict[str, Any]) -> PreparedRequest:
        settings = _without(settings, ADDED_ARGUMENTS)
        with warnings.catch_warnings():
            if self._prepared:  # the first request of a call has had the warnings
                warnings.simplefilter("ignore")
            prepared = prepare.prepare(self._original, prompt, self._model.device, settings)
        assistant = self._arguments.get("assistant_model")
        self.unserved += served.unserved_settings(prepared.config, assistant)
        return prepared

    def _set_params(self) -> None:
        """SamplingParams of every request; seeds from torch's generator where none are given."""
        positions, vocabulary = max_positions(self._model), vocab_size(self._model)
        seeds = self._seeds()
        each = zip(self.prompts, self._settings, self._prepared, seeds, strict=True)
        for prompt, settings, prepared, seed in each:
            deterministic = self._asked("deterministic", settings)
            if deterministic is None:
                deterministic = self._defaults.deterministic
            params = prepared.params(seed, deterministic, vocabulary)
            if len(prompt) + params.max_new_tokens > positions:
                self.unserved.append(f"a length beyond the model's {positions} positions")
            self.params.append(params)
        if any(p.logits_processors or p.stopping_criteria for p in self.params):
            padded, spare = self._padded_prompts(), self.given.width - max(map(len, self.prompts))
            given = (self._arguments, self._prepared, self.params, padded.tolist(), spare)
            self.wide = wide_rows(*given)
        needs_seed = [p.temperature > 0 and p.seed is None for p in self.params]
        if self.unserved or not any(needs_seed):
            return
        base = int(torch.randint(2**62, (1,)))
        for index, params in enumerate(self.params):
            if needs_seed[index]:
                seed = noise_key(base, index) & (2**63 - 1)
                self.params[index] = params.resolve(seed=seed)

    def _seeds(self) -> list[int | None]:
        """Of each request: as an argument gives it, or from the base of a config or of ``patch``.
        None: neither."""
        given = [settings.get("seed") for settings in self._settings]
        bases: list[int | None] = []
        for settings, seed in zip(self._settings, given, strict=True):
            base = self._asked("seed", settings) if seed is None else None
            bases.append(self._defaults.seed if base is None and seed is None else base)
            if base is not None:
                check_base(base)
        if all(base is None for base in bases):
            return given
        mixed = self._row_seeds.of(bases, (prompt.key for prompt in self.prompts))
        return [m if seed is None else seed for seed, m in zip(given, mixed, strict=True)]

    @cached_property
    def keeps(self) -> frozenset[str]:
        """Which of ``KEPT`` are part of the result."""
        config = self.config
        if not config.return_dict_in_generate:
            return frozenset()
        return frozenset(compress(KEPT, (config.output_scores, config.output_logits)))

    @property
    def seeds(self) -> list[int | None]:
        """The seed of every row of the result; with the row's number among the completions of its
        prompt it gives the row's noise."""
        return [p.seed for p in self.params for _ in range(p.num_return_sequences)]

    @property
    def pad(self) -> int:
        """The token that fills up completions after their end."""
        return next((p.pad for p in self._prepared if p.pad is not None), 0)

    def drafter(self) -> Drafter | None:
        """The drafter that the call asks for, if it does."""
        assistant = self._arguments.get("assistant_model")
        if assistant is self._model:
            return None
        if assistant is not None:
            return make_drafter(assistant, self._model, "assistant_model")
        most = self.config.prompt_lookup_num_tokens
        if most is None:
            return None
        return NgramDrafter(longest=self.config.max_matching_ngram_size or 2, most=most)

    def _padded_prompts(self) -> Tensor:
        """What the returned sequences begin with, one row per completion."""
        counts = torch.tensor([params.num_return_sequences for params in self.params])
        prompts = self.given.padded(self.pad)
        return prompts.repeat_interleave(counts.to(prompts.device), dim=0)

    def streamers(self) -> Streamers | None:
        """The streamers of the call, where it has any; they have got the prompts."""
        if (streamer := self._arguments.get("streamer")) is None:
            return None
        pairs = zip(self.prompts, self.params, strict=True)
        prompts = [prompt.ids for prompt, p in pairs for _ in range(p.num_return_sequences)]
        return Streamers(streamer, self._padded_prompts(), prompts)

    def ids(self, sequences: list[Sequence]) -> Tensor:
        """[N, L + T]: the prompts and what was generated."""
        generated = [s.tokens[s.request.num_prompt :] for s in sequences]
        return append(self._padded_prompts(), generated, self.pad)

    def output(self, sequences: list[Sequence]) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` returns for finished ``sequences``."""
        ids = self.ids(sequences)
        if not self.config.return_dict_in_generate:
            return ids
        steps: dict[str, Any] = {}
        if "scores" in self.keeps:
            steps["scores"] = stack_steps([s.scores for s in sequences], self.pad)
        if "logits" in self.keeps:
            steps["logits"] = stack_steps([s.logits for s in sequences], self.pad)
        output = GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids), **steps)
        setattr(output, "seeds", self.seeds)  # noqa: B010 not one of its keys
        return output


def _without(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}


def _at_index(allowed: Callable[..., Any], index: int) -> Callable[[int, Tensor], Any]:
    return lambda _, ids: allowed(index, ids)

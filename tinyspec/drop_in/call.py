"""One call of ``generate``: from its arguments to prompts and parameters of requests, and back.

Knows transformers' arguments and no engine.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.generation import GenerateDecoderOnlyOutput

from tinyspec.drafts.drafter import Drafter, NgramDrafter, make_drafter
from tinyspec.drop_in import prepare, served
from tinyspec.drop_in.prepare import PreparedRequest
from tinyspec.drop_in.prompts import Prompts, Streamers
from tinyspec.drop_in.served import ADDED_ARGUMENTS, CALL_ARGUMENTS, PROMPT_ARGUMENTS
from tinyspec.errors import refuse
from tinyspec.model.supported import max_positions, vocab_size
from tinyspec.sampling_params import SamplingParams
from tinyspec.scalars import plain
from tinyspec.scheduler.request import Sequence, noise_key

_PADS = "a batch with rows that end in pads (pad on the left instead)"
_MASK = (1 << 63) - 1


class RowSeeds:
    """The rows' seeds of one call after the other, where its arguments name none: from a config, or
    from ``patch``.

    A row's seed is mixed from the base, its prompt, and how many rows with this prompt there were
    since the base changed: in earlier calls and further up in this one. So equal prompts have
    samples of their own, whatever calls they are spread over, and a script that is run again
    repeats them. One number is kept for each distinct prompt, about 100 bytes, until the base
    changes.

    Where torch.distributed has several ranks, rows are counted over all of them, call by call in
    the order of ranks: each rank must make as many calls that sample by a base as the others. They
    wait for each other here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bases: set[int] = set()
        self._counts: Counter[int] = Counter()

    def of(self, bases: list[int | None], prompts: Iterable[int]) -> list[int | None]:
        """Of one call's rows; None where a row has no base. prompts: their digests.

        Raises RuntimeError where other ranks do not call within the process group's timeout.
        """
        with self._lock:
            rank, ranks = _over_ranks(list(zip(bases, prompts, strict=True)))
            distinct = {base for rows in ranks for base, _ in rows} - {None}
            if distinct and distinct != self._bases:
                self._bases, self._counts = distinct, Counter()
            return [[self._next(*row) for row in rows] for rows in ranks][rank]

    def _next(self, base: int | None, prompt: int) -> int | None:
        """The seed of the next row with this base and prompt."""
        if base is None:
            return None
        key = noise_key(base, prompt)
        self._counts[key] += 1
        return noise_key(key, self._counts[key]) & _MASK


def _over_ranks(given: Any) -> tuple[int, list[Any]]:
    """This process's rank, and what all ranks give."""
    started = distributed.is_available() and distributed.is_initialized()
    if not started or (size := distributed.get_world_size()) == 1:
        return 0, [given]
    found = [None] * size
    try:
        distributed.all_gather_object(found, given)
    except RuntimeError as error:
        raise RuntimeError(
            "a base of seeds counts prompts over all ranks: each must sample in as many calls of "
            f"generate as the others, or with an argument seed ({error})"
        ) from error
    return distributed.get_rank(), found


class Call:
    """The arguments of one call, taken apart.

    arguments: by name, without those that say nothing. original: the model's own ``generate``.
    defaults: ``deterministic`` and the base of seeds where the arguments do not say. row_seeds:
    made of such bases. prompts: all, without pads. prepared, params: of each prompt. unserved: what
    only ``original`` serves; where there is any, the others are not complete.
    Raises what ``original`` raises for bad arguments, ValueError.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        original: Callable[..., Any],
        arguments: dict[str, Any],
        defaults: SamplingParams,
        row_seeds: RowSeeds,
    ):
        self._model, self._original = model, original
        self._defaults, self._row_seeds = defaults, row_seeds
        self.arguments = {
            name: value
            for name, value in arguments.items()
            # None unsets a generation setting; elsewhere it means "not given".
            if (value is not None or hasattr(model.generation_config, name))
            and not served.says_nothing(model, name, value)
        }
        self.prepared: list[PreparedRequest] = []
        self.params: list[SamplingParams] = []
        self.unserved = list(served.unserved_arguments(model, self.arguments))
        if self._asked("token_healing", self.arguments):  # of the batch, by its tokenizer
            self.unserved.append("token_healing")
        # A cache is made as transformers prepares, which takes a GPU, libraries or memory.
        name = "cache_implementation"
        cache = self.arguments.get(name, self._asked(name, self.arguments))
        if cache not in (None, "hybrid", *served.SERVED_VALUES[name]):  # it unsets "hybrid"
            self.unserved.append(f"{name}={cache!r}")
        if not self.unserved:
            self._prepare()
        if not self.unserved:
            self._set_params()
        elif defaults.seed is not None and self._asked("do_sample", self.arguments):
            row_seeds.of([], [])  # other ranks, where it is served, wait

    @property
    def tinyspec_only(self) -> str | None:
        """What the call asks for that transformers does not have, if there is such a thing."""
        for name in ADDED_ARGUMENTS:
            value = self._asked(name, self.arguments)
            if value is not None and value is not False:
                return f"{name}={value!r}"
        if any(prepare.is_per_request(name, value) for name, value in self.arguments.items()):
            return "a value for each request"
        return None

    def _asked(self, name: str, settings: dict[str, Any]) -> Any:
        """``seed`` or ``deterministic`` as an argument or a config gives it, the latter also as
        ``patch`` does; None: neither."""
        configs = (settings.get("generation_config"), self._model.generation_config)
        values = (settings.get(name), *(getattr(config, name, None) for config in configs))
        default = self._defaults.deterministic if name == "deterministic" else None
        return plain(next((value for value in values if value is not None), default))

    def _prepare(self) -> None:
        """Let transformers prepare every request alone, those that are alike once."""
        ids = self.arguments.get("inputs", self.arguments.get("input_ids"))
        mask, embeds = self.arguments.get("attention_mask"), self.arguments.get("inputs_embeds")
        self.prompts = Prompts(ids, mask, embeds)
        if self.prompts.ends_in_pads:
            self.unserved.append(_PADS)
            return
        self._settings = self._settings_of(len(self.prompts.each))
        shared: dict[tuple[object, ...], PreparedRequest] = {}
        for index, settings in enumerate(self._settings):
            prepared = self._prepare_prompt(index, settings, shared)
            if self.prompts.strip(index, prepared.config.pad_token_id, prepared.eos):
                prepared = self._prepare_prompt(index, settings, shared)
            self.prepared.append(prepared)
            several = prepared.config.num_return_sequences > 1
            if several and settings.get("prefix_allowed_tokens_fn"):
                self.unserved.append("prefix_allowed_tokens_fn with num_return_sequences > 1")
        if self.prompts.ends_in_pads:
            self.unserved.append(_PADS)
        self.config = self.prepared[0].config  # for what is the same in all
        for name in prepare.SHARED_FIELDS:
            values = [getattr(prepared.config, name) for prepared in self.prepared]
            if any(value != values[0] for value in values):
                raise refuse(name, values, "one value for all requests of a call")

    def _settings_of(self, count: int) -> list[dict[str, Any]]:
        """The settings of each of ``count`` requests."""
        arguments = _without(self.arguments, (*PROMPT_ARGUMENTS, *CALL_ARGUMENTS))
        each = prepare.per_request(arguments, count)
        config, tokenizer = self._model.generation_config, self.arguments.get("tokenizer")
        for index, settings in enumerate(each):
            allowed = settings.get("prefix_allowed_tokens_fn")
            if allowed is not None:  # prepared alone, every prompt has index 0
                at_index = partial(lambda f, n, _, ids: f(n, ids), allowed, index)
                settings["prefix_allowed_tokens_fn"] = at_index
            prepare.add_stop_strings(settings, config, tokenizer)
        return each

    def _prepare_prompt(
        self, index: int, settings: dict[str, Any], shared: dict[tuple[object, ...], Any]
    ) -> PreparedRequest:
        """Requests of one length with the same settings share processors, as in transformers; of
        any length where no processor is called."""
        prompt = self.prompts.each[index]
        if len(prompt) == 0:
            raise refuse(f"input_ids[{index}]", [], "at least one token for each prompt")
        # Objects are compared by identity, numbers and text by value.
        items = _without(settings, ADDED_ARGUMENTS).items()
        values = ((n, v if isinstance(v, (bool, int, float, str)) else id(v)) for n, v in items)
        alike = tuple(values)
        key = len(prompt), *alike
        prepared: PreparedRequest | None = shared.get(alike) or shared.get(key)
        if prepared is None:
            given = self._original, prompt, self._model.device, _without(settings, ADDED_ARGUMENTS)
            prepared = prepare.prepare(*given, silent=bool(shared))
            assistant = self.arguments.get("assistant_model")
            self.unserved += served.unserved_settings(prepared.config, assistant)
            if prepared.fits_any_length:
                shared[alike] = prepared
            elif not any(isinstance(p, prepare.OF_PROMPT) for p in prepared.processors):
                shared[key] = prepared
        return prepared

    def _set_params(self) -> None:
        """SamplingParams of every request, but for seeds that nobody gives."""
        positions, vocabulary = max_positions(self._model), vocab_size(self._model)
        each = zip(self.prompts.each, self._settings, self.prepared, self._seeds(), strict=True)
        made: dict[tuple[object, ...], SamplingParams] = {}
        for prompt, settings, prepared, seed in each:
            deterministic = self._asked("deterministic", settings)
            key = id(prepared), seed, deterministic
            if (params := made.get(key)) is None:
                params = made[key] = prepared.params(seed, deterministic, vocabulary)
            if len(prompt) + params.most_new_tokens > positions:
                self.unserved.append(f"a length beyond the model's {positions} positions")
            self.params.append(params)

    def draw_seeds(self) -> None:
        """Seeds from torch's generator for what samples and was given none."""
        left = [n for n, one in enumerate(self.params) if one.temperature > 0 and one.seed is None]
        base = int(torch.randint(2**62, (1,))) if left else 0
        for index in left:
            self.params[index] = self.params[index].resolve(seed=noise_key(base, index) & _MASK)

    def _seeds(self) -> list[int | None]:
        """Of each request: as an argument gives it, or where it samples from the base of a config
        or of ``patch``. None: neither."""
        given = [settings.get("seed") for settings in self._settings]
        bases: list[int | None] = []
        for settings, prepared, seed in zip(self._settings, self.prepared, given, strict=True):
            base = self._asked("seed", settings) if seed is None else None
            base = self._defaults.seed if base is None and seed is None else base
            if base is not None:
                SamplingParams(seed=base)  # raises
            bases.append(base if prepared.config.do_sample else None)
        if all(base is None for base in bases):
            return given
        mixed = self._row_seeds.of(bases, (prompt.digest for prompt in self.prompts.each))
        return [m if seed is None else seed for seed, m in zip(given, mixed, strict=True)]

    @property
    def keeps(self) -> frozenset[str]:
        """What of every step is part of the result."""
        config = self.config
        wanted = {"scores": config.output_scores, "logits": config.output_logits}
        return frozenset(n for n, on in wanted.items() if on and config.return_dict_in_generate)

    @property
    def seeds(self) -> list[int | None]:
        """The seed of every row of the result; with the row's number among the completions of its
        prompt it gives the row's noise."""
        return [p.seed for p in self.params for _ in range(p.num_return_sequences)]

    @property
    def pad(self) -> int:
        """The token that fills up completions after their end."""
        return next((p.pad for p in self.prepared if p.pad is not None), 0)

    def drafter(self) -> Drafter | PreTrainedModel | None:
        """The drafter that the call asks for, if it does."""
        assistant = self.arguments.get("assistant_model")
        if assistant is self._model:
            return None
        if assistant is not None:
            return make_drafter(assistant, self._model, "assistant_model")
        most = self.config.prompt_lookup_num_tokens
        if most is None:
            return None
        return NgramDrafter(longest=self.config.max_matching_ngram_size or 2, most=most)

    def padded(self) -> Tensor:
        """What the returned sequences begin with, one row per completion."""
        counts = torch.tensor([params.num_return_sequences for params in self.params])
        prompts = self.prompts.padded(self.pad)
        return prompts.repeat_interleave(counts.to(prompts.device), dim=0)

    def streamers(self) -> Streamers | None:
        """The streamers of the call, where it has any; they have got the prompts."""
        if (streamer := self.arguments.get("streamer")) is None:
            return None
        pairs = zip(self.prompts.each, self.params, strict=True)
        prompts = [prompt.ids for prompt, p in pairs for _ in range(p.num_return_sequences)]
        return Streamers(streamer, self.padded(), prompts)

    def output(self, sequences: list[Sequence]) -> Tensor | GenerateDecoderOnlyOutput:
        """What ``generate`` returns for finished ``sequences``: [N, L + T], prompts and what was
        generated, and what is kept of it."""
        generated = [s.tokens[s.request.num_prompt :] for s in sequences]
        longest, prompts = max(map(len, generated)), self.padded()
        filled = [tokens + [self.pad] * (longest - len(tokens)) for tokens in generated]
        new = torch.tensor(filled, dtype=torch.long, device=prompts.device)
        ids = torch.cat([prompts, new.view(len(generated), longest)], dim=1)
        if not self.config.return_dict_in_generate:
            return ids
        steps: dict[str, Any] = {}
        for name in self.keeps:
            kept = [getattr(sequence, name) for sequence in sequences]
            # After its end a completion has the pad token with certainty.
            ended = torch.full_like(kept[0][0], -torch.inf)
            ended[self.pad] = 0.0
            steps[name] = tuple(map(torch.stack, zip_longest(*kept, fillvalue=ended)))
        output = GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, ids), **steps)
        setattr(output, "seeds", self.seeds)  # noqa: B010 not one of its keys
        return output


def _without(arguments: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name not in names}

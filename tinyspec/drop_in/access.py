"""What continuous batching uses of a patched model, and its calls, taken apart as ``generate``'s.

Knows arguments, and neither outputs nor threads.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from tinyspec.drop_in.call import Call
from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.served import PROMPT_ARGUMENTS
from tinyspec.engine.drafter import Drafter
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.scheduler.request import Request

# The name under which transformers keeps a manager on a model.
KEPT_AS = "_cached_continuous_batching_manager"
USER_CODE = {"logits_processor", "stopping_criteria"}


@dataclass(frozen=True)
class Access:
    """Of a patched model.

    taken_apart: a call of arguments by name, and a base of its seeds. resumed, locked: blocks in
    which the engine is in the model, and in which the model is its own. requests: the engine's, of
    a call. wanted: whether threads wait for the model. drafter: of calls that ask for none.
    """

    model: PreTrainedModel
    taken_apart: Callable[[dict[str, Any], int | None], Call]
    resumed: Callable[[], AbstractContextManager[Engine]]
    locked: Callable[[], AbstractContextManager[None]]
    requests: Callable[[Engine, Call], list[Request]]
    wanted: Callable[[], bool]
    drafter: Drafter

    def call(
        self,
        prompts: list[list[int]],
        generation_config: GenerationConfig | None,
        config: Any,
        settings: dict[str, Any],
    ) -> Call:
        """The call of ``generate`` with the same rows; the user's processors and criteria are
        called for each row alone.

        config: a ContinuousBatchingConfig or None. Raises what ``generate`` raises for settings,
        ValueError for those that it has and this has not, NotImplementedError for those that only
        transformers' own ``generate`` serves.
        """
        arguments = {k: v for k, v in settings.items() if v is not None}
        if arguments.get("cache_implementation") == "paged":  # what led here from ``generate``
            for name in ("cache_implementation", "inputs", "input_ids"):
                arguments.pop(name, None)
        for name in {"streamer", *PROMPT_ARGUMENTS} & arguments.keys() - {"attention_mask"}:
            raise refuse(
                name,
                arguments[name],
                "prompts are lists of token ids, and streaming=True of add_request streams",
            )
        if isinstance(generation_config, GenerationConfig):
            generation_config = _merged(generation_config, arguments)
        if generation_config is not None:
            arguments["generation_config"] = generation_config
        arguments["input_ids"] = prompts
        for name in USER_CODE & arguments.keys():  # rows come and go by themselves
            if not is_per_request(name, arguments[name]):
                arguments[name] = [list(arguments[name])] * len(prompts)
        call = self.taken_apart(arguments, getattr(config, "seed", None))
        if call.unserved:
            unserved = ", ".join(dict.fromkeys(call.unserved))
            raise NotImplementedError(
                f"{unserved} is not served by tinyspec's continuous batching; call model.generate"
            )
        if getattr(config, "return_logprobs", False):
            call.params = [params.resolve(logprobs=True) for params in call.params]
        return call

    def token_lists(self, name: str, inputs: Any) -> list[list[int]]:
        """Prompts as lists of token ids. Raises ValueError naming what is none."""
        if hasattr(inputs, "tolist"):
            inputs = inputs.tolist()
        if isinstance(inputs, str) or not isinstance(inputs, Sequence):
            raise refuse(name, inputs, "a list of lists of token ids")
        size = vocab_size(self.model)
        return [_token_ids(f"{name}[{n}]", ids, size) for n, ids in enumerate(inputs)]

    def token_ids(self, name: str, ids: Any) -> list[int]:
        """One prompt. Raises ValueError as ``token_lists``."""
        return _token_ids(name, ids, vocab_size(self.model))


def _merged(given: GenerationConfig, arguments: dict[str, Any]) -> GenerationConfig:
    """``given`` with what transformers' continuous batching takes beside a config; from
    ``arguments``, where ``generate`` takes it with a warning, it is taken out."""
    config = copy.deepcopy(given)
    if config.cache_implementation == "paged":
        config.cache_implementation = None
    for name in ("max_new_tokens", "eos_token_id"):
        if name in arguments and not is_per_request(name, arguments[name]):
            setattr(config, name, arguments.pop(name))
    return config


def _token_ids(name: str, ids: Any, size: int) -> list[int]:
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) == 0:
        raise refuse(name, given, "a list of token ids, at least one")
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise refuse(name, token, f"token ids of the vocabulary, 0 to {size - 1}")
    return list(given)

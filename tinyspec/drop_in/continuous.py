"""``generate_batch`` of a patched model: lists of token ids in, transformers' ``GenerationOutput``
out, with the requests that ``generate`` makes of the same rows.

Knows arguments and outputs; not when calls run. Managers of continuous batching are transformers'
own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import transformers
from tqdm import tqdm
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.drop_in.call import Call
from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.requests import raise_failed
from tinyspec.drop_in.served import PROMPT_ARGUMENTS
from tinyspec.engine.drafter import Drafter
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.model.supported import vocab_size
from tinyspec.scheduler.request import Request

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput

_USER_CODE = {"logits_processor", "stopping_criteria"}


def arguments_of(
    model: PreTrainedModel,
    inputs: Any,
    generation_config: GenerationConfig | None,
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Those of ``generate`` for the same rows; the user's processors and criteria are called for
    each row alone. Raises ValueError for prompts that are none, and settings that this has not."""
    prompts = _token_lists(inputs, vocab_size(model))
    arguments = {k: v for k, v in settings.items() if v is not None}
    if arguments.get("cache_implementation") == "paged":  # what led here from ``generate``
        for name in ("cache_implementation", "inputs", "input_ids"):
            arguments.pop(name, None)
    for name in {"streamer", *PROMPT_ARGUMENTS} & arguments.keys() - {"attention_mask"}:
        raise refuse(name, arguments[name], "left out: inputs are lists of token ids")
    if isinstance(generation_config, GenerationConfig):
        generation_config = _merged(generation_config, arguments)
    if generation_config is not None:
        arguments["generation_config"] = generation_config
    arguments["input_ids"] = prompts
    for name in _USER_CODE & arguments.keys():
        if not is_per_request(name, arguments[name]):
            arguments[name] = [list(arguments[name])] * len(prompts)
    return arguments


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


def _token_lists(inputs: Any, size: int) -> list[list[int]]:
    inputs = inputs.tolist() if hasattr(inputs, "tolist") else inputs
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        raise refuse("inputs", inputs, "a list of lists of token ids")
    return [_token_ids(f"inputs[{n}]", ids, size) for n, ids in enumerate(inputs)]


def _token_ids(name: str, ids: Any, size: int) -> list[int]:
    given = ids.tolist() if hasattr(ids, "tolist") else ids
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) == 0:
        raise refuse(name, given, "a list of token ids, at least one")
    for token in given:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < size:
            raise refuse(name, token, f"token ids of the vocabulary, 0 to {size - 1}")
    return list(given)


def refuse_unserved(call: Call) -> None:
    """Raise NotImplementedError naming what only transformers' own ``generate`` serves."""
    if call.unserved:
        unserved = ", ".join(dict.fromkeys(call.unserved))
        raise NotImplementedError(
            f"{unserved} is not served by tinyspec's generate_batch; call model.generate"
        )


def run(
    engine: Engine,
    requests: list[Request],
    call: Call,
    drafter: Drafter,
    record_timestamps: bool,
    progress_bar: bool,
) -> dict[str, GenerationOutput]:
    """Outputs by id. Of each prompt the first completions are children of the last, which has its
    id, as transformers orders them. Raises what a processor or a criterion raised."""
    new_output, finished = _types()
    begun = time.perf_counter()
    sequences = [sequence for request in requests for sequence in request.sequences]
    stamps: dict[tuple[str, int], list[float]] = {
        (s.request.request_id, s.index): [] for s in sequences
    }
    ended: dict[tuple[str, int], float] = {}
    bar = tqdm(total=len(sequences), unit="request", disable=not progress_bar)
    with bar, engine.follow(requests, drafter) as events:
        for event in events:
            if event.finish_reason == "abort":
                break
            row, now = (event.request_id, event.index), time.perf_counter()
            stamps[row] += [now] * len(event.token_ids)
            if event.finish_reason is not None:
                ended[row] = now
                bar.update()
    raise_failed(sequences)
    outputs: dict[str, GenerationOutput] = {}
    for number, request in enumerate(requests):
        last = len(request.sequences) - 1
        for sequence in request.sequences:
            child = "" if sequence.index == last else f"__child#{sequence.index}"
            row = request.request_id, sequence.index
            output = new_output(
                request_id=f"req_{number}{child}",
                prompt_ids=call.prompts[number].ids,
                generated_tokens=sequence.ids(request.num_prompt, sequence.length),
                logprobs=sequence.logprobs,
                status=finished,
                created_time=begun,
                lifespan=(begun, ended[row]),
                timestamps=stamps[row] if record_timestamps else None,
            )
            setattr(output, "seed", sequence.params.seed)  # noqa: B010 not one of its fields
            outputs[output.request_id] = output
    return outputs


def _types() -> tuple[Any, Any]:
    """The class of outputs, and the status of those that have finished. Raises RuntimeError where
    transformers has them elsewhere."""
    try:
        from transformers.generation.continuous_batching.requests import (
            GenerationOutput,
            RequestStatus,
        )
    except ImportError as error:
        raise RuntimeError(
            f"continuous batching of transformers {transformers.__version__} is not what tinyspec "
            f"knows ({error}); call model.generate"
        ) from error
    return GenerationOutput, RequestStatus.FINISHED

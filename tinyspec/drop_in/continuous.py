"""``generate_batch`` of a patched model: lists of token ids in, transformers' ``GenerationOutput``
out, with the requests that ``generate`` makes of the same rows.

Knows arguments and outputs; not when calls run. Managers of continuous batching are transformers'
own.
"""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING, Any

from tqdm import tqdm
from transformers import GenerationConfig

from tinyspec.drop_in.call import Call
from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.run import new_requests, raise_failed
from tinyspec.engine.drafter import Drafter
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import GenerationOutput


def arguments_of(
    inputs: Any, generation_config: GenerationConfig | None, settings: dict[str, Any]
) -> dict[str, Any]:
    """Those of ``generate`` for the same rows; the user's processors and criteria are called for
    each row alone. Raises ValueError for settings that this has not."""
    arguments = {name: value for name, value in settings.items() if value is not None}
    if arguments.pop("cache_implementation", None) == "paged":  # what led here from ``generate``
        generation_config = copy.deepcopy(generation_config)
        setattr(generation_config, "cache_implementation", None)  # noqa: B010
        arguments.pop("input_ids", None)
    for name in {"streamer", "input_ids"} & arguments.keys():
        raise refuse(name, arguments[name], "left out: inputs are lists of token ids")
    arguments |= {"input_ids": inputs, "generation_config": generation_config}
    for name in {"logits_processor", "stopping_criteria"} & arguments.keys():
        if not is_per_request(name, arguments[name]):
            arguments[name] = [list(arguments[name])] * len(inputs)
    return arguments


def run(
    engine: Engine, call: Call, drafter: Drafter, record_timestamps: bool, progress_bar: bool
) -> dict[str, GenerationOutput]:
    """Outputs by id. Of each prompt the first completions are children of the last, which has its
    id, as transformers orders them. Raises what a processor or a criterion raised."""
    from transformers.generation.continuous_batching import requests as theirs

    begun, requests = time.perf_counter(), new_requests(engine, call)
    sequences = [sequence for request in requests for sequence in request.sequences]
    stamps: dict[tuple[str, int], list[float]] = {
        (s.request.request_id, s.index): [] for s in sequences
    }
    bar = tqdm(total=len(sequences), unit="request", disable=not progress_bar)
    with bar, engine.follow(requests, drafter) as events:
        for event in events:
            if event.finish_reason == "abort":
                break
            now = time.perf_counter()
            stamps[event.request_id, event.index] += [now] * len(event.token_ids)
            bar.update(event.finish_reason is not None)
    raise_failed(sequences)
    outputs: dict[str, GenerationOutput] = {}
    for number, request in enumerate(requests):
        last = len(request.sequences) - 1
        for sequence in request.sequences:
            child = "" if sequence.index == last else f"__child#{sequence.index}"
            times = stamps[request.request_id, sequence.index]
            output = theirs.GenerationOutput(
                request_id=f"req_{number}{child}",
                prompt_ids=call.prompts.each[number].ids,
                generated_tokens=sequence.ids(request.num_prompt, sequence.length),
                logprobs=sequence.logprobs,
                status=theirs.RequestStatus.FINISHED,
                created_time=begun,
                lifespan=(begun, times[-1]),
                timestamps=times if record_timestamps else None,
            )
            setattr(output, "seed", sequence.params.seed)  # noqa: B010 not one of its fields
            outputs[output.request_id] = output
    return outputs

"""A call's requests in an engine: made, run to their end, streamed. Knows no model and no lock."""

from __future__ import annotations

from tinyspec.drop_in.call import Call
from tinyspec.drop_in.streamers import Streamers
from tinyspec.engine.drafter import Drafter
from tinyspec.engine.engine import Engine
from tinyspec.engine.results import EventStream
from tinyspec.scheduler.request import Request, Sequence


def new_requests(engine: Engine, call: Call) -> list[Request]:
    """The engine's requests, with pages reserved for all that may run at once; none where rows in
    step do not all fit."""
    size = engine.config.page_size or 1
    pages = []
    for prompt, params in zip(call.prompts, call.params, strict=True):
        first = -(-(len(prompt) + params.max_new_tokens) // size)
        # Completions share the prompt's full pages, unless each computes them.
        further = first - (len(prompt) // size if call.wide is None else 0)
        pages += [first] + [further] * (params.num_return_sequences - 1)
    most = engine.config.max_sequences
    needed = sum(sorted(pages)[-most:])
    if call.wide is not None:
        needed = sum(pages) + len(pages)  # that admission may ask for one more of each
    with engine.lock("generate"):
        engine.reserve(needed + engine.pool.num_held)  # of calls of other threads
        if call.wide is not None and (len(pages) > most or needed > engine.pool.num_pages):
            call.unserved.append(
                f"user code for all of {len(pages)} rows ({needed} pages) at once, where there are "
                f"max_sequences={most} and {engine.pool.num_pages} pages"
            )
            return []
        ids = [p.ids or [0] * len(p) for p in call.prompts]
        requests = engine.ready().of_ids(ids, call.params)
    for request, prompt in zip(requests, call.prompts, strict=True):
        request.embeds, request.num_hidden = prompt.embeds, len(prompt) - len(prompt.ids)
        request.keeps = call.keeps
    return requests


def run(engine: Engine, requests: list[Request], call: Call, drafter: Drafter) -> None:
    """Run requests to their end. Raises what a processor or a criterion raised."""
    sequences = [sequence for request in requests for sequence in request.sequences]
    streamers = call.streamers()
    if call.wide is not None:
        call.wide.run(engine, requests, streamers, call.pad)
    elif streamers is None:
        engine.run(requests, drafter)
    else:
        _stream(engine.follow(requests, drafter), sequences, streamers, call.pad)
    raise_failed(sequences)
    if streamers is not None:
        streamers.end()


def raise_failed(sequences: list[Sequence]) -> None:
    """Raise what ended one of ``sequences`` early, if anything did."""
    aborted = [(s, n) for n, s in enumerate(sequences) if s.finish_reason == "abort"]
    for failed, n in sorted(aborted, key=lambda pair: pair[0].error is None)[:1]:
        raise failed.cause or RuntimeError(f"completion {n}: {failed.error}")


def _stream(events: EventStream, sequences: list[Sequence], streamers: Streamers, pad: int) -> None:
    """Give streamers what ``sequences`` get, to their end or to the first abort."""
    indices = {(s.request.request_id, s.index): n for n, s in enumerate(sequences)}
    with events:
        for event in events:
            if event.finish_reason == "abort":
                return
            index = indices[event.request_id, event.index]
            streamers.put(index, event.token_ids, event.finish_reason is not None, pad)

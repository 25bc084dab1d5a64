"""Processors and criteria that a call is given for all its rows at once, as transformers calls
them: found among the parameters of the rows, and called once for every step of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import PrefixConstrainedLogitsProcessor

from tinyspec.drop_in.prepare import is_per_request
from tinyspec.drop_in.settings import PreparedRequest
from tinyspec.drop_in.streamers import Streamers
from tinyspec.engine.engine import Engine
from tinyspec.errors import refuse
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.processors import BatchWide, SpecialRow
from tinyspec.runner.sampler import NOT_FINITE, SampleBatch, Sampled, SpecialResult
from tinyspec.sampling_params import SamplingParams
from tinyspec.scheduler.request import Request, Sequence

_HOW = "with processors or criteria for all rows, which may also be a list for each prompt"


@dataclass(eq=False)
class WideRows:
    """B rows of one call that get their tokens in step, each with its own engine request or
    completion. A row that has ended goes on behind its end, as in transformers, until all have.

    prompts [B][W]: ids as the call was given them, pads included. pad: what follows in a row that
    has ended; -1: what it would have. criteria: called with [B, W + t] ids and the scores of every
    step, or None; [B] answers, or one for all. done: the rows that have ended. scores: [B, V] of
    every step, where they are kept.
    """

    prompts: list[list[int]]
    pad: int
    criteria: list[Callable[..., Any]]
    done: list[bool] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def run(
        self, engine: Engine, requests: list[Request], streamers: Streamers | None, pad: int
    ) -> None:
        """Run ``requests``, whose completions are the rows, to their end, or to the first abort.
        Raises what the user's code raised."""
        sequences = [sequence for request in requests for sequence in request.sequences]
        self.done, tracker = [False] * len(sequences), engine.tracker
        for request in requests:
            request.supplied, request.sequences[0].siblings = True, []

        def wait() -> bool:
            return all(s.next_logits is not None or s.finished for s in sequences)

        try:
            tracker.add(requests)
            while not any(sequence.finished for sequence in sequences):
                tracker.run_until(wait)
                with engine.lock("generate"), engine.runner.torch_state():
                    if any(s.next_logits is None for s in sequences):
                        continue  # aborted, or to be computed again
                    self._step(engine, sequences)
                for n, sequence in enumerate(sequences if streamers is not None else ()):
                    assert streamers is not None
                    streamers.put(n, sequence.tokens[-1:], sequence.finished, pad)
        finally:
            tracker.cancel(requests)

    def _step(self, engine: Engine, sequences: list[Sequence]) -> None:
        """One token for every row."""
        with engine.lock.step():
            found = self._sample(engine, sequences)
        for n in np.flatnonzero(found.tokens < 0).tolist():
            result = found.special.get(n, SpecialResult())
            raise result.cause or RuntimeError(f"completion {n}: {result.error or NOT_FINITE}")
        logprobs = None if found.logprobs is None else found.logprobs.tolist()
        engine.core.committer.supply(sequences, found.tokens.tolist(), logprobs)
        for n, sequence in enumerate(sequences):
            engine.core.committer.keep(sequence, found.special[n])
        if "scores" in sequences[0].request.keeps:
            self.scores.append(torch.stack([s.scores[-1] for s in sequences]))
        with engine.lock.step():
            self._note_ends(engine, sequences)
        ended = all(self.done) or any(sequence.remaining == 0 for sequence in sequences)
        reasons = [("stop" if done else "length") if ended else "" for done in self.done]
        engine.tracker.end(sequences, reasons)

    def _sample(self, engine: Engine, sequences: list[Sequence]) -> Sampled:
        """A token for each row, by the logits that it waits with."""
        special = {
            n: SpecialRow(
                sequence.params,
                sequence.num_generated,
                sequence.history if sequence.params.needs_history else [],
                self.pad if self.done[n] else -1,
                "scores" in sequence.request.keeps,
                "logits" in sequence.request.keeps,
                sequence.request.thread,
            )
            for n, sequence in enumerate(sequences)
        }
        each = [sequence.sampling for sequence in sequences]
        batch = SampleBatch(
            np.arange(len(sequences)),
            position=np.array([sequence.length for sequence in sequences]),
            **{name: np.array([one[name] for one in each]) for name in each[0]},
            logprobs=any(s.params.logprobs or s.params.top_logprobs for s in sequences),
            special=special,
            together=self._ids(sequences),
        )
        logits = torch.stack([sequence.next_logits for sequence in sequences])
        sampling = engine.core.sampler.sample(logits, batch)
        logprobs = None if sampling.logprobs is None else sampling.logprobs.cpu().numpy()
        return sampling.on_host(sampling.tokens.cpu().numpy(), logprobs)

    def _ids(self, sequences: list[Sequence]) -> list[list[int]]:
        """[B][W + t]: all tokens so far."""
        return [
            prompt + sequence.ids(sequence.request.num_prompt, sequence.length)
            for prompt, sequence in zip(self.prompts, sequences, strict=True)
        ]

    def _note_ends(self, engine: Engine, sequences: list[Sequence]) -> None:
        """Which rows have ended by their newest tokens, a row by itself and all together."""
        for n, sequence in enumerate(sequences):
            if not self.done[n]:
                (newest,) = sequence.ids(sequence.length - 1, sequence.length)
                by_token = newest in sequence.params.stop_ids
                self.done[n] = by_token or engine.core.committer.stops(sequence)
        if not self.criteria:
            return
        ids = torch.tensor(self._ids(sequences), dtype=torch.int64, device=engine.runner.device)
        scores = tuple(self.scores) or None
        with callers_modes():
            answers = [_answer(criterion(ids, scores), len(ids)) for criterion in self.criteria]
        self.done = [any(answer) for answer in zip(self.done, *answers, strict=True)]


def _answer(given: Any, count: int) -> list[bool]:
    """One answer for each of ``count`` rows."""
    answer = torch.as_tensor(given)
    if answer.shape not in ((), (1,), (count,)):
        raise ValueError(f"it answered with shape {tuple(answer.shape)} for {count} rows")
    return [bool(each) for each in answer.expand(count).tolist()]


def wide_rows(
    arguments: dict[str, Any],
    prepared: list[PreparedRequest],
    params: list[SamplingParams],
    padded: list[list[int]],
    spare: int,
) -> WideRows | None:
    """What all rows of a call share, and ``params`` [B] changed to it; None where each row is by
    itself: one row without pads, or code that is transformers' own, ``stateless``, or a prompt's.

    padded: ids of all completions as the call was given them. spare: pads of the longest prompt.
    Raises ValueError for values that would have to be one for all.
    """
    wide, criteria = _wide(arguments, params), _criteria(arguments, params)
    if not (wide or criteria) or (len(padded) == 1 and not spare):
        return None
    _one_for_all("deterministic", [p.deterministic for p in params])
    most = _most(prepared, params, spare)
    for index, one in enumerate(params):
        places = iter(wide)
        params[index] = one.resolve(
            max_new_tokens=most,
            min_new_tokens=min(one.min_new_tokens, most),
            logits_processors=[
                next(places) if wide and _is_wide(p) else p for p in one.logits_processors
            ],
            stopping_criteria=[c for c in one.stopping_criteria if c not in criteria],
        )
    first = prepared[0]
    pad = first.pad if first.eos and first.pad is not None else -1
    return WideRows(padded, pad, criteria)


def _most(prepared: list[PreparedRequest], params: list[SamplingParams], spare: int) -> int:
    """New tokens of every row: as many as given, or up to a length that counts pads."""
    new, ends = [p.max_new_tokens for p in params], [one.config.max_length for one in prepared]
    by_default = len({*new}) == 1 < len({*ends})  # so many tokens behind each prompt
    if by_default or any(one.config.max_new_tokens is not None for one in prepared):
        _one_for_all("max_new_tokens", new)
        return new[0]
    _one_for_all("max_length", ends)
    return max(min(new) - spare, 1)


def _wide(arguments: dict[str, Any], params: list[SamplingParams]) -> list[BatchWide]:
    """A processor for each of the user's."""
    if is_per_request("logits_processor", arguments.get("logits_processor")):
        return []
    return [BatchWide(p) for p in params[0].logits_processors if _is_wide(p)]


def _is_wide(processor: Any) -> bool:
    own = isinstance(processor, PrefixConstrainedLogitsProcessor)
    return not own and not getattr(processor, "stateless", False)


def _criteria(arguments: dict[str, Any], params: list[SamplingParams]) -> list[Any]:
    if is_per_request("stopping_criteria", arguments.get("stopping_criteria")):
        return []
    return [
        criterion
        for criterion in params[0].stopping_criteria
        if not type(criterion).__module__.startswith("transformers.")
        and not getattr(criterion, "stateless", False)
    ]


def _one_for_all(name: str, values: list[Any]) -> None:
    if any(value != values[0] for value in values):
        raise refuse(name, values, f"one value {_HOW}")

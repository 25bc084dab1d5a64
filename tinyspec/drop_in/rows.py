"""Rows of continuous batching: each becomes one of transformers' ``GenerationOutput``.

Knows sequences and what is told of them, and nothing of threads.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from transformers.generation.continuous_batching.requests import GenerationOutput, RequestStatus

from tinyspec.drop_in.call import Call
from tinyspec.scheduler.request import Request, Sequence


@dataclass(eq=False)
class Row:
    """One completion of one prompt.

    streaming: every token is told, not only the end. cancelled: nothing is told any more. sequence:
    None before it is begun. error: why it ended where no sequence says so.
    """

    request_id: str
    prompt_ids: list[int]
    streaming: bool = False
    record_timestamps: bool = False
    cancelled: bool = False
    sequence: Sequence | None = None
    error: str | None = None
    created_time: float = field(default_factory=time.perf_counter)
    _begun: float = -1
    _ended: float = -1
    _timestamps: list[float] = field(default_factory=list)
    _told: int = 0

    def look(self) -> GenerationOutput | None:
        """Its output, where there is something to tell since the last call."""
        sequence, now = self.sequence, time.perf_counter()
        assert sequence is not None
        if self._begun < 0 and (sequence.running or sequence.finished):
            self._begun = now
        grown = sequence.num_generated - self._told
        self._told += grown
        self._timestamps += [now] * grown
        if self.ended:
            self._ended = now
        return self.output() if self.ended or (self.streaming and grown) else None

    def fail(self, error: str) -> GenerationOutput:
        """Its output where ``error`` ends it."""
        self.error, self._ended = error, time.perf_counter()
        return self.output()

    @property
    def ended(self) -> bool:
        return self.error is not None or (self.sequence is not None and self.sequence.finished)

    @property
    def cause(self) -> Exception | None:
        """What ended it early; None where nothing did."""
        sequence = self.sequence
        if self.status != RequestStatus.FAILED:
            return None
        of_user = None if sequence is None else sequence.cause
        return of_user or RuntimeError(f"{self.request_id}: {self._reason}")

    @property
    def status(self) -> RequestStatus:
        sequence = self.sequence
        if self.error is not None or (sequence and sequence.finish_reason == "abort"):
            return RequestStatus.FAILED
        if sequence is None or not (sequence.running or sequence.finished or self._told):
            return RequestStatus.PENDING
        if sequence.finished:
            return RequestStatus.FINISHED
        return RequestStatus.DECODING if sequence.num_generated else RequestStatus.PREFILLING

    @property
    def _reason(self) -> str | None:
        if self.status != RequestStatus.FAILED:
            return None
        return self.error or (self.sequence and self.sequence.error) or "it was aborted"

    def output(self) -> GenerationOutput:
        """Of what there is now; besides transformers' fields ``seed``, that of its prompt."""
        sequence = self.sequence
        tokens = sequence.ids(sequence.request.num_prompt, sequence.length) if sequence else []
        output = GenerationOutput(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            generated_tokens=tokens,
            logprobs=[] if sequence is None else sequence.logprobs,
            error=self._reason,
            status=self.status,
            created_time=self.created_time,
            lifespan=(self._begun, self._ended),
            timestamps=list(self._timestamps) if self.record_timestamps else None,
        )
        seed = None if sequence is None else sequence.params.seed
        setattr(output, "seed", seed)  # noqa: B010 not one of its fields
        return output


class Batch:
    """The rows of one prepared call: of each prompt as many as it has completions.

    ids: one a prompt. The first completions are its children, the last one has its id, as
    transformers orders them.
    """

    def __init__(
        self,
        call: Call,
        prompts: list[list[int]],
        ids: list[str],
        streaming: bool = False,
        record_timestamps: bool = False,
    ):
        self.call = call
        self.rows: list[Row] = []
        for prompt, name, params in zip(prompts, ids, call.params, strict=True):
            names = [f"{name}__child#{n}" for n in range(params.num_return_sequences - 1)]
            self.rows += [Row(n, prompt, streaming, record_timestamps) for n in (*names, name)]

    def begin(self, requests: list[Request]) -> None:
        """Its rows are the sequences of ``requests``."""
        sequences = [sequence for request in requests for sequence in request.sequences]
        for row, sequence in zip(self.rows, sequences, strict=True):
            row.sequence = sequence

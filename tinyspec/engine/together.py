"""Tokens of rows that advance together: sampled and committed once the logits of all are there,
those that wait without pages included.

Knows one ``LockStep`` at a time, which has the engine to itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.engine.commit import Committer
from tinyspec.model.torch_state import callers_modes
from tinyspec.runner.processors import SpecialRow
from tinyspec.runner.sampler import NOT_FINITE, SampleBatch, Sampled, Sampler, SpecialResult
from tinyspec.scheduler.lock_step import LockStep
from tinyspec.scheduler.sequence_table import Array


@dataclass(eq=False)
class Together:
    """Collects the logits that passes yield, samples all rows of a call, commits their tokens."""

    committer: Committer
    sampler: Sampler

    def take(self, lock: LockStep, rows: Array, places: Array, found: Sampled) -> None:
        """Of ``rows`` of the table the logits that were ``found`` at ``places``; one token for
        every row of the call once all are there."""
        table = self.committer.table
        for row, place in zip(rows.tolist(), places.tolist(), strict=True):
            sequence = table.sequences[row]
            result = found.special.get(place, SpecialResult())
            if result.logits is None:
                self.committer.fail(sequence, NOT_FINITE)
                return
            lock.logits[lock.numbers[sequence]] = result.logits
        if lock.ready:
            logits = torch.stack([lock.logits[n] for n in range(len(lock.sequences))])
            lock.logits.clear()
            with self.committer.admission.at_once(lock.sequences):
                self._commit(lock, *self._sample(lock, logits))

    def _sample(self, lock: LockStep, logits: Tensor) -> tuple[Array, Sampled]:
        """Rows of the table, in the call's order, and a token for each; logits [B, V]."""
        table = self.committer.table
        rows = np.array([sequence.row for sequence in lock.sequences])
        position = table.length[rows]
        special = {
            n: SpecialRow(
                sequence.params,
                sequence.num_generated,
                sequence.history if sequence.params.needs_history else [],
                lock.pad if lock.done[n] else -1,
                "scores" in sequence.request.keeps,
                "logits" in sequence.request.keeps,
                sequence.request.thread,
            )
            for n, sequence in enumerate(lock.sequences)
        }
        wanted = bool(table.places("logprobs_wanted", rows))
        batch = SampleBatch(
            np.arange(len(rows)),
            table.key[rows],
            position,
            table.temperature[rows],
            table.top_k[rows],
            table.top_p[rows],
            table.min_p[rows],
            wanted,
            special,
            lock.ids(),
        )
        sampling = self.sampler.sample(logits, batch)
        logprobs = None if sampling.logprobs is None else sampling.logprobs.cpu().numpy()
        return rows, sampling.on_host(sampling.tokens.cpu().numpy(), logprobs)

    def _commit(self, lock: LockStep, rows: Array, found: Sampled) -> None:
        table, committer = self.committer.table, self.committer
        for n in np.flatnonzero(found.tokens < 0).tolist():
            result = found.special.get(n, SpecialResult())
            committer.fail(lock.sequences[n], result.error or NOT_FINITE, result.cause)
        if (found.tokens < 0).any():
            return
        starts, ones, tokens = table.length[rows], np.ones(len(rows), np.int64), found.tokens
        table.commit(rows, ones, tokens[:, None])
        if found.logprobs is not None:
            table.write_logprobs(rows, starts, ones, found.logprobs[:, None])
        for n, sequence in enumerate(lock.sequences):
            committer.keep(sequence, found.special[n])
        if "scores" in lock.sequences[0].request.keeps:
            lock.scores.append(torch.stack([s.scores[-1] for s in lock.sequences]))
        try:
            self._note_ends(lock, table.stops_at(rows, tokens))
        except Exception as error:
            why = f"a stopping criterion raised {type(error).__name__}: {error}"
            committer.fail(lock.sequences[0], why, error)
            return
        at_most = table.length[rows] >= table.most[rows]
        if ended := all(lock.done) or bool(at_most.any()):
            for sequence, done in zip(lock.sequences, lock.done, strict=True):
                sequence.finish_reason = "stop" if done else "length"
        committer.finish(rows, ones, tokens[:, None], np.full(len(rows), ended))

    def _note_ends(self, lock: LockStep, by_token: Array) -> None:
        """Which rows have ended by their newest tokens, a row by itself and all together."""
        committer = self.committer
        for n, sequence in enumerate(lock.sequences):
            if not lock.done[n]:
                lock.done[n] = bool(by_token[n]) or committer.stops(sequence)
        if not lock.criteria:
            return
        ids = torch.tensor(lock.ids(), dtype=torch.int64, device=committer.runner.device)
        scores = tuple(lock.scores) or None
        with callers_modes(lock.sequences[0].request.thread):
            answers = [_answer(criterion(ids, scores), len(ids)) for criterion in lock.criteria]
        lock.done = [any(answer) for answer in zip(lock.done, *answers, strict=True)]


def _answer(given: Any, count: int) -> list[bool]:
    """One answer for each of ``count`` rows."""
    answer = torch.as_tensor(given)
    if answer.shape not in ((), (1,), (count,)):
        raise ValueError(f"it answered with shape {tuple(answer.shape)} for {count} rows")
    return [bool(each) for each in answer.expand(count).tolist()]

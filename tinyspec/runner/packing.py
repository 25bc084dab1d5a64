"""A pass as the device is told of it: its rows, what is sampled from them, and what decides on
drafts. What runs there reads nothing of the host that may change meanwhile. Knows no user.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.kernels.backend import Kernels
from tinyspec.runner.device_queue import to_device
from tinyspec.runner.model_runner import ModelRunner
from tinyspec.runner.sampler import NUMBERS, SampleBatch
from tinyspec.scheduler.admission import Admission
from tinyspec.scheduler.passes import DRAFT
from tinyspec.scheduler.sequence_table import Array
from tinyspec.scheduler.step import Step, spread


def pack(step: Step, before: Step | None, admission: Admission, runner: ModelRunner) -> Step:
    """Fill in what the device is told of ``step``; what goes wrong here is its ``error``.

    before: a pass whose results are not in, as if it were committed (``Step.ahead``).
    """
    table, rows = step.table, step.rows
    step.begin_record(len(admission.waiting), admission.pool.num_held)
    step.verifies = (step.yields > 0) & (table.num_drafts[rows] > 0) & (step.kinds != DRAFT)
    if (checkpoints := admission.checkpoints).on:
        admission.prefix.keep_states(step)
        checkpoints.move(step)
    try:
        if admission.copies:
            runner.cache.copy_pages(admission.copies)
        step.before, step.samples = before, samples(step)
        _draw_up(step, before, runner)
    except Exception as error:
        step.error = error
    return step


def _draw_up(step: Step, before: Step | None, runner: ModelRunner) -> None:
    step.unscored = _unscored(step)
    firsts, yields = step.firsts, step.yields
    wanted = firsts if step.single else spread(step.cu_rows - yields, yields)
    if step.unscored:  # these rows come first
        begins = step.cu_rows - step.ends  # rows of position 0
        wanted = np.concatenate([[begins[n] + p for n, p, _ in step.unscored], wanted])
        step.targets = to_device(np.array([token for *_, token in step.unscored]), runner.device)
    newest = None
    if before is not None:
        sources = before.sources(step.rows)
        drawn = step.ends == step.table.length[step.rows] + step.table.num_drafts[step.rows]
        some = np.flatnonzero((sources >= 0) & drawn)
        newest = np.stack([step.cu_rows[some] - 1, sources[some]])
    if np.count_nonzero(step.verifies):
        step.compared = _compared(step, before, runner.device)
    runner.memory.pack(step, wanted, newest)


def samples(step: Step) -> SampleBatch:
    """What the sampler needs to know of every token."""
    table, row, position, logits_row = step.table, step.rows, step.ends, step.firsts
    if not step.single:
        row, logits_row = row.repeat(step.yields), np.arange(step.num_tokens)
        position = spread(position - step.yields + 1, step.yields)
    numbers = {name: getattr(table, name)[row] for name in NUMBERS}
    owners = {n: table.sequences[row[n]] for n in table.places("special_sampling", row)}
    wanted = bool(table.places("logprobs_wanted", row))
    return SampleBatch.of(numbers, logits_row, position, owners, wanted)


def _unscored(step: Step) -> list[tuple[int, int, int]]:
    """As in ``Step``."""
    found: list[tuple[int, int, int]] = []
    for n in step.table.places("scores_prompt", step.rows):
        request = step.table.sequences[step.rows[n]].request
        known, prompt = request.prompt_logprobs, request.prompt
        positions = range(int(step.starts[n]), min(int(step.ends[n]), len(prompt) - 1))
        found += [(n, p, prompt[p + 1]) for p in positions if known[p + 1] is None]
    return found


def _compared(step: Step, before: Step | None, device: torch.device) -> dict[str, Any]:
    """What ``decisions`` reads, for the S sequences that have drafts to verify. before: whose
    tokens are the newest drafts of some, which have no ids yet."""
    table, which = step.table, step.verifies
    rows, firsts, counts = step.rows[which], step.firsts[which], step.yields[which]
    unknown = np.full(len(rows), -1) if before is None else before.sources(rows)
    drafts, lengths = table.num_drafts[rows], table.length[rows]
    place = np.arange(max(int(counts.max()), int(drafts.max())))
    columns = np.minimum(lengths[:, None] + place, table.ids.shape[1] - 1)
    guesses = table.ids[rows[:, None], columns]
    guesses[place >= drafts[:, None]] = -1
    some = np.flatnonzero(unknown >= 0)
    numbers = drafts, lengths - 1, table.most[rows] - lengths, table.num_pages[rows]
    arrays: dict[str, Array] = {
        "guesses": guesses,
        "places": firsts[:, None] + np.minimum(place, counts[:, None] - 1),
        "excess": place >= counts[:, None],
        "stops": table.stops[rows],
        "numbers": np.stack(numbers).astype(np.int32),
    }
    if len(some):
        arrays["last"] = np.stack([some, drafts[some] - 1, unknown[some]])
    return {name: to_device(array, device) for name, array in arrays.items()}


def decisions(
    step: Step, kernels: Kernels, page_size: int, tokens: Tensor, before: Tensor | None
) -> Tensor:
    """Decisions [5, S] int32 on the sampled ``tokens``; before: those of the pass before. A
    sequence is verified up to its first row without a token; where that is its first row, its
    decision means nothing."""
    given = step.compared
    targets = tokens[given["places"]].masked_fill_(given["excess"], -1)
    good = (targets >= 0).long().cumprod(1).sum(1).clamp_(min=1).int()
    if "last" in given:
        assert before is not None
        sequence, place, source = given["last"]
        given["guesses"][sequence, place] = before[source]
    drafts, starts, remaining, pages = given["numbers"].unbind()
    held = (drafts, starts, remaining, given["stops"], pages)
    found = kernels.accept_truncate(given["guesses"], targets, good, *held, page_size)
    return torch.stack(found)

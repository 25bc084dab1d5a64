"""The columns of the sequence table: what they mean, and the kind of each. Host only."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def column(name: str) -> Any:
    """A property of a sequence that its row of the table keeps: 0 for one that does not run, of
    which nothing is computed."""

    def get(self: Any) -> Any:
        return getattr(self.table, name)[self.row].item() if self.table is not None else 0

    def set(self: Any, value: Any) -> None:
        assert self.table is not None
        getattr(self.table, name)[self.row] = value

    return property(get, set)


class Columns:
    """One number of each running sequence.

    Each is [R]. What a sequence is stays as it is: used: whether the row is. entry: a number of its
    own for every stay of a sequence in the table, 0 in a free row. order: of arrival.
    deterministic. most: tokens at which it ends. window: most drafts that may wait. temperature: 0
    for greedy. key: of the noise. top_k, top_p, min_p: filters, 0, 1 and 0 where they are off.
    logprobs_wanted. special_sampling: the sampler needs its parameters and history.
    special_commit: tokens are committed one by one. given: its continuation is. has_embeds,
    scores_prompt: parts of the prompt enter as embeddings, or its log-probabilities are wanted.
    thinking: states are added to its prompt. supplied: its tokens come from outside.

    And what changes: length: committed tokens. computed: leading positions whose KV is final.
    canonical: those of them whose KV is canonical. frozen: leading positions in shared pages, which
    must not be written. indexed: leading pages that the prefix cache has seen. num_pages.
    num_drafts. draft_free: none may wait. proposed: the drafts came from a drafter, so they have no
    KV. draft_ended: the last draft is a stop token or failed. drafted, accepted, rolled_back,
    rollbacks, verify_passes: counts since they were last added to its statistics. unthought: chunks
    of the prompt without a thought. reach: positions that may run before more are thought about.
    """

    used: Array
    entry: Array
    order: Array
    deterministic: Array
    most: Array
    window: Array
    temperature: Array
    key: Array
    top_k: Array
    top_p: Array
    min_p: Array
    logprobs_wanted: Array
    special_sampling: Array
    special_commit: Array
    given: Array
    has_embeds: Array
    scores_prompt: Array
    thinking: Array
    supplied: Array
    length: Array
    computed: Array
    canonical: Array
    frozen: Array
    indexed: Array
    num_pages: Array
    num_drafts: Array
    proposed: Array
    draft_ended: Array
    draft_free: Array
    drafted: Array
    accepted: Array
    rolled_back: Array
    rollbacks: Array
    verify_passes: Array
    unthought: Array
    reach: Array

    # What ``any`` can tell, as they stay as they are.
    _FIXED = (
        *("deterministic", "temperature", "logprobs_wanted", "special_sampling"),
        *("special_commit", "given", "has_embeds", "scores_prompt", "thinking", "supplied"),
    )
    _FLAGS = (
        *("used", "deterministic", "logprobs_wanted", "special_sampling", "special_commit"),
        *("given", "has_embeds", "scores_prompt", "thinking", "supplied"),
        *("proposed", "draft_ended", "draft_free"),
    )
    _REALS = ("temperature", "top_p", "min_p")
    _COUNTS = (
        *("entry", "order", "most", "window", "key", "top_k", "length", "computed", "canonical"),
        *("frozen", "indexed", "num_pages", "num_drafts", "unthought", "reach"),
    )
    STATS = ("drafted", "accepted", "rolled_back", "rollbacks", "verify_passes")

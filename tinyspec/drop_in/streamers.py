"""Tokens to the streamers of transformers, in the order and the shapes that it puts them.

Knows streamers and tokens; not where these come from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinyspec.errors import refuse


class Streamers:
    """One streamer for all completions of a call, or one for each.

    A single one gets [N] tokens a step, once every unfinished completion has the step's token;
    finished ones get ``pad``. Each of several gets the tokens of its own completion.
    """

    def __init__(self, streamer: Any, padded: Tensor, prompts: list[list[int]]):
        """padded [N, L]: the prompts as returned; prompts: every completion's, without pads.

        Raises ValueError where there are several streamers, and not one for each completion.
        """
        self._steps = 0
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._finished = [False] * len(prompts)
        self._several = isinstance(streamer, (list, tuple))
        self._streamers: list[Any] = list(streamer) if self._several else [streamer]
        if self._several:
            if len(streamer) != len(prompts):
                allowed = f"{len(prompts)}, one for each completion (or a single streamer for all)"
                raise refuse("len(streamer)", len(streamer), allowed)
            for one, ids in zip(streamer, prompts, strict=True):
                one.put(torch.tensor([ids], dtype=torch.long))
        else:
            streamer.put(padded.cpu())

    def put(self, index: int, token_ids: list[int], finished: bool, pad: int) -> None:
        """Tokens of the completion ``index``."""
        self._tokens[index] += token_ids
        self._finished[index] |= finished
        if self._several:
            for token in token_ids:
                self._streamers[index].put(torch.tensor([token]))
            if finished:
                self._streamers[index].end()
            return
        while self._has_step():
            step = [ids[self._steps] if self._steps < len(ids) else pad for ids in self._tokens]
            self._streamers[0].put(torch.tensor(step))
            self._steps += 1

    def _has_step(self) -> bool:
        """Whether the next step's token is there, of every completion that has one."""
        there = [len(tokens) > self._steps for tokens in self._tokens]
        pairs = zip(there, self._finished, strict=True)
        return any(there) and all(has_token or finished for has_token, finished in pairs)

    def end(self) -> None:
        """All completions have ended."""
        if not self._several:
            self._streamers[0].end()

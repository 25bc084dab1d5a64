"""Tokens to the streamers of transformers, in the order and the shapes that it puts them.

Knows streamers and tokens; not where these come from.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinyspec.errors import refuse


class Streamers:
    """One streamer for all completions of a call, one for each, or none.

    A single one gets [N] tokens a step, as soon as every completion that goes on has the step's;
    those that have ended get ``pad``. Each of several gets the tokens of its own completion.
    """

    def __init__(self, streamer: Any, prompts: Tensor, alone: list[list[int]]):
        """prompts [N, L]: as returned; alone: every completion's own prompt, without pads.

        Raises ValueError where there are several streamers, and not one for each completion.
        """
        self._put = 0
        self._tokens: list[list[int]] = [[] for _ in alone]
        self._ended = [False] * len(alone)
        self._several = isinstance(streamer, (list, tuple))
        self._streamers = list(streamer) if self._several else [streamer]
        if streamer is None:
            self._streamers = []
        elif not self._several:
            streamer.put(prompts.cpu())
        elif len(streamer) != len(alone):
            allowed = f"one, or a list of one for each of the {len(alone)} completions"
            raise refuse("streamer", f"{len(streamer)} streamers", allowed)
        else:
            for one, ids in zip(streamer, alone, strict=True):
                one.put(torch.tensor([ids], dtype=torch.long))

    def __bool__(self) -> bool:
        """Whether anybody is told."""
        return bool(self._streamers)

    def put(self, place: int, token_ids: list[int], ended: bool, pad: int) -> None:
        """Tokens of the completion ``place``."""
        if not self._streamers:
            return
        self._tokens[place] += token_ids
        self._ended[place] |= ended
        if self._several:
            for token in token_ids:
                self._streamers[place].put(torch.tensor([token]))
            if ended:
                self._streamers[place].end()
            return
        while (step := self._step(pad)) is not None:
            self._streamers[0].put(torch.tensor(step))

    def _step(self, pad: int) -> list[int] | None:
        """The next step's tokens, once all are there."""
        place = self._put
        if not any(len(tokens) > place for tokens in self._tokens):
            return None
        states = list(zip(self._tokens, self._ended, strict=True))
        if any(len(tokens) <= place and not ended for tokens, ended in states):
            return None
        self._put += 1
        return [tokens[place] if place < len(tokens) else pad for tokens in self._tokens]

    def end(self) -> None:
        """All completions have ended."""
        if self._streamers and not self._several:
            self._streamers[0].end()

"""From the padded tensors of transformers' ``generate`` to single prompts without pads, and back;
what streamers are put.

Knows tensors, their shapes and which of a call's arguments they are; neither models nor parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import compress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinyspec.errors import refuse
from tinyspec.scalars import is_array, plain_list


@dataclass
class Prompt:
    """One prompt: its token ids, or what enters the model in their place, [L, hidden]."""

    ids: list[int]
    embeds: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.embeds is None else len(self.embeds)

    @property
    def digest(self) -> int:
        """64 bits, equal for equal prompts, in any process."""
        values = np.array(self.ids, np.int64)
        if self.embeds is not None:
            values = self.embeds.detach().cpu().contiguous().view(torch.uint8).numpy()
        return int.from_bytes(blake2b(values.tobytes(), digest_size=8).digest(), "little")


class Prompts:
    """The prompts of one call, without pads.

    input_ids: 1-D or 2-D, or lists of any lengths. attention_mask: of the same shape; tokens where
    it is 0 are left out. embeds: [B, L, hidden], in place of ids. ends_in_pads: whether a row ends
    in what does not count. Raises ValueError where the shapes do not fit.
    """

    def __init__(self, input_ids: Any, attention_mask: Any = None, embeds: Tensor | None = None):
        lists = isinstance(input_ids, Sequence)  # without padding, whatever their lengths
        self._masked = attention_mask is not None or lists
        if embeds is not None and embeds.ndim != 3:
            raise refuse("inputs_embeds.shape", tuple(embeds.shape), "[batch, length, hidden]")
        ids = _rows("input_ids", input_ids) if embeds is None else [[]] * len(embeds)
        lengths = [len(row) if embeds is None else embeds.shape[1] for row in ids]
        if not ids:
            raise refuse("input_ids", input_ids, "at least one prompt")
        masks = [[1] * length for length in lengths]
        if attention_mask is not None:
            masks = _rows("attention_mask", attention_mask)
            if [len(mask) for mask in masks] != lengths:
                raise refuse("attention_mask", masks, f"as long as the prompts, {lengths}")
        self.ends_in_pads = any(mask and not mask[-1] for mask in masks)
        self.each = [Prompt(list(compress(*pair))) for pair in zip(ids, masks, strict=True)]
        self.width = max(map(len, self.each)) if lists else max(lengths)
        self._padded: Tensor | None = None
        if embeds is not None:
            for prompt, mask, given in zip(self.each, masks, embeds, strict=True):
                prompt.embeds = given[torch.tensor(mask, device=given.device) != 0]
            self._padded = torch.empty(len(embeds), 0, dtype=torch.long, device=embeds.device)
        elif not lists:
            self._padded = torch.atleast_2d(torch.as_tensor(input_ids))

    def strip(self, index: int, pad: int | None, eos: Sequence[int]) -> bool:
        """Without an attention mask every pad token of a prompt is padding, unless it is a stop
        token too. Returns whether there was any."""
        prompt = self.each[index]
        if self._masked or prompt.embeds is not None or pad in eos or pad not in prompt.ids:
            return False
        self.ends_in_pads |= prompt.ids[-1] == pad
        prompt.ids = [i for i in prompt.ids if i != pad]
        return True

    def padded(self, pad: int) -> Tensor:
        """What the returned sequences begin with, [B, L]."""
        if self._padded is None:
            rows = [[pad] * (self.width - len(prompt)) + prompt.ids for prompt in self.each]
            self._padded = torch.tensor(rows)
        return self._padded


def _rows(name: str, given: Any) -> list[list[Any]]:
    """Rows of numbers, from a tensor or array of one or two dimensions, or from lists."""
    if getattr(given, "ndim", 1) > 2:
        raise refuse(f"{name}.shape", tuple(given.shape), "[length] or [batch, length]")
    given = plain_list(given)
    if any(isinstance(part, str) for part in given):
        raise refuse(name, given, "numbers in one list, or in a list for each prompt")
    several = all(isinstance(part, Sequence) or is_array(part) for part in given)
    return [plain_list(part) for part in given] if several else [given]


class Streamers:
    """One streamer of transformers for all completions of a call, or one for each.

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
        if not self._several:
            streamer.put(padded.cpu())
        elif len(streamer) != len(prompts):
            allowed = f"{len(prompts)}, one for each completion (or a single streamer for all)"
            raise refuse("len(streamer)", len(streamer), allowed)
        else:
            for one, ids in zip(streamer, prompts, strict=True):
                one.put(torch.tensor([ids], dtype=torch.long))

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
        open_ = [len(t) for t, done in zip(self._tokens, self._finished, strict=True) if not done]
        there = min(open_) if open_ else max(map(len, self._tokens))
        for place in range(self._steps, there):
            step = [ids[place] if place < len(ids) else pad for ids in self._tokens]
            self._streamers[0].put(torch.tensor(step))
            self._steps += 1

    def end(self) -> None:
        """No more tokens will come."""
        for one, done in zip(self._streamers, self._finished, strict=False):
            if not (self._several and done):  # it was called when that one ended
                one.end()

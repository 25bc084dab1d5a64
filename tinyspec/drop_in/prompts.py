"""From the padded tensors of transformers' ``generate`` to rows without pads, and back.

A row is one prompt by itself. Knows tensors and their layout, and neither models nor parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinyspec.errors import refuse


@dataclass
class Prompt:
    """One prompt: its token ids, or what enters the model in their place, [L, hidden]."""

    ids: list[int]
    embeds: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.embeds is None else len(self.embeds)


@dataclass
class Prompts:
    """The prompts of one call.

    block: the prompts as they were given, [B, L], with which the returned sequences begin; None:
    lists of several lengths, to be padded on the left with what the call's pad token turns out to
    be. masked: whether the caller said which tokens count.
    """

    rows: list[Prompt]
    block: Tensor | None
    masked: bool

    @classmethod
    def of(cls, input_ids: Any, attention_mask: Any, embeds: Tensor | None = None) -> Prompts:
        """Rows of ``input_ids``, 1-D or 2-D or a list of lists of any lengths, or of ``embeds``
        [B, L, hidden], without what ``attention_mask`` (of the same shape) leaves out.

        Raises ValueError naming the argument where the shapes do not fit.
        """
        if embeds is not None:
            if embeds.ndim != 3:
                raise refuse("inputs_embeds", tuple(embeds.shape), "[batch, length, hidden]")
            mask = _mask(attention_mask, embeds.shape[:2])
            block = _tensor(input_ids)
            if block is None:
                block = torch.empty(len(embeds), 0, dtype=torch.long, device=embeds.device)
            given = block.tolist() if block.shape[1:] == embeds.shape[1:2] else [[]] * len(embeds)
            rows = [
                Prompt([i for i, real in zip(ids, keep, strict=False) if real], part[keep])
                for ids, part, keep in zip(given, embeds, mask.to(embeds.device), strict=True)
            ]
            return cls(rows, block, attention_mask is not None)
        if len(input_ids) == 0:
            raise refuse("input_ids", input_ids, "at least one prompt")
        block = _tensor(input_ids)
        if block is None:  # lists of several lengths
            lists = [_ids(ids) for ids in input_ids]
            if attention_mask is not None:
                masks = [_ids(mask) for mask in attention_mask]
                if list(map(len, masks)) != list(map(len, lists)):
                    raise refuse("attention_mask", masks, "as long as input_ids, list by list")
                pairs = zip(lists, masks, strict=True)
                lists = [[i for i, m in zip(*pair, strict=True) if m] for pair in pairs]
            return cls([Prompt(ids) for ids in lists], None, True)
        if block.ndim != 2:
            raise refuse("input_ids", tuple(block.shape), "of shape [length] or [batch, length]")
        mask = _mask(attention_mask, block.shape)
        lists = [
            [i for i, real in zip(ids, keep, strict=True) if real]
            for ids, keep in zip(block.tolist(), mask.tolist(), strict=True)
        ]
        # Lists have no padding, whatever their lengths.
        masked = attention_mask is not None or isinstance(input_ids, Sequence)
        return cls([Prompt(ids) for ids in lists], block, masked)

    def __len__(self) -> int:
        return len(self.rows)

    def strip(self, number: int, pad: int | None, eos: Sequence[int]) -> None:
        """Without a mask, every pad token of a row is padding, unless it is a stop token too."""
        row = self.rows[number]
        if not self.masked and row.embeds is None and pad is not None and pad not in eos:
            row.ids = [i for i in row.ids if i != pad]

    def prompts(self, pad: int) -> Tensor:
        """What the returned sequences begin with, [B, L]."""
        if self.block is not None:
            return self.block
        longest = max(len(row) for row in self.rows)
        padded = [[pad] * (longest - len(row)) + row.ids for row in self.rows]
        return torch.tensor(padded, dtype=torch.long)


def _ids(given: Any) -> list[int]:
    """One list of token ids, from a list, a tensor or an array."""
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _tensor(given: Any) -> Tensor | None:
    """``given`` as a tensor [B, L]; None for lists of several lengths."""
    if given is None or isinstance(given, Tensor):
        block = given
    elif isinstance(given, Sequence) and (
        len({_length(part) for part in given}) > 1 or _length(given[0]) == 0
    ):
        return None
    elif isinstance(given, Sequence) and given and isinstance(given[0], Tensor):
        block = torch.stack(list(given))
    else:
        block = torch.as_tensor(given)
    if block is None:
        return None
    if block.is_floating_point() or block.is_complex():
        raise refuse("input_ids", block.dtype, "token ids, integers")
    return block[None] if block.ndim == 1 else block


def _length(part: Any) -> int:
    return len(part) if hasattr(part, "__len__") and getattr(part, "ndim", 1) > 0 else -1


def _mask(given: Any, shape: Sequence[int]) -> Tensor:
    """Which of [B, L] tokens count."""
    if given is None:
        return torch.ones(tuple(shape), dtype=torch.bool)
    mask = torch.as_tensor(given)
    mask = mask[None] if mask.ndim == 1 else mask
    if tuple(mask.shape) != tuple(shape):
        raise refuse("attention_mask", f"of shape {tuple(mask.shape)}", f"shape {tuple(shape)}")
    return mask != 0


def sequences(prompts: Tensor, generated: list[list[int]], pad: int) -> Tensor:
    """``prompts`` [N, L] with the ``generated`` tokens behind, filled up with ``pad``."""
    longest = max(map(len, generated))
    filled = [tokens + [pad] * (longest - len(tokens)) for tokens in generated]
    new = torch.tensor(filled, dtype=torch.long, device=prompts.device)
    return torch.cat([prompts, new.view(len(generated), longest)], dim=1)


def steps(kept: list[list[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Per step [N, V], from what every completion kept of each of its tokens, [V].

    Behind its end a completion has the pad token for certain: 0 there, -inf elsewhere.
    """
    first = kept[0][0]
    behind = torch.full_like(first, -torch.inf)
    behind[pad] = 0.0
    longest = max(map(len, kept))
    return tuple(
        torch.stack([rows[step] if step < len(rows) else behind for rows in kept])
        for step in range(longest)
    )

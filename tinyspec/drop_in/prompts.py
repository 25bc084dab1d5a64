"""From the padded tensors of transformers' ``generate`` to single prompts without pads, and back.

Knows tensors, their shapes and which of a call's arguments they are; neither models nor parameters.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import compress, zip_longest
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from tinyspec.errors import refuse


@dataclass
class Prompt:
    """One prompt: its token ids, or what enters the model in their place, [L, hidden]."""

    ids: list[int]
    embeds: Tensor | None = None

    def __len__(self) -> int:
        return len(self.ids) if self.embeds is None else len(self.embeds)

    @property
    def key(self) -> Hashable:
        """Equal for equal prompts."""
        if self.embeds is None:
            return tuple(self.ids)
        bits = self.embeds.detach().cpu().contiguous().view(torch.uint8)
        return tuple(self.ids), bits.numpy().tobytes()


class Prompts:
    """The prompts of one call, without pads.

    input_ids: 1-D or 2-D, or lists of any lengths. embeds: [B, L, hidden]. attention_mask: of the
    same shape; tokens where it is 0 are left out. Raises ValueError where the shapes do not fit.
    """

    def __init__(self, input_ids: Any, attention_mask: Any = None, embeds: Tensor | None = None):
        # Lists have no padding, whatever their lengths.
        self._masked = attention_mask is not None or isinstance(input_ids, Sequence)
        if embeds is None and len(input_ids) == 0:
            raise refuse("input_ids", input_ids, "at least one prompt")
        # The returned sequences begin with these, [B, L]; None: lists of several lengths.
        self._input_ids = None if input_ids is None else _tensor(input_ids)
        if embeds is not None:
            if embeds.ndim != 3:
                raise refuse("inputs_embeds.shape", tuple(embeds.shape), "[batch, length, hidden]")
            if self._input_ids is None:
                empty = torch.empty(len(embeds), 0, dtype=torch.long, device=embeds.device)
                self._input_ids = empty
            lists = self._input_ids.tolist()
            masks = _mask(attention_mask, embeds.shape[:2]).tolist()
        elif self._input_ids is not None:
            shape = self._input_ids.shape
            if len(shape) != 2:
                raise refuse("input_ids.shape", tuple(shape), "[length] or [batch, length]")
            lists = self._input_ids.tolist()
            masks = _mask(attention_mask, shape).tolist()
        else:
            lists = _lists(input_ids)
            masks = [[1] * len(ids) for ids in lists]
            if attention_mask is not None:
                masks = _lists(attention_mask)
            if list(map(len, masks)) != list(map(len, lists)):
                raise refuse("attention_mask", masks, "lists as long as those of input_ids")
        kept = [list(compress(ids, mask)) for ids, mask in zip(lists, masks, strict=True)]
        self._width = len(masks[0])
        self.prompts = [Prompt(ids) for ids in kept]
        if embeds is not None:
            for prompt, part, mask in zip(self.prompts, embeds, masks, strict=True):
                prompt.embeds = part[torch.tensor(mask, device=embeds.device)]

    def strip(self, index: int, pad: int | None, eos: Sequence[int]) -> bool:
        """Without an attention mask every pad token of a prompt is padding, unless it is a stop
        token too. Returns whether there was any."""
        prompt = self.prompts[index]
        before = len(prompt)
        if not self._masked and prompt.embeds is None and pad is not None and pad not in eos:
            prompt.ids = [i for i in prompt.ids if i != pad]
        return len(prompt) < before

    def padded(self, pad: int) -> Tensor:
        """What the returned sequences begin with, [B, L]."""
        if self._input_ids is not None:
            return self._input_ids
        longest = self.width
        return torch.tensor([[pad] * (longest - len(p)) + p.ids for p in self.prompts])

    @property
    def width(self) -> int:
        """Of the padded prompts, embeddings included."""
        return self._width if self._input_ids is not None else max(map(len, self.prompts))


def _lists(given: Any) -> list[list[int]]:
    """Lists of numbers, from lists, tensors or arrays."""
    return [part.tolist() if hasattr(part, "tolist") else list(part) for part in given]


def _tensor(given: Any) -> Tensor | None:
    """``given`` as a tensor [B, L]; None for lists of several lengths."""
    if isinstance(given, Sequence):
        lengths = {_length(part) for part in given}
        if len(lengths) > 1 or 0 in lengths:
            return None
        if isinstance(given[0], Tensor):
            given = torch.stack(list(given))
    ids = torch.as_tensor(given)
    if ids.is_floating_point() or ids.is_complex():
        raise refuse("input_ids.dtype", ids.dtype, "integers (token ids)")
    return ids[None] if ids.ndim == 1 else ids


def _length(part: Any) -> int | None:
    """The length of a list, None of a number."""
    return len(part) if hasattr(part, "__len__") and getattr(part, "ndim", 1) > 0 else None


def _mask(given: Any, shape: Sequence[int]) -> Tensor:
    """Which of [B, L] tokens count."""
    mask = torch.ones(tuple(shape)) if given is None else torch.as_tensor(given)
    mask = mask[None] if mask.ndim == 1 else mask
    if mask.shape != shape:
        raise refuse("attention_mask.shape", tuple(mask.shape), f"{tuple(shape)}, as the prompts")
    return mask != 0


def mask_of(arguments: dict[str, Any], default: GenerationConfig) -> Tensor | None:
    """Which tokens count, [B, L]: as given, or as transformers takes it from pad tokens; None where
    prompts are no batch of one length."""
    ids = arguments.get("inputs", arguments.get("input_ids"))
    mask = arguments.get("attention_mask")
    if mask is not None:
        return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if not isinstance(ids, Tensor) or ids.ndim != 2 or arguments.get("inputs_embeds") is not None:
        return None
    configs = (arguments.get("generation_config"), default)

    def setting(name: str) -> Any:
        values = (arguments.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    pads, eos = _numbers(setting("pad_token_id")), _numbers(setting("eos_token_id"))
    return (ids != pads[0]).long() if len(pads) == 1 and pads[0] not in eos else None


def _numbers(value: Any) -> list[Any]:
    """All numbers in a number, a tensor or lists of any depth; none in None."""
    if value is None:
        return []
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, (list, tuple)):
        return [number for part in value for number in _numbers(part)]
    return [value]


def ends_in_pads(mask: Tensor | None) -> bool:
    """Whether a row of ``mask`` [B, L] ends in what does not count."""
    return mask is not None and mask.numel() > 0 and bool((mask[:, -1] == 0).any())


def append(prompts: Tensor, generated: list[list[int]], pad: int) -> Tensor:
    """``prompts`` [N, L] with the ``generated`` tokens behind, filled up with ``pad``."""
    longest = max(map(len, generated))
    filled = [tokens + [pad] * (longest - len(tokens)) for tokens in generated]
    new = torch.tensor(filled, dtype=torch.long, device=prompts.device)
    return torch.cat([prompts, new.view(len(generated), longest)], dim=1)


def stack_steps(kept: list[list[Tensor]], pad: int) -> tuple[Tensor, ...]:
    """Scores of every step, [N, V], from those of every completion's tokens, [V] each.

    After its end a completion has the pad token with certainty: 0 there, -inf elsewhere.
    """
    ended = torch.full_like(kept[0][0], -torch.inf)
    ended[pad] = 0.0
    return tuple(torch.stack(step) for step in zip_longest(*kept, fillvalue=ended))

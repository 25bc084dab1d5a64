"""Calls whose rows end in pads, which transformers' own ``generate`` continues behind.

tinyspec leaves pads out wherever they stand. So that a call's answer does not hang on who serves
it, transformers gets such rows with their pads in front. Knows tensors and names of arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from tinyspec.errors import refuse

_MOVED = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "token_type_ids")
# Of these tensors nothing says how they go with pads moved.
_IN_THE_WAY = ("position_ids", "past_key_values", "negative_prompt_ids")


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


class PadsInFront:
    """The arguments of a call with every row's pads in front, and its result put back.

    mask: which tokens count. Raises ValueError naming the argument that cannot be moved along.
    """

    def __init__(self, arguments: dict[str, Any], mask: Tensor):
        for name in _IN_THE_WAY:
            if arguments.get(name) is not None:
                raise refuse(name, "...", "left out where rows end in pads; pad rows on the left")
        order = (mask != 0).long().argsort(dim=1, stable=True)
        self._prompts = arguments.get("inputs", arguments.get("input_ids"))
        self.arguments = {**arguments, "attention_mask": mask}
        for name in _MOVED:
            given = self.arguments.get(name)
            if given is not None:
                index = order.to(given.device)
                if given.ndim == 3:
                    index = index[..., None].expand(-1, -1, given.shape[2])
                self.arguments[name] = given.gather(1, index)

    def restore(self, result: Any) -> Any:
        """What ``generate`` returned, with prompts as they were given."""
        if self._prompts is None:
            return result
        sequences = result if isinstance(result, Tensor) else result.sequences
        rows, length = self._prompts.shape
        given = self._prompts.to(sequences).repeat_interleave(len(sequences) // rows, dim=0)
        restored = torch.cat([given, sequences[:, length:]], dim=1)
        if isinstance(result, Tensor):
            return restored
        result.sequences = restored
        return result

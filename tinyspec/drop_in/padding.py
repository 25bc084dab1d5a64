"""Calls whose rows end in pads, which transformers' own ``generate`` continues behind.

tinyspec leaves pads out wherever they stand. So that a call's answer does not hang on who serves
it, transformers gets such rows with their pads in front. Knows tensors and names of arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tinyspec.errors import refuse
from tinyspec.model.private_names import CACHE_NAMES

_MOVED = ("inputs", "input_ids", "inputs_embeds", "attention_mask", "token_type_ids")
# Of these tensors nothing says how they go with pads moved.
_IN_THE_WAY = ("position_ids", *CACHE_NAMES, "negative_prompt_ids")


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

"""The masks that a model makes for itself, read as the keys that a row sees.

They say it whether or not a window is passed to attention. Knows transformers' mask interface.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface

from tinyspec.model.attention_calls import Reach

_ONE_AT_A_TIME = Lock()


class UnknownAttention(Exception):
    """What of an attention call is not known here."""


def reach_of(
    mask_function: Callable[..., Tensor],
    rows: int,
    size: int | None,
    chunked: bool = False,
    device: torch.device | str = "cpu",
) -> Reach | None:
    """Which keys a mask function of transformers' lets a row see; ``size`` as it comes with it.

    None where that is neither all before the row, nor a window, nor a chunk. A function that looks
    something up per row knows ``rows`` rows; too few to tell a window from a chunk, ``chunked``
    does.
    """

    def seen(place: Tensor) -> Tensor:
        zero = torch.zeros((), dtype=torch.long, device=device)
        found = torch.as_tensor(mask_function(zero, zero, place[:, None], place))
        return found.expand(len(place), len(place))

    edges = set(range(rows))
    if not _looks_up(mask_function):
        edges |= {63, 64, 1000}
        edges |= {n * (size or 1) + d for n in (1, 2, 5) for d in (-1, 0, 1)} - {-1}
    place = torch.tensor(sorted(edges), device=device)
    found = seen(place)
    q, k = place[:, None], place
    before = k <= q
    kinds = {Reach(): before}
    if size:
        window, chunk = before & (k > q - size), before & (k // size == q // size)
        pair = [(Reach(window=size), window), (Reach(chunk=size), chunk)]
        kinds = dict([*(pair[::-1] if chunked else pair), *kinds.items()])
    return next((reach for reach, keys in kinds.items() if torch.equal(found, keys)), None)


def _looks_up(function: Any) -> bool:
    """Whether a mask function, or one that it is made of, holds a table of rows."""
    held = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for value in held:
        if isinstance(value, Tensor) and value.numel() > 1:
            return True
        parts = value if isinstance(value, (list, tuple)) else [value]
        if any(callable(part) and _looks_up(part) for part in parts):
            return True
    return False


class Masks:
    """The masks that a model makes, as long as they are noted."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, Reach | None]] = []

    def make(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        local_size: int | None = None,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
        config: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """As a mask function of transformers'; ``use_vmap`` says that the caller has rules."""
        shape = batch_size, 1, q_length, kv_length
        mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
        reach = None
        if not use_vmap:
            chunked = local_size and getattr(config, "attention_chunk_size", None) == local_size
            reach = reach_of(mask_function, q_length, local_size, bool(chunked), device)
        self._made.append((mask, reach))
        return mask

    def reach(self, mask: Tensor) -> Reach:
        """What is known of a mask, or of a slice of it."""
        for made, reach in self._made:
            if made.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                if reach is None:
                    raise UnknownAttention(
                        "has a mask that is neither causal, nor sliding, nor chunked"
                    )
                return reach
        raise UnknownAttention("has a mask of its own making")

    @contextmanager
    def noted(self, implementation: str) -> Iterator[None]:
        """Have models with this attention make masks here. The interface is the whole process's:
        one at a time; another thread's pass makes a mask more, which paged attention passes over.
        """
        with _ONE_AT_A_TIME:
            AttentionMaskInterface.register(implementation, self.make)
            try:
                yield
            finally:
                del AttentionMaskInterface._global_mapping[implementation]

"""Which keys a row attends to, read from the masks that a model makes.

A window shows in its mask whether or not it is passed to attention. Knows transformers' mask
interface.
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
    """Why an attention call cannot be served."""


def reach_of(
    mask_function: Callable[..., Tensor],
    rows: int,
    size: int | None,
    chunked: bool = False,
    device: torch.device | str = "cpu",
) -> Reach | None:
    """The keys that a mask function of transformers, made with ``size``, lets a row attend to.

    None if they are not all before the row, a window or a chunk. A function that holds a table of
    rows is evaluated for ``rows`` rows; where window and chunk agree on these, ``chunked`` decides.
    """

    edges = set(range(rows))
    if not _looks_up(mask_function):
        edges |= {63, 64, 1000}
        edges |= {n * (size or 1) + d for n in (1, 2, 5) for d in (-1, 0, 1)} - {-1}
    position = torch.tensor(sorted(edges), device=device)
    q, k = position[:, None], position
    zero = torch.zeros((), dtype=torch.long, device=device)
    found = torch.as_tensor(mask_function(zero, zero, q, k)).expand(len(k), len(k))
    before = k <= q
    kinds = [(Reach(), before)]
    if size:
        kinds.insert(0, (Reach(window=size), before & (k > q - size)))
        kinds.insert(0 if chunked else 1, (Reach(chunk=size), before & (k // size == q // size)))
    return next((reach for reach, keys in kinds if torch.equal(found, keys)), None)


def _looks_up(value: Any) -> bool:
    """Whether a mask function, or one that it calls, holds a table of rows."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, (list, tuple)):
        return any(map(_looks_up, value))
    held = getattr(value, "__closure__", None) or ()
    return any(_looks_up(cell.cell_contents) for cell in held)


class Masks:
    """The masks that a model makes while ``registered``."""

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
        """Has the signature of transformers' mask functions; use_vmap: the model adds its own."""
        shape = batch_size, 1, q_length, kv_length
        mask = torch.ones(shape, dtype=torch.bool, device=device).tril()
        reach = None
        if not use_vmap:
            chunked = local_size and getattr(config, "attention_chunk_size", None) == local_size
            reach = reach_of(mask_function, q_length, local_size, bool(chunked), device)
        self._made.append((mask, reach))
        return mask

    def reach(self, mask: Tensor) -> Reach:
        """Of a mask that was made here, or of a slice of it."""
        for made, reach in self._made:
            if made.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                if reach is None:
                    raise UnknownAttention(
                        "has a mask that is neither causal, nor sliding, nor chunked"
                    )
                return reach
        raise UnknownAttention("has a mask of its own making")

    @contextmanager
    def registered(self, implementation: str) -> Iterator[None]:
        """Models with this attention implementation make their masks here.

        The registry belongs to the process, so one at a time; a pass in another thread makes masks
        too, which paged attention ignores.
        """
        with _ONE_AT_A_TIME:
            AttentionMaskInterface.register(implementation, self.make)
            try:
                yield
            finally:
                del AttentionMaskInterface._global_mapping[implementation]

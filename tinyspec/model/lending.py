"""Lets a served model be used by itself between passes: its own forward, and copies of it.

Knows what a pass runs, and nothing of what is exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from typing import Any

from torch import nn

from tinyspec.model.attention import AttentionContext
from tinyspec.model.exchange import ABSENT, Place
from tinyspec.model.wrappers import own_forward


class Lending:
    """Stands where the forward of a served model is looked up, and what copies and pickles it.

    A pass gets the forward that it always gets; for anybody else ``lend`` restores the model first.
    """

    def __init__(self, module: nn.Module, context: AttentionContext, lend: Callable[[], None]):
        self._module, self._context, self._lend = module, context, lend
        self.__signature__ = signature(module.forward)
        self.tinyspec_own: Any = None  # see ``own_forward``

    def places(self) -> Iterator[Place]:
        """Of a module that is its own."""
        table = vars(self._module)
        self.tinyspec_own = own_forward(self._module) if "forward" in table else None
        yield Place(table, "forward", table.get("forward", ABSENT), self)
        yield Place(table, "__reduce_ex__", table.get("__reduce_ex__", ABSENT), self._reduce)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        if not self._context.busy:
            self._lend()
            return module.forward(*args, **kwargs)
        if self.tinyspec_own is not None:
            return self.tinyspec_own(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    def _reduce(self, protocol: Any) -> Any:
        """Copies are of the model itself."""
        self._lend()
        return self._module.__reduce_ex__(protocol)

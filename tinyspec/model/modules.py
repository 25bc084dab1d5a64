"""Walking over the modules of a model, and what a module's forward calls."""

from __future__ import annotations

import inspect

from torch import nn


def children(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, module) of every module of ``model`` but ``model`` itself.

    A list, so that modules can be replaced during the walk.
    """
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
    ]


def calls_interface(module: nn.Module) -> bool:
    """Whether a module's forward looks its attention up in transformers' registry."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names

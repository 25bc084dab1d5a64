"""Walking over the modules of a model, and putting one module in the place of another."""

from __future__ import annotations

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


def replace_child(parent: nn.Module, name: str, before: nn.Module, after: nn.Module) -> None:
    """Make ``after`` the child ``name`` of ``parent``.

    It takes over the parameters and the training mode that ``before`` has now.
    """
    for own in before._parameters.keys() & after._parameters.keys():
        after._parameters[own] = before._parameters[own]
    after.training = before.training
    parent._modules[name] = after

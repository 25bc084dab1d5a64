"""Which module of a model an error came from, and what may help. Knows tracebacks."""

from __future__ import annotations

from traceback import walk_tb

from torch import nn

from tinyspec.model.private_names import EXPERTS_CHOICE


def failure(model: nn.Module, error: Exception) -> str:
    """``error`` of a forward over the attention's interface, with the innermost module that was
    running."""
    names = {id(module): name for name, module in model.named_modules() if name}
    owners = [id(frame.f_locals.get("self")) for frame, _ in walk_tb(error.__traceback__)]
    inside = [names[owner] for owner in owners if owner in names]
    where = f" in {inside[-1]}" if inside else ""
    raised = f"a forward over its attention's interface raised {type(error).__name__}{where}"
    return f"{raised}: {error}{_advice(model, inside)}"


def _advice(model: nn.Module, inside: list[str]) -> str:
    """What may help where experts ran by a function that not all shapes are fit for."""
    config = vars(model.get_submodule(inside[-1])).get("config") if inside else None
    choice = getattr(config, EXPERTS_CHOICE, None)
    if choice in (None, "eager") or "experts" not in inside[-1]:
        return ""
    return (
        f" (transformers runs these experts by {choice}, which does not take every size: "
        'model.set_experts_implementation("eager") does)'
    )

"""What attention a model calls, and in which order: read off forwards of a few rows, not off names.

The attention of those forwards computes nothing; it notes what reaches it. The masks that a model
makes for itself say which keys a layer sees, whether or not a window is passed on. With attention
silenced no row may know its neighbours: where one does, the model keeps state other than keys and
values. Knows transformers' interfaces; no pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tinyspec.errors import unsupported
from tinyspec.model.attention_calls import AttentionCall, GivenCall, LayerShape, Reach, Survey
from tinyspec.model.equivalence import ROWS as PROBE_ROWS
from tinyspec.model.masks import Masks, UnknownAttention
from tinyspec.model.supported import vocab_size

ROWS = 12
# How far logits move, by the largest of them, when rows stand elsewhere in a pass, at most.
ROUNDING = {torch.float32: 5e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
# Arguments of an attention call that say what is known otherwise, or nothing without a cache.
SILENT = {
    *("dropout", "position_ids", "use_cache", "cache_position", "past_key_values", "layer_idx"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "head_mask", "position_embeddings"),
    *("input_ids", "inputs_embeds", "num_items_in_batch", "training"),
}


class AttentionRecorder:
    """Stands for attention in one forward: notes every call, and returns zeros."""

    def __init__(self, masks: Masks):
        self._masks = masks
        self.calls: list[AttentionCall] = []
        self.keys: list[Tensor] = []
        self.reason: str | None = None

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        *,
        scale: float,
        **scores: Any,
    ) -> tuple[Tensor, None]:
        """As an attention function of transformers'."""
        try:
            reach = self._reach(module, mask, **scores)
        except UnknownAttention as error:
            self.reason = self.reason or f"{type(module).__name__} {error}"
            reach = Reach()
        rows, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        size = max(query.shape[-1], width)
        shape = LayerShape(heads, key.shape[1], size, scores.get("softcap") or 0.0)
        self.calls.append(AttentionCall(module, shape, reach, scale))
        self.keys.append(key.clone())
        return query.new_zeros(len(query), rows, heads, width), None

    def _reach(
        self,
        module: nn.Module,
        mask: Tensor | None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Reach:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if mask is None and not causal:
            raise UnknownAttention("is not causal")
        unknown = sorted(name for name, v in others.items() if v is not None and name not in SILENT)
        if unknown:
            raise UnknownAttention(f"gives attention {', '.join(unknown)}")
        window = sliding_window or 0
        if mask is None:
            return Reach(window)
        reach = self._masks.reach(mask)
        if window not in (0, reach.window):
            raise UnknownAttention(f"has a window of {window} and a mask with another")
        return reach


def accepted(model: nn.Module, **given: Any) -> dict[str, Any]:
    """Those of the arguments that the model's forward takes."""
    takes = inspect.signature(type(model).forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return {name: value for name, value in given.items() if open_ended or name in takes}


Listen = Callable[[AttentionRecorder | None, Tensor | None], None]


def _forward(
    model: PreTrainedModel,
    listen: Listen,
    recorder: AttentionRecorder,
    order: Tensor,
    positions: Tensor,
    **more: Any,
) -> Tensor:
    """Logits of the tokens number ``order``, at ``positions``, with attention recorded."""
    ids = (order * 7 + 3) % vocab_size(model)
    positions = positions.to(model.device)
    listen(recorder, positions)
    arguments = accepted(
        model,
        input_ids=ids[None].to(model.device),
        position_ids=positions[None],
        use_cache=False,
        return_dict=True,
        **more,
    )
    try:
        return model(**arguments).logits[0].float()
    except Exception as error:
        why = f"a forward over its attention's interface raised {type(error).__name__}: {error}"
        raise unsupported(model, why) from error
    finally:
        listen(None, None)


def survey(model: PreTrainedModel, implementation: str, listen: Listen) -> Survey:
    """Run a few rows through ``model``, whose attention is ``implementation`` and calls the
    recorder that ``listen`` is given.

    Raises UnsupportedModelError where what reaches attention is not all that a row has to know.
    """
    rows, masks = torch.arange(ROWS), Masks()
    first, reversed_, moved = (AttentionRecorder(masks) for _ in range(3))
    with masks.noted(implementation):
        logits = _forward(model, listen, first, rows, rows)
    other = _forward(model, listen, reversed_, rows.flip(0), rows.flip(0))
    ends = torch.tensor([0, ROWS - 1], device=model.device)
    elsewhere = _forward(model, listen, moved, rows, rows + 1, logits_to_keep=ends)
    keeps_logits = len(elsewhere) == len(ends)
    reason = first.reason
    if not first.calls:
        reason = "it calls no attention"
    elif not _alike(logits, other.flip(0), model.dtype):
        reason = "rows affect each other outside attention (recurrent state)"
    elif [id(call.module) for call in reversed_.calls] != [id(call.module) for call in first.calls]:
        reason = "which of its layers call attention depends on its tokens"
    elif all(map(torch.equal, first.keys, moved.keys)) and torch.equal(
        logits[ends] if keeps_logits else logits, elsewhere
    ):
        reason = "its rows do not know their positions (it ignores position_ids)"
    if reason is not None:
        raise unsupported(model, reason)
    return Survey(first.calls, keeps_logits)


def given_calls(
    model: PreTrainedModel, listen: Listen, modules: dict[int, nn.Module], last: int
) -> dict[int, list[GivenCall]]:
    """The calls of ``modules``, by id, in a forward of ``PROBE_ROWS`` rows at positions from 0 to
    ``last``."""
    found: dict[int, list[GivenCall]] = {key: [] for key in modules}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[id(module)].append(GivenCall(args, kwargs))

    hooks = [
        module.register_forward_pre_hook(note, with_kwargs=True) for module in modules.values()
    ]
    try:
        positions = torch.linspace(0, last, PROBE_ROWS).long()
        recorder = AttentionRecorder(Masks())
        _forward(model, listen, recorder, torch.arange(PROBE_ROWS), positions)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _alike(some: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of a model of ``dtype`` are the same but for rounding."""
    known = some.isfinite()
    if not torch.equal(known, others.isfinite()):
        return False
    some, others = some[known], others[known]
    if not len(some):
        return True  # it says nothing either way
    return bool((some - others).abs().max() <= ROUNDING[dtype] * some.abs().max().clamp(min=1e-6))

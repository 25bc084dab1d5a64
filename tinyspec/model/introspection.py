"""Which attention a model calls, and in which order: recorded in forwards of a few rows.

Attention is replaced by a recorder that returns zeros. Rows must then be independent of each other;
if not, the model keeps state other than keys and values. Knows transformers' attention interface;
no pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from tinyspec.errors import unsupported
from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.model.attention import (
    IMPLEMENTATION,
    Attend,
    AttentionCall,
    LayerShape,
    ModuleCall,
    paged_attention_function,
)
from tinyspec.model.scratch_weights import other_weights, scratch_weights
from tinyspec.model.served_model import ATTENTION_CHOICE, served_of
from tinyspec.model.supported import CACHE_NAMES, cache_windows, failing_module, vocab_size
from tinyspec.model.trial import ROWS as PROBE_ROWS

_ONE_AT_A_TIME = Lock()
TRIAL = f"{IMPLEMENTATION}, trial"


def reach_of(
    mask_function: Callable[..., Tensor],
    rows: int,
    size: int | None,
    chunked: bool = False,
    device: torch.device | str = "cpu",
) -> CausalMask | None:
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
    kinds = [(CausalMask(), before)]
    if size:
        window = CausalMask(window=size), before & (k > q - size)
        chunk = CausalMask(chunk=size), before & (k // size == q // size)
        kinds = [chunk, window, *kinds] if chunked else [window, chunk, *kinds]
    return next((reach for reach, keys in kinds if torch.equal(found, keys)), None)


def _looks_up(value: Any) -> bool:
    """Whether a mask function, or one that it calls, holds a table of rows."""
    if isinstance(value, Tensor):
        return value.numel() > 1
    if isinstance(value, (list, tuple)):
        return any(map(_looks_up, value))
    held = getattr(value, "__closure__", None) or ()
    return any(_looks_up(cell.cell_contents) for cell in held)


ROWS = 12
NO_POSITIONS = "its rows do not know their positions (it ignores position_ids)"
# How much logits may differ, relative to the largest, when rows change places in a pass.
ROUNDING = {torch.float32: 5e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
# Arguments of an attention call that do not change which keys a row sees, or nothing at all.
SILENT = {
    *("softcap", "s_aux"),
    *("dropout", "position_ids", "use_cache", "cache_position", *CACHE_NAMES, "layer_idx"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "head_mask", "position_embeddings"),
    *("input_ids", "inputs_embeds", "num_items_in_batch", "training"),
}


class AttentionRecorder:
    """Replaces attention in one forward: records every call and returns zeros. Masks that the model
    makes while they are ``asked`` for are made here. reason: why a call cannot be served."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.keys: list[Tensor] = []
        self.reason: str | None = None
        self._masks: list[tuple[Tensor, CausalMask | None]] = []

    @contextmanager
    def asked(self, model: PreTrainedModel) -> Iterator[None]:
        """``model``, a shadow, makes its masks here, by an attention of another name than that of
        passes in other threads: the registry belongs to the process."""
        configs = [getattr(vars(m).get("config"), "__dict__", {}) for m in model.modules()]
        with _ONE_AT_A_TIME:
            AttentionInterface.register(TRIAL, paged_attention_function)
            AttentionMaskInterface.register(TRIAL, self.make_mask)
            try:
                for config in configs:
                    if ATTENTION_CHOICE in config:
                        config[ATTENTION_CHOICE] = TRIAL
                yield
            finally:
                for config in configs:
                    if ATTENTION_CHOICE in config:
                        config[ATTENTION_CHOICE] = IMPLEMENTATION
                for registry in (AttentionInterface, AttentionMaskInterface):
                    del registry._global_mapping[TRIAL]

    def make_mask(
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
        self._masks.append((mask, reach))
        return mask

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
        """Has the signature of transformers' attention functions."""
        found = self._reach(module, mask, **scores)
        if isinstance(found, str):
            self.reason = self.reason or f"{type(module).__name__} {found}"
            found = CausalMask()
        rows, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        size = max(query.shape[-1], width)
        sinks = scores.get("s_aux") is not None
        shape = LayerShape(heads, key.shape[1], size, scores.get("softcap") or 0.0, sinks)
        self.calls.append(AttentionCall(module, shape, found, scale))
        self.keys.append(key.clone())
        return query.new_zeros(len(query), rows, heads, width), None

    def _reach(
        self,
        module: nn.Module,
        mask: Tensor | None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        **others: Any,
    ) -> CausalMask | str:
        """The keys that rows of a call attend to, or why it cannot be served."""
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if mask is None and not causal:
            return "is not causal"
        unknown = sorted(name for name, v in others.items() if v is not None and name not in SILENT)
        if unknown:
            return f"gives attention {', '.join(unknown)}"
        window = sliding_window or 0
        if mask is None:
            return CausalMask(window)
        place = mask.untyped_storage().data_ptr()  # of a mask that was made here, or a slice of it
        made = [reach for x, reach in self._masks if x.untyped_storage().data_ptr() == place]
        if not made:
            return "has a mask of its own making"
        if (reach := made[0]) is None:
            return "has a mask that is neither causal, nor sliding, nor chunked"
        if window not in (0, reach.window):
            return f"has a window of {window} and a mask with another"
        return reach


def accepted(model: nn.Module, **given: Any) -> dict[str, Any]:
    """The arguments that the model's forward takes."""
    takes = inspect.signature(type(model).forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return {name: value for name, value in given.items() if open_ended or name in takes}


def _forward(
    model: PreTrainedModel, attend: Attend, order: Tensor, positions: Tensor, **more: Any
) -> Tensor:
    """Logits of the sample tokens ``order`` at ``positions``, by a recorder's ``attend``."""
    ids = (order * 7 + 3) % vocab_size(model)
    positions, context = positions.to(model.device), served_of(model).context
    context.record(attend, positions)
    arguments = accepted(
        model,
        input_ids=ids[None].to(model.device),
        position_ids=positions[None],
        use_cache=False,
        return_dict=True,
        **more,
    )
    try:
        with other_weights({}, model):  # buffers that modules write to are not the user's
            return model(**arguments).logits[0].float()
    except Exception as error:
        raise unsupported(model, failing_module(model, error)) from error
    finally:
        context.record(None)


def attention_calls(model: PreTrainedModel) -> tuple[list[AttentionCall], bool]:
    """The attention calls of a forward, in order; whether the model follows ``logits_to_keep``.

    Raises UnsupportedModelError if a row depends on more than its position and what attention gets.
    """
    calls, keeps_logits, reason = _tried(model)
    if reason == NO_POSITIONS:  # as with weights that are zero, which show nothing
        with scratch_weights(model):
            calls, keeps_logits, reason = _tried(model)
    if reason is not None:
        raise unsupported(model, reason)
    return calls, keeps_logits


def _tried(model: PreTrainedModel) -> tuple[list[AttentionCall], bool, str | None]:
    """As ``attention_calls``, by the weights that the model has, and why it is refused."""
    rows = torch.arange(ROWS, device="cpu")
    first, reversed_, moved = (AttentionRecorder() for _ in range(3))
    with first.asked(model):
        logits = _forward(model, first.attend, rows, rows)
    other = _forward(model, reversed_.attend, rows.flip(0), rows.flip(0))
    ends = torch.tensor([0, ROWS - 1], device=model.device)
    elsewhere = _forward(model, moved.attend, rows, rows + 1, logits_to_keep=ends)
    keeps_logits = len(elsewhere) == len(ends)
    reason, served = first.reason, served_of(model)
    if not (first.calls or served.recurrent):
        reason = "it calls no attention"
    elif not _alike(logits, other.flip(0), served.dtype):
        reason = "rows affect each other outside attention (recurrent state)"
    elif [id(call.module) for call in reversed_.calls] != [id(call.module) for call in first.calls]:
        reason = "which of its layers call attention depends on its tokens"
    elif not served.recurrent and (  # which need no positions
        all(map(torch.equal, first.keys, moved.keys))
        and torch.equal(logits[ends] if keeps_logits else logits, elsewhere)
    ):
        reason = NO_POSITIONS
    windows = cache_windows(model) - {
        size for call in first.calls for size in (call.reach.window, call.reach.chunk)
    }
    if reason is None and windows:
        reason = f"its cache has a window of {min(windows)} where its masks have none"
    return first.calls, keeps_logits, reason


def module_calls(
    model: PreTrainedModel, modules: Iterable[nn.Module], last: int
) -> dict[nn.Module, list[ModuleCall]]:
    """The calls of ``modules`` in a forward of ``PROBE_ROWS`` rows at positions
    from 0 to ``last``, with attention recorded."""
    found: dict[nn.Module, list[ModuleCall]] = {module: [] for module in modules}

    def note(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        copy = output.clone() if isinstance(output, Tensor) else None
        found[module].append(ModuleCall(args, kwargs, output, copy))

    positions = torch.linspace(0, last, PROBE_ROWS, dtype=torch.float32, device="cpu").long()
    rows = torch.arange(PROBE_ROWS, device="cpu")
    with ExitStack() as hooks:
        for module in found:
            hooks.enter_context(module.register_forward_hook(note, with_kwargs=True))
        _forward(model, AttentionRecorder().attend, rows, positions)
    return found


def _alike(some: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of a model of ``dtype`` are equal up to rounding."""
    known = some.isfinite()
    if not torch.equal(known, others.isfinite()):
        return False
    some, others = some[known], others[known]
    if not len(some):
        return True
    return bool((some - others).abs().max() <= ROUNDING[dtype] * some.abs().max().clamp(min=1e-6))

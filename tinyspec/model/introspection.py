"""What attention a model calls, and in which order: read off forwards of a few rows, not off names.

The attention of those forwards computes nothing; it notes what reaches it. The masks that a model
makes for itself say which keys a layer sees, whether or not a window is passed on. With attention
silenced no row may know its neighbours: where one does, the model keeps state other than keys and
values. Knows transformers' interfaces; no pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface, PreTrainedModel

from tinyspec.errors import unsupported
from tinyspec.model.attention_calls import AttentionCall, LayerShape, Reach, Survey
from tinyspec.model.supported import vocab_size

ROWS = 12
# How far logits move, by the largest of them, when rows stand elsewhere in a pass, at most.
ROUNDING = {torch.float32: 5e-4, torch.bfloat16: 0.05, torch.float16: 0.01}
_ONE_AT_A_TIME = Lock()
# Arguments of an attention call that say what is known otherwise, or nothing without a cache.
SILENT = {
    *("dropout", "position_ids", "use_cache", "cache_position", "past_key_values", "layer_idx"),
    *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
    *("logits_to_keep", "head_mask", "position_embeddings"),
    *("input_ids", "inputs_embeds", "num_items_in_batch", "training"),
}


class _Unknown(Exception):
    """What of a call is not known here."""


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


class _Masks:
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
                    raise _Unknown("has a mask that is neither causal, nor sliding, nor chunked")
                return reach
        raise _Unknown("has a mask of its own making")

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


class AttentionRecorder:
    """Stands for attention in one forward: notes every call, and returns zeros."""

    def __init__(self, masks: _Masks):
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
        **scores: Any,
    ) -> tuple[Tensor, None]:
        """As an attention function of transformers'."""
        try:
            reach = self._reach(module, mask, **scores)
        except _Unknown as error:
            self.reason = self.reason or f"{type(module).__name__} {error}"
            reach = Reach()
        rows, heads, width = query.shape[2], query.shape[1], value.shape[-1]
        size = max(query.shape[-1], width)
        shape = LayerShape(heads, key.shape[1], size, scores.get("softcap") or 0.0)
        self.calls.append(AttentionCall(module, shape, reach))
        self.keys.append(key.clone())
        return query.new_zeros(len(query), rows, heads, width), None

    def _reach(
        self,
        module: nn.Module,
        mask: Tensor | None,
        is_causal: bool | None = None,
        sliding_window: int | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **others: Any,
    ) -> Reach:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if mask is None and not causal:
            raise _Unknown("is not causal")
        unknown = sorted(name for name, v in others.items() if v is not None and name not in SILENT)
        if unknown:
            raise _Unknown(f"gives attention {', '.join(unknown)}")
        window = sliding_window or 0
        if mask is None:
            return Reach(window)
        reach = self._masks.reach(mask)
        if window not in (0, reach.window):
            raise _Unknown(f"has a window of {window} and a mask with another")
        return reach


def accepted(model: nn.Module, **given: Any) -> dict[str, Any]:
    """Those of the arguments that the model's forward takes."""
    takes = inspect.signature(type(model).forward).parameters
    open_ended = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return {name: value for name, value in given.items() if open_ended or name in takes}


def survey(
    model: PreTrainedModel,
    implementation: str,
    listen: Callable[[AttentionRecorder | None, Tensor | None], None],
) -> Survey:
    """Run a few rows through ``model``, whose attention is ``implementation`` and, once told so by
    ``listen``, calls the recorder.

    Raises UnsupportedModelError where what reaches attention is not all that a row has to know.
    """
    places = torch.arange(ROWS)
    ids = (places * 7 + 3) % vocab_size(model)
    masks = _Masks()

    def forward(order: Tensor, ahead: int = 0, **more: Any) -> tuple[AttentionRecorder, Tensor]:
        recorder = AttentionRecorder(masks)
        at = (places[order] + ahead).to(model.device)
        listen(recorder, at)
        arguments = accepted(
            model,
            input_ids=ids[order][None].to(model.device),
            position_ids=at[None],
            use_cache=False,
            return_dict=True,
            **more,
        )
        try:
            return recorder, model(**arguments).logits[0].float()
        except Exception as error:
            why = f"a forward over its attention's interface raised {type(error).__name__}: {error}"
            raise unsupported(model, why) from error
        finally:
            listen(None, None)

    with masks.noted(implementation):
        first, logits = forward(places)
    turned, other = forward(places.flip(0))
    ends = torch.tensor([0, ROWS - 1], device=model.device)
    moved, elsewhere = forward(places, 1, logits_to_keep=ends)
    keeps_logits = len(elsewhere) == len(ends)
    reason = first.reason
    if not first.calls:
        reason = "it calls no attention"
    elif not _alike(logits, other.flip(0), model.dtype):
        reason = "with attention left out its rows still know each other: it keeps other state"
    elif len(turned.calls) != len(first.calls):
        reason = "how often it calls attention depends on its tokens"
    elif all(map(torch.equal, first.keys, moved.keys)) and torch.equal(
        logits[ends] if keeps_logits else logits, elsewhere
    ):
        reason = "its rows do not know their positions (it does not heed position_ids)"
    if reason is not None:
        raise unsupported(model, reason)
    return Survey(first.calls, keeps_logits)


def _alike(some: Tensor, others: Tensor, dtype: torch.dtype) -> bool:
    """Whether logits of a model of ``dtype`` are the same but for rounding."""
    known = some.isfinite()
    if not torch.equal(known, others.isfinite()):
        return False
    some, others = some[known], others[known]
    if not len(some):
        return True  # it says nothing either way
    return bool((some - others).abs().max() <= ROUNDING[dtype] * some.abs().max().clamp(min=1e-6))

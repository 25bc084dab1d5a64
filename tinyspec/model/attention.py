"""Attention of a served model over the pages of the pass that is running.

Two ways to the same kernels: ``PagedAttention`` replaces attention modules of the standard
structure; ``paged_attention_function`` serves every module that calls transformers' attention
interface. Neither knows requests; what a pass needs is in one ``AttentionContext``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import itemgetter
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from tinyspec.kernels.backend import AttentionMetadata, Kernels, LayerStates
from tinyspec.kernels.twins.attention_plan import CausalMask
from tinyspec.model.gradients import Tape
from tinyspec.model.one_dnn import PrepackedWeights
from tinyspec.model.shadow import standing_in
from tinyspec.model.torch_state import NO_AUTOCAST, Autocast


@dataclass(frozen=True)
class LayerShape:
    """Heads of one attention layer, the softcap of its scores (0: none), and whether each head has
    a sink."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softcap: float = 0.0
    sinks: bool = False


@dataclass(frozen=True)
class AttentionCall:
    """One attention call of a forward, by a module of this name. reach: the keys that a row attends
    to; scale: of the scores."""

    module: nn.Module
    shape: LayerShape
    reach: CausalMask
    scale: float
    name: str = ""


class ModuleCall(NamedTuple):
    """One call of a module: its arguments, and what it returned; copy: of a tensor, then."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    copy: Any = None

    @property
    def hidden(self) -> Any:
        """The hidden states [1, R, hidden]."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def of(self, hidden: Tensor) -> ModuleCall:
        """The same call on other hidden states."""
        if self.args:
            return ModuleCall((hidden, *self.args[1:]), self.kwargs)
        return ModuleCall((), {**self.kwargs, "hidden_states": hidden})


# The name of paged attention in transformers' registries. No mask function has this name, so models
# build no masks: causality comes from the segments.
IMPLEMENTATION = "tinyspec"
TAKEN = (
    "this is a module of tinyspec's own copy of the model, which runs in its engine's passes only"
)


class UnlikeAtLoad(RuntimeError):
    """A pass called attention otherwise than the forward that was recorded."""


Attend = Callable[..., tuple[Tensor, None]]


class PendingRope(NamedTuple):
    """The rotation of a layer's q and k that is left to the KV write.

    owner: the layer's ``DeferredRope``. q, k: unrotated. angles: cos and sin [R, rot].
    """

    owner: Any
    q: Tensor
    k: Tensor
    angles: tuple[Tensor, Tensor]


class AttentionContext:
    """What attention layers share: the kernels, the KV pool, the running pass and its thread.

    kernels: set before the first pass. k, v: the pool, by attention call. rows: of each short
    convolution, states: of each recurrent layer, in order of the modules.
    layers: the attention calls of a pass, in order. autocast: of the forward that they are a part
    of. prepacked: for the linears of the next pass. A forward in another thread is refused.
    """

    kernels: Kernels
    hidden: Tensor | None = None  # the last ones of a pass [R, H], where they are kept

    def __init__(self, autocast: Autocast = NO_AUTOCAST) -> None:
        self.autocast = autocast
        self.hold()
        self.layers: list[AttentionCall] = []
        self.recorder: Attend | None = None
        self.metadata: AttentionMetadata | None = None
        self.positions: Tensor | None = None
        self.thread = 0
        self.slot_mapping: Tensor | None = None
        self.tape: Tape | None = None
        self.prepacked: PrepackedWeights | None = None
        # A norm, hidden states, and what the norm gives them, computed before it is called.
        self.ahead: tuple[nn.Module, Tensor, Tensor] | None = None
        self._pending: PendingRope | None = None
        self._calls = self._convolutions = self.scans = 0

    def record(self, recorder: Attend | None, positions: Tensor | None = None) -> None:
        """Send this thread's attention calls to ``recorder``; None ends it."""
        self.recorder, self.positions = recorder, positions
        self.thread = get_ident()

    def begin(
        self,
        metadata: AttentionMetadata,
        slot_mapping: Tensor,
        positions: Tensor,
        tape: Tape | None = None,
    ) -> None:
        """A pass begins in this thread; tape: of one that is differentiated."""
        self.metadata, self.slot_mapping, self.positions = metadata, slot_mapping, positions
        self.tape, self.thread = tape, get_ident()
        self._calls = self._convolutions = self.scans = 0

    def hold(
        self,
        k: Sequence[Tensor] = (),
        v: Sequence[Tensor] = (),
        rows: Sequence[Tensor] = (),
        states: Sequence[LayerStates] = (),
    ) -> None:
        """Passes read and write these pools from now on."""
        self.k, self.v, self.rows, self.states = k, v, rows, states

    def check(self) -> None:
        """Raise RuntimeError if the forward that ended made fewer attention calls than recorded at
        load, or left a rotation undone."""
        if self._calls != len(self.layers):
            raise UnlikeAtLoad(
                f"the model called attention {self._calls} times in a pass, {len(self.layers)} "
                "times when it was loaded: which of its layers run must not depend on its rows"
            )
        convolutions = "short convolutions", self._convolutions, len(self.rows)
        for kind, ran, there in (convolutions, ("recurrent layers", self.scans, len(self.states))):
            if ran != there:
                raise UnlikeAtLoad(
                    f"the model ran {ran} {kind} in a pass and has {there}: which of its layers "
                    "run must not depend on its rows"
                )
        if self._pending is not None:
            raise UnlikeAtLoad("a layer rotated q and k and then did not call attention")

    def end(self) -> None:
        """The pass has ended or failed."""
        self.metadata = self.slot_mapping = self.positions = self.tape = self._pending = None
        self.prepacked = self.hidden = None

    def resumed(self) -> Callable[[], AbstractContextManager[None]]:
        """Of this moment of a pass: what makes a block that goes on from here, in any thread, also
        after the pass has ended."""
        kept = dict(vars(self))

        @contextmanager
        def block() -> Iterator[None]:
            before = dict(vars(self))
            vars(self).update(kept, thread=get_ident())
            try:
                yield
            finally:
                vars(self).update(before)

        return block

    @property
    def canonical(self) -> bool | None:
        """Whether the running pass is; None outside of passes."""
        return None if self.metadata is None else self.metadata.exact

    def serves(self) -> bool:
        """Whether this thread's pass is running."""
        return self.metadata is not None and self.thread == get_ident()

    def records(self) -> bool:
        """Whether this thread's calls go to ``recorder``."""
        return self.recorder is not None and self.thread == get_ident()

    def running(self) -> tuple[Kernels, AttentionMetadata, Tensor]:
        """Kernels, metadata and slots of this thread's pass. Raises RuntimeError outside of one."""
        metadata, slots = self.metadata, self.slot_mapping
        if not self.serves() or metadata is None or slots is None:
            raise RuntimeError(TAKEN)
        return self.kernels, metadata, slots

    def leave_rope(self, rope: PendingRope) -> None:
        """Leave the rotation of the next attention call's q and k to the KV write."""
        if self._pending is not None:
            raise UnlikeAtLoad("a layer rotated q and k twice before it called attention")
        self._pending = rope

    def take_rope(self, module: nn.Module, q: Tensor, k: Tensor) -> PendingRope | None:
        """The rotation that ``module`` has left to this call, or None.

        Raises RuntimeError if it was another module's, or q and k are not what was left unrotated.
        """
        if self._pending is None or not self.serves():
            return None
        rope, self._pending = self._pending, None
        own = rope.owner is vars(module).get("tinyspec_rope")
        if not own or (rope.owner.whole and not (q is rope.q and k is rope.k)):
            raise UnlikeAtLoad(
                f"{type(module).__name__} called attention with other q and k than were rotated "
                "before, unlike when the model was loaded: this must not depend on its rows"
            )
        return rope

    def _next(self, module: nn.Module) -> AttentionCall:
        """The record of this attention call; RuntimeError if it is another module's."""
        recorded = self.layers[self._calls : self._calls + 1]
        if not recorded or recorded[0].module is not module:
            names = [layer.name for layer in self.layers if layer.module is module]
            raise UnlikeAtLoad(
                f"attention call {self._calls} of a pass came from "
                f"{[*names, type(module).__name__][0]}, when the model was loaded from "
                f"{recorded[0].name if recorded else 'no module'}: which of its layers run, and in "
                "which order, must not depend on its rows"
            )
        self._calls += 1
        return recorded[0]

    def angles(
        self, given: tuple[Tensor, Tensor], layout: Callable[[Tensor], Tensor] = itemgetter(0)
    ) -> tuple[Tensor, Tensor]:
        """``layout`` of cos and sin [1, R, n], [R, rot]: the same tensors for all layers of a pass
        that are given the same."""
        if self.metadata is None:
            return given  # ``attend`` raises
        cos, sin = given
        key = layout, id(cos), id(sin)
        if key not in self.metadata.derived:
            # Keeps cos and sin alive: id() is the key.
            self.metadata.derived[key] = (layout(cos), layout(sin)), given
        return self.metadata.derived[key][0]

    def attend(
        self,
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        norm: dict[str, Any],
        **scores: Any,
    ) -> Tensor:
        """One attention call of ``module``: write k and v [R, Hkv, D] to their slots, attend with q
        [R, Hq, D].

        v may have another width than q and k: heads of the cache have the larger.
        """
        kernels, metadata, slots = self.running()
        number, layer = self._calls, self._next(module)
        cos, sin = rope or (None, None)
        k_cache, v_cache = self.k[number], self.v[number]
        dim, width = k_cache.shape[-1], v.shape[-1]
        if q.shape[-1] < dim:
            q, k = pad(q, (0, dim - q.shape[-1])), pad(k, (0, dim - k.shape[-1]))
        if width < dim:
            v = pad(v, (0, dim - width))
        q, k, v = self.autocast.cast(q, k, v)
        scores |= layer.reach._asdict()  # window and chunk

        derived, caches = metadata.derived, (k_cache, v_cache)

        def write(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor, **norm: Any) -> Tensor:
            norm |= zip(("q_weight", "k_weight"), weights, strict=False)
            given = q, k, v, cos, sin, *caches, slots
            return kernels.fused_kv_write(*given, derived=derived, **norm)

        with self.autocast.off():
            if self.tape is not None and torch.is_grad_enabled():

                def written() -> Tensor:
                    return k_cache.flatten(0, 1).index_select(0, slots.clamp(min=0))

                def read(q: Tensor, **scores: Any) -> Tensor:
                    return kernels.paged_attention(q, *caches, metadata, **scores)

                calls = write, written, read, kernels.backend == "torch"
                out = self.tape.attend(number, *calls, (q, k, v), rope, norm, scores)
            else:
                out = kernels.paged_attention(write(q, k, v, **norm), *caches, metadata, **scores)
        return out if width == dim else out[..., :width].contiguous()

    def convolve(self, number: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Short convolution ``number`` of a pass, of rows x [R, C]; weight [C, K], bias [C]."""
        if self.records():
            return x
        kernels, metadata, slots = self.running()
        self._convolutions += 1
        (x,) = self.autocast.cast(x)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return kernels.short_conv(x, weight, bias, self.rows[number], slots, metadata)

        with self.autocast.off():
            if self.tape is not None and torch.is_grad_enabled():
                return self.tape.convolve(number, run, x, weight, bias)
            return run(x, weight, bias)


def eps_name(norm: nn.Module) -> str:
    """The attribute that holds a norm's epsilon."""
    return "variance_epsilon" if hasattr(norm, "variance_epsilon") else "eps"


class PagedAttention(nn.Module):
    """Attention over pages with q, k, v and o projections, RoPE and optional q/k norm."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    o_proj: nn.Module
    q_norm: Any
    k_norm: Any

    head_dim: int
    tinyspec_context: AttentionContext
    tinyspec_scores: dict[str, float]

    def _norm(self) -> dict[str, Any]:
        """What the KV write needs to norm q and k: the weights may have been replaced."""
        if "q_norm" not in self._modules:
            return {}
        q, k = self.q_norm, self.k_norm
        return {"q_weight": q.weight, "k_weight": k.weight, "eps": getattr(q, eps_name(q))}

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, R, hidden]; position_embeddings cos and sin [1, R, rot]."""
        rows, linears = hidden_states.shape[1], (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (linear(hidden_states).view(rows, -1, self.head_dim) for linear in linears)
        context, scores = self.tinyspec_context, self.tinyspec_scores
        rope = context.angles(position_embeddings)
        out = context.attend(self, q, k, v, rope, self._norm(), **scores)
        return self.o_proj(out.view(1, rows, -1)), None


def fused_attention(
    module: nn.Module, context: AttentionContext, scale: float, softcap: float
) -> PagedAttention:
    """The stand-in of an attention module that has its parts."""
    scores = {"scale": scale, "softcap": softcap}
    return standing_in(module, PagedAttention, tinyspec_context=context, tinyspec_scores=scores)


def paged_attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [1, Hq, R, D], key and value [1, Hkv, R, D]."""
    context: AttentionContext = module.tinyspec_context  # type: ignore[assignment]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if context.records() and context.recorder is not None:
        known = {"softcap": softcap, "s_aux": s_aux, **kwargs}
        return context.recorder(module, query, key, value, attention_mask, scale=scale, **known)
    rope = context.take_rope(module, query, key)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    form = {"interleaved": True} if rope and rope.owner.rope.interleaved else {}
    scores = {"scale": scale, "softcap": softcap or 0.0, "sinks": s_aux}
    out = context.attend(module, q, k, v, rope and rope.angles, form, **scores)
    return out[None], None

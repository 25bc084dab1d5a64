"""Layers with a recurrent state over the pass that is running: gated delta rule and Mamba 2.

transformers' modules of all these families call functions of the same names. A stand-in runs the
code of its module's own forward, in which these names are the engine's: so whatever a family does
around them (projections, gates, norms) is done as it does it. Knows no model by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from inspect import unwrap
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from tinyspec.config import MOST_TAPS, STATE_TILE
from tinyspec.kernels import backend
from tinyspec.kernels.backend import Checkpoints, LayerStates
from tinyspec.model.attention import AttentionContext
from tinyspec.model.scratch_weights import scratch_weights
from tinyspec.model.shadow import standing_in
from tinyspec.model.trial import ROWS, Trials, begin_pass, close, probe_rows
from tinyspec.model.wrappers import runs_class_forward

CONV, DELTA, MAMBA2 = "causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
# What modules call with a cache, or in training: they have none, and are in eval mode.
OTHERS = (
    *("causal_conv1d_update", "torch_recurrent_gated_delta_rule"),
    *("mamba2_selective_state_update", "mamba2_split_conv1d_scan_combined"),
)
NO_FUNCTIONS = f"its layers with a state do not all call {CONV} and one of {DELTA} and {MAMBA2}"
# Of the norms of queries and keys, in all libraries that have them.
EPS = 1e-6
# Elsewhere on a CPU bits of softplus may depend on the place of a number.
WIDTH = 64
# Roundings of a result by which sums in another order may differ.
ROUNDINGS = 16


@dataclass(frozen=True)
class RecurrentShape:
    """Of a recurrent layer: inputs of its convolution and their dtype, heads of keys and of values,
    their sizes and dtype."""

    channels: int
    inputs: torch.dtype
    key_heads: int
    key_dim: int
    heads: int
    value_dim: int
    dtype: torch.dtype

    def parts(self, states: int, ring: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of its ``LayerStates``."""
        heads, width = self.heads, self.key_heads * self.key_dim + self.heads * self.value_dim
        of_model = (self.channels, self.inputs), (width, self.dtype)
        rings = (*of_model, (2 * heads, torch.float32))
        state = (states, heads, self.key_dim, self.value_dim), torch.float32
        return [*(((states, ring, width), dtype) for width, dtype in rings), state]

    def states(self, states: int, ring: int, new: Callable[..., Tensor]) -> LayerStates:
        """Of so many sequences. new: as ``torch.zeros``, on the model's device."""
        return LayerStates(*(new(shape, dtype=kind) for shape, kind in self.parts(states, ring)))


class RecurrentLayer(nn.Module):
    """The module's own forward, with the functions of the engine."""

    tinyspec_forward: Callable[..., Tensor]

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """hidden_states [1, R, hidden]."""
        _refuse_others(kwargs)
        return self.tinyspec_forward(self, hidden_states)


def _refuse_others(given: dict[str, Any]) -> None:
    """Raise for what a recurrent layer is given in no pass: masks, caches, bounds of sequences."""
    others = [name for name, value in given.items() if isinstance(value, (Tensor, tuple))]
    others = [name for name in others if name not in ("position_ids", "position_embeddings")]
    if others or given.get("cache") is not None or given.get("cache_params") is not None:
        raise RuntimeError(f"a recurrent layer was given {', '.join(others) or 'a cache'}")


class _Calls:
    """The functions that a module calls, recurrent layer ``number``, over the pass of ``context``.
    found: where it was recorded, what makes its shape."""

    def __init__(self, context: AttentionContext, number: int):
        self._context, self._number = context, number
        self.found: list[Any] = []

    def convolve(
        self,
        hidden_states: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """As ``causal_conv1d_fn``: hidden_states [1, C, R], weight [C, K], bias [C]."""
        _refuse_others(kwargs)
        if weight.shape[1] > MOST_TAPS + 1:
            raise RuntimeError(f"a convolution of {weight.shape[1]} inputs is wider than its ring")
        context, rows = self._context, hidden_states[0].T
        if context.records():
            self.found = [rows.shape[1], context.autocast.dtype or rows.dtype]
        else:
            kernels, metadata, slots = context.running()
            assert metadata.checkpoints is not None
            ring, places = context.states[self._number].conv, metadata.checkpoints.slots
            (rows,) = context.autocast.cast(rows)
            weight = weight.contiguous()
            with context.autocast.off():
                own = rows
                rows = kernels.short_conv(own, weight, bias, ring, slots, metadata, ring=True)
                kernels.keep_rows(ring, own, places, metadata)
        if activation is not None:
            rows = _activation(activation)(rows)
        return rows.T[None]

    def delta_rule(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """As ``torch_chunk_gated_delta_rule``: query, key [1, R, Hk, Dk], value [1, R, H, Dv], g
        and beta [1, R, H]."""
        _refuse_others(kwargs)
        if self._recorded(key, value):
            return value, None
        gates = torch.stack([g[0].float(), beta[0].float()], -1)
        scale, eps = query.shape[-1] ** -0.5, EPS if use_qk_l2norm_in_kernel else None
        rule = {"delta": True, "scale": scale, "eps": eps}
        return self._scan(query[0], key[0], value[0], gates, rule).to(query.dtype)[None], None

    def mamba2(
        self,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        *,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **kwargs: Any,
    ) -> Tensor:
        """As ``mamba2_chunk_scan``: hidden_states [1, R, H, Dv], dt [1, R, H], A [H], B and C
        [1, R, Hk, Dk], D and dt_bias [H]."""
        _refuse_others(kwargs)
        if self._recorded(B, hidden_states):
            return hidden_states.float()
        heads, values = dt.shape[-1], hidden_states[0]
        dt = dt[0] if dt_bias is None else dt[0] + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(F.pad(dt, (0, -heads % WIDTH)))[:, :heads]
        dt = dt.clamp(*dt_limit).float()
        gates = torch.stack([A.float() * dt, dt], -1)
        out = self._scan(C[0], B[0], values, gates, {"delta": False})
        return (out if D is None else out + D.float()[:, None] * values.float())[None]

    def _recorded(self, key: Tensor, value: Tensor) -> bool:
        """Whether this thread's calls are."""
        if records := self._context.records():
            dtype = self._context.autocast.dtype or value.dtype
            self.found += [*key.shape[2:], *value.shape[2:], dtype]
        return records

    def _scan(self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, rule: dict[str, Any]) -> Tensor:
        context = self._context
        kernels, metadata, _ = context.running()
        if context.tape is not None and torch.is_grad_enabled():
            raise NotImplementedError("recurrent layers have no exact gradients: use torch.no_grad")
        q, k, v = context.autocast.cast(q, k, v)
        states = context.states[self._number]
        with context.autocast.off():
            out: Tensor = kernels.recurrent(q, k, v, gates, states, metadata, **rule)
        context.scans += 1
        return out


_activation: Callable[[str], nn.Module] = cache(ACT2FN.__getitem__)


def _unused(name: str, *_: Any, **__: Any) -> Any:
    raise RuntimeError(f"a recurrent layer called {name}, which it does not without a cache")


def _own_forward(module: nn.Module) -> FunctionType | None:
    """The code of a module's forward, if it is transformers' and calls the functions known here."""
    forward = unwrap(type(module).forward)
    if not (isinstance(forward, FunctionType) and runs_class_forward(module)):
        return None
    names, home = set(forward.__code__.co_names), forward.__module__ or ""
    found = [name for name in (CONV, DELTA, MAMBA2) if name in names]
    ours = home.startswith("transformers.") and CONV in found and len(found) == 2
    given = forward.__globals__
    return forward if ours and all(given[name].__module__ == home for name in found) else None


def _stand_in(module: nn.Module, own: _Calls) -> nn.Module:
    """It runs the same code with these functions for those of the same names."""
    forward = _own_forward(module)
    assert forward is not None
    calls: dict[str, Callable[..., Any]] = {name: partial(_unused, name) for name in OTHERS}
    calls |= {CONV: own.convolve, DELTA: own.delta_rule, MAMBA2: own.mamba2}
    names = {**forward.__globals__, **calls}
    parts = forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__
    made = FunctionType(*parts)
    made.__kwdefaults__ = forward.__kwdefaults__
    return standing_in(module, RecurrentLayer, tinyspec_forward=made)


def _shape(width: int, context: AttentionContext, module: Any) -> RecurrentShape | None:
    """The shape of a layer whose stand-in gives rows [.., width] of one sequence what it gives
    them, up to rounding; None of another."""
    trial, like = AttentionContext(context.autocast), next(module.parameters())
    trial.kernels = backend.load("torch" if like.device.type == "cpu" else "triton")
    # Of one size: what a state keeps of larger ones hides others, and rounds them.
    rows = probe_rows((width,), like.dtype, like.device)
    rows = F.rms_norm(rows, rows.shape[-1:])[None]
    with scratch_weights(module):
        own, calls = module(rows), _Calls(trial, 0)
        standing = _stand_in(module, calls)
        trial.record(partial(_unused, "attention"))
        standing(rows)
        trial.record(None)
        shape = RecurrentShape(*calls.found)
        trial.hold(states=[shape.states(1, ROWS, partial(torch.zeros, device=like.device))])
        begin_pass(trial, like.device)
        assert trial.metadata is not None
        place = torch.arange(ROWS, device=like.device)
        first = place[:1].int()
        trial.metadata.checkpoints = Checkpoints(first, first, first + ROWS, place, STATE_TILE)
        found = standing(rows)
    trial.check()
    return shape if close(found, own, ROUNDINGS) else None


def recurrent_stand_ins(
    model: PreTrainedModel, context: AttentionContext, trials: Trials
) -> tuple[dict[nn.Module, nn.Module], list[RecurrentShape]]:
    """The stand-ins of recurrent layers, in order of the modules, and their shapes."""
    width = model.config.get_text_config(decoder=True).hidden_size
    made, shapes = dict[nn.Module, nn.Module](), list[RecurrentShape]()
    for module in filter(_own_forward, model.modules()):
        if (shape := trials.of(module, partial(_shape, width, context, module))) is not None:
            made[module] = _stand_in(module, _Calls(context, len(made)))
            shapes.append(shape)
    return made, shapes

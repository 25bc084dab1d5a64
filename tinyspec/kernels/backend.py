"""The engine's kernels: Triton on a GPU, their plain-torch twins on a CPU, one set of signatures.

Which of the two runs is decided once per engine, by ``load``. What attention needs to know of a
pass is ``AttentionMetadata``: its rows, grouped by sequence. It knows nothing of requests, drafts
or canonical passes: a prompt chunk, a decode row and the rows of a verify are all segments, so one
reduction serves them all. All that the package reads of the environment, beside the key of a probe,
is read here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

# What cuBLAS, and torch where it calls cuBLAS, look at once and tell by no function. What only
# logs, no product depends on.
PREFIXES = ("CUBLAS", "TORCH_CUBLAS", "NVIDIA_TF32_OVERRIDE", "DISABLE_ADDMM_CUDA_LT")
LOGS = "_LOG"
MODULES = {
    "triton": (
        *("kv_write", "paged_attention", "accept", "sample", "hidden_states", "experts"),
        *("short_conv", "recurrent"),
    ),
    "torch": (
        *("twins.layers", "twins.attention", "twins.sample", "twins.short_conv"),
        "twins.recurrent",
    ),
}


@dataclass(frozen=True)
class Kernels:
    """One implementation of every kernel; the docstrings of the twins define what each does."""

    backend: str
    fused_kv_write: Callable[..., Any]
    paged_attention: Callable[..., Any]
    accept_truncate: Callable[..., Any]
    sample: Callable[..., Any]
    log_softmax: Callable[..., Any]
    softmax: Callable[..., Any]
    chosen_logprobs: Callable[..., Any]
    linear: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    gated: Callable[..., Any]
    sort_by_expert: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    add_experts: Callable[..., Any]
    short_conv: Callable[..., Any]
    recurrent: Callable[..., Any]
    keep_rows: Callable[..., Any]


@dataclass
class Checkpoints:
    """Of a pass through layers with a recurrent state. Each segment's sequence has a state, as it
    is after ``at`` of its tokens, and a ring of places for what its rows since then were.

    owners: [S] int32, which state and which ring. at: [S] int32, 0 for none; a multiple of
    ``tile``, like ``to``: [S] int32, up to which token the pass moves the state; ``at``: it
    stays. slots: [R] int64, place of each row in the rings, -1 for none. tile: tokens that a
    backend may sum at once, from multiples of it on.
    """

    owners: Tensor
    at: Tensor
    to: Tensor
    slots: Tensor
    tile: int


class LayerStates(NamedTuple):
    """What one recurrent layer keeps of N sequences. In rings of L places what its last rows were:
    conv [N, L, C], which its convolution reads, kv [N, L, Hk * Dk + H * Dv] and gates [N, L, 2 * H]
    fp32. state: [N, H, Dk, Dv] fp32."""

    conv: Tensor
    kv: Tensor
    gates: Tensor
    state: Tensor


@dataclass
class AttentionMetadata:
    """Segment s is the rows ``cu_seqlens_q[s]:cu_seqlens_q[s + 1]``: consecutive tokens of one
    sequence, the last of them at position ``seq_lens[s] - 1``. Rows after the last are padding.

    page_table:   [S, P] int32, a sequence's pages in order; entries past its last page are 0.
    cu_seqlens_q: [S + 1] int32, first row of every segment.
    seq_lens:     [S] int32, context length including the segment's own rows.
    page_size:    tokens per page.
    exact:        whether the pass is canonical; in others a backend may use a faster reduction.
    derived:      what a backend computes once per pass and reuses in every layer.
    kept:         what it leaves to the passes behind, as long as the pages are there.
    checkpoints:  where layers with a recurrent state begin; None where there are none.
    """

    page_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    page_size: int
    exact: bool = True
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    kept: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    checkpoints: Checkpoints | None = None

    @classmethod
    def of(
        cls,
        spans: Sequence[tuple[int, int]],
        page_tables: Sequence[Sequence[int]],
        page_size: int,
        device: torch.device | str = "cpu",
        exact: bool = True,
    ) -> AttentionMetadata:
        """One segment per sequence: its tokens at positions ``first`` to ``end - 1``, for every
        (first, end) of ``spans``; ``page_tables``: its pages in order, enough for ``end`` tokens.
        """
        counts = [end - first for first, end in spans]
        lengths = [end for _, end in spans]
        width = max(map(len, page_tables))

        def column(values: Sequence[Any]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device="cpu").to(device)

        return cls(
            page_table=column([[*pages, *[0] * (width - len(pages))] for pages in page_tables]),
            cu_seqlens_q=column(list(accumulate(counts, initial=0))),
            seq_lens=column(lengths),
            page_size=page_size,
            exact=exact,
        )


def interprets_triton() -> bool:
    """Whether Triton's kernels run interpreted, on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def of_cublas() -> dict[str, str]:
    """What is set of the variables that cuBLAS's products may depend on."""
    found = (name for name in os.environ if name.startswith(PREFIXES) and LOGS not in name)
    return {name: os.environ[name] for name in sorted(found)}


def refusal(backend: str, device_type: str) -> str | None:
    """Why ``backend`` cannot run on a device, or None."""
    if backend == "torch" and device_type != "cpu":
        return "the twins run on a CPU only"
    if backend == "triton" and device_type == "cpu" and not interprets_triton():
        return "on a CPU Triton runs interpreted only: set TRITON_INTERPRET=1 first"
    return None


def load(backend: str) -> Kernels:
    """The kernels of ``backend``: "triton" or "torch" (the twins).

    Triton is imported here and not before: TRITON_INTERPRET must be set before it is imported, and
    on a CPU it need not be installed.
    """
    assert backend in MODULES, backend
    found: dict[str, Any] = {}
    for name in MODULES[backend]:
        found |= vars(import_module(f"{__package__}.{name}"))
    return Kernels(backend, **{each.name: found[each.name] for each in fields(Kernels)[1:]})

"""Every kernel at sizes that tell, with its check, its work and what stands beside it.

On a GPU the Triton kernels, on a CPU their twins. Knows how inputs are made; times nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import device_time, roofline
from benchmarks.device_time import CUDA, Call
from benchmarks.roofline import Heads, States, Work
from tinyspec.config import STATE_TILE, EngineConfig
from tinyspec.kernels import backend
from tinyspec.kernels.backend import AttentionMetadata, LayerStates
from tinyspec.runner.batch import Batch

DEVICE = "cuda" if CUDA else "cpu"
KERNELS = backend.load("triton" if CUDA else "torch")
PAGE = EngineConfig().resolve(device_type=DEVICE, model_positions=4096).page_size or 0
DTYPE = torch.bfloat16
HEADS, SMOKE_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
Spans = list[tuple[int, int]]


def decoding(batch: int, context: int) -> Spans:
    return [(context - 1, context)] * batch


# (first, end) of every sequence; on a CPU and under the sanitizer an eighth of the contexts' root.
ATTENTION: dict[str, Spans] = {
    "decode 64 x 4096": decoding(64, 4096),
    "decode 1 x 32768": decoding(1, 32768),
    "decode 64 x 1024": decoding(64, 1024),
    "decode 1 x 1024": decoding(1, 1024),
    "prompt 4096": [(0, 4096)],
    "decode 64 x 512 beside 1 x 131072": [*decoding(64, 512), *decoding(1, 131072)],
    "verify 8 x 17 of 4096": [(4079, 4096)] * 8,
    "decode 63 x 1024 beside a prompt of 1985": [*decoding(63, 1024), (0, 1985)],
}
# Greedy or sampled rows of a vocabulary, forced to none.
SAMPLE = {
    f"sample {rows} x 151936, {kind}": (rows, 151936, kind == "with noise")
    for rows, kind in product((512, 64, 1), ("greedy", "with noise"))
}
# Of Qwen3.5-9B's shape.
STATES, SMOKE_STATES = States(16, 32, 128, 128), States(1, 2, 16, 8)
RECURRENT: dict[str, Spans] = {
    "recurrent 64 x 1": decoding(64, 1029),
    "recurrent 1 x 1": decoding(1, 1029),
    "recurrent prompt 2048": [(0, 2048)],
}
WRITES = {f"KV write {rows} rows": rows for rows in (4096, 64)}


@dataclass
class Case:
    """calls: the same work on different memory. wrong: what a check found, or None. beside: another
    implementation of the same, for a ratio."""

    calls: list[Call]
    work: Work
    wrong: Callable[[], str | None]
    beside: dict[str, Call]


def several(work: Work, make: Callable[[], Call]) -> list[Call]:
    """Calls on as many sets of inputs as do not fit the caches together."""
    return [make() for _ in range(device_time.sets(work.bytes))]


def near(found: Tensor, expected: Tensor, most: float = 1e-2) -> str | None:
    """None, or how far one is from the other, which was computed in fp32."""
    error = distance(found, expected)
    return None if error < most else f"{error} from fp32"


def small(spans: Spans) -> Spans:
    """A few short sequences of the same kinds."""
    kept = list(dict.fromkeys(spans))[-3:]
    return [(max(0, min(40, end) - (end - first)), min(40, end)) for first, end in kept]


def attention_case(spans: Spans, heads: Heads, page: int = PAGE) -> Case:
    work, inputs = roofline.attention(heads, spans), []

    def make() -> Call:
        inputs.append(attention_inputs(spans, heads, page))
        return partial(KERNELS.paged_attention, *inputs[-1], scale=heads.dim**-0.5)

    calls = several(work, make)
    first = inputs[0]
    beside = {"sdpa": sdpa(*first, 0, DTYPE)} if len(spans) == 1 else {}

    def wrong() -> str | None:
        out, rows = calls[0](), first[3].cu_seqlens_q.tolist()
        for segment in {0, len(spans) - 1}:
            expected = sdpa(*first, segment, torch.float32)()[0].transpose(0, 1)
            if said := near(out[rows[segment] : rows[segment + 1]], expected, 2e-2):
                return f"sequence {segment}: {said}"
        return None

    return Case(calls, work, wrong, beside)


def attention_inputs(spans: Spans, heads: Heads, page: int) -> tuple[Any, ...]:
    """q, caches and metadata; the pages of the sequences are scattered."""
    counts = [-(-end // page) for _, end in spans]
    shuffled = torch.randperm(sum(counts)).tolist()
    tables = [[shuffled.pop() for _ in range(count)] for count in counts]
    rows = sum(end - first for first, end in spans)
    k, v = (normal(sum(counts), page, heads.kv, heads.dim) for _ in range(2))
    q = normal(rows, heads.q, heads.dim)
    return q, k, v, AttentionMetadata.of(spans, tables, page, DEVICE)


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, metadata: AttentionMetadata, segment: int, dtype: torch.dtype
) -> Callable[[], Tensor]:
    """Torch's attention of one sequence, whose pages are gathered here: [1, Hq, rows, D]."""
    begin, end = metadata.cu_seqlens_q[segment : segment + 2].tolist()
    count, length = end - begin, int(metadata.seq_lens[segment])
    pages = metadata.page_table[segment, : -(-length // metadata.page_size)].long()
    k, v = (x[pages].flatten(0, 1)[:length] for x in (k, v))
    q, k, v = (x.transpose(0, 1)[None].to(dtype).contiguous() for x in (q[begin:end], k, v))
    mask = None
    if 1 < count < length:
        mask = torch.ones(count, length, dtype=torch.bool, device=q.device).tril(length - count)
    causal = mask is None and count > 1
    attend: Any = F.scaled_dot_product_attention
    return partial(attend, q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=True)


def kv_write_case(rows: int, heads: Heads) -> Case:
    work = roofline.kv_write(heads, rows)

    def make() -> Call:
        q, k, v = (normal(rows, count, heads.dim) for count in (heads.q, heads.kv, heads.kv))
        half = torch.rand(rows, heads.dim // 2, device=DEVICE) * 6.28
        cos, sin = (torch.cat((x, x), dim=-1).to(DTYPE) for x in (half.cos(), half.sin()))
        pool = torch.zeros(2, -(-rows // PAGE), PAGE, heads.kv, heads.dim, dtype=DTYPE)
        keys, values = pool.to(DEVICE)
        slots = torch.randperm(len(keys) * PAGE, device=DEVICE)[:rows]
        return partial(KERNELS.fused_kv_write, q, k, v, cos, sin, keys, values, slots)

    calls = several(work, make)

    def wrong() -> str | None:
        out = calls[0]()
        q, k, v, cos, sin, keys, values, slots = calls[0].args
        for found, before in ((out, q), (keys.flatten(0, 1)[slots], k)):
            if said := near(found, rotated(before.float(), cos.float(), sin.float())):
                return said
        return None if torch.equal(values.flatten(0, 1)[slots], v) else "values"

    return Case(calls, work, wrong, {})


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE, the first half with the second."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def sample_case(rows: int, vocab: int, noise: bool) -> Case:
    work = roofline.sample(rows, vocab)
    heat, numbers = torch.full((rows,), 0.6 * noise, device=DEVICE), torch.arange(rows).to(DEVICE)
    calls = several(
        work,
        lambda: partial(
            KERNELS.sample,
            torch.randn(rows, vocab, device=DEVICE),
            heat,
            numbers * 7919,
            numbers,
        ),
    )

    def wrong() -> str | None:
        (tokens, logprobs), logits = calls[0](), calls[0].args[0]
        logits = logits / 0.6 if noise else logits
        expected = torch.log_softmax(logits.double(), -1).gather(1, tokens[:, None])[:, 0]
        if not torch.allclose(logprobs.double(), expected, atol=1e-4):
            return "log-probabilities"
        return None if noise or torch.equal(tokens, logits.argmax(-1)) else "tokens"

    return Case(calls, work, wrong, {})


def linear_case(rows: int, width: int) -> Case:
    work = roofline.linear(rows, width, width)
    calls = several(
        work, lambda: partial(KERNELS.linear, normal(rows, width), normal(width, width))
    )

    def wrong() -> str | None:
        x, weight = calls[0].args
        return near(calls[0](), x.float() @ weight.float().T)

    return Case(calls, work, wrong, {"cublas": partial(F.linear, *calls[0].args)})


def norm_case(rows: int, width: int) -> Case:
    work = roofline.norm(rows, width)

    def make() -> Call:
        given = normal(rows, width), normal(rows, width), normal(width)
        return partial(KERNELS.add_rms_norm, *given, 1e-6)

    calls = several(work, make)

    def wrong() -> str | None:
        (normed, summed), (x, residual, weight) = calls[0](), calls[0].args[:3]
        expected = F.rms_norm(summed.float(), (width,), weight.float(), 1e-6)
        return near(normed, expected) or (None if torch.equal(summed, x + residual) else "sums")

    return Case(calls, work, wrong, {})


def gated_case(rows: int, width: int) -> Case:
    work = roofline.activation(rows, width)
    calls = several(
        work, lambda: partial(KERNELS.gated, normal(rows, width), normal(rows, width), "silu")
    )

    def wrong() -> str | None:
        gate, up, _ = calls[0].args
        return near(calls[0](), F.silu(gate.float()) * up.float())

    return Case(calls, work, wrong, {})


MATRICES = {
    **{f"linear {n} x 4096 x 4096": (linear_case, n, 4096) for n in (1, 64, 2048)},
    **{f"residual and norm {n} x 4096": (norm_case, n, 4096) for n in (64, 2048)},
    **{f"gated {n} x 14336": (gated_case, n, 14336) for n in (64, 2048)},
}


def recurrent_case(spans: Spans, shape: States) -> Case:
    """The gated delta rule, from states at a multiple of ``STATE_TILE`` tokens on."""
    work = roofline.recurrent(shape, spans, STATE_TILE)
    count, rows = len(spans), sum(end - first for first, end in spans)
    width = shape.key_heads * shape.dk

    def make() -> Call:
        keys = [normal(rows, shape.key_heads, shape.dk) for _ in range(2)]
        values, ring = normal(rows, shape.heads, shape.dv), 4 * STATE_TILE
        kept = normal(count, ring, width + shape.heads * shape.dv)
        gates, old = (
            torch.stack((-torch.rand(size), torch.rand(size)), -1).to(DEVICE)
            for size in ((rows, shape.heads), (count, ring, shape.heads))
        )
        state = torch.randn(count, shape.heads, shape.dk, shape.dv, device=DEVICE)
        states = LayerStates(kept, kept, old.flatten(2), state)
        parts = [([0] * (end - first), first, [0] * (end // PAGE + 1)) for first, end in spans]
        owned = [
            (number, *(n // STATE_TILE * STATE_TILE for n in span))
            for number, span in enumerate(spans)
        ]
        metadata = Batch.of(parts, rows, PAGE, torch.device(DEVICE), (owned, ring)).metadata
        rule = {"delta": True, "scale": shape.dk**-0.5, "eps": 1e-6}
        return partial(KERNELS.recurrent, *keys, values, gates, states, metadata, **rule)

    calls = several(work, make)

    def wrong() -> str | None:
        q, k, v, gates, states, _ = calls[0].args
        first, end = spans[0]
        own = slice(0, min(end - first, 64))
        old = (
            torch.arange(first // STATE_TILE * STATE_TILE, first, device=DEVICE)
            % states.kv.shape[1]
        )
        old_k, old_v = states.kv[0, old].split([width, shape.heads * shape.dv], 1)
        k, v = (
            torch.cat([kept.view(-1, *x.shape[1:]), x[own]]).float()
            for kept, x in ((old_k, k), (old_v, v))
        )
        gates = torch.cat([states.gates[0, old].view(-1, shape.heads, 2), gates[own]])
        state = states.state[0] * bool(first)
        q, k = (F.normalize(x.float(), dim=-1, eps=1e-6) for x in (q[own], k))
        q, k = (x.repeat_interleave(shape.heads // shape.key_heads, 1) for x in (q, k))
        found = []
        for token, (g, beta) in enumerate(zip(*gates.unbind(-1), strict=True)):
            state = state * g.exp()[:, None, None]
            update = beta[:, None] * (v[token] - torch.einsum("hkv,hk->hv", state, k[token]))
            state = state + k[token][:, :, None] * update[:, None]
            if token >= len(old):
                found.append(torch.einsum("hkv,hk->hv", state, q[token - len(old)]))
        return near(calls[0]()[own], torch.stack(found) * shape.dk**-0.5)

    return Case(calls, work, wrong, {})


def accept_case(requests: int, width: int) -> Case:
    drafts = torch.randint(0, 9, (requests, width), device=DEVICE)
    targets = drafts.clone()
    targets[::2, 5] += 1

    def column(value: int) -> Tensor:
        return torch.full((requests,), value, dtype=torch.int32, device=DEVICE)

    lengths = column(width), column(width - 1), column(9), column(99)
    stops = torch.full((requests, 1), -1, device=DEVICE)
    decide = partial(KERNELS.accept_truncate, drafts, targets, *lengths, stops, column(9), PAGE)

    def wrong() -> str | None:
        found = decide().num_committed.tolist()
        return None if found == [6, width] * (requests // 2) else f"{found}"

    return Case([decide], roofline.accept(requests, width), wrong, {})


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float32, device=DEVICE).to(DTYPE)


def distance(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm; NaN where either has one."""
    expected = expected.double()
    return float((found.double() - expected).norm() / expected.norm())


def cases(smoke: bool) -> dict[str, Callable[[], Case]]:
    """Every kernel, the most telling first. smoke: tiny sizes under the same names."""
    heads = SMOKE_HEADS if smoke else HEADS
    found: dict[str, Callable[[], Case]] = {}
    for name, spans in ATTENTION.items():
        found[name] = partial(attention_case, small(spans) if smoke else spans, heads)
    for name, rows in WRITES.items():
        found[name] = partial(kv_write_case, min(rows, 9) if smoke else rows, heads)
    for name, (rows, vocab, noise) in SAMPLE.items():
        sizes = (min(rows, 4), 1000) if smoke else (rows, vocab)
        found[name] = partial(sample_case, *sizes, noise)
    for name, (make, rows, width) in MATRICES.items():
        found[name] = partial(make, *((min(rows, 5), 64) if smoke else (rows, width)))
    for name, spans in RECURRENT.items():
        of = SMOKE_STATES if smoke else STATES
        found[name] = partial(recurrent_case, small(spans) if smoke else spans, of)
    found["accept 64 x 17"] = partial(accept_case, 4 if smoke else 64, 17)
    return found

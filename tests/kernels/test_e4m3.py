"""Codes of the KV cache: of every number and of what they mean, by the kernels and by the twins,
which have them of torch; what is written as codes, and attention over them.

bf16 goes through the interpreter as fp32, which holds all its numbers.
"""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.kernels.cases import DEVICE, DTYPES, normal
from tests.kernels.layout import Sequence, lay_out, with_sinks
from tests.kernels.test_kv_write import TURNS, angles, slots
from tests.kernels.test_paged_attention import launched
from tests.support.budget import first
from tinyspec.kernels import kv_write
from tinyspec.kernels.twins import attention as twin_attention
from tinyspec.kernels.twins import layers as twin
from tinyspec.model.checksum import same_bits

CODES, NAN = twin.CODES, twin.NAN
BLOCK = tl.constexpr(4096)


@cache
def numbers(kind: str) -> Tensor:
    """All numbers of a 16-bit dtype; or, in fp32, every number of e4m3, what lies half-way between
    two, what lies beside these, subnormal numbers, and infinities."""
    if kind != "fp32":
        bits = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
        return bits.view({"bf16": torch.bfloat16, "fp16": torch.float16}[kind])
    own = twin.values(torch.arange(NAN).to(CODES), torch.float32)
    places = torch.cat([own, (own[1:] + own[:-1]) / 2, torch.tensor([464.0, 480, 1e30, math.inf])])
    beside = [places.nextafter(torch.tensor(to)) for to in (0.0, math.inf)]
    tiny = torch.tensor([1e-45, 1e-40, 1e-38, 1e-10, math.nan])
    found = torch.cat([places, *beside, tiny])
    return torch.cat([found, -found])


@triton.jit
def encode_kernel(x_ptr, code_ptr, count):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < count, other=0.0)
    tl.store(code_ptr + place, kv_write.encode(x), mask=place < count)


@triton.jit
def decode_kernel(code_ptr, value_ptr, wrong_ptr):
    """256 codes, in 64 rows of four."""
    row = tl.arange(0, 64)
    place = row[:, None] * 4 + tl.arange(0, 4)[None, :]
    value = kv_write.decode(tl.load(code_ptr + place))
    tl.store(value_ptr + place, value)
    tl.store(wrong_ptr + row, kv_write.not_numbers(value))


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp32"])
def test_every_number_has_its_code(kind):
    x = numbers(kind)
    expected = twin.stored(x, CODES)
    found = torch.full(x.shape, 0x55, dtype=CODES, device=DEVICE)
    given = (x.float() if kind == "bf16" else x).to(DEVICE)
    encode_kernel[(triton.cdiv(len(x), BLOCK.value),)](given, found, len(x))
    assert torch.equal(found.cpu(), expected)
    assert torch.equal(expected & 0x7F == NAN, x.isnan()) and x.isnan().any()


def test_every_code_has_its_number():
    codes = torch.arange(256).to(CODES)
    meant = twin.values(codes, torch.float32)
    # 2 ** -9, 2 ** -6, 1, 448
    assert meant[[0x01, 0x08, 0x38, 0x7E]].tolist() == [2**-9, 2**-6, 1, 448]
    found = torch.empty(256, device=DEVICE)
    wrong = torch.empty(64, device=DEVICE)
    decode_kernel[(1,)](codes.to(DEVICE), found, wrong)
    expected = meant.masked_fill(meant.isnan(), 480)
    expected[0xFF] = -480
    assert same_bits(found.cpu(), expected)
    rows = codes.view(64, 4)
    bad = (rows & 0x7F == NAN).any(1)
    assert torch.equal(wrong.isnan().cpu(), bad) and (wrong.cpu()[~bad] == 0).all()


def written(module: object, cast: torch.dtype | None, **inputs: Tensor | None) -> list[Tensor]:
    """q, and the caches that a KV write leaves; ``cast``: their dtype."""
    q, k, v = (inputs[name] for name in "qkv")
    caches = [torch.zeros(2, 16, *k.shape[1:], dtype=cast or k.dtype) for _ in range(2)]
    caches = [cache.fill_(3).to(DEVICE) for cache in caches]
    out = module.fused_kv_write(  # type: ignore[attr-defined]
        q, k, v, inputs["cos"], inputs["sin"], *caches, slots([20, -1, 3, 31]),
        q_weight=inputs["weight"], k_weight=inputs["weight"], interleaved=bool(inputs["turn"]),
    )  # fmt: skip
    return [out, *caches]


@pytest.mark.crossed(0.2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("size", first(1, [(80, 20), (64, 64), (32, 0)], 0.2), ids=str)
@pytest.mark.parametrize("module", [kv_write, twin], ids=["kernel", "twin"])
def test_codes_of_what_is_written_otherwise(module, size, turn, dtype):
    """After norm and rotation, in the dtype of the model; other slots stay as they are."""
    dim, rot = size
    q, k, v = (normal(4, heads, dim, seed=heads, dtype=dtype) for heads in (6, 2, 2))
    k[2, 1, 3], v[2, 1, 5], v[0, 0, 0], v[0, 0, 1] = math.nan, math.nan, 1e4, -1e4
    cos, sin = angles(4, rot, dtype) if rot else (None, None)
    weight = 200 * normal(dim, seed=9, dtype=dtype)
    given = {"q": q, "k": k, "v": v, "cos": cos, "sin": sin, "weight": weight, "turn": turn}
    out, *caches = written(module, None, **given)
    same, *codes = written(module, CODES, **given)
    assert same_bits(out, same)
    mine = torch.zeros(32, dtype=torch.bool)
    mine[[20, 3, 31]] = True
    for cache_, found in zip(caches, codes, strict=True):
        rows, found = cache_.flatten(0, 1), found.flatten(0, 1)
        assert torch.equal(found[mine], twin.stored(rows[mine], CODES))
        assert (found[~mine] == 3).all()
    keys, values = (cache.flatten(0, 1) for cache in codes)
    assert values[20, 0, :2].tolist() == [0x7E, 0xFE]
    assert values[3, 1, 5] & 0x7F == (NAN if module is twin else 0)
    assert (keys[3, 1] & 0x7F == NAN).any() and not (keys[3, 0] & 0x7F == NAN).any()
    assert (twin.values(codes[0], torch.float32).abs() == 448).any()
    given["v"] = v.masked_fill(v == 1e4, math.inf)
    assert all(map(torch.equal, codes, written(module, CODES, **given)[1:]))


# Name: q heads, KV heads, head size, options.
ATTENTION = {
    "gqa-32": (4, 2, 32, {}),
    "mqa-80 in a window": (3, 1, 80, {"window": 23}),
    "all of 96": (2, 1, 96, {"window": 40, "softcap": 4.0, "sinks": True}),
    "256 in chunks": (2, 1, 256, {"chunk": 29}),
}
LENGTH = 67
SPANS = ((0, 3), (34, 35), (60, LENGTH))


def runs(name: str, dtype: torch.dtype) -> list:
    """A pass over codes, the same over what they mean, and its options."""
    heads, kv_heads, dim, options = ATTENTION[name]
    sequence = Sequence.make(LENGTH, heads, kv_heads, dim, dtype)
    sequence.k, sequence.v = (twin.stored(3 * x, CODES) for x in (sequence.k, sequence.v))
    # Keys and values that only some rows attend to.
    sequence.k[36, 0, 1] = NAN
    sequence.v[62, 0, 7] = NAN | 0x80
    meant = Sequence(sequence.q, *(twin.values(x, dtype) for x in (sequence.k, sequence.v)))
    work = [lay_out([(s, *span) for span in SPANS], padding=2) for s in (sequence, meant)]
    return [*work, with_sinks(options, heads, dtype)]


@pytest.mark.crossed(0.5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["walk", "spread", "twin", "plain twin"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention_is_that_of_the_numbers(name, mode, dtype):
    """By one entry of the launch table: the same bits, NaN where a row attends to one."""
    *passes, options = runs(name, dtype)
    outs = []
    for work in passes:
        if "twin" in mode:
            work.metadata.exact = mode == "twin"
            outs.append(work(attend=twin_attention.paged_attention, **options))
        else:
            with launched(mode, block_n=16):
                outs.append(work(**options))
    assert outs[0].dtype == dtype and same_bits(*outs)
    assert outs[0].isnan().any() and not outs[0].isnan().all()

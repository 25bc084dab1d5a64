"""Bytes and operations against numbers worked out by hand. Nothing runs here."""

import pytest

from benchmarks import roofline
from benchmarks.roofline import Heads

# 4.3 TB/s: a copy on an H200.
COPY = roofline.DEVICES["H200"].with_measured(4.3e12, 788e12)
LLAMA = roofline.preset_config("llama-3.1-8b")
QWEN = roofline.preset_config("qwen3-0.6b")


@pytest.mark.parametrize(
    "found, moved, done",
    [
        # One row at position 3 of 2 query heads and 1 of keys, of size 4: q and out of 8 numbers
        # each, keys and values of 4 tokens; 4 keys x 2 heads x 4 numbers x 2 products x 2.
        (roofline.attention(Heads(2, 1, 4), [(3, 4)]), 2 * (16 + 32), 128),
        # A prompt of 3: 6 pairs of a row and a key.
        (roofline.attention(Heads(1, 1, 8), [(0, 3)], "float32"), 4 * (48 + 48), 6 * 32),
        # 64 x 4,096 tokens, 8 heads of 128, bf16: 1 GiB of keys and values, 1 MiB of q and out.
        (
            roofline.attention(Heads(32, 8, 128), [(4095, 4096)] * 64),
            (1 << 30) + (1 << 20),
            64 * 4096 * 32 * 128 * 4,
        ),
        # q 2 x 4, k and v 4 each, in and out; cos and sin 4 each; a slot.
        (roofline.kv_write(Heads(2, 1, 4), 3), 3 * (2 * (32 + 8) + 8), 0),
        (roofline.linear(2, 3, 5), 2 * (15 + 6 + 10), 60),
        (roofline.sample(2, 1000), 2 * (4000 + 32), 0),
        (roofline.accept(4, 17), 4 * (35 * 8 + 40), 0),
        (roofline.norm(3, 10), 2 * 130, 0),
        (roofline.activation(3, 10), 180, 0),
    ],
)
def test_kernels(found, moved, done):
    assert (found.bytes, found.operations) == (moved, done)


@pytest.mark.parametrize(
    "config, billions, kv_bytes",
    # Weights that a step reads, of the published sizes: of an embedding that is not tied one row.
    [(QWEN, 0.596, 114_688), (LLAMA, 8.03 - 0.525, 131_072)],
    ids=["qwen", "llama"],
)
def test_decode_steps(config, billions, kv_bytes):
    """Bytes of keys and values a token, and what a step of 1 or 64 rows must read: 2 bytes a weight
    and the contexts."""
    more, one = (roofline.decode(config, 1, n)["attention"].bytes for n in (11, 10))
    assert more - one == kv_bytes
    for batch in (1, 64):
        works = roofline.decode(config, batch, 1024)
        read = 2e9 * billions + batch * 1024 * kv_bytes
        assert sum(work.bytes for work in works.values()) == pytest.approx(read, rel=2e-2)
        assert roofline.floor(works, COPY) == pytest.approx(read / 4.3e12, rel=2e-2)

"""The key of a completion's noise. Host only."""

from __future__ import annotations

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def noise_key(seed: int, index: int) -> int:
    """64-bit noise key of completion ``index`` under ``seed``, as a signed integer.

    splitmix64's finaliser (Steele et al., 2014) over the seed, moved on by the index.
    """
    x = (seed + (index + 1) * _GOLDEN) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    x ^= x >> 31
    return x - (1 << 64) if x >> 63 else x

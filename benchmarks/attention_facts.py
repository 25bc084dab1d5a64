"""Does a row's attention depend on its own sequence alone? SDPA, and the CPU's tile op, measured.

Each check runs the same rows through several shapes of one kind (query rows, batch, padded length)
and reports which shapes agree bit for bit. Knows no model, only head counts and head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.row_classes import row_classes
from tinyspec.determinism.probes.bits import position_invariant, unequal_bits

TILE = 128
QUERY_ROWS = (*range(1, 17), 32, 33, 34, 35, 36, 64, 65, 66, 67, 100, 128, 129, 256)
BATCHES = (1, 2, 3, 4, 5, 8, 16, 32)
PADDED = (128, 160, 192, 256, 384, 512, 768, 1024)
PROMPTS = (2, 3, 5, 17, 64, 100, 129, 300)

Attend = Callable[..., Tensor]  # (query, key, value, mask, causal) -> [batch, heads, rows, any]


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer."""

    query: int
    key: int
    size: int


def checks(heads: Heads, dtype: torch.dtype, device: str) -> list[dict[str, Any]]:
    """Every check this device can run, one dict each: what varies, classes or the count equal."""
    found = []
    if torch.device(device).type == "cpu":
        found += _tile_checks(heads, dtype)
        kernels: dict[str, Attend] = {"SDPA": _sdpa}
    else:
        names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
        kernels = {f"SDPA {name.split('_')[0].lower()}": _backend(name) for name in names}
        kernels = {"SDPA default": _sdpa, **kernels}
    for name, attend in kernels.items():
        for check in (_padded_lengths, _query_rows, _batches, _alone_or_in_prompt):
            if check is _padded_lengths and not _takes_masks(name):
                continue
            try:
                found += check(name, attend, heads, dtype, device)
            except RuntimeError as error:
                reason = str(error).strip().splitlines()[0][:80]
                found.append({"kernel": name, "varies": check.__name__[1:], "skipped": reason})
    return found


def _tile_checks(heads: Heads, dtype: torch.dtype) -> list[dict[str, Any]]:
    """One head a KV head: the tile op takes a GQA group as further query rows."""
    heads = Heads(heads.key, heads.key, heads.size)
    found = _query_rows("tile op", _tile, heads, dtype, "cpu")
    found += _batches("tile op", _tile, heads, dtype, "cpu")
    return [*found, _paged_strides(heads, dtype)]


def _sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """Key and value repeated to the query's heads: every backend takes that, not every one GQA."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal)


def _backend(name: str) -> Attend:
    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False
    ) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, name)):
            return _sdpa(query, key, value, mask, causal)

    return attend


def _tile(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """Output and log-sum-exp of the CPU's flash attention, side by side in the last dimension."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, attn_mask=mask
    )
    assert lse.shape == out.shape[:3], (lse.shape, out.shape)
    return torch.cat((out.float(), lse.float().unsqueeze(-1)), -1)  # exact: they fit in fp32


def _random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def _classes(kernel: str, varies: str, fn: Any, inputs: Tensor, counts: Any, reference: int):
    found = row_classes(fn, inputs, counts, reference)
    moved = [n for n in counts if not position_invariant(fn, inputs, n, passes=12)]
    return {
        "kernel": kernel,
        "varies": varies,
        "reference": reference,
        "classes": [list(members) for members in found.classes],
        "position_dependent": moved,
    }


def _query_rows(name: str, attend: Attend, heads: Heads, dtype: torch.dtype, device: str):
    """Rows that see the same 100 of 128 keys, by how many of them share a call."""
    key, value = (
        _random(1, heads.key, TILE, heads.size, dtype=dtype, device=device, seed=seed)
        for seed in (1, 2)
    )
    mask = torch.zeros(1, 1, 1, TILE, dtype=dtype, device=device)
    mask[..., 100:] = float("-inf")

    def fn(rows: Tensor) -> Tensor:
        query = rows.view(1, len(rows), heads.query, heads.size).transpose(1, 2)
        seen = mask.expand(1, 1, len(rows), TILE).contiguous() if _takes_masks(name) else None
        return attend(query, key, value, seen).transpose(1, 2).reshape(len(rows), -1)

    inputs = _random(256, heads.query * heads.size, dtype=dtype, device=device)
    return [_classes(name, "query rows in a call", fn, inputs, QUERY_ROWS, 64)]


def _batches(name: str, attend: Attend, heads: Heads, dtype: torch.dtype, device: str):
    """Items (four or one query rows, 128 keys of their own) by how many share a batch."""
    found = []
    for rows in (4, 1):
        sizes = [rows * heads.query, *[TILE * heads.key] * 2]

        def fn(items: Tensor, rows: int = rows, sizes: list[int] = sizes) -> Tensor:
            parts = items.split([size * heads.size for size in sizes], dim=1)
            shapes = ((rows, heads.query), (TILE, heads.key), (TILE, heads.key))
            query, key, value = (
                part.reshape(len(items), *shape, heads.size).transpose(1, 2)
                for part, shape in zip(parts, shapes, strict=True)
            )
            mask = None
            if _takes_masks(name):
                mask = torch.zeros(len(items), 1, rows, TILE, dtype=dtype, device=device)
                mask[..., 100:] = float("-inf")
            return attend(query, key, value, mask).reshape(len(items), -1)

        inputs = _random(32, sum(sizes) * heads.size, dtype=dtype, device=device)
        found.append(_classes(name, f"batch, {rows} query rows each", fn, inputs, BATCHES, 8))
    return found


def _paged_strides(heads: Heads, dtype: torch.dtype) -> dict[str, Any]:
    """Pages read in place from a pool `[pages, 128, kv_heads, head_dim]`, or each from a copy."""
    pages = 9
    pool = _random(2, pages, TILE, heads.key, heads.size, dtype=dtype, device="cpu", seed=3)
    key, value = (part.transpose(1, 2) for part in pool)
    query = _random(pages, heads.query, 4, heads.size, dtype=dtype, device="cpu", seed=4)
    mask = torch.zeros(pages, 1, 4, TILE, dtype=dtype)
    mask[..., 100:] = float("-inf")
    together = _tile(query, key, value, mask)
    alone = [
        _tile(query[i : i + 1], key[i : i + 1].clone(), value[i : i + 1].clone(), mask[i : i + 1])
        for i in range(pages)
    ]
    equal = pages - int(unequal_bits(together, torch.cat(alone)).any(dim=1).sum())
    return {"kernel": "tile op", "varies": "pages in place or copied", "equal": equal, "of": pages}


def _padded_lengths(name: str, attend: Attend, heads: Heads, dtype: torch.dtype, device: str):
    """100 keys, masked in a KV padded to several lengths; the exact length without a mask."""
    found = []
    for rows in (1, 4, 32):
        query = _random(1, heads.query, rows, heads.size, dtype=dtype, device=device)
        whole = [
            _random(1, heads.key, PADDED[-1], heads.size, dtype=dtype, device=device, seed=seed)
            for seed in (1, 2)
        ]
        results: list[tuple[list[int], Tensor]] = []
        for length in (100, *PADDED):
            key, value = (part[:, :, :length].contiguous() for part in whole)
            mask = None
            if length != 100:
                mask = torch.zeros(1, 1, rows, length, dtype=dtype, device=device)
                mask[..., 100:] = float("-inf")
            out = attend(query, key, value, mask)
            for members, bits in results:
                if not unequal_bits(out, bits).any():
                    members.append(length)
                    break
            else:
                results.append(([length], out))
        found.append(
            {
                "kernel": name,
                "varies": f"KV padded from 100 (exact, no mask), {rows} query rows",
                "reference": PADDED[-1],
                "classes": [members for members, _ in results],
            }
        )
    return found


def _alone_or_in_prompt(name: str, attend: Attend, heads: Heads, dtype: torch.dtype, device: str):
    """Rows of a prompt against the same rows alone, the prompt masked or `is_causal`."""
    ways = ("masked", "is_causal")
    counted = {f"alone or in a prompt, {way}": [0, 0] for way in ways}
    counted["masked or is_causal prompt"] = [0, 0]
    for length in PROMPTS:
        query = _random(1, heads.query, length, heads.size, dtype=dtype, device=device)
        key, value = (
            _random(1, heads.key, length, heads.size, dtype=dtype, device=device, seed=seed)
            for seed in (1, 2)
        )
        mask = torch.full((length, length), float("-inf"), device=device).triu(1).to(dtype)
        prompts = {"is_causal": attend(query, key, value, causal=True)}
        if _takes_masks(name):
            prompts["masked"] = attend(query, key, value, mask[None, None])
            wrong = unequal_bits(*(prompts[way].transpose(1, 2)[0] for way in ways)).any(dim=1)
            counted["masked or is_causal prompt"][0] += int((~wrong).sum())
            counted["masked or is_causal prompt"][1] += length
        for row in {0, 1, length // 2, length - 1}:
            seen = (part[:, :, : row + 1] for part in (key, value))
            alone = attend(query[:, :, row : row + 1], *seen)
            for way, prompt in prompts.items():
                same = not unequal_bits(alone, prompt[:, :, row : row + 1]).any()
                counted[f"alone or in a prompt, {way}"][0] += int(same)
                counted[f"alone or in a prompt, {way}"][1] += 1
    return [
        {"kernel": name, "varies": varies, "equal": equal, "of": of}
        for varies, (equal, of) in counted.items()
        if of
    ]


def _takes_masks(name: str) -> bool:
    return name != "SDPA flash"

"""The cache of a returned dict: keys and values of sequences as transformers keeps
them. Knows their shapes, and neither pages nor engines.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tinyspec.drop_in.prepare import Generate
from tinyspec.drop_in.prompts import Prompt, Prompts
from tinyspec.model.private_names import CACHE

LAYERS = (DynamicLayer, DynamicSlidingWindowLayer)
# Tokens: no more than a window holds.
FEW = 4
# Of a layer's largest value, by ``EngineConfig.kv_dtype``; another form differs by much more,
# rounding to bf16 and to 8 bits by less.
CLOSE = {"auto": 0.05, "fp8_e4m3": 0.25}
# Keys and values of one sequence, per layer [tokens, heads, dim].
Kept = list[tuple[Tensor, Tensor]]


def filled_cache(cache: Cache, prompts: Prompts, counts: list[int], kept: list[Kept]) -> None:
    """Fill an empty ``cache`` with N rows: ``counts`` [B] completions of each prompt, ``kept`` [N].

    Every token stands where it does in the returned sequences, the newest ones left out; pads, and
    what follows the end of a row, are zeros, which attention masks cover.
    """
    width = prompts.width
    places = [[*prompts.places(n)] for n, count in enumerate(counts) for _ in range(count)]
    for place, of_row in zip(places, kept, strict=True):
        place += range(width, width + len(of_row[0][0]) - len(place))
    longest = max(place[-1] for place in places) + 1
    for layer in range(len(kept[0])):
        keys, values = (
            _padded([of_row[layer][which] for of_row in kept], places, longest) for which in (0, 1)
        )
        cache.update(keys, values, layer)


def keeps_alike(
    model: PreTrainedModel, generate: Generate, prompt: Prompt, kept: Kept, kv_dtype: str
) -> bool:
    """Whether the model's own ``generate``, which runs here for the first tokens of ``prompt``,
    keeps for each layer what attention was given, ``kept``: some models keep what keys and values
    are made from, or share them."""
    count = min(len(prompt), FEW)
    if prompt.embeds is not None:
        given: dict[str, Tensor] = {"inputs_embeds": prompt.embeds[None, :count]}
    else:
        given = {"input_ids": torch.tensor([prompt.ids[:count]], device=model.device)}
    cache = empty_cache(model)
    mask = torch.ones(1, count, dtype=torch.long, device=model.device)
    config = GenerationConfig(max_new_tokens=1, num_beams=1, do_sample=False, pad_token_id=0)
    generate(**given, attention_mask=mask, generation_config=config, **{CACHE: cache})
    layers = [own for own in cache.layers if isinstance(own, DynamicLayer)]
    if len(cache.layers) != len(kept) or any(type(own) not in LAYERS for own in cache.layers):
        return False
    pairs = (
        (theirs, mine[:count].transpose(0, 1)[None])
        for layer, both in zip(layers, kept, strict=True)
        for theirs, mine in zip((layer.keys, layer.values), both, strict=True)
    )
    return all(theirs is not None and near(mine, theirs, CLOSE[kv_dtype]) for theirs, mine in pairs)


def near(mine: Tensor, theirs: Tensor, close: float) -> bool:
    """Whether two tensors differ by no more than ``close`` of the largest value. Autocast, which
    trainers put around a model, gives the model's own another dtype."""
    if mine.shape != theirs.shape:
        return False
    most = close * float(theirs.abs().max())
    return torch.allclose(mine.float(), theirs.float(), rtol=0, atol=most)


def empty_cache(model: PreTrainedModel, most: int | None = None) -> Cache:
    """As the model's own ``generate`` makes it; most: tokens of a static one."""
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config) if most is None else StaticCache(config, most)


def _padded(rows: list[Tensor], places: list[list[int]], longest: int) -> Tensor:
    """[N, heads, longest, dim] from [tokens, heads, dim] of each row."""
    _, heads, dim = rows[0].shape
    padded = rows[0].new_zeros(len(rows), heads, longest, dim)
    for row, values, place in zip(padded, rows, places, strict=True):
        row[:, torch.tensor(place, device=row.device)] = values.transpose(0, 1)
    return padded

"""Starting weights with the heads that look back already in place.

Finding "what came after this word last time" (an induction circuit) is what a small model learns
last and what every question here needs. So layer 0 starts with heads that attend one to four tokens
back, and layer 1 with one that attends to where the token before was the present one, and one that
attends to where the token four back stood three back ("Ana is now in the" finds "Ana enters
the attic"). Training changes them like all weights. Does not know the data.

Source of the circuit: Olsson et al. 2022, In-context Learning and Induction Heads.
"""

import math

import torch
from transformers import LlamaForCausalLM

WEIGHT_STD = 0.05
OUTPUT_STD = 0.003
COMMON_SHARE = 0.5
OFFSETS = (1, 2, 3, 4)
NUM_FREQUENCIES = 3
OFFSET_SCORE = 40.0
OFFSET_FLOOR = 2.0
MATCH_GAIN = 3.0
LATEST_SCORE = 20.0
COPY_GAIN = 0.3


@torch.no_grad()
def start_weights(model: LlamaForCausalLM, seed: int) -> None:
    """Fill `model` in place; it needs four heads, two key heads, and no biases.

    Dimension 0 of every embedding holds one common value. Through it a query and a key can be
    constant vectors whose rotary score, a sum of cos(frequency * (distance - offset)), peaks at
    the wanted distance. The slowest pair, which hardly turns, takes a constant from that score: it
    is then large at the peak alone, so a token whose common value is small is still found.
    """
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    dim, width = config.head_dim, config.hidden_size
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            adds_to_stream = "o_proj" in name or "down_proj" in name
            std = OUTPUT_STD if adds_to_stream else WEIGHT_STD
            parameter.normal_(0.0, std, generator=generator)
    model.get_input_embeddings().weight[:, 0] = WEIGHT_STD * math.sqrt(
        width * COMMON_SHARE / (1 - COMMON_SHARE)
    )
    common = math.sqrt(width * COMMON_SHARE)
    half = dim // 2
    heads = [slice(head * dim, (head + 1) * dim) for head in range(len(OFFSETS))]
    # Orthogonal directions: one set to read tokens from, and one per offset to write them to.
    directions = torch.randn(width - 1, half * (1 + len(OFFSETS)), generator=generator)
    directions = torch.linalg.qr(directions)[0].T
    directions = torch.cat([torch.zeros(len(directions), 1), directions], dim=1)
    read, *writes = directions.split(half)

    look_back, match = model.model.layers[0].self_attn, model.model.layers[1].self_attn
    steps = torch.arange(half)
    frequencies = config.rope_parameters["rope_theta"] ** -(steps / half)
    fast = (steps < NUM_FREQUENCIES).float()
    size = math.sqrt(OFFSET_SCORE * math.sqrt(dim)) / common
    look_back.q_proj.weight.zero_()
    look_back.k_proj.weight.zero_()
    for head, offset, write in zip(heads, OFFSETS, writes, strict=True):
        angle = -offset * frequencies
        query = torch.cat([fast * angle.cos(), fast * angle.sin()])
        query[half - 1] = -OFFSET_FLOOR
        look_back.q_proj.weight[head, 0] = size * query
        look_back.o_proj.weight[:, head.start : head.start + half] = COPY_GAIN * write.T
    for head in heads[: config.num_key_value_heads]:
        key = torch.cat([fast, 0 * fast])
        key[half - 1] = 1.0
        look_back.k_proj.weight[head, 0] = size * key
        look_back.v_proj.weight[head.start : head.start + half] = read

    # Rotation spoils a match of contents, so it uses only the slow half of the pairs; the next
    # faster pair prefers the latest of several matches.
    slow = torch.cat([steps[half // 2 :], steps[half // 2 :] + half])
    size = math.sqrt(LATEST_SCORE * math.sqrt(dim)) / common
    one_back, _, three_back, four_back = writes
    for query, key, wanted, found in ((0, 0, read, one_back), (2, 1, four_back, three_back)):
        match.q_proj.weight[heads[query]] = match.k_proj.weight[heads[key]] = 0.0
        match.q_proj.weight[heads[query].start + slow] = MATCH_GAIN * wanted
        match.k_proj.weight[heads[key].start + slow] = MATCH_GAIN * found
    match.q_proj.weight[heads[2].start + half // 2 - 1, 0] = size
    match.k_proj.weight[heads[1].start + half // 2 - 1, 0] = size

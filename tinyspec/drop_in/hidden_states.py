"""The ``hidden_states`` of a returned dict: what sequences have kept of each layer, step by step as
transformers gives it. Knows their shapes, and neither passes nor engines.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.drop_in.prepare import Generate
from tinyspec.drop_in.prompts import Prompt, Prompts
from tinyspec.drop_in.returned_cache import near
from tinyspec.scheduler.request import Sequence

# Tokens that are compared with the model's own.
FEW = 4
# Of one step, per layer [B, tokens, hidden].
Step = tuple[Tensor, ...]


def own(generate: Generate, model: PreTrainedModel, prompts: list[Prompt]) -> Step | None:
    """Those of the first prompt's first tokens by the model's own ``generate``; None where it has
    none, or of another form. transformers leaves hooks in a model that is asked for them for the
    first time."""
    prompt = prompts[0]
    if prompt.embeds is not None:
        given: dict[str, Tensor] = {"inputs_embeds": prompt.embeds[None, :FEW]}
    else:
        given = {"input_ids": torch.tensor([prompt.ids[:FEW]], device=model.device)}
    mask = torch.ones(1, min(len(prompt), FEW), dtype=torch.long, device=model.device)
    settings: dict[str, Any] = {"output_hidden_states": True, "return_dict_in_generate": True}
    settings |= {"max_new_tokens": 1, "num_beams": 1, "do_sample": False, "pad_token_id": 0}
    output = generate(**given, attention_mask=mask, generation_config=GenerationConfig(**settings))
    found: tuple[Step, ...] | None = output.hidden_states
    if not found or not found[0]:
        return None
    # Some have several streams in a layer.
    sound = all(layer.ndim == 3 and layer.shape == found[0][0].shape for layer in found[0])
    return found[0] if sound else None


def alike(expected: Step, sequence: Sequence, close: float) -> bool:
    """Whether ``sequence`` has kept what the model's own has for its first tokens; ``close``: in
    parts of a layer's largest value."""
    found = _joined(sequence)
    pairs = zip(found, expected, strict=False)
    return len(found) == len(expected) and all(
        near(mine[: theirs.shape[1]], theirs[0], close) for mine, theirs in pairs
    )


def steps(prompts: Prompts, counts: list[int], sequences: list[Sequence]) -> tuple[Step, ...]:
    """Of ``counts`` [B] completions of each prompt: the prompts' [N, W, hidden] per layer, then
    each token's [N, 1, hidden] but the newest one's; zeros for pads and behind a row's end."""
    owner = [n for n, count in enumerate(counts) for _ in range(count)]
    rows = [_joined(sequence) for sequence in sequences]
    layers, _, width = rows[0].shape
    lengths = [sequence.num_generated for sequence in sequences]
    first = rows[0].new_zeros(layers, len(rows), prompts.width, width)
    later = rows[0].new_zeros(layers, len(rows), max(lengths) - 1, width)
    for n, row in enumerate(rows):
        places = torch.tensor(prompts.places(owner[n]), device=row.device)
        first[:, n, places] = row[:, : len(places)]
        later[:, n, : lengths[n] - 1] = row[:, len(places) :]
    return tuple(first), *map(tuple, later.split(1, 2))


def _joined(sequence: Sequence) -> Tensor:
    """[layers + 1, length - 1, hidden]: of each position what the latest pass left; of a prompt
    that another completion computed, that one's."""
    leader = sequence.request.sequences[0]
    passes = [*(leader.hidden if leader is not sequence else ()), *sequence.hidden]
    states = passes[0][1]
    joined = states.new_zeros(len(states), sequence.length - 1, states.shape[2])
    for start, states in passes:
        end = min(start + states.shape[1], joined.shape[1])
        joined[:, start:end] = states[:, : end - start]
    return joined

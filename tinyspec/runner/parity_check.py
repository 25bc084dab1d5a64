"""A short prompt through a model's own ``generate`` and through ours: the test of a new family.

For models of a kind that no test of this project has compared yet. A model that is served wrongly
is wrong on its first tokens; what only shows behind a window is read off its masks. Knows passes
of rows, no requests.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.errors import unsupported
from tinyspec.kernels.attention_metadata import AttentionMetadata
from tinyspec.model.patched_model import PatchedModel
from tinyspec.model.supported import SERVED, max_positions, vocab_size
from tinyspec.model.torch_state import TorchState
from tinyspec.runner.batch import Batch
from tinyspec.runner.model_runner import ModelRunner

PROMPT, STEPS = 20, 6
# Differences of logits by the largest of them: rounding makes far less, another model far more.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.02}


def is_known(model: PreTrainedModel) -> bool:
    """Whether a model is transformers' own, and of a type that was compared token by token."""
    own = type(model).__module__.startswith("transformers.")
    return own and model.config.model_type in SERVED


def check_parity(patched: PatchedModel, runner: ModelRunner) -> None:
    """Compare logits of the patched model with those of its own ``generate``, if it is not known.

    Raises UnsupportedModelError where they differ.
    """
    model = patched.model
    if is_known(model):
        return
    patched.suspend()
    try:
        tokens, expected = _by_itself(model)
    except Exception as error:
        why = f"its own generate raised {type(error).__name__}: {error}"
        raise unsupported(model, why) from error
    finally:
        resumed = patched.resume()
    assert resumed, "its own generate has changed the model"
    end = len(tokens) - 1
    prompt = len(tokens) - STEPS
    cuts = [0, prompt // 3, *range(prompt, end + 1)]
    pages = list(range(1, 2 + end // runner.page_size))
    with runner.scratch(len(pages) + 1) as cache, runner.torch_state():
        cache.zero(pages)
        found = [_rows(runner, tokens, pages, *piece)[-1] for piece in pairwise(cuts)]
    off = float((torch.stack(found[1:]) - expected).abs().max() / expected.abs().max())
    if not off <= TOLERANCE[model.dtype]:
        why = f"nobody has tried a model of its kind, and over pages its logits are {off:.1%} off"
        raise unsupported(model, f"{why} those of its own generate")


def _by_itself(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """What its own ``generate`` makes of a prompt: all tokens, and logits [STEPS, V] fp32."""
    # Not the one that stands on the model: that may be ours.
    own: Any = type(model)
    prompt = min(PROMPT, max_positions(model) - STEPS)
    ids = (torch.arange(prompt, device=model.device) * 5 + 2) % vocab_size(model)
    before = model.generation_config
    model.generation_config = GenerationConfig(
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    try:
        with TorchState(model)():
            said = own.generate(model, ids[None], attention_mask=torch.ones_like(ids)[None])
    finally:
        model.generation_config = before
    return said.sequences[0], torch.cat(said.logits).float()


def _rows(runner: ModelRunner, tokens: Tensor, pages: list[int], first: int, last: int) -> Tensor:
    """Logits of the rows ``first`` to ``last`` of one sequence, by a pass of their bucket."""
    rows, device = last - first, tokens.device
    bucket = runner.buckets.fit(rows)

    def padded(values: Tensor, filler: int) -> Tensor:
        return torch.cat([values, values.new_full((bucket - rows,), filler)])

    place = torch.arange(first, last, device=device)
    size = runner.page_size
    metadata = AttentionMetadata.of([(first, last)], [pages], size, device)
    slots = padded(place + pages[0] * size, -1)
    batch = Batch(padded(tokens[first:last], 0), padded(place, 0), slots, metadata, [0])
    keep = padded(torch.arange(rows, device=device), 0)
    return runner.forward(batch, keep, canonical=True)[:rows]

"""Compares logits of a model's own ``generate`` with those of passes over pages, for one prompt.

For model types that no test of this project covers. A model that is served wrongly is wrong within
the first tokens; windows longer than that are known from its masks. Knows passes, not requests.
"""

from __future__ import annotations

from itertools import pairwise
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from tinyspec.errors import unsupported
from tinyspec.model.introspection import ROUNDING
from tinyspec.model.scratch_weights import other_weights, scratch_weights
from tinyspec.model.served_model import ServedModel
from tinyspec.model.shadow import Shadow
from tinyspec.model.supported import SERVED, max_positions, vocab_size
from tinyspec.model.torch_state import Autocast, TorchState
from tinyspec.runner.batch import Batch
from tinyspec.runner.model_runner import ModelRunner

PROMPT, STEPS = 20, 6
STATES = 1, PROMPT + STEPS


def check_parity(served: ServedModel, runner: ModelRunner) -> None:
    """Compare logits of the served model with those of its own ``generate``, unless it is
    transformers' own, of a type that tests compare token by token.

    Raises UnsupportedModelError if they differ by more than rounding.
    """
    model = served.model
    if type(model).__module__.startswith("transformers.") and model.config.model_type in SERVED:
        return
    plain = Shadow(served.user).of(served.user)
    with other_weights({}, model, plain):
        off = _off(served, runner, plain)
    if isnan(off):  # as with weights that are zero, which show nothing
        with scratch_weights(model, plain):
            off = _off(served, runner, plain)
    # Twice: both sides round.
    if not off <= 2 * ROUNDING[runner.dtype]:
        why = f"its type is untested, and its logits over pages are {off:.1%} off"
        raise unsupported(model, f"{why} those of its own generate")


def _off(served: ServedModel, runner: ModelRunner, plain: PreTrainedModel) -> float:
    """How far the logits are apart from those of ``plain``, another shadow of the same model,
    relative to the largest; NaN where its own are all zero."""
    model = served.model
    try:
        tokens, expected = _own_generate(plain, served.autocast)
    except Exception as error:
        why = f"its own generate raised {type(error).__name__}: {error}"
        raise unsupported(model, why) from error
    end = len(tokens) - 1
    prompt = len(tokens) - STEPS
    most = runner.buckets.largest
    cuts = [0, *range(min(prompt // 3, most), prompt, most), *range(prompt, end + 1)]
    pages = list(range(1, 2 + end // runner.page_size))
    # What a cache of fewer bits rounds away is no difference of the model.
    fresh = runner.pages(len(pages) + 1, runner.dtype, STATES)
    with runner.torch_state(), runner.on_pages(fresh):
        found = [_logits(runner, tokens, pages, *piece)[-1] for piece in pairwise(cuts)]
    apart = (torch.stack(found[-STEPS:]) - expected).abs().max().nan_to_num(torch.inf)
    return float(apart / largest) if (largest := expected.abs().max()) else nan


def _own_generate(model: PreTrainedModel, autocast: Autocast) -> tuple[Tensor, Tensor]:
    """The model's own ``generate`` of a prompt: all tokens, and logits [STEPS, V] fp32."""
    # Of the class: the instance's may be ours.
    own: Any = type(model)
    prompt = min(PROMPT, max_positions(model) - STEPS)
    place = torch.arange(prompt, dtype=torch.int64, device=model.device)
    ids = (place * 5 + 2) % vocab_size(model)
    model.generation_config = GenerationConfig(
        max_new_tokens=STEPS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with TorchState(model.device)(), autocast.on():
        output = own.generate(model, ids[None], attention_mask=torch.ones_like(ids)[None])
    return output.sequences[0], torch.cat(output.logits).float()


def _logits(runner: ModelRunner, tokens: Tensor, pages: list[int], first: int, last: int) -> Tensor:
    """Logits of the tokens ``first`` to ``last - 1`` of one sequence, from a pass of their own."""
    rows, bucket = last - first, runner.buckets.fit(last - first)
    part = tokens[first:last].tolist(), first, pages
    # A ring of all tokens needs no state.
    states = [(0, 0, 0)], STATES[1]
    batch = Batch.of([part], bucket, runner.page_size, tokens.device, states)
    keep = torch.arange(bucket, dtype=torch.int64, device=tokens.device) % rows
    return runner.forward(batch, keep, canonical=True)[:rows].float()

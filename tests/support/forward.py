"""What tests of canonical forwards have in common: batches, what generation computed for them,
gradients and how far they are off."""

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.support.judge import padded

Gradients = dict[str, Tensor]
DRAWS = 3  # of weights at which gradients are compared
# What may be off in fp32 besides twice as much as plain's: sums of few, equal numbers have no error
# in one order.
ROUNDING = 1e-6


def quiet(model: nn.Module) -> nn.Module:
    """``model`` without dropout in training."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and "drop" in name:
                setattr(module, name, 0.0)
    return model


def packed(rows: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Rows after one another, with positions that begin anew."""
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    ids = torch.cat([torch.tensor(row) for row in rows])
    return {"input_ids": ids[None], "position_ids": positions[None]}


class Rollout(NamedTuple):
    """What deterministic generation made: of each prompt its tokens, the place that gave the first
    logits, and logits [T, V]."""

    rows: list[list[int]]
    begins: list[int]
    logits: list[Tensor]

    def equal(self, found: Sequence[Tensor]) -> bool:
        """Whether logits [L, V] of all tokens of each row have the bits of generation."""
        return all(
            torch.equal(x[begin : len(row) - 1].float(), logits)
            for x, row, begin, logits in zip(found, *self, strict=True)
        )


def rollout(model: Any, prompts: Sequence[list[int]], tokens: int, **settings: Any) -> Rollout:
    """By ``model.generate`` of a patched model, padded on the left."""
    ids, mask = (x.to(model.device) for x in padded(prompts, "left"))
    asked = {"output_logits": True, "return_dict_in_generate": True, "deterministic": True}
    asked |= {"max_new_tokens": tokens, "pad_token_id": 0, "eos_token_id": None, **settings}
    out = model.generate(input_ids=ids, attention_mask=mask, **asked)
    made = out.sequences[:, ids.shape[1] :].tolist()
    rows = [prompt + row for prompt, row in zip(prompts, made, strict=True)]
    logits = torch.stack(out.logits, 1).float()
    return Rollout(rows, [len(prompt) - 1 for prompt in prompts], list(logits))


def unpadded(logits: Tensor, mask: Tensor) -> list[Tensor]:
    """[B, L, V] -> [l, V] of the real tokens of each row."""
    return [x[real] for x, real in zip(logits, mask.bool(), strict=True)]


def loss_of(logits: Sequence[Tensor], rows: Sequence[Sequence[int]]) -> Tensor:
    """The mean of -log p of every token but the first of each row; in fp32, or in fp64."""
    given = torch.cat([x[: len(row) - 1] for x, row in zip(logits, rows, strict=True)])
    wanted = torch.cat([torch.tensor(row[1:], device=given.device) for row in rows])
    exact = given if given.dtype == torch.float64 else given.float()
    return nn.functional.cross_entropy(exact, wanted)


def gradients(model: nn.Module, loss: Tensor) -> Gradients:
    """By name, of the parameters that have one."""
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    found = {name: p.grad.clone() for name, p in named if p.grad is not None}
    model.zero_grad()
    return found


def plain_logits(model: Any, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """By the model's own forward, row by row, at the positions of generation."""
    takes = "position_ids" in inspect.signature(model.forward).parameters
    found = []
    for row in rows:
        ids, positions = torch.tensor([[row], [range(len(row))]], device=model.device)
        more = {"position_ids": positions} if takes else {}
        found.append(model(ids, use_cache=False, **more).logits[0])
    return found


def twins(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two unpatched copies of ``model`` with the same weights, the second in fp64."""
    plain = copy.deepcopy(model)
    if getattr(plain.config, "attn_logit_softcapping", None):
        plain.set_attn_implementation("eager")  # transformers 5.17 takes SDPA, which leaves it out
    exact = copy.deepcopy(plain).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")
    return plain, exact


def error(found: Gradients, exact: Gradients) -> float:
    """How far gradients are off, all together, as a part of their size."""
    off = sum(float((found[name].double() - x).norm() ** 2) for name, x in exact.items())
    return float((off / sum(float(x.norm() ** 2) for x in exact.values())) ** 0.5)


def wrong_gradients(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], run: Callable[[], Sequence[Tensor]]
) -> str | None:
    """What is wrong with the gradients through ``run``, which gives the logits of ``rows``. How far
    rounded ones are off is a random number: they are taken at several places near the weights."""
    weights = [p.detach().clone() for p in model.parameters()]
    noise = torch.Generator().manual_seed(0)
    ours = theirs = 0.0
    for _ in range(DRAWS):
        plain, exact = twins(model)
        own = gradients(plain, loss_of(plain_logits(plain, rows), rows))
        truth = gradients(exact, loss_of(plain_logits(exact, rows), rows))
        found = gradients(model, loss_of(run(), rows))
        if missing := own.keys() - found.keys():
            return f"no gradient of {sorted(missing)}"
        ours += error(found, truth) ** 2
        theirs += error(own, truth) ** 2
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1 + 2**-8 * torch.randn(p.shape, generator=noise).to(p))
    with torch.no_grad():
        for p, weight in zip(model.parameters(), weights, strict=True):
            p.copy_(weight)
    ours, theirs = ((x / DRAWS) ** 0.5 for x in (ours, theirs))
    if not ours <= 2 * theirs + ROUNDING:
        return f"gradients off by {ours:.2g}, plain's by {theirs:.2g}"
    return None

"""TRL's trainers on canonical passes: training computes the log-probabilities of the rollouts.

TRL's trainers put a fused head over ``model.forward``, which calls the backbone and the weight of
the head by itself, so that no patched forward is reached. Here that call is answered with TRL's own
record. Knows no trainer: temperature and fields are those that the fused head was made with.
"""

from __future__ import annotations

from inspect import getclosurevars
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import ContinuousBatchingConfig, PreTrainedModel, TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from tinyspec.config import EngineConfig
from tinyspec.drop_in.forward import EngineOf, PatchedForward
from tinyspec.drop_in.patching import patch
from tinyspec.errors import refuse
from tinyspec.model.wrappers import unwrap
from tinyspec.runner.token_logprobs import token_logprobs

# The label of positions that are not scored.
IGNORED = -100
# Of logits whose statistics are computed at a time.
ROWS = 32


def patch_trainer(trainer: Any, config: EngineConfig | None = None) -> None:
    """Let ``trainer.model``, and its ``ref_model`` where there is one, generate and compute
    log-probabilities in canonical passes: those of training are those of the rollouts, bit for bit.

    trainer: one of TRL's, built and not yet run. A model that is not patched is patched, as by
    ``tinyspec.patch(model, config, deterministic=True, seed=trainer.args.seed)``, and once it is
    resumed from a checkpoint seeds go on from seed and step; one that is, with ``forward=True`` or
    without, before or after the trainer was built, keeps its settings.
    ``tinyspec.unpatch(model)`` ends it.

    TRL's log-probabilities are those of all tokens at its temperature, whatever top-k, top-p and
    min-p the rollouts have. Raises ValueError for what is no trainer with a fused head, or one with
    ``cast_lm_head_to_fp32``, and what ``patch`` raises. The trainer raises what
    ``tinyspec.canonical`` raises; ``output_router_logits`` is refused so.
    """
    models = [trainer.model]
    if getattr(trainer, "ref_model", None) is not None:
        models.append(trainer.ref_model)
    heads = [_fused_head(unwrap(model)) for model in models]
    for model, head in zip(models, heads, strict=True):
        inside: Any = unwrap(model)
        if not hasattr(inside.generate, "serving"):
            patch(model, config, deterministic=True, seed=trainer.args.seed)
            trainer.add_callback(Resumed())
        patched = inside.generate
        patched.wrapper = model  # one put around it since, whose forward may turn autocast on
        patched.add(FusedForward(inside, patched.serving, head))


def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
    """``GRPOTrainer(..., rollout_func=rollout)``: a completion of each of ``prompts``, those that
    patched ``generate`` gives, and the log-probabilities that they were drawn with.

    Raises ValueError before ``patch_trainer``, and what ``model.generate_batch`` raises.
    """
    model: Any = unwrap(trainer.model)
    if not hasattr(model.generate, "serving"):
        raise refuse("trainer.model", type(model).__name__, "one behind patch_trainer(trainer)")
    ids, *_ = trainer._tokenize_prompts(prompts)
    wanted = ContinuousBatchingConfig(return_logprobs=True)
    outputs = model.generate_batch(ids, trainer.generation_config, wanted).values()
    return {
        "prompt_ids": ids,
        "completion_ids": [output.generated_tokens for output in outputs],
        "logprobs": [output.logprobs for output in outputs],
    }


class Resumed(TrainerCallback):
    """A run that is resumed does not repeat the seeds that it began with."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step:
            model: Any = unwrap(given["model"])
            model.generate.reseed((args.seed << 32) + state.global_step)


def _fused_head(model: PreTrainedModel) -> dict[str, Any]:
    """What the fused head of a model was made with."""
    forward: Any = vars(model).get("forward")
    while type(forward) is PatchedForward:  # of patch(model, forward=True)
        forward = forward.before
    made_with = getclosurevars(forward).nonlocals if hasattr(forward, "__code__") else {}
    if not made_with.keys() >= {"outputs", "temperature", "cast_lm_head_to_fp32"}:
        raise refuse("trainer.model.forward", forward, "the fused head of a trainer of trl>=1.16")
    if made_with["cast_lm_head_to_fp32"]:
        raise refuse("cast_lm_head_to_fp32", True, "False: generation has no such head")
    return dict(made_with)


class FusedForward(PatchedForward):
    """``model.forward`` of a trainer's model. head: what TRL's fused head was made with."""

    def __init__(self, model: PreTrainedModel, engine_of: EngineOf, head: dict[str, Any]):
        super().__init__(model, engine_of)
        self._temperature: float = head["temperature"]
        self._fields = [name for name in head["outputs"] if name != "log_probs"]

    def serve(self, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        """With ``fused_lm_head=True`` TRL's record of [B, L - 1] ([B, L] with ``shift_labels``),
        0 where the label is -100; else the model's own output."""
        if not fused_lm_head:
            return super().serve(*args, **kwargs)
        names = "labels", "shift_labels", "num_items_in_batch"
        labels, shifted, count = (kwargs.pop(name, None) for name in names)
        following = labels[:, 1:] if shifted is None else shifted
        mask = following != IGNORED
        columns = mask.any(0).nonzero().squeeze(1)
        given = {**kwargs, "logits_to_keep": columns, "return_dict": True}
        logits = super().serve(*args, **given).logits[mask[:, columns]]
        ids = following[mask]
        found = {"log_probs": token_logprobs(logits, ids, self._temperature)}
        if self._fields:
            found |= self._statistics(logits, ids)
        record = {
            name: values.new_zeros(mask.shape).masked_scatter(mask, values)
            for name, values in found.items()
        }
        scored = mask.sum().clamp(min=1) if count is None else count
        loss = -record["log_probs"].sum() / scored
        return FusedCausalLMOutput(loss=loss, label_mask=mask, **record)

    def _statistics(self, logits: Tensor, ids: Tensor) -> dict[str, Tensor]:
        """The other fields, [N] each, a few rows at a time; nothing is kept for the backward."""
        parts = zip(logits.split(ROWS), ids.split(ROWS), strict=True)
        each = [
            checkpoint(_statistics_of, *part, self._temperature, use_reentrant=False)
            for part in parts
        ]
        return {name: torch.cat([found[name] for found in each]) for name in self._fields}


def _statistics_of(logits: Tensor, ids: Tensor, temperature: float) -> dict[str, Tensor]:
    """Fields of TRL's record, of some rows of logits."""
    scaled = logits.float() / temperature
    logprobs = scaled.log_softmax(-1)
    return {
        "entropy": -(logprobs.exp() * logprobs).sum(-1),
        "log_sum_sq_probs": (2 * logprobs).logsumexp(-1).detach(),
        "mean_logits": scaled.mean(-1).detach(),
        "is_top1": scaled.argmax(-1) == ids,
    }

"""TRL's trainers compute the log-probabilities of the rollouts, by engine passes alone."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import tinyspec
from tests.support import zoo
from tests.support.drop_in import SMALL
from tests.support.tiny import tiny
from tinyspec import Engine, SamplingParams
from tinyspec.drop_in import forward as canonical

pytest.importorskip("trl")

from transformers import TrainerControl, TrainerState
from trl.trainer.utils import add_fused_lm_head

from tinyspec.integrations.trl import patch_trainer, rollout

FIELDS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
PROMPTS = [[5, 17, 3], [9, 8, 7, 6, 5, 4, 3, 11], [40]]
ANSWERS = [[4, 5, 6, 7], [50, 51], [9]]
TEMPERATURE = 0.7


def trainer_of(model: Any, ref_model: Any = None, **head: Any) -> Any:
    """What ``patch_trainer`` needs of a trainer of TRL's, with its fused head."""
    for each in filter(None, (model, ref_model)):
        add_fused_lm_head(each, temperature=TEMPERATURE, outputs=FIELDS, **head)
    args, given = types.SimpleNamespace(seed=7), {"model": model, "ref_model": ref_model}
    callbacks: list[Any] = []
    return types.SimpleNamespace(
        **given, args=args, callbacks=callbacks, add_callback=callbacks.append
    )


def patched_trainer() -> Any:
    trainer = trainer_of(tiny())
    patch_trainer(trainer, SMALL)
    return trainer


def batch_of(prompts: list[list[int]], answers: list[list[int]]) -> dict[str, torch.Tensor]:
    """As TRL makes it: prompts padded on the left, completions on the right; these are labels."""
    width, length = max(map(len, prompts)), max(map(len, answers))
    ids = torch.zeros(len(prompts), width + length, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        begin, end = width - len(prompt), width + len(answer)
        ids[row, begin:end] = torch.tensor(prompt + answer)
        mask[row, begin:end] = 1
        labels[row, width:end] = torch.tensor(answer)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def drawn(engine: Engine) -> tuple[list[list[int]], list[list[float]]]:
    """Completions of different lengths, and what they were drawn with."""
    params = [
        SamplingParams(
            max_new_tokens=n, temperature=TEMPERATURE, seed=n, deterministic=True, logprobs=True
        )
        for n in (4, 12, 7)
    ]
    completions = [o.completions[0] for o in engine.generate(PROMPTS, params)]
    return [c.token_ids for c in completions], [c.logprobs for c in completions]


@pytest.fixture
def reached(monkeypatch):
    """The number of sequences of every forward that an engine has computed."""
    seen: list[int] = []
    whole = canonical.forward

    def forward(engine, sequences, *rest):
        seen.append(len(sequences))
        return whole(engine, sequences, *rest)

    monkeypatch.setattr(canonical, "forward", forward)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_the_record_has_the_bits_of_generation(family, dtype, reached):
    made = [zoo.tiny(family).to(dtype) for _ in range(3)]
    with Engine(made[0], config=SMALL) as engine:
        answers, expected = drawn(engine)
    batch = batch_of(PROMPTS, answers)
    plain_trainer, trainer = map(trainer_of, made[1:])
    patch_trainer(trainer, SMALL)
    positions = (batch["attention_mask"].cumsum(-1) - 1).clamp(min=0)  # gpt2 makes no such
    plain = plain_trainer.model(**batch, position_ids=positions, fused_lm_head=True)
    found = trainer.model(**batch, fused_lm_head=True)
    assert reached == [len(PROMPTS)], "by the engine"
    assert type(found) is type(plain) and found.keys() == plain.keys()
    width = max(map(len, PROMPTS)) - 1
    for row, values in enumerate(expected):
        assert found.log_probs[row, width : width + len(values)].tolist() == values
    assert (found.log_probs != plain.log_probs).any(), "control: the plain way differs"
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.1, "atol": 0.1}
    for name in (*FIELDS, "loss", "label_mask"):
        assert found[name].shape == plain[name].shape and found[name].dtype == plain[name].dtype
        if found[name].dtype == torch.bool:
            assert torch.equal(found[name], plain[name]) or dtype == torch.bfloat16
        else:
            torch.testing.assert_close(found[name], plain[name], **close)
            assert found[name].requires_grad == plain[name].requires_grad, name


def test_gradients_are_those_of_trl():
    """Of the loss, and of an entropy bonus; a row without labels gives none."""
    grads = []
    for exact in (False, True):
        trainer, batch = trainer_of(tiny()), batch_of(PROMPTS, ANSWERS)
        if exact:
            patch_trainer(trainer, SMALL)
        batch["labels"][1] = -100
        found = trainer.model(**batch, fused_lm_head=True, num_items_in_batch=4)
        (found.loss - 0.1 * found.entropy.sum()).backward()
        grads.append([parameter.grad for parameter in trainer.model.parameters()])
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-3, atol=1e-5)


def test_no_label_at_all():
    """A differentiable 0, as TRL gives."""
    trainer, batch = patched_trainer(), batch_of(PROMPTS, [[4], [5], [6]])
    batch["labels"][:] = -100
    found = trainer.model(**batch, fused_lm_head=True)
    assert found.loss.item() == 0 and not found.label_mask.any()
    found.loss.backward()


def test_other_calls():
    """Shifted labels; logits without the fused head; the reference model; unpatching both."""
    trainer = trainer_of(tiny(), tiny())
    heads = [vars(model)["forward"] for model in (trainer.model, trainer.ref_model)]
    patch_trainer(trainer, SMALL)
    batch = batch_of(PROMPTS, ANSWERS)
    found = trainer.model(**batch, fused_lm_head=True)
    other = trainer.ref_model(**batch, fused_lm_head=True)
    assert torch.equal(found.log_probs, other.log_probs), "the KL divergence of equal weights is 0"
    labels = batch.pop("labels")
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    found_shifted = trainer.model(**batch, shift_labels=shifted, fused_lm_head=True)
    assert torch.equal(found_shifted.log_probs[:, :-1], found.log_probs)
    logits = trainer.model(**batch).logits
    with tinyspec.canonical(trainer.model):
        assert torch.equal(trainer.model(**batch).logits, logits)
    for model, head in zip((trainer.model, trainer.ref_model), heads, strict=True):
        tinyspec.unpatch(model)
        assert vars(model)["forward"] is head
        assert model(**batch, labels=labels, fused_lm_head=True).log_probs is not None


def test_a_resumed_run_has_seeds_of_its_own():
    """The same whenever it is resumed there; a model that is patched already keeps its base."""

    def rows(step: int, seed: int | None = None) -> list[list[int]]:
        trainer = trainer_of(tiny())
        if seed is not None:
            tinyspec.patch(trainer.model, SMALL, deterministic=True, seed=seed)
        patch_trainer(trainer, SMALL)
        for callback in trainer.callbacks:
            state = TrainerState(global_step=step)
            callback.on_train_begin(trainer.args, state, TrainerControl(), model=trainer.model)
        ids = torch.tensor(PROMPTS[:1] * 4)
        found = trainer.model.generate(ids, do_sample=True, max_new_tokens=8, pad_token_id=0)
        return found.tolist()

    first = rows(0)
    assert first == rows(0) != rows(3) == rows(3) != rows(4)
    assert rows(3, seed=7) == first


def test_refused_by_name():
    plain = types.SimpleNamespace(model=tiny())
    with pytest.raises(ValueError, match=r"trainer\.model\.forward"):
        patch_trainer(plain, SMALL)
    assert "generate" not in vars(plain.model)
    with pytest.raises(ValueError, match=r"trainer\.model"):
        rollout(["One day"], plain)
    with pytest.raises(ValueError, match="cast_lm_head_to_fp32"):
        patch_trainer(trainer_of(tiny(), cast_lm_head_to_fp32=True), SMALL)
    trainer, batch = patched_trainer(), batch_of(PROMPTS, [[4], [5], [6]])
    with pytest.raises(ValueError, match=r"trainer\.model\.forward"):
        patch_trainer(trainer, SMALL)
    with pytest.raises(ValueError, match="output_router_logits"):
        trainer.model(**batch, fused_lm_head=True, output_router_logits=True)

"""TRL's trainers compute the log-probabilities of the rollouts, by engine passes alone."""

import os
import types
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from transformers import AutoModelForCausalLM, AutoTokenizer

import tinyspec
from tests.support import zoo
from tests.support.drop_in import SMALL
from tests.support.tiny import tiny
from tinyspec import Engine, SamplingParams
from tinyspec.drop_in import forward as canonical
from tinyspec.tools.demo import BUNDLED

pytest.importorskip("trl")

import datasets
import peft
import trl
from transformers import TrainerControl, TrainerState
from trl.trainer.utils import add_fused_lm_head

from tinyspec.integrations.trl import patch_trainer, rollout

pytestmark = pytest.mark.filterwarnings("ignore")

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


ORDERS = {
    "patch build trainer": "",
    "build patch trainer": "",
    "build trainer": "",
    "build patch": "fused_lm_head='True' is not allowed: TRL's: .*patch_trainer",
    "build trainer patch": "it is patched, by tinyspec.patch or by patch_trainer",
    "build patch trainer trainer": r"trainer\.model\.forward=.*FusedForward",
    "patch build": "other bits",
    "build patch trainer unpatch": "other bits",
}


@pytest.mark.parametrize("order, said", ORDERS.items(), ids=ORDERS)
def test_patched_forwards_and_trainers_in_any_order(order, said, reached):
    """``patch(model, forward=True)`` and ``patch_trainer``: both work, or the message names the
    other. A head that TRL puts over a patched forward does not reach it, which nobody can tell."""
    with Engine(tiny(), config=SMALL) as engine:
        answers, expected = drawn(engine)
    model, trainer = tiny(), None
    steps = {
        "patch": lambda: tinyspec.patch(model, SMALL, deterministic=True, forward=True),
        "trainer": lambda: patch_trainer(trainer, SMALL),
        "unpatch": lambda: tinyspec.unpatch(model),
    }

    def found():
        nonlocal trainer
        for step in order.split():
            if step == "build":
                trainer = trainer_of(model)
            else:
                steps[step]()
        return trainer.model(**batch_of(PROMPTS, answers), fused_lm_head=True).log_probs

    if said not in ("", "other bits"):
        with pytest.raises(ValueError, match=said):
            found()
        return
    logprobs, width = found(), max(map(len, PROMPTS)) - 1
    assert len(reached) == (said == "")
    rows = enumerate(expected)
    alike = [logprobs[n, width : width + len(row)].tolist() == row for n, row in rows]
    assert all(alike) == (said == "")


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


# GRPO by ``rollout`` and RLOO by patched ``generate``, under TRL's trainers: completions do not
# hang on how rows are spread over batches, calls and processes.

SPREAD = pytest.mark.slow("random use", 40)
STORIES = [f"User: Tell me a story about a {animal}.\nAssistant:" for animal in ("fox", "bee")]
GROUP, STEPS = 4, 2
# Per-device batch size, batches that are generated at once (None: those of an optimizer step),
# processes. In the last one every group is on both of them.
WAYS = [(4, None, 1), (1, None, 1), (2, None, 1), (4, 1, 1), (1, None, 2), (2, 1, 2)]


def trained(kind, way, folder, exact=True, dtype=torch.float32, lora=False, **given):
    """Prompt and tokens of all completions, and how far the log-probabilities of training were
    from those of ``rollout``. Weights stay: gradients would be added up in other orders. exact:
    "rollout": ``generate`` alone is patched; "before": the model is, and its forward, before the
    trainer is built."""
    batch, at_once, processes = way
    seen, differences = [], []

    def reward(prompts, completion_ids, **_):
        seen.extend(zip(prompts, map(tuple, completion_ids), strict=True))
        return [float(len(set(ids))) for ids in completion_ids]

    class Trainer(getattr(trl, f"{kind}Trainer")):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            self.trained = found[0].detach()
            return found

        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if (drawn := inputs.get("sampling_per_token_logps")) is not None:
                apart = (self.trained - drawn).abs()[inputs["completion_mask"].bool()]
                differences.append(apart.max().item())
            return loss

    arguments = {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": len(STORIES) * GROUP // (batch * processes),
        "steps_per_generation": at_once,
        "num_generations": GROUP,
        "max_completion_length": 8,
        "max_steps": STEPS,
        "learning_rate": 0.0,
        "temperature": 1.5,
        "seed": 3,
        **{"output_dir": str(folder), "use_cpu": True, "bf16": False, "report_to": "none"},
        **{"save_strategy": "no", "disable_tqdm": True},
        **given,
    }
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=dtype)
    if exact == "before":
        tinyspec.patch(model, deterministic=True, seed=3, forward=True)
    trainer = Trainer(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**arguments),
        train_dataset=datasets.Dataset.from_dict({"prompt": STORIES}),
        processing_class=AutoTokenizer.from_pretrained(BUNDLED),
        **({"rollout_func": rollout} if kind == "GRPO" and exact else {}),
        peft_config=adapters if lora else None,
    )
    if exact == "rollout":
        tinyspec.patch(trainer.model, deterministic=True, seed=3)
    elif exact:
        patch_trainer(trainer)
    trainer.train()
    return seen, differences


def on_a_rank(rank, kind, way, folder, exact):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    distributed.init_process_group("gloo", f"file://{folder}/store", world_size=2, rank=rank)
    torch.save(trained(kind, way, folder, exact), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


def spread(kind, way, folder, exact=True):
    """As ``trained``, by two processes together."""
    folder.mkdir()
    torch.multiprocessing.spawn(on_a_rank, (kind, way, str(folder), exact), 2)
    one, other = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    return one[0] + other[0], one[1] + other[1]


@pytest.mark.parametrize("lora", [False, True], ids=["weights", "LoRA"])
@pytest.mark.parametrize("bf16", ["fp32", "bf16", "bf16 autocast"])
def test_training_has_the_log_probabilities_of_the_rollouts(bf16, lora, tmp_path):
    """While weights move, with gradients that are added up over four batches of an optimizer step;
    TRL's own head over the same rollouts has others."""
    moving = {"learning_rate": 1e-2, "bf16": bf16 == "bf16 autocast", "lora": lora, "max_steps": 3}
    moving["dtype"] = torch.bfloat16 if bf16 == "bf16" else torch.float32
    found = {
        exact: trained("GRPO", (2, None, 1), tmp_path, exact=exact, **moving)
        for exact in (True, "before", "rollout")
    }
    for completions, differences in (found[True], found["before"]):
        assert set(differences) == {0.0} and len(differences) == 3 * 4
        assert len(set(completions)) > 8
    assert max(found["rollout"][1]) > 0, "control"


@SPREAD
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_completions_do_not_hang_on_how_rows_are_spread(kind, tmp_path):
    """With ``rollout`` training has its log-probabilities."""
    first = None
    for way in WAYS:
        run = trained if way[2] == 1 else spread
        seen, differences = run(kind, way, tmp_path / str(way))
        first = first or sorted(seen)
        assert sorted(seen) == first, way
        assert set(differences) == ({0.0} if kind == "GRPO" else set())
    assert len(set(first)) == len(first) == STEPS * len(STORIES) * GROUP


@SPREAD
def test_control_transformers_own(tmp_path):
    """It draws as rows lie in the batch, and in each process anew."""
    alone, called, two = WAYS[0], WAYS[3], WAYS[4]
    first = sorted(trained("GRPO", alone, tmp_path, exact=False)[0])
    assert sorted(trained("GRPO", called, tmp_path, exact=False)[0]) != first
    assert sorted(spread("GRPO", two, tmp_path / "two", exact=False)[0]) != first

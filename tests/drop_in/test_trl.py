"""TRL's trainers under their defaults on a patched model: GRPO and RLOO, gradient checkpointing,
mixed precision by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import tinyspec
from tests.support.drop_in import PAD, SMALL, patched
from tests.support.memory import pool_of
from tests.support.tiny import VOCAB, tiny
from tinyspec.drop_in.patched_generate import PatchedGenerate

pytestmark = [
    pytest.mark.slow("random use", 5),
    pytest.mark.filterwarnings("ignore"),
]
GROUP = 8
PROMPTS = [f"w{n} w{n + 1} w{n + 5}" for n in range(8)]
ASKED = {"deterministic": True, "seed": 7}
FAMILIES = ("qwen3", "llama", "gpt2", "gpt_neox")


def tokenizer() -> PreTrainedTokenizerFast:
    words = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{n}": n for n in range(3, VOCAB)}}
    made = Tokenizer(WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def loaded(family: str, folder: Path) -> Any:
    """A tiny model as from the hub: trainers load the reference model from where it was."""
    if not folder.exists():
        tiny(family).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def trainer_of(kind: str, model: Any, folder: Path, **settings: Any) -> Any:
    """A trainer under TRL's defaults. After each step ``seen`` has the completions' ids, ``states``
    which engine there is, how many pages its pool has, and the fingerprint."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    seen: list[list[list[int]]] = []

    states: list[tuple[Any, int, str]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(completion_ids)
        if isinstance(model.generate, PatchedGenerate):
            pages, _ = pool_of(model)
            states.append((model.generate._engine, pages, model.generate.fingerprint))
        return [float(sum(ids) % 7) for ids in completion_ids]

    arguments = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "per_device_train_batch_size": GROUP,
        "gradient_accumulation_steps": 1,
        "max_completion_length": 10,
        "max_steps": 3,
        "temperature": 3.0,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "seed": 3,
        **settings,
    }
    made = getattr(trl, f"{kind}Trainer")(
        model=model,
        reward_funcs=reward,
        args=getattr(trl, f"{kind}Config")(**arguments),
        train_dataset=datasets.Dataset(
            datasets.table.InMemoryTable.from_pydict({"prompt": PROMPTS}), fingerprint="prompts"
        ),
        processing_class=tokenizer(),
    )
    assert made.args.gradient_checkpointing and made.args.bf16, "TRL's defaults"
    made.seen, made.states = seen, states
    return made


@pytest.fixture
def counts(monkeypatch) -> dict[str, int]:
    """Calls that transformers' own ``generate`` served, and engines that were made."""
    found = {"_call_original": 0, "_new_engine": 0}

    def count(name, own):
        def counted(*args):
            found[name] += 1
            return own(*args)

        monkeypatch.setattr(PatchedGenerate, name, counted)

    for name in found:
        count(name, getattr(PatchedGenerate, name))
    return found


def script(kind: str, family: str, folder: Path, steps: int = 2, **settings: Any) -> Any:
    """The trainer of a script that has run, and its model, patched."""
    model = loaded(family, folder / "model")
    tinyspec.patch(model, SMALL)
    trainer = trainer_of(kind, model, folder, **{"max_steps": steps, **settings})
    trainer.train()
    return trainer, model


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_is_kept_from_step_to_step(kind, family, tmp_path, counts, probed):
    """One is made by ``patch``, one after the trainer has wrapped the model; one proof in all."""
    before = tiny(family)
    trainer, model = script(kind, family, tmp_path, 3, generation_kwargs=ASKED)
    assert counts == {"_call_original": 0, "_new_engine": 2}
    assert len(trainer.states) == 3 and len({id(engine) for engine, *_ in trainer.states}) == 1
    # The trainer's optimizer is a fused one.
    assert len({fingerprint for *_, fingerprint in trainer.states}) == 3
    assert len(probed) <= 1, "none where another test's is on disk"
    assert len(model.generate.seeds) == GROUP and None not in model.generate.seeds
    for completions in trainer.seen:
        assert len({tuple(ids) for ids in completions}) == GROUP
    changed = zip(before.parameters(), model.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in changed), "trained"
    # Autocast, which accelerate put around the forward, is not on behind the fingerprint's back.
    ids = torch.tensor([[5, 6, 7]])
    asked = {"max_new_tokens": 6, "pad_token_id": PAD, "deterministic": True, "do_sample": False}
    wrapped = model.generate(ids, **asked)
    tinyspec.unpatch(model)
    assert model(ids).logits.dtype == torch.float32 and "forward" in vars(model)
    unwrapped = tiny(family)
    unwrapped.load_state_dict(model.state_dict())
    with patched(unwrapped):
        assert torch.equal(unwrapped.generate(ids, **asked), wrapped)


@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
def test_memory_is_released_after_each_call(kind, tmp_path, counts):
    model = loaded("llama", tmp_path / "model")
    tinyspec.patch(model, SMALL, release=True)
    trainer = trainer_of(kind, model, tmp_path)
    trainer.train()
    assert [pages for _, pages, _ in trainer.states] == [0, 0, 0]
    assert len({id(engine) for engine, *_ in trainer.states}) == 1
    kept, _ = script(kind, "llama", tmp_path)
    assert all(pages > 0 for _, pages, _ in kept.states), "control"


def test_a_script_that_is_run_again_repeats(tmp_path):
    """Also its first group in any batch size that keeps a group whole. Control: another seed."""

    def completions(**settings):
        trainer, model = script("GRPO", "llama", tmp_path, generation_kwargs=ASKED, **settings)
        tinyspec.unpatch(model)
        return trainer.seen, [fingerprint for *_, fingerprint in trainer.states]

    first = completions()
    assert len(first[0]) == 2 and completions() == first
    halves = {"per_device_train_batch_size": GROUP // 2, "gradient_accumulation_steps": 2}
    for sizes in (halves, {"per_device_train_batch_size": 2 * GROUP}):
        other = completions(**sizes)
        assert other[0][0][:GROUP] == first[0][0]
        assert other == completions(**sizes)
    again = script("GRPO", "llama", tmp_path, generation_kwargs={**ASKED, "seed": 8})[0].seen
    assert again[0] != first[0][0]


def test_an_unwrapped_model_is_served(tmp_path, counts):
    """What trainers put around each call, with and without gradient checkpointing."""
    utils = pytest.importorskip("trl.models.utils")
    accelerator = pytest.importorskip("accelerate").Accelerator(mixed_precision="bf16", cpu=True)
    model = tiny("gpt2")
    tinyspec.patch(model, SMALL, deterministic=True)
    prepared = accelerator.prepare_model(model)
    found = []
    for checkpointing in (True, False, True):
        if checkpointing:
            prepared.gradient_checkpointing_enable()
        with utils.unwrap_model_for_generation(prepared, accelerator) as unwrapped:
            asked = {"max_new_tokens": 6, "pad_token_id": PAD, "do_sample": False}
            found.append(unwrapped.generate([[5, 6, 7]], **asked).tolist())
        assert prepared.is_gradient_checkpointing == checkpointing
        prepared.gradient_checkpointing_disable()
    assert found[0] == found[1] == found[2]
    assert counts == {"_call_original": 0, "_new_engine": 2}
    tinyspec.unpatch(model)

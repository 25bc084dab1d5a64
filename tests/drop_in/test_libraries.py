"""What people put around a model, and run on top of ``model.generate``, works as it is: PEFT,
torch.compile, accelerate, pipelines, and TRL's trainers by default.

Results are those of an unpatched model."""

from __future__ import annotations

import copy
import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, pipeline

import tinyspec
from tests.support.drop_in import PAD, SMALL, greedy, own, patched, random_ids
from tests.support.tiny import VOCAB, tiny
from tinyspec.drop_in.patching import PatchedGenerate
from tinyspec.tools.demo import BUNDLED

IDS = torch.tensor([[5, 17, 3, 99, 42, 8], [0, 0, 7, 7, 30, 61]])
MASK = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])


def generate(model, **settings):
    return model.generate(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=12, pad_token_id=0, **settings
    )


@pytest.fixture
def adapted():
    """A LoRA model whose adapter makes a difference."""
    peft = pytest.importorskip("peft")
    names = ["q_proj", "v_proj", "up_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=names, init_lora_weights=False)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny(), config).eval()


def test_an_adapter_in_its_wrapper(adapted):
    twin = copy.deepcopy(adapted)
    expected = generate(twin)
    tinyspec.patch(adapted)
    assert torch.equal(generate(adapted), expected)
    with adapted.disable_adapter(), twin.disable_adapter():
        bare = generate(twin)
        assert torch.equal(generate(adapted), bare)
        assert not torch.equal(bare, expected)
    assert torch.equal(generate(adapted), expected)
    alone = adapted.generate(IDS[:1], max_new_tokens=12, deterministic=True)
    assert torch.equal(generate(adapted, deterministic=True)[:1], alone)
    tinyspec.unpatch(adapted)
    assert "generate" not in vars(adapted.get_base_model())
    assert torch.equal(generate(adapted), expected)


def test_an_adapter_for_each_row_is_transformers_own_affair(adapted, caplog):
    """PEFT's hooks are on the layers for that call; the next one is served."""
    peft = pytest.importorskip("peft")
    names = ["o_proj", "q_proj"]
    config = peft.LoraConfig(r=4, lora_alpha=32, target_modules=names, init_lora_weights=False)
    adapted.add_adapter("other", config)
    twin = copy.deepcopy(adapted)
    tinyspec.patch(adapted)
    for names in (["default", "other"], ["__base__", "default"]):
        expected = generate(twin, adapter_names=names)
        assert not torch.equal(expected, generate(twin))
        before = copy.copy(adapted.get_base_model().generate.stats())
        assert torch.equal(generate(adapted, adapter_names=names), expected)
        assert "transformers' own generate runs" in caplog.text
        assert torch.equal(generate(adapted), generate(twin))
        assert adapted.get_base_model().generate.stats() != before, "served"
    # After an error PEFT leaves its hooks where they are.
    with pytest.raises(NotImplementedError, match="deterministic"):
        generate(adapted, adapter_names=names, deterministic=True)


def test_compiled():
    model = tiny()
    expected = generate(model)
    outer = torch.compile(model, backend="eager")
    tinyspec.patch(outer)
    assert torch.equal(generate(outer), expected)
    assert model.generate.stats().committed > 0
    tinyspec.unpatch(outer)
    assert "generate" not in vars(model) and torch.equal(generate(outer), expected)


TEXTS = ["User: What is 2 + 3?\nBot:", "Once upon a time", "User: Tell me a story.\nBot:"]
CHATS = [
    [{"role": "user", "content": "What is 2 + 3?"}],
    [
        {"role": "user", "content": "What is 4 + 4?"},
        {"role": "assistant", "content": "4 + 4 = 8."},
        {"role": "user", "content": "Tell me a story about a fox."},
    ],
]
GREEDY = {"max_new_tokens": 16, "do_sample": False}


@pytest.fixture(scope="module")
def tokenizer():
    loaded = AutoTokenizer.from_pretrained(BUNDLED)
    loaded.padding_side = "left"
    return loaded


def bundled():
    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)


@pytest.fixture(scope="module")
def plain():
    return bundled()


@pytest.fixture(scope="module")
def model():
    with patched(bundled()) as model:
        yield model


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"batch_size": 2},
        {"batch_size": 3, "return_full_text": False},
        {"return_full_text": True},
        {"return_tensors": True},
        {"max_new_tokens": 5, "repetition_penalty": 1.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("asked", [TEXTS, CHATS], ids=["texts", "chats"])
def test_pipeline(model, plain, tokenizer, arguments, asked):
    answers = []
    for one in (model, plain):
        pipe = pipeline("text-generation", model=one, tokenizer=tokenizer)
        # Without lengths and modes of its own, a pipeline samples 256 tokens.
        found = pipe(asked, **{**GREEDY, **arguments})
        answers.append([pipe(asked[0], **{**GREEDY, **arguments}), *found])
    assert answers[0] == answers[1]
    assert model.generate.stats().committed > 0


def test_a_pipeline_hands_on_what_tinyspec_adds(model, tokenizer):
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    asked = {"do_sample": True, "max_new_tokens": 12, "seed": 3, "deterministic": True}
    alone = pipe(TEXTS[1], **asked)
    assert pipe([TEXTS[1], TEXTS[2]], batch_size=2, **asked)[0] == alone
    assert pipe(TEXTS[1], **{**asked, "seed": 4}) != alone


def test_no_grad_and_inference_mode():
    prompt = random_ids(12)
    expected = greedy(own(), prompt)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with patched(tiny()) as model:
            with context:
                assert greedy(model, prompt) == expected
            loss = model(torch.tensor([prompt]), labels=torch.tensor([prompt])).loss
            loss.backward()
            assert all(p.grad is not None for p in model.parameters())


def put_over(model):
    """A method over ``model.forward`` that calls the one before, as TRL's trainers put it."""
    before = model.forward

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused=False, **kwargs):
        assert self is not None and not fused
        return before(*args, **kwargs)

    model.forward = types.MethodType(forward, model)


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("patched_first", [False, True])
def test_a_method_over_the_forward(patched_first, forward):
    """The engine's copy runs it around its own modules; a patched forward inside of it serves."""
    prompt = random_ids(9)
    with patched(tiny(), forward=True) as model:
        expected = greedy(model, prompt, deterministic=True)
        logits = model(torch.tensor([prompt])).logits
    model = tiny()
    if not patched_first:
        put_over(model)
    with patched(model, forward=forward):
        if patched_first:
            put_over(model)
        assert greedy(model, prompt, deterministic=True) == expected
        same = torch.equal(model(torch.tensor([prompt])).logits, logits)
        assert same or not forward


def test_results_can_be_trained_on():
    """Nothing that a call returns is an inference tensor, unless the caller is in that mode."""
    with patched(tiny()) as model:
        found = model.generate(
            torch.tensor([random_ids(9)]),
            max_new_tokens=4,
            pad_token_id=PAD,
            return_dict_in_generate=True,
            output_scores=True,
            output_logits=True,
        )
        assert not any(t.is_inference() for t in (found.sequences, *found.scores, *found.logits))
        model(found.sequences, labels=found.sequences).loss.backward()


GROUP = 8
ASKS = [f"w{n} w{n + 1} w{n + 5}" for n in range(8)]
ASKED = {"deterministic": True, "seed": 7}
WITH_TRL = pytest.mark.slow("random use", 5)
TRAINED = ("qwen3", "gpt2")


def of_words() -> PreTrainedTokenizerFast:
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
    which engine there is, and the fingerprint."""
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    seen: list[list[list[int]]] = []
    states: list[tuple[Any, str]] = []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        seen.append(completion_ids)
        if isinstance(model.generate, PatchedGenerate):
            states.append((model.generate._engine, model.generate.fingerprint))
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
            datasets.table.InMemoryTable.from_pydict({"prompt": ASKS}), fingerprint="prompts"
        ),
        processing_class=of_words(),
    )
    assert made.args.gradient_checkpointing and made.args.bf16, "TRL's defaults"
    made.seen, made.states = seen, states
    return made


def script(kind: str, family: str, folder: Path, steps: int = 2, **settings: Any) -> Any:
    """The trainer of a script that has run, and its model, patched."""
    model = loaded(family, folder / "model")
    tinyspec.patch(model, SMALL)
    trainer = trainer_of(kind, model, folder, **{"max_steps": steps, **settings})
    trainer.train()
    return trainer, model


@WITH_TRL
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["GRPO", "RLOO"])
@pytest.mark.parametrize("family", TRAINED)
def test_the_engine_is_kept_from_step_to_step(kind, family, tmp_path, caplog, probed):
    """It serves all; one proof in all."""
    before = tiny(family)
    trainer, model = script(kind, family, tmp_path, 3, generation_kwargs=ASKED)
    assert "transformers' own generate runs" not in caplog.text
    assert len(trainer.states) == 3 and len({id(engine) for engine, *_ in trainer.states}) == 1
    # The trainer's optimizer is a fused one.
    assert len({fingerprint for *_, fingerprint in trainer.states}) == 3
    assert len(probed) <= 1, "none where another test's is on disk"
    assert len(model.generate.seeds) == GROUP and None not in model.generate.seeds
    for completions in trainer.seen:
        assert len({tuple(ids) for ids in completions}) == GROUP
    changed = zip(before.parameters(), model.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in changed), "trained"
    # In the precision that accelerate put around the forward, from the first step on.
    assert {engine.autocast for engine, *_ in trainer.states} == {torch.bfloat16}
    ids = torch.tensor([[5, 6, 7]])
    asked = {"max_new_tokens": 6, "pad_token_id": PAD, "deterministic": True, "do_sample": False}
    wrapped = model.generate(ids, **asked)
    tinyspec.unpatch(model)
    assert model(ids).logits.dtype == torch.float32 and "forward" in vars(model)
    unwrapped = tiny(family)
    unwrapped.load_state_dict(model.state_dict())
    with patched(unwrapped), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(unwrapped.generate(ids, **asked), wrapped)


@WITH_TRL
@pytest.mark.filterwarnings("ignore")
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

"""PEFT: adapters that live in a model's layers are served, through the wrapper or without it; those
that do not are refused by name."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support import loading, zoo
from tests.support.budget import first
from tests.support.loading import CONFIG, DETERMINISTIC, PROMPTS, greedy, refused, tokens
from tests.support.mixes import bits
from tests.support.tiny import prompts, tiny
from tinyspec import Engine, SamplingParams, doctor

peft = pytest.importorskip("peft")

SOME = ["q_proj", "v_proj", "down_proj"]


def lora(model=None, wrap=True, **settings):
    """A tiny model with a LoRA adapter that changes what it says."""
    settings = {"r": 4, "target_modules": SOME, "init_lora_weights": False, **settings}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = model or tiny()
    if wrap:
        return peft.get_peft_model(model, config).eval()
    model.add_adapter(config)
    return model.eval()


def mixed():
    """Adapters of two kinds at once."""
    model = peft.get_peft_model(tiny(), peft.LoraConfig(target_modules=["q_proj"]), mixed=True)
    model.add_adapter("other", peft.LoHaConfig(target_modules=["k_proj"], init_weights=False))
    model.set_adapter(["default", "other"])
    return model.eval()


def tuned(kind, model=None, **settings):
    """A tiny model with an adapter of another kind."""
    config = getattr(peft, f"{kind}Config")(**settings)
    return peft.get_peft_model(model or tiny(), config).eval()


IA3 = {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
TOKENS = {"target_modules": ["embed_tokens"], "token_indices": [1, 2, 3]}
# Adapters in layers.
WAYS = {
    "lora": lora,
    "mixed": mixed,
    "bf16 base": lambda: lora(tiny(dtype=torch.bfloat16)),
    "dora": lambda: lora(use_dora=True),
    "gpt2": lambda: lora(tiny("gpt2"), target_modules=["c_attn"], fan_in_fan_out=True),
    "embedding": lambda: lora(target_modules=["embed_tokens", "lm_head", "k_proj"]),
    "no wrapper": lambda: lora(wrap=False),
    "ia3": lambda: tuned("IA3", **IA3, init_ia3_weights=False),
    "loha": lambda: tuned("LoHa", target_modules=["q_proj"], init_weights=False),
    "oft": lambda: tuned("OFT", target_modules=["q_proj"], oft_block_size=8, init_weights=False),
    "tokens": lambda: tuned("TrainableTokens", **TOKENS, init_weights=False),
}


@pytest.mark.parametrize("way", first(2, WAYS.values(), 1), ids=WAYS)
def test_adapters_in_layers(way):
    model = way()
    loading.serve(model, None if model.dtype == torch.bfloat16 else greedy(model))


# Fingerprints and changes under way; with this no proof is needed for a fingerprint.
UNPROVEN = replace(CONFIG, linear="never")


def test_adapters_change_while_an_engine_is_open():
    model = lora()
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    with Engine(model, config=UNPROVEN) as engine:

        def answers():
            return tokens(engine.generate(PROMPTS, loading.PLAIN)), engine.fingerprint

        first = answers()
        with model.disable_adapter():
            without = answers()
        model.set_adapter("other")
        other = answers()
        model.set_adapter("default")
        again = answers()
        model.merge_adapter()
        merged = answers()
        model.unmerge_adapter()
        scaling = model.base_model.model.model.layers[0].mlp.down_proj.scaling
        scaling["default"] *= 3
        scaled = answers()
        scaling["default"] /= 3
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B.default" in name:
                    parameter.mul_(1.5)
        trained = answers()
    assert first == again and merged[0] == first[0]
    seen = [first, without, other, merged, scaled, trained]
    assert len({print_ for _, print_ in seen}) == 6 and scaled[0] != first[0]
    assert without[0] == greedy(tiny()) and trained[0] == greedy(model)
    model.set_adapter("other")
    assert other[0] == greedy(model)


def test_which_of_disabled_adapters_is_active_is_no_part_of_the_fingerprint():
    model = heard()
    with Engine(model, config=UNPROVEN) as engine:
        enabled, disabled = [], []
        for name in ("default", "other"):
            model.set_adapter(name)
            enabled.append(engine.fingerprint)
            with model.disable_adapter():
                disabled.append(engine.fingerprint)
    assert disabled[0] == disabled[1]
    assert len({*enabled, *disabled}) == 3, "control: it matters while they are enabled"


def heard(**settings):
    """Two adapters with large weights: W + BA - BA is another W."""
    model = lora(**settings)
    model.add_adapter("other", copy.deepcopy(model.peft_config["default"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.5, generator=torch.Generator().manual_seed(len(name)))
    return model


@pytest.mark.parametrize("names", [["default"], ["default", "other"]], ids=len)
@pytest.mark.parametrize("safe", [False, True])
def test_a_merge_that_was_undone_is_a_change(safe, names):
    """Between two calls and during one."""
    model, long = heard(), replace(DETERMINISTIC, max_new_tokens=40)

    def undone():
        model.merge_adapter(names, safe_merge=safe)
        model.unmerge_adapter()

    def answers(engine):
        outputs = engine.generate(PROMPTS, DETERMINISTIC)
        return [bits(output) for output in outputs], outputs[0].fingerprint

    with Engine(model, config=CONFIG) as engine:
        before = answers(engine)
        undone()
        after = answers(engine)
        events = engine.stream(PROMPTS[1], long)
        next(events)
        undone()
        *_, last = events
        assert last.finish_reason == "abort"
        assert "the weights changed" in last.error
        again = answers(engine)
    with Engine(model, config=CONFIG) as fresh:
        assert answers(fresh) == again
    assert after[0] != before[0], "control: bits move"
    assert after[1] != before[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_is_loaded_beside_its_model(tmp_path, dtype):
    """By name: what PEFT makes of both; what is no adapter, or another model's, is told."""
    tiny(dtype=dtype).save_pretrained(tmp_path / "base")
    lora(tiny(dtype=dtype)).save_pretrained(tmp_path / "own")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=dtype)
    model = peft.PeftModel.from_pretrained(base, tmp_path / "own", autocast_adapter_dtype=False)
    with Engine(model.eval(), config=CONFIG) as engine:
        expected = engine.generate(PROMPTS, DETERMINISTIC)
    given = {"device": "cpu", "config": CONFIG}
    with Engine.from_pretrained(tmp_path / "base", **given, lora=tmp_path / "own") as engine:
        found = engine.generate(PROMPTS, DETERMINISTIC)
    with Engine.from_pretrained(tmp_path / "base", **given) as engine:
        control = engine.generate(PROMPTS, DETERMINISTIC)
    assert [*map(bits, found)] == [*map(bits, expected)] != [*map(bits, control)]
    for wrong in (tmp_path / "none", tmp_path / "base"):
        with pytest.raises(ValueError, match=r"lora=.* is not allowed: an adapter that PEFT has"):
            Engine.from_pretrained(tmp_path / "base", **given, lora=wrong)


# In a process of its own: here, engines of other tests may be open.
COUNTED = """
import gc
from tests.model.test_adapters import UNPROVEN, Engine, heard, peft

layer = peft.tuners.lora.Linear
own, model, other = (layer.merge, layer.unmerge), heard(), heard()
with Engine(model, config=UNPROVEN) as engine:
    with Engine(other, config=UNPROVEN):
        assert layer.merge is not own[0] and layer.unmerge is not own[1]
        model.set_adapter("other")
        engine.check_model()  # makes another copy
    model.merge_adapter()
    model.unmerge_adapter()
    assert engine.contract.changed()
assert (layer.merge, layer.unmerge) == own
dropped = Engine(model, config=UNPROVEN)
assert layer.merge is not own[0]
del dropped
gc.collect()
assert (layer.merge, layer.unmerge) == own
print("seen to the end")
"""


def test_merges_are_counted_as_long_as_an_engine_is_open():
    child = subprocess.run([sys.executable, "-c", COUNTED], capture_output=True, text=True)
    assert child.stdout == "seen to the end\n", child.stderr


# Refused


def merged_and_disabled():
    """PEFT unmerges them in the next forward, whoever calls it."""
    model = lora()
    model.merge_adapter()
    model.base_model.disable_adapter_layers()
    return model


def prompted(kind):
    return tuned(kind, task_type="CAUSAL_LM", num_virtual_tokens=3)


def adaption_prompt():
    return tuned("AdaptionPrompt", task_type="CAUSAL_LM", adapter_len=2, adapter_layers=1)


REFUSED = {
    "'default' is PROMPT_TUNING, and its virtual tokens": lambda: prompted("PromptTuning"),
    "'default' is PREFIX_TUNING, and its virtual tokens": lambda: prompted("PrefixTuning"),
    "'default' is ADAPTION_PROMPT": adaption_prompt,
    "a pass would unmerge model.layers.0.self_attn.q_proj": merged_and_disabled,
    "alora_invocation_tokens": lambda: lora(alora_invocation_tokens=[1, 2]),
    "q_proj's parameters in every pass": lambda: lora(
        target_modules=[], target_parameters=["q_proj.weight"]
    ),
}


def test_what_is_not_in_the_layers_is_refused():
    for message, make in REFUSED.items():
        model = make()
        refused(model, message)
        assert message in doctor(model, CONFIG).problems[0]
    model = lora()
    model.register_forward_hook(lambda *_: None)
    refused(model, "PeftModelForCausalLM has forward hooks")


AROUND_ATTENTION = {
    "adaption prompt": lambda: adaption_prompt().base_model.model,
    "a copy of it": lambda: lora(modules_to_save=["self_attn"]),
    "norm of queries": lambda: tuned("LNTuning", tiny("qwen3"), target_modules=["q_norm"]),
}


@pytest.mark.crossed(0.8)
@pytest.mark.parametrize("make", AROUND_ATTENTION.values(), ids=AROUND_ATTENTION)
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_within_attention_is_served(make, deterministic):
    """The module that was called at load is the one that is served, whatever it is wrapped in."""
    model = make()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(own in name for own in ("adaption", "modules_to_save", "ln_tuning")):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    expected = [zoo.greedy(model, prompt, 20)[0] for prompt in prompts(3)]
    assert expected != [zoo.greedy(tiny(), prompt, 20)[0] for prompt in prompts(3)], (
        "as if left out"
    )
    params = SamplingParams(max_new_tokens=20, ignore_eos=True, deterministic=deterministic)
    with Engine(model, config=CONFIG) as engine:
        outputs = engine.generate(prompts(3), params)
    assert [output.completions[0].token_ids for output in outputs] == expected


def test_an_adapter_swapped_in_place_is_a_change(tmp_path):
    from peft.utils import hotswap

    model, other = lora(), lora()
    other.save_pretrained(tmp_path)
    with Engine(model, config=UNPROVEN) as engine:
        before = engine.fingerprint
        hotswap.hotswap_adapter(model, str(tmp_path), "default")
        after = engine.fingerprint
    with Engine(model, config=UNPROVEN) as fresh:
        assert fresh.fingerprint == after != before

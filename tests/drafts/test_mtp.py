"""Heads that ship with checkpoints: what they draft is what transformers' own model of them says,
and no bit of an output moves."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import cache_utils, modeling_layers

from tests.drafts.test_assistant import drafted
from tests.support.cases import engine_of, model_of, text
from tests.support.heads import KINDS, LAYERS, with_head
from tests.support.recorded import as_on_a_gpu
from tests.support.zoo import tiny as of_zoo
from tinyspec import Engine, EngineConfig, SamplingParams, patch, unpatch
from tinyspec.drafts.mtp import HeadRunner
from tinyspec.scheduler.scheduler import Scheduler

ALWAYS = {"verify": "always", "draft_window": 3, "page_size": 8}
ORACLE = getattr(modeling_layers, "MtpModel", None)
SAMPLED = {"temperature": 1.0, "seed": 5}


def oracle_of(model):
    """transformers' own model of the head, told what it does not know of every family."""
    config = model.config
    for name, kind in (("layer_types", "full_attention"), ("mlp_layer_types", "sparse")):
        if getattr(config, name, None) is not None:
            setattr(config, f"mtp_{name}", getattr(config, f"mtp_{name}", None) or [kind])
    config.num_mtp_layers = 1
    if config.model_type in LAYERS:
        names = [rf"model\.layers\.{config.num_hidden_layers}\..*"]
        model._keys_to_ignore_on_load_unexpected = names
    return ORACLE.from_pretrained(model).eval()


@pytest.mark.skipif(not hasattr(ORACLE, "forward_layer"), reason="an older transformers")
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_transformers(kind, tmp_path, monkeypatch):
    """The first ones, which begin with the model's hidden states, and the next, which begin with
    the head's own."""
    torch.manual_seed(0)
    model, seen = with_head(of_zoo(kind), tmp_path), []
    forward = HeadRunner.forward

    def noted(self, batch, *given, **more):
        seen.append((batch.input_ids.tolist(), forward(self, batch, *given, **more)))
        return seen[-1][1]

    monkeypatch.setattr(HeadRunner, "forward", noted)
    prompt = text(13, 1)
    with engine_of(model, drafter="mtp", max_model_len=64, **ALWAYS) as engine:
        params = SamplingParams(max_new_tokens=8, deterministic=True, ignore_eos=True)
        (output,) = engine.generate([prompt], params)
    (read, first), (drafts, second), (more, third) = seen[:3]
    known = [*prompt, output.completions[0].token_ids[0]]
    assert read[: len(prompt)] == known[1:]
    head, ids = oracle_of(model), torch.tensor([known])
    cache = cache_utils.MtpCache(config=model.config.get_mtp_config())
    with torch.no_grad():
        hidden = model.get_decoder()(ids[:, :-1]).last_hidden_state
        places = torch.arange(len(prompt))[None]
        hidden = head.forward_layer(0, hidden, places, cache, input_ids=ids[:, 1:])[:, -1:]
        for number, (found, token) in enumerate(
            ((first, drafts[0]), (second, more[0]), (third, None))
        ):
            expected = head._project_to_logits(hidden)[0, -1]
            assert torch.allclose(found[0], expected, rtol=1e-3, atol=2e-4), number
            if token is None:
                break
            assert token == int(expected.argmax())
            place = torch.tensor([[len(prompt) + number]])
            hidden = head.forward_layer(0, hidden, place, cache, input_ids=torch.tensor([[token]]))
    assert not torch.allclose(first[0], second[0], rtol=1e-3, atol=2e-4), "control"


def right_one(folder):
    """A model whose head is right: a token depends on the one before alone."""
    model = model_of("as is")
    width = model.config.hidden_size
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
        for layer in model.model.layers[:-1]:
            layer.mlp.down_proj.weight.zero_()
        weight = model.model.embed_tokens.weight
        weight /= weight.square().mean(1, keepdim=True).sqrt()
    joined = torch.cat((torch.eye(width), torch.zeros(width, width)), 1)
    return with_head(
        model, folder, enorm=torch.ones(width), hnorm=torch.ones(width), eh_proj=joined
    )


@pytest.mark.parametrize("style", [{}, SAMPLED, {**SAMPLED, "top_k": 9, "repetition_penalty": 1.2}])
def test_one_that_is_right(style, tmp_path):
    """Is always right, at any temperature; accepted drafts are no draft the next time."""
    settings = {"max_new_tokens": 24, "logprobs": True, "deterministic": True, **style}
    asked = [(text(n, seed=n), SamplingParams(**settings)) for n in (1, 3, 9, 17, 40)]
    _, stats = drafted(right_one(tmp_path), asked, "mtp", **ALWAYS)
    assert stats.accepted > 0.99 * stats.drafted > 0.7 * stats.committed * 3 / 4


def test_as_on_a_gpu(tmp_path, monkeypatch):
    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(Scheduler, "how_many", lambda *given: 3)
    params = SamplingParams(max_new_tokens=20, deterministic=True, logprobs=True, **SAMPLED)
    asked, judge = [(text(n, n), params) for n in (3, 20)], {"backend": "triton", "page_size": 8}
    _, stats = drafted(right_one(tmp_path), asked, "mtp", judge, **judge, overlap=True)
    assert stats.accepted > 0.9 * stats.drafted > 0


def test_a_patched_model(tmp_path):
    """``use_mtp`` is transformers' name for what the engine does by its config."""
    model = right_one(tmp_path)
    given = {"do_sample": True, "seed": 3, "max_new_tokens": 20, "deterministic": True}
    ids, found = torch.tensor([text(7, 2), text(7, 3)]), []
    for drafter in (None, "mtp"):
        patch(model, EngineConfig(drafter=drafter))
        found.append(model.generate(ids, **given, **({"use_mtp": True} if drafter else {})))
        unpatch(model)
    assert torch.equal(*found)


def test_checkpoints_without_one(tmp_path):
    model = model_of("as is")
    model.save_pretrained(tmp_path)
    model.config.name_or_path = str(tmp_path)
    with pytest.raises(ValueError, match=r"drafter='mtp'.*has no head.*mtp\.fc\.weight"):
        engine_of(model, drafter="mtp")
    model.config.name_or_path = str(tmp_path / "nothing")
    with pytest.raises(ValueError, match=r"drafter='mtp'.*cannot be read"):
        engine_of(model, drafter="mtp")


def test_a_head_in_parts(tmp_path):
    """What it lacks is named, and never drawn at random."""
    model, file = right_one(tmp_path), tmp_path / "model.safetensors"
    kept = load_file(file)
    del kept["mtp.layers.0.mlp.up_proj.weight"]
    save_file(kept, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0\.mlp\.up_proj\.weight"):
        engine_of(model, drafter="mtp")


def test_by_name(tmp_path):
    """It is no model's name."""
    right_one(tmp_path)
    config = EngineConfig(max_model_len=64)
    with Engine.from_pretrained(tmp_path, drafter="mtp", config=config) as engine:
        assert engine.config.drafter == "mtp" and hasattr(engine.drafter, "mtp_head")

"""Every text causal LM of transformers: served as the README's table says, or refused as it says.

The table is what ``python -m tests.support.walk`` has found. Here the same is found again, type by
type: quickly (attention, or the refusal, and a run of some tokens) and, in the slow tests,
token by token and bit by bit.
"""

from dataclasses import replace
from importlib.metadata import version

import pytest
import torch
from torch import nn

from tests.support import walk
from tests.support.budget import first
from tests.support.graphs import with_graphs
from tests.support.zoo import BUILT, MODEL_TYPES, tiny
from tests.support.zoo_configs import CANNOT
from tinyspec import Engine, EngineConfig, SamplingParams, UnsupportedModelError
from tinyspec.engine import engine
from tinyspec.model.supported import SERVED
from tinyspec.runner import parity_check

TABLE = walk.places()
# Families are written otherwise in other versions: why one is refused, or that it is, may differ.
OWN_VERSION = version("transformers") == walk.rendered_with()


def test_the_table_is_complete():
    """Of the version that it was rendered with; older ones have fewer types."""
    missing = set(TABLE) - set(MODEL_TYPES)
    assert set(MODEL_TYPES) <= set(TABLE) and set(CANNOT) <= set(TABLE)
    assert not missing or not OWN_VERSION
    assert {kind for kind, row in TABLE.items() if len(row) == 3} == SERVED
    assert f"{len(SERVED)} of {len(TABLE)} model types" in walk.table()
    assert len(SERVED) >= 120


@pytest.mark.parametrize("kind", first(60, BUILT, 0.1))
def test_attention_or_refusal(kind, monkeypatch):
    """Nothing is taken as known: each is compared with its own ``generate`` over a few tokens."""
    monkeypatch.setattr(parity_check, "SERVED", frozenset())
    model = tiny(kind)
    if kind in SERVED:
        assert walk.attention_of(model) == TABLE[kind][0]
    else:
        with pytest.raises(UnsupportedModelError) as refused:
            walk.attention_of(model)
        reason = str(refused.value).partition(" is not supported: ")[2]
        assert reason and (not OWN_VERSION or [walk.shortened(reason)] == TABLE[kind])


@pytest.mark.slow("model types", 4)
@pytest.mark.parametrize("kind", sorted(SERVED & set(BUILT)))
def test_tokens_and_bits(kind):
    """64 greedy tokens of ragged batches of 1, 3 and 8, and bits as the table says."""
    model = tiny(kind)
    assert walk.wrong_tokens(model) == []
    assert walk.contract_of(model) in walk.allowed(TABLE[kind][1])
    assert walk.forward_of(model) in walk.allowed(TABLE[kind][2])


@pytest.mark.slow("model types", 6)
@pytest.mark.parametrize("kind", sorted(SERVED & set(BUILT)))
def test_bits_on_the_triton_path(kind, monkeypatch):
    """As a GPU runs it, in bf16, but for the kernels: graphs of a CPU, twins pose."""
    with_graphs(monkeypatch)
    config = replace(walk.CONFIG, backend="triton")
    assert walk.contract_of(tiny(kind).bfloat16(), 40, config) in walk.allowed(TABLE[kind][1])


@pytest.mark.parametrize("kind", ["longcat_flash", "phimoe", "roc_bert"])
def test_canonical_forwards(kind):
    """Of types that are special there: all others are among the slow tests."""
    assert walk.forward_of(tiny(kind)) == TABLE[kind][2] or not OWN_VERSION


def test_experts_of_its_own_are_refused():
    """Rows that reach none of them in the proof's passes hid that their products follow the rows:
    the probe saw no product at all, and a crowd changed bits."""
    assert walk.contract_of(tiny("longcat_flash"), tokens=2) == TABLE["longcat_flash"][1]
    assert TABLE["longcat_flash"][1] == walk.REFUSED


# Families that nobody has tried


class Shifted(nn.Module):
    """A layer that lets a row see half of the row before it, as hybrids do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1] / 2


def test_rows_that_know_each_other_are_refused():
    model = tiny("llama")
    model.model.layers[1].mlp = Shifted(model.model.layers[1].mlp)
    with pytest.raises(UnsupportedModelError, match="rows affect each other outside attention"):
        Engine(model)


def test_a_model_without_positions_is_refused():
    model = tiny("llama")
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.zeros_like(position_ids))
    with pytest.raises(UnsupportedModelError, match=r"do not know their positions|forward of its"):
        Engine(model)


@pytest.mark.parametrize("known", [False, True])
def test_control_a_wrong_attention_shows_in_the_rehearsal(known, monkeypatch):
    """Scores half as large as they should be: with the type known, nobody would look."""
    if not known:
        monkeypatch.setattr(parity_check, "SERVED", frozenset())
    model = tiny("gpt2")
    paged = engine.install

    def spoilt(*args, **owner):
        patched = paged(*args, **owner)
        attend = patched.context.attend

        def halved(*rows, scale, **scores):
            return attend(*rows, scale=scale / 2, **scores)

        patched.context.attend = halved
        return patched

    monkeypatch.setattr(engine, "install", spoilt)
    if known:
        Engine(model).close()
    else:
        with pytest.raises(UnsupportedModelError, match="off those of its own generate"):
            Engine(model)
    assert not hasattr(model, "_tinyspec")


def test_a_long_rope_is_served_as_far_as_one_table_holds():
    config = walk.tiny("phi3").config
    config.rope_parameters = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "long_factor": [4.0] * 8,
        "short_factor": [1.0] * 8,
        "original_max_position_embeddings": 64,
    }
    config.original_max_position_embeddings = 64
    model = type(tiny("phi3"))(config).eval()
    with pytest.raises(UnsupportedModelError, match="max_model_len=64"):
        Engine(model)
    asked = [[3, 4, 5]], SamplingParams(max_new_tokens=4, deterministic=True)
    with Engine(model, config=EngineConfig(max_model_len=64)) as engine:
        first = engine.generate(*asked)[0]
        with torch.no_grad():
            model.lm_head.weight.mul_(-1)
        # Its module writes to a buffer whenever a table is made: no pass does.
        outputs = [first, *(engine.generate(*asked)[0] for _ in range(2))]
    assert all(output.completions[0].finish_reason == "length" for output in outputs)


SMALL = [{"max_model_len": 8}, *({"reference_rows": n, "max_rows": n} for n in (4, 7))]


@pytest.mark.parametrize("sizes", SMALL, ids=str)
def test_sequences_and_passes_may_be_smaller_than_what_a_model_is_tried_with(sizes, monkeypatch):
    """Of a class outside the table of types the prompt of the comparison is cut to fit."""
    monkeypatch.setattr(parity_check, "SERVED", frozenset())
    params = SamplingParams(max_new_tokens=5, ignore_eos=True, deterministic=True)
    prompt = [3, 4, 5] if "max_model_len" in sizes else [*range(3, 15)]
    with Engine(tiny("llama"), config=EngineConfig(**sizes)) as engine:
        (output,) = engine.generate([prompt], params)
    assert len(output.completions[0].token_ids) == 5


def test_layers_that_run_by_the_value_of_rows_end_their_requests():
    """KV goes by the order of calls: a layer left out would shift all behind it."""
    model = tiny("llama")
    layer = model.model.layers[0]
    forward = layer.forward

    def skipped(hidden_states, **kwargs):
        few = hidden_states.shape[1] < 4
        return hidden_states if few else forward(hidden_states, **kwargs)

    layer.forward = skipped
    with Engine(model) as engine:
        completion = engine.generate([[3, 4, 5, 6, 7, 8]])[0].completions[0]
    assert "must not depend on its rows" in completion.error


def test_llama4_is_refused_where_it_would_count_rows():
    model = tiny("llama4_text")
    for config in (model.config, *(layer.self_attn.config for layer in model.model.layers)):
        config.floor_scale = 24
    for name, settings in {
        "max_model_len=23": {"max_model_len": 24, "max_rows": 16, "reference_rows": 16},
        "max_rows=23": {"max_model_len": 23, "max_rows": 64},
    }.items():
        with pytest.raises(UnsupportedModelError, match=name):
            Engine(model, config=EngineConfig(**settings))

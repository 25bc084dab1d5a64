"""The ``past_key_values`` of returned dicts: transformers' own, up to rounding."""

import pytest
import torch
from transformers import DynamicCache

from tests.support import zoo
from tests.support.budget import first
from tests.support.drop_in import patched
from tinyspec import EngineConfig
from tinyspec.kernels.twins.e4m3 import CODES, stored, values
from tinyspec.model.supported import SERVED
from tinyspec.runner.kv_cache import KVCache

NEW = 7
# The rows of a call, of several lengths, padded in front.
ROWS = zoo.prompts()[:3]
WIDTH = max(map(len, ROWS))
FIRST = ("llama", "mistral", "gemma3_text", "gpt2")


# What these keep is no key or value of attention (latents, shared layers, heads before they are
# repeated), or they keep it in a cache of their own.
OF_ANOTHER_FORM = {
    *("axk1", "deepseek_v2", "deepseek_v3", "diffllama", "gemma3n_text", "gemma4_text", "youtu"),
    *("glm4_moe_lite", "jetmoe", "longcat_flash", "minicpm3", "mllama"),
}


def padded(rows=ROWS):
    ids = torch.tensor([[0] * (WIDTH - len(row)) + row for row in rows])
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def generate(model, given, **settings):
    settings = {"max_new_tokens": NEW, "return_dict_in_generate": True} | settings
    return model.generate(**given, do_sample=settings.pop("do_sample", False), **settings)


def differences(found, expected, mask):
    """The largest of each layer, relative to the layer's values, where ``mask`` [N, T] is 1."""
    assert type(found) is type(expected) is DynamicCache
    assert len(found.layers) == len(expected.layers)
    assert found.get_seq_length() == expected.get_seq_length()
    worst = []
    for layer, own in zip(found.layers, expected.layers, strict=True):
        assert type(layer) is type(own)
        for mine, theirs in ((layer.keys, own.keys), (layer.values, own.values)):
            assert mine.shape == theirs.shape and mine.dtype == theirs.dtype
            real = mask[:, -mine.shape[2] :, None].transpose(1, 2)[..., None] != 0
            difference = (mine - theirs).masked_fill(~real, 0).abs().max()
            worst.append(float(difference / theirs.abs().max()))
    return max(worst)


def mask_of(given, tokens):
    return torch.nn.functional.pad(given["attention_mask"], (0, tokens), value=1)


ORDER = sorted(SERVED, key=lambda kind: (kind not in FIRST, kind))


@pytest.mark.parametrize("kind", first(len(FIRST), ORDER, 1.5))
def test_cache_of_every_family(kind):
    """Its layers, shapes, lengths and values, and what transformers makes of it afterwards."""
    model, given = zoo.tiny(kind), padded(ROWS if kind in FIRST else ROWS[1:2])
    own = generate(model, given)
    with patched(model):
        served = generate(model, given)
        assert model.generate.stats().committed > 0
    assert torch.equal(own.sequences, served.sequences)
    if kind in OF_ANOTHER_FORM:
        assert served.past_key_values is None
        return
    mask = mask_of(given, NEW - 1)
    assert differences(served.past_key_values, own.past_key_values, mask) < 1e-4
    further = torch.cat([own.sequences, own.sequences[:, :4]], 1)
    asked = {"input_ids": further, "attention_mask": mask_of(given, NEW + 4)}
    again = [
        generate(model, asked, past_key_values=out.past_key_values).sequences
        for out in (own, served)
    ]
    assert torch.equal(*again)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_static_and_dynamic_caches_by_name(kind):
    """A static one has room for what was asked for, zeros behind it, and takes more tokens."""
    model, given = zoo.tiny(kind), padded()
    names = ("static", "dynamic")
    own = [generate(model, given, cache_implementation=name) for name in names]
    with patched(model):
        served = [generate(model, given, cache_implementation=name) for name in names]
        assert model.generate.stats().committed == 2 * NEW * len(ROWS)
    for theirs, mine in zip(own, served, strict=True):
        assert torch.equal(theirs.sequences, mine.sequences)
        expected, found = theirs.past_key_values, mine.past_key_values
        assert type(found) is type(expected)
        assert int(found.get_seq_length()) == int(expected.get_seq_length())
        for layer, other in zip(found.layers, expected.layers, strict=True):
            assert type(layer) is type(other) and layer.keys.shape == other.keys.shape
            kept = layer.keys.abs().sum((1, 3)) > 0
            difference = (layer.keys - other.keys).abs().amax((1, 3))
            assert float(difference[kept].max()) < 1e-4
    # The model goes on from either.
    tokens = served[0].sequences[:, -1:]
    mask, places = mask_of(given, NEW), mask_of(given, NEW).sum(1, keepdim=True) - 1
    with torch.no_grad():
        logits = [
            model(
                tokens,
                attention_mask=mask,
                position_ids=places,
                past_key_values=out.past_key_values,
            ).logits
            for out in (own[1], served[1])
        ]
    assert torch.allclose(*logits, atol=1e-4)


def test_codes_of_8_bits_are_returned_as_numbers():
    """Those of the first layer are the model's own, rounded; another sum may round another way."""
    model, given = zoo.tiny("llama"), {"input_ids": torch.tensor(ROWS[1:2])}
    own = generate(model, given, max_new_tokens=1)
    with patched(model, EngineConfig(kv_dtype="fp8_e4m3")):
        served = generate(model, given, max_new_tokens=1)
    mask = torch.ones(1, len(ROWS[1]))
    assert 1e-3 < differences(served.past_key_values, own.past_key_values, mask) < 0.25
    theirs, mine = (out.past_key_values.layers[0].keys for out in (own, served))
    rounded = values(stored(theirs, CODES), torch.float32)
    assert (mine == rounded).float().mean() > 0.99 and not torch.equal(mine, theirs)


ROWS_TWICE = [row for row in ROWS for _ in range(2)]
STOPS = list(range(2, zoo.VOCAB, 3))


def ended(generated):
    """How many tokens a row has, a stop token included."""
    places = [n for n, token in enumerate(generated) if token in STOPS]
    return places[0] + 1 if places else len(generated)


def test_tokens_stand_where_they_do_in_the_sequences():
    """Pads in front and what follows a row's end are zeros; also for several completions, lists of
    any lengths and rows that end in pads."""
    model = zoo.tiny("llama")
    with patched(model):
        block = padded()
        behind = {name: values.flip(1).contiguous() for name, values in block.items()}
        calls = [block, {"input_ids": ROWS}, behind]
        for given in calls:
            asked = {"eos_token_id": STOPS, "pad_token_id": 0, "num_return_sequences": 2}
            out = generate(model, given, **asked, do_sample=True, seed=3)
            layer = out.past_key_values.layers[1]
            assert layer.keys.shape[0] == 2 * len(ROWS) and len(out.past_key_values.layers) == 2
            real = layer.keys.abs().sum((1, 3)) > 0
            for row, ids, filled in zip(out.sequences, ROWS_TWICE, real, strict=True):
                assert int(filled.sum()) == len(ids) + ended(row[WIDTH:].tolist()) - 1
                assert torch.equal(filled[:WIDTH], row[:WIDTH] != 0)
            assert len({ended(row[WIDTH:].tolist()) for row in out.sequences}) > 1


def test_prompts_given_as_embeddings_have_keys_too():
    model = zoo.tiny("llama")
    embeds = model.get_input_embeddings()(torch.tensor([ROWS[1]])).detach()
    own = generate(model, {"inputs_embeds": embeds})
    with patched(model):
        served = generate(model, {"inputs_embeds": embeds})
    mask = torch.ones(1, len(ROWS[1]) + NEW - 1)
    assert differences(served.past_key_values, own.past_key_values, mask) < 1e-4


def test_deterministic_rows_leave_the_same_bits_alone_and_in_a_batch():
    model = zoo.tiny("llama")
    with patched(model):
        crowd = generate(model, padded(), deterministic=True)
        alone = generate(model, {"input_ids": torch.tensor(ROWS[:1])}, deterministic=True)
        plain = generate(model, padded())
    tokens, first = len(ROWS[0]) + NEW - 1, WIDTH - len(ROWS[0])

    def of(out, start):
        return [layer.keys[0, :, start : start + tokens] for layer in out.past_key_values.layers]

    assert all(map(torch.equal, of(crowd, first), of(alone, 0)))
    # The control: bits of other passes differ somewhere.
    assert not all(map(torch.equal, of(plain, first), of(alone, 0)))


def test_nothing_is_copied_where_no_cache_is_returned(monkeypatch):
    copied = []
    monkeypatch.setattr(KVCache, "read_all", lambda *_: copied.append(1) or 1 / 0)
    model = zoo.tiny("llama")
    with patched(model):
        assert generate(model, padded(), return_dict_in_generate=False).shape[1] == WIDTH + NEW
        assert generate(model, padded(), use_cache=False).past_key_values is None
        assert not copied
        with pytest.raises(ZeroDivisionError):
            generate(model, padded())


def test_other_forms_are_said_once(caplog):
    model = zoo.tiny("diffllama")
    with patched(model):
        for _ in range(2):
            assert generate(model, padded(ROWS[1:2])).past_key_values is None
    assert caplog.text.count("past_key_values of returned dicts are None") == 1

"""What tinyspec does not serve goes to the model's own ``generate``, with a word; with what only
tinyspec has it is refused by name. And every field of GenerationConfig is one or the other."""

import copy
import logging
import re
from unittest.mock import Mock

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, GenerationConfig
from transformers.generation import UnbatchedClassifierFreeGuidanceLogitsProcessor

import tinyspec
from tests.support import zoo
from tests.support.drop_in import greedy, patched
from tests.support.judge import PAD, ROWS, listen, one, padded, pair
from tests.support.tiny import tiny
from tinyspec.drop_in import served
from tinyspec.model.supported import CACHE, CACHE_NAMES
from tinyspec.tools.demo import BUNDLED

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# The name of the argument that holds a cache, and older ones, which transformers renames.
TAKEN = CACHE_NAMES[CACHE_NAMES.index(CACHE) :]
BASE = {"max_new_tokens": 6, "pad_token_id": PAD}
DICT = {"return_dict_in_generate": True}
BLOCK, MASK = padded(ROWS[:4])
BATCH = {"input_ids": BLOCK, "attention_mask": MASK}


def another(model, input_ids, generation_config, **_):
    return input_ids * 2


def forwarded(model):
    """A cache of the prompts' first tokens, made by the model itself."""
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(BLOCK[:, :3], past_key_values=cache)
    return cache


# By the name that the refusal gives: arguments that only transformers' own serves.
UNSERVED = {
    "num_beams": lambda m: {"num_beams": 2},
    "num_beams-config": lambda m: {"generation_config": GenerationConfig(num_beams=2)},
    "guidance_scale": lambda m: {"guidance_scale": 1.5},
    "watermarking_config": lambda m: {
        "watermarking_config": {"bias": 4.0, "seeding_scheme": "lefthash"}
    },
    "output_attentions": lambda m: {"output_attentions": True, **DICT},
    "output_hidden_states": lambda m: {"output_hidden_states": True, **DICT},
    "cache_implementation": lambda m: {"cache_implementation": "offloaded"},
    **{name: lambda m, name=name: {name: forwarded(m)} for name in TAKEN},
    "position_ids": lambda m: {"position_ids": torch.arange(17).expand(4, 17)},
    "custom_generate": lambda m: {"custom_generate": another},
    "assistant_early_exit": lambda m: {
        "input_ids": one(ROWS[0]),
        "attention_mask": None,
        "assistant_early_exit": 1,
    },
    "force_words_ids": lambda m: {"force_words_ids": [[3]]},
    "synced_gpus": lambda m: {"synced_gpus": True},
    "inputs": lambda m: {"inputs": BLOCK},
    "inputs_embeds": lambda m: {"inputs_embeds": m.get_input_embeddings()(BLOCK).detach()},
    "no prompt": lambda m: {"input_ids": None, "attention_mask": None, "bos_token_id": 7},
    "is_assistant": lambda m: {"is_assistant": True},
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": lambda m: {
        "logits_processor": [UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, pair()[1])]
    },
    # A name that no version of transformers knows, on which its own ``generate`` complains.
    "invented": lambda m: {"invented": 3},
    "token_type_ids": lambda m: {"token_type_ids": torch.ones_like(BLOCK)},
}
CASES = [("llama", name) for name in UNSERVED if name != "token_type_ids"]
CASES += [("gpt2", name) for name in ("token_type_ids", "num_beams", *TAKEN)]


def same(given, judged):
    """Whether two results hold the same, however they are nested."""
    if isinstance(judged, torch.Tensor):
        return torch.equal(given, judged)
    if isinstance(judged, dict):
        return list(given) == list(judged) and all(same(given[k], judged[k]) for k in judged)
    if isinstance(judged, (tuple, list)):
        return len(given) == len(judged) and all(map(same, given, judged))
    return type(given) is type(judged)


def in_order(line):
    """The line with the names of a set, which transformers prints as it comes, in order."""
    return re.sub(r"\{(.*?)\}", lambda names: str(sorted(names[1].split(", "))), line)


@pytest.mark.parametrize("family, name", CASES)
def test_transformers_own_result_and_one_line(family, name, caplog):
    """Refused by name with what only tinyspec has."""
    own = tiny(family)
    model = copy.deepcopy(own)
    tinyspec.patch(model)
    case = UNSERVED[name]
    heard = []
    with caplog.at_level(logging.INFO, logger="tinyspec"):
        for each in (model, own, model):
            torch.manual_seed(3)
            heard.append(listen(each.generate, **{**BATCH, **BASE, **case(each)}))
    ours, theirs, again = heard
    assert ours.complaint == theirs.complaint == again.complaint
    assert list(map(in_order, ours.lines)) == list(map(in_order, theirs.lines))
    assert type(ours.result) is type(theirs.result)
    if theirs.error is None:
        assert same(ours.result, theirs.result) and same(again.result, theirs.result)
    lines = [r.getMessage() for r in caplog.records if r.name == "tinyspec"]
    argument = name.split("-")[0]
    assert argument in lines[0] and len(lines) == len(set(lines))
    for more in ({"deterministic": True}, {"seed": 3}):
        with pytest.raises(NotImplementedError, match=argument):
            model.generate(**{**BASE, **BATCH, **case(model), **more})
    after = [listen(each.generate, **BATCH, **BASE).result for each in (model, own)]
    assert torch.equal(*after)


def test_returned_dicts_have_no_cache(caplog):
    """Said once; nothing is said where transformers' own has none either."""
    model, own = pair()
    model, lines = copy.deepcopy(model), []
    tinyspec.patch(model)
    for more in ({"use_cache": False}, {}, {}):
        with caplog.at_level(logging.INFO, logger="tinyspec"):
            out = model.generate(**BATCH, **BASE, **DICT, **more)
        assert out.past_key_values is None
        lines.append(caplog.text.count(f"{CACHE} of returned dicts is None"))
    assert lines == [0, 1, 1]
    assert own.generate(**BATCH, **BASE, **DICT).past_key_values is not None, "control"


@pytest.mark.parametrize("place", ["argument", "config", "default"])
@pytest.mark.parametrize("kind", ["offloaded", "quantized"])
def test_a_cache_that_cannot_be_made_here(monkeypatch, place, kind):
    """As by a torch for GPUs where there is none, and without a library for packed caches: refused
    before transformers makes it."""
    broken = Mock(side_effect=RuntimeError("no device"))
    monkeypatch.setattr(torch, "Stream", broken)
    monkeypatch.setattr(transformers.generation.utils, "QuantizedCache", broken)
    own, name = copy.deepcopy(pair()[1]), "cache_implementation"
    asked = {**BATCH, **BASE, "deterministic": True}
    if place == "argument":
        asked[name] = kind
    elif place == "config":
        asked["generation_config"] = GenerationConfig(cache_implementation=kind)
    else:
        own.generation_config.cache_implementation = kind
    with patched(own) as model:
        with pytest.raises(NotImplementedError, match=f"{name}='{kind}'"):
            model.generate(**asked)
        assert not broken.called
        with pytest.raises(RuntimeError, match="no device"):  # transformers' own
            model.generate(**asked | {"deterministic": None})
        if place != "argument":  # None unsets it
            model.generate(**asked, cache_implementation=None)
    assert broken.called, "control"


def test_token_healing():
    """transformers' own, prompts healed by its way; refused with what only tinyspec has."""
    model = AutoModelForCausalLM.from_pretrained(BUNDLED)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    asked = {**tokenizer("Once upon a ti", return_tensors="pt"), "max_new_tokens": 4}
    healed = {**asked, "token_healing": True, "tokenizer": tokenizer}
    own, plain = model.generate(**healed), model.generate(**asked)
    assert own.tolist() != plain.tolist(), "control"
    tinyspec.patch(model)
    assert torch.equal(model.generate(**healed), own)
    with pytest.raises(NotImplementedError, match="token_healing"):
        model.generate(**healed, deterministic=True)


LENGTHS = {"beyond": 12, "up-to": 7}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("name", LENGTHS)
def test_lengths_near_the_models_own(family, name):
    """512 positions: what goes beyond is transformers', as far as the model bears it."""
    asked = {"inputs": one([3 + n % 100 for n in range(505)]), "pad_token_id": PAD}
    asked["max_new_tokens"] = LENGTHS[name]
    ours, theirs = (listen(m.generate, **asked) for m in pair(family))
    assert ours.complaint == theirs.complaint
    assert theirs.error is not None or torch.equal(ours.result, theirs.result)
    assert bool(theirs.error) == (family == "gpt2" and name == "beyond")


# A value of every field that is neither honoured nor without effect.
SET = {
    "cache_implementation": "offloaded",
    "cache_config": {"nbits": 4},
    "max_cache_len": 64,
    "guidance_scale": 2.0,
    "watermarking_config": {"bias": 1.0},
    "assistant_early_exit": 1,
    "assistant_ensemble_weight": 0.5,
    "speculation_type": "dflash",
    "penalty_alpha": 0.6,
    "dola_layers": "low",
    "constraints": [1],
    "force_words_ids": [[3]],
}
FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]


def unserved(**fields):
    """What is named of a config with these fields, even if transformers would refuse them."""
    config = GenerationConfig()
    for name, value in fields.items():
        setattr(config, name, value)
    return list(served.unserved_settings(config))


def test_every_field_of_the_installed_config_is_classified():
    groups = (served.SERVED_FIELDS, served.INERT_FIELDS, served.DICT_FIELDS)
    unknown = set().union(*groups) - set(FIELDS) - {"transformers_version"}
    assert not unknown, "fields that transformers does not have"
    assert sum(map(len, groups)) == len(set().union(*groups)), "a field of two groups"
    assert len(FIELDS) > 60
    for name in FIELDS:
        if name in served.SERVED_FIELDS | served.INERT_FIELDS:
            continue
        heard = unserved(**{name: SET.get(name, True)}, do_sample=True, **DICT)
        assert any(name in why for why in heard), f"{name} is dropped in silence"
    # Entries that are no fields today are not dropped either.
    assert any("new_field" in why for why in unserved(new_field=3))
    assert not unserved()


INERT_VALUES = {
    "early_stopping": True,
    "length_penalty": 3.0,
    "num_assistant_tokens": 3,
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.9,
    "max_matching_ngram_size": 3,
    "assistant_lookbehind": 3,
    "target_lookbehind": 3,
    "use_cache": False,
    "disable_compile": True,
    "decoder_start_token_id": 3,
    "transformers_version": "4.0.0",
    "num_beams": 1,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "compile_config": transformers.CompileConfig(),
    "low_memory": True,
    "prefill_chunk_size": 4,
    # Without a dict to return.
    "output_attentions": True,
    "output_hidden_states": True,
    "cache_implementation": "static",
    # An argument alone.
    "logits_to_keep": 2,
}
# What transformers says of a forward or a loop that a served call does not run.
UNSAID = {"compile_config": "criteria for compilation", "output_attentions": "`sdpa` attention"}


def test_inert_fields_change_nothing(caplog):
    for name in {*served.INERT_FIELDS, *served.DICT_FIELDS, "logits_to_keep"}:
        settings = {**BASE, name: INERT_VALUES[name]}
        with caplog.at_level(logging.DEBUG, logger="tinyspec"):
            ours, theirs = (listen(m.generate, one(ROWS[0]), **settings) for m in pair())
        assert ours.complaint == theirs.complaint, name
        lines = [line for line in theirs.lines if UNSAID.get(name, "\n") not in line]
        assert ours.lines == lines and len(lines) == len(theirs.lines) - (name in UNSAID), name
        assert theirs.error is not None or torch.equal(ours.result, theirs.result), name
    assert not [r for r in caplog.records if r.name == "tinyspec"]


def test_a_hook_that_is_not_called_as_expected():
    model = tiny()
    model.generate = lambda input_ids, **_: input_ids
    with patched(model), pytest.raises(RuntimeError, match=r"passed no .* unpatch"):
        greedy(model, [5, 17, 3])


@pytest.mark.parametrize("kind", ["gemma3", "bert"])
def test_zeros_that_change_nothing_are_served(kind):
    own = zoo.tiny(kind)
    ids = torch.tensor([[5, 9, 4, 7], [8, 3, 6, 2]])
    asked = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": False, "output_logits": True}
    given = {"input_ids": ids, "token_type_ids": torch.zeros_like(ids), **asked, **DICT}
    expected = own.generate(**given)
    with patched(copy.deepcopy(own)) as model:
        found = model.generate(**given)
        assert model.generate.stats().committed == 8
        given["token_type_ids"] = torch.ones_like(ids)
        with pytest.raises(NotImplementedError, match="token_type_ids"):
            model.generate(**given, deterministic=True)
    assert torch.equal(found.sequences, expected.sequences)
    assert all(map(torch.allclose, found.logits, expected.logits, [1e-4] * 4, [1e-4] * 4))

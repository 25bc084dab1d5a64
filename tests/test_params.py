"""What a user may ask for: every bad value is refused by field and value, good ones are kept."""

import json
import re
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch

from tinyspec import EngineConfig, SamplingParams
from tinyspec.errors import OTHER_NAMES

NAN, INF = float("nan"), float("inf")
BAD_PARAMS = {
    "max_new_tokens": (0, -1, 1.0, "5", True, 2**63),
    "min_new_tokens": (-1, 0.5, None, 129),
    "temperature": (-0.1, NAN, INF, "hot", None, True, 2**1024, 1e39, 9e-7),
    "top_k": (-1, 2.0, "5", True, 2**63),
    "top_p": (-1e-9, -0.5, 1.01, NAN, "most", True),
    "min_p": (-0.1, 1.5, NAN, "some"),
    "repetition_penalty": (0, -1.0, INF, None, 2**1024),
    "frequency_penalty": (NAN, INF, "1", None, True, 2**1024),
    "presence_penalty": (-INF, None, "1", False),
    "logit_bias": (5, [(1, 2.0)], {1: NAN}, {-1: 1.0}, {"a": 1}, {1: "2"}, {1.5: 2}, {True: 1}),
    "allowed_token_ids": ([-1], [1.5], "ab", [None], [True]),
    "bad_words_ids": (5, [5], [[]], [[-1]], [[1.5]], "ab", [None], [[True]]),
    "json_schema": (5, ["a"], {"a": {1}}),
    "regex": (5, ["a"], b"a"),
    "grammar": (True, {"start": "a"}),
    "seed": (-1, 2**64, 1.5, "x", True),
    "deterministic": (1, "yes", None),
    "num_return_sequences": (0, -2, 1.5, None),
    "eos_token_id": (-1, (3, -1), 1.5, "end", (None,), True),
    "ignore_eos": (1, None),
    "stop_strings": ("", ("a", ""), (3,), 5, None),
    "stop_token_ids": (-1, (1, 2.0), "a", 1.5, None),
    "logprobs": (1, None, 5),
    "top_logprobs": (-1, True, 1.5, None),
    "prompt_logprobs": (1, None),
    "logprobs_mode": ("cooked", None, 3),
    "logits_processors": (5, None, 2.5),
    "stopping_criteria": (5, None),
    "thinking": (1, None, "yes"),
    "include_stop_str": (0, None, "no"),
}
BAD_CONFIG = {
    "prefix_cache": (None, 1, "yes"),
    "reference_rows": (0, 3, -4, 8.0, "8", True),
    "max_rows": (0, 3, 16.0, True),
    "max_sequences": (0, -1, 2.5, None),
    "max_model_len": (1, -5, "long"),
    "page_size": (0, -1, 3, 48, 2048, 16.0, "16", True),
    "num_pages": (0, -1, 1.5),
    "memory_fraction": (0, -0.5, 1.5, NAN, "half"),
    "draft_window": (0, -1, 1.5, "16"),
    "verify": ("never", None, True),
    "drafter": ("oracle",),
    "backend": ("cuda", None),
    "trace": ("yes", None),
    "verify_weights": (3, None),
    "seed": (-1, 1.5, 2**64),
    "kv_dtype": ("fp8", "fp8_e5m2", "bfloat16", torch.float8_e4m3fn, True, None),
    "cuda_graphs": (1, "yes"),
    "linear": ("sometimes", None),
    "prepack": ("sometimes", None, True),
    "overlap": (1, "yes"),
    "thinking_window": (0, -1, 2.5, True),
}


def cases(kind, table):
    return [
        pytest.param(kind, field, value, id=f"{field}={value!r}")
        for field, values in table.items()
        for value in values
    ]


def test_no_field_is_forgotten():
    assert set(BAD_PARAMS) == {field.name for field in fields(SamplingParams)}
    assert set(BAD_CONFIG) == {field.name for field in fields(EngineConfig)}


@pytest.mark.parametrize(
    "kind, field, value",
    [*cases(SamplingParams, BAD_PARAMS), *cases(EngineConfig, BAD_CONFIG)],
)
def test_bad_values(kind, field, value):
    with pytest.raises(ValueError) as refusal:
        kind(**{field: value})
    assert field in str(refusal.value) and repr(value) in str(refusal.value)


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
def test_unknown_field(kind):
    with pytest.raises(TypeError, match="temprature"):
        kind(temprature=1.0)
    with pytest.raises(TypeError):
        kind(4)
    with pytest.raises(FrozenInstanceError):
        kind().seed = 5


def test_names_that_others_have():
    """Each names a setting that there is, or says that there is none."""
    own = {kind.__name__: {f.name for f in fields(kind)} for kind in (SamplingParams, EngineConfig)}
    for name, told in OTHER_NAMES.items():
        for kind in (SamplingParams, EngineConfig):
            with pytest.raises(ValueError, match=f"^{name}=2 is not allowed: {told}"):
                kind(**{name: 2})
        called = re.search(r"called (\w+).* in (\w+)", told)
        if called is None:
            # Of arguments, which are no settings.
            assert name in ("messages", "device_map", "torch_dtype") or told == "there is none"
        else:
            assert called[1] in own[called[2]]
        assert name not in own["SamplingParams"] | own["EngineConfig"]


NUMBERS = {
    "numpy": (np.int64, np.float64, np.bool_, lambda *values: np.array(values)),
    "numpy's small": (np.uint8, np.float32, np.bool_, lambda *values: np.array(values, np.int16)),
    "torch": (torch.tensor, torch.tensor, torch.tensor, lambda *values: torch.tensor(values)),
}


@pytest.mark.parametrize("integer, real, truth, several", NUMBERS.values(), ids=NUMBERS)
def test_numbers_of_numpy_and_torch(integer, real, truth, several):
    """Wherever Python's are; and they are Python's afterwards."""
    kinds = {int: integer, float: real, bool: truth}
    plain = {
        f.name: {int: 1, float: 0.5, bool: True}[type(f.default)]
        for f in fields(SamplingParams)
        if type(f.default) in kinds
    }
    plain |= {"top_k": 5, "seed": 5, "top_p": 0.5, "min_p": 0.5, "top_logprobs": 2}
    plain |= {"logit_bias": {4: 0.5}, "bad_words_ids": ((4, 5),)}
    given = {name: kinds.get(type(value), tuple)(value) for name, value in plain.items()}
    given |= {"logit_bias": {integer(4): real(0.5)}, "bad_words_ids": [several(4, 5)]}
    params = SamplingParams(**given, eos_token_id=integer(3), stop_token_ids=[integer(4), 5])
    assert params == SamplingParams(**plain, eos_token_id=3, stop_token_ids=several(4, 5))
    assert len(plain) == 20
    for name, value in {**plain, "eos_token_id": (3,), "stop_token_ids": (4, 5)}.items():
        assert repr(getattr(params, name)) == repr(value), "of Python's types"
    for bad in ({"max_new_tokens": real(5.5)}, {"seed": truth(True)}, {"temperature": several(1)}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            SamplingParams(**bad)
    config = {"max_rows": integer(64), "draft_window": integer(3), "memory_fraction": real(0.5)}
    same = EngineConfig(max_rows=64, draft_window=3, memory_fraction=0.5, prefix_cache=False)
    assert EngineConfig(**config, prefix_cache=truth(False)) == same


def test_settings_that_do_not_fit_together():
    with pytest.raises(ValueError, match=r"memory_fraction=0.5"):
        EngineConfig(memory_fraction=0.5, num_pages=4)
    with pytest.raises(ValueError, match=r"min_new_tokens=9 .*max_new_tokens=8"):
        SamplingParams(max_new_tokens=8, min_new_tokens=9)
    with pytest.raises(ValueError, match=r"regex='a' .*left out beside json_schema"):
        SamplingParams(regex="a", json_schema={})
    with pytest.raises(ValueError, match=r"max_rows=16 .*reference_rows=32"):
        EngineConfig(max_rows=16).resolve(device_type="cpu", model_positions=64)
    with pytest.raises(ValueError, match=r"max_model_len=65 .*64"):
        EngineConfig(max_model_len=65).resolve(device_type="cpu", model_positions=64)


def test_edges_are_allowed():
    SamplingParams(max_new_tokens=1, min_new_tokens=1, seed=2**64 - 1, repetition_penalty=0.5)
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, eos_token_id=0, stop_token_ids=[0])
    EngineConfig(reference_rows=4, max_rows=4, max_sequences=1, page_size=1, draft_window=1, seed=0)
    EngineConfig(page_size=1024, memory_fraction=1.0, drafter="ngram")


def test_defaults_by_device():
    cpu = EngineConfig().resolve(device_type="cpu", model_positions=64)
    gpu = EngineConfig().resolve(device_type="cuda", model_positions=64)
    assert (cpu.reference_rows, cpu.page_size, cpu.backend) == (32, 128, "torch")
    assert (gpu.reference_rows, gpu.page_size, gpu.backend) == (128, 64, "triton")
    assert cpu.max_model_len == gpu.max_model_len == 64
    assert cpu.resolve(device_type="cpu", model_positions=64) == cpu


def test_one_or_several():
    params = SamplingParams(eos_token_id=3, stop_token_ids=[4, 5], stop_strings="end")
    assert (params.eos_token_id, params.stop_token_ids) == ((3,), (4, 5))
    assert (params.stop_strings, params.stop_ids) == (("end",), (3, 4, 5))
    assert SamplingParams(eos_token_id=3, stop_token_ids=4, ignore_eos=True).stop_ids == (4,)


def test_plain_data_and_back():
    params = SamplingParams(
        temperature=0.1, seed=2**64 - 1, stop_strings=("a", "\n"), eos_token_id=(1, 2), top_p=1 / 3
    )
    assert SamplingParams.from_dict(json.loads(json.dumps(params.to_dict()))) == params
    assert SamplingParams(bad_words_ids=[torch.tensor([1, 2])]).bad_words_ids == ((1, 2),)
    for processors in (cases, [cases]):  # a function that makes them, and one that is one
        named = SamplingParams(logits_processors=processors).to_dict()
        assert named["logits_processors"] == ["cases"]
        assert SamplingParams.from_dict(named).logits_processors == ("cases",)

"""The fingerprint in readable parts: short, told apart, and the digest of exactly these."""

import hashlib
import json

import torch

from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.determinism.fingerprint_parts import LONGEST, are_parts, differences

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
MOST = 2048


def test_outputs_carry_the_parts_of_their_fingerprint():
    params = SamplingParams(max_new_tokens=2, deterministic=True)
    with Engine(tiny(), config=CONFIG) as engine:
        plain = engine.generate(prompts(1), SamplingParams(max_new_tokens=2))[0]
        outputs = engine.generate(prompts(2), params)
        assert outputs[0].fingerprint_parts == engine.contract.fingerprint.parts
        assert outputs[0].fingerprint_parts is not outputs[1].fingerprint_parts
        assert (plain.fingerprint, plain.fingerprint_parts) == (None, None)
    again = RequestOutput.from_json(outputs[0].to_json())
    text = json.dumps(again.fingerprint_parts, sort_keys=True)
    assert again.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert len(text) <= MOST and are_parts(again.fingerprint_parts)
    found = again.fingerprint_parts
    assert found["threads"] == torch.get_num_threads() and found["torch"] == torch.__version__
    assert found["dtype"] == "float32" and found["model"] == "LlamaForCausalLM"
    assert found["reference_rows"] == 8


def test_what_changed_is_named():
    """By its value where there is one to read."""

    def parts(model, **settings):
        with Engine(model, config=EngineConfig(**{"reference_rows": 8, **settings})) as engine:
            return engine.contract.current_fingerprint().parts

    model = tiny()
    own = parts(model)
    assert differences(own, parts(tiny())) == []
    assert differences(own, parts(tiny(), max_model_len=100)) == ["max_model_len 512 -> 100"]
    (other,) = differences(own, parts(tiny(), kv_dtype="fp8_e4m3"))
    assert other == "kv_dtype auto -> fp8_e4m3"
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert differences(own, parts(model)) == ["weights"]
    other = differences(own, parts(tiny(dtype=torch.bfloat16)))
    assert other[0] == "dtype float32 -> bfloat16" and "weights" in other
    other = differences(own, parts(tiny(family="qwen3")))
    assert other[0] == "model LlamaForCausalLM -> Qwen3ForCausalLM"


def test_all_parts_at_their_longest_fit():
    """Whatever the device and its libraries are called."""
    with Engine(tiny(), config=CONFIG) as engine:
        parts = engine.contract.current_fingerprint().parts
    on_gpu = [*parts, "multiprocessors", "blas", "cublas", "triton", "driver"]
    fixed = {"reference_rows", "max_model_len", "backend", "kv_dtype", "cuda_graphs"}
    free = {"device", "model", "libraries", "linears", "blas"}
    longest = dict.fromkeys(on_gpu, "sha256 " + 32 * "0")
    longest |= {name: 10**6 for name in fixed} | dict.fromkeys(free, "x" * (LONGEST - 2))
    assert len(json.dumps(longest)) <= MOST

"""Variables of the environment: one that changes the bits of a pass changes the fingerprint too."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from threading import Event, Thread
from typing import Any

import pytest
import torch

from tests.support.tiny import prompts, tiny
from tinyspec import (
    DeterminismError,
    Engine,
    EngineConfig,
    SamplingParams,
    TinyspecError,
    UnsupportedModelError,
    doctor,
)
from tinyspec.determinism import environment
from tinyspec.kernels import backend
from tinyspec.model import openmp

# Two threads: with one, most variables would change nothing.
BASE = {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive", "TRITON_INTERPRET": "0"}

# Wide enough that libraries cut their sums.
PASSES = """
import json, sys
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig
from tinyspec import DeterminismError, Engine, EngineConfig, SamplingParams
from tinyspec import UnsupportedModelError
def model_of(dtype):
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        initializer_range=0.1, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype)).eval()
params = SamplingParams(max_new_tokens=8, deterministic=True, logprobs=True)
prompts = [[n * 7 % 512 for n in range(length)] for length in (3, 90, 200)]
gelu = F.gelu(torch.linspace(-6, 6, 4096)).tolist()
found = {}
for dtype in sys.argv[1:]:
    try:
        with Engine(model_of(dtype), config=EngineConfig(max_model_len=256)) as engine:
            outputs = engine.generate(prompts, params)
            bits = [(c.token_ids, c.logprobs) for output in outputs for c in output.completions]
            found[dtype] = {"bits": bits, "fingerprint": engine.fingerprint, "gelu": gelu}
    except (DeterminismError, UnsupportedModelError, RuntimeError):
        found[dtype] = None
print(json.dumps(found))
"""


def child(code: str, *arguments: str, **variables: str) -> str:
    """What ``code`` prints in a fresh process with these variables beside BASE."""
    unset = ("OPENBLAS_CORETYPE", *BASE)
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        env={**kept, **BASE, **variables},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@cache
def passes(*dtypes: str, code: str = PASSES, **variables: str) -> dict[str, Any]:
    """By dtype: bits and fingerprint of deterministic requests; None where they are refused."""
    return json.loads(child(code, *dtypes, **variables).splitlines()[-1])


CONFIG = EngineConfig(reference_rows=8, max_rows=16)
PARAMS = SamplingParams(max_new_tokens=6, deterministic=True, logprobs=True)
DTYPES = ("float32", "bfloat16")

# The number of threads is part of the fingerprint, whether or not bits of a model depend on it.
COUNTS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
# Which instructions MKL and oneDNN use; how many threads there are, and what each does; neither.
ALL = """
    MKL_CBWR=COMPATIBLE MKL_CBWR=AVX2 MKL_CBWR=AUTO,STRICT MKL_ENABLE_INSTRUCTIONS=AVX2
    MKL_ENABLE_INSTRUCTIONS=SSE4_2 MKL_DEBUG_CPU_TYPE=5 MKL_VML_MODE=EP ONEDNN_MAX_CPU_ISA=SSE41
    ONEDNN_MAX_CPU_ISA=AVX2 ONEDNN_MAX_CPU_ISA=AVX512_CORE DNNL_MAX_CPU_ISA=AVX2
    ONEDNN_CPU_ISA_HINTS=PREFER_YMM ONEDNN_DEFAULT_FPMATH_MODE=BF16 ONEDNN_DEFAULT_FPMATH_MODE=ANY
    DNNL_DEFAULT_FPMATH_MODE=BF16 ATEN_CPU_CAPABILITY=avx2 ATEN_CPU_CAPABILITY=default

    OMP_NUM_THREADS=1 OMP_THREAD_LIMIT=1 OMP_THREAD_LIMIT=64 OMP_DYNAMIC=TRUE
    OMP_MAX_ACTIVE_LEVELS=0 OMP_SCHEDULE=dynamic,1 OMP_PROC_BIND=close OMP_WAIT_POLICY=active
    KMP_BLOCKTIME=0 KMP_DETERMINISTIC_REDUCTION=1 MKL_NUM_THREADS=1
    MKL_DOMAIN_NUM_THREADS=MKL_DOMAIN_BLAS=1 MKL_DYNAMIC=TRUE

    LRU_CACHE_CAPACITY=1 ONEDNN_PRIMITIVE_CACHE_CAPACITY=0 MALLOC_PERTURB_=170 PYTHONHASHSEED=7
    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1
"""


@pytest.mark.slow("environments", 6)
@pytest.mark.parametrize("variable", ALL.split())
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_variable_changes_bits_alone(variable, dtype):
    """Bits and fingerprint both change, or neither does, or the request is refused.

    Bits are those of passes, and of gelu in fp32: oneDNN's on every CPU, while a model in bf16 runs
    without oneDNN on one that has AVX2 alone. The fingerprint holds for models that call it.
    """
    name, _, value = variable.partition("=")
    before, found = passes(*DTYPES)[dtype], passes(*DTYPES, **{name: value})[dtype]
    if found is not None:
        other = {part: found[part] != before[part] for part in found}
        changes = other["bits"] or other["gelu"] or name in COUNTS
        assert other["fingerprint"] == changes, other


BLIND = """
from tinyspec.determinism import fingerprint
fingerprint.canary = lambda *_: ""
"""


@pytest.mark.slow("environments", 20)
def test_control_without_the_canary():
    """Bits change under the same fingerprint."""
    others = [{"ONEDNN_MAX_CPU_ISA": isa} for isa in ("AVX2", "SSE41")]
    found = [passes(*DTYPES, code=BLIND + PASSES, **variables) for variables in ({}, *others)]
    before, *after = ([one[dtype] for dtype in DTYPES] for one in found)
    kept = [(a, b) for one in after for a, b in zip(before, one, strict=True) if b is not None]
    assert all(a["fingerprint"] == b["fingerprint"] for a, b in kept)
    assert any(a["bits"] != b["bits"] for a, b in kept)


def test_a_limit_leaves_fewer_threads(two_threads):
    """oneDNN would leave out what the others compute."""
    assert openmp.settle() == 2 and openmp.shortage() is None
    code = f"import runpy; print(runpy.run_path({openmp.__file__!r})['shortage']())"
    assert child(code, OMP_THREAD_LIMIT="1").startswith("OpenMP runs 1 of the 2 threads")


def test_counting_threads_waits_for_nobodys_python(two_threads):
    """A server does it before every pass, beside the thread that talks to its clients."""
    interval, ended = sys.getswitchinterval(), Event()

    def seconds(call: Callable[[], object]) -> float:
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    def run_python() -> None:
        while not ended.is_set():
            pass

    sys.setswitchinterval(0.3)
    busy = Thread(target=run_python)
    try:
        busy.start()
        assert seconds(openmp.settle) < 0.2
        # It may have lost its core just then.
        assert any(seconds(lambda: time.sleep(0)) > 0.2 for _ in range(99)), "control"
    finally:
        ended.set()
        busy.join()
        sys.setswitchinterval(interval)


def test_a_shortage_of_threads_is_refused(monkeypatch, two_threads):
    """Before an engine starts, and where it comes later."""
    with Engine(tiny(), config=CONFIG) as engine:
        engine.generate(prompts(2), PARAMS)
        monkeypatch.setattr(openmp, "settle", lambda: 1)
        with pytest.raises(DeterminismError, match=r"runs 1 of the 2.*set_num_threads\(1\)"):
            engine.generate(prompts(2), PARAMS)
    with pytest.raises(
        RuntimeError, match=r"^OpenMP runs 1 of the 2.*set_num_threads\(1\)"
    ) as found:
        Engine(tiny(), config=CONFIG)
    assert isinstance(found.value, TinyspecError)
    assert not isinstance(found.value, UnsupportedModelError), "it says nothing of the model"
    report = doctor(tiny(), CONFIG)
    assert not report and report.problems == (str(found.value),)


def test_control_canaries_see_what_is_not_pinned(monkeypatch, two_threads):
    """Each of these changes bits of linears, sums or element-wise functions."""
    bits, given = environment._canary_bits.__wrapped__, []
    monkeypatch.setattr(environment, "_canary_bits", lambda *of: given.extend(of) or "f" * 16)
    with Engine(tiny(), config=CONFIG) as engine:
        environment.canary(engine.runner.model, 8)

        def digest() -> str:
            return bits(*given)

        def products() -> list[torch.Tensor]:
            linears, heads, dtype, rows, device, name, _ = given
            kernels = backend.load(name)
            attention = environment._attention(heads, dtype, device, kernels)
            return [*environment._linears(linears, rows, device, kernels.linear), *attention]

        whole = digest()
        assert digest() == whole
        torch.set_num_threads(1)
        assert digest() != whole
        torch.set_num_threads(2)
        assert digest() == whole
        matmul = torch.backends.mkldnn.matmul
        exact = products()
        for value in ("bf16", "ieee"):
            matmul.fp32_precision = value
            # By CPU it changes all products, those that leave MKL for oneDNN, or none.
            assert (digest() == whole) is all(map(torch.equal, products(), exact))
        assert digest() == whole
        flushes = torch.set_flush_denormal(True)
        flushed = digest()
        torch.set_flush_denormal(False)
        assert (flushed != whole) is flushes and digest() == whole


def test_the_environment_is_readable():
    found = environment.environment(torch.device("cpu"))
    assert (found["threads"], found["threads running"]) == (torch.get_num_threads(), 1)
    assert found["device"] and found["instruction set"]

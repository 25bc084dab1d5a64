"""The fingerprint in readable parts, the digest of exactly these: the package's own code, libraries
and variables of CUDA, by a stand-in for them, and all that an engine is made of."""

import ctypes
import hashlib
import json
import shutil
from importlib import import_module
from operator import attrgetter
from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny import prompts, tiny
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams
from tinyspec.determinism import environment, fingerprint
from tinyspec.determinism.fingerprint import WINGS
from tinyspec.determinism.fingerprint_parts import DIGEST, LONGEST, are_parts, differences
from tinyspec.determinism.results import PACKAGE, code_digest
from tinyspec.model.checksum import row_checksums

CONFIG = EngineConfig(reference_rows=8, max_rows=16)
MOST = 2048


def parts_of(model, **settings):
    with Engine(model, config=EngineConfig(**{"reference_rows": 8, **settings})) as engine:
        return engine.contract.current_fingerprint().parts


def test_outputs_carry_the_parts_of_their_fingerprint():
    params = SamplingParams(max_new_tokens=2, deterministic=True)
    with Engine(tiny(), config=CONFIG) as engine:
        plain = engine.generate(prompts(1), SamplingParams(max_new_tokens=2))[0]
        outputs = engine.generate(prompts(2), params)
        assert outputs[0].fingerprint_parts == engine.contract.fingerprint.parts
        assert outputs[0].fingerprint_parts is not outputs[1].fingerprint_parts
        assert (plain.fingerprint, plain.fingerprint_parts) == (None, None)
        canary = environment.canary(engine.runner.model, 8)
    again = RequestOutput.from_json(outputs[0].to_json())
    found = again.fingerprint_parts
    text = json.dumps(found, sort_keys=True)
    assert again.fingerprint == hashlib.sha256(text.encode()).hexdigest()[:32]
    assert len(text) <= MOST and are_parts(found)
    own = {"threads": torch.get_num_threads(), "torch": torch.__version__, "dtype": "float32"}
    own |= {"model": "LlamaForCausalLM", "reference_rows": 8, "canary": DIGEST + canary}
    assert {**own, "code": DIGEST + fingerprint.code()[:32]}.items() <= found.items()


def test_what_changed_is_named():
    """By its value where there is one to read."""
    model = tiny()
    own = parts_of(model)
    assert differences(own, parts_of(tiny(), max_rows=16)) == []
    assert differences(own, parts_of(tiny(), max_model_len=100)) == ["max_model_len 512 -> 100"]
    coded = parts_of(tiny(), kv_dtype="fp8_e4m3")
    assert differences(own, coded) == ["kv_dtype auto -> fp8_e4m3"]
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    assert differences(own, parts_of(model)) == ["weights"]
    other = differences(own, parts_of(tiny(dtype=torch.bfloat16)))
    assert other[0] == "dtype float32 -> bfloat16" and "weights" in other
    other = differences(own, parts_of(tiny(family="qwen3")))
    assert other[0] == "model LlamaForCausalLM -> Qwen3ForCausalLM"


def test_all_parts_at_their_longest_fit():
    """Whatever the device and its libraries are called."""
    on_gpu = [*parts_of(tiny()), "multiprocessors", "blas", "cublas", "triton", "driver"]
    fixed = {"reference_rows", "max_model_len", "backend", "kv_dtype", "cuda_graphs"}
    free = {"device", "model", "libraries", "linears", "blas"}
    longest = dict.fromkeys(on_gpu, "sha256 " + 32 * "0")
    longest |= {name: 10**6 for name in fixed} | dict.fromkeys(free, "x" * (LONGEST - 2))
    assert len(json.dumps(longest)) <= MOST


# The package's own code


# Of each wing that decides bits, twins and kernels apart; and of others.
DECIDE = ("kernels/sample.py", "kernels/twins/sample.py", "model/linears.py", "runner/sampler.py")
SEEN = dict.fromkeys(DECIDE, ("passes", "all"))
SEEN |= {"thinking/taps.py": ("thinking", "all"), "scheduler/buckets.py": ("all",)}


def digests(root):
    """Of the wings that decide bits, of thinking's, and of every file."""
    kinds = {"passes": WINGS, "thinking": ("thinking",), "all": ()}
    return {name: code_digest.__wrapped__(*of, root=root) for name, of in kinds.items()}


def test_what_the_digests_see(tmp_path):
    """The fingerprint's those that decide bits, wherever installed; the key of results all."""
    copy = tmp_path / "one"
    for name in SEEN:
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(PACKAGE / name, copy / name)
    own = digests(copy)
    assert digests(shutil.copytree(copy, tmp_path / "elsewhere")) == own
    for name, kinds in SEEN.items():
        text = (copy / name).read_text()
        (copy / name).write_text(text + "x = 1\n")
        found = digests(copy)
        assert tuple(kind for kind in found if found[kind] != own[kind]) == kinds, name
        (copy / name).write_text(text)
    assert digests(copy) == own
    (copy / "runner" / "sampler.py").rename(copy / "runner" / "picker.py")
    assert digests(copy)["passes"] != own["passes"]


@pytest.mark.parametrize("file, owner, names", fingerprint.NAMES + fingerprint.OF_TEXT)
def test_what_is_named_is_there(file, owner, names):
    """To be imported, too: no name is one of a time before."""
    module = import_module(f"tinyspec.{file.removesuffix('.py').replace('/', '.')}")
    for name in names.split():
        attrgetter(f"{owner}.{name}".lstrip("."))(module)


# In a file of the package, a text and what takes its place.
MOVES_BITS = {
    "the constant of the noise": ("scheduler/request.py", "_GOLDEN = 0x9E37", "_GOLDEN = 0x9E39"),
    "the noise": ("scheduler/request.py", "x ^= x >> 31", "x ^= x >> 30"),
    "a filter": ("scheduler/request.py", "params.min_p) or 0.0", "params.min_p) or 0.5"),
    "tokens of a state": ("config.py", "STATE_TILE = 8", "STATE_TILE = 16"),
    "the end": ("engine/commit.py", 'finish_reason = "stop"', 'finish_reason = "end"'),
    "the layout of JSON": ("structured/schemas.py", '_separator": ", "', '_separator": ","'),
    "a property": ("sampling_params.py", "if self.ignore_eos else", "if not self.ignore_eos else"),
}
MOVES_NONE = {
    "a page": ("config.py", "(128 if cpu else 64)", "(64 if cpu else 64)"),
    "a text": ("scheduler/request.py", '"""64-bit noise key', '"""A noise key'),
    "a comment": ("scheduler/request.py", "x ^= x >> 31", "x ^= x >> 31  # the last\n"),
    "a type": ("scheduler/request.py", "index: int) -> int:", "index: Any) -> Any:"),
    "another constant": ("scheduler/buckets.py", "MOST_DRAFTS = 16", "MOST_DRAFTS = 12"),
    "a drafter": ("drafts/drafter.py", "REMEMBERS = 0.02", "REMEMBERS = 0.03"),
    "how far a stop string reaches": ("text/decoding.py", "in stops) + 1", "in stops)"),
    "the order of pages": ("scheduler/prefix_cache.py", "digest_size=16", "digest_size=20"),
}


@pytest.mark.parametrize("what", [*MOVES_BITS, *MOVES_NONE])
def test_code_by_name(tmp_path, what):
    """Of other wings the fingerprint holds what bits depend on, and nothing else."""
    file, before, after = {**MOVES_BITS, **MOVES_NONE}[what]
    root = shutil.copytree(PACKAGE, tmp_path / "copy", ignore=lambda *_: {"tools", "__pycache__"})
    own, text = fingerprint.code.__wrapped__(root), (root / file).read_text()
    of_text = fingerprint.text_code.__wrapped__(root)
    assert own == fingerprint.code() and text.count(before) == 1
    (root / file).write_text(text.replace(before, after))
    assert (fingerprint.code.__wrapped__(root) != own) == (what in MOVES_BITS)
    moved = fingerprint.text_code.__wrapped__(root) != of_text
    assert moved == (what == "how far a stop string reaches")


def test_a_name_that_is_gone_is_an_error(tmp_path):
    root = shutil.copytree(PACKAGE, tmp_path / "copy", ignore=lambda *_: {"tools", "__pycache__"})
    text = (root / "scheduler/request.py").read_text()
    (root / "scheduler/request.py").write_text(text.replace("def noise_key", "def key"))
    with pytest.raises(KeyError, match="noise_key"):
        fingerprint.code.__wrapped__(root)


@pytest.mark.parametrize("told", [False, True])
def test_weights_that_change_change_one_part(told):
    """What an engine knew before is what a new one finds; written through ``.data``, too."""
    model, config = tiny(), EngineConfig(linear="never", verify_weights=told)
    params = SamplingParams(max_new_tokens=1, deterministic=True)
    with Engine(model, config=config) as engine:
        parts = [engine.generate([[1, 2]], params)[0].fingerprint_parts]
        for _ in range(2):
            weight = model.lm_head.weight
            (weight.data if told else weight.detach()).mul_(1.5)
            known = engine.generate([[1, 2]], params)[0].fingerprint_parts
            with Engine(model, config=config) as other:
                assert known == other.generate([[1, 2]], params)[0].fingerprint_parts
            parts.append(known)
    assert len({part["weights"] for part in parts}) == 3
    assert len({str({**part, "weights": ""}) for part in parts}) == 1


def test_row_checksums():
    rows = torch.randn(5, 300)
    sums = row_checksums(rows)
    assert sums.shape == (5,) and len(set(sums.tolist())) == 5
    assert torch.equal(row_checksums(rows[2:4]), sums[2:4]), "a row's sum is its own"
    swapped = rows.clone()
    swapped[1, 3], swapped[1, 200] = rows[1, 200], rows[1, 3]
    assert (row_checksums(swapped) != sums).tolist() == [False, True, False, False, False]
    rows[0, 7], swapped[0, 7] = torch.nan, -torch.nan
    assert row_checksums(rows)[0] == row_checksums(swapped)[0]


# cuBLAS and the driver


def test_libraries_that_are_loaded(tmp_path):
    """Each in two parts, and others; another version has another size."""
    names = ["libcublas.so.12", "libcublasLt.so.12", "libtorch_cuda.so"]
    for length, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(length))
    paths = [*(tmp_path / name for name in names for _ in range(2)), "[heap]"]
    paths.append("/nowhere/libcublas.so.11 (deleted)")
    maps = tmp_path / "maps"
    maps.write_text("".join(f"7f00-7f01 r-xp 00000000 08:01 42    {path}\n" for path in paths))
    found = environment.loaded_libraries(maps)
    assert found == [("libcublas.so.12", 0), ("libcublasLt.so.12", 1)]
    (tmp_path / names[0]).write_bytes(bytes(9))
    assert environment.loaded_libraries(maps)[0] == ("libcublas.so.12", 9)
    assert environment.loaded_libraries(tmp_path / "none") == []


def test_version_of_the_driver():
    """On a device of CUDA's: this library has the name on all systems that have one."""

    def load(path):
        def get_version(found):
            ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 13000

        assert path == "libcuda.so.1"
        return SimpleNamespace(cuDriverGetVersion=get_version)

    assert environment.driver(load) == "13000"


def test_variables(monkeypatch):
    kept = {"CUBLAS_EMULATE_SINGLE_PRECISION": "1", "NVIDIA_TF32_OVERRIDE": "1"}
    kept |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "4096"}
    for name, value in {**kept, "CUBLASLT_LOG_LEVEL": "5", "CUBLAS_LOGINFO_DBG": "1"}.items():
        monkeypatch.setenv(name, value)
    assert environment.cublas.__wrapped__()["variables"] == kept


@pytest.mark.parametrize("found", [{}, {"libraries": [("libcublas.so.12", 7)]}], ids=str)
def test_cublas_is_part_of_it(found, monkeypatch):
    """On CUDA."""
    monkeypatch.setattr(environment, "ambient", lambda device: {"blas": "cublas 4096"})
    monkeypatch.setattr(environment, "device_parts", lambda device: ["GPU", "sm_90", "132"])
    monkeypatch.setattr(environment, "cublas", lambda: found)
    assert environment.environment(torch.device("cuda"))["cublas"] == found
    assert "cublas" not in environment.environment(torch.device("cpu"))

"""What the fingerprint holds of cuBLAS and the driver on CUDA, by a stand-in for the libraries."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tinyspec.determinism import environment
from tinyspec.kernels import backend

LINE = "7f00-7f01 r-xp 00000000 08:01 42    {}"


@pytest.fixture
def maps(tmp_path):
    """Of a process that has loaded both libraries, each in two parts, and others: one more of the
    same name, and files in a folder of a like name."""
    names = ["libcublas.so.12", "libcublasLt.so.12", "libtorch_cuda.so"]
    names += ["libcublas-12/libcublas.so.12", "libcublas-12/table.bin"]
    (tmp_path / "libcublas-12").mkdir()
    for name in names:
        (tmp_path / name).touch()
    gone = "/nowhere/libcublas.so.11 (deleted)"
    paths = [*(tmp_path / name for name in names for _ in range(2)), "[heap]", gone]
    (tmp_path / "maps").write_text("".join(LINE.format(path) + "\n" for path in paths))
    return tmp_path / "maps"


def loader(parts, whole, loaded):
    """Of libraries with these versions."""

    def get_property(part, value):
        ctypes.cast(value, ctypes.POINTER(ctypes.c_int))[0] = parts[part]
        return 0

    def get_version():
        return whole

    def load(path):
        loaded.append(path)
        # A symbol is also looked up in the libraries that a library depends on.
        own = {} if "Lt" in path else {"cublasGetProperty": get_property}
        return SimpleNamespace(cublasLtGetVersion=get_version, **own)

    return load


def test_versions_of_loaded_libraries(maps):
    loaded = []
    found = environment.cublas_versions(maps, loader((12, 9, 1), 120901, loaded))
    twice = ["libcublas.so.12", "12.9.1"]
    assert found == [twice, twice, ["libcublasLt.so.12", "120901"]]
    assert len(loaded) == 3
    assert environment.cublas_versions(maps, loader((12, 9, 2), 120901, [])) != found


def test_versions_where_none_can_be_asked(maps, tmp_path):
    assert environment.cublas_versions(tmp_path / "none") == []
    found = environment.cublas_versions(maps, lambda path: SimpleNamespace())
    assert {version for _, version in found} == {""}


def test_version_of_the_driver():
    """On a device of CUDA's: this library has the name on all systems that have one."""

    def load(path):
        def get_version(found):
            ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 13000
            return 0

        assert path == "libcuda.so.1"
        return SimpleNamespace(cuDriverGetVersion=get_version)

    assert environment.driver(load) == "13000"


VARIABLES = {
    "CUBLAS_EMULATE_SINGLE_PRECISION": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "4096",
}


@pytest.mark.parametrize("told", [False, True])
def test_variables(told, monkeypatch):
    """Sizes of workspaces where torch does not tell them."""
    for name, value in {**VARIABLES, "CUBLASLT_LOG_LEVEL": "5", "CUBLAS_LOGINFO_DBG": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(environment, "_C", SimpleNamespace())
    if told:
        environment._C._cuda_getCublasWorkspaceSize = lambda: 1 << 25
    left_out = backend.WORKSPACES if told else ()
    expected = {name: value for name, value in VARIABLES.items() if name not in left_out}
    assert environment.cublas.__wrapped__()["variables"] == expected


def test_it_is_part_of_the_fingerprint(monkeypatch):
    """On CUDA, and read once."""
    monkeypatch.setattr(environment, "ambient", lambda device: {"blas": "cublas 4096"})
    monkeypatch.setattr(environment, "device_parts", lambda device: ["GPU", "sm_90", "132"])
    fixed = environment.cublas.__wrapped__()
    assert set(fixed) == {"versions", "variables"}
    gpu = torch.device("cuda")
    assert environment.environment(gpu)["cublas"] == fixed
    monkeypatch.setattr(environment, "cublas", lambda: {"versions": {"libcublas.so.12": "13.0.0"}})
    assert environment.environment(gpu)["cublas"] != fixed
    assert "cublas" not in environment.environment(torch.device("cpu"))

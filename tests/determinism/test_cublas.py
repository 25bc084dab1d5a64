"""What the fingerprint holds of cuBLAS and the driver on CUDA, by a stand-in for the libraries."""

import ctypes
from types import SimpleNamespace

import torch

from tinyspec.determinism import environment

LINE = "7f00-7f01 r-xp 00000000 08:01 42    {}\n"


def test_libraries_that_are_loaded(tmp_path):
    """Each in two parts, and others; another version has another size."""
    names = ["libcublas.so.12", "libcublasLt.so.12", "libtorch_cuda.so"]
    for length, name in enumerate(names):
        (tmp_path / name).write_bytes(bytes(length))
    gone = "/nowhere/libcublas.so.11 (deleted)"
    paths = [*(tmp_path / name for name in names for _ in range(2)), "[heap]", gone]
    maps = tmp_path / "maps"
    maps.write_text("".join(map(LINE.format, paths)))
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


VARIABLES = {
    "CUBLAS_EMULATE_SINGLE_PRECISION": "1",
    "NVIDIA_TF32_OVERRIDE": "1",
    "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "CUBLASLT_WORKSPACE_SIZE": "4096",
}


def test_variables(monkeypatch):
    for name, value in {**VARIABLES, "CUBLASLT_LOG_LEVEL": "5", "CUBLAS_LOGINFO_DBG": "1"}.items():
        monkeypatch.setenv(name, value)
    assert environment.cublas.__wrapped__()["variables"] == VARIABLES


def test_it_is_part_of_the_fingerprint(monkeypatch):
    """On CUDA."""
    monkeypatch.setattr(environment, "ambient", lambda device: {"blas": "cublas 4096"})
    monkeypatch.setattr(environment, "device_parts", lambda device: ["GPU", "sm_90", "132"])
    for found in ({}, {"libraries": [("libcublas.so.12", 7)]}):
        monkeypatch.setattr(environment, "cublas", lambda found=found: found)
        assert environment.environment(torch.device("cuda"))["cublas"] == found
    assert "cublas" not in environment.environment(torch.device("cpu"))

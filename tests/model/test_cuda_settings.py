"""Settings of cuBLAS and cuDNN: pinned in passes on CUDA, and the caller's come back. They can be
read and set without a GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product

import pytest
import torch

from tinyspec.model import torch_settings
from tinyspec.model.torch_settings import pin_again, pinned

C = torch._C
NEWER = ("cuda matmul", "mkldnn matmul", "cuda conv", "cuda rnn")
OLDER = (C._get_float32_matmul_precision, C._get_cublas_allow_tf32, C._get_cudnn_allow_tf32)
BLAS = torch.backends.cuda.matmul


@pytest.fixture(autouse=True)
def as_with_a_gpu(monkeypatch):
    """What passes look at quickly is kept for the process: no other test has a GPU's."""
    monkeypatch.setattr(torch_settings, "_of_process", torch_settings._of_gpus)
    torch_settings._quick.cache_clear()
    yield
    torch_settings._quick.cache_clear()


def newer() -> list[str]:
    return [C._get_fp32_precision_getter(*operator.split()) for operator in NEWER]


def set_newer(values) -> None:
    for operator, value in zip(NEWER, values, strict=True):
        C._set_fp32_precision_setter(*operator.split(), value)


def older() -> list:
    """What the older settings say; None: torch refuses to read it."""
    found = []
    for get in OLDER:
        try:
            found.append(get())
        except RuntimeError:
            found.append(None)
    return found


@contextmanager
def caller(precision: str, allowed: bool, values) -> Iterator[None]:
    """What a caller has set; torch's defaults come back."""
    C._set_float32_matmul_precision(precision)
    C._set_cudnn_allow_tf32(allowed)
    set_newer(values)
    try:
        yield
    finally:
        C._set_float32_matmul_precision("highest")
        C._set_cudnn_allow_tf32(True)
        set_newer(("none", "none", "tf32", "tf32"))


CALLERS = [
    (precision, allowed, values)
    for precision, allowed in product(("highest", "high", "medium"), (True, False))
    for values in product(("none", "tf32"), ("none", "bf16"), ("ieee", "tf32"), ("none", "tf32"))
]


def test_both_settings_of_a_precision():
    """In a pass each reads as no TF32, whatever the caller has set; afterwards as before, those
    that contradict each other and those that are hidden by that among them."""
    refused = 0
    for precision, allowed, values in CALLERS:
        with caller(precision, allowed, values):
            before = newer(), older()
            refused += None in before[1]
            with pinned("cuda"):
                assert newer() == ["ieee"] * 4 and older() == ["highest", False, False]
            assert (newer(), older()) == before
            set_newer(["ieee", "ieee"] + ["tf32" if allowed else "ieee"] * 2)
            assert [C._get_float32_matmul_precision(), C._get_cudnn_allow_tf32()] == [
                precision,
                allowed,
            ]
    assert 0 < refused < len(CALLERS)


def flags(names: list[str], value, expected: list, read: list[str] = ()):
    """How to read some of cuBLAS's, how to change them, and what they are in a pass."""
    get = lambda: [getattr(BLAS, name) for name in read or names]  # noqa: E731
    return get, lambda: [setattr(BLAS, name, value) for name in names], expected


REDUCTIONS = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
BOTH = [name for first in REDUCTIONS for name in (first, f"{first}_split_k")]
OTHERS = [
    flags(["allow_fp16_accumulation"], True, [False]),
    (C._get_sm_carveout_experimental, lambda: C._set_sm_carveout_experimental(16), None),
]
if isinstance(C._get_cublas_allow_fp16_reduced_precision_reduction(), tuple):  # since torch 2.13
    OTHERS.append(flags(REDUCTIONS, (False, False), [False, True] * 2, BOTH))
if hasattr(C, "_get_cublaslt_prefer_grouped_gemm"):  # since torch 2.14
    OTHERS.append(flags(["prefer_cublaslt_grouped_gemm"], True, [False]))


@pytest.mark.parametrize("get, change, expected", OTHERS)
def test_other_settings(get, change, expected):
    """Also where they are changed within a step."""
    default = [(setting, setting.get()) for setting in torch_settings._of_process()]
    try:
        change()
        before = get()
        assert before != expected
        with pinned("cuda"):
            assert get() == expected
            change()
            pin_again("cuda")
            assert get() == expected
        assert get() == before
    finally:
        for setting, value in default:
            setting.set(value)


def test_threads_that_overlap():
    """Pinned until the last has left, whichever came first; then the caller's again."""
    every = torch_settings._of_process()
    with caller("high", True, ("tf32",) * 4):
        before = [setting.get() for setting in every]
        threads = [ThreadPoolExecutor(1) for _ in range(2)]
        blocks = [pinned("cuda") for _ in range(2)]
        for thread, block in zip(threads, blocks, strict=True):
            thread.submit(block.__enter__).result()
        for thread, block in zip(threads, blocks, strict=True):
            assert all(setting.get() == setting.value for setting in every)
            thread.submit(block.__exit__, None, None, None).result()
            thread.shutdown()
        assert [setting.get() for setting in every] == before != [s.value for s in every]

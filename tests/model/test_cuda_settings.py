"""Settings of cuBLAS and cuDNN: pinned in passes on CUDA, and the caller's come back. They can be
read and set without a GPU."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import permutations, product

import pytest
import torch

from tinyspec.model import torch_settings
from tinyspec.model.torch_settings import Setting, pin_again, pinned

C = torch._C
NEWER = ("cuda matmul", "mkldnn matmul", "cuda conv", "cuda rnn")
OLDER = (C._get_float32_matmul_precision, C._get_cublas_allow_tf32, C._get_cudnn_allow_tf32)
BLAS = torch.backends.cuda.matmul


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


def test_control_a_precision_by_operator_alone(monkeypatch):
    """As it was: the older setting cannot be read in a pass."""
    only = (torch_settings._precision("cuda", "matmul"), torch_settings._precision("cuda", "conv"))
    monkeypatch.setattr(torch_settings, "_of_process", lambda device_type: only)
    monkeypatch.setattr(torch_settings, "_shared", torch_settings._Shared())
    with caller("high", True, ("tf32", "tf32", "tf32", "tf32")), pinned("cuda"):
        assert older()[1:] == [None, None]


def put(name: str, value: object) -> None:
    setattr(BLAS, name, value)


REDUCTIONS = [f"allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
BOTH = [name for first in REDUCTIONS for name in (first, f"{first}_split_k")]
OTHERS = {
    "fp16 accumulation": (
        lambda: BLAS.allow_fp16_accumulation,
        lambda: put("allow_fp16_accumulation", True),
        False,
    ),
    "multiprocessors": (
        C._get_sm_carveout_experimental,
        lambda: C._set_sm_carveout_experimental(16),
        None,
    ),
}
if isinstance(C._get_cublas_allow_fp16_reduced_precision_reduction(), tuple):  # since torch 2.13
    OTHERS["reductions and split-K"] = (
        lambda: [getattr(BLAS, name) for name in BOTH],
        lambda: [put(name, (False, False)) for name in REDUCTIONS],
        [False, True] * 2,
    )


@pytest.mark.parametrize("name", OTHERS)
def test_other_settings(name):
    """Also where they are changed within a step."""
    get, change, expected = OTHERS[name]
    default = [(setting, setting.get()) for setting in torch_settings._of_process("cuda")]
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
            assert isinstance(setting, Setting)
            setting.set(value)


def test_a_cpu_reads_none_of_them(monkeypatch):
    """What a step on a CPU looks at is not more than it was."""
    assert len(torch_settings._of_process("cpu")) == 7
    with caller("high", True, ("none",) * 4), pinned("cpu"):
        assert older() == ["high", None, None]


KINDS = ("cpu", "cuda")
# In which order passes on two kinds of devices begin (at the first mention) and end, both twice or
# one of them again while the other still runs.
ORDERS = sorted(set(permutations([*KINDS, *KINDS])))
ORDERS.append(("cpu", "cuda", "cuda", "cuda", "cuda", "cpu"))
# Of other names, and shared as well: what a caller may have set.
CHANGED = {"dtype": torch.float64, "mkldnn": False, "cudnn benchmark": True}
CHANGED["deterministic algorithms"] = True, True


def lost(order) -> set[str]:
    """Settings that are not pinned while a pass runs that wants them, or not the caller's again
    after the last; each pass has a thread."""
    wanted = {kind: torch_settings._of_process(kind) for kind in KINDS}
    every = [*dict.fromkeys((*wanted["cpu"], *wanted["cuda"]))]
    before = [setting.get() for setting in every]
    changed = [(s, CHANGED[s.name]) for s in every if s.name in CHANGED]
    found: set[str] = set()
    running = {}
    try:
        for setting, value in changed:
            setting.set(value)
        callers = [setting.get() for setting in every]
        for kind in order:
            if kind in running:
                thread, block = running.pop(kind)
                thread.submit(block.__exit__, None, None, None).result()
                thread.shutdown()
            else:
                thread, block = running[kind] = ThreadPoolExecutor(1), pinned(kind)
                thread.submit(block.__enter__).result()
            found |= {s.name for each in running for s in wanted[each] if s.get() != s.value}
        assert not running
        found |= {s.name for s, value in zip(every, callers, strict=True) if s.get() != value}
    finally:
        for setting, value in zip(reversed(every), reversed(before), strict=True):
            setting.set(value)
    return found


@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_two_kinds_of_devices(order):
    """Passes on both in two threads, in whichever order they begin and end."""
    for case in CALLERS[::3]:
        with caller(*case):
            assert lost(order) == set(), case


class EachKindForItself:
    """As it was: settings that two kinds of devices share are restored by each."""

    def __init__(self):
        self.kinds = {kind: torch_settings._Shared() for kind in KINDS}

    def acquire(self, kind):
        self.kinds[kind].acquire(kind)

    def release(self, kind):
        self.kinds[kind].release(kind)


def test_control_each_kind_for_itself(monkeypatch):
    """Where one ends within the other nothing is lost; else the pass that still runs loses what is
    pinned, and the caller what it had set."""
    monkeypatch.setattr(torch_settings, "_shared", EachKindForItself())
    with caller("high", True, ("tf32", "tf32", "tf32", "tf32")):
        assert lost(("cpu", "cuda", "cuda", "cpu")) == set()
        assert lost(("cpu", "cuda", "cpu", "cuda")) == {
            "deterministic algorithms",
            "dtype",
            "matmul",
        }


def test_nothing_is_written_while_another_kind_runs(monkeypatch):
    """A precision that torch holds twice is restored in two steps: not under a pass that reads
    one."""
    written = []

    def recorded(setting: Setting) -> Setting:
        def put(value):
            written.append(setting.name)
            setting.set(value)

        return setting._replace(set=put)

    of = {kind: tuple(map(recorded, torch_settings._of_process(kind))) for kind in KINDS}
    monkeypatch.setattr(torch_settings, "_of_process", of.__getitem__)
    with caller("high", True, ("tf32", "tf32", "tf32", "tf32")):
        with pinned("cpu"):
            with pinned("cuda"):
                written.clear()
            assert "cudnn" in written and "matmul" not in written
            written.clear()
        assert "matmul" in written


def test_kinds_want_the_same_of_what_they_share():
    of = {kind: torch_settings._of_process(kind) for kind in KINDS}
    with caller("medium", True, ("tf32", "bf16", "tf32", "tf32")):
        for first, second in permutations(KINDS):
            with pinned(first), pinned(second):
                for setting in (*of[first], *of[second]):
                    assert setting.get() == setting.value, setting.name
    cpu, cuda = ({setting.name for setting in settings} for settings in of.values())
    assert cpu & cuda == {"dtype", "deterministic algorithms", "einsum", "matmul"}

"""The run of everything: results are there whenever it is cut, and steps keep to their time."""

import sys
import time
from itertools import product
from pathlib import Path

from benchmarks import journal, on_gpu
from benchmarks.on_gpu import OF_A_GPU, Step, gpu_steps, run_all, smoke_steps

ROOT = Path(__file__).parents[2]


def step(name: str, seconds: int, text: str, **more: bool) -> Step:
    return Step(name, seconds, (sys.executable, "-c", text), **more)


def test_steps(tmp_path, monkeypatch, capsys):
    """One step fails, one hangs, and the others run; what each had written stays. Where no time is
    left for another, it does not begin."""
    monkeypatch.setattr(on_gpu, "GRACE_S", 0.2)
    hangs = "import time; print('begun', flush=True); time.sleep(60)"
    steps = [
        step("fine", 20, "print('some words')"),
        step("fails", 20, "raise SystemExit(3)"),
        step("hangs", 1, hangs),
        step("after", 20, "import sys; print(sys.argv)", told=False),
    ]
    began = time.time()
    run_all(steps, tmp_path, tmp_path, began + 30)
    assert time.time() - began < 15
    run_all([step("late", 60, hangs)] * 2, tmp_path, tmp_path, time.time() + 2)
    lines = journal.read(tmp_path / "results.jsonl")
    assert {line["case"]: line["result"] for line in lines if "result" in line} == {
        **{"fine": "passed", "fails": "failed (3)", "hangs": "out of time"},
        **{"after": "passed", "late": "no time"},
    }
    log = (tmp_path / "log.txt").read_text()
    assert "some words" in log and "begun" in log and "['-c']" in log
    assert "| hangs | " in (tmp_path / "report.md").read_text()


def test_lists():
    """Names are used once; bits come first, speed before tests; commands name files that exist."""
    for steps in (list(gpu_steps()), list(smoke_steps())):
        names = [step.name for step in steps]
        assert len(set(names)) == len(names)
        for step in steps:
            for part in step.command:
                if part.startswith(("benchmarks/", "tests/")):
                    assert (ROOT / part).exists()
    names = [step.name for step in gpu_steps()]
    first = ["qwen: bits", "llama: bits", "moe: bits", "hybrid: bits", "ceilings, kernels"]
    assert names[: len(first)] == first
    assert names.index("tests: kernels") > 5
    files = [path for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()]
    marked = {str(path.relative_to(ROOT)) for path in files if path != Path(__file__)}
    assert {name for name in marked if not name.startswith("tests/kernels/")} == set(OF_A_GPU)


def test_predictions():
    """Every prediction is of a case that is measured."""
    from benchmarks.first_token import DISKS
    from benchmarks.kernel_cases import cases
    from benchmarks.measure_kernels import CEILINGS
    from benchmarks.measure_models import BATCHES, REFERENCES, SIDES
    from benchmarks.presets import PRESETS

    known = {("ceilings", name) for name in CEILINGS} | {("kernels", name) for name in cases(False)}
    known |= {("steps", f"{p}, batch {batch}") for p, batch in product(PRESETS, BATCHES)}
    known |= {("steps", f"{p}, batch 64, deterministic") for p in PRESETS}
    shares = product(PRESETS, (0, 10, 50, 100))
    known |= {("nano-vllm's workload", f"{p}, {n} % deterministic") for p, n in shares}
    started = product(("first token", "until passes are graphs"), PRESETS, DISKS)
    known |= {(section, f"{p}, {disk}") for section, p, disk in started}
    sizes = product(PRESETS, REFERENCES, (1, 64))
    known |= {
        ("steps by reference_rows", f"{p}, reference_rows={rows}, batch {batch}")
        for p, rows, batch in sizes
    }
    ragged = product(PRESETS, (64, 256), SIDES)
    known |= {("ragged requests", f"{p}, {n} requests: {side}") for p, n, side in ragged}
    for predicted in journal.predictions():
        assert (predicted["section"], predicted["case"]) in known, predicted
        assert predicted["low"] < predicted["high"] and predicted["why"]

"""The comparison of stored bits: equal files pass, one bit fails. No model runs here."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from benchmarks.compare_bits import main


def entry(section: str, name: str, **changes: Any) -> dict[str, Any]:
    plain = {
        "section": section,
        "name": name,
        "deterministic": section.startswith("deterministic"),
        "tokens": [3, 1, 4],
        "logprobs": [(-0.5).hex(), (-1.25).hex(), (-0.1).hex()],
        "others": ["5:-0x1.8p+1"],
        "finish": "length",
    }
    return {**plain, **changes}


REPORT = {
    "format": 1,
    "environment": {"torch": "2.13", "load_average": 0.5},
    "seen": {},
    "requests": [
        entry("deterministic: crowd", "llama 0"),
        entry("deterministic: crowd", "llama 1"),
        entry("plain: crowd", "llama 0"),
    ],
}


@pytest.fixture
def compared(tmp_path, capsys):
    """Exit status and output of comparing REPORT with a changed copy of it."""

    def compared(change, *options: str) -> tuple[int, str]:
        other: dict[str, Any] = copy.deepcopy(REPORT)
        change(other)
        paths = []
        for name, report in (("a", REPORT), ("b", other)):
            paths.append(str(tmp_path / name))
            (tmp_path / name).write_text(json.dumps(report))
        status = main(["compare", *paths, *options])
        return status, capsys.readouterr().out

    return compared


def bit(report: dict[str, Any]) -> None:
    """Another last bit in one log-probability, as fp32 has it."""
    bits = report["requests"][1]["logprobs"]
    bits[1] = (float.fromhex(bits[1]) * (1 + 2**-23)).hex()


def changed(**changes: Any):
    return lambda report: report["requests"][0].update(changes)


def test_equal_files(compared):
    status, text = compared(lambda report: report["environment"].update(load_average=9.0))
    assert status == 0
    assert "deterministic: 2 of 2 requests equal" in text
    assert "plain: 1 of 1 requests equal" in text
    assert "environments differ" not in text


CHANGES = {
    "bit": (bit, "deterministic: crowd, llama 1: logprobs[1] -0x1.4000000000000p+0"),
    "token": (changed(tokens=[3, 1, 5]), "tokens[2] 4 and 5"),
    "length": (changed(tokens=[3, 1]), "3 and 2 tokens"),
    "top": (changed(others=["6:-0x1.8p+1"]), "others[0]"),
    "finish": (changed(finish="stop"), "finish 'length' and 'stop'"),
    "kind": (changed(deterministic=False), "deterministic in one file only"),
    "missing": (lambda report: report["requests"].pop(0), "llama 0: only in the first file"),
}


@pytest.mark.parametrize(("change", "said"), CHANGES.values(), ids=CHANGES)
def test_changes(compared, change, said):
    status, text = compared(change)
    assert status == 1 and said in text

"""The comparison of stored bits: equal files pass, one bit fails. No model runs here."""

import copy
import json
from typing import Any

import pytest

from benchmarks.compare_bits import main

REQUEST = {
    "tokens": [3, 1, 4],
    "logprobs": [(-0.5).hex(), (-1.25).hex(), (-0.1).hex()],
    "others": ["5:-0x1.8p+1"],
    "finish": "length",
}
REPORT = {
    "format": 1,
    "environment": {"torch": "2.13", "load_average": 0.5},
    "seen": {},
    "requests": [
        {**REQUEST, "section": f"{kind}: crowd", "name": name, "deterministic": kind != "plain"}
        for kind, name in (("deterministic", "0"), ("deterministic", "1"), ("plain", "0"))
    ],
}
# One log-probability has another last bit, as fp32 has it.
BIT = [(-0.5).hex(), (-1.25 * (1 + 2**-23)).hex(), (-0.1).hex()]
# Of the second request: what is there instead, and what is said.
CHANGES = {
    "bit": ({"logprobs": BIT}, "deterministic: crowd, 1: logprobs[1] -0x1.4000000000000p+0"),
    "token": ({"tokens": [3, 1, 5]}, "tokens[2] 4 and 5"),
    "length": ({"tokens": [3, 1]}, "3 and 2 tokens"),
    "top": ({"others": ["6:-0x1.8p+1"]}, "others[0]"),
    "finish": ({"finish": "stop"}, "finish 'length' and 'stop'"),
    "kind": ({"deterministic": False}, "deterministic in one file only"),
    "missing": (None, "1: only in the first file"),
}


@pytest.mark.parametrize("kind", ["equal", *CHANGES])
def test_compared(kind, tmp_path, capsys):
    other: dict[str, Any] = copy.deepcopy(REPORT)
    other["environment"]["load_average"] = 9.0
    changes, said = CHANGES.get(kind, ({}, "deterministic: 2 of 2 requests equal"))
    if changes is None:
        del other["requests"][1]
    else:
        other["requests"][1].update(changes)
    for name, report in (("a", REPORT), ("b", other)):
        (tmp_path / name).write_text(json.dumps(report))
    status = main(["compare", str(tmp_path / "a"), str(tmp_path / "b")])
    told = capsys.readouterr().out
    assert status == (kind != "equal") and said in told
    if kind == "equal":
        assert "plain: 1 of 1 requests equal" in told and "environments differ" not in told

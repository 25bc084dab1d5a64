"""diff: what two files of outputs do not have in common, by request."""

import json
import random
import struct
from dataclasses import replace

import pytest

from tinyspec import Completion, RequestOutput, SamplingParams
from tinyspec.cli.main import main
from tinyspec.determinism.fingerprint_parts import digest_of
from tinyspec.tools.diff import diff

PARTS = {"device": "CPU", "threads": 2, "weights": "sha256 00", "torch": "2.12.0"}


def fp32(bits):
    return struct.unpack(">f", bits.to_bytes(4, "big"))[0]


THREE = Completion(
    token_ids=[5, 6, 7],
    text="abc",
    logprobs=[fp32(0xBF800000 + n) for n in range(3)],
    top_logprobs=[[(5, -1.0)], [(6, -1.0)], [(7, -1.0)]],
    finish_reason="length",
)


def output(number=0, parts=None, seed=3, **changes):
    """Of three tokens. parts: of the fingerprint, that are others."""
    parts = {**PARTS, **(parts or {})}
    own = {name: changes.pop(name) for name in list(changes) if hasattr(THREE, name)}
    given = {
        "request_id": f"request-{number}",
        "prompt_token_ids": [1, 2, number],
        "params": SamplingParams(deterministic=True, temperature=1.0, seed=seed),
        "completions": [replace(THREE, **own)],
        **{"fingerprint": digest_of(parts), "fingerprint_parts": parts},
    }
    return RequestOutput(**given | changes)


def only(report):
    (entry,) = report.entries
    return entry.verdict, entry.position, entry.reason


def test_the_same_in_any_order():
    outputs = [output(n) for n in range(5)]
    shuffled = random.Random(1).sample(outputs, 5)
    renamed = [replace(o, request_id=f"other-{n}") for n, o in enumerate(shuffled)]
    report = diff(outputs, renamed)
    assert report and [entry.request_id for entry in report.entries] == [
        o.request_id for o in outputs
    ]
    assert str(report).endswith("5 same")
    assert not diff(outputs, [*renamed[1:], output(3, token_ids=[5, 6, 8])])


OFF = [fp32(0xBF800000), fp32(0xBF800005), fp32(0xBF800002)]
MOVED = "log-probability -1.0000001192092896 -> -1.0000005960464478"


@pytest.mark.parametrize(
    ("changes", "position", "reason"),
    [
        ({"token_ids": [5, 6, 8]}, 2, "token 7 -> 8"),
        ({"token_ids": [5, 6]}, 2, "token 7 -> (absent)"),
        ({"token_ids": [5, 6, 8], "logprobs": [-1.0] * 3}, 1, "-> -1.0, token 7 -> 8 at 2"),
        ({"token_ids": [5, 6.0, 7]}, 1, "token 6 -> 6.0"),
        ({"logprobs": OFF}, 1, MOVED),
        ({"logprobs": None}, 0, "logprobs ["),
        ({"top_logprobs": [[(5, -1.0)], [(6, -2.0)]]}, 1, "top log-probabilities [(6, -1.0)] -> "),
        ({"finish_reason": "stop"}, None, "finish_reason 'length' -> 'stop'"),
        ({"text": "abd"}, None, "text 'abc' -> 'abd'"),
        ({"prompt_logprobs": [None, -1.0, -1.0]}, None, "prompt_logprobs (absent) -> ["),
    ],
)
def test_what_differs(changes, position, reason):
    verdict, place, told = only(diff([output()], [output(**changes)]))
    assert (verdict, place) == ("differs", position) and reason in told


def test_other_fingerprints_are_explained():
    other = output(parts={"threads": 1, "weights": "sha256 01", "torch": "2.13.0"})
    found = "threads 2 -> 1, torch 2.12.0 -> 2.13.0, weights; the bits are the same"
    assert only(diff([output()], [other])) == ("not comparable", None, found)
    other = output(token_ids=[5, 6, 8], fingerprint="f" * 32, fingerprint_parts=None)
    found = f"fingerprint {output().fingerprint} -> {'f' * 32}; token 7 -> 8"
    assert only(diff([output()], [other])) == ("not comparable", 2, found)


def test_other_requests():
    """Of the same name: told; of another: only in one of the files."""
    own = output()
    found = ("not comparable", None, "seed 3 -> 4; the bits are the same")
    assert only(diff([own], [output(seed=4)])) == found
    reason = only(diff([own], [output(prompt_token_ids=[1, 3, 0])]))[2]
    assert reason.startswith("prompts differ at token 1")
    both = replace(own, completions=own.completions * 2)
    assert "1 completions -> 2" in only(diff([own], [both]))[2]
    entries = diff([own, output(1)], [output(2), output(1)]).entries
    assert [(e.request_id, e.verdict) for e in entries] == [
        ("request-0", "only in the first"),
        ("request-1", "same"),
        ("request-2", "only in the second"),
    ]


def test_the_command(tmp_path, capsys):
    one, other, bad = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "c.jsonl"
    one.write_text("".join(output(n).to_json() + "\n" for n in range(2)))
    other.write_text(output(1).to_json() + "\n" + output(0, token_ids=[5, 9, 7]).to_json() + "\n")
    bad.write_text(one.read_text() + "[1]\n")
    assert main(["diff", str(one), str(one)]) == 0
    capsys.readouterr()
    assert main(["diff", str(one), str(other)]) == 1
    text = capsys.readouterr().out
    assert "token 1: token 6 -> 9" in text and "1 differs, 1 same" in text
    assert main(["diff", str(one), str(other), "--json"]) == 1
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert [entry["position"] for entry in entries] == [1, None]
    assert main(["diff", str(one), str(bad)]) == 2
    assert f"tinyspec: {bad}, line 3 is not an output of tinyspec" in capsys.readouterr().err

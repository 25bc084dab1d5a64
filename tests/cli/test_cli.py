"""The command line, as a user meets it: the demo, prompts in, text and JSON lines out."""

import io
import json

import pytest

from tinyspec import Completion, RequestOutput, SamplingParams, StreamEvent
from tinyspec.cli.generate import TextWriter
from tinyspec.cli.main import main


def run(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_demo_keeps_its_promise(capsys):
    status, out, _ = run(capsys, "demo", "--crowd", "5", "--max-new-tokens", "20")
    assert status == 0
    assert "20 tokens and 20 log-probabilities: identical, bit for bit" in out
    assert "deterministic=False" in out
    for word in ("Prefill", "Decode", "Verify", "ollback", "KV cache after", "fingerprint"):
        assert word in out


def write_outputs(capsys, file):
    options = ("--max-new-tokens", "8", "--deterministic", "--logprobs", "--json")
    _, out, _ = run(capsys, "generate", "One day", "Once", "--temperature", "0.9", *options)
    file.write_text(out)
    return [RequestOutput.from_json(line) for line in out.splitlines()]


def test_audit_of_what_generate_wrote(capsys, tmp_path):
    file = tmp_path / "outputs.jsonl"
    outputs = write_outputs(capsys, file)
    status, out, _ = run(capsys, "audit", str(file))
    assert status == 0
    assert "2 same" in out and outputs[0].fingerprint in out

    tokens = outputs[1].completions[0].token_ids
    tokens[3] = tokens[3] + 1
    file.write_text("".join(output.to_json() + "\n" for output in outputs))
    status, out, _ = run(capsys, "audit", str(file), "--json")
    assert status == 1
    entries = json.loads(out)["entries"]
    assert [(e["verdict"], e["position"]) for e in entries] == [("same", None), ("differs", 3)]

    status, out, _ = run(capsys, "audit", str(file), "--reference-rows", "16")
    assert status == 1
    assert "2 not comparable" in out


def test_audit_goes_on_after_a_bad_line(capsys, tmp_path):
    file = tmp_path / "outputs.jsonl"
    outputs = write_outputs(capsys, file)
    good = outputs[1].to_json()
    bad = good.replace('"temperature": 0.9', '"temperature": -1')
    assert bad != good
    twice = good.replace('"request_id": ', '"request_id": "b", "request_id": ')
    file.write_text(f"{good}\n\n{bad}\n[1]\n{twice}\n{good}\n")
    status, out, err = run(capsys, "audit", str(file))
    assert status == 2
    assert "2 same" in out
    assert "line 3 is not an output of tinyspec: temperature=-1" in err and "line 4" in err
    assert "line 5 is not an output of tinyspec" in err and "twice" in err


def test_a_missing_model(capsys):
    status, _, err = run(capsys, "generate", "--model", "no/such/folder", "x")
    assert status == 2
    assert "no/such/folder" in err


@pytest.mark.parametrize("live", [True, False])
def test_texts_stand_in_the_order_of_prompts(live):
    """However they grow; live, the first unfinished one at once."""
    file, seen = io.StringIO(), []
    writer = TextWriter([("a", 0), ("a", 1), ("b", 0)], file, live)
    for name, index, text in (("b", 0, "x."), ("a", 0, "1"), ("a", 1, "3."), ("a", 0, "2.")):
        end = "stop" if text.endswith(".") else None
        writer.event(StreamEvent(name, index, [1], text, finish_reason=end))
        seen.append(file.getvalue())
    for name, texts in (("b", ["x."]), ("a", ["12.", "3."])):
        completions = [Completion([1], text, finish_reason="stop") for text in texts]
        writer.output(RequestOutput(name, [1], SamplingParams(), completions))
    assert seen[2] == ("1" if live else "") and file.getvalue() == "12.\n3.\nx.\n"

"""The command line, as a user meets it: the demo, prompts in, text and JSON lines out."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from tinyspec import RequestOutput
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


def test_generate_from_arguments(capsys):
    status, out, _ = run(capsys, "generate", "One day", "Once", "--max-new-tokens", "5", "--json")
    assert status == 0
    outputs = [RequestOutput.from_json(line) for line in out.splitlines()]
    assert len(outputs) == 2
    assert all(len(o.completions[0].token_ids) <= 5 for o in outputs)
    status, text, _ = run(capsys, "generate", "One day", "--max-new-tokens", "5")
    assert text.strip() == outputs[0].completions[0].text.strip()


def test_generate_from_files(capsys, tmp_path):
    text = tmp_path / "prompts.txt"
    text.write_text("One day\n\nOnce\n")
    _, out, _ = run(capsys, "generate", "--file", str(text), "--max-new-tokens", "3", "--json")
    assert len(out.splitlines()) == 2
    lines = tmp_path / "prompts.jsonl"
    lines.write_text(
        json.dumps({"prompt": [5, 6, 7], "max_new_tokens": 2, "seed": 4, "temperature": 1.0})
        + "\n"
        + json.dumps({"prompt": [{"role": "user", "content": "What is 1 + 2?"}]})
        + "\n"
    )
    _, out, _ = run(capsys, "generate", "--file", str(lines), "--max-new-tokens", "3", "--json")
    outputs = {o.request_id[:6]: o for o in map(RequestOutput.from_json, out.splitlines())}
    first, second = outputs["line-1"], outputs["line-2"]
    assert first.prompt_token_ids == [5, 6, 7]
    assert (first.params.max_new_tokens, first.params.seed) == (2, 4)
    assert second.params.max_new_tokens == 3


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


def test_audit_of_what_was_aborted_or_is_plain(capsys, tmp_path):
    """Nothing differs, and not everything is verified."""
    file = tmp_path / "outputs.jsonl"
    outputs = write_outputs(capsys, file)
    cut = outputs[0].completions[0]
    cut.token_ids, cut.logprobs, cut.finish_reason = cut.token_ids[:3], cut.logprobs[:3], "abort"
    cut.text = None
    plain = replace(outputs[1], params=replace(outputs[1].params, deterministic=False))
    file.write_text("".join(output.to_json() + "\n" for output in (outputs[1], outputs[0], plain)))
    status, out, _ = run(capsys, "audit", str(file), "--json")
    assert status == 1
    entries = json.loads(out)["entries"]
    assert [e["verdict"] for e in entries] == ["same", "partial", "not comparable"]
    assert entries[0]["verified"] == ["token_ids", "finish_reason", "error", "logprobs", "text"]
    assert entries[1]["verified"] == ["token_ids", "logprobs"]


def test_audit_goes_on_after_a_bad_line(capsys, tmp_path):
    file = tmp_path / "outputs.jsonl"
    outputs = write_outputs(capsys, file)
    good = outputs[1].to_json()
    bad = good.replace('"temperature": 0.9', '"temperature": -1')
    assert bad != good
    file.write_text(f"{good}\n\n{bad}\n[1]\n{good}\n")
    status, out, err = run(capsys, "audit", str(file))
    assert status == 2
    assert "2 same" in out
    assert "line 3 is not an output of tinyspec: temperature=-1" in err and "line 4" in err


def test_audit_of_something_else(capsys, tmp_path):
    file = tmp_path / "outputs.jsonl"
    file.write_text('{"request_id": "a"}\n')
    status, out, err = run(capsys, "audit", str(file))
    assert (status, out) == (2, "")
    assert "line 1 is not an output of tinyspec" in err


def test_doctor(capsys):
    status, out, _ = run(capsys, "doctor", "--max-rows", "32")
    assert status == 0
    assert "*32" in out and "deterministic=True can be served" in out
    status, out, _ = run(capsys, "doctor", "--max-rows", "32", "--json")
    assert status == 0 and json.loads(out)["ok"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("not json", "line 1 is not JSON"),
        ('["a"]', "line 1"),
        ('{"prompt": "a", "temprature": 1}', "temprature=1"),
        ('{"prompt": "a", "top_p": 2}', "top_p=2"),
        ('{"prompt": ""}', "prompt="),
    ],
)
def test_bad_lines_are_named(capsys, tmp_path, line, complaint):
    file = tmp_path / "bad.jsonl"
    file.write_text(line + "\n")
    status, out, err = run(capsys, "generate", "--file", str(file))
    assert status == 2
    assert out == ""
    assert complaint in err


@pytest.mark.slow("installation", 5)
def test_standard_input():
    """Of a process of its own: the command as it is installed."""
    command = [sys.executable, "-m", "tinyspec", "generate", "--max-new-tokens", "4"]
    done = subprocess.run(command, input="Once\nOne day\n", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 2


def test_a_missing_model(capsys):
    status, _, err = run(capsys, "generate", "--model", "no/such/folder", "x")
    assert status == 2
    assert "no/such/folder" in err

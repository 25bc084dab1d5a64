"""What once gave a traceback or misled, in commands of every kind: one line that helps; and the
command as a process: terminals, pipes and signals."""

import os
import pty
import signal
import subprocess
import sys
from contextlib import suppress
from unittest.mock import Mock

import pytest

from tinyspec import Completion, RequestOutput, SamplingParams

COMMANDS = {
    "demo": (["demo", "--crowd", "0"], "--crowd=0 is not allowed: an integer of at least 1"),
    "audit": (["audit", "nowhere.jsonl"], "tinyspec: nowhere.jsonl: No such file or directory"),
    "diff": (["diff", "-", "-"], "second='-' is not allowed: a file; standard input can be read"),
    "trace": (["trace", "nowhere.json", "-o", "x.svg"], "nowhere.json: No such file or directory"),
    "an empty prompt": (["generate", ""], "prompt 1: prompt=[] is not allowed: at least one token"),
    "score bytes": (["score", "a\udcffb", "x"], "prompt[1]='\\udcff' is not allowed: no lone"),
    "a missing model": (["generate", "--model", "no/such", "x"], "model='no/such' is not allowed"),
    "no GPU": (
        ["generate", "Once", "--device", "cuda"],
        "device='cuda' is not allowed: auto, cpu, cuda or cuda:N, and torch finds no",
    ),
    "a value": (["generate", "Once", "--top-p", "2"], "top_p=2.0 is not allowed: a number in ["),
    "a trace": (["generate", "Once", "--trace", "no/run.json"], "no/run.json: No such file or"),
    "--resume": (["generate", "Once", "--resume"], "--resume=True is not allowed: together with"),
    "no command": ([], "the following arguments are required: COMMAND (see tinyspec --help)"),
}


@pytest.mark.parametrize(("arguments", "complaint"), COMMANDS.values(), ids=COMMANDS)
def test_one_line(command, tmp_path, monkeypatch, arguments, complaint):
    """On a machine without a GPU, and without a network."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert complaint in err and err.count("\n") == 1 and err.startswith("tinyspec")


def test_unexpected_errors_are_one_line_too(command, served, monkeypatch):
    monkeypatch.setattr(served[0], "events", Mock(side_effect=RuntimeError("something\nelse")))
    told = "tinyspec: RuntimeError: something else (--debug shows the traceback)\n"
    assert command("generate", "Once") == (2, "", told)
    with pytest.raises(RuntimeError, match="something"):
        command("generate", "Once", "--debug")


def test_a_trace_is_not_written_over_prompts_or_outputs(command, served, tmp_path, monkeypatch):
    """Once both were lost, with exit status 0."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One day", "max_new_tokens": 2}\n')
    given = ("generate", "--file", prompts, "--output", "outputs.jsonl", "--trace")
    for name, other in (("./prompts.jsonl", "file"), ("outputs.jsonl", "output")):
        complaint = f"--trace='{name}' is not allowed: another file than --{other}"
        assert command(*given, name) == (2, "", f"tinyspec: {complaint}\n")
    assert "One day" in prompts.read_text() and list(tmp_path.iterdir()) == [prompts]


def test_standard_input_of_every_reader(command, served, stdin):
    """``-`` stands for it."""
    output = RequestOutput("a", [5], SamplingParams(), [Completion([6], finish_reason="stop")])
    no_trace = "- is not a trace that engine.trace.save wrote"
    for text, arguments, status, told in (
        (output.to_json(), ("generate", "-", "--json"), 2, "line 1"),  # an output is no prompt
        ('{"prompt": "One", "continuation": " day"}', ("score", "--file", "-"), 0, ""),
        ("nonsense", ("audit", "-"), 2, "line 1 is not an output of tinyspec"),
        ("nonsense", ("trace", "-", "-o", "x.svg"), 2, no_trace),
    ):
        stdin(text + "\n")
        found, _, err = command(*arguments)
        assert found == status and told in err


# Ctrl-C while torch is imported: an exception in the middle of it would end the process in C++.
HELD = """
import os, signal, sys, time
from tinyspec.cli.main import main
class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Torch())
"""


def start(*arguments, **how):
    return subprocess.Popen([sys.executable, *arguments], stderr=subprocess.PIPE, **how)


def ended(child):
    """How it ended, and what it said on standard error, but for what libraries say."""
    lines = child.communicate(timeout=200)[1].decode().splitlines()
    told = [line for line in lines if line.startswith("tinyspec") or "Traceback" in line]
    return child.returncode, told


INTERRUPTED = (130, ["tinyspec: interrupted"])


@pytest.mark.parametrize(
    ("load", "end"),
    [
        ("raise SystemExit(main(['score', 'Once', ' upon']))", INTERRUPTED),
        ("import torch", (-2, ["Traceback (most recent call last):"])),
    ],
    ids=["held", "control"],
)
def test_ctrl_c_while_libraries_load(load, end):
    assert ended(start("-c", HELD + load)) == end


@pytest.mark.slow("installation", 20)
@pytest.mark.parametrize("name", ["demo", "doctor"])
def test_ctrl_c_while_it_runs(name, sigint):
    """One line and 130, whatever the command is doing once libraries are loaded."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    child = start("-m", "tinyspec", name, stdout=subprocess.DEVNULL, env=environment)
    with suppress(subprocess.TimeoutExpired):
        child.wait(6)
    child.send_signal(signal.SIGINT)
    assert ended(child) == INTERRUPTED


LONG = ("-m", "tinyspec", "generate", "Once", "One day", "--max-new-tokens", "1500", "--ignore-eos")


@pytest.mark.slow("installation", 8)
def test_text_comes_piece_by_piece_and_ctrl_c_is_one_line(sigint):
    terminal, end = pty.openpty()
    child = start(*LONG, stdout=end)
    os.close(end)
    pieces = [os.read(terminal, 10000) for _ in range(5)]
    assert child.poll() is None and len(b"".join(pieces)) < 500
    child.send_signal(signal.SIGINT)
    assert ended(child) == INTERRUPTED
    os.close(terminal)


@pytest.mark.slow("installation", 8)
def test_a_closed_pipe_is_silent():
    child = start(*LONG, stdout=subprocess.PIPE)
    child.stdout.close()
    assert ended(child) == (141, [])


@pytest.mark.slow("installation", 60)
def test_a_hub_that_does_not_answer():
    """The error names the model, after what the hub's library says of its attempts."""
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    asked = ("-m", "tinyspec", "generate", "x", "--model", "no/such-model")
    status, told = ended(start(*asked, env={**os.environ, **variables}))
    assert status == 2
    assert told[-1].startswith("tinyspec: model='no/such-model' is not allowed")

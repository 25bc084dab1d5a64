"""What once gave a traceback or misled, in commands of every kind: one line that helps."""

import os
import signal
import subprocess
import sys

import pytest

from tinyspec import Completion, RequestOutput, SamplingParams

COMMANDS = {
    "demo": (["demo", "--crowd", "0"], "--crowd=0 is not allowed: an integer of at least 1"),
    "a seed": (["demo", "--seed", "-1"], "--seed=-1 is not allowed: an integer in [0, 2**63)"),
    "doctor": (["doctor", "--reference-rows", "3"], "reference_rows=3 is not allowed: an integer"),
    "audit": (["audit", "nowhere.jsonl"], "tinyspec: nowhere.jsonl: No such file or directory"),
    "diff": (["diff", "-", "-"], "second='-' is not allowed: a file; standard input can be read"),
    "trace": (["trace", "nowhere.json", "-o", "x.svg"], "nowhere.json: No such file or directory"),
    "a folder": (["generate", "--file", "."], "tinyspec: .: Is a directory"),
    "an empty prompt": (["generate", ""], "prompt 1: prompt=[] is not allowed: at least one token"),
    "bytes": (["generate", "a\udcffb"], r"prompt[1]='\udcff' is not allowed: no lone surrogates"),
    "score bytes": (["score", "a\udcffb", "x"], "prompt[1]='\\udcff' is not allowed: no lone"),
    "no tokens": (["score", "x", ""], "continuation=[] is not allowed: at least one token"),
    "half a pair": (["score", "x"], "continuation=None is not allowed: a prompt and its cont"),
    "no command": ([], "the following arguments are required: COMMAND (see tinyspec --help)"),
    "another": (["serv"], "invalid choice: 'serv'"),
}


@pytest.mark.parametrize(("arguments", "complaint"), COMMANDS.values(), ids=COMMANDS)
def test_one_line(command, served, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.chdir(tmp_path)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert complaint in err and err.count("\n") == 1 and err.startswith("tinyspec: ")


def test_a_trace_is_not_written_over_prompts_or_outputs(command, served, tmp_path, monkeypatch):
    """Once both were lost, with exit status 0."""
    monkeypatch.chdir(tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "One day", "max_new_tokens": 2}\n')
    given = ("generate", "--file", prompts, "--output", "outputs.jsonl", "--trace")
    for name, other in (("./prompts.jsonl", "file"), ("outputs.jsonl", "output")):
        status, out, err = command(*given, name)
        assert (status, out) == (2, "")
        complaint = f"--trace='{name}' is not allowed: another file than --{other}"
        assert err == f"tinyspec: {complaint}\n"
    assert "One day" in prompts.read_text() and list(tmp_path.iterdir()) == [prompts]


def test_standard_input_of_every_reader(command, served, stdin):
    """``-`` stands for it."""
    output = RequestOutput("a", [5], SamplingParams(), [Completion([6], finish_reason="stop")])
    stdin(output.to_json() + "\n")
    status, out, _ = command("generate", "-", "--json")
    assert status == 2 and out == "", "an output is no prompt"
    stdin('{"prompt": "One", "continuation": " day"}\n')
    assert command("score", "--file", "-")[0] == 0
    stdin("nonsense\n")
    assert "line 1 is not an output of tinyspec" in command("audit", "-")[2]
    stdin("nonsense\n")
    assert (
        "- is not a trace that engine.trace.save wrote" in command("trace", "-", "-o", "x.svg")[2]
    )


INTERRUPTED = """
import os, signal, time
from tinyspec.cli.common import ends_at_once
signal.signal(signal.SIGINT, signal.default_int_handler)
{before}
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
"""


@pytest.mark.parametrize(
    ("before", "status", "told"),
    [("with ends_at_once():", 130, "tinyspec: interrupted\n"), ("if True:", -2, "Traceback")],
    ids=["held", "control"],
)
def test_ctrl_c_while_libraries_load(before, status, told):
    """An exception in the middle of torch's import would end the process in C++."""
    code = INTERRUPTED.format(before=before)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == status and done.stderr.startswith(told)


@pytest.mark.slow("installation", 30)
@pytest.mark.parametrize("seconds", [0.3, 0.6, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("name", ["demo", "doctor"])
def test_ctrl_c_at_any_time(name, seconds):
    """One line and 130, whatever the command is doing."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tinyspec", name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        child.send_signal(signal.SIGINT)
    lines = child.communicate(timeout=120)[1].decode().splitlines()
    assert child.returncode == 130
    assert [line for line in lines if line.startswith("tinyspec") or "Traceback" in line] == [
        "tinyspec: interrupted"
    ]


def test_the_version_is_one_line(command):
    status, out, _ = command("--version")
    assert status == 0 and out.count("\n") == 1
    for name in ("tinyspec ", "Python ", "torch ", "transformers ", "triton "):
        assert name in out

"""What once gave a traceback or misled, in commands of every kind: one line that helps; and the
command as a process: terminals, pipes and signals."""

import os
import pty
import signal
import subprocess
import sys

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
    def fail(*_):
        raise RuntimeError("something\nelse")

    monkeypatch.setattr(served[0], "follow", fail)
    status, _, err = command("generate", "Once")
    assert status == 2
    assert err == "tinyspec: RuntimeError: something else (--debug shows the traceback)\n"
    with pytest.raises(RuntimeError, match="something"):
        command("generate", "Once", "--debug")


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


CHILD = """
import os, signal, sys, time
from tinyspec.cli.main import main
class Torch:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Torch())
{load}
"""


@pytest.mark.parametrize(
    ("load", "status", "told"),
    [
        ("raise SystemExit(main(['score', 'Once', ' upon']))", 130, "tinyspec: interrupted"),
        ("import torch", -2, "Traceback (most recent call last):"),
    ],
    ids=["held", "control"],
)
def test_ctrl_c_while_libraries_load(load, status, told):
    """An exception in the middle of torch's import would end the process in C++."""
    code = CHILD.format(load=load)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if line.startswith(("tinyspec", "Trace"))]
    assert (done.returncode, lines) == (status, [told])


@pytest.mark.slow("installation", 20)
@pytest.mark.parametrize("name", ["demo", "doctor"])
def test_ctrl_c_while_it_runs(name):
    """One line and 130, whatever the command is doing once libraries are loaded."""
    child = subprocess.Popen(
        [sys.executable, "-m", "tinyspec", name],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    try:
        child.wait(6)
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


LONG = ("generate", "Once", "One day", "--max-new-tokens", "1500", "--ignore-eos")


def start(*arguments, **how):
    command = [sys.executable, "-m", "tinyspec", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, **how)


def told(child):
    """What it said on standard error, but for what libraries say when they are imported."""
    lines = child.communicate(timeout=120)[1].decode().splitlines()
    return [line for line in lines if line.startswith("tinyspec") or "Traceback" in line]


@pytest.mark.slow("installation", 8)
def test_text_comes_piece_by_piece_and_ctrl_c_is_one_line(sigint):
    terminal, end = pty.openpty()
    child = start(*LONG, stdout=end)
    os.close(end)
    pieces = [os.read(terminal, 10000) for _ in range(5)]
    assert child.poll() is None and len(b"".join(pieces)) < 500
    child.send_signal(signal.SIGINT)
    assert told(child) == ["tinyspec: interrupted"] and child.returncode == 130
    os.close(terminal)


@pytest.mark.slow("installation", 8)
def test_a_closed_pipe_is_silent():
    child = start(*LONG, stdout=subprocess.PIPE)
    child.stdout.close()
    assert told(child) == [] and child.returncode == 141


@pytest.mark.slow("installation", 60)
def test_a_hub_that_does_not_answer():
    """The error names the model, after what the hub's library says of its attempts."""
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    child = start("generate", "x", "--model", "no/such-model", env={**os.environ, **variables})
    lines = child.communicate(timeout=200)[1].decode().splitlines()
    assert child.returncode == 2
    assert lines[-1].startswith("tinyspec: model='no/such-model' is not allowed")

"""The command as a process: terminals, pipes and signals."""

import os
import pty
import signal
import subprocess
import sys

import pytest

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
    """The error names the model, after one warning."""
    variables = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9"}
    child = start("generate", "x", "--model", "no/such-model", env={**os.environ, **variables})
    lines = child.communicate(timeout=200)[1].decode().splitlines()
    assert child.returncode == 2
    assert lines[-1].startswith("tinyspec: model='no/such-model' is not allowed")
    assert sum("thrown while requesting" in line or "Retrying" in line for line in lines) <= 1

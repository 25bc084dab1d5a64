"""A server whose answers depend on other requests is caught, whatever else it serves or refuses."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tinyspec.cli.main import main

ALL = {"max_tokens", "temperature", "seed", "logprobs", "return_token_ids", "stream"}


class Server(ThreadingHTTPServer):
    """Answers with random tokens of prompt and seed. fault: what it does wrong. takes: fields."""

    daemon_threads, request_queue_size = True, 64

    def __init__(self, fault="", takes=ALL):
        super().__init__(("127.0.0.1", 0), Handler)
        self.fault, self.takes, self.prompts = fault, takes, set()
        self.running, self.asked, self.lock = 0, 0, threading.Lock()

    def handle_error(self, *_):
        """Clients that went away."""


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["content-length"]))
        with server.lock:
            server.running, server.asked = server.running + 1, server.asked + 1
            number, crowd = server.asked, server.running > 1
        time.sleep(0.01)
        crowd = crowd or server.running > 1
        try:
            self.answer(json.loads(body), number, crowd, server.fault)
        finally:
            with server.lock:
                server.running -= 1

    def answer(self, body, number, crowd, fault):
        prompt, stream = str(body.get("messages") or body["prompt"]), body.get("stream")
        again = prompt in self.server.prompts
        self.server.prompts.add(prompt)
        if refused := body.keys() - self.server.takes - {"model", "messages", "prompt"}:
            return self.reply(400, {"error": f"no {min(refused)}"})
        if fault == "hangs" or (fault == "hangs in a crowd" and crowd):
            time.sleep(5)
        if fault == "interrupt" and number == 40:
            os.kill(os.getpid(), signal.SIGINT)
        if (fault == "busy" and number == 40) or (fault == "fails" and crowd and number % 5 == 0):
            return self.reply(429 if fault == "busy" else 500, {})
        seed = body.get("seed") if body.get("temperature", 1) and fault != "no seed" else None
        source = random.Random("" if fault == "one answer" else f"{prompt} {seed}")
        ids = [source.randrange(900) for _ in range(body.get("max_tokens", 16))]
        digits = [-source.random() for _ in ids]
        ids[5] += {"text": crowd, "warm": again, "streamed": bool(stream)}.get(fault, False)
        digits[5] -= 1e-15 * (fault == "digits" and crowd)
        parts = [slice(n, n + 1) for n in range(len(ids))] if stream else [slice(None)]
        choices = [choice(body, ids[part], digits[part]) for part in parts]
        choices[-1]["finish_reason"] = "length"
        whole = {"system_fingerprint": "fp_b" if fault == "fingerprint" and number > 30 else "fp_a"}
        chunks = [whole | {"choices": [one]} for one in choices]
        if not stream:
            return self.reply(200, chunks[0])
        events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in [*chunks, {"choices": []}])
        return self.reply(200, f"{events}data: [DONE]\n\n", "text/event-stream; charset=utf-8")

    def reply(self, status, content, kind="application/json"):
        data = (content if isinstance(content, str) else json.dumps(content)).encode()
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def choice(body, ids, digits):
    """As OpenAI's two endpoints have it, with vLLM's ids of tokens."""
    tokens = [f" word{token}" for token in ids]
    pairs = zip(tokens, digits, strict=True)
    if "messages" in body:
        message = {"content": "".join(tokens)}
        found = {"delta" if body.get("stream") else "message": message}
        logprobs = {"content": [{"token": token, "logprob": value} for token, value in pairs]}
    else:
        found, logprobs = {"text": "".join(tokens)}, {"tokens": tokens, "token_logprobs": digits}
    given = {"logprobs": logprobs, "return_token_ids": ids}
    names = {"logprobs": "logprobs", "return_token_ids": "token_ids"}
    return found | {names[name]: value for name, value in given.items() if body.get(name)}


@pytest.fixture
def probe(tmp_path, capsys):
    """Probes a server, in small crowds: exit status, what is printed, JSON."""
    servers = []

    def run(*faults, options=("--crowds", "4", "--endpoints", "chat"), **settings):
        servers.append(Server(*faults, **settings))
        threading.Thread(target=servers[-1].serve_forever, args=(0.01,), daemon=True).start()
        url, file = f"http://127.0.0.1:{servers[-1].server_port}", tmp_path / "report.json"
        status = main(["probe", url, "--json", str(file), *options])
        printed = capsys.readouterr().out
        print(printed)
        return status, printed, json.loads(file.read_text())

    yield run
    for server in servers:
        server.shutdown()


def test_a_deterministic_server(probe):
    status, printed, report = probe(options=("--crowds", "4", "8"))
    assert status == 0 and printed.splitlines()[-1].startswith("EQUAL")
    modes = {"chat, greedy", "chat, seeded", "completions, greedy", "completions, seeded"}
    for number, row in zip((4, *[8, 4, 4], *[16, 8, 8]), report["rows"].values(), strict=True):
        assert row == {mode: {"compared": number, "equal": number} for mode in modes}
    assert report["given"]["token_ids"] == report["given"]["logprobs"] == report["given"]["text"]
    assert list(report["fingerprints"]) == ["fp_a"] and report["complete"]
    assert len(report["controls"]) == 6 and "6 of 6" in printed


@pytest.mark.parametrize("fault", ["text", "digits", "warm", "streamed"])
def test_what_depends_on_others_is_caught(probe, fault):
    """Also where one fingerprint is claimed, and where only the last digit differs."""
    status, printed, report = probe(fault)
    assert status == 1 and printed.splitlines()[-1].startswith("DIFFERENT")
    found = report["differences"][0]
    assert found["found"].startswith("token 5 (")
    assert ("text" in found["found"].splitlines()[0]) == (fault != "digits")
    assert found["alone"] != found["other"] and f"alone: {found['alone']['text'][9:12]!r}"[:-1]
    alone = report["rows"]["1 of the same request"]["chat, greedy"]
    assert alone["equal"] == {"warm": 0, "streamed": 3}.get(fault, 4)


@pytest.mark.parametrize("fault", ["no seed", "one answer"])
def test_controls(probe, fault):
    """Who answers all the same, or ignores the seed, proves nothing by equal answers."""
    status, printed, report = probe(fault)
    same = {name.split("another ")[1] for name, differ in report["controls"].items() if not differ}
    assert same == {"no seed": {"seed"}, "one answer": {"prompt", "seed"}}[fault]
    assert status == 2 and printed.splitlines()[-1].startswith("CONTROL FAILED: ")


@pytest.mark.parametrize("field", sorted(ALL))
def test_what_is_refused_is_left_out(probe, field):
    status, printed, report = probe(takes=ALL - {field} | {"max_completion_tokens"})
    assert status == 0 and f"note: chat, {field}: HTTP 400" in printed
    modes = set(report["rows"]["1 of the same request"])
    assert ("chat, greedy" in modes) == (field != "temperature")
    assert ("chat, seeded" in modes) == (field != "seed")


def test_failures_are_counted(probe):
    status, printed, report = probe("fails")
    assert (
        status == 0 and report["failures"]["HTTP 500: {}"] > 2 and "failures: HTTP 500" in printed
    )
    status, _, report = probe("busy")
    assert status == 0 and report["failures"] == {"HTTP 429, sent again": 1}
    status, printed, report = probe("fingerprint")
    assert status == 0 and list(report["fingerprints"]) == ["fp_a", "fp_b"]


@pytest.mark.parametrize("fault", ["hangs", "hangs in a crowd"])
def test_a_server_that_hangs(probe, fault):
    began = time.monotonic()
    status, printed, _ = probe(fault, options=("--timeout", "0.3", "--crowds", "4"))
    assert status == 2 and "NOT TRIED" in printed and "no answer in 0.3 s" in printed
    assert time.monotonic() - began < 10


def test_ctrl_c(probe):
    """What was found before is told."""
    status, printed, report = probe("interrupt")
    assert status == 130 and not report["complete"] and report["rows"] and "NOT TRIED" in printed


def test_bad_input(capsys):
    for options in (["--crowds", "1"], ["--extra-body", "[1]"], ["--json", "/no/folder/file"], []):
        assert main(["probe", "http://127.0.0.1:9", *options]) == 2
        assert capsys.readouterr().err.startswith("tinyspec: ")


def test_no_torch():
    child = "import sys, tinyspec.serve.probe; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", child], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr

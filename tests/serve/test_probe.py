"""A server whose answers depend on other requests is caught, whatever else it serves or refuses."""

import asyncio
import json
import os
import random
import signal
import socket
import threading
import time

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.support.budget import first
from tinyspec.cli.main import main

ALL = {"max_tokens", "temperature", "seed", "logprobs", "return_token_ids", "stream"}


class Fake:
    """Answers with random tokens of prompt and seed. fault: what it does wrong. takes: fields."""

    def __init__(self, fault="", takes=ALL):
        self.fault, self.takes, self.prompts, self.running, self.asked = fault, takes, set(), 0, 0

    async def models(self, _):
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def post(self, request):
        body = await request.json()
        self.running, self.asked = self.running + 1, self.asked + 1
        number, before = self.asked, self.running
        await asyncio.sleep(0.01)
        crowd = max(before, self.running) > 1
        if self.fault == "hangs" or (self.fault == "hangs in a crowd" and crowd):
            await asyncio.sleep(1)
        self.running -= 1
        return self.answer(body, number, crowd)

    def answer(self, body, number, crowd):
        fault, stream = self.fault, body.get("stream")
        prompt = str(body.get("messages") or body["prompt"])
        again, _ = prompt in self.prompts, self.prompts.add(prompt)
        if refused := body.keys() - self.takes - {"model", "messages", "prompt"}:
            return JSONResponse({"error": f"no {min(refused)}"}, 400)
        if fault == "interrupt" and number == 40:
            os.kill(os.getpid(), signal.SIGINT)
        if (fault == "busy" and number == 40) or (fault == "fails" and crowd and number % 5 == 0):
            return JSONResponse({}, 429 if fault == "busy" else 500)
        seed = body.get("seed") if body.get("temperature", 1) and fault != "no seed" else None
        source = random.Random("" if fault == "one answer" else f"{prompt} {seed}")
        ids = [source.randrange(900) for _ in range(body.get("max_tokens", 16))]
        digits = [-source.random() for _ in ids]
        ids[5] += {"text": crowd, "warm": again, "streamed": bool(stream)}.get(fault, False)
        digits[5] -= 1e-15 * (fault == "digits" and crowd)
        parts = [slice(n, n + 1) for n in range(len(ids))] if stream else [slice(None)]
        choices = [choice(body, ids[part], digits[part]) for part in parts]
        choices[-1]["finish_reason"] = "length"
        name = "fp_b" if fault == "fingerprint" and number > 30 else "fp_a"
        chunks = [{"system_fingerprint": name, "choices": [one]} for one in choices]
        if not stream:
            return JSONResponse(chunks[0])
        events = [json.dumps(chunk) for chunk in [*chunks, {"choices": []}]]
        text = "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"])
        return Response(text, media_type="text/event-stream")


def choice(body, ids, digits):
    """As OpenAI's two endpoints have it, with vLLM's ids of tokens."""
    tokens = [f" word{token}" for token in ids]
    text = "".join(tokens)
    found, logprobs = {"text": text}, {"tokens": tokens, "token_logprobs": digits}
    if "messages" in body:
        pairs = zip(tokens, digits, strict=True)
        found = {"delta" if body.get("stream") else "message": {"content": text}}
        logprobs = {"content": [{"token": token, "logprob": value} for token, value in pairs]}
    found |= {"logprobs": logprobs} if body.get("logprobs") else {}
    return found | ({"token_ids": ids} if body.get("return_token_ids") else {})


@pytest.fixture
def probe(tmp_path, capsys):
    """Probes a server, in small crowds: exit status, what is printed, JSON."""
    servers = []

    def run(fault="", options=("--crowds", "4", "--endpoints", "chat"), takes=ALL):
        fake, file = Fake(fault, takes), tmp_path / "r"
        door = socket.create_server(("127.0.0.1", 0))
        posts = [Route(f"/v1/{n}completions", fake.post, methods=["POST"]) for n in ("", "chat/")]
        app = Starlette(routes=[Route("/v1/models", fake.models), *posts])
        servers.append(uvicorn.Server(uvicorn.Config(app, log_level="error")))
        threading.Thread(target=servers[-1].run, kwargs={"sockets": [door]}, daemon=True).start()
        url = f"http://127.0.0.1:{door.getsockname()[1]}"
        status = main(["probe", url, "--json", str(file), *options])
        return status, capsys.readouterr().out, json.loads(file.read_text())

    yield run
    for server in servers:
        server.should_exit = True


def test_a_deterministic_server(probe):
    status, printed, report = probe(options=("--crowds", "4", "8"))
    assert status == 0 and printed.splitlines()[-1].startswith("EQUAL") and report["complete"]
    modes = {"chat, greedy", "chat, seeded", "completions, greedy", "completions, seeded"}
    for number, row in zip((4, *[8, 4, 4], *[16, 8, 8]), report["rows"].values(), strict=True):
        assert row == {mode: {"compared": number, "equal": number} for mode in modes}
    assert report["given"]["token_ids"] == report["given"]["logprobs"] == report["given"]["text"]
    assert list(report["fingerprints"]) == ["fp_a"] and "controls: 6 of 6" in printed


@pytest.mark.parametrize("fault", ["text", "digits", "warm", "streamed"])
def test_what_depends_on_others_is_caught(probe, fault):
    """Also where one fingerprint is claimed, and where only the last digit differs."""
    status, printed, report = probe(fault)
    assert status == 1 and printed.splitlines()[-1].startswith("DIFFERENT")
    found = report["differences"][0]
    lines = [line.partition(":")[0].strip() for line in found["found"].splitlines()]
    places = ["token_ids[5]", "logprobs[5]"]
    assert lines[-2:] == (places if fault != "digits" else places[1:]) and found["found"] in printed
    assert len(lines) == (1 if fault == "digits" else 3)
    alone = report["rows"]["1 of the same request"]["chat, greedy"]
    assert alone["equal"] == {"warm": 0, "streamed": 3}.get(fault, 4)


@pytest.mark.parametrize("fault", ["no seed", "one answer"])
def test_controls(probe, fault):
    """Equal answers prove nothing where the seed is ignored, or all answers are the same."""
    status, printed, report = probe(fault)
    same = {name.split("another ")[1] for name, differ in report["controls"].items() if not differ}
    assert same == {"no seed": {"seed"}, "one answer": {"prompt", "seed"}}[fault]
    assert status == 2 and printed.splitlines()[-1].startswith("CONTROL FAILED: ")


LEFT_OUT = {"temperature": "chat, greedy", "seed": "chat, seeded", "all others": None}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_what_is_refused_is_left_out(probe, what):
    fields = ALL - {"temperature", "seed"} if what == "all others" else {what}
    status, printed, report = probe(takes=ALL - fields | {"max_completion_tokens"})
    assert status == 0
    assert all(f"note: chat, {field}: HTTP 400" in printed for field in fields)
    assert LEFT_OUT[what] not in report["rows"]["1 of the same request"]


def test_what_goes_wrong_is_told(probe, sigint):
    reports = {}
    for fault in ("fails", "busy", "fingerprint", "interrupt"):
        status, printed, reports[fault] = probe(fault)
        assert status == (130 if fault == "interrupt" else 0)
    assert reports["fails"]["failures"]["HTTP 500: {}"] > 2
    assert reports["busy"]["failures"] == {"HTTP 429, sent again": 1}
    assert list(reports["fingerprint"]["fingerprints"]) == ["fp_a", "fp_b"]
    interrupted = reports["interrupt"]
    assert interrupted["rows"] and not interrupted["complete"] and "NOT TRIED" in printed


@pytest.mark.parametrize("fault", ["hangs", "hangs in a crowd"])
def test_a_server_that_hangs(probe, fault):
    began = time.monotonic()
    status, printed, _ = probe(fault, options=("--timeout", "0.3", "--crowds", "4"))
    assert status == 2 and "NOT TRIED" in printed and "no answer in 0.3 s" in printed
    assert time.monotonic() - began < 20


def test_bad_input(capsys):
    for options in (["--crowds", "1"], ["--extra-body", "[1]"], ["--json", "/no/folder/file"], []):
        assert main(["probe", "http://127.0.0.1:9", *options]) == 2
        assert capsys.readouterr().err.startswith("tinyspec: ")


@pytest.mark.parametrize("deterministic", first(1, [True, False], 8))
def test_tinyspec(served, capsys, deterministic):
    """Deterministic requests are equal; where the promise is switched off the crowd is seen."""
    extra = json.dumps({"deterministic": deterministic})
    crowd = "2" if deterministic else "4"
    options = ("--crowds", crowd, "--endpoints", "completions", "--max-tokens", "6")
    status = main(["probe", served.url, *options, "--extra-body", extra])
    assert status == (not deterministic), capsys.readouterr().out

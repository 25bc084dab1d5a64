"""Clients that go away, ask too much, send too much or without the key; and the end."""

import asyncio
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.serve.test_bodies import said as whole
from tests.serve.test_bodies import streamed
from tests.support import serving
from tests.support.patience import PATIENCE
from tests.support.serving import CHAT, COMPLETIONS, MODEL, PROMPT, RESPONSES, events, running
from tests.support.tiny import tiny
from tinyspec import AsyncEngine
from tinyspec.serve.app import Server

LONG = {"prompt": PROMPT, "max_tokens": 1900, "ignore_eos": True}
LONG_ONES = {
    COMPLETIONS: LONG,
    CHAT: {"messages": serving.MESSAGES, "max_tokens": 1900, "ignore_eos": True},
    RESPONSES: {"input": PROMPT, "max_output_tokens": 1900, "ignore_eos": True},
}


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def head(path, length):
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", length]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def posted(path, **body):
    """The bytes of a request."""
    content = json.dumps({"model": MODEL, **body}).encode()
    return head(path, f"Content-Length: {len(content)}") + content


@pytest.mark.parametrize("deterministic", [False, True], ids=["plain", "deterministic"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("path", LONG_ONES)
def test_a_client_that_goes_away(served, path, stream, deterministic):
    """Its request is gone long before its end, with its pages."""
    before = served.engine.stats().committed
    given = {"stream": stream, "deterministic": deterministic, **LONG_ONES[path]}
    with connected(served.url) as client:
        client.sendall(posted(path, **given))
        serving.wait_until(lambda: served.engine.stats().committed > before)
        assert served.engine.tracker.requests
    served.settled()
    assert served.engine.stats().committed - before < 1000
    assert not served.engine.pool.num_held


def test_floods_are_refused(bundled):
    """Beyond what runs and waits requests get 429 with a time to come again; the others end."""
    with running(bundled, {"max_requests": 2, "max_waiting": 2}) as server:
        with ThreadPoolExecutor(24) as pool:
            asked = LONG | {"max_tokens": 60}
            found = list(pool.map(lambda _: server.post(COMPLETIONS, **asked), range(24)))
        statuses = [response.status_code for response in found]
        assert set(statuses) == {200, 429} and statuses.count(200) >= 4
        refused = found[statuses.index(429)]
        assert refused.headers["Retry-After"] == "1"
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert server.post(COMPLETIONS, **asked).status_code == 200
        server.settled()


def test_a_request_that_takes_too_long(bundled):
    with running(bundled, timeout=0.2) as server:
        assert server.post(COMPLETIONS, **LONG).status_code == 504
        streamed = server.post(COMPLETIONS, **LONG, stream=True)
        assert streamed.text.rstrip().endswith("}}") and "longer than" in streamed.text
        *begun, last = server.client().responses.create(
            model=MODEL, input=PROMPT, extra_body={"ignore_eos": True}, stream=True
        )
        assert (last.type, last.sequence_number) == ("response.failed", len(begun))
        assert last.response.status == "failed" and "longer than" in last.response.error.message
        server.settled()


def test_long_texts(bundled, monkeypatch):
    """One that cannot fit is not read; while one is read that may, its time is counted, and short
    ones are answered."""
    text = PROMPT * 200_000
    with running(bundled) as server:
        assert "characters" in server.post(COMPLETIONS, prompt=text).json()["error"]["message"]
    # As if it could be one token.
    monkeypatch.setattr(bundled.tokenizer, "get_vocab", lambda: {text: 0})
    with running(bundled, timeout=0.3) as server, ThreadPoolExecutor(2) as pool:
        long = [pool.submit(server.post, COMPLETIONS, prompt=text) for _ in range(2)]
        wait(long, return_when=FIRST_COMPLETED)
        assert server.post(COMPLETIONS, prompt=PROMPT, max_tokens=1).status_code == 200
        assert {one.result().status_code for one in long} == {504}


WRONG_KEYS = ["", "Bearer", "secret"]
WRONG_KEYS += [f"Bearer {word}" for word in ("secre", "secret2", "Secret", "\xe9")]


def test_the_key(bundled):
    with running(bundled, api_key="secret") as server:
        asked = f"{server.url}/v1/models"
        assert httpx.get(f"{server.url}/health").status_code == 200
        for key in WRONG_KEYS:
            refused = httpx.get(asked, headers={"Authorization": key.encode("latin-1")})
            assert refused.status_code == 401
            assert refused.json()["error"]["code"] == "invalid_api_key"
        for scheme in ("bearer", "BEARER"):
            headers = {"Authorization": f"{scheme} secret"}
            assert httpx.get(asked, headers=headers).status_code == 200
        assert server.client(api_key="secret").models.list().data[0].id == MODEL


def test_bodies_are_bounded(bundled):
    """One that is too large, says so or not, or never ends."""
    with running(bundled, bounds=(10_000, 0.5)) as server:
        assert server.post(COMPLETIONS, prompt="a " * 20_000).status_code == 413
        chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
        with connected(server.url) as client:
            client.sendall(head(COMPLETIONS, "Transfer-Encoding: chunked") + chunk * 4)
            assert b" 413 " in client.recv(100)
        began = time.monotonic()
        for body in (b"", b'{"prompt": '):
            with connected(server.url) as client:
                client.sendall(head(COMPLETIONS, "Content-Length: 100") + body)
                assert b" 408 " in client.recv(100)
        assert time.monotonic() - began >= 1.0
        assert server.post(COMPLETIONS, prompt=PROMPT, max_tokens=1).status_code == 200


def test_slow_readers_hold_up_nobody(served):
    """A stream that is not read goes on; others get their answers meanwhile."""
    with connected(served.url) as client:
        client.sendall(posted(COMPLETIONS, stream=True, **LONG))
        assert b" 200 " in client.recv(100)
        assert served.post(COMPLETIONS, prompt=PROMPT, max_tokens=3).status_code == 200
    served.settled()


def test_the_end_lets_requests_finish(bundled):
    """What runs is answered; afterwards nobody is let in."""
    with ThreadPoolExecutor(1) as pool, running(bundled) as server:
        asked = pool.submit(server.post, COMPLETIONS, **LONG | {"max_tokens": 100})
        serving.wait_until(lambda: bundled.tracker.requests)
    assert asked.result().status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_what_no_server_is_made_of(bundled):
    with serving.storyteller(num_pages=1) as small:
        for engine, settings, complaint in (
            (bundled, {"timeout": 0}, "timeout=0 is not allowed"),
            (tiny(), {}, "tokenizer"),
            (small, {}, "what the page pool holds"),
        ):
            shared = AsyncEngine(engine)
            with pytest.raises(ValueError, match=complaint):
                Server(shared, MODEL, **settings)
            asyncio.run(shared.close())


@pytest.mark.slow("server", 30)
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c(times, sigint, tmp_path):
    """Once: what runs is answered. Twice: the process ends at once. A server that answers has
    proven the reference's passes, with ``--warm-up`` the others, too."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tinyspec", "serve", "--port", str(port), "--device", "cpu"]
    command.append("--warm-up" if times == 1 else "--trace")
    environment = {**os.environ, "TINYSPEC_API_KEY": "secret", "HF_HOME": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment)
    url = f"http://127.0.0.1:{port}"

    def answers():
        assert process.poll() is None, process.stderr.read()
        try:
            return httpx.get(f"{url}/health").status_code == 200
        except httpx.TransportError:
            return False

    try:
        serving.wait_until(answers)
        (proven,) = (json.loads(path.read_text()) for path in tmp_path.rglob("*.json"))
        assert (len(proven["results"]["buckets"]) > 1) == (times == 1)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        assert ("key chat trace" in httpx.get(url).text) == (times == 2)
        asked = {"url": f"{url}{COMPLETIONS}", "headers": {"Authorization": "Bearer secret"}}
        with httpx.stream("POST", **asked, json={"model": MODEL, **LONG, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            if times == 2:
                time.sleep(0.3)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
            else:
                assert list(lines)[-2:] == ["data: [DONE]", ""]
                assert process.wait(PATIENCE) == 130
    finally:
        process.kill()


# Two hundred clients at once, for minutes: streams and whole answers, random disconnects, slow
# readers, malformed bodies, floods past the limit. Every deterministic answer is that of its
# request alone, nothing is lost, memory is flat.

SECONDS, CLIENTS, KINDS = 120, 200, 24
LIMITS = {"max_requests": 60, "max_waiting": 60}
PAGE = 4096


def asked(n):
    body = {"model": MODEL, "seed": n, "deterministic": True, "stream": n % 2 == 0}
    messages = [{"role": "user", "content": f"Story {n}."}]
    path, own = (
        (COMPLETIONS, {"prompt": "Once upon " * (1 + n % 5), "max_tokens": 20}),
        (CHAT, {"messages": messages, "max_tokens": 20, "stop": " named"}),
        (RESPONSES, {"input": f"Tell {n}.", "max_output_tokens": 20}),
    )[n % 3]
    return path, body | own


def said(response):
    """What an answer tells, streamed or not."""
    told = events(response)
    return str(streamed(told) if told else whole(response.json()))


async def one_client(http, seed, solo, until, counts):
    rng = random.Random(seed)
    while time.monotonic() < until:
        n, what = rng.randrange(KINDS), rng.random()
        path, body = asked(n)
        if what < 0.15:
            with suppress(TimeoutError):
                await asyncio.wait_for(http.post(path, json=body), rng.random())
            counts["gone"] += 1
        elif what < 0.25:
            async with http.stream("POST", path, json=body) as stream:
                async for _ in stream.aiter_raw():
                    await asyncio.sleep(rng.random() * 0.3)
                    if rng.random() < 0.3:
                        break
            counts["slow"] += 1
        elif what < 0.3:
            found = await http.post(path, content=b'{"model": "' + rng.randbytes(20))
            assert found.status_code == 400
            counts["malformed"] += 1
        else:
            found = await http.post(path, json=body)
            counts[found.status_code] += 1
            if found.status_code == 429:
                await asyncio.sleep(rng.random())
                continue
            assert found.status_code == 200 and said(found) == solo[n]


@pytest.mark.slow("server", SECONDS + 20)
def test_two_hundred_clients(request):
    minutes = request.config.getoption("--soak-minutes")
    length = SECONDS if minutes is None else 60 * minutes
    counts, sizes = Counter(), []

    async def main(url):
        limits = httpx.Limits(max_connections=CLIENTS)
        headers = {"Content-Type": "application/json"}
        how = {"base_url": url, "timeout": PATIENCE, "limits": limits, "headers": headers}
        async with httpx.AsyncClient(**how) as http:
            solo = [said(await http.post(p, json=b)) for p, b in map(asked, range(KINDS))]
            assert len(set(solo)) > KINDS / 2, "control: another request has another answer"
            until = time.monotonic() + length
            clients = [one_client(http, n, solo, until, counts) for n in range(CLIENTS)]
            await asyncio.gather(*clients, watch(until))

    async def watch(until):
        while time.monotonic() < until:
            await asyncio.sleep(length / 12)
            gc.collect()
            sizes.append(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE)

    with serving.storyteller(num_pages=200) as engine, running(engine, LIMITS) as server:
        asyncio.run(main(server.url))
        server.settled()
        assert engine.pool.num_held == 0 and not engine.tracker.requests
        text = httpx.get(f"{server.url}/metrics").text
    print("\n", counts, sizes)
    assert f'num_requests_waiting{{model_name="{MODEL}"}} 0.0' in text
    assert counts[200] > CLIENTS and counts[429] and counts["gone"] and counts["slow"]
    assert max(sizes[-3:]) - max(sizes[3:6]) < 60e6

"""Two hundred clients at once, for minutes: streams and whole answers, random disconnects, slow
readers, malformed bodies, floods past the limit. Every deterministic answer is that of its request
alone, nothing is lost, memory is flat.
"""

import asyncio
import gc
import json
import random
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.support.patience import PATIENCE
from tests.support.serving import CHAT, COMPLETIONS, MODEL, RESPONSES, running, storyteller

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
    """The text of an answer, streamed or not."""
    lines = response.text.split("\n")
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    data = data or [response.json()]
    assert not any(one.get("error") for one in data), data[-1]
    if "output" in data[0]:
        return data[0]["output"][0]["content"][0]["text"]
    if "type" in data[0]:
        return "".join(one.get("delta", "") for one in data)
    choices = [choice for one in data for choice in one["choices"]]
    parts = [choice.get("delta") or choice.get("message") or choice for choice in choices]
    return "".join(part.get("content") or part.get("text") or "" for part in parts)


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

    with storyteller(num_pages=200) as engine, running(engine, LIMITS) as server:
        asyncio.run(main(server.url))
        server.settled()
        assert engine.pool.num_held == 0 and not engine.tracker.requests
        text = httpx.get(f"{server.url}/metrics").text
    print("\n", counts, sizes)
    assert f'num_requests_waiting{{model_name="{MODEL}"}} 0.0' in text
    assert counts[200] > CLIENTS and counts[429] and counts["gone"] and counts["slow"]
    assert max(sizes[-3:]) - max(sizes[3:6]) < 60e6

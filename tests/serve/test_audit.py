"""A response is what this engine gives again, and one that was changed is not."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from operator import getitem

import httpx
import pytest

from tests.support.serving import CHAT, COMPLETIONS, MESSAGES, MODEL, PROMPT, RESPONSES, running

OWN = {"model": MODEL, "deterministic": True, "return_token_ids": True}
TOPS = {"logprobs": True, "top_logprobs": 2}
REQUESTS = {
    "chat": (CHAT, {"messages": MESSAGES, "n": 2, "max_tokens": 20, **TOPS}),
    "completions": (
        COMPLETIONS,
        {"prompt": [PROMPT, "One"], "n": 2, "echo": True, "logprobs": 1, "seed": 1},
    ),
    "stopped": (COMPLETIONS, {"prompt": "Once", "stop": " named", "max_tokens": 60, "seed": 4}),
    "greedy": (CHAT, {"messages": MESSAGES, "temperature": 0}),
    "responses": (RESPONSES, {"input": PROMPT, "instructions": "Tell a story."}),
}


def places(value):
    """Every container of a response, and every key of it, but for what is not compared."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in pairs:
        if key in ("id", "created", "created_at", "completed_at") or "details" in str(key):
            continue
        if isinstance(inner, (dict, list)) and inner:
            yield from ((key, *rest) for rest in places(inner))
        elif inner is not None and inner != [] and inner != {}:
            yield (key,)


def changed(response, path):
    """A copy with another value there."""
    response = deepcopy(response)
    *way, last = path
    inner = reduce(getitem, way, response)
    value = inner[last]
    if isinstance(value, (bool, str)):
        inner[last] = not value if isinstance(value, bool) else value + "x"
    else:  # by one token, or one bit
        inner[last] = value + 1 if isinstance(value, int) else value * (1 + 2**-23) or 1.0
    return response


@pytest.mark.parametrize("kind", list(REQUESTS))
def test_a_response(served, kind):
    path, own = REQUESTS[kind]
    request = {**OWN, **own}
    response = served.post(path, **request).json()

    def verdict(response):
        found = served.post_raw("/v1/audit", {"request": request, "response": response})
        return found.json().get("verdict", found.status_code)

    assert verdict(response) == "same"
    every = list(places(response))
    assert len(every) > 15
    step = max(1, len(every) // 6)
    for place in {*every[::step], ("model",)} - {("seed",)}:
        found = verdict(changed(response, place))
        other = place == ("system_fingerprint",)
        assert found in ("differs", 400, *["not comparable"] * other), place
    holder = [] if kind == "responses" else ["choices", 0]
    other = changed(response, [*holder, "token_ids", 5])
    found = served.post_raw("/v1/audit", {"request": request, "response": other}).json()
    assert found["reason"].startswith("choices[0].token_ids[5]: " if holder else "token_ids[5]: ")


def test_what_cannot_be_compared(served):
    def audited(request, response):
        return served.post_raw("/v1/audit", {"request": request, "response": response})

    request = {**OWN, "prompt": PROMPT}
    plain = {**request, "deterministic": False}
    found = audited(plain, served.post(COMPLETIONS, **plain).json()).json()
    assert found["verdict"] == "not comparable" and "deterministic" in found["reason"]
    without = served.post(COMPLETIONS, **request | {"return_token_ids": False}).json()
    assert "return_token_ids" in audited(request, without).json()["error"]["message"]
    bad = [{"token_ids": ids} for ids in ([None], [1.0], ["1"], [True], [-1], [10**6], 5)]
    for choices in (without["choices"], [None], [1], 5, None, "x", {}, *([one] for one in bad)):
        found = audited(request, {**without, "choices": choices})
        assert found.status_code == 400 and found.json()["error"]["param"] == "response"


def test_within_every_limit(bundled):
    """Audits wait as requests do, and end with their clients."""
    request = {**OWN, "prompt": PROMPT, "max_tokens": 600, "ignore_eos": True}
    with running(bundled, {"max_requests": 1, "max_waiting": 1}) as server:
        body = {"request": request, "response": server.post(COMPLETIONS, **request).json()}

        def status(_):
            with suppress(httpx.ReadTimeout):
                return httpx.post(f"{server.url}/v1/audit", json=body, timeout=0.3).status_code

        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(status, range(8)))
        assert set(found) <= {200, 429, None} and found.count(429) >= 4
        server.settled()

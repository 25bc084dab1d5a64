"""The page at /: what it is served with, and what a browser makes of it."""

import base64
import hashlib
import json
import re

import httpx
import pytest

from tests.support.browser import CHROMIUM, Browser
from tests.support.serving import CHAT, MESSAGES, running, storyteller, wait_until
from tinyspec.cli.serve import TRACED

ASKED = {"messages": MESSAGES, "seed": 7, "max_tokens": 40, "deterministic": True}
SIZES = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
DRAWN = {**TRACED, "draft_window": 3}
CROWD, DRAW = "Ask again in a crowd of 16", "Draw its last verify"


@pytest.fixture(scope="module")
def traced():
    with storyteller(num_pages=100, **DRAWN) as engine, running(engine) as server:
        yield server
        server.settled()


def facts(url):
    return re.search(r'<meta name="server" content="(.*)">', httpx.get(f"{url}/").text)[1].split()


def test_the_page(served):
    """It is HTML that may load nothing but itself, and no part of the API."""
    found = httpx.get(f"{served.url}/")
    assert found.status_code == 200
    assert found.headers["Content-Type"] == "text/html; charset=utf-8"
    policy = dict(p.split(" ", 1) for p in found.headers["Content-Security-Policy"].split("; "))
    assert policy.pop("default-src") == "'none'" and policy.pop("connect-src") == "'self'"
    for name in ("script", "style"):
        (part,) = re.findall(f"<{name}>(.*?)</{name}>", found.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()
        assert policy.pop(f"{name}-src") == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'", "data:"}
    assert found.headers["X-Content-Type-Options"] == "nosniff"
    head = httpx.head(f"{served.url}/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["Content-Length"] == found.headers["Content-Length"]
    assert httpx.post(f"{served.url}/", json={}).status_code == 405
    assert "/" not in httpx.get(f"{served.url}/openapi.json").json()["paths"]
    assert httpx.get(f"{served.url}/docs").status_code == 200


def test_what_the_page_knows(bundled, monkeypatch, traced):
    """Whether there is a key, which the page itself needs not, a chat template, and a trace."""
    with running(bundled, api_key="secret") as server:
        assert facts(server.url) == ["key", "chat"]
        for path in ("v1/models", "v1/verifies/cmpl_1", "docs"):
            assert httpx.get(f"{server.url}/{path}").status_code == 401
    monkeypatch.setattr(bundled.tokenizer, "chat_template", None)
    with running(bundled) as server:
        assert facts(server.url) == []
    assert facts(traced.url) == ["chat", "trace"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_verifies_that_are_drawn(served, traced, stream):
    """By an answer's id, which nobody knows but who asked; only of a server that keeps a trace."""
    said = traced.post(CHAT, **ASKED, stream=stream, return_token_ids=True)
    first = json.loads(said.text.split("\n")[0].removeprefix("data: "))
    (drawn,) = httpx.get(f"{traced.url}/v1/verifies/{first['id']}").json()
    assert list(drawn["stages"]) == ["Prefill", "Decode", "Verify", "No Rollback"]
    known, *tokens = drawn["stages"]["No Rollback"][0]
    assert known["colour"] == "canonical" and tokens[-1]["colour"] == "bonus"
    text = "".join(cell["text"].split(" ", 1)[1] for cell in tokens).replace("\u00b7", " ")
    whole = traced.post(CHAT, **ASKED).json()["choices"][0]["message"]["content"]
    assert text in whole
    assert httpx.get(f"{traced.url}/v1/verifies/chatcmpl_1").json() == []
    refused = httpx.get(f"{served.url}/v1/verifies/{first['id']}")
    assert refused.status_code == 404 and "--trace" in refused.json()["error"]["message"]


class Lies:
    """A drafter that is wrong in the first half of an answer, and proposes nothing behind it."""

    def propose(self, sequences, n):
        return [[5] if len(tokens) < 30 else [] for tokens in sequences]


def test_the_last_rollback_is_drawn_too():
    """Behind the last verify, where that had none."""
    with storyteller(**DRAWN, drafter=Lies()) as engine, running(engine) as server:
        said = server.post(CHAT, **ASKED).json()
        drawn = httpx.get(f"{server.url}/v1/verifies/{said['id']}").json()
    assert [list(one["stages"])[-1] for one in drawn] == ["No Rollback", "Rollback"]
    for one, rolled_back in zip(drawn, (False, True), strict=True):
        colours = [cell["colour"] for cell in one["stages"]["Verify"][0]]
        assert ("rejected" in colours) == rolled_back


# In Chromium, where it is installed.


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    found = Browser(tmp_path_factory.mktemp("chromium"))
    yield found
    found.close()


def asked(page, text, **settings):
    """Type a message and send it; its answer's text."""
    for name, value in settings.items():
        page.type(str(value), f"#{name}")
    page.wait("!running")
    page.type(text)
    page.press("Enter")
    page.wait("!running && document.querySelector('.turn:last-child .actions button')")
    return page.js(
        "document.querySelector('.turn:last-child > .text:not(.asked, [hidden])').innerText"
    )


def crowded(page):
    """The verdict on the last answer and the same in a crowd, and both texts."""
    page.click(CROWD)
    page.wait("!running && document.querySelector('.turn:last-child .verdict, .turn .error')")
    texts = "[...document.querySelectorAll('.turn:last-child .pair .text')].map(e => e.innerText)"
    return page.js("document.querySelector('.turn:last-child .verdict').innerText"), page.js(texts)


@pytest.mark.slow("server", 10)
@pytest.mark.parametrize("width, scheme", SIZES)
def test_a_chat(browser, traced, width, scheme):
    """It loads, streams, repeats itself, is the same in a crowd, and draws a verify; nothing is
    wrong on the console, asked of others, or wider than the window."""
    with browser.page(traced.url, width, scheme=scheme) as page:
        page.wait("model")
        dark = page.js("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        assert dark == (scheme == "dark")
        seen = "new MutationObserver(() => seen.add($('log').innerText)).observe($('log'), how)"
        page.js(f"seen = new Set(); how = {{subtree: true, childList: true}}; {seen}; 0")
        first = asked(page, "Tell me a story about a fox.", most=60)
        assert len(first) > 100 and page.js("seen.size") > 5
        page.click("New chat")
        assert asked(page, "Tell me a story about a fox.") == first
        verdict, texts = crowded(page)
        assert verdict.startswith("✓ The same, bit for bit: ") and texts == [first, first]
        passes = traced.engine.trace.passes()
        assert max(len({work.request_id for work in one.works}) for one in passes) >= 16
        page.click(DRAW)
        page.wait("document.querySelectorAll('.turn:last-child .stage').length >= 4")
        assert "KV cache after decode" in page.text()
        assert page.js("document.documentElement.scrollWidth") <= width
        page.click("New chat")
        assert asked(page, "Tell me a story about a fox.", seed=8) != first, "control"
        assert page.complaints() == []
        sent = {one["request"]["url"] for one in page.told("Network.requestWillBeSent")}
        assert all(url.startswith((traced.url, "data:")) for url in sent) and len(sent) > 3


@pytest.mark.slow("server", 40)
def test_a_plain_request_in_a_crowd(browser, traced):
    """Control: its bits are others each time, its text for some seed; the place is marked."""
    with browser.page(traced.url) as page:
        page.wait("model")
        page.js("$('text').focus()")
        for key in ("Tab", "Tab", " "):
            page.press(key)
        assert not page.js("$('deterministic').checked")
        for seed in range(8, 48):
            asked(page, "Tell me a story about a fox.", seed=seed, temperature=2, most=300)
            verdict, texts = crowded(page)
            assert verdict.startswith("≠ ")
            marks = page.js("[...document.querySelectorAll('mark')].map(e => e.innerText)")
            if "Different from token" in verdict:
                break
            assert texts[0] == texts[1] and marks[0] == marks[1]
            page.click("New chat")
        assert texts[0] != texts[1] and marks[0] != marks[1]
        before = page.js("[...document.querySelectorAll('mark')].map(e => e.previousSibling.data)")
        assert before[0] == before[1]


@pytest.mark.slow("server", 10)
@pytest.mark.parametrize("by", ["button", "key"])
def test_stop(browser, traced, by):
    """It ends the request at the server, too."""
    with browser.page(traced.url) as page:
        page.wait("model")
        page.type("1900", "#most")
        page.type("2", "#temperature")
        page.type("Tell me a story.")
        page.press("Enter")
        page.wait("document.querySelector('.turn .about code')")
        before = traced.engine.stats().committed
        page.press("Escape") if by == "key" else page.js("$('stop').click()")
        page.wait("!running && document.body.innerText.includes('Stopped.')")
        traced.settled()
        assert traced.engine.stats().committed - before < 1000
        assert page.js("getComputedStyle($('send')).display") != "none"


@pytest.mark.slow("server", 10)
def test_errors_and_the_key(browser, traced):
    """They are shown as the server tells them."""
    with running(traced.engine, api_key="secret") as server, browser.page(server.url) as page:
        page.wait("document.activeElement === $('key')")
        assert page.complaints() == []
        page.type("wrong", "#key")
        page.press("Enter")
        page.wait("$('trouble').innerText === 'the API key is missing or wrong'")
        page.type("secret", "#key")
        page.press("Enter")
        page.wait("model && !$('trouble').innerText")
        assert asked(page, "Tell me a story.", most=5)
        page.type("3000", "#most")
        page.type("Again")
        page.press("Enter")
        page.wait("document.querySelector('.turn:last-child .error')")
        asked_for = [*MESSAGES, {"role": "assistant", "content": "x"}]
        said = server.client(api_key="secret")
        with pytest.raises(Exception, match="max_tokens") as refused:
            said.chat.completions.create(
                model=page.js("model"), messages=asked_for, max_tokens=3000
            )
        shown = page.js("document.querySelector('.turn:last-child .error').innerText")
        assert shown[:40] == refused.value.body["message"][:40]


@pytest.mark.slow("server", 10)
def test_without_a_chat_template(browser, traced, monkeypatch):
    """Text is continued by /v1/completions."""
    monkeypatch.setattr(traced.engine.tokenizer, "chat_template", None)
    with running(traced.engine) as server, browser.page(server.url) as page:
        page.wait("model")
        assert page.js("$('text-label').innerText") == "Text to continue"
        text = asked(page, "Once upon a time", most=20)
        verdict, texts = crowded(page)
        assert verdict.startswith("✓ The same, bit for bit: 20 tokens") and texts == [text, text]
        assert page.complaints() == []


@pytest.mark.slow("server", 5)
def test_text_is_no_markup(browser, traced):
    """Neither what is asked nor what is answered."""
    markup = "<img src=x onerror='hurt=1'><script>hurt=1</script>"
    choice = {"index": 0, "delta": {"content": markup}, "token_ids": [5], "finish_reason": "stop"}
    body = f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\ndata: [DONE]\n\n"
    with browser.page(traced.url) as page:
        page.wait("model")
        page.ask("Fetch.enable", patterns=[{"urlPattern": f"*{CHAT}"}])
        page.type(markup)
        page.press("Enter")
        wait_until(lambda: page.told("Fetch.requestPaused"))
        given = {"requestId": page.told("Fetch.requestPaused")[0]["requestId"], "responseCode": 200}
        page.ask("Fetch.fulfillRequest", **given, body=base64.b64encode(body.encode()).decode())
        page.wait("document.querySelector('.turn .actions button')")
        assert page.text().count(markup) == 2
        assert page.js("document.images.length") == 0 and page.js("typeof hurt") == "undefined"

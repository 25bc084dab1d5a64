"""The demo: what it shows comes from its run, and its status hangs on the promise alone."""

import io
import re

import pytest

from tinyspec import Engine, EngineConfig
from tinyspec.engine.trace import VERIFIED, TracedWork
from tinyspec.tools.demo import BUNDLED, SEEDS, Demo, demo
from tinyspec.tools.terminal import Style
from tinyspec.tools.trace_run import Run, RunPass
from tinyspec.tools.verify_picture import lines, picture


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(verify="always", trace=True, draft_window=3)
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu", config) as engine:
        yield engine


def test_it_shows_its_own_run(engine, capsys):
    assert demo(engine, 3, 12, patience=0.0) == 0
    out = capsys.readouterr().out
    assert "12 tokens and 12 log-probabilities: identical, bit for bit" in out
    for words in ("deterministic=False", "KV cache after prefill", "Decode", "Verify", "ollback"):
        assert words in out
    assert out.splitlines()[-1] == f"fingerprint {engine.fingerprint}"
    table = [line.split() for line in out.splitlines() if re.match(r"  \d+  ", line)]
    assert len(table) == 4 and table[0][1:3] == ["sampled,", "deterministic"]


def test_where_no_text_differs(engine, capsys, monkeypatch):
    """It says so, how many seeds it tried, and keeps its status."""
    asked = []
    whole = Demo.pair

    def same(self, seed, deterministic):
        asked.append(seed)
        return whole(self, seed, True)

    monkeypatch.setattr(Demo, "pair", same)
    assert demo(engine, 1, 4, patience=0.2) == 0
    tried = len(asked) - 1
    assert asked[: min(tried, len(SEEDS))] == list(SEEDS[:tried]) and asked[-1] == SEEDS[0]
    out = capsys.readouterr().out
    assert "no text differed on this machine" in out
    assert tried == 1 or f"({tried} seeds tried)" in out


def test_a_broken_promise_is_the_status(engine, capsys, monkeypatch):
    """Control: the plain request stands for the deterministic one, and tokens are changed."""
    whole = Demo.pair

    def broken(self, seed, deterministic):
        found = whole(self, seed, deterministic)
        found.crowd[0].completions[0].token_ids[2] += 1
        return found

    monkeypatch.setattr(Demo, "pair", broken)
    assert demo(engine, 1, 5, patience=0.0) == 1
    out = capsys.readouterr().out
    assert "NOT THE SAME" in out and "another text from token 3 on" in out


def test_tokens_that_differ_are_coloured(engine, monkeypatch):
    one = Demo(engine, 1, 4)
    ids = engine.tokenizer(" Ana can run. Ben can sing.")["input_ids"]
    other = [*ids[:5], *engine.tokenizer(" sleep now.")["input_ids"]]
    one.style = Style(Terminal())
    coloured = one._marked(ids, other)
    decode = engine.tokenizer.decode
    assert coloured == decode(ids[:5]).strip() + f"\033[1;30;43m{decode(ids[5:])}\033[0m"
    assert "\033" not in one._marked(ids, ids)
    one.style = Style(io.StringIO())
    assert one._marked(ids, other) == f"{decode(ids[:5]).strip()}>>>{decode(ids[5:])}"


def rollback():
    """Of two drafts out of four."""
    texts = dict(enumerate((" friend", ",", " a", " big", " crow", " proud", " named")))
    work = TracedWork("a", 0, 13, True, VERIFIED, 25, 5, [1, 2, 5], 0, [1, 2, 3, 4], accepted=2)
    work.targets, work.rejected = [1, 2, 5, 4, 6], 2
    one = RunPass(3, 0.0, 1.0, 32, True, "", 1, {}, 3, [work] * 8)
    return picture(one, work, Run([one], texts), fast=True)


def test_a_rollback_in_characters():
    text = "\n".join(lines(rollback(), Style(io.StringIO())))
    assert "≠ T3'·big  ✗" in text and "= T2'  ✓" in text
    assert "2 drafts dropped; sequence and KV cut behind T3" in text
    assert "25 canonical + 3 verified + 2 dropped" in text and "25 canonical + 4 of drafts" in text
    assert text.splitlines()[-1].endswith("25 canonical + 3 verified")
    assert max(map(len, text.splitlines())) <= 100
    assert "\033[31m" in "\n".join(lines(rollback(), Style(Terminal())))

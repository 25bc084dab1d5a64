"""Files of probe results: any bytes at all are read as what was stored, or as nothing."""

import json
import logging
import os
import random
from dataclasses import asdict

import pytest

from tinyspec.determinism import results
from tinyspec.determinism.results import BucketResult, ComparedRows, ProbeResults, Unsound

KEY = "key"
RESULTS = ProbeResults(
    reference=8,
    buckets=(
        BucketResult(8, True, (), 1 / 3),
        BucketResult(16, False, ("a.b",), 0.2, ("a.c",), {"a.c": 8}, 3.0),
    ),
    unsound=(Unsound("a.b", "why"),),
    kernel_linears=("a.b",),
    attention=(ComparedRows("decode", 7, 0),),
    confirmed=True,
)


@pytest.fixture
def file(home):
    """Of results that are stored."""
    results._warn_once.cache_clear()
    results.store(KEY, RESULTS)
    return home / f"{KEY}.json"


def ignored(caplog, match: str) -> None:
    """Nothing is read, and the log says so once, however often that is tried."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tinyspec"):
        assert [results.load(KEY) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert match in record.getMessage() and "ignored" in record.getMessage()


def signed(found: object) -> str:
    """A file with the right checksum."""
    return json.dumps({"key": KEY, "checksum": results._checksum(found), "results": found})


def plain() -> dict:
    return json.loads(json.dumps(asdict(RESULTS)))


def test_there_and_back(file, caplog):
    assert results.load(KEY) == RESULTS
    assert results.load("another") is None and not caplog.records
    assert list(file.parent.iterdir()) == [file], "no draft is left"
    file.write_text(signed(plain()))
    assert results.load(KEY) == RESULTS


def test_every_cut_and_every_changed_byte(file):
    """But for space between words, which changes nothing."""
    whole, rng = file.read_bytes(), random.Random(0)
    for place in rng.sample(range(len(whole)), 40):
        file.write_bytes(whole[:place])
        assert results.load(KEY) in (None, *[RESULTS] * (place == len(whole) - 1))
        other = rng.choice([b"\0", b"\xff", b"7", b'"', b"[", b" "])
        file.write_bytes(whole[:place] + other + whole[place + 1 :])
        assert results.load(KEY) in (None, RESULTS)
    file.write_bytes(rng.randbytes(5000))
    assert results.load(KEY) is None


@pytest.mark.parametrize(
    "text, why",
    [
        ("[" * 10**6, "RecursionError"),
        (signed(plain()).replace('"key": "key"', '"key": "other"'), "checksum"),
        (signed(plain()).replace('"reference": 8', '"reference": 9'), "checksum"),
        (signed({**plain(), "more": 1}), "TypeError"),
    ],
    ids=["nested", "key", "changed", "more"],
)
def test_bytes_that_are_no_results(file, caplog, text, why):
    file.write_text(text)
    ignored(caplog, why)
    results.store(KEY, RESULTS)
    assert results.load(KEY) == RESULTS, "written anew"


def test_a_folder_or_a_pipe_in_its_place(file, caplog):
    """Nobody waits for what is written to a pipe; the log says once what cannot be written."""
    for put in (os.mkfifo, os.mkdir):
        file.unlink()
        put(file)
        if put is os.mkfifo:
            ignored(caplog, "not a file")
    with caplog.at_level(logging.WARNING, "tinyspec"):
        results.store(KEY, RESULTS)
        results.store(KEY, RESULTS)
    assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1
    assert list(file.parent.iterdir()) == [file], "no draft is left"


def test_a_file_of_another_user(file, caplog, monkeypatch):
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert results.load(KEY) == RESULTS, "root's is trusted"
        os.chown(file, 12345, -1)
    ignored(caplog, "belongs to user")


def test_tiles():
    """A linear's are the largest bucket in which it ran whole, of which the pass is a multiple."""
    cut = {8: {}, 12: {}, 16: {}, 24: {"a": 8}, 32: {"a": 16}, 64: {"a": 16, "b": 32}}
    buckets = (BucketResult(n, n != 12, (), 0.1, own, n > 16) for n, own in cut.items())
    found = ProbeResults(8, tuple(buckets))
    assert found.tiles == {"a": {24: 8, 32: 16, 64: 16}, "b": {64: 32}}
    assert found.copied == [24, 32, 64]
    expected = {(16, "a"): 8, (24, "a"): 8, (48, "a"): 16, (48, "b"): 24, (64, "b"): 32}
    assert {key: found.tile_of(key[1], key[0]) for key in expected} == expected

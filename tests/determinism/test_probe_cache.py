"""Files of probe results: any bytes at all are read as what was stored, or as nothing."""

import json
import logging
import os
import random
from dataclasses import asdict
from threading import Thread

import pytest
from huggingface_hub import constants

from tests.support.budget import first
from tests.support.patience import PATIENCE
from tinyspec.determinism import probe_cache
from tinyspec.determinism.probe_results import BucketResult, ComparedRows, ProbeResults, Unsound

KEY = "key"
RESULTS = ProbeResults(
    reference=8,
    buckets=(
        BucketResult(8, True, (), 1 / 3),
        BucketResult(16, False, ("a.b",), 0.2, ("a.c",), 3.0),
    ),
    unsound=(Unsound("a.b", "why"),),
    kernel_linears=("a.b",),
    tiled=("a.b", "a.c"),
    attention=(ComparedRows("decode", 7, 0),),
    compared=4,
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    monkeypatch.setattr(probe_cache, "_said", set())
    return tmp_path / "tinyspec"


@pytest.fixture
def file(home):
    """Of results that are stored."""
    probe_cache.store(KEY, RESULTS)
    return home / f"{KEY}.json"


def ignored(caplog, match: str) -> None:
    """Nothing is read, and the log says so once, however often that is tried."""
    caplog.clear()
    with caplog.at_level(logging.WARNING, "tinyspec"):
        assert [probe_cache.load(KEY) for _ in range(3)] == [None] * 3
    (record,) = caplog.records
    assert match in record.getMessage() and "ignored" in record.getMessage()


def signed(results: object) -> str:
    """A file with the right checksum."""
    checksum = probe_cache._checksum(results)
    return json.dumps(
        {"format": probe_cache.FORMAT, "key": KEY, "checksum": checksum, "results": results}
    )


def plain() -> dict:
    return json.loads(json.dumps(asdict(RESULTS)))


def test_there_and_back(file, caplog):
    assert probe_cache.load(KEY) == RESULTS
    assert probe_cache.load("another") is None and not caplog.records
    assert list(file.parent.iterdir()) == [file], "no draft is left"
    file.write_text(signed(plain()))
    assert probe_cache.load(KEY) == RESULTS


def test_every_cut_and_every_changed_byte(file):
    """But for space between words, which changes nothing."""
    whole, rng = file.read_bytes(), random.Random(0)
    for place in rng.sample(range(len(whole)), 40):
        file.write_bytes(whole[:place])
        assert probe_cache.load(KEY) in (None, *[RESULTS] * (place == len(whole) - 1))
        other = rng.choice([b"\0", b"\xff", b"7", b'"', b"[", b" "])
        file.write_bytes(whole[:place] + other + whole[place + 1 :])
        assert probe_cache.load(KEY) in (None, RESULTS)
    file.write_bytes(rng.randbytes(5000))
    assert probe_cache.load(KEY) is None


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "JSONDecodeError"),
        ("7", "TypeError"),
        ("[" * 10**6, "RecursionError"),
        ('{"format": ' + "9" * 10**5 + "}", "ValueError"),
        ('{"format": 5}', "KeyError"),
        (signed(plain()).replace('"format": 5', '"format": 4'), "another version"),
        (signed(plain()).replace('"key": "key"', '"key": "other"'), "another model"),
        (signed(plain()).replace('"reference": 8', '"reference": 9'), "checksum"),
    ],
    ids=["empty", "number", "nested", "digits", "lacking", "version", "key", "changed"],
)
def test_bytes_that_are_no_results(file, caplog, text, why):
    file.write_text(text)
    ignored(caplog, why)
    probe_cache.store(KEY, RESULTS)
    assert probe_cache.load(KEY) == RESULTS, "written anew"


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Ways to every value within a value of JSON."""
    inner = value.items() if isinstance(value, dict) else ()
    inner = enumerate(value) if isinstance(value, list) else inner
    return [path, *(found for name, own in inner for found in places(own, (*path, name)))]


def fits(path: list, before: object, other: object) -> bool:
    """Whether ``other`` may stand in the place of ``before``, as far as its own type goes."""
    if other is KeyError:  # left out: of a list, or of a dict of names
        return not isinstance(path[-1], str)
    return type(other) is type(before) or (type(before) is float and type(other) is int)


@pytest.mark.parametrize("part", first(1, range(6), 0.4))
def test_wrong_types_with_the_right_checksum(file, part):
    """Every value replaced by one of every other type, and every one left out."""
    others = (None, True, 7, 0.5, "text", [], [[]], {}, {"a": 1}, float("nan"), KeyError)
    refused = 0
    for path in places(plain())[1 + part :: 6]:
        for other in others:
            results = holder = plain()
            for name in path[:-1]:
                holder = holder[name]
            before = holder.pop(path[-1])
            if other is not KeyError and isinstance(holder, list):
                holder.insert(path[-1], other)
            elif other is not KeyError:
                holder[path[-1]] = other
            file.write_text(signed(results))
            read = probe_cache.load(KEY) is not None
            assert not read or fits(path, before, other), (path, other)
            refused += not read
    assert refused > 50


def test_more_than_was_stored(file):
    file.write_text(signed({**plain(), "more": 1}))
    assert probe_cache.load(KEY) is None


def test_a_folder_in_its_place(file, caplog):
    file.unlink()
    file.mkdir()
    ignored(caplog, "not a file")
    with caplog.at_level(logging.WARNING, "tinyspec"):
        probe_cache.store(KEY, RESULTS)
        probe_cache.store(KEY, RESULTS)
    assert [record.getMessage().count("cannot be written") for record in caplog.records] == [0, 1]
    assert list(file.parent.iterdir()) == [file], "no draft is left"


def test_a_pipe_in_its_place(file, caplog):
    """Nobody writes to it, and nobody waits."""
    file.unlink()
    os.mkfifo(file)
    ignored(caplog, "not a file")


def test_a_file_of_another_user(file, caplog, monkeypatch):
    owner = file.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner == 0:
        assert probe_cache.load(KEY) == RESULTS, "root's is trusted"
        fstat = os.fstat

        def of_another(handle):
            found = list(fstat(handle))
            found[4] = 12345
            return os.stat_result(found)

        monkeypatch.setattr(os, "fstat", of_another)
    ignored(caplog, "belongs to user")


def test_a_file_too_large(file, caplog, monkeypatch):
    monkeypatch.setattr(probe_cache, "MOST_BYTES", 100)
    ignored(caplog, "bytes")


def test_a_folder_that_cannot_be_written_is_told_once(home, caplog):
    home.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "tinyspec"):
        for key in ("one", "two", "one"):
            probe_cache.store(key, RESULTS)
            assert probe_cache.load(key) is None
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage() and str(home) in record.getMessage()


def test_threads_that_store_at_once(home):
    """Each one's results are there afterwards, and no draft is."""
    own = [ProbeResults(reference=8, buckets=(), compared=n) for n in range(8)]
    threads = [Thread(target=probe_cache.store, args=(KEY, results)) for results in own]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert probe_cache.load(KEY) in own
    assert [path.name for path in home.iterdir()] == [f"{KEY}.json"]

"""Pictures of a trace: every token is there once, in every kind of file, and nothing is loaded."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest

from tests.support.cases import text
from tests.support.mixes import HalfLiar
from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.main import main
from tinyspec.tools.drawing import COLOURS, LEGEND, grid, timeline
from tinyspec.tools.terminal import lines
from tinyspec.tools.trace import cells_of, find_verify, read

KINDS = ("svg", "html")


def traced(path, count, wrong=0.3):
    """A run of deterministic and plain requests with a drafter that is wrong now and then."""
    params = [SamplingParams(max_new_tokens=20, deterministic=n % 2 == 0) for n in range(count)]
    prompts = [text(5 + n % 7, seed=n) for n in range(count)]
    with Engine(tiny()) as engine:
        truth = [o.completions[0].token_ids for o in engine.generate(prompts, params)]
    known = [p + t for p, t in zip(prompts, truth, strict=True)]
    config = EngineConfig(trace=True, drafter=HalfLiar(known, 1, wrong=wrong), draft_window=4)
    with Engine(tiny(), config=config) as engine:
        engine.generate(prompts, params)
        engine.trace.save(path)
        return engine.stats()


@pytest.fixture(scope="module", params=[3, 64])
def saved(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    return path, traced(path, request.param), request.param


def test_every_token_has_a_cell(saved):
    path, stats, count = saved
    run = read(path)
    assert len(run.lanes) == count
    cells = Counter(
        c for one in run.passes for w in one.works for c in cells_of(w, one.record.canonical)
    )
    assert set(cells) <= set(LEGEND) <= set(COLOURS)
    tokens = ("accepted", "bonus", "canonical", "riding", "plain")
    assert sum(cells[name] for name in tokens) == stats.committed == 20 * count
    assert cells["accepted"] == stats.accepted > 0
    assert cells["rejected"] == stats.rolled_back > 0
    assert sum(one.record.rows["verify"] for one in run.passes) == stats.rows["verify"]
    drawn = Counter(re.findall(r'<rect class="(\w+)"', "".join(timeline(run).elements)))
    assert drawn["accepted"] == cells["accepted"] + 1, "and once in the legend"
    assert drawn["rejected"] == cells["rejected"] + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_draws(saved, kind, capsys, tmp_path):
    path, _, count = saved
    picture = tmp_path / f"run.{kind}"
    assert main(["trace", str(path), "-o", str(picture)]) == 0
    assert f"{count} completions" in capsys.readouterr().out
    words = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in words and "<title>request-0: " in words
    # Nothing is loaded: the one address is the name of the SVG format.
    assert set(re.findall(r"https?://[^\"' <]*", words)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in words and "@import" not in words and "url(" not in words
    ElementTree.fromstring(re.search("<svg.*</svg>", words, re.DOTALL).group())
    arguments = ["--first", "3", "--cells", "10", "--view", "timeline"]
    assert main(["trace", str(path), "-o", str(picture), *arguments]) == 0
    few = picture.read_text(encoding="utf-8")
    assert "(the first of " in few and len(few) < len(words)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_verify_says_what_happened(saved):
    """With a rollback, as the trace has it; the same in characters and in SVG."""
    verify = find_verify(read(saved[0]))
    _, decode, checked, outcome = verify.columns
    assert outcome.name == "Rollback" and "sequence and KV are cut behind" in outcome.note
    accepted = [cell for cell in checked.tokens if cell.colour == "accepted"]
    drafts = [cell.text.partition(" ")[2] for cell in decode.tokens[1:]]
    found = [cell.text.partition(" ")[2] for cell in checked.tokens]
    assert found[: len(accepted)] == drafts[: len(accepted)]
    own = checked.tokens[len(accepted)]
    assert own.colour == "bonus" and found[len(accepted)] != drafts[len(accepted)]
    assert outcome.tokens[1:] == [*accepted, own]
    assert outcome.note.startswith(f"{len(drafts) - len(accepted)} dropped")
    drawing, plain = "".join(grid(verify).elements), "\n".join(lines(verify, io.StringIO()))
    for column in verify.columns:
        for words in (column.name, *(cell.text for cell in column.cache + column.tokens)):
            assert words in plain and f">{words.replace(chr(39), '&#x27;')}<" in drawing
        assert column.note in plain
    assert max(map(len, plain.splitlines())) <= 120 and "\033" not in plain
    assert "\033[31m" in "\n".join(lines(verify, Terminal()))


EMPTY = '{"traceEvents": [], "tinyspec": {"format": 1, "texts": {}}}'
BAD = {
    "no JSON": ("nonsense", "run.svg", "is not a trace that engine.trace.save wrote"),
    "another trace": ('{"traceEvents": []}', "run.svg", "is not a trace that engine.trace.save"),
    "a list": ("[]", "run.svg", "is not a trace that engine.trace.save wrote"),
    "no passes": (EMPTY, "run.svg", "run.json' is not allowed: a trace with at least one pass"),
    "a kind": ("{}", "run.png", "run.png' is not allowed: a name that ends with .svg, .html"),
}


@pytest.mark.parametrize(("content", "output", "complaint"), BAD.values(), ids=BAD)
def test_what_is_no_trace(capsys, tmp_path, content, output, complaint):
    file = tmp_path / "run.json"
    file.write_text(content)
    assert main(["trace", str(file), "-o", str(tmp_path / output)]) == 2
    err = capsys.readouterr().err
    assert complaint in err and err.count("\n") == 1
    assert not (tmp_path / output).exists()


def test_generate_writes_one(tmp_path, capsys):
    file = tmp_path / "run.json"
    arguments = ("Once", "--max-new-tokens", "4", "--deterministic", "--trace", str(file))
    assert main(["generate", *arguments]) == 0
    run = read(file)
    tokens = [token for one in run.passes for w in one.works for token in w.tokens]
    assert "".join(run.texts[token] for token in tokens).strip() == capsys.readouterr().out.strip()


NASTY = "<script>'\"&]]>\x00\x1b\ud800\u2028\u202e\uffff\n"


@pytest.mark.parametrize("kind", KINDS)
def test_names_and_texts_of_every_kind(kind, tmp_path):
    """Once a lone surrogate left an empty file, and a control character an SVG that no one reads:
    in a token's text, a completion's name, the name of the file."""
    saved = tmp_path / "\udcff<b>.json"
    traced(saved, 1, wrong=0.9)
    data = json.loads(saved.read_text())
    tokens = {t for e in data["traceEvents"] for t in e["args"].get("tokens", [])}
    data["tinyspec"]["texts"] = dict.fromkeys(tokens, f"\u65e5{NASTY}")
    for event in data["traceEvents"]:
        event["args"]["request_id" if "tokens" in event["args"] else "way"] = NASTY
    saved.write_text(json.dumps(data))
    picture = tmp_path / f"run.{kind}"
    assert main(["trace", str(saved), "-o", str(picture)]) == 0
    words = picture.read_text(encoding="utf-8")
    assert "<script>" not in words and "<b>" not in words and "&lt;script&gt;" in words
    assert not set("\x00\x1b\u2028\u202e\uffff") & set(words)
    ElementTree.fromstring(re.search("<svg.*</svg>", words, re.DOTALL).group())

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
from tinyspec.tools.drawing import COLOURS
from tinyspec.tools.terminal import Style
from tinyspec.tools.timeline import LEGEND, cells_of, timeline
from tinyspec.tools.trace_run import read
from tinyspec.tools.verify_picture import describe, draw, lines

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
    cells = Counter(c for one in run.passes for w in one.works for c in cells_of(w, one.canonical))
    assert set(cells) <= set(LEGEND) <= set(COLOURS)
    tokens = ("accepted", "bonus", "canonical", "riding", "plain")
    assert sum(cells[name] for name in tokens) == stats.committed == 20 * count
    assert cells["accepted"] == stats.accepted > 0
    assert cells["rejected"] == stats.rolled_back > 0
    assert sum(one.rows["verify"] for one in run.passes) == stats.rows["verify"]
    drawn = Counter(re.findall(r'<rect class="(\w+)" [^>]* rx=', "".join(timeline(run).elements)))
    assert drawn["accepted"] == cells["accepted"] + 1, "and once in the legend"
    assert drawn["rejected"] == cells["rejected"] + 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_draws(saved, kind, capsys):
    path, _, count = saved
    picture = path.with_suffix(f".{kind}")
    assert main(["trace", str(path), "-o", str(picture)]) == 0
    assert f"{count} completions" in capsys.readouterr().out
    words = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in words
    # Nothing is loaded: the one address is the name of the SVG format.
    assert set(re.findall(r"https?://[^\"' <]*", words)) == {"http://www.w3.org/2000/svg"}
    assert "<script" not in words and "@import" not in words and "url(" not in words
    if kind == "svg":
        ElementTree.fromstring(words)
        assert "<title>request-0: " in words


def test_the_close_up_says_what_happened(saved):
    """A verify with a rollback, as the trace has it; the same in characters and in SVG."""
    path, _, _ = saved
    run = read(path)
    one = describe(run)
    _, decode, verify, outcome = one.panels
    assert outcome.name == "Rollback" and "dropped; sequence and KV cut behind" in outcome.note
    accepted = [token for token in verify.tokens if token.colour == "accepted"]
    drafts = [token.text for token in decode.tokens[1:]]
    assert [token.text for token in accepted] == drafts[: len(accepted)]
    own = verify.tokens[len(accepted)]
    assert own.colour == "bonus" and own.text != drafts[len(accepted)]
    assert outcome.tokens[1:] == [*accepted, own]
    assert f"{len(drafts) - len(accepted)} draft" in outcome.note
    drawing, text = "".join(draw(one).elements), "\n".join(lines(one, Style(io.StringIO())))
    for panel in one.panels:
        words = [panel.name, f"KV cache after {panel.name.lower()}", *str(panel.note).split()]
        assert all(word in text for word in words)
        assert all(f">{word}<" in drawing for word in (panel.name, panel.name.lower()))


def test_a_window_of_passes(saved, tmp_path):
    path, _, _ = saved
    run = read(path)
    few, whole = timeline(run, most_cells=10), timeline(run)
    assert few.width <= whole.width and len(few.elements) < len(whole.elements)
    counted = f"{len(run.lanes)} completions, {len(run.passes)} passes,"
    assert f">{counted}" in whole.elements[0]
    picture = tmp_path / "few.svg"
    arguments = ["-o", str(picture), "--first", "3", "--cells", "10", "--view", "timeline"]
    assert main(["trace", str(path), *arguments]) == 0
    assert "the first of" in picture.read_text()


BAD = {
    "no JSON": ("nonsense", "run.svg", "is not a trace that engine.trace.save wrote"),
    "another trace": ('{"traceEvents": []}', "run.svg", "is not a trace that engine.trace.save"),
    "a list": ("[]", "run.svg", "is not a trace that engine.trace.save wrote"),
    "no passes": (
        '{"traceEvents": [], "tinyspec": {"format": 1, "texts": {}}}',
        "run.svg",
        "run.json' is not allowed: a trace with at least one pass",
    ),
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
    text = "".join(run.text(token) for one in run.passes for w in one.works for token in w.tokens)
    assert text.strip() == capsys.readouterr().out.strip()
    assert json.loads(file.read_text())["traceEvents"]


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
    for found in re.findall("<svg.*?</svg>", words, re.DOTALL):
        ElementTree.fromstring(found)

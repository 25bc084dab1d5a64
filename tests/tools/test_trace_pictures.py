"""Pictures of a trace: every token is there once, in every kind of file, and nothing is loaded."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.cases import text
from tests.support.mixes import HalfLiar
from tests.support.tiny import VOCAB, tiny
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.main import main
from tinyspec.tools.drawing import LEGEND, html, svg, timeline
from tinyspec.tools.terminal import LOOKS, laid_out, lines
from tinyspec.tools.trace import MODEL, cells_of, diagrams, find_verify, read


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


COUNT = 24


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "run.json"
    return path, traced(path, COUNT)


def test_every_token_has_a_cell(saved):
    path, stats = saved
    run = read(path)
    assert len(run.lanes) == COUNT
    cells = Counter(c for one in run.passes for w in one.works for c in cells_of(w, one.canonical))
    assert set(cells) <= set(LEGEND) <= set(LOOKS)
    tokens = ("accepted", "bonus", "canonical", "riding", "plain")
    assert sum(cells[name] for name in tokens) == stats.committed == 20 * COUNT
    assert cells["accepted"] == stats.accepted > 0
    assert cells["rejected"] == stats.rolled_back > 0
    assert sum(one.rows["verify"] for one in run.passes) == stats.rows["verify"]
    drawn = Counter(re.findall(r'<rect class="(\w+)"', svg([timeline(run)])))
    for name in ("accepted", "rejected"):
        assert drawn[name] == cells[name] + 1, "and once in the legend"


def drawing_of(words):
    """The root of the SVG in a page, which XML's own parser can read."""
    return ElementTree.fromstring(re.search("<svg.*</svg>", words, re.DOTALL).group())


@pytest.mark.parametrize("kind", ["svg", "html"])
def test_the_command_draws(saved, kind, capsys, tmp_path):
    picture = tmp_path / f"run.{kind}"
    assert main(["trace", str(saved[0]), "-o", str(picture)]) == 0
    assert f"{COUNT} completions" in capsys.readouterr().out
    words = picture.read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in words and "<title>request-0: " in words
    # Nothing is loaded: the one address is the name of the SVG format.
    assert set(re.findall(r"https?://[^\"' <]*", words)) == {"http://www.w3.org/2000/svg"}
    assert not any(loading in words for loading in ("<script", "@import", "url("))
    assert drawing_of(words) is not None


def seed(name):
    """One of the texts after which diagrams are drawn."""
    words = (Path(__file__).parent / "seeds" / f"{name}.txt").read_text(encoding="utf-8")
    return words.translate({ord("\N{SUBSCRIPT ZERO}") + n: str(n) for n in range(5)})


def stages_of(diagram):
    """What enters each stage, its tokens, what the model makes of them, parts of the KV cache."""
    found = []
    for first, *cache in diagram.stages.values():
        texts = [cell.text for cell in first]
        end = texts.index(MODEL.text) if MODEL.text in texts else len(first)
        enters = [c.text.removesuffix(" \N{RIGHTWARDS ARROW}") for c in first if not c.colour]
        cells = [cell for cell in first[:end] if cell.colour]
        kv = [cell for row in cache for cell in row[1:]]
        found.append(SimpleNamespace(enters=enters, cells=cells, outputs=first[end + 1 :], kv=kv))
    return found


def tokens_of(parts):
    """Of parts of the KV cache."""
    return sum(int(part.text.split()[0]) for part in parts)


def written(diagram, kind):
    """All words of a diagram as they stand in a terminal, an SVG or a page; none of its labels is
    left out."""
    if kind == "terminal":
        words = lines(diagram, io.StringIO())
    else:
        drawing = laid_out(diagram)
        root = drawing_of(svg([drawing]) if kind == "svg" else html([drawing], "a run"))
        words = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    told = " ".join(" ".join(words).split())
    rows = chain.from_iterable(diagram.stages.values())
    labels = [diagram.title, diagram.note, *diagram.stages]
    labels += [cell.text for row in (diagram.legend, *rows) for cell in row]
    for label in filter(None, labels):
        assert " ".join(label.split()) in told, label
    return told


class LiesOnce:
    """Knows ``truth``; the third draft of the first verify is wrong."""

    def __init__(self, truth):
        self.truth, self.lied = truth, False

    def propose(self, sequences, n):
        (tokens,) = [list(sequence) for sequence in sequences]
        drafts = self.truth[len(tokens) :][:3]
        if len(drafts) == 3 and not self.lied:
            self.lied, drafts[2] = True, (drafts[2] + 1) % VOCAB
        return [drafts]


@pytest.fixture(scope="module")
def verifies(tmp_path_factory):
    """A verify with a rollback by a drafter's lie, and of another run, in which a deterministic
    request drafts on the fast path beside two plain ones, one without; the works of both."""
    path = tmp_path_factory.mktemp("verify") / "run.json"
    mine, prompt = SamplingParams(max_new_tokens=16, deterministic=True), text(6, seed=4)
    config = EngineConfig(trace=True, verify="always", draft_window=3)

    def run_of(drafter, prompts, params):
        with Engine(tiny(), config=replace(config, drafter=drafter)) as engine:
            output = engine.generate(prompts, params)[0]
            engine.trace.save(path)
            return read(path), output.completions[0].token_ids

    others = SamplingParams(max_new_tokens=30)
    run, tokens = run_of(None, [prompt, text(5), text(9)], [mine, others, others])
    rolled_back, _ = run_of(LiesOnce(prompt + tokens), [prompt], mine)
    return {
        rollback: (find_verify(r, rollback), r) for rollback, r in enumerate((run, rolled_back))
    }


# Which seed each outcome is drawn after, and what the seed calls the token names in a cell.
OUTCOMES = {"dvr-with-rollback": True, "dvr-no-rollback": False}


@pytest.mark.parametrize("kind", ["terminal", "html"])
@pytest.mark.parametrize("name", OUTCOMES)
def test_a_verify_has_every_label_of_its_seed(verifies, name, kind):
    told, words = written(verifies[OUTCOMES[name]][0], kind), seed(name)
    labels = re.findall(r'^\* "(.+)"$', words, re.MULTILINE)
    stages = re.findall(r"^\d\. \*\*(\w+)(?: & (\w+))?:\*\*", words, re.MULTILINE)
    labels += [stage for pair in stages for stage in pair if stage not in ("", "Final")]
    labels += ["deterministic request", *re.findall('Text states: "(.+)"', words)]
    tokens = set(re.findall(r"T\d'?(?!\w)", words))
    assert len(labels) >= 10 and len(tokens) >= 8
    for label in {*labels, *tokens, *re.findall(r"T\d ?\(=T\d'\)", words)}:
        assert re.sub(r"(T\d)\(", r"\1 (", label) in told, label
    assert ("rejected tokens" in told) == ("rejected" in words) == OUTCOMES[name]
    assert "Sequence and KV after accepting all tokens (including T4)" in told or OUTCOMES[name]


@pytest.mark.parametrize("rollback", [False, True])
def test_a_verify_says_what_is_so(verifies, rollback):
    """Colours of the seed: of the cache blue, blue over yellow, blue over green, and of each token;
    KV behind the last accepted token, and not the verifier's own; requests of each pass."""
    for stage in ("Blue cylinder (initial", "yellow lower section", "green lower section"):
        assert stage in seed("dvr-with-rollback-2")
    diagram, run = verifies[rollback]
    prefill, decode, verify, outcome = stages_of(diagram)
    assert [part.colour for part in prefill.kv] == ["prompt"]
    assert decode.kv[-1].colour == ("prompt" if rollback else "draft")
    assert verify.kv[-1].colour == "accepted" and outcome.kv == []
    assert {cell.colour for cell in decode.cells[1:]} == {"draft"}
    marks = ["rejected", "bonus", "rejected"] if rollback else ["accepted", "bonus"]
    assert [cell.colour for cell in verify.cells[1:]] == ["accepted", "accepted", *marks]
    assert outcome.cells[-1].colour == "bonus"

    number = int(diagram.title.rpartition(" ")[2])
    works = [(one.number, work) for one, work in run.of(run.lanes[0])]
    (work,) = [work for pass_number, work in works if pass_number == number]
    assert tokens_of(verify.kv) == work.kv == work.start + len(work.tokens)
    assert len(outcome.cells) == 1 + len(work.tokens)
    assert tokens_of(prefill.kv) == work.prompt_tokens == 6
    if not rollback:
        drafted = [w for before, w in works if w.kind == "draft" and before < number][-1]
        assert tokens_of(decode.kv) == drafted.kv + drafted.kv_drafts
    note = diagram.note
    assert ("T3' dropped, T3 kept (the verifier's own)" in note) == rollback
    assert "cut behind" not in note and ("KV the next pass" in note) == rollback
    others = "other requests: 0" if rollback else "other requests: 2"
    drafting = "drafts of a drafter: no KV" if rollback else others
    entered = [stage.enters[-1] for stage in (prefill, decode, verify)]
    assert entered == [others, drafting, others]
    plain = lines(diagram, io.StringIO())
    assert max(map(len, plain)) <= 100 and "\033" not in "".join(plain)
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    assert ("\033[31m" in "\n".join(lines(diagram, terminal))) == rollback


def test_prefill_and_decode_as_in_their_seed(tmp_path):
    """Of one plain request of the bundled model, whose answer ends."""
    file, words = tmp_path / "run.json", seed("prefill-decode")
    prompt = "User: What is your name? Assistant:"
    arguments = [prompt, "--max-new-tokens", "60", "--dtype", "float32", "--trace", str(file)]
    assert main(["generate", *arguments]) == 0
    run = read(file)
    (diagram,) = diagrams(run)
    labels = set(re.findall(r'(?:[Ll]abeled|The) "([^"]+)"', words)) - {"can", "The"}
    assert {"Transformer Model", "prompt", "prefill", "decode", "kv cache"} <= labels
    for told in [written(diagram, kind) for kind in ("terminal", "svg", "html")]:
        for label in {*labels - {"EoS/"}, "EoS", "fed back"} - {"can", "vary", "widely"}:
            assert label in told, label
    works = [work for _, work in run.of(run.lanes[0])]
    tokens = [token for work in works for token in work.tokens]
    prefill, decode = stages_of(diagram)
    assert works[-1].end == "stop" and decode.outputs[-1].text.endswith(" EoS")
    assert prefill.outputs[0].text == decode.cells[0].text == run.text(tokens[0])
    assert [c.text for c in decode.outputs[:3]] == [c.text for c in decode.cells[1:4]]
    assert tokens_of(prefill.kv[:1]) == works[0].prompt_tokens == len(prefill.cells)
    assert tokens_of(decode.kv) == works[0].prompt_tokens + len(tokens) - 1


EMPTY = '{"traceEvents": [], "tinyspec": {"format": 1, "texts": {}}}'
BAD = {
    "no JSON": ("nonsense", "run.svg", "is not a trace that engine.trace.save wrote"),
    "another trace": ('{"traceEvents": []}', "run.svg", "is not a trace that engine.trace.save"),
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


NASTY = "<script>'\"&]]>\x00\x1b\ud800\u2028\u202e\uffff\n"


def test_names_and_texts_of_every_kind(tmp_path):
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
    picture = tmp_path / "run.html"
    assert main(["trace", str(saved), "-o", str(picture)]) == 0
    words = picture.read_text(encoding="utf-8")
    assert "<script>" not in words and "<b>" not in words and "&lt;script&gt;" in words
    assert not set("\x00\x1b\u2028\u202e\uffff") & set(words)
    assert drawing_of(words) is not None

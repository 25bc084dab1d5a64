"""An assistant by its name: commands, the server, and what doctor, traces and statistics tell."""

import copy
import io
import json
from dataclasses import replace

import httpx
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.drafts.test_assistant import drafted, perturbed
from tests.support.cases import bits_of, engine_of, model_of, text
from tests.support.serving import COMPLETIONS, running
from tests.support.tiny import tiny
from tests.support.tokenizers import tokenizer_of
from tinyspec import Engine, EngineConfig, SamplingParams, doctor
from tinyspec.cli.main import main
from tinyspec.engine.trace import chrome_trace
from tinyspec.tools.demo import BUNDLED
from tinyspec.tools.terminal import lines
from tinyspec.tools.trace import find_verify, run_of

PARAMS = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3, deterministic=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The bundled model with other weights, in fp32, where it is bf16."""
    path = tmp_path_factory.mktemp("assistant")
    perturbed(AutoModelForCausalLM.from_pretrained(BUNDLED).float(), 0.3).save_pretrained(path)
    AutoTokenizer.from_pretrained(BUNDLED).save_pretrained(path)
    return path


def drafting(folder):
    config = EngineConfig(verify="always", draft_window=3, trace=True)
    return Engine.from_pretrained(BUNDLED, device="cpu", config=config, drafter=folder)


def test_by_folder(folder):
    """In the target's dtype; statistics and the trace say whose drafts were right."""
    prompts = ["Once upon a time", "The fox"]
    with Engine.from_pretrained(BUNDLED, device="cpu") as engine:
        expected = bits_of(engine.generate(prompts, PARAMS))
    with drafting(folder) as engine:
        assert bits_of(engine.generate(prompts, PARAMS)) == expected
        stats, passes = engine.stats(), engine.trace.passes()
        assert engine.config.drafter.dtype == engine.model.dtype
        data = json.loads(json.dumps(chrome_trace(passes, engine.tokenizer)))
    assert stats.accepted_by["assistant"] > 10 and stats.rollbacks_by["assistant"] > 0
    assert sum(stats.drafted_by.values()) == stats.drafted
    assert sum(stats.accepted_by.values()) == stats.accepted
    assert sum(stats.rollbacks_by.values()) == stats.rollbacks
    drawn = find_verify(run_of(data), rollback=False)
    cells = [cell for stage in drawn.stages.values() for row in stage for cell in row]
    assert any("drafts of the assistant" in cell.text for cell in cells)
    assert any(cell.colour == "assistant" for cell in cells) and lines(drawn, io.StringIO())


def test_other_tokens_are_refused_by_name(tmp_path):
    tiny().save_pretrained(tmp_path)
    tokenizer_of("pieces").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f"drafter='{tmp_path}'.*tokens of the one served"):
        Engine.from_pretrained(BUNDLED, device="cpu", drafter=tmp_path)


@pytest.mark.parametrize("name", ["ngram", "folder"])
def test_commands(name, folder, capsys):
    given = ["generate", "One day", "--json", "--deterministic", "--max-new-tokens", "8"]
    drafter = str(folder) if name == "folder" else name
    assert main(given) == 0 == main([*given, "--drafter", drafter])
    without, with_one = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert [c["token_ids"] for c in without["completions"]] == [
        c["token_ids"] for c in with_one["completions"]
    ]


def test_the_server_tells(folder):
    """By OpenAI's fields and vLLM's metrics."""
    with drafting(folder) as engine, running(engine) as server:
        body = {"prompt": "One day", "max_tokens": 24, "deterministic": True}
        usage = server.post(COMPLETIONS, **body).json()["usage"]
        metrics = httpx.get(f"{server.url}/metrics").text.splitlines()
        stats = engine.stats()
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == stats.accepted > 0
    assert details["rejected_prediction_tokens"] == stats.rolled_back > 0
    counts = {"drafts": stats.verify_passes, "draft_tokens": stats.drafted}
    for name, count in (counts | {"accepted_tokens": stats.accepted}).items():
        name = f"vllm:spec_decode_num_{name}_total"
        assert [float(line.split()[-1]) for line in metrics if line.startswith(name)] == [count]


def test_doctor_tells_what_drafts_cost():
    model = tiny()
    config = EngineConfig(reference_rows=8, max_rows=12)
    with Engine(model, config=config) as engine:
        assert not doctor(engine).drafts
    report = doctor(model, replace(config, drafter=copy.deepcopy(model)))
    assert [*report.drafts] == [1, 2, 4, 8] and min(report.drafts.values()) > 0
    assert "drafts of one request by the assistant" in str(report)


def test_ngrams_before_an_assistant(monkeypatch):
    """Where three tokens were there before, what followed them; elsewhere the assistant drafts."""
    # However long a busy machine takes to look them up.
    monkeypatch.setattr("tinyspec.drafts.drafter.SHARE", float("inf"))
    model = model_of("as is")
    common = {"max_new_tokens": 24, "logprobs": True, "deterministic": True}
    common |= {"temperature": 1.0, "seed": 5}
    two = SamplingParams(**common, allowed_token_ids=(3, 5))  # of these all threes come soon
    asked = [(text(9, 1), two), (text(30, 2), SamplingParams(**common))]
    _, stats = drafted(model, asked, ("ngram", copy.deepcopy(model)))
    assert stats.accepted_by["assistant"] == stats.drafted_by["assistant"] > 10
    assert stats.drafted_by["ngram"] > 0 and stats.drafted_by["fast path"] == 0
    with pytest.raises(ValueError, match="drafter"):
        engine_of(model, drafter=("ngram", "ngram"))

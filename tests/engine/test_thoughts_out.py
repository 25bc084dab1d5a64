"""Thoughts as users see them: outputs, streams, JSON, scores, audits, the command line."""

import json
from dataclasses import replace

import pytest

from tests.cli.conftest import main
from tests.support.thinking import exact, params, prompt_of, said, thinking_model, tokenizer
from tinyspec import Engine, EngineConfig, RequestOutput, audit
from tinyspec.outputs import Thought

PROMPTS = [prompt_of(n, n) for n in (5, 21, 67, 80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved model and its tokenizer."""
    path = tmp_path_factory.mktemp("thinking")
    thinking_model(quiet=0.0, biased=False).save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(folder):
    settings = EngineConfig(reference_rows=16, max_rows=64, page_size=16, thinking_window=3)
    with Engine.from_pretrained(folder, config=settings) as found:
        yield found


def test_texts_and_json(engine):
    outputs = engine.generate(PROMPTS, exact())
    for output in outputs:
        assert [thought.chunk for thought in output.thoughts] == list(range(len(output.thoughts)))
        for thought in output.thoughts:
            words = [f"w{token}" for token in thought.token_ids if token != 1]
            assert thought.text.split() == words
        again = RequestOutput.from_json(output.to_json())
        assert again == output and again.params.thinking
    assert len(outputs[2].thoughts) == 8
    plain = engine.generate(PROMPTS[0], exact(thinking=False))[0]
    assert plain.thoughts is None and RequestOutput.from_json(plain.to_json()) == plain
    # What was written before there were thoughts.
    data = json.loads(plain.to_json())
    del data["thoughts"], data["params"]["thinking"]
    assert RequestOutput.from_json(json.dumps(data)) == plain


def test_streamed_as_they_are_committed(engine):
    wanted = params(num_return_sequences=2)
    outputs = engine.generate(PROMPTS, wanted)
    engine.release()  # nothing is known from before
    with engine.stream(PROMPTS, wanted) as events:
        found = {request.request_id: [] for request in events.requests}
        told = [event for event in events if event.thoughts]
    for event in told:
        assert event.index == 0
        found[event.request_id].append(event.thoughts)
    joined = [[t for thoughts in found[name] for t in thoughts] for name in found]
    assert joined == [output.thoughts for output in outputs]
    assert len([*found.values()][3]) > 1 and sum(not event.token_ids for event in told) > 1


def test_scores_read_with_thoughts(engine):
    outputs = engine.generate(PROMPTS, exact())
    answers = [output.completions[0] for output in outputs]
    scores = engine.score(PROMPTS, [answer.token_ids for answer in answers], params())
    assert scores == [answer.logprobs for answer in answers]
    # Control: read without thoughts.
    plain = engine.score(PROMPTS, [answer.token_ids for answer in answers])
    assert plain[-1] != scores[-1] and plain[0] == scores[0]


def test_audited(engine):
    outputs = engine.generate(PROMPTS, exact(num_return_sequences=2, temperature=1.0, seed=4))
    assert audit(engine, outputs)
    thoughts = outputs[2].thoughts
    active = next(n for n, thought in enumerate(thoughts) if len(thought.token_ids) > 1)

    def forged(**changes):
        other = [*thoughts]
        other[active] = replace(other[active], **changes)
        return replace(outputs[2], thoughts=other)

    silent = [replace(thought, text=None) for thought in thoughts]
    assert audit(engine, [replace(outputs[2], thoughts=silent)])
    others = [
        forged(token_ids=[5, 1]),
        forged(token_ids=[float(t) for t in thoughts[active].token_ids]),
        forged(text="w7"),
        forged(cut=not thoughts[active].cut),
        forged(chunk=active + 1),
        replace(outputs[2], thoughts=thoughts[:-1]),
        replace(outputs[2], thoughts=[*thoughts, Thought(8, [1], "")]),
        replace(outputs[2], thoughts=[None] * 8),
        replace(outputs[2], thoughts=None),
        replace(outputs[2], params=replace(outputs[2].params, thinking=False)),
    ]
    report = audit(engine, [replace(one, request_id=f"{n}") for n, one in enumerate(others)])
    found = {entry.request_id for entry in report.entries if entry.verdict != "same"}
    assert found == {f"{n}" for n in range(len(others))}


def test_command_line(folder, engine, capsys):
    prompt = " ".join(f"w{token}" for token in PROMPTS[2])
    (output,) = engine.generate(prompt, params(4))
    assert said(output) == said(engine.generate([output.prompt_token_ids], params(4))[0])
    given = ["generate", prompt, "--model", str(folder), "--max-new-tokens", "4", "--device", "cpu"]
    assert main([*given, "--thinking"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == output.completions[0].text.strip()
    for thought in output.thoughts:
        shown = f"chunk {thought.chunk}: {thought.text.strip()}" in err
        assert shown == (len(thought.token_ids) > 1)
    assert main([*given, "--thinking", "--json"]) == 0
    found = RequestOutput.from_json(capsys.readouterr().out)
    assert found.thoughts == output.thoughts
    assert main(given) == 0
    assert "chunk" not in capsys.readouterr().err

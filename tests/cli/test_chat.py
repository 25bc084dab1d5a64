"""The conversation on the terminal."""

import pytest

from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams, audit
from tinyspec.cli.chat import Chat
from tinyspec.tools.demo import BUNDLED

LINES = "What is 1 + 2?\n/seed 5\n/deterministic\nAnd 3 + 4?\n"


def test_a_conversation(command, served, stdin, tmp_path):
    """Every answer is that to the conversation so far, and audit takes what /save writes."""
    saved = tmp_path / "chat.jsonl"
    stdin(
        f"{LINES}/save {saved}\n/save {saved}\n/clear\n/nothing\n/seed x\n/save\n"
        f"/save {tmp_path}/no/chat.jsonl\n/exit\nnot read\n"
    )
    status, out, err = command("chat", "--max-new-tokens", 12, "--temperature", 0.5, "--logprobs")
    assert status == 0
    first, second = (RequestOutput.from_json(line) for line in saved.read_text().splitlines())
    answers = [output.completions[0].text for output in (first, second)]
    parts = [answers[0], "seed 5", "deterministic on", answers[1], f"2 answers in {saved}"]
    assert out == "\n".join([*parts, "a new conversation", ""])
    complaints = err.splitlines()
    assert "File exists" in complaints[0] and "command='/nothing' is not" in complaints[1]
    assert "seed='x' is not allowed" in complaints[2]
    assert "the name of a file" in complaints[3] and len(complaints) == 5
    assert complaints[4] == f"tinyspec: {tmp_path}/no/chat.jsonl: No such file or directory"

    messages = [
        {"role": "user", "content": "What is 1 + 2?"},
        {"role": "assistant", "content": answers[0].lstrip()},
        {"role": "user", "content": "And 3 + 4?"},
    ]
    (again,) = served[0].generate([messages], second.params)
    assert again.prompt_token_ids == second.prompt_token_ids
    assert again.completions[0].logprobs == second.completions[0].logprobs
    assert (
        second.params.seed == 5 and second.params.deterministic and not first.params.deterministic
    )
    assert audit(served[0], [second])


def test_a_turn_starts_from_the_pages_of_those_before(capsys):
    """Those of the answers too: every page that the conversation so far fills."""
    config = EngineConfig(page_size=4)
    with Engine.from_pretrained(BUNDLED, device="cpu", config=config) as engine:
        chat = Chat(engine, SamplingParams(max_new_tokens=20), system="Tell the truth.")
        for line in ("What is 1 + 2?", "And 3 + 4?", "And 5 + 4?"):
            assert not chat.take(line)
    before = 0
    for output in chat.outputs:
        (completion,) = output.completions
        assert completion.stats.cached_prompt_tokens == before // 4 * 4
        assert completion.finish_reason == "stop" and len(completion.token_ids) > 4
        before = len(output.prompt_token_ids) + len(completion.token_ids) - 1


def test_ctrl_c_ends_the_answer_alone(served, capsys, monkeypatch):
    chat = Chat(served[0], SamplingParams(max_new_tokens=9, ignore_eos=True))
    steps = []
    advance = served[0].tracker.advance

    def interrupted():
        steps.append(0)
        if len(steps) == 3:
            raise KeyboardInterrupt
        advance()

    monkeypatch.setattr(served[0].tracker, "advance", interrupted)
    chat.take("What is 1 + 2?")
    completion = chat.outputs[0].completions[0]
    assert completion.finish_reason == "abort" and 0 < len(completion.token_ids) < 9
    assert not served[0].has_unfinished()
    chat.take("And now?")
    assert chat.outputs[1].completions[0].finish_reason == "length"


def test_ctrl_c_at_the_prompt(command, served, monkeypatch):
    def interrupted(prompt):
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    assert command("chat") == (130, "", "tinyspec: interrupted\n")


def test_a_conversation_that_is_too_long(served, capsys, monkeypatch):
    chat = Chat(served[0], SamplingParams(max_new_tokens=9))
    chat.take("word " * 3000)
    assert "/clear begins another conversation" in capsys.readouterr().err
    assert chat.outputs == []
    monkeypatch.setattr(served[0].tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="one whose tokenizer has a chat template"):
        Chat(served[0], SamplingParams())

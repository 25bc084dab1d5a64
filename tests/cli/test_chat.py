"""The conversation on the terminal."""

from unittest.mock import Mock

import pytest

from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.chat import Chat
from tinyspec.tools.demo import BUNDLED

ASKED = ("What is 1 + 2?", "And 3 + 4?")
OPTIONS = ("--max-new-tokens", 12, "--temperature", 0.5, "--seed", 5, "--deterministic")


def test_a_conversation(command, served, stdin):
    """Every answer is that to the conversation so far, and to nothing else after /clear."""
    stdin(f"{ASKED[0]}\n\n{ASKED[1]}\n/clear\n{ASKED[0]}\n/exit\nnot read\n")
    status, out, err = command("chat", *OPTIONS)
    assert (status, err) == (0, "")
    params = SamplingParams(max_new_tokens=12, temperature=0.5, seed=5, deterministic=True)
    messages, answers = [], []
    for asked in ASKED:
        messages.append({"role": "user", "content": asked})
        (output,) = served[0].generate([messages], params)
        answers.append(output.completions[0].text)
        messages.append({"role": "assistant", "content": answers[-1].lstrip()})
    assert out == "\n".join([*answers, answers[0], ""])


def test_a_turn_starts_from_the_pages_of_those_before(capsys):
    """Those of the answers too: every page that the conversation so far fills."""
    config = EngineConfig(page_size=4)
    with Engine.from_pretrained(BUNDLED, device="cpu", config=config) as engine:
        chat = Chat(engine, SamplingParams(max_new_tokens=20), system="Tell the truth.")
        answers = [chat.take(line) for line in (*ASKED, "And 5 + 4?")]
    before = 0
    for answer in answers:
        tokens = [token for event in answer for token in event.token_ids]
        assert {event.cached_prompt_tokens for event in answer} == {before // 4 * 4}
        assert answer[-1].finish_reason == "stop" and len(tokens) > 4
        before = answer[0].num_prompt_tokens + len(tokens) - 1


def test_ctrl_c_ends_the_answer_alone(served, capsys, monkeypatch):
    chat = Chat(served[0], SamplingParams(max_new_tokens=9, ignore_eos=True))
    steps = []
    advance = served[0].tracker.advance

    def interrupted(called):
        steps.append(0)
        if len(steps) == 3:
            raise KeyboardInterrupt
        advance(called)

    monkeypatch.setattr(served[0].tracker, "advance", interrupted)
    told = chat.take("What is 1 + 2?")
    assert 0 < sum(len(event.token_ids) for event in told) < 9
    assert told[-1].finish_reason is None
    assert not served[0].has_unfinished()
    assert chat.take("And now?")[-1].finish_reason == "length"


def test_ctrl_c_at_the_prompt(command, served, monkeypatch):
    monkeypatch.setattr("builtins.input", Mock(side_effect=KeyboardInterrupt))
    assert command("chat") == (130, "", "tinyspec: interrupted\n")


def test_a_conversation_that_is_too_long(command, served, stdin, monkeypatch):
    """It is said, and stays as it was."""
    stdin(f"{'word ' * 3000}\n{ASKED[0]}\n")
    status, out, err = command("chat", "--max-new-tokens", 9)
    assert status == 0 and out.count("\n") == 1 and err.count("\n") == 1
    assert "max_model_len" in err and "/clear begins another conversation" in err
    monkeypatch.setattr(served[0].tokenizer, "chat_template", None)
    with pytest.raises(ValueError, match="one whose tokenizer has a chat template"):
        Chat(served[0], SamplingParams())

"""The command line, as a user meets it: prompts in, text and JSON lines out, audits of these."""

import io
import json
from dataclasses import replace
from unittest.mock import Mock

import pytest

from tests.support.tiny import tiny
from tinyspec import Engine, EngineConfig, RequestOutput, SamplingParams, StreamEvent
from tinyspec.cli.chat import Chat
from tinyspec.cli.generate import OutputFile, TextWriter
from tinyspec.determinism.fingerprint_parts import digest_of
from tinyspec.tools.demo import BUNDLED


def outputs(text):
    return [RequestOutput.from_json(line) for line in text.splitlines()]


def test_audit_of_what_generate_wrote(command, tmp_path):
    """It goes on after a bad line; another reference is another engine."""
    file = tmp_path / "outputs.jsonl"
    options = ("--max-new-tokens", 8, "--deterministic", "--logprobs", "--json")
    _, written, _ = command("generate", "One day", "Once", "--temperature", 0.9, *options)
    one, other = outputs(written)
    file.write_text(written)
    status, out, _ = command("audit", file)
    assert status == 0 and "2 same" in out and one.fingerprint in out

    other.completions[0].token_ids[3] += 1
    good, bad = written.splitlines()[0], written.replace('"temperature": 0.9', '"temperature": -1')
    twice = good.replace('"request_id": ', '"request_id": "b", "request_id": ')
    lines = (good, "", bad.splitlines()[0], "[1]", twice, other.to_json(), "")
    file.write_text("\n".join(lines))
    status, out, err = command("audit", file, "--json")
    entries = json.loads(out)["entries"]
    assert status == 2
    assert [(e["verdict"], e["position"]) for e in entries] == [("same", None), ("differs", 3)]
    assert "line 3 is not an output of tinyspec: temperature=-1" in err and "line 4" in err
    assert "line 5 is not an output of tinyspec" in err and "twice" in err

    status, out, _ = command("audit", file, "--reference-rows", 16)
    assert status == 2 and "2 not comparable" in out


def test_texts_stand_in_the_order_of_prompts():
    """However they grow; the first unfinished one at once."""
    file, seen = io.StringIO(), []
    writer = TextWriter([("a", 0), ("a", 1), ("b", 0)], file)
    for name, index, text in (("b", 0, "x."), ("a", 0, "1"), ("a", 1, "3."), ("a", 0, "2.")):
        end = "stop" if text.endswith(".") else None
        writer.event(StreamEvent(name, index, [1], text, finish_reason=end))
        seen.append(file.getvalue())
    assert seen == ["", "1", "1", "12.\n3.\nx.\n"]


def test_lines_end_with_line_feeds_alone(command, served, tmp_path):
    """U+2028 and U+0085 may stand within JSON, and in a prompt."""
    text = "a\u2028b\x85c"
    for name, line in (("p.jsonl", json.dumps({"prompt": text}, ensure_ascii=False)), ("p", text)):
        file = tmp_path / name
        file.write_text(f"{line}\r\n", encoding="utf-8", newline="")
        status, out, err = command("generate", "--file", file, "--max-new-tokens", 1, "--json")
        assert (status, err) == (0, "")
        assert outputs(out)[0].prompt_token_ids == served[0].tokenizer(text)["input_ids"]


@pytest.mark.parametrize("dash", [(), ("-",), ("--file", "-")])
def test_standard_input(command, served, stdin, dash):
    """JSON lines are recognised by the first."""
    few = ("--max-new-tokens", 1, "--json")
    stdin('\ufeff{"prompt": [5, 6]}\n{"prompt": "Once"}\n')
    first, second = outputs(command("generate", *dash, *few)[1])
    assert len(first.prompt_token_ids) == 2 != len(second.prompt_token_ids)
    stdin("{not JSON}\nOnce\n")
    assert len(outputs(command("generate", *dash, *few)[1])) == 2
    stdin('{"promt": "a"}\n')
    status, _, err = command("generate", *dash, *few)
    assert status == 2 and "standard input, line 1" in err


def test_what_is_not_utf8(command, served, stdin):
    stdin(b"Once\n\xff\n")
    assert command("generate")[2].startswith("tinyspec: standard input, line 2 is not UTF-8")
    stdin(b"")
    assert command("generate")[2] == "tinyspec: prompts=[] is not allowed: at least one prompt\n"


def test_an_aborted_completion(command, served, stdin):
    """Exit status 1, and one line that says which and why; the others are there."""
    model = tiny()
    model.lm_head.weight.data[0] = float("nan")
    stdin('{"prompt": [5, 6]}\n')
    with Engine(model) as served[0]:
        status, out, err = command("generate", "--json", "--max-new-tokens", 2)
    assert (status, outputs(out)[0].completions[0].finish_reason) == (1, "abort")
    assert err.startswith("tinyspec: standard input, line 1: aborted: ") and err.count("\n") == 1


def test_score(command, served, tmp_path):
    file = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": "One", "continuation": " day"}, {"prompt": [5], "continuation": [6, 7]}]
    file.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    status, out, err = command("score", "--file", file, "--json", "--temperature", 0.5)
    assert (status, err) == (0, "")
    found = [json.loads(line) for line in out.splitlines()]
    params = SamplingParams(temperature=0.5)
    expected = served[0].score(["One", [5]], [" day", [6, 7]], params)
    assert [one["logprobs"] for one in found] == expected
    assert [one["line"] for one in found] == [1, 2]
    assert {one["fingerprint"] for one in found} == {served[0].fingerprint}
    _, out, _ = command("score", "One", " day", "--temperature", 0.5)
    assert out.startswith(f"{sum(expected[0]):.6f} in ")
    file.write_text('{"prompt": "One", "continuation": [6, "a"]}\n')
    status, _, err = command("score", "--file", file)
    assert status == 2 and f"{file}, line 1: continuation[1]='a' is not allowed" in err


def test_what_a_terminal_is_told(command, monkeypatch, tmp_path):
    """A line about the run at its end; nothing where standard error is no terminal."""
    arguments = ("score", "Once", " upon a time")
    assert command(*arguments)[2] == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    err = command(*arguments)[2]
    assert " tokens, " in err and "prompt tokens cached" in err and "passes canonical" in err


# The conversation on the terminal

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
    run_pass = served[0].tracker.run_pass

    def interrupted():
        steps.append(0)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return run_pass()

    monkeypatch.setattr(served[0].tracker, "run_pass", interrupted)
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


# --output and --resume: every request once in the file, whatever ended the runs before

PROMPTS = ["One day", "Once", "What is 1 + 2?"]
WRITTEN = ("--max-new-tokens", 3, "--deterministic", "--logprobs")


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "outputs.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return source, target


@pytest.fixture
def generate(command, served, files):
    def run(*more):
        return command("generate", "--file", files[0], "--output", files[1], *WRITTEN, *more)

    return run


def bits_in(file):
    outputs = [RequestOutput.from_json(line) for line in file.read_text().splitlines()]
    assert len({output.request_id for output in outputs}) == len(outputs)
    return {o.request_id: (o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs}


def test_interrupted_cut_off_and_continued(generate, files, monkeypatch):
    """The outputs are those of a run that nothing interrupted."""
    assert generate() == (0, "", "")
    whole = bits_in(files[1])
    assert len(whole) == len(PROMPTS)
    files[1].unlink()

    write, written, most = OutputFile.write, [], [1]

    def writes(file, output):
        if len(written) == most[0]:
            raise KeyboardInterrupt
        written.append(output.request_id)
        write(file, output)

    monkeypatch.setattr(OutputFile, "write", writes)
    status, _, err = generate()
    assert status == 130 and err.count("\n") == 1
    assert err.startswith("tinyspec: interrupted: what has finished is in") and "--resume" in err
    assert set(bits_in(files[1])) == set(written)

    with files[1].open("a") as file:
        file.write('{"request_id": "line-2-0')
    most[0] = None
    assert generate("--resume") == (0, "", "")
    assert bits_in(files[1]) == whole
    assert sorted(written) == sorted(whole), "nothing runs twice"
    assert generate("--resume") == (0, "", "")
    assert len(written) == len(whole)


def test_a_file_is_not_written_over(generate, files):
    files[1].write_text("something\n")
    status, _, err = generate()
    assert status == 2 and "--resume continues one" in err
    assert files[1].read_text() == "something\n"
    status, _, err = generate("--resume")
    assert status == 2 and f"{files[1]}, line 1 is not an output of tinyspec" in err


def test_other_input_is_refused(generate, files):
    """Other parameters, another order of the prompts, fewer of them."""
    generate()
    before, lines = files[1].read_bytes(), files[0].read_text().splitlines()
    for text, more in (
        ("\n".join(lines), ("--temperature", 0.5)),
        ("\n".join([lines[1], lines[0], lines[2]]), ()),
        (lines[0], ()),
    ):
        files[0].write_text(text)
        status, _, err = generate("--resume", *more)
        assert status == 2 and f"{files[1]} has an output of 'line-" in err
        assert "which is not in the input" in err and err.count("\n") == 1
    assert files[1].read_bytes() == before


@pytest.mark.parametrize(
    ("options", "part", "value", "told"),
    [
        ((), "threads", 99, "threads 99 -> "),
        (("--stop", "zzz"), "tokenizer", "sha256 0", "tokenizer"),  # which decides where they end
    ],
    ids=["threads", "tokenizer"],
)
def test_another_fingerprint_is_refused(generate, files, options, part, value, told):
    """Control: with its own an output is continued."""
    assert generate(*options) == generate(*options, "--resume") == (0, "", "")
    output, *others = map(RequestOutput.from_json, files[1].read_text().splitlines())
    parts = {**output.fingerprint_parts, part: value}
    other = replace(output, fingerprint=digest_of(parts), fingerprint_parts=parts)
    files[1].write_text("".join(o.to_json() + "\n" for o in (other, *others[:1])))
    before = files[1].read_bytes()
    status, _, err = generate(*options, "--resume")
    assert status == 2 and f"its fingerprint is {digest_of(parts)}: {told}" in err
    assert files[1].read_bytes() == before

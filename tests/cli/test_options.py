"""Options and input: every field that a shell can give, and one line for everything refused."""

import json
from dataclasses import fields

import pytest

from tests.support.tiny import tiny
from tinyspec import Engine, RequestOutput, SamplingParams
from tinyspec.cli.jobs import OPTIONS

FUNCTIONS = {"logits_processors", "stopping_criteria"}
GIVEN = {
    "max_new_tokens": ("--max-new-tokens", "6"),
    "min_new_tokens": ("--min-new-tokens", "2"),
    "temperature": ("--temperature", "0.5"),
    "top_k": ("--top-k", "9"),
    "top_p": ("--top-p", "0.9"),
    "min_p": ("--min-p", "0.01"),
    "repetition_penalty": ("--repetition-penalty", "1.1"),
    "seed": ("--seed", "7"),
    "deterministic": ("--deterministic",),
    "num_return_sequences": ("--num-return-sequences", "2"),
    "eos_token_id": ("--eos-token-id", "3", "--eos-token-id", "5"),
    "ignore_eos": ("--ignore-eos",),
    "stop_strings": ("--stop", "zzz", "--stop-strings", "yyy"),
    "stop_token_ids": ("--stop-token-ids", "4"),
    "logprobs": ("--logprobs",),
    "top_logprobs": ("--top-logprobs", "2"),
    "prompt_logprobs": ("--prompt-logprobs",),
    "logprobs_mode": ("--logprobs-mode", "raw"),
    "thinking": ("--thinking",),
}
EXPECTED = SamplingParams(
    max_new_tokens=6,
    min_new_tokens=2,
    temperature=0.5,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    seed=7,
    deterministic=True,
    num_return_sequences=2,
    eos_token_id=(3, 5),
    ignore_eos=True,
    stop_strings=("zzz", "yyy"),
    stop_token_ids=(4,),
    logprobs=True,
    top_logprobs=2,
    prompt_logprobs=True,
    logprobs_mode="raw",
)


def test_every_field_has_an_option(command, served):
    assert set(OPTIONS) == set(GIVEN) == {f.name for f in fields(SamplingParams)} - FUNCTIONS
    # The bundled model does not think.
    options = [word for name, words in GIVEN.items() if name != "thinking" for word in words]
    status, out, err = command("generate", "One day", "--json", *options)
    assert (status, err) == (0, "")
    assert RequestOutput.from_json(out).params == EXPECTED


LINES = {
    "a number": ('{"prompt": 5}', "prompt=5 is not allowed: text, a list of token ids"),
    "empty": ('{"prompt": []}', "prompt=[] is not allowed: text, a list of token ids"),
    "a string among token ids": ('{"prompt": [5, "a"]}', "prompt[1]='a' is not allowed: token"),
    "lone surrogate": (r'{"prompt": "a\ud800"}', r"prompt[1]='\ud800' is not allowed: no lone"),
    "in a message": (
        r'{"prompt": [{"role": "user", "content": "\udc00"}]}',
        r"='\udc00' is not allowed: no lone surrogates",
    ),
    "in a stop": (r'{"prompt": "a", "stop_strings": "\ud800"}', "stop_strings='\\ud800'"),
    "long": (json.dumps({"prompt": [5] * 5000}), "prompt='5000 tokens' is not allowed: fewer than"),
    "unknown": ('{"prompt": "a", "temprature": 1}', "did you mean temperature?"),
    "vLLM's": (
        '{"prompt": "a", "max_tokens": 1}',
        "max_tokens=1 is not allowed: it is called max_",
    ),
    "a bad value": ('{"prompt": "a", "top_p": 2}', "top_p=2 is not allowed: a number in [0, 1]"),
    "a function": ('{"prompt": "a", "stopping_criteria": ["f"]}', "stopping_criteria=['f'] is not"),
    "twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "stands twice"),
    "no prompt": ('{"promt": "a"}', 'a JSON object with a "prompt"'),
    "no JSON": ('{"prompt": "a"', "is not JSON: Expecting ',' delimiter (column 15)"),
    "a list": ('["a"]', 'a JSON object with a "prompt"'),
}


@pytest.mark.parametrize(("line", "complaint"), LINES.values(), ids=LINES)
def test_bad_lines(command, served, tmp_path, line, complaint):
    """One line that names the file and the line; nothing runs."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once"}\n\n' + line + '\n{"prompt": "Once"}\n')
    status, out, err = command("generate", "--file", file)
    assert (status, out) == (2, "")
    assert err.startswith(f"tinyspec: {file}, line 3") and complaint in err
    assert err.count("\n") == 1 and len(err) < 700


def test_control_the_lines_around_them_run(command, served, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once"}\n\n{"prompt": "Once"}\n')
    status, out, err = command("generate", "--file", file, "--max-new-tokens", 2)
    assert (status, out.count("\n"), err) == (0, 2, "")


BAD = {
    "--device cuda": "device='cuda' is not allowed: auto, cpu, cuda or cuda:N, and torch finds no",
    "--device gpu": "device='gpu' is not allowed: auto, cpu, cuda or cuda:N",
    "--dtype float99": "argument --dtype: invalid choice: 'float99' (choose from",
    "--top-p 2": "top_p=2.0 is not allowed: a number in [0, 1]",
    "--top-k many": "argument --top-k: invalid int value: 'many'",
    "--model no/such/model": "model='no/such/model' is not allowed: a folder with a model",
    "--file nowhere.txt": "tinyspec: nowhere.txt: No such file or directory\n",
    "--trace nowhere/run.json": "tinyspec: nowhere/run.json: No such file or directory\n",
    "--resume": "--resume=True is not allowed: together with --output",
}


@pytest.mark.parametrize(("options", "complaint"), BAD.items(), ids=BAD)
def test_bad_options(command, monkeypatch, options, complaint):
    """On a machine without a GPU, and without a network."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    status, out, err = command("generate", "Once", *options.split())
    assert (status, out) == (2, "")
    assert complaint in err and err.count("\n") == 1


def test_debug_shows_the_traceback(command, served):
    with pytest.raises(ValueError, match="top_p=2"):
        command("generate", "Once", "--top-p", "2", "--debug")


def test_unexpected_errors_are_one_line_too(command, served, monkeypatch):
    def fail(*_):
        raise RuntimeError("something\nelse")

    monkeypatch.setattr(served[0].tracker, "add", fail)
    status, _, err = command("generate", "Once")
    assert status == 2
    assert err == "tinyspec: RuntimeError: something else (--debug shows the traceback)\n"


def outputs(text):
    return [RequestOutput.from_json(line) for line in text.splitlines()]


def test_lines_end_with_line_feeds_alone(command, served, tmp_path):
    """U+2028 and U+0085 may stand within JSON, and in a prompt."""
    text = "a\u2028b\x85c"
    for name, line in (("p.jsonl", json.dumps({"prompt": text}, ensure_ascii=False)), ("p", text)):
        file = tmp_path / name
        file.write_text(f"{line}\r\n", encoding="utf-8", newline="")
        status, out, err = command("generate", "--file", file, "--max-new-tokens", 1, "--json")
        assert (status, err) == (0, "")
        (output,) = outputs(out)
        assert output.prompt_token_ids == served[0].tokenizer(text)["input_ids"]
        (tmp_path / "audited").write_text(out)


@pytest.mark.parametrize("dash", [(), ("-",), ("--file", "-")])
def test_standard_input(command, served, stdin, dash):
    """JSON lines are recognised by the first."""
    few = ("--max-new-tokens", 1, "--json")
    stdin('\ufeff{"prompt": [5, 6]}\n{"prompt": "Once"}\n')
    _, out, _ = command("generate", *dash, *few)
    assert {o.request_id[:6]: len(o.prompt_token_ids) for o in outputs(out)}["line-1"] == 2
    stdin("{not JSON}\nOnce\n")
    _, out, _ = command("generate", *dash, *few)
    assert len(outputs(out)) == 2
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
    assert command("score", "One")[0] == 2

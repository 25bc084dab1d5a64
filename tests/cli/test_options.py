"""Options and input: every field that a shell can give, and one line for everything refused."""

import json
from dataclasses import fields
from unittest.mock import Mock

import pytest

from tests.support.loading import saved
from tinyspec import Completion, Engine, RequestOutput, SamplingParams
from tinyspec.cli.common import SAMPLING, Parser, add_sampling

# As a shell gives it, and what becomes of it.
GIVEN = {
    "max_new_tokens": ("--max-new-tokens 6", 6),
    "min_new_tokens": ("--min-new-tokens 2", 2),
    "temperature": ("--temperature 0.5", 0.5),
    "top_k": ("--top-k 9", 9),
    "top_p": ("--top-p 0.9", 0.9),
    "min_p": ("--min-p 0.01", 0.01),
    "repetition_penalty": ("--repetition-penalty 1.1", 1.1),
    "frequency_penalty": ("--frequency-penalty 0.5", 0.5),
    "presence_penalty": ("--presence-penalty -0.5", -0.5),
    "logit_bias": ('--logit-bias {"5":2.5}', {5: 2.5}),
    "allowed_token_ids": ("--allowed-token-ids 5 --allowed-token-ids 6", (5, 6)),
    "bad_words_ids": ("--bad-words-ids [[5],[6,7]]", ((5,), (6, 7))),
    "regex": ("--regex .*", ".*"),
    "seed": ("--seed 7", 7),
    "deterministic": ("--deterministic", True),
    "num_return_sequences": ("--num-return-sequences 2", 2),
    "eos_token_id": ("--eos-token-id 3 --eos-token-id 5", (3, 5)),
    "ignore_eos": ("--ignore-eos", True),
    "stop_strings": ("--stop zzz --stop-strings yyy", ("zzz", "yyy")),
    "stop_token_ids": ("--stop-token-ids 4", (4,)),
    "include_stop_str": ("--no-include-stop-str", False),
    "logprobs": ("--logprobs", True),
    "top_logprobs": ("--top-logprobs 2", 2),
    "prompt_logprobs": ("--prompt-logprobs", True),
    "logprobs_mode": ("--logprobs-mode raw", "raw"),
}


def test_every_field_has_an_option(command, served):
    # The bundled model does not think, and a text has one form.
    functions = {"logits_processors", "stopping_criteria"}
    assert set(SAMPLING) == {*GIVEN, "thinking", "json_schema", "grammar"}
    assert set(SAMPLING) == {f.name for f in fields(SamplingParams)} - functions
    options = [word for words, _ in GIVEN.values() for word in words.split()]
    status, out, err = command("generate", "One day", "--json", *options)
    assert (status, err) == (0, "")
    expected = SamplingParams(**{name: value for name, (_, value) in GIVEN.items()})
    assert RequestOutput.from_json(out).params == expected


def test_every_option_is_told():
    """By the docstring of SamplingParams."""
    parser = Parser()
    add_sampling(parser)
    helps = {action.dest: action.help for action in parser._actions}
    assert helps.keys() == {*SAMPLING, "help"} and all(helps.values())
    assert helps["seed"] == "makes a sampled request repeatable"


LINES = {
    "a number": ('{"prompt": 5}', "prompt=5 is not allowed: text, a list of token ids"),
    "in a message": (r'{"prompt": [{"role": "user", "content": "\udc00"}]}', "no lone surrogates"),
    "long": (json.dumps({"prompt": [5] * 5000}), "prompt='5000 tokens' is not allowed: fewer than"),
    "unknown": ('{"prompt": "a", "temprature": 1}', "did you mean temperature?"),
    "vLLM's": ('{"prompt": "a", "max_tokens": 1}', "max_tokens=1 is not allowed: it is called "),
    "a bad value": ('{"prompt": "a", "top_p": 2}', "top_p=2 is not allowed: a number in [0, 1]"),
    "a function": ('{"prompt": "a", "stopping_criteria": ["f"]}', "stopping_criteria=['f'] is not"),
    "twice": ('{"prompt": "a", "seed": 1, "seed": 2}', "stands twice"),
    "no prompt": ('{"promt": "a"}', 'a JSON object with a "prompt"'),
    "messages": ('{"messages": [{"role": "user"}]}', "(messages: it is called prompt here, which "),
    "no JSON": ('{"prompt": "a"', "is not JSON: Expecting ',' delimiter: line 1 column 15"),
}


def test_bad_lines(command, served, tmp_path):
    """One line that names the file and the line; nothing runs. Control: the lines around do."""
    file = tmp_path / "prompts.jsonl"
    for line, complaint in LINES.values():
        file.write_text('{"prompt": "Once"}\n\n' + line + '\n{"prompt": "Once"}\n')
        status, out, err = command("generate", "--file", file)
        assert (status, out) == (2, ""), line
        assert err.startswith(f"tinyspec: {file}, line 3") and complaint in err
        assert err.count("\n") == 1 and len(err) < 700
    file.write_text('{"prompt": "Once"}\n\n{"prompt": "Once"}\n')
    status, out, err = command("generate", "--file", file, "--max-new-tokens", 2)
    assert (status, out.count("\n"), err) == (0, 2, "")


@pytest.mark.parametrize("name", ["generate", "chat", "score", "doctor", "audit", "demo"])
def test_how_a_model_is_loaded(command, monkeypatch, tmp_path, name):
    """Of every command that loads one."""
    load = Mock(side_effect=ValueError("enough"))
    monkeypatch.setattr(Engine, "from_pretrained", load)
    output = RequestOutput("a", [5], SamplingParams(), [Completion([6], finish_reason="stop")])
    (tmp_path / "o.jsonl").write_text(output.to_json())
    given = {"generate": ["Once"], "score": ["Once", " day"], "audit": [tmp_path / "o.jsonl"]}
    call = [name, *given.get(name, []), "--model", "a/b"]
    assert command(*call, "--revision", "v1", "--trust-remote-code")[2] == "tinyspec: enough\n"
    assert command(*call)[0] == 2
    found = [(call.args[0], call.kwargs) for call in load.call_args_list]
    assert found == [("a/b", {"revision": "v1", "trust_remote_code": True}), ("a/b", {})]


def test_a_folder_without_a_tokenizer(command, tmp_path):
    """Ids in and out; text and chats are refused in one line."""
    given, file = ("--model", saved(tmp_path), "--max-new-tokens", 3), tmp_path / "p.jsonl"
    file.write_text('{"prompt": [1, 2]}\n{"prompt": [3]}\n')
    status, out, _ = command("generate", "--file", file, "--json", *given)
    ids = [RequestOutput.from_json(line).completions[0].token_ids for line in out.splitlines()]
    assert status == 0 and list(map(len, ids)) == [3, 3]
    status, out, _ = command("generate", "--file", file, *given)
    assert [[int(token) for token in line.split()] for line in out.splitlines()] == ids
    file.write_text('{"prompt": [1, 2], "continuation": [3, 4]}\n')
    assert "in 2 tokens" in command("score", "--file", file, *given[:2])[1]
    for call in (("generate", "Once"), ("chat",)):
        status, out, err = command(*call, *given)
        assert (status, out) == (2, "") and "tokenizer" in err.splitlines()[-1]

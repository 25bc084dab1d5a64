"""--output and --resume: every request once in the file, whatever ended the runs before."""

import json
from dataclasses import replace

import pytest

from tinyspec import RequestOutput
from tinyspec.cli.generate import OutputFile
from tinyspec.determinism.fingerprint_parts import digest_of

PROMPTS = ["One day", "Once", "What is 1 + 2?"]
OPTIONS = ("--max-new-tokens", 3, "--deterministic", "--logprobs")


@pytest.fixture
def files(tmp_path):
    source, target = tmp_path / "prompts.jsonl", tmp_path / "outputs.jsonl"
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    return source, target


@pytest.fixture
def generate(command, served, files):
    def run(*more):
        return command("generate", "--file", files[0], "--output", files[1], *OPTIONS, *more)

    return run


def bits(file):
    outputs = [RequestOutput.from_json(line) for line in file.read_text().splitlines()]
    assert len({output.request_id for output in outputs}) == len(outputs)
    return {o.request_id: (o.completions[0].token_ids, o.completions[0].logprobs) for o in outputs}


def test_interrupted_cut_off_and_continued(generate, files, monkeypatch):
    """The outputs are those of a run that nothing interrupted."""
    assert generate() == (0, "", "")
    whole = bits(files[1])
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
    assert set(bits(files[1])) == set(written)

    with files[1].open("a") as file:
        file.write('{"request_id": "line-2-0')
    most[0] = None
    assert generate("--resume") == (0, "", "")
    assert bits(files[1]) == whole
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

"""The bundled thinking model, by the engine and by the plain reading, and its demo."""

import io
from contextlib import ExitStack
from pathlib import Path
from random import Random

import pytest
from transformers import AutoTokenizer

from benchmarks.coin_reader.tasks import TASKS
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.main import main
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.thinking.model import ThinkingModel
from tinyspec.thinking.reading import read
from tinyspec.tools.demo_thinking import BUNDLED, PROMPT, WAYS, demo_thinking, rounds

END = 1


@pytest.fixture(scope="module")
def model():
    return ThinkingModel.from_pretrained(BUNDLED)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(BUNDLED)


def prompts_of(tokenizer, operations, count):
    rng = Random(f"demo {operations}")
    made = [TASKS["parity"].example(rng, operations, held_out=True) for _ in range(count)]
    return [tokenizer(" ".join(e.prompt)).input_ids for e in made], [e.answer[0] for e in made]


def words(tokenizer, reading):
    """The first word of each answer."""
    return tokenizer.convert_ids_to_tokens(reading.logits.argmax(-1).tolist())


@pytest.mark.parametrize("operations, count", [(10, 24), (40, 8)])
def test_the_engine_is_right_and_thinks_what_the_reading_thinks(
    model, tokenizer, operations, count
):
    """Also where states are taken away, and then it is wrong about half of the time."""
    prompts, answers = prompts_of(tokenizer, operations, count)
    params = SamplingParams(max_new_tokens=2, thinking=True)

    def by_engine():
        with Engine(model, tokenizer) as engine:
            outputs = engine.generate(prompts, params)
        thoughts = [[thought.token_ids for thought in output.thoughts] for output in outputs]
        return thoughts, [output.completions[0].text.split()[0] for output in outputs]

    reading = read(model, prompts)
    found = by_engine()
    assert found == (reading.thoughts, words(tokenizer, reading))
    assert found[1] == answers


def test_it_is_small():
    assert sum(path.stat().st_size for path in Path(BUNDLED).iterdir()) < 2e6


class Ascii(io.StringIO):
    encoding = "ascii"

    def isatty(self):
        return False


def test_the_demo_shows_its_run(tokenizer, capsys):
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(
                Engine(
                    ThinkingModel.from_pretrained(BUNDLED),
                    tokenizer,
                    EngineConfig(thinking_window=window),
                )
            )
            for name, window in WAYS.items()
        }
        assert demo_thinking(engines, ThinkingConfig.load(BUNDLED), PROMPT) == 0
    out = capsys.readouterr().out
    assert "T → heads <eos>" in out and "T → tails <eos>" in out and "answer: heads" in out
    assert "C(tails <eos>)" in out and "T → <eos>" in out and "identical, bit for bit" in out
    assert "speculative: 3 rounds, 12 chunks run" in out
    assert "sequential: 5 rounds, 5 chunks run" in out


@pytest.mark.parametrize("window", [None, 1, 3])
def test_drawn_rounds_are_those_of_the_engine(model, tokenizer, window):
    """Chunks that think and chunks that do not, by words that the model knows in another order."""
    (prompt, *_), _ = prompts_of(tokenizer, 12, 1)
    config = EngineConfig(thinking_window=window)
    with Engine(model, tokenizer, config) as engine:
        (output,) = engine.generate([prompt], SamplingParams(max_new_tokens=1, thinking=True))
    drawn = list(rounds(output.thoughts, window, END))
    assert output.completions[0].stats.thinking_passes == len(drawn)


def test_by_command(capsys, monkeypatch):
    out = Ascii()
    monkeypatch.setattr("sys.stdout", out)
    assert main(["demo", "--thinking"]) == 0
    assert "identical, bit for bit" in out.getvalue()
    monkeypatch.undo()
    assert main(["demo", "--thinking", "--model", str(BUNDLED.parent / "storyteller")]) != 0
    assert "thinking_config.json is no ThinkingConfig" in capsys.readouterr().err

"""The demos: what they show comes from their runs, and the status hangs on the promise alone."""

import io
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.coin_reader.tasks import TASKS
from benchmarks.storyteller import evaluate as scores
from benchmarks.storyteller import questions as stories
from tinyspec import Engine, EngineConfig, SamplingParams
from tinyspec.cli.main import main
from tinyspec.thinking.config import ThinkingConfig
from tinyspec.tools import demo as demos
from tinyspec.tools.demo import BUNDLED, COINS, THINKER, WAYS, Demo, demo, demo_thinking


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(verify="always", trace=True, draft_window=3)
    with Engine.from_pretrained(BUNDLED, "bfloat16", "cpu", config) as engine:
        yield engine


def shown(capsys):
    """Lines of the demo: few and short enough for a terminal, both outcomes among them."""
    found = capsys.readouterr().out.splitlines()
    assert len(found) <= 45 and max(map(len, found)) <= 100
    heads = [line.partition(":")[0] for line in found]
    assert heads.count("Rollback") == heads.count("No Rollback") == 1
    assert heads[-2:] == ["Proven", "Next"] and "deterministic=True kept all " in found[-2]
    return found


def test_it_shows_its_own_run(capsys):
    assert main(["demo", "--crowd", "3", "--max-new-tokens", "60"]) == 0
    found = shown(capsys)
    (same,) = [n for n, line in enumerate(found) if line.endswith(": identical, bit for bit")]
    (head,) = [n for n, line in enumerate(found) if line.startswith("Rollback: ")]
    assert found[3].startswith("deterministic=False") and same < head, "the texts first"


LYING = "a drafter that lies on purpose"


def test_only_both_outcomes_of_one_where_no_draft_is_wrong(capsys):
    """On equal bits a drafter supplies the rollback, and the demo says so."""
    config = EngineConfig(verify="always", trace=True, draft_window=3)
    with Engine.from_pretrained(BUNDLED, "float32", "cpu", config) as exact:
        assert demo(exact, 1, 12, patience=0.0, rollback=True) == 0
        assert exact.stats().rollbacks == 0
        found = shown(capsys)
    assert found[0].startswith("The fast path gave no verify with a rollback in this run")
    assert LYING in found[0] and not any("deterministic=" in line for line in found[:-2])
    assert "drafts below: the same tokens." in " ".join(found[:2])
    told = " ".join(found)
    assert "drafts of a drafter: no KV" in told and "T3' dropped, T3 kept" in told


def test_control_a_broken_promise_is_the_status(engine, capsys, monkeypatch):
    whole = Demo.pair

    def broken(self, seed, deterministic):
        found = whole(self, seed, deterministic)
        found[1].completions[0].token_ids[2] += 1
        return found

    monkeypatch.setattr(Demo, "pair", broken)
    assert demo(engine, 1, 5, patience=0.0) == 1
    out = capsys.readouterr().out
    assert "DIFFERENT: token " in out and "another text from token 3 on" in out


# The seed's figure, and what its labels are in the demo.
FIGURE = (Path(__file__).parent / "seeds" / "thinking-states.txt").read_text()
LABELS = {
    '"KV Cache"': "KV cache",
    "L<sup>in</sup>": "L_in   S",
    "L<sup>out</sup>": "L_out  Z",
    "`T` and `C`": "T C  T \N{UPWARDS ARROW}  C \N{RIGHTWARDS ARROW}",
    "`S_{i+1}`": "S1 = ",
    "`Z_i`": "Z1 = ",
    '"<EOS>"': "<eos>",
    '"heads."': "answer ",
}


@pytest.fixture(scope="module")
def thinkers():
    with ExitStack() as stack:
        engines = {}
        for name, window in WAYS.items():
            config = EngineConfig(thinking_window=window, trace=True)
            engines[name] = stack.enter_context(Engine.from_pretrained(THINKER, config=config))
        yield engines


def rounds(out: str, column: int) -> tuple[list[int], list[str]]:
    """Rounds and chunks that a way names, and the marks of each round that it draws."""
    half = [line[50 * column :][:50] for line in out.splitlines()]
    (head,) = [line for line in half if line.startswith(tuple(f"{way}: " for way in WAYS))]
    marks = [line.split()[2] for line in half if line.startswith("  round ")]
    return [int(word) for word in head.split() if word.isdigit()], marks


def test_the_thinking_demo(thinkers, capsys, monkeypatch):
    """The seed's sentence and labels, thoughts and rounds of the run itself. Control: other
    thoughts than those of the other way."""
    config = ThinkingConfig.load(THINKER)
    assert f'"{COINS} heads."' in FIGURE
    assert demo_thinking(thinkers, config) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 100 and "identical, bit for bit" in out
    assert [label for label in LABELS if label not in FIGURE] == []
    assert [label for label in LABELS.values() if label not in out] == []
    params = SamplingParams(max_new_tokens=8, thinking=True)
    (output,) = thinkers["sequential"].generate([COINS], params)
    decode, thoughts = thinkers["sequential"].tokenizer.decode, output.thoughts
    for n, thought in enumerate(thoughts):
        first_word = decode(thought.token_ids).split()[0]
        assert f"Z{n + 1} = {first_word}" in out
        state = f"C(Z{n + 1})" if len(thought.token_ids) > 1 else "0"
        assert f"S{n + 1} = {state}" in out
    assert output.completions[0].text.strip() in out
    # Algorithm 1: a round ends with the first thought that is not trivial, and what follows it runs
    # again; the rest of the prompt is a chunk of its own.
    count, expected, first = len(thoughts) + 1, [], 0
    while first < count:
        active = (n for n in range(first, count - 1) if len(thoughts[n].token_ids) > 1)
        end = next(active, count - 1) + 1
        expected.append(demos.STAYS * (end - first) + demos.AGAIN * (count - end))
        first = end
    assert rounds(out, 0) == ([len(expected), sum(map(len, expected))], expected)
    assert rounds(out, 1) == ([count, count], [demos.STAYS] * count)
    short = SamplingParams(thinking=True, deterministic=True)
    outputs = [engine.generate(["A coin."], short) for engine in thinkers.values()]
    outputs[1][0].completions[0].token_ids[0] += 1
    for engine, output in zip(thinkers.values(), outputs, strict=True):
        monkeypatch.setattr(engine, "generate", lambda *_, found=output: found)
    assert demo_thinking(thinkers, config) == 1
    assert "DIFFERENT: token " in capsys.readouterr().out


def test_the_thinking_demo_of_the_command_line(capsys, monkeypatch):
    """In any encoding; with a model that thinks alone."""
    ascii_only = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr("sys.stdout", ascii_only)
    assert main(["demo", "--thinking"]) == 0
    monkeypatch.undo()
    assert main(["demo", "--thinking", "--model", str(BUNDLED)]) != 0
    assert "thinking_config.json is no ThinkingConfig" in capsys.readouterr().err


SHARES = (0.0, 0.5, 0.7, 0.85)


def read_by_the_thinker(share, count):
    """Held-out examples, and what the engine made of them."""
    tokenizer = AutoTokenizer.from_pretrained(THINKER)
    rng = Random(f"demo {share}")
    made = [TASKS["coin"].example(rng, rng.randint(0, 10), True, share) for _ in range(count)]
    prompts = [tokenizer.decode(tokenizer.convert_tokens_to_ids(e.prompt)) for e in made]
    with Engine.from_pretrained(THINKER) as engine:
        params = SamplingParams(max_new_tokens=3, thinking=True)
        return made, engine.generate(prompts, params)


def right(made, outputs):
    """Parts of the answers and of the thoughts."""
    size = ThinkingConfig.load(THINKER).chunk_size
    answers = [output.completions[0].text.split() for output in outputs]
    pairs = [
        (thought.text.split(), words[:-1])
        for example, output in zip(made, outputs, strict=True)
        for thought, words in zip(output.thoughts, example.thoughts(size), strict=True)
    ]
    said = [a == ["".join(e.answer[:2])] for a, e in zip(answers, made, strict=True)]
    return sum(said) / len(said), sum(x == y for x, y in pairs) / len(pairs)


AT_LENGTH = [pytest.param(n, 500, marks=pytest.mark.slow("thinking", 60)) for n in SHARES]


@pytest.mark.parametrize(("share", "count"), [(0.7, 12), *AT_LENGTH])
def test_the_thinker_is_right(share, count):
    """Control: not about examples with another answer."""
    made, outputs = read_by_the_thinker(share, count)
    answers, thoughts = right(made, outputs)
    assert answers >= 0.98 and thoughts >= 0.998
    others = [replace(example, answer=("edge", ".")) for example in made]
    assert right(others, outputs)[0] == 0


# The bundled models: what the package ships loads, fits, answers, stops and stays uncertain

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]
QUESTIONS, FLOOR = 200, 0.85


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return scores.load(BUNDLED, torch.float32)


@pytest.mark.parametrize(
    ("folder", "most"), [(BUNDLED, 4e6), (THINKER, 2e6)], ids=["story", "coin"]
)
def test_folders_are_small(folder: Path, most: float) -> None:
    assert 0 < sum(path.stat().st_size for path in Path(folder).iterdir()) < most


def test_ids_and_dtype(loaded: Loaded) -> None:
    model, tokenizer = loaded
    assert scores.load(BUNDLED, "auto")[0].dtype == torch.bfloat16
    assert model.config.vocab_size == len(tokenizer)
    for settings in (model.config, model.generation_config):
        for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
            assert getattr(settings, name) == getattr(tokenizer, name)
    assert not model.generation_config.do_sample
    assert tokenizer.eos_token_id != tokenizer.pad_token_id


def test_chat_template(loaded: Loaded) -> None:
    tokenizer = loaded[1]
    said = ("What is 2 + 3?", "2 + 3 = 5.", "Tell me a story about a fox.")
    roles = ("user", "assistant", "user")
    messages = [{"role": r, "content": c} for r, c in zip(roles, said, strict=True)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == stories.chat_prompt([said[:2]], said[2])
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == tokenizer(text)["input_ids"]


@pytest.mark.slow("model types", 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_answers_held_out_questions(dtype: torch.dtype) -> None:
    model, tokenizer = scores.load(BUNDLED, dtype)
    questions = stories.held_out_questions(QUESTIONS, seed=1)
    answers = scores.greedy_answers(model, tokenizer, [prompt for prompt, _ in questions])
    right = [said == answer for (said, _), (_, answer) in zip(answers, questions, strict=True)]
    assert sum(right) / QUESTIONS >= FLOOR
    assert sum(stopped for _, stopped in answers) / QUESTIONS >= 0.99

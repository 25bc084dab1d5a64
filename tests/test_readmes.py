"""Every snippet of every README runs as it stands, on the bundled model and without a network."""

import ast
import asyncio
import contextlib
import inspect
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TextStreamer

import tinyspec
from tests.support.serving import running, storyteller
from tinyspec import EngineConfig, SamplingParams
from tinyspec.cli.main import _parser, main
from tinyspec.model.torch_settings import NEWEST_TORCH
from tinyspec.tools.demo import BUNDLED

ROOT = Path(__file__).parents[1]


def readmes_of(root: Path) -> list[str]:
    """Those of the project: none in hidden folders and in virtual environments that lie in it."""
    environments = {found.parent for found in root.rglob("pyvenv.cfg")}
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("README.md")
        if not environments.intersection(path.parents)
        and not any(part.startswith(".") for part in path.relative_to(root).parts)
    )


READMES = readmes_of(ROOT)
# The rule for names: what stands for a model, on a hub or in a folder, is the bundled one.
MODEL = re.compile(r"\b(?:[A-Z][\w.-]*/[\w.-]+|FOLDER_OR_HUB_NAME|(?<=--model )NAME)")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# ```python gpu: compiled, and not run without one; another word: nor without that library.
GPU = "gpu"


class Snippet(NamedTuple):
    """name: README and line of its fence. language: the first word behind the fence. words: those
    that follow. code: with the bundled model for names of models."""

    readme: str
    name: str
    language: str
    words: list[str]
    text: str
    code: str


def with_model(text: str) -> str:
    return MODEL.sub(str(BUNDLED), text)


def snippets(readme: str) -> list[Snippet]:
    """Those in fences."""
    text = (ROOT / readme).read_text()
    found = []
    for match in FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        name = f"{readme}:{text[: match.start()].count(chr(10)) + 1}"
        found.append(Snippet(readme, name, language, words, match[2], with_model(match[2])))
    return found


def inline(readme: str, begins: str) -> list[str]:
    """What stands between backticks, begins so, and is no name alone."""
    text = FENCE.sub("", (ROOT / readme).read_text())
    found = re.findall(r"`([^`]+)`", text)
    return [" ".join(one.split()) for one in found if re.match(begins, one)]


ALL = [snippet for readme in READMES for snippet in snippets(readme)]
PYTHON = [s for s in ALL if s.language == "python"]
SHELL = [s for s in ALL if s.language == "bash"]
# Commands that are not run here: .ci/run runs some, the others measure for minutes.
ELSEWHERE = ("pip", "pytest", "python", "bash", "for", "curl", "nohup", "kill")
# Where snippets ask a server, which then is there.
URL = "http://127.0.0.1:8000"


def test_environments_in_the_clone_are_not_read(tmp_path):
    folders = ("", "wing/", ".hidden/", "env/lib/library/")
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "README.md").touch()
    own = ["README.md", "wing/README.md"]
    assert readmes_of(tmp_path) == ["README.md", "env/lib/library/README.md", own[1]], "control"
    (tmp_path / "env/pyvenv.cfg").touch()
    assert readmes_of(tmp_path) == own


def test_versions_of_torch():
    """From the lower bound, beside which there is none, to the newest tested."""
    oldest = re.search(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())[1]
    newest = ".".join(map(str, NEWEST_TORCH))
    assert f"torch {oldest} to {newest}," in (ROOT / "README.md").read_text()


@pytest.fixture
def given(tmp_path, monkeypatch, proven_on_demand):
    """What snippets take for granted: a model, its tokenizer, prompts. Sizes of passes are proven
    as for users."""
    monkeypatch.chdir(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    batch = tokenizer(["Once upon a time", "One day"], return_tensors="pt", padding=True)
    ids = [tokenizer("Once upon a time")["input_ids"], tokenizer("One day")["input_ids"]]
    yield {
        "tinyspec": tinyspec,
        "SamplingParams": SamplingParams,
        "model": model,
        "tokenizer": tokenizer,
        "batch": batch,
        "prompts": ids,
        "ids": ids[0],
        "generation_config": GenerationConfig(max_new_tokens=8, do_sample=False),
        "first": TextStreamer(tokenizer),
        "second": TextStreamer(tokenizer),
    }
    tinyspec.unpatch(model)


def run(snippet, names, url=URL):
    """As a script that may await; ``url``: of the server."""
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(snippet.code.replace(URL, url), snippet.name, "exec", flags=flags)
    done = eval(code, names)
    if inspect.iscoroutine(done):
        asyncio.run(done)


def is_here(word):
    return torch.cuda.is_available() if word == GPU else find_spec(word) is not None


@pytest.mark.parametrize("readme", sorted({s.readme for s in PYTHON}))
def test_python(readme, given, monkeypatch):
    """Those of one README run in their order, with the names of those before. No snippet hands
    tinyspec's own arguments to a model that it does not serve."""
    refuse = Mock(side_effect=AssertionError("this model is not patched"))
    monkeypatch.setattr(type(given["model"]), "generate_batch", refuse)
    found, url = [snippet for snippet in PYTHON if snippet.readme == readme], URL
    with contextlib.ExitStack() as stack:
        if any(URL in snippet.text for snippet in found):
            engine = stack.enter_context(storyteller())
            url = stack.enter_context(running(engine, model=str(BUNDLED))).url
        for snippet in found:
            compile(snippet.text, snippet.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if all(is_here(word) for word in snippet.words):
                run(snippet, given, url)


def commands(text):
    """Simple commands of a shell snippet, with their words; comments are left out."""
    joined = text.replace("\\\n", " ")
    lines = [line.partition("    #")[0].strip() for line in joined.splitlines()]
    parts = [part for line in lines if line for part in re.split(r"&&|;", line)]
    return [part.strip() for part in parts if part.strip()]


@pytest.mark.parametrize("snippet", SHELL, ids=lambda s: s.name)
def test_shell(snippet, tmp_path, monkeypatch, capsys):
    """The syntax is right; ``tinyspec`` runs; files and modules that other commands name exist."""
    done = subprocess.run(["bash", "-n"], input=snippet.text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    for command in commands(snippet.code):
        words = shlex.split(command)
        if words[0] == "tinyspec":
            if words[1] not in ("demo", "serve"):  # tests of their own run these
                run_command(words[1:], capsys)
        else:
            check_names(command)


def run_command(words, capsys):
    """One ``tinyspec`` command, with its standard output in a file where that is asked for."""
    target = None
    if ">" in words:
        words, target = words[: words.index(">")], words[words.index(">") + 1]
    status = main(words)
    out = capsys.readouterr().out
    if target is not None:
        Path(target).write_text(out)
    assert status == 0, out


def check_names(command):
    """A command that is run elsewhere: what it names is there."""
    words = [word for word in command.split() if "=" not in word] or [command]
    assert words[0] in (*ELSEWHERE, "do", "done"), command
    for name in re.findall(r"\b(?:benchmarks|tests)/[\w/]+\.(?:py|sh)", command):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"-m ((?:benchmarks|tests)[\w.]*)", command):
        assert (ROOT / f"{name.replace('.', '/')}.py").is_file(), name


@pytest.mark.parametrize("readme", READMES)
def test_commands_between_backticks(readme):
    """The options exist, and what stands for files and scripts."""
    for command in inline(readme, r"tinyspec \w+ "):
        words = shlex.split(with_model(command))[1:]
        with contextlib.redirect_stderr(sys.stdout):
            _parser(words).parse_args(words)
    for command in inline(readme, r"(python|pytest|bash) "):
        check_names(command)
    for expression in inline(readme, r"(EngineConfig|SamplingParams)\("):
        if "..." not in expression:
            names = {"EngineConfig": EngineConfig, "SamplingParams": SamplingParams}
            eval(expression, names)

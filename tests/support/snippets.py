"""Snippets of the READMEs: what stands in their fences and in commands between backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tinyspec.tools.demo import BUNDLED

ROOT = Path(__file__).parents[2]
READMES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in ROOT.rglob("README.md")
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
)
# The rule for names: what stands for a model, on a hub or in a folder, is the bundled one.
MODEL = re.compile(r"\b(?:[A-Z][\w.-]*/[\w.-]+|FOLDER_OR_HUB_NAME|(?<=--model )NAME)")
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# ```python gpu: compiled, and not run without one.
GPU = "gpu"


@dataclass(frozen=True)
class Snippet:
    """language: the first word behind the fence. words: those that follow. line: of its fence."""

    readme: str
    line: int
    language: str
    words: tuple[str, ...]
    text: str

    @property
    def name(self) -> str:
        return f"{self.readme}:{self.line}"

    @property
    def code(self) -> str:
        """Its text with the bundled model for names of models."""
        return with_model(self.text)


def with_model(text: str) -> str:
    return MODEL.sub(str(BUNDLED), text)


def snippets(readme: str) -> list[Snippet]:
    """Those in fences."""
    text = (ROOT / readme).read_text()
    found = []
    for match in FENCE.finditer(text):
        language, *words = match[1].split() or [""]
        line = text[: match.start()].count("\n") + 1
        found.append(Snippet(readme, line, language, tuple(words), match[2]))
    return found


def inline(readme: str, begins: str) -> list[str]:
    """What stands between backticks, begins so, and is no name alone."""
    text = FENCE.sub("", (ROOT / readme).read_text())
    found = re.findall(r"`([^`]+)`", text)
    return [" ".join(one.split()) for one in found if re.match(begins, one)]

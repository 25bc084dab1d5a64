"""What the drop-in uses of transformers: a release without it is refused by name."""

import ast
from pathlib import Path

import pytest
import torch
from transformers import GenerationMixin

import tinyspec
from tests.support.drop_in import SMALL, greedy, own, patched
from tests.support.tiny import tiny

PROMPT = [5, 17, 3]


def test_generate_without_custom_generate_is_refused_by_patch(monkeypatch):
    def generate(self, inputs=None, generation_config=None, **kwargs):
        return inputs

    model = tiny()
    monkeypatch.setattr(GenerationMixin, "generate", generate)
    with pytest.raises(RuntimeError, match=r"no argument custom_generate.*install"):
        tinyspec.patch(model, SMALL)
    assert "generate" not in vars(model)
    monkeypatch.undo()
    with patched(model):
        assert greedy(model, PROMPT) == greedy(own(), PROMPT)


def ignores(model):
    """A ``generate`` that does not call ``custom_generate``."""
    return lambda input_ids, **_: input_ids


def renames(model):
    """A ``generate`` that passes it the processors under another name."""

    def generate(custom_generate, **settings):
        def hook(model, input_ids, logits_processor, **others):
            return custom_generate(model, input_ids, processors=logits_processor, **others)

        return type(model).generate(model, **settings, custom_generate=hook)

    return generate


@pytest.mark.parametrize(
    "make, missing",
    [
        (ignores, "generation_config, logits_processor, stopping_criteria, input_ids"),
        (renames, "logits_processor"),
    ],
)
def test_a_hook_that_is_not_called_as_expected(make, missing):
    model = tiny()
    model.generate = make(model)
    with (
        patched(model),
        pytest.raises(RuntimeError, match=f"passed no {missing} to custom_generate.*unpatch"),
    ):
        greedy(model, PROMPT)


def private_names(source):
    """Names that are imported, attributes of anything but ``self``, and strings that could be
    names of attributes; of these the private ones."""
    return [
        n for n in names_in(source) if n.startswith("_") and not n.startswith("__") and n != "_"
    ]


def names_in(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) != "self":
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and str(node.value).isidentifier():
            yield str(node.value)


def test_no_private_name_of_transformers():
    for path in (Path(tinyspec.__file__).parent / "drop_in").glob("*.py"):
        assert private_names(path.read_text()) == [], path.name
    source = "from a import _b\nc._d()\nself._e\ngetattr(f, '_g', None)"
    assert sorted(private_names(source)) == ["_b", "_d", "_g"], "control"


def test_arguments_that_generate_cannot_bind():
    ids = torch.tensor([PROMPT])
    with patched(tiny()) as model:
        for each in (model, own()):
            with pytest.raises(TypeError, match="inputs"):
                each.generate(ids, inputs=ids)
            with pytest.raises(TypeError, match="positional"):
                each.generate(ids, *[None] * 11)

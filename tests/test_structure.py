"""The shape of the package: one direction of imports, short files, nothing tuned or atomic."""

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import tinyspec

ROOT = Path(tinyspec.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# From the top down: a wing imports only wings that stand in a row below its own, and SHARED.
WINGS = (
    ("cli",),
    ("integrations",),
    ("serve",),
    ("tools", "drop_in"),
    ("engine",),
    ("drafts", "structured", "text"),
    ("thinking",),
    ("determinism",),
    ("runner",),
    ("scheduler",),
    ("model",),
    ("kernels",),
)
# In order: each imports only what stands before it.
SHARED = ("errors", "interrupts", "scalars", "config", "sampling_params", "outputs")
# Beside the wings: the public surface.
SURFACE = ("tinyspec", "__main__")
NOT_ON_HOST = {"torch", "triton", "transformers", "tokenizers"}


@cache
def tree(name):
    return ast.parse(FILES[name].read_text())


def imports(name):
    """Full names of the modules that a module imports, wherever in it the import stands."""
    found = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & set(FILES)
            found |= submodules or {node.module}
    return found


def wing(module):
    """The first part of a module's name below the package."""
    return module.split(".")[1] if "." in module else module


def internal(name):
    return {module for module in imports(name) if module.split(".")[0] == "tinyspec"}


def external(name):
    return {module.split(".")[0] for module in imports(name)} - {"tinyspec"}


def test_every_module_has_a_place():
    placed = [name for row in (*WINGS, SHARED, SURFACE) for name in row]
    assert len(placed) == len(set(placed))
    assert {wing(name) for name in FILES} == set(placed)


def test_one_direction():
    level = {name: place for place, row in enumerate(WINGS) for name in row}
    order = {name: place for place, name in enumerate(SHARED)}

    def allowed(name, module):
        here, there = wing(name), wing(module)
        if here in SURFACE:
            return True
        if there in SHARED:
            return here in level or order[there] < order[here]
        return here in level and there in level and (here == there or level[here] < level[there])

    wrong = [
        f"{name} imports {module}"
        for name in FILES
        for module in internal(name)
        # Where the package lies on disk may be asked of the package itself.
        if module != "tinyspec" and not allowed(name, module)
    ]
    assert wrong == []


@pytest.mark.parametrize("name", [name for row in WINGS for name in row])
def test_no_cycle_within_a_wing(name):
    members = {module for module in FILES if wing(module) == name}
    TopologicalSorter({module: internal(module) & members for module in members}).prepare()


def test_wings_say_what_they_are():
    """Every module has a docstring, and every folder an ``__init__`` of one line: that alone."""
    assert [name for name in FILES if not ast.get_docstring(tree(name))] == []
    for folder in {path.parent for path in FILES.values()} - {ROOT}:
        assert len((folder / "__init__.py").read_text().splitlines()) == 1, folder


@pytest.mark.parametrize("name", [n for n in FILES if wing(n) in ("scheduler", *SHARED)])
def test_host_only(name):
    assert not external(name) & NOT_ON_HOST
    assert {wing(module) for module in internal(name)} <= {"scheduler", *SHARED}


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tinyspec.kernels")])
def test_kernels(name):
    """torch, triton, the standard library and the helpers; the twins without triton."""
    assert external(name) <= {"torch", "triton"} | sys.stdlib_module_names
    if ".twins" in name:
        assert "triton" not in external(name)
    assert all(wing(module) == "kernels" for module in internal(name))


def test_triton_stays_in_the_kernels():
    assert {wing(name) for name in FILES if "triton" in external(name)} == {"kernels"}


# A key given as an option would stand in the list of processes.
READ_THE_ENVIRONMENT = ("tinyspec.kernels.backend", "tinyspec.cli.reports", "tinyspec.cli.serve")


@pytest.mark.parametrize("name", FILES)
def test_files(name):
    """They are short, nothing is atomic or tuned, and few read the environment."""
    assert len(FILES[name].read_text().splitlines()) <= 400
    for node in ast.walk(tree(name)):
        word = getattr(node, "attr", None) or getattr(node, "id", None) or ""
        assert "autotune" not in word and not word.startswith("atomic")
        assert word not in ("environ", "getenv") or name in READ_THE_ENVIRONMENT


MAKE_TENSORS = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn"}
MAKE_TENSORS |= {"randperm", "scalar_tensor", "tensor", "zeros"}


@pytest.mark.parametrize("name", [n for n in FILES if wing(n) in ("kernels", "runner")])
def test_new_tensors_name_dtype_and_device(name):
    """What runs in a pass leaves neither to torch's defaults, which the user may set."""
    for node in ast.walk(tree(name)):
        made = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if made and ast.unparse(node.func.value) == "torch" and node.func.attr in MAKE_TENSORS:
            given = {keyword.arg for keyword in node.keywords}
            assert given >= {"dtype", "device"}, f"{name}, line {node.lineno}"

"""The shape of the package: one direction of imports, short files, nothing tuned or atomic."""

import ast
import inspect
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import tinyspec

ROOT = Path(tinyspec.__file__).parent
FILES = {
    ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}

# From the ground up: a module imports only what stands on a line above its own. Packages are one
# entry here and have their own rules below.
LAYERS = (
    ("errors", "gate", "packed", "families", "deferrable"),
    ("unwrap",),
    (
        "interrupts",
        "pages",
        "buckets",
        "filters",
        "invariance",
        "facts",
        "kernels",
        "linears",
        "row_tiles",
        "models",
    ),
    ("config", "params", "text", "ambient", "drafter", "kv_cache", "bucket_classes", "fact_cache"),
    ("outputs", "norms", "survey", "capacity", "sampler", "attention_probe", "loading"),
    ("request", "attention", "routing_probe"),
    ("experts",),
    ("fingerprint",),
    ("patched", "deferred"),
    ("patch",),
    ("passes", "intake", "prefix_cache", "outbox", "stream", "hf_rows", "hf_streamers"),
    ("batch", "residents", "hf_settings"),
    ("runner", "scheduler", "hf_prepare"),
    ("commit", "model_probe", "linear_probe", "hf_call", "rehearsal"),
    ("bucket_probe",),
    ("loop", "contract"),
    ("desk",),
    ("engine",),
    ("door", "replay", "probe", "trace"),
    ("drop_in",),
    ("tinyspec",),
    ("demo",),
    ("cli",),
    ("__main__",),
)
HOST_ONLY = {
    *("scheduler", "residents", "prefix_cache", "pages", "buckets", "request", "passes"),
    *("config", "params", "outputs", "errors", "facts"),
}
NOT_ON_HOST = {"torch", "triton", "transformers", "tokenizers", "numpy"}
KERNEL_HELPERS = {
    f"tinyspec.kernels.{name}"
    for name in ("launch", "philox", "segments", "accepted", "attention_merge")
}
TWIN_HELPERS = {
    *(f"tinyspec.kernels.{name}" for name in ("segments", "accepted")),
    *(f"tinyspec.kernels.twins.{n}" for n in ("philox", "tile_plan", "tiles", "quick_attention")),
}
MODELS = "tinyspec.models"


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


def unit(module):
    """The entry of ``LAYERS`` that a module of the package belongs to."""
    return module.split(".")[1] if "." in module else module


def internal(name):
    return {module for module in imports(name) if module.split(".")[0] == "tinyspec"}


def external(name):
    return {module.split(".")[0] for module in imports(name)} - {"tinyspec"}


def test_imports_are_read():
    """Control: the parser that the other tests stand on sees what stands in the files."""
    assert imports("tinyspec.loop") >= {"time", "torch", "tinyspec.commit", "tinyspec.passes"}
    assert "tinyspec.kernels" in internal("tinyspec.engine")
    assert {unit("tinyspec.kernels.twins.sample"), unit("tinyspec")} == {"kernels", "tinyspec"}


def test_every_module_has_a_place():
    placed = [name for layer in LAYERS for name in layer]
    assert len(placed) == len(set(placed))
    assert {unit(name) for name in FILES} <= set(placed)


def test_one_direction():
    height = {name: level for level, layer in enumerate(LAYERS) for name in layer}
    wrong = [
        f"{name} imports {module}"
        for name in FILES
        for module in internal(name)
        if unit(module) != unit(name) and height[unit(module)] >= height[unit(name)]
    ]
    assert wrong == []


@pytest.mark.parametrize("name", sorted(HOST_ONLY))
def test_host_only(name):
    assert not external(f"tinyspec.{name}") & NOT_ON_HOST
    assert {unit(module) for module in internal(f"tinyspec.{name}")} <= HOST_ONLY


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("tinyspec.kernels")])
def test_kernels(name):
    """torch, triton, the standard library and the helpers; the twins without triton."""
    assert external(name) <= {"torch", "triton"} | sys.stdlib_module_names
    if ".twins" in name:
        assert "triton" not in external(name)
    assert internal(name) <= (TWIN_HELPERS if ".twins" in name else KERNEL_HELPERS)


def test_triton_stays_in_the_kernels():
    users = {name for name in FILES if "triton" in external(name)}
    assert users
    assert all(name.startswith("tinyspec.kernels.") for name in users)


def test_the_bundled_model_stands_alone():
    """Making the bundled model needs nothing of the engine."""
    for name in FILES:
        if name.startswith(MODELS):
            assert all(module.startswith(MODELS) for module in internal(name))


def test_short_files():
    lengths = {name: len(path.read_text().splitlines()) for name, path in FILES.items()}
    assert {name: length for name, length in lengths.items() if length > 300} == {}


def test_no_atomics_and_no_autotune():
    for name in FILES:
        for node in ast.walk(tree(name)):
            word = getattr(node, "attr", None) or getattr(node, "id", None) or ""
            assert "autotune" not in word and not word.startswith("atomic"), name


def test_one_place_reads_the_environment():
    readers = set()
    for name in FILES:
        for node in ast.walk(tree(name)):
            if getattr(node, "attr", None) in ("environ", "getenv"):
                readers.add(name)
    assert len(readers) <= 1, readers


def test_module_docstrings():
    assert [name for name in FILES if not ast.get_docstring(tree(name))] == []


def test_public_names():
    assert list(tinyspec.__all__) == sorted(set(tinyspec.__all__))
    for name in tinyspec.__all__:
        assert not inspect.ismodule(getattr(tinyspec, name))
        assert getattr(tinyspec, name).__doc__


CHILD = """
import sys
sys.modules["triton"] = None  # importing it fails
import tinyspec
from tests.support.tiny import tiny
with tinyspec.Engine(tiny()) as engine:
    params = tinyspec.SamplingParams(max_new_tokens=3, deterministic=True, temperature=1.0, seed=1)
    assert len(engine.generate([[1, 2, 3]], params)[0].completions[0].token_ids) == 3
print(sorted(name for name in sys.modules if name.startswith("tinyspec.kernels")))
"""


def test_a_cpu_needs_no_triton():
    """Importing the package and generating on a CPU loads the twins and no Triton kernel."""
    child = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert child.returncode == 0, child.stderr[-2000:]
    loaded = set(ast.literal_eval(child.stdout.splitlines()[-1]))
    kernels = {name for name in FILES if name.startswith("tinyspec.kernels")}
    assert "tinyspec.kernels.twins.sample" in loaded
    assert not [name for name in loaded & kernels if "triton" in external(name)]

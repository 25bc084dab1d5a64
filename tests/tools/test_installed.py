"""The package as pip installs it: as a wheel, and editable beside a clone named ``tinyspec``."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tinyspec

# Models in the package.
BUNDLED = {"storyteller", "coin_reader"}
SOURCE = Path(tinyspec.__file__).parent.parent


def run(*command, folder, **environment):
    how = {"cwd": folder, "env": {**os.environ, **environment}}
    child = subprocess.run([*map(str, command)], capture_output=True, text=True, **how)
    assert child.returncode == 0, child.stderr[-2000:]
    return child.stdout


@pytest.fixture
def clone(tmp_path):
    """A copy of the project, in a folder named as the package."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(SOURCE / "tinyspec", tmp_path / "tinyspec" / "tinyspec", ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, tmp_path / "tinyspec")
    for name in ("tests", "benchmarks"):
        (tmp_path / "tinyspec" / name).mkdir()
        (tmp_path / "tinyspec" / name / "__init__.py").touch()
    return tmp_path / "tinyspec"


def install(*what, target):
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "install", *options, "--target", target, *what, folder=target)


@pytest.fixture
def target(tmp_path):
    (tmp_path / "site").mkdir()
    return tmp_path / "site"


def from_beside(clone, target, code):
    """What ``python -c code`` prints in the folder that holds the clone, with the libraries of this
    environment and its own installation of the package left out."""
    code = f"import site; site.addsitedir({str(target)!r}); {code}"
    folders = (path for path in sys.path if Path(path).name in ("site-packages", "dist-packages"))
    libraries = os.pathsep.join(folders)
    return run(sys.executable, "-S", "-c", code, folder=clone.parent, PYTHONPATH=libraries)


@pytest.mark.slow("installation", 5)
def test_editable_beside_a_clone_of_the_same_name(clone, target):
    """The folder ``tinyspec`` of the clone is not taken for a namespace package."""
    find = "from importlib.util import find_spec; print(find_spec('tinyspec').origin)"
    assert from_beside(clone, target, find) == "None\n", "control: without the installation"
    install("-e", clone, target=target)
    assert Path(from_beside(clone, target, find).strip()) == clone / "tinyspec" / "__init__.py"


def test_the_wheel_holds_the_package_and_nothing_else(clone, target):
    install(clone, target=target)
    installed = {p.relative_to(target) for p in (target / "tinyspec").rglob("*") if p.is_file()}
    source = {p.relative_to(clone) for p in (clone / "tinyspec").rglob("*") if p.is_file()}
    kept = {p for p in source if p.suffix in (".py", ".html") or p.parent.name in BUNDLED}
    assert {path for path in installed if path.suffix != ".pyc"} == kept
    for name in ("tools/storyteller/demo_prompts.json", "serve/page.html"):
        assert Path("tinyspec", name) in kept
    folders = {path.name for path in target.iterdir() if path.suffix != ".dist-info"}
    assert folders == {"tinyspec", "bin"}


@pytest.mark.slow("installation", 20)
def test_both_run(clone, target):
    install("-e", clone, target=target)
    assert "function patch" in from_beside(clone, target, "import tinyspec; print(tinyspec.patch)")
    shutil.rmtree(target)
    target.mkdir()
    install(clone, target=target)
    demo = [target / "bin" / "tinyspec", "demo", "--crowd", "2", "--max-new-tokens", "4"]
    text = run(*demo, folder=target.parent, PYTHONPATH=str(target))
    assert "deterministic=True" in text and "bit for bit" in text

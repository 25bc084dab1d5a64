"""Digests of this package's own code: of the wings that decide bits, and of every file."""

from __future__ import annotations

import ast
import hashlib
from functools import cache
from pathlib import Path

import tinyspec

PACKAGE = Path(tinyspec.__file__).parent
# The wings that decide what a pass computes; the twins are part of kernels.
WINGS = ("kernels", "model", "runner")
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def syntax_digest(root: Path = PACKAGE, places: tuple[str, ...] = WINGS) -> str:
    """Digest of the syntax trees of ``places``, wings and files in the package at ``root``, by path
    within it.

    Comments, docstrings, formatting and the place of installation leave it as it is. The trees may
    depend on the version of Python.
    """
    files = {
        path.relative_to(root).as_posix(): path
        for place in places
        for path in ([root / place] if place.endswith(".py") else (root / place).rglob("*.py"))
    }
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        digest.update(f"{name}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()


@cache
def file_digest(root: Path = PACKAGE) -> str:
    """Digest of the bytes of every Python file of the package at ``root``."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()

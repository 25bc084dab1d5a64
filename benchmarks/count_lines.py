"""Lines of code by folder: no blank lines, no comments, no docstrings.

    python benchmarks/count_lines.py [PATH ...] [--files]

A line counts if any part of a token of code is on it; a docstring is a string that begins a module,
class or function. Knows Python's grammar, not which files belong to a package: it counts
every .py file below the paths.
"""

from __future__ import annotations

import argparse
import ast
import tokenize
from collections import defaultdict
from io import StringIO
from pathlib import Path

# Tokens without code of their own.
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def main(arguments: list[str] | None = None) -> int:
    """Print files and lines of every folder, and the total."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="*", type=Path, default=[Path("tinyspec")])
    parser.add_argument("--files", action="store_true", help="a line for every file as well")
    options = parser.parse_args(arguments)
    files = sorted({file for path in options.paths for file in python_files(path)})
    if not files:
        parser.error(f"no .py file in {', '.join(map(str, options.paths))}")
    folders: dict[Path, list[tuple[Path, int]]] = defaultdict(list)
    for file in files:
        folders[file.parent].append((file, code_lines(file.read_text(encoding="utf-8"))))
    width = max(len(str(name)) for name in [*folders, *files])
    print(f"{'folder':<{width}} {'files':>6} {'lines':>7} {'longest':>8}")
    for folder, members in sorted(folders.items()):
        counts = [count for _, count in members]
        print(f"{folder!s:<{width}} {len(members):>6} {sum(counts):>7,} {max(counts):>8}")
        for file, count in members if options.files else ():
            print(f"{'  ' + file.name:<{width}} {'':>6} {count:>7,}")
    total = sum(count for members in folders.values() for _, count in members)
    print(f"{'total':<{width}} {len(files):>6} {total:>7,}")
    return 0


def python_files(path: Path) -> list[Path]:
    """``path`` itself, or every .py file below it."""
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


def code_lines(source: str) -> int:
    """Lines of ``source`` that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstring_lines(source))


def docstring_lines(source: str) -> set[int]:
    """Lines of docstrings."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            assert text.end_lineno is not None
            found.update(range(text.lineno, text.end_lineno + 1))
    return found


if __name__ == "__main__":
    raise SystemExit(main())

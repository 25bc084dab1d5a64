"""Reading a forward's source: whether rotated q and k go to the attention interface and nowhere
else, and whether two functions do the same. Knows syntax; not modules, models or rotations.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

import torch

# How transformers' modeling files call the function that rotates.
ROTATE = "apply_rotary_pos_emb"
INTERFACES = "ALL_ATTENTION_FUNCTIONS"
# What makes a function more than assignments and branches, in the order in which they stand.
_BEYOND = (
    *(ast.For, ast.While, ast.With, ast.Try, ast.Match, ast.Lambda, ast.ListComp, ast.SetComp),
    *(ast.DictComp, ast.GeneratorExp, ast.NamedExpr, ast.Delete, ast.Global, ast.Nonlocal),
    *(ast.ClassDef, ast.Import, ast.ImportFrom, ast.Await, ast.Yield, ast.YieldFrom),
    *(ast.AsyncFunctionDef, ast.AsyncFor, ast.AsyncWith),
)


@cache
def source_of(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a plain function; None where it has no source, or runs another code."""
    if not isinstance(function, FunctionType) or function.__closure__:
        return None
    if hasattr(function, "__wrapped__"):
        return None
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(function)))
        compiled = compile(parsed, "", "exec", dont_inherit=True)
    except (OSError, TypeError, SyntaxError):
        return None
    code = next((c for c in compiled.co_consts if isinstance(c, CodeType)), None)
    tree = parsed.body[0]
    if code is None or not isinstance(tree, ast.FunctionDef):
        return None
    # Not the instructions, which also hang on what the rest of the file imports.
    same = all(
        getattr(code, name) == getattr(function.__code__, name)
        for name in ("co_consts", "co_names", "co_varnames", "co_flags")
    )
    return tree if same else None


class _Bare(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        body = node.body[1:] if ast.get_docstring(node) is not None else node.body
        node.name, node.body, node.decorator_list, node.returns = "", body, [], None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return node
        return ast.copy_location(ast.Assign([node.target], node.value), node)


def bare(tree: ast.FunctionDef) -> ast.FunctionDef:
    """A function without name, docstring, decorators and annotations."""
    copied = ast.parse(ast.unparse(tree)).body[0]
    return _Bare().visit(copied)


@cache
def text_of(tree: ast.FunctionDef) -> str:
    """What a function does, comparable with what others do."""
    return ast.dump(bare(tree))


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _names(node: ast.AST) -> list[str]:
    """Of a tuple of names, what they are; empty for anything else."""
    if not isinstance(node, ast.Tuple) or not all(isinstance(e, ast.Name) for e in node.elts):
        return []
    return [e.id for e in node.elts if isinstance(e, ast.Name)]


def _matches(node: ast.AST, text: str) -> bool:
    """Whether a statement or an expression reads ``text``."""
    return ast.unparse(node) == ast.unparse(ast.parse(text))


def _behind(tree: ast.AST, statement: ast.AST) -> Iterator[ast.AST]:
    """What stands behind a statement."""
    end = (statement.end_lineno, statement.end_col_offset)  # type: ignore[attr-defined]
    for node in ast.walk(tree):
        if isinstance(node, (ast.stmt, ast.expr)) and (node.lineno, node.col_offset) >= end:
            yield node


@cache
def hands_over(forward: ast.FunctionDef) -> bool:
    """Whether a forward rotates q and k once, and from there on only hands them to a cache, where
    there is one, and to the attention interface.

    Unrotated they may have been taken apart, for their first elements alone to turn, and are put
    together again.
    """
    tree = bare(forward)
    if forward.decorator_list or any(isinstance(n, _BEYOND) for n in ast.walk(tree)):
        return False
    if sum(isinstance(n, ast.FunctionDef) for n in ast.walk(tree)) > 1:
        return False
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign)]
    calls = [n for n in assigned if isinstance(n.value, ast.Call) and _named(n.value.func, ROTATE)]
    if len(calls) != 1 or sum(_named(n, ROTATE) for n in ast.walk(tree)) != 1:
        return False
    turned = _names(calls[0].targets[0])
    if len(turned) != 2 or not _matches(calls[0].value, f"{ROTATE}({', '.join(turned)}, cos, sin)"):
        return False
    return _only_attended(tree, calls[0], *turned) or _rejoined(tree, calls[0], turned)


def _rejoined(tree: ast.FunctionDef, turning: ast.Assign, turned: list[str]) -> bool:
    """``q_rot, q_pass = q[..., :n], q[..., n:]`` before, ``q = torch.cat((q_rot, q_pass), dim=-1)``
    behind, of k as well, and nothing else is done with the parts."""
    wholes, last = [], turning
    for rot in turned:
        users = [s for s in tree.body if any(_named(node, rot) for node in ast.walk(s))]
        if len(users) != 3 or users[1] is not turning:
            return False
        cut, _, join = users
        if not isinstance(cut, ast.Assign) or not isinstance(join, ast.Assign):
            return False
        parts, whole = _names(cut.targets[0]), join.targets[0]
        if len(parts) != 2 or parts[0] != rot or not isinstance(whole, ast.Name):
            return False
        rest = parts[1]
        upper = next(n.upper for n in ast.walk(cut) if isinstance(n, ast.Slice))
        n = ast.unparse(upper or ast.Constant(None))
        before = f"{rot}, {rest} = {whole.id}[..., :{n}], {whole.id}[..., {n}:]"
        if not _matches(cut, before) or sum(_named(node, rest) for node in ast.walk(tree)) != 2:
            return False
        if not _matches(join, f"{whole.id} = torch.cat(({rot}, {rest}), dim=-1)"):
            return False
        wholes.append(whole.id)
        last = join
    return len({*wholes, *turned}) == 4 and _only_attended(tree, last, *wholes)


def _only_attended(tree: ast.FunctionDef, turning: ast.stmt, q: str, k: str) -> bool:
    """Whether q and k, from behind a statement on, go to a cache and to the interface alone."""
    behind = list(_behind(tree, turning))
    allowed: set[ast.AST] = set()
    callers = [n for n in behind if isinstance(n, ast.Assign) and _fetches(n.value)]
    names = {n.targets[0].id for n in callers if isinstance(n.targets[0], ast.Name)}
    if len(callers) != 1 or len(names) != 1:
        return False
    interface = names.pop()
    if sum(_named(n, interface) for n in ast.walk(tree)) != 2:
        return False
    for node in behind:
        if isinstance(node, ast.Call) and _named(node.func, interface):
            if len(node.args) < 4 or not _named(node.args[0], "self"):
                return False
            if not _named(node.args[1], q) or not _named(node.args[2], k):
                return False
            allowed |= {node.args[1], node.args[2]}
        elif isinstance(node, ast.If) and _updates(node, k):
            allowed |= {n for n in ast.walk(node) if _named(n, k)}
    return all(n in allowed for n in behind if _named(n, q) or _named(n, k)) and len(allowed) >= 2


def _fetches(value: ast.expr) -> bool:
    """``ALL_ATTENTION_FUNCTIONS.get_interface(...)``."""
    called = value.func if isinstance(value, ast.Call) else None
    return called is not None and _matches(called, f"{INTERFACES}.get_interface")


def _updates(node: ast.If, k: str) -> bool:
    """``if past is not None: k, v = past.update(k, v, self.layer_idx)``."""
    written = node.body[0]
    if len(node.body) != 1 or node.orelse or not isinstance(written, ast.Assign):
        return False
    stored = _names(written.targets[0])
    if len(stored) != 2 or stored[0] != k or stored[1] == k:
        return False
    past = ast.unparse(node.test).removesuffix(" is not None")
    text = f"{stored[0]}, {stored[1]} = {past}.update({k}, {stored[1]}, self.layer_idx)"
    return (
        past.isidentifier()
        and _matches(node.test, f"{past} is not None")
        and _matches(written, text)
    )


def of_family(family: str, name: str) -> Any:
    """What ``family``'s modeling file calls ``name``, or None."""
    module = import_module(f"transformers.models.{family}.modeling_{family}")
    return getattr(module, name, None)


@cache
def essence(function: Callable[..., Any]) -> str | None:
    """What a function does, by its source and that of the functions it calls; None if unknown."""
    tree = source_of(function)
    if tree is None:
        return None
    assert isinstance(function, FunctionType)
    parts = [text_of(tree)]
    own = {*function.__code__.co_varnames, function.__name__}
    for name in sorted({n.id for n in ast.walk(bare(tree)) if isinstance(n, ast.Name)} - own):
        value = function.__globals__.get(name)
        called = essence(value) if isinstance(value, FunctionType) else None
        if called is not None:
            parts.append(f"{name}: {called}")
        elif value is not torch and (value is not None or not hasattr(builtins, name)):
            return None
    return "\n".join(parts)

"""The source as tests look at it: each module is parsed once for all of them.

The product's trees are kept. With those of the tests they would be 350 MiB: these are parsed for each one that asks.
"""

import ast
import gc
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]
_BARE: Final = frozenset({"ctx", "id", "op", "ops"})
"""Fields of nodes that have names, operators and contexts, of which nothing more is read."""
PACKAGES: Final = ("cgroupfs", "resctrl", "state", "reconciler")


@cache
def product() -> tuple[Path, ...]:
    """The product's modules, package by package, sorted."""
    return tuple(path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))


@cache
def _kept(path: Path) -> tuple[ast.AST, ...]:
    return _parsed(path)


def _parsed(path: Path) -> tuple[ast.AST, ...]:
    # As `ast.walk`, in half of its time. A million nodes are no garbage: the collector would look through them all.
    collecting = gc.isenabled()
    gc.disable()
    found: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in found:
        for name in node._fields:
            value = None if name in _BARE else getattr(node, name, None)
            if isinstance(value, list):
                found += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    if collecting:
        gc.enable()
    return tuple(found)


def nodes(path: Path) -> tuple[ast.AST, ...]:
    """A module's nodes but for operators and contexts, in the order of `ast.walk`: the first is the module."""
    return _kept(path) if _is_product(path) else _parsed(path)


def _is_product(path: Path) -> bool:
    return path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES


def tree(path: Path) -> ast.Module:
    return _top(nodes(path))


def _top(walked: tuple[ast.AST, ...]) -> ast.Module:
    first = walked[0]
    assert isinstance(first, ast.Module)
    return first


class Module(NamedTuple):
    """What one module says by its statements.

    ``top``: what it defines at its top. ``imports``: the first words of the modules that it imports. ``texts``: the
    strings that are statements, with their first lines; ``docstrings``: those of them that are the module's, a class's
    or a function's.
    """

    top: frozenset[str]
    classes: tuple[str, ...]
    imports: frozenset[str]
    texts: tuple[tuple[int, str], ...]
    docstrings: tuple[tuple[int, str], ...]


@cache
def module(path: Path) -> Module:
    # Of the tests nothing else is walked: what their expressions hold are nine nodes of ten.
    whole = tree(path) if _is_product(path) else ast.parse(path.read_text(encoding="utf-8"))
    imports: set[str] = set()
    texts: list[tuple[int, str]] = []
    first: set[int] = set()
    for node in _statements(whole):
        if type(node) in _DOCUMENTED and (inner := node.body):  # type: ignore[attr-defined]  # these have one
            first.add(inner[0].lineno)
        match node:
            case ast.Import():
                imports.update(item.name.partition(".")[0] for item in node.names)
            case ast.ImportFrom(module=str(name), level=0):
                imports.add(name.partition(".")[0])
            case ast.Expr(value=ast.Constant(value=str(text))):
                texts.append((node.lineno, text))
    return Module(
        top=frozenset(name for node in whole.body for inner in _shallow(node) for name in _defined(inner)),
        classes=tuple(node.name for node in whole.body if isinstance(node, ast.ClassDef)),
        imports=frozenset(imports),
        texts=tuple(texts),
        docstrings=tuple((line, text) for line, text in texts if line in first),
    )


def _statements(whole: ast.Module) -> list[ast.AST]:
    """The module, its statements and those inside them, with the handlers and cases that hold some."""
    found: list[ast.AST] = [whole]
    for node in found:
        for field in _BLOCKS:
            block = getattr(node, field, None)
            # Of a lambda and a conditional expression the same words are expressions: these are not walked.
            if type(block) is list:
                found += block
    return found


@cache
def defines(path: Path) -> frozenset[str]:
    """All names that a module defines anywhere: arguments and attributes, too."""
    return frozenset(name for node in nodes(path) for name in _defined(node))


def _shallow(node: ast.AST) -> Iterator[ast.AST]:
    """A statement and what it assigns; of a function or class the name only."""
    yield node
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        for inner in ast.iter_child_nodes(node):
            yield from _shallow(inner)


def _stored(name: str) -> Callable[[Any], Iterable[str]]:
    return lambda node: (getattr(node, name),) if type(node.ctx) is ast.Store else ()


def _made(node: ast.Call) -> Iterable[str]:
    """The name that ``TypeVar`` or ``NewType`` is called with."""
    match node.args:
        case [ast.Constant(value=str(name)), *_]:
            return (name,)
    return ()


# By the exact type: of a million nodes most define nothing.
_DEFINES: Final[dict[type[ast.AST], Callable[[Any], Iterable[str]]]] = {
    **dict.fromkeys((ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef), lambda node: (node.name,)),
    ast.Name: _stored("id"),
    ast.Attribute: _stored("attr"),
    ast.arg: lambda node: (node.arg,),
    ast.alias: lambda node: (node.asname or node.name).split("."),
    ast.Call: _made,
}
_BLOCKS: Final = ("body", "orelse", "finalbody", "handlers", "cases")
_DOCUMENTED: Final = frozenset({ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef})


def _defined(node: ast.AST) -> Iterable[str]:
    return _DEFINES[type(node)](node) if type(node) in _DEFINES else ()


@cache
def literals(path: Path) -> tuple[tuple[int, str], ...]:
    """The strings, with their quotes, and the comments of a module as its source has them, with their first lines."""
    found = []
    line, counted, text = 1, 0, path.read_text(encoding="utf-8")
    for token in _STRING_OR_COMMENT.finditer(text):
        line += text.count("\n", counted, token.start())
        counted = token.start()
        found.append((line, token[0]))
    return tuple(found)


def comments(path: Path) -> tuple[tuple[int, str], ...]:
    return tuple((line, text) for line, text in literals(path) if text[0] == "#")


# A number sign in a string begins no comment. The same as by ``tokenize``, at a tenth of its time: no literal of this
# Python has its own quotes inside (those of f-strings may, from 3.12 on).
_STRING_OR_COMMENT: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|#[^\n]*''', re.DOTALL
)

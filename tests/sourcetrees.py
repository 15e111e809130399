"""The source as tests look at it: each module is parsed once for all of them.

The product's trees are kept. With those of the tests they would be 350 MiB: these are parsed for each one that asks.
"""

import ast
import gc
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Final

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
    return _kept(path) if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES else _parsed(path)


def tree(path: Path) -> ast.Module:
    module = nodes(path)[0]
    assert isinstance(module, ast.Module)
    return module


@cache
def comments(path: Path) -> tuple[tuple[int, str], ...]:
    """A module's comments with their lines' numbers. Only a source with a number sign is taken apart, which is slow."""
    source = path.read_text(encoding="utf-8")
    if "#" not in source:
        return ()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return tuple((token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT)

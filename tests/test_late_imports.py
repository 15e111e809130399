"""Imports inside functions keep memory and start-up time low; one that cannot do that is a mistake."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.sourcetrees import ROOT, nodes, product, tree


def imported(node: ast.AST) -> Iterator[str]:
    """The modules that import statements directly below a node name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom) and child.module is not None:
            yield child.module
        elif isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)


def late(path: Path) -> Iterator[str]:
    """The modules that are imported inside functions."""
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                yield from imported(inner)


def test_nothing_is_imported_late_that_is_loaded_already() -> None:
    twice = [
        (str(path.relative_to(ROOT)), module)
        for path in product()
        for module in late(path)
        if module in {".".join(path.relative_to(ROOT).with_suffix("").parts), *imported(tree(path))}
    ]
    assert len(product()) > 300
    assert twice == []


def test_modules_are_loaded_by_name_in_one_place_only() -> None:
    users = [str(path.relative_to(ROOT)) for path in product() if "importlib" in imported(tree(path))]
    assert users == ["reconciler/runtime/lazy.py"]

"""Imports inside functions keep memory and start-up time low; one that cannot do that is a mistake."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("cgroupfs", "resctrl", "state", "reconciler")
TREES = {
    path.relative_to(ROOT): ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(tree: ast.AST) -> Iterator[str]:
    """The modules that import statements directly below a node name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def late(tree: ast.Module) -> Iterator[str]:
    """The modules that are imported inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in ast.walk(node):
                yield from imported(inner)


def test_nothing_is_imported_late_that_is_loaded_already() -> None:
    twice = [
        (str(path), module)
        for path, tree in TREES.items()
        for module in late(tree)
        if module in {".".join(path.with_suffix("").parts), *imported(tree)}
    ]
    assert len(TREES) > 300
    assert twice == []


def test_modules_are_loaded_by_name_in_one_place_only() -> None:
    users = [str(path) for path, tree in TREES.items() if "importlib" in imported(tree)]
    assert users == ["reconciler/runtime/lazy.py"]

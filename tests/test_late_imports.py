"""Imports inside functions keep memory and start-up time low; one that cannot do that is a mistake."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.sourcetrees import ROOT, nodes, product, tree


def imported(statements: Iterable[ast.AST]) -> Iterator[str]:
    """The modules that the import statements among these name."""
    for statement in statements:
        if isinstance(statement, ast.ImportFrom) and statement.module is not None:
            yield statement.module
        elif isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)


def late(path: Path) -> Iterator[str]:
    """The modules that are imported inside functions."""
    functions = [
        range(node.lineno, (node.end_lineno or 0) + 1)
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    statements = [node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom)]
    return imported(node for node in statements if any(node.lineno in lines for lines in functions))


def test_nothing_is_imported_late_that_is_loaded_already() -> None:
    twice = [
        (str(path.relative_to(ROOT)), module)
        for path in product()
        for module in late(path)
        if module in {".".join(path.relative_to(ROOT).with_suffix("").parts), *imported(tree(path).body)}
    ]
    assert len(product()) > 300
    assert twice == []


def test_modules_are_loaded_by_name_in_one_place_only() -> None:
    users = [str(path.relative_to(ROOT)) for path in product() if "importlib" in imported(tree(path).body)]
    assert users == ["reconciler/runtime/lazy.py"]

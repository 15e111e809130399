"""The product has no circles, and the agent is composed: each room of those before it, in one phase."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.imports import circles, imports, sources, within
from tests.sourcetrees import ROOT, nodes

DAEMON = ROOT / "reconciler/daemon"
AGENT = DAEMON / "agent.py"
COMPOSING = (
    *sorted(DAEMON.glob("*.py")),
    *(ROOT / f"reconciler/control/{name}.py" for name in ("hub", "record", "writes", "side_actuators", "loop")),
)
"""Where parts are made of parts."""


def _constructor() -> ast.FunctionDef:
    for node in nodes(AGENT):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            return node
    raise AssertionError("the agent has no constructor")


def test_circles_are_found() -> None:
    arrows = {"a": ["b"], "b": ["c"], "c": ["b", "d"], "d": [], "e": ["f"], "f": ["e"], "g": ["a"]}
    assert circles(arrows) == [["b", "c"], ["e", "f"]]


def test_no_module_imports_one_that_needs_it() -> None:
    assert len(imports()) > 500
    assert circles(imports()) == []


@pytest.mark.parametrize("package", sorted(name for name, path in sources().items() if path.name == "__init__.py"))
def test_no_folder_of_a_room_needs_one_that_needs_it(package: str) -> None:
    assert circles(within(package)) == []


def test_the_agent_is_read_in_one_go() -> None:
    constructor = _constructor()
    assert constructor.end_lineno is not None
    assert len(AGENT.read_text().splitlines()) < 200
    assert constructor.end_lineno - constructor.lineno + 1 < 50


def _own(node: ast.AST) -> Iterator[str]:
    """The attributes of ``self`` that are read."""
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Load) and _is_self(child.value):
            yield child.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def test_each_room_is_made_of_those_before_it() -> None:
    """Neither the agent nor a method of it is handed to a part, and no part waits for one that is made later."""
    made: set[str] = set()
    for statement in _constructor().body:
        assert not any(isinstance(node, ast.Lambda) for node in ast.walk(statement)), ast.unparse(statement)
        assert set(_own(statement)) <= made, ast.unparse(statement)
        handed = [
            node
            for call in ast.walk(statement)
            if isinstance(call, ast.Call)
            for node in (*call.args, *(keyword.value for keyword in call.keywords))
            if _is_self(node)
        ]
        assert not handed, ast.unparse(statement)
        made |= {
            node.attr
            for node in ast.walk(statement)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
        }
    assert len(made) > 10


def _patched(path: Path) -> Iterator[str]:
    """Assignments to an attribute of another object than ``self``, and no module's."""
    walked = nodes(path)
    modules = {alias.name for node in walked if isinstance(node, ast.Import) for alias in node.names}
    for node in walked:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and not _is_self(node.value):
            if ast.unparse(node.value) in modules:
                continue
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("path", COMPOSING, ids=lambda path: path.stem)
def test_nothing_is_patched_into_a_part_that_was_made(path: Path) -> None:
    assert list(_patched(path)) == []

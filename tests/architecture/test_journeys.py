"""The journeys of docs/architecture.md are the program's: each named function exists, and the named order is real.

A reference is `file.py:function` or `file.py:Class.method`. Those of a journey are entered in the order of the text, by
the first entry of each, when its scene is run. Functions that only a worker thread enters cannot be named: trio keeps
such threads, and one that is older than the scene is not observed.
"""

import ast
import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.architecture.scenes import container_start, foreign_write, reload, whole_eviction
from tests.e2e.mounts import hierarchies
from tests.fakes.node import HIERARCHIES
from tests.sourcetrees import ROOT, tree

TEXT: Final = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
JOURNEYS: Final[dict[str, Callable[[str], list[str]]]] = {
    "A container's start, to its last write": container_start,
    "A sample, to an eviction": whole_eviction,
    "A setting, to its effect": reload,
}
FOREIGN: Final = "A foreign CPU set, put back"


def references(text: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py:[\w.]+)`", text)


def section(title: str) -> str:
    return TEXT.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@cache
def functions(file: str) -> frozenset[str]:
    """The functions of a module and the methods of its classes."""
    body = tree(ROOT / file).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    methods = {
        f"{each.name}.{node.name}"
        for each in classes
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    return frozenset(methods | {node.name for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)})


def test_every_function_that_is_named_exists() -> None:
    named = [reference.split(":") for reference in references(TEXT)]
    assert len(named) > 40
    assert [f"{file}:{name}" for file, name in named if name not in functions(file)] == []


@pytest.mark.parametrize("title", [*JOURNEYS, FOREIGN])
def test_a_journey_names_at_least_a_function_in_each_point(title: str) -> None:
    points = re.split(r"\n(?=\d+\. )", section(title))[1:]
    assert [point.partition(".")[0] for point in points] == [str(number) for number in range(1, len(points) + 1)]
    assert len(points) >= (5 if title == FOREIGN else 7)
    assert [point for point in points if not references(point)] == []


@pytest.mark.parametrize("title", JOURNEYS)
def test_the_functions_of_a_journey_are_entered_in_its_order(title: str, tmp_path: Path) -> None:
    assert_order(title, JOURNEYS[title](str(tmp_path)))


@pytest.mark.kernel
def test_the_functions_that_put_a_foreign_cpu_set_back_are_entered_in_their_order(tmp_path: Path) -> None:
    if os.geteuid() != 0 or set(HIERARCHIES) - set(hierarchies()) or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("REAL KERNEL TEST NOT RUN: needs root, cgroup v1 hierarchies and two CPUs")
    assert_order(FOREIGN, foreign_write(str(tmp_path / "node")))


def assert_order(title: str, entered: list[str]) -> None:
    named = references(section(title))
    assert [reference for reference in named if reference not in entered] == []
    assert sorted(named, key=entered.index) == named

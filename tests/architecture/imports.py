"""Which module of the product imports which, as the source says: late imports and those for types among them."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tests.sourcetrees import ROOT, nodes, product


@cache
def sources() -> Mapping[str, Path]:
    """The files, by module name."""
    found = {}
    for path in product():
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports() -> Mapping[str, frozenset[str]]:
    """By module, the modules that it imports."""
    known = sources()
    return {name: frozenset(_imported(path, known)) - {name} for name, path in known.items()}


def _imported(path: Path, known: Mapping[str, Path]) -> Iterable[str]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in known or node.module in known:
                    yield whole if whole in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)


def circles(arrows: Mapping[str, Iterable[str]]) -> list[list[str]]:
    """The largest sets of names each of which reaches all others of its set: Tarjan's components of several names."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        numbers[name] = lowest[name] = len(numbers)
        path.append(name)
        for other in sorted(arrows.get(name, ())):
            if other not in numbers:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in path:
                lowest[name] = min(lowest[name], numbers[other])
        if lowest[name] == numbers[name]:
            members = path[path.index(name) :]
            del path[path.index(name) :]
            if len(members) > 1:
                found.append(sorted(members))

    for name in sorted(arrows):
        if name not in numbers:
            visit(name)
    return found


def within(package: str) -> dict[str, set[str]]:
    """The arrows between the files and folders directly in a package."""
    depth = package.count(".") + 2
    inside: dict[str, set[str]] = {}
    for name, others in imports().items():
        if name.startswith(f"{package}."):
            place = ".".join(name.split(".")[:depth])
            there = {".".join(other.split(".")[:depth]) for other in others if other.startswith(f"{package}.")}
            inside.setdefault(place, set()).update(there - {place})
    return inside

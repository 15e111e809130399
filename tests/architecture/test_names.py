"""A class name means one thing in the whole product."""

import ast
from collections import defaultdict

from tests.sourcetrees import ROOT, nodes, product


def test_no_two_classes_share_a_name() -> None:
    modules: dict[str, list[str]] = defaultdict(list)
    for path in product():
        if path.stem.endswith("_pb2"):
            continue
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(path.relative_to(ROOT)))
    assert len(modules) > 500
    # The same class twice in one module: for a type checker, and made from a table when the program runs.
    shared = {name: paths for name, paths in modules.items() if len(set(paths)) > 1}
    assert shared == {}

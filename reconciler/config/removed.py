"""Settings of earlier versions: a configuration that still has one is read without it, and a warning says what applies.

A node must start after an upgrade, so such a key is never an error. The table says what replaced each, or why nothing
did. A rule that cannot mean what was written is off: with one condition less it could respond more often.
"""

import re
from collections.abc import Mapping
from typing import Final, final

from reconciler.settings.nodes import ConfigProblem, Node, Scalar, Sequence, SourceLocation
from reconciler.settings.nodes import Mapping as Section

_CONDITIONS: Final = (
    "write the comparisons as `threshold` detectors: those of one group must all agree (and), one group is enough (or)"
)
REMOVED: Final[Mapping[str, str]] = {
    "interference.rules.*.mode": "write enabled: false for off, dry_run: true for shadow, dry_run: false for enforce",
    "interference.rules.*.when.expression": _CONDITIONS,
}
"""Dotted keys (``*`` for a name, without the indexes of lists), and what to write instead."""
_RULE: Final = 3
"""Names in the path of a rule, ``interference.rules.NAME``: it is off without a key of it that is in the table."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@final
class RemovedKeys:
    """Takes the keys of `REMOVED` out of files, and adds each to ``found``."""

    def __init__(self, found: list[ConfigProblem], table: Mapping[str, str] = REMOVED) -> None:
        self._table = {tuple(path.split(".")): text for path, text in table.items()}
        self._found = found

    def prune(self, tree: Node) -> Node:
        """The file without them."""
        return self._pruned(tree, ())

    def _pruned(self, node: Node, path: tuple[str, ...]) -> Node:
        # Most sections have nothing in the table: they are not copied.
        if isinstance(node, Scalar) or not any(_below(path, pattern) for pattern in self._table):
            return node
        if isinstance(node, Sequence):
            return Sequence(node.at, tuple(self._pruned(item, path) for item in node.items))
        before = len(self._found)
        items = {}
        for key, value in node.items.items():
            inner = (*path, key)
            text = next((text for pattern, text in self._table.items() if _matches(inner, pattern)), None)
            if text is None:
                items[key] = self._pruned(value, inner)
            else:
                self._note(node.places[key], inner, text)
        if len(path) == _RULE and path[:2] == ("interference", "rules") and len(self._found) > before:
            return Section(node.at, {"enabled": Scalar(node.at, "false", quoted=False)}, {"enabled": node.at})
        return Section(node.at, items, node.places)

    def _note(self, at: SourceLocation, path: tuple[str, ...], text: str) -> None:
        # A name may be a misplaced secret.
        shown = ".".join(name if _PLAIN.fullmatch(name) else "*" for name in path)
        effect = "the rule is off" if path[:2] == ("interference", "rules") else "ignored"
        self._found.append(ConfigProblem(at, shown, f"no longer a setting, {effect}; {text}"))


def _matches(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    return len(path) == len(pattern) and _below(path, pattern)


def _below(path: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    """Whether ``pattern`` is ``path``, or begins with it."""
    return len(path) <= len(pattern) and all(wanted in {"*", name} for name, wanted in zip(path, pattern, strict=False))

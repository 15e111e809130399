"""The YAML reader: text as nodes with their place, for bypassd's own files and for those of others.

Made of libyaml's events by `reconciler.settings.yaml_composer`. Characters, levels and nodes are bounded.

bypassd's own files (`parse_tree`) are read by their schema: ``on``, ``010`` and ``12:30`` remain text where the setting
is text. Files of others (`read_yaml`: the kubelet's, a kubeconfig, manifests) have no schema here.
"""

import re
from typing import Final

import msgspec
from msgspec import Struct

from cgroupfs.errors import InputError
from reconciler.settings.nodes import ConfigProblem, Mapping, Node, Scalar, Sequence, YamlError

Path = tuple[str | int, ...]

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16
_FOREIGN_BYTES: Final = 4 << 20
_FOREIGN_DEPTH: Final = 64


def parse_tree(file: str, text: str, problems: list[ConfigProblem], *, largest: int = MAX_BYTES) -> Node | None:
    """The content of one of our own files; an empty mapping for an empty file, None (and a problem) if unreadable.

    Nothing is interpreted here; anchors, aliases, tags and a second document are refused. ``largest`` is in characters.
    """
    from reconciler.settings.yaml_composer import Composer  # the library: 11 ms that a node without a file saves

    composer = Composer(file, problems, depth=MAX_DEPTH)
    try:
        root = composer.compose(text, largest)
    except YamlError as exc:
        problems.append(ConfigProblem(composer.at, "", exc.expected))
        return None
    return Mapping(composer.at, {}, {}) if root is None or (isinstance(root, Scalar) and root.null) else root


class YamlDocument(Struct, frozen=True, kw_only=True):
    """One document of a file of others: plain ``data``, and ``marks``: path -> (line, column) of each key and entry.

    ``more``: other documents follow it in the text.
    """

    where: str
    data: object
    marks: dict[Path, tuple[int, int]]
    more: bool = False

    def place(self, path: Path) -> str:
        """``file:line:column`` of the entry at ``path``, or of the nearest entry around it that the text has."""
        for end in range(len(path), -1, -1):
            mark = self.marks.get(path[:end])
            if mark is not None:
                return f"{self.where}:{mark[0]}:{mark[1]}"
        return self.where

    def value(self, path: Path) -> object:
        """The data at ``path``, or of the nearest entry around it."""
        data = self.data
        for step in path:
            try:
                data = data[step]  # type: ignore[index]
            except (KeyError, IndexError, TypeError):
                return data
        return data

    def refusal(self, path: Path, expected: str) -> InputError:
        """The one message for a bad entry at ``path``: its place in the file, its name, its value."""
        name = f": {dotted(path)}" if path else ""
        return InputError(f"{self.place(path)}{name}", self.value(path), expected)

    def explain(self, error: msgspec.ValidationError, base: Path = ()) -> InputError:
        """A message of msgspec about the data at ``base``, with its place in the file instead of msgspec's path."""
        text, _, at = str(error).partition(" - at ")
        path = base + _steps(at)
        if unknown := re.match(r"Object contains unknown field `(.+)`", text):
            return self.refusal((*path, unknown[1]), "no such key here")
        if missing := re.match(r"Object missing required field `(.+)`", text):
            return self.refusal(path, f"the key {missing[1]} in it")
        if wanted := re.match(r"Expected `(.+)`, got `", text):
            return self.refusal(path, wanted[1])
        return self.refusal(path, f"a valid entry: {text}")


def dotted(path: Path) -> str:
    """``overrides[0].labels`` for a path."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def read_yaml(text: str, where: str) -> YamlDocument:
    """The first document of a file of others; an empty text is the data None.

    Anchors and merge keys are followed, and single values are as of `Scalar.plain`.
    Errors: `YamlError` for what is not YAML, and for too many characters, levels or nodes.
    """
    from reconciler.settings.yaml_composer import Composer

    problems: list[ConfigProblem] = []
    composer = Composer(where, problems, depth=_FOREIGN_DEPTH, foreign=True)
    root = composer.compose(text, _FOREIGN_BYTES)
    # Duplicate keys, for example.
    if problems:
        raise YamlError(problems[0].place, problems[0].message)
    marks: dict[Path, tuple[int, int]] = {}
    data = None if root is None else _plain(root, (), marks)
    return YamlDocument(where=where, data=data, marks=marks, more=composer.more)


def _plain(node: Node, path: Path, marks: dict[Path, tuple[int, int]]) -> object:
    """A node as plain data; as deep as the composer allows. Errors: `YamlError` for a merge key without a mapping."""
    # An entry of a mapping already has the place of its key.
    marks.setdefault(path, (node.at.line, node.at.column))
    if isinstance(node, Scalar):
        return node.plain
    if isinstance(node, Sequence):
        return [_plain(item, (*path, index), marks) for index, item in enumerate(node.items)]
    data: dict[str, object] = {}
    for key, value in node.items.items():
        at = node.places[key]
        marks[*path, key] = (at.line, at.column)
        data[key] = _plain(value, (*path, key), marks)
    if "<<" in data:
        # A mapping's own keys win over merged ones, and an earlier merged mapping over a later.
        merged, own, data = data.pop("<<"), data, {}
        for other in reversed(merged) if isinstance(merged, list) else [merged]:
            if not isinstance(other, dict):
                raise YamlError(node.items["<<"].at, "expected a mapping to merge")
            data.update(other)
        data.update(own)
    return data


def _steps(at: str) -> Path:
    """A path such as ``$.overrides[0].labels`` in msgspec's form; an index that msgspec does not name ends it."""
    steps: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[([^\]]*)\]", at.strip("`")):
        if index == "...":
            break
        steps.append(int(index) if index.isdigit() else name)
    return tuple(steps)

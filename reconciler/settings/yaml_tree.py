"""YAML text as a tree of nodes that know where they stand; nothing is interpreted, so nothing is misread.

Only libyaml's event stream is used. Loading to plain data loses duplicate keys silently and turns ``010`` into 8 and
``12:30:00`` into 45000; its composer recurses in C, so that 50,000 nested brackets end the process. Events do neither.
Anchors, aliases and tags are refused: a configuration has no need of them, and they can make a small file enormous.
"""

from typing import Final, NamedTuple

import yaml
from msgspec import Struct

MAX_BYTES: Final = 1 << 20
MAX_DEPTH: Final = 16
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})


class SourceLocation(NamedTuple):
    """Where something stands in a file, counted from 1."""

    file: str
    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class ConfigProblem(NamedTuple):
    """One thing that is wrong. ``path`` is the setting's dotted name, empty for the file as a whole."""

    place: SourceLocation
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.path}: {self.message}" if self.path else f"{self.place}: {self.message}"


class Scalar(Struct, frozen=True):
    """A single value as it was written. ``quoted`` ones are text, whatever they look like."""

    at: SourceLocation
    text: str
    quoted: bool

    @property
    def null(self) -> bool:
        """True for nothing, ``~`` and ``null``."""
        return not self.quoted and self.text in _NULLS

    @property
    def shown(self) -> str:
        """For a message."""
        return "nothing" if self.null else repr(self.text if len(self.text) <= 40 else f"{self.text[:40]}...")


class Sequence(Struct, frozen=True):
    """A list."""

    at: SourceLocation
    items: tuple["Node", ...]
    shown: str = "a list"


class Mapping(Struct, frozen=True):
    """Keys with their values; ``places`` tells where each key stands. A key that came twice keeps its first value."""

    at: SourceLocation
    items: dict[str, "Node"]
    places: dict[str, SourceLocation]
    shown: str = "a section with keys"


Node = Scalar | Sequence | Mapping


class _RefusedError(Exception):
    """Stops the walk at something that makes the rest of the file meaningless."""

    def __init__(self, at: SourceLocation, message: str) -> None:
        super().__init__(message)
        self.at = at


class _Builder:
    """One file on its way from events to nodes."""

    def __init__(self, file: str, problems: list[ConfigProblem]) -> None:
        self.file = file
        self.problems = problems

    def place(self, event: yaml.Event) -> SourceLocation:
        mark = event.start_mark
        return (
            SourceLocation(self.file, mark.line + 1, mark.column + 1)
            if mark is not None
            else SourceLocation(self.file, 1, 1)
        )

    def build(self, text: str) -> Node | None:
        # An open collection: its start, the nodes so far; a mapping's keys and values alternate.
        stack: list[tuple[yaml.Event, list[Node]]] = []
        root: Node | None = None
        for event in yaml.parse(text, Loader=yaml.CSafeLoader):
            node: Node | None = None
            if isinstance(event, yaml.NodeEvent):
                self._refuse_fancy(event)
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                raise _RefusedError(self.place(event), "a second document starts here; put everything into one")
            if isinstance(event, yaml.ScalarEvent):
                quoted = event.style not in {"", None}
                node = Scalar(self.place(event), event.value, quoted)
            elif isinstance(event, yaml.CollectionStartEvent):
                if len(stack) >= MAX_DEPTH:
                    raise _RefusedError(self.place(event), f"nested more than {MAX_DEPTH} levels deep")
                stack.append((event, []))
            elif isinstance(event, yaml.CollectionEndEvent):
                start, nodes = stack.pop()
                at = self.place(start)
                mapping = isinstance(start, yaml.MappingStartEvent)
                node = self._mapping(at, nodes) if mapping else Sequence(at, tuple(nodes))
            if node is not None and stack:
                stack[-1][1].append(node)
            elif node is not None:
                root = node
        return root

    def _refuse_fancy(self, event: yaml.NodeEvent) -> None:
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            # Its name is not shown: it may be a password that nobody has quoted.
            message = "anchors and aliases are refused: write it out; a text that begins with & or * needs quotes"
            raise _RefusedError(self.place(event), message)
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            message = "tags are refused: the setting knows its own type; a text that begins with ! needs quotes"
            raise _RefusedError(self.place(event), message)

    def _mapping(self, at: SourceLocation, nodes: list[Node]) -> Mapping:
        items: dict[str, Node] = {}
        places: dict[str, SourceLocation] = {}
        for key, value in zip(nodes[::2], nodes[1::2], strict=True):
            if not isinstance(key, Scalar):
                self.problems.append(ConfigProblem(key.at, "", f"expected a key; got {key.shown}"))
            elif key.text in places:
                first = places[key.text]
                message = f"duplicate key {key.text!r}; the first is at line {first.line}, column {first.column}"
                self.problems.append(ConfigProblem(key.at, "", message))
            else:
                items[key.text] = value
                places[key.text] = key.at
        return Mapping(at, items, places)


def parse_tree(file: str, text: str, problems: list[ConfigProblem]) -> Mapping | None:
    """The mapping that ``text`` holds; empty for an empty file, None (and a problem) where it cannot be read as one."""
    start = SourceLocation(file, 1, 1)
    if len(text) > MAX_BYTES:
        problems.append(ConfigProblem(start, "", f"larger than {MAX_BYTES >> 20} MiB; this is no configuration"))
        return None
    builder = _Builder(file, problems)
    try:
        # The library cannot even refuse what stands for a byte that is no text.
        text.encode()
    except UnicodeEncodeError as exc:
        line, column = text.count("\n", 0, exc.start) + 1, exc.start - text.rfind("\n", 0, exc.start)
        problems.append(ConfigProblem(SourceLocation(file, line, column), "", "not UTF-8 text"))
        return None
    try:
        root = builder.build(text)
    except _RefusedError as exc:
        problems.append(ConfigProblem(exc.at, "", str(exc)))
        return None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark
        at = SourceLocation(file, mark.line + 1, mark.column + 1) if mark is not None else start
        context = f" {exc.context}" if exc.context else ""
        problems.append(ConfigProblem(at, "", f"not YAML: {exc.problem}{context}"))
        return None
    except yaml.YAMLError as exc:
        problems.append(ConfigProblem(start, "", f"not YAML: {' '.join(str(exc).split())}"))
        return None
    if root is None or (isinstance(root, Scalar) and root.null):
        return Mapping(start, {}, {})
    if not isinstance(root, Mapping):
        problems.append(ConfigProblem(root.at, "", f"expected settings as 'key: value'; got {root.shown}"))
        return None
    return root

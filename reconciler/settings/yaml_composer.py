"""Nodes with their places out of libyaml's events; `reconciler.settings.yaml` says what is accepted.

The only module of the reader that imports the YAML library.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol, final

import yaml
from msgspec import Struct

from reconciler.settings.nodes import (
    ConfigProblem,
    Mapping,
    Node,
    Scalar,
    Sequence,
    SourceLocation,
    YamlError,
)

_MAX_NODES: Final = 50_000
"""An alias counts as all that it refers to: a few lines of them can mean billions of nodes."""


class _Mark(Protocol):
    """A place in a text; line and column count from 0."""

    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


class DepthError(yaml.YAMLError):
    """A text is nested deeper than allowed; ``mark`` is where."""

    def __init__(self, mark: _Mark | None, depth: int) -> None:
        super().__init__(f"nested more than {depth} levels deep")
        self.mark = mark


def events(text: str, *, depth: int) -> Iterator[yaml.Event]:
    """The events of libyaml for a text with at most ``depth`` levels.

    Errors: `yaml.YAMLError`; of these `DepthError` where it is nested deeper.
    """
    level = 0
    # Not `yaml.load`: it drops duplicate keys silently, and turns ``010`` into 8 and ``12:30:00`` into 45000. Not
    # `yaml.compose`: libyaml's composer recurses in C, so 50,000 nested brackets end the process.
    for event in yaml.parse(text, Loader=yaml.CSafeLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > depth:
            raise DepthError(event.start_mark, depth)
        yield event


class _Anchored(NamedTuple):
    """A complete node with an anchor: how many nodes and levels an alias adds."""

    node: Node
    nodes: int
    levels: int


class _Open(Struct):
    """A collection that has not ended: its nodes so far; of a mapping keys and values alternate."""

    start: yaml.CollectionStartEvent
    nodes: list[Node]
    before: int
    levels: int = 1


@final
class Composer:
    """Makes nodes out of one file's events. ``at`` is the place of the last error."""

    def __init__(self, file: str, problems: list[ConfigProblem], *, depth: int, foreign: bool = False) -> None:
        self.at = SourceLocation(file, 1, 1)
        self.more = False
        self._problems = problems
        self._depth = depth
        self._foreign = foreign
        self._anchors: dict[str, _Anchored | None] = {}
        self._count = 0

    def compose(self, text: str, largest: int) -> Node | None:
        """The first document's root; None without any. Errors: `YamlError`."""
        if len(text) > largest:
            raise self._error(None, f"larger than {largest >> 20} MiB; this is not a configuration")
        try:
            # libyaml cannot even report a surrogate, which is not valid text.
            text.encode()
        except UnicodeEncodeError as exc:
            line, column = text.count("\n", 0, exc.start) + 1, exc.start - text.rfind("\n", 0, exc.start)
            self.at = SourceLocation(self.at.file, line, column)
            raise YamlError(self.at, "not UTF-8 text") from exc
        try:
            return self._document(text)
        except yaml.MarkedYAMLError as exc:
            context = f" {exc.context}" if exc.context else ""
            raise self._error(exc.problem_mark, f"not YAML: {exc.problem}{context}") from exc
        except DepthError as exc:
            raise self._error(exc.mark, str(exc)) from exc
        except yaml.YAMLError as exc:
            raise self._error(None, f"not YAML: {' '.join(str(exc).split())}") from exc

    def _document(self, text: str) -> Node | None:
        stack: list[_Open] = []
        root: Node | None = None
        for event in events(text, depth=self._depth):
            node: Node | None = None
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                if not self._foreign:
                    raise self._error(event.start_mark, "a second document starts here; put everything into one")
                self.more = True
                break
            if isinstance(event, yaml.NodeEvent):
                self._check(event)
            if isinstance(event, yaml.AliasEvent):
                node = self._alias(event, stack)
            elif isinstance(event, yaml.ScalarEvent):
                self._add(event, 1)
                node = Scalar(self._place(event.start_mark), event.value, not event.implicit[0])
                self._anchor(event.anchor, node, 1, 0)
            elif isinstance(event, yaml.CollectionStartEvent):
                if event.anchor is not None:
                    self._anchors[event.anchor] = None  # until it ends, an alias to it would be endless
                stack.append(_Open(event, [], self._count))
                self._add(event, 1)
            elif isinstance(event, yaml.CollectionEndEvent):
                ended = stack.pop()
                at = self._place(ended.start.start_mark)
                mapping = isinstance(ended.start, yaml.MappingStartEvent)
                node = self._mapping(at, ended.nodes) if mapping else Sequence(at, tuple(ended.nodes))
                self._anchor(ended.start.anchor, node, self._count - ended.before, ended.levels)
                if stack:
                    stack[-1].levels = max(stack[-1].levels, ended.levels + 1)
            if node is not None and stack:
                stack[-1].nodes.append(node)
            elif node is not None:
                root = node
        return root

    def _check(self, event: yaml.NodeEvent) -> None:
        if self._foreign:
            return
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            # Its name is not shown: it may be a password without quotes.
            message = "anchors and aliases are refused: write it out; a text that begins with & or * needs quotes"
            raise self._error(event.start_mark, message)
        # "!" alone means text, as quotes do.
        tag = getattr(event, "tag", None)
        if tag is not None and tag != "!":
            message = "tags are refused: the setting knows its own type; a text that begins with ! needs quotes"
            raise self._error(event.start_mark, message)

    def _alias(self, event: yaml.AliasEvent, stack: list[_Open]) -> Node:
        if event.anchor not in self._anchors:
            raise self._error(event.start_mark, "not YAML: an alias without an anchor of that name before it")
        known = self._anchors[event.anchor]
        if known is None:
            raise self._error(event.start_mark, "an alias inside its own anchor is endless")
        self._add(event, known.nodes)
        # The events count levels as written; those behind an alias are in another place of the text.
        if len(stack) + known.levels > self._depth:
            raise self._error(event.start_mark, f"nested more than {self._depth} levels deep")
        if stack:
            stack[-1].levels = max(stack[-1].levels, known.levels + 1)
        return known.node

    def _anchor(self, name: str | None, node: Node, nodes: int, levels: int) -> None:
        if name is not None:
            self._anchors[name] = _Anchored(node, nodes, levels)

    def _add(self, event: yaml.Event, nodes: int) -> None:
        self._count += nodes
        if self._count > _MAX_NODES:
            raise self._error(event.start_mark, f"more than {_MAX_NODES} values, those behind aliases included")

    def _mapping(self, at: SourceLocation, nodes: list[Node]) -> Mapping:
        items: dict[str, Node] = {}
        places: dict[str, SourceLocation] = {}
        for key, value in zip(nodes[::2], nodes[1::2], strict=True):
            if not isinstance(key, Scalar):
                self._problems.append(ConfigProblem(key.at, "", f"expected a key; got {key.shown}"))
            elif key.text in places:
                first = places[key.text]
                message = f"duplicate key {key.shown}; the first is at line {first.line}, column {first.column}"
                self._problems.append(ConfigProblem(key.at, "", message))
            else:
                items[key.text] = value
                places[key.text] = key.at
        return Mapping(at, items, places)

    def _place(self, mark: _Mark | None) -> SourceLocation:
        line, column = (0, 0) if mark is None else (mark.line, mark.column)
        return SourceLocation(self.at.file, line + 1, column + 1)

    def _error(self, mark: _Mark | None, message: str) -> YamlError:
        self.at = self._place(mark)
        return YamlError(self.at, message)

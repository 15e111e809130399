"""YAML from people and from the kubelet, read without surprises, with the place of everything in it.

`yaml.load` drops duplicate keys silently, reads ``010`` as 8, ``12:30:00`` as 45000 and ``0.1`` as a binary float. Here
only the parser is used; plain data is made from its events by rules of our own:

- null, true/false (and YAML 1.1's yes/no/on/off) and decimal integers become what they are;
- everything else stays the text that stands there, so ``0.5`` and ``1e3`` reach the quantity parser exactly;
- a duplicate key, an unhashable key, a document that refers to itself or explodes through aliases is refused.

The kubelet and its users may write anchors and merge keys, so unlike in our own configuration they are followed.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import msgspec
import yaml
from msgspec import Struct

from cgroupfs.errors import InputError

Path = tuple[str | int, ...]
Words = Mapping[str, Iterable[str]]

_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""Stands for a byte that is no text; the library cannot even refuse it."""
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_ENDLESS: Final = "a document without endless or deep nesting"
_DEEPEST: Final = 64
_MOST_NODES: Final = 50_000
_MOST_DIGITS: Final = 20


class YamlDocument(Struct, frozen=True, kw_only=True):
    """One document: plain ``data``, and ``marks``: path -> (line, column) of each key and list item, from 1.

    ``more``: other documents follow it in the text.
    """

    where: str
    data: object
    marks: dict[Path, tuple[int, int]]
    more: bool = False

    def place(self, path: Path) -> str:
        """``file:line:column`` of the entry at ``path``, or of the nearest one around it that stands in the text."""
        for end in range(len(path), -1, -1):
            mark = self.marks.get(path[:end])
            if mark is not None:
                return f"{self.where}:{mark[0]}:{mark[1]}"
        return self.where

    def value(self, path: Path) -> object:
        """The data at ``path``, or of the nearest one around it."""
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

    def explain(self, error: msgspec.ValidationError, base: Path = (), words: Words | None = None) -> InputError:
        """A message of msgspec about the data at ``base`` as ours: it names a path, the text knows its place.

        ``words`` maps a key to the words that it may have, which msgspec does not tell.
        """
        text, _, at = str(error).partition(" - at ")
        path = base + _steps(at)
        if unknown := re.match(r"Object contains unknown field `(.+)`", text):
            return self.refusal((*path, unknown[1]), "no such key here")
        if missing := re.match(r"Object missing required field `(.+)`", text):
            return self.refusal(path, f"the key {missing[1]} in it")
        if wanted := re.match(r"Expected `(.+)`, got `", text):
            return self.refusal(path, wanted[1])
        if words and path and path[-1] in words and text.startswith("Invalid enum value"):
            return self.refusal(path, f"one of {', '.join(words[str(path[-1])])}")
        return self.refusal(path, f"a valid entry: {text}")


def dotted(path: Path) -> str:
    """``overrides[0].labels`` for a path."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def read_yaml(text: str, where: str) -> YamlDocument:
    """The first document of ``text``; an empty text is the data None.

    Errors: `InputError` with ``where:line:column`` for what is not YAML and for what is refused above.
    """
    if not text.isascii() and (bad := _SURROGATE.search(text)) is not None:
        line = text.count("\n", 0, bad.start()) + 1
        column = bad.start() - text.rfind("\n", 0, bad.start())
        raise InputError(f"{where}:{line}:{column}", bad[0], "UTF-8 text")
    try:
        loader = yaml.CSafeLoader(text)
        try:
            return _Reader(loader, where).document()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f"{where}:{mark.line + 1}:{mark.column + 1}" if mark else where
        raise InputError(place, exc.problem or "", "well-formed YAML") from exc
    except yaml.YAMLError as exc:
        raise InputError(where, str(exc).splitlines()[0], "well-formed YAML") from exc


class _Built(NamedTuple):
    """A value and how many nodes it stands for once every alias is followed."""

    data: object
    nodes: int


class _Reader:
    """Makes one document out of the parser's events.

    Not out of its node tree: the library builds that recursively in C, where a line of brackets ends the process. An
    alias shares the value of its anchor, and the nodes it stands for are counted: whoever walks the data later does
    follow it, and a few lines of aliases can stand for billions.
    """

    def __init__(self, loader: yaml.CSafeLoader, where: str) -> None:
        self._loader = loader
        self._where = where
        self._marks: dict[Path, tuple[int, int]] = {}
        self._anchors: dict[str, _Built | None] = {}
        self._nodes = 0

    def document(self) -> YamlDocument:
        self._take()  # the stream's start
        data: object = None
        if not self._loader.check_event(yaml.StreamEndEvent):
            self._take()  # the document's start
            data = self._value(self._take(), ()).data
            self._take()  # its end
        more = not self._loader.check_event(yaml.StreamEndEvent)
        return YamlDocument(where=self._where, data=data, marks=self._marks, more=more)

    def _take(self) -> yaml.Event:
        event = self._loader.get_event()
        assert event is not None, "the parser ends every stream with an event of its own"
        return event

    def _value(self, event: yaml.Event, path: Path) -> _Built:
        self._marks.setdefault(path, _position(event))
        if len(path) > _DEEPEST:
            raise self._refused(event, dotted(path), _ENDLESS)
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise self._refused(event, f"*{event.anchor}", "well-formed YAML: an anchor of that name before it")
            known = self._anchors[event.anchor]
            if known is None:
                raise self._refused(event, f"*{event.anchor}", _ENDLESS)
            self._count(event, known.nodes, path)
            return known
        anchor = event.anchor if isinstance(event, yaml.NodeEvent) else None
        if anchor is not None:
            self._anchors[anchor] = None  # until it is complete, an alias to it would be endless
        if isinstance(event, yaml.MappingStartEvent):
            built = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            built = self._sequence(path)
        elif isinstance(event, yaml.ScalarEvent):
            built = _Built(_scalar(event), 1)
        else:
            raise self._refused(event, dotted(path), "a value")
        if anchor is not None:
            self._anchors[anchor] = built
        self._count(event, 1, path)
        return built

    def _count(self, event: yaml.Event, nodes: int, path: Path) -> None:
        self._nodes += nodes
        if self._nodes > _MOST_NODES:
            raise self._refused(event, dotted(path), _ENDLESS)

    def _sequence(self, path: Path) -> _Built:
        items: list[object] = []
        nodes = 1
        while not self._loader.check_event(yaml.SequenceEndEvent):
            built = self._value(self._take(), (*path, len(items)))
            items.append(built.data)
            nodes += built.nodes
        self._take()
        return _Built(items, nodes)

    def _mapping(self, path: Path) -> _Built:
        found: dict[str, object] = {}
        merged: list[object] = []
        nodes = 1
        while not self._loader.check_event(yaml.MappingEndEvent):
            key = self._take()
            if not isinstance(key, yaml.ScalarEvent):
                raise self._refused(key, dotted(path), "a plain text as key")
            if key.value in found:
                raise self._refused(key, key.value, "each key once")
            at = (*path, key.value)
            self._marks[at] = _position(key)
            event = self._take()
            built = self._value(event, at)
            nodes += built.nodes
            if key.value == "<<" and key.implicit[0]:
                merged += self._mappings(event, built.data)
            else:
                found[key.value] = built.data
        self._take()
        # A mapping's own keys win over merged ones, and an earlier merged mapping over a later.
        for other in merged:
            if isinstance(other, dict):
                found = {**other, **found}
        return _Built(found, nodes)

    def _mappings(self, event: yaml.Event, data: object) -> list[object]:
        items = data if isinstance(data, list) else [data]
        if not all(isinstance(item, dict) for item in items):
            raise self._refused(event, str(data), "a mapping to merge")
        return items

    def _refused(self, event: yaml.Event, value: str, expected: str) -> InputError:
        line, column = _position(event)
        return InputError(f"{self._where}:{line}:{column}", value, expected)


def _position(event: yaml.Event) -> tuple[int, int]:
    """Line and column from 1; people count so, the parser from 0."""
    mark = event.start_mark
    return (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)


def _scalar(event: yaml.ScalarEvent) -> object:
    text = str(event.value)
    if not event.implicit[0]:
        return text  # quoted, or tagged by hand
    if text in _NULLS:
        return None
    if text.lower() in _BOOLS:
        return _BOOLS[text.lower()]
    if len(text) <= _MOST_DIGITS and _INTEGER.fullmatch(text):
        return int(text)
    return text


def _steps(at: str) -> Path:
    """A path such as ``$.overrides[0].labels`` in msgspec's writing; what it leaves open (``[...]``) ends it."""
    steps: list[str | int] = []
    for name, index in re.findall(r"\.([^.\[\]`]+)|\[([^\]]*)\]", at.strip("`")):
        if index == "...":
            break
        steps.append(int(index) if index.isdigit() else name)
    return tuple(steps)

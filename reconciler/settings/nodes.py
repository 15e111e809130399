"""The nodes of a YAML text with their places: what `reconciler.settings.yaml_composer` makes of libyaml's events."""

import re
from typing import Final, NamedTuple

from msgspec import Struct

from cgroupfs.errors import AgentError, InputError

BOOLS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""YAML 1.1's words, as common in Kubernetes manifests; compared in lower case."""
_NULLS: Final = frozenset({"", "~", "null", "Null", "NULL"})
_INTEGER: Final = re.compile(r"[-+]?(0|[1-9][0-9]*)", re.ASCII)
_MAX_DIGITS: Final = 20


class SourceLocation(NamedTuple):
    """A place in a file; line and column count from 1. Without a line: the file as a whole, which was not read."""

    file: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


class ConfigProblem(NamedTuple):
    """One mistake. ``path`` is the setting's dotted name, empty for the file as a whole."""

    place: SourceLocation
    path: str
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.path}: {self.message}" if self.path else f"{self.place}: {self.message}"


class YamlError(InputError):
    """A text that is not YAML, or not YAML that is read here. The message begins with ``file:line:column``."""

    def __init__(self, at: SourceLocation, message: str) -> None:
        AgentError.__init__(self, f"{at}: {message}")
        self.where = str(at)
        self.value = None
        self.expected = message


class Scalar(Struct, frozen=True):
    """A single value as written. ``quoted`` ones are text, whatever their form."""

    at: SourceLocation
    text: str
    quoted: bool

    @property
    def null(self) -> bool:
        """True for an empty value, ``~`` and ``null``."""
        return not self.quoted and self.text in _NULLS

    @property
    def shown(self) -> str:
        return "nothing" if self.null else repr(self.text if len(self.text) <= 40 else f"{self.text[:40]}...")

    @property
    def plain(self) -> object:
        """The value in files of others: null, a truth value, or a decimal integer; everything else remains text.

        So ``0.5`` and ``1e3`` reach the quantity parser exactly.
        """
        if self.null:
            return None
        if self.quoted:
            return self.text
        if self.text.lower() in BOOLS:
            return BOOLS[self.text.lower()]
        if len(self.text) <= _MAX_DIGITS and _INTEGER.fullmatch(self.text):
            return int(self.text)
        return self.text


class Sequence(Struct, frozen=True):
    at: SourceLocation
    items: tuple["Node", ...]
    shown: str = "a list"


class Mapping(Struct, frozen=True):
    """Keys with their values and places. A key that is written twice keeps its first value."""

    at: SourceLocation
    items: dict[str, "Node"]
    places: dict[str, SourceLocation]
    shown: str = "a section with keys"


Node = Scalar | Sequence | Mapping

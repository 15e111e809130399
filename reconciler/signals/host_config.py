"""The section ``host_workloads``: what is not a pod and is watched all the same."""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

from msgspec import Meta, Struct

from state.hosts import CountsAs

MOST: Final = 64
"""Entries: each is read once a second."""
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_GLOB: Final = r"A-Za-z0-9:_.@\\*?\[\]!"
_UNIT: Final = re.compile(rf"[{_GLOB}-]{{1,255}}")
_PART: Final = re.compile(rf"[{_GLOB}+,=~#%^-]{{1,255}}")
_PARTS: Final = 16
_CONTAINER: Final = re.compile(r"(?:[A-Za-z0-9_./-]{1,128}=)?[A-Za-z0-9_.*?\[\]!-]{1,128}")
_USER: Final = re.compile(r"[a-z_][a-z0-9_.-]{0,31}\$?|[0-9]{1,10}", re.ASCII)
UNITS: Final = (".service", ".scope", ".slice")
"""The units of systemd that have processes of their own."""


class HostKind(StrEnum):
    """What an entry names; the word before the colon."""

    UNIT = "unit"
    CGROUP = "cgroup"
    DOCKER = "docker"
    USER = "user"


class HostMatch(NamedTuple):
    """An entry's ``match``, checked."""

    kind: HostKind
    pattern: str


class HostWorkloadConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One host workload. Nothing is ever written to it, and it is never evicted."""

    match: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=512,
            description="unit:GLOB (systemd units), cgroup:/PATH (globs in its parts), docker:GLOB (name or id of "
            "containers; or LABEL=GLOB) or user:NAME (or a uid)",
            # Reported besides a mistake in `counts_as`, too, after which the entry is not made.
            extra={"check": "reconciler.signals.host_config:parse_match"},
        ),
    ]
    counts_as: Annotated[
        CountsAs,
        Meta(description="victim: evaluated like an online pod; be: a suspect like a BE pod, but never limited"),
    ]

    def __post_init__(self) -> None:
        parse_match(self.match)


def parse_match(text: str) -> HostMatch:
    """Kind and pattern; a unit without a type is a service. Errors: `ValueError`, with what was expected."""
    word, colon, pattern = text.partition(":")
    try:
        kind = HostKind(word) if colon else None
    except ValueError:
        kind = None
    match kind:
        case HostKind.UNIT if _UNIT.fullmatch(pattern):
            return HostMatch(kind, pattern if pattern.endswith(UNITS) else f"{pattern}.service")
        case HostKind.CGROUP if _is_path(pattern):
            return HostMatch(kind, pattern)
        case HostKind.DOCKER if _CONTAINER.fullmatch(pattern):
            return HostMatch(kind, pattern)
        case HostKind.USER if _USER.fullmatch(pattern):
            return HostMatch(kind, pattern)
    expected = {
        HostKind.UNIT: "the name of a unit, such as postgresql@*.service",
        HostKind.CGROUP: f"an absolute path of at most {_PARTS} parts, without . and .., such as /system.slice/db-*",
        HostKind.DOCKER: "the name or id of containers, such as web-*, or a label of theirs, such as app=web",
        HostKind.USER: "the name of a user, or a uid",
    }
    if kind is None:
        raise ValueError(f"expected unit:, cgroup:, docker: or user:, and what it names; got {text[:80]!r}")
    raise ValueError(f"{kind}: expected {expected[kind]}; got {pattern[:80]!r}")


def _is_path(pattern: str) -> bool:
    parts = pattern.split("/")
    return (
        not parts[0]
        and 1 < len(parts) <= _PARTS + 1
        and all(_PART.fullmatch(part) and part not in {".", ".."} for part in parts[1:])
    )


def check_entries(entries: Mapping[str, HostWorkloadConfig]) -> None:
    """Errors: `ValueError` for too many entries, or a name that a message or a metric could not show."""
    if len(entries) > MOST:
        raise ValueError(f"host_workloads: {len(entries)} entries; expected at most {MOST}")
    for name in entries:
        if not _NAME.fullmatch(name):
            raise ValueError(f"host_workloads: {name!r} is not a name; expected 1 to 64 letters, digits, dots, _ and -")

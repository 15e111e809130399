"""What passes between judging and writing: a group with what is wanted there, and one file to be written.

One file: what it holds, what we know of it, what is wanted; so what is there to do? Pure.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from msgspec import Struct

from cgroupfs.codecs import Version
from cgroupfs.knobs import Knob
from state.entry import US, FileKey, LedgerEntry
from state.model import Container, GroupRef, Phase, Setting


class FileAction(StrEnum):
    """What one file needs."""

    NOTHING = "nothing"
    """It holds what is wanted."""
    FIRST = "first touch"
    """Never ours before: record the original, then write."""
    CHANGE = "change"
    """It holds what we wrote (or what was there before we ever wrote), and something else is wanted now."""
    FOREIGN = "foreign"
    """Somebody else changed what we had written."""
    RELEASE = "release"
    """Nothing is wanted any more and our value stands: put the old one back."""
    DROP = "drop"
    """Nothing is wanted any more and our value does not stand: it is no longer ours, leave it."""
    STUCK = "stuck"
    """Nothing is wanted any more, our value stands, and nobody knows the old one."""


class FileState(NamedTuple):
    """A file's place in the comparison. Texts are in the kernel's normal form; None is "not known" or "nothing"."""

    actual: str
    wanted: str | None
    seen: str | None
    restore: str | None


def compare(entry: LedgerEntry | None, found: FileState) -> FileAction:
    """What there is to do about one file.

    A file is "ours as written" when it still holds what we read back after our last write. An entry that we have not
    written yet (its original is durable, its write was lost in a crash or not yet due) is no ground for a fight:
    whatever stands there was put there by its owner.
    """
    if found.wanted is None:
        if entry is None:
            return FileAction.NOTHING
        if entry.writer != US or found.actual != found.seen:
            # Never written, or changed since. If it reads as the original, that is just as well.
            return FileAction.DROP
        if found.restore is None:
            return FileAction.STUCK
        return FileAction.DROP if found.actual == found.restore else FileAction.RELEASE
    if found.actual == found.wanted:
        return FileAction.NOTHING
    if entry is None:
        return FileAction.FIRST
    if not entry.writer or (entry.writer == US and found.actual == found.seen):
        return FileAction.CHANGE
    return FileAction.FOREIGN


class GroupTarget(Struct, frozen=True, kw_only=True):
    """One group, and all that is wanted there, by knob: settings of ours that are not among them are taken back.

    ``signalled``: the runtime has just written (its signal came), so a foreign value is its doing and expected.
    """

    group: GroupRef
    settings: Mapping[str, Setting] = {}
    pod_uid: str | None = None
    container: Container | None = None
    signalled: bool = False

    @property
    def creating(self) -> bool:
        """True while what is written would be lost: the runtime has not written its own values yet."""
        return self.container is not None and self.container.phase is Phase.CREATING


class KnobFile(NamedTuple):
    """One knob's file in one group. ``key`` is (controller, group path, file name)."""

    knob: Knob
    version: Version
    directory: str
    key: FileKey


class FileWrite(NamedTuple):
    """One file that is about to be written. ``raw`` is its text as read, ``actual`` the same in normal form."""

    target: GroupTarget
    knob: Knob
    version: Version
    directory: str
    key: FileKey
    setting: Setting | None
    raw: str
    actual: str
    text: str
    move: FileAction

    @property
    def place(self) -> tuple[str, str]:
        """Group path and knob."""
        return self.key[1], self.knob.name

    @property
    def is_zero(self) -> bool:
        """Whether it turns its knob off."""
        return self.knob.decode(self.text, self.version) == 0

"""Rows of the ledger: one `LedgerEntry` per value that bypassd changed, one `LedgerEvent` per change of its state.

A value is named by three texts: the kind of object, the object, the field of it. Control files of cgroups are one kind,
with the controller in the key; every other kind has a codec (`reconciler.actuators.codec`) that gives the texts their
meaning.
"""

import re
from enum import StrEnum
from typing import Final

import msgspec
from msgspec import Struct

from state.kinds import CGROUP

FileKey = tuple[str, str, str]
"""(kind, object, field): the identity of a value.

For a control file (controller, group path, file name), at any mount point: each controller is a kind there.
"""

US: Final = "us"


class OriginalSource(StrEnum):
    READ = "read"
    """Read from the file before our first write."""
    SPEC = "spec"
    """The value in the runtime's spec, recorded before the runtime wrote it; corrected by the first write's reading."""
    UNKNOWN = "unknown"
    """Adopted after the store was lost: unknown. Only a baseline can be restored."""


class BeforeSource(StrEnum):
    READ = ""
    """Read at the write; or the event has no such value."""
    SPEC = "spec"
    """Not read: computed from the runtime's spec, which the runtime has written by its own account."""
    SEEN = "seen"
    """Not read: the last value that was read from the file or written by bypassd."""


_BYTES: Final = 0xDC00
"""Python's surrogates for bytes that are not valid UTF-8 begin here (PEP 383)."""
_SURROGATE: Final = re.compile("[\udc80-\udcff]")
_STORED: Final = re.compile("//([89a-f][0-9a-f])")


class LedgerEntry(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """One value. Texts are as the file gives them, without the final newline; None is "not known".

    Units: all times are wall-clock seconds, 0.0 for never.
    """

    controller: str  # empty for other kinds than control files
    path: str  # of other kinds: the object
    file: str  # of other kinds: the field
    knob: str
    # Distinguishes the object from a later one of the same name: of the group's directory in the trigger hierarchy (as
    # in `state.model.GroupRef`), or the index of a network device; 0: unknown.
    inode: int = 0
    order: int = 0  # counts first touches
    original: str | None = None
    origin: OriginalSource = OriginalSource.READ
    baseline: str | None = None  # the present value of the kubelet and the runtime (runc's state.json)
    wanted: str | None = None
    seen: str | None = None
    writer: str = ""  # `US`, or the kind of the foreign writer
    process: str = ""  # the foreign writer's name
    touched_at: float = 0.0
    written_at: float = 0.0
    foreign_at: float = 0.0
    foreign_count: int = 0
    failures: int = 0
    failed_errno: int = 0  # 0: none
    failed_since: float = 0.0
    yielded: bool = False
    pod_uid: str | None = None
    container_id: str | None = None
    policy: str = ""
    reason: str = ""
    kind: str = CGROUP  # of object; `CGROUP` for a control file
    # Every value of bypassd that the object may have, the newest last, durable before it is written. Empty for control
    # files, whose values are noted in `state.intents`.
    ours: tuple[str, ...] = ()

    @property
    def key(self) -> FileKey:
        """The identity: kind (a control file's controller), object, field."""
        return self.controller if self.kind == CGROUP else self.kind, self.path, self.file

    @property
    def restore_text(self) -> str | None:
        """The text that undoes bypassd's change: the kubelet's newest value where known, else the original."""
        return self.original if self.baseline is None else self.baseline


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One line of the history."""

    at: float
    kind: str  # touch, write, failed, foreign, gone, restored, yield, resume, or free
    controller: str = ""
    path: str = ""
    file: str = ""
    before: str | None = None  # None of a write: the file was not read, and no value of it is known
    after: str | None = None
    wanted: str | None = None
    errno: int = 0
    error: str = ""
    writer: str = ""
    process: str = ""
    policy: str = ""
    reason: str = ""
    pod_uid: str | None = None
    container_id: str | None = None
    number: int = 0  # its place in the stream of events (`state.event_log`); 0: not in the stream
    pod: str = ""  # the title of the pod at that time; empty: none, or not known
    before_source: BeforeSource = BeforeSource.READ


def row_key(key: FileKey) -> str:
    """The store's key of a value: ``kind:object:field`` (no kind's and no controller's name has a colon)."""
    return f"{key[0]}:{stored_path(key[1])}:{key[2]}"


def stored_path(path: str) -> str:
    """A group's path as valid UTF-8: ``//ff`` for any other byte. No path has two slashes in a row."""
    return path if path.isascii() else _SURROGATE.sub(lambda match: f"//{ord(match[0]) - _BYTES:02x}", path)


def path_of(stored: str) -> str:
    """The path that `stored_path` has made this text of."""
    return _STORED.sub(lambda match: chr(_BYTES + int(match[1], 16)), stored) if "//" in stored else stored


def same_group(recorded: int, number: int) -> bool:
    """Whether two inodes may be the same directory; 0 is "unknown" and matches any."""
    return recorded in {0, number} or number == 0


TEXTS: Final = (
    *("controller", "path", "file", "knob", "original", "baseline", "wanted", "seen", "writer", "process"),
    *("pod_uid", "container_id", "policy", "reason", "kind"),
)
"""The fields of an `LedgerEntry` that are texts."""


class RestoreOutcome(StrEnum):
    """What became of one value."""

    RESTORED = "restored"
    ALREADY = "already as before"
    GONE = "its group is gone"
    FOREIGN = "changed by somebody else since; left"
    UNKNOWN = "its original is not known; left"
    REFUSED = "the kernel refused"


class RestoreResult(Struct, frozen=True, kw_only=True):
    """One value of the ledger and how undoing it ended. ``ok``: it is as if bypassd had never changed it."""

    path: str
    file: str
    undo: RestoreOutcome
    text: str = ""
    detail: str = ""

    @property
    def ok(self) -> bool:
        """False if a person should check it."""
        return self.undo in {RestoreOutcome.RESTORED, RestoreOutcome.ALREADY, RestoreOutcome.GONE}

    @property
    def over(self) -> bool:
        """True where nothing is left to restore: also where it is another program's value by now."""
        return self.ok or self.undo is RestoreOutcome.FOREIGN

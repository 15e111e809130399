"""Rows of the ledger: one `LedgerEntry` per control file that we changed, one `LedgerEvent` per change of its state."""

from enum import StrEnum
from typing import Final

import msgspec

FileKey = tuple[str, str, str]
"""(controller, group path, file name): the identity of a control file, wherever the hierarchy is mounted."""

US: Final = "us"


class OriginalSource(StrEnum):
    """How an original came to be known."""

    READ = "read"
    """Read from the file before our first write."""
    SPEC = "spec"
    """What the runtime was told to write, noted before it did; corrected by what the first write finds."""
    UNKNOWN = "unknown"
    """Adopted after the store was lost: nobody knows. Only a baseline can be restored."""


class LedgerEntry(msgspec.Struct, kw_only=True, gc=False, omit_defaults=True):
    """One control file. Texts are as the file gives them, without the final newline; None is "not known".

    ``inode`` is of the group's directory in the trigger hierarchy (as in `state.model.GroupRef`), 0 if unknown: it
    tells the group from a later one of the same name. ``baseline`` is what the kubelet and the runtime want there now
    (runc's state.json). ``order`` counts first touches. ``writer`` is `US` or the kind of the foreign writer, with its
    ``process`` name. Units: all times are wall-clock seconds, 0.0 for never; ``failed_errno`` 0 for none.
    """

    controller: str
    path: str
    file: str
    knob: str
    inode: int = 0
    order: int = 0
    original: str | None = None
    origin: OriginalSource = OriginalSource.READ
    baseline: str | None = None
    wanted: str | None = None
    seen: str | None = None
    writer: str = ""
    process: str = ""
    touched_at: float = 0.0
    written_at: float = 0.0
    foreign_at: float = 0.0
    foreign_count: int = 0
    failures: int = 0
    failed_errno: int = 0
    failed_since: float = 0.0
    yielded: bool = False
    pod_uid: str | None = None
    container_id: str | None = None
    policy: str = ""
    reason: str = ""

    @property
    def key(self) -> FileKey:
        """The identity: controller, group path, file."""
        return self.controller, self.path, self.file

    @property
    def restore_text(self) -> str | None:
        """What to write to undo us: the newest wish of the kubelet where known, else what was there before."""
        return self.original if self.baseline is None else self.baseline


class LedgerEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False, omit_defaults=True):
    """One line of the history. ``kind``: touch, write, failed, foreign, gone, restored, yield, resume, or free."""

    at: float
    kind: str
    controller: str = ""
    path: str = ""
    file: str = ""
    before: str | None = None
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


def row_key(key: FileKey) -> str:
    """The store's key of a file: ``controller:/group/path:file`` (a controller's name has no colon)."""
    return f"{key[0]}:{key[1]}:{key[2]}"


def same_group(recorded: int, found: int) -> bool:
    """Whether two inodes may be the same directory; 0 is "unknown" and matches any."""
    return recorded in {0, found} or found == 0


TEXTS: Final = (
    *("controller", "path", "file", "knob", "original", "baseline", "wanted", "seen", "writer", "process"),
    *("pod_uid", "container_id", "policy", "reason"),
)
"""The fields of an `LedgerEntry` that are texts."""

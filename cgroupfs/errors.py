"""All errors that bypassd raises on purpose, and the table that turns an errno into one of them.

AgentError
├─ InputError              a file, label, option or response from outside is invalid; names place, value, valid form
├─ SourceError             a source is unavailable now (kubelet, runtime, checkpoint); applied settings remain
├─ StoreError              the ledger's file cannot be read or written; no first touches until it can
└─ CgroupError             the kernel refused an access to one control file
   ├─ CgroupGoneError      the group was removed meanwhile; normal, read again
   ├─ CgroupRefusedError   the value was refused; needs a policy change or a person
   ├─ CgroupBusyError      refused now, may be accepted later (another process or a child holds it)
   │  ├─ CgroupUnderWayError   the kernel still executes it, or an earlier write: retry soon
   │  └─ CgroupChangedError    another program has written the file since it was read
   └─ CgroupDeniedError    the agent lacks the right, or the mount is read-only
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cgroupfs.bounded import shown

_LONGEST_PLACE: Final = 400
"""Of a place's name: it may hold keys of the file."""


class AgentError(Exception):
    """Base of every error this agent raises on purpose."""


class InputError(AgentError):
    """Input from outside is invalid.

    ``where`` is a file, ``file:line:column``, a label's name or a URL; ``value`` the value there; ``expected`` the
    valid form. The text of the exception is the one message for people.
    """

    def __init__(self, where: str, value: object, expected: str) -> None:
        super().__init__(f"{where[:_LONGEST_PLACE]}: {shown(value)}: expected {expected}")
        self.where = where
        self.value = value
        self.expected = expected


class SourceError(AgentError):
    """A source is unavailable now. Never a reason to undo what is applied."""

    def __init__(self, source: str, message: str) -> None:
        super().__init__(f"{source}: {message}")
        self.source = source


class StoreError(AgentError):
    """The store cannot be read or written. Until it can, nothing is touched for the first time."""


class CgroupError(AgentError):
    """One control file could not be used. ``__cause__`` holds the OSError, ``errno`` its number (0 if none)."""

    def __init__(self, path: str, message: str, code: int = 0) -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.errno = code


class CgroupGoneError(CgroupError):
    """The group was removed between discovery and use. Never an alert."""


class CgroupRefusedError(CgroupError):
    """The kernel refuses this value here; the message ends in the errno's name, such as EINVAL."""


class CgroupBusyError(CgroupError):
    """Refused now; may be accepted when a child, a sibling or memory usage has moved."""


class CgroupUnderWayError(CgroupBusyError):
    """The wait is over, and the kernel still executes this write or an earlier one. Never an alert."""


class CgroupChangedError(CgroupBusyError):
    """The file no longer reads what the step assumes: read it again. Never an alert."""


class CgroupDeniedError(CgroupError):
    """The agent may not do this at all: missing right, read-only mount."""


# kernel-measured on 5.10 to 6.18: when the group was removed an open fails with ENOENT, an already open fd with ENODEV.
# ESRCH is an attach of a dead pid. Everything not listed is a refusal of the value.
_GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ESRCH, errno.ENOTCONN})
# EMFILE, ENFILE: the shortage is this process's or the machine's, and proves nothing about the file.
_BUSY: Final = frozenset({errno.EBUSY, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE})
_DENIED: Final = frozenset({errno.EPERM, errno.EROFS})


def errno_name(code: int | None) -> str:
    """``EINVAL`` for 22; the number itself if it has no name."""
    return errno.errorcode.get(code or 0, str(code))


def cgroup_error(path: str, exc: OSError, doing: str) -> CgroupError:
    """The error of the tree above for one OSError; ``doing`` reads like ``write '0-3'``.

    EACCES is a *refusal*, not a missing right, for a write: v1 answers it to a cpuset that is not inside its parent's.
    """
    code = exc.errno or 0
    if code in _GONE:
        return CgroupGoneError(path, f"{doing}: group is gone ({errno_name(code)})", code)
    if code in _BUSY:
        return CgroupBusyError(path, f"{doing}: {errno_name(code)}", code)
    if code in _DENIED:
        return CgroupDeniedError(path, f"{doing}: {errno_name(code)}", code)
    return CgroupRefusedError(path, f"{doing}: {errno_name(code)}", code)


@contextmanager
def translated(path: str, doing: str) -> Iterator[None]:
    """Turn an OSError of the block into the matching `CgroupError`, with the cause kept."""
    try:
        yield
    except OSError as exc:
        raise cgroup_error(path, exc, doing) from exc

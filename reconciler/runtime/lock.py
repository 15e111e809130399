"""One bypassd per state directory, and per node: two would fight over every file and each undo the other's restore."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Final, Self, final

from cgroupfs.errors import AgentError, errno_name
from cgroupfs.lines import lines_of, status_field
from cgroupfs.log import get_log

_LOG: Final = get_log("lock")

_NO_ROOM: Final = frozenset({errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO})
"""With these the file cannot be made, and the directory's own lock is enough."""


class AlreadyRunningError(AgentError):
    """Another process holds the lock; the text names it. ``pid`` is None when it is unknown."""

    def __init__(self, path: str, pid: int | None, runs: str = "is running on this state directory") -> None:
        super().__init__(f"{path}: another bypassd (pid {'unknown' if pid is None else pid}) {runs}")
        self.pid = pid


@final
class InstanceLock:
    """``<directory>/lock`` and the directory itself, held with flock until `release` or the process's end.

    Errors: `AlreadyRunningError`; `AgentError` when the directory cannot be used.
    """

    def __init__(self, directory: str) -> None:
        self.path = os.path.join(directory, "lock")
        self._fds: list[int] = []
        try:
            os.makedirs(directory, mode=0o700, exist_ok=True)
            # The directory is locked, too: on a read-only or full file system the file cannot be made.
            self._fds.append(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._fds.append(_open(self.path))
        except OSError as exc:
            if exc.errno not in _NO_ROOM or not self._fds:
                self.release()
                raise AgentError(f"{self.path}: cannot be opened: {errno_name(exc.errno)}") from exc
        try:
            for fd in self._fds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            pid = _pid(self.path)
            self.release()
            if isinstance(exc, BlockingIOError):
                raise AlreadyRunningError(self.path, pid) from exc
            raise AgentError(f"{self.path}: cannot be locked: {errno_name(exc.errno)}") from exc
        if len(self._fds) == 2:
            self._note(self._fds[1])

    @staticmethod
    def _note(fd: int) -> None:
        # The lock holds without its note; a full disk must not keep the node unprotected.
        with suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        # The file remains: without it two processes could hold locks on two files of one name.
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.release()


@contextmanager
def exclusive(directory: str) -> Iterator[None]:
    """Hold the lock of the directory of all pods' groups, whatever the state directory is. It need not exist.

    Any user may open that directory: only a lock of a process of root counts, as another daemon is one. The kernel
    reports no pid for a process that has ended and left the lock to a child; a daemon has no such child.

    Errors: `AlreadyRunningError`.
    """
    fd = -1
    try:
        with suppress(OSError):
            fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                pid = holder(directory)
                if pid is not None and _is_roots(pid):
                    runs = "manages these pods, with another store.path: stop it first"
                    raise AlreadyRunningError(directory, pid, runs) from exc
                _LOG.warning("a lock that no bypassd has taken is ignored", path=directory, pid=pid or "unknown")
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def _is_roots(pid: int) -> bool:
    """Whether root has started a process that still runs."""
    try:
        status = "\n".join(_lines(f"/proc/{pid}/status"))
    except OSError:
        return False
    # Not by the directory's owner, who is root where a process cannot be dumped. The first one is the real user: a
    # program that is set-user-ID keeps its caller's.
    return status_field(status, "Uid:").split()[:1] == ["0"]


def holder(path: str, locks: str = "/proc/locks") -> int | None:
    """The process that holds a lock of flock(2) on a file, in this process's PID namespace; None: none is seen.

    Source: proc(5).
    """
    try:
        number = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            inode = f"{_device(number)}:{os.fstat(number).st_ino}"
        finally:
            os.close(number)
        lines = _lines(locks)
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        # A process that waits for it has an arrow in the second place.
        if len(fields) >= 6 and fields[1] == "FLOCK" and fields[5] == inode and fields[4].isdecimal():
            return int(fields[4]) or None
    return None


def _device(number: int) -> str:
    """The device of an open file's file system, as in /proc/locks. Errors: `OSError`.

    Of a file on btrfs, and on some overlays, stat(2) has another one: that of a part of the file system.
    """
    mount = next((line.split()[1] for line in _lines(f"/proc/self/fdinfo/{number}") if line.startswith("mnt_id:")), "")
    for line in _lines("/proc/self/mountinfo"):
        fields = line.split(" ")
        if fields[0] == mount:
            major, _, minor = fields[2].partition(":")
            return f"{int(major):02x}:{int(minor):02x}"
    raise FileNotFoundError(errno.ENOENT, f"no mount {mount}")


def _lines(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return lines_of(file.read())


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        if exc.errno != errno.EROFS:
            raise
    try:
        # flock(2) needs no right to write.
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError as exc:
        # As `_NO_ROOM` has it: the file cannot be made.
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path) from exc


def _pid(path: str) -> int | None:
    """The holder's pid in the file; None where the file has none."""
    try:
        with open(path, "rb") as file:
            text = file.read(32).strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None

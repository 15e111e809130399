"""One group with all groups below it, in every hierarchy that has it: list, freeze, thaw and kill its processes.

The group is its directories, held open: a later group of the same name is never affected. On v1 a process is in one
group of each hierarchy; it belongs to this one when it is in any of its directories.

Source: kernel documentation, admin-guide/cgroup-v2 (cgroup.events, cgroup.kill, cgroup.freeze) and
cgroup-v1/freezer-subsystem.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from typing import Final, Self, final

from cgroupfs.bounded import digits
from cgroupfs.errors import cgroup_error
from cgroupfs.hierarchy import FREEZER, Hierarchy

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Removed, being removed, or threaded: the processes of a threaded group are listed by the group above it.
_NO_PROCESSES: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOTDIR})
_STATE: Final = "freezer.state"
_FREEZE: Final = "cgroup.freeze"
_PROCS: Final = "cgroup.procs"
_CHUNK: Final = 1 << 16


@final
class Subtree:
    """Use as ``with Subtree.open(...) as tree``. Everything is inline reads and writes of control files.

    Errors: `CgroupError` of writes. A removed group has no process, which is not an error.
    """

    def __init__(self, found: Mapping[str, tuple[int, int]], freezer: str | None = None) -> None:
        """``found``: open directory and version by mount directory; ``freezer``: the mount that stops tasks."""
        self._found = dict(found)
        self._freezer = freezer

    @classmethod
    def open(cls, hierarchy: Hierarchy, group: str, inodes: Mapping[str, int] | None = None) -> Self:
        """The group as it is now; with ``inodes`` only where it still has those. Nothing of it may be left.

        Errors: `CgroupError` when an existing directory cannot be opened.
        """
        freezer = hierarchy.controllers.get(FREEZER)
        tree = cls({}, freezer.directory if freezer is not None else None)
        try:
            for mount in hierarchy.mounts():
                path = mount.path(group)
                try:
                    number = os.open(path, _DIRECTORY)
                except OSError as exc:
                    if exc.errno in _NO_PROCESSES:
                        continue
                    raise cgroup_error(path, exc, "open") from exc
                tree._found[mount.directory] = (number, mount.version)
                if inodes is not None and inodes.get(mount.directory) != os.fstat(number).st_ino:
                    os.close(tree._found.pop(mount.directory)[0])
        except BaseException:
            # Such as EMFILE: what is open by now would remain so.
            tree.close()
            raise
        return tree

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for number, _ in self._found.values():
            os.close(number)
        self._found.clear()

    @property
    def inodes(self) -> dict[str, int]:
        """Identity of this group among groups of its name, by mount directory."""
        return {directory: os.fstat(number).st_ino for directory, (number, _) in self._found.items()}

    @property
    def exists(self) -> bool:
        return any(_read(number, _PROCS) is not None for number, _ in self._found.values())

    def scan(self) -> Iterator[bool]:
        """Whether processes that have not exited are there, one part after another: a caller may pause in between."""
        for number, version in self._found.values():
            events = _read(number, "cgroup.events") if version == 2 else None
            if events is not None:
                yield "populated 1" in events
                continue
            for below in _below(number):
                yield bool((_read(number, f"{below}/{_PROCS}") or "").strip())

    def groups(self) -> "Iterator[SubtreeGroup]":
        """Every group of it, in every hierarchy, each above those below it."""
        for number, _ in self._found.values():
            for below in _below(number):
                yield SubtreeGroup(number, below)

    # Stopping

    def thawing(self) -> Iterator[bool]:
        """Thaw every frozen group of it, frozen by any program, one after another; True: this one was frozen.

        SIGKILL ends a frozen v1 task only when it is thawed, a v2 one at once. A frozen group above it keeps it from
        running: `held_above`.
        """
        for number, version in self._found.values():
            file, running = (_STATE, "THAWED") if version == 1 else (_FREEZE, "0")
            if _read(number, file) is None:
                continue  # no freezer here, or a kernel without one
            # From the top: on v1 a group runs when all above it do.
            for below in _below(number):
                state = _read(number, f"{below}/{file}")
                stopped = state is not None and state.strip() != running
                yield stopped and _write(number, f"{below}/{file}", running)

    def thaw(self) -> int:
        """`thawing` to its end; how many groups were stopped."""
        return sum(self.thawing())

    def held_above(self) -> bool:
        """Whether a v1 group above it is frozen: then no process here ends before that one is thawed."""
        return any(
            (_read(number, "freezer.parent_freezing") or "").strip() == "1" for number, _ in self._found.values()
        )

    def stop(self) -> bool:
        """Begin to stop all tasks of it; False without a freezer. `thaw` must follow, in any case."""
        number, version = self._found.get(self._freezer or "", (-1, 0))
        file, stopped = (_STATE, "FROZEN") if version == 1 else (_FREEZE, "1")
        return number >= 0 and _write(number, file, stopped)

    def stopped(self) -> bool:
        """Whether what `stop` began is complete. A task that sleeps uninterruptibly may hold it up for ever."""
        number, version = self._found.get(self._freezer or "", (-1, 0))
        if version == 1:
            return (_read(number, _STATE) or "").strip() == "FROZEN"
        return number >= 0 and "frozen 1" in (_read(number, "cgroup.events") or "")

    def kill(self) -> bool:
        """SIGKILL to all at once, also to processes being forked (v2, kernel 5.14); False: unavailable here."""
        done = False
        for number, version in self._found.values():
            done |= version == 2 and _write(number, "cgroup.kill", "1")
        return done


@final
class SubtreeGroup:
    """One group of a `Subtree`: an open directory, and the relative path below it ("." for itself)."""

    __slots__ = ("number", "path")

    def __init__(self, number: int, path: str) -> None:
        self.number = number
        self.path = path

    def pids(self) -> list[int]:
        """The processes in this very group. 0 is one outside this pid namespace."""
        text = _read(self.number, f"{self.path}/{_PROCS}") or ""
        return [pid for word in text.split() if (pid := digits(word)) is not None]


def _below(number: int) -> Iterator[str]:
    """Relative paths of a directory and all below it, each after the one above."""
    pending = ["."]
    while pending:
        path = pending.pop()
        yield path
        try:
            inside = os.open(path, _DIRECTORY, dir_fd=number)
        except OSError as exc:
            if exc.errno in _NO_PROCESSES:
                continue
            raise cgroup_error(path, exc, "list") from exc
        try:
            with os.scandir(inside) as entries:
                pending += [f"{path}/{entry.name}" for entry in entries if entry.is_dir(follow_symlinks=False)]
        except OSError as exc:
            if exc.errno not in _NO_PROCESSES:
                raise cgroup_error(path, exc, "list") from exc
        finally:
            os.close(inside)


def _read(number: int, file: str) -> str | None:
    """A control file; None when it, or its group, is not there."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=number)
        try:
            parts = []
            while part := os.read(opened, _CHUNK):
                parts.append(part)
        finally:
            os.close(opened)
    except OSError as exc:
        if exc.errno in _NO_PROCESSES:
            return None
        raise cgroup_error(file, exc, "read") from exc
    return b"".join(parts).decode("ascii", "replace")


def _write(number: int, file: str, text: str) -> bool:
    """True when written; False when no such file exists, or no group any more."""
    try:
        opened = os.open(file, os.O_WRONLY | os.O_CLOEXEC, dir_fd=number)
        try:
            os.write(opened, text.encode())
        finally:
            os.close(opened)
    except OSError as exc:
        if exc.errno in _NO_PROCESSES:
            return False
        raise cgroup_error(file, exc, f"write {text!r}") from exc
    return True

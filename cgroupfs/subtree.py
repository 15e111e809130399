"""One group with all groups below it, in every hierarchy that has it: list, freeze, thaw and kill its processes.

The group is its directories, held open: a later group of the same name is never affected. On v1 a process is in one
group of each hierarchy; it belongs to this one when it is in any of its directories.

Source: kernel documentation, admin-guide/cgroup-v2 (cgroup.events, cgroup.kill, cgroup.freeze) and
cgroup-v1/freezer-subsystem.
"""

import errno
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Final, Self, final

from cgroupfs.bounded import digits
from cgroupfs.errors import cgroup_error, translated
from cgroupfs.hierarchy import FREEZER, Hierarchy
from cgroupfs.threads import MOST_GROUPS

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Removed, being removed, or threaded: the processes of a threaded group are listed by the group above it.
_NO_PROCESSES: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.EOPNOTSUPP, errno.ENOTDIR})
_STATE: Final = "freezer.state"
_FREEZE: Final = "cgroup.freeze"
_PROCS: Final = "cgroup.procs"
_CHUNK: Final = 1 << 16
_MOST_CURSORS: Final = 1024
"""Directories with too many groups whose position is kept."""


@final
class Subtree:
    """Use as ``with Subtree.open(...) as tree``. Everything is inline reads and writes of control files.

    Errors: `CgroupError` of writes. A removed group has no process, which is not an error.
    """

    def __init__(self, found: Mapping[str, tuple[int, int]], freezer: str | None = None) -> None:
        """``found``: open directory and version by mount directory; ``freezer``: the mount that stops tasks."""
        self._found = dict(found)
        self._freezer = freezer
        self._cursors: dict[int, int] = {}
        """Positions in directories with too many groups, by inode."""
        self.missing = ""
        """Why the last walk, of `groups`, `scan` or `thawing`, may have left out groups; empty: it did not."""

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
        return any(next(_parts(number, _PROCS), None) is not None for number, _ in self._found.values())

    def scan(self) -> Iterator[bool]:
        """Whether processes that have not exited are there, one part after another: a caller may pause in between.

        True where not all groups could be listed.
        """
        self.missing = ""
        for number, version in self._found.values():
            events = _read(number, "cgroup.events") if version == 2 else None
            if events is not None:
                yield "populated 1" in events
                continue
            for group in self._walk(number):
                yield next(SubtreeGroup(group).pids(), None) is not None
            if self.missing:
                yield True

    def groups(self) -> "Iterator[SubtreeGroup]":
        """The groups of it, in every hierarchy, each above those below it; see `missing`. Each until the next step."""
        self.missing = ""
        for number, _ in self._found.values():
            yield from map(SubtreeGroup, self._walk(number))

    # Stopping

    def thawing(self) -> Iterator[bool]:
        """Thaw the frozen groups of it, frozen by any program, one after another; True: this one was frozen.

        SIGKILL ends a frozen v1 task only when it is thawed, a v2 one at once. A frozen group above it keeps it from
        running: `held_above`.
        """
        self.missing = ""
        for number, version in self._found.values():
            file, running = (_STATE, "THAWED") if version == 1 else (_FREEZE, "0")
            if _read(number, file) is None:
                continue  # no freezer here, or a kernel without one
            # From the top: on v1 a group runs when all above it do.
            for group in self._walk(number):
                state = _read(group, file)
                stopped = state is not None and state.strip() != running
                yield stopped and _write(group, file, running)

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

    def _walk(self, number: int) -> Iterator[int]:
        """A directory and at most `MOST_GROUPS` below it, each after the one above and open until the next step.

        By one name at a time: the path of groups that a tenant nests is longer than the kernel takes. One descriptor,
        of any depth: the group above a group never changes.
        """
        # Names below the present group, and None for the way back to the one above it. The first to be dropped are
        # those beyond the bound.
        pending: deque[str | None] = deque(maxlen=2 * MOST_GROUPS)
        with translated(".", "list"):
            inside = os.dup(number)
        try:
            for left in range(MOST_GROUPS, -1, -1):
                yield inside
                pending.append(None)
                pending.extend(self._names(inside, left + 1))
                while True:
                    name = pending.pop()
                    if not pending:
                        return  # the way back from the group itself
                    try:
                        below = os.open(name or "..", _DIRECTORY, dir_fd=inside)
                    except OSError as exc:
                        if name is not None and exc.errno in _NO_PROCESSES:
                            continue
                        raise cgroup_error(name or "..", exc, "list") from exc
                    os.close(inside)
                    inside = below
                    if name is not None:
                        break
            self.missing = f"only {MOST_GROUPS} groups in it are listed at a time"
        finally:
            os.close(inside)

    def _names(self, number: int, most: int) -> list[str]:
        """The names of at most so many directories in one, in random order.

        Of more than that the next call lists those that follow: a tenant cannot keep one from being listed.
        """
        inode = os.fstat(number).st_ino
        try:
            begin = self._cursors.pop(inode, 0)
            names, end = _listed(number, begin, most)
            if begin and len(names) < most:
                more, end = _listed(number, 0, most)
                names |= more
        except OSError as exc:
            if exc.errno in _NO_PROCESSES:
                return []
            raise cgroup_error("a group in it", exc, "list") from exc
        if end:
            if len(self._cursors) >= _MOST_CURSORS:
                self._cursors.clear()
            self._cursors[inode] = end
        chosen = list(names)
        random.shuffle(chosen)
        return chosen[:most]


@final
class SubtreeGroup:
    """One group of a `Subtree`: an open directory."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def pids(self) -> Iterator[int]:
        """The processes in this very group, read a part at a time: a caller may pause in between.

        0 is one outside this pid namespace.
        """
        rest = b""
        for part in _parts(self.number, _PROCS):
            *lines, rest = (rest + part).split(b"\n")
            for line in lines:
                if (pid := digits(line.decode("ascii", "replace"))) is not None:
                    yield pid


def _listed(number: int, begin: int, most: int) -> tuple[dict[str, None], int]:
    """Names of directories in one, from a position on, and where to go on; 0: the end was reached.

    More than ``most`` by what the kernel has returned at once: positions within that are not known.
    """
    names: dict[str, None] = {}
    os.lseek(number, begin, os.SEEK_SET)
    with os.scandir(number) as entries:
        end = begin
        for entry in entries:
            # The kernel's position, behind all that it has returned.
            at = os.lseek(number, 0, os.SEEK_CUR)
            if at != end and len(names) >= most:
                return names, end
            end = at
            if entry.is_dir(follow_symlinks=False):
                names[entry.name] = None
    return names, 0


def _read(number: int, file: str) -> str | None:
    """A control file; None when it, or its group, is not there."""
    parts = list(_parts(number, file))
    return b"".join(parts).decode("ascii", "replace") if parts else None


def _parts(number: int, file: str) -> Iterator[bytes]:
    """A control file as the kernel gives it, a page at a time, with an empty part at its end; none: it is not there."""
    try:
        opened = os.open(file, os.O_RDONLY | os.O_CLOEXEC, dir_fd=number)
        try:
            part = b"more"
            while part:
                part = os.read(opened, _CHUNK)
                yield part
        finally:
            os.close(opened)
    except OSError as exc:
        if exc.errno not in _NO_PROCESSES:
            raise cgroup_error(file, exc, "read") from exc


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

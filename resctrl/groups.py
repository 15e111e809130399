"""Control groups: bypassd's, by their prefix, made under the hardware's budget, filled, and removed again.

Groups of other names are never changed. The kernel's own message (``last_cmd_status``) is part of every refusal. All
calls are synchronous and slow: for a worker thread, never in the event loop.

Source: kernel documentation, filesystems/resctrl.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

from msgspec import Struct

from cgroupfs.errors import CgroupError, CgroupGoneError, CgroupRefusedError, InputError, cgroup_error, errno_name
from cgroupfs.threads import numbers
from resctrl.capability import Capability
from resctrl.files import REAL, GroupFiles
from resctrl.schemata import Schemata, check_schemata, differing, format_schemata, parse_schemata, writable

PASSES: Final = 10
"""Readings of a group within one call, while threads are missing in it."""
MOST_WRITES: Final = 4096
"""Within one call: a program that forks without end must not keep it."""

Threads = Callable[[], Iterable[int]]
PREFIX: Final = "bypassd-"
"""Prefix of the names of all groups of bypassd; it is enough to remove them."""
DEFAULT: Final = ""
"""The name of the default group, in which every thread begins."""
_NO_GROUPS: Final = frozenset({"info", "mon_data", "mon_groups"})
_LONGEST: Final = 200


class MoveResult(Struct, frozen=True, kw_only=True):
    """Result of one call. ``complete``: at its end no thread was missing. ``gone``: ended meanwhile, which is fine.

    ``refused``: errno names with the number of threads that got them.
    """

    moved: int = 0
    gone: int = 0
    complete: bool = True
    refused: Mapping[str, int] = {}


def members(files: GroupFiles, directory: str) -> frozenset[int]:
    """The threads of a group, of a control group with those in its monitoring groups.

    Errors: `CgroupError`; `InputError` for a text that no kernel shows.
    """
    try:
        return frozenset(numbers(files.read(directory, "tasks")))
    except ValueError as exc:
        raise InputError(f"{directory}/tasks", str(exc), "numbers of threads") from exc
    except OSError as exc:
        raise cgroup_error(f"{directory}/tasks", exc, "read") from exc


def gather(
    files: GroupFiles, directory: str, threads: Threads, *, passes: int = PASSES, most: int = MOST_WRITES
) -> MoveResult:
    """Bring all of ``threads`` into the group, in no more than ``most`` writes.

    A difference from peers, which write each process id once per period and ignore errors: a group takes threads, not
    processes, so the other threads of a process remain behind.

    Errors: `CgroupError` when the group itself cannot be used (it was removed). Refusals of single threads are in the
    result: writing to a monitoring group fails with EINVAL while a thread is not in its control group yet.
    """
    moved = gone = 0
    refused: dict[str, int] = {}
    unmovable: set[int] = set()
    # A new thread starts in the group of its creator, so one that forks while it is moved leaves children behind. A
    # program that forks without end is complete after later calls: its new children have moved parents.
    for _ in range(passes):
        # 0 is a thread outside this pid namespace. Written, it is the writer's own thread.
        missing = sorted(set(threads()) - members(files, directory) - unmovable - {0})
        if not missing:
            return MoveResult(moved=moved, gone=gone, complete=not refused, refused=refused)
        for tid in missing:
            if moved + gone + len(unmovable) >= most:
                return MoveResult(moved=moved, gone=gone, complete=False, refused=refused)
            code = _put(files, directory, tid)
            if code == 0:
                moved += 1
            elif code == errno.ESRCH:
                gone += 1
            else:
                unmovable.add(tid)
                refused[errno_name(code)] = refused.get(errno_name(code), 0) + 1
    return MoveResult(moved=moved, gone=gone, complete=False, refused=refused)


def expel(files: GroupFiles, directory: str, leaving: Callable[[frozenset[int]], Iterable[int]], to: str) -> int:
    """Move those of the group's members that ``leaving`` returns to the group ``to``; returns how many were moved.

    A thread's number may have been given to another program between reading it and writing it.
    """
    # The members are read before ``leaving`` reads whose they are: a thread that a member forks meanwhile is in both.
    others = sorted(leaving(members(files, directory)))[:MOST_WRITES]
    return sum(_put(files, to, tid) == 0 for tid in others)


def _put(files: GroupFiles, directory: str, tid: int) -> int:
    """0 or the errno. Errors: `CgroupGoneError` when the group itself was removed."""
    try:
        files.write(directory, "tasks", f"{tid}\n")
    except OSError as exc:
        if exc.errno in {errno.ENOENT, errno.ENODEV}:
            raise cgroup_error(f"{directory}/tasks", exc, f"write {tid}") from exc
        return exc.errno or errno.EIO
    return 0


class OutOfGroupsError(CgroupRefusedError):
    """The hardware has no group to give. ``what``: ``CLOSIDs`` or ``RMIDs``."""

    def __init__(self, path: str, what: str) -> None:
        super().__init__(path, f"mkdir: out of {what} (ENOSPC)", errno.ENOSPC)
        self.what = what


def remove_directory(files: GroupFiles, path: str) -> bool:
    """Remove a control or monitoring group. False when there was none. Errors: `CgroupError`."""
    try:
        files.rmdir(path)
    except OSError as exc:
        error = cgroup_error(path, exc, "rmdir")
        if isinstance(error, CgroupGoneError):
            return False
        raise error from exc
    return True


@final
class ControlGroups:
    def __init__(self, root: str, files: GroupFiles = REAL) -> None:
        self.root = root
        self.files = files

    def path(self, name: str) -> str:
        """The directory of a group; `DEFAULT` is the mount itself."""
        return f"{self.root}/{name}" if name else self.root

    def ours(self) -> list[str]:
        """Names of our groups that exist, sorted. Errors: `CgroupError`."""
        return [name for name in self._all() if name.startswith(PREFIX)]

    def foreign(self) -> list[str]:
        """Names of others' control groups, sorted. Errors: `CgroupError`."""
        return [name for name in self._all() if not name.startswith(PREFIX)]

    def of_others(self) -> frozenset[int]:
        """The threads in groups of others. A group that is removed meanwhile has none."""
        threads: set[int] = set()
        for name in self.foreign():
            try:
                threads |= members(self.files, self.path(name))
            except CgroupGoneError:
                continue
        return frozenset(threads)

    def members(self, name: str) -> frozenset[int]:
        """The threads of one group. Errors: `CgroupError`."""
        return members(self.files, self.path(name))

    def create(self, name: str) -> bool:
        """Make a group; False when it was there.

        Errors: `OutOfGroupsError`; `CgroupBusyError` while freed monitoring ids still occupy cache (the kernel checks
        once a second: try again); `CgroupError`.
        """
        path = self.path(self._own(name))
        try:
            self.files.mkdir(path)
        except FileExistsError:
            return False
        except OSError as exc:
            if exc.errno == errno.ENOSPC:
                # Only the message shows which of the two ids is exhausted.
                raise OutOfGroupsError(path, "RMIDs" if "RMID" in self.status() else "CLOSIDs") from exc
            raise self._error(path, exc, "mkdir") from exc
        return True

    def remove(self, name: str) -> bool:
        """Remove a group; its threads move to the default group. False when there was none. Errors: `CgroupError`."""
        return remove_directory(self.files, self.path(self._own(name)))

    def schemata(self, name: str) -> dict[str, dict[int, int]]:
        """What a group holds. Errors: `CgroupError`; `InputError` for a text that no kernel shows."""
        path = self.path(name)
        try:
            return parse_schemata(self.files.read(path, "schemata"))
        except OSError as exc:
            raise cgroup_error(f"{path}/schemata", exc, "read") from exc

    def set_schemata(self, name: str, wanted: Schemata, capability: Capability) -> dict[str, dict[int, int]]:
        """Bring a group to ``wanted`` in one write and read it back; returns the written text, empty without a change.

        Errors: `InputError` for an illegal value here (nothing is written then); `CgroupRefusedError` with the kernel's
        reason, or when something else reads back; `CgroupError`.
        """
        check_schemata(wanted, capability)
        wanted = writable(wanted, capability)
        todo = differing(wanted, self.schemata(name), capability)
        if not todo:
            return {}
        path = f"{self.path(name)}/schemata"
        text = format_schemata(todo)
        try:
            self.files.write(self.path(name), "schemata", text)
        except OSError as exc:
            raise self._error(path, exc, f"write {text!r}") from exc
        left = differing(wanted, self.schemata(name), capability)
        if left:
            raise CgroupRefusedError(path, f"wrote {text!r}; it does not hold {format_schemata(left)!r} afterwards")
        return todo

    def status(self) -> str:
        """The kernel's last message about a refusal; "" where it has none."""
        try:
            lines = self.files.read(f"{self.root}/info", "last_cmd_status").split("\n")
        except OSError:
            return ""
        # The file grows line by line until a command clears it: the newest is at its end.
        last = [line for line in lines if line.strip()][-1:]
        return "" if last in ([], ["ok"]) else last[0].strip()

    def _all(self) -> list[str]:
        try:
            return sorted(name for name in self.files.groups(self.root) if name not in _NO_GROUPS)
        except OSError as exc:
            raise cgroup_error(self.root, exc, "list") from exc

    def _own(self, name: str) -> str:
        if not name.startswith(PREFIX) or "/" in name or "\n" in name or len(name) > _LONGEST:
            raise ValueError(f"{name!r} is not a group name of bypassd")
        return name

    def _error(self, path: str, exc: OSError, doing: str) -> CgroupError:
        status = self.status()
        return cgroup_error(path, exc, f"{doing} ({status})" if status else doing)

"""Moving threads between groups: one thread a write, until none is left to move or the bounds are reached.

A group takes threads, not processes, and new threads start in the group of their creator. A process that forks while it
is moved leaves children behind; so the list is read again until no thread is missing. A program that forks without end
is moved completely in the end because its new children have moved parents, but no single call waits for that.

Source: kernel documentation, filesystems/resctrl. Peers write each process id once per period and ignore errors; the
threads of a process stay behind then.
"""

import errno
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from msgspec import Struct

from cgroupfs.bounded import whole
from cgroupfs.errors import InputError, cgroup_error, errno_name
from resctrl.files import GroupFiles

PASSES: Final = 10
MOST_WRITES: Final = 4096

_AT_ONCE: Final = 1000

Threads = Callable[[], Iterable[int]]


class MoveResult(Struct, frozen=True, kw_only=True):
    """Result of one call. ``settled``: at its end no thread was missing. ``gone``: ended meanwhile, which is fine.

    ``refused``: errno names with the number of threads that got them.
    """

    moved: int = 0
    gone: int = 0
    passes: int = 0
    on_settled: bool = True
    refused: Mapping[str, int] = {}


def numbers(text: str) -> set[int]:
    """The ids of a tasks file. Errors: `ValueError`.

    In portions: between two of them other threads of this process get their turn, which one long conversion would keep
    waiting (1 ms for 10,000 ids).
    """
    parts = text.split()
    result: set[int] = set()
    for first in range(0, len(parts), _AT_ONCE):
        result.update(map(whole, parts[first : first + _AT_ONCE]))
    return result


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

    Errors: `CgroupError` when the group itself cannot be used (it was removed). Refusals of single threads are in the
    result: writing to a monitoring group fails with EINVAL while a thread is not in its control group yet.
    """
    moved = gone = 0
    refused: dict[str, int] = {}
    given_up: set[int] = set()
    for turn in range(1, passes + 1):
        missing = sorted(set(threads()) - members(files, directory) - given_up)
        if not missing:
            return MoveResult(moved=moved, gone=gone, passes=turn, on_settled=not refused, refused=refused)
        for tid in missing:
            if moved + gone + len(given_up) >= most:
                return MoveResult(moved=moved, gone=gone, passes=turn, on_settled=False, refused=refused)
            code = _put(files, directory, tid)
            if code == 0:
                moved += 1
            elif code == errno.ESRCH:
                gone += 1
            else:
                given_up.add(tid)
                refused[errno_name(code)] = refused.get(errno_name(code), 0) + 1
    return MoveResult(moved=moved, gone=gone, passes=passes, on_settled=False, refused=refused)


def expel(files: GroupFiles, directory: str, threads: Threads, to: str, *, most: int = MOST_WRITES) -> int:
    """Move members of the group that are not in ``threads`` to the group ``to``; returns how many were moved.

    A thread's number may have been given to another program between reading it and writing it. The members are read
    before ``threads``: a thread that a member forks meanwhile is in both.
    """
    inside = members(files, directory)
    strangers = sorted(inside - set(threads()))[:most]
    return sum(_put(files, to, tid) == 0 for tid in strangers)


def _put(files: GroupFiles, directory: str, tid: int) -> int:
    """0 or the errno. Errors: `CgroupGoneError` when the group itself was removed."""
    try:
        files.write(directory, "tasks", f"{tid}\n")
    except OSError as exc:
        if exc.errno in {errno.ENOENT, errno.ENODEV}:
            raise cgroup_error(f"{directory}/tasks", exc, f"write {tid}") from exc
        return exc.errno or errno.EIO
    return 0

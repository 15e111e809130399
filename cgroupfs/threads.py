"""The threads of a group and of all groups below it, of which a tenant makes any number."""

import errno
from collections.abc import Iterable
from typing import Final, NamedTuple

from cgroupfs.bounded import whole
from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy

MOST_GROUPS: Final = 4_096
"""Groups below one that are read, 40 ms: a node of its own in a pod (kind, a CI runner) has some hundred."""
_AT_ONCE: Final = 1000
GONE: Final = frozenset({errno.ENOENT, errno.ENODEV, errno.ENOTDIR})
"""Errors of a group that was removed, before or after its file was opened."""


class GroupThreads(NamedTuple):
    """The threads of groups."""

    ids: set[int]  # 0: each thread outside this PID namespace
    missing: str = ""  # why there may be others; empty: none


def together(parts: Iterable[GroupThreads]) -> GroupThreads:
    """The threads of several groups."""
    listed = tuple(parts)
    missing = next((part.missing for part in listed if part.missing), "")
    return GroupThreads(set().union(*(part.ids for part in listed)), missing)


def numbers(text: str) -> set[int]:
    """The ids of a file that lists threads or processes. Errors: `ValueError`.

    In portions, between which other threads of this process can run: one conversion of 10,000 ids keeps the interpreter
    for 1 ms.
    """
    parts = text.split()
    result: set[int] = set()
    for first in range(0, len(parts), _AT_ONCE):
        result.update(map(whole, parts[first : first + _AT_ONCE]))
    return result


def threads_below(directory: str, file: str, files: FileOps, most: int = MOST_GROUPS) -> GroupThreads:
    """The threads of a group and of at most ``most`` groups below it; those removed meanwhile are left out.

    A tenant nests groups until their path is longer than the kernel takes; those are missing, and the others listed.

    ``file`` lists threads: ``tasks`` on v1, ``cgroup.threads`` on v2. Errors: `OSError`, if the group itself was
    removed or one of them cannot be read.
    """
    ids: set[int] = set()
    left, missing = most, ""
    # Not recursive: a tenant nests groups deeper than the call stack may be.
    pending = [directory]
    while pending:
        group = pending.pop()
        try:
            ids |= numbers(files.read(group, file))
            inside = files.groups(group, left + 1)
        except ValueError as exc:
            raise OSError(errno.EIO, "not a list of threads", f"{group}/{file}") from exc
        except OSError as exc:
            if group == directory or exc.errno not in {*GONE, errno.ENAMETOOLONG}:
                raise
            if exc.errno not in GONE:
                missing = missing or "groups in it are nested too deeply to be listed"
            continue
        if len(inside) > left:
            missing = f"only the threads of {most} groups in it are listed"
        pending += [f"{group}/{name}" for name in inside[:left]]
        left -= len(inside[:left])
    return GroupThreads(ids, missing)


def threads_of(hierarchy: Hierarchy, path: str, files: FileOps = REAL) -> GroupThreads:
    """`threads_below`, of a group in the trigger hierarchy; none of one that was removed, or that cannot be read."""
    file = "tasks" if hierarchy.version(hierarchy.trigger) == 1 else "cgroup.threads"
    try:
        return threads_below(hierarchy.trigger_directory(path), file, files, MOST_GROUPS)
    except OSError as exc:
        return GroupThreads(set(), "" if exc.errno in GONE else f"cannot list its threads: {errno_name(exc.errno)}")

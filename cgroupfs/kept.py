"""Reading the same control files again and again: their descriptors remain open between two readings.

An open, a read and a close of a file that was last read a second ago cost 11-14 µs, a mere read 3-5 (6.18, 110 pods;
see docs/signals.md). Only for control files: a descriptor below /proc/<pid> would keep its process's resources.
"""

import errno
import os
import resource
from typing import Final, final

from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy

_CHUNK: Final = 4_096
_LONG: Final = 1 << 20
_MANY: Final = 10_000
_SWEEP: Final = 4
"""Every so many passes what is not read any more is closed."""
_PART: Final = 4
"""Of the descriptors that this process may have, at most this part is kept open here. Each also costs 5 KiB of kernel
memory. Beyond it files are opened for each reading."""
_SHORTAGE: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})


@final
class FdCache:
    """`ReadOps` with descriptors that remain open. ``most``: of them; None: a quarter of what the process may have."""

    def __init__(self, most: int | None = None) -> None:
        if most is None:
            soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            most = soft // _PART if soft != resource.RLIM_INFINITY else 1 << 16
        self._most = most
        # Descriptor, and the pass in which it was last read.
        self._open: dict[tuple[str, str], list[int]] = {}
        self._pass = 0

    def __len__(self) -> int:
        return len(self._open)

    def rotate(self) -> None:
        """Begin a pass; now and then, close what was not read for two."""
        self._pass += 1
        if self._pass % _SWEEP == 0:
            self._close_before(self._pass - 2)

    def close(self) -> None:
        """Close all of them; the next reading opens what it needs."""
        self._close_before(self._pass + 1)

    def _close_before(self, number: int) -> None:
        for key in [key for key, (_, last) in self._open.items() if last < number]:
            os.close(self._open.pop(key)[0])

    def read(self, directory: str, file: str) -> str:
        key = directory, file
        known = self._open.get(key)
        if known is not None:
            try:
                text = _read(known[0])
            except OSError:
                # ENODEV, for ever: the group was removed; its name may be another group's by now.
                del self._open[key]
                os.close(known[0])
            else:
                known[1] = self._pass
                return text
        if len(self._open) >= self._most:
            return REAL.read(directory, file)
        try:
            number = os.open(f"{directory}/{file}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            if exc.errno in _SHORTAGE:
                self._most = len(self)  # from now on no more than are open
            raise
        try:
            text = _read(number)
        except OSError:
            os.close(number)
            raise
        self._open[key] = [number, self._pass]
        return text

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return REAL.groups(directory, most)


def _read(number: int) -> str:
    data = os.pread(number, _CHUNK, 0)
    # The kernel cuts at the end of a record: a part may be a little shorter than requested.
    if len(data) > _CHUNK // 2:
        parts = [data]
        while more := os.pread(number, _LONG, sum(map(len, parts))):
            parts.append(more)
        data = b"".join(parts)
    return data.decode("utf-8", "surrogateescape")


@final
class GroupDirectories:
    """The directories of groups in one controller's hierarchy, worked out once each."""

    def __init__(self, hierarchy: Hierarchy, controller: str) -> None:
        self._hierarchy = hierarchy
        self._controller = controller
        self._known: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        """As `Hierarchy.directory`. Errors: `SourceError`."""
        text = self._known.get(path)
        if text is None:
            if len(self._known) >= _MANY:
                self._known.clear()
            text = self._known[path] = self._hierarchy.directory(self._controller, path)
        return text

"""This machine's own threads for the mounted resctrl model: who is where, read from /proc.

The kernel keeps a thread's group in the thread and copies it at fork. From outside that is rebuilt: what was moved is
remembered by number and start time; a process that started after its parent was moved is where the parent is, as is a
thread after its leader. Two cases cannot be seen and count as the default group, which only makes work for code that
moves until nothing is left to move: a child whose parent has ended, and one started within the same clock tick.
"""

import os
import time
from dataclasses import dataclass

from tests.fakes.resctrl_parts import Place

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class _Seen:
    """Where a thread is, and since when (ticks since boot; 0: always). ``start`` tells it from others of its number."""

    start: int
    place: Place
    since: int


class ProcTasks:
    """`Tasks` of the running machine."""

    def __init__(self, proc: str = "/proc") -> None:
        self._proc = proc
        self._moved: dict[int, _Seen] = {}

    def place(self, tid: int) -> Place | None:
        seen = self._seen(tid, {})
        return None if seen is None else seen.place

    def put(self, tid: int, place: Place) -> None:
        now = self._seen(tid, {})
        if now is None:
            return
        if now.place != Place():
            # Children that are here because this one was must stay.
            self._moved = self._walk()
        self._moved[tid] = _Seen(now.start, place, int(time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS_PER_SECOND))

    def threads(self) -> list[tuple[int, Place]]:
        return [(tid, seen.place) for tid, seen in self._walk().items()]

    def _walk(self) -> dict[int, _Seen]:
        known: dict[int, _Seen | None] = {}
        found: dict[int, _Seen] = {}
        for pid in sorted(int(name) for name in os.listdir(self._proc) if name.isdigit()):
            try:
                tids = [int(name) for name in os.listdir(f"{self._proc}/{pid}/task")]
            except OSError:
                continue
            for tid in sorted(tids, key=lambda tid: (tid != pid, tid)):
                seen = self._seen(tid, known, pid)
                if seen is not None:
                    found[tid] = seen
        return found

    def _seen(self, tid: int, known: dict[int, _Seen | None], leader: int = 0) -> _Seen | None:
        """Where one thread is; ``known`` holds answers of the same walk."""
        if tid in known:
            return known[tid]
        known[tid] = seen = self._look(tid, known, leader)
        return seen

    def _look(self, tid: int, known: dict[int, _Seen | None], leader: int) -> _Seen | None:
        try:
            with open(f"{self._proc}/{tid}/stat", encoding="utf-8", errors="replace") as file:
                fields = file.read().rpartition(")")[2].split()
            leader = leader or self._leader(tid)
        except OSError:
            self._moved.pop(tid, None)
            return None
        parent, start = int(fields[1]), int(fields[19])
        moved = self._moved.get(tid)
        if moved is not None and moved.start == start:
            return moved
        above = self._seen(parent if leader == tid else leader, known) if parent else None
        if above is not None and above.place != Place() and start > above.since:
            # Born there: so is all that it starts.
            return _Seen(start, above.place, 0)
        return _Seen(start, Place(), 0)

    def _leader(self, tid: int) -> int:
        with open(f"{self._proc}/{tid}/status", encoding="utf-8", errors="replace") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("Tgid:"))

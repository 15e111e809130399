"""Monitoring of the resctrl model: what each monitoring id (RMID) counts, and which ids are free."""

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.fakes.resctrl_schemata import LastStatus
from tests.fakes.resctrl_shapes import MonitorShape, Release

COUNT_BYTES = 65_536
"""Bytes of one count of the hardware."""
LIMBO_CHECK_S = 1.0


@dataclass(slots=True)
class Count:
    """What one RMID counts in one domain: bytes, and bytes per second since a moment.

    ``word``: the hardware's answer instead of all numbers; ``unavailable``: events without a number at the next read.
    """

    occupancy: int
    total_bps: float
    local_bps: float
    since: float
    total: float = 0
    local: float = 0
    word: str = ""
    unavailable: set[str] = field(default_factory=set)


class Monitor:
    """What every RMID counts, and the free ones, given out in the order of their return.

    Freed RMIDs wait until the cache has lost their bytes: once a second the kernel checks whether domains have less
    than the threshold. Before 6.9 the domain of the caller's CPU was checked at once (here: the first one).
    """

    def __init__(self, shape: MonitorShape, release: Release, status: LastStatus, now: Callable[[], float]) -> None:
        self.threshold = shape.threshold
        self.check_after = 0
        """For tests that cannot count on time: check after so many refusals instead."""
        self.idle_occupancy, self.idle_bps = 0, 0.0
        """The counts of RMIDs for which nothing else is set."""
        self.shape, self._status, self._now = shape, status, now
        self._counts: dict[tuple[int, int], Count] = {}
        self._free = deque(range(1, shape.rmids))
        self._dirty: set[tuple[int, int]] = set()
        """RMIDs that wait and domains, where they are not clean yet."""
        self._refusals, self._due = 0, 0.0
        self._checked_at_once = shape.domains[:1] if release < (6, 9) else ()

    def at(self, rmid: int, domain: int) -> Count:
        """The counts of one RMID in one domain, up to date."""
        now = self._now()
        idle = Count(self.idle_occupancy, self.idle_bps, self.idle_bps / 2, now)
        count = self._counts.setdefault((rmid, domain), idle)
        count.total += count.total_bps * (now - count.since)
        count.local += count.local_bps * (now - count.since)
        count.since = now
        return count

    def read(self, rmid: int, domain: int, event: str) -> int | str:
        """Whole counts in bytes, or the word that the file shows instead."""
        count = self.at(rmid, domain)
        if count.word or event in count.unavailable:
            count.unavailable.discard(event)
            return count.word or "Unavailable"
        values = {"llc_occupancy": count.occupancy, "mbm_total_bytes": count.total, "mbm_local_bytes": count.local}
        return int(values[event]) // COUNT_BYTES * COUNT_BYTES

    def reconfigure(self, domain: int) -> None:
        """The kinds of traffic that count changed: all counts start again, and are unavailable at the next read."""
        for rmid in range(self.shape.rmids):
            count = self.at(rmid, domain)
            count.total = count.local = 0
            count.unavailable = set(self.shape.events[1:])

    @property
    def waiting(self) -> set[int]:
        """RMIDs that belong to no group and are not clean yet."""
        period, late = self._period, self._now() - self._due
        if self._dirty and late >= 0:
            self._due += period * (1 + late // period)
            self._check()
        return {rmid for rmid, _ in self._dirty}

    def take(self) -> int:
        """The RMID of a new group, its traffic from 0; the last group's bytes may still be in the cache.

        Errors: `OSError`, EBUSY where RMIDs wait, otherwise ENOSPC.
        """
        if self.waiting and not self._free and self.check_after:
            self._refusals = (self._refusals + 1) % self.check_after
            if self._refusals == 0:
                self._check()
        if not self._free:
            self._status.refuse("Out of RMIDs", errno.EBUSY if self._dirty else errno.ENOSPC)
        rmid = self._free.popleft()
        for domain in self.shape.domains:
            count = self.at(rmid, domain)
            count.total = count.local = 0
            count.total_bps, count.local_bps = self.idle_bps, self.idle_bps / 2
        return rmid

    def give(self, rmid: int) -> None:
        """A group was removed."""
        if not self.waiting:
            self._due = self._now() + self._period
        for domain in self.shape.domains:
            if domain not in self._checked_at_once or self._occupancy(rmid, domain) > self.threshold:
                self._dirty.add((rmid, domain))
        self._free += {rmid} - self.waiting

    @property
    def _period(self) -> float:
        return float("inf") if self.check_after else LIMBO_CHECK_S

    def _check(self) -> None:
        for checked in self.shape.domains:
            waited = {rmid for rmid, _ in self._dirty}
            clean = {at for at in self._dirty if at[1] == checked and self._occupancy(*at) < self.threshold}
            self._dirty -= clean
            self._free += sorted(waited - {rmid for rmid, _ in self._dirty})

    def _occupancy(self, rmid: int, domain: int) -> float:
        value = self.read(rmid, domain, "llc_occupancy")
        return float("inf") if isinstance(value, str) else value

"""Parts of the resctrl model: the status file's buffer, threads, monitoring ids, and what they count."""

import errno
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tests.fakes.kernel_files import fail
from tests.fakes.resctrl_shapes import MonitorShape, Release

STATUS_BYTES = 512
LIMBO_CHECK_S = 1.0


class LastStatus:
    """``info/last_cmd_status``: 512 bytes that grow line by line; what does not fit whole is lost, and all after it."""

    def __init__(self) -> None:
        self._text = ""
        self._full = False

    def clear(self) -> None:
        self._text, self._full = "", False

    def puts(self, line: str) -> None:
        self._full = self._full or len(self._text) + len(line) + 2 > STATUS_BYTES
        if not self._full:
            self._text += f"{line}\n"

    def refuse(self, line: str, code: int = errno.EINVAL) -> OSError:
        """Note why, and the error to raise."""
        self.puts(line)
        return OSError(code, line)

    def show(self) -> str:
        return self._text or "ok\n"


class Place(NamedTuple):
    """Where a thread is: the numbers of its control group and of its monitoring group."""

    closid: int = 0
    rmid: int = 0


class Tasks(Protocol):
    """The threads of the machine."""

    def place(self, tid: int) -> Place | None:
        """Where the thread is; None: there is none of that number."""

    def put(self, tid: int, place: Place) -> None:
        """Move one thread."""

    def threads(self) -> list[tuple[int, Place]]:
        """Every thread, as the kernel walks them: each process's leader, then its other threads."""


@dataclass(slots=True)
class _Thread:
    leader: int
    place: Place


class FakeTasks:
    """Threads in memory: spawn, fork, clone, end. A new thread is where the one is that made it."""

    def __init__(self, first: int = 1_000) -> None:
        self._next = itertools.count(first)
        self._threads: dict[int, _Thread] = {}

    def spawn(self, threads: int = 1, parent: int = 0) -> int:
        """A process with so many threads, forked by ``parent`` (0: by somebody in the default group); its pid."""
        place = self._threads[parent].place if parent else Place()
        pid = next(self._next)
        self._threads[pid] = _Thread(pid, place)
        for _ in range(threads - 1):
            self.clone(pid)
        return pid

    def clone(self, tid: int) -> int:
        """A thread made by a thread; its number."""
        made, maker = next(self._next), self._threads[tid]
        self._threads[made] = _Thread(maker.leader, maker.place)
        return made

    def tids(self, pid: int) -> list[int]:
        """The threads of a process, its leader first."""
        return [tid for tid, thread in self._threads.items() if thread.leader == pid]

    def end(self, tid: int) -> None:
        """A thread ends; with its leader the whole process."""
        if self._threads.pop(tid).leader == tid:
            for other in self.tids(tid):
                del self._threads[other]

    def place(self, tid: int) -> Place | None:
        thread = self._threads.get(tid)
        return None if thread is None else thread.place

    def put(self, tid: int, place: Place) -> None:
        self._threads[tid].place = place

    def threads(self) -> list[tuple[int, Place]]:
        members = {pid: [pid] for pid, thread in self._threads.items() if thread.leader == pid}
        for tid, thread in self._threads.items():
            if thread.leader != tid:
                members[thread.leader].append(tid)
        return [(tid, self._threads[tid].place) for all_of_one in members.values() for tid in all_of_one]


@dataclass(slots=True)
class Count:
    """What one monitoring id counts in one domain: bytes, and bytes per second since a moment."""

    occupancy: int
    total: float = 0
    local: float = 0
    total_bps: float = 0
    local_bps: float = 0
    since: float = 0

    def settle(self, now: float) -> None:
        self.total += self.total_bps * (now - self.since)
        self.local += self.local_bps * (now - self.since)
        self.since = now


class Counters:
    """What every monitoring id counts. Reads are whole units, as the hardware's are."""

    def __init__(self, shape: MonitorShape, now: Callable[[], float]) -> None:
        self.domains = shape.domains
        self._shape = shape
        self._now = now
        self._counts: dict[tuple[int, int], Count] = {}
        self._words: dict[tuple[int, int], str] = {}
        self._once: set[tuple[int, int, str]] = set()
        self.idle_occupancy = 0
        self.idle_bps = 0.0

    def at(self, rmid: int, domain: int) -> Count:
        """The counts of one id in one domain, up to date."""
        now = self._now()
        count = self._counts.get((rmid, domain))
        if count is None:
            count = Count(self.idle_occupancy, total_bps=self.idle_bps, local_bps=self.idle_bps / 2, since=now)
            self._counts[rmid, domain] = count
        count.settle(now)
        return count

    def fresh(self, rmid: int) -> None:
        """The id goes to a new group: traffic counts from 0; the last tenant's bytes may still be in the cache."""
        for domain in self._shape.domains:
            count = self.at(rmid, domain)
            count.total = count.local = 0
            count.total_bps, count.local_bps = self.idle_bps, self.idle_bps / 2

    def answer(self, rmid: int, domain: int, word: str) -> None:
        """Let the hardware answer ``Unavailable`` or ``Error`` for an id; "": numbers again."""
        self._words[rmid, domain] = word

    def forget(self, domain: int, rmids: int) -> None:
        """What is counted was changed: all counts of the domain start again, and are unavailable at the next read."""
        for rmid in range(rmids):
            count = self.at(rmid, domain)
            count.total = count.local = 0
            self._once |= {(rmid, domain, event) for event in self._shape.events[1:]}

    def read(self, rmid: int, domain: int, event: str) -> int | str:
        """Bytes, or the word that the file shows instead."""
        if word := self._words.get((rmid, domain)):
            return word
        if (rmid, domain, event) in self._once:
            self._once.discard((rmid, domain, event))
            return "Unavailable"
        count = self.at(rmid, domain)
        value = {"llc_occupancy": count.occupancy, "mbm_total_bytes": count.total, "mbm_local_bytes": count.local}
        return int(value[event]) // self._shape.unit * self._shape.unit

    def occupied(self, rmid: int, domain: int) -> int | None:
        """Bytes in the cache as the kernel's own check sees them; None: the hardware did not say."""
        value = self.read(rmid, domain, "llc_occupancy")
        return None if isinstance(value, str) else value


class Rmids:
    """Monitoring ids: given out in the order they came back; freed ones wait until the cache has lost their bytes.

    Once a second, as long as a domain has ids that wait, the kernel looks at them: below the threshold they are clean
    there. Before 6.9 the domain that the caller runs in was looked at right away (here: the first one).
    """

    def __init__(self, shape: MonitorShape, release: Release, counters: Counters, now: Callable[[], float]) -> None:
        self.threshold = shape.threshold
        self.check_s = LIMBO_CHECK_S
        self.check_after = 0
        """For tests that cannot count on time: look after so many refusals instead."""
        self._refusals = 0
        self._shape = shape
        self._release = release
        self._counters = counters
        self._now = now
        self._free = deque(range(1, shape.rmids))
        self._busy: dict[int, set[int]] = {domain: set() for domain in shape.domains}
        self._due: dict[int, float] = {}

    @property
    def waiting(self) -> set[int]:
        """Ids that belong to no group and are not clean yet."""
        self._check()
        return set().union(*self._busy.values())

    def take(self) -> int | None:
        """An id for a new group; None: there is none free."""
        self._check()
        if not self._free and self.check_after and any(self._busy.values()):
            self._refusals = (self._refusals + 1) % self.check_after
            if self._refusals == 0:
                self._look(list(self._busy))
        if not self._free:
            return None
        rmid = self._free.popleft()
        self._counters.fresh(rmid)
        return rmid

    def give(self, rmid: int) -> None:
        """A group is gone."""
        self._check()
        if "llc_occupancy" in self._shape.events:
            for domain in self._unclean(rmid):
                if not self._busy[domain]:
                    self._due[domain] = self._now() + self.check_s
                self._busy[domain].add(rmid)
        if not any(rmid in ids for ids in self._busy.values()):
            self._free.append(rmid)

    def _unclean(self, rmid: int) -> Iterator[int]:
        for index, domain in enumerate(self._shape.domains):
            if self._release < (6, 9) and index == 0:
                occupied = self._counters.occupied(rmid, domain)
                if occupied is not None and occupied <= self.threshold:
                    continue
            yield domain

    def _check(self) -> None:
        now = self._now()
        for domain, ids in self._busy.items():
            if ids and self._due[domain] <= now:
                self._due[domain] += self.check_s * (1 + (now - self._due[domain]) // self.check_s)
                self._look([domain])

    def _look(self, domains: list[int]) -> None:
        for domain in domains:
            for rmid in sorted(self._busy[domain]):
                occupied = self._counters.occupied(rmid, domain)
                if occupied is None or occupied >= self.threshold:
                    continue
                self._busy[domain].discard(rmid)
                if not any(rmid in others for others in self._busy.values()):
                    self._free.append(rmid)

    def missing(self) -> int:
        """The errno of a group that cannot be made for want of an id."""
        return errno.EBUSY if self.waiting else errno.ENOSPC


def unsigned(text: str, base: int, bits: int = 64) -> int | None:
    """kstrtoul: digits, perhaps a plus before and a newline after them; None where the kernel refuses.

    Base 16 takes 0x before the digits; base 0 tells 0x and octal numbers by how they begin.
    """
    digits = text.removesuffix("\n").removeprefix("+")
    if digits[:2] in {"0x", "0X"} and base in {0, 16}:
        digits, base = digits[2:], 16
    if base == 0:
        base = 8 if digits.startswith("0") and len(digits) > 1 else 10
    allowed = {8: "01234567", 10: "0123456789", 16: "0123456789abcdefABCDEF"}[base]
    if not digits or digits.strip(allowed):
        return None
    number = int(digits, base)
    return number if number < 1 << bits else None


def cpu_mask(text: str, count: int) -> int:
    """bitmap_parse: hexadecimal groups of at most 8 digits, apart by commas. EINVAL, EOVERFLOW as the kernel."""
    words = text.split("\n", 1)[0].strip().split(",")
    if words == [""]:
        return 0
    for word in words:
        if not word or word.strip("0123456789abcdefABCDEF"):
            fail(errno.EINVAL)
        if len(word) > 8:
            fail(errno.EOVERFLOW)
    mask = 0
    for word in words:
        mask = mask << 32 | int(word, 16)
    if mask >> count:
        fail(errno.EOVERFLOW)
    return mask


def show_mask(mask: int, count: int) -> str:
    """bitmap "%*pb": groups of 32 bits apart by commas, as wide as the machine."""
    words = []
    for start in range(0, count, 32):
        width = (min(32, count - start) + 3) // 4
        words.append(f"{mask >> start & 0xFFFFFFFF:0{width}x}")
    return ",".join(reversed(words)) + "\n"

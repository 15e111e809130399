"""The daemon's own CPU group and its weight, which bounds the delay that its wake-ups cause to online tasks.

CFS places a group that has slept behind the run queue's minimum, by up to half a latency period (3 ms on one CPU, 12 ms
on large machines), against kubepods, which never sleeps while BE work runs. With the usual 1024 shares (system.slice)
such a group is picked at each wake-up and keeps the CPU for the credit of up to 5 ms, whatever the daemon's nice value:
that counts inside its group only. EEVDF (Linux 6.6 and later) has no such credit.

So the daemon runs in a group of its own directly below the root, with a small weight (`node.own_shares`): it is picked
later, and leaves the CPU after each short stint (`reconciler.runtime.stint_timer`, docs/performance.md). The weight is
larger in four states: the start, a container in creation, work that waits, and after a wait without any CPU time.

Units: shares as in cpu.shares of cgroup v1, 1024 for a service; on v2 cpu.weight is the same ratio to 100.
Source: the kernel's sched-design-CFS and place_entity(); measured in virtual time on Linux 5.10 and 6.1.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from errno import ENOENT
from typing import Final, final

import trio
from msgspec import Struct

from cgroupfs.errors import errno_name
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy
from cgroupfs.log import get_log
from cgroupfs.scheduling import has_eevdf, runner_keeps_cpu
from reconciler.runtime.own_weight import (
    BEGINNING,
    GROUP,
    RAISED_SHARES,
    USUAL_SHARES,
    Beginning,
    as_shares,
    cpu_group,
    service_weight,
    top_group,
)
from reconciler.runtime.stint_timer import TIMER, StintTimer

_LOG: Final = get_log("own group")
LATE_S: Final = 0.3
"""Work that has waited for a CPU for so long, in all, since the loop was last idle is late.

A pass of 6 ms waits 0.1 s with 50 shares beside a busy CPU, as it may; it has to end within a second.
"""
FACTOR: Final = 4
"""The weight grows by it each time, up to `RAISED_SHARES` (the usual weight with EEVDF)."""
_SETTLE_S: Final = 0.0005
"""A sleep after a raise: the group has waited, and is behind by more than the new weight lets it yield at."""
BURST_S: Final = 0.1
"""CPU time with a raised weight at most: a pass takes a few milliseconds, a start less than this after its imports."""
REST_S: Final = 1.0
"""Between two bursts, so that endless work has a tenth of a CPU at a raised weight."""
STARVED_S: Final = 1.0
"""In which each periodic pass has to end. A wait that is longer is more than a small weight explains."""
SOUND_SHARES: Final = 256
"""At rest where a running group keeps the CPU (`runner_keeps_cpu`): with 200 one of three tries waited a second, with
256 none.

Those kernels place a running group anew whenever its weight on its CPU changes, further behind each time. kubepods'
share of each CPU changes at every tick while BE work moves between CPUs: it never gives the CPU to a group of 50 (3 to
45 s were seen), which cannot raise its weight without CPU time. So it has this weight from the start. On a kernel that
has the fault and another number it has it after the first wait.
"""
KEPT_S: Final = 3600.0
"""So long the weight at rest remains larger after a wait of `STARVED_S`; another one raises it by `FACTOR`."""
START_SHARES: Final = 10 * USUAL_SHARES
"""While a container is in creation: the weight of the nice value -10. All of the work before its first instruction has
some 20 ms. The store's thread has no real-time priority, and its rows have to be durable before the signal."""
_CHECK_S: Final = 10.0
"""Between two checks whether another program has written the weight."""
_SESSIONS: Final = "/user.slice/"
_RT_US: Final = "200000"
"""Real-time CPU time of a group made here, in each period of a second: `reconciler.runtime.priority.SHARE`."""


class Placement(StrEnum):
    """What the group directly below the root, whose weight counts against kubepods', is."""

    OWN = "own"
    SHARED = "shared"
    """With other services, such as system.slice."""
    ROOT = "root"
    """No group: every thread competes with kubepods by its own nice value."""
    POD = "pod"
    UNKNOWN = "unknown"


class OwnGroupStatus(Struct, frozen=True, kw_only=True):
    """``group``: the daemon's in the CPU hierarchy. ``top``: the group directly below the root, "" for none.

    ``shares``: read back from ``top`` (in cpu.shares); None where it has none. ``raised``: how often work was late.
    ``starved``: how often it had no CPU for so long that the weight at rest was raised.
    """

    placement: Placement
    group: str = ""
    top: str = ""
    shares: int | None = None
    raised: int = 0
    starved: int = 0
    problem: str = ""


def placement_of(group: str, kubepods: str) -> Placement:
    """What kind of place a group is. ``kubepods``: the path of all pods' group."""
    top = top_group(group)
    if not top:
        return Placement.ROOT if group == "/" else Placement.UNKNOWN
    if top == top_group(kubepods):
        return Placement.POD
    # The unit has ``Slice=bypassd.slice``.
    return Placement.OWN if top == GROUP else Placement.SHARED


@final
class OwnGroup(trio.abc.Instrument):
    """The daemon's CPU group: its place, its weight, and the raise of the weight while work waits.

    All methods are called in the loop's thread.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        kubepods: str,
        *,
        shares: int,
        starting: Callable[[], bool] = lambda: False,
        files: FileOps = REAL,
        table: str = "/proc/self/cgroup",
        now: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
        release: str = "",
        beginning: Beginning = BEGINNING,
        timer: StintTimer = TIMER,
    ) -> None:
        """``now``: monotonic seconds; ``used``: CPU seconds of the calling thread; ``table``: its groups.

        ``release``: the kernel's; "": the running one's. With EEVDF no yield is needed, and the weight of late work is
        the usual one. ``starting``: whether a container is in creation. ``shares``: the weight at rest, at least
        `SOUND_SHARES` where less starves; `USUAL_SHARES`: it is unmanaged, and no group is made.
        """
        self._hierarchy = hierarchy
        self._kubepods = kubepods
        release = release or os.uname().release
        self._shares = max(shares, SOUND_SHARES) if runner_keeps_cpu(release) else shares
        self._eevdf = has_eevdf(release)
        self._most = USUAL_SHARES if self._eevdf else max(RAISED_SHARES, shares)
        """The weight of late work, of the start and of the end."""
        self._rest = self._most
        """The weight while nothing is late: at the end of the start it becomes ``shares``."""
        self._beginning = beginning
        self._timer = timer
        self._starting = starting
        self._is_starting = False
        self._files = files
        self._table = table
        self._now, self._used, self._sleep = now, used, sleep
        self._version = hierarchy.version("cpu")
        self._group = self._read_group()
        self._came_from: str | None = None
        """The group that it has left for one made by itself."""
        self._managed = False
        self._problem = ""
        self._raised = 0
        self._raised_to = 0
        """The weight of the present burst; 0: none."""
        self._starved = 0
        self._kept_until = 0.0
        """When the weight at rest is ``shares`` again; 0: it is."""
        self._idle_at = self._idle_used = 0.0
        self._wakes_at = float("inf")
        """When the loop's wait ends at the latest."""
        self._raised_used = 0.0
        self._rests_until = 0.0
        self._check_at = 0.0

    @property
    def status(self) -> OwnGroupStatus:
        if self._group is None:
            return OwnGroupStatus(placement=Placement.UNKNOWN, problem=self._problem)
        top = self._top()
        return OwnGroupStatus(
            placement=placement_of(self._group, self._kubepods),
            group=self._group,
            top=top,
            shares=self._read_shares() if top else None,
            raised=self._raised,
            starved=self._starved,
            problem=self._problem,
        )

    def prepare(self) -> None:
        """The start itself is a second of work (its libraries): the raised weight, also after a run that was killed.

        An unmanaged group gets back the weight that it had before `reconciler.runtime.own_weight.begin`.
        """
        if placement_of(self._group or "", self._kubepods) is not Placement.OWN or not self._hierarchy.writable("cpu"):
            return
        if self._shares != USUAL_SHARES:
            self._write(USUAL_SHARES if self._timer.paced else self._most)
        elif self._beginning.lowered and self._read_shares() == self._as_read(RAISED_SHARES):
            self._write(USUAL_SHARES)

    def start(self) -> None:
        """Take the place, and keep the weight of the start. Errors: none; a refusal is logged and in `status`."""
        if self._shares == USUAL_SHARES or self._group is None or not self._hierarchy.writable("cpu"):
            return
        # Where no service manager made a group for the daemon it makes one itself; `stop` removes it.
        if self._may_move():
            self._move()
        # A pod's or container's group, or another slice of the unit, is the administrator's choice: only reported.
        if placement_of(self._group, self._kubepods) is not Placement.OWN:
            return
        self._managed = True
        self._idle_at, self._idle_used = self._now(), self._used()
        if self._timer.paced:
            self._rest = USUAL_SHARES
        self._write(self._rest)
        self._check_at = self._now() + _CHECK_S
        trio.lowlevel.add_instrument(self)
        _LOG.info("has a CPU group of its own", group=self._group, shares=self._rest)

    def settle(self) -> None:
        """Take the weight at rest: every part has started. Errors: none; also where `start` has taken no place."""
        self._timer.pace(on=False)
        self._rest = self._shares
        if self._managed and not self._is_starting and not self._raised_to:
            self._idle_at, self._idle_used = self._now(), self._used()
            self._write(self._rest)
            _LOG.info("all parts have started", group=self._group, shares=self._shares)

    def stop(self) -> None:
        """Take the weight of the start for the end, and leave a group made by itself. Errors: none."""
        if self._managed:
            self._managed = False
            trio.lowlevel.remove_instrument(self)
            paced = self._timer.pace(on=True)
            # With the usual weight, unpaced, the lag that the small one needs to be picked (20 ms) would be as much CPU
            # time, in which no online task runs: 23 ms on 5.10.
            self._write(USUAL_SHARES if paced else self._most)
            if not (self._eevdf or paced):
                self._sleep(_SETTLE_S)
        if self._came_from is None:
            # systemd removes the slice with its last service.
            return
        directory = self._hierarchy.directory("cpu", GROUP)
        with suppress(OSError):
            self._attach(self._came_from)
            self._group, self._came_from = self._came_from, None
            # Another daemon of the machine may be in it.
            os.rmdir(directory)

    def before_io_wait(self, timeout: float) -> None:
        """The loop has nothing to do for ``timeout`` seconds, or (0) checks for events between two steps."""
        if not self._managed:
            return
        now = self._now()
        self._wakes_at = now + timeout
        if self._starting():
            if not self._is_starting:
                self._is_starting, self._raised_to = True, 0
                self._write(START_SHARES)
        elif self._is_starting:
            self._is_starting = False
            self._lower(now)
        elif timeout > 0:
            if self._raised_to:
                self._lower(now)
            elif now >= self._check_at:
                self._check(now)
        elif self._raised_to and self._used() - self._raised_used > BURST_S:
            self._lower(now)
        elif (
            self._most > self._rest
            and now >= self._rests_until
            and now - self._idle_at > LATE_S
            and now - self._idle_at - (self._used() - self._idle_used) > LATE_S
        ):
            self._raise(now)

    def after_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            # What passed after the end of the wait was a wait for a CPU.
            self._idle_at, self._idle_used = min(self._now(), self._wakes_at), self._used()

    def _raise(self, now: float) -> None:
        waited_s = now - self._idle_at - (self._used() - self._idle_used)
        if self._eevdf and not self._raised_to and waited_s > STARVED_S:
            self._keep(now, waited_s)
        if not self._raised_to:
            self._raised += 1
            self._raised_used = self._used()
        if self._raised_to < self._most:
            self._raised_to = min(self._most, FACTOR * (self._raised_to or self._rest))
            self._write(self._raised_to)
            if not self._eevdf:
                self._sleep(_SETTLE_S)
        self._idle_at, self._idle_used = now, self._used()

    def _keep(self, now: float, waited_s: float) -> None:
        """Have more weight at rest: the end of this burst writes it."""
        self._starved += 1
        self._rest = min(self._most, max(SOUND_SHARES, FACTOR * self._rest))
        self._kept_until = now + KEPT_S
        _LOG.warning("had no CPU time: more weight", seconds=round(waited_s, 1), shares=self._rest, for_s=KEPT_S)

    def _lower(self, now: float) -> None:
        self._raised_to = 0
        self._rests_until = now + REST_S
        self._idle_at, self._idle_used = now, self._used()
        self._write(self._rest)

    def _check(self, now: float) -> None:
        self._check_at = now + _CHECK_S
        if 0 < self._kept_until <= now:
            self._rest, self._kept_until = self._shares, 0.0
        # Another program may have changed it, as systemd does at daemon-reload.
        if self._read_shares() != self._as_read(self._rest):
            self._write(self._rest)

    # The kernel's files

    def _top(self) -> str:
        return top_group(self._group or "")

    def _read_group(self) -> str | None:
        if self._version is None:
            return None
        try:
            with open(self._table, encoding="utf-8", errors="replace", newline="\n") as file:
                return cpu_group(file.read(), self._version)
        except OSError:
            return None

    def _file(self) -> str:
        return "cpu.shares" if self._version == 1 else "cpu.weight"

    def _as_read(self, shares: int) -> int:
        """What `_read_shares` returns after ``shares`` was written: v2 has coarser steps."""
        return shares if self._version == 1 else as_shares(service_weight(shares))

    def _read_shares(self) -> int | None:
        try:
            value = int(self._files.read(self._hierarchy.directory("cpu", self._top()), self._file()))
        except (OSError, ValueError):
            return None
        return value if self._version == 1 else as_shares(value)

    def _write(self, shares: int) -> None:
        value = shares if self._version == 1 else service_weight(shares)
        try:
            self._files.write(self._hierarchy.directory("cpu", self._top()), self._file(), str(value))
        except OSError as exc:
            problem = f"{self._top()}: {self._file()}: {errno_name(exc.errno)}"
            if exc.errno == ENOENT and self._has_no_weights():
                problem = ""
            elif problem != self._problem:
                _LOG.warning("cannot set the weight of the daemon's own group", group=self._top(), error=problem)
            self._problem = problem
        else:
            self._problem = ""

    def _has_no_weights(self) -> bool:
        """v2 without the cpu controller below the root: the kubelet enables it, and `_check` sets the weight then."""
        with suppress(OSError):
            return self._version != 1 and self._files.inode(self._hierarchy.directory("cpu", self._top())) > 0
        return False

    def _may_move(self) -> bool:
        """Whether the group is neither a pod's nor one that a service manager made in this hierarchy."""
        if os.geteuid() != 0 or self._hierarchy.root != "/":
            return False
        placement = placement_of(self._group or "", self._kubepods)
        if placement is Placement.ROOT:
            # On v1 a service without CPU accounting is here: systemd manages only the groups that it made.
            return self._version == 1 or not _has_systemd()
        # Of other groups only that of a login session is left: a container's is one of its limits.
        return (self._group or "").startswith(_SESSIONS) and self._version == 1

    def _move(self) -> None:
        directory = self._hierarchy.directory("cpu", GROUP)
        before = self._group
        try:
            # A killed daemon has left it, or another one is in it.
            with suppress(FileExistsError):
                os.mkdir(directory, 0o755)
            with suppress(OSError):
                # Where the kernel shares out real-time CPU (RT_GROUP_SCHED), a new group has none.
                self._files.write(directory, "cpu.rt_runtime_us", _RT_US)
            self._attach(GROUP)
        except OSError as exc:
            self._problem = f"{GROUP}: {errno_name(exc.errno)}"
            _LOG.warning("cannot make a CPU group of its own", group=GROUP, error=errno_name(exc.errno))
            with suppress(OSError):
                os.rmdir(directory)
            return
        self._came_from, self._group = before, self._read_group()

    def _attach(self, group: str) -> None:
        self._files.write(self._hierarchy.directory("cpu", group), "cgroup.procs", str(os.getpid()))


def remove_left(hierarchy: Hierarchy) -> None:
    """Remove the group that a killed daemon made for itself. One with processes or groups remains. Errors: none."""
    # Not in a copied node, whose groups are directories. It may be systemd's, which makes it again when it is needed.
    if hierarchy.root == "/" and hierarchy.version("cpu") is not None:
        with suppress(OSError):
            os.rmdir(hierarchy.directory("cpu", GROUP))


def _has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")

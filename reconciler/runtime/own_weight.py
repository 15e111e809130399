"""The daemon's group in the CPU hierarchy, its weights, and the weight of its first second (`begin`).

Until `reconciler.runtime.own_group` manages the weight the program imports its libraries, more than a second of work
for a slow CPU, in the group that systemd has made, which weighs as much as kubepods: measured in virtual time on Linux
5.10 beside BE pods, p99 of an online pod was 6 to 8 times its own for 2.7 seconds. So this module imports little, and
`begin` is called before the program's other imports.

Units: shares as in cpu.shares of cgroup v1, 1024 for a service; on v2 cpu.weight is the same ratio to 100.
"""

import os
from contextlib import suppress
from typing import Final, final

from cgroupfs.lines import lines_of
from cgroupfs.scheduling import has_eevdf
from reconciler.runtime.stint_timer import TIMER, StintTimer

GROUP: Final = "/bypassd.slice"
USUAL_SHARES: Final = 1024
_USUAL_WEIGHT: Final = 100
RAISED_SHARES: Final = 200
"""Before EEVDF the largest weight of late work, and the daemon's at a start and end that are not paced: a sixth of a
busy CPU.

sched_yield() gives the CPU to kubepods only while the own group is behind it by no more than the wake-up granularity
(1 ms) divided by the weight, as a part of 1024. It is behind by up to 3 ms after a sleep, and by a tick of 4 ms beside
processes that never sleep; granularity and credit grow alike with the number of CPUs. So above 256 shares there are
milliseconds in which nothing gives way.
"""


@final
class Beginning:
    """Whether `begin` has lowered the weight in this process: the same value may be the administrator's."""

    def __init__(self) -> None:
        self.lowered = False


BEGINNING: Final = Beginning()


def cpu_group(table: str, version: int) -> str | None:
    """The path of a process in the CPU hierarchy, from the text of its ``/proc/PID/cgroup``; None where it has none."""
    for line in lines_of(table):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon and (not controllers if version != 1 else "cpu" in controllers.split(",")):
            return path
    return None


def top_group(path: str) -> str:
    """The group directly below the root that a group is in, or is itself; "" for the root."""
    first = path.partition("/")[2].partition("/")[0]
    return f"/{first}" if first else ""


def service_weight(shares: int) -> int:
    """In cpu.weight of cgroup v2, where a service has 100, what ``shares`` are of the 1024 that it has on v1."""
    return max(1, round(shares * _USUAL_WEIGHT / USUAL_SHARES))


def as_shares(weight: int) -> int:
    """What cpu.weight is in shares, as `service_weight`."""
    return weight * USUAL_SHARES // _USUAL_WEIGHT


def begin(
    proc: str = "/proc/self", release: str = "", beginning: Beginning = BEGINNING, timer: StintTimer = TIMER
) -> None:
    """Pace the start, or where ``timer`` cannot, lower a usual weight of the own group to `RAISED_SHARES`.

    ``release``: of another kernel than the running one. Errors: none; `OwnGroup` reports what is in force.
    """
    if has_eevdf(release or os.uname().release):
        return
    with suppress(OSError, ValueError):
        mount, version = _cpu_mount(_read(f"{proc}/mounts"))
        if top_group(cpu_group(_read(f"{proc}/cgroup"), version) or "") != GROUP:
            return
        usual, value = (USUAL_SHARES, RAISED_SHARES) if version == 1 else (_USUAL_WEIGHT, service_weight(RAISED_SHARES))
        path = f"{mount}{GROUP}/{'cpu.shares' if version == 1 else 'cpu.weight'}"
        # Another weight is the administrator's, or of an earlier run.
        if int(_read(path)) == usual and not timer.pace(on=True):
            with open(path, "w", encoding="ascii") as file:
                file.write(str(value))
            beginning.lowered = True


def _cpu_mount(mounts: str) -> tuple[str, int]:
    """Directory and version of the CPU hierarchy; v1 where both are mounted. Errors: `ValueError` without one."""
    # Not by `cgroupfs.hierarchy`, whose imports would be a part of what is to be paced.
    rows = [row for row in (line.split(" ") for line in lines_of(mounts)) if len(row) > 3]
    for _, directory, kind, options, *_ in rows:
        if kind == "cgroup" and "cpu" in options.split(","):
            return directory, 1
    for _, directory, kind, *_ in rows:
        if kind == "cgroup2":
            return directory, 2
    raise ValueError("no CPU hierarchy")


def _read(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace", newline="\n") as file:
        return file.read()

"""Facts of processes for a person: name, command line, user id, age and memory, through psutil.

For reports and log lines only. psutil costs some memory once and 0.2 ms for each process, has one `/proc` for the whole
program and proves nothing of a process. So the following read `/proc` directly: the fast path and the attribution of
each write (`cgroupfs.attribution`), readings of each second (`reconciler.signals`), what a signal or a write to a
process depends on (start time and pidfd: `reconciler.responses.means.processes`, `reconciler.actuators.processes`), the
search for the kubelet (`reconciler.sources.host_processes`), and everything below another root (`--root`, captures).

Every field is chosen by the process itself: cut here, sanitized where it is printed. Arguments may hold credentials.
"""

import time
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from cgroupfs.lines import status_field

_MOST: Final = 200
"""Processes that are read in one call."""
_NAME: Final = 64
_MOST_STATUS: Final = 64 * 1024
_COMMAND: Final = 200


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """One process. None and the empty text: not readable. ``command``: the arguments, joined by spaces.

    ``uid``: a number, as resolving its name may query a server.
    """

    pid: int
    name: str
    command: str = ""
    uid: int | None = None
    age_s: float | None = None
    rss_bytes: int | None = None


def process_facts(pids: Iterable[int], *, now: float | None = None) -> list[ProcessFacts]:
    """The facts of those that still run, at most `_MOST`, the largest in memory first. ``now``: wall clock (s).

    Errors: none; a process that has ended is not in the list.
    """
    import psutil

    at_s = time.time() if now is None else now
    facts: list[ProcessFacts] = []
    for pid in sorted({pid for pid in pids if pid > 0})[:_MOST]:
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                facts.append(
                    ProcessFacts(
                        pid=pid,
                        name=process.name()[:_NAME],
                        command=" ".join(process.cmdline())[:_COMMAND],
                        uid=_real_uid(pid),
                        age_s=max(0.0, at_s - process.create_time()),
                        rss_bytes=process.memory_info().rss,
                    )
                )
        except (psutil.Error, OSError):
            # It has ended, or is hidden (hidepid).
            continue
    return sorted(facts, key=lambda each: (-(each.rss_bytes or 0), each.pid))


def _real_uid(pid: int) -> int | None:
    """Psutil takes the first text of the right form in the file, which a process's name may have (6.1)."""
    with open(f"/proc/{pid}/status", "rb") as file:
        uids = status_field(file.read(_MOST_STATUS), b"Uid:").split()
    return int(uids[0]) if uids else None

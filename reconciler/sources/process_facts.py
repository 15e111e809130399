"""Facts of processes for a person: name, command line, user id, age and memory, through psutil.

For reports and log lines only: psutil has one `/proc` for the whole program and proves nothing of a process. What
decides, or runs each second, or below another root, reads `/proc` directly.
"""

import time
from collections.abc import Iterable
from typing import Final

from msgspec import Struct

from cgroupfs.lines import status_field

_MOST: Final = 200
"""Processes that are read in one call: 0.2 ms each."""
_NAME: Final = 64
_MOST_STATUS: Final = 64 * 1024
_COMMAND: Final = 200


class ProcessFacts(Struct, frozen=True, kw_only=True):
    """One process. None and the empty text: not readable. Texts are the process's own choice: sanitize to print them.

    ``command``: the arguments, joined by spaces; they may hold credentials.
    """

    pid: int
    name: str
    command: str = ""
    # No name: to resolve it may query a server.
    uid: int | None = None
    age_s: float | None = None
    rss_bytes: int | None = None


def process_facts(pids: Iterable[int], *, now: float | None = None) -> list[ProcessFacts]:
    """The facts of those that still run, at most `_MOST`, the largest in memory first. ``now``: wall clock (s).

    Errors: none; a process that has ended is not in the list.
    """
    import psutil  # late: 19 ms and 4 MiB

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
    # psutil takes the first text of the right form in the file, which a process may have in its name.
    with open(f"/proc/{pid}/status", "rb") as file:
        uids = status_field(file.read(_MOST_STATUS), b"Uid:").split()
    return int(uids[0]) if uids else None

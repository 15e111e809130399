"""Scheduling policies of single threads, by system call.

Inherited over fork and exec; the nice value is kept across a change. A change out of the idle class needs CAP_SYS_NICE
or a sufficient RLIMIT_NICE, one on another user's thread CAP_SYS_NICE. Source: sched(7), sched_setscheduler(2).
"""

import os
import re
from typing import Final, Protocol, final

OTHER: Final = 0
BATCH: Final = 3
IDLE: Final = 5
USUAL: Final = frozenset({OTHER, BATCH})
"""Those that any thread may choose, and that weigh alike. Source: sched(7)."""
NAMES: Final = {OTHER: "other", 1: "fifo", 2: "rr", BATCH: "batch", IDLE: "idle", 6: "deadline", 7: "ext"}
"""By the kernel's numbers. Source: include/uapi/linux/sched.h."""
REALTIME: Final = {number: NAMES[number] for number in (1, 2, 6)}
"""Those that run before every usual thread. Source: sched(7)."""
_NUMBERS: Final = {name: number for number, name in NAMES.items()}
_RESET: Final = 0x4000_0000
"""SCHED_RESET_ON_FORK: of a thread in the idle class it resets a negative nice value only, never the class."""


_RELEASE: Final = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_EEVDF: Final = (6, 6)
_FIRST_KEEPING: Final = (6, 13, 0)
_LAST_KEEPING: Final = (6, 18, 44)


def kernel_version(release: str) -> tuple[int, int] | None:
    """Major and minor number of a release (``uname -r``), whatever follows them; None where it has none."""
    match = _RELEASE.match(release)
    return (int(match[1]), int(match[2])) if match else None


def has_eevdf(release: str) -> bool:
    """Whether a kernel of this release has the EEVDF scheduler; True where that is not known."""
    version = kernel_version(release)
    return version is None or version >= _EEVDF


def runner_keeps_cpu(release: str) -> bool:
    """Whether a running group that is reweighted moves ahead of those that wait, which may starve for seconds.

    From commit 6d71a9c61604 (6.13) to its revert 101f3498b4bd (6.18.45); 6.12.117 has neither. False where it is not
    known: a distribution's kernel may have one of them and another number.
    """
    match = _RELEASE.match(release)
    return match is not None and _FIRST_KEEPING <= (int(match[1]), int(match[2]), int(match[3] or 0)) <= _LAST_KEEPING


def feature(text: str, name: str) -> int:
    """Whether a feature of the scheduler is on, 1 or 0, in the text of debugfs' ``sched/features``.

    Errors: `ValueError` if the kernel has no such feature.
    """
    words = text.split()
    if name not in words and f"NO_{name}" not in words:
        raise ValueError(f"this kernel's scheduler has no feature {name}")
    return int(name in words)


class Scheduler(Protocol):
    """Reads and sets policies. Errors: `OSError`, as the kernel answers; ESRCH for a thread that has ended."""

    def policy(self, tid: int) -> int:
        """The policy, without flags."""

    def set_policy(self, tid: int, policy: int) -> None:
        """Set a policy without a real-time priority. The thread's flag SCHED_RESET_ON_FORK remains."""


@final
class RealScheduler:
    def policy(self, tid: int) -> int:
        return os.sched_getscheduler(_thread(tid)) & ~_RESET

    def set_policy(self, tid: int, policy: int) -> None:
        flag = os.sched_getscheduler(_thread(tid)) & _RESET
        os.sched_setscheduler(tid, policy | flag, os.sched_param(0))


REAL_SCHEDULER: Final[Scheduler] = RealScheduler()
"""The running kernel."""


def policy_text(policy: int) -> str:
    """A policy's name, as in chrt(1); the number of one that has none here."""
    return NAMES.get(policy, str(policy))


def policy_number(text: str) -> int:
    """The policy of a name. Errors: `ValueError` for an unknown one."""
    if text not in _NUMBERS:
        raise ValueError(f"{text[:20]!r} is not a scheduling policy")
    return _NUMBERS[text]


def _thread(tid: int) -> int:
    # 0 is the caller for the kernel; a group lists it for a process outside of this PID namespace.
    if tid <= 0:
        raise ProcessLookupError(f"no thread {tid}")
    return tid

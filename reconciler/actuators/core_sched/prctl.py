"""Core scheduling by prctl(2): one task at a time, each task with a cookie or none.

Tasks run on two threads of one core at the same time only if their cookies are equal, or both have none. The kernel
creates a cookie; children inherit it at fork; it exists while a task has it. Only a hash of it can be read: equal for
equal cookies while they exist.

Source: kernel documentation, admin-guide/hw-vuln/core-scheduling; prctl(2); kernel/sched/core_sched.c. Tried on 6.1.
"""

import ctypes
import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Protocol, Self, TypeVar, final

T = TypeVar("T")

PR_SCHED_CORE: Final = 62
_GET: Final = 0
_CREATE: Final = 1
_SHARE_TO: Final = 2
_SHARE_FROM: Final = 3
_THREAD: Final = 0
"""The scope of a call: one task. The other scopes, a process or a process group, are for writing only."""

_REASONS: Final = {
    errno.EINVAL: "this kernel has no core scheduling (CONFIG_SCHED_CORE, from Linux 5.14 on)",
    errno.ENODEV: "no core of this machine has two online threads: core scheduling has no effect",
    errno.ENOSYS: "this kernel has no prctl",
    errno.EPERM: "prctl is not permitted here (a seccomp filter)",
}


class Prctl(Protocol):
    """The four calls. ``tid`` is a thread's id, 0 the calling thread. All raise `OSError` as the kernel returns it.

    EINVAL: no core scheduling in this kernel; ENODEV: no core with two threads; ESRCH: no such task; EPERM: no
    permission to read the task (as for ptrace: CAP_SYS_PTRACE).
    """

    def get(self, tid: int) -> int:
        """The hash of the task's cookie; 0 for none."""

    def create(self) -> None:
        """Give the calling thread a new cookie."""

    def share_from(self, tid: int) -> None:
        """Give the calling thread that task's cookie, or none if it has none."""

    def share_to(self, tid: int) -> None:
        """Give that task the calling thread's cookie, or none if it has none."""


@final
class RealPrctl:
    def __init__(self) -> None:
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl
        # Variadic in C, with arguments of unsigned long: ctypes would pass a number as an int.
        self._prctl.argtypes = (ctypes.c_int, *(ctypes.c_ulong,) * 4)

    def get(self, tid: int) -> int:
        uint64 = ctypes.c_uint64()
        self._call(_GET, tid, ctypes.addressof(uint64))
        return uint64.value

    def create(self) -> None:
        self._call(_CREATE, 0)

    def share_from(self, tid: int) -> None:
        self._call(_SHARE_FROM, tid)

    def share_to(self, tid: int) -> None:
        self._call(_SHARE_TO, tid)

    def _call(self, command: int, tid: int, address: int = 0) -> None:
        if self._prctl(PR_SCHED_CORE, command, tid, _THREAD, address):
            number = ctypes.get_errno()
            raise OSError(number, f"prctl: {errno.errorcode.get(number, str(number))}")


def unable(prctl: Prctl) -> str:
    """Why core scheduling is unavailable on this machine now; empty if it is available."""
    try:
        own = prctl.get(0)
    except OSError as exc:
        return _REASONS.get(exc.errno or 0, str(exc))
    if own:
        # Every thread of bypassd would pass it on, and none could clear a cookie.
        return "bypassd itself has a core scheduling cookie: start it without one"
    return ""


@final
class CookieCarrier:
    """A dedicated thread that passes a cookie to other tasks. It starts without one; its cookie ends with it."""

    def __init__(self) -> None:
        # Only a task can pass on its cookie, and every thread inherits that of its creator: this one does nothing else.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="core-cookie")

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in the carrier's thread and wait for its result."""
        return self._thread.submit(function, *arguments).result()

    def close(self) -> None:
        self._thread.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

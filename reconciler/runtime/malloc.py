"""Limits the daemon's memory: one allocation arena, no huge pages, and free pages of the start returned.

Source: mallopt(3), malloc_trim(3), prctl(2). Elsewhere (musl) both are absent and nothing is done.
"""

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8
_PR_SET_THP_DISABLE: Final = 41


def limit_arenas() -> None:
    """Before threads start: one arena for all of them, no huge pages, no module that the collector passes over."""
    gc.freeze()
    libc = ctypes.CDLL(None)
    # khugepaged scans the memory of each process that may have huge pages, for 2 ms at a time, and on Linux 5.10 online
    # tasks wait for it (seen with sched_switch; only where a process like this one runs). A refusal (a kernel without
    # THP) leaves nothing to prevent.
    libc.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    mallopt = getattr(libc, "mallopt", None)
    if mallopt is not None:
        # glibc gives each allocating thread an arena of its own. The few threads here (store, kubelet list, rendering)
        # allocate little, so contention costs nothing.
        mallopt(_M_ARENA_MAX, 1)


def keep_objects() -> None:
    """Existing objects are long-lived: the collector skips them from now on, after one pass over the new ones.

    Called before the loop begins, and after each stage of the start in turn.
    """
    gc.collect()
    # A pass takes half a microsecond an object, in one piece, on a CPU that an online pod may want: 30 ms without this,
    # for most objects are of modules and hold no garbage.
    gc.freeze()


def trim_after_start() -> None:
    """After the start: keep the rest of it, and return free pages."""
    keep_objects()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def free_earlier() -> None:
    """Between two starts in one process: free what is left of the first, which the collector has skipped since."""
    gc.unfreeze()
    keep_objects()

"""Limits the daemon's memory: one allocation arena, and free pages of the start returned.

A daemon on every node costs its memory on every node. glibc gives each allocating thread an arena of its own and keeps
freed pages; the few threads here (store, kubelet list, rendering) allocate little, and contention costs nothing.

Source: mallopt(3), malloc_trim(3). Elsewhere (musl) both are absent and nothing is done.
"""

import ctypes
import gc
from typing import Final

_M_ARENA_MAX: Final = -8


def limit_arenas() -> None:
    """Before threads start: all of them allocate from the main arena, and no module is looked at by the collector."""
    gc.freeze()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def keep_objects() -> None:
    """Existing objects are long-lived: the collector skips them from now on, after one look at the new ones.

    A look takes half a microsecond an object, in one piece, on a CPU that an online pod may want. The modules are most
    of all objects and hold no garbage, so they are kept before the loop begins, and each stage of the start in turn.
    """
    gc.collect()
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

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
    """Before threads start: all of them allocate from the main arena."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)


def trim_after_start() -> None:
    """After the start: existing objects are long-lived, so the collector skips them from now on; return free pages.

    Again after a further start in the same process: what was left of the one before is freed.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

"""Keeps the daemon small: one allocation arena, and pages that the start has left behind given back.

A daemon on every node is paid for on every node. glibc gives each thread that allocates an arena of its own and keeps
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
    """After the start: what lives now lives long, so the collector need not walk it again; give free pages back."""
    gc.collect()
    gc.freeze()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

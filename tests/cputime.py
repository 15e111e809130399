"""CPU seconds of a piece of work, for tests that hold its growth: where it is wrong the worst input takes minutes.

A busy machine adds to one try, not to the least of several. Bounds are those of a machine that passes over one
mebibyte of quotes in 3 ms; on a slower one a step that exceeds its bound counts for so much less.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

_TRIES: Final = 10
_PASS_S: Final = 0.003
_QUOTES: Final = b'"' + b'\\"' * (1 << 19) + b'"'


def least_cpu_s(work: Callable[[], object], enough_s: float) -> float:
    """The least CPU time of several tries, of which one below ``enough_s`` is enough. Seconds."""
    return longest_step_s(lambda: iter([work()]), enough_s)


def longest_step_s(work: Callable[[], Iterator[object]], enough_s: float) -> float:
    """The longest of a work's steps, each by the least CPU time of several rounds of the whole work. Seconds.

    ``work`` begins a round, which is the first step; each item of the iterator ends one. All rounds have equal steps.
    """
    least: list[float] = []
    for _ in range(_TRIES):
        taken = []
        began = time.process_time()
        for _ in work():
            taken.append(time.process_time() - began)
            began = time.process_time()
        taken.append(time.process_time() - began)
        least = [min(pair) for pair in zip(least, taken, strict=True)] if least else taken
        if max(least) < enough_s:
            return max(least)
    return max(least) / _slower()


def _slower() -> float:
    """How many times slower this machine is than that of the bounds; at least 1."""
    passes = []
    for _ in range(_TRIES):
        began = time.process_time()
        msgspec.json.decode(_QUOTES, type=msgspec.Raw)
        passes.append(time.process_time() - began)
    return max(1.0, min(passes) / _PASS_S)

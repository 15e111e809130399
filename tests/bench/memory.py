"""Allocations of an online pod alone and beside BE pods that allocate without end, with the agent and without."""

import os

from msgspec.structs import asdict

from tests.node.memoryscene import Scene, compare, scene

_ROOT = f"/bypassd-bench-memory-{os.getpid()}"


def run(windows: int, seconds: float) -> dict[str, object]:
    """So many windows of each kind, each so long; the same twice, without and with the agent."""
    fields: dict[str, object] = {"windows": windows, "seconds": seconds}
    for name, agent in (("without the agent", False), ("with the agent", True)):
        with scene(_ROOT, agent=agent) as current:
            compared = compare(current.windows(windows, seconds))
            fields[name] = {key: round(value, 3) for key, value in asdict(compared).items()} | _happened(current)
    return fields


def _happened(current: Scene) -> dict[str, object]:
    return {
        "times_at_the_limit_of_all_pods": current.hits(current.kubepods),
        "times_at_the_limit_of_be_work": current.hits(current.besteffort),
        "oom_kills": {name: current.oom_kills(name) for name in current.pods},
        "most_in_use_mib": int(current.read(current.kubepods, "memory.max_usage_in_bytes")) >> 20,
    }

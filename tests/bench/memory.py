"""Allocations of an online pod alone and beside BE pods that allocate without end, with the agent and without."""

import os

from msgspec.structs import asdict

from tests.node.memoryscene import Scene, compare, scene

_ROOT = f"/bypassd-bench-memory-{os.getpid()}"


def run(windows: int, seconds: float) -> dict[str, object]:
    """So many windows of each kind, each so long; the same twice, without and with the agent."""
    found: dict[str, object] = {"windows": windows, "seconds": seconds}
    for name, agent in (("without the agent", False), ("with the agent", True)):
        with scene(_ROOT, agent=agent) as here:
            compared = compare(here.windows(windows, seconds))
            found[name] = {key: round(value, 3) for key, value in asdict(compared).items()} | _happened(here)
    return found


def _happened(here: Scene) -> dict[str, object]:
    return {
        "times_at_the_limit_of_all_pods": here.hits(here.kubepods),
        "times_at_the_limit_of_be_work": here.hits(here.besteffort),
        "oom_kills": {name: here.oom_kills(name) for name in here.pods},
        "most_in_use_mib": int(here.read(here.kubepods, "memory.max_usage_in_bytes")) >> 20,
    }

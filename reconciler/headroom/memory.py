"""Memory headroom: the memory allocatable to BE pods, of the whole node. Pure. Units: bytes.

For all BE pods together, their present use included:

    left for pods + what remains in use of BE's - reserve - growth_percent of what all others keep

and no more than the bound on BE work's memory (`reconciler.policies.be_memory`) where that is in force. "Left for pods"
is the kernel's MemAvailable or what is left below kubepods' own limit, the smaller.

Source: Koordinator's batch memory (policy usage: capacity, less a margin, less the system's and online pods' use) and
Katalyst's memory headroom (capacity less 5 GiB less 1.1 times what others use).
"""

from typing import Final

from reconciler.headroom.cpu import HeadroomConfig
from reconciler.headroom.smoothing import SmoothedReading, SmoothingConfig
from reconciler.runtime.format import size
from state.memory import NodeMemoryReading

WHOLE: Final = 0
"""The one part of memory headroom: where a pod's memory lies is open unless the pod is bound to a NUMA node."""
_NO_BOUND: Final = 1 << 62
"""More than any machine has."""


def smoothing_of(config: HeadroomConfig) -> SmoothingConfig:
    """Smoothing of the memory headroom: the windows of the CPU headroom, with steps of its own."""
    return SmoothingConfig(
        report_s=config.report_s,
        window_s=config.window_s,
        least=config.memory.min_step_bytes,
        most=config.memory.max_step_bytes,
        hold_s=config.unknown_hold_s,
        what="memory use",
        most_words=size(config.memory.max_step_bytes),
    )


def reserve_bytes(node: NodeMemoryReading, config: HeadroomConfig) -> int:
    """What is never offered: in place of Koordinator's margin (35 % of the capacity) and Katalyst's fixed 5 GiB."""
    return max(node.for_pods_bytes * config.memory.reserve_percent // 100, config.memory.reserve_bytes)


def update(
    node: NodeMemoryReading | None,
    be_kept_bytes: int | None,
    bound: int | None,
    config: HeadroomConfig,
    *,
    stale_after_s: float,
) -> SmoothedReading:
    """What BE work could have now. ``be_kept_bytes``: what remains in use of all BE pods' memory, None: unknown.

    ``bound``: what all BE work may use together, in bytes; None: as much as there is. No floor raises the result
    (Katalyst: 5 GiB on a full node).
    """
    budget = bound if bound is not None else _NO_BOUND
    if node is None:
        return SmoothedReading(tops={WHOLE: _NO_BOUND}, supply=None, budget=budget)
    total, own = node.for_pods_bytes, config.memory
    reserve = reserve_bytes(node, config)
    top = max(0, total - reserve)
    fresh = node.age_s is not None and node.age_s <= stale_after_s
    if not fresh or be_kept_bytes is None:
        return SmoothedReading(tops={WHOLE: top}, supply=None, budget=budget)
    left = node.left_for_pods_bytes
    others = max(0, total - left - be_kept_bytes)
    # ``left`` has the page cache that could be dropped: of BE's use only what would remain is added.
    supply = left + be_kept_bytes - reserve - others * own.growth_percent // 100
    return SmoothedReading(tops={WHOLE: top}, supply={WHOLE: max(0, min(supply, top))}, budget=budget)

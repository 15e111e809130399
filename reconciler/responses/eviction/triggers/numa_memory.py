"""A NUMA node is short of free memory, by the kernel's watermarks, for several passes.

Each pass in which less than the low watermark and a margin is free counts one, each other takes one off.

Source: Katalyst, memory eviction plugin, NUMA memory pressure.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from reconciler.responses.eviction.config import NumaMemoryTriggerConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext, is_nearly_out
from reconciler.responses.eviction.triggers.base import (
    EVERY,
    RECLAIMED,
    Judged,
    Shortage,
    Trigger,
    TriggerResult,
    not_measurable,
)
from reconciler.runtime.format import size

_MARGIN_PART: Final = 0.05
_CACHE_PART: Final = 0.10
_LEAST_PART: Final = 0.001
"""A pod that holds less than this of the node is no candidate."""


class NodeWatermarks(Struct, frozen=True, kw_only=True):
    """One node as it is now, in bytes. ``dropped``: so much page cache can be dropped that it is not short.

    ``reclaimable``: its page cache that is easy to drop; None: not known.
    """

    total: float
    free: float
    low: float
    urgent: float | None
    dropped: bool
    reclaimable: float | None = None

    @property
    def short(self) -> bool:
        """Whether this pass counts."""
        return self.free < self.low and not self.dropped

    @property
    def critical(self) -> bool:
        """Whether it counts at once."""
        return self.short and self.urgent is not None and self.free < self.urgent

    @property
    def exhausted(self) -> bool:
        """Whether the page cache does not help either: the OOM killer follows for pods that are bound to the node."""
        if not self.critical or self.urgent is None or self.reclaimable is None:
            return False
        return self.free + self.reclaimable < self.urgent


def marks_of(config: NumaMemoryTriggerConfig, scene: EvictionContext, subject: str) -> NodeWatermarks | None:
    """The marks of one node; None: not known."""
    free, total = scene.value(subject, "memory.free"), scene.value(subject, "memory.total")
    if free is None or not total:
        return None
    # Katalyst's margins are absolute, by which a small node is always short.
    margin = min(float(config.margin_bytes), _MARGIN_PART * total)
    urgent = min(float(config.urgent_bytes), _MARGIN_PART * total)
    low = scene.value(subject, "memory.low")
    low = (total * config.fallback_percent / 100 if low is None else low) + margin
    least = scene.value(subject, "memory.min")
    cache = scene.value(subject, "memory.inactive_file")
    if cache is not None and cache < max(min(float(config.inactive_file_bytes), _CACHE_PART * total), low):
        low += urgent
    return NodeWatermarks(
        total=total,
        free=free,
        low=low,
        urgent=None if least is None else least + urgent,
        # A page cache that fills the node leaves little free memory, too.
        dropped=cache is not None and cache >= config.droppable_percent / 100 * total,
        reclaimable=cache,
    )


def _judge(config: NumaMemoryTriggerConfig, scene: EvictionContext, memory: Mapping[str, int]) -> Judged[int]:
    """``memory``: how many passes each node has been short, less those in which it was not."""
    counts: dict[str, int] = {}
    pressures: list[Shortage] = []
    parts: list[str] = []
    known = False
    for subject in scene.places("numa:"):
        marks = marks_of(config, scene, subject)
        count = memory.get(subject, 0)
        if marks is None:
            counts[subject] = count
            parts.append(f"{subject}: unknown")
            continue
        known = True
        if marks.critical:
            # BE pods are evicted at once, and pods of all classes in the next pass.
            count = max(count, config.all_passes - 2)
        count = min(count + 1, config.all_passes) if marks.short else max(0, count - 1)
        counts[subject] = count
        text = f"{subject}: {size(marks.free)} of {size(marks.total)} free (threshold {size(marks.low)})"
        if marks.dropped:
            text += ", page cache can be dropped"
        parts.append(text)
        every = count >= config.all_passes
        if marks.short and (every or marks.critical or count >= config.reclaimed_passes):
            pressures.append(
                Shortage(
                    trigger=TRIGGER.name,
                    subject=subject,
                    good=EvictedResource.MEMORY,
                    need=marks.low - marks.free,
                    least=_LEAST_PART * marks.total,
                    hard=True,
                    # While other nodes have memory, only pods that are bound to this one are in danger.
                    critical=marks.exhausted and is_nearly_out(scene),
                    classes=EVERY if every else RECLAIMED,
                    evidence=f"{text}, for {count} passes{', below the min watermark' if marks.critical else ''}",
                )
            )
    if not known:
        return not_measurable("memory of NUMA nodes"), counts
    return TriggerResult(words="; ".join(parts), pressures=tuple(pressures)), counts


TRIGGER: Final = Trigger(
    name="numa_memory",
    summary="a NUMA node is short of free memory",
    config_type=NumaMemoryTriggerConfig,
    signals=(
        "memory.available",
        "memory.free",
        "memory.total",
        "memory.low",
        "memory.min",
        "memory.inactive_file",
        "memory.numa_rss",
    ),
    judge=_judge,
    features=("BEMemoryEvict", "MemoryEvict"),
)

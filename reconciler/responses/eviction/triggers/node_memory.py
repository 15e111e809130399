"""The node uses more of its memory than a threshold; what the kernel can drop (MemAvailable) does not count as used.

As in koordlet, but in exact numbers (it cuts the percentage to a whole one) and with each victim's use in bytes: in its
mode by priority koordlet multiplies that by 1000, so that one victim counts as a thousand.

Source: Koordinator, qosmanager memoryevict.
"""

from collections.abc import Mapping
from typing import Final

from reconciler.responses.eviction.config import NodeMemoryConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext, is_nearly_out
from reconciler.responses.eviction.triggers.base import Judged, Shortage, Trigger, TriggerResult, not_measurable
from reconciler.runtime import format as fmt
from reconciler.runtime.format import size
from state.evidence import NODE


def _judge(config: NodeMemoryConfig, scene: EvictionContext, _memory: Mapping[str, None]) -> Judged[None]:
    total, available = (scene.value(NODE, signal) for signal in TRIGGER.signals)
    if not total or available is None:
        return not_measurable(*TRIGGER.signals), {}
    used = max(0.0, total - available)
    percent = used / total * 100
    message = f"{size(used)} of {size(total)} used, {fmt.percent(percent)} "
    message += f"(threshold {fmt.percent(config.threshold_percent)})"
    if percent < config.threshold_percent:
        return TriggerResult(words=message), {}
    pressure = Shortage(
        trigger=TRIGGER.name,
        good=EvictedResource.MEMORY,
        need=used - total * config.left_percent / 100,
        evidence=message,
        hard=True,
        critical=is_nearly_out(scene),
    )
    return TriggerResult(words=message, pressures=(pressure,)), {}


TRIGGER: Final = Trigger(
    name="node_memory",
    summary="the node uses more of its memory than a threshold",
    config_type=NodeMemoryConfig,
    signals=("memory.total", "memory.available"),
    judge=_judge,
    features=("BEMemoryEvict", "MemoryEvict"),
)

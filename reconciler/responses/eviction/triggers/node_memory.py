"""The node uses more of its memory than a threshold; what the kernel can drop (MemAvailable) does not count as used.

As koordlet has it, but in exact numbers (it cuts the percentage to a whole one) and with what each victim holds in
bytes: in its mode by priority koordlet multiplies that by 1000, so that one victim seems to be a thousand.

Source: Koordinator, qosmanager memoryevict.
"""

from typing import Final

from reconciler.responses.eviction.config import NodeMemoryConfig
from reconciler.responses.eviction.resources import Good, size
from reconciler.responses.eviction.samples import Scene
from reconciler.responses.eviction.triggers.base import Nothing, Pressure, Reading, Trigger, blind
from state.evidence import NODE


def _judge(config: NodeMemoryConfig, scene: Scene, _memory: Nothing | None) -> tuple[Reading, Nothing]:
    total, available = (scene.value(NODE, signal) for signal in TRIGGER.signals)
    if not total or available is None:
        return blind(*TRIGGER.signals), Nothing()
    used = max(0.0, total - available)
    percent = used / total * 100
    words = f"{size(used)} of {size(total)} used, {percent:.1f} %, too much at {config.threshold_percent:g} %"
    if percent < config.threshold_percent:
        return Reading(words=words), Nothing()
    pressure = Pressure(
        trigger=TRIGGER.name,
        good=Good.MEMORY,
        need=used - total * config.left_percent / 100,
        evidence=words,
        hard=True,
    )
    return Reading(words=words, pressures=(pressure,)), Nothing()


TRIGGER: Final = Trigger(
    name="node_memory",
    summary="the node uses more of its memory than a threshold",
    config_type=NodeMemoryConfig,
    memory_type=Nothing,
    signals=("memory.total", "memory.available"),
    judge=_judge,
    features=("BEMemoryEvict", "MemoryEvict"),
)

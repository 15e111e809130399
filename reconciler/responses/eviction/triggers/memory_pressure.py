"""The node as a whole has no free memory left, or its online pods stall for lack of memory.

Two conditions, each with its own pressure: free memory below the low watermark (or a bound of the configuration), and
memory pressure (PSI over 10 s) of the node together with that of enough online pods, for 15 s and for 45 s. Without PSI
only the first is evaluated.

Source: Katalyst, memory eviction plugin, system memory pressure; its kswapd rule has no caller there and none here.
"""

from typing import Final

from reconciler.responses.eviction.config import MemoryPressureConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext, is_nearly_out
from reconciler.responses.eviction.triggers.base import (
    EVERY,
    RECLAIMED,
    Judged,
    Shortage,
    Since,
    Trigger,
    TriggerResult,
    not_measurable,
    since_when,
)
from reconciler.runtime.format import duration, percent, size
from state.evidence import NODE
from state.model import PodClass

_WINDOW_S: Final = 10.0
_SEEN: Final = 0.5
_LEAST_PART: Final = 0.001
_STALL: Final = "stall"


def _free(config: MemoryPressureConfig, scene: EvictionContext) -> tuple[str, Shortage | None] | None:
    """The first condition; None: not known."""
    free, total = scene.value(NODE, "memory.free"), scene.value(NODE, "memory.total")
    if free is None or not total:
        return None
    bound = max(float(config.free_bytes), scene.value(NODE, "memory.low") or 0.0)
    cache = scene.value(NODE, "memory.inactive_file")
    message = f"{size(free)} of {size(total)} free (threshold {size(bound)})"
    if free >= bound or (cache is not None and cache >= config.droppable_percent / 100 * total):
        return message, None
    return message, Shortage(
        trigger=TRIGGER.name,
        good=EvictedResource.MEMORY,
        need=bound - free,
        least=_LEAST_PART * total,
        hard=True,
        critical=is_nearly_out(scene),
        evidence=message,
    )


def _stalled(config: MemoryPressureConfig, scene: EvictionContext) -> tuple[str, bool] | None:
    """The second condition as it is now, with the numbers; None: not known."""
    node = scene.mean(NODE, "memory.pressure", _WINDOW_S, _SEEN)
    if node is None:
        return None
    online = scene.pods(PodClass.SHARED, PodClass.DEDICATED)
    known = [scene.mean(pod.subject, "memory.pressure", _WINDOW_S, _SEEN) for pod in online]
    pods = [value for value in known if value is not None]
    suffering = sum(value > config.pod_percent for value in pods)
    mean = sum(pods) / len(pods) if pods else 0.0
    message = f"memory pressure {percent(node)}, online pods above the limit: {suffering}, their mean {percent(mean)}"
    return message, node >= config.node_percent and suffering >= config.pods and mean >= config.mean_percent


def _judge(config: MemoryPressureConfig, scene: EvictionContext, memory: Since) -> Judged[float]:
    free, stalled = _free(config, scene), _stalled(config, scene)
    if free is None and stalled is None:
        return not_measurable("memory.free", "memory.pressure"), {}
    parts = [pair[0] for pair in (free, stalled) if pair is not None]
    pressures = [free[1]] if free is not None and free[1] is not None else []
    since = since_when(memory, (_STALL,) if stalled is not None and stalled[1] else (), scene.now)
    lasted = scene.now - since.get(_STALL, scene.now)
    if stalled is not None and stalled[1] and lasted >= config.reclaimed_s:
        pressures.append(
            # A stall has no amount (``need``): one pod is evicted, and the effect is awaited.
            Shortage(
                trigger=TRIGGER.name,
                good=EvictedResource.MEMORY,
                least=_LEAST_PART * (scene.value(NODE, "memory.total") or 0.0),
                hard=True,
                critical=is_nearly_out(scene),
                classes=EVERY if lasted >= config.all_s else RECLAIMED,
                evidence=f"{stalled[0]}, for {duration(lasted)}",
            )
        )
    return TriggerResult(words="; ".join(parts), pressures=tuple(pressures)), since


TRIGGER: Final = Trigger(
    name="memory_pressure",
    summary="the node has no free memory, or its pods stall on memory",
    config_type=MemoryPressureConfig,
    signals=(
        "memory.free",
        "memory.total",
        "memory.low",
        "memory.inactive_file",
        "memory.available",
        "memory.pressure",
    ),
    judge=_judge,
    features=("BEMemoryEvict", "MemoryEvict"),
)

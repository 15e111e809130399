"""The node uses nearly all of its CPU time.

As in koordlet, but by exact numbers: it cuts the percentage to a whole one, so 95.9 counts as 95.

Source: Koordinator, qosmanager cpuevict (node usage).
"""

from collections.abc import Mapping
from typing import Final

from reconciler.responses.eviction.config import NodeCpuConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Judged, Shortage, Trigger, TriggerResult, not_measurable
from reconciler.runtime import format as fmt
from state.evidence import NODE

_SEEN: Final = 0.5


def release_milli(config: NodeCpuConfig, use: float, idle: float) -> float:
    """The CPU use that has to go, in thousandths of a CPU; 0: none."""
    there = use + idle
    if there <= 0 or use / there * 100 < config.threshold_percent:
        return 0.0
    return use - there * config.left_percent / 100


def _judge(config: NodeCpuConfig, scene: EvictionContext, _memory: Mapping[str, None]) -> Judged[None]:
    use, idle = (scene.value(NODE, signal) for signal in TRIGGER.signals)
    if use is None or idle is None:
        return not_measurable(*TRIGGER.signals), {}
    mean_use, mean_idle = (scene.mean(NODE, signal, config.window_s, _SEEN) for signal in TRIGGER.signals)
    if mean_use is None or mean_idle is None:
        return TriggerResult(words=f"unknown: too few samples in {fmt.duration(config.window_s)}", known=False), {}
    # The smaller: a peak that is over evicts no pod.
    need = min(release_milli(config, use, idle), release_milli(config, mean_use, mean_idle))
    percent = mean_use / max(1.0, mean_use + mean_idle) * 100
    message = f"CPU use {fmt.percent(percent)}, mean of {fmt.duration(config.window_s)} "
    message += f"(threshold {fmt.percent(config.threshold_percent)})"
    if need <= 0:
        return TriggerResult(words=message), {}
    return TriggerResult(
        words=message,
        pressures=(Shortage(trigger=TRIGGER.name, good=EvictedResource.CPU, need=need, evidence=message),),
    ), {}


TRIGGER: Final = Trigger(
    name="node_cpu",
    summary="the node uses nearly all of its CPU time",
    config_type=NodeCpuConfig,
    signals=("cpu.use", "cpu.idle"),
    judge=_judge,
    features=("CPUEvict",),
)

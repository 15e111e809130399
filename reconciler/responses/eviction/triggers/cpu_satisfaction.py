"""BE work gets too little of the CPU that it has requested, while it uses what it gets.

As in koordlet: over a window and again by the last sample, use of BE's allowance is high, and the allowance divided by
the requests is at most ``lower_percent``; then requests have to be evicted until the rest is at ``upper_percent``.

Source: Koordinator, qosmanager cpuevict (BE satisfaction).
"""

from collections.abc import Mapping
from typing import Final

from reconciler.responses.eviction.config import CpuSatisfactionConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import Judged, Shortage, Trigger, TriggerResult, not_measurable
from reconciler.runtime import format as fmt
from state.evidence import NODE

_SIGNALS: Final = ("be.use", "be.limit", "be.request")
_SEEN: Final = 1 / 3
"""The part of the window that must have been seen."""
_SMALL_MILLI: Final = 1000
"""Below one CPU the used share is not significant: BE work always counts as using it."""


def release_milli(config: CpuSatisfactionConfig, use: float, limit: float, request: float) -> float:
    """The requests that have to go, in thousandths of a CPU; 0: none."""
    if request <= 0:
        return 0.0
    # Unlike in koordlet a limit of nothing counts: BE work that may have nothing at all is short of CPU.
    if limit >= _SMALL_MILLI and use / limit * 100 < config.use_percent:
        return 0.0
    satisfied = max(0.0, limit) / request * 100
    if satisfied > config.lower_percent:
        return 0.0
    return request * (config.upper_percent - satisfied) / 100


def _judge(config: CpuSatisfactionConfig, scene: EvictionContext, _memory: Mapping[str, None]) -> Judged[None]:
    last = [scene.value(NODE, signal) for signal in _SIGNALS]
    mean = [scene.mean(NODE, signal, config.window_s, _SEEN) for signal in _SIGNALS]
    lacking = [signal for signal, value in zip(_SIGNALS, last, strict=True) if value is None]
    if lacking:
        return not_measurable(*lacking), {}
    use, limit, request = (value or 0.0 for value in last)
    if None in mean:
        return TriggerResult(words=f"unknown: too few samples in {fmt.duration(config.window_s)}", known=False), {}
    over = [value or 0.0 for value in mean]
    # The smaller: a shortage that is over evicts no pod.
    need = min(release_milli(config, use, limit, request), release_milli(config, over[0], over[1], over[2]))
    share = over[1] / over[2] * 100 if over[2] > 0 else 100.0
    message = (
        f"BE limit {fmt.cpus(over[1])} of {fmt.cpus(over[2])} CPU requested ({fmt.percent(round(share))}, "
        f"threshold {fmt.percent(config.lower_percent)}), in use {fmt.cpus(over[0])}, "
        f"mean of {fmt.duration(config.window_s)}"
    )
    if need <= 0:
        return TriggerResult(words=message), {}
    pressure = Shortage(trigger=TRIGGER.name, good=EvictedResource.CPU_REQUEST, need=need, evidence=message)
    return TriggerResult(words=message, pressures=(pressure,)), {}


TRIGGER: Final = Trigger(
    name="cpu_satisfaction",
    summary="BE pods get too small a share of their CPU requests",
    config_type=CpuSatisfactionConfig,
    signals=_SIGNALS,
    judge=_judge,
    features=("BECPUEvict",),
)

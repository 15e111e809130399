"""The amount published for BE pods exceeds the CPU or memory that BE work has now by far.

The present amount is the plan's own figure, from this node: Katalyst and koordlet read it from the API server.

Source: Katalyst, reclaimed resource eviction plugin; Koordinator, qosmanager (allocatable).
"""

from typing import Final

from reconciler.responses.eviction.config import ReclaimedResourceConfig
from reconciler.responses.eviction.resources import EvictedResource, cpu_request, format_amount, memory_request
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    RECLAIMED,
    Judged,
    Shortage,
    Since,
    Trigger,
    TriggerResult,
    not_measurable,
)
from reconciler.runtime.format import duration
from state.evidence import NODE

_SEEN: Final = 0.5


def _most(scene: EvictionContext, signal: str, length_s: float) -> float | None:
    """The most in the window: the figure follows online work within a second, and a dip of it evicts no pod.

    None where less than half of the window has been seen.
    """
    if length_s <= 0:
        return scene.value(NODE, signal)
    if scene.mean(NODE, signal, length_s, _SEEN) is None:
        return None
    return max(value for _, value in scene.past(NODE, signal, length_s))


def _judge(config: ReclaimedResourceConfig, scene: EvictionContext, _memory: Since) -> Judged[float]:
    # With mid-tier requests of BE pods, which run on the same CPUs. What online pods were promised of it by the API
    # server is not measured on the node.
    pods = list(scene.pods(*RECLAIMED))
    pressures: list[Shortage] = []
    parts: list[str] = []
    for good, ratio, signal, requested in (
        (EvictedResource.CPU_REQUEST, config.cpu_ratio, "be.budget", sum(cpu_request(pod) or 0 for pod in pods)),
        (
            EvictedResource.MEMORY_REQUEST,
            config.memory_ratio,
            "be.memory_bound",
            sum(memory_request(pod) or 0 for pod in pods),
        ),
    ):
        there = _most(scene, signal, config.for_s)
        if there is None:
            continue  # koordlet takes a missing figure for zero, and evicts all
        available = format_amount(good, there).removesuffix(" requested")
        text = f"BE: {format_amount(good, requested)}, {available} available (threshold {ratio:g} times that)"
        parts.append(text)
        if requested > ratio * there:
            need = requested - ratio * there * config.lower_percent / 100
            pressures.append(Shortage(trigger=TRIGGER.name, good=good, need=need, hard=True, evidence=text))
    if not parts:
        if any(scene.value(NODE, signal) is not None for signal in TRIGGER.signals):
            return TriggerResult(words=f"unknown: too few samples in {duration(config.for_s)}", known=False), {}
        return not_measurable(*TRIGGER.signals), {}
    return TriggerResult(words="; ".join(parts), pressures=tuple(pressures)), {}


TRIGGER: Final = Trigger(
    name="reclaimed_resource",
    summary="BE pods request far more than is available to them",
    config_type=ReclaimedResourceConfig,
    signals=("be.budget", "be.memory_bound"),
    judge=_judge,
    features=("CPUAllocatableEvict", "MemoryAllocatableEvict"),
)

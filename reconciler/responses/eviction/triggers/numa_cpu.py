"""A NUMA node uses nearly all of its CPU time, in most of a full ring of samples.

Differences from Katalyst: the threshold is a share of the node's CPU time, and not from a list by CPU model; the
shortage lasts until a sample is at a lower mark; BE pods are evicted, and online pods that are bound to the node only
where the configuration has them.

Source: Katalyst, CPU eviction plugin, NUMA CPU usage.
"""

from collections.abc import Mapping
from typing import Final

from msgspec import Struct

from reconciler.responses.eviction.config import NumaCpuConfig
from reconciler.responses.eviction.resources import EvictedResource
from reconciler.responses.eviction.samples import EvictionContext
from reconciler.responses.eviction.triggers.base import (
    EVERY,
    RECLAIMED,
    Judged,
    Shortage,
    Trigger,
    TriggerResult,
    not_measurable,
)
from reconciler.responses.eviction.triggers.ring import LoadRing, advance
from reconciler.runtime import format as fmt

_PREFIX: Final = "numa:"
_USE: Final = "cpu.numa_use"
_IDLE: Final = "cpu.numa_idle"


class BusyNode(Struct, frozen=True, kw_only=True):
    """One node: the used part of its CPU time, and whether it is short of it."""

    ring: LoadRing
    short: bool = False


def judge_node(config: NumaCpuConfig, ring: LoadRing, *, was_short: bool) -> BusyNode:
    newest = ring.ratios[-1]
    if len(ring.ratios) < config.samples:
        return BusyNode(ring=ring)
    if was_short and newest * 100 <= config.left_percent:
        # From this sample on: use between the two marks neither begins nor ends a shortage.
        return BusyNode(ring=LoadRing((newest,) * len(ring.ratios), ring.at_s))
    threshold = config.threshold_percent / 100
    begins = newest > threshold and ring.above(config, threshold) is not None
    return BusyNode(ring=ring, short=was_short or begins)


def _pods_only_on(scene: EvictionContext, subject: str) -> frozenset[str]:
    """Pods whose end helps: the scheduler moves the tasks of a pod on several nodes to an idle one.

    By this frame: an older sample may be from before the pod was moved.
    """
    samples, end = scene.frame.samples, f"@{subject}"
    return frozenset(uid for uid, pod in scene.frame.pods.items() if _USE in samples.get(pod.subject + end, {}))


def _judge(config: NumaCpuConfig, scene: EvictionContext, memory: Mapping[str, BusyNode]) -> Judged[BusyNode]:
    places = scene.places(_PREFIX, _USE)
    if len(places) == 1:
        return TriggerResult(words="one NUMA node: not evaluated (node_cpu is the same)"), {}
    nodes: dict[str, BusyNode] = {}
    pressures: list[Shortage] = []
    parts: list[str] = []
    for subject in places:
        use, idle = scene.value(subject, _USE), scene.value(subject, _IDLE)
        if use is None or idle is None or use + idle <= 0:
            continue
        last = memory.get(subject)
        old = last.ring if last is not None else None
        ring = advance(old, config, scene, subject=subject, signal=_USE, whole=use + idle)
        if ring is None:
            continue
        node = nodes[subject] = judge_node(config, ring, was_short=last is not None and last.short)
        if len(ring.ratios) < config.samples:
            parts.append(f"{subject}: {len(ring.ratios)} of {config.samples} samples")
            continue
        text = f"{subject}: CPU use {fmt.percent(ring.ratios[-1] * 100)}, mean of {fmt.duration(config.sample_s)} "
        text += f"(threshold {fmt.percent(config.threshold_percent)}"
        text += f", short until {fmt.percent(config.left_percent)})" if node.short else ")"
        parts.append(text)
        # Of the newest sample and the present use the smaller: a load that has just ended evicts no pod.
        need = min(ring.ratios[-1] * (use + idle), use) - (use + idle) * config.left_percent / 100
        if node.short and need > 0:
            pressures.append(
                Shortage(
                    trigger=TRIGGER.name,
                    subject=subject,
                    good=EvictedResource.CPU,
                    need=need,
                    classes=EVERY if config.online_pods else RECLAIMED,
                    only=_pods_only_on(scene, subject),
                    evidence=text,
                )
            )
    if not nodes:
        return not_measurable("CPU use of NUMA nodes"), {}
    known = any(len(node.ring.ratios) >= config.samples for node in nodes.values())
    return TriggerResult(words="; ".join(parts), pressures=tuple(pressures), known=known), nodes


TRIGGER: Final = Trigger(
    name="numa_cpu",
    summary="a NUMA node uses nearly all of its CPU time",
    config_type=NumaCpuConfig,
    signals=(_USE, _IDLE),
    judge=_judge,
)

"""BE work as a whole: its limit in the plan, its requests, and its use. From the view only; pure."""

from collections.abc import Iterable
from typing import Final, final

from cgroupfs.codecs import DEFAULT_PERIOD_US
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet
from state.evidence import NODE
from state.model import ContainerKind, NodeView, Pod, PodClass, Pools

SIGNALS: Final = (
    "be.budget",
    "be.limit",
    "be.request",
    "be.use",
    "be.memory_request",
    "be.memory_bound",
    "be.memory_use",
)


def limit_milli(view: NodeView, pools: Pools) -> int:
    """What BE work can use: all CPUs of its pool, or the quotas on it where they are less.

    The quotas in force in the besteffort directory count, else those of the plan.
    """
    most = 1000 * len(pools.reclaimed)
    quota_us = view.actual.get((view.besteffort, "cpu.quota"))
    period_us = view.actual.get((view.besteffort, "cpu.period"))
    period = period_us if isinstance(period_us, int) and period_us > 0 else DEFAULT_PERIOD_US
    outside = sum(pools.quota_milli.get(uid, 0) for uid in view.pods) if pools.quota_milli is not None else 0
    # With a floor, a group inside forbids the directory's quota, and each pod has one by the plan.
    if isinstance(quota_us, int) and quota_us > 0 and view.besteffort not in view.quota_floors:
        return min(most, quota_us * 1000 // period + outside)
    if pools.quota_milli is not None:
        return min(most, sum(pools.quota_milli.values()))
    return most


def requested(pods: Iterable[Pod], most: int) -> tuple[int, int]:
    """CPU (thousandths) and memory (bytes) that BE pods have requested, by whichever name of the resource.

    ``most``: what pods can have of the CPU.
    """
    cpu = memory = 0
    for pod in pods:
        if pod.pod_class is PodClass.RECLAIMED:
            for container in pod.members:
                # An init container has ended before the others begin.
                if container.kind in {ContainerKind.APP, ContainerKind.UNKNOWN}:
                    cpu += container.requests.counted_cpu(most) or 0
                    memory += container.requests.be_memory_bytes or 0
    return cpu, memory


@final
class BestEffortReader(BaseReader):
    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        view, pools = scene.view, scene.pools
        cpu, memory = requested(view.pods.values(), view.capacity_milli)
        sheet.put(NODE, "be.request", cpu)
        sheet.put(NODE, "be.memory_request", memory)
        if view.cpu is not None and view.cpu.age_s is not None:
            sheet.put(NODE, "be.use", view.cpu.reclaimed_milli, age_s=view.cpu.age_s)
        node = view.node_memory
        if node is not None and node.age_s is not None and node.reclaimed_bytes is not None:
            sheet.put(NODE, "be.memory_use", node.reclaimed_bytes, age_s=node.age_s)
        if pools is None:
            return
        sheet.put(NODE, "be.budget", pools.budget_milli)
        sheet.put(NODE, "be.limit", limit_milli(view, pools))
        bounds = [number for number in (scene.memory.reclaimed_high_bytes, scene.memory.reclaimed_max_bytes) if number]
        if bounds:
            sheet.put(NODE, "be.memory_bound", min(bounds))

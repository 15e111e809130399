"""interrupts: CPUs that pods own serve no interrupts of devices that may be served elsewhere.

An interrupt takes 1 to 10 us of its CPU, and the soft interrupt behind it up to milliseconds, above any priority of a
thread. When a CPU is free again the interrupt has its original back. Off by default.

The kernel places interrupts of a queue for each CPU (NVMe, many network cards) itself and refuses every other place;
each serves the requests of its own CPU. irqbalance places all others again every ten seconds: ban the owned CPUs there,
or do not run it.

Source: kernel documentation, core-api/irq/irq-affinity and admin-guide/kernel-parameters (``managed_irq``);
irqbalance(1). nri-plugins moves them by class of CPUs, Katalyst by load.
"""

from typing import Annotated, Final

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.policies.base import Policy, PolicyConfig
from reconciler.runtime.format import plural
from state.cpu import InterruptPlan
from state.model import NodeView
from state.plan import NodePlan

NAME: Final = "interrupts"


class InterruptsConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Whether interrupts of devices are moved."""

    enabled: Annotated[bool, Meta(description="move interrupts off the CPUs that pods own, and back")] = False


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: InterruptsConfig) -> NodePlan:
    """Which CPUs to keep interrupts off, and where they may go instead."""
    owned = CpuSet.union(plan.pools.dedicated.values())
    free = view.topology.online - owned
    if not owned or not free:
        text = "no pod owns CPUs" if not owned else "pods own all CPUs: interrupts stay"
        part = InterruptPlan(dry_run=config.dry_run)
    else:
        # The actuator confines an interrupt to its CPUs that are not owned; one that has none, to the CPUs of the same
        # NUMA nodes that no pod owns, else to any such.
        text = f"off {plural(len(owned), 'owned CPU')}: {owned}"
        part = InterruptPlan(avoid=owned, free=free, dry_run=config.dry_run)
    return replace(plan, interrupts=part, reasons={**plan.reasons, NAME: text})


POLICY = Policy(
    name=NAME,
    summary="interrupts of devices off the CPUs that pods own",
    config_type=InterruptsConfig,
    precedence=84,
    decide_resources=decide_resources,
)

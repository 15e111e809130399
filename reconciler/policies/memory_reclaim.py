"""memory reclaim: takes unneeded memory from BE containers, and their page cache when the node is short.

Nothing permanent is written into control files: the actuator of this name
(`reconciler.actuators.memory_reclaim.actuator`) makes the kernel reclaim a bounded amount at a time, by the laws in
`reconciler.policies.memory_reclaim_control`. Off by default: the pages that are needed again are read again, and on
cgroup v1 all page cache of a container is dropped at once.
"""

from typing import Annotated, ClassVar, Final

from msgspec import Meta, convert
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from state.memory import ReclaimRequest
from state.model import NodeView
from state.plan import NodePlan

NAME: Final = "memory_reclaim"
_BYTES: Final = 1 << 40


class MemoryReclaimConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much is taken, how often, and when it stops."""

    enabled: Annotated[bool, Meta(description="reclaim memory of BE containers")] = False
    probe: Annotated[
        bool,
        Meta(description="reclaim a little from each container while no task waits for memory (v2 only)"),
    ] = True
    relieve: Annotated[
        bool,
        Meta(description="drop page cache when a NUMA node is nearly out of memory, largest first"),
    ] = True

    # Constants: no two nodes need them to differ.
    # After a container waited for memory: senpai's back-off.
    rest_s: ClassVar[float] = 60.0
    # Above this use of the swap only page cache is reclaimed (enforced from Linux 6.9).
    swap_percent: ClassVar[int] = 80
    # By one action: more holds the kernel's locks for long (cgroup v2 only).
    most_bytes: ClassVar[int] = 256 << 20
    # Of page cache: less is not worth a write.
    least_bytes: ClassVar[int] = 64 << 20
    # Senpai's.
    interval_s: ClassVar[float] = 6.0
    # Senpai's target of memory pressure.
    pressure_percent: ClassVar[float] = 0.1
    # Senpai's largest step: a wrong one costs one part in a hundred in refaults.
    probe_percent: ClassVar[float] = 1.0
    # Senpai's floor: what a small program needs to run at all.
    leave_bytes: ClassVar[int] = 100 << 20


def decide_resources(
    view: NodeView, plan: NodePlan, previous: NodePlan | None, config: MemoryReclaimConfig
) -> NodePlan:
    """Pass the policy's parameters to the actuator."""
    del previous
    version = view.versions.get("memory")
    if version is None:
        reason = "no memory controller is mounted on this node"
        return replace(plan, reasons={**plan.reasons, NAME: reason})
    wish = replace(convert(config, ReclaimRequest, from_attributes=True), probe=config.probe and version == 2)
    kinds = [name for name, on in (("unused memory", wish.probe), ("page cache on shortage", wish.relieve)) if on]
    reason = f"reclaims from BE containers: {' and '.join(kinds)}" if kinds else "not supported by this kernel"
    memory = replace(plan.memory, reclaim=wish)
    return replace(plan, memory=memory, reasons={**plan.reasons, NAME: reason})


POLICY = Policy(
    name=NAME,
    summary="reclaims unused memory and page cache of BE containers",
    config_type=MemoryReclaimConfig,
    precedence=72,
    decide_resources=decide_resources,
)

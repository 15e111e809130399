"""memory reclaim: takes unneeded memory from BE containers, and their page cache when the node is short.

Nothing permanent is written into control files: `reconciler.actuators.memory_reclaim.actuator` makes the kernel reclaim
a bounded amount at a time, by the two laws here, `probe` and `relieve`. Off by default: pages that are needed again are
read again.

Units: bytes, percent of wall time. Source: senpai (senpai.py, and the plug-in of oomd); Meta's TMO paper (ASPLOS 2022);
Katalyst's cache reaper (largest cache first).
"""

from collections.abc import Iterable, Mapping
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct, convert
from msgspec.structs import replace

from reconciler.policies.base import Policy, PolicyConfig
from reconciler.runtime.format import percent, size
from state.memory import GroupMemory, MemoryShortage, NodeMemoryReading, ReclaimAction, ReclaimRequest, ZoneNode
from state.model import NodeView
from state.plan import NodePlan

_LEAST: Final = 1 << 20
"""Less than this is not worth an action."""
NAME: Final = "memory_reclaim"


class ReclaimHistory(Struct, frozen=True, kw_only=True):
    """State of a container between two rounds; times are monotonic.

    ``rest_until``: it is not probed before; ``relieved_until``: its cache has just been dropped, and may grow until
    then.
    """

    at_s: float
    stalled_us: int | None = None
    rest_until: float = 0.0
    relieved_until: float = 0.0


def pressure_percent(before: ReclaimHistory | None, now: GroupMemory) -> float | None:
    """Share of the time since the last round in which some task waited for memory; None: unknown."""
    if before is None or before.stalled_us is None or now.stalled_us is None:
        return None
    elapsed_s, stalled_us = now.at_s - before.at_s, now.stalled_us - before.stalled_us
    if elapsed_s <= 0 or stalled_us < 0:
        return None
    return min(100.0, stalled_us / elapsed_s / 10_000)


def has_swap(node: NodeMemoryReading, wish: ReclaimRequest) -> bool:
    """Whether pages may go to swap: there is some, and less of it is in use than the threshold.

    The plug-in of oomd has this test inverted.
    """
    used = node.swap_bytes - node.swap_free_bytes
    return node.swap_bytes > 0 and used * 100 < node.swap_bytes * wish.swap_percent


def probe(
    before: ReclaimHistory | None, now: GroupMemory, node: NodeMemoryReading, wish: ReclaimRequest
) -> tuple[ReclaimAction | None, ReclaimHistory]:
    """What one container gives up now, and what to remember of it.

    A little while its pressure remains low: memory that it does not fault back in was not needed. Senpai's: at most 1 %
    a round, less by the square of how near the pressure is to its target, none above it, and then a pause.
    """
    base = before if before is not None else ReclaimHistory(at_s=now.at_s)
    kept = replace(base, at_s=now.at_s, stalled_us=now.stalled_us)
    pressure = pressure_percent(before, now)
    if pressure is None or now.at_s < kept.rest_until:
        return None, kept
    if pressure >= wish.pressure_percent:
        return None, replace(kept, rest_until=now.at_s + wish.rest_s)
    # From a tenth of the target on less is taken, and a hundredth at the target: senpai.py's coeff_probe.
    near = min(1.0, (wish.pressure_percent / (10 * pressure)) ** 2) if pressure > 0 else 1.0
    want = min(int(now.used_bytes * wish.probe_percent / 100 * near), wish.most_bytes)
    swaps = has_swap(node, wish)
    # Without room in swap only page cache that no process has mapped: for more the kernel would scan for nothing, and
    # throw out program text.
    if not swaps:
        want = min(want, now.droppable_bytes)
    if want < _LEAST or now.used_bytes - want < wish.leave_bytes:
        return None, kept
    why = f"memory pressure {percent(pressure)}, limit {percent(wish.pressure_percent)}"
    action = ReclaimAction(
        path=now.path, pod_uid=now.pod_uid, kind="probe", want_bytes=want, why=why, cache_only=not swaps
    )
    return action, kept


def missing_bytes(nodes: Mapping[int, ZoneNode], short: Mapping[int, MemoryShortage]) -> dict[int, int]:
    """By NUMA node that is hard pressed: what it lacks to be at rest. Missing data does not count as a shortage."""
    numbers: dict[int, int] = {}
    for number in sorted(nodes):
        if short.get(number) is MemoryShortage.HARD:
            node = nodes[number]
            # Of *free* memory: available memory would count the page cache that is to be dropped.
            numbers[number] = max(_LEAST, node.rest_bytes - node.free_bytes)
    return numbers


def relieve(
    groups: Iterable[GroupMemory],
    tried: Mapping[str, ReclaimHistory],
    missing: Mapping[int, int],
    wish: ReclaimRequest,
    *,
    version: int,
) -> ReclaimAction | None:
    """The container whose page cache is dropped when a node is short: the largest cache there; one per round.

    That is before the kernel makes online work do its own reclaiming, and before a process is killed. No container is
    left with less than ``leave_bytes``.
    """
    if not missing:
        return None
    need = sum(missing.values())

    def spare(group_memory: GroupMemory) -> int:
        """What it may give; on v1 all of its cache or nothing."""
        over = group_memory.used_bytes - wish.leave_bytes
        # Cache on other nodes does not help. On v1 all cache of the container is dropped (force_empty).
        return min(group_memory.cache_on(missing), over) if version == 2 or group_memory.droppable_bytes <= over else 0

    fit = [
        group_memory
        for group_memory in groups
        if group_memory.cache_on(missing) >= max(_LEAST, wish.least_bytes)
        and spare(group_memory) >= _LEAST
        and ((last := tried.get(group_memory.path)) is None or group_memory.at_s >= last.relieved_until)
        # On v1 program text is dropped as well: only of containers above their request.
        and (version == 2 or group_memory.used_bytes > group_memory.asked_bytes)
    ]
    if not fit:
        return None
    chosen = min(fit, key=lambda group_memory: (-group_memory.cache_on(missing), group_memory.path))
    want = min(need, spare(chosen), wish.most_bytes) if version == 2 else 0
    where = ", ".join(map(str, missing))
    cache = chosen.cache_on(missing)
    why = f"NUMA node {where} lacks {size(need)} of free memory; page cache of this container: {size(cache)}"
    why += "" if chosen.droppable_on is None else " there"
    return ReclaimAction(path=chosen.path, pod_uid=chosen.pod_uid, kind="relief", want_bytes=want, why=why)


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

"""reserve: CPUs of the system, the kubelet and the interrupts remain out of every other pool."""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, MAX_CPUS, CpuSet
from reconciler.policies.base import Policy, PolicyConfig
from state.model import NodeView, Pools
from state.topology import Topology

_LIST = r"^(\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)?$"


class StrictReserve(StrEnum):
    """Whether online pods remain off the reserved CPUs as well."""

    KUBELET = "kubelet"
    ALWAYS = "always"
    NEVER = "never"


class ReserveConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPUs kept for the host and for interrupts.

    Source: the kubelet's ``reservedSystemCPUs`` and its option strict-cpu-reservation (issue 104147, KEP-4540);
    Katalyst's reserve and interrupt pools. Unlike the kubelet, which only keeps exclusive pods off these CPUs, BE pods
    remain off them too. Unlike Katalyst, whose ramping pods may run on interrupt CPUs, no pod is put there.
    """

    cpus: Annotated[
        str,
        Meta(
            description="CPU list such as 0-1,16, besides the kubelet's; empty: none",
            pattern=_LIST,
        ),
    ] = ""
    count: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_CPUS,
            description="number of CPUs to reserve if no list is set: whole cores, lowest first, spread over the NUMA "
            "nodes",
        ),
    ] = 0
    strict: Annotated[
        StrictReserve,
        Meta(description="online pods avoid reserved CPUs: like the kubelet's strict-cpu-reservation, always, never"),
    ] = StrictReserve.KUBELET
    interrupt_cpus: Annotated[
        str,
        Meta(description="CPU list for interrupts, which no pod placed by bypassd gets", pattern=_LIST),
    ] = ""

    def __post_init__(self) -> None:
        """Refuse what the pattern cannot: a range that runs backwards."""
        for name in ("cpus", "interrupt_cpus"):
            try:
                CpuSet.parse(getattr(self, name))
            except ValueError as exc:
                raise ValueError(f"{name}: {exc}; expected a CPU list below {MAX_CPUS}") from exc


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: ReserveConfig) -> Pools:
    """Reserve the kubelet's and our own CPUs, as far as they are online."""
    ours = CpuSet.parse(config.cpus)
    kubelets = view.kubelet.reserved
    parts = [f"{name} {cpus}" for name, cpus in (("the kubelet's", kubelets), ("configured", ours)) if cpus]
    # A list of CPUs, the kubelet's too, has precedence over a number.
    if config.count and not parts:
        ours = spread(config.count, view.topology, pools.online_cpus)
        parts = [f"{len(ours)} chosen by bypassd: {ours}"]
    wanted = ours | kubelets
    reserved = wanted & pools.online_cpus
    reason = " and ".join(parts) if parts else "no reserved CPUs"
    if gone := wanted - view.topology.online:
        reason += f"; CPU {gone} is not online"
    if outside := (wanted & view.topology.online) - reserved:
        reason += f"; CPU {outside} is outside of {view.kubepods} in any case"
    strict = config.strict is StrictReserve.ALWAYS or (
        config.strict is StrictReserve.KUBELET and view.kubelet.strict_reserved
    )
    interrupt = CpuSet.parse(config.interrupt_cpus) & (pools.online_cpus - reserved)
    reasons = {**pools.reasons, "reserved": reason}
    if interrupt:
        reasons["interrupt"] = "configured for interrupts"
    if interrupt and pools.shared <= reserved | interrupt:
        # A node has to run its pods somewhere: of the two, interrupts are the smaller evil for them.
        interrupt = EMPTY
        reasons["interrupt"] = "not kept free: no other CPU would remain for pods"
    return replace(
        pools,
        reserved=reserved,
        lenient=EMPTY if strict else reserved,
        interrupt=interrupt,
        shared=pools.shared - reserved - interrupt,
        reasons=reasons,
    )


def spread(count: int, topology: Topology, within: CpuSet) -> CpuSet:
    """``count`` of these CPUs, whole cores with the lowest numbers, one node after the other; the last may be cut.

    Source: Katalyst's TakeHTByNUMABalance. Difference: Katalyst counts threads, and leaves half a core beside each.
    """
    cores: dict[int, list[CpuSet]] = {node: [] for node in topology.nodes()}
    for part in sorted(filter(None, (core & within for core in topology.cores())), key=_lowest):
        cores[topology.node_of(_lowest(part))].append(part)
    nodes = [iter(parts) for parts in cores.values()]
    taken = EMPTY
    while nodes and len(taken) < count:
        for node in list(nodes):
            core = next(node, None)
            if core is None:
                nodes.remove(node)
                continue
            taken |= core.lowest(count - len(taken))
            if len(taken) == count:
                break
    return taken


def _lowest(cpus: CpuSet) -> int:
    """The lowest CPU of a set that has one."""
    return (cpus.mask & -cpus.mask).bit_length() - 1


POLICY = Policy(
    name="reserve",
    summary="keeps CPUs of the system, the kubelet and interrupts out of all other pools",
    config_type=ReserveConfig,
    precedence=60,
    decide_node=decide_node,
)

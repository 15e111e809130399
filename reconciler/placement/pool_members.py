"""The pool of each online pod, and the pod's request. Pure.

The default pool needs no name. Katalyst's ``cpuset_pool`` makes another pool, ``numa_binding`` one on a NUMA node;
system pods that name a pool have one of their own, all others run everywhere.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.demand import NumaOccupancy
from reconciler.placement.seats import NO_RIVALS, NodeRivals, NodeSeats, SeatRequest
from state.cpu import SHARED_POOL
from state.model import NodeView, Pod, PodClass
from state.pod_index import derived
from state.topology import Topology

DEFAULT: Final = "shared"
_BOUND: Final = "-NUMA"
_AND: Final = "+"


class PoolMembers(NamedTuple):
    """Pods by pool. ``bound``: pod uid -> pool, for all but the default pool; ``nodes``: pool -> its NUMA nodes.

    ``seated``: the pods that were assigned to a node now.
    """

    pods: Mapping[str, tuple[Pod, ...]]
    bound: Mapping[str, str]
    nodes: Mapping[str, tuple[int, ...]]
    seated: Sequence[SeatRequest] = ()


def members(
    pods: Mapping[str, Pod],
    free: CpuSet,
    topology: Topology,
    before: Mapping[str, str],
    owners: Mapping[str, CpuSet] | None = None,
    *,
    rivals: NodeRivals = NO_RIVALS,
) -> PoolMembers:
    """Every online pod in its pool. ``before``: ``bound`` of the last time, so that a pod remains on its node.

    ``owners``: pods that have CPUs of their own, which are in no pool, and on which nodes. ``rivals``: new containers
    with CPUs of their own, which are placed afterwards.

    A pod that is to be on one node and has none is assigned to one (`reconciler.placement.seats`).
    """
    owners = owners or {}
    occupancy = NumaOccupancy({uid: pod.wish for uid, pod in pods.items()})
    for uid, owner_nodes in owners.items():
        occupancy.assign_pod(uid, owner_nodes)
    result: dict[str, list[Pod]] = {DEFAULT: []}
    bound: dict[str, str] = {}
    nodes: dict[str, tuple[int, ...]] = {}
    # A node without free CPUs is not used.
    usable = {node: len(cpus) for node in topology.nodes() if (cpus := topology.node_cpus(node) & free)}
    seats = NodeSeats(usable, rivals)
    later: list[Pod] = []

    def join(pod: Pod, base: str, on: tuple[int, ...] = ()) -> None:
        key = pool_on(base, on) if on else base
        result.setdefault(key, []).append(pod)
        if key != DEFAULT:
            bound[pod.uid] = key
        if on:
            nodes[key] = on
            occupancy.assign_pod(pod.uid, CpuSet(on))
            usable_nodes = [node for node in on if node in usable]
            for node in usable_nodes:
                seats.join(node, base_of(key) if len(on) == 1 else key, pod.request_milli // len(usable_nodes))

    for uid in sorted(pods):
        pod = pods[uid]
        base = None if uid in owners else _base(pod)
        if base is None:
            continue
        if not (pod.wish.numa_binding and usable):
            join(pod, base)
            continue
        # A scheduler may have decided several nodes: then the pool is of all of them.
        decided = tuple(sorted({node for node in pod.wish.nodes if topology.node_cpus(node)}))
        for on in (decided, _nodes_before(before.get(uid), base)):
            if any(node in usable for node in on):
                join(pod, base, on)
                break
        else:
            later.append(pod)
    waiting = [
        SeatRequest(pod.uid, _pool(_base(pod) or DEFAULT), pod.request_milli, pod.wish.numa_share is False)
        for pod in later
    ]
    chosen_nodes = seats.choose(waiting, occupancy) if waiting else {}
    for pod in later:
        join(pod, _base(pod) or DEFAULT, (chosen_nodes[pod.uid],))
    return PoolMembers({key: tuple(result[key]) for key in sorted(result)}, dict(sorted(bound.items())), nodes, waiting)


def owners_of(dedicated: Mapping[str, CpuSet], view: NodeView) -> dict[str, CpuSet]:
    """The pods that own CPUs, and their NUMA nodes, if any pod is particular about those."""
    owners: dict[str, CpuSet] = {key.partition("/")[0]: EMPTY for key in dedicated}
    if not derived(view.pods, _is_any_particular):
        return owners
    for key, cpus in dedicated.items():
        uid = key.partition("/")[0]
        owners[uid] |= CpuSet(map(view.topology.node_of, cpus))
    return owners


def _is_any_particular(pods: Mapping[str, Pod]) -> bool:
    return any(pod.wish.numa_share is False for pod in pods.values())


def bound_nodes(bound: Mapping[str, str]) -> dict[str, CpuSet]:
    """Pod uid -> the NUMA nodes of its pool, for those in a pool of some; ``bound`` as in `PoolMembers`."""
    return {uid: CpuSet(nodes) for uid, key in bound.items() if (nodes := nodes_of(key))}


def nodes_of(key: str) -> tuple[int, ...]:
    """The NUMA nodes in a pool's name, as in ``shared/x-NUMA0`` or ``shared/x-NUMA0+2``; empty: bound to none."""
    _, mark, text = key.rpartition(_BOUND)
    numbers = text.split(_AND) if mark else []
    return tuple(map(int, numbers)) if all(number.isdecimal() for number in numbers) else ()


def base_of(key: str) -> str:
    """A pool's name without its NUMA nodes."""
    return key.rpartition(_BOUND)[0] if nodes_of(key) else key


def pool_on(base: str, nodes: tuple[int, ...]) -> str:
    """The name of a pool on these NUMA nodes."""
    return f"{_pool(base)}{_BOUND}{_AND.join(map(str, nodes))}"


def requests_of(pods: Mapping[str, Pod]) -> Mapping[str, int]:
    """`Pod.request_milli` of each of these pods, by uid."""
    return derived(pods, _requests)


def _requests(pods: Mapping[str, Pod]) -> Mapping[str, int]:
    return {uid: pod.request_milli for uid, pod in pods.items()}


def _base(pod: Pod) -> str | None:
    """The pool without its node; None for pods that are in no online pool."""
    name = pod.wish.pool if pod.wish.pool != SHARED_POOL else None
    if pod.pod_class is PodClass.DEDICATED:
        return DEFAULT  # one without CPUs of its own must not run on those of others
    if pod.pod_class is PodClass.SHARED:
        return f"shared/{name}" if name else DEFAULT
    if pod.pod_class is PodClass.SYSTEM and name:
        return f"system/{name}"
    return None


def _pool(base: str) -> str:
    return f"{DEFAULT}/{SHARED_POOL}" if base == DEFAULT else base


def _nodes_before(key: str | None, base: str) -> tuple[int, ...]:
    prefix = f"{_pool(base)}{_BOUND}"
    return nodes_of(key) if key is not None and key.startswith(prefix) else ()

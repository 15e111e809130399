"""Every claim on the CPUs in a finished plan: CPUs requested and granted, by which rule, and what prevented more.

Pure, and derived: the pools hold the decision, their reasons the rules. For people, metrics and alerts.
"""

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from msgspec import Struct, to_builtins

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.churn import by_pool
from reconciler.placement.pool_members import DEFAULT, bound_nodes
from reconciler.runtime.format import first_of, plural
from state.cpu import OwnerCpus
from state.model import ContainerKind, CpuPolicy, NodeView, Pod, PodClass, Pools, SourceStatus
from state.pod_index import derived, in_order
from state.topology import Topology

PLACEMENT: Final = "placement"
"""The source whose status is that of all claims."""
_CPU: Final = 1000
_DEDICATED: Final = "dedicated/"
REFUSED: Final = "did not get its CPUs: "
"""Begins the reason of a container that was refused."""
_SHOWN: Final = 4
"""Owners named in one message."""
_CUT_SHOWN: Final = 8
"""Claims that are cut, in one message."""


class CpuClaim(Struct, frozen=True, kw_only=True):
    """One claim. ``owner``: the pool's name, ``dedicated/UID/CONTAINER`` for a container's own CPUs.

    ``pods``: their uids, of BE work none; ``asked``: CPUs, of a pool for the sum of its pods' requests or its measured
    demand; ``got``: CPUs; ``nodes``: the NUMA nodes of its CPUs; ``bound``: those that were decided for it; ``rule``:
    the reason of the policy that decided; ``against``: what kept it from what it asked, empty where it has that.
    """

    owner: str
    pods: tuple[str, ...] = ()
    asked: int = 0
    got: int = 0
    nodes: tuple[int, ...] = ()
    bound: tuple[int, ...] = ()
    rule: str = ""
    against: str = ""

    @property
    def cut(self) -> bool:
        """Whether it has fewer CPUs than it requested, or others than were decided for it."""
        return bool(self.against)

    @property
    def message(self) -> str:
        """One sentence for people, of a claim that is cut."""
        return f"{self.owner} has {self.got} of {plural(self.asked, 'CPU')}: {self.against}"


def cpu_claims(view: NodeView, pools: Pools) -> tuple[CpuClaim, ...]:
    """The claims of a finished plan: containers with CPUs of their own first, then the pools, BE work last."""
    own = tuple(_own(view, pools))
    # Those without CPUs of their own run in a pool, but their claim is their own.
    owners = frozenset(uid for claim in own for uid in claim.pods)
    owned = frozenset(key.partition("/")[0] for key in pools.dedicated)
    members = derived(view.pods, _members, pools.bound, owned, owners)
    names = sorted({*pools.named, *members} - {DEFAULT})
    shared = tuple(_pool(name, members.get(name, _PoolPods()), view, pools) for name in (*names, DEFAULT))
    cpus = pools.reclaimed
    be = CpuClaim(
        owner="reclaimed",
        asked=min(len(cpus), -(-pools.budget_milli // _CPU)),
        got=len(cpus),
        nodes=_nodes(cpus, view.topology),
        rule=pools.reasons.get("reclaimed", ""),
    )
    return (*own, *shared, be)


def plain(claims: tuple[CpuClaim, ...]) -> list[dict[str, object]]:
    """The same as plain values, for documents."""
    return [{**to_builtins(claim), "cut": claim.cut} for claim in claims]


def _own(view: NodeView, pools: Pools) -> Iterator[CpuClaim]:
    asked: dict[str, int] = {}
    # Where the policy is off no container requests CPUs of its own: all run in the pools.
    off = pools.reasons.get("exclusive") == "off" or "exclusive" in pools.trials
    allocates = view.kubelet.policy is CpuPolicy.NONE and not off
    wanted = allocates or bool(pools.placed)
    for uid, pod in view.pods.items():
        if pod.pod_class is not PodClass.DEDICATED or not wanted:
            continue
        for container in pod.members:
            milli = container.request_milli or 0
            if container.kind in (ContainerKind.APP, ContainerKind.UNKNOWN) and milli >= _CPU:
                asked[f"{uid}/{container.name or container.id}"] = milli
    for key in sorted({*asked, *pools.dedicated}):
        cpus = pools.dedicated.get(key, EMPTY)
        milli = asked.get(key, _CPU * len(cpus))
        owner, uid = f"{_DEDICATED}{key}", key.partition("/")[0]
        bound = view.pods[uid].wish.nodes if uid in view.pods and key in pools.placed else ()
        nodes = _nodes(cpus, view.topology)
        rule = pools.reasons.get(owner, pools.reasons.get("dedicated" if key not in asked else "exclusive", ""))
        against = ""
        if len(cpus) < -(-milli // _CPU):
            taken = _taken(CpuSet(bound) or CpuSet(view.topology.nodes()), owner, view, pools)
            against = f"{rule.removeprefix(REFUSED)}; {taken}"
        elif bound and not set(nodes) <= set(bound):
            against = f"not on NUMA node {CpuSet(bound)}, as decided; {_taken(CpuSet(bound), owner, view, pools)}"
        got = len(cpus)
        if (contradiction := view.owners.get(key)) is not None and cpus:
            got = len((contradiction.kernel & cpus) - contradiction.shared) if not contradiction.runs_elsewhere else 0
            against = contradicted(contradiction, view, pools, ours=key in pools.placed)
        yield CpuClaim(
            owner=owner,
            pods=(uid,),
            asked=-(-milli // _CPU),
            got=got,
            nodes=nodes,
            bound=bound,
            rule=rule,
            against=against,
        )


def contradicted(owner: OwnerCpus, view: NodeView, pools: Pools, *, ours: bool) -> str:
    """What the kernel's files say against a container's exclusive CPUs, and whether BE work avoids it."""
    record = "bypassd's plan" if ours else "the kubelet's checkpoint"
    parts = []
    if owner.kernel != owner.record:
        parts.append(f"{record} gives it CPU {owner.record}, its CPU set file has CPU {owner.kernel or 'none'}")
    if owner.runs_elsewhere:
        beside = owner.kernel & pools.reclaimed
        parts.append(
            f"BE work also runs on CPU {beside}" if beside else f"BE work is kept off CPU {owner.kernel & view.cpus}"
        )
    if owner.beside:
        more = f" and {len(owner.beside) - 1} more" if len(owner.beside) > 1 else ""
        parts.append(f"CPU {owner.shared} is not exclusive: {owner.beside[0]}{more}")
    return "; ".join(parts)


class _PoolPods(NamedTuple):
    """The pods of one pool by uid, and the sum of their requests."""

    pods: tuple[Pod, ...] = ()
    milli: int = 0


def _members(
    table: Mapping[str, Pod], bound: Mapping[str, str], owned: frozenset[str], owners: frozenset[str]
) -> Mapping[str, _PoolPods]:
    """By pool, as `Pools.pool_of` has it: but for BE pods, and for ``owners``, each of which has a claim of its own."""
    result: dict[str, list[Pod]] = {}
    for pod in in_order(table):
        in_default = pod.uid not in owned and pod.pod_class not in (PodClass.SYSTEM, PodClass.RECLAIMED)
        name = bound.get(pod.uid, DEFAULT if in_default else "")
        if name not in ("", "dedicated", "reclaimed") and pod.uid not in owners:
            result.setdefault(name, []).append(pod)
    return {name: _PoolPods(tuple(pods), sum(pod.request_milli for pod in pods)) for name, pods in result.items()}


def _pool(name: str, members: _PoolPods, view: NodeView, pools: Pools) -> CpuClaim:
    pods, cpus = members.pods, pools.named.get(name, pools.shared)
    size = pools.sizes.get(name)
    milli = size.wanted_milli if size is not None else members.milli
    asked = -(-milli // _CPU)
    on = bound_nodes({"": name}).get("", EMPTY)
    against = ""
    in_shared = name != DEFAULT and cpus == pools.shared
    if in_shared:
        taken = _taken(on or CpuSet(view.topology.nodes()), name, view, pools)
        against = f"no CPU left for a pool of its own: runs in the shared pool; {taken}"
    elif len(cpus) < asked:
        against = _taken(on or CpuSet(view.topology.nodes()), name, view, pools)
    else:
        off = [pod for pod in pods if on and pod.wish.nodes and not set(on) & set(pod.wish.nodes)]
        if off:
            decided = CpuSet(node for pod in off for node in pod.wish.nodes)
            against = f"not on NUMA node {decided}, as decided; {_taken(decided, name, view, pools)}"
    return CpuClaim(
        owner=name,
        pods=tuple(pod.uid for pod in pods),
        asked=asked,
        got=0 if in_shared else len(cpus),
        nodes=_nodes(cpus, view.topology),
        bound=tuple(on),
        rule=pools.reasons.get(name, ""),
        against=against,
    )


def _taken(nodes: CpuSet, name: str, view: NodeView, pools: Pools) -> str:
    cpus_there = CpuSet.union(map(view.topology.node_cpus, nodes))
    where = f"NUMA {'node' if len(nodes) == 1 else 'nodes'} {nodes}"
    if not cpus_there:
        return f"{where} has no online CPUs" if len(nodes) == 1 else f"{where} have no online CPUs"
    # The CPUs of pools that run in the shared one are counted once, as those of BE work in mode overlap.
    guests = {key for key, cpus in pools.named.items() if cpus == pools.shared}
    unseen = {name, *guests} if pools.separate else {name, "reclaimed", *guests}
    outside = view.topology.online - view.cpus
    owners: Mapping[str, CpuSet] = {
        owner: part
        for owner, cpus in {**by_pool(pools), "isolated": view.topology.isolated, "outside": outside}.items()
        if owner not in unseen and (part := cpus & cpus_there)
    }
    largest = sorted(owners, key=lambda owner: (-len(owners[owner]), owner))
    parts = [f"{owner} {len(owners[owner])}" for owner in largest[:_SHOWN]]
    if len(largest) > _SHOWN:
        parts.append(
            f"{plural(len(largest) - _SHOWN, 'other')} {sum(len(owners[owner]) for owner in largest[_SHOWN:])}"
        )
    return f"of {plural(len(cpus_there), 'CPU')} on {where}: {', '.join(parts) or 'all are its own'}"


def _nodes(cpus: CpuSet, topology: Topology) -> tuple[int, ...]:
    return tuple(node for node in topology.nodes() if topology.node_cpus(node) & cpus)


def claims_status(claims: tuple[CpuClaim, ...]) -> SourceStatus:
    """Whether every claim got what it requested; if not, which did not, and why."""
    missing = [claim.message for claim in claims if claim.cut]
    detail = first_of(missing, _CUT_SHOWN) or "all claims on CPUs are met"
    return SourceStatus(name=PLACEMENT, ok=not missing, age_s=0.0, detail=detail)

"""reclaimed: BE pods get the CPU that online work leaves, as a CPU set, a quota, or both.

CPU sets are written to the containers' own groups, and the quota to the besteffort directory; `for_pod` and
`reconciler.policies.be_quota` have the exceptions.

Source: Koordinator takes sibling pairs round-robin over sockets and starts from nothing at each step, Katalyst counts
from the highest ids down. bypassd keeps pairs and high ids (interrupts and host work gather on the low ones).
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, final

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.naming import QosClass
from reconciler.placement.chain import checked, loaded
from reconciler.placement.config import PlacementConfig
from reconciler.policies.base import Policy, PolicyConfig, owns_cpus, period_us, quota_us
from reconciler.policies.be_quota import floor_above, own_quota, part_of_pod, parts_of, split
from reconciler.policies.budget import (
    BudgetConfig,
    arriving_milli,
    at_top,
    choose_law,
    cpu_count,
    harm_budget,
    next_budget,
)
from reconciler.policies.overlap import PoolOverlap, overlaps, shares
from reconciler.policies.start_allowance import (
    StartConfig,
    container_weight,
    directory_part,
    next_starts,
    pod_weight,
)
from reconciler.runtime.format import cpu, duration
from state.cpu import StartPlan
from state.model import ContainerKind, CpuPolicy, NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan
from state.topology import CpuKind, Topology

if TYPE_CHECKING:
    from reconciler.placement.allocate import CpuPreference

NAME: Final = "reclaimed"
_BUILT_IN: Final = PlacementConfig()
"""Rules that leave the choice to `choose_cpus`, which follows the built-in ones by itself."""


def choose_cpus(
    count: int,
    candidates: CpuSet,
    held: CpuSet,
    taken: CpuSet,
    topology: Topology,
    *,
    tiers: Sequence[CpuSet] | None = None,
) -> CpuSet:
    """``count`` of ``candidates`` (all, if there are fewer): those ``held`` now as far as possible.

    ``taken`` are the CPUs of others; threads of the same core as one of them are given last. ``tiers`` are disjoint
    sets, the best first; candidates in none of them are last. Left out: efficiency cores, then the others.
    """
    if count >= len(candidates):
        return candidates
    if tiers is None:
        tiers = [cpus for cpus in (topology.kind_cpus(CpuKind.EFFICIENCY),) if cpus]
    rest = candidates
    for tier in tiers:
        rest -= tier
    ranked = [*tiers, rest]
    last = neighbours(candidates, taken, topology)
    first = candidates - last
    # Held CPUs beside a taken one are given up for others: that rule precedes the fewest changes.
    chosen = _fill(min(count, len(first)), first, held, topology, ranked)
    if len(chosen) == count:
        return chosen
    return chosen | _fill(count - len(chosen), last, held, topology, ranked)


class BeCpuRules(NamedTuple):
    """The candidates that a chain of rules leaves, their order for `choose_cpus`, and the message for people."""

    candidates: CpuSet
    tiers: Sequence[CpuSet] | None
    message: str


def by_rules(candidates: CpuSet, topology: Topology, config: PlacementConfig, *, interrupts: CpuSet) -> BeCpuRules:
    """What a site's rules make of the candidates; the ``interrupts`` among them are last.

    Rules that leave none are not followed: BE pods run already, and have to run somewhere.
    """
    plugins = tuple(config.plugins.items())
    cpu_preference = _preference(_SameShape(topology), candidates, plugins, interrupts)
    text = "".join(f"; plug-in {name} failed and was skipped: {error}" for name, error in cpu_preference.errors.items())
    allowed = CpuSet.union(cpu_preference.tiers)
    if not allowed:
        names = ", ".join(cpu_preference.filters)
        return BeCpuRules(candidates, None, f"{text}; rules {names} exclude every CPU and are ignored")
    if allowed != candidates:
        text += f"; CPU {candidates - allowed} excluded by {', '.join(cpu_preference.filters)}"
    return BeCpuRules(allowed, cpu_preference.tiers, text)


@final
class _SameShape:
    """A topology as a key: the same object is the same machine."""

    __slots__ = ("topology",)

    def __init__(self, topology: Topology) -> None:
        self.topology = topology

    # By identity: comparing a thousand CPUs at each plan saves nothing. The key keeps the object: no other has its id.
    def __hash__(self) -> int:
        return id(self.topology)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _SameShape) and other.topology is self.topology


@lru_cache(maxsize=8)
def _preference(
    machine: _SameShape, cpus: CpuSet, rules: tuple[tuple[str, float], ...], interrupts: CpuSet
) -> "CpuPreference":
    """Once for all plans that ask about the same CPUs: budgets change each second, candidates seldom."""
    from reconciler.placement.allocate import preference

    chain = loaded(PlacementConfig(plugins=dict(rules)))
    return preference(cpus, machine.topology, chain, interrupts=interrupts)


def neighbours(cpus: CpuSet, taken: CpuSet, topology: Topology) -> CpuSet:
    """Those of ``cpus`` that share a core with one of ``taken``."""
    # Over the masks: hundreds of cores are compared at each plan, and a set made for each of them costs the most.
    near = 0
    for core in topology.cores():
        if core.mask & taken.mask:
            near |= core.mask
    return CpuSet.from_mask(cpus.mask & near)


def _fill(count: int, pool: CpuSet, held: CpuSet, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    """``count`` CPUs of the pool, the held ones first. Over the masks, as `neighbours`."""
    # A moved task loses its cache, and a v1 cpuset write costs time in proportion to all cpusets of the machine.
    kept = held & pool
    if len(kept) > count:
        return _release(kept, len(kept) - count, topology, tiers)
    missing = count - len(kept)
    if not missing:
        return kept
    free, begun = pool.mask & ~kept.mask, kept.mask
    # The highest first: interrupts and host work gather on the low ones.
    cores = [core.mask for core in reversed(topology.cores()) if core.mask & free]
    # Prefer a core that BE work already has a thread of: its other thread is of little use to other work.
    cores.sort(key=lambda core: not core & begun)
    chosen = kept.mask
    for tier in tiers:
        room = free & tier.mask
        for core in cores:
            usable = core & room
            while usable:
                cpu = 1 << (usable.bit_length() - 1)
                chosen |= cpu
                usable ^= cpu
                missing -= 1
                if not missing:
                    return CpuSet.from_mask(chosen)
    return CpuSet.from_mask(chosen)


def _release(kept: CpuSet, count: int, topology: Topology, tiers: Sequence[CpuSet]) -> CpuSet:
    """Release lone threads first, then whole cores from the lowest: online work gets cores, not halves.

    The last tier is released first.
    """
    left = kept.mask
    cores = [core.mask for core in topology.cores() if core.mask & left]
    # By the threads that BE work has of each; the sort is stable, so the lowest first.
    cores.sort(key=lambda core: (core & left).bit_count())
    for tier in reversed(tiers):
        room = kept.mask & tier.mask
        for core in cores:
            usable = core & room
            while usable:
                cpu = usable & -usable
                left ^= cpu
                usable ^= cpu
                count -= 1
                if not count:
                    return CpuSet.from_mask(left)
    return CpuSet.from_mask(left)


class ReclaimedForm(StrEnum):
    """How the budget is enforced."""

    CPUSET = "cpuset"
    QUOTA = "quota"
    BOTH = "both"


class ReclaimedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """BE pods: how much, in which form, and which CPUs count."""

    budget: BudgetConfig = BudgetConfig()
    start: StartConfig = StartConfig()
    form: Annotated[
        ReclaimedForm,
        Meta(description="cpuset: BE work runs only on its CPUs; quota: its CPU time is limited; both"),
    ] = ReclaimedForm.BOTH
    minimum_cpus: Annotated[int, Meta(ge=1, le=8192, description="minimum CPUs in the BE CPU set, if available")] = 1
    minimum_per_node: Annotated[
        int, Meta(ge=0, le=1024, description="minimum CPUs per NUMA node, for BE work bound to a node")
    ] = 0
    share_reserved: Annotated[bool, Meta(description="count reserved CPUs as capacity and run BE work there")] = False
    share_exclusive: Annotated[
        bool,
        Meta(
            description="count dedicated CPUs as capacity and run BE work there, at the cost of their pods; not where "
            "a pod forbids it or its labels are unknown"
        ),
    ] = False
    besteffort_cpuset: Annotated[
        bool,
        Meta(
            description="also narrow the CPU sets of the besteffort directory and below; only under kubelet policy "
            "none (under static, container starts would fail)"
        ),
    ] = False
    placement: PlacementConfig = PlacementConfig()

    def __post_init__(self) -> None:
        """Load a site's plug-ins. Errors: `InputError` naming the plug-in that cannot be loaded."""
        checked(self.placement)


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: ReclaimedConfig) -> Pools:
    """Set the budget, choose the CPUs, split the quota."""
    confined = config.form is not ReclaimedForm.QUOTA and view.kubelet.reasserts_s is None
    counted, squeezed, alone = _candidates(view, pools, config)
    tiers: Sequence[CpuSet] | None = None
    text = ""
    if confined and squeezed is None and (config.placement != _BUILT_IN or view.irq_cpus):
        counted, tiers, text = by_rules(counted, view.topology, config.placement, interrupts=view.irq_cpus)
    was_confined = previous is not None and previous.confined and confined
    # Never in the pods' directories; the others only once it was kept off them.
    outside = view.topology.online - (counted if was_confined else pools.online_cpus)
    # CPUs that only BE work uses may be filled: no online work on them needs room.
    law = replace(config.budget, limit_percent=100) if pools.separate and squeezed is None else config.budget
    arriving = arriving_milli(view, lambda pod, container: owns_cpus(pod, container, pools), law)
    movable = confined and squeezed is None
    # Without a set of its own BE work is bounded by a quota, whatever is configured.
    bounded = config.form is not ReclaimedForm.CPUSET or not movable
    # A reserve is a share of CPU time, which no CPU set keeps.
    timed = config.form is ReclaimedForm.QUOTA or law.harm.reserve_percent > 0
    # A CPU set has at least these CPUs, so no ceiling below them has any effect.
    least = 0 if timed else 1000 * (max(1, config.minimum_cpus) if movable else len(counted))
    choice = choose_law(view, pools, counted, squeezed if alone else None, law, least_milli=least)
    ceiling = pools.budget_milli
    if choice.reading is not None:
        budget = harm_budget(view, choice, previous, law, outside=outside, ceiling=ceiling, arriving=arriving)
        # BE work that yields waits by itself; after each pause of a quota it has a claim that it had used up before.
        bounded = timed or (bounded and choice.terms is not None and ceiling < choice.terms.top_milli)
    else:
        budget = next_budget(view, counted, previous, law, outside=outside, ceiling=ceiling, arriving=arriving)
    unlimited = at_top(choice, budget, law)
    bounded = bounded and not unlimited
    held = previous.reclaimed & counted if previous is not None else EMPTY
    count = len(counted)
    if not unlimited:
        # The harm law's ceiling is a number of whole CPUs that does not hover: the last of them is not kept back.
        decided = not bounded and choice.reading is not None and budget.milli == choice.reading.ceiling_milli
        held_back = 0 if decided else len(held)
        count = cpu_count(budget.milli, held_back, count, config.minimum_cpus, bounded=bounded)
    # Siblings of CPUs that are shared on purpose are no longer worth avoiding.
    taken = (pools.reserved | pools.dedicated_cpus) - counted
    reclaimed = EMPTY
    if confined and squeezed is None and pools.named and not pools.separate:
        pool_overlaps = overlaps(view, pools, counted)
        for key, number in shares(count, pool_overlaps, held, view.topology.threads).items():
            if number:
                cpus = pool_overlaps[key].cpus
                reclaimed |= choose_cpus(number, cpus, held & cpus, taken, view.topology, tiers=tiers)
        text += _spread(pool_overlaps, reclaimed)
    else:
        reclaimed = choose_cpus(count, counted, held, taken, view.topology, tiers=tiers)
    for node in view.topology.nodes() if config.minimum_per_node else ():
        cpus = view.topology.node_cpus(node) & counted
        if len(reclaimed & cpus) < config.minimum_per_node:
            kept = (held | reclaimed) & cpus
            reclaimed |= choose_cpus(config.minimum_per_node, cpus, kept, taken, view.topology, tiers=tiers)
    reasons = dict(pools.reasons)
    reasons["budget"] = budget.reason
    reasons["law"] = choice.reason
    reasons["reclaimed"] = _reason(reclaimed, counted, taken, squeezed, view, bounded=bounded) + text
    reasons["cpuset"] = _why_cpuset(confined, config, view)
    quota: dict[str, int] | None = None
    if bounded:
        quota, reasons["quota"] = split(budget.milli, view, previous.quota_milli if previous is not None else None)
        if config.form is ReclaimedForm.CPUSET:
            reasons["quota"] += "; not configured, but required: the CPU set cannot limit BE work here"
    elif unlimited:
        reasons["quota"] = "not used: BE work may have all idle CPU"
    else:
        reasons["quota"] = "not used: the CPU set limits BE work"
    return replace(
        pools,
        reclaimed=reclaimed,
        budget_milli=budget.milli,
        budget_at=budget.at,
        unknown_since=budget.unknown_since,
        confined=confined,
        quota_milli=quota,
        harm=choice.terms,
        reasons=reasons,
    )


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: ReclaimedConfig) -> NodePlan:
    """Which BE pods start or end with an allowance in addition to the budget."""
    before = previous.starts if previous is not None else StartPlan()
    starts = next_starts(view, before, config.start)
    return replace(plan, starts=starts)


def parents(view: NodeView, plan: NodePlan, config: ReclaimedConfig) -> list[Setting]:
    """The besteffort directory's quota, and its CPU set where that is configured."""
    pools = plan.pools
    settings: list[Setting] = []
    share = (pools.quota_milli or {}).get(view.besteffort)
    if share is None and pools.quota_milli is not None and floor_above(pools.budget_milli, view) is not None:
        # v1 refuses the budget: a tenant has made a group with a larger quota inside a container. The least quota that
        # the kernel takes here is written; the pods have quotas of their own besides it.
        share = pools.budget_milli
    if share is not None:
        part = directory_part(share, view, plan.starts)
        reason = f"BE quota {cpu(share)}" if part == share else f"BE quota {cpu(share)}, {cpu(part)} while a pod starts"
        settings.append(
            _setting(view.besteffort, "cpu.quota", quota_us(part, period_us(view, view.besteffort)), reason)
        )
    if config.besteffort_cpuset and pools.confined:
        settings.append(_setting(view.besteffort, "cpu.set", pools.reclaimed, "equal to the BE pool"))
    return settings


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: ReclaimedConfig) -> list[Setting]:
    """A BE pod's containers: CPU set, least weight, and a part of the budget where no directory bounds it."""
    pools = plan.pools
    if pod.pod_class is not PodClass.RECLAIMED:
        return []
    settings: list[Setting] = []

    def want(path: str, knob: str, value: CpuSet | int, reason: str, cid: str | None = None) -> None:
        settings.append(_setting(path, knob, value, reason, uid=pod.uid, cid=cid))

    narrowed = narrows_besteffort(view, pools, config) and pod.qos is QosClass.BESTEFFORT
    if narrowed:
        want(pod.group.path, "cpu.set", pools.reclaimed, "required by the narrowed besteffort directory")
    want(pod.group.path, "cpu.weight", *pod_weight(pod, view, plan.starts))
    pool, whose = pool_on_node(pod, view, pools)
    if pod.sandbox is not None:
        whole = f"{whose}; {pod.sandbox}: the pod as a whole"
        for path, cid in ((pod.group.path, None), *((inner.group.path, inner.id) for inner in pod.containers)):
            if pools.confined:
                want(path, "cpu.set", pool, whole, cid)
        if (part := part_of_pod(pod, view, pools)) is not None:
            value = quota_us(part, period_us(view, pod.group.path))
            want(pod.group.path, "cpu.quota", value, f"share of the BE budget: {cpu(part)}")
        return settings
    parts = parts_of(pod, view, pools)
    for container in pod.containers:
        path, cid = container.group.path, container.id
        if owns_cpus(pod, container, pools):
            continue  # the kubelet's exclusive CPUs are adopted, with any label
        if container.kind is ContainerKind.SANDBOX:
            if narrowed:
                want(path, "cpu.set", pools.reclaimed, "required by the narrowed besteffort directory", cid)
            continue
        # On the containers' own groups: the kubelet rewrites these rarely, and that is noticed.
        if pools.confined:
            want(path, "cpu.set", pool, whose, cid)
        # A kubelet that rewrites everything of a container every few seconds rewrites its shares, too.
        if view.kubelet.reasserts_s is None:
            want(path, "cpu.weight", *container_weight(pod, container, view), cid)
        if cid in parts:
            part = max(parts[cid], plan.starts.floor_milli) if pod.uid in plan.starts.pods else parts[cid]
            value = own_quota(part, container, view)
            want(path, "cpu.quota", value, f"share of the BE budget: {cpu(part)}", cid)
    return settings


def narrows_besteffort(view: NodeView, pools: Pools, config: ReclaimedConfig) -> bool:
    """True when the besteffort directory's own CPU set is narrowed, so that all below it must be too."""
    return (
        config.besteffort_cpuset
        and pools.confined
        and view.kubelet.policy is CpuPolicy.NONE
        and (pools.quota_milli is None or not view.online_in_besteffort)
    )


class _Candidates(NamedTuple):
    """CPUs for BE work. ``squeezed``: why it has to use others' CPUs; None: it does not.

    ``alone``: these are CPUs on which the waiting of online pods does not show what BE work costs their owners.
    """

    cpus: CpuSet
    squeezed: str | None = None
    alone: bool = False


def _candidates(view: NodeView, pools: Pools, config: ReclaimedConfig) -> _Candidates:
    """The CPUs that BE work may use; if there are none, the shared ones that it must use, with a reason."""
    online, kubelet = pools.online_cpus, view.kubelet
    refused = _closed_to_be(view, pools)
    dedicated = refused if config.share_exclusive else pools.dedicated_cpus
    usable = online - dedicated - pools.interrupt
    if kubelet.policy is not CpuPolicy.NONE and kubelet.default_cpus & online:
        # CPUs in neither the default set nor an entry are about to be given to a container: one allocation is two
        # renames of the checkpoint, and the first only takes them away.
        shown = pools.dedicated_cpus - refused if config.share_exclusive else EMPTY
        usable &= kubelet.default_cpus | shown
    # Tasks on isolated CPUs are not balanced: BE work would pile up on one of them.
    usable = (usable - view.topology.isolated) or usable
    usable = _without_owners(usable, view, pools, config)
    counted = usable if config.share_reserved else usable - pools.reserved
    if pools.separate:
        theirs = CpuSet.union((pools.shared, *pools.named.values()))
        counted = (counted - theirs) or counted
    if not config.share_exclusive:
        # Last: no BE work on CPUs of online pools, on reserved or isolated ones for the sake of such a node.
        counted = (counted - _exclusive_nodes(view, pools)) or counted
    if counted:
        return _Candidates(counted)
    if usable:
        # Where online pods run there, too, they wait for the same CPUs as the system does.
        beside = usable & CpuSet.union((pools.shared, *pools.named.values()))
        return _Candidates(usable, f"only reserved CPUs left: BE shares CPU {usable} with the system", not beside)
    everything = (online - pools.dedicated_cpus) or (kubelet.default_cpus & online) or (online - refused) or online
    return _Candidates(everything, f"all CPUs are dedicated: BE shares CPU {everything}", alone=True)


def _without_owners(cpus: CpuSet, view: NodeView, pools: Pools, config: ReclaimedConfig) -> CpuSet:
    """Without the CPUs where owners of exclusive CPUs run against the record; the smallest set first, some CPU is left.

    With ``share_exclusive`` of the owners that refuse BE work only.
    """
    # The record's CPUs are excluded already.
    for key in sorted(
        pools.elsewhere.keys() & pools.dedicated.keys(), key=lambda key: (len(pools.elsewhere[key]), key)
    ):
        pod = view.pods.get(key.partition("/")[0])
        if not config.share_exclusive or pod is None or pod.wish.lends is False:
            cpus = (cpus - pools.elsewhere[key]) or cpus
    return cpus


def _exclusive_nodes(view: NodeView, pools: Pools) -> CpuSet:
    """All CPUs of the NUMA nodes of containers that want these nodes to themselves.

    Source: Katalyst's ``numa_exclusive``. There BE work may run on the unused CPUs of such a node, as on all dedicated
    CPUs; here both need ``share_exclusive``.
    """
    topology, nodes = view.topology, set[int]()
    for key, cpus in pools.dedicated.items():
        pod = view.pods.get(key.partition("/")[0])
        if pod is not None and pod.wish.numa_exclusive:
            nodes |= {topology.node_of(number) for number in cpus & topology.online}
    return CpuSet.union(map(topology.node_cpus, sorted(nodes)))


def _closed_to_be(view: NodeView, pools: Pools) -> CpuSet:
    """The dedicated CPUs whose pods refuse BE work, or may: their labels are not known yet.

    Source: Koordinator's BE pods run on an LSR pod's CPUs and never on an LSE pod's. Katalyst's dedicated pods do not
    specify it, and there BE work uses their CPUs.
    """
    masks = 0
    for key, cpus in pools.dedicated.items():
        pod = view.pods.get(key.partition("/")[0])
        if pod is not None and (pod.wish.lends is False or not pod.classification.certain):
            masks |= cpus.mask
    return CpuSet.from_mask(masks)


def pool_on_node(pod: Pod, view: NodeView, pools: Pools) -> tuple[CpuSet, str]:
    """The pool as one pod gets it: the part on its NUMA nodes, where it is bound to some and there is such a part."""
    if pod.wish.numa_binding and pod.wish.nodes:
        nodes = CpuSet(pod.wish.nodes)
        cpus = pools.reclaimed & CpuSet.union(map(view.topology.node_cpus, nodes))
        if cpus:
            return cpus, f"BE pool on NUMA node {nodes}"
    return pools.reclaimed, "BE pool"


def _reason(
    reclaimed: CpuSet, counted: CpuSet, taken: CpuSet, squeezed: str | None, view: NodeView, *, bounded: bool
) -> str:
    if squeezed is not None:
        return f"{squeezed}, limited by quota" if bounded else squeezed
    reason = f"BE runs on CPU {reclaimed} ({len(reclaimed)} of {len(counted)} eligible)"
    beside = neighbours(reclaimed, taken, view.topology)
    if beside:
        reason += f"; CPU {beside} has a dedicated or reserved sibling: no other was free"
    return reason


def _spread(pool_overlaps: Mapping[str, PoolOverlap], reclaimed: CpuSet) -> str:
    """On how many CPUs of each pool BE work runs."""
    parts = [
        f"{len(part)} of {key or 'others'}"
        for key, overlap in pool_overlaps.items()
        if (part := overlap.cpus & reclaimed)
    ]
    return f"; by what each pool can spare: {', '.join(parts)}"


def _why_cpuset(confined: bool, config: ReclaimedConfig, view: NodeView) -> str:
    if confined:
        return "BE containers are limited to the BE pool"
    if config.form is ReclaimedForm.QUOTA:
        return "not used: quota limits BE work (form: quota)"
    return (
        f"not used: this kubelet rewrites every container's CPU set every {duration(view.kubelet.reasserts_s)} "
        "(static CPU manager up to 1.21); BE is limited by quota only"
    )


def _setting(
    path: str, knob: str, value: CpuSet | int, reason: str, *, uid: str | None = None, cid: str | None = None
) -> Setting:
    return Setting(path=path, knob=knob, value=value, policy=NAME, reason=reason, pod_uid=uid, container_id=cid)


POLICY = Policy(
    name=NAME,
    summary="BE pods get the CPU that online pods do not use",
    config_type=ReclaimedConfig,
    precedence=40,
    counts_in_dry_run=True,
    decide_node=decide_node,
    decide_resources=decide_resources,
    parents=parents,
    pod=for_pod,
)

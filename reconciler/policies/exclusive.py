"""exclusive: under the kubelet's policy none, bypassd gives dedicated pods CPUs of their own, and they keep them.

The policy does what the kubelet's static CPU manager does, where that is switched off, and for pods that it would not
serve: by label, of any QoS class, with or without NUMA binding. Under the static policy the kubelet decides, and its
result is adopted (`dedicated`).

Source: kubelet CPU manager, static policy and its options; Katalyst, dedicated_cores (where a pod without NUMA binding
is an error).
"""

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import EMPTY, CpuSet
from reconciler.placement.chain import checked, loaded
from reconciler.placement.claims import REFUSED
from reconciler.placement.config import PlacementConfig
from reconciler.placement.demand import CpuDemand
from reconciler.placement.floors import PoolFloors
from reconciler.policies.base import OWN_CPUS, Policy, PolicyConfig, placed_cpus, setting_of, whole_pod
from state.cpu import TopologyPolicy
from state.model import Container, ContainerKind, CpuPolicy, NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan
from state.pod_index import index_of
from state.topology import Topology

NAME: Final = OWN_CPUS
INIT_KEY: Final = "(init)"
"""The key of a pod's init containers: no container can be called so."""
_CPU: Final = 1000
_POOL: Final = "dedicated/"
"""Before a demand's key: its part of the pools' reasons, by the pool's name."""
_FRESH_S: Final = 60.0
"""Older figures of the nodes' memory say nothing about a container that starts now."""

Interface = Annotated[str, Meta(pattern=r"^[^\s/]{1,64}$")]


if TYPE_CHECKING:
    from reconciler.placement.resource_hints import NumaFreeMemory


class ExclusiveConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CPUs of their own for dedicated pods. Options as the kubelet's static policy has them; a pod may ask for more."""

    keep_cpus: Annotated[
        int,
        Meta(ge=1, le=8192, description="CPUs never allocated exclusively, besides the reserved ones"),
    ] = 1
    full_cores: Annotated[bool, Meta(description="whole physical cores only (full-pcpus-only)")] = False
    distribute: Annotated[
        bool, Meta(description="spread a container that needs several NUMA nodes evenly (distribute-cpus-across-numa)")
    ] = False
    align_socket: Annotated[bool, Meta(description="prefer one socket over one NUMA node (align-by-socket)")] = False
    prefer_l3: Annotated[
        bool, Meta(description="prefer CPUs under one L3 cache (prefer-align-cpus-by-uncorecache)")
    ] = True
    topology_policy: Annotated[
        TopologyPolicy,
        Meta(description="the kubelet's topology manager policy for new containers; a rejection is only reported"),
    ] = TopologyPolicy.BEST_EFFORT
    avoid_irqs: Annotated[
        tuple[Interface, ...],
        Meta(description="network interfaces (names or patterns such as ens*) whose interrupt CPUs are allocated last"),
    ] = ()
    placement: PlacementConfig = PlacementConfig()

    # Ended containers whose CPUs a restart must not take for free; the oldest are forgotten.
    remember: ClassVar[int] = 256

    def __post_init__(self) -> None:
        """Load a site's plug-ins. Errors: `InputError` naming the plug-in that cannot be loaded."""
        checked(self.placement)


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: ExclusiveConfig) -> Pools:
    """Choose CPUs for the containers that are to own some; out of what is shared until now."""
    held = _held(previous)
    if not _may_allocate(view, previous):
        why = f"the kubelet's CPU manager policy is {view.kubelet.policy}: it allocates exclusive CPUs itself"
        return _without(pools, _remembered(held, {}, config), why)
    placed = previous.placed_by_pod if previous is not None else {}
    dedicated = {pod.uid: pod for pod in index_of(view.pods).dedicated}
    # A pod of another class has demands only while it has CPUs and its class is not certain.
    concerned = dedicated | {uid: view.pods[uid] for uid in placed if uid in view.pods}
    demands = [
        demand
        for uid, pod in sorted(concerned.items())
        for demand in _with_scheduler_cpus(pod, list(_of_pod(pod, held, placed.get(uid, ()), config)), view.topology)
    ]
    if demands or dedicated:
        # For the first such pod, while it has only its pause container; see `placement.config`.
        from reconciler.placement.binding import choose
    if not demands:
        return _without(pools, _remembered(held, {}, config), "no pod requests exclusive CPUs")
    held_now = CpuSet.union(demand.held for demand in demands)
    # The scheduler does not balance over isolated CPUs. Those that a container has already are its own.
    free = ((pools.shared - view.topology.isolated) or pools.shared) | held_now & pools.shared
    gone = CpuSet.union(cpus for key, cpus in held.items() if key not in {demand.key for demand in demands})
    room = PoolFloors(demands, free, view, (pools, previous), keep=config.keep_cpus)
    choice = choose(
        demands,
        free,
        view.topology,
        loaded(config.placement),
        policy=config.topology_policy,
        wishes={uid: pod.wish for uid, pod in view.pods.items()},
        affinity=view.kubelet.affinity,
        # Not in the first pass: running containers already have their memory, and would be counted twice.
        memory=_memory(view) if previous is not None else None,
        interrupts=view.irq_cpus,
        remembered=gone,
        floors=room,
    )
    allocation = choice.allocation
    reasons = {**pools.reasons, NAME: _reason(allocation.refused, allocation.errors)}
    if view.irq_cpus:
        reasons[NAME] += f"; CPU {view.irq_cpus} (network interrupts) is allocated last"
    for key, cpus in allocation.cpus.items():
        # The reason of the choice is given once; later passes report the CPUs as kept.
        kept = previous is not None and previous.dedicated.get(key) == cpus
        why = (previous.reasons.get(f"{_POOL}{key}") if kept and previous is not None else None) or choice.reasons[key]
        reasons[f"{_POOL}{key}"] = why or "exclusive CPUs"
    reasons |= {f"{_POOL}{key}": f"{REFUSED}{why}" for key, why in allocation.refused.items()}
    return replace(
        pools,
        dedicated=dict(sorted({**pools.dedicated, **allocation.cpus}.items())),
        placed=tuple(allocation.cpus),
        remembered=_remembered(held, allocation.cpus, config),
        shared=pools.shared - allocation.owned,
        bound=choice.seats,
        reasons=reasons,
    )


def _may_allocate(view: NodeView, previous: Pools | None) -> bool:
    """Under policy none; and while the kubelet's policy cannot be read, for as long as bypassd's CPUs are assigned."""
    kubelet = view.kubelet
    if kubelet.policy is CpuPolicy.UNKNOWN or kubelet.held:
        return previous is not None and bool(previous.placed)
    return kubelet.policy is CpuPolicy.NONE


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: ExclusiveConfig) -> list[Setting]:
    """The CPU sets of a pod that has CPUs from us."""
    if pod.sandbox is not None:
        whole = CpuSet.union(plan.pools.dedicated[key] for key in plan.pools.placed_by_pod.get(pod.uid, ()))
        reason = "exclusive CPUs of its containers"
        return whole_pod(pod, "cpu.set", whole, policy=NAME, reason=reason) if whole else []
    settings = []
    for container in pod.containers:
        cpus = placed_cpus(pod, container, plan.pools)
        if cpus:
            own = f"{pod.uid}/{container.name or container.id}"
            reason = plan.pools.reasons.get(f"{_POOL}{own}", "runs on its pod's exclusive CPUs")
            settings.append(setting_of(pod, container, "cpu.set", cpus, policy=NAME, reason=reason))
    return settings


def whole_cpus(container: Container) -> int:
    """How many CPUs a container is to own: its request, rounded up; 0 for less than one CPU, or an unknown one.

    A container with 0 follows its pod's largest one (`reconciler.policies.base.placed_cpus`).
    """
    milli = container.request_milli
    return -(-milli // _CPU) if milli is not None and milli >= _CPU else 0


def _held(previous: Pools | None) -> dict[str, CpuSet]:
    """Previous assignments: first of removed containers, then of those that existed in the last pass.

    They are kept over restarts of a container, of the agent (the pools are in the store) and of the node.
    """
    if previous is None:
        return {}
    return {**previous.remembered, **{key: previous.dedicated[key] for key in previous.placed}}


def _of_pod(
    pod: Pod, held: Mapping[str, CpuSet], placed: tuple[str, ...], config: ExclusiveConfig
) -> Iterator[CpuDemand]:
    """The demands of one pod; a container between two runs, and a pod without metadata, keeps what it had."""
    prefix = f"{pod.uid}/"
    init_key = prefix + INIT_KEY
    before = {key: held[key] for key in placed}
    if pod.pod_class is not PodClass.DEDICATED:
        if not pod.classification.certain:
            for key, cpus in before.items():
                yield _demand(pod, key, len(cpus), cpus, config)
        return
    # Read off the containers that exist now: an init container's end frees nothing that its pod's app containers run on
    # (kubernetes 105114), and nothing leaks.
    apps = {
        f"{prefix}{container.name or container.id}": whole_cpus(container)
        for container in pod.members
        if container.kind in (ContainerKind.APP, ContainerKind.UNKNOWN)
    }
    counts = {key: count for key, count in apps.items() if count}
    absent = {key: len(cpus) for key, cpus in before.items() if key != init_key and key not in apps}
    # A new container takes over from an absent one of its pod. Without the kubelet's list an init container looks like
    # any other, and would keep its CPUs for as long as the pod exists. One that was only between two runs gets its old
    # CPUs as far as they are free then.
    heirs = dict(zip(_largest_first(counts, held), _largest_first(absent), strict=False))
    counts |= {key: count for key, count in absent.items() if key not in heirs.values()}
    if counts:
        largest = min(counts, key=lambda key: (-counts[key], key))
        for key in sorted(counts):
            # The init containers' CPUs pass to the app container, which has not started yet.
            inherited = held.get(init_key, EMPTY) if key == largest else EMPTY
            inherited = before[heirs[key]] if key in heirs else inherited
            yield _demand(pod, key, counts[key], held.get(key) or inherited, config)
        return
    init = max((whole_cpus(container) for container in pod.members if container.kind is ContainerKind.INIT), default=0)
    if init:
        yield _demand(pod, init_key, init, held.get(init_key, EMPTY), config)


def _with_scheduler_cpus(pod: Pod, demands: list[CpuDemand], topology: Topology) -> list[CpuDemand]:
    """The demands with their parts of the CPUs that a scheduler chose for the pod, core by core.

    None has more than it requests, whatever the annotation says. What one of them has already remains its own.
    """
    cpus = pod.wish.cpus
    if not cpus:
        return demands
    left = cpus - CpuSet.union(demand.held for demand in demands)
    order = [number for core in topology.cores() for number in core if number in left]
    # Offline ones too: a choice that has one cannot be followed, which is reported.
    order += sorted(left - CpuSet(order))
    decided: list[CpuDemand] = []
    for demand in demands:
        part = sorted(demand.held & cpus)[: demand.count]
        missing = demand.count - len(part)
        part += order[:missing]
        order = order[missing:]
        decided.append(replace(demand, explicit=CpuSet(part) or None))
    return decided


def _largest_first(counts: Mapping[str, int], but: Collection[str] = ()) -> list[str]:
    return sorted((key for key in counts if key not in but), key=lambda key: (-counts[key], key))


def _memory(view: NodeView) -> "NumaFreeMemory | None":
    """The nodes' memory as read, and the containers' requests; None where it decides nothing."""
    known = view.numa_memory
    if known is None or known.age_s is None or known.age_s > _FRESH_S:
        return None
    total: dict[int, int] = {}
    for node in view.topology.nodes():
        amount = view.topology.node(node).memory_bytes
        if amount is None or node not in known.free:
            return None
        total[node] = amount
    requests: dict[str, int] = {}
    for pod in index_of(view.pods).dedicated:
        for container in pod.members:
            number = container.requests.memory_bytes or 0
            key = f"{pod.uid}/{INIT_KEY if container.kind is ContainerKind.INIT else container.name or container.id}"
            requests[key] = max(requests.get(key, 0), number)  # init containers run one after another
    from reconciler.placement.resource_hints import NumaFreeMemory  # see `placement.config`

    return NumaFreeMemory(total=total, free={node: known.free[node] for node in total}, requests=requests)


def _demand(pod: Pod, key: str, count: int, held: CpuSet, config: ExclusiveConfig) -> CpuDemand:
    wish = pod.wish
    full_cores = config.full_cores if wish.full_cores is None else wish.full_cores
    return CpuDemand(
        key=key,
        count=count,
        nodes=wish.nodes,
        numa_binding=wish.numa_binding,
        numa_exclusive=wish.numa_exclusive,
        full_cores=full_cores,
        distribute=config.distribute if wish.distribute is None else wish.distribute,
        align_socket=config.align_socket if wish.align_socket is None else wish.align_socket,
        prefer_l3=config.prefer_l3,
        spread_cores=bool(wish.spread_cores) and not full_cores,
        strict_cores=wish.strict_cores,
        apart=wish.apart,
        held=held,
        priority=pod.priority or 0,
        pod_class=pod.pod_class,
    )


def _reason(refused: Mapping[str, str], errors: Mapping[str, str]) -> str:
    """The reason as text for people, most severe first."""
    lines = [f"plug-in {name} failed and was skipped: {error}" for name, error in errors.items()]
    lines += [f"{key} did not get the CPUs it requests: {why}" for key, why in refused.items()]
    return "; ".join(lines) or "all CPU requests fulfilled"


def _remembered(held: Mapping[str, CpuSet], now: Mapping[str, CpuSet], config: ExclusiveConfig) -> dict[str, CpuSet]:
    """The newest removed containers, with their CPUs that have no owner since; a container that returns is dropped."""
    owned = CpuSet.union(now.values())
    gone = [
        (key, cpus - owned)
        for key, cpus in held.items()
        if key not in now and not key.endswith(f"/{INIT_KEY}") and not cpus <= owned
    ]
    # gone[-0:] would be all of them.
    return dict(gone[-config.remember :]) if config.remember else {}


def _without(pools: Pools, remembered: Mapping[str, CpuSet], reason: str) -> Pools:
    return replace(pools, placed=(), remembered=remembered, reasons={**pools.reasons, NAME: reason})


POLICY = Policy(
    name=NAME,
    summary="exclusive CPUs for dedicated pods under the kubelet's policy none",
    config_type=ExclusiveConfig,
    precedence=8,
    decide_node=decide_node,
    pod=for_pod,
)

"""shared: online pods share what is neither reserved nor owned, in one pool, or in several that pods name.

Nothing is written for the default pool as long as it is all that is left by the kubelet: its pods remain where the
kubelet put them, and the limits of BE work protect them. They are confined themselves where they would disturb others:
CPUs that bypassd gave to a single container, named pools, interrupt CPUs, or a reclaimed pool that is to be separate.

Sizes: a named pool has its pods' requests, their measured needs, or a fixed number. What is left is divided over the
pools (mode overlap: BE work runs on CPUs of online pools), or BE work's alone (mode separate: no CPU of theirs).

Source: Katalyst's share pools, NUMA-bound share pools (SNB) and its two modes of the reclaim pool.
"""

from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Final, NamedTuple

from msgspec import Meta
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.isolation import SIGNALS as ISOLATION_SIGNALS
from reconciler.placement.isolation import IsolatedPods, IsolationConfig, admit, isolation_pool, observe
from reconciler.placement.pool_members import DEFAULT, PoolMembers, members, owners_of, requests_of
from reconciler.placement.provision import ProvisionConfig, ProvisionPolicy, demand, with_experience
from reconciler.placement.provision import signals_of as provision_signals
from reconciler.placement.seats import cpus_of
from reconciler.placement.sizes import SizeConfig, fit, granted, regulate
from reconciler.policies.base import Policy, PolicyConfig, owns_cpus, setting_of, whole_pod
from reconciler.runtime.format import cpu, duration, plural
from state.cpu import PodIsolation, PoolSize, PoolTerms
from state.model import NodeView, Pod, PodClass, Pools, Setting
from state.plan import NodePlan
from state.pod_index import derived

NAME: Final = "shared"
LIMITED_TO_IT: Final = "; online pods are limited to it"
_CPU: Final = 1000
_SYSTEM: Final = "system/"
_SHOWN: Final = 4
"""Pods named in one message."""


class ConfineMode(StrEnum):
    """Whether online pods of the default pool get a CPU set."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class SharedPoolMode(StrEnum):
    """Whether BE work runs on CPUs of online pools."""

    OVERLAP = "overlap"
    SEPARATE = "separate"


class PoolSizing(StrEnum):
    REQUEST = "request"
    MEASURED = "measured"


class SharedConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pools of online pods."""

    mode: Annotated[
        SharedPoolMode,
        Meta(description="overlap: BE runs on online pools' CPUs; separate: on what sized ones leave"),
    ] = SharedPoolMode.OVERLAP
    confine: Annotated[
        ConfineMode,
        Meta(
            description="write a CPU set for online pods: auto (only if others would suffer), always, never "
            "(disables named pools)"
        ),
    ] = ConfineMode.AUTO
    sizing: Annotated[PoolSizing, Meta(description="size pools by requests, or by measured demand")] = (
        PoolSizing.REQUEST
    )
    fixed: Annotated[
        Mapping[str, int],
        Meta(description="fixed size of a pool by name, such as shared/batch or shared"),
    ] = {}
    expand: Annotated[
        bool,
        Meta(
            description="mode overlap: divide unrequested CPUs among all pools by request; false: the default pool "
            "has them"
        ),
    ] = True
    leave_cpus: Annotated[int, Meta(ge=1, le=8192, description="mode separate: CPUs kept for BE work")] = 1
    size: SizeConfig = SizeConfig()
    provision: ProvisionConfig = ProvisionConfig()
    isolation: IsolationConfig = IsolationConfig()

    def __post_init__(self) -> None:
        """Refuse sizes of nothing."""
        for name, cpus in self.fixed.items():
            if cpus < 1:
                raise ValueError(f"fixed.{name}: {cpus} CPUs; expected at least 1")

    @property
    def measured(self) -> bool:
        """Whether the CPU use of online pods is needed."""
        return self.sizing is PoolSizing.MEASURED

    @property
    def signals(self) -> frozenset[str]:
        """The signals of online pods that are needed here; the interference monitor measures them."""
        if not self.enabled:
            return frozenset()
        sizes = provision_signals(self.provision) if self.measured else frozenset[str]()
        return sizes | (ISOLATION_SIGNALS if self.isolation.enabled else frozenset())


def announce(view: NodeView, pools: Pools, previous: Pools | None, config: SharedConfig) -> Pools:
    """What the pools will need besides their pods' requests: the policies before leave it to them."""
    if _obstacle(view, config) is not None:
        return replace(pools, terms=PoolTerms(own=False))
    sizes = dict[str, int]()
    if config.measured and previous is not None:
        sizes = {key: size.asked for key, size in previous.sizes.items() if size.wanted_milli >= _CPU}
    leave = config.leave_cpus if config.mode is SharedPoolMode.SEPARATE else 0
    return replace(pools, terms=PoolTerms(cpus={**sizes, **config.fixed}, leave=leave))


def decide_node(view: NodeView, pools: Pools, previous: Pools | None, config: SharedConfig) -> Pools:
    """Divide what is left among the online pools."""
    # Online pods have to run somewhere.
    if not pools.shared:
        everything = pools.online_cpus
        shared = (view.kubelet.default_cpus & everything) or (everything - pools.dedicated_cpus) or everything
        reason = f"all CPUs are reserved or dedicated; online pods run on CPU {shared} with the system"
        return replace(pools, shared=shared, bound={}, reasons={**pools.reasons, NAME: reason})
    # The scheduler does not balance over isolated CPUs: a pool of many would pile up on one of them.
    pools = replace(pools, shared=(pools.shared - view.topology.isolated) or pools.shared)
    barred = _obstacle(view, config)
    # Of a single CPU no part is BE work's own.
    separate = config.mode is SharedPoolMode.SEPARATE and barred is None and len(pools.shared) > 1
    owners = owners_of(pools.dedicated, view)
    # A pod that waits for a node got one when the dedicated containers took theirs, if any of those was new.
    seats = pools.bound or (previous.bound if previous is not None else {})
    result = derived(view.pods, members, pools.shared, view.topology, seats, owners)
    reasons = dict(pools.reasons)
    states: Mapping[str, PodIsolation] = {}
    isolated: Mapping[str, int] = {}
    if barred is not None:
        # Without CPU sets there is only the default pool, in which all online pods run.
        result = PoolMembers({DEFAULT: result.pods[DEFAULT]}, {}, {})
    elif config.isolation.enabled:
        states, admitted = _isolate(result, view, pools, previous, config)
        isolated = {isolation_pool(uid): cpus for uid, cpus in admitted.sizes.items()}
        result = _with_isolated(result, admitted.sizes)
        reasons["isolation"] = _isolation_text(admitted)
    named: Mapping[str, CpuSet] = {}
    shared, sizes = pools.shared, dict[str, PoolSize]()
    if len(result.pods) > 1 or separate:
        sets, sizes, texts = _divide(result, view, (pools, previous), config, isolated, separate=separate)
        shared = sets.pop(DEFAULT)
        # Where nothing is left BE work shares with online pods after all, within its budget.
        separate = separate and bool(pools.shared - shared - CpuSet.union(sets.values()))
        named = sets
        reasons |= texts
    confined = barred is None and (
        config.confine is ConfineMode.ALWAYS or bool(named or separate or pools.placed or pools.interrupt)
    )
    reasons.setdefault(NAME, "neither reserved nor dedicated")
    reasons[NAME] += LIMITED_TO_IT if confined else f"; online pods keep {barred or _KEPT}"
    return replace(
        pools,
        shared=shared,
        named=named,
        bound=result.bound,
        sizes=sizes,
        isolation=states,
        separate=separate,
        confine_shared=confined,
        reasons=reasons,
    )


_KEPT: Final = "the CPU set from the kubelet"


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: SharedConfig) -> list[Setting]:
    """The CPU set of an online pod's containers, where its pool requires one."""
    pools = plan.pools
    key = pools.bound.get(pod.uid)
    if key is not None and key in pools.named:
        cpus, reason = pools.named[key], f"pool {key}"
    elif pod.pod_class in (PodClass.SHARED, PodClass.DEDICATED) and pools.confine_shared:
        cpus, reason = pools.shared | pools.lenient, "shared pool"
    else:
        return []
    if pod.sandbox is not None:
        owner = any(owns_cpus(pod, container, pools) for container in pod.members)
        return [] if owner else whole_pod(pod, "cpu.set", cpus, policy=NAME, reason=reason)
    return [
        setting_of(pod, container, "cpu.set", cpus, policy=NAME, reason=reason)
        for container in pod.workload
        if not owns_cpus(pod, container, pools)
    ]


def _obstacle(view: NodeView, config: SharedConfig) -> str | None:
    """Why no online pod may be given a CPU set here; None when it may."""
    if config.confine is ConfineMode.NEVER:
        return f"{_KEPT} (confine: never)"
    # The static policy of 1.21 and older: a CPU set would be overwritten for ever.
    if view.kubelet.reasserts_s is not None:
        return f"{_KEPT}, rewritten every {duration(view.kubelet.reasserts_s)}"
    return None


class _PoolRequest(NamedTuple):
    sizes: dict[str, PoolSize]
    cpus: dict[str, int]
    fixed: Collection[str]


def _divide(
    found: PoolMembers,
    view: NodeView,
    plans: tuple[Pools, Pools | None],
    config: SharedConfig,
    isolated: Mapping[str, int],
    *,
    separate: bool,
) -> tuple[dict[str, CpuSet], dict[str, PoolSize], dict[str, str]]:
    """Sizes that fit, and CPUs of that number, for every online pool. The reasons name each pool's request.

    Where they do not fit they are cut as in `placement.sizes.fit`; `placement.pack` chooses the CPUs with the fewest
    changes.
    """
    pools, previous = plans
    free, topology = pools.shared, view.topology
    request = _requested(found, view, previous, config, isolated)
    sizes: dict[str, int] = {}
    within: dict[str, CpuSet] = {}
    guests: list[str] = []  # pools without CPUs of their own, which run in the default one
    merged = _merged(request.cpus, request, len(free) - (config.leave_cpus if separate else 0), joins=True)
    unbound = {key: size for key, size in request.cpus.items() if key not in found.nodes and key not in merged}
    # Pools of one node first: those of several have a choice.
    nodes = sorted(set(found.nodes.values()), key=lambda on: (len(on), on))
    # Every pool needs one CPU, as far as its node has one.
    theirs = {on: free & CpuSet.union(map(topology.node_cpus, on)) for on in nodes}
    inside: dict[tuple[int, ...], list[str]] = {}
    for on in nodes:
        keys = [key for key, where in found.nodes.items() if where == on and key not in merged]
        more = _merged(keys, request, len(theirs[on]), joins=False)
        merged += more
        inside[on] = [key for key in keys if key not in more]
    least = {on: min(len(keys), len(theirs[on])) for on, keys in inside.items()}
    later = sum(least.values()) + len(unbound)
    leave = max(0, min(config.leave_cpus, len(free) - later)) if separate else 0
    for on, keys in inside.items():
        cpu_set = theirs[on]
        # CPUs that this pool must leave to the pools after it.
        later -= least[on]
        taken = sum(sizes[key] for key, where in found.nodes.items() if key in sizes and set(where) <= set(on))
        if not cpu_set:
            guests += keys
            continue
        room = min(len(cpu_set) - taken, len(free) - leave - sum(sizes.values()) - later)
        cut = fit({key: request.cpus[key] for key in keys}, max(1, room))
        own = dict(cut.sizes)
        if cut.shared and len(own) < room:
            # They run in the default pool, which has a CPU of its own: one CPU more for a pool of this node.
            own[min(cut.shared, key=lambda key: (-request.cpus[key], key))] = 1
        sizes |= own
        within |= dict.fromkeys(own, cpu_set)
        guests += [key for key in cut.shared if key not in own]
    room = max(1, len(free) - leave - sum(sizes.values()))
    # What pods without a place on their node request, they request of the default pool.
    small = -(-sum(request.sizes[key].wanted_milli for key in merged) // _CPU)
    if guest_cpus := sum(request.cpus[key] for key in guests) + small:
        unbound[DEFAULT] = guest_cpus + unbound[DEFAULT] if found.pods[DEFAULT] else max(guest_cpus, unbound[DEFAULT])
    cut = fit(unbound, room)
    sizes |= cut.sizes
    asked = request.cpus[DEFAULT] + guest_cpus + sum(request.cpus[key] for key in cut.shared if key != DEFAULT)
    guests += [*merged, *(key for key in cut.shared if key != DEFAULT)]
    # In mode overlap the default pool has the rest. In mode separate BE work has it, unless pools were cut.
    if DEFAULT not in sizes or cut.shared or not separate:
        minimum = sizes.get(DEFAULT, 1)
        sizes[DEFAULT] = max(1, room - sum(size for key, size in cut.sizes.items() if key != DEFAULT))
        if config.expand and not (separate or cut.shared) and sizes[DEFAULT] > minimum:
            sizes |= _expanded({**sizes, DEFAULT: minimum}, request, _with_guests(found, guests), view, plans)
    from reconciler.placement.pack import pack  # only where there is more than one pool

    # BE work's own CPUs are the rest, wherever that is: they are not packed, and keep no pool from its best place.
    sets = pack(sizes, _held(previous, sizes), free, topology, within)
    result = {key: cpus for key, cpus in sets.items() if cpus}
    unplaced = [key for key in sets if key not in result and key != DEFAULT]
    asked += sum(request.cpus[key] for key in unplaced)
    guests += unplaced
    squeezed = DEFAULT not in result
    result.setdefault(DEFAULT, free)
    texts = {
        key: f"{request.sizes[key].reason}; has {_with_extra(cpus, request.cpus[key])}"
        for key, cpus in result.items()
        if key in request.sizes
    }
    if guests and not squeezed:
        has = _with_extra(result[DEFAULT], asked)
        texts[DEFAULT] = f"{request.sizes[DEFAULT].reason}; has {has}; also runs {plural(len(guests), 'pool')} cut to 0"
    if squeezed:
        texts[DEFAULT] = "fewer CPUs than pools: uses the CPUs of the other pools"
    for key in guests:
        result[key] = result[DEFAULT]
        texts[key] = "no CPU left for a separate pool: runs in the shared pool"
    # Pools without CPUs of their own are kept too: a pool whose demand is forgotten asks for all of it at once, and
    # would be larger than those that got their CPUs the last time.
    final = {
        key: granted(
            size,
            min(sizes.get(key, 1), size.asked),
            previous.sizes.get(key) if previous is not None else None,
            view.now,
        )
        for key, size in request.sizes.items()
        if config.measured or (key in sizes and (separate or key != DEFAULT))
    }
    return dict(sorted(result.items())), dict(sorted(final.items())), texts


def _merged(keys: Iterable[str], request: _PoolRequest, room: int, *, joins: bool) -> list[str]:
    """Pools of less than a CPU that run in the default pool where the pools do not all fit, the smallest first.

    Those that remain have together no more than they all request, rounded up: a CPU of its own for each would be taken
    from others, and a tenant names as many pools as it has pods. ``joins``: the default pool is among ``keys``.
    """
    pools = list(keys)
    wanted = {key: request.sizes[key].wanted_milli for key in pools if key != DEFAULT and key not in request.fixed}
    small = sorted((key for key in wanted if wanted[key] < _CPU), key=lambda key: (wanted[key], key))
    over = sum(request.cpus[key] for key in pools) - room
    have, most = sum(request.cpus[key] for key in small), cpus_of(sum(wanted[key] for key in small))
    merged, milli = list[str](), 0
    for key in small:
        if over + -(-milli // _CPU) <= 0 or have <= most:
            break
        merged.append(key)
        milli += wanted[key] if joins else 0
        over -= request.cpus[key]
        have -= request.cpus[key]
    return merged


def _with_guests(found: PoolMembers, keys: Iterable[str]) -> PoolMembers:
    """The same with the pods of these pools in the default one, where they run."""
    guests = (pod for key in keys for pod in found.pods[key])
    return found._replace(pods={**found.pods, DEFAULT: (*found.pods[DEFAULT], *guests)})


def _isolate(
    found: PoolMembers, view: NodeView, pools: Pools, previous: Pools | None, config: SharedConfig
) -> tuple[Mapping[str, PodIsolation], IsolatedPods]:
    """The states of the pods that may be isolated, and those that get CPUs.

    Not system pods, pods that are bound to NUMA nodes, and pods that are alone in their pool.
    """
    before = previous.isolation if previous is not None else {}
    candidates = {
        pod.uid: (key, pod)
        for key, pods in found.pods.items()
        if len(pods) > 1 and key not in found.nodes and not key.startswith(_SYSTEM)
        for pod in pods
    }
    pods = {uid: pod for uid, (_, pod) in candidates.items()}
    states = observe(pods.values(), view.indicators, before, view.now, config.isolation)
    requests = requests_of(view.pods)
    milli = {key: sum(requests[pod.uid] for pod in members) for key, members in found.pods.items()}
    least = dict(config.fixed)
    if config.measured and previous is not None:
        least = {key: size.asked for key, size in previous.sizes.items() if key in milli} | least
    leave = config.leave_cpus if config.mode is SharedPoolMode.SEPARATE else 0

    def fits(sizes: Mapping[str, int]) -> bool:
        rest, left = dict(milli), {key: len(members) for key, members in found.pods.items()}
        for uid in sizes:
            key, _ = candidates[uid]
            rest[key] -= requests[uid]
            left[key] -= 1
        # A pool all of whose pods are isolated is gone; the default one always exists.
        used = sum(max(cpus_of(rest[key]), least.get(key, 0)) for key in rest if left[key] or key == DEFAULT)
        return used + sum(sizes.values()) <= len(pools.shared) - leave

    held = [uid for uid in states if previous is not None and previous.bound.get(uid) == isolation_pool(uid)]
    return states, admit(pods, states, held, fits, cpus=len(pools.shared), config=config.isolation)


def _with_isolated(found: PoolMembers, uids: Collection[str]) -> PoolMembers:
    """The same with these pods in pools of their own."""
    if not uids:
        return found
    pods = {key: tuple(pod for pod in members if pod.uid not in uids) for key, members in found.pods.items()}
    pods |= {isolation_pool(pod.uid): (pod,) for members in found.pods.values() for pod in members if pod.uid in uids}
    bound = {**found.bound, **{uid: isolation_pool(uid) for uid in uids}}
    kept = {key: members for key, members in sorted(pods.items()) if members or key == DEFAULT}
    return PoolMembers(kept, dict(sorted(bound.items())), found.nodes)


def _isolated_reason(pod: Pod, cpus: int) -> str:
    base = "limit" if cpus > cpus_of(pod.request_milli) else "request"
    return f"isolated: more runnable threads than it requests ({cpu(pod.request_milli)}); {base}: {plural(cpus, 'CPU')}"


def _isolation_text(admitted: IsolatedPods) -> str:
    text = f"{plural(len(admitted.sizes), 'pod')} isolated, on {plural(sum(admitted.sizes.values()), 'CPU')}"
    if admitted.waiting:
        named = ", ".join(admitted.waiting[:_SHOWN]) + (", ..." if len(admitted.waiting) > _SHOWN else "")
        text += f"; no room within the bounds and beside all requests: {named}"
    return text


def _expanded(
    sizes: Mapping[str, int],
    request: _PoolRequest,
    found: PoolMembers,
    view: NodeView,
    plans: tuple[Pools, Pools | None],
) -> dict[str, int]:
    """The sizes with the CPUs that no pool requests. ``sizes``: as requested, all of which fit.

    Not for pools of a fixed size, of system pods, and on several nodes.
    """
    from reconciler.placement.expansion import NodeRoom, expand  # only where there is more than one pool
    from reconciler.policies.overlap import pool_uses

    (pools, previous), nodes = plans, found.nodes
    growing = [
        key
        for key in sizes
        if key == DEFAULT or not (key in request.fixed or key.startswith(_SYSTEM) or len(nodes.get(key, ())) > 1)
    ]
    rooms: list[NodeRoom] = []
    for on in sorted({nodes[key] for key in growing if key in nodes}):
        here = [key for key in growing if nodes.get(key) == on]
        others = sum(size for key, size in sizes.items() if key not in here and on[0] in nodes.get(key, ()))
        cpus = len(view.topology.node_cpus(on[0]) & pools.shared) - others
        rooms.append(NodeRoom(here, max(cpus, sum(sizes[key] for key in here))))
    weights = {key: max(1, sum(pod.request_milli for pod in found.pods[key])) for key in growing}
    # The default pool also has the pods that request nothing: it counts at least as the others on average.
    mean = sum(weights[key] for key in growing if key != DEFAULT) // max(1, len(growing) - 1)
    weights[DEFAULT] = max(weights[DEFAULT], mean)
    uses = pool_uses(found.pods, view, pools.dedicated_cpus)
    return expand(
        {key: sizes[key] for key in growing},
        weights,
        {key: len(cpus & pools.shared) for key, cpus in _held(previous, growing).items()},
        len(pools.shared) - sum(size for key, size in sizes.items() if key not in growing),
        rest=DEFAULT,
        rooms=rooms,
        used={key: -(-milli // _CPU) for key, milli in uses.items() if milli is not None},
    )


def _requested(
    result: PoolMembers, view: NodeView, previous: Pools | None, config: SharedConfig, isolated: Mapping[str, int]
) -> _PoolRequest:
    """What each pool is to have if there is room, at least one CPU."""
    threads, requests = 2 if view.topology.smt else 1, requests_of(view.pods)
    sizes: dict[str, PoolSize] = {}
    for key, pods in result.pods.items():
        before = previous.sizes.get(key) if previous is not None else None
        fixed = config.fixed.get(key)
        if (own := isolated.get(key)) is not None:
            size = PoolSize(wanted_milli=own * _CPU, cpus=own, reason=_isolated_reason(pods[0], own))
        elif fixed is not None:
            size = PoolSize(wanted_milli=fixed * _CPU, cpus=fixed, reason=f"fixed: {fixed} CPUs")
        elif config.measured:
            starting = view.cpu is None  # the first sample of this run is still to come
            provision = config.provision
            milli, why = demand(
                key,
                pods,
                view.uses,
                view.indicators,
                before,
                now=view.now,
                config=provision,
                size=config.size,
                threads=threads,
                starting=starting,
            )
            size = regulate(before, milli, view.now, config.size, threads=threads)
            if provision.pools.get(key, provision.policy) is ProvisionPolicy.PID:
                size = with_experience(size, before, pods, view.uses, provision.estimate)
            # An unchanged size keeps its reason: else every plan would differ from the last one.
            if size is not before:
                size = replace(size, reason=f"{why}; {size.reason}")
        else:
            milli = sum(requests[pod.uid] for pod in pods)
            size = PoolSize(
                wanted_milli=milli,
                cpus=max(1, -(-milli // _CPU)),
                reason=f"requests of {plural(len(pods), 'pod')}: {cpu(milli)}",
            )
        sizes[key] = size
    return _PoolRequest(sizes, {key: size.asked for key, size in sizes.items()}, {*config.fixed, *isolated})


def _with_extra(cpus: CpuSet, requested: int) -> str:
    extra = len(cpus) - requested
    return f"{len(cpus)}, {extra} of them requested by no pool" if extra > 0 else str(len(cpus))


def _held(previous: Pools | None, keys: Iterable[str]) -> dict[str, CpuSet]:
    if previous is None:
        return {}
    now = {**previous.named, DEFAULT: previous.shared}
    return {key: now[key] for key in keys if key in now}


POLICY = Policy(
    name=NAME,
    summary="online pods share the remaining CPUs, in one pool or in named pools",
    config_type=SharedConfig,
    precedence=50,
    announce=announce,
    decide_node=decide_node,
    pod=for_pod,
)

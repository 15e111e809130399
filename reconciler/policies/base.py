"""The interface of a policy: a name, a config, and up to five pure functions.

A new policy is one file that ends in ``POLICY = Policy(...)`` and one row in `policies.table`. All functions get the
`NodeView` of the moment and nothing else; they keep no reference to it, write nothing, and return the same result for
the same arguments.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Final, Generic, Protocol, TypeVar

from msgspec import Meta, Struct, json

from cgroupfs.codecs import Value, Version
from cgroupfs.cpuset import CpuSet
from cgroupfs.knobs import CATALOG
from cgroupfs.naming import QosClass
from state.model import Container, ContainerKind, NodeView, Pod, Pools, Setting
from state.plan import NodePlan

C_contra = TypeVar("C_contra", bound=Struct, contravariant=True)
C = TypeVar("C", bound=Struct)

# The kernel clamps other values to these (cgroup v1, cpu.shares).
SHARES_MIN: Final = 2
SHARES_MAX: Final = 262144
_SHARES_PER_CPU: Final = 1024
QUOTA_MIN_US: Final = 1000
"""The kernel refuses a smaller quota with EINVAL, on v1 and v2, whatever the period."""
PERIOD_US: Final = 100_000
OWN_CPUS: Final = "exclusive"
"""The policy that gives containers CPUs of their own: no other may set theirs."""
OF_KUBELET: Final = "dedicated"
"""The policy that applies the kubelet's exclusive CPUs to a pod in a machine or kernel of its own, as a whole."""
MILLI_MIN: Final = 10
"""`QUOTA_MIN_US` in thousandths of a CPU at the usual period: no share of a budget can be smaller."""


ASSUMED_MILLI: Final = 1000
"""What a pod without a request counts as, in thousandths of a CPU."""


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every policy's section has; each policy's own config extends it."""

    enabled: Annotated[bool, Meta(description="apply this policy")] = True
    dry_run: Annotated[
        bool,
        Meta(description="plan and show this policy's settings without writing them; written ones are restored"),
    ] = False


class PoolAllocator(Protocol[C_contra]):
    """Take a pool out of what is left, or lower ``budget_milli``.

    Runs in table order. The first sees every online CPU in ``shared``, nothing elsewhere, and a budget of all CPUs.
    """

    def __call__(self, view: NodeView, pools: Pools, previous: Pools | None, config: C_contra) -> Pools: ...


class ResourceAllocator(Protocol[C_contra]):
    """Fill in a field of the plan besides the pools: memory, disk, network, cache, cookies, values in ``/proc``.

    Runs in table order, after all pools are decided.
    """

    def __call__(self, view: NodeView, plan: NodePlan, previous: NodePlan | None, config: C_contra) -> NodePlan: ...


class ForParents(Protocol[C_contra]):
    """Settings of the directories above the pods."""

    def __call__(self, view: NodeView, plan: NodePlan, config: C_contra) -> Sequence[Setting]: ...


class ForPod(Protocol[C_contra]):
    """Settings of one pod's directory and its containers. Called at each container start: no loop over other pods."""

    def __call__(self, pod: Pod, view: NodeView, plan: NodePlan, config: C_contra) -> Sequence[Setting]: ...


class Policy(Struct, Generic[C], frozen=True, kw_only=True):
    """One policy.

    ``precedence``: where two want different values of one knob, the lower number wins; of a limit, such as a quota, the
    tighter value (`reconciler.control.planner`).

    ``announce``: what those before it in the table have to know: what it will need (``Pools.terms``), what it leaves to
    a weight (``Pools.weight_yields``). Called before any policy takes CPUs.
    """

    name: str
    summary: str
    config_type: type[C]
    precedence: int
    announce: PoolAllocator[C] | None = None
    decide_node: PoolAllocator[C] | None = None
    decide_resources: ResourceAllocator[C] | None = None
    parents: ForParents[C] | None = None
    pod: ForPod[C] | None = None
    requested: Callable[[Pod, C], bool] | None = None
    """Whether a pod requests the policy for itself: where it is off for the node, it applies to such pods only, and its
    functions see that in ``enabled``. Not called while a policy is on that excludes this one."""
    counts_in_dry_run: bool = False
    """Whether the policies after it plan by its ``decide_node`` in a dry run, too: facts, and the BE pool.

    The quotas never count. What does not is in ``Pools.trials`` then, for its own settings.
    """


# Any: each policy has a config type of its own, and the table holds them all; `Policy` itself ties the functions of
# one policy to its config type, and the section of its name is made of it.
AnyPolicy = Policy[Any]


def check_policy(policy: AnyPolicy) -> None:
    """What a row of the table must have: a wrong one fails at start and not at use.

    Errors: `ValueError` for no function, no summary, and a config that is no `PolicyConfig`, is not frozen, accepts
    unknown keys or lacks a default.
    """
    if not policy.summary:
        raise ValueError("needs a summary")
    if not any((policy.decide_node, policy.decide_resources, policy.parents, policy.pod)):
        raise ValueError("decides nothing")
    if not issubclass(policy.config_type, PolicyConfig):
        raise ValueError("its config must extend PolicyConfig")  # noqa: TRY004  # one kind of error
    config = policy.config_type.__struct_config__
    if not config.frozen or not config.forbid_unknown_fields:
        raise ValueError("its config must be frozen and forbid unknown fields")
    try:
        json.decode(b"{}", type=policy.config_type)
    except ValueError as exc:
        raise ValueError(f"its config needs a default for each field ({exc})") from exc


def check_precedence(policies: Iterable[AnyPolicy]) -> tuple[AnyPolicy, ...]:
    """The policies in their order. Errors: `ValueError` where two have the same precedence."""
    table = tuple(policies)
    ranks: dict[int, str] = {}
    for policy in table:
        if policy.precedence in ranks:
            raise ValueError(f"policy {policy.name}: has the precedence of {ranks[policy.precedence]}")
        ranks[policy.precedence] = policy.name
    return table


def setting_of(pod: Pod, container: Container | None, knob: str, value: Value, *, policy: str, reason: str) -> Setting:
    """What ``policy`` wants of a container of the pod, or (None) of the pod's own directory."""
    return Setting(
        path=(pod if container is None else container).group.path,
        knob=knob,
        value=value,
        policy=policy,
        reason=reason,
        pod_uid=pod.uid,
        container_id=None if container is None else container.id,
    )


def pod_total(pod: Pod, amount: Callable[[Container], int | None]) -> int | None:
    """`Pod.total`; None where a container has none: nothing bounds that one."""
    if not pod.members or any(amount(item) is None for item in pod.members):
        return None
    return pod.total(lambda item: amount(item) or 0)


def process_groups(pod: Pod) -> tuple[Container | None, ...]:
    """Where a pod's processes are: in its containers' groups; of a machine or kernel of its own (None) in the pod's."""
    return pod.workload if pod.sandbox is None else (None,)


def whole_pod(pod: Pod, knob: str, value: Value, *, policy: str, reason: str) -> list[Setting]:
    """CPUs or memory nodes of a pod in a machine or kernel of its own: at its directory, where its processes are."""
    why = f"{reason}; {pod.sandbox}: the pod as a whole"
    # In each group below, too: on v1 a set cannot be smaller than those below it.
    return [setting_of(pod, item, knob, value, policy=policy, reason=why) for item in (None, *pod.containers)]


def owns_cpus(pod: Pod, container: Container, pools: Pools) -> bool:
    """True when the container has CPUs of its own, or is indistinguishable from a container of its pod that has."""
    if not pools.dedicated:
        return False
    if container.name is not None:
        return f"{pod.uid}/{container.name}" in pools.dedicated
    prefix = f"{pod.uid}/"
    return any(key.startswith(prefix) for key in pools.dedicated)


def placed_cpus(pod: Pod, container: Container, pools: Pools) -> CpuSet | None:
    """The CPUs that we chose for a container, its own or those it shares with its pod; None when we chose none."""
    keys = pools.placed_by_pod.get(pod.uid)
    if keys is None or container.kind is ContainerKind.SANDBOX:
        return None
    own = f"{pod.uid}/{container.name or container.id}"
    if own in keys:
        return pools.dedicated[own]
    if container.kind is ContainerKind.INIT:
        return CpuSet.union(pools.dedicated[key] for key in keys)  # the app containers are not running yet
    # A side-car is on the CPUs of the pod's main container, if one is named and has its own, else of its largest.
    if (main := f"{pod.uid}/{pod.wish.main}") in keys:
        return pools.dedicated[main]
    return pools.dedicated[min(keys, key=lambda key: (-len(pools.dedicated[key]), key))]


def period_us(view: NodeView, path: str, container: Container | None = None) -> int:
    """The CFS period in force in a group: as read, else the value passed to the runtime, else the kernel's default."""
    value = view.actual.get((path, "cpu.period"))
    if isinstance(value, int) and value > 0:
        return value
    if container is not None and container.spec is not None and container.spec.period_us:
        return container.spec.period_us
    return PERIOD_US


def shares_of(milli: int) -> int:
    """A request in thousandths of a CPU as CPU shares: the kubelet's own conversion, within what the kernel takes."""
    return min(max(milli * _SHARES_PER_CPU // 1000, SHARES_MIN), SHARES_MAX)


# How much a pod's request may weigh against other pods. It divides the BE budget, the CPU time of the besteffort
# directory and the fair shares of owners between tenants, so it counts only as far as a scheduler has counted it:
# - A request in the pod's spec, and at most all CPUs that pods can have. A scheduler places no larger one, but a pod
#   with a ``nodeName`` passes none, and the kubelet ignores requests for resources that its node does not offer.
# - A pod without a request counts as a whole CPU, whatever the number of its containers; so does, within its pod, a
#   container without one.
# - A request that only the annotation has (`reconciler.pods.resources`) is the tenant's claim: it counts as a whole CPU
#   at most, so it never weighs more than no request at all, and as nothing beside a request of the same pod.


def container_asks(container: Container, most: int) -> int:
    """What one container counts as, the measure by which its pod's share is split, in thousandths of a CPU.

    ``most``: what pods can have (`NodeView.capacity_milli`).
    """
    requests = container.requests
    return requests.counted_cpu(most) or min(requests.claimed_cpu_milli or ASSUMED_MILLI, ASSUMED_MILLI)


def pod_asks(pod: Pod, most: int) -> int:
    """What a pod counts as beside other pods: its containers together, without the pause container."""
    requests = [container.requests for container in pod.members]
    if counted := sum(item.counted_cpu(most) or 0 for item in requests):
        return min(counted, most)
    return min(sum(item.claimed_cpu_milli or 0 for item in requests) or ASSUMED_MILLI, ASSUMED_MILLI)


def weighs_by_request(pod: Pod, view: NodeView) -> bool:
    """Whether the weight of a pod's directory follows its request for BE work, or for mid-tier resources.

    Only where every pod beside it has a weight of the same kind.
    """
    # Elsewhere such requests would compete with the plain ones of online pods; besteffort's own weight protects these.
    if pod.qos is not QosClass.BESTEFFORT:
        return False
    # For a BE pod no online pod may be beside it, for an online pod none without a request, which has 2 shares.
    return not (view.unweighed_in_besteffort if pod.pod_class.online else view.online_in_besteffort)


def pod_shares(milli: int, pod: Pod, view: NodeView) -> int:
    """The weight of the directory of a BE pod or of a mid-tier pod, whichever policy wants it, in CPU shares.

    Weights of containers need no such rule: they compete inside of their pod only.
    """
    milli = min(milli, view.capacity_milli)
    if weighs_by_request(pod, view):
        return shares_of(milli)
    # An online pod has the least once for each CPU of its request: the pods without one beside it count as a CPU each.
    return SHARES_MIN * max(1, milli // 1000) if pod.pod_class.online else SHARES_MIN


def quota_us(milli: int, period: int) -> int:
    """Thousandths of a CPU as a quota of ``period`` µs, never below what the kernel accepts."""
    return max(QUOTA_MIN_US, milli * period // 1000)


def unsupported_reason(view: NodeView, name: str) -> str | None:
    """Why a knob is unavailable on this node; None when it is available."""
    return missing_reason(name, view.versions, view.knobs)


def missing_reason(name: str, versions: Mapping[str, Version], knobs: frozenset[str]) -> str | None:
    """The same of a node without a view: versions of the mounted controllers, and the knobs that kubepods has."""
    knob = CATALOG[name]
    version = versions.get(knob.controller)
    if version is None:
        return f"no {knob.controller} controller is mounted on this node"
    if name in knobs:
        return None
    form = knob.forms.get(version)
    if form is None:
        return f"cgroup v{version} has no {name}"
    if not knobs:
        return "unknown: no kubepods directory to probe this kernel with"
    return f"this kernel has no {name} ({form.file}, from Linux {form.since} on)"

"""memory qos: a pod's memory request is protected from reclaim, and its use beyond that is throttled before its limit.

Per class, in percent: ``memory.min`` and ``memory.low`` of the request, and ``memory.high`` between request and limit.
Off by default. Per pod: Koordinator's ``memoryQOS`` annotation; its policy ``auto`` applies also where the node's
policy is off, as with koordlet. Swap, too, is bounded by class (`swap_of`).

Source: Koordinator's cgreconcile (minLimitPercent, lowLimitPercent, throttlingPercent), which follows the kubelet's
MemoryQoS (KEP-2570); swap: KEP-2400 (a share of the node's swap by request, and none for Guaranteed pods), Katalyst's
swap control.
"""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.codecs import PAGE
from cgroupfs.naming import QosClass
from reconciler.policies.base import Policy, PolicyConfig, pod_total, setting_of, unsupported_reason
from reconciler.runtime.format import size
from state.memory import MemoryProtection
from state.model import Container, NodeView, Pod, PodClass, Setting
from state.plan import NodePlan

NAME: Final = "memory_qos"


_Min = Annotated[int, Meta(ge=0, le=100, description="share of the memory request that is never reclaimed")]
_Low = Annotated[int, Meta(ge=0, le=100, description="share of the memory request that is reclaimed last")]
_Throttling = Annotated[
    int,
    Meta(
        ge=0,
        le=100,
        description="point between request and limit above which the group is throttled and reclaimed (v2), or "
        "reclaimed first on shortage (v1)",
    ),
]


class ClassMemory(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the pods of one class get; 0 is "nothing"."""

    min_percent: _Min = 0
    low_percent: _Low = 0
    throttling_percent: _Throttling = 0
    oom_group: Annotated[bool, Meta(description="the OOM killer kills a container's processes together (v2 only)")] = (
        False
    )
    swap_percent: Annotated[
        Annotated[int, Meta(ge=0, le=1000)] | None,
        Meta(
            description="swap in addition to the memory limit, as a share of it (v2 without a limit: of the node's "
            "memory); null: what the runtime set",
        ),
    ] = None


class OnlineMemory(ClassMemory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What online pods of this class get; 0 is "nothing"."""

    # Koordinator's defaults are all 0; here switching the policy on has an effect.
    low_percent: _Low = 100


class ReclaimedMemory(ClassMemory, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What BE pods get; 0 is "nothing"."""

    throttling_percent: _Throttling = 90


class MemoryQosConfig(PolicyConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The percentages by class."""

    enabled: Annotated[bool, Meta(description="protect memory requests from reclaim; throttle before the limit")] = (
        False
    )
    pods: Annotated[
        bool, Meta(description="while off: apply to pods that request it (koordinator.sh/memoryQOS auto)")
    ] = True
    directories: Annotated[
        bool,
        Meta(
            description="write the sums of the protections to kubepods and the QoS directories, without which they "
            "have no effect; off where the kubelet's MemoryQoS writes them"
        ),
    ] = True
    dedicated: OnlineMemory = OnlineMemory()
    shared: OnlineMemory = OnlineMemory()
    reclaimed: ReclaimedMemory = ReclaimedMemory()

    # As other online pods.
    system: ClassVar[OnlineMemory] = OnlineMemory()


class MemoryAmounts(Struct, frozen=True, kw_only=True):
    """Amounts of one container, bytes in whole pages. ``high`` None: bypassd sets no bound."""

    min_bytes: int = 0
    low_bytes: int = 0
    high_bytes: int | None = None


class _Limits(Struct, frozen=True, kw_only=True):
    """A container's memory request and limit in bytes. None: none."""

    request: int | None
    limit: int | None


def percents(pod: Pod, config: MemoryQosConfig) -> ClassMemory:
    """The class's percentages with the pod's own over them; all 0 for a pod that wants none, or is to have none."""
    wish = pod.memory
    if wish.off or not (config.enabled or wish.auto):
        return ClassMemory()
    base: ClassMemory = getattr(config, pod.pod_class.value)
    overcommitted = pod.pod_class is PodClass.RECLAIMED or any(item.requests.mid for item in pod.members)

    def protected(own: int | None, of_class: int) -> int:
        # What is protected is taken from others: memory that no scheduler has set aside is not protected on request.
        return of_class if own is None else min(own, of_class) if overcommitted else own

    return ClassMemory(
        min_percent=protected(wish.min_percent, base.min_percent),
        low_percent=protected(wish.low_percent, base.low_percent),
        throttling_percent=base.throttling_percent if wish.throttling_percent is None else wish.throttling_percent,
        oom_group=base.oom_group if wish.oom_group is None else wish.oom_group,
    )


def amounts(request: int, limit: int | None, total: int | None, of: ClassMemory) -> MemoryAmounts:
    """The formula: ``high = floor((request + (limit - request) x percent / 100) / page) x page``.

    ``high`` is never below ``min``, and ``low`` is raised to ``min``. ``total``: the node's memory, which replaces a
    missing limit; None: unknown.
    """
    lowest = _whole_pages(request * of.min_percent // 100)
    low = _whole_pages(request * of.low_percent // 100)
    top = limit if limit is not None else total
    high = None
    if of.throttling_percent and top is not None and top > request:
        bound = max(_whole_pages(request + (top - request) * of.throttling_percent // 100), lowest)
        high = bound if PAGE <= bound < top else None  # at the limit it would change nothing
    return MemoryAmounts(min_bytes=lowest, low_bytes=max(low, lowest) if low else 0, high_bytes=high)


def of_container(pod: Pod, container: Container, view: NodeView, of: ClassMemory) -> MemoryAmounts:
    """One container's amounts; a BE pod's requests and limits are its batch memory where it has any."""
    sizes = _limits_of(pod, container)
    request, limit = sizes.request, sizes.limit
    total = view.node_memory.total_bytes if view.node_memory is not None else None
    if total is not None:
        # A pod that passed no scheduler has any number under names that the kubelet does not count.
        request, limit = min(request or 0, total), total if limit is None else min(limit, total)
    return amounts(request or 0, limit, total, of)


def _swap_limit(pod: Pod, container: Container, view: NodeView, plan: NodePlan) -> int | None:
    """The memory limit of which swap is a share. On v1 the kernel must have it: no batch limit that nothing writes."""
    if view.versions.get("memory") == 1 and not plan.memory.batch_limits:
        return container.limits.memory_bytes
    return _limits_of(pod, container).limit


def _limits_of(pod: Pod, container: Container) -> _Limits:
    requests, limits = container.requests, container.limits
    request, limit = requests.memory_bytes, limits.memory_bytes
    if pod.pod_class is PodClass.RECLAIMED or requests.mid or limits.mid:
        request = requests.batch_memory_bytes if requests.batch_memory_bytes is not None else request
        limit = limits.batch_memory_bytes if limits.batch_memory_bytes is not None else limit
    return _Limits(request=request, limit=limit)


def swap_of(limit: int | None, percent: int, view: NodeView) -> int | None:
    """The ``memory.swap`` value of this kernel in bytes; None: not known (v1 without a limit, node unknown).

    Besides its memory limit a container may have a share of that limit in swap; a runtime gives a container with a
    limit none.
    """
    total = view.node_memory.total_bytes if view.node_memory is not None else None
    # A pod may name any limit; above the node's memory it is none, and its swap would have no bound either.
    base = total if limit is None else limit if total is None else min(limit, total)
    # v1 bounds memory and swap together: under a shortage of the node pages may go to swap all the same.
    if view.versions.get("memory") == 1:
        return None if limit is None or base is None else _whole_pages(limit + base * percent // 100)
    if percent == 0:
        return 0
    return None if base is None else _whole_pages(base * percent // 100)


def _swap_percents(view: NodeView, config: MemoryQosConfig) -> dict[str, int]:
    """By class, where this node has swap and the kernel accounts it."""
    if not config.enabled or unsupported_reason(view, "memory.swap") is not None:
        return {}
    if view.node_memory is not None and not view.node_memory.swap_bytes:
        return {}
    classes = (PodClass.DEDICATED, PodClass.SHARED, PodClass.RECLAIMED)
    percents_of = {item.value: getattr(config, item.value).swap_percent for item in classes}
    return {name: percent for name, percent in percents_of.items() if percent is not None}


def _swap(pod: Pod, view: NodeView, plan: NodePlan, config: MemoryQosConfig) -> list[Setting]:
    """The bound of each container; in gVisor or kata that of the pod, whose limit is the sum with its overhead."""
    percent = _swap_percents(view, config).get(pod.pod_class.value)
    if percent is None:
        return []
    if pod.sandbox is None:
        wanted = [(item, _swap_limit(pod, item, view, plan)) for item in pod.workload]
        return [
            setting_of(pod, item, "memory.swap", value, policy=NAME, reason=_swap_reason(limit, percent))
            for item, limit in wanted
            if (value := swap_of(limit, percent, view)) is not None
        ]
    total = pod_total(pod, lambda item: _swap_limit(pod, item, view, plan))
    limit = total + (pod.overhead.memory_bytes or 0) if total else None
    value = swap_of(limit, percent, view)
    why = f"{_swap_reason(limit, percent)}; {pod.sandbox}: the pod as a whole"
    return [] if value is None else [setting_of(pod, None, "memory.swap", value, policy=NAME, reason=why)]


def _swap_reason(limit: int | None, percent: int) -> str:
    return f"swap up to {percent} % of the {'memory limit' if limit is not None else 'memory of the node'}"


def _without_limit(view: NodeView, plan: NodePlan, percents_of: dict[str, int]) -> str:
    """Those that v1 cannot bound, for people."""
    if view.versions.get("memory") != 1 or not percents_of:
        return ""
    titles = [
        pod.title
        for pod in view.pods.values()
        if pod.pod_class.value in percents_of
        and any(_swap_limit(pod, item, view, plan) is None for item in pod.workload)
    ]
    if not titles:
        return ""
    return f"; swap of {len(titles)} pods without a memory limit is not bounded on cgroup v1, such as {min(titles)}"


def of_pod(pod: Pod, view: NodeView, config: MemoryQosConfig) -> list[tuple[Container, MemoryAmounts]]:
    """The amounts of every container but the pause container, a running init container included: it is the pod then."""
    of = percents(pod, config)
    return [(container, of_container(pod, container, view, of)) for container in pod.members]


def decide_resources(view: NodeView, plan: NodePlan, previous: NodePlan | None, config: MemoryQosConfig) -> NodePlan:
    """The sums that the directories above the pods must hold, and why there are none."""
    swap = _swap_percents(view, config)
    if not config.dry_run:  # else `batch` has the bound that is in force
        plan = replace(plan, memory=replace(plan.memory, swap_percent=swap))
    unbounded = _without_limit(view, plan, swap)
    missing = unsupported_reason(view, "memory.low")
    if missing is not None or not config.directories:
        text = f"soft limits only: {missing}" if missing is not None else "no protection on the QoS directories"
        return replace(plan, reasons={**plan.reasons, NAME: text + unbounded})
    # Protections count only as far as every directory above has them too (cgroup-v2, "effective"); those of
    # Koordinator's pods outside its sums are cut silently.
    sums: dict[str, MemoryProtection] = {}
    for pod in view.pods.values():
        protection = _sum(amount for _, amount in of_pod(pod, view, config))
        if protection == MemoryProtection():
            continue
        level = {QosClass.BESTEFFORT: view.besteffort, QosClass.BURSTABLE: view.burstable}.get(pod.qos)
        for path in (view.kubepods, level) if level is not None else (view.kubepods,):
            sums[path] = _added(sums.get(path, MemoryProtection()), protection)
    whole = sums.get(view.kubepods, MemoryProtection())
    text = f"pod memory never reclaimed: {size(whole.min_bytes)}, reclaimed last: {size(whole.low_bytes)}"
    memory = replace(plan.memory, protected=dict(sorted(sums.items())))
    return replace(plan, memory=memory, reasons={**plan.reasons, NAME: text + unbounded})


def parents(view: NodeView, plan: NodePlan, config: MemoryQosConfig) -> list[Setting]:
    reason = "sum of the protections below"
    return [
        Setting(path=path, knob=knob, value=value, policy=NAME, reason=reason)
        for path, protection in sorted(plan.memory.protected.items())
        for knob, value in (("memory.min", protection.min_bytes), ("memory.low", protection.low_bytes))
        if value and unsupported_reason(view, knob) is None
    ]


def for_pod(pod: Pod, view: NodeView, plan: NodePlan, config: MemoryQosConfig) -> list[Setting]:
    """Protections and bounds of a pod's containers, and the sums on its directory."""
    pairs = of_pod(pod, view, config)
    if pod.sandbox is not None:
        return _for_sandboxed(pod, view, config, [amount for _, amount in pairs]) + _swap(pod, view, plan, config)
    settings = _swap(pod, view, plan, config)
    settings += [setting for container, amount in pairs for setting in _settings_of(pod, container, amount, view)]
    if percents(pod, config).oom_group and unsupported_reason(view, "memory.oom_group") is None:
        reason = "all processes are killed together"
        settings += [
            setting_of(pod, container, "memory.oom_group", 1, policy=NAME, reason=reason) for container, _ in pairs
        ]
    sums = _sum(amount for _, amount in pairs)
    for knob, value in (("memory.min", sums.min_bytes), ("memory.low", sums.low_bytes)):
        if value and unsupported_reason(view, knob) is None:
            settings.append(setting_of(pod, None, knob, value, policy=NAME, reason="sum of its containers"))
    return settings


def _for_sandboxed(pod: Pod, view: NodeView, config: MemoryQosConfig, amounts_of: list[MemoryAmounts]) -> list[Setting]:
    """A pod in gVisor or kata: the sums, at its directory. No throttling point where a container has none."""
    sums, highs = _sum(iter(amounts_of)), [amount.high_bytes for amount in amounts_of]
    high = sum(item for item in highs if item) if highs and all(highs) else None
    whole = MemoryAmounts(min_bytes=sums.min_bytes, low_bytes=sums.low_bytes, high_bytes=high)
    settings = list(_settings_of(pod, None, whole, view))
    if percents(pod, config).oom_group and unsupported_reason(view, "memory.oom_group") is None:
        reason = "all processes are killed together"
        settings.append(setting_of(pod, None, "memory.oom_group", 1, policy=NAME, reason=reason))
    return settings


def _settings_of(pod: Pod, container: Container | None, amount: MemoryAmounts, view: NodeView) -> Iterator[Setting]:
    # v1 has none of the three. Its soft limit acts only where the whole node is short of memory.
    v2 = view.versions.get("memory") == 2
    wanted = (
        ("memory.min", amount.min_bytes or None, "share of the request that is never reclaimed"),
        ("memory.low", amount.low_bytes or None, "share of the request that is reclaimed last"),
        ("memory.high" if v2 else "memory.soft", amount.high_bytes, "throttling point between request and limit"),
    )
    for knob, value, reason in wanted:
        if value is not None and unsupported_reason(view, knob) is None:
            yield setting_of(pod, container, knob, value, policy=NAME, reason=reason)


def _sum(memory_amounts: Iterator[MemoryAmounts]) -> MemoryProtection:
    total = MemoryProtection()
    for item in memory_amounts:
        total = _added(total, MemoryProtection(min_bytes=item.min_bytes, low_bytes=item.low_bytes))
    return total


def _added(protection: MemoryProtection, other: MemoryProtection) -> MemoryProtection:
    return MemoryProtection(
        min_bytes=protection.min_bytes + other.min_bytes, low_bytes=protection.low_bytes + other.low_bytes
    )


def _requested(pod: Pod, config: MemoryQosConfig) -> bool:
    return config.pods and pod.memory.auto


def _whole_pages(number: int) -> int:
    return number // PAGE * PAGE


POLICY = Policy(
    name=NAME,
    summary="memory requests protected from reclaim; throttling before the limit",
    config_type=MemoryQosConfig,
    precedence=54,
    decide_resources=decide_resources,
    parents=parents,
    pod=for_pod,
    requested=_requested,
)

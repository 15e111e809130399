"""The start allowance: CPU time in addition to the BE budget for BE containers that start and BE pods that end.

The runtime's init (runc's, crun's) runs inside the container's group, so a budget that is used up stops it. From a
container's first directory until its program is executed, BE work may therefore use `StartConfig.cpu_milli` where its
budget is smaller. The same for a moment after each command of the runtime for a BE container: the exec of a probe, a
stop.

What bounds it, whatever tenants start: seconds per container, a token bucket over the node, and the CPU that BE work
has altogether meanwhile. Without tokens a start has what its even weight gives it within the budget.

Arithmetic only. Units: thousandths of a CPU, seconds; times are on the view's clock.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, ClassVar, Final, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.policies.base import (
    SHARES_MAX,
    SHARES_MIN,
    container_asks,
    pod_asks,
    pod_shares,
    shares_of,
    weighs_by_request,
)
from reconciler.policies.idle_buffer import IdleSample
from state.cpu import StartPlan
from state.model import Container, NodeView, Phase, Pod
from state.pod_index import derived, index_of

END_S: Final = 1.0
"""How long a pod that ends has the allowance, after the request to delete it and again at the end of its grace period.
What a program does on SIGTERM in between has the budget."""
_LEAST_S: Final = 1.0
"""Seconds of tokens from which on the allowance begins again: it is not switched several times a second."""
_TICK_S: Final = 0.01
"""The soonest next plan: rounding must not plan the same moment again and again."""


class StartConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The bounds of the allowance."""

    cpu_milli: Annotated[
        int,
        Meta(
            ge=0,
            le=64_000,
            description="minimum CPU of BE work while a BE container starts; 0: no start allowance",
        ),
    ] = 1000

    # The runtime's own timeout of a start is minutes; a slower start is throttled as other work.
    seconds: ClassVar[float] = 5.0
    # The program's exec follows the runtime's signal.
    exec_s: ClassVar[float] = 0.1
    # So starts in a row do not turn the budget off.
    share_percent: ClassVar[int] = 10
    # Saved up: a node that starts ten pods at once is usual.
    burst_s: ClassVar[float] = 30.0
    # A throttled start of this length fails probes.
    late_s: ClassVar[float] = 5.0
    # A probe's exec or a stop takes less than this.
    command_s: ClassVar[float] = 0.3


class _Window(NamedTuple):
    """A time in which a pod has the allowance. ``spare``: only while the bucket is more than half full.

    Those of commands, which leave the other half to starts.
    """

    uid: str
    begin: float
    length: float
    spare: bool = False


def next_starts(view: NodeView, previous: StartPlan, config: StartConfig) -> StartPlan:
    """One step: which BE pods start or end now, what the bucket has left, and which of them have the allowance."""
    now = view.now
    times = _times(view, previous, config)
    windows = list(_windows(view, times, config))
    share = config.share_percent / 100
    # While a pod has the allowance a second costs one, less the tokens that come in it.
    spent = max(0.0, previous.spent_s + max(0.0, now - previous.at) * (bool(previous.pods) - share))
    left = config.burst_s - spent
    half = config.burst_s / 2
    pods = frozenset(
        uid for uid, begin, length, spare in windows if begin <= now < begin + length and (left > half or not spare)
    )
    # More than a moment's worth to begin with, and all of it once begun.
    if not config.cpu_milli or left <= (0.0 if previous.pods else min(_LEAST_S, half)):
        pods = frozenset()
    due = [begin if begin > now else begin + length for _, begin, length, _ in windows if begin + length > now]
    if pods and share < 1.0:
        # When the last token is spent.
        due.append(now + left / (1.0 - share))
    if not pods:
        # Without tokens the end of a window changes nothing.
        due = [begin for _, begin, _, _ in windows if begin > now]
    same = not pods and not previous.pods
    return replace(
        times,
        even=not view.online_in_besteffort,
        floor_milli=config.cpu_milli if pods else 0,
        pods=pods,
        raised=frozenset(uid for uid in pods if weighs_by_request(view.pods[uid], view)),
        # Without an allowance the tokens follow from the time only: such plans do not differ.
        spent_s=previous.spent_s if same else spent,
        at=previous.at if same else now,
        due=max(now + _TICK_S, min(due)) if due else None,
    )


def _times(view: NodeView, previous: StartPlan, config: StartConfig) -> StartPlan:
    """Since when each container is created, executed and each pod ends; kept as long as they matter."""
    now = view.now
    created, executed, ending = dict[str, float](), dict[str, float](), dict[str, float]()
    for pod in _concerned(view, {*previous.created, *previous.executed}):
        if pod.deleting and pod.containers:
            ending[pod.uid] = min(previous.ending.get(pod.uid, now), now)  # never in the future: the clock may go back
        for container in pod.containers:
            cid = container.id
            if container.phase is Phase.CREATING:
                created[cid] = min(previous.created.get(cid, now), now)
            elif cid in previous.created:
                executed[cid] = now
            elif cid in previous.executed and now < previous.executed[cid] + config.exec_s:
                executed[cid] = min(previous.executed[cid], now)
    return StartPlan(created=created, executed=executed, ending=ending)


def _windows(view: NodeView, times: StartPlan, config: StartConfig) -> Iterator[_Window]:
    for pod in _concerned(view, {*times.created, *times.executed, *view.commands}):
        if pod.uid in times.ending:
            since = times.ending[pod.uid]
            yield _Window(pod.uid, since, END_S)
            if pod.grace_s is not None and pod.grace_s > END_S:
                yield _Window(pod.uid, since + pod.grace_s, END_S)
        for container in pod.containers:
            if container.id in times.created:
                yield _Window(pod.uid, times.created[container.id], config.seconds)
            # A kubelet up to 1.21 updates every container every few seconds, and each update is a command.
            if container.id in view.commands and view.kubelet.reasserts_s is None:
                yield _Window(pod.uid, view.commands[container.id], config.command_s, spare=True)
            if container.id in times.executed:
                yield _Window(pod.uid, times.executed[container.id], config.exec_s)


def _starting_or_ending(pods: Mapping[str, Pod]) -> Sequence[Pod]:
    """BE pods that start or end by what they are: their deletion was requested, or a container is in creation."""
    return [
        pod
        for pod in index_of(pods).reclaimed
        if pod.deleting or any(container.phase is Phase.CREATING for container in pod.containers)
    ]


def _owners(pods: Mapping[str, Pod]) -> Mapping[str, Pod]:
    return {container.id: pod for pod in index_of(pods).reclaimed for container in pod.containers}


def _concerned(view: NodeView, containers: Iterable[str]) -> Iterator[Pod]:
    found = {pod.uid: pod for pod in derived(view.pods, _starting_or_ending)}
    owners = derived(view.pods, _owners)
    found |= {owners[cid].uid: owners[cid] for cid in containers if cid in owners}
    return (found[uid] for uid in sorted(found))


def directory_part(part: int, view: NodeView, starts: StartPlan) -> int:
    """The besteffort directory's part of the budget, or what starts in it may use if that is more."""
    if starts.floor_milli <= part:
        return part
    inside = any(pod.qos is QosClass.BESTEFFORT for uid in starts.pods if (pod := view.pods.get(uid)) is not None)
    return starts.floor_milli if inside else part


def pod_weight(pod: Pod, view: NodeView, starts: StartPlan) -> tuple[int, str]:
    """The weight of a BE pod's directory, in shares, and the reason."""
    # Even weights are among BE pods only: the besteffort directory's own weight protects online pods outside it.
    if not weighs_by_request(pod, view):
        return SHARES_MIN, "minimum CPU weight: online pods go first"
    if pod.uid in starts.raised:
        # The highest: busy pods do not take the allowance.
        return SHARES_MAX, "a container starts or the pod ends: before the other BE pods"
    return pod_shares(pod_asks(pod, view.capacity_milli), pod, view), "even CPU weight: only BE pods are beside it"


def container_weight(pod: Pod, container: Container, view: NodeView) -> tuple[int, str]:
    """The same of a container: the least, but even beside a container with a request for BE work.

    Containers without one are even already.
    """
    requested = any(item.requests.be_cpu_milli or item.requests.claimed_cpu_milli for item in pod.workload)
    if not requested or not weighs_by_request(pod, view):
        return SHARES_MIN, "minimum CPU weight: online pods go first"
    return shares_of(
        container_asks(container, view.capacity_milli)
    ), "even CPU weight: only BE containers are beside it"


def without_allowance(sample: IdleSample, budget_milli: int) -> IdleSample:
    """An idle sample as it would be without what BE work used above its budget, for a time with an allowance."""
    if sample.idle_milli is None or sample.reclaimed_milli is None or sample.reclaimed_milli <= budget_milli:
        return sample
    # The idle buffer would take this for a need of online pods, and cut the budget for it.
    above = sample.reclaimed_milli - budget_milli
    return replace(sample, idle_milli=min(sample.top_milli, sample.idle_milli + above), reclaimed_milli=budget_milli)

"""Common parts of the two laws that lend CPU time above a container's quota: borrowers, and the settings written.

`quota_burst` and `quota_turbo` decide how much; the sampler keeps their states and passes the result to the planner as
``NodeView.lent_us``: quotas by group path, in µs of the group's own period. Only quotas in that map become settings, so
that a loan that ends, a policy that is switched off and an agent that restarts all restore the original.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from reconciler.policies.base import PERIOD_US, owns_cpus, setting_of
from reconciler.policies.normalise import quota_of
from reconciler.runtime.format import cpu
from state.model import NodeView, Phase, Pod, PodClass, Pools, Setting

CPU_MILLI: Final = 1000


class QuotaBorrower(Struct, frozen=True, kw_only=True):
    """A container that may be lent CPU time: its own quota and period (µs).

    ``limit_us`` is the kubelet's value for the runtime, normalised where the node's CPUs count for more: a loan is made
    on the quota in force without it.
    """

    path: str
    inode: int
    container_id: str
    limit_us: int
    period_us: int

    @property
    def limit_milli(self) -> int:
        """The limit in thousandths of a CPU, at least one."""
        return max(1, self.limit_us * CPU_MILLI // self.period_us)


def borrowers(pod: Pod, pools: Pools) -> tuple[QuotaBorrower, ...]:
    """The containers of an online pod that have a quota; none of any other pod. Pure."""
    if pod.pod_class is not PodClass.SHARED:
        return ()
    quota_borrowers: list[QuotaBorrower] = []
    for container in pod.workload:
        # An unknown quota bars the whole pod: on v1 no container may be above its pod, and the pod's quota could not be
        # raised for the others (a later start of this one might fail).
        if container.spec is None:
            return ()
        quota = quota_of(pod, container, pools)
        # One in creation has no quota yet, one that owns CPUs needs no loan.
        if container.phase is not Phase.SETTLED or quota is None or owns_cpus(pod, container, pools):
            continue
        quota_borrowers.append(
            QuotaBorrower(
                path=container.group.path,
                inode=container.group.inode,
                container_id=container.id,
                limit_us=quota,
                period_us=container.spec.period_us or PERIOD_US,
            )
        )
    return tuple(quota_borrowers)


def ceiling_us(limit_us: int, period: int, percent: int, cpus: int) -> int:
    """The largest quota of a container: a percentage of its limit, and no more than the node has CPUs for.

    Never below the limit, whatever the percentage.
    """
    return max(limit_us, min(limit_us * percent // 100, cpus * period))


def pod_quota_us(own_us: int, period: int, loans: Sequence[tuple[QuotaBorrower, int]]) -> int:
    """A pod directory's quota with its containers' loans on top. ``own_us``: without bypassd.

    Source: Koordinator's cfsQuotaBurst moves the pod by the containers' delta, so that what a pod has besides
    (overhead, a container without loan) remains.
    """
    # Rounded up for each: no child is above it.
    return own_us + sum(-(-(lent - borrower.limit_us) * period // borrower.period_us) for borrower, lent in loans)


def rationed(wants: Mapping[str, float], room: float) -> dict[str, float]:
    """What each is granted so that all together have at most ``room``: everything, or all in the same proportion."""
    total = sum(wants.values())
    if total <= room or total <= 0.0:
        return dict(wants)
    share = max(0.0, room) / total
    return {path: want * share for path, want in wants.items()}


def wanted(pod: Pod, view: NodeView, pools: Pools, *, policy: str, percent: int) -> list[Setting]:
    """The loans of one pod as settings: each container's quota, and the pod directory's where that has one. Pure."""
    if not view.lent_us or view.kubelet.reasserts_s is not None:
        return []  # such a kubelet takes every loan back within seconds
    settings: list[Setting] = []
    for borrower in borrowers(pod, pools):
        lent = view.lent_us.get(borrower.path, 0)
        # With another period than the runtime's a quota would mean something else than the law has computed.
        if view.actual.get((borrower.path, "cpu.period"), borrower.period_us) != borrower.period_us:
            continue
        # After a resize a loan made on the old limit is cut to the new ceiling, and dropped below the new limit.
        value = min(lent, ceiling_us(borrower.limit_us, borrower.period_us, percent, len(view.cpus)))
        if value > borrower.limit_us:
            above = cpu((value - borrower.limit_us) * CPU_MILLI // borrower.period_us)
            settings.append(
                Setting(
                    path=borrower.path,
                    knob="cpu.quota",
                    value=value,
                    policy=policy,
                    reason=f"borrows {above} above its limit of {borrower.limit_us} µs",
                    pod_uid=pod.uid,
                    container_id=borrower.container_id,
                )
            )
    own = view.lent_us.get(pod.group.path)
    if settings and own is not None:
        reason = f"includes quota lent to {len(settings)} of its containers"
        settings.append(setting_of(pod, None, "cpu.quota", own, policy=policy, reason=reason))
    return settings

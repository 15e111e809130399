"""Compares the exclusive CPUs of containers with the kernel's files: a record protects nothing that the kernel denies.

The kubelet's checkpoint and bypassd's own plan say which CPUs a container has alone. Whether that is so, is in CPU set
files: its own (of a pod in a machine or kernel of its own, the pod's, as no group below it has its processes), and
those of every other container. A kubelet corrects a wrong set within one period of its reconcile loop; what is wrong
for longer is handed to the inventory, and the plan protects the CPUs where the container runs. Kubernetes 120230: the
checkpoint has the new CPUs, the update of the container failed, and the file keeps the old ones for ever.

Cost: one read of 11 µs a container (measured, with its parsing), twice a period, where a container has exclusive CPUs.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final, NamedTuple, final

import trio

from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.log import get_log
from reconciler.control.limit_check import EVERY_S, LimitCheck
from reconciler.control.reconciler import Reconciler
from reconciler.policies.reclaimed import ReclaimedForm
from reconciler.policies.shared import ConfineMode
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.wakeup import beat_after
from reconciler.runtime.workqueue import NODE
from state.cpu import OwnerCpus
from state.model import Container, ContainerKind, Phase, Pod, PodClass

NAME: Final = "owners of CPUs"
_LOG: Final = get_log("owner_check")
_MOST_SHOWN: Final = 4
"""Containers that are named beside one owner."""


class _OwnerPlace(NamedTuple):
    """A group that has processes, and the containers whose they are."""

    path: str
    pod: Pod
    containers: tuple[Container, ...]


@final
class OwnerCheck:
    """A component: compares exclusive CPUs with the files twice in each of the kubelet's periods."""

    def __init__(self, reconciler: Reconciler, *, period_s: Callable[[], float], enforces: Callable[[], bool]) -> None:
        """``period_s``: how long the kubelet takes to correct a CPU set. ``enforces``: whether bypassd writes."""
        self._reconciler = reconciler
        self._period_s = period_s
        self._enforces = enforces
        self._since: dict[str, float] = {}
        judge = reconciler.actuator.judge
        self.limits = LimitCheck(judge.control_files, judge.ledger, reconciler.inventory.layout)
        self._limits_at = 0.0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Check until cancelled, twice in each period."""
        task_status.started()
        while True:
            await trio.sleep_until(beat_after(self._period_s() / 2))
            await self.check()
            if trio.current_time() >= self._limits_at:
                self._limits_at = trio.current_time() + EVERY_S
                inventory = self._reconciler.inventory
                kubelet, pools = inventory.readings.kubelet, self._reconciler.pools
                reserved = kubelet.reserved | inventory.readings.topology.isolated
                reserved |= EMPTY if pools is None else pools.reserved
                await self.limits.check(inventory.pods, kubelet.policy, reserved)

    async def check(self) -> None:
        """Compare once; mark the node when what is reported differs from before."""
        now = trio.current_time()
        found = await self._found()
        self._since = {key: self._since.get(key, now) for key in found}
        lasting = {key: owner for key, owner in found.items() if now - self._since[key] >= self._period_s()}
        inventory = self._reconciler.inventory
        before = inventory.readings.owners
        if lasting == before:
            return
        for key in sorted(lasting.keys() - before.keys()):
            owner = lasting[key]
            _LOG.warning(
                "exclusive CPUs are not what the kernel's files have",
                container=key,
                record=str(owner.record),
                kernel=str(owner.kernel),
                beside="; ".join(owner.beside),
            )
        for key in sorted(before.keys() - lasting.keys()):
            _LOG.info("exclusive CPUs agree with the kernel's files again", container=key)
        inventory.take(owners=lasting)
        self._reconciler.dirty.mark(NODE)

    async def _found(self) -> dict[str, OwnerCpus]:
        """The contradictions of this moment, by key of the pools."""
        pools, policies = self._reconciler.pools, self._reconciler.policies
        if pools is None or not pools.dedicated:
            return {}
        pods = self._reconciler.inventory.pods
        cpus_of = self._reconciler.actuator.judge.control_files.cpus_in_effect
        kernel: dict[str, CpuSet] = {}
        """By key; of a pod in a machine of its own, which may have no group below its own, by uid too."""
        others: list[tuple[_OwnerPlace, CpuSet]] = []
        slices = TimeSlice()
        for place in _places(pods):
            cpus = cpus_of(place.path)
            if cpus:
                keys = [f"{place.pod.uid}/{item.name or item.id}" for item in place.containers]
                for key in (*keys, *([place.pod.uid] if place.pod.sandbox is not None else [])):
                    kernel[key] = kernel.get(key, EMPTY) | cpus
                others.append((place, cpus))
            await slices.checkpoint()
        found: dict[str, OwnerCpus] = {}
        for key, record in pools.dedicated.items():
            ours = key in pools.placed
            if ours and not (self._enforces() and _writes(policies.exclusive)):
                continue
            uid = key.partition("/")[0]
            have = kernel.get(key) or kernel.get(uid) or record
            if (pod := pods.get(uid)) is not None and pod.sandbox is not None:
                # The pod as a whole owns what its containers own.
                whole = CpuSet.union(cpus for owner, cpus in pools.dedicated.items() if owner.startswith(f"{uid}/"))
                have = record if have <= whole else have
            beside = [
                (place, cpus & record)
                for place, cpus in others
                if place.pod.uid != uid and cpus & record and not _is_meant(place.pod, policies, ours=ours)
            ]
            if have != record or beside:
                found[key] = OwnerCpus(
                    record=record,
                    kernel=have,
                    shared=CpuSet.union(cpus for _, cpus in beside),
                    beside=tuple(_text(place, cpus) for place, cpus in beside[:_MOST_SHOWN]),
                )
            await slices.checkpoint()
        return found


def _places(pods: Mapping[str, Pod]) -> Iterator[_OwnerPlace]:
    """The groups with processes of containers that the runtime has finished with, but for pause containers."""
    for pod in list(pods.values()):
        containers = tuple(
            item
            for item in pod.containers
            if item.phase is Phase.SETTLED
            and item.kind is not ContainerKind.SANDBOX
            and (item.name is not None or item.kind is not ContainerKind.UNKNOWN)
        )
        if pod.sandbox is not None:
            yield _OwnerPlace(pod.group.path, pod, containers)
            continue
        for item in containers:
            yield _OwnerPlace(item.group.path, pod, (item,))


def _writes(section: object) -> bool:
    """Whether a policy's settings are written."""
    return bool(getattr(section, "enabled", True)) and not getattr(section, "dry_run", False)


def _is_meant(pod: Pod, policies: PoliciesConfig, *, ours: bool) -> bool:
    """Whether the configuration lets this pod run on exclusive CPUs.

    ``ours``: bypassd chose the CPUs. System pods are not kept off those; under the kubelet's static policy they are.
    """
    if pod.pod_class is PodClass.RECLAIMED:
        anywhere = ours and policies.reclaimed.form is ReclaimedForm.QUOTA
        return policies.reclaimed.share_exclusive or not _writes(policies.reclaimed) or anywhere
    if not ours:
        return False
    return (
        pod.pod_class is PodClass.SYSTEM or policies.shared.confine is ConfineMode.NEVER or not _writes(policies.shared)
    )


def _text(place: _OwnerPlace, cpus: CpuSet) -> str:
    name = place.containers[0].name if len(place.containers) == 1 else None
    return f"{place.pod.title}{f'/{name}' if name else ''} may run on CPU {cpus}"

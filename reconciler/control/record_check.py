"""Compares what records say of containers with the kernel's files: a record protects nothing that the kernel denies.

`OwnerCheck`: exclusive CPUs, by the kubelet's checkpoint and bypassd's own plan. A difference that lasts is handed to
the inventory, and the plan protects the CPUs where the container runs. `LimitCheck`: limits, CPU sets and groups, by
the runtime's records. A difference that lasts is a condition of the node. Nothing is written.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, final

import trio

from cgroupfs.codecs import DEFAULT_PERIOD_US
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import CgroupError
from cgroupfs.files import REAL
from cgroupfs.lines import lines_of, stat_numbers
from cgroupfs.log import get_log
from cgroupfs.naming import Layout, QosClass
from cgroupfs.partitions import Partition, not_in_effect, partitions_beside, partitions_in
from cgroupfs.steps import ancestors
from reconciler.actuators.cgroup.control_files import ControlFileCache
from reconciler.control.reconciler import Reconciler
from reconciler.policies.reclaimed import ReclaimedForm
from reconciler.policies.shared import ConfineMode
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import first_of, size
from reconciler.runtime.wakeup import next_beat
from reconciler.runtime.workqueue import NODE
from reconciler.sources.bundles import InitProcess
from state.cpu import OwnerCpus
from state.ledger import Ledger
from state.model import Container, ContainerKind, CpuPolicy, Phase, Pod, PodClass, SourceStatus

LIMITS_NAME: Final = "limits and CPU sets"
LIMITS_EVERY_S: Final = 60.0
_SHOWN: Final = 3
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
"""The kernel rounds a limit of memory down to a whole number of pages."""
_ROUNDED_MILLI: Final = 10
"""systemd rounds a quota up to 10 ms of CPU time in a second."""
_CPU: Final = 1000
_BOUNDING: Final = ("cpu", "cpuset", "memory")
"""Controllers of which a process in another group is not bounded."""
_UNUSED_V2: Final = "\n0::/\n"
"""The last line where cgroup2 has no controllers, and runtimes put no process into it."""


class _Difference(NamedTuple):
    title: str
    text: str
    uid: str = ""
    """Of the pod; empty: of a directory above the pods."""
    unbounded: bool = False
    """No file of the container's groups bounds its first process."""


@final
class LimitCheck:
    """Compares records with files, and reports differences that last.

    They differ where an update failed half-way, another program wrote the file, or systemd reapplied a unit's older
    value. Cost: up to four reads of some 10 µs a container, and one of 20 µs for its first process.
    """

    def __init__(
        self,
        control_files: ControlFileCache,
        ledger: Ledger,
        layout: Layout,
        init: Callable[[str], InitProcess | None] = lambda _: None,
    ) -> None:
        """``init``: the first process of a container, by its id."""
        self._layout = layout
        self._init = init
        self._control_files = control_files
        self._ledger = ledger
        self._before: frozenset[_Difference] = frozenset()
        self._above: dict[str, CpuSet] = {}
        """The CPUs in effect of directories, by path, read once in each check."""
        self._beside: tuple[Partition, ...] | None = None
        """The node's partitions, searched once in each check that needs them: up to 5 ms."""
        self._lasting: tuple[_Difference, ...] = ()
        self.has_new = False
        """Whether the last check has found a difference that the one before had not."""

    async def check(self, pods: Mapping[str, Pod], policy: CpuPolicy, reserved: CpuSet = EMPTY) -> None:
        """Compare every container once. ``policy``: the kubelet's CPU manager's. ``reserved``: not for pods."""
        slices = TimeSlice()
        found: set[_Difference] = set()
        self._above.clear()
        self._beside = None
        kubepods = self._layout.kubepods
        for path in (kubepods, *(above for above in ancestors(kubepods) if above != "/")):
            # Pods are kept off reserved and isolated CPUs on purpose.
            found |= self._narrowed(path, path, spared=reserved)
        for qos in (QosClass.BURSTABLE, QosClass.BESTEFFORT):
            found |= self._narrowed(self._layout.qos(qos), self._layout.qos(qos))
        # A copy: a pass may change the pods at a checkpoint below.
        for pod in list(pods.values()):
            found |= self._narrowed(pod.title, pod.group.path, pod.uid)
            found |= self._partitioned(pod)
            spec_known = pod.spec_known
            for item in pod.workload if pod.sandbox is None else ():
                if item.phase is Phase.SETTLED and item.spec is not None:
                    name = f"{pod.title}/{item.name or item.id[:13]}"
                    # Under another policy the kubelet narrows the sets of containers itself.
                    found |= (
                        self._narrowed(name, item.group.path, pod.uid)
                        if policy is CpuPolicy.NONE and not item.spec.cpus
                        else set()
                    )
                    texts = (self._memory(item, spec_known=spec_known), self._quota(item, spec_known=spec_known))
                    found |= {_Difference(name, text, pod.uid) for text in texts if text}
                    if text := self._outside(item):
                        found.add(_Difference(name, text, pod.uid, unbounded=True))
            await slices.checkpoint()
        # In two checks in a row: a record and its file are not written at once.
        self._lasting = tuple(sorted(found & self._before))
        self.has_new = not found <= self._before
        self._before = frozenset(found)

    def status(self) -> SourceStatus:
        """Whether every limit in a record is the file's."""
        texts = [f"{item.title}: {item.text}" for item in self._lasting]
        detail = first_of(texts, _SHOWN) or "every limit and CPU set is as recorded"
        return SourceStatus(name=LIMITS_NAME, ok=not texts, age_s=0.0, detail=detail)

    def problems(self, uid: str) -> list[str]:
        return [f"{item.title}: {item.text}" for item in self._lasting if item.uid == uid]

    def unbounded(self) -> set[str]:
        """Uids of the pods with a first process outside of its container's groups."""
        return {item.uid for item in self._lasting if item.unbounded}

    def _narrowed(self, title: str, path: str, uid: str = "", spared: CpuSet = EMPTY) -> set[_Difference]:
        """What a v1 group lacks of the CPUs of the group above, unless bypassd manages the set of either.

        Neither the kubelet nor the runtime narrows these sets.
        """
        file = self._control_files.find(path, "cpu.set")
        if file is None or file.version != 1:
            return set()
        above = path.rpartition("/")[0] or "/"
        if any(entry.knob == "cpu.set" for group in (path, above) for entry in self._ledger.group(group)):
            return set()
        have = self._control_files.cpus_in_effect(path)
        # Those of a directory with many groups are read once.
        if above not in self._above:
            self._above[above] = self._control_files.cpus_in_effect(above)
        if have == self._above[above] or not have or not (lacks := self._above[above] - have - spared):
            return set()
        # The CPU was offline before bypassd's start (later ones `CpusetRepair` restores), or another agent keeps the
        # pods off it (koordlet's suppression of BE).
        text = f"its CPU set {have} lacks CPU {lacks} of the group above, which no record explains"
        return {_Difference(title, text, uid)}

    def _partitioned(self, pod: Pod) -> set[_Difference]:
        """Containers whose v2 CPU set is not in effect, and groups of theirs that keep others off CPUs.

        A partition takes CPUs from groups whose set still has them (`cgroupfs.partitions`).
        """
        files, hierarchy = self._control_files.files, self._control_files.hierarchy
        texts: list[str] = []
        for item in pod.containers if hierarchy.version("cpuset") == 2 else ():
            texts += map(str, partitions_in(hierarchy, item.group.path, files))
            try:
                wanted = CpuSet.parse(self._control_files.text_in("cpuset", item.group.path, "cpuset.cpus"))
            except (CgroupError, ValueError):
                continue
            have = not_in_effect(hierarchy, item.group.path, wanted, files)
            if have is not None:
                if self._beside is None:
                    self._beside = tuple(partitions_beside(hierarchy, files))
                taken = [str(found) for found in self._beside if found.cpus & wanted]
                why = f": {taken[0]}" if taken else ""
                texts.append(f"its CPU set {wanted} is not in effect, it runs on CPU {have}{why}")
        return {_Difference(pod.title, text, pod.uid) for text in texts}

    def _outside(self, container: Container) -> str:
        """Where the container's first process is, if not in its groups; empty: in them, or not known.

        Another program, a person, or a program of the container that may write ``cgroup.procs`` can move it. Then no
        file of its groups bounds it, and every file reads as wanted.
        """
        init = self._init(container.id)
        if init is None:
            return ""
        hierarchy = self._control_files.hierarchy
        directory = f"{hierarchy.root.rstrip('/')}/proc/{init.pid}"
        name = container.group.path.rpartition("/")[2]
        places: dict[str, list[str]] = {}
        try:
            text = REAL.read(directory, "cgroup")
            # The usual case, without parsing: the name is in every line.
            if text.count(name) >= text.count("\n") - text.endswith(_UNUSED_V2):
                return ""
            for controllers, path in _groups_of(text):
                bounding = [each for each in _BOUNDING if each in controllers] or (
                    # All of v2 is one hierarchy, without a controller's name.
                    [each for each in _BOUNDING if hierarchy.version(each) == 2] if controllers == {""} else []
                )
                # A container's name is its own; where the path begins depends on the namespace of the reader.
                if bounding and name not in path.split("/"):
                    places.setdefault(path, []).extend(bounding)
            # Field 22: clock ticks from the boot to its start.
            if not places or (init.start and stat_numbers(REAL.read(directory, "stat"), 22) != [init.start]):
                return ""  # the pid is another process's by now
        except (OSError, ValueError):
            return ""  # it has exited
        where = "; ".join(f"{path} ({', '.join(sorted(each))})" for path, each in sorted(places.items()))
        return f"its first process {init.pid} is in another group, which its settings do not bound: {where}"

    def _memory(self, container: Container, *, spec_known: bool) -> str:
        record = container.spec.memory_bytes if container.spec is not None else None
        admitted = container.limits.memory_bytes
        if not (record or admitted or spec_known):
            return ""
        # Either counts: crun's record does not follow a resize that the kubelet has admitted.
        recorded = [number for number in (record, admitted) if number and number > 0]
        known, have = self._read(container, "memory.max")
        if not known or (not recorded and (have is None or not spec_known)):
            return ""
        if have is not None and have // _PAGE in {number // _PAGE for number in recorded}:
            return ""
        return _differ("memory limit", [size(number) for number in recorded[:1]], None if have is None else size(have))

    def _quota(self, container: Container, *, spec_known: bool) -> str:
        if (recorded := recorded_quotas(container, spec_known=spec_known)) is None:
            return ""
        known, quota = self._read(container, "cpu.quota")
        if not known or (quota is None and not recorded):
            return ""
        period_known, period = self._read(container, "cpu.period")
        if not period_known or not period:
            return ""
        have = None if quota is None else quota * _CPU // period
        if have is not None and any(number - 1 <= have <= number + _ROUNDED_MILLI for number in recorded):
            return ""
        texts = [f"{number / _CPU:g}" for number in recorded[:1]]
        return _differ("CPU quota", texts, None if have is None else f"{have / _CPU:g}")

    def _read(self, container: Container, knob: str) -> tuple[bool, int | None]:
        """Whether the file's value is known and not bypassd's, and the value; None: no limit."""
        file = self._control_files.find(container.group.path, knob)
        # A file with a value of bypassd is compared by the reconciler.
        if file is None or self._ledger.get(file.key) is not None:
            return False, None
        try:
            value = file.knob.decode(self._control_files.text(file), file.version)
        except (CgroupError, ValueError):
            return False, None
        return value is None or isinstance(value, int), value if isinstance(value, int) else None


def recorded_quotas(container: Container, *, spec_known: bool) -> list[int] | None:
    """The quotas, in thousandths of a CPU, that the runtime's record and the kubelet have for a container.

    None where that is not known: without a record, and where a resize that only the pod's spec shows may have added
    one. crun's record does not follow a resize.
    """
    spec, admitted = container.spec, container.limits.cpu_milli
    if spec is None:
        return None
    record = (spec.quota_us or 0) * _CPU // (spec.period_us or DEFAULT_PERIOD_US)
    found = [number for number in (record, admitted) if number and number > 0]
    return found if found or spec_known else None


def _differ(what: str, recorded: Sequence[str], have: str | None) -> str:
    record = f"a {what} of {recorded[0]}" if recorded else f"no {what}"
    return f"the runtime's record has {record}, its file has {f'no {what}' if have is None else f'a {what} of {have}'}"


def _groups_of(text: str) -> Iterator[tuple[set[str], str]]:
    """The controllers of each hierarchy, and the group of a process there. Source: cgroups(7), /proc/PID/cgroup."""
    for line in lines_of(text):
        _, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if colon:
            yield set(controllers.split(",")), path


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
    """A component: compares exclusive CPUs with the files twice in each of the kubelet's periods.

    Kubernetes 120230: the checkpoint has the new CPUs, the update of the container failed, and the file keeps the old
    ones for ever. Cost: one read of 11 µs a container (measured, with its parsing), where one has exclusive CPUs.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        *,
        period_s: Callable[[], float],
        enforces: Callable[[], bool],
        bounds_written: Callable[[], int],
    ) -> None:
        """``period_s``: how long the kubelet takes to correct a CPU set. ``enforces``: whether bypassd writes.

        ``bounds_written``: how often another program has written a CPU set or limit
        (`reconciler.actuators.cgroup.conflict.WriteAttribution`).
        """
        self._reconciler = reconciler
        self._period_s = period_s
        self._enforces = enforces
        self._bounds_written = bounds_written
        self._written = 0
        self._since: dict[str, float] = {}
        judge = reconciler.actuator.judge
        inventory = reconciler.inventory
        self.limits = LimitCheck(judge.control_files, judge.ledger, inventory.layout, inventory.init)
        self._limits_at = 0.0

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        while True:
            await next_beat(self._period_s() / 2)
            await self.check()
            written = self._bounds_written()
            # Sooner where another program has written such a file; a new difference is compared once more.
            if trio.current_time() >= self._limits_at or written != self._written or self.limits.has_new:
                self._written, self._limits_at = written, trio.current_time() + LIMITS_EVERY_S
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
        # The kubelet corrects a wrong set within one period of its reconcile loop.
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
    # A copy: the caller lets passes run between two groups.
    for pod in list(pods.values()):
        containers = tuple(
            item
            for item in pod.workload
            if item.phase is Phase.SETTLED and (item.name is not None or item.kind is not ContainerKind.UNKNOWN)
        )
        if pod.sandbox is not None:
            # No group below the pod's has its processes.
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

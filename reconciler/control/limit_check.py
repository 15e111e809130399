"""Compares the limits and CPU sets that follow from the runtime's records with the kernel's files.

Kubelet and policies use the record; what is in force is the file. They differ where an update failed half-way, where
another program wrote the file, or where systemd reapplied a unit's older value. Files that bypassd manages are compared
by the reconciler, and are left out here.

On v1 it is the same with CPU sets: a CPU that was offline leaves every set but the root's for good, and neither the
kubelet nor the runtime narrows the set of kubepods, of a QoS directory or of a pod, nor, under the CPU manager policy
none, of a container whose record names no CPUs. What a group lacks of the group above was taken before bypassd's start,
or by another program. `reconciler.control.cpu_hotplug` restores what it has seen go. Nothing is written here: no record
separates such a CPU from one that an administrator or another agent (koordlet's suppression of BE) keeps the pods off.
In kubepods a CPU that is reserved by the kubelet's or bypassd's configuration, or isolated, is not missed.

On v2 a group may run on other CPUs than its set has, also where bypassd manages it: partitions take them
(`cgroupfs.partitions`).

A limit that the kubelet has admitted counts as recorded: crun's record does not follow a resize. A difference at two
looks in a row is a condition of the node, which names both values; nothing is written, as the file's owner is the
kubelet.

Cost: up to four reads of some 10 µs a container, once a minute.
"""

import os
from collections.abc import Mapping
from typing import Final, NamedTuple, final

from cgroupfs.codecs import DEFAULT_PERIOD_US
from cgroupfs.cpuset import EMPTY, CpuSet
from cgroupfs.errors import CgroupError
from cgroupfs.naming import Layout, QosClass
from cgroupfs.partitions import not_in_effect, partitions_beside, partitions_in
from cgroupfs.steps import ancestors
from reconciler.actuators.cgroup.control_files import ControlFileCache
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import first_of, size
from state.ledger import Ledger
from state.model import Container, ContainerKind, CpuPolicy, Phase, Pod, SourceStatus

NAME: Final = "limits and CPU sets"
EVERY_S: Final = 60.0
_SHOWN: Final = 3
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")
"""The kernel rounds a limit of memory down to a whole number of pages."""
_ROUNDED_MILLI: Final = 10
"""systemd rounds a quota up to 10 ms of CPU time in a second."""
_CPU: Final = 1000


class _Difference(NamedTuple):
    title: str
    text: str
    uid: str = ""
    """Of the pod; empty: of a directory above the pods."""


@final
class LimitCheck:
    """Compares records with files, and reports differences that last."""

    def __init__(self, control_files: ControlFileCache, ledger: Ledger, layout: Layout) -> None:
        self._layout = layout
        self._control_files = control_files
        self._ledger = ledger
        self._before: frozenset[_Difference] = frozenset()
        self._above: dict[str, CpuSet] = {}
        """By path, the CPUs in effect of directories in this check."""
        self._lasting: tuple[_Difference, ...] = ()

    async def check(self, pods: Mapping[str, Pod], policy: CpuPolicy, reserved: CpuSet = EMPTY) -> None:
        """Compare every container once. ``policy``: the kubelet's CPU manager's. ``reserved``: not for pods."""
        slices = TimeSlice()
        found: set[_Difference] = set()
        self._above.clear()
        kubepods = self._layout.kubepods
        for path in (kubepods, *(above for above in ancestors(kubepods) if above != "/")):
            found |= self._narrowed(path, path, spared=reserved)
        for qos in (QosClass.BURSTABLE, QosClass.BESTEFFORT):
            found |= self._narrowed(self._layout.qos(qos), self._layout.qos(qos))
        for pod in list(pods.values()):
            found |= self._narrowed(pod.title, pod.group.path, pod.uid)
            found |= self._partitioned(pod)
            for item in pod.containers if pod.sandbox is None else ():
                if item.kind is not ContainerKind.SANDBOX and item.phase is Phase.SETTLED and item.spec is not None:
                    name = f"{pod.title}/{item.name or item.id[:13]}"
                    found |= (
                        self._narrowed(name, item.group.path, pod.uid)
                        if policy is CpuPolicy.NONE and not item.spec.cpus
                        else set()
                    )
                    found |= {
                        _Difference(name, text, pod.uid) for text in (self._memory(item), self._quota(item)) if text
                    }
            await slices.checkpoint()
        self._lasting = tuple(sorted(found & self._before))
        self._before = frozenset(found)

    def status(self) -> SourceStatus:
        """Whether every limit in a record is the file's."""
        texts = [f"{item.title}: {item.text}" for item in self._lasting]
        detail = first_of(texts, _SHOWN) or "every limit and CPU set is as recorded"
        return SourceStatus(name=NAME, ok=not texts, age_s=0.0, detail=detail)

    def problems(self, uid: str) -> list[str]:
        """The differences of one pod, as text."""
        return [f"{item.title}: {item.text}" for item in self._lasting if item.uid == uid]

    def _narrowed(self, title: str, path: str, uid: str = "", spared: CpuSet = EMPTY) -> set[_Difference]:
        """What a v1 group lacks of the CPUs of the group above, unless bypassd manages the set of either."""
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
        lacks = self._above[above] - have - spared
        if not have or not lacks:
            return set()
        text = f"its CPU set {have} lacks CPU {lacks} of the group above, which no record explains"
        return {_Difference(title, text, uid)}

    def _partitioned(self, pod: Pod) -> set[_Difference]:
        """Containers whose v2 CPU set is not in effect, and groups of theirs that keep others off CPUs."""
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
                taken = [str(found) for found in partitions_beside(hierarchy, files) if found.cpus & wanted]
                why = f": {taken[0]}" if taken else ""
                texts.append(f"its CPU set {wanted} is not in effect, it runs on CPU {have}{why}")
        return {_Difference(pod.title, text, pod.uid) for text in texts}

    def _memory(self, container: Container) -> str:
        record = container.spec.memory_bytes if container.spec is not None else None
        if not record or record < 0:
            return ""
        known, have = self._read(container, "memory.max")
        admitted = container.limits.memory_bytes
        pages = {number // _PAGE for number in (record, admitted) if number}
        if not known or (have is not None and have // _PAGE in pages):
            return ""
        shown = "no memory limit" if have is None else f"a memory limit of {size(have)}"
        return f"the runtime's record has a memory limit of {size(record)}, its file has {shown}"

    def _quota(self, container: Container) -> str:
        spec = container.spec
        if spec is None or not spec.quota_us or spec.quota_us < 0:
            return ""
        record = spec.quota_us * _CPU // (spec.period_us or DEFAULT_PERIOD_US)
        known, quota = self._read(container, "cpu.quota")
        period_known, period = self._read(container, "cpu.period")
        if not known or not period_known or not period:
            return ""
        have = None if quota is None else quota * _CPU // period
        expected = [number for number in (record, container.limits.cpu_milli) if number]
        if have is not None and any(number - 1 <= have <= number + _ROUNDED_MILLI for number in expected):
            return ""
        shown = "no CPU quota" if have is None else f"a CPU quota of {have / _CPU:g}"
        return f"the runtime's record has a CPU quota of {record / _CPU:g}, its file has {shown}"

    def _read(self, container: Container, knob: str) -> tuple[bool, int | None]:
        """Whether the file's value is known and not bypassd's, and the value; None: no limit."""
        file = self._control_files.find(container.group.path, knob)
        if file is None or self._ledger.get(file.key) is not None:
            return False, None
        try:
            value = file.knob.decode(self._control_files.text(file), file.version)
        except (CgroupError, ValueError):
            return False, None
        return value is None or isinstance(value, int), value if isinstance(value, int) else None

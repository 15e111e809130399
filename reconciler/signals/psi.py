"""Pressure of the node and of each pod, from the kernel's stall totals between two passes and not its averages.

A pod's files are in its directory in the cgroup2 tree, in the v1 cpuacct directory of vendor kernels (``psi_v1=1``), or
in a private cgroup2 mount (`reconciler.signals.privatepsi`).

**Cost**: three reads of 1-3 µs a pod. Units: percent of wall time. Source: kernel documentation, accounting/psi.
"""

import errno
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol, final

from cgroupfs.hierarchy import UNIFIED
from cgroupfs.pressure import PressureResource, StallTotals, parse_totals
from cgroupfs.private import private_tree
from reconciler.runtime.cooperative import TimeSlice
from reconciler.signals.counter_delta import CounterDelta, CounterIncrease
from reconciler.signals.podcpu import PodCpu, QuotaLookup
from reconciler.signals.processes import same_groups
from reconciler.signals.readers import BaseReader, SampleContext, SampleSheet, SharedReaders
from state.evidence import NODE
from state.model import Pod

SIGNALS: Final = tuple(f"{resource}.pressure{full}" for resource in PressureResource for full in ("", "_full"))
_FILE: Final = {resource: f"{resource}.pressure" for resource in PressureResource}
_SOME: Final = _FILE
_FULL: Final = {resource: f"{resource}.pressure_full" for resource in PressureResource}
_OF_CPU: Final = "cpu."
_SEARCH_S: Final = 30.0
"""Between two searches of a pod's files; of one that has none, `_SEARCH_MISSING_S`."""
_SEARCH_MISSING_S: Final = 10.0
_LEAST: Final = 0.1
"""Confidence where throttling explains all of the pressure."""
_REMEDY: Final = {
    "boot": "no pressure information: not in this kernel, or disabled; boot with psi=1 (and psi_v1=1 on kernels "
    "that have it)",
    "full": "no full CPU pressure in this kernel (added in 5.13)",
    "pods": "no pressure files for pods: no cgroup2 tree contains their processes; enable interference.private_cgroup2",
    "private": "no pressure files for pods: the pods' private groups are not filled yet",
    "off": "pressure is disabled for this group (cgroup.pressure)",
}


class PressureGroups(Protocol):
    """Directories with pressure files made for the pods; `privatepsi.PrivateGroups` provides them."""

    def directory(self, uid: str) -> str | None: ...

    def update(self, pods: Mapping[str, Pod], now: float) -> None:
        """The pods that there are: make and fill what is missing, in its own time."""

    @property
    def problem(self) -> str | None:
        """Why not all of them are filled."""

    async def aclose(self) -> None: ...


class _PressureFile(NamedTuple):
    directory: str | None
    pod: Pod
    again_at: float


@final
class Psi(BaseReader):
    """A `Reader`. ``private``: where pods' groups are made for this; None: they are not."""

    def __init__(
        self, shared: SharedReaders, quotas: QuotaLookup | None, *, private: PressureGroups | None = None
    ) -> None:
        super().__init__(shared)
        self._hierarchy = shared.means.hierarchy
        self._quotas = quotas
        self._private = private
        self._without_pods = _REMEDY["private" if private is not None and shared.means.private_cgroup2 else "pods"]
        self._node = f"{shared.means.root.rstrip('/')}/proc/pressure"
        self._grew = CounterDelta()
        self._located: dict[str, _PressureFile] = {}
        self._node_again_at = 0.0
        """The node has no pressure before: it has some from its boot on, or never."""

    def problems(self) -> Mapping[str, str]:
        private = self._private.problem if self._private is not None else None
        return {**self._problems, **(dict.fromkeys(SIGNALS, private) if private is not None else {})}

    async def aclose(self) -> None:
        if self._private is not None:
            await self._private.aclose()

    async def read(self, scene: SampleContext, sheet: SampleSheet, now: float) -> None:
        self._grew.rotate()
        self._problems = {}
        texts = set(scene.wanted)
        wanted = [
            pressure_resource
            for pressure_resource in PressureResource
            if {_SOME[pressure_resource], _FULL[pressure_resource]} & texts
        ]
        pods = scene.view.pods
        if self._private is not None:
            self._private.update(pods, now)
        absent = [self._read_node(resource, sheet, now) for resource in wanted]
        if absent and all(absent) and now >= self._node_again_at:
            self._node_again_at = now + _SEARCH_S
        slices = TimeSlice()
        located: dict[str, _PressureFile] = {}
        missing = 0
        for uid, pod in pods.items():
            file = located[uid] = self._locate(pod, now)
            if file.directory is None:
                missing += bool(pod.containers)
                continue
            if not self._read_pod(pod, file.directory, wanted, sheet):
                # Its group may have been removed or replaced: the next pass searches again.
                del located[uid]
            await slices.checkpoint()
        self._located = located
        # Of all pods, not of some: then it is the node that has no such files.
        if missing and missing == sum(1 for pod in pods.values() if pod.containers):
            for resource in wanted:
                for signal in (_SOME[resource], _FULL[resource]):
                    self._problems.setdefault(signal, self._without_pods)

    def _read_node(self, resource: PressureResource, sheet: SampleSheet, now: float) -> bool:
        """True: the kernel has none."""
        if now < self._node_again_at:
            self._without(resource)
            return True
        totals = self._totals(self._node, str(resource), resource)
        if totals is None:
            return self._problems.get(_SOME[resource]) == _REMEDY["boot"]
        grew = self._grew.grown(("node", resource), self._clock(), tuple(totals))
        if grew is not None:
            # The node as a whole has no full one of the CPU: the line is there, and always zero.
            full = None if resource is PressureResource.CPU else _percent(grew, 1)
            sheet.enter(NODE, {_SOME[resource]: _percent(grew, 0), _FULL[resource]: full})
        return False

    def _without(self, resource: PressureResource) -> None:
        for signal in (_SOME[resource], _FULL[resource]):
            self._problems[signal] = _REMEDY["boot"]

    def _read_pod(self, pod: Pod, directory: str, wanted: Sequence[PressureResource], sheet: SampleSheet) -> bool:
        counts: list[int | None] = []
        at_s = self._clock()
        reported = False
        for resource in wanted:
            totals = self._totals(directory, _FILE[resource], resource)
            counts += (None, None) if totals is None else totals
            reported = reported or totals is not None
            if totals is not None and totals.full_us is None and resource is PressureResource.CPU:
                self._problems[_FULL[resource]] = _REMEDY["full"]
        if not reported:
            return False
        grew = self._grew.grown((pod.group.inode or pod.uid, directory, *wanted), at_s, tuple(counts))
        if grew is None:
            return True
        values: dict[str, float | None] = {}
        per_percent = 1e4 * grew.interval_s
        subject = f"pod:{pod.uid}"
        names = [signal for resource in wanted for signal in (_SOME[resource], _FULL[resource])]
        for signal, stalled_us in zip(names, grew.by, strict=True):
            if stalled_us is None:
                continue
            # Reading takes time, too: a little more than all is all.
            percent = min(100.0, stalled_us / per_percent)
            if percent and signal.startswith(_OF_CPU):
                value, confidence = self._without_quota(pod.uid, percent)
                sheet.put(subject, signal, value, confidence=confidence)
            else:
                values[signal] = percent
        sheet.enter(subject, values)
        return True

    def _without_quota(self, uid: str, percent: float) -> tuple[float, float]:
        """CPU pressure without throttling, and its confidence: the share that throttling does not explain."""
        throttling = self._quotas.throttling(uid) if self._quotas is not None else None
        if throttling is None:
            return percent, 1.0
        # Throttled time is summed over CPUs and pressure is not: with several CPUs stopped at once too much is
        # subtracted, rather than that the effect of a quota is attributed to a neighbour.
        own = min(percent, 100.0 * throttling.cpus)
        return percent - own, max(_LEAST, 1.0 - own / percent)

    def _totals(self, directory: str, file: str, resource: PressureResource) -> StallTotals | None:
        try:
            return parse_totals(self._files.read(directory, file))
        except ValueError as exc:
            self._problems[f"{resource}.pressure"] = f"{directory}/{file}: {exc}"
        except OSError as exc:
            # Any other error of a pod's file is its group's, removed meanwhile: the caller searches again.
            if directory == self._node or exc.errno in {errno.EOPNOTSUPP, errno.ENOSYS}:
                self._without(resource)
        return None

    def _locate(self, pod: Pod, now: float) -> _PressureFile:
        """Where this pod's files are; searched again when its groups change, and at intervals."""
        known = self._located.get(pod.uid)
        if known is not None and now < known.again_at and (known.pod is pod or same_groups(known.pod, pod)):
            # A private group is filled in its own time: it may be ready by now.
            if known.directory is None and self._private is not None:
                return known._replace(directory=self._private.directory(pod.uid))
            return known
        directory = self._find(pod)
        return _PressureFile(directory, pod, now + (_SEARCH_MISSING_S if directory is None else _SEARCH_S))

    def _find(self, pod: Pod) -> str | None:
        path = pod.group.path
        if self._hierarchy.version(UNIFIED) is not None:
            directory = self._hierarchy.directory(UNIFIED, path)
            # On hybrid nodes runc puts containers there from 1.1 on. A directory without the pod's processes shows no
            # pressure ever.
            if self._hierarchy.trigger == UNIFIED or self._populated(directory):
                if self._is_readable(directory):
                    return directory
                if self._switched_off(directory):
                    self._problems["cpu.pressure"] = f"{directory}: {_REMEDY['off']}"
        if self._hierarchy.version("cpuacct") == 1:
            directory = self._hierarchy.directory("cpuacct", path)
            if self._is_readable(directory):
                return directory
        return self._private.directory(pod.uid) if self._private is not None else None

    def _populated(self, directory: str) -> bool:
        try:
            return "populated 1" in self._files.read(directory, "cgroup.events")
        except OSError:
            return False

    def _is_readable(self, directory: str) -> bool:
        """Whether one of the three files can be read: a backport may lack some."""
        for resource in PressureResource:
            # By reading: an existing file may still fail with "not supported".
            try:
                parse_totals(self._files.read(directory, f"{resource}.pressure"))
            except (OSError, ValueError):
                continue
            return True
        return False

    def _switched_off(self, directory: str) -> bool:
        try:
            return self._files.read(directory, "cgroup.pressure").strip() == "0"
        except OSError:
            return False


def _percent(grew: CounterIncrease, index: int) -> float | None:
    """Stall in percent of the time between two readings. Reading takes time, too: a little more than all is all."""
    rate = grew.rate(index)
    return None if rate is None else min(100.0, rate / 1e4)


def build(shared: SharedReaders) -> Psi:
    from reconciler.signals.privatepsi import PrivateGroups

    means = shared.means
    tree = private_tree(means.hierarchy) if means.root == "/" else None
    groups = PrivateGroups(tree, shared.processes, wanted=means.private_cgroup2) if tree is not None else None
    return Psi(shared, shared.reader(PodCpu), private=groups)

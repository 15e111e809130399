"""CPU hot-plug: detect a change of the online CPUs, undo the kernel's changes of cpusets, reconcile everything.

On cgroup v1 a CPU that is set offline is removed from every cpuset, and only the root cpuset gets it again when it
returns. The kubelet never rewrites its directories, and under policy none no container's either: every pod of the node,
and every later one (a new directory copies its parent's set), would remain off that CPU until the machine reboots.

Source: kernel/cgroup/cpuset.c (cpuset_hotplug_workfn, remove_tasks_in_empty_cpuset).
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple, final

from cgroupfs.cpuset import EMPTY, MAX_CPUS, CpuSet
from cgroupfs.files import REAL, FileOps
from cgroupfs.knobs import CATALOG
from cgroupfs.log import get_log
from cgroupfs.naming import GroupKind, Layout, QosClass
from cgroupfs.steps import ancestors
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.inner_groups import walk
from reconciler.control.reconciler import Reconciler
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import plural
from reconciler.sources.hotplug import CpuChange
from state.ledger import Ledger
from state.model import Pod

_LOG: Final = get_log("cpu_hotplug")
_KNOB: Final = "cpu.set"
_FILE: Final = "cpuset.cpus"
_AT_ONCE: Final = 32
"""Groups inside that are written before another pass may run: 13 ms with 3,000 groups, as each write visits all."""
_EVERY: Final = CpuSet.span(MAX_CPUS)


class RestoredCpus(NamedTuple):
    """One group that got CPUs back; with an ``error``, did not."""

    path: str
    cpus: CpuSet
    error: str = ""


@final
class CpusetRepair:
    """Restores CPUs that have returned to cpusets that the kernel narrowed.

    `changed` is what the hot-plug source calls.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        judge: ChangeDetector,
        ledger: Ledger,
        layout: Layout,
        *,
        files: FileOps = REAL,
        tell: Callable[[str], None],
    ) -> None:
        """``tell`` is called with one log line per change."""
        self._reconciler = reconciler
        self._judge = judge
        self._ledger = ledger
        self._layout = layout
        self._files = files
        self._tell = tell
        self._lacking: dict[str, CpuSet] = {}
        """CPUs that a directory lacked before the change: its pods are kept off them on purpose."""
        online = reconciler.inventory.readings.topology.online
        for path in self._above():
            if have := self._read(path):
                self._lacking[path] = online - have

    async def changed(self, change: CpuChange) -> None:
        """The online CPUs have changed. Waits for the reconcile pass that is under way."""
        judge, knowledge = self._judge, self._reconciler.inventory
        given: list[RestoredCpus] = []
        emptied: list[str] = []
        async with self._reconciler.paused() as let_pass:
            knowledge.take(topology=change.after)
            # On v2 the kernel keeps the configured set, and nothing has to be done.
            if judge.hierarchy.version("cpuset") == 1:
                directories = self._directories()
                self._took(change.taken, directories)
                # The kernel's own change of a file is then no foreign write.
                judge.control_files.unplugged |= dict.fromkeys(change.taken, time.time())
                if change.taken:
                    emptied = await self._emptied(knowledge.pods.values())
                given = await self._give_back(change.back, knowledge.pods.values(), let_pass)
                self._reconciler.actuator.cpus_changed()
                for path in directories:
                    judge.control_files.load(path, (_KNOB,))
        message = change.describe
        if emptied:
            more = f" and {len(emptied) - 1} more" if len(emptied) > 1 else ""
            message += f"; no CPU left for {emptied[0]}{more}: its processes run in the parent group until it restarts"
        if failed := [cpus for cpus in given if cpus.error]:
            message += f"; cannot restore the CPUs of {failed[0].path}: {failed[0].error}"
        if done := len(given) - len(failed):
            message += f"; restored in {plural(done, 'cpuset')} from which the kernel had removed it"
        self._tell(message)
        self._reconciler.dirty.mark_all("hotplug")

    def _directories(self) -> dict[str, CpuSet]:
        """The sets of the directories above containers, as they were read last."""
        directories: dict[str, CpuSet] = {}
        for (path, knob), value in self._judge.control_files.actual.items():
            if knob == _KNOB and isinstance(value, CpuSet):
                name = self._layout.parse(path)
                if name is not None and name.kind is not GroupKind.CONTAINER:
                    directories[path] = value
        return directories

    def _took(self, cpus: CpuSet, known: Mapping[str, CpuSet]) -> None:
        # Without the pods that were removed.
        there = {*known, *self._above()}
        self._lacking = {path: lacks for path, lacks in self._lacking.items() if path in there}
        for path, have in known.items():
            above = known.get(path.rpartition("/")[0])
            if above is not None:
                lacked = (above - have) & cpus
                self._lacking[path] = (self._lacking.get(path, EMPTY) - cpus) | lacked

    async def _emptied(self, pods: Iterable[Pod]) -> list[str]:
        """Containers without any CPU: the kernel has moved their processes to the group above.

        They are not moved back: such a container runs on its pod's CPUs until it is restarted.
        """
        texts: list[str] = []
        slices = TimeSlice()
        for pod in pods:
            texts += [container.group.path for container in pod.containers if self._read(container.group.path) == EMPTY]
            await slices.checkpoint()
        return texts

    async def _give_back(
        self, cpus: CpuSet, pods: Iterable[Pod], let_pass: Callable[[], Awaitable[None]]
    ) -> list[RestoredCpus]:
        """Widen every group that lost the CPUs, parents first. Raises no error: a group may have been removed."""
        widened: list[tuple[str, CpuSet, CpuSet]] = []
        given: list[RestoredCpus] = []
        have = {"": self._read("/")}  # the root is "" as the parent of ``/kubepods``
        slices = TimeSlice()
        for path, uid, allowed in self._groups(pods) if cpus else ():
            above, now = have.get(path.rpartition("/")[0]), self._read(path)
            if above is None or now is None:
                continue
            back = (cpus & above & allowed) - now - self._lacking.get(path, EMPTY)
            if back and self._may_write(path, uid):
                error = self._write(path, now | back)
                given.append(RestoredCpus(path, back, error))
                if not error:
                    widened += [(path, now, now | back)] if uid is not None else []
                    now |= back
            have[path] = now
            await slices.checkpoint()
        for path, before, after in widened:
            given += await self._widen_inside(path, before, after, let_pass)
        return given

    async def _widen_inside(
        self, top: str, before: CpuSet, after: CpuSet, let_pass: Callable[[], Awaitable[None]]
    ) -> list[RestoredCpus]:
        """Widen groups inside a pod or a container, as of docker, that had all of the set above them, parents first.

        No file has what a smaller one had before the CPU was removed.
        """
        given: list[RestoredCpus] = []
        changed = {top: (before.mask, after.mask)}
        knob = CATALOG[_KNOB]
        slices = TimeSlice()
        for group in walk(self._judge.hierarchy, self._files, ("cpuset", top, _FILE), knob, 1):
            was, now = next(changed[above] for above in ancestors(group.path) if above in changed)
            if group.now == was and not any(entry.knob == _KNOB for entry in self._ledger.group(group.path)):
                cpus = CpuSet.from_mask(now)
                given.append(RestoredCpus(group.path, cpus - before, self._write(group.path, cpus)))
                # No mask equals -1: nothing below a group that could not be written is widened.
                changed[group.path] = (-1, -1) if given[-1].error else (was, now)
                if len(given) % _AT_ONCE == 0:
                    await let_pass()
            else:
                # Its set was not that of the group above, so none below it had that either.
                changed[group.path] = -1, -1
            await slices.checkpoint()
        return given

    def _may_write(self, path: str, uid: str | None) -> bool:
        """False for files that the plan manages, for held targets, and for everything in a mode that writes nothing."""
        mode = self._judge.mode
        # A file with a setting of bypassd is written by the plan, which is made again for the new topology.
        if not mode.enforce or any(entry.knob == _KNOB for entry in self._ledger.group(path)):
            return False
        return mode.hold_on(path, _KNOB, uid) is None

    def _above(self) -> list[str]:
        """kubepods, and the directories above it where the kubelet was given a root of its own."""
        parts = self._layout.kubepods.strip("/").split("/")
        return [f"/{'/'.join(parts[:depth])}" for depth in range(1, len(parts) + 1)]

    def _groups(self, pods: Iterable[Pod]) -> Iterator[tuple[str, str | None, CpuSet]]:
        """Every group from the top down, with its pod's uid and the CPUs that its owner wants it to have."""
        for path in (*self._above(), self._layout.qos(QosClass.BURSTABLE), self._layout.qos(QosClass.BESTEFFORT)):
            yield path, None, _EVERY
        for pod in pods:
            yield pod.group.path, pod.uid, _EVERY
            for container in pod.containers:
                spec = container.spec.cpus if container.spec is not None else None
                yield container.group.path, pod.uid, _parsed(spec) if spec else _EVERY

    def _read(self, path: str) -> CpuSet | None:
        try:
            return CpuSet.parse(self._files.read(self._judge.hierarchy.directory("cpuset", path), _FILE))
        except (OSError, ValueError):
            return None

    def _write(self, path: str, cpus: CpuSet) -> str:
        try:
            # Not in the ledger: it is the owner's value again, which `restore` must not undo.
            self._files.write(self._judge.hierarchy.directory("cpuset", path), _FILE, str(cpus))
        except OSError as exc:
            _LOG.warning("cannot restore a CPU that came online", path=path, error=exc.strerror)
            return exc.strerror or str(exc)
        return ""


def _parsed(text: str) -> CpuSet:
    try:
        return CpuSet.parse(text)
    except ValueError:
        return EMPTY  # what the owner wants is not known: no CPU is given back

"""Recognizes values of an earlier run of bypassd that no store has: its state directory was deleted, or is another.

Such a value is not the node's own: a quota of the besteffort directory would bound BE work for ever, as no plan wants
it and no ledger has its original. A start without any record compares the files of the groups of BE work with what
every kubelet and the runtime's own record leave there: a BestEffort pod has 2 shares and no quota, no pod is in the
idle class, the besteffort directory has no quota and no soft bound, a container what its record says. A difference is
entered in the ledger as bypassd's, with that value as the original, so that it follows the plan or is restored; one
alert names what was found. In a mode that writes nothing, and while it cannot be recorded, it is a problem, also after
a restart (`reconciler.control.persistence`).
"""

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

from cgroupfs.naming import QosClass
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.compare import FileWrite, GroupTarget
from reconciler.control.inventory import Inventory
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import plural
from state.model import ContainerKind, CpuPolicy, GroupRef, Phase, SourceStatus

NAME: Final = "values of an earlier run"
_SHOWN: Final = 3
_OF_DIRECTORY: Final = ("cpu.quota", "memory.high", "memory.soft")
_OF_POD: Final = ("cpu.idle", "cpu.quota", "cpu.weight")
_OF_CONTAINER: Final = ("cpu.quota", "cpu.weight", "memory.max")


class _Candidate(NamedTuple):
    target: GroupTarget
    knobs: tuple[str, ...]


@final
class EarlierRun:
    """See the module's text. `check` is called in each whole pass, before it is planned."""

    def __init__(
        self,
        actuator: CgroupActuator,
        inventory: Inventory,
        *,
        unrecorded: bool,
        inode: Callable[[str], int],
        alert: Callable[[str], None],
    ) -> None:
        """``unrecorded``: the store has nothing of an earlier run. ``inode``: of a group's directory, 0: gone."""
        self._actuator = actuator
        self._inventory = inventory
        self._open = unrecorded
        self._inode = inode
        self._alert = alert
        self._left = ""

    async def check(self) -> None:
        """Enter what is found, once; in a mode that writes nothing only report it."""
        if not self._open:
            return
        judge, slices = self._actuator.judge, TimeSlice()
        found: list[FileWrite] = []
        for candidate in self._candidates():
            found += judge.unrecorded_values(candidate.target, candidate.knobs)
            await slices.checkpoint()
        text = _text(found)
        if not judge.enforce:
            self._left = text
            return
        if not found or await self._actuator.take_over(found):
            self._open, self._left = False, ""
            if found:
                self._alert(f"{text}: taken as left by an earlier bypassd; those are the originals now")
        else:
            self._left = text

    @property
    def is_open(self) -> bool:
        """Whether values of an earlier run may be there that no record has: for the next run, too."""
        return self._open

    def status(self) -> SourceStatus:
        """Whether values are in force that no record explains."""
        return SourceStatus(name=NAME, ok=not self._left, age_s=0.0, detail=self._left or "none without a record")

    def _candidates(self) -> Iterator[_Candidate]:
        path = self._inventory.besteffort
        # Under the static policy the kubelet changes sets, and not every runtime's record follows.
        none = self._inventory.readings.kubelet.policy is CpuPolicy.NONE
        of_container = (*_OF_CONTAINER, "cpu.set") if none else _OF_CONTAINER
        if inode := self._inode(path):
            yield _Candidate(GroupTarget(group=GroupRef(path=path, inode=inode)), _OF_DIRECTORY)
        for pod in list(self._inventory.pods.values()):
            if pod.qos is not QosClass.BESTEFFORT and pod.pod_class.online:
                continue
            yield _Candidate(GroupTarget(group=pod.group, pod_uid=pod.uid), _OF_POD)
            for item in pod.containers:
                if item.kind is not ContainerKind.SANDBOX and item.phase is Phase.SETTLED and item.spec is not None:
                    yield _Candidate(GroupTarget(group=item.group, pod_uid=pod.uid, container=item), of_container)


def _text(found: list[FileWrite]) -> str:
    parts = [
        f"{write.key[1]}/{write.key[2]} is {write.actual}, kubelet and runtime leave {write.text}"
        for write in found[:_SHOWN]
    ]
    if len(found) > _SHOWN:
        parts.append(f"and {plural(len(found) - _SHOWN, 'more file')}")
    return "; ".join(parts)

"""Recognizes values of an earlier run of bypassd that no store has: its state directory was deleted, or is another.

Such a value is not the node's own: a quota of the besteffort directory would bound BE work for ever, as no plan wants
it and no ledger has its original. A start without any record compares the files of the groups of BE work with what
every kubelet and the runtime's own record leave there. A difference is entered in the ledger as bypassd's, with that
value as the original, so that it follows the plan or is restored; an alert names what was found.
"""

import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, final

from cgroupfs.naming import QosClass
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.compare import FileWrite, GroupTarget
from reconciler.control.inventory import Inventory
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.format import first_of
from state.model import CpuPolicy, GroupRef, Phase, SourceStatus

NAME: Final = "values of an earlier run"
_SHOWN: Final = 3
_OF_DIRECTORY: Final = ("cpu.quota", "memory.high", "memory.soft")
"""The kubelet gives the besteffort directory no quota and no soft bound."""
_OF_POD: Final = ("cpu.idle", "cpu.quota", "cpu.weight")
"""The kubelet gives a BestEffort pod 2 shares and no quota, and puts no pod into the idle class."""
_OF_CONTAINER: Final = ("cpu.quota", "cpu.weight", "memory.max", "memory.swap")
"""The runtime's record of a container has them."""
_PATIENCE_S: Final = 600.0
"""After this time a source that would make a group known is taken for missing, and its values for the node's own."""


Unexamined = frozenset[tuple[str, int]] | None
"""The groups (path, inode) that may have values of an earlier run; None: all that are there at the first pass."""


class _Candidate(NamedTuple):
    """A group; ``knobs`` None: it cannot be examined yet."""

    target: GroupTarget
    knobs: tuple[str, ...] | None

    @property
    def key(self) -> tuple[str, int]:
        return self.target.group.path, self.target.group.inode


@final
class EarlierRun:
    """Compares the files with the kubelet's and the runtime's values at the first passes.

    `check` is called in each whole pass, before it is planned.
    """

    def __init__(
        self,
        actuator: CgroupActuator,
        inventory: Inventory,
        *,
        unexamined: Unexamined,
        inode: Callable[[str], int],
        alert: Callable[[str], None],
    ) -> None:
        """``unexamined``: None where the store has nothing of an earlier run. ``inode``: of a directory, 0: gone."""
        self._actuator = actuator
        self._inventory = inventory
        self._inode = inode
        self._alert = alert
        self._pending = unexamined
        self._until: float | None = None
        self._left = ""
        self._found: tuple[FileWrite, ...] = ()

    async def check(self) -> None:
        """Enter what is found, once for each group; in a mode that writes nothing only report it."""
        if not self.is_open:
            return
        judge, slices = self._actuator.judge, TimeSlice()
        candidates = list(self._candidates())
        if self._until is None:
            self._until = time.monotonic() + _PATIENCE_S
        found: list[FileWrite] = []
        left: set[tuple[str, int]] = set()
        for candidate in candidates:
            # A group that was made after the first pass has no value of an earlier run.
            if self._pending is not None and candidate.key not in self._pending:
                continue
            if candidate.knobs is None:
                if time.monotonic() < self._until:
                    left.add(candidate.key)
            elif there := judge.unrecorded_values(candidate.target, candidate.knobs):
                found += there
                # Until it is in the ledger it is a problem, also after a restart (`reconciler.control.persistence`).
                left.add(candidate.key)
            await slices.checkpoint()
        self._left = _text(found)
        entered = {(write.target.group.path, write.target.group.inode) for write in found}
        if found and judge.mode.enforce and await self._actuator.take_over(found):
            self._alert(f"{self._left}: taken as left by an earlier bypassd; those are the originals now")
            self._left, found = "", []
            left -= entered
        self._found = tuple(found)
        self._pending = frozenset(left)

    @property
    def is_open(self) -> bool:
        """Whether values of an earlier run may be there that no record has."""
        return self._pending is None or bool(self._pending)

    @property
    def unexamined(self) -> Unexamined:
        return self._pending

    def status(self) -> SourceStatus:
        """Whether values are in force that no record explains."""
        return SourceStatus(name=NAME, ok=not self._left, age_s=0.0, detail=self._left or "none without a record")

    def problems(self, uid: str) -> list[str]:
        return [_difference(write) for write in self._found if write.target.pod_uid == uid]

    def _candidates(self) -> Iterator[_Candidate]:
        path = self._inventory.besteffort
        # Under the static policy the kubelet changes sets, and not every runtime's record follows.
        none = self._inventory.readings.kubelet.policy is CpuPolicy.NONE
        of_container = (*_OF_CONTAINER, "cpu.set") if none else _OF_CONTAINER
        if inode := self._inode(path):
            yield _Candidate(GroupTarget(group=GroupRef(path=path, inode=inode)), _OF_DIRECTORY)
        for pod in list(self._inventory.pods.values()):
            known = pod.qos is QosClass.BESTEFFORT or pod.classification.certain
            if known and pod.qos is not QosClass.BESTEFFORT and pod.pod_class.online:
                continue
            yield _Candidate(GroupTarget(group=pod.group, pod_uid=pod.uid), _OF_POD if known else None)
            for item in pod.workload:
                ready = known and item.phase is Phase.SETTLED and item.spec is not None
                target = GroupTarget(group=item.group, pod_uid=pod.uid, container=item)
                yield _Candidate(target, of_container if ready else None)


def _text(found: list[FileWrite]) -> str:
    return first_of([_difference(write) for write in found], _SHOWN, "files")


def _difference(write: FileWrite) -> str:
    return f"{write.key[1]}/{write.key[2]} is {write.actual}, kubelet and runtime leave {write.text}"

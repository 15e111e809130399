"""A container's group with processes of the test's own, and an actuator that can be killed and started again."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from msgspec.structs import replace

from cgroupfs.files import REAL
from cgroupfs.hierarchy import Hierarchy
from reconciler.actuators.base import ActuatorContext, ActuatorKind, PlanSnapshot
from reconciler.control.planner import plan_node
from reconciler.policies.table import PoliciesConfig
from state.entry import RestoreResult
from state.ledger import Ledger
from state.memory import MemoryPreferences
from state.model import GroupRef, Hold, Phase, PodClass
from state.store import Store
from tests.cgroupfs.kernelgroup import kernel_groups
from tests.reconciler.actuators.acting import context, undone
from tests.reconciler.nodes import container, node, pod


class Swept(Protocol):
    """What the tests drive of an actuator."""

    def planned(self, situation: PlanSnapshot) -> None: ...

    async def sweep(self) -> None: ...


A = TypeVar("A", bound=Swept)


class Live(Generic[A]):
    """The pod ``be`` with its container ``main``."""

    def __init__(
        self,
        hierarchy: Hierarchy,
        root: str,
        path: Path,
        make: Callable[[ActuatorContext], A],
    ) -> None:
        self.hierarchy = hierarchy
        self.pod = f"{root}/podbe"
        self.names: list[str] = []
        self.main = self.group("main")
        self.path = str(path / "state.db")
        self.store = Store(self.path, boot="one")
        self.started: list[subprocess.Popen[bytes]] = []
        self._make = make
        self._fill(root)
        self._make_group(self.pod)
        self.add("main")
        self.actuator = self.make()

    def group(self, name: str) -> str:
        """The path of a container's group."""
        return f"{self.pod}/id-{name}"

    def add(self, name: str) -> None:
        """One more container."""
        self.names.append(name)
        self._make_group(self.group(name))

    def _make_group(self, group: str) -> None:
        os.mkdir(self.hierarchy.trigger_directory(group))
        self._fill(group)

    def _fill(self, group: str) -> None:
        """Of a new group of v1's cpuset hierarchy: what its parent has."""
        if self.hierarchy.trigger == "cpuset":
            directory = self.hierarchy.trigger_directory(group)
            for file in ("cpuset.cpus", "cpuset.mems"):
                REAL.write(directory, file, REAL.read(os.path.dirname(directory), file).strip())

    def make(self) -> A:
        return self._make(context(Ledger(self.store), hierarchy=self.hierarchy))

    def crash(self) -> None:
        """The agent is killed and starts again: only the store is left."""
        self.store.close()
        self.store = Store(self.path, boot="one")
        self.actuator = self.make()

    def undone(self, kind: ActuatorKind, only: str | None = None) -> Sequence[RestoreResult]:
        """The results of a restore without a daemon."""
        return undone(kind, Ledger(self.store), only=only)

    def start(self, command: Sequence[str] = ("sleep", "60")) -> subprocess.Popen[bytes]:
        """A process, not in the container yet."""
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.started.append(popen)
        return popen

    def enter(self, pid: int, name: str = "main") -> int:
        REAL.write(self.hierarchy.trigger_directory(self.group(name)), "cgroup.procs", str(pid))
        return pid

    def move(self, pid: int, inside: str) -> None:
        """Into a group below the container's, made level by level as its own manager would."""
        group = self.main
        for name in inside.split("/"):
            group = f"{group}/{name}"
            if not os.path.isdir(self.hierarchy.trigger_directory(group)):
                self._make_group(group)
        REAL.write(self.hierarchy.trigger_directory(group), "cgroup.procs", str(pid))

    def situation(
        self,
        config: PoliciesConfig,
        *,
        enforce: bool = True,
        cls: PodClass = PodClass.RECLAIMED,
        wish: MemoryPreferences | None = None,
        holds: dict[str, Hold] | None = None,
        phase: Phase = Phase.SETTLED,
    ) -> PlanSnapshot:
        item = pod("be", *map(container, self.names), cls=cls)
        paths = map(self.group, self.names)
        groups = [GroupRef(path=path, inode=REAL.inode(self.hierarchy.trigger_directory(path))) for path in paths]
        containers = tuple(
            replace(inner, group=group, phase=phase) for inner, group in zip(item.containers, groups, strict=True)
        )
        item = replace(item, group=GroupRef(path=self.pod), containers=containers, memory=wish or MemoryPreferences())
        view = node(item, versions=self.hierarchy.versions())
        plan = plan_node(view, None, config)
        return PlanSnapshot(view=view, plan=plan, enforce=enforce, holds=holds or {})

    async def apply(self, situation: PlanSnapshot) -> None:
        self.actuator.planned(situation)
        await self.actuator.sweep()

    def end_processes(self) -> None:
        """With those that they have started themselves."""
        for popen in self.started:
            popen.kill()
        for name in self.names:
            for pid in REAL.read(self.hierarchy.trigger_directory(self.group(name)), "cgroup.procs").split():
                os.kill(int(pid), signal.SIGKILL)
        for popen in self.started:
            popen.communicate()
        self.started.clear()

    def end(self) -> None:
        self.end_processes()
        self.store.close()


L = TypeVar("L", bound=Live[Any])


@contextmanager
def live_container(name: str, path: Path, kind: Callable[[Hierarchy, str, Path], L]) -> Iterator[L]:
    with kernel_groups(name, "cpuset") as (hierarchy, root):
        made = kind(hierarchy, root, path)
        try:
            yield made
        finally:
            made.end()


class Killed(BaseException):
    """The agent ends here, as by SIGKILL."""


class Mortal:
    """Passes on what is requested of another, until the agent is killed before one more change."""

    def __init__(self, real: object, method: str, left: list[int]) -> None:
        self._real = real
        self._method = method
        self._left = left

    def __getattr__(self, name: str) -> Any:  # whatever the other has
        return self._change if name == self._method else getattr(self._real, name)

    def _change(self, *given: object) -> object:
        if not self._left[0]:
            raise Killed
        self._left[0] -= 1
        return getattr(self._real, self._method)(*given)

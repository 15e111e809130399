"""An actuator on the strict fake kernel, with a real ledger in a real store, and a way to stop after any write."""

import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import trio

from cgroupfs.codecs import Value
from cgroupfs.files import REAL, FileOps
from cgroupfs.hierarchy import Hierarchy, HierarchyMode
from cgroupfs.writer import KernelWriter
from reconciler.actuators.base import ActuatorContext, ActuatorKind, OfflineContext
from reconciler.actuators.cgroup.apply import CgroupActuator
from reconciler.actuators.cgroup.compare import GroupTarget
from reconciler.actuators.cgroup.conflict import ForeignWrites
from reconciler.actuators.cgroup.decide import ChangeDetector
from reconciler.actuators.cgroup.fastpath import FastPath, FastResult
from reconciler.actuators.cgroup.foreign_rules import ForeignRules
from reconciler.actuators.mode import WriteMode, WriteSettings
from reconciler.runtime.object_errors import ObjectErrors
from state.entry import RestoreResult
from state.ledger import Ledger
from state.model import Container, GroupRef, Phase, RuntimeSpec, Setting
from state.store import Store
from tests.fakes.kernel import FakeKernel, Mode
from tests.fakes.no_api import no_api

BE = "/kubepods/besteffort"
POD = f"{BE}/pod11111111-1111-4111-8111-111111111111"
UID = "11111111-1111-4111-8111-111111111111"
CID = "ab" * 32
GROUP = f"{POD}/{CID}"


def context(ledger: Ledger, **given: Any) -> ActuatorContext:
    """The arguments of an auxiliary actuator: on this machine without cgroups, but for those given."""
    known: dict[str, Any] = {
        "hierarchy": Hierarchy(root="/", mode=HierarchyMode.V2, controllers={}),
        "root": "/",
        "store_lane": trio.CapacityLimiter(1),
        "fastpath": FastPath(lambda _: None),
        "writes": Counter(),
        "misses": dict,
        "api": None,
        "node": "n1",
    }
    return ActuatorContext(ledger=ledger, **(known | given))


def undone(
    kind: ActuatorKind, ledger: Ledger, *, root: str = "/", only: str | None = None, files: object = REAL
) -> list[RestoreResult]:
    """The results of a restore while no daemon runs."""
    assert kind.undo is not None
    given = OfflineContext(root=root, ledger=ledger, api=no_api, only=only, files=cast(FileOps, files))
    return list(kind.undo(given))


class Stopped(BaseException):
    """The process ended here, as by SIGKILL: nothing after the last write happened."""


class StoppingFiles:
    """`FileOps` that ends the process after a number of writes."""

    def __init__(self, kernel: FakeKernel, writes: int | None = None) -> None:
        self.kernel = kernel
        self.left = writes
        self.count = 0

    def _count(self) -> None:
        if self.left is not None and self.count >= self.left:
            raise Stopped
        self.count += 1

    def inode(self, directory: str) -> int:
        return self.kernel.inode(directory)

    def read(self, directory: str, file: str) -> str:
        return self.kernel.read(directory, file)

    def write(self, directory: str, file: str, text: str) -> None:
        self._count()
        self.kernel.write(directory, file, text)

    def groups(self, directory: str, most: int | None = None) -> list[str]:
        return self.kernel.groups(directory, most)

    def files(self, directory: str) -> list[str]:
        return self.kernel.files(directory)


class Followed:
    """Notes what is followed."""

    def __init__(self) -> None:
        self.paths: set[str] = set()

    def follow(self, path: str) -> None:
        self.paths.add(path)

    def forget(self, path: str) -> None:
        self.paths.discard(path)


class Names:
    """Says who wrote a file, as the test says."""

    def __init__(self) -> None:
        self.writer: tuple[str, str] | None = None

    def last_writer(self, directory: str, file: str) -> tuple[str, str] | None:
        return self.writer


class Acting:
    """One life of the actuator on a node that outlives it."""

    def __init__(self, kernel: FakeKernel, hierarchy: Hierarchy, path: Path, *, writes: int | None = None) -> None:
        self.kernel = kernel
        self.hierarchy = hierarchy
        self.files = StoppingFiles(kernel, writes)
        self.store = Store(str(path / "state.db"), boot="one")
        self.ledger = Ledger(self.store)
        self.alerts: list[tuple[str, str]] = []
        self.results: list[FastResult] = []
        self.names = Names()
        self.followed = Followed()
        self.lane = FastPath(self._fired, files=self.files)
        self.mode = WriteMode(WriteSettings())
        self.judge = ChangeDetector(
            hierarchy=hierarchy,
            ledger=self.ledger,
            foreign=ForeignWrites(ForeignRules(rounds=2)),
            attribution=self.names,
            files=self.files,
            alert=lambda kind, message, setting: self.alerts.append((kind, message)),
            held=lambda _hold: None,
            errors=ObjectErrors(),
            mode=self.mode,
        )
        self.writer = KernelWriter(hierarchy, files=self.files)
        self.actuator = CgroupActuator(
            judge=self.judge,
            ledger=self.ledger,
            writer=self.writer,
            lane=self.lane,
            store_lane=trio.CapacityLimiter(1),
            watched=self.followed,
        )

    def _fired(self, result: FastResult) -> None:
        self.results.append(result)
        self.actuator.on_executed(result)

    def inode(self, path: str) -> int:
        return self.kernel.inode(self.hierarchy.trigger_directory(path))

    def read(self, path: str, knob: str) -> str:
        controller, file = FILES[knob]
        return self.kernel.read(self.hierarchy.directory(controller, path), file).rstrip("\n")

    def write(self, path: str, knob: str, text: str) -> None:
        controller, file = FILES[knob]
        self.kernel.write(self.hierarchy.directory(controller, path), file, text)

    def target(
        self,
        path: str,
        settings: Mapping[str, Value],
        *,
        creating: RuntimeSpec | None = None,
        signalled: bool = False,
    ) -> GroupTarget:
        container = None
        group = GroupRef(path=path, inode=self.inode(path))
        if path == GROUP:
            phase = Phase.SETTLED if creating is None else Phase.CREATING
            container = Container(id=CID, group=group, phase=phase, spec=creating or RuntimeSpec(shares=2))
        return GroupTarget(
            group=group,
            settings={
                knob: Setting(path=path, knob=knob, value=value, policy="reclaimed", reason="test", pod_uid=UID)
                for knob, value in settings.items()
            },
            pod_uid=UID,
            container=container,
            signalled=signalled,
        )

    def stood(self, path: str, knob: str) -> str | None:
        standing = self.judge.statuses.get((path, knob))
        return None if standing is None else standing.state

    def retry_now(self) -> None:
        """What was refused is tried again in the next pass."""
        self.judge.due(math.inf)

    def close(self) -> None:
        self.store.close()


FILES = {
    "cpu.set": ("cpuset", "cpuset.cpus"),
    "cpu.quota": ("cpu", "cpu.cfs_quota_us"),
    "cpu.weight": ("cpu", "cpu.shares"),
    "memory.max": ("memory", "memory.limit_in_bytes"),
    "memory.swap": ("memory", "memory.memsw.limit_in_bytes"),
}


def make_node(root: Path, *, mode: Mode = "v1", cpus: int = 4) -> tuple[FakeKernel, Hierarchy]:
    """A node with one BE pod of one container, as the kubelet and runc leave it."""
    kernel = FakeKernel(mode, root=str(root), cpus=cpus)
    kernel.install()
    hierarchy = Hierarchy.detect(str(root))
    for path in ("/kubepods", BE, POD, GROUP):
        kernel.make_group(path)
        kernel.write(hierarchy.directory("cpuset", path), "cpuset.cpus", f"0-{cpus - 1}")
        kernel.write(hierarchy.directory("cpuset", path), "cpuset.mems", "0")
    if mode == "v1":
        kernel.write(hierarchy.directory("cpu", GROUP), "cpu.shares", "2")
    return kernel, hierarchy


def snapshot(kernel: FakeKernel, hierarchy: Hierarchy) -> dict[tuple[str, str], str]:
    """The text of every file that the agent may touch."""
    return {
        (path, knob): kernel.read(hierarchy.directory(controller, path), file)
        for path in (BE, POD, GROUP)
        for knob, (controller, file) in FILES.items()
    }

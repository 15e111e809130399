"""A node for readers of signals: groups as directories in a temporary one, pods, contexts, a clock of the test's."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.files import RealFiles
from cgroupfs.hierarchy import UNIFIED, Hierarchy, HierarchyMode, Mount
from cgroupfs.naming import QosClass
from reconciler.signals.catalog import SIGNALS
from reconciler.signals.readers import Reader, ReaderContext, SampleContext, SampleSheet, SharedReaders
from state.model import Classification, Container, ContainerKind, GroupRef, NodeView, Pod, PodClass, Pools, Resources
from state.topology import Topology

KUBEPODS = "/kubepods"
V1 = ("cpu", "cpuacct", "cpuset", "memory", "blkio", "pids")
V2 = ("cpu", "cpuset", "memory", "io", "pids", UNIFIED)


def shared(**means: Any) -> SharedReaders:
    """For readers of a node with these means; by default without a controller."""
    known: dict[str, Any] = {
        "hierarchy": Hierarchy(root="/", mode=HierarchyMode.V2, controllers={}),
        "files": RealFiles(),
    }
    return SharedReaders(ReaderContext(**(known | means)))


class Tree:
    """``version`` 1 or 2; ``unified``: a v1 node has a cgroup2 mount besides (hybrid)."""

    def __init__(self, tmp_path: Path, version: int = 1, *, unified: bool = False) -> None:
        self.root = tmp_path
        self.now = 100.0
        mounts: dict[str, Mount] = {}
        if version == 1:
            for name in V1:
                directory = str(tmp_path / "cgroup" / name)
                mounts[name] = Mount(directory=directory, version=1, controllers=(name,))
        if version == 2 or unified:
            names = V2 if version == 2 else (UNIFIED,)
            mount = Mount(directory=str(tmp_path / "cgroup" / "unified"), version=2, controllers=names)
            mounts |= dict.fromkeys(names, mount)
        mode = HierarchyMode.V2 if version == 2 else HierarchyMode.HYBRID if unified else HierarchyMode.V1
        self.hierarchy = Hierarchy(root="/", mode=mode, controllers=mounts)
        (tmp_path / "proc").mkdir()

    def clock(self) -> float:
        """What readers take for the time."""
        return self.now

    def shared(self, **means: Any) -> SharedReaders:
        """For readers of this node. Control files are plain files here: opened at each reading."""
        return shared(**{"hierarchy": self.hierarchy, "root": str(self.root), "clock": self.clock} | means)

    def group(self, path: str) -> None:
        """Make a group's directories."""
        for mount in self.hierarchy.mounts():
            os.makedirs(mount.path(path), exist_ok=True)

    def put(self, controller: str, path: str, file: str, text: str) -> None:
        """Write a control file."""
        (Path(self.hierarchy.directory(controller, path)) / file).write_text(text)

    def proc(self, file: str, text: str) -> None:
        """Write a file below /proc."""
        place = self.root / "proc" / file
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def pod(
        self,
        uid: str = "a",
        *,
        containers: int = 1,
        sandbox: bool = False,
        pod_class: PodClass = PodClass.SHARED,
        qos: QosClass = QosClass.BURSTABLE,
        requests: Resources | None = None,
    ) -> Pod:
        path = f"{KUBEPODS}/{qos.directory}/pod{uid}"
        made = []
        for index in range(containers + sandbox):
            cid = f"{uid}{index}".ljust(64, "0")
            self.group(f"{path}/{cid}")
            kind = ContainerKind.SANDBOX if sandbox and not index else ContainerKind.APP
            made.append(Container(id=cid, group=self.ref(f"{path}/{cid}"), kind=kind, requests=requests or Resources()))
        self.group(path)
        return Pod(
            uid=uid,
            qos=qos,
            group=self.ref(path),
            containers=tuple(made),
            classification=Classification(pod_class=pod_class, source="test"),
        )

    def ref(self, path: str) -> GroupRef:
        return GroupRef(path=path, inode=os.stat(self.hierarchy.trigger_directory(path)).st_ino)


def scene(
    tree: Tree, *pods: Pod, pools: Pools | None = None, wanted: Sequence[str] = (), cpus: int = 4
) -> SampleContext:
    """What there is to measure; by default everything is wanted."""
    view = NodeView(
        topology=Topology(online=CpuSet(range(cpus))),
        versions=tree.hierarchy.versions(),
        kubepods=KUBEPODS,
        besteffort=f"{KUBEPODS}/besteffort",
        burstable=f"{KUBEPODS}/burstable",
        pods={pod.uid: pod for pod in pods},
    )
    return SampleContext(view=view, pools=pools, wanted=tuple(wanted or SIGNALS))


def read(reader: Reader, context: SampleContext, now: float = 100.0, sheet: SampleSheet | None = None) -> SampleSheet:
    filled = sheet or SampleSheet()
    trio.run(reader.read, context, filled, now)
    return filled


def values(sheet: SampleSheet, subject: str = "pod:a") -> dict[str, float]:
    return {signal: sample.value for signal, sample in sheet.samples.get(subject, {}).items()}

"""A pod whose groups are plain directories: its processes are those in the files. For any machine, and quick."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cgroupfs.hierarchy import FREEZER, Hierarchy, HierarchyMode, Mount
from reconciler.responses.means.base import EvictionResult, EvictionWork
from state.eviction import EvictionCase, EvictionMethodName, EvictionOrder, EvictionOutcome, EvictionStep
from state.evidence import PodSnapshot
from state.model import PodClass


class PlainNode:
    """One v1 hierarchy below ``directory``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        mount = Mount(directory=str(directory), version=1, controllers=("cpu", FREEZER))
        self.hierarchy = Hierarchy(root="/", mode=HierarchyMode.V1, controllers={"cpu": mount, FREEZER: mount})
        self.pods: dict[str, PodSnapshot] = {}

    def add(self, uid: str, *, grace_s: float = 0.2, annotations: dict[str, str] | None = None) -> "PlainPod":
        pod = PlainPod(self.directory / f"pod{uid}")
        self.pods[uid] = PodSnapshot(
            uid=uid,
            title=f"shop/{uid}",
            pod_class=PodClass.RECLAIMED,
            group=f"/pod{uid}",
            namespace="shop",
            grace_s=grace_s,
            annotations=annotations or {},
        )
        return pod


class PlainPod:
    """One pod, with one process in it at first."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self._procs, self._freezer = directory / "cgroup.procs", directory / "freezer.state"
        self._freezer.write_text("THAWED\n")
        self.directory = directory
        self.live(4_000_001)  # above what a kernel gives

    def live(self, *pids: int) -> None:
        self._procs.write_text("".join(f"{pid}\n" for pid in pids))

    def end(self) -> None:
        self.live()

    @property
    def alive(self) -> bool:
        return bool(self._procs.read_text())

    def freeze(self) -> None:
        self._freezer.write_text("FROZEN\n")

    @property
    def frozen(self) -> bool:
        return self._freezer.read_text().strip() != "THAWED"


Act = Callable[[EvictionWork], EvictionResult | Awaitable[EvictionResult]]


class ScriptedWay:
    """Does what the script says, each time it is tried; ``log`` are the pods it was tried on."""

    def __init__(
        self,
        means: EvictionMethodName,
        *script: Act,
        unusable: str | None = None,
        unasked: bool = False,
    ) -> None:
        self._means = means
        self.script = script
        self.why = unusable
        self.unasked = unasked
        self.log: list[str] = []
        self.resumed: list[EvictionStep | None] = []
        self.at_once = 0
        self.most_at_once = 0
        self.takes_s = 0.0

    @property
    def means(self) -> EvictionMethodName:
        return self._means

    def unusable(self, case: EvictionCase) -> EvictionResult | None:
        return None if self.why is None else EvictionResult(outcome=None, detail=self.why, unasked=self.unasked)

    async def terminate(self, work: EvictionWork) -> EvictionResult:
        self.log.append(work.case.order.uid)
        self.resumed.append(work.resumed)
        await work.step(EvictionStep.ASK if self._means is EvictionMethodName.API else EvictionStep.STOP)
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            await trio.sleep(self.takes_s)
            result = self.script[min(len(self.log), len(self.script)) - 1](work)
            return await result if isinstance(result, Awaitable) else result
        finally:
            self.at_once -= 1


def ends(pod: PlainPod) -> Callable[[EvictionWork], EvictionResult]:

    def act(_: EvictionWork) -> EvictionResult:
        pod.end()
        return EvictionResult(outcome=EvictionOutcome.DONE, detail="it is over")

    return act


def fails(message: str, *, unasked: bool = False) -> Callable[[EvictionWork], EvictionResult]:
    """The way that does not."""
    return lambda _: EvictionResult(outcome=None, detail=message, unasked=unasked)


def order_for(uid: str, **more: object) -> EvictionOrder:
    values: dict[str, object] = {
        "id": f"1-{uid}",
        "uid": uid,
        "title": f"shop/{uid}",
        "namespace": "shop",
        "name": uid,
        "owner": None,
        "cause": "node_memory",
        "evidence": "memory 91 %",
        "ranking": ("it: because",),
    }
    make: Callable[..., EvictionOrder] = EvictionOrder
    return make(**{**values, **more})

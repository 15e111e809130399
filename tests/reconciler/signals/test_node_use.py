"""Use of the node and its pods as means of a window: from counters, for pods that start, end and start again."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from cgroupfs.naming import QosClass
from cgroupfs.usage import MemoryUsage
from reconciler.signals.node_use import NodeUseMeter
from state.memory import NodeMemoryReading
from state.model import Classification, GroupRef, Pod, PodClass
from tests.known import known

GI = 1 << 30
MEMORY = NodeMemoryReading(total_bytes=32 * GI, available_bytes=20 * GI, age_s=0.0)


class Counters:
    """The part of `UsageReader` that is used, with settable counters."""

    def __init__(self) -> None:
        self.ns: dict[str, int] = {}
        self.memory: dict[str, int] = {}

    def cpu_ns(self, path: str) -> int | None:
        return self.ns.get(path)

    def memory_use(self, path: str) -> MemoryUsage | None:
        used = self.memory.get(path)
        return None if used is None else MemoryUsage(limit_bytes=None, used_bytes=used + 5, droppable_bytes=5)


class Knowledge:
    def __init__(self) -> None:
        self.node_memory: NodeMemoryReading | None = MEMORY
        self.pods: Mapping[str, Pod] = {}


class Scene:
    """A node of two CPUs; `after` lets time pass with this many ticks of work on each CPU."""

    def __init__(self, root: Path) -> None:
        self.counters, self.knowledge, self.now_s = Counters(), Knowledge(), 1000.0
        self._busy = self._idle = 1000
        (root / "proc").mkdir()
        self._stat = root / "proc/stat"
        self.after(0, 0)
        self.meter = NodeUseMeter(self.counters, self.knowledge, root=str(root), clock=lambda: self.now_s)

    def after(self, seconds: float, busy_s: float) -> None:
        self.now_s += seconds
        self._busy += round(100 * busy_s)
        self._idle += round(100 * (seconds - busy_s))
        rows = [f"cpu{number} {self._busy} 0 0 {self._idle} 0 0 0 0 0 0" for number in range(2)]
        self._stat.write_text("\n".join(["cpu 1 2 3 4", *rows, "intr 0"]) + "\n")

    def add(
        self, name: str, *, inode: int = 1, ns: int = 0, priority: int | None = None, reclaimed: bool = False
    ) -> None:
        pod_class = PodClass.RECLAIMED if reclaimed else PodClass.SHARED
        pod = Pod(
            uid=name,
            qos=QosClass.BURSTABLE,
            group=GroupRef(path=f"/kubepods/{name}", inode=inode),
            containers=(),
            classification=Classification(pod_class=pod_class, source="test"),
            namespace="shop",
            name=name,
            priority=priority,
        )
        self.knowledge.pods = {**self.knowledge.pods, name: pod}
        self.counters.ns[pod.group.path] = ns
        self.counters.memory[pod.group.path] = GI


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


async def test_one_reading_is_no_mean(scene: Scene) -> None:
    scene.add("a")
    assert await scene.meter.measure(300) is None


async def test_the_mean_is_of_the_window(scene: Scene) -> None:
    scene.add("a")
    await scene.meter.measure(300)
    scene.after(60, 30)
    scene.counters.ns["/kubepods/a"] = 45 * 10**9
    use = known(await scene.meter.measure(300))
    assert (use.cpus_milli, use.cpu_milli) == (2000, 1000)
    assert (use.total_bytes, use.memory_bytes) == (32 * GI, 12 * GI)
    (pod,) = use.pods
    assert (pod.namespace, pod.name, pod.cpu_milli, pod.memory_bytes) == ("shop", "a", 750, GI)
    assert use.system == (250, 11 * GI)


async def test_what_is_before_the_window_does_not_count(scene: Scene) -> None:
    scene.add("a")
    for _ in range(10):
        await scene.meter.measure(120)
        scene.after(60, 60)
    for _ in range(4):
        await scene.meter.measure(120)
        scene.after(60, 0)
    use = known(await scene.meter.measure(120))
    assert use.cpu_milli == 0


async def test_a_new_pod_counts_from_its_first_reading(scene: Scene) -> None:
    await scene.meter.measure(300)
    scene.after(60, 30)
    # Its counter has what it used before the first reading, which cannot be dated.
    scene.add("late", ns=10**12)
    use = known(await scene.meter.measure(300))
    assert use.pods == ()
    scene.after(60, 30)
    scene.counters.ns["/kubepods/late"] += 6 * 10**9
    use = known(await scene.meter.measure(300))
    assert [pod.cpu_milli for pod in use.pods] == [100]


async def test_a_pods_successor_in_the_same_directory_begins_anew(scene: Scene) -> None:
    scene.add("a", inode=1, ns=10**12)
    await scene.meter.measure(300)
    scene.after(60, 30)
    scene.add("a", inode=2, ns=10**9)
    use = known(await scene.meter.measure(300))
    assert use.pods == ()


@pytest.mark.parametrize("lost", ["ns", "memory"])
async def test_a_pod_that_cannot_be_read_is_left_out(scene: Scene, lost: str) -> None:
    scene.add("a")
    scene.add("b")
    await scene.meter.measure(300)
    scene.after(60, 30)
    del getattr(scene.counters, lost)["/kubepods/a"]
    use = known(await scene.meter.measure(300))
    assert [pod.name for pod in use.pods] == ["b"]


async def test_unknown_memory_is_no_report(scene: Scene) -> None:
    await scene.meter.measure(300)
    scene.after(60, 30)
    scene.knowledge.node_memory = None
    assert await scene.meter.measure(300) is None


@pytest.mark.parametrize(
    ("priority", "reclaimed", "expected"),
    [
        (9500, False, ("koord-prod", "LS")),
        (7999, False, ("koord-mid", "LS")),
        (5000, True, ("koord-batch", "BE")),
        (3000, True, ("koord-free", "BE")),
        (None, True, ("koord-batch", "BE")),
        (2_000_001_000, False, ("", "LS")),
        (0, False, ("", "LS")),
    ],
)
async def test_a_pod_has_koordinators_names(
    scene: Scene, priority: int | None, reclaimed: bool, expected: tuple[str, str]
) -> None:
    scene.add("a", priority=priority, reclaimed=reclaimed)
    await scene.meter.measure(300)
    scene.after(60, 30)
    use = known(await scene.meter.measure(300))
    assert [(pod.priority, pod.qos) for pod in use.pods] == [expected]

"""Online pods that allocate beside BE pods that allocate without end, on the embedded node, and how long each took.

The pods' memory is what kubepods may use, as where a kubelet enforces its allocatable: so that little that running out
of it costs seconds and disturbs no other program. Windows with and without BE work alternate, so what else the machine
does affects both equally.
"""

import mmap
import os
import statistics
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

from msgspec import Struct

from tests.e2e.agent import eventually
from tests.e2e.node import RunningPod
from tests.e2e.pods import ContainerSpec, PodSpec, new_uid
from tests.fakes.kubelet.cgroups import read, write
from tests.fakes.kubelet.fake import playing_the_kubelet
from tests.node.bypassd import BypassdProcess, configuration
from tests.node.client import read_samples
from tests.node.scripted import ScriptedNode

MEGA: Final = 1 << 20
PODS_BYTES: Final = 1024 * MEGA
BATCH_BYTES: Final = 192 * MEGA
CEILING_MIB: Final = 4096
"""Nobody gets there: kubepods' own limit is far below."""
BE_BYTES: Final = PODS_BYTES * 60 // 100 * 105 // 100
"""The most that all BE work may have: what the reserve leaves, and ``hard_percent`` above it."""
BURST_MIB: Final = 4
PAUSE_US: Final = 2000
SETTLE_S: Final = 0.25
"""The first part of each window is not counted."""
POLICIES: Final[dict[str, Any]] = {
    "be_memory": {
        "enabled": True, "reserve_percent": 40, "hard_percent": 5, "floor_percent": 10,
    },
    "memory_qos": {"enabled": True},
    "oom_score": {"enabled": True},
    # BE work gets nine tenths of the one CPU that the online pod has not: it is memory that is to stop it, not the CPU.
    "reclaimed": {"budget": {"floor_percent": 45}},
    "idle_buffer": {"enabled": False},
}  # fmt: skip
SOON: Final = {"policies.be_memory.interval_s": 1.0, "policies.oom_score.sweep_s": 1.0}
_NUMBERS: Final = struct.Struct("<5q")


class Hog(NamedTuple):
    """What a BE program reported: bytes it has now, the most it ever had, how often it was killed or never stopped."""

    now: int
    most: int
    killed: int
    reached: int


class Window(Struct, frozen=True, kw_only=True):
    """One span of the clock. Units: seconds; ``times``: of each of the online pod's bursts that began in it."""

    with_be: bool
    times: tuple[float, ...]


class Compared(Struct, frozen=True, kw_only=True):
    """Windows alone and with BE work. Ratios: 1.0 is "as alone". Units: microseconds."""

    alone_us: float
    beside_us: float
    ratio: float
    """Of the medians of the windows' medians."""
    tail_ratio: float
    """The same of the windows' 90th percentiles."""
    bursts: int


def touching(name: str, *, exclusive: bool) -> PodSpec:
    """An online pod that asks for memory, uses and returns it, for ever."""
    limit = 64 * MEGA
    container = ContainerSpec(
        run=("touch", str(BURST_MIB), str(PAUSE_US)),
        cpu_request=1000 if exclusive else 250,
        cpu_limit=1000 if exclusive else 0,
        memory_request=limit,
        memory_limit=limit if exclusive else 0,
    )
    labels = {"koordinator.sh/qosClass": "LS"}
    return PodSpec(name=name, uid=new_uid(), labels={} if exclusive else labels, containers=(container,))


def hog(name: str, *, batch_memory: int = 0) -> PodSpec:
    """A BE pod that asks for more and more; held by a limit of its own, or else by that of all BE work."""
    container = ContainerSpec(run=("grow", str(CEILING_MIB)), batch_memory=batch_memory)
    return PodSpec(name=name, uid=new_uid(), labels={"koordinator.sh/qosClass": "BE"}, containers=(container,))


class Scene:
    """The node with its pods, and their timings."""

    def __init__(self, node: ScriptedNode, agent: BypassdProcess | None, pods: dict[str, RunningPod]) -> None:
        self.node = node
        self.agent = agent
        self.pods = pods
        self._offset = 0
        """Where the next reading of the online pod's bursts begins."""
        self._switches = {name: _Switch(self._file(name)) for name in pods if name.startswith("hog")}

    def switch(self, *, on: bool) -> None:
        """BE work begins, or ends at once."""
        for switch in self._switches.values():
            switch.set(on=on)

    def hogs(self) -> dict[str, Hog]:
        return {name: switch.read() for name, switch in self._switches.items()}

    def windows(self, count: int, seconds: float) -> list[Window]:
        """So many windows of each kind, in turns."""
        spans = []
        for number in range(2 * count):
            with_be = number % 2 == 1
            self.switch(on=with_be)
            time.sleep(SETTLE_S)
            began = time.monotonic()
            time.sleep(seconds)
            spans.append((with_be, began, time.monotonic()))
        self.switch(on=False)
        bursts, self._offset = read_samples(self._file("online"), self._offset)
        return [
            Window(with_be=with_be, times=tuple(took for at, took in bursts if begin <= at < end))
            for with_be, begin, end in spans
        ]

    def goes_on(self, name: str) -> None:
        """Wait until an online pod has done one more burst."""
        before = os.path.getsize(self._file(name))
        eventually(f"{name} goes on", lambda: os.path.getsize(self._file(name)) > before, within_s=30)

    def read(self, group: str, file: str) -> str:
        """A memory file of a group, by its path."""
        return read(self.node.cgroups.directory("memory", group), file)

    def hits(self, group: str) -> int:
        """How often a group has been at its limit."""
        return int(self.read(group, "memory.failcnt"))

    def oom_kills(self, name: str) -> int:
        """How often the OOM killer took a process of a container."""
        group = self.pods[name]["main"].group
        rows = dict(line.split() for line in self.read(group, "memory.oom_control").splitlines())
        return int(rows["oom_kill"])

    @property
    def kubepods(self) -> str:
        return self.node.cgroups.group("kubepods")

    @property
    def besteffort(self) -> str:
        return self.node.cgroups.group("kubepods", "besteffort")

    def _file(self, name: str) -> str:
        return f"{self.node.out_directory(self.pods[name].spec, 'main')}/work"


class _Switch:
    """The numbers of one `grow` program."""

    def __init__(self, path: str) -> None:
        eventually(f"{path} is there", lambda: os.path.exists(path) and os.path.getsize(path) >= _NUMBERS.size)
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _NUMBERS.size)

    def set(self, *, on: bool) -> None:
        struct.pack_into("<q", self._memory, 0, int(on))

    def read(self) -> Hog:
        _, now, most, killed, reached = _NUMBERS.unpack(self._memory)
        return Hog(now, most, killed, reached)


def compare(windows: Sequence[Window]) -> Compared:
    """What BE work costs the online pod. Errors: `ValueError` where a kind of window has no burst at all."""
    kinds = {
        kind: [window.times for window in windows if window.with_be is kind and window.times] for kind in (False, True)
    }
    if not all(kinds.values()):
        raise ValueError("no burst of the online pod in a whole kind of windows")

    def over(kind: bool, share: float) -> float:
        return statistics.median(sorted(times)[int(len(times) * share)] for times in kinds[kind])

    return Compared(
        alone_us=over(False, 0.5) * 1e6,
        beside_us=over(True, 0.5) * 1e6,
        ratio=over(True, 0.5) / over(False, 0.5),
        tail_ratio=over(True, 0.9) / over(False, 0.9),
        bursts=sum(len(times) for kind in kinds.values() for times in kind),
    )


@contextmanager
def scene(cgroup_root: str, *, agent: bool = True) -> Iterator[Scene]:
    """An online pod with a CPU of its own, one beside BE work, two BE pods, the agent; all is undone afterwards."""
    with (
        playing_the_kubelet(),
        ScriptedNode.start(cpu_policy="static", reserved=frozenset({0}), cgroup_root=cgroup_root) as node,
    ):
        node.kubelet.listen()
        write(node.cgroups.directory("memory", node.cgroups.group("kubepods")), "memory.limit_in_bytes", PODS_BYTES)
        specs = (
            touching("online", exclusive=True),
            touching("neighbour", exclusive=False),
            hog("hog-batch", batch_memory=BATCH_BYTES),
            hog("hog-free"),
        )
        pods = {spec.name: node.run_pod(spec) for spec in specs}
        process = BypassdProcess(node, cri_socket=None)
        process.forked = True
        process.write_config(
            {**configuration(node, process.directory, cri_socket=None), "policies": POLICIES, "constants": SOON}
        )
        result = Scene(node, process if agent else None, pods)
        if not agent:
            yield result
            return
        process.start()
        try:
            process.wait_ready()
            batch = pods["hog-batch"]["main"].group
            eventually("BE pods are bounded", lambda: _bounded(result, batch) and _bounded(result, result.besteffort))
            yield result
        finally:
            process.stop()


def _bounded(result: Scene, group: str) -> bool:
    return int(result.read(group, "memory.limit_in_bytes")) < PODS_BYTES

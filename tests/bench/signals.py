"""What sampling costs: all signals of pods, node, pools and file systems once a second, of real processes."""

import os
import signal
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.naming import QosClass
from reconciler.detectors.config import InterferenceConfig
from reconciler.interference.engine import InterferenceEngine
from reconciler.signals.catalog import SIGNALS
from reconciler.signals.readers import ReaderContext, SampleContext, SampleSheet
from reconciler.signals.reading import MeteredReader, build, costs
from state.model import Classification, Container, ContainerKind, GroupRef, NodeView, Pod, PodClass, Pools
from state.topology import Topology

ROOT = "/bypassd-bench-signals"
THREADS = 2000
_THREADED_PODS = 20
_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "blkio", UNIFIED)
_WARM_UP = 3
_THREADS_OF = """
import sys, threading, time
threading.stack_size(65536)
def work():
    while True:
        time.sleep(0.5)
for _ in range(int(sys.argv[1]) - 1):
    threading.Thread(target=work, daemon=True).start()
print(flush=True)
work()
"""


class Pods:
    """Pods of a sandbox and one container, with a process each, in every hierarchy there is."""

    def __init__(self, hierarchy: Hierarchy) -> None:
        self.hierarchy = hierarchy
        self.pods: dict[str, Pod] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        self._directories = [
            mount.path(ROOT)
            for mount in hierarchy.mounts()
            if set(mount.controllers) & set(_CONTROLLERS) and os.access(mount.directory, os.W_OK)
        ]

    def add(self, number: int, command: list[str], *, wait: bool = False) -> None:
        """One pod; ``wait``: until its process has written a line."""
        uid = f"{number:08x}-0000-4000-8000-000000000000"
        qos = QosClass.BESTEFFORT if number % 2 else QosClass.BURSTABLE
        path = f"{ROOT}/{qos.directory}/pod{uid}"
        containers = []
        for index, what in enumerate((["sleep", "10000"], command)):
            cid = f"{number * 10 + index:064x}"
            self._make(f"{path}/{cid}")
            process = subprocess.Popen(what, stdout=subprocess.PIPE if wait and index else subprocess.DEVNULL)
            self._processes.append(process)
            for directory in self._directories:
                with open(f"{directory}/{path.removeprefix(ROOT)}/{cid}/cgroup.procs", "w") as file:
                    file.write(str(process.pid))
            if process.stdout is not None:
                process.stdout.readline()
            kind = ContainerKind.APP if index else ContainerKind.SANDBOX
            containers.append(Container(id=cid, group=self._ref(f"{path}/{cid}"), kind=kind))
        pod_class = PodClass.RECLAIMED if number % 2 else PodClass.SHARED
        self.pods[uid] = Pod(
            uid=uid,
            qos=qos,
            group=self._ref(path),
            containers=tuple(containers),
            classification=Classification(pod_class=pod_class, source="bench"),
        )

    def _ref(self, path: str) -> GroupRef:
        return GroupRef(path=path, inode=os.stat(self.hierarchy.trigger_directory(path)).st_ino)

    def _make(self, path: str) -> None:
        for directory in self._directories:
            below = directory
            for name in ("", *path.removeprefix(ROOT).strip("/").split("/")):
                above, below = below if name else os.path.dirname(below), f"{below}/{name}" if name else below
                if os.path.isdir(below):
                    continue
                os.mkdir(below)
                for knob in ("cpuset.cpus", "cpuset.mems"):
                    if os.path.exists(f"{below}/{knob}"):
                        with open(f"{above}/{knob}") as source, open(f"{below}/{knob}", "w") as target:
                            target.write(source.read().strip())

    def close(self) -> None:
        """End the processes and remove the groups."""
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
        for process in self._processes:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for directory in self._directories:
            for below, _, _ in os.walk(directory, topdown=False):
                for _ in range(50):
                    try:
                        os.rmdir(below)
                    except OSError:
                        time.sleep(0.02)
                    else:
                        break


@contextmanager
def pods() -> Iterator[Pods]:
    """An empty set of pods; all of it is gone afterwards."""
    made = Pods(Hierarchy.detect())
    made.close()
    try:
        yield made
    finally:
        made.close()


def default_signals() -> tuple[str, ...]:
    """Those that the rules that ship want, with the evidence against suspects and the steps of the ladder."""
    return tuple(sorted(InterferenceEngine(InterferenceConfig(enabled=True)).wanted()))


def scene(made: Pods, wanted: tuple[str, ...]) -> SampleContext:
    """The pods on this machine's CPUs, BE and shared ones on all of them."""
    online = CpuSet(range(os.cpu_count() or 1))
    view = NodeView(
        topology=Topology(online=online),
        versions=made.hierarchy.versions(),
        kubepods=ROOT,
        besteffort=f"{ROOT}/besteffort",
        burstable=f"{ROOT}/burstable",
        pods=made.pods,
    )
    pools = Pools(
        online_cpus=online, reserved=CpuSet(), dedicated={}, shared=online, reclaimed=online, budget_milli=1000
    )
    return SampleContext(view=view, pools=pools, wanted=wanted)


async def measure(made: Pods, seconds: int, wanted: tuple[str, ...]) -> dict[str, object]:
    """One pass a second, as the daemon does it."""
    readers = build(wanted, ReaderContext(hierarchy=made.hierarchy, filesystems={"nodefs": "/var", "imagefs": "/usr"}))
    context = scene(made, wanted)
    try:
        for _ in range(_WARM_UP):
            await _pass(readers, context)
            await trio.sleep(0.2)
        before, spent, slowest = costs(readers), 0.0, 0.0
        due = trio.current_time()
        for _ in range(seconds):
            began, clock = time.thread_time(), time.monotonic()
            samples = await _pass(readers, context)
            spent += time.thread_time() - began
            slowest = max(slowest, time.monotonic() - clock)
            due += 1.0
            await trio.sleep_until(due)
        after = costs(readers)
        return {
            "pods": len(made.pods),
            "samples": samples,
            "percent_of_a_core": round(100.0 * spent / seconds, 2),
            "loop_us": _loop_us(),
            "longest_pass_ms": round(1000.0 * slowest, 1),
            "us_a_pass": {name: round(1e6 * (after[name].cpu_s - before[name].cpu_s) / seconds) for name in after},
        }
    finally:
        for reader in readers:
            await reader.aclose()


def _loop_us() -> int:
    """How fast this machine is just now: ten thousand additions took 115 to 210 µs for the figures in docs."""
    return round(1e6 * statistics.median(timeit.repeat(lambda: sum(range(10_000)), number=1, repeat=201)))


async def _pass(readers: tuple[MeteredReader, ...], context: SampleContext) -> int:
    sheet = SampleSheet()
    now = time.monotonic()
    for reader in readers:
        await reader.read(context, sheet, now)
    return sum(len(samples) for samples in sheet.samples.values())


def run(count: int, seconds: int) -> dict[str, object]:
    """``count`` pods of one process a container; then pods of `THREADS` threads together."""
    default, everything = default_signals(), tuple(SIGNALS)
    with pods() as made:
        for number in range(count):
            made.add(number, ["sleep", "10000"])
        many = trio.run(measure, made, seconds, default)
        most = trio.run(measure, made, seconds, everything)
    with pods() as made:
        for number in range(_THREADED_PODS):
            made.add(number, [sys.executable, "-c", _THREADS_OF, str(THREADS // _THREADED_PODS)], wait=True)
        threads = trio.run(measure, made, seconds, default)
    return {"default": many, "every signal": most, f"default, {THREADS} threads": threads}

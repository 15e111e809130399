"""The readers on this machine's kernel: real processes that are throttled, that wait for each other, that are moved."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trio

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import SourceError
from cgroupfs.hierarchy import UNIFIED, Hierarchy
from cgroupfs.naming import QosClass
from cgroupfs.private import PrivateTree, private_tree
from reconciler.signals.podcpu import PodCpu
from reconciler.signals.privatepsi import PrivateGroups, restore_groups
from reconciler.signals.processes import PodProcesses
from reconciler.signals.psi import Psi
from reconciler.signals.readers import Reader, ReaderContext, SampleContext, SampleSheet, SharedReaders
from reconciler.signals.runqueue import RunQueue
from reconciler.signals.taskstats import Taskstats
from state.entry import RestoreOutcome
from state.evidence import Sample
from state.model import Classification, Container, GroupRef, NodeView, Pod, PodClass
from state.topology import Topology
from tests.cgroupfs.kernelgroup import kernel_groups

pytestmark = [pytest.mark.kernel, pytest.mark.alone]
CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory")
SPIN = "while True: pass"
WAIT_S = 1.5


class Machine:
    """Pods below one group of this test's own."""

    def __init__(self, hierarchy: Hierarchy, top: str) -> None:
        self.hierarchy, self.top = hierarchy, top
        self.pods: dict[str, Pod] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self._cpuset(top)

    def _cpuset(self, path: str) -> None:
        directory = self.hierarchy.directory("cpuset", path)
        for file in ("cpuset.cpus", "cpuset.mems"):
            text = Path(directory).parent.joinpath(file).read_text()
            Path(directory, file).write_text(text)

    def pod(self, uid: str, *, unified: bool = True, quota_us: int = -1, cpu: int | None = None) -> Pod:
        path = f"{self.top}/pod{uid}"
        inner = f"{path}/{uid[0] * 64}"
        for text in (path, inner):
            for controller in (*CONTROLLERS, *([UNIFIED] if unified else [])):
                os.makedirs(self.hierarchy.directory(controller, text), exist_ok=True)
            self._cpuset(text)
        Path(self.hierarchy.directory("cpu", inner), "cpu.cfs_quota_us").write_text(str(quota_us))
        if cpu is not None:
            Path(self.hierarchy.directory("cpuset", inner), "cpuset.cpus").write_text(str(cpu))
        pod = Pod(
            uid=uid,
            qos=QosClass.BURSTABLE,
            group=self._ref(path),
            containers=(Container(id=uid[0] * 64, group=self._ref(inner)),),
            classification=Classification(pod_class=PodClass.SHARED, source="test"),
        )
        self.pods[uid] = pod
        return pod

    def _ref(self, path: str) -> GroupRef:
        return GroupRef(path=path, inode=os.stat(self.hierarchy.trigger_directory(path)).st_ino)

    def start(self, pod: Pod, code: str = SPIN, *, unified: bool = True) -> int:
        """A process that begins its work when it is in all of the pod's groups."""
        process = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE)
        self.processes.append(process)
        for controller in (*CONTROLLERS, *([UNIFIED] if unified else [])):
            place = self.hierarchy.directory(controller, pod.containers[0].group.path)
            Path(place, "cgroup.procs").write_text(str(process.pid))
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        return process.pid

    def scene(self) -> SampleContext:
        view = NodeView(
            topology=Topology(online=CpuSet(range(os.cpu_count() or 1))),
            versions=self.hierarchy.versions(),
            kubepods=self.top,
            besteffort=f"{self.top}/besteffort",
            burstable=f"{self.top}/burstable",
            pods=dict(self.pods),
        )
        return SampleContext(view=view, pools=None, wanted=("cpu.pressure", "cpu.pressure_full", "memory.pressure"))

    def close(self) -> None:
        for pod in self.pods.values():
            # Children, too.
            for pid in PodProcesses(self.hierarchy).get(pod, 0.0):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()


@contextmanager
def machine(name: str) -> Iterator[Machine]:
    with kernel_groups(name, *CONTROLLERS, UNIFIED) as (hierarchy, top), ExitStack() as stack:
        made = Machine(hierarchy, top)
        stack.callback(made.close)
        yield made


def observe(made: Machine, *readers: Reader, passes: int = 2, pause_s: float = WAIT_S) -> SampleSheet:
    async def passes_of() -> SampleSheet:
        sheet = SampleSheet()
        for number in range(passes):
            if number:
                await trio.sleep(pause_s)
            sheet, now = SampleSheet(), time.monotonic()
            for reader in readers:
                await reader.read(made.scene(), sheet, now)
        for reader in readers:
            await reader.aclose()
        return sheet

    return trio.run(passes_of)


def sample(sheet: SampleSheet, uid: str, signal: str) -> Sample:
    return sheet.samples[f"pod:{uid}"][signal]


def test_a_process_that_its_own_quota_stops_suffers_from_nobody() -> None:
    with machine("own") as made:
        pod = made.pod("a", quota_us=10_000)
        made.start(pod)
        shared = SharedReaders(ReaderContext(hierarchy=made.hierarchy))
        cpu = shared.reader(PodCpu)
        waits = RunQueue(shared, shared.processes, cpu)
        sheet = observe(made, cpu, waits, Psi(shared, cpu))
    assert sample(sheet, "a", "cpu.use").value < 300
    assert sample(sheet, "a", "cpu.throttled").value > 20
    throttled = sample(sheet, "a", "cpu.throttled_milli").value
    raw_wait = sample(sheet, "a", "cpu.wait_milli").value + sample(sheet, "a", "cpu.wait_own").value
    # The kernel counts throttled time as waiting: this is what would be blamed on a neighbour.
    assert raw_wait >= 0.9 * throttled > 0
    assert sample(sheet, "a", "cpu.wait_own").value == pytest.approx(throttled, rel=0.15)
    # Whatever else this machine does now may take a part of the rest.
    raw_pressure = 100.0 - sample(sheet, "a", "cpu.use").value / 10
    assert sample(sheet, "a", "cpu.pressure").value <= raw_pressure - throttled / 10 + 10
    assert sample(sheet, "a", "cpu.pressure").confidence <= 1 - 0.9 * throttled / 10 / raw_pressure + 0.1


def test_two_groups_on_one_cpu_wait_for_each_other_and_both_ways_of_asking_agree() -> None:
    with machine("contend") as made:
        first, second = made.pod("a", cpu=0), made.pod("b", cpu=0)
        made.start(first)
        made.start(second)
        shared = SharedReaders(ReaderContext(hierarchy=made.hierarchy))
        cpu = shared.reader(PodCpu)

        def refuse() -> Taskstats:
            raise SourceError("taskstats", "not now")

        queue, by_thread = (RunQueue(shared, shared.processes, cpu, source) for source in (Taskstats, refuse))
        sheets: dict[str, SampleSheet] = {}
        psi = Psi(shared, cpu)

        async def both() -> None:
            for number in range(2):
                if number:
                    await trio.sleep(WAIT_S)
                for name, reader in (("asked", queue), ("by thread", by_thread)):
                    sheets[name] = SampleSheet()
                    now = time.monotonic()
                    await cpu.read(made.scene(), sheets[name], now)
                    await reader.read(made.scene(), sheets[name], now)
                await psi.read(made.scene(), sheets["asked"], time.monotonic())

            await queue.aclose()

        trio.run(both)
    for name in ("a", "b"):
        assert sample(sheets["asked"], name, "cpu.wait").value > 30
        assert sample(sheets["asked"], name, "cpu.pressure").value > 30
        assert sample(sheets["asked"], name, "cpu.wait").confidence > 0.85
        assert sample(sheets["asked"], name, "cpu.wait").value == pytest.approx(
            sample(sheets["by thread"], name, "cpu.wait").value, abs=8
        )


def test_threads_that_have_ended_are_still_counted_by_process() -> None:
    """What threads' own files no longer have."""
    code = (
        "import threading, time, sys\n"
        "def spin():\n"
        "    until = time.monotonic() + 0.3\n"
        "    while time.monotonic() < until: pass\n"
        "for _ in range(2):\n"
        "    one = threading.Thread(target=spin); one.start(); one.join()\n"
        "print('done', flush=True)\n"
        "input()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        stats = Taskstats()
        delays = stats.query([process.pid, 2**22 - 1])
        stats.close()
        main = int(Path(f"/proc/{process.pid}/schedstat").read_text().split()[0])
        process.communicate(b"\n")
    assert delays.keys() == {process.pid}
    assert delays[process.pid].run_ns > main + 200_000_000 / 4


@contextmanager
def private(name: str) -> Iterator[PrivateTree]:
    # Not in a temporary directory of pytest's, which would be emptied: with the groups of this machine in it.
    name = f"bypassd-test-{name}-{os.getpid()}"
    tree = PrivateTree(point=f"/run/{name}", prefix=f"{name}-")
    try:
        tree.open()
    except Exception as exc:  # noqa: BLE001  # whatever it is, the kernel does not offer it here
        pytest.skip(f"REAL KERNEL TEST NOT RUN: cannot mount cgroup2: {exc}")
    try:
        yield tree
    finally:
        tree.open()
        tree.clear()


def _until(made: Machine, reader: Psi, done: Callable[[], bool]) -> SampleSheet:
    async def look() -> SampleSheet:
        sheet = SampleSheet()
        with trio.fail_after(60):
            while not done():
                sheet = SampleSheet()
                await reader.read(made.scene(), sheet, time.monotonic())
                await trio.sleep(0.1)
        return sheet

    return trio.run(look)


def _place(pid: int) -> str:
    lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    return next(line for line in lines if line.startswith("0::")).removeprefix("0::")


def test_pods_of_a_v1_node_get_pressure_in_private_groups_and_keep_their_own() -> None:
    with machine("private") as made, private("psi") as tree:
        other = made.pod("b", unified=False)
        foreign = made.start(other, "import time; time.sleep(60)", unified=False)
        somebody = f"{made.top}/somebody"
        os.makedirs(made.hierarchy.directory(UNIFIED, somebody))
        Path(made.hierarchy.directory(UNIFIED, somebody), "cgroup.procs").write_text(str(foreign))
        groups = PrivateGroups(tree, PodProcesses(made.hierarchy))
        reader = Psi(SharedReaders(ReaderContext(hierarchy=made.hierarchy)), None, private=groups)
        _until(made, reader, lambda: groups.problem is not None)
        # What is wrong with one pod delays no other.
        pod = made.pod("a", unified=False)
        parent = made.start(
            pod, "import os, time\nif os.fork() == 0:\n    time.sleep(60)\ntime.sleep(60)", unified=False
        )
        _until(made, reader, lambda: groups.directory("a") is not None and len(tree.pids("a")) == 2)
        assert _place(parent) == f"/{os.path.basename(tree.directory('a'))}"
        assert made.top in Path(f"/proc/{parent}/cgroup").read_text()
        sheet = observe(made, reader, passes=2, pause_s=0.3)
        # observe has closed the reader: everything is as before.
        assert sample(sheet, "a", "memory.pressure").confidence == 1.0
        assert "b" not in {key.removeprefix("pod:") for key in sheet.samples}
        assert _place(parent) == "/"
        assert _place(foreign) == somebody
        assert not os.path.ismount(tree.root)
        assert groups.problem is not None
        assert "which another program manages" in groups.problem


def test_what_a_killed_run_has_left_is_found_and_removed_by_the_next() -> None:
    with machine("left") as made, private("left") as tree:
        pod = made.pod("a", unified=False)
        pid = made.start(pod, "import time; time.sleep(60)", unified=False)
        assert tree.attach("gone", [pid], pod.group.path).moved == 1
        assert tree.traces()
        # A next start that does not want them any more.
        groups = PrivateGroups(tree, PodProcesses(made.hierarchy), wanted=False)
        _until(
            made,
            Psi(SharedReaders(ReaderContext(hierarchy=made.hierarchy)), None, private=groups),
            lambda: not tree.traces(),
        )
        assert _place(pid) == "/"
        # One that does: without its pod it is removed, with its pod it stays.
        tree.open()
        tree.attach("gone", [pid], pod.group.path)
        groups = PrivateGroups(tree, PodProcesses(made.hierarchy))
        reader = Psi(SharedReaders(ReaderContext(hierarchy=made.hierarchy)), None, private=groups)
        _until(made, reader, lambda: groups.directory("a") is not None)
        assert tree.uids() == {"a"}
        trio.run(reader.aclose)
        assert not os.path.exists(tree.root)


def test_restore_without_a_daemon_gives_one_pods_processes_back() -> None:
    with machine("restore") as made:
        pod = made.pod("a", unified=False)
        pid = made.start(pod, "import time; time.sleep(60)", unified=False)
        tree = private_tree(made.hierarchy)
        assert tree is not None
        uid = f"test-{os.getpid()}"
        tree.attach(uid, [pid], pod.group.path)
        assert _place(pid) == f"/bypassd-psi-{uid}"
        done = restore_groups(made.hierarchy, uid)
        assert [(result.path, result.undo) for result in done] == [(tree.directory(uid), RestoreOutcome.RESTORED)]
        assert _place(pid) == "/"
        assert restore_groups(made.hierarchy, uid) == []


def test_a_process_that_is_not_in_the_pod_is_never_taken() -> None:
    with machine("stray") as made, private("stray") as tree:
        pod = made.pod("a", unified=False)
        stray = subprocess.Popen(["sleep", "60"])
        made.processes.append(stray)
        result = tree.attach("a", [stray.pid, 2**22 - 1], pod.group.path)
        assert (result.moved, result.foreign) == (0, None)
        assert tree.uids() == frozenset()
        assert _place(stray.pid) == "/"


def test_somebody_who_is_just_in_the_mount_does_not_keep_it() -> None:
    with private("busy") as tree:
        inside = os.open(tree.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            tree.close()
            assert not os.path.exists(tree.root)
        finally:
            os.close(inside)

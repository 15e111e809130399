"""One cell of the table: a service under load, beside one kind of BE work, under one law; and all of them in turn.

Rounds are interleaved: each runs every law and every kind once, so that what the machine does meanwhile is in all of
them equally. Each cell follows its own measurement of alone at once: minutes in which the machine is slow are in both.
A cell has the online latencies, the work of BE, and the machine's use during exactly that time.
"""

import contextlib
import os
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from tests.e2e.node import RunningPod
from tests.e2e.pods import PERIOD_US, ContainerSpec, PodSpec, new_uid
from tests.e2e.programs import program
from tests.fakes.kubelet.cgroups import write
from tests.fakes.kubelet.fake import playing_the_kubelet
from tests.fakes.ports import free_port, listening
from tests.node.bypassd import BypassdProcess, configuration
from tests.node.ending import terminated_like_ctrl_c
from tests.node.reaper import watched
from tests.node.scripted import ScriptedNode
from tests.protection.hogs import CPUS, Hog, units
from tests.protection.laws import FIXED_PERCENT, LAWS, Law
from tests.protection.services import Load, Service, loaded, start_load

_BE: Final = {"koordinator.sh/qosClass": "BE"}
_LIVE: Final = {"koordinator.sh/qosClass": "LS"}
GROUP: Final = f"/bypassd-protection-{os.getpid()}"
ALL: Final = frozenset(os.sched_getaffinity(0))
_TICKS: Final = os.sysconf("SC_CLK_TCK")
AGENT_SETTLE_S: Final = 6.0
"""After the agent's start, which is some tenths of a second of work, and three seconds later 30 ms more."""
ALONE_SETTLE_S: Final = 0.7
"""Before alone is measured: the load itself settles at once, and there is no BE work that would have to."""


class Cell(Struct, frozen=True, kw_only=True):
    """One measurement. Times in microseconds, ``busy`` and ``steal`` in CPUs, ``work`` in units a second.

    ``rate``: requests a second that were intended; ``done``: that were answered. ``busy`` is that of the node's
    ``cpus`` CPUs.
    ``ran_us``, ``waited_us``, ``runs``: what a request had of the server's threads: CPU time, time runnable without a
    CPU, and times that one of them was put on a CPU.
    ``settle_s``: from the BE pod's start to the measurement. ``windows``: the p99 of each quarter of a second, -1 for
    one without an answer. ``pair``: the same number for a cell and the alone that it is compared with, within a round.
    """

    service: str
    share: float
    hog: str
    law: str
    round: int
    settle_s: float
    rate: float
    done: float
    p50: float
    p99: float
    p999: float
    worst: float
    late_p99: float
    generator: float
    unanswered: int
    busy: float
    steal: float
    work: float
    windows: tuple[float, ...]
    pair: int = 0
    cpus: int = CPUS
    ran_us: float = 0.0
    waited_us: float = 0.0
    runs: float = 0.0


class Uses(Struct, frozen=True):
    """The use of some CPUs since boot by /proc/stat, in seconds of CPU."""

    busy: float
    steal: float
    at: float

    @classmethod
    def now(cls, cpus: frozenset[int] = ALL) -> "Uses":
        busy = stolen = 0.0
        for line in Path("/proc/stat").read_text().splitlines():
            name, *words = line.split()
            if name.removeprefix("cpu").isdigit() and int(name[3:]) in cpus:
                user, nice, system, _idle, _iowait, irq, softirq, steal = (int(word) / _TICKS for word in words[:8])
                busy, stolen = busy + user + nice + system + irq + softirq, stolen + steal
        return cls(busy, stolen, time.monotonic())


def tids(pod: RunningPod) -> set[int]:
    """All threads of a pod's containers."""
    found: set[int] = set()
    for running in pod.containers.values():
        group = Path(running.directory("cpu"))
        file = next(file for file in (group / "tasks", group / "cgroup.threads") if file.exists())
        found.update(int(word) for word in file.read_text().split())
    return found


class Scheduled(Struct, frozen=True):
    """What the scheduler counted of each of some threads: nanoseconds running, nanoseconds runnable, times it ran.

    Source: Documentation/scheduler/sched-stats.rst, /proc/PID/schedstat.
    """

    threads: Mapping[int, tuple[int, int, int]]

    @classmethod
    def of(cls, threads: Iterable[int]) -> "Scheduled":
        found = {}
        for tid in threads:
            with contextlib.suppress(OSError):
                ran, waited, times = Path(f"/proc/{tid}/schedstat").read_text().split()
                found[tid] = int(ran), int(waited), int(times)
        return cls(found)

    def since(self, before: "Scheduled") -> tuple[float, float, float]:
        """Seconds running, seconds runnable and times run of the threads that were there before."""
        parts = [
            [now - then for now, then in zip(self.threads[tid], counts, strict=True)]
            for tid, counts in before.threads.items()
            if tid in self.threads
        ]
        ran, waited, times = (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0, 0)
        return ran / 1e9, waited / 1e9, times


class Stage:
    """A node with one service on it. BE pods and the agent start and end.

    ``client``: the CPU of the generator, where it has one of its own, which is then none of the node's.
    """

    def __init__(
        self, node: ScriptedNode, pod: RunningPod, service: Service, port: int, directory: str, client: int | None
    ) -> None:
        self.node, self.pod, self.service, self.port, self.directory = node, pod, service, port, directory
        self.client = client
        self.cpus = ALL - {client}
        self.generator, self.hogs = str(program("generator")), str(program("hogs"))
        self.forked = False
        """Whether a fork server starts the agent: see `tests.fakes.forkserver`."""
        self._agent: BypassdProcess | None = None
        self._law: Law | None = None

    def load(self, rate: float, *, warmup_s: float, seconds: float, seed: int) -> Load:
        """Open-loop load, and its result."""
        return loaded(self.start_load(rate, warmup_s=warmup_s, seconds=seconds, seed=seed))

    def start_load(self, rate: float, *, warmup_s: float, seconds: float, seed: int) -> subprocess.Popen[str]:
        """Open-loop load, at work."""
        running = start_load(
            self.generator, self.service, self.port, rate, warmup_s=warmup_s, seconds=seconds, seed=seed
        )
        if self.client is not None:
            os.sched_setaffinity(running.pid, {self.client})
        return running

    def answers(self, *, within_s: float = 30.0) -> None:
        """Wait for the first answer: PostgreSQL listens before it accepts a login. Errors: `RuntimeError`."""
        deadline = time.monotonic() + within_s
        while True:
            try:
                self.load(20.0, warmup_s=0.0, seconds=0.2, seed=1)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def capacity(self, *, most_us: float = 20_000.0) -> float:
        """The highest rate, to a quarter, that it sustains alone with a p99 below ``most_us``."""
        good, rate, factor = 200.0, 200.0, 2.0
        while rate < 300_000:
            result = self.load(rate, warmup_s=0.3, seconds=1.0, seed=1)
            # Arrivals are random: their number in a second differs from the rate by its square root.
            if result.unanswered or result.p99 > most_us or result.rate < 0.95 * rate - 4 * rate**0.5:
                if factor < 2:
                    break
                # Doubled until it fails, then on by quarters from the last that it sustained.
                factor, rate = 1.25, good * 1.25
            else:
                good, rate = rate, rate * factor
        return good

    def rule(self, law: Law, online_busy: float, *, settle_s: float = AGENT_SETTLE_S) -> None:
        """Put a law in force. ``online_busy``: CPUs in use without BE work. ``settle_s``: after an agent starts."""
        if law is self._law:
            return
        self.unrule()
        self._law = law
        if law.fixed:
            self._quota(max(0.1, len(self.cpus) * FIXED_PERCENT / 100 - online_busy))
        if law.config is not None:
            agent = BypassdProcess(self.node, cri_socket=None)
            agent.forked = self.forked
            given = dict(law.config)
            if self.client is not None:
                # The kubelet's reservedSystemCPUs: no pod runs there.
                reserve = {"cpus": str(self.client), "strict": "always"}
                given["policies"] = {**given.get("policies", {}), "reserve": reserve}
            agent.write_config({**configuration(self.node, agent.directory, cri_socket=None), **given})
            agent.start()
            agent.wait_ready()
            if self.client is not None:
                for tid in os.listdir(f"/proc/{agent.pid}/task"):
                    os.sched_setaffinity(int(tid), self.cpus)
            time.sleep(settle_s)
            self._agent = agent

    def unrule(self) -> None:
        """As without any law."""
        agent, self._agent, law, self._law = self._agent, None, self._law, None
        if agent is not None:
            agent.restore()
            agent.stop()
        if law is not None and law.fixed:
            self._quota(None)

    @property
    def agent_pid(self) -> int | None:
        """The agent's process, where the law has one."""
        return self._agent.pid if self._agent is not None else None

    def _quota(self, cpus: float | None) -> None:
        directory = self.node.cgroups.directory("cpu", self.node.cgroups.group("kubepods", "besteffort"))
        write(directory, "cpu.cfs_quota_us", -1 if cpus is None else int(cpus * PERIOD_US))

    @contextmanager
    def hog(self, hog: Hog | None, law: Law) -> Iterator[Callable[[], int]]:
        """BE work; the function returns its units so far."""
        if hog is None:
            yield lambda: 0
            return
        directory = f"{self.directory}/hog-{hog.name.replace(' ', '-')}"
        os.makedirs(directory, exist_ok=True)
        Path(directory, "count").unlink(missing_ok=True)
        command = hog.command(self.hogs, directory, len(self.cpus))
        container = ContainerSpec(run=("exec", *command), cpu_request=0 if law.be else 1000)
        pod = self.node.run_pod(
            PodSpec(name="hog", namespace="batch", uid=new_uid(), labels=dict(_BE), containers=(container,))
        )
        try:
            yield lambda: units(directory)
        finally:
            self.node.remove_pod(pod)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The agent does nothing meanwhile, as if it did not run; what it has written stays."""
        pid = self.agent_pid
        if pid is None:
            yield
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def cell(
        self,
        hog: Hog | None,
        law: Law,
        *,
        share: float,
        rate: float,
        seconds: float,
        settle_s: float,
        number: int,
        pair: int = 0,
    ) -> Cell:
        with self.hog(hog, law) as done:
            time.sleep(0.2)
            running = self.start_load(rate, warmup_s=settle_s, seconds=seconds, seed=number + 1)
            time.sleep(settle_s)
            server = tids(self.pod)
            before, work_before, scheduled = Uses.now(self.cpus), done(), Scheduled.of(server)
            time.sleep(seconds)
            after, work_after = Uses.now(self.cpus), done()
            ran, waited, runs = Scheduled.of(server).since(scheduled)
            load = loaded(running)
        took = after.at - before.at
        answered = max(1.0, load.rate * took)
        return Cell(
            service=self.service.name,
            share=share,
            hog=hog.name if hog is not None else "-",
            law=law.name,
            round=number,
            settle_s=settle_s,
            rate=rate,
            done=load.rate,
            p50=load.p50,
            p99=load.p99,
            p999=load.p999,
            worst=load.worst,
            late_p99=load.late_p99,
            generator=load.cpu,
            unanswered=load.unanswered,
            busy=(after.busy - before.busy) / took,
            steal=(after.steal - before.steal) / took,
            work=(work_after - work_before) / took,
            windows=load.windows,
            pair=pair,
            cpus=len(self.cpus),
            ran_us=ran / answered * 1e6,
            waited_us=waited / answered * 1e6,
            runs=runs / answered,
        )

    def alone_work(self, hog: Hog, *, seconds: float) -> float:
        """Units a second of BE work while the service gets no requests and no law holds."""
        law = Law(name="unmanaged", be=False)
        self.unrule()
        with self.hog(hog, law) as done:
            time.sleep(0.5)
            began, before = time.monotonic(), done()
            time.sleep(seconds)
            return (done() - before) / (time.monotonic() - began)


@contextmanager
def stage(service: Service, directory: str, *, apart: bool = False) -> Iterator[Stage]:
    """A node with the service's pod; all is undone afterwards.

    ``apart``: the generator has the machine's first CPU to itself, as if it were on another machine, and the node the
    others: its pods by their cpuset, the agent by its affinity. Else all share all CPUs, and as soon as no CPU is idle
    the kernel runs the server on the CPU of the generator that wakes it, which then interrupts it at each request.
    """
    if apart and len(ALL) < 2:
        raise RuntimeError("a generator with a CPU of its own needs two CPUs")
    client = min(ALL) if apart else None
    own = f"{directory}/{service.name}"
    os.makedirs(own, exist_ok=True)
    port = free_port()
    command = service.prepare(own, port)
    container = ContainerSpec(run=("exec", *command), cpu_request=1000)
    with (
        terminated_like_ctrl_c(),
        playing_the_kubelet(),
        ScriptedNode.start(cpu_policy="none", reserved=frozenset(), cgroup_root=GROUP) as node,
        watched(node.directory),
    ):
        node.kubelet.listen()
        if client is not None:
            groups = [node.cgroups.group("kubepods", *qos) for qos in (("burstable",), ("besteffort",), ())]
            for group in (*groups, GROUP):
                cpus = ",".join(str(cpu) for cpu in sorted(ALL - {client}))
                write(node.cgroups.directory("cpuset", group), "cpuset.cpus", cpus)
        pod: RunningPod = node.run_pod(
            PodSpec(name=service.name, namespace="shop", uid=new_uid(), labels=dict(_LIVE), containers=(container,))
        )
        listening(port)
        result = Stage(node, pod, service, port, own, client)
        try:
            result.answers()
            yield result
        finally:
            result.unrule()
            node.remove_pod(pod)


def measured(
    place: Stage,
    *,
    shares: Sequence[float],
    hogs: Sequence[Hog],
    laws: Sequence[Law],
    rounds: int,
    seconds: float,
    settle_s: float,
    say: Callable[[str], None],
    agent_settle_s: float = AGENT_SETTLE_S,
) -> Iterator[Cell | tuple[str, str, float]]:
    """All cells of one service; and as (service, kind, units a second) each kind's work with the machine to itself."""
    top = statistics.median(place.capacity() for _ in range(3))
    say(f"{place.service.name}: sustains {top:.0f} requests a second alone")
    for hog in hogs:
        yield place.service.name, hog.name, place.alone_work(hog, seconds=seconds)
    for number in range(rounds):
        for share in shares:
            rate = top * share
            measure = partial(place.cell, share=share, rate=rate, seconds=seconds, number=number)
            pair = 0
            for law in laws:
                place.unrule()
                for index, hog in enumerate(hogs):
                    pair += 1
                    with place.paused():
                        alone = measure(None, LAWS["alone"], settle_s=ALONE_SETTLE_S, pair=pair)
                    yield alone
                    if index == 0:
                        place.rule(law, alone.busy, settle_s=agent_settle_s)
                    cell = measure(None if law.control else hog, law, settle_s=settle_s, pair=pair)
                    say(f"  {share:.0%} {law.name:<12} {hog.name:<9} p99 {cell.p99:8.0f} (alone {alone.p99:.0f}) us")
                    yield msgspec.structs.replace(cell, hog=hog.name)
            place.unrule()


def encoded(cell: Cell | tuple[str, str, float]) -> bytes:
    """A line of the record."""
    value: Any = cell if isinstance(cell, Cell) else {"service": cell[0], "hog": cell[1], "alone_work": cell[2]}
    return msgspec.json.encode(value) + b"\n"

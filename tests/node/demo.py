"""The demo: an online service alone, then with BE pods and no agent, then with the agent. All figures are measured.

Whatever happens, everything is undone: the agent puts its files back, that is checked by reading them, pods and groups
are removed. What fails on the way ends the demo with a message.
"""

import contextlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Generic

from msgspec import Struct

from tests.node import workload
from tests.node.bypassd import Bypassd, Start, Undoing, View
from tests.node.client import percentile
from tests.node.frame import Frame, Row, agent_lines, budget_text, directory_row, pools_of, row_of
from tests.node.picture import Second, seconds_of
from tests.node.screen import Screen
from tests.node.stage import P, Stage
from tests.node.values import Difference, Place, Values, groups_of
from tests.node.workload import Latency, ServiceMeter, WorkMeter

REFRESH_S: Final = 0.5
VIEW_S: Final = 3.0
"""Seconds between two requests to the agent: its answer takes CPU time of the phase that is measured."""
SETTLE_S: Final = 2.0
"""The first seconds of each phase are not counted: what the phase is about has only just been started."""
JOB_EVERY_S: Final = 2.5
JOB_LIVES_S: Final = 4.0
SHARES: Final = (0.22, 0.28, 0.5)
"""How the measured time is given to the three phases."""
_NO_ROOM: Final = ("no CPU is left", "every CPU is")
PHASES: Final = ("online alone", "online + BE, no agent", "online + BE, agent enforcing")


class DemoFailed(Exception):
    """A part of the demo did not do what it must."""


class Measured(Struct, frozen=True, kw_only=True):
    """One phase's figures. ``latency`` and ``be_rate`` are None where nothing is measured (the fake kernel)."""

    name: str
    seconds: float
    latency: Latency | None
    be_rate: float | None
    beside: float | None = None
    """CPUs in use by all that is in no pod: the rest of the machine, the client and the agent."""
    series: tuple[Second, ...] = ()
    """Second by second, from the phase's beginning on."""


class Outcome(Struct, frozen=True, kw_only=True):
    """All that the demo found."""

    phases: tuple[Measured, ...]
    starts: Mapping[str, bool | None]
    signal_to_write_s: tuple[float, ...]
    knobs: Mapping[str, int]
    files: int
    writes: int
    foreign: Mapping[str, int]
    updates: int
    refused: tuple[str, ...]
    undoing: Undoing
    compared: int
    differences: tuple[Difference, ...]
    changes: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    """The last table under the agent."""
    pools: tuple[tuple[str, str], ...] = ()
    squeezed: tuple[str, ...] = ()
    """Pools that did not get what they ask for, and why."""


class Churn(Generic[P]):
    """Short-lived BE pods: every few seconds one is created and one removed. Runs in a thread of its own."""

    def __init__(self, stage: Stage[P]) -> None:
        self._stage = stage
        self._stopping = threading.Event()
        self.still = threading.Lock()
        """While it is held no pod is in creation or removal."""
        self._thread = threading.Thread(target=self._run, name="churn", daemon=True)
        self.started: dict[str, float] = {}
        """Container ids, in the order of their starts, with the moment that each one's pod was begun; monotonic."""
        self.problem: str | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """The pods that are there now stay."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        number = 0
        living: list[tuple[float, P]] = []
        while not self._stopping.is_set():
            try:
                number += 1
                with self.still:
                    began = time.monotonic()
                    pod = self._stage.run_pod(workload.job(number))
                    self.started |= {like.id: began for like in pod.containers.values()}
                    living.append((time.monotonic() + JOB_LIVES_S, pod))
                    while living and living[0][0] < time.monotonic():
                        self._stage.remove_pod(living.pop(0)[1])
            except Exception as exc:  # noqa: BLE001  (reported by the demo, which ends then)
                self.problem = f"{type(exc).__name__}: {exc}"
                return
            self._stopping.wait(JOB_EVERY_S)


class Demo(Generic[P]):
    """One run on one node. ``service``: its processes really run, so latency and work are measured."""

    def __init__(
        self,
        stage: Stage[P],
        values: Values,
        screen: Screen,
        *,
        start_agent: Callable[[], Bypassd],
        seconds: float,
        cpus: int,
        facts: str,
        label: str = "",
        service: bool = True,
        beside_s: Callable[[], float] | None = None,
    ) -> None:
        """``beside_s``: CPU seconds so far of all that is in no pod, where that is measured."""
        self._stage = stage
        self._values = values
        self._screen = screen
        self._start_agent = start_agent
        self._seconds = seconds
        self._cpus = cpus
        self._facts = facts
        self._label = label
        self._service = service
        self._beside_s = beside_s
        self._work = WorkMeter()
        self._meter: ServiceMeter | None = None
        self._view: View | None = None
        self._viewed_at = 0.0
        self._agent: Bypassd | None = None
        self._churn = Churn(stage)
        self._starts: dict[str, Start] = {}
        self._began = time.monotonic()
        self._rows: dict[int, tuple[Row, ...]] = {}
        """The last table of each phase."""
        self._rates: list[tuple[float, int]] = []
        self._totals: list[tuple[float, int]] = []

    def run(self) -> Outcome:
        """All phases, the restore and its check. Errors: `DemoFailed` and what the parts raise."""
        with contextlib.ExitStack() as undo:
            if self._cpus > 1:
                self._stage.run_pod(workload.ledger())
            self._stage.run_pod(workload.search())
            front = self._stage.run_pod(workload.frontend())
            if self._service:
                path = f"{self._stage.out_directory(front.spec, 'main')}/service.sock"
                self._meter = ServiceMeter(self._stage.directory, path, self._cpus - 1)
                undo.callback(self._meter.stop)
                self._wait_for_service()
            phases = [self._phase(0)]
            for number in (1, 2):
                self._stage.run_pod(workload.crunch(number, self._cpus))
            # Last: beside it a BestEffort container has so little weight that its very start takes many seconds.
            self._stage.run_pod(workload.executor(self._cpus))
            self._churn.start()
            undo.callback(self._churn.stop)
            before: dict[Place, str] = {}
            phases.append(self._phase(1, each=lambda: before.update(self._values.snapshot(self._groups()))))
            self._wait_for_churn()
            before.update(self._values.snapshot(self._groups()))
            self._agent = self._start_agent()
            undo.callback(self._agent.stop)
            ready = time.monotonic()
            phases.append(self._phase(2))
            self._churn.stop()
            self._look(last=True)
            return self._undo(tuple(phases), before, [cid for cid, at in self._churn.started.items() if at >= ready])

    def _undo(self, phases: tuple[Measured, ...], before: Mapping[Place, str], fresh: Sequence[str]) -> Outcome:
        """The agent's own restore, and the proof: every file is read and compared."""
        agent, view = self._agent, self._view
        assert agent is not None
        assert view is not None
        undoing = agent.restore()
        compared, differences = self._values.differences(self._groups(), before)
        return Outcome(
            phases=phases,
            starts={cid: self._starts[cid].before_exec if cid in self._starts else None for cid in fresh},
            signal_to_write_s=tuple(
                start.seconds for cid, start in self._starts.items() if cid in fresh and start.seconds is not None
            ),
            knobs=view.knobs,
            files=view.files,
            writes=view.writes,
            foreign=view.foreign,
            updates=self._stage.kubelet.updates,
            refused=tuple(self._stage.kubelet.refused),
            undoing=undoing,
            compared=compared,
            differences=tuple(differences),
            changes=tuple(changes_between(self._rows[1], self._rows[2])),
            rows=self._rows[2],
            pools=self._pools(),
            squeezed=tuple(
                f"{name}: {view.reasons[name]}"
                for name in sorted(view.reasons)
                if any(message in view.reasons[name] for message in _NO_ROOM)
            ),
        )

    def _phase(self, number: int, *, each: Callable[[], object] = lambda: None) -> Measured:
        begin = time.monotonic()
        length = self._seconds * SHARES[number]
        if self._meter is not None:
            self._meter.show_from(begin)
        counted, work, beside = begin + min(SETTLE_S, length / 2), 0, 0.0
        while (now := time.monotonic()) < begin + length:
            self._look()
            if now < counted:
                work, beside = self._work.total, self._beside_s() if self._beside_s is not None else 0.0
            each()
            frame = self._frame(number, begin + length - now)
            self._rows[number] = frame.rows
            self._screen.show(frame)
            time.sleep(max(0.0, min(REFRESH_S, begin + length - time.monotonic())))
        with self._churn.still:
            self._look(last=True)
            # The table that remains: what the agent says now, and the values read after it.
            self._rows[number] = self._frame(number, 0.0).rows
        end = time.monotonic()
        seconds = end - counted
        return Measured(
            name=PHASES[number],
            seconds=seconds,
            latency=self._meter.between(counted, end) if self._meter is not None else None,
            be_rate=(self._work.total - work) / seconds if self._service and number else None,
            beside=(self._beside_s() - beside) / seconds if self._beside_s is not None else None,
            series=seconds_of(begin, end, self._meter.samples, self._totals if number else ()) if self._meter else (),
        )

    def _look(self, *, last: bool = False) -> None:
        """Read meters, and the agent where it is due or ``last``; what has broken ends the demo."""
        if self._churn.problem is not None:
            raise DemoFailed(f"the pods that come and go: {self._churn.problem}")
        if self._stage.kubelet.failures:
            raise DemoFailed(self._stage.kubelet.failures[0])
        if self._meter is not None:
            self._meter.update()
            if not self._meter.alive:
                raise DemoFailed("the online service's client has ended: the service does not answer any more")
        self._work.update(self._pods(), self._stage.out_directory)
        self._totals.append((time.monotonic(), self._work.total))
        self._rates = self._totals[-7:]
        now = time.monotonic()
        if self._agent is not None and (self._view is None or last or now - self._viewed_at >= VIEW_S):
            self._view, self._viewed_at = self._agent.view(), now
            self._starts.update(self._view.starts)

    def _pods(self) -> list[P]:
        return list(self._stage.pods.values())

    def _groups(self) -> dict[str, str]:
        names = self._stage.cgroups
        above = [names.group("kubepods"), *(names.group("kubepods", qos) for qos in ("burstable", "besteffort"))]
        return groups_of(self._pods(), above, names.pod_group)

    def _rate(self) -> float | None:
        if not self._service or len(self._rates) < 2:
            return None
        (first, was), (last, now) = self._rates[0], self._rates[-1]
        return (now - was) / (last - first) if last > first else None

    def _frame(self, number: int, left_s: float) -> Frame:
        rate = self._rate()
        pods = sorted(self._pods(), key=lambda pod: (workload.is_be(pod.spec), pod.spec.name))
        latency = self._meter.recent() if self._meter is not None else None
        rows = [
            row_of(pod, self._values, self._view, self._progress(pod), online=not workload.is_be(pod.spec))
            for pod in pods
        ]
        besteffort = self._stage.cgroups.group("kubepods", "besteffort")
        rows.append(directory_row(besteffort, "besteffort/", self._values, self._view, ""))
        seconds = [start.seconds for start in self._starts.values() if start.seconds is not None]
        new = {
            cid: self._starts[cid].before_exec
            for cid in self._churn.started
            if cid in self._starts and self._starts[cid].seconds is not None
        }
        return Frame(
            label=self._label,
            node=self._facts,
            phase=PHASES[number],
            step=f"({number + 1} of {len(PHASES)})",
            elapsed_s=time.monotonic() - self._began,
            left_s=left_s + self._seconds * sum(SHARES[number + 1 :]),
            rows=tuple(rows),
            latency=latency,
            be_rate=rate if number else None,
            budget=budget_text(self._view),
            pools=self._pools(),
            agent=agent_lines(self._view, new, statistics.median(seconds) if seconds else None),
        )

    def _pools(self) -> tuple[tuple[str, str], ...]:
        return pools_of(self._view, {pod.spec.uid: pod.spec.name for pod in self._pods()})

    def _progress(self, pod: P) -> str:
        if not self._service:
            return ""
        if self._meter is not None and pod.spec.name == "frontend":
            return f"{len(self._meter.samples)} answers"
        units = self._work.by_pod.get(pod.spec.uid, 0)
        return f"{units} units"

    def _wait_for_churn(self, within_s: float = 20.0) -> None:
        """What the values of a short-lived pod are without the agent has to be seen before it starts."""
        deadline = time.monotonic() + within_s
        while not self._churn.started:
            if self._churn.problem is not None or time.monotonic() > deadline:
                raise DemoFailed(f"no short-lived pod starts: {self._churn.problem or f'not within {within_s:.0f} s'}")
            time.sleep(0.05)

    def _wait_for_service(self, within_s: float = 20.0) -> None:
        deadline = time.monotonic() + within_s
        while self._meter is not None and not self._meter.samples:
            self._meter.update()
            if not self._meter.alive or time.monotonic() > deadline:
                raise DemoFailed("the online service does not answer")
            time.sleep(0.05)


def changes_between(before: Sequence[Row], after: Sequence[Row]) -> Iterator[str]:
    """What the agent has done to the pods that were there in both, in words."""
    then = {row.title: row for row in before}
    for row in after:
        was = then.get(row.title)
        if was is None:
            continue
        columns = (("CPUs", was.cpus, row.cpus), ("quota", was.quota, row.quota), ("weight", was.weight, row.weight))
        moved = [f"{name} {old.actual} → {new.actual}" for name, old, new in columns if old.actual != new.actual]
        if moved:
            yield f"{row.title}: {', '.join(moved)}"


def tail_of(values: Sequence[float]) -> Iterator[str]:
    """Median and 99th percentile of seconds, in milliseconds."""
    ordered = list(values)
    for share in (0.5, 0.99):
        value = percentile(ordered, share)
        yield "-" if value is None else f"{value * 1000:.2f} ms"

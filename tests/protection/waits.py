"""Who ran while an online server waited for a CPU: the tail of a law, by its cause.

    python -m tests.protection.waits [--services redis,node] [--hogs "int 2x,stream"] [--laws alone,kubernetes,cpu]
        [--shares 0.3] [--rounds 3] [--seconds 2] [--controls stopped,pinned] [--client apart|beside]
        [--record FILE] [--report]

A latency has the machine's own disturbances in it; this has each apart. While the server is under open-loop load the
kernel's scheduler events are recorded (tracefs, a buffer of our own), and every moment in which one of the server's
threads was runnable and did not run is counted for what ran on its CPU: BE work, the server's other threads, the
generator, the agent, or the machine's other tasks; and how often BE threads were moved to another CPU. The events cost
the server CPU time; they cost it the same under every law.

Controls measure a law again in each round: ``stopped`` with the agent stopped (SIGSTOP; what it has written is in
force), so the difference is the running agent's part; ``pinned`` with each BE thread kept on one CPU, so the difference
is the part of BE threads that move.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from tests.protection.cells import Stage, Uses, stage, tids
from tests.protection.hogs import HOGS, Hog
from tests.protection.laws import LAWS, Law
from tests.protection.report import read_record
from tests.protection.services import installed, loaded

STALL_S: Final = 0.3e-3
"""A wait that is counted as a stall: longer than a server needs for a request."""
KINDS: Final = ("BE", "server", "generator", "agent", "machine", "idle")
"""``idle``: the CPU had not begun to run the thread yet (the wake-up of an idle CPU)."""
CONTROLS: Final = {"stopped": " (agent stopped)", "pinned": " (BE pinned)"}
"""What a control is called in the table."""

_EVENTS: Final = ("sched_switch", "sched_wakeup", "sched_wakeup_new", "sched_migrate_task")
_LINE: Final = re.compile(r"\[(\d+)\]\s+\S+\s+(\d+\.\d+): (\w+): (.*)")
_SWITCH: Final = re.compile(
    r"prev_comm=.* prev_pid=(\d+) prev_prio=-?\d+ prev_state=(\S+) ==> next_comm=(.*) next_pid=(\d+)"
)
_WOKEN: Final = re.compile(r"comm=.* pid=(\d+) prio=-?\d+ target_cpu=(\d+)")
_MOVED: Final = re.compile(r"comm=(.*) pid=(\d+) prio=-?\d+ orig_cpu=\d+ dest_cpu=(\d+)")


class Wait(NamedTuple):
    """One wait of a thread, and for how long of it each task ran on its CPU: (pid, name) to seconds."""

    seconds: float
    ran: Mapping[tuple[int, str], float]


class _Waiting:
    """A thread that is runnable: on which CPU, since when, and until when its time is counted."""

    __slots__ = ("counted", "cpu", "ran", "since")

    def __init__(self, at: float, cpu: int) -> None:
        self.since = self.counted = at
        self.cpu = cpu
        self.ran: defaultdict[tuple[int, str], float] = defaultdict(float)


def waits(lines: Iterable[str], server: frozenset[int]) -> tuple[list[Wait], float]:
    """All waits of the server's threads, and the seconds that the record covers. Lines of a trace, in order of time."""
    running: dict[int, tuple[tuple[int, str], float]] = {}
    waiting: dict[int, _Waiting] = {}
    found: list[Wait] = []
    first = at = 0.0

    def count(cpu: int) -> None:
        if cpu not in running:
            return
        task, since = running[cpu]
        for one in waiting.values():
            if one.cpu == cpu:
                one.ran[task] += max(0.0, at - max(since, one.counted))
                one.counted = at

    for line in lines:
        if (match := _LINE.search(line)) is None:
            continue
        cpu, at, event, text = int(match[1]), float(match[2]), match[3], match[4]
        first = first or at
        if event == "sched_switch" and (switch := _SWITCH.search(text)) is not None:
            count(cpu)
            before, after = int(switch[1]), int(switch[4])
            running[cpu] = ((after, switch[3]), at)
            if (ended := waiting.pop(after, None)) is not None:
                found.append(Wait(at - ended.since, ended.ran))
            if before in server and switch[2].startswith("R"):
                waiting[before] = _Waiting(at, cpu)
        elif event.startswith("sched_wakeup") and (woken := _WOKEN.search(text)) is not None:
            pid = int(woken[1])
            if pid in server and pid not in waiting:
                waiting[pid] = _Waiting(at, int(woken[2]))
        elif (moved := _MOVED.search(text)) is not None and (one := waiting.get(int(moved[2]))) is not None:
            count(one.cpu)
            one.cpu, one.counted = int(moved[3]), at
    return found, at - first


def moves(lines: Iterable[str], tasks: Collection[str]) -> int:
    """How often threads of these names were moved to another CPU."""
    found = (_MOVED.search(line) for line in lines if " sched_migrate_task: " in line)
    return sum(match is not None and match[1] in tasks for match in found)


@contextmanager
def tracefs() -> Iterator[Path]:
    """The mounted tracefs; a mount of our own where there is none."""
    known = Path("/sys/kernel/tracing")
    if (known / "instances").is_dir():
        yield known
        return
    with tempfile.TemporaryDirectory(prefix="bypassd-tracefs-") as directory:
        subprocess.run(["mount", "-t", "tracefs", "tracefs", directory], check=True)
        try:
            yield Path(directory)
        finally:
            subprocess.run(["umount", directory], check=True)


class Recorder:
    """The scheduler's events in a buffer of our own."""

    def __init__(self, root: Path) -> None:
        self._root = root / "instances" / f"bypassd-{os.getpid()}"

    def __enter__(self) -> Self:
        self._root.mkdir()
        self._write("tracing_on", "0")
        self._write("trace_clock", "mono")
        self._write("buffer_size_kb", "65536")
        for event in _EVENTS:
            self._write(f"events/sched/{event}/enable", "1")
        return self

    def __exit__(self, *_: object) -> None:
        self._root.rmdir()

    def _write(self, name: str, text: str) -> None:
        (self._root / name).write_text(text)

    def record(self, seconds: float, each: Callable[[], None]) -> list[str]:
        """The lines of some seconds; ``each`` is called ten times a second meanwhile."""
        self._write("trace", "")
        self._write("tracing_on", "1")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(0.1)
            each()
        self._write("tracing_on", "0")
        return (self._root / "trace").read_text(errors="replace").splitlines()


def names(pids: Iterable[int]) -> set[str]:
    """The names of processes; those that ended meanwhile are left out."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.add(Path(f"/proc/{pid}/comm").read_text(errors="replace").strip())
    return found


def pin(threads: Iterable[int]) -> None:
    """Each thread on one CPU, in turn; those that ended meanwhile are left out."""
    cpus = sorted(os.sched_getaffinity(0))
    for number, tid in enumerate(sorted(threads)):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(tid, {cpus[number % len(cpus)]})


def by_kind(found: Sequence[Wait], seconds: float, kind: Callable[[tuple[int, str]], str]) -> dict[str, Any]:
    """What the waits had of each kind.

    ``waited``: milliseconds of waiting in a second; ``stalls``: waits above `STALL_S` in a second, each counted for the
    kind that ran the longest; ``be``: the 99th and the 99.9th percentile of what one wait had of BE, in microseconds.
    """
    waited: defaultdict[str, float] = defaultdict(float)
    stalls: defaultdict[str, int] = defaultdict(int)
    of_be = []
    for wait in found:
        parts: defaultdict[str, float] = defaultdict(float)
        for task, took in wait.ran.items():
            parts[kind(task)] += took
        for name, took in parts.items():
            waited[name] += took
        of_be.append(parts["BE"])
        if wait.seconds > STALL_S and parts:
            stalls[max(parts, key=parts.__getitem__)] += 1
    of_be.sort()
    return {
        "waited": {name: round(waited[name] / seconds * 1e3, 3) for name in KINDS},
        "stalls": {name: round(stalls[name] / seconds, 2) for name in KINDS},
        "be": tuple(round(of_be[int(len(of_be) * part)] * 1e6, 1) if of_be else 0.0 for part in (0.99, 0.999)),
    }


def cell(
    place: Stage, recorder: Recorder, hog: Hog | None, law: Law, *, rate: float, seconds: float, control: str | None
) -> dict[str, Any]:
    """Measure one: `by_kind` and the p99 in microseconds. ``control``: one of `CONTROLS`."""
    be: set[str] = set()

    def look() -> None:
        for pod in list(place.node.pods.values()):
            if pod is not place.pod:
                be.update(names(tids(pod)))

    with place.hog(hog, law):
        time.sleep(1.0)
        agent = place.agent_pid
        agents = {int(name) for name in os.listdir(f"/proc/{agent}/task")} if agent is not None else set()
        if control == "pinned":
            pin(tid for pod in place.node.pods.values() if pod is not place.pod for tid in tids(pod))
        if control == "stopped" and agent is not None:
            os.kill(agent, signal.SIGSTOP)
        try:
            running = place.start_load(rate, warmup_s=0.3, seconds=seconds + 0.4, seed=1)
            time.sleep(0.5)
            server = tids(place.pod)
            look()
            lines = recorder.record(seconds, look)
            load = loaded(running)
        finally:
            if control == "stopped" and agent is not None:
                os.kill(agent, signal.SIGCONT)

    def kind(task: tuple[int, str]) -> str:
        pid, name = task
        if pid in server:
            return "server"
        if pid == running.pid:
            return "generator"
        if pid in agents:
            return "agent"
        if pid == 0:
            return "idle"
        return "BE" if name in be else "machine"

    found, took = waits(lines, frozenset(server))
    return {**by_kind(found, took, kind), "p99": load.p99, "moves": round(moves(lines, be) / took, 1)}


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """A line for each service, load, kind of BE work and law: medians over the rounds."""
    cells: dict[tuple[str, float, str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["service"], row["share"], row["hog"], row["law"]), []).append(row)
    shown = [kind for kind in KINDS if kind != "idle"]
    lines = ["| service | load | BE work | law | p99 | of BE, p99 and p99.9 | " + " | ".join(shown) + " | BE moves |"]
    lines.append("|---|---|---|---|---:|---:|" + "---:|" * (len(shown) + 1))
    for (service, share, hog, law), some in cells.items():
        stalls = [statistics.median(one["stalls"][kind] for one in some) for kind in shown]
        of_be = [statistics.median(one["be"][number] for one in some) for number in (0, 1)]
        p99 = statistics.median(one["p99"] for one in some)
        lines.append(
            f"| {service} | {share:.0%} | {hog} | {law} | {p99:.0f} us | {of_be[0]:.0f} us, {of_be[1]:.0f} us | "
            + " | ".join(f"{one:.1f}" for one in stalls)
            + f" | {statistics.median(one['moves'] for one in some):.0f} |"
        )
    return "\n".join(lines)


def measured(
    place: Stage,
    recorder: Recorder,
    *,
    shares: Sequence[float],
    hogs: Sequence[Hog],
    laws: Sequence[Law],
    rounds: int,
    seconds: float,
    controls: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """All cells of one service, round by round."""
    top = statistics.median(place.capacity() for _ in range(3))
    for number in range(rounds):
        for share in shares:
            before = Uses.now(place.cpus)
            place.load(top * share, warmup_s=0, seconds=1, seed=1)
            after = Uses.now(place.cpus)
            for law in laws:
                place.rule(law, (after.busy - before.busy) / (after.at - before.at))
                for hog in [None] if law.name == "alone" else hogs:
                    apply = [name for name in controls if hog and (name != "stopped" or law.config is not None)]
                    for control in (None, *apply):
                        row = cell(place, recorder, hog, law, rate=top * share, seconds=seconds, control=control)
                        title = law.name + (CONTROLS[control] if control else "")
                        of = {"service": place.service.name, "share": share, "hog": hog.name if hog else "-"}
                        yield {**of, "law": title, "round": number, "rate": top * share, **row}
            place.unrule()


def main(parts: Sequence[str] | None = None) -> int:
    """Measure, and write the table to standard output."""
    options = argparse.ArgumentParser(description="Who ran while an online server waited for a CPU.")
    options.add_argument("--services", default="redis,nginx,node")
    options.add_argument("--hogs", default="int 2x,stream")
    options.add_argument("--laws", default="alone,kubernetes,cpu")
    options.add_argument("--shares", default="0.3")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--seconds", type=float, default=2.0)
    options.add_argument("--controls", default="stopped,pinned")
    options.add_argument("--client", choices=("apart", "beside"), default="apart", help="a CPU of its own, or all")
    options.add_argument("--record", type=Path, default=Path("waits.jsonl"))
    options.add_argument("--report", action="store_true", help="only from the record: measure nothing")
    given = options.parse_args(parts)
    if not given.report:
        with (
            given.record.open("a") as record,
            tempfile.TemporaryDirectory(prefix="bypassd-waits-") as directory,
            tracefs() as root,
            Recorder(root) as recorder,
        ):
            Path(directory).chmod(0o755)
            for service in installed(given.services):
                with stage(service, directory, apart=given.client == "apart") as place:
                    for row in measured(
                        place,
                        recorder,
                        shares=[float(text) for text in given.shares.split(",")],
                        hogs=[HOGS[name] for name in given.hogs.split(",")],
                        laws=[LAWS[name] for name in given.laws.split(",")],
                        rounds=given.rounds,
                        seconds=given.seconds,
                        controls=[name for name in given.controls.split(",") if name],
                    ):
                        record.write(json.dumps(row) + "\n")
                        record.flush()
    print(table(read_record(given.record)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

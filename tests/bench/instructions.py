"""``python -m tests.bench instructions N``: BE containers that are bounded before their first instruction, under load.

Real containers (containerd, runc) whose first act is to read their own control files. Each round starts some one at a
time and as many bursts of 15, by each of the daemon's variants in turn, so that a neighbour's noise meets all of them;
the bare C loop is one of them. For each late container: what was late.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from tests.e2e.agent import Agent, config_for
from tests.e2e.hogs import Hogs
from tests.e2e.node import Node, RunningPod
from tests.e2e.test_first_instruction import bare_loop, be_pod, late

AT_ONCE: Final = 15
BARE: Final = "bare C loop"
_ROOT: Final = "/bypassd-bench"
_MS: Final = (0, 1, 2, 5, 10, 20, 50, 100, 1000)


class Start(Struct, frozen=True, kw_only=True):
    """One start. Milliseconds against the runtime's rename of state.json; None: unknown.

    ``late``: files that had not their value at the first instruction.
    """

    late: tuple[str, ...]
    cause: str = ""
    seen: float | None = None
    prepared: float | None = None
    woken: float | None = None
    written: float | None = None
    program: float | None = None


def _measured(node: Node, pod: RunningPod, agent: Agent | None) -> Start:
    container = pod["main"]
    report = container.report(within_s=60)
    missed = tuple(late(report))
    renamed = os.stat(f"{node.containerd.runc_root}/{container.id}/state.json").st_ctime
    program = time.time() - (time.monotonic() - report.first_ns / 1e9)
    times: Mapping[str, float | None] = {}
    if agent is not None:
        known = agent.pod(pod.spec.uid) or {"containers": []}
        times = next((item["times"] for item in known["containers"] if item["id"] == container.id), {})

    def after(at: float | None) -> float | None:
        return None if at is None else round((at - renamed) * 1000, 1)

    start = Start(
        late=missed,
        seen=after(times.get("seen_at")),
        prepared=after(times.get("prepared_at")),
        woken=after(times.get("signal_at")),
        written=after(times.get("written_at")),
        program=after(program),
    )
    return replace(start, cause=_cause(start))


def _cause(start: Start) -> str:
    """Why it was late; the rename's time is a tick of the kernel's coarse clock, 4 ms."""
    if not start.late:
        return ""
    program = start.program if start.program is not None else 0.0
    if start.seen is None or start.seen > program:
        return "directory noticed late"
    if start.prepared is None or start.prepared > (program if start.woken is None else start.woken):
        return "class or plan late"
    # None: not noticed by the time of the look, some milliseconds after the program's start.
    return "signal noticed late" if start.woken is None or start.woken > program - 1 else "written late"


def _starts(node: Node, agent: Agent | None, load: Hogs, single: int, bursts: int) -> tuple[list[Start], list[Start]]:
    alone = []
    for number in range(single):
        pod = node.run_pod(be_pod(f"alone-{number}"))
        pod["main"].report(within_s=60)
        with load.paused():
            alone.append(_measured(node, pod, agent))
            node.remove_pod(pod)
    at_once = []
    for number in range(bursts):
        pods = node.run_pods([be_pod(f"burst-{number}-{item}") for item in range(AT_ONCE)])
        for pod in pods:
            pod["main"].report(within_s=60)
        with load.paused():
            time.sleep(0.5)
            at_once += [_measured(node, pod, agent) for pod in pods]
            node.remove_pods(pods)
    return alone, at_once


def _round(node: Node, variant: Mapping[str, object] | None, where: str, sizes: tuple[int, int], load: int) -> "_Pair":
    if variant is None:
        with bare_loop(node, where), Hogs(load) as hogs:
            return _starts(node, None, hogs, *sizes)
    section = {"cgroup_root": node.record.cgroup_root, "resync_s": 30, **variant}
    agent = Agent({**config_for(node, where), "node": section}, where)
    agent.within = ("setsid",)
    agent.start()
    try:
        agent.wait_ready()
        time.sleep(0.5)
        with Hogs(load) as hogs:
            return _starts(node, agent, hogs, *sizes)
    finally:
        agent.stop()


_Pair = tuple[list[Start], list[Start]]


def run(
    single: int, bursts: int, rounds: int, load: int, variants: Sequence[Mapping[str, object] | None]
) -> dict[str, object]:
    """``variants``: settings of the section ``node``, None for the bare loop. Counts: of each round and variant."""
    names = [BARE if variant is None else json.dumps(variant) for variant in variants]
    alone: dict[str, list[Start]] = {name: [] for name in names}
    at_once: dict[str, list[Start]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="bypassd-bench-") as directory, Node.start(cgroup_root=_ROOT) as node:
        for turn in range(rounds):
            for number, name in enumerate(names):
                one, many = _round(node, variants[number], f"{directory}/{turn}-{number}", (single, bursts), load)
                alone[name] += one
                at_once[name] += many
                print(f"{turn} {name}: {_share(one)} {_share(many)} {os.getloadavg()[0]:.1f}", file=sys.stderr)
    return {name: {"single": _figures(alone[name]), "bursts": _figures(at_once[name])} for name in names}


def _share(starts: Sequence[Start]) -> str:
    return f"{sum(not start.late for start in starts)} of {len(starts)}"


def _figures(starts: Sequence[Start]) -> dict[str, object]:
    return {
        "in_time": _share(starts),
        "causes": dict(Counter(start.cause for start in starts if start.late)),
        "ms_rename_to": {
            name: _histogram([value for start in starts if (value := getattr(start, name)) is not None])
            for name in ("seen", "prepared", "woken", "written", "program")
        },
        "late": [repr(start) for start in starts if start.late][:40],
    }


def _histogram(values: Sequence[float]) -> dict[str, object]:
    """How many were at most so many milliseconds after the rename; the median beside it."""
    if not values:
        return {}
    counts = {f"<={ms}": sum(value <= ms for value in values) for ms in _MS}
    return {"median": round(statistics.median(values), 1), "max": max(values), **counts}

"""``python -m tests.bench``: what the daemon costs and how fast it is, measured on this machine's real cgroups.

    idle N      N pods of two containers and a process: time from start to all right, then CPU and memory while nothing
                happens (--tops T: beside as many `bypassctl top`; --protect full: under this level)
    starts N    N containers started one at a time, and in bursts of 15: signal to last write, beside a bare C loop, and
                the daemon's CPU time for each of the former (--protect full: under this level)
    instructions N  N real containers started one at a time and in bursts of 15, under load: bounded before the first
                instruction, by the daemon's variants in turn (--node '{"realtime_ms": 0}' '{}' null; null: a bare C
                loop)
    page N      what an open page costs the daemon: N pods, in turns with and without its requests
    churn N     N pods made and removed as fast as the kernel allows: nothing missed, nothing left behind
    plan        one whole plan: CPU time and memory at 256 CPUs and 500 pods, and how both grow
    memory N    N windows of an online pod's allocations alone and N beside BE pods that allocate without end
    signals N   what one second's sampling of all signals costs: N pods, and pods of 2000 threads together
    law         what the harm law does with made and recorded traces: harm, turns, BE work lost
    judge N     what one second's judging of N pods costs, ranking suspects, and a recorded night
    promises    what each law of headroom promises under made loads of days, and how much of it was there
    movement N  N random lives of pools on each of some machines: CPUs moved by ours and by packing from scratch

Figures, not tests: they are printed, with the machine's own noise in them.
"""

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

from reconciler.cli import status as status_command
from reconciler.web.app import page as page_of_the_daemon
from tests.bench import instructions, judging, law, memory, movement, planning, promises, signals
from tests.e2e.agent import Agent
from tests.e2e.baseline.run import WatchWrite
from tests.fakes.node import PAUSE, Box, DirectoryNode, NodePod, RealKernel
from tests.fakes.terminal import CLI, OnTerminal

KINDS = (
    *("answers", "churn", "idle", "instructions", "judge", "law", "memory", "movement", "page", "plan", "promises"),
    *("signals", "starts"),
)
_TURNS = 3
MOUNT = "/sys/fs/cgroup"
HTTP_PORT = 19470
_CREATION_S = 0.02
"""From the container's mkdir to the runtime's signal: 14-30 ms were recorded."""


def bench_pod(
    node: DirectoryNode, number: int, *, qos: str = "besteffort", containers: int = 1, process: bool = False
) -> NodePod:
    """A running pod; ``containers`` beside the pause container; ``process``: one that sleeps in each of them."""
    return node.add(
        f"pod-{number}",
        uid=f"{number:08x}-0000-4000-8000-000000000000",
        namespace="bench",
        qos=qos,
        labels={"app": f"app-{number % 7}", "pod-template-hash": f"{number:010d}"},
        annotations={"kubernetes.io/config.seen": "2026-01-01T00:00:00Z"},
        containers=containers,
        process=process,
    )


@contextlib.contextmanager
def running(node: DirectoryNode, protect: str = "", **more: object) -> Iterator[tuple[Agent, float]]:
    """The agent on this node, and how long it took from exec to ready (s). ``more``: of the section ``http``."""
    config = node.daemon_config(http={"port": HTTP_PORT, **more}, **_level(protect))
    agent = Agent(config, f"{node.root}/agent", http_socket=node.socket)
    began = time.monotonic()
    agent.start()
    try:
        agent.wait_ready()
        yield agent, time.monotonic() - began
    finally:
        agent.stop()


def _level(protect: str) -> dict[str, str]:
    # A level also writes files of the machine, such as vm.watermark_scale_factor.
    return {"protect": protect, "on_stop": "restore"} if protect else {}


def right(paths: list[str]) -> bool:
    """True when every container of ours has the least weight and a set of one CPU."""
    return all(_read(f"{MOUNT}/cpu{path}/cpu.shares") == "2" for path in paths) and all(
        _read(f"{MOUNT}/cpuset{path}/cpuset.cpus") in {"0", "1"} for path in paths
    )


def _read(path: str) -> str:
    with open(path) as file:
        return file.read().strip()


def cpu_and_rss(pid: int) -> tuple[float, float]:
    """CPU seconds so far, and resident MiB."""
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])
    pages = int(_read(f"/proc/{pid}/statm").split()[1])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGESIZE") / 2**20


def idle(node: DirectoryNode, count: int, seconds: float, tops: int, protect: str) -> dict[str, object]:
    """Start to all right, then CPU and memory, while ``tops`` live views run."""
    watched = []
    for number in range(count):
        # A pod without a process would have its processes listed again at each look.
        pod = bench_pod(node, number, qos="besteffort" if number % 2 else "burstable", process=True)
        watched += [pod.main.group] if number % 2 else []
    config = node.daemon_config(http={"port": HTTP_PORT}, **_level(protect))
    agent = Agent(config, f"{node.root}/agent", http_socket=node.socket)
    began = time.monotonic()
    agent.start()
    try:
        while not right(watched):
            time.sleep(0.002)
            assert time.monotonic() - began < 60, agent.tail()
        all_right = time.monotonic() - began
        agent.wait_ready()
        ready = time.monotonic() - began
        time.sleep(5)
        with contextlib.ExitStack() as stack:
            views = [stack.enter_context(OnTerminal(*CLI, "top", "--socket", node.socket)) for _ in range(tops)]
            for view in views:
                view.until("q quit")
            before, _ = cpu_and_rss(agent.pid)
            began = time.monotonic()
            while (left := began + seconds - time.monotonic()) > 0:
                for view in views:
                    view.read(min(left, 0.2))
                time.sleep(0 if views else left)
            after, rss = cpu_and_rss(agent.pid)
        return {
            "pods": count,
            "tops": tops,
            "start_to_all_right_s": round(all_right, 3),
            "ready_seen_s": round(ready, 3),
            "cpu_percent_of_a_core": round((after - before) / seconds * 100, 2),
            "rss_mib": round(rss, 1),
        }
    finally:
        agent.stop()


def starts(node: DirectoryNode, count: int, protect: str) -> dict[str, object]:
    """Signal to last write: the agent's own measure, beside a bare C loop on the same node, in turns.

    And its CPU time for a container: 50 ms for each start are measured, idle ones included.
    """
    for number in range(110):
        bench_pod(node, number)
    alone: list[float] = []
    at_once: list[float] = []
    bare: list[float] = []
    used: list[float] = []
    for turn in range(_TURNS):
        first = 10_000 * (turn + 1)
        bare += _bare(node, range(first, first + count))
        with running(node, protect) as (agent, _):
            numbers = range(first + 2_000, first + 2_000 + count)
            before, _ = cpu_and_rss(agent.pid)
            for number in numbers:
                _start_one(node, number)
                time.sleep(0.03)
            used.append((cpu_and_rss(agent.pid)[0] - before) / count)
            alone += _hot(agent, numbers)
            _remove(node, numbers)
            numbers = range(first + 4_000, first + 4_000 + count - count % 15)
            for burst in range(0, len(numbers), 15):
                _start_many(node, numbers[burst : burst + 15])
                time.sleep(0.3)
            at_once += _hot(agent, numbers)
            _remove(node, numbers)
    return {
        "agent_us": _figures(alone),
        "agent_15_at_once_us": _figures(at_once),
        "bare_c_us": _figures(bare),
        "agent_cpu_ms_a_start": round(statistics.median(used) * 1000, 1),
        "ratio_of_medians": round(statistics.median(alone) / statistics.median(bare), 2),
    }


def page(node: DirectoryNode, count: int, seconds: float) -> dict[str, object]:
    """The daemon's CPU time without and with one open page, which requests what its script does."""
    text = page_of_the_daemon()[0].decode()
    fast, slow = re.findall(r'await get\("(/state[^"]+)"\)', text)[:2]
    intervals = re.search(r"FAST_MS = (\d+), SLOW_MS = (\d+)", text)
    assert intervals is not None
    fast_s, slow_s = (int(number) / 1000 for number in intervals.groups())
    for number in range(count):
        bench_pod(node, number, qos="besteffort" if number % 2 else "burstable")
    used: dict[bool, list[float]] = {False: [], True: []}
    sizes: dict[str, int] = {}
    with running(node, state_over_tcp=True) as (agent, _):
        connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=10)
        time.sleep(5)
        for turn in range(2 * _TURNS):
            opened = bool(turn % 2)
            began, slow_due = time.monotonic(), 0.0
            before, _ = cpu_and_rss(agent.pid)
            connection.close()  # idle for a turn: the daemon has ended it
            while (now := time.monotonic()) < began + seconds:
                addresses = [fast, slow] if now >= slow_due else [fast]
                slow_due = now + slow_s - 0.1 if now >= slow_due else slow_due
                for address in addresses if opened else ():
                    connection.request("GET", address)
                    sizes[address] = len(connection.getresponse().read())
                time.sleep(max(0.0, min(now + fast_s, began + seconds) - time.monotonic()))
            after, _ = cpu_and_rss(agent.pid)
            used[opened].append(round((after - before) / (time.monotonic() - began) * 60_000))
        connection.close()
    return {
        "pods": count,
        "cpu_ms_a_minute": {"closed": used[False], "open": used[True]},
        "page_ms_a_minute": statistics.median(used[True]) - statistics.median(used[False]),
        "bytes": sizes,
    }


ANSWERS = {
    "metrics": "/metrics",
    "state": "/state",
    "status": f"/state?{'&'.join(f'section={name}' for name in status_command._SECTIONS)}",
    "pods": "/state?section=podlist",
}
_ANSWERS = 6


def answers(node: DirectoryNode, count: int) -> dict[str, object]:
    """The daemon's CPU time for one answer of each kind, all pods with series of their own: in turns with idle time."""
    for number in range(count):
        bench_pod(node, number, qos="besteffort" if number % 2 else "burstable")
    used: dict[str, list[float]] = {name: [] for name in ("idle", *ANSWERS)}
    sizes: dict[str, int] = {}
    series = 0
    with running(node, state_over_tcp=True, pod_metrics_limit=2000) as (agent, _):
        time.sleep(65)  # the first minute of each pod
        for _ in range(_TURNS):
            for name, times in used.items():
                began, before = time.monotonic(), _ran_s(agent.pid)
                for _ in range(_ANSWERS):
                    due = time.monotonic() + 0.5
                    if name in ANSWERS:
                        status, body = agent.get(ANSWERS[name])
                        assert status == 200, body
                        sizes[name] = len(body)
                        if name == "metrics":
                            series = sum(not line.startswith(b"#") for line in body.splitlines())
                    time.sleep(max(0.0, due - time.monotonic()))
                ran = _ran_s(agent.pid) - before
                times.append(ran / (time.monotonic() - began) * 0.5 * 1000)
    idle_ms = statistics.median(used.pop("idle"))
    return {
        "pods": count,
        "series": series,
        "ms_an_answer": {name: round(statistics.median(times) - idle_ms, 1) for name, times in used.items()},
        "idle_ms_in_half_a_second": round(idle_ms, 1),
        "bytes": sizes,
    }


def _ran_s(pid: int) -> float:
    """CPU time of all threads, to the nanosecond."""
    total = 0
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            total += int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[0])
    return total / 1e9


def _start_one(node: DirectoryNode, number: int) -> None:
    pod, box = _prepare(node, number)
    node.make_groups(pod, box)
    time.sleep(_CREATION_S)
    node.settle(box)


def _start_many(node: DirectoryNode, numbers: range) -> None:
    made = [_prepare(node, number) for number in numbers]
    for pod, box in made:
        node.make_groups(pod, box)
    time.sleep(0.03)
    for _, box in made:
        node.settle(box)


def _prepare(node: DirectoryNode, number: int) -> tuple[NodePod, Box]:
    pod = bench_pod(node, number, containers=0)
    return pod, node.prepare(pod, "main", PAUSE, container_id=f"{number:064x}")


def _remove(node: DirectoryNode, numbers: range) -> None:
    for number in numbers:
        node.remove(node.pods[f"{number:08x}-0000-4000-8000-000000000000"])


def _hot(agent: Agent, numbers: range) -> list[float]:
    """Microseconds from signal to last write of these containers, as the agent noted them."""
    time.sleep(1)
    wanted = {f"{number:064x}" for number in numbers}
    times = []
    for pod in agent.state("pods")["pods"]:
        for container in pod["containers"]:
            took = container["times"].get("signal_to_last_write_s")
            if container["id"] in wanted and took is not None:
                times.append(took * 1e6)
    missing = len(wanted) - len(times)
    if missing:
        print(f"{missing} of {len(wanted)} containers were not written", file=sys.stderr)
    return times


def _bare(node: DirectoryNode, numbers: range) -> list[float]:
    """The same from the C loop: one cpuset that changes (BE containers' shares are right as runc makes them)."""
    files = {f"{MOUNT}/cpuset%s/cpuset.cpus": "1"}
    directory = f"{node.root}/bare-{numbers[0]}"
    os.makedirs(directory)
    with WatchWrite(runc_root=node.runc_root, bundles=node.bundles, files=files, directory=directory) as bare:
        for number in numbers:
            _start_one(node, number)
            time.sleep(0.03)
        time.sleep(0.5)
        wanted = {f"{number:064x}" for number in numbers}
        times = [answer.took_us for answer in bare.answers() if answer.container in wanted]
    _remove(node, numbers)
    return times


def _figures(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 1),
        "p99": round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
    }


def churn(node: DirectoryNode, count: int) -> dict[str, object]:
    """Pods made and removed as fast as the kernel allows."""
    with running(node) as (agent, _):
        _, rss_before = cpu_and_rss(agent.pid)
        began = time.monotonic()
        alive: list[NodePod] = []
        for number in range(count):
            alive.append(bench_pod(node, number))
            if len(alive) > 50:
                node.remove(alive.pop(0))
        made_s = time.monotonic() - began
        wanted = {pod.uid for pod in alive}
        settled = _until(lambda: _uids(agent) == wanted)
        paths = [pod.main.group for pod in alive]
        missed = 0 if _until(lambda: right(paths)) is not None else 1
        for pod in alive:
            node.remove(pod)
        emptied = _until(lambda: not _uids(agent))
        time.sleep(3)
        left = agent.state("files")["files"]
        _, rss_after = cpu_and_rss(agent.pid)
        return {
            "pods": count,
            "made_and_removed_s": round(made_s, 2),
            "caught_up_after_s": settled,
            "missed": missed,
            "all_gone_after_s": emptied,
            "ledger_rows_left_below_pods": sum("/pod" in entry["path"] for entry in left),
            "rss_mib_before_after": [round(rss_before, 1), round(rss_after, 1)],
            "watches": _metric(agent, "bypassd_watches"),
        }


def _uids(agent: Agent) -> set[str]:
    return {pod["uid"] for pod in agent.state("pods")["pods"]}


def _metric(agent: Agent, name: str) -> float | None:
    _, body = agent.get("/metrics")
    for line in body.decode().splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    return None


def _until(done: Callable[[], object], within_s: float = 20.0) -> float | None:
    began = time.monotonic()
    while time.monotonic() - began < within_s:
        if done():
            return round(time.monotonic() - began, 2)
        time.sleep(0.05)
    return None


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m tests.bench", description=(__doc__ or "").splitlines()[0])
    options.add_argument(
        "what",
        choices=KINDS,
    )
    options.add_argument(
        "count", type=int, nargs="?", default=0, help="of pods, containers, windows or lives; none for plan"
    )
    options.add_argument("--hogs", type=int, default=0, help="of instructions: processes that want a whole CPU each")
    options.add_argument("--rounds", type=int, default=2, help="of instructions: how often each variant has its turn")
    options.add_argument("--bursts", type=int, default=2, help="of instructions: in each round")
    options.add_argument("--node", nargs="+", type=json.loads, default=[{}], help="of instructions: variants, as JSON")
    options.add_argument("--tops", type=int, default=0, help="of idle: live views that run meanwhile")
    options.add_argument("--protect", default="", help="of idle and starts: the level; without it mode enforce")
    options.add_argument("--seconds", type=float, default=20.0)
    return options


def main() -> int:
    """Run one measurement and print it: as JSON, movement as a table."""
    given = parser().parse_args()
    if given.what == "movement":
        print(f"{movement.table(given.count, movement.EVENTS)}\n\n{movement.plans(given.count)}\n\n{movement.prices()}")
        return 0
    if given.what == "law":
        print(law.table())
        return 0
    if given.what == "promises":
        print(promises.table())
        return 0
    if given.what == "plan":
        print(json.dumps(planning.run(), indent=2))
        return 0
    if given.what == "judge":
        print(json.dumps(judging.run(given.count or 110), indent=2))
        return 0
    if os.geteuid() != 0 or not os.access(f"{MOUNT}/cpuset/cgroup.procs", os.W_OK):
        print("needs root and writable cgroup v1 hierarchies", file=sys.stderr)
        return 2
    if given.what == "instructions":
        fields = instructions.run(given.count or 20, given.bursts, given.rounds, given.hogs, given.node)
        print(json.dumps(fields, indent=2))
        return 0
    if given.what == "memory":
        print(json.dumps(memory.run(given.count or 15, 1.5), indent=2))
        return 0
    if given.what == "signals":
        print(json.dumps(signals.run(given.count or 110, int(given.seconds)), indent=2))
        return 0
    kernel = RealKernel()
    with (
        tempfile.TemporaryDirectory(prefix="bypassd-bench-") as directory,
        DirectoryNode(directory, kernel, kernel.mounts, cgroup_root="/bypassd-bench") as node,
    ):
        if given.what == "idle":
            fields = idle(node, given.count, given.seconds, given.tops, given.protect)
        elif given.what == "starts":
            fields = starts(node, given.count, given.protect)
        elif given.what == "page":
            fields = page(node, given.count or 110, given.seconds)
        elif given.what == "answers":
            fields = answers(node, given.count or 500)
        else:
            fields = churn(node, given.count)
    print(json.dumps({"kubepods": node.kubepods, **fields}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

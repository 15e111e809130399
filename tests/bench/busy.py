"""What the daemon costs beside BE work that uses every CPU: by preset and by component, in turns within one run.

The spinners have little weight against the rest of the machine, so that its other work continues.
"""

import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

from tests.e2e.agent import Agent
from tests.fakes.node import HIERARCHIES, DirectoryNode, NodePod

PRESETS: Final[dict[str, dict[str, object]]] = {
    "cpu": {"mode": "enforce", "protect": "cpu"},
    "full": {"mode": "enforce", "protect": "full"},
    "enforce": {"mode": "enforce"},
}
_BE_PODS: Final = 2
_SPINNERS: Final = 2
_SPIN: Final = "while True: pass"
_SERVE: Final = """
import time
while True:
    until = time.monotonic() + 0.0005
    while time.monotonic() < until: pass
    time.sleep(0.002)
"""
_SETTLE_S: Final = 15.0
"""The early sweeps after new containers, and the rules' start."""
_SHARES: Final = "64"


def run(node: DirectoryNode, count: int, presets: list[str], rounds: int, seconds: float) -> dict[str, object]:
    """``count`` pods without processes beside one online pod that serves and two BE pods of two spinners."""
    for number in range(count):
        _pod(node, number, "besteffort" if number % 2 else "burstable")
    online = _pod(node, count, "burstable")
    be = [_pod(node, count + 1 + index, "besteffort") for index in range(_BE_PODS)]
    node.write(node.cgroup_root, "cpu", "cpu.shares", _SHARES)
    measured: dict[str, list[dict[str, float]]] = {preset: [] for preset in presets}
    with _working(node, online, _SERVE, 1), contextlib.ExitStack() as stack:
        for pod in be:
            stack.enter_context(_working(node, pod, _SPIN, _SPINNERS))
        for _ in range(rounds):
            for preset in presets:
                measured[preset].append(_measure(node, preset, seconds))
                print(f"{preset}: {json.dumps(measured[preset][-1])}", file=sys.stderr)
    return {
        "pods": count + 1 + _BE_PODS,
        "ms_a_second": {preset: _summary(figures) for preset, figures in measured.items()},
    }


def _pod(node: DirectoryNode, number: int, qos: str) -> NodePod:
    return node.add(f"pod-{number}", uid=f"{number:08x}-0000-4000-8000-000000000000", namespace="bench", qos=qos)


@contextlib.contextmanager
def _working(node: DirectoryNode, pod: NodePod, program: str, processes: int) -> Iterator[None]:
    """So many processes of a Python program in the pod's container."""
    started = []
    try:
        for _ in range(processes):
            process = subprocess.Popen([sys.executable, "-c", program])
            started.append(process)
            for controller in HIERARCHIES:
                node.write(pod.main.group, controller, "cgroup.procs", str(process.pid))
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _measure(node: DirectoryNode, preset: str, seconds: float) -> dict[str, float]:
    """Milliseconds of CPU time a second: in all (``all``), and of each component's steps and jobs."""
    directory = f"{node.root}/agent"
    config = node.daemon_config(on_stop="restore", **PRESETS[preset])
    agent = Agent(config, directory, http_socket=node.socket)
    agent.start()
    try:
        agent.wait_ready()
        time.sleep(_SETTLE_S)
        before = _work(agent)
        time.sleep(0.5)
        switches, used, began = _switches(agent.pid), _cpu_s(agent.pid), time.monotonic()
        time.sleep(seconds)
        took = time.monotonic() - began
        used, switches = _cpu_s(agent.pid) - used, _switches(agent.pid) - switches
        after = _work(agent)
    finally:
        agent.stop()
    took_work = took + 0.5
    figures = {"all": used / took * 1000, "wake-ups": switches / took}
    figures |= {name: (after[name] - before.get(name, 0.0)) / took_work * 1000 for name in after}
    return {name: round(value, 3) for name, value in figures.items() if value >= 0.001}


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process with all of its threads, those that have ended too: clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def _switches(pid: int) -> int:
    """How often its main thread gave up a CPU to wait."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("voluntary_ctxt_switches"))


def _work(agent: Agent) -> dict[str, float]:
    work: dict[str, Any] = agent.state("agent")["agent"]["work"]
    return {name: item["cpu_s"] for name, item in work.items()}


def _summary(figures: list[dict[str, float]]) -> dict[str, object]:
    names = sorted({name for each in figures for name in each}, key=lambda name: -figures[0].get(name, 0.0))
    return {name: _spread([each.get(name, 0.0) for each in figures]) for name in names}


def _spread(values: list[float]) -> list[float]:
    """Median, least and most."""
    return [round(statistics.median(values), 3), round(min(values), 3), round(max(values), 3)]

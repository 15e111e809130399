"""A whole agent on a fake node, from its start over a container's start to samples, with failures of single calls."""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import trio
import trio.testing
from msgspec import Struct, field
from msgspec.structs import replace

from reconciler.agent import Agent
from reconciler.config import Config, Mode
from reconciler.place import find_place
from reconciler.supervisor import Supervisor
from tests.fakes.faults import Call, Faults
from tests.reconciler.cli.livenode import BATCH, QOS, LiveNode, container_id, group

LATE: Final = "dddddddd-4444-4444-8444-444444444444"
"""A best-effort pod that comes while the agent runs."""
WATCHED: Final = ("cpuset.cpus", "cpu.shares", "cpu.cfs_quota_us", "memory.limit_in_bytes")
Values = dict[str, str]
Fault = Callable[[Call], int]


class Run(Struct):
    """What came of one run. ``fatal``: why the agent ended, "" when it did not."""

    fatal: str = ""
    start: str = ""
    hits: int = 0
    early: Values = field(default_factory=dict)
    late: Values = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    alerts: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    opened: set[str] = field(default_factory=set)


def values(node: LiveNode) -> Values:
    """Every setting below kubepods, as the kernel has it."""
    found: Values = {}
    for tree in node.kernel.trees:
        for directory, _, files in os.walk(f"{tree.mount}/kubepods"):
            for file in WATCHED:
                if file in files:
                    path = f"{directory}/{file}"
                    found[path.removeprefix(node.root)] = node.kernel.read(directory, file).strip()
    return found


def config_of(node: LiveNode) -> Config:
    """The node's own; the BE budget is a constant."""
    base = node.config
    be = base.policies.reclaimed
    budget = replace(be.budget, limit_percent=1.0, floor_percent=50.0)
    policies = replace(
        base.policies,
        reclaimed=replace(be, budget=budget),
        idle_buffer=replace(base.policies.idle_buffer, enabled=False),
    )
    return replace(base, policies=policies, mode=Mode.ENFORCE)


def play(directory: Path, fault: Fault, *, until: str = "end") -> Run:
    """One whole run in a directory of its own, which is removed. The fault ends after the first values were taken."""
    QOS.setdefault(LATE, "/besteffort")
    node = LiveNode(directory)
    run = Run()
    faults = Faults(node.root, node.kernel)
    clock = trio.testing.MockClock(autojump_threshold=0.003)
    try:
        with faults.installed(), mock.patch.object(time, "monotonic", clock.current_time):
            try:
                trio.run(_live, node, faults, fault, run, clock=clock)
            except BaseException as exc:  # noqa: BLE001  (what ends the daemon is the question)
                while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
                    exc = exc.exceptions[0]
                run.fatal = f"{type(exc).__name__}: {exc} <- {exc.__cause__!r}"
    finally:
        shutil.rmtree(directory)
    run.calls, run.hits = faults.calls, faults.hits
    return run


async def _live(node: LiveNode, faults: Faults, fault: Fault, run: Run) -> None:
    faults.judge = fault
    config = config_of(node)
    try:
        place = find_place(config)
        assert place is not None
        agent = Agent(config, place, files=faults)
    except Exception as exc:
        run.start = f"{type(exc).__name__}: {exc}"
        raise
    supervisor = Supervisor(agent.components())
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            with trio.move_on_after(20):
                await agent.reconciler.ready.wait()
            await trio.sleep(0.5)
            with faults.apart():
                node.kernel.make_group(group(LATE))
                os_names = _late(node)
            await trio.sleep(0.05)
            with faults.apart():
                os_names()
            await trio.sleep(5.2)
            with faults.apart():
                run.early = values(node)
            run.problems = _problems(agent)
            run.alerts = dict(agent.alerts)
            run.failures = {name: one.error for name, one in supervisor.statuses.items() if one.failures}
            faults.judge = lambda _call: 0
            await trio.sleep(130)
            with faults.apart():
                run.late = values(node)
            supervisor.stop("the end of the test")
    finally:
        agent.close()


def _problems(agent: Agent) -> list[str]:
    found = [f"{one.name}: {one.detail}" for one in agent.statuses() if not one.ok]
    for here in agent.judge.standings.by_group.values():
        found += [
            f"{one.setting.path}/{knob}: {one.state}: {one.detail}"
            for knob, one in here.items()
            if one.state not in {"in place", "written"}
        ]
    return found


def _late(node: LiveNode) -> Callable[[], None]:
    """The new pod's container up to its bundle and groups; what is returned is runc's last step."""
    import json

    cid = container_id(LATE)
    notes = {
        "io.kubernetes.cri.container-type": "container",
        "io.kubernetes.cri.container-name": "main",
        "io.kubernetes.cri.sandbox-id": "e" * 64,
        "io.kubernetes.cri.sandbox-name": "late-1",
        "io.kubernetes.cri.sandbox-namespace": "ci",
    }
    bundle = {
        "ociVersion": "1.0.2",
        "annotations": notes,
        "linux": {"cgroupsPath": f"{group(LATE)}/{cid}", "resources": {"cpu": {"shares": 2, "cpus": "0-6"}}},
    }
    node.put(f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{cid}/config.json", json.dumps(bundle))
    os.makedirs(f"{node.root}/run/containerd/runc/k8s.io/{cid}", exist_ok=True)
    node.kernel.make_group(f"{group(LATE)}/{cid}")

    def settle() -> None:
        cgroups = {"path": f"{group(LATE)}/{cid}", "cpu_shares": 2, "cpuset_cpus": "0-6"}
        state = {"id": cid, "init_process_pid": 42, "config": {"cgroups": cgroups}}
        base = f"{node.root}/sys/fs/cgroup"
        node.kernel.write(f"{base}/cpuset{group(LATE)}/{cid}", "cpuset.cpus", "0-6")
        node.kernel.write(f"{base}/cpu{group(LATE)}/{cid}", "cpu.shares", "2")
        path = f"{node.root}/run/containerd/runc/k8s.io/{cid}/state.json"
        with open(f"{path}.tmp", "w") as file:
            file.write(json.dumps(state))
        os.rename(f"{path}.tmp", path)

    return settle

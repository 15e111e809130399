"""A whole agent on a fake node, from its start over a container's start to samples, with failures of single calls."""

import math
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final
from unittest import mock

import trio
import trio.testing
from msgspec import Struct, field
from msgspec.structs import replace

from cgroupfs.attribution import ObservedWrite
from reconciler.actuators.cgroup.conflict import WriteAttribution
from reconciler.config.environment import wait_for_place
from reconciler.config.model import AgentMode, Config
from reconciler.daemon.agent import Agent
from reconciler.runtime.supervisor import Supervisor
from state.store import Store
from tests.fakes.faults import Call, Fault, Faults
from tests.fakes.livenode import BATCH, PINNED, QOS, WEB, LiveNode, container_id
from tests.fakes.node import Box
from tests.fakes.report import status_report

LATE: Final = "dddddddd-4444-4444-8444-444444444444"
"""A best-effort pod that comes while the agent runs."""
UIDS: Final = (WEB, BATCH, PINNED, LATE)
_WATCHED: Final = ("cpuset.cpus", "cpu.shares", "cpu.cfs_quota_us", "memory.limit_in_bytes")
_PASSED_S: Final = 130.0
"""So long after the end of a failure everything must be right: twice the longest wait."""
Values = dict[str, str]


class Run(Struct):
    """The result of one run: values by path without the root, before the failure's end, after it, and put back.

    ``calls``: until the failure's end. ``fatal``: why the agent has ended, "" when it has not. ``said``: problems,
    reasons not to be ready, counted errors, failures of components.
    """

    fatal: str = ""
    hits: int = 0
    calls: list[Call] = field(default_factory=list)
    unseen: list[tuple[str, str]] = field(default_factory=list)
    early: Values = field(default_factory=dict)
    late: Values = field(default_factory=dict)
    restored: Values = field(default_factory=dict)
    not_ready: Sequence[str] = ()
    problems: list[str] = field(default_factory=list)
    counted: dict[tuple[str, str], int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    @property
    def said(self) -> bool:
        return bool(self.not_ready or self.problems or self.counted or self.failures)


class _Deaf:
    """A `WriteWatch` in whose reach no other program writes."""

    problem = None

    def __init__(self, *_arguments: object, **_more: object) -> None:
        self.close = self.follow = self.forget = lambda *_arguments: None

    def take(self) -> Sequence[ObservedWrite]:
        return ()

    async def next_batch(self) -> Sequence[ObservedWrite]:
        await trio.sleep(math.inf)
        return ()


def owner(path: str) -> str | None:
    """The pod that a path belongs to, None for the node's."""
    return next((uid for uid in UIDS if uid in path or container_id(uid) in path), None)


def differences(texts: Values, wanted: Values) -> set[str]:
    return {path for path in texts.keys() | wanted.keys() if texts.get(path) != wanted.get(path)}


def play(directory: Path, fault: Fault, expected: Values | None = None) -> Run:
    """One whole run in a directory of its own, which is removed. The fault ends after the first values were taken."""
    directory.mkdir()
    with mock.patch.dict(QOS, {LATE: "/besteffort"}):
        node = LiveNode(directory, files=False)
        run = Run()
        faults = Faults(node.root, node.kernel)
        clock = trio.testing.MockClock(autojump_threshold=0.0005)
        try:
            with ExitStack() as stack:
                stack.enter_context(faults.installed())
                stack.enter_context(mock.patch.object(trio.to_thread, "run_sync", _at_once))
                stack.enter_context(mock.patch.object(time, "monotonic", clock.current_time))
                # Its default is older than the test's clock.
                defaults = Store.__init__.__kwdefaults__
                stack.enter_context(mock.patch.dict(defaults, monotonic=clock.current_time))
                # The real one would report whatever else is written on the same file system.
                stack.enter_context(mock.patch.dict(WriteAttribution.__init__.__kwdefaults__, watch=_Deaf))
                try:
                    trio.run(_live, node, faults, fault, run, expected, clock=clock)
                except Exception as exc:  # noqa: BLE001  (what ends the agent is the question)
                    run.fatal = repr(_innermost(exc))
        finally:
            shutil.rmtree(directory)
    run.hits, run.unseen = faults.hits, faults.unseen()
    return run


async def _live(node: LiveNode, faults: Faults, fault: Fault, run: Run, expected: Values | None) -> None:
    faults.fault = fault
    config = _config(node)
    place = None
    with trio.move_on_after(60):
        place = await wait_for_place(config, print)
    if place is None:
        # It still waits for what cannot be read.
        faults.fault = lambda _call: 0
        place = await wait_for_place(config, print)
    agent = Agent(config, place, files=faults)
    supervisor = Supervisor(agent.components())
    show = status_report(agent, statuses=lambda: list(supervisor.statuses.values()))
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(supervisor.run)
            with trio.move_on_after(20):
                await agent.control.reconciler.ready.wait()
            with faults.apart():
                settle = _late(node)
            await trio.sleep(0.05)
            with faults.apart():
                settle()
            await trio.sleep(5.2)
            with faults.apart():
                run.early = _values(node)
                run.not_ready = show.not_ready()
                result = show.state(("problems",))["problems"]
                run.problems = [str(entry) for entry in result] if isinstance(result, list) else []
            run.counted = dict(agent.writes.judge.errors.counts)
            run.failures = {name: status.failures for name, status in supervisor.statuses.items() if status.failures}
            faults.fault = lambda _call: 0
            run.calls = list(faults.calls)
            await _wait(node, faults, run, expected)
            with faults.apart():
                await agent.commands.restore()
                run.restored = _values(node)
            supervisor.stop("the end of the test")
    finally:
        agent.close()


async def _at_once(work: Callable[..., Any], *arguments: Any, **_more: Any) -> Any:
    """A thread's work in the loop: while a thread works the clock would jump."""
    await trio.lowlevel.checkpoint()
    return work(*arguments)


async def _wait(node: LiveNode, faults: Faults, run: Run, expected: Values | None) -> None:
    """Until all is as expected, and no longer than it may take."""
    until = trio.current_time() + _PASSED_S
    while True:
        await trio.sleep(5 if expected is not None else 60)
        with faults.apart():
            run.late = _values(node)
        if expected is None or run.late == expected or trio.current_time() >= until:
            return


def _values(node: LiveNode) -> Values:
    """Every setting below kubepods, as the kernel has it."""
    values: Values = {}
    for tree in node.kernel.trees:
        for directory, _, _ in os.walk(f"{tree.mount}/kubepods"):
            files = node.kernel.files(directory)
            for file in _WATCHED:
                if file in files:
                    values[f"{directory}/{file}".removeprefix(node.root)] = node.kernel.read(directory, file).strip()
    return values


def _config(node: LiveNode) -> Config:
    """The node's own; the BE budget is a constant."""
    policies = node.config.policies
    budget = replace(policies.reclaimed.budget, limit_percent=1.0, floor_percent=50.0)
    reclaimed = replace(policies.reclaimed, budget=budget)
    idle_buffer = replace(policies.idle_buffer, enabled=False)
    return replace(
        node.config, mode=AgentMode.ENFORCE, policies=replace(policies, reclaimed=reclaimed, idle_buffer=idle_buffer)
    )


def _late(node: LiveNode) -> Callable[[], object]:
    """The new pod's container up to its bundle and groups; what is returned is runc's last step."""
    pod = node.admit(LATE, "ci", "late-1")
    cid = container_id(LATE)
    box = Box(id=cid, name="main", group=f"{pod.group}/{cid}", resources={"cpu": {"shares": 2, "cpus": "0-6"}})
    node.write_bundle(pod, box, sandbox="e" * 64)
    os.makedirs(f"{node.runc_root}/{cid}")
    node.kernel.make_group(box.group)
    return lambda: node.settle(box)


def _innermost(exc: BaseException) -> BaseException:
    while isinstance(exc, BaseExceptionGroup) and len(exc.exceptions) == 1:
        exc = exc.exceptions[0]
    return exc.__cause__ or exc


@contextmanager
def quiet_place(path: str) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of runs write and sync a store."""
    made = Path("/dev/shm" if os.path.isdir("/dev/shm") else path) / f"bypassd-faults-{os.getpid()}"
    made.mkdir(exist_ok=True)
    try:
        yield made
    finally:
        shutil.rmtree(made)

"""Scenes whose functions are recorded.

The files of two are counted: a foreign CPU set put back, and an eviction from its signal to the order. The functions of
three are compared with the journeys of docs/architecture.md: a container's start, an eviction to its end, a reload.
"""

import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, Final, TypeVar
from unittest.mock import patch

import trio
from msgspec.structs import replace

from cgroupfs.files import REAL
from reconciler.config import load
from reconciler.daemon import config_in_force
from reconciler.daemon.agent import Agent
from reconciler.daemon.main import Daemon
from reconciler.detectors.config import InterferenceConfig
from reconciler.detectors.rule import RuleConfig
from reconciler.detectors.table import DetectorEntry
from reconciler.detectors.threshold import ThresholdConfig
from reconciler.responses.eviction.case import ended_alert
from reconciler.responses.eviction.config import EvictionConfig, LimitsConfig, NodeMemoryConfig, TriggersConfig
from reconciler.responses.eviction.executor import Evictor
from reconciler.responses.eviction.exemptions import ExemptionsConfig
from reconciler.runtime.supervisor import Supervisor
from state.evidence import ContendedResource
from state.measures import Response
from tests.architecture.entered import EnteredFiles
from tests.daemon.process import configuration
from tests.daemon.writers import Scribe
from tests.fakes.constants import applied, varied
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group
from tests.fakes.node import DirectoryNode, RealKernel
from tests.node.inprocess import InProcess

T = TypeVar("T")

# One of them since a container's inner groups are narrowed before it.
FOREIGN_CPUSET_FILES: Final = 41
EVICTION_FILES: Final = 94
"""Bounds: more files than that are too many for one way. Each alert is an event too, which is two files more."""
CGROUP_ROOT: Final = f"/bypassd-test-architecture-{os.getpid()}"
_WITHIN_S: Final = 30.0
_SETTLE_S: Final = 2.5
_IDLE_S: Final = 0.5
_PASS: Final = "reconciler/control/reconciler.py:Reconciler.reconcile"
_VERIFY_S: Final = 0.2
"""The last pass that no event causes comes so long after a container's first: sooner than `_IDLE_S` after another."""
_QUIET_S: Final = 60.0
"""Between two samples: nothing but the scene's own events is entered."""
_GI: Final = 1 << 30
_MEMINFO: Final = f"""\
MemTotal: {16 << 20} kB
MemFree: {8 << 20} kB
MemAvailable: {8 << 20} kB
Inactive(file): 0 kB
SwapTotal: 0 kB
SwapFree: 0 kB
"""


@contextlib.contextmanager
def _agent(made: DirectoryNode, entered: EnteredFiles, **more: object) -> Iterator[InProcess]:
    file = f"{made.root}/config.yaml"
    config = configuration(made, **more)
    constants = config.pop("constants")
    assert isinstance(constants, dict)
    with open(file, "w", encoding="utf-8") as opened:
        json.dump(config, opened)
    with applied(constants), entered.installed():
        agent = InProcess(file, REAL)
        agent.start()
        try:
            yield agent
        finally:
            agent.stop()


def foreign_cpuset(directory: str) -> dict[str, list[str]]:
    """A program writes another CPU set into a BE container: the files from the kernel's event to our write."""
    return _foreign_cpuset(directory).files


def foreign_write(directory: str) -> list[str]:
    """The same: the functions in the order of their first entry."""
    return _foreign_cpuset(directory).order


def _foreign_cpuset(directory: str) -> EnteredFiles:
    entered = EnteredFiles()
    os.makedirs(directory, exist_ok=True)
    kernel = RealKernel()
    with (
        DirectoryNode(directory, kernel, kernel.mounts, cgroup_root=CGROUP_ROOT, runc="runc") as node,
        Scribe("tuned") as program,
    ):
        pod = node.add("be")
        before = node.cpus(pod.main)
        constants = {"kubelet.period_s": 3600, "writes.verify_s": _VERIFY_S}
        with _agent(node, entered, node={"sample_s": 60}, constants=constants):
            _wait(lambda: node.cpus(pod.main) != before)
            ours = node.cpus(pod.main)
            _wait(lambda: _is_idle(entered))
            entered.until_written(lambda: node.cpus(pod.main) == ours)
            program.write(node.path(pod.main.group, "cpuset", "cpuset.cpus"), before)
            assert entered.finished.wait(_WITHIN_S), "the CPU set is not put back"
    return entered


def _is_idle(entered: EnteredFiles) -> bool:
    """Whether no pass has begun for a while.

    One that is under way when the program writes may read the value before the kernel's event is read.
    """
    entered.until_ended()
    time.sleep(_IDLE_S)
    return _PASS not in entered.order


def _wait(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def eviction(directory: str) -> dict[str, list[str]]:
    """An online pod's signal rises: the files from its next reading, through rule and ladder, to the order."""
    return trio.run(_eviction, Path(directory), Evictor.submit).files


def whole_eviction(directory: str) -> list[str]:
    """The same to the end of the case: the functions in the order of their first entry."""
    return trio.run(_eviction, Path(directory), ended_alert).order


async def _eviction(directory: Path, last: Callable[..., Any]) -> EnteredFiles:
    live, entered = LiveNode(directory), EnteredFiles()
    rule = RuleConfig(
        dry_run=False,
        when=((DetectorEntry(threshold=ThresholdConfig(signal="memory.use", of="victim", above=2.0 * _GI, for_s=0)),),),
        resource=ContendedResource.MEMORY,
        responses=(Response.EVICT,),
    )
    config = replace(
        live.config,
        interference=varied(InterferenceConfig(enabled=True, rules={"memory-use": rule}), settle_s=0),
        eviction=varied(
            EvictionConfig(
                enabled=True,
                dry_run=False,
                limits=varied(LimitsConfig(), quiet_s=0),
                spared=varied(ExemptionsConfig(), young_s=0),
                triggers=TriggersConfig(node_memory=NodeMemoryConfig(enabled=True)),
            ),
            interval_s=1.0,
        ),
    )
    live.put("proc/meminfo", _MEMINFO)
    control_files = live.kernel.read

    def read(path: str, file: str) -> str:
        if isinstance(path, str) and path.startswith(f"{live.root}/proc"):
            return REAL.read(path, file)
        return control_files(path, file)

    def charge(uid: str, size: int) -> None:
        live.kernel.charge(f"{live.root}/sys/fs/cgroup/memory{group(uid)}/{container_id(uid)}", anon=size)

    with entered.installed(), patch.object(live.kernel, "read", read), live.agent(config) as agent:
        await live.look(agent)
        for uid, pod in agent.control.inventory.pods.items():
            certain = replace(pod.classification, certain=True)
            agent.control.inventory.pods[uid] = replace(pod, classification=certain)
        charge(WEB, _GI)
        charge(BATCH, 4 * _GI)
        async with trio.open_nursery() as nursery:
            await nursery.start(agent.interference.run)
            await trio.sleep(_SETTLE_S)
            entered.until_called(last)
            charge(WEB, 2 * _GI)
            assert await trio.to_thread.run_sync(entered.finished.wait, _WITHIN_S), f"{last.__name__} is not called"
            nursery.cancel_scope.cancel()
    return entered


def container_start(directory: str) -> list[str]:
    """A second container of a BE pod starts: the functions in the order of their first entry, to its last write."""
    return trio.run(_container_start, Path(directory))


async def _container_start(directory: Path) -> list[str]:
    live, entered = LiveNode(directory), EnteredFiles()

    def start() -> None:
        pod = live.pods[BATCH]
        box = live.create(pod, "second", {"cpu": {"shares": 2, "cpus": "0-6"}})
        _wait(lambda: "reconciler/actuators/cgroup/fastpath.py:FastPath.prepare" in entered.order)
        live.settle(box)
        _wait(lambda: live.cpus(box) != "0-6")
        time.sleep(_SETTLE_S)

    config = replace(live.config, node=replace(live.config.node, sample_s=_QUIET_S))
    with entered.installed(), live.agent(config) as agent:
        async with _running(agent):
            entered.until_ended()
            await trio.to_thread.run_sync(start)
    return entered.order


def reload(directory: str) -> list[str]:
    """A configuration file gets another level and is read again: the functions, to the first write that follows."""
    return trio.run(_reload, Path(directory))


async def in_place(job: Callable[..., T], *args: object) -> T:
    """Run the job of a worker thread in this one."""
    return job(*args)


async def _reload(directory: Path) -> list[str]:
    live, entered = LiveNode(directory), EnteredFiles()
    file = directory / "config.yaml"
    rest = {
        "operator_file": None,
        "node": {"root": live.root, "sample_s": _QUIET_S},
        "kubelet": {"endpoint": "off"},
        "runtime": {"cri": "off"},
        "store": {"path": live.store},
    }
    file.write_text(json.dumps({"protect": "observe", **rest}))
    daemon = Daemon(load.load(str(file)))
    # A worker thread may be older than the profile.
    here = patch.object(config_in_force, "in_worker", in_place)
    with here, entered.installed(), live.agent(daemon.config) as agent:
        daemon.agent = agent
        async with _running(agent):
            before = live.quota(live.besteffort)
            file.write_text(json.dumps({"protect": "cpu", **rest}))
            entered.until_ended()
            assert not (await daemon.reload()).problems
            await trio.to_thread.run_sync(_wait, lambda: live.quota(live.besteffort) != before)
    return entered.order


@contextlib.asynccontextmanager
async def _running(agent: Agent) -> AsyncIterator[None]:
    """The agent's components, ready and idle."""
    supervisor = Supervisor(agent.components())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(supervisor.run)
        await agent.control.reconciler.ready.wait()
        await trio.sleep(_IDLE_S)
        yield
        supervisor.stop("the end of the scene")

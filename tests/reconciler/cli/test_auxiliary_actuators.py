"""Side actuators in the agent: built where the node is this machine, shown, counted and undone with all the rest."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from reconciler.actuators.cgroup.status import SettingStatus
from reconciler.actuators.core_sched.actuator import CoreSched
from reconciler.actuators.restore import restore_ledger
from reconciler.cli.exits import Exit
from reconciler.config.model import AgentMode
from reconciler.control import side_actuators
from reconciler.daemon.agent import Agent
from reconciler.policies.core_sched import CoreSchedConfig
from state.cache import CacheConsumption, CacheUsage
from state.cpu import CORE_COOKIE
from state.kinds import CAPACITY, FILE, SYSCTL
from state.model import Hold
from state.store import boot_id
from tests.fakes.cores import FakeCores
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group
from tests.fakes.no_api import no_api
from tests.fakes.report import status_report
from tests.reconciler.actuators.acting import context
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon, listening


class Machine:
    """A node of four cores with two threads each, whose kernel has core scheduling; both pods have a process."""

    def __init__(self, path: Path) -> None:
        self.live = LiveNode(path)
        for cpu in range(8):
            first = cpu - cpu % 2
            self.live.put(f"sys/devices/system/cpu/cpu{cpu}/topology/core_cpus_list", f"{first}-{first + 1}\n")
        self.cores = FakeCores(path / "machine")
        for uid in (BATCH, WEB):
            self.cores.group(self.box(uid))
            self.cores.spawn(self.box(uid))

    @staticmethod
    def box(uid: str) -> str:
        return f"{group(uid)}/{container_id(uid)}"

    def config(self, **more: Any) -> Any:
        policies = replace(self.live.config.policies, core_sched=CoreSchedConfig(enabled=True, **more))
        return replace(self.live.config, mode=AgentMode.ENFORCE, policies=policies)

    def beside(self, agent: Agent) -> CoreSched:
        """The side, on this machine's kernel instead of the test's own."""
        given = context(
            agent.record.ledger,
            hierarchy=self.cores.hierarchy(),
            store_lane=agent.record.lane,
            writes=agent.writes.actuator.writes,
        )
        side = CoreSched(given, self.cores, self.cores.proc)
        agent.sides.all = (side,)
        return side


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


async def test_a_reload_a_hold_and_a_restore_reach_it_through_the_next_look(machine: Machine) -> None:
    with machine.live.agent(machine.config()) as agent:
        side = machine.beside(agent)

        async def look() -> set[int]:
            await machine.live.look(agent)
            await side.sweep()
            return machine.cores.cookies(machine.box(BATCH))

        [cookie] = await look()
        assert cookie
        assert machine.cores.cookies(machine.box(WEB)) == {0}
        await agent.record.holds.put(Hold(target=f"knob:{CORE_COOKIE}", reason="r", by="b"))
        agent.reconfigure(machine.live.config)
        assert await look() == {cookie}
        await agent.commands.release(f"knob:{CORE_COOKIE}")
        assert await look() == {0}
        agent.reconfigure(machine.config())
        assert await look() != {0}
        done = await agent.commands.restore()
        assert ("core cookie", "reclaimed", True) in {(result.file, result.path, result.ok) for result in done}
        assert await look() == {0}


def _document(agent: Agent) -> dict[str, Any]:
    show = status_report(agent)
    answer: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(show.state(()), enc_hook=str))
    return answer


async def test_it_is_shown_and_counted_like_a_control_file(machine: Machine, run: Run, tmp_path: Path) -> None:
    with machine.live.agent(machine.config()) as agent:
        side = machine.beside(agent)
        await machine.live.look(agent)
        await side.sweep()
        await agent.keeper.flush()
        document = _document(agent)
        snapshot = status_report(agent).metrics()
    [pod] = [pod for pod in document["pods"] if pod["uid"] == BATCH]
    [setting] = [entry for entry in pod["containers"][0]["settings"] if entry["knob"] == CORE_COOKIE]
    assert (setting["wanted"], setting["state"], setting["policy"]) == ("reclaimed", "written", "core_sched")
    assert document["budget"]["reasons"]["core_sched"] == "BE pods share cores only with BE pods"
    assert list(document["sides"]["core_sched"]["cookies"]) == ["reclaimed"]
    assert snapshot.settings[CORE_COOKIE, "in_force"] == 1
    assert snapshot.counters.writes[CORE_COOKIE, "written"] == 1
    with listening(FakeDaemon(document), str(tmp_path / "s")) as socket:
        ran = run("why", BATCH, "--socket", socket)
    assert ran.code == Exit.OK
    lines = ran.out[ran.out.index(f"  {CORE_COOKIE}") :].splitlines()
    assert lines[0].startswith(f"  {CORE_COOKIE} reclaimed  written")
    assert lines[1:3] == ["    core_sched: the pod is BE", "    1 thread"]
    assert "already correct" not in "".join(lines[:4]), "no control file of it was looked at"
    assert "core cookie" in ran.out[ran.out.index("history") :]


class Measuring:
    """A side that measures one pod's cache."""

    statuses: Mapping[str, Mapping[str, SettingStatus]] = {}

    def measured(self) -> CacheUsage:
        return CacheUsage(at_s=time.monotonic() - 3, pods={BATCH: CacheConsumption(occupancy_bytes=7)})


async def test_what_a_side_measures_of_caches_is_in_the_metrics(machine: Machine) -> None:
    with machine.live.agent(machine.config()) as agent:
        await machine.live.look(agent)
        show = status_report(agent)
        assert (show.metrics().cache, show.metrics().cache_age_s) == (None, None)
        agent.sides.all = (Measuring(),)  # type: ignore[assignment]  # only what a scrape asks for
        snapshot = show.metrics()
    assert snapshot.cache is not None
    assert snapshot.cache_age_s == pytest.approx(3, abs=1)
    known = {pod.uid: pod.llc_bytes for pod in snapshot.pods}
    assert (known.pop(BATCH), set(known.values())) == (7, {None})
    assert {pod.memory_bytes_s for pod in snapshot.pods} == {None}


def test_a_copy_of_a_node_has_no_threads_to_reach(machine: Machine) -> None:
    """Thread ids mean something on the machine that they are of."""
    with machine.live.agent(machine.config()) as agent:
        assert not {"core_sched", "resctrl"} & {side.name for side in agent.sides.all}


async def test_a_copy_of_a_node_has_none_to_restore(machine: Machine) -> None:
    with machine.live.agent(machine.config()) as agent:
        table = side_actuators.restore_table_without_daemon(machine.live.root, agent.record.ledger, None, no_api)
        assert list(table) == [SYSCTL, FILE, CAPACITY]
        assert await restore_ledger(agent.record.ledger, table, side_actuators.codec_of) == []


def test_this_machine_gets_one(machine: Machine) -> None:
    machine.live.put("proc/sys/kernel/random/boot_id", f"{boot_id()}\n")
    with machine.live.agent() as agent:
        assert {"core_sched", "resctrl"} <= {side.name for side in agent.sides.all}

"""The daemon between two agents: what the first one leaves behind, and a signal that arrives before the second."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from reconciler.config import load
from reconciler.config.model import AgentMode, Config, OnStop
from reconciler.daemon import main
from reconciler.runtime import malloc
from reconciler.runtime.lock import AlreadyRunningError, exclusive
from reconciler.runtime.priority import LoopPriority, PriorityCalls, PriorityState
from state.entry import RestoreResult
from tests.until import until


class NoCalls(PriorityCalls):
    """System calls about priorities that change nothing."""

    def set_scheduler(self, policy: int, level: int) -> None: ...

    def set_nice(self, nice: int) -> None: ...

    def limit(self, soft_us: int, hard_us: int) -> None: ...

    def now(self) -> float:
        return 0.0

    def pause(self, seconds: float) -> None: ...

    def used(self) -> float:
        return 0.0


class FakeAgent:
    """An agent without parts, which is ready at once. ``made``: all of them."""

    made: list["FakeAgent"]

    def __init__(self, config: Config, place: object, *, renew: Callable[[str], None], **_: object) -> None:
        self.config = config
        self.place = place
        self.renew = renew
        self.priority = LoopPriority(nice=0, slice_s=0.01, starting=lambda: False, calls=NoCalls())
        self.process = SimpleNamespace(
            prepare=lambda: None, start=self.priority.start, stop=self.priority.stop, settle=lambda: None
        )
        self.process.urgent = lambda: False
        reconciler = SimpleNamespace(ready=trio.Event(), look_s=0.0, busy_since=None, problem="")
        reconciler.ready.set()
        self.control = SimpleNamespace(inventory=SimpleNamespace(pods=()), reconciler=reconciler)
        self.sources = SimpleNamespace(is_urgent=lambda: False, has_unread=lambda: False)
        self.mode = SimpleNamespace(enforce=config.mode is AgentMode.ENFORCE)
        self.alerts = SimpleNamespace(component=lambda _status: None)
        self.headroom = SimpleNamespace(publisher=SimpleNamespace(end=self.withdraw))
        self.commands = self
        self.restored = self.withdrawn = 0
        self.daemon_weights_restored = 0
        self.closed = False
        self.made.append(self)

    def components(self) -> list[list[object]]:
        return []

    async def restore(self) -> list[RestoreResult]:
        self.restored += 1
        return []

    async def restore_daemon_weights(self) -> None:
        self.daemon_weights_restored += 1

    async def withdraw(self) -> None:
        self.withdrawn += 1

    def set_enforce(self, *, enforce: bool) -> None:
        self.mode.enforce = enforce

    def reconfigure(self, config: Config, *, paused: bool = False) -> None:
        self.config = config
        self.mode.enforce = config.mode is AgentMode.ENFORCE and not paused

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> list[FakeAgent]:
    async def found(*_: object) -> Any:
        return place()

    FakeAgent.made = []
    monkeypatch.setattr(main, "Agent", FakeAgent)
    monkeypatch.setattr(main, "wait_for_place", found)
    monkeypatch.setattr(main, "_RENEW_S", 0.0)
    monkeypatch.setattr(main.Daemon, "_inner", lambda *_: [])
    # All objects of all tests: tests/reconciler/runtime/test_malloc.py has that.
    monkeypatch.setattr(malloc, "free_earlier", lambda: None)
    return FakeAgent.made


def place(pods: str = "") -> Any:
    kubelet = SimpleNamespace(problems=())
    layout = SimpleNamespace(driver=SimpleNamespace(value="cgroupfs"), kubepods="/kubepods")
    hierarchy = SimpleNamespace(mode=SimpleNamespace(value="v1"), trigger_directory=lambda _: pods)
    runtime = SimpleNamespace(problems=())
    topology = SimpleNamespace(online="0-1")
    return SimpleNamespace(
        kubelet=kubelet, layout=layout, hierarchy=hierarchy, runtime=runtime, topology=topology, own=None
    )


def loaded(config: Config) -> load.Loaded:
    return load.Loaded(config=config, files=())


async def test_the_agent_before_leaves_no_priority_of_its_own(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    daemon = main.Daemon(loaded(Config()))
    nursery.start_soon(daemon.run)
    await until(lambda: agents and agents[0].priority.status.state is PriorityState.REAL_TIME)
    agents[0].renew("test")
    await until(lambda: len(agents) == 2 and agents[1].priority.status.state is PriorityState.REAL_TIME)
    assert agents[0].closed
    assert agents[0].priority.status.state is PriorityState.OFF


@pytest.mark.parametrize("on_stop", list(OnStop))
async def test_a_signal_while_the_node_is_searched_again_restores_and_withdraws_by_the_last_one(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, on_stop: OnStop
) -> None:
    places, searched = [place()], trio.Event()

    async def found(*_: object) -> Any:
        if not places:
            searched.set()
            await trio.sleep_forever()
        return places.pop()

    monkeypatch.setattr(main, "wait_for_place", found)
    daemon = main.Daemon(loaded(Config(mode=AgentMode.ENFORCE, on_stop=on_stop)))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run)
            await until(lambda: agents and agents[0].priority.status.state is PriorityState.REAL_TIME)
            agents[0].renew("test")
            await searched.wait()
            os.kill(os.getpid(), signal.SIGTERM)
    assert [agent.withdrawn for agent in agents] == [0, 1]
    assert [agent.restored for agent in agents] == [0, int(on_stop is OnStop.RESTORE)]
    assert [agent.daemon_weights_restored for agent in agents] == [0, int(on_stop is OnStop.KEEP)]
    assert agents[1].closed


@pytest.mark.parametrize(("mode", "restored"), [(AgentMode.ENFORCE, [0, 1]), (AgentMode.OBSERVE, [0, 0])])
async def test_a_stop_restores_the_weights_of_the_nodes_daemons_and_a_renewal_does_not(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, mode: AgentMode, restored: list[int]
) -> None:
    daemon = main.Daemon(loaded(Config(mode=mode)))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run)
            await until(lambda: agents)
            agents[0].renew("test")
            await until(lambda: len(agents) > 1)
            os.kill(os.getpid(), signal.SIGTERM)
    assert [agent.daemon_weights_restored for agent in agents] == restored
    assert [agent.restored for agent in agents] == [0, 0]


async def test_a_restore_on_stop_that_does_not_end_is_said_and_is_the_last_thing_that_the_daemon_does(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def restore(agent: FakeAgent) -> list[RestoreResult]:
        agent.restored += 1
        await trio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(FakeAgent, "restore", restore)
    monkeypatch.setattr(main, "_RESTORE_S", 0.05, raising=False)
    daemon = main.Daemon(loaded(Config(mode=AgentMode.ENFORCE, on_stop=OnStop.RESTORE)))
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(daemon.run)
            await until(lambda: agents)
            os.kill(os.getpid(), signal.SIGTERM)
    assert [(agent.restored, agent.withdrawn, agent.closed) for agent in agents] == [(1, 1, True)]
    assert "the restore on stop did not end" in caplog.text


async def test_after_a_restore_by_command_the_next_agent_writes_nothing_until_a_reload(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery
) -> None:
    config = loaded(Config(mode=AgentMode.ENFORCE))
    monkeypatch.setattr(load, "reload", lambda _: (config, ()))
    daemon = main.Daemon(config)
    nursery.start_soon(daemon.run)
    await until(lambda: agents)
    assert agents[0].mode.enforce
    agents[0].set_enforce(enforce=False)
    for number in (1, 2):
        agents[-1].renew("test")
        await until(lambda number=number: len(agents) > number)  # type: ignore[misc]
        assert not agents[-1].mode.enforce
    await daemon.reload()
    assert agents[-1].mode.enforce
    agents[-1].renew("test")
    await until(lambda: len(agents) == 4)
    assert agents[-1].mode.enforce


async def test_a_window_that_begins_is_applied_and_a_restore_by_command_lasts_over_it(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, nursery: trio.Nursery, tmp_path: Path
) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "mode: enforce\nwindows:\n- {name: morning, when: daily 06:00-12:00 UTC, limit_percent: 10}\n"
        "- {name: evening, when: daily 18:00-24:00 UTC, limit_percent: 90}\n"
    )
    midnight = 20_000 * 86_400.0
    now = midnight + 5 * 3600
    monkeypatch.setattr(main, "_BEAT_S", 0.01)
    daemon = main.Daemon(load.load(str(file)), wall=lambda: now)
    nursery.start_soon(daemon.run)
    await until(lambda: agents)

    def limit() -> int:
        return agents[0].config.policies.reclaimed.budget.limit_percent

    assert limit() == 65
    now = midnight + 7 * 3600
    await until(lambda: limit() == 10)
    assert agents[0].mode.enforce
    agents[0].set_enforce(enforce=False)
    now = midnight + 19 * 3600
    await until(lambda: limit() == 90)
    assert not agents[0].mode.enforce
    assert not (await daemon.reload()).problems
    assert limit() == 90
    assert agents[0].mode.enforce


@pytest.mark.parametrize("observe", [False, True])
async def test_only_one_daemon_that_may_write_manages_a_nodes_pods_whatever_its_store(
    agents: list[FakeAgent], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, nursery: trio.Nursery, *, observe: bool
) -> None:
    async def found(*_: object) -> Any:
        return place(str(tmp_path))

    monkeypatch.setattr(main, "wait_for_place", found)
    with exclusive(str(tmp_path)):
        daemon = main.Daemon(loaded(Config(mode=AgentMode.ENFORCE)), observe=observe)
        if observe:
            nursery.start_soon(daemon.run)
            await until(lambda: agents)
            return
        with pytest.raises(ExceptionGroup) as caught:
            await daemon.run()
    refused = caught.value.exceptions[0]
    assert isinstance(refused, AlreadyRunningError)
    assert (refused.pid, agents) == (os.getpid(), [])
    # The kernel has released it, and the next daemon's agents hold it, one after the other.
    daemon = main.Daemon(loaded(Config(mode=AgentMode.ENFORCE)))
    nursery.start_soon(daemon.run)
    await until(lambda: agents)
    agents[0].renew("test")
    await until(lambda: len(agents) == 2)
    with pytest.raises(AlreadyRunningError, match="manages these pods, with another store"), exclusive(str(tmp_path)):
        pass

"""The configuration in force: the files, the window of the wall clock, the mode of the command line."""

from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from reconciler.config import load
from reconciler.config.model import AgentMode, Protection
from reconciler.control.event_notes import EventNotes, WindowNow
from reconciler.daemon.agent import Agent
from reconciler.daemon.config_in_force import ConfigInForce
from reconciler.daemon.numbers import snapshot
from reconciler.daemon.status import ReloadResult
from reconciler.runtime.cooperative import all_steps
from reconciler.settings.binder import ConfigError, TextLayers
from state.entry import LedgerEvent
from tests.fakes.livenode import LiveNode
from tests.fakes.report import status_report
from tests.reconciler.daemon.test_wiring import MEMINFO, WithProc

NOON = 1_796_040_000.0
"""Monday, 12:00 UTC."""
HOUR = 3600.0
TEXT = """
protect: cpu
windows:
- name: office
  when: weekdays 09:00-20:00 UTC
  protect: full
- name: night
  when: daily 22:00-06:00 UTC
  limit_percent: 90
"""


class WallClock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> WallClock:
    return WallClock(NOON)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(TEXT)
    return path


@pytest.fixture
def in_force(file: Path, clock: WallClock) -> ConfigInForce:
    return ConfigInForce(load.load(str(file)), wall=clock)


async def followed(in_force: ConfigInForce) -> tuple[str | None, bool]:
    """The window after one second of the daemon's, and whether another configuration is in force."""
    changed = in_force.is_due() and await in_force.decide()
    return in_force.window().name, changed


def test_a_start_decides_the_window_and_knows_what_follows(in_force: ConfigInForce) -> None:
    assert in_force.config.protect is Protection.FULL
    assert in_force.config.mode is AgentMode.ENFORCE
    assert in_force.loaded.config.protect is Protection.CPU
    assert in_force.window() == WindowNow(
        name="office", until=NOON + 8 * HOUR, then=None, names=("office", "night"), level=Protection.CPU
    )


async def test_the_window_follows_the_clock(in_force: ConfigInForce, clock: WallClock) -> None:
    seen = []
    for step in (0.0, 8 * HOUR - 1, 1, HOUR, HOUR, 8 * HOUR, 3 * HOUR):
        clock.now += step
        seen.append(await followed(in_force))
        assert not in_force.is_due()
    assert seen == [
        *(("office", False), ("office", False), (None, True), (None, False), ("night", True), (None, True)),
        ("office", True),
    ]


@pytest.mark.parametrize("step", [-5 * HOUR, 10.5 * HOUR, 24 * HOUR * 400, -24 * HOUR * 400, -0.5])
async def test_a_clock_that_was_set_or_a_suspend_is_followed_at_once(
    in_force: ConfigInForce, clock: WallClock, file: Path, step: float
) -> None:
    clock.now += step
    assert in_force.is_due()
    await in_force.decide()
    again = ConfigInForce(load.load(str(file)), wall=clock)
    assert in_force.window() == again.window()
    assert in_force.config == again.config
    assert not in_force.is_due()


async def test_a_reload_decides_anew_and_a_bad_file_changes_nothing(
    in_force: ConfigInForce, clock: WallClock, file: Path
) -> None:
    clock.now += 10.5 * HOUR
    file.write_text(TEXT.replace("limit_percent: 90", "limit_percent: 80"))
    assert await in_force.reload() == ()
    assert (in_force.window().name, in_force.config.policies.reclaimed.budget.limit_percent) == ("night", 80)
    file.write_text(TEXT.replace("22:00", "22:60"))
    before = in_force.config
    with pytest.raises(ConfigError):
        await in_force.reload()
    assert in_force.config is before
    # Read files are not read again at a change of the window.
    clock.now += 11.5 * HOUR
    assert await followed(in_force) == ("office", True)
    file.write_text("protect: cpu\n")
    assert await in_force.reload() == ()
    assert in_force.window() == WindowNow(level=Protection.CPU)
    assert not in_force.is_due()


async def test_observe_of_the_command_line_holds_in_every_window(file: Path, clock: WallClock) -> None:
    in_force = ConfigInForce(load.load(str(file)), observe=True, wall=clock)
    modes = [in_force.config.mode]
    clock.now += 10.5 * HOUR
    await followed(in_force)
    modes.append(in_force.config.mode)
    assert modes == [AgentMode.OBSERVE] * 2


async def test_no_part_of_a_reload_or_a_change_of_the_window_is_work_of_the_loop(
    in_force: ConfigInForce, clock: WallClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = trio.lowlevel.current_trio_token()
    inside: list[bool] = []
    layers = TextLayers

    def made(*args: object, **more: object) -> object:
        try:
            inside.append(trio.lowlevel.current_trio_token() is here)
        except RuntimeError:
            inside.append(False)
        return layers(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "TextLayers", made)
    await in_force.reload()
    clock.now += 10.5 * HOUR
    assert await followed(in_force) == ("night", True)
    assert inside == [False] * len(inside)
    assert len(inside) >= 3


def test_each_change_is_an_event_with_what_was_and_what_follows(in_force: ConfigInForce) -> None:
    events: list[LedgerEvent] = []
    notes = EventNotes(events.append, "1", {}, wall=lambda: NOON)
    notes.window(WindowNow())
    notes.window(in_force.window())
    notes.window(in_force.window())
    notes.window(WindowNow(names=("office",)))
    notes.window(WindowNow())
    texts = [event.reason for event in events if event.kind == "window"]
    assert len(texts) == 3
    assert texts[0].startswith("office until ")
    assert texts[0].endswith(", then no window")
    assert texts[1:] == ["office -> no window", "no window -> no windows any more"]


async def test_the_agent_shows_the_window_counts_its_minutes_and_a_change_is_an_event(
    tmp_path: Path, in_force: ConfigInForce, clock: WallClock
) -> None:
    live = LiveNode(tmp_path / "node", files=False)
    live.put("proc/meminfo", MEMINFO)
    agent = Agent(live.config, live.place(), files=WithProc(live), window=in_force.window)

    async def reload() -> ReloadResult:
        return ReloadResult(needs_restart=await in_force.reload())

    try:
        show = status_report(agent, reload=reload)
        await live.look(agent)
        seen = []
        for step in (0.0, 10.5 * HOUR):
            clock.now += step
            await followed(in_force)
            config = replace(in_force.config, node=live.config.node, store=live.config.store)
            agent.reconfigure(config)
            agent.accounts.effect.minute([])
            about = show.state(["agent"])["agent"]
            assert isinstance(about, dict)
            window = about["window"]
            numbers = all_steps(snapshot(agent, ready=True, components=[])).windows
            seen.append((window["name"], window["then"], numbers))
            assert (await show.reload())["protect"] == "cpu"
        assert seen == [
            ("office", None, {"office": True, "night": False}),
            ("night", None, {"office": False, "night": True}),
        ]
        (hour,) = agent.accounts.effect.hours.values()
        assert {name: part.minutes for name, part in hour.windows.items()} == {"office": 1, "night": 1}
        events = [event.reason for event in agent.record.ledger.events_after(0) if event.kind == "window"]
        assert [event.partition(" until")[0] for event in events] == ["office", "office -> night"]
    finally:
        agent.close()

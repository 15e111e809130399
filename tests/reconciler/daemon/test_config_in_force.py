"""What decides the configuration in force, from the lowest: default, control plane, level, file; then --observe."""

import threading
from pathlib import Path

import pytest
import trio
import trio.testing

from reconciler.clients.kube_config import NodeSettings
from reconciler.config import node_settings
from reconciler.config.load import Loaded, load, value_at
from reconciler.config.model import AgentMode
from reconciler.config.node_settings import KeptObject, KeptSettings, KeptValue, encode_kept
from reconciler.control.event_notes import EventNotes
from reconciler.daemon import main
from reconciler.daemon.config_in_force import ConfigInForce
from reconciler.daemon.node_settings import changes
from state.entry import LedgerEvent
from state.schema import META, NODE_SETTINGS
from state.store import Store, StoreBatch
from tests.fakes.livenode import LiveNode
from tests.reconciler.daemon.test_wiring import MEMINFO, agent_on

LIMIT = "policies.reclaimed.budget.limit_percent"
FORM = "policies.reclaimed.form"


def kept(percent: int) -> KeptSettings:
    section = "resourceUsedThresholdWithBE"
    values = (
        KeptValue(f"{section}.cpuSuppressThresholdPercent", percent),
        KeptValue(f"{section}.cpuSuppressPolicy", "cfsQuota"),
    )
    return KeptSettings(
        source=NodeSettings.KOORDINATOR, node="n1", objects=(KeptObject(title="NodeSLO n1", values=values),)
    )


class Files:
    """A configuration file and a store."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "config.yaml"
        self.store = directory / "state.db"

    def write(self, text: str = "", settings: str = "koordinator") -> None:
        self.path.write_text(f"store: {{path: {self.store}}}\napiserver: {{node_settings: {settings}}}\n{text}")

    def keep(self, row: bytes) -> None:
        store = Store(str(self.store))
        batch = StoreBatch()
        batch.put(META, NODE_SETTINGS, row)
        store.apply(batch)
        store.close()

    def with_settings(self) -> ConfigInForce:
        """Nothing in the file, and the control plane's settings in the store."""
        self.keep(encode_kept(kept(55)))
        self.write()
        return self.in_force()

    def in_force(self, *, observe: bool = False) -> ConfigInForce:
        return ConfigInForce(load(str(self.path)), observe=observe)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_the_layers(files: Files) -> None:
    got = files.with_settings()
    assert (value_at(got.config, LIMIT), value_at(got.config, FORM)) == (55, "quota")
    files.write("protect: cpu\n")
    await got.reload()
    assert (value_at(got.config, LIMIT), value_at(got.config, FORM)) == (55, "both")
    assert got.config.mode is AgentMode.ENFORCE
    assert files.in_force(observe=True).config.mode is AgentMode.OBSERVE
    files.write("protect: cpu\npolicies: {reclaimed: {budget: {limit_percent: 60%}}}\n")
    await got.reload()
    assert value_at(got.config, LIMIT) == 60
    assert value_at(files.in_force().config, LIMIT) == 60


async def test_a_change_is_taken_without_reading_the_files(files: Files) -> None:
    got = files.with_settings()
    files.write("not: {valid\n")
    assert not await got.use_node_settings(kept(55))
    before = got.config
    assert await got.use_node_settings(kept(70))
    assert list(changes(before, got.config)) == [f"{LIMIT} 55 -> 70"]
    assert await got.use_node_settings(None)
    assert value_at(got.config, LIMIT) == value_at(ConfigInForce(load("/none")).config, LIMIT)


async def test_off_counts_at_once_and_on_again_has_what_is_known(files: Files) -> None:
    got = files.with_settings()
    assert got.settings_row() == encode_kept(kept(55)), "what a recording has"
    files.write(settings="off")
    await got.reload()
    assert got.settings_row() == b""
    assert value_at(got.config, LIMIT) != 55
    assert got.settings_facts() == {}
    files.write(settings="katalyst")
    await got.reload()
    # Of another control plane nothing is known yet: the present ones stay.
    assert value_at(got.config, LIMIT) == 55
    assert got.settings_facts()["taken"] == {
        LIMIT: "NodeSLO n1: resourceUsedThresholdWithBE.cpuSuppressThresholdPercent = 55",
        FORM: "NodeSLO n1: resourceUsedThresholdWithBE.cpuSuppressPolicy = cfsQuota",
    }


@pytest.mark.parametrize("row", [b"", b"\x81\xa1v\x63", b"\xff" * 100, b"x" * (300 << 10)])
def test_a_row_that_cannot_be_read_is_no_settings(files: Files, row: bytes) -> None:
    files.keep(row)
    files.write()
    assert value_at(files.in_force().config, FORM) == value_at(load("/none").config, FORM)


def test_stored_settings_of_another_node_do_not_count(files: Files) -> None:
    got = files.with_settings()
    got.drop_settings_of_others(lambda: "n1")
    assert value_at(got.config, LIMIT) == 55
    got.drop_settings_of_others(lambda: "n2")
    assert value_at(got.config, LIMIT) != 55
    assert got.settings_row() == b""


def test_without_a_store_there_are_none(files: Files) -> None:
    files.write()
    assert files.in_force().config == load(str(files.path)).config


def test_an_event_names_every_setting_and_is_bounded() -> None:
    events: list[LedgerEvent] = []
    notes = EventNotes(events.append, "1", {})
    rows = [f"policies.a.number{number} 1 -> 2" for number in range(60)]
    notes.settings(rows, "why")
    texts = [event.reason for event in events if event.kind == "settings"]
    assert len(texts) > 2
    assert all(len(text) <= 410 for text in texts)
    assert [row for text in texts for row in text.removeprefix("why: ").split("; ")] == rows
    notes.settings([], "why")
    assert len([event for event in events if event.kind == "settings"]) == len(texts)


async def test_a_change_is_like_a_reload_but_does_not_end_a_restore(files: Files, tmp_path: Path) -> None:
    files.write("mode: enforce\n")
    daemon = main.Daemon(load(str(files.path)))
    live = LiveNode(tmp_path / "node", files=False)
    live.put("proc/meminfo", MEMINFO)
    with agent_on(live) as agent:
        daemon.agent = agent
        await daemon._use_node_settings(kept(55))
        modes = [agent.mode.enforce]
        assert value_at(agent.config, LIMIT) == 55
        agent.commands.set_enforce(enforce=False)
        await daemon._use_node_settings(kept(0))
        modes.append(agent.mode.enforce)
        assert modes == [True, False]
        assert value_at(agent.config, LIMIT) != 55
        noted = [event.reason for event in agent.record.ledger.events_after(0) if event.kind == "settings"]
        text = "the control plane's settings: "
        assert noted == [
            f"{text}{LIMIT} 65 -> 55; {FORM} both -> quota",
            f"{text}1 value not taken: bypassctl config explain apiserver.node_settings",
            f"{text}{LIMIT} 55 -> 65",
        ]


async def test_a_change_during_a_reload_is_kept(files: Files, nursery: trio.Nursery) -> None:
    got = files.with_settings()
    nursery.start_soon(got.reload)
    await trio.testing.wait_all_tasks_blocked()
    assert await got.use_node_settings(kept(70))
    await got.reload()
    assert value_at(got.config, LIMIT) == 70


async def test_the_loop_does_other_things_while_settings_are_taken(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    files.write()
    got, threads, real = files.in_force(), list[int](), node_settings.in_force

    def seen(loaded: Loaded, kept: KeptSettings | None) -> node_settings.SettingsInForce:
        threads.append(threading.get_ident())
        return real(loaded, kept)

    monkeypatch.setattr(node_settings, "in_force", seen)
    assert await got.use_node_settings(kept(70))
    assert value_at(got.config, LIMIT) == 70
    assert threads
    assert threading.get_ident() not in threads


async def test_a_reload_while_settings_are_taken_is_kept(files: Files) -> None:
    files.write()
    got = files.in_force()
    files.write("policies: {reclaimed: {form: both}}\n")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(got.use_node_settings, kept(70))
        nursery.start_soon(got.reload)
    assert (value_at(got.config, LIMIT), value_at(got.config, FORM)) == (70, "both")


async def test_a_window_is_above_the_control_plane_and_below_it_the_rest_counts_on(files: Files) -> None:
    files.keep(encode_kept(kept(55)))
    files.write("windows: [{name: day, when: 'daily 06:00-18:00 UTC', limit_percent: 30%}]\n")
    now = 20_000 * 86_400.0
    got = ConfigInForce(load(str(files.path)), wall=lambda: now)
    assert (value_at(got.config, LIMIT), value_at(got.config, FORM)) == (55, "quota")
    now += 7 * 3600.0
    assert got.is_due()
    assert await got.decide()
    assert (value_at(got.config, LIMIT), value_at(got.config, FORM)) == (30, "quota")
    assert not await got.use_node_settings(kept(70))
    now += 12 * 3600.0
    assert await got.decide()
    assert value_at(got.config, LIMIT) == 70

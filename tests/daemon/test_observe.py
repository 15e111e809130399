"""Observe, by option and by configuration: no write is made, each is shown as it would be."""

import signal
from collections.abc import Callable

from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.writers import Modifications
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]


def test_nothing_is_written_and_every_write_is_shown(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be", shares=102)
    before = node.tree()
    with Modifications(node.directories()) as seen:
        item = daemon(mode="enforce").up("--observe")
        wait_for(lambda: item.standing(pod.main.group, "cpu.set").get("state") == "would write", told=item.tail)
        shown = {row["knob"]: row["wanted"] for row in _settings(item, pod.main.group)}
        assert shown == {"cpu.set": item.state("pools")["pools"]["reclaimed"], "cpu.weight": "2"}
        item.look_again()
        assert seen.take() == []
    assert node.tree() == before
    assert item.state("files")["files"] == [], "nothing is recorded of what is not touched"
    # The runtime's next signal fires nothing either.
    node.settle(pod.main)
    item.look_again()
    assert node.tree() == before
    assert item.state("agent")["agent"]["mode"] == "observe"


def test_a_reload_turns_writing_on_and_off(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("be", shares=102)
    item = daemon(mode="observe").up()
    wait_for(lambda: item.standing(pod.main.group, "cpu.set").get("state") == "would write", told=item.tail)
    item.configure(mode="enforce")
    item.signal(signal.SIGHUP)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    item.configure(mode="observe")
    item.signal(signal.SIGHUP)
    wait_for(lambda: item.state("agent")["agent"]["mode"] == "observe", told=item.tail)
    late = node.add("late", shares=102)
    wait_for(lambda: item.standing(late.main.group, "cpu.set").get("state") == "would write", told=item.tail)
    assert (node.cpus(late.main), node.shares(late.main)) == ("0-1", "102")
    assert bounded(node, pod.main), "what is in force stays until somebody restores it"


def _settings(daemon: Daemon, group: str) -> list[dict[str, str]]:
    settings: list[dict[str, str]] = next(
        row["settings"] for pod in daemon.state("pods")["pods"] for row in pod["containers"] if row["group"] == group
    )
    return settings

"""Host workloads are measured while the configuration names any, and nothing is loaded while it does not."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import trio
import trio.testing

from reconciler.control.host_watch import HostWatch
from reconciler.control.inventory import Inventory
from reconciler.signals.host_config import HostWorkloadConfig
from state.hosts import CountsAs, HostWorkloads
from tests.reconciler.signals.podtree import Tree
from tests.reconciler.signals.test_host_processes import put


class Layout:
    kubepods = "/kubepods"


class Known:
    """The part of the inventory that is used."""

    layout = Layout()

    def __init__(self) -> None:
        self.taken: list[HostWorkloads] = []

    def take(self, *, hosts: HostWorkloads) -> None:
        self.taken.append(hosts)


@pytest.fixture
def known() -> Known:
    return Known()


def entry(match: str, role: CountsAs = CountsAs.BE) -> HostWorkloadConfig:
    return HostWorkloadConfig(match=match, counts_as=role)


async def test_entries_of_a_reload_are_measured_and_those_removed_are_forgotten(
    tmp_path: Path, known: Known, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    tree = Tree(tmp_path)
    for number, name in enumerate(("a", "b"), 21):
        tree.group(f"/{name}")
        for mount in tree.hierarchy.mounts():
            Path(mount.path(f"/{name}"), "cgroup.procs").write_text(f"{number}\n")
        put(tree, number)
        tree.put("cpuacct", f"/{name}", "cpuacct.usage", "0")
    entries: dict[str, HostWorkloadConfig] = {}
    watch = HostWatch(
        cast(Inventory, known), tree.hierarchy, entries=lambda: entries, root=str(tmp_path), clock=trio.current_time
    )
    await nursery.start(watch.run)
    await trio.sleep(60)
    assert known.taken == [], "nothing is configured"

    entries = {"a": entry("cgroup:/a")}
    watch.reconfigure()
    await trio.sleep(3.5)
    tree.put("cpuacct", "/a", "cpuacct.usage", str(500_000_000))
    await trio.sleep(1)
    assert [list(hosts.entries) for hosts in known.taken] == [["a"]] * 5
    assert known.taken[-1].be_milli == pytest.approx(500, abs=1)
    assert watch.be_ms == pytest.approx(500, abs=1)
    assert watch.victims == {}

    entries = {"b": entry("cgroup:/b", CountsAs.VICTIM)}
    watch.reconfigure()
    await trio.sleep(0.5)
    assert [list(hosts.entries) for hosts in known.taken[5:]] == [[], ["b"]]
    assert {uid: (host.pids, host.pod.uid, host.pod.group.path) for uid, host in watch.victims.items()} == {
        "host:b /b": ((22,), "host:b /b", "/b")
    }

    entries = {}
    watch.reconfigure()
    await trio.sleep(60)
    assert [list(hosts.entries) for hosts in known.taken[7:]] == [[]]
    assert watch.victims == {}


async def test_very_many_groups_are_read_every_other_second(
    tmp_path: Path, known: Known, nursery: trio.Nursery, autojump_clock: trio.testing.MockClock
) -> None:
    tree = Tree(tmp_path, 2)
    for number in range(130):
        tree.group(f"/many/{number}")
    entries = {"many": entry("cgroup:/many/*")}
    watch = HostWatch(
        cast(Inventory, known), tree.hierarchy, entries=lambda: entries, root=str(tmp_path), clock=trio.current_time
    )
    await nursery.start(watch.run)
    await trio.sleep(9)
    assert [hosts.at_s - known.taken[0].at_s for hosts in known.taken] == pytest.approx([0, 2, 4, 6, 8])


async def test_a_stop_forgets_what_was_read(tmp_path: Path, known: Known) -> None:
    tree = Tree(tmp_path)
    tree.group("/a")
    entries: Mapping[str, Any] = {"a": entry("cgroup:/a")}
    watch = HostWatch(cast(Inventory, known), tree.hierarchy, entries=lambda: entries, root=str(tmp_path))
    async with trio.open_nursery() as nursery:
        await nursery.start(watch.run)
        while not known.taken:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    assert known.taken[-1] == HostWorkloads()

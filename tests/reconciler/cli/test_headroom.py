"""bypassctl headroom and owners: from a daemon, from its store, and when there is none."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import msgpack
import pytest
import trio

from reconciler.actuators.codec import write_rows
from reconciler.actuators.node_mark import CODEC, MarkRow, MarkRows
from reconciler.cli.exits import Exit
from state.ledger import Ledger
from state.schema import ASSIGNMENTS, META, PUBLISHED
from state.store import Store, StoreBatch, boot_id
from tests.fakes.api_server import FakeApiServer, in_thread
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import Run
from tests.reconciler.cli.fakedaemon import FakeDaemon

NOWHERE = {**dict.fromkeys(("target", "cpu_milli", "memory_bytes", "detail", "at", "problem", "last_edit")), "edits": 0}
PROMISED: dict[str, Any] = {
    "milli": 5600,
    "reason": "the mean of 4 times 30 s",
    "known_s": 0.4,
    "nodes": [
        {"numa_node": 0, "milli": 3200, "supply_milli": 3410, "cpus": "2-7"},
        {"numa_node": 1, "milli": 2400, "supply_milli": 2200, "cpus": "10-15"},
    ],
    "memory": {
        "bytes": 12 << 30,
        "supply_bytes": 13 << 30,
        "reason": "the mean of 4 times 30 s",
        "known_s": 2.0,
    },
    "law": {"name": "recent", "text": "recent: what the last minutes have left"},
}


def test_it_is_shown_by_node_and_is_one_document_for_programs(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["headroom"] = PROMISED
    ran = ctl("headroom")
    assert ran.code == Exit.OK
    assert ran.out.splitlines() == [
        "allocatable to BE: 5.60 CPU (CPU use measured 400 ms ago)",
        "reason: the mean of 4 times 30 s",
        "NUMA NODE  ALLOCATABLE  AVAILABLE  CPUS",
        "        0         3.20       3.41  2-7",
        "        1         2.40       2.20  10-15",
        "allocatable to BE: 12 GiB memory (13 GiB available, memory use measured 2 s ago)",
        "reason: the mean of 4 times 30 s",
        "law recent: what the last minutes have left",
    ]
    assert json.loads(ctl("headroom", "-o", "json").out) == {"headroom": PROMISED}
    assert "numa_node: 1" in ctl("headroom", "-o", "yaml").out


@pytest.mark.parametrize(
    ("there", "text"),
    [
        ({}, "not published to the cluster (headroom.publish: off, or mode: observe)"),
        ({"target": "node", "problem": "patch: HTTP 403"}, "not published: patch: HTTP 403"),
        ({"target": "node"}, "published to node: not read back yet"),
        (
            {
                "target": "node",
                "cpu_milli": 1000,
                "memory_bytes": 0,
                "at": 1.0,
                "edits": 2,
                "last_edit": {"text": "kubelet changed allocatable", "at": 0.0},
            },
            "changed by others 2 times, last at -: kubelet changed allocatable",
        ),
    ],
)
def test_where_it_is_published_or_why_not(ctl: Run, daemon: FakeDaemon, there: dict[str, Any], text: str) -> None:
    daemon.document["headroom"] = {**PROMISED, "published": {**NOWHERE, **there}}
    assert ctl("headroom").out.splitlines()[-1] == text


def test_what_a_killed_daemon_has_published_is_named_with_the_command(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    with closing(Store(str(path))) as store:
        batch = StoreBatch()
        batch.put(ASSIGNMENTS, "headroom", msgpack.packb({"milli": {"0": 900}, "at": 1.0}))
        batch.put(META, PUBLISHED, msgpack.packb({"target": "node", "node": "n1"}))
        store.apply(batch)
    ran = run("headroom", "--store", str(path), "--socket", str(tmp_path / "none.sock"))
    assert ran.out.splitlines()[-1] == "still published to node; bypassctl headroom --withdraw"


def test_the_daemons_own_document_has_it(ctl: Run) -> None:
    """The real agent, which has planned but not yet measured for long enough."""
    ran = ctl("headroom", "-o", "json")
    assert json.loads(ran.out)["headroom"] == {
        "milli": 0,
        "reason": "not measured yet",
        "known_s": None,
        "nodes": [],
        "memory": {"bytes": 0, "supply_bytes": None, "reason": "not measured yet", "known_s": None},
        "closed": False,
        "law": {"name": "recent", "text": "recent: what the last minutes have left"},
        "published": NOWHERE,
    }


def test_without_a_daemon_headroom_is_read_from_the_store_if_there_is_any(run: Run, live: LiveNode) -> None:
    async def measured(*, seconds: int) -> None:
        async with live.looked() as agent:
            use = agent.control.inventory.readings.cpu
            for second in range(seconds):
                agent.headroom.report.update(
                    agent.control.reconciler.pools, agent.control.inventory.readings.topology, use, 1.0 + second
                )
            await agent.keeper.flush()

    trio.run(lambda: measured(seconds=0))
    parts = ("headroom", "--root", str(live.root), "--store", live.config.store.path)
    ran = run(*parts)
    assert (ran.code, ran.err.splitlines()[-1]) == (Exit.NOT_FOUND, "bypassctl: no headroom published yet")
    trio.run(lambda: measured(seconds=60))
    result = json.loads(run(*parts, "-o", "json").out)["headroom"]
    assert result["milli"] > 0
    assert [node["numa_node"] for node in result["nodes"]] == [0]


def test_the_unit_removes_the_mark_of_a_killed_daemon_and_says_why_it_cannot(run: Run, tmp_path: Path) -> None:
    others = {"key": "dedicated", "value": "db", "effect": "NoSchedule"}
    ours = {"key": "bypassd/closed", "effect": "NoSchedule", "value": "until-20270115T120000Z"}

    def server() -> FakeApiServer:
        made = FakeApiServer()
        made.nodes.add("n1", taints=[others, ours])
        return made

    path, config = tmp_path / "state.db", tmp_path / "config.yaml"
    text = json.dumps({"key": "bypassd/closed", "effect": "NoSchedule", "value": ours["value"]}, separators=(",", ":"))
    row = MarkRow(path="/api/v1/nodes/n1", field="NoSchedule", ours=(text,))
    with closing(Store(str(path), boot=boot_id())) as store:
        write_rows(Ledger(store), CODEC, MarkRows(rows={"NoSchedule": row}))
    with in_thread(server) as api:
        config.write_text(f"apiserver: {{server: 'http://127.0.0.1:{api.port}'}}\n")
        words = ("headroom", "--withdraw", "--store", str(path), "--config", str(config))
        api.nodes.rights = {"get nodes"}
        failed = run(*words)
        assert failed.code == Exit.NOT_OK
        assert "taint bypassd/closed:NoSchedule" in failed.err
        assert "cannot patch" in failed.err
        api.nodes.rights = None
        ran = run(*words)
        assert (ran.code, ran.out) == (Exit.OK, "the node is open to new BE pods again\n")
        assert api.nodes.taints("n1") == [others]
        assert run(*words).out == "nothing is published\n"


ACCOUNT = {
    "owner": "ci",
    "sold_s": 120.4,
    "taken_back_s": 30.0,
    "lost_s": 5.0,
    "fair_s": 200.0,
    "debt_s": 79.6,
    "counts_percent": 125,
}
OWNERS: dict[str, Any] = {
    "label": None,
    "fair_shares": True,
    "fair_hours": 4,
    "windows": [
        {"hours": 1, "owners": [ACCOUNT]},
        {"hours": 24, "owners": [ACCOUNT, {**ACCOUNT, "owner": "batch", "debt_s": -79.6, "counts_percent": 100}]},
    ],
}


def test_each_window_has_a_row_for_each_owner_and_it_is_one_document_for_programs(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["owners"] = OWNERS
    ran = ctl("owners")
    assert ran.code == Exit.OK
    rows = [line.split() for line in ran.out.splitlines()]
    assert rows.count(["ci", "120", "s", "30", "s", "5", "s", "200", "s", "80", "s", "125", "%"]) == 2
    assert ["batch", "120", "s", "30", "s", "5", "s", "200", "s", "-80", "s", "100", "%"] in rows
    assert json.loads(ctl("owners", "-o", "json").out) == {"owners": OWNERS}


def test_without_any_account_there_is_no_empty_table_and_while_it_is_off_none(ctl: Run, daemon: FakeDaemon) -> None:
    daemon.document["owners"] = {**OWNERS, "windows": [{"hours": hours, "owners": []} for hours in (1, 4, 24)]}
    ran = ctl("owners")
    assert (ran.code, len(ran.out.splitlines())) == (Exit.OK, 2)
    daemon.document["owners"] = {}
    assert ctl("owners").code == Exit.NOT_FOUND

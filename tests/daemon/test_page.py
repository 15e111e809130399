"""What people read of a running daemon: the page with its documents, followed events, the report, links in alerts."""

import http.client
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from reconciler.cli.exits import Exit
from reconciler.control.effect_hours import ROW, EffectHour, OnlineMinutes
from reconciler.control.hour_rows import HOUR_S
from reconciler.web.app import page
from state.schema import META
from state.store import Store, StoreBatch
from tests.daemon.process import Daemon, bounded, wait_for
from tests.daemon.test_foreign_writes import named
from tests.daemon.writers import Scribe
from tests.fakes.daemonprocess import ROOT, environment
from tests.fakes.node import DirectoryNode
from tests.fakes.ports import free_port, listening

Make = Callable[..., Daemon]


def fetched(port: int, path: str) -> tuple[int, bytes]:
    """One GET over TCP, as a browser's."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={"Sec-Fetch-Site": "same-origin"})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def requests_of(text: str) -> list[str]:
    """The addresses that the page's script requests."""
    return re.findall(r'get\("(/[^"]+)"\)', text)


def test_the_page_and_every_document_that_it_requests_follow_a_pod(node: DirectoryNode, daemon: Make) -> None:
    port = free_port()
    item = daemon(http={"enabled": True, "port": port, "state_over_tcp": True}).up()
    listening(port)
    served = [fetched(port, "/"), item.get("/")]
    assert served == [(200, page()[0])] * 2
    addresses = requests_of(served[0][1].decode())
    assert len(addresses) >= 3

    def documents() -> dict[str, Any]:
        """All sections that the page reads, over TCP."""
        sections: dict[str, Any] = {}
        for address in addresses:
            status, body = fetched(port, address)
            assert status == 200, (address, body)
            document = json.loads(body)
            wanted = address.partition("section=")[2].split(",")
            assert set(wanted) <= document.keys(), address
            sections |= document
        return sections

    def listed() -> list[str]:
        return [f"{pod['namespace']}/{pod['name']}" for pod in documents()["podlist"]]

    assert listed() == []
    pod = node.add("be", namespace="ci")
    wait_for(lambda: listed() == ["ci/be"], told=item.tail)
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    (row,) = documents()["podlist"]
    assert (row["uid"], row["class"], row["pool"]) == (pod.uid, "reclaimed", "reclaimed")
    wait_for(lambda: any(event["pod_uid"] == pod.uid for event in documents()["history"]), told=item.tail)
    node.remove(pod)
    wait_for(lambda: listed() == [], told=item.tail)


def test_without_the_permission_the_page_is_served_and_the_state_is_not(node: DirectoryNode, daemon: Make) -> None:
    port = free_port()
    item = daemon(http={"enabled": True, "port": port}).up()
    listening(port)
    assert fetched(port, "/")[0] == 200
    assert fetched(port, "/readyz")[0] == 200
    for address in requests_of(page()[0].decode()):
        assert fetched(port, address)[0] == 404
        assert item.get(address)[0] == 200


@contextmanager
def following(item: Daemon, path: Path, *more: str) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """``bypassctl events --follow`` as a process; the events that it has printed. It ends by Ctrl-C, with success."""
    command = [sys.executable, "-m", "reconciler.cli", "events", "--follow", "-o", "json", *more]
    # A test run in the background of a shell ignores SIGINT, which programs inherit.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with path.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--config", item.config_file], cwd=ROOT, env=environment(), stdout=out, stderr=subprocess.PIPE
        )
    signal.signal(signal.SIGINT, before)
    try:
        yield lambda: [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        process.send_signal(signal.SIGINT)
        assert process.wait(15) == Exit.OK
    finally:
        process.kill()
        process.communicate()


def test_followed_events_are_those_of_a_pod_that_comes_and_goes_each_once_over_a_restart(
    node: DirectoryNode, daemon: Make, tmp_path: Path
) -> None:
    item = daemon().up()
    with following(item, tmp_path / "events", "--since", "1h", "--type", "write", "--type", "daemon") as events:
        wait_for(lambda: any(event["kind"] == "start" for event in events()), told=item.tail)
        first = node.add("first", namespace="ci")
        wait_for(lambda: any(event["pod"] == "ci/first" for event in events()), told=item.tail)
        node.remove(first)
        assert item.stop() == 0
        item.up()
        second = node.add("second", namespace="ci")
        # An event comes some time after the write that it is about.
        wait_for(
            lambda: any(event["file"] == "cpuset.cpus" and event["path"] == second.main.group for event in events()),
            told=item.tail,
        )
        wait_for(lambda: bounded(node, second.main), told=item.tail)
    rows = events()
    numbers = [event["number"] for event in rows]
    assert numbers == sorted(set(numbers))
    assert [event["kind"] for event in rows if event["type"] == "daemon"] == ["start", "stop", "start"]
    cpus = [event for event in rows if event["file"] == "cpuset.cpus" and event["path"] == second.main.group]
    assert [event["after"] for event in cpus] == [node.cpus(second.main)]
    # What the pod that is gone went through is still printed, by its name.
    answer = item.control("events", "--pod", "ci/first", "-o", "json")
    assert answer.returncode == Exit.OK, answer.stderr
    assert {json.loads(line)["pod_uid"] for line in answer.stdout.splitlines()} == {first.uid}


def test_the_report_has_the_hours_of_earlier_runs_and_is_refused_without_any(node: DirectoryNode, daemon: Make) -> None:
    item = daemon().up()
    assert item.control("report", "--since", "2h").returncode == Exit.NOT_FOUND
    assert item.stop() == 0
    side = OnlineMinutes(minutes=30, samples=60, wait_milli=120.0, waits={"17": 60})
    hour = EffectHour(be_cpu_s=7200.0, minutes=60, enforced=60, with_be=side, without_be=side, counts={"starts": 30})
    batch = StoreBatch()
    batch.put(META, f"{ROW}{int(time.time()) // HOUR_S}", msgspec.msgpack.encode(hour))
    store = Store(node.store, boot="tests", version="tests", node="tests")
    store.apply(batch)
    store.close()
    stopped = item.control("report", "--since", "2h", "-o", "json")
    item.up()
    running = item.control("report", "--since", "2h", "--gate", "-o", "json")
    assert (stopped.returncode, running.returncode) == (Exit.OK, Exit.NO_EVIDENCE), (stopped.stderr, running.stderr)
    for answer in (stopped, running):
        (row,) = json.loads(answer.stdout)["hours"]
        assert (row["be_cpu_hours"], row["minutes"]) == (2.0, 60)
    gate = {bound["name"]: bound["state"] for bound in json.loads(running.stdout)["gate"]["bounds"]}
    # Nothing throttled was counted: what is not known is not within its bound.
    assert (gate["wait"], gate["late"], gate["throttled"]) == ("passed", "passed", "unknown")


def test_an_alert_has_the_address_of_its_pod_on_the_page(node: DirectoryNode, daemon: Make, tmp_path: Path) -> None:
    port = free_port()
    sinks = {"lines": {"file": {"path": str(tmp_path / "alerts")}, "batch_delay_s": 0}}
    item = daemon(
        node={"name": "node-17.example"},
        http={"enabled": True, "port": port, "state_over_tcp": True},
        alerts={"sinks": sinks, "page_url": f"http://127.0.0.1:{port}/?node={{node}}"},
    ).up()
    named(item)
    pod = node.add("be", namespace="ci")
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    with Scribe("sh") as shell:
        shell.write(node.path(pod.main.group, "cpuset", "cpuset.cpus"), "0-1")
        wait_for(lambda: (tmp_path / "alerts").exists() and (tmp_path / "alerts").read_text(), told=item.tail)
    (alert,) = [json.loads(line) for line in (tmp_path / "alerts").read_text().splitlines()]
    address, _, fragment = alert["details"]["page"].partition("#")
    assert address == f"http://127.0.0.1:{port}/?node=node-17.example"
    assert fetched(port, address.partition(str(port))[2]) == (200, page()[0])
    (shown,) = item.state("podlist")["podlist"]
    assert fragment == f"pod={shown['namespace']}/{shown['name']}" == "pod=ci/be"

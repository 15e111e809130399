"""A control plane's settings of the node, at a real daemon: from its object to the files, and without an API server."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

from reconciler.cli.main import main
from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode
from tests.fakes.object_server import NODES, ObjectServer

Make = Callable[..., Daemon]
SLOS = "/apis/slo.koordinator.sh/v1alpha1/nodeslos"
SWITCH = "policies.reclaimed.enabled"


@contextmanager
def serving(server: ObjectServer) -> Iterator[ObjectServer]:
    ready, stop = threading.Event(), trio.Event()
    token: list[Any] = []

    async def run() -> None:
        async with trio.open_nursery() as nursery:
            await nursery.start(server.serve)
            token.append(trio.lowlevel.current_trio_token())
            ready.set()
            await stop.wait()
            nursery.cancel_scope.cancel()

    thread = threading.Thread(target=trio.run, args=(run,), daemon=True)
    thread.start()
    assert ready.wait(30)
    try:
        yield server
    finally:
        token[0].run_sync_soon(stop.set)
        thread.join(30)


def test_they_count_below_the_files_and_over_a_restart_without_an_api_server(
    node: DirectoryNode, daemon: Make, capsys: Any
) -> None:
    pod = node.add("be", shares=102)
    server = ObjectServer(lambda: 0.0)
    server.kinds.add(SLOS)
    server.make(f"{NODES}/n1", kind="Node")
    server.make(f"{SLOS}/n1", kind="NodeSLO", spec={"resourceUsedThresholdWithBE": {"enable": False, "x": 1}})

    def facts(item: Daemon) -> dict[str, Any]:
        result: dict[str, Any] = item.state("agent")["agent"]["node_settings"]
        return result

    def events(item: Daemon) -> list[str]:
        return [row["reason"] for row in item.state("history")["history"] if row["kind"] == "settings"]

    with serving(server):
        api = {"server": f"http://127.0.0.1:{server.port}", "watch_pods": "off"}
        item = daemon(node={"name": "n1"}, apiserver=api).up()
        wait_for(lambda: bounded(node, pod.main), told=item.tail)
        assert facts(item) == {"wanted": "off"}
        # By a reload: what the NodeSLO has is in force, and BE is not bounded any more.
        item.configure(node={"name": "n1"}, apiserver={**api, "node_settings": "koordinator"})
        assert item.call("POST", "/reload")[0] == 200
        wait_for(lambda: not bounded(node, pod.main), told=item.tail)
        assert facts(item)["taken"] == {SWITCH: "NodeSLO n1: resourceUsedThresholdWithBE.enable = False"}
        assert facts(item)["left"] == ["NodeSLO n1: resourceUsedThresholdWithBE.x = 1: not known to this version"]
        wait_for(lambda: len(events(item)) == 2, told=item.tail)
        assert set(events(item)) == {
            "the control plane's settings: 1 value not taken: bypassctl config explain apiserver.node_settings",
            f"the control plane's settings: {SWITCH} true -> false",
        }
        assert [line for line in item.problems() if "node settings" in line] == []
    item.stop()
    item.up()
    # Now nothing answers: the last ones count from the first plan on.
    wait_for(lambda: facts(item).get("problem"), told=item.tail)
    assert list(facts(item)["taken"]) == [SWITCH]
    assert not bounded(node, pod.main)
    wait_for(lambda: [line for line in item.problems() if "node settings" in line], told=item.tail)
    arguments = ["--config", item.config_file, "--store", node.store]
    assert main(["config", "show", SWITCH, *arguments]) == 0
    assert "[NodeSLO n1: resourceUsedThresholdWithBE.enable = False]" in capsys.readouterr().out
    # A file is above them.
    more = {**api, "node_settings": "koordinator"}
    item.configure(node={"name": "n1"}, apiserver=more, policies={"reclaimed": {"enabled": True}})
    assert item.call("POST", "/reload")[0] == 200
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert facts(item)["taken"] == {}
    # Off: as the files have it, and nothing of it is kept.
    item.configure(node={"name": "n1"}, apiserver=more)
    assert item.call("POST", "/reload")[0] == 200
    wait_for(lambda: not bounded(node, pod.main), told=item.tail)
    item.configure(node={"name": "n1"}, apiserver=api)
    assert item.call("POST", "/reload")[0] == 200
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    wait_for(lambda: facts(item)["source"] is None, told=item.tail)

"""Configuration, signals and the end: every problem at once, a bad reload changes nothing, a stop is quick."""

import signal
import socket
from collections.abc import Callable

import pytest

from tests.daemon.process import Daemon, bounded, run_to_end, wait_for
from tests.fakes.kubelet.api import Behaviour
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
KUBELET_S = 60.0
BAD = """\
mode: enforce
polices: {}
node: {resync_s: 0.1}
classes:
  selectors:
  - class: slow
    namespaces: [ci]
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_orderly_and_leaves_settings_in_force(
    node: DirectoryNode, daemon: Make, number: signal.Signals
) -> None:
    pod = node.add("be")
    item = daemon(constants={"kubelet.timeout_s": KUBELET_S}).up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    tree = node.tree()
    # A client that holds a connection, and a kubelet that hangs, do not delay it.
    node.kubelet.api.behaviour = Behaviour.HANGING
    with socket.socket(socket.AF_UNIX) as idle:
        idle.connect(item.http_socket)
        idle.sendall(b"GET /state HTTP/1.1\r\n")
        item.signal(number)
        # Before the kubelet's time for an answer is over.
        assert item.end_code(within_s=KUBELET_S / 2) == 0
    assert node.tree() == tree
    assert item.lines("warning", "error") == []


def test_a_stop_while_it_starts_is_heeded(node: DirectoryNode, daemon: Make) -> None:
    for _ in range(10):
        node.add()
    node.kubelet.api.behaviour = Behaviour.HANGING
    item = daemon(constants={"kubelet.timeout_s": 5.0})
    item.start()
    wait_for(lambda: item.lines("info"), told=lambda: "no line in the log")
    item.signal(signal.SIGTERM)
    assert item.end_code() == 0
    item.up()


def test_a_bad_configuration_is_every_problem_with_its_place_and_no_start(node: DirectoryNode, daemon: Make) -> None:
    item = daemon()
    with open(item.config_file, "w") as file:
        file.write(BAD)
    before = node.tree()
    for parts in (("run",), ("check-config",)):
        done = run_to_end(*parts, "--config", item.config_file)
        assert done.returncode == 2
        lines = done.stderr.splitlines()
        assert len(lines) == 3, done.stderr
        for line, place in zip(lines, ("2:1", "3:18", "6:12"), strict=True):
            assert line.startswith(f"{item.config_file}:{place}: "), line
    assert run_to_end("run", "--config", f"{item.directory}/none.yaml").returncode == 2
    assert node.tree() == before


def test_a_bad_reload_changes_nothing_and_a_good_one_works(node: DirectoryNode, daemon: Make) -> None:
    pod, ci = node.add("be"), node.add("job", qos="burstable", shares=512, namespace="ci")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    tree = node.tree()
    with open(item.config_file, "w") as file:
        file.write(BAD)
    item.signal(signal.SIGHUP)
    said = wait_for(lambda: item.said("new configuration invalid"), told=item.tail)
    assert len(said) == 1
    assert all(f"config.yaml:{place}:" in said[0] for place in ("2:1", "3:18", "6:12"))
    status, answer = item.call("POST", "/reload")
    assert status == 400
    assert "config.yaml:3:18:" in answer["error"]
    assert len(answer["problems"]) == 3
    assert node.tree() == tree
    assert item.pod(ci.uid)["class"] == "shared"
    item.configure(classes={"selectors": [{"class": "reclaimed", "namespaces": ["ci"]}]})
    item.signal(signal.SIGHUP)
    wait_for(lambda: bounded(node, ci.main), told=item.tail)
    assert item.pod(ci.uid)["class_source"] == "selector: ci"


def test_what_a_reload_says_is_in_force_is_in_force(node: DirectoryNode, daemon: Make) -> None:
    """Every setting either works after a reload or is named as one that needs a restart: none is ignored."""
    pod = node.add("be")
    with open(f"{node.root}/other.yaml", "w") as file:
        file.write(f"overrides:\n- class: shared\n  uid: {pod.uid}\n")
    item = daemon().up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    item.configure(
        operator_file=f"{node.root}/other.yaml",
        node={"sample_s": 7},
        writes={"foreign": {"rounds": 9}},
        http={"port": 9471},
    )
    item.signal(signal.SIGHUP)
    wait_for(lambda: item.pod(pod.uid)["class"] == "shared", told=item.tail)
    named = {row["setting"] for row in item.lines("warning") if "needs a restart" in row["msg"]}
    assert named == {"node.sample_s", "http.port"}

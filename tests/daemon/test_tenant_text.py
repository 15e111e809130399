"""Pods whose authors write as much as they may, and a kubelet's list that fails: classes, memory and the loop hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.kubelet.api import Behaviour, Item
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
KOORDINATOR = "koordinator.sh/qosClass"
STATUS = "scheduling.koordinator.sh/resource-status"
MIB = 1 << 20


@pytest.fixture
def listed(node: DirectoryNode, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Further pods of the kubelet's list, or such as replace the node's own of their uid."""
    more: list[dict[str, Any]] = []
    items = node.kubelet.api.items

    def both() -> list[Item]:
        uids = {fields["metadata"]["uid"] for fields in more}
        return [*(fields for fields in items() if fields["metadata"]["uid"] not in uids), *more]

    monkeypatch.setattr(node.kubelet.api, "items", both)
    return more


def peak_bytes(daemon: Daemon) -> int:
    text = Path(f"/proc/{daemon.pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmHWM:")) * 1024


def test_a_pod_keeps_its_class_when_its_labels_cannot_be_read_and_over_a_restart(
    node: DirectoryNode, daemon: Make, listed: list[dict[str, Any]]
) -> None:
    marked = node.add("marked", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    item = daemon().up()
    wait_for(lambda: bounded(node, marked.main), told=item.tail)
    listed.append({"metadata": {"uid": marked.uid, "labels": 7}})
    wait_for(lambda: item.pod(marked.uid)["problems"], told=item.tail)
    assert item.pod(marked.uid)["class"] == "reclaimed"
    assert bounded(node, marked.main)
    listed.clear()
    wait_for(lambda: not item.pod(marked.uid)["problems"], told=item.tail)
    node.kubelet.api.behaviour = Behaviour.BROKEN
    for end in (item.stop, item.kill):
        end()
        item.up()
        shown = item.pod(marked.uid)
        assert (shown["class"], shown["class_certain"], shown["last_class"]) == ("reclaimed", False, "reclaimed")
        assert shown["class_source"].startswith(f"label {KOORDINATOR}=BE")
        assert len(shown["problems"]) == 1
        assert bounded(node, marked.main)
    node.kubelet.api.behaviour = Behaviour.GOOD
    wait_for(lambda: item.pod(marked.uid)["class_certain"], told=item.tail)
    assert item.pod(marked.uid)["problems"] == []


def test_texts_of_the_greatest_length_delay_no_new_pod_and_fill_no_memory(
    node: DirectoryNode, daemon: Make, listed: list[dict[str, Any]]
) -> None:
    item = daemon().up()
    wait_for(lambda: item.pod, told=item.tail)
    before = peak_bytes(item)
    strides = json.dumps({"cpuset": "0-8191:1/1," * 20_000})
    hostile = [node.add(f"hostile-{number}", annotations={STATUS: strides}) for number in range(6)]
    around = {f"example.io/{number}": "x" * 100 for number in range(2200)}
    for number in range(200):
        metadata = {"uid": f"uid-{number}", "name": f"p{number}", "namespace": "n", "annotations": around}
        listed.append({"metadata": metadata, "spec": {"containers": [{"name": "main"}]}})
    requests = node.kubelet.api.requests
    marked = node.add("marked", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    wait_for(lambda: bounded(node, marked.main), told=item.tail)
    for pod in hostile:
        wait_for(lambda pod=pod: bounded(node, pod.main), told=item.tail)  # type: ignore[misc]
        wait_for(lambda pod=pod: item.pod(pod.uid)["problems"], told=item.tail)  # type: ignore[misc]
        (problem,) = item.pod(pod.uid)["problems"]
        assert STATUS in problem
    # Three lists of 46 MB each, in paced work beside the other parts of the suite.
    wait_for(lambda: node.kubelet.api.requests > requests + 2, within_s=90, told=item.tail)
    assert peak_bytes(item) - before < 24 * MIB
    assert len(item.said(STATUS)) == 0, "shown, not logged at each look"

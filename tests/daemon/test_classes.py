"""Who is BE and who is not, as each source reports it, and what follows on the real cgroups.

Precedence, conflicts and broken marks: tests/reconciler/pods/test_classify.py.
"""

import json
import os
from collections.abc import Callable
from typing import Any

from reconciler.pods.resources import EXTENDED_SPEC
from tests.daemon.process import Daemon, bounded, wait_for
from tests.fakes.node import DirectoryNode

Make = Callable[..., Daemon]
KATALYST = "katalyst.kubewharf.io/qos_level"
KOORDINATOR = "koordinator.sh/qosClass"
VOLCANO = "volcano.sh/qos-level"


def test_best_effort_pods_are_bounded_and_online_pods_are_left_alone(node: DirectoryNode, daemon: Make) -> None:
    be = node.add("be", process=True, shares=102)
    online = node.add("online", qos="burstable", shares=512, process=True)
    before = {box.id: node.cpus(box) + " " + node.shares(box) for box in online.boxes}
    item = daemon().up()
    wait_for(lambda: bounded(node, be.main), told=item.tail)
    assert node.quota(node.besteffort) == "100000"
    assert node.read(be.group, "cpu", "cpu.shares") == "1024", "as a whole CPU, beside BE pods only"
    assert {box.id: node.cpus(box) + " " + node.shares(box) for box in online.boxes} == before
    assert node.cpus(be.boxes[0]) == "0-1", "pause containers are not managed"
    assert item.pod(be.uid)["class_source"] == "kubernetes QoS: BestEffort"
    assert item.pod(online.uid)["class_source"] == "kubernetes QoS: Burstable"
    assert item.lines("warning", "error") == []
    assert item.problems() == []


MARKS: dict[str, tuple[dict[str, Any], str, str]] = {
    "katalyst-be": (
        {"annotations": {KATALYST: "reclaimed_cores"}},
        "reclaimed",
        f"annotation {KATALYST}=reclaimed_cores",
    ),
    "katalyst": ({"annotations": {KATALYST: "dedicated_cores"}}, "dedicated", f"annotation {KATALYST}=dedicated_cores"),
    "koordinator": ({"labels": {KOORDINATOR: "BE"}}, "reclaimed", f"label {KOORDINATOR}=BE"),
    "volcano": ({"annotations": {VOLCANO: "BE"}}, "reclaimed", f"annotation {VOLCANO}=BE"),
    "labelled": ({"labels": {"team": "batch"}}, "reclaimed", "selector: batch work"),
    "in-ci": ({"namespace": "ci"}, "reclaimed", "selector: ci"),
    "critical": ({"priority_class": "system-node-critical"}, "system", "priority class system-node-critical"),
}


def test_a_mark_makes_the_class_and_is_shown_as_its_source(node: DirectoryNode, daemon: Make) -> None:
    pods = {name: node.add(name, qos="burstable", shares=512, **marks) for name, (marks, _, _) in MARKS.items()}
    selectors = [
        {"class": "reclaimed", "name": "batch work", "labels": {"matchLabels": {"team": "batch"}}},
        {"class": "reclaimed", "name": "ci", "namespaces": ["ci"]},
    ]
    item = daemon(classes={"selectors": selectors}).up()

    def told() -> dict[str, tuple[str, str]]:
        return {pod["name"]: (pod["class"], pod["class_source"]) for pod in item.state("pods")["pods"]}

    wanted = {name: (pod_class, source) for name, (_, pod_class, source) in MARKS.items()}
    wait_for(lambda: told() == wanted, told=lambda: str(told()))
    for name, pod in pods.items():
        if MARKS[name][1] == "reclaimed":
            wait_for(lambda pod=pod: bounded(node, pod.main), told=item.tail)  # type: ignore[misc]
        else:
            assert (node.cpus(pod.main), node.shares(pod.main)) == ("0-1", "512")


def test_the_operators_file_has_the_last_word_and_a_bad_entry_is_one_message(node: DirectoryNode, daemon: Make) -> None:
    report = node.add("report", namespace="batch")
    other = node.add("other", namespace="batch")
    with open(f"{node.root}/classes.yaml", "w") as file:
        file.write(
            "overrides:\n"
            "- class: shared\n"
            "  pod: batch/report*\n"
            "  reason: month end\n"
            "- class: fast\n"
            "  pod: batch/other\n"
        )
    item = daemon().up()
    wait_for(lambda: item.pod(report.uid).get("class") == "shared", told=item.tail)
    wait_for(lambda: bounded(node, other.main), told=item.tail)
    assert item.pod(report.uid)["class_source"] == "override: batch/report* (classes.yaml:2)"
    assert node.cpus(report.main) == "0-1"
    assert len(item.said("classes.yaml:5:")) == 1
    assert len([line for line in item.problems() if "classes.yaml:5:" in line]) == 1


def test_static_manifests_tell_labels_where_no_api_answers(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("web-vm", qos="burstable", shares=512, listed=False)
    manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", "uid": pod.uid, "labels": {KOORDINATOR: "BE"}},
        "spec": {"containers": [{"name": "main", "image": "app:1"}]},
    }
    manifests = f"{node.root}/manifests"
    os.mkdir(manifests)
    with open(f"{manifests}/web.yaml", "w") as file:
        json.dump(manifest, file)
    with open(f"{manifests}/broken.yaml", "w") as file:
        file.write("kind: Pod\nmetadata: [not a mapping]\n")
    item = daemon(static_manifests=manifests, kubelet={"endpoint": "off"}).up()
    wait_for(lambda: item.pod(pod.uid).get("class") == "reclaimed", told=item.tail)
    assert item.pod(pod.uid)["class_source"] == f"label {KOORDINATOR}=BE"
    assert "manifest" in item.pod(pod.uid)["meta_source"]
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    assert len(item.said("broken.yaml")) == 1
    assert len([line for line in item.problems() if "broken.yaml" in line]) == 1


def test_labels_that_come_late_change_the_class_both_ways(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("late", qos="burstable", shares=512)
    item = daemon().up()
    assert item.pod(pod.uid)["class"] == "shared"
    pod.meta["labels"] = {KOORDINATOR: "BE"}
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    pod.meta["labels"] = {}
    wait_for(lambda: (node.cpus(pod.main), node.shares(pod.main)) == ("0-1", "512"), told=item.tail)
    assert item.pod(pod.uid)["class"] == "shared"


def test_without_any_api_the_bundles_and_paths_still_tell_names_and_qos(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("alone", namespace="shop", listed=False)
    item = daemon(kubelet={"endpoint": "off"}).up()
    wait_for(lambda: bounded(node, pod.main), told=item.tail)
    shown = item.pod(pod.uid)
    assert (shown["title"], shown["class_source"]) == ("shop/alone", "kubernetes QoS: BestEffort")
    assert {box["kind"] for box in shown["containers"]} == {"sandbox", "app"}
    assert os.path.isdir(node.path(pod.group, "cpu"))


def test_a_tenants_claim_gives_its_pod_no_more_than_the_others_have(node: DirectoryNode, daemon: Make) -> None:
    """The annotation that a webhook writes for batch resources: without one, its pod's tenant has written it."""
    batch = {"requests": {"kubernetes.io/batch-cpu": "1M"}, "limits": {"kubernetes.io/batch-cpu": "900"}}
    claim = {EXTENDED_SPEC: json.dumps({"containers": {"main": batch}})}
    greedy, fair = node.add("greedy", annotations=claim), node.add("fair")
    item = daemon().up()
    wait_for(lambda: bounded(node, fair.main), told=item.tail)
    wait_for(lambda: node.quota(greedy.main.group) == "90000", told=item.tail)
    shares = [node.read(pod.group, "cpu", "cpu.shares") for pod in (greedy, fair)]
    assert shares == ["1024", "1024"], "its limit bounds it, its request weighs nothing"
    (problem,) = item.pod(greedy.uid)["problems"]
    assert "as claims they count as a whole CPU at most" in problem
    item.stop()
    item = daemon(classes={"extended_spec_by_webhook": True}).up()
    wait_for(lambda: node.read(greedy.group, "cpu", "cpu.shares") != "1024", told=item.tail)
    assert node.read(greedy.group, "cpu", "cpu.shares") == str(1024 * (os.cpu_count() or 1)), (
        "at most what the node has"
    )
    assert item.pod(greedy.uid)["problems"] == []

"""Who is BE and who is not, as each source reports it, and what follows on the real cgroups."""

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
MIB = 1 << 20


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


def test_conflicting_marks_give_the_stronger_class_and_one_message(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("odd", annotations={KATALYST: "shared_cores"}, labels={KOORDINATOR: "BE"})
    item = daemon().up()
    wait_for(lambda: item.pod(pod.uid).get("class") == "shared", told=item.tail)
    problems = [line for line in item.problems() if "default/odd" in line]
    assert len(problems) == 1
    assert f"annotation {KATALYST}=shared_cores gives shared" in problems[0]
    assert f"label {KOORDINATOR}=BE gives reclaimed" in problems[0]
    assert node.cpus(pod.main) == "0-1"


def test_broken_marks_are_one_message_each_and_the_qos_counts(node: DirectoryNode, daemon: Make) -> None:
    broken = node.add("broken", annotations={KATALYST: "recliamed_cores"}, labels={KOORDINATOR: "be"})
    good = node.add("good", qos="burstable", shares=512, labels={KOORDINATOR: "BE"})
    item = daemon().up()
    wait_for(lambda: bounded(node, broken.main) and bounded(node, good.main), told=item.tail)
    problems = [line for line in item.problems() if "default/broken" in line]
    assert len(problems) == 2
    assert any("recliamed_cores" in line and "reclaimed_cores" in line for line in problems)
    assert any("'be'" in line and "LSE, LSR" in line for line in problems)
    assert [line for line in item.problems() if "default/good" in line] == []


def test_batch_resources_become_weight_quota_and_memory_limit(node: DirectoryNode, daemon: Make) -> None:
    sizes = {"kubernetes.io/batch-cpu": "300", "kubernetes.io/batch-memory": str(64 * MIB)}
    pod = node.add("batch", labels={KOORDINATOR: "BE"}, requests=sizes, limits=sizes)
    item = daemon().up()
    wait_for(lambda: node.shares(pod.main) == "307", told=item.tail)
    wait_for(lambda: node.quota(pod.main.group) == "30000", told=item.tail)
    wait_for(lambda: node.read(pod.main.group, "memory", "memory.limit_in_bytes") == str(64 * MIB), told=item.tail)
    assert node.read(pod.group, "cpu", "cpu.shares") == "307"


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


def test_an_override_in_the_configuration_outranks_every_mark(node: DirectoryNode, daemon: Make) -> None:
    pod = node.add("vip", annotations={KATALYST: "reclaimed_cores"})
    item = daemon(classes={"overrides": [{"class": "shared", "uid": pod.uid}]}).up()
    wait_for(lambda: item.pod(pod.uid).get("class") == "shared", told=item.tail)
    assert item.pod(pod.uid)["class_source"].startswith(f"override: uid {pod.uid} (")
    assert "config.yaml:" in item.pod(pod.uid)["class_source"]


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


def test_a_best_effort_pod_of_kube_system_is_unmanaged_while_its_priority_is_unknown(
    node: DirectoryNode, daemon: Make
) -> None:
    proxy, be = node.add("proxy", namespace="kube-system"), node.add("be")
    before = node.cpus(proxy.main)
    item = daemon(kubelet={"endpoint": "off"}).up()
    wait_for(lambda: bounded(node, be.main), told=item.tail)
    assert item.pod(proxy.uid)["class_source"] == "namespace kube-system, priority not known"
    assert node.cpus(proxy.main) == before

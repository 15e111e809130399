"""bypassctl plan for a described machine: no node, no root, no cgroups."""

import json
from pathlib import Path
from typing import Any

import pytest

from cgroupfs.cpuset import CpuSet
from cgroupfs.errors import InputError
from cgroupfs.naming import QosClass
from reconciler.cli import podsfile
from reconciler.cli.exits import Exit
from reconciler.cli.plan import blocks
from reconciler.cli.podsfile import read_pods_file
from reconciler.cli.screen import plain
from reconciler.settings.binder import ConfigError
from tests.fakes.marks import MARKS
from tests.reconciler.cli.conftest import Run

PODS = """\
- {name: db, namespace: shop, class: dedicated, requests: {cpu: 4, memory: 8Gi}, limits: {cpu: 4, memory: 8Gi}}
- {name: web, count: 3, requests: {cpu: 500m}, use: 300m}
- name: crunch
  count: 2
  labels: {koordinator.sh/qosClass: BE}
  containers:
  - {name: main}
  - {name: log, limits: {cpu: 100m}}
"""


def config(path: Path, text: str = "mode: enforce\n") -> str:
    file = path / "config.yaml"
    file.write_text(text)
    return str(file)


def pods(path: Path, text: str = PODS) -> str:
    file = path / "pods.yaml"
    file.write_text(text)
    return str(file)


def plan(run: Run, *message: str) -> dict[str, Any]:
    ran = run("plan", *message, "-o", "json")
    assert ran.code == 0, ran.err
    fields: dict[str, Any] = json.loads(ran.out)
    return fields


def test_a_described_machine_with_pods_is_planned_for(run: Run, tmp_path: Path) -> None:
    machine = "2 sockets x 8 cores x 2 threads; distance 10 21"
    fields = plan(run, "--machine", machine, "--pods", pods(tmp_path), "--config", config(tmp_path))
    assert fields["node"]["machine"] == machine
    assert (fields["node"]["described"], fields["node"]["cpus"], fields["node"]["mode"]) == (True, "0-31", "enforce")
    classes = {pod["title"]: (pod["class"], pod["qos"]) for pod in fields["pods"]}
    assert classes == {
        "shop/db": ("dedicated", "Guaranteed"),
        "default/web-0": ("shared", "Burstable"),
        "default/web-1": ("shared", "Burstable"),
        "default/web-2": ("shared", "Burstable"),
        "default/crunch-0": ("reclaimed", "Burstable"),
        "default/crunch-1": ("reclaimed", "Burstable"),
    }
    assert fields["budget"]["used"]["online_milli"] == 900
    assert fields["writes"] == []
    assert {setting["state"] for setting in fields["settings"]} == {"wanted"}
    drawn = {
        cpu["id"]: set(cpu["pools"])
        for socket in fields["placement"]["sockets"]
        for node in socket["nodes"]
        for core in node["cores"]
        for cpu in core["cpus"]
    }
    for name, text in fields["pools"].items():
        assert CpuSet(cpu for cpu, names in drawn.items() if name in names) == CpuSet.parse(text)


BUSY = """\
- {name: db, class: dedicated, requests: {cpu: 8}, limits: {cpu: 8}, use: 7500m}
- {name: web, count: 2, requests: {cpu: 1}, use: 500m}
- {name: batch, class: reclaimed}
"""


def test_the_budget_is_that_of_the_steady_state(run: Run, tmp_path: Path) -> None:
    """The busy CPUs of db are none of BE work's: 65 % of the other seven, less 1 of web (and of one grain)."""
    fields = plan(run, "--machine", "16 cores", "--pods", pods(tmp_path, BUSY), "--config", config(tmp_path))
    counted = CpuSet.parse(fields["pools"]["shared"]) - CpuSet.parse(fields["pools"]["reserved"])
    law = 650 * len(counted) - 1000
    assert law - 640 <= fields["budget"]["budget_milli"] <= law
    assert "steady state" in fields["sources"]["cpu"]


def test_a_described_machine_without_a_steady_state_is_a_problem(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(podsfile, "_MOST_STEPS", 2)
    fields = plan(run, "--machine", "16 cores", "--pods", pods(tmp_path, BUSY), "--config", config(tmp_path))
    assert any("no steady state" in problem for problem in fields["problems"])


def test_the_screen_shows_the_machine_and_the_drawing(run: Run, tmp_path: Path) -> None:
    assert "2 sockets x 2 nodes x 8 cores x 2 threads" in run("plan", "--help").out
    ran = run("plan", "--machine", "8 cores; numa off", "--pods", pods(tmp_path), "--config", config(tmp_path))
    assert ran.code == 0
    assert "machine  8 cores\n" in ran.out
    assert "socket 0  node 0  CPU 0-7\n" in ran.out
    assert "R  reserved" in ran.out
    assert "described machine: there are no files to compare or write\n" in ran.out
    assert "nothing to write" not in ran.out


def test_the_drawing_in_the_readme_is_what_is_printed(run: Run, tmp_path: Path) -> None:
    readme = (Path(__file__).parents[3] / "docs/tutorial.md").read_text().replace("\n    ", "\n")
    _, _, block = readme.partition("\n$ cat pods.yaml\n")
    listed, _, block = block.partition('\n$ bypassctl plan --machine "')
    machine, _, block = block.partition('" --pods pods.yaml\n...\n')
    drawing, end, _ = block.partition("\n...\n")
    assert end
    assert drawing.startswith("socket 0  node 0")
    ran = run("plan", "--machine", machine, "--pods", pods(tmp_path, listed), "--config", config(tmp_path, ""))
    assert f"\n{drawing}\n" in ran.out


def test_a_claim_that_is_cut_is_shown_with_its_rule_and_below_what_stood_against_it(run: Run, tmp_path: Path) -> None:
    text = "- {name: db, class: dedicated, requests: {cpu: 6}}\n- {name: big, class: dedicated, requests: {cpu: 9}}\n"
    ran = run("plan", "--machine", "8 cores", "--pods", pods(tmp_path, text), "--config", config(tmp_path, ""))
    (claim,) = (line for line in ran.out.splitlines() if line.startswith("dedicated default/big/main "))
    assert claim.split()[2:4] == ["9", "0"]
    assert "did not get its CPUs: requests 9 CPUs" in claim
    (problem,) = (line for line in ran.out.splitlines() if line.startswith("! "))
    assert problem.startswith("! dedicated/default.big/main has 0 of 9 CPUs: requests 9 CPUs")
    assert "of 8 CPUs on NUMA node 0: dedicated/default.db/main 6" in problem


def test_the_budget_s_reason_is_that_of_the_steady_state(run: Run, tmp_path: Path) -> None:
    """Three CPUs of use are on CPUs that BE work does not have."""
    text = "- {name: db, class: dedicated, requests: {cpu: 4}, use: 3}\n- {name: be, class: reclaimed}\n"
    fields = plan(run, "--machine", "8 cores", "--pods", pods(tmp_path, text), "--config", config(tmp_path, ""))
    assert "- 3.00 online + 3.00 on other CPUs" in fields["budget"]["reasons"]["budget"]
    assert 0.65 * 4000 - 320 < fields["budget"]["budget_milli"] <= 0.65 * 4000


def test_a_containers_own_pool_is_shown_by_the_name_of_its_pod(run: Run, live: Any) -> None:
    fields = plan(run, "--root", live.root)
    (owner,) = (name for name in fields["pools"] if name.startswith("dedicated/"))
    lines = plain(blocks(fields)).splitlines()
    title = next(pod["title"] for pod in fields["pods"] if pod["uid"] == owner.split("/")[1])
    assert f"1  dedicated {title}/main  7" in lines
    assert f"1  dedicated {owner.removeprefix('dedicated/')}  7" in plain(blocks({**fields, "pods": []})).splitlines()


def test_no_pods_are_an_empty_machine(run: Run, tmp_path: Path) -> None:
    fields = plan(run, "--machine", "4 cores", "--config", config(tmp_path))
    assert fields["pods"] == []
    assert fields["pools"]["shared"] == "0-3"
    assert "4 cores" in run("plan", "--machine", "4 cores", "--config", config(tmp_path)).out


def test_a_captured_node_has_the_drawing_and_the_text_of_its_machine(run: Run, live: Any) -> None:
    fields = plan(run, "--root", live.root)
    assert (fields["node"]["described"], fields["node"]["machine"]) == (False, "8 cores")
    cores = fields["placement"]["sockets"][0]["nodes"][0]["cores"]
    assert cores[0]["cpus"] == [{"id": 0, "pools": ["reserved"]}]
    assert "socket 0  node 0  CPU 0-7\n" in run("plan", "--root", live.root).out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--machine", "8 cors"), "machine: '8 cors': expected a number of sockets, nodes, cores, threads"),
        (("--machine", "8 cores", "--root", "/tmp"), "--machine and --root exclude each other"),
        (("--pods", "/nowhere"), "--pods requires --machine"),
        (("--machine", "8 cores", "--pods", "/nowhere/pods.yaml"), "/nowhere/pods.yaml: 'No such file or directory'"),
        (("--machine", "8 cores", "--config", "/nowhere/config.yaml"), "/nowhere/config.yaml"),
    ],
)
def test_a_mistake_is_one_line(run: Run, words: tuple[str, ...], told: str) -> None:
    ran = run("plan", *words)
    assert ran.code == Exit.USAGE
    assert told in ran.err
    assert len(ran.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("pods: {}", ":1:1: expected a list; got a section with keys"),
        ("- {namespace: shop}", ":1:3: [0]: missing key 'name'"),
        ("- {name: a, clas: shared}", ":1:13: [0].clas: unknown key 'clas'; did you mean 'class'?"),
        ("- {name: a, class: slow}", "expected one of system, dedicated, shared, reclaimed"),
        ("- {name: a, qos: Best}", "expected one of Guaranteed, Burstable, BestEffort"),
        ("- {name: a, count: 0}", "count"),
        ("- {name: a, use: much}", "expected CPUs in use, such as 1500m or 2"),
        ("- {name: a, use: -1}", "expected CPUs in use"),
        ("- {name: a}\n- {name: a}", "'default/a': expected each pod once"),
        ("- {name: a, requests: {cpu: 1}, containers: [{name: b}]}", "requests and limits in each container"),
        ("- [", ":2:1: not YAML"),
        ("{bad", "expected what kubectl get pods -o json writes"),
    ],
)
def test_a_pods_file_with_a_mistake_is_refused_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises((InputError, ConfigError)) as error:
        read_pods_file(pods(tmp_path, text), MARKS)
    assert str(tmp_path) in str(error.value)
    assert told in str(error.value)


def test_a_quantity_that_is_none_spoils_itself_only(tmp_path: Path) -> None:
    result, problems = read_pods_file(pods(tmp_path, "- {name: a, requests: {cpu: lots, memory: 1Gi}}"), MARKS)
    assert result[0].meta.containers[0].requests.memory_bytes == 1 << 30
    assert problems == [
        "default/a: container main: requests: cpu: 'lots': expected a quantity such as 100m, 4Gi, 1e3 or 0.5"
    ]


@pytest.mark.parametrize(
    ("line", "qos"),
    [
        ("{name: a}", QosClass.BESTEFFORT),
        ("{name: a, requests: {cpu: 1}}", QosClass.BURSTABLE),
        ("{name: a, limits: {cpu: 1, memory: 1Gi}}", QosClass.GUARANTEED),
        ("{name: a, requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 2, memory: 1Gi}}", QosClass.BURSTABLE),
        ("{name: a, limits: {cpu: 1}}", QosClass.BURSTABLE),
        ("{name: a, requests: {kubernetes.io/batch-cpu: 1000}}", QosClass.BESTEFFORT),
        ("{name: a, qos: Guaranteed}", QosClass.GUARANTEED),
    ],
)
def test_the_qos_class_is_the_one_that_kubernetes_would_give(tmp_path: Path, line: str, qos: QosClass) -> None:
    ((pod,), problems) = read_pods_file(pods(tmp_path, f"- {line}"), MARKS)
    assert (pod.qos, problems) == (qos, [])


def test_kubectls_own_list_is_read_with_the_label_that_the_configuration_names(run: Run, tmp_path: Path) -> None:
    labels = {**{f"other-{number}": "x" for number in range(200)}, "team": "batch"}
    uid = "aaaaaaaa-1111-4111-8111-111111111111"
    item = {
        "metadata": {"name": "web-0", "namespace": "shop", "uid": uid, "labels": labels},
        "spec": {"containers": [{"name": "main", "resources": {"requests": {"cpu": "2"}}}]},
        "status": {
            "qosClass": "Burstable",
            "containerStatuses": [{"name": "main", "containerID": "containerd://ab12"}],
        },
    }
    file = pods(tmp_path, json.dumps({"apiVersion": "v1", "kind": "List", "items": [item]}))
    ((pod,), problems) = read_pods_file(file, MARKS)
    assert (pod.meta.name, pod.qos, pod.pod_class, problems) == ("web-0", QosClass.BURSTABLE, None, [])
    rules = "classes: {overrides: [{class: reclaimed, labels: {matchLabels: {team: batch}}}]}\n"
    for text, kind in (("mode: enforce\n", "shared"), (rules, "reclaimed")):
        fields = plan(run, "--machine", "8 cores", "--pods", file, "--config", config(tmp_path, text))
        assert [(entry["title"], entry["class"]) for entry in fields["pods"]] == [("shop/web-0", kind)]

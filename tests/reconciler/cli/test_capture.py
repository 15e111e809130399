"""capture and plan: a node as a tree, and the same answers from the tree as from the node."""

import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cgroupfs.hierarchy import Hierarchy
from reconciler.cli import recorded
from reconciler.cli.exits import Exit
from reconciler.cli.recorded import CriAnswers, read_recorded
from state.model import PodMeta
from state.topology_sysfs import read_topology
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BOX, SECRET, USAGE, WEB, LiveNode, container_id, group
from tests.fakes.marks import MARKS
from tests.reconciler.cli.conftest import Ran, Run

FIXTURES = Path(__file__).parents[2] / "fixtures"


def plan(run: Run, root: str, *message: str) -> dict[str, Any]:
    ran = run("plan", "--root", root, "-o", "json", *message)
    assert (ran.code, ran.err) == (Exit.OK, "")
    answer: dict[str, Any] = json.loads(ran.out)
    return answer


def capture(run: Run, root: str, target: str) -> Ran:
    ran = run("capture", target, "--root", root, "--interval", "0")
    assert (ran.code, ran.err) == (Exit.OK, "")
    return ran


def steady(document: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between a node and its copy by being a copy."""
    return {key: value for key, value in document.items() if key not in {"at", "captured_at", "sources", "node"}}


@pytest.mark.parametrize("mode", ["v1", "v2"])
def test_a_capture_behaves_as_the_node(run: Run, tmp_path: Path, mode: Mode) -> None:
    live = LiveNode(tmp_path, mode)
    before = plan(run, live.root)
    capture(run, live.root, str(tmp_path / "captured"))
    after = plan(run, str(tmp_path / "captured"))
    assert steady(after) == steady(before)
    assert after["node"]["cgroups"] == mode
    assert {setting["state"] for setting in after["settings"]} == {"would write"}
    assert Hierarchy.detect(str(tmp_path / "captured")).versions() == Hierarchy.detect(live.root).versions()
    assert read_topology(str(tmp_path / "captured")) == read_topology(live.root)


EDGECORE = f"""\
modules:
  edgeHub: {{token: {SECRET}}}
  edged: {{tailoredKubeletConfig: {{reservedSystemCPUs: 0-2}}}}
"""


@pytest.mark.parametrize(
    ("words", "path", "text"),
    [
        ("k3s\0server\0", "etc/rancher/k3s/config.yaml", f"token: {SECRET}\nkubelet-arg: [reserved-cpus=0-2]\n"),
        ("edgecore\0--config=/e.yaml\0", "e.yaml", EDGECORE),
    ],
    ids=["k3s", "edgecore"],
)
def test_a_capture_has_the_settings_of_a_kubelet_inside_another_program_and_no_secret(
    run: Run, live: LiveNode, tmp_path: Path, words: str, path: str, text: str
) -> None:
    live.put("proc/40/cmdline", words)
    live.put(path, text)
    before = plan(run, live.root)
    assert before["pools"]["reserved"] == "0-2"
    captured = tmp_path / "captured"
    capture(run, live.root, str(captured))
    assert plan(run, str(captured))["pools"] == before["pools"]
    kept = [file for file in captured.rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()]
    assert kept == []
    (finding,) = [
        item
        for item in json.loads(run("doctor", "--root", str(captured), "-o", "json").out)["findings"]
        if item["check"] == "kubelet"
    ]
    assert finding["state"] == "ok", finding


def test_the_plan_is_what_the_agent_does(run: Run, live: LiveNode, tmp_path: Path) -> None:
    """The capture of an untouched node, planned offline, and the agent on that node: same settings, same pools."""
    live.put(recorded.USAGE, msgspec.json.encode(USAGE).decode())
    planned = plan(run, live.root)
    assert planned["budget"]["used"] == {
        "busy_milli": 3000,
        "online_milli": 2000,
        "reclaimed_milli": 700,
        "system_milli": 300,
        "host_be_milli": 0,
    }
    document = live.document()
    assert planned["pools"] == document["pools"]
    wanted = {(setting["path"], setting["knob"]): setting["value"] for setting in document["settings"]}
    assert {(setting["path"], setting["knob"]): setting["value"] for setting in planned["settings"]} == wanted
    written = {(file["path"], file["file"]): file["wanted"] for file in document["files"]}
    assert {(write["path"], write["file"]): write["text"] for write in planned["writes"]} == written
    # Planned again where the agent has been: its pools are remembered, as a second life of the agent does.
    again = plan(run, live.root)
    assert again["sources"]["store"] == "/var/lib/bypassd/state.db"
    second = live.document()
    assert again["pools"] == second["pools"] != document["pools"]
    assert again["budget"]["budget_milli"] == second["budget"]["budget_milli"]


def test_a_capture_holds_no_secret_and_is_for_its_owner_only(run: Run, live: LiveNode, tmp_path: Path) -> None:
    live.put("etc/kubernetes/manifests/web.yaml", f"kind: Pod\nmetadata: {{name: x}}\nspec: {{env: [{SECRET}]}}\n")
    live.put("etc/containerd/config.toml", f'version = 2\n[auth]\npassword = "{SECRET}"\n')
    live.put("var/lib/kubelet/pki/kubelet.key", SECRET)
    live.put("etc/bypassd/config.yaml", "kubelet:\n  token_file: /etc/bypassd/token\n")
    live.put("etc/bypassd/token", SECRET)
    with open(f"{live.root}/var/lib/kubelet/config.yaml", "a") as file:
        file.write("staticPodPath: /etc/kubernetes/manifests\n")
    target = tmp_path / "captured"
    capture(run, live.root, str(target))
    paths = [path for path in target.rglob("*") if path.is_file()]
    assert not [path for path in paths if SECRET in path.read_text(errors="replace")]
    names = {str(path.relative_to(target)) for path in paths}
    assert {"etc/kubernetes/manifests/web.yaml", "etc/containerd/config.toml", "etc/bypassd/config.yaml"} <= names
    assert not {"etc/bypassd/token", "var/lib/kubelet/pki/kubelet.key"} & names
    assert f"run/containerd/runc/k8s.io/{container_id(WEB)}/state.json" in names
    assert f"sys/fs/cgroup/cpuset{group(WEB)}/cpuset.cpus" in names
    assert {oct(path.stat().st_mode & 0o777) for path in paths} == {"0o600"}
    assert oct(target.stat().st_mode & 0o777) == "0o700"


def test_the_plan_uses_the_captured_configuration_and_names_it(run: Run, live: LiveNode, tmp_path: Path) -> None:
    """The node's agent runs with a file of its own: without it the plan has other settings, and other writes."""
    live.put("opt/agent/own.yaml", "policies:\n  reclaimed: {enabled: false}\n")
    live.put("opt/agent/conf.d/more.yaml", "mode: enforce\n")
    own, archive = f"{live.root}/opt/agent/own.yaml", str(tmp_path / "node.tar.gz")
    assert run("capture", archive, "--root", live.root, "--interval", "0", "--config", own).code == Exit.OK
    expected, defaults = plan(run, live.root, "--config", own), plan(run, live.root)
    assert expected["settings"] != defaults["settings"]
    captured = plan(run, archive)
    assert steady(captured) == steady(expected)
    assert captured["node"]["mode"] == "enforce"
    assert captured["node"]["config"] == "/opt/agent/own.yaml, /opt/agent/conf.d/more.yaml"
    assert defaults["node"]["config"].startswith("defaults")
    other = tmp_path / "other.yaml"
    other.write_text("mode: observe\n")
    named = plan(run, archive, "--config", str(other))
    assert (named["node"]["config"], named["writes"]) == (str(other), defaults["writes"])


def test_a_capture_names_no_configuration_outside_of_itself(run: Run, live: LiveNode, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("mode: enforce\n")
    for said in ("../../own.yaml", "/../own.yaml", 7, "", "a\0b", "x" * 10_000, ["own.yaml"]):
        live.put(recorded.ABOUT, json.dumps({"version": "1", "node": "n", "at": 1.0, "files": 1, "config": said}))
        ran = run("doctor", "--root", live.root, "-o", "json")
        (row,) = [row for row in json.loads(ran.out)["findings"] if row["check"] == "config"]
        assert row["found"] == "mode observe; no file: defaults apply", said


def test_an_archive_is_a_tree_too(run: Run, live: LiveNode, tmp_path: Path) -> None:
    archive = str(tmp_path / "node.tar.gz")
    ran = capture(run, live.root, archive)
    assert f"bypassctl plan --root {archive}" in ran.out
    with tarfile.open(archive) as opened:
        assert recorded.ABOUT in opened.getnames()
        assert not [name for name in opened.getnames() if name.startswith(("/", ".."))]
    assert steady(plan(run, archive)) == steady(plan(run, live.root))
    assert run("capture", archive, "--root", live.root).code == Exit.USAGE, "never overwritten"
    assert sorted(os.listdir(tmp_path)) == ["node", "node.tar.gz"]


def test_a_directory_with_something_in_it_is_not_used(run: Run, live: LiveNode, tmp_path: Path) -> None:
    ran = run("capture", live.root, "--root", live.root)
    assert (ran.code, ran.err) == (Exit.USAGE, f"bypassctl: {live.root}: is not empty\n")
    assert run("capture", str(tmp_path / "x"), "--interval", "-1").code == Exit.USAGE
    assert run("capture", "/proc/nonsense/x", "--root", live.root).code == Exit.USAGE
    assert run("capture", "/proc/nonsense/x.tar.gz", "--root", live.root).code == Exit.USAGE


def test_a_missing_part_is_reported_and_does_not_stop_the_capture(run: Run, live: LiveNode, tmp_path: Path) -> None:
    live.put("etc/kubernetes/manifests/broken.yaml", "kind: [")
    with open(f"{live.root}/var/lib/kubelet/config.yaml", "a") as file:
        file.write("staticPodPath: /etc/kubernetes/manifests\n")
    ran = run("capture", str(tmp_path / "captured"), "--root", live.root, "--interval", "0", "-o", "json")
    assert ran.code == Exit.OK
    message = json.loads(ran.out)
    assert message["problems"] == ["/etc/kubernetes/manifests/broken.yaml: not captured, cannot be masked: not YAML"]
    assert message["files"] > 100


def test_recorded_answers_classify_the_pods_and_survive_being_captured_again(
    run: Run, live: LiveNode, tmp_path: Path
) -> None:
    labels = {"koordinator.sh/qosClass": "BE"}
    web = PodMeta(uid=WEB, source="cri", namespace="shop", name="web-0", labels=labels, annotations={})
    live.put(recorded.CRI, msgspec.json.encode(CriAnswers(pods=(web,))).decode())
    shutil.copy(FIXTURES / "meta/kubelet-pods.json", f"{live.root}/{recorded.KUBELET_PODS}")
    capture(run, live.root, str(tmp_path / "captured"))
    text = (tmp_path / "captured" / recorded.KUBELET_PODS).read_text()
    assert ("while :" in text, "qos.example.io/class" in text) == (False, True), "masked again"
    fields = plan(run, str(tmp_path / "captured"))
    (pod,) = [pod for pod in fields["pods"] if pod["uid"] == WEB]
    assert (pod["class"], pod["meta_source"]) == ("reclaimed", "cri+bundle+cgroup")
    assert fields["sources"]["kubelet"] == "6 pods"
    assert fields["sources"]["cri"] == "1 pod"
    node = read_recorded(str(tmp_path / "captured"), MARKS)
    assert node.cri is not None
    assert node.cri.pods == (web,)


def test_a_hold_and_a_refusal_of_the_kernel_are_in_the_plan(run: Run, live: LiveNode) -> None:
    live.document()
    live.kernel.write(f"{live.root}/sys/fs/cgroup/cpu/kubepods/besteffort", "cpu.cfs_quota_us", "-1")
    fields = plan(run, live.root)
    assert [(write["file"], write["text"]) for write in fields["writes"]] == [
        ("cpu.cfs_quota_us", fields["writes"][0]["text"])
    ]
    out = run("plan", "--root", live.root).out
    assert "plan for a copied node; configured mode observe" in out
    assert "writes in this order (1)" in out
    assert "cpu.quota" in out


def test_what_is_not_a_node_is_one_message(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    ran = run("plan", "--root", str(tmp_path / "empty"))
    assert ran.code == Exit.UNREACHABLE
    assert ran.err.count("\n") == 1
    assert run("plan", "--root", str(tmp_path / "missing")).code == Exit.USAGE
    (tmp_path / "bad.tar.gz").write_bytes(b"nonsense")
    assert run("plan", "--root", str(tmp_path / "bad.tar.gz")).code == Exit.USAGE


def test_recorded_answers_of_another_kind_are_refused(run: Run, live: LiveNode) -> None:
    live.put(recorded.KUBELET_PODS, '{"kind": "Secret"}')
    ran = run("plan", "--root", live.root)
    assert ran.code == Exit.USAGE
    assert "kubelet-pods.json" in ran.err
    live.put(recorded.KUBELET_PODS, '{"items": null, "kind": "PodList"}')
    live.put(recorded.CRI, "[]")
    assert run("plan", "--root", live.root).code == Exit.USAGE


# A recording of a real node, laid out as files


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """containerd 1.6 and a kubelet 1.22 with the static policy on two CPUs, one Guaranteed pod with CPU 1."""
    root = tmp_path / "recording"
    groups = json.loads((FIXTURES / "cgroups/static-02-guaranteed-int.json").read_text())
    controllers = ("cpuset", "cpu", "memory", "pids")
    mounts = "".join(
        f"{number} 20 0:{number} / /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
        for number, name in enumerate(controllers, 30)
    )
    files = {
        "proc/self/mountinfo": f"20 1 0:20 / / rw - ext4 /dev/root rw\n{mounts}",
        "sys/devices/system/cpu/online": "0-1\n",
        "var/lib/kubelet/cpu_manager_state": (FIXTURES / "kubelet/static-one-exclusive/cpu_manager_state").read_text(),
        "var/lib/kubelet/config.yaml": "cgroupDriver: cgroupfs\ncpuManagerPolicy: static\nreservedSystemCPUs: '0'\n",
        recorded.KUBELET_PODS: (FIXTURES / "meta/kubelet-pods.json").read_text(),
    }
    for path, values in groups.items():
        for file, text in values.items():
            if file != "nprocs":
                files[f"sys/fs/cgroup/{file.partition('.')[0]}{path}/{file}"] = f"{text}\n"
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return str(root)


def test_a_recorded_node_is_planned_for(run: Run, recording: str, tmp_path: Path) -> None:
    fields = plan(run, recording)
    assert fields["node"] | {"name": None} == {
        "name": None,
        "described": False,
        "machine": "2 cores",
        "mode": "observe",
        "cgroups": "v1",
        "driver": "cgroupfs",
        "kubepods": "/kubepods",
        "cpus": "0-1",
        "kubelet_policy": "static",
        "config": "defaults (no file)",
    }
    (owner,) = [name for name in fields["pools"] if name.startswith("dedicated/")]
    assert fields["pools"][owner] == "1"
    classes = {pod["class"] for pod in fields["pods"]}
    assert "dedicated" in classes
    capture(run, recording, str(tmp_path / "captured"))
    assert steady(plan(run, str(tmp_path / "captured"))) == steady(fields)


def test_the_plan_has_the_documented_keys_and_is_the_same_each_time(run: Run, live: LiveNode, tmp_path: Path) -> None:
    capture(run, live.root, str(tmp_path / "captured"))
    fields, other = plan(run, str(tmp_path / "captured")), plan(run, str(tmp_path / "captured"))
    assert {**fields, "at": 0} == {**other, "at": 0}
    text = (FIXTURES.parents[1] / "docs/plan.md").read_text()
    for key in (
        *fields,
        *fields["node"],
        *fields["sources"],
        *fields["settings"][0],
        *fields["writes"][0],
        *fields["budget"],
        *fields["resources"],
        *fields["resources"]["memory"],
        *fields["resources"]["starts"],
        *fields["pods"][0],
    ):
        assert f"`{key}`" in text or f"`{key}[]`" in text or f" {key}" in text, key


def test_an_archive_is_not_written_through_a_link_that_waits_under_its_name(
    run: Run, live: LiveNode, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "node.tar.gz.part").symlink_to(victim)
    capture(run, live.root, str(tmp_path / "node.tar.gz"))
    assert victim.read_text() == "mine"
    assert not (tmp_path / "node.tar.gz").is_symlink()


@pytest.mark.parametrize(("at", "level", "named"), [(36_000.0, "cpu+memory", " (window w)"), (32_400.0, "cpu", "")])
def test_the_plan_of_a_captured_node_is_that_of_the_window_of_its_time(
    run: Run, live: LiveNode, tmp_path: Path, at: float, level: str, named: str
) -> None:
    own, fixed = tmp_path / "own.yaml", tmp_path / "fixed.yaml"
    own.write_text("protect: cpu\nwindows: [{name: w, when: 'daily 10:00-11:00 UTC', protect: cpu+memory}]\n")
    fixed.write_text(f"protect: {level}\n")
    day = 20_000 * 86_400.0
    live.put(recorded.ABOUT, json.dumps({"version": "1", "node": "n", "at": day + at, "files": 1}))
    found, expected = plan(run, live.root, "--config", str(own)), plan(run, live.root, "--config", str(fixed))
    assert found["node"]["config"] == f"{own}{named}"
    assert steady(found) == steady(expected)
    fixed.write_text("protect: full\n" if level == "cpu" else "protect: cpu\n")
    assert steady(plan(run, live.root, "--config", str(fixed))) != steady(expected)


def test_a_window_without_a_zone_has_that_of_the_captured_node(run: Run, live: LiveNode, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    own.write_text("windows: [{name: w, when: 'daily 10:00-11:00', protect: cpu}]\n")
    about = {"version": "1", "node": "n", "at": 20_000 * 86_400.0 + 5 * 3600, "files": 1}
    for zone in ("Asia/Kathmandu", "UTC", "Europe/Nowhere", "../../etc/passwd", ""):
        live.put(recorded.ABOUT, json.dumps({**about, "zone": zone}))
        named = " (window w)" if zone == "Asia/Kathmandu" else ""
        assert plan(run, live.root, "--config", str(own))["node"]["config"] == f"{own}{named}", zone


def test_a_capture_has_the_name_of_the_nodes_zone(run: Run, live: LiveNode, tmp_path: Path) -> None:
    os.makedirs(f"{live.root}/etc", exist_ok=True)
    os.symlink("/usr/share/zoneinfo/America/Santiago", f"{live.root}/etc/localtime")
    capture(run, live.root, str(tmp_path / "captured"))
    assert json.loads((tmp_path / "captured" / recorded.ABOUT).read_text())["zone"] == "America/Santiago"


@pytest.mark.parametrize("depth", [60, 1200])
def test_groups_that_a_container_nests_without_end_are_left_out(
    run: Run, live: LiveNode, tmp_path: Path, depth: int
) -> None:
    live.document()
    nested = f"{live.root}/sys/fs/cgroup/cpu{BOX}/a"
    made = os.open(os.path.dirname(nested), os.O_PATH)
    for _ in range(depth):
        os.mkdir("a", dir_fd=made)
        inner = os.open("a", os.O_PATH, dir_fd=made)
        with open(os.open("cpu.shares", os.O_CREAT | os.O_WRONLY, dir_fd=inner), "w") as file:
            file.write("2\n")
        os.close(made)
        made = inner
    os.close(made)
    try:
        ran = run("capture", f"{tmp_path}/x.tar.gz", "--root", live.root, "-o", "json")
    finally:
        # The library is recursive.
        subprocess.run(["rm", "-rf", nested], check=True)
    assert ran.code == Exit.OK
    assert json.loads(ran.out)["problems"] == ["/sys/fs/cgroup/cpu/kubepods: 1 group too deep or too many"]
    assert run("plan", "--root", f"{tmp_path}/x.tar.gz").code == Exit.OK


def test_groups_beyond_what_an_archive_may_have_are_left_out(
    run: Run, live: LiveNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live.document()
    monkeypatch.setattr("reconciler.cli.capture._MOST_FILES", 0)
    problems = json.loads(run("capture", f"{tmp_path}/x.tar.gz", "--root", live.root, "-o", "json").out)["problems"]
    assert "/sys/fs/cgroup/cpu/kubepods: 3 groups too deep or too many" in problems

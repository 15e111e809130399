"""The runtime's order, timing and files against the recorded trace; a real start against the kernel."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from reconciler.sources.bundles import parse_bundle, parse_state
from state.model import ContainerKind, RuntimeSpec
from tests.e2e.pods import ContainerSpec, best_effort, burstable
from tests.e2e.statewatch import StateWatch
from tests.fakes.kubelet.fake import RuntimeFailed, Version
from tests.fakes.oci import bundle
from tests.node import runc
from tests.node.scripted import ScriptedNode, resources

RECORDED = json.loads((Path(__file__).parents[1] / "fixtures/node/runc-create.json").read_text())["containers"]
TRACED = ("cpuset", "devices", "memory", "cpu", "pids", "unified")
MOUNTS = {name: f"/{name}" for name in TRACED}
ASKED: dict[str, dict[str, Any]] = {
    "sandbox": {"cpu": {"shares": 2}},
    "main": {"memory": {"limit": 67108864}, "cpu": {"shares": 512, "period": 100000, "quota": 50000, "cpus": "0"}},
    "side": {"memory": {}, "cpu": {"shares": 2, "period": 100000, "cpus": "0"}},
}
GROUP = "/kubepods/burstable/pod33333333-3333-4333-8333-333333333333/" + "a" * 64
UNPRIVILEGED = os.geteuid() != 0
needs_root = pytest.mark.skipif(UNPRIVILEGED, reason="REAL KERNEL TEST NOT RUN: cgroups are made by root only")


class Noting:
    """Hands that do nothing but note; the parent's cpuset is the recorded one."""

    def __init__(self) -> None:
        self.steps: list[list[str]] = []
        self._began = time.monotonic()
        self.at: dict[str, float] = {}
        self._shares = ""
        self._limit = 0x7FFFFFFFFFFFF000

    def mkdir(self, path: str) -> None:
        if path.endswith(GROUP):
            self.steps.append(["mkdir", path.split("/")[1]])

    def rmdir(self, path: str) -> None:
        self.steps.append(["rmdir", path.split("/")[1]])

    def read(self, directory: str, file: str) -> str:
        if file == "memory.limit_in_bytes":
            return f"{self._limit}\n"
        return {"cpuset.cpus": "0-1\n", "cpuset.mems": "0\n", "cpu.shares": self._shares}[file]

    def write(self, directory: str, file: str, text: str) -> None:
        if file == "cpu.shares":
            self._shares = text
        elif file == "memory.limit_in_bytes":
            self._limit = int(text)
        if file != "cgroup.procs":
            self.steps.append(["write", file, text])
            self.at.setdefault(f"{file} {len(self.steps)}", 1000 * (time.monotonic() - self._began))


@pytest.mark.parametrize("which", ["sandbox", "main", "side"])
def test_directories_and_values_come_in_the_recorded_order(which: str) -> None:
    hands = Noting()
    runc.Runtime(hands, MOUNTS, scale=0).create(GROUP, ASKED[which], 4711)
    wanted = [step[:-1] for step in RECORDED[which] if step[0] != "rename"]
    assert hands.steps == wanted


def test_the_set_is_not_written_before_its_recorded_time() -> None:
    hands = Noting()
    runc.Runtime(hands, MOUNTS).create(GROUP, ASKED["main"], 4711)
    shares_at = next(at for name, at in hands.at.items() if name.startswith("cpu.shares"))
    assert runc.SET_MS <= shares_at < 5 * runc.SET_MS


def test_directories_go_in_one_round_and_each_once() -> None:
    hands = Noting()
    runc.Runtime(hands, MOUNTS).remove(GROUP)
    assert sorted(step[1] for step in hands.steps) == sorted(TRACED)


def test_a_weight_changed_in_between_fails_as_in_runc() -> None:
    class Disturbed(Noting):
        def read(self, directory: str, file: str) -> str:
            return "2\n" if file == "cpu.shares" else super().read(directory, file)

    with pytest.raises(ValueError, match="the maximum allowed cpu-shares is 2"):
        runc.Runtime(Disturbed(), MOUNTS, scale=0).set(GROUP, ASKED["main"])


def test_v2_values_are_written_in_their_own_files() -> None:
    texts = {value.file: value.text for value in runc.values(ASKED["main"], v2=True)}
    memory = {"memory.swap.max": "0", "memory.max": "67108864"}
    assert texts == {"cpuset.cpus": "0", "cpu.weight": "20", "cpu.max": "50000 100000"} | memory


def test_the_bound_of_memory_and_swap_never_is_below_that_of_memory() -> None:
    hands = Noting()
    runtime = runc.Runtime(hands, MOUNTS, scale=0)
    for limit in (1 << 20, 2 << 20, 1 << 20):
        runtime.set(GROUP, {"memory": {"limit": limit}})
    names = ["swap" if "memsw" in file else "memory" for _, file, _ in hands.steps]
    assert names == ["memory", "swap", "swap", "memory", "memory", "swap"]


def _config(spec: ContainerSpec | None) -> dict[str, Any]:
    request = resources(spec, "0") if spec is not None else {"cpu": {"shares": 2}}
    return bundle(
        uid="33333333-3333-4333-8333-333333333333",
        namespace="shop",
        pod="web",
        group=GROUP,
        resources=request,
        container=spec.name if spec is not None else "",
        sandbox="b" * 64,
    )


def test_the_agent_reads_the_same_from_bundle_and_state() -> None:
    spec = ContainerSpec(cpu_request=500, cpu_limit=500, memory_limit=64 << 20)
    fields = _config(spec)
    bundle = parse_bundle(json.dumps(fields).encode(), "a" * 64)
    state = parse_state(json.dumps(runc.state("a" * 64, 4711, fields, MOUNTS, "/bundle")).encode())
    wanted = RuntimeSpec(
        cpus="0", shares=512, quota_us=50000, period_us=100000, memory_bytes=64 << 20, swap_bytes=64 << 20
    )
    assert state.spec == wanted
    assert bundle.spec.shares == 512
    assert (bundle.kind, bundle.pod_name, bundle.namespace) == (ContainerKind.APP, "web", "shop")
    assert state.group == bundle.group == GROUP
    assert parse_bundle(json.dumps(_config(None)).encode(), "b" * 64).kind is ContainerKind.SANDBOX


@pytest.mark.kernel
@needs_root
def test_a_started_container_has_its_values_signals_before_exec_and_again_with_an_update() -> None:
    with ScriptedNode.start(cgroup_root="/bypassd-test-node-runc") as node:
        with StateWatch(node.containerd.runc_root) as watch:
            web = node.run_pod(burstable("web", cpu_request=250, cpu_limit=500, run=("pause",)))["main"]
            assert (web.read("cpu", "cpu.shares"), web.read("cpu", "cpu.cfs_quota_us")) == ("256", "50000")
            pid = web.init_pid()
            assert web.read("memory", "cgroup.procs") == str(pid)
            deadline = time.monotonic() + 60
            while Path(f"/proc/{pid}/comm").read_text().strip() == runc.INIT_NAME:
                assert time.monotonic() < deadline, "the program is never exec'ed"
                time.sleep(0.005)
            first = watch.wait(web.id)
            with open(f"{web.directory('cpu')}/cpu.shares", "w", encoding="utf-8") as file:
                file.write("77")
            node.kubelet.version = Version.STATIC_121
            assert node.kubelet.tick() == [web.id]
            assert web.read("cpu", "cpu.shares") == "256"
            assert watch.wait(web.id, times=2) > first
        top = node.cgroups.directory("cpuset", "/bypassd-test-node-runc")
        directory = node.directory
    assert not os.path.exists(top)
    assert not os.path.exists(directory)


@pytest.mark.kernel
@needs_root
def test_a_container_that_cannot_start_says_why() -> None:
    with ScriptedNode.start(cgroup_root="/bypassd-test-node-bad") as node:
        # A quota above the pod's own is refused by the kernel with EINVAL, and the start fails as on a node.
        pod = best_effort("greedy")
        group = node.cgroups.make_pod(pod)
        node.cgroups._set(group, {"quota": 1000})
        node._start_container(pod, "c" * 64, "c" * 64, None, ["sleep", "60"], {"cpu": {"shares": 2}})
        spec = ContainerSpec(name="main", cpu_limit=500)
        with pytest.raises(RuntimeFailed, match="Invalid argument"):
            node._start_container(pod, "c" * 64, "d" * 64, spec, ["sleep", "60"], resources(spec, ""))
        node._end(node.cgroups.container_group(pod, "c" * 64))
        node._end(node.cgroups.container_group(pod, "d" * 64))

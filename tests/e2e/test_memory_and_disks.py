"""Memory and disk limits of real containers, on whichever cgroup version this machine has: held, kept, given back.

What only cgroup v2 has (protections, memory.high, memory.reclaim) is proved here, in the virtual machine.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgroupfs.codecs import PAGE
from cgroupfs.errors import SourceError
from reconciler.sources.disks import find_disk
from tests.e2e.agent import eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.mounts import hierarchies, pure_v2
from tests.e2e.node import Node, Running, RunningPod
from tests.e2e.pods import ContainerSpec, PodSpec, new_uid
from tests.e2e.values import snapshot
from tests.fakes.kubelet.cgroups import read

pytestmark = [pytest.mark.containerd, pytest.mark.core]

MEGA = 1 << 20
BATCH = 64 * MEGA
HIGH = BATCH * 9 // 10 // PAGE * PAGE
"""Half of the batch memory is asked for, so four fifths of the way to the limit is nine tenths of it."""
REQUEST = 48 * MEGA
POLICIES: dict[str, object] = {
    "be_memory": {"enabled": True, "reserve_percent": 20, "hard_percent": 10},
    "memory_qos": {"enabled": True, "reclaimed": {"throttling_percent": 80, "oom_group": True}},
}
V2 = pytest.mark.skipif(not pure_v2(), reason="REAL KERNEL TEST NOT RUN: no cgroup v2 with controllers")


def web() -> PodSpec:
    container = ContainerSpec(cpu_request=250, memory_request=REQUEST)
    return PodSpec(name="web", uid=new_uid(), containers=(container,))


def batch(name: str, *, eats_mib: int = 0) -> PodSpec:
    """A BE pod with batch memory, which its annotation has before its first instruction."""
    mode = ("eat", str(eats_mib)) if eats_mib else ("sleep",)
    amounts = {
        "requests": {"kubernetes.io/batch-memory": BATCH // 2},
        "limits": {"kubernetes.io/batch-memory": BATCH},
    }
    return PodSpec(
        name=name,
        uid=new_uid(),
        labels={"koordinator.sh/qosClass": "BE"},
        annotations={"node.koordinator.sh/extended-resource-spec": json.dumps({"containers": {"main": amounts}})},
        containers=(ContainerSpec(run=mode),),
    )


def memory(container: Running, file: str) -> str:
    return container.read("memory", file)


def limit(container: Running) -> str:
    return memory(container, "memory.max" if pure_v2() else "memory.limit_in_bytes")


def used(container: Running) -> int:
    return int(memory(container, "memory.current" if pure_v2() else "memory.usage_in_bytes"))


def alive(container: Running) -> bool:
    """Whether its program runs; runc deletes the state of a dead container at some later time."""
    try:
        return os.path.exists(f"/proc/{container.init_pid()}")
    except FileNotFoundError:
        return False


@pytest.mark.quiet
def test_limits_are_set_hold_a_growing_pod_and_are_removed(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    online, calm = run_pod(web()), run_pod(batch("calm"))
    before = snapshot(containerd_node)
    # Little room between being slowed down and the limit: who is slowed down takes minutes for each megabyte.
    policies = {**POLICIES, "memory_qos": {"enabled": True, "reclaimed": {"throttling_percent": 99, "oom_group": True}}}
    daemon = agent(containerd_node, policies=policies, **pod_list)
    eventually("the BE pod has its batch limit", lambda: limit(calm["main"]) == str(BATCH), within_s=30)
    besteffort = containerd_node.cgroups.directory("memory", containerd_node.cgroups.group("kubepods", "besteffort"))
    bound = "memory.max" if pure_v2() else "memory.limit_in_bytes"
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    eventually(
        "all BE work is bounded",
        lambda: read(besteffort, bound) != "max" and int(read(besteffort, bound)) < total * 9 // 10,
        within_s=30,
    )
    if pure_v2():
        eventually("the request is protected", lambda: memory(online["main"], "memory.low") == str(REQUEST))
        pod = containerd_node.cgroups.directory("memory", containerd_node.cgroups.pod_group(online.spec))
        kubepods = containerd_node.cgroups.directory("memory", containerd_node.cgroups.group("kubepods"))
        eventually(
            "and counts in the directories above",
            lambda: read(pod, "memory.low") == read(kubepods, "memory.low") == str(REQUEST),
        )
        assert int(read(besteffort, "memory.high")) < int(read(besteffort, bound))
        assert memory(calm["main"], "memory.oom.group") == "1"
    # More than it may have: the OOM killer takes it within its own group, and no other.
    greedy = run_pod(batch("greedy", eats_mib=3 * BATCH // MEGA))
    eventually("the one that eats more than its limit is gone", lambda: not alive(greedy["main"]), within_s=60)
    assert alive(online["main"])
    assert alive(calm["main"])
    containerd_node.remove_pod(greedy)
    assert daemon.stop() == 0
    after = {path: text for path, text in snapshot(containerd_node).items() if "memory" in path}
    assert after == {path: before[path] for path in after}


@V2
@pytest.mark.quiet
def test_who_cannot_be_reclaimed_is_slowed_down_at_memory_high_and_lives(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    agent(containerd_node, policies=POLICIES, **pod_list)
    pod = run_pod(batch("between", eats_mib=(HIGH + BATCH) // 2 // MEGA - 1))
    eventually("its memory.high is there", lambda: memory(pod["main"], "memory.high") == str(HIGH), within_s=30)

    def hits() -> int:
        rows = dict(line.split() for line in memory(pod["main"], "memory.events").splitlines())
        assert rows["oom_kill"] == "0"
        return int(rows["high"])

    eventually("it has come to its bound", lambda: hits() > 0, within_s=60)
    assert used(pod["main"]) <= BATCH
    assert alive(pod["main"])


@V2
@pytest.mark.quiet
def test_a_limit_below_use_is_not_written_and_no_process_is_killed(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    pod = run_pod(batch("early", eats_mib=2 * BATCH // MEGA))
    eventually("it has eaten", lambda: used(pod["main"]) > BATCH * 3 // 2, within_s=30)
    daemon = agent(containerd_node, **pod_list)

    def standing() -> list[tuple[str, str]]:
        fields = daemon.pod(pod.spec.uid) or {"containers": []}
        return [
            (setting["state"], setting["detail"])
            for container in fields["containers"]
            for setting in container["settings"]
            if setting["knob"] == "memory.max"
        ]

    eventually("the agent says why not", lambda: any(state == "refused" for state, _ in standing()), within_s=60)
    assert "no more memory can be reclaimed" in standing()[0][1]
    assert limit(pod["main"]) == "max"
    assert alive(pod["main"])


@V2
def test_unused_page_cache_is_reclaimed(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object], tmp_path: Path
) -> None:
    pod = run_pod(batch("reader"))
    if not os.path.exists(f"{pod['main'].directory('memory')}/memory.pressure"):
        pytest.skip("REAL KERNEL TEST NOT RUN: this kernel was started without pressure information")
    file = tmp_path / "cache"
    # The first reader of a page pays for it.
    script = f'echo $$ >"$0" && head -c {48 * MEGA} /dev/zero >"{file}" && sync "{file}"'
    subprocess.run(["/bin/sh", "-c", script, f"{pod['main'].directory('memory')}/cgroup.procs"], check=True)
    before = used(pod["main"])
    assert before > 40 * MEGA
    eager = {"interval_s": 1, "probe_percent": 10, "pressure_percent": 50, "leave_bytes": 0}
    constants = {f"policies.memory_reclaim.{name}": value for name, value in eager.items()}
    policies = {"batch": {"memory": False}, "memory_reclaim": {"enabled": True}}
    daemon = agent(containerd_node, policies=policies, constants=constants, **pod_list)
    eventually("its cache shrinks", lambda: used(pod["main"]) < before * 8 // 10, within_s=60)
    counts = daemon.state("sides")["sides"]["memory_reclaim"]["counts"]
    assert counts["bytes"] > 0, counts
    assert alive(pod["main"])


@pytest.fixture
def swap(tmp_path: Path) -> Iterator[None]:
    """Some swap, of the machine or, where that is the tests' own, of a file."""
    if len(Path("/proc/swaps").read_text().splitlines()) > 1:
        yield
        return
    if not os.environ.get("BYPASSD_TEST_SWAP"):
        pytest.skip("REAL KERNEL TEST NOT RUN: no swap, and BYPASSD_TEST_SWAP does not allow to make some")
    file = str(tmp_path / "swap")
    # With its blocks: swap may have no holes.
    subprocess.run(["dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=256", "status=none"], check=True)
    os.chmod(file, 0o600)
    subprocess.run(["mkswap", file], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["swapon", file], check=True)
    yield
    subprocess.run(["swapoff", file], check=True)


@pytest.mark.quiet
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("swap")
def test_a_be_pod_swaps_up_to_its_bound_and_is_killed_beyond(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    qos = {"enabled": True, "reclaimed": {"throttling_percent": 0, "swap_percent": 50}}
    daemon = agent(containerd_node, policies={"memory_qos": qos}, **pod_list)
    # A page counts twice while it is written to swap and still in memory: on a slow disk that is most of the bound.
    pod = run_pod(batch("within", eats_mib=BATCH * 9 // 8 // MEGA))
    file = "memory.swap.max" if pure_v2() else "memory.memsw.limit_in_bytes"
    bound = BATCH // 2 if pure_v2() else BATCH * 3 // 2
    eventually("its bound is there", lambda: memory(pod["main"], file) == str(bound), within_s=30)

    def swapped() -> int:
        if pure_v2():
            return int(memory(pod["main"], "memory.swap.current"))
        return int(memory(pod["main"], "memory.memsw.usage_in_bytes")) - used(pod["main"])

    eventually("it has swapped", lambda: swapped() > MEGA, within_s=20)
    greedy = run_pod(batch("beyond", eats_mib=BATCH * 3 // MEGA))
    eventually("the one that eats more than both is gone", lambda: not alive(greedy["main"]), within_s=20)
    assert alive(pod["main"])
    assert swapped() <= BATCH // 2
    assert daemon.stop() == 0
    assert memory(pod["main"], file) == ("max" if pure_v2() else str((1 << 63) // PAGE * PAGE - PAGE))


def test_be_work_has_its_disk_limits_through_a_kill_and_loses_them(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object]
) -> None:
    """On v2 on the besteffort directory, which binds all below it; on v1 shared out to the containers."""
    try:
        disk = find_disk(containerd_node.directory)
    except SourceError as exc:
        pytest.skip(f"REAL KERNEL TEST NOT RUN: {exc}")
    first, online = run_pod(batch("first")), run_pod(web())
    controller, file = ("io", "io.max") if pure_v2() else ("blkio", "blkio.throttle.write_bps_device")
    if not pure_v2() and controller not in hierarchies():
        pytest.skip("REAL KERNEL TEST NOT RUN: no blkio hierarchy")
    if not os.path.exists(f"{first['main'].directory(controller)}/{file}"):
        pytest.skip(f"REAL KERNEL TEST NOT RUN: containers have no {file} here")
    rule = {"name": containerd_node.directory, "write_bps": 8 * MEGA}
    policies = {"disk": {"enabled": True, "weight_be": None, "devices": [rule]}}
    groups = containerd_node.cgroups

    def limits(pod: RunningPod) -> str:
        directory = groups.directory(controller, groups.group("kubepods", "besteffort"))
        return read(directory, file) if pure_v2() else pod["main"].read(controller, file)

    def shown(number: int) -> str:
        return f"{disk.device} rbps=max wbps={number} riops=max wiops=max" if pure_v2() else f"{disk.device} {number}"

    daemon = agent(containerd_node, policies=policies, **pod_list)
    eventually("one BE pod has all of it", lambda: limits(first) == shown(8 * MEGA), within_s=30)
    second = run_pod(batch("second"))
    part = shown(8 * MEGA if pure_v2() else 4 * MEGA)
    eventually("two share it", lambda: limits(first) == limits(second) == part, within_s=30)
    assert online["main"].read(controller, file) == ""
    daemon.kill()
    assert limits(first) == part, "what was set stays"
    done = daemon.control("restore")
    assert done.returncode == 0, done.stderr
    assert limits(first) == limits(second) == ""

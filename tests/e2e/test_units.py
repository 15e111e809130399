"""The parts of the harness that need no container: formulas, checkpoint, parsers."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cri import Cri, CriError
from tests.e2e.pods import PodSpec, best_effort, burstable, guaranteed, pod_values, shares_of
from tests.e2e.traceparse import parse_bpftrace, parse_strace, parse_tracefs
from tests.fakes.kubelet.cgroups import SYSTEMD, KubeletCgroups
from tests.fakes.kubelet.cpu_manager import NONE, STATIC, CpuManager, checksum

UID = "11111111-1111-4111-8111-111111111111"


@pytest.mark.parametrize(
    ("policy", "default", "entries", "expected"),
    [
        (STATIC, "0-1", {}, 1636926438),
        (STATIC, "0", {UID: {"main": "1"}}, 3292922294),
        (NONE, "", {}, 1353318690),
    ],
)
def test_the_checksum_is_the_one_kubelets_wrote(
    policy: str, default: str, entries: dict[str, dict[str, str]], expected: int
) -> None:
    assert checksum(policy, default, entries) == expected


def test_exclusive_cpus_leave_the_default_set_and_come_back(tmp_path: Path) -> None:
    cpus = CpuManager(str(tmp_path), policy=STATIC, cpus={0, 1, 2, 3}, reserved={0})
    pod = guaranteed("alone", cpus=2)
    cpus.allocate(pod)
    state = json.loads((tmp_path / "cpu_manager_state").read_text())
    assert (state["defaultCpuSet"], state["entries"]) == ("0,3", {pod.uid: {"main": "1-2"}})
    assert cpus.cpus_of(pod, "main") == "1-2"
    assert cpus.cpus_of(best_effort("other"), "main") == "0,3"
    cpus.release(pod)
    cpus.tick()
    assert json.loads((tmp_path / "cpu_manager_state").read_text())["defaultCpuSet"] == "0-3"
    assert [path.name for path in tmp_path.iterdir()] == ["cpu_manager_state"]


@pytest.mark.parametrize(
    ("pod", "qos", "values"),
    [
        (best_effort("a"), "BestEffort", {"shares": 2}),
        (burstable("b", cpu_request=250), "Burstable", {"shares": 256}),
        (
            burstable("c", cpu_limit=500, memory_limit=1024),
            "Burstable",
            {"shares": 256, "quota": 50000, "memory": 1024},
        ),
        (guaranteed("d", cpus=2, memory=4096), "Guaranteed", {"shares": 2048, "quota": 200000, "memory": 4096}),
    ],
)
def test_pod_values_are_the_kubelets(pod: PodSpec, qos: str, values: dict[str, int]) -> None:
    assert pod.qos == qos
    assert pod_values(pod) == values


def test_shares_have_a_floor_of_two() -> None:
    assert [shares_of(milli) for milli in (0, 1, 1000)] == [2, 2, 1024]


def test_slices_are_named_by_their_whole_path() -> None:
    pod = burstable("web")
    escaped = pod.uid.replace("-", "_")
    slices = KubeletCgroups(driver=SYSTEMD)
    assert slices.pod_group(pod) == (f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{escaped}.slice")
    assert slices.cri_parent(pod) == f"kubepods-burstable-pod{escaped}.slice"
    assert slices.container_group(pod, "abc").endswith(".slice/cri-containerd-abc.scope")


def test_bpftrace_writes_have_the_file_of_their_descriptor() -> None:
    seen = parse_bpftrace(
        "Attaching 14 probes...\nREADY\n"
        "M\t10\t7\t/kubepods/besteffort/podx/c\n"
        "O\t11\t7\t70\t-100\t/sys/fs/cgroup\no\t11\t7\t70\t5\nO\t12\t7\t71\t5\tcpu/kubepods/podx/c/cpu.shares\n"
        "W\t13\t7\t6\trunc\t512\nW\t14\t8\t6\tother\tnot opened\no\t12\t7\t71\t6\n"
        "R\t14\t7\t70\t/run/x/state.json\nr\t15\t7\t70\t0\nX\t16\t7\t/app\ngarbage\tx\n"
    )
    (write,) = seen.writes or []
    assert (write.t_ns, write.comm, write.path, write.text) == (
        13, "runc", "/sys/fs/cgroup/cpu/kubepods/podx/c/cpu.shares", "512",
    )  # fmt: skip
    assert seen.made("/kubepods/besteffort/podx/c").t_ns == 10
    assert seen.exec_of(7, "/app").t_ns == 16
    assert [rename.path for rename in seen.renames or []] == ["/run/x/state.json"]


def test_tracefs_lines_give_exec_and_mkdir() -> None:
    seen = parse_tracefs(
        "# tracer: nop\n"
        "           mkdir-18555   [001] d..1.  1208.525245: cgroup_mkdir: root=1 id=171 level=1 path=/kubepods\n"
        "        runc:[2:INIT]-19   [000] .....  1208.521593: sched_process_exec: filename=/app pid=19 old_pid=19\n"
    )
    assert seen.writes is None
    assert seen.made("/kubepods").t_ns == 1208525245000
    assert seen.exec_of(19, "/app").t_ns == 1208521593000


def test_strace_lines_give_writes_below_the_cgroup_mounts_on_the_monotonic_clock() -> None:
    text = (
        '42    1700000000.000123 write(4</sys/fs/cgroup/cpu/x/cpu.shares>, "3\\n", 2) = 2\n'
        '42    1700000000.000200 write(1</dev/null>, "3", 1) = 1\n'
    )
    (write,) = parse_strace(text, offset_ns=1_600_000_000_000_000_000)
    assert (write.t_ns, write.pid, write.text) == (100_000_000_000_123_000, 42, "3")


@pytest.mark.parametrize("call", ["stop_container", "remove_container", "stop_sandbox", "remove_sandbox"])
def test_a_call_on_its_way_to_a_shim_that_exits_is_made_again(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """containerd 1.6's answers for a pod whose processes were killed just now, as recorded; a kubelet asks again."""
    answers = ['failed to kill container "11f3": ttrpc: closed: unknown', "container is still running", None]
    left = iter(answers)

    def answer(self: Cri, service: str, name: str, *_: Any) -> None:
        if (text := next(left)) is not None:
            raise CriError(name, "UNKNOWN", text)

    monkeypatch.setattr(Cri, "_call", answer)
    getattr(Cri("/nowhere"), call)("11f3")
    assert next(left, "all used") == "all used"


def test_any_other_refusal_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def answer(self: Cri, service: str, name: str, *_: Any) -> None:
        next(calls)
        raise CriError(name, "NOT_FOUND", "no such container")

    monkeypatch.setattr(Cri, "_call", answer)
    with pytest.raises(CriError, match="no such container"):
        Cri("/nowhere").stop_container("11f3")
    assert next(calls) == 1

"""doctor on fabricated nodes, and (loudly skipped elsewhere) on this machine."""

import json
import os
import shutil
from pathlib import Path

import pytest
from msgspec.structs import replace

from reconciler import __version__
from reconciler.cli import asking
from reconciler.cli.asking import QueryResults, release
from reconciler.cli.checks import CheckState, machine
from reconciler.cli.checks import agent as checks
from reconciler.cli.checks.kubelet import kubelet, runtime
from reconciler.cli.doctor import examine
from reconciler.cli.document import Unreachable
from reconciler.cli.exits import Exit
from reconciler.cli.nodeview import InspectedNode
from reconciler.config.load import digest
from reconciler.config.model import AgentMode, Config
from reconciler.policies.core_sched import CoreSchedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.sources.cri import RuntimeCondition, RuntimeVersion
from reconciler.sources.kubelet_watch import kubelet_facts
from tests.fakes.livenode import PINNED, LiveNode, container_id, group
from tests.reconciler.cli.conftest import Run, inspected

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"

MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: 0 kB\nSwapFree: 0 kB\n"


@pytest.fixture
def good(live: LiveNode) -> LiveNode:
    return furnished(live)


def furnished(live: LiveNode) -> LiveNode:
    """With all that doctor looks for."""
    live.put("proc/sys/kernel/osrelease", "6.1.0-28-amd64\n")
    live.put("proc/pressure/cpu", PSI)
    live.put("proc/meminfo", MEMINFO)
    live.put("proc/self/status", "CapEff:\t000001ffffffffff\n")
    live.put("sys/fs/cgroup/cpuacct/kubepods/cpu.pressure", PSI)
    live.put("sys/bus/event_source/devices/cpu/type", "4\n")
    live.put("proc/cpuinfo", "flags\t\t: fpu rdt_a cat_l3 mba\n")
    live.put("proc/filesystems", "nodev\tresctrl\n")
    for name, text in {"cbm_mask": "fff", "min_cbm_bits": "1", "num_closids": "16", "shareable_bits": "0"}.items():
        live.put(f"sys/fs/resctrl/info/L3/{name}", f"{text}\n")
    for name, number in {"max_user_watches": 65536, "max_user_instances": 128, "max_queued_events": 16384}.items():
        live.put(f"proc/sys/fs/inotify/{name}", f"{number}\n")
    live.document()
    return live


def states(root: str) -> dict[str, tuple[CheckState, str, str]]:
    return {result.name: (result.state, result.found, result.fix) for result in examine(inspected(root))}


def test_a_node_that_has_it_all_is_all_ok_on_one_screen(run: Run, good: LiveNode) -> None:
    ran = run("doctor", "--root", good.root)
    assert ran.code == Exit.OK
    assert ran.err == ""
    assert "OK: 0 errors, 0 warnings" in ran.out
    assert len(ran.out.splitlines()) <= 24
    assert {state for state, _, _ in states(good.root).values()} == {CheckState.OK}
    rows = states(good.root)
    assert rows["kubepods"][1] == "/kubepods: 3 pods, 3 containers"
    assert rows["checkpoints"][1] == "policy static, 1 exclusive container, checksum OK"
    assert rows["CPU manager"][1] == "static policy, reserved 0; exclusive CPUs are those of the kernel's files"
    assert rows["runtime"][1] == "events from /run/containerd/runc/k8s.io: 3 of 3 containers"
    assert rows["resctrl"][1] == "L3 12 ways; 16 groups"
    assert rows["PSI"][1] == "node, groups, triggers any window"
    assert rows["scheduler"][1] == "CFS burst, idle class"
    assert rows["store"][1].endswith("state.db: 4 files")


def test_every_lack_has_a_fix(good: LiveNode) -> None:
    root = good.root
    good.put("proc/sys/kernel/osrelease", "4.19.0\n")
    for path in ("proc/pressure", "sys/bus", "sys/fs/resctrl", "run/containerd/runc"):
        shutil.rmtree(f"{root}/{path}")
    good.put("var/lib/kubelet/cpu_manager_state", "{")
    good.put("proc/sys/fs/inotify/max_user_watches", "40\n")
    rows = states(root)
    for name in ("kernel", "PSI", "PMU", "resctrl", "runtime", "checkpoints", "inotify"):
        state, _, fix = rows[name]
        assert state is CheckState.WARN, name
        assert fix, name
    assert "mount -t resctrl" in rows["resctrl"][2]
    assert "max_user_watches=8192" in rows["inotify"][2]
    # Running groups keep the CPU there; the fix has the release that is mended.
    good.put("proc/sys/kernel/osrelease", "6.18.44-amd64\n")
    state, text, fix = states(root)["kernel"]
    assert (state, "6.18.44-amd64" in text, "6.18.45" in fix) == (CheckState.WARN, True, True)


def test_exclusive_cpus_are_not_called_respected_where_the_checkpoint_is_of_no_use(good: LiveNode) -> None:
    good.put("var/lib/kubelet/config.yaml", "kind: KubeletConfiguration\ncpuManagerPolicy: static\n")
    for content, fault in (
        ("{", "torn"),
        ('{"policyName":"static","epoch":3,"checksum":1}', "future"),
        (None, "missing"),
    ):
        if content is None:
            os.unlink(f"{good.root}/var/lib/kubelet/cpu_manager_state")
        else:
            good.put("var/lib/kubelet/cpu_manager_state", content)
        rows = states(good.root)
        assert rows["checkpoints"][0] is CheckState.WARN
        state, text, fix = rows["CPU manager"]
        assert (state, text) == (
            CheckState.WARN,
            f"static policy, but exclusive CPUs are unknown: the checkpoint is not usable ({fault})",
        )
        assert "see checkpoints" in fix


def test_a_capability_that_root_lacks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(checks, "has_capability", lambda _root, bit: bit != 1)
    (result,) = [item for item in checks.agent(inspected("/"), QueryResults()) if item.name == "rights"]
    assert (result.state, result.found) == (CheckState.WARN, "root without DAC_OVERRIDE")


@pytest.mark.parametrize(
    ("policy", "state"),
    [
        (os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, CheckState.OK),
        (os.SCHED_FIFO, CheckState.OK),
        (os.SCHED_OTHER | os.SCHED_RESET_ON_FORK, CheckState.WARN),
    ],
)
def test_a_daemon_without_real_time_priority_is_reported(
    monkeypatch: pytest.MonkeyPatch, policy: int, state: CheckState
) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", {4711: policy}.__getitem__)
    results = QueryResults(daemon="ready", daemon_pid=4711)
    (result,) = [item for item in checks.agent(inspected("/"), results) if item.name == "daemon"]
    assert result.state is state
    assert bool(result.fix) is (state is CheckState.WARN)


def test_scheduler_features_are_read_from_the_files_of_kubepods(good: LiveNode) -> None:
    kubepods = "sys/fs/cgroup/cpu/kubepods"
    good.put(f"{kubepods}/cpu.bvt_warp_ns", "0\n")
    assert states(good.root)["scheduler"] == (CheckState.OK, "CFS burst, idle class, group identity", "")
    switch = "proc/sys/kernel/sched_group_identity_enabled"
    good.put(switch, "0\n")
    off = "sysctl -w kernel.sched_group_identity_enabled=1"
    assert states(good.root)["scheduler"] == (
        CheckState.WARN,
        "CFS burst, idle class, group identity (disabled)",
        off,
    )
    good.put(switch, "1\n")
    assert states(good.root)["scheduler"][0] is CheckState.OK
    for file in ("cpu.cfs_burst_us", "cpu.idle"):
        os.unlink(f"{good.root}/{kubepods}/{file}")
    good.put(f"{kubepods}/cpu.qos_level", "0\n")
    assert states(good.root)["scheduler"] == (
        CheckState.WARN,
        "group identity, QoS level",
        "CFS burst: Linux 5.14 and idle class: Linux 5.15 or later",
    )


def test_an_obstacle_is_bad_with_exit_code_1(run: Run, good: LiveNode) -> None:
    good.put("etc/bypassd/config.yaml", "mode: fast\nnod: 1\n")
    with open(f"{good.root}/var/lib/bypassd/state.db", "wb") as file:
        file.write(b"not a database, not at all" * 100)
    os.unlink(f"{good.root}/var/lib/bypassd/state.db.copy")
    ran = run("doctor", "--root", good.root, "-o", "json")
    assert ran.code == Exit.NOT_OK
    answer = json.loads(ran.out)
    bad = {finding["check"]: finding for finding in answer["findings"] if finding["state"] == "bad"}
    assert bad.keys() == {"config", "store"}
    assert "; and 1 more" in bad["config"]["found"]
    assert answer["bad"] == 2
    assert "2 error" in run("doctor", "--root", good.root).out


def test_a_directory_that_is_no_node_has_no_cgroups(run: Run, tmp_path: Path) -> None:
    ran = run("doctor", "--root", str(tmp_path))
    assert ran.code == Exit.NOT_OK
    assert "bad   cgroups" in ran.out
    assert "bad   kubepods" in ran.out
    assert "bad   CPUs" in ran.out


def test_a_narrowed_besteffort_directory_conflicts_with_the_static_cpu_manager(good: LiveNode) -> None:
    good.put("etc/bypassd/config.yaml", "policies:\n  reclaimed:\n    besteffort_cpuset: true\n")
    state, text, fix = states(good.root)["CPU manager"]
    assert state is CheckState.WARN
    assert "besteffort_cpuset is enabled" in text
    assert "besteffort_cpuset: false" in fix


@pytest.mark.parametrize("case", ["runc", "sandboxed", "kubelet before 1.18"])
def test_exclusive_cpus_that_no_file_has_are_not_called_respected(good: LiveNode, case: str) -> None:
    """Kubernetes 120230; and a pod in gVisor, whose processes are in the pod's directory, not in the container's."""
    box = f"{group(PINNED)}/{container_id(PINNED)}"
    sandboxed = case == "sandboxed"
    if case == "kubelet before 1.18":
        entries = f'{{"{container_id(PINNED)}":"7"}}'
        text = f'{{"policyName":"static","defaultCpuSet":"0-6","entries":{entries}}}'
        good.put("var/lib/kubelet/cpu_manager_state", text)
    if sandboxed:
        shim = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{container_id(PINNED)}/shim-binary-path"
        good.put(shim, "/usr/local/bin/containerd-shim-runsc-v1")
    else:
        good.write(box, "cpuset", "cpuset.cpus", "1-6")
    state, text, fix = states(good.root)["CPU manager"]
    assert state is CheckState.WARN
    wrong = "0-7" if sandboxed else "1-6"
    assert f"the checkpoint gives main of pod {PINNED} CPU 7, its CPU set file has CPU {wrong}" in text
    assert "restart that pod" in fix


def test_answers_and_refusals_of_kubelet_and_runtime_are_reported(good: LiveNode) -> None:
    node = inspected(good.root)
    results = QueryResults(
        kubelet_version="v1.21.4",
        cri_version=RuntimeVersion(name="containerd", version="1.7.2", api="v1"),
        cri_conditions=(RuntimeCondition(type="NetworkReady", ok=False, message="no CNI"),),
    )
    (manager,) = [result for result in kubelet(node, results) if result.name == "CPU manager"]
    assert manager.state is CheckState.WARN
    assert "before 1.22" in manager.found
    (nri,) = [result for result in runtime(node, results) if result.name == "NRI"]
    assert (nri.state, nri.found) == (CheckState.OK, "containerd 1.7.2 supports it; disabled")
    good.put("var/run/nri/nri.sock", "")
    (nri,) = [result for result in runtime(node, results) if result.name == "NRI"]
    assert nri.state is CheckState.WARN


def test_the_version_of_a_program_is_two_numbers() -> None:
    assert release("v1.22.17+k3s1") == (1, 22)
    assert release("6.1.0-28-amd64") == (6, 1)
    assert release(None) is None
    assert release("unknown") is None


@pytest.mark.kernel
def test_on_this_machine_doctor_reads_everything_and_changes_nothing(run: Run) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root: fanotify marks and the capabilities of the daemon")
    ran = run("doctor", "-o", "json")
    fields = {finding["check"]: finding for finding in json.loads(ran.out)["findings"]}
    assert len(fields) == 23
    for entry in fields.values():
        assert bool(entry["fix"]) == (entry["state"] != "ok"), entry
    assert fields["cgroups"]["state"] in {"ok", "warn"}
    assert asking.query_node(inspected("/")).fanotify is not None


def test_core_scheduling_is_probed_on_the_running_kernel(good: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    there = inspected(good.root)
    assert "core scheduling" not in states(good.root)
    fix = "set policies.core_sched.enabled: false, or use another kernel"
    for why, wanted, expected in (
        ("", False, (CheckState.OK, "available; policies.core_sched is disabled", "")),
        ("", True, (CheckState.OK, "here", "")),
        ("it has none", False, (CheckState.OK, "not used; it has none", "")),
        ("it has none", True, (CheckState.WARN, "it has none", fix)),
    ):
        monkeypatch.setattr(machine, "unable", lambda _prctl, why=why: why)
        policies = PoliciesConfig(core_sched=CoreSchedConfig(enabled=wanted))
        node = replace(there, root="/", config=replace(there.config, policies=policies))
        [result] = [item for item in machine.machine(node) if item.name == "core scheduling"]
        assert (result.state, result.found, result.fix) == expected, (why, wanted)


def test_resctrl_groups_are_counted_and_foreign_ones_that_use_all_are_reported(good: LiveNode) -> None:
    good.put("sys/fs/resctrl/info/L3/num_closids", "3\n")
    good.put("sys/fs/resctrl/info/L3_MON/mon_features", "llc_occupancy\n")
    good.put("sys/fs/resctrl/info/L3_MON/num_rmids", "32\n")
    good.put("sys/fs/resctrl/bypassd-be/tasks", "")
    good.put("sys/fs/resctrl/theirs/tasks", "")
    text = "L3 12 ways; 3 groups, 32 monitoring ids; 1 of bypassd, 1 of other programs"
    assert states(good.root)["resctrl"] == (CheckState.OK, text, "")
    good.put("sys/fs/resctrl/more/tasks", "")
    state, _, fix = states(good.root)["resctrl"]
    assert (state, fix) == (CheckState.WARN, "all control groups are used by other programs: none left for pod classes")


def running(node: InspectedNode, **more: object) -> dict[str, object]:
    """What a daemon reports that uses what the node has."""
    assert node.layout is not None
    return {
        "version": __version__,
        "config_digest": digest(node.config),
        "configured_mode": node.config.mode.value,
        "driver": node.layout.driver.value,
        "kubepods": node.layout.kubepods,
        "kubelet": {**kubelet_facts(node.kubelet), "pid": 1, "pending": []},
        **more,
    }


def compared(node: InspectedNode, state: dict[str, object]) -> tuple[CheckState, str, str]:
    results = QueryResults(daemon_state=state)
    (found,) = [result for result in checks.agent(node, results) if result.name == "daemon state"]
    return found.state, found.found, found.fix


@pytest.mark.parametrize(
    ("placement", "group", "shares", "problem", "state"),
    [
        ("own", "/bypassd.slice/bypassd.service", 50, "", CheckState.OK),
        ("own", "/bypassd.slice/bypassd.service", None, "", CheckState.OK),
        ("pod", "/kubepods/burstable/podx/y", 1024, "", CheckState.OK),
        ("shared", "/system.slice/bypassd.service", 1024, "", CheckState.WARN),
        ("root", "/", None, "", CheckState.WARN),
        ("own", "/bypassd.slice", 1024, "/bypassd.slice: cpu.shares: EROFS", CheckState.WARN),
        ("unknown", "", None, "", CheckState.OK),
    ],
)
def test_the_weight_that_the_daemon_has_beside_online_pods_is_checked(
    placement: str, group: str, shares: int | None, problem: str, state: CheckState
) -> None:
    own = {"placement": placement, "group": group, "top": "/x", "shares": shares, "raised": 0, "problem": problem}
    found = checks.own_group(own)
    assert found.state is state
    assert bool(found.fix) is (state is CheckState.WARN)
    assert group in found.found or problem in found.found
    assert "None" not in found.found


@pytest.mark.parametrize(
    ("group", "command"),
    [
        ("/system.slice/bypassd.service", "systemctl daemon-reload && systemctl restart bypassd.service"),
        ("/system.slice/bypassd@a.service", ">/etc/systemd/system/bypassd@a.service.d/zz-slice.conf && systemctl"),
        ("/user.slice/user-0.slice/session-1.scope", "systemd-run --slice=bypassd.slice bypassd run"),
        ("/system.slice/$(reboot).service", "systemd-run --slice=bypassd.slice bypassd run"),
        ("/", "systemd-run --slice=bypassd.slice bypassd run"),
    ],
)
def test_a_shared_weight_is_ended_by_one_command(group: str, command: str) -> None:
    own = {"placement": "shared", "group": group, "top": "/x", "shares": 1024, "raised": 0, "problem": ""}
    assert command in checks.own_group(own).fix


@pytest.mark.parametrize(
    ("changes", "refused", "state", "named"),
    [
        ({}, {}, CheckState.WARN, "weight 1024, uses 0.05 CPU, waits 2 % of the time, each wake-up may delay"),
        ({"credit_us": 586}, {}, CheckState.OK, "weight 1024"),
        ({"wanted": 1024}, {}, CheckState.OK, "weight 1024"),
        ({"credit_us": None, "waits": None}, {}, CheckState.OK, "/system.slice: weight 1024, uses 0.05 CPU"),
        ({"use_milli": None}, {}, CheckState.OK, "no group of daemons"),
        ({}, {"/system.slice": "no such group"}, CheckState.WARN, "/system.slice: no such group"),
    ],
)
def test_what_the_nodes_other_daemons_may_cost_is_checked(
    changes: dict[str, object], refused: dict[str, str], state: CheckState, named: str
) -> None:
    row = {"group": "/system.slice", "weight": 1024, "original": 1024, "wanted": None, "use_milli": 50}
    row |= {"waits": 0.02, "credit_us": 3000, **changes}
    found = checks.node_daemons({"daemons": [row], "daemons_refused": refused})
    assert found.state is state
    assert bool(found.fix) is (state is CheckState.WARN)
    assert named in found.found


def test_a_daemon_that_uses_what_the_node_has_is_ok(good: LiveNode) -> None:
    node = inspected(good.root)
    assert compared(node, running(node))[0] is CheckState.OK
    office = {"name": "office", "until": None, "then": None, "names": ["office"]}
    assert compared(node, running(node, window=office))[1].endswith("; window office, no change within two weeks")
    own = {"placement": "root", "group": "/"}
    results = QueryResults(daemon_state=running(node, own_group=own))
    assert {"daemon weight", "node daemons"} <= {result.name for result in checks.agent(node, results)}
    # A daemon of another version reports less, or in another shape.
    kubelets: list[object] = [7, {"pending": 7}, {"pending": None}]
    others: list[dict[str, object]] = [{"version": __version__}, {}, *({"kubelet": kubelet} for kubelet in kubelets)]
    for state in others:
        assert compared(node, state)[0] is CheckState.OK, state


def test_what_the_running_daemon_uses_and_the_node_no_longer_has_is_a_warning(good: LiveNode) -> None:
    node = inspected(good.root)
    changes: list[tuple[dict[str, object], str]] = [
        ({"version": "0.0.1"}, "version"),
        ({"config_digest": "0" * 16}, "configuration"),
        ({"configured_mode": "enforce"}, "mode"),
        ({"driver": "systemd"}, "cgroup driver"),
        ({"kubepods": "/kubepods.slice"}, "kubepods"),
        ({"root_dir": "/data/kubelet"}, "kubelet root_dir"),
        ({"node_name": "other"}, "kubelet node_name"),
        ({"reserved_cpus": "0-1"}, "kubelet reserved_cpus"),
        ({"pending": ["reserved_cpus: 0 -> 0-1"], "reserved_cpus": "5"}, "kubelet reserved_cpus: 0 -> 0-1"),
        ({"root_dir": "/" + "x" * 100_000}, "kubelet root_dir"),
    ]
    for more, named in changes:
        state = running(node)
        used = state["kubelet"]
        assert isinstance(used, dict)
        for key, value in more.items():
            (state if key in state else used)[key] = value
        result, found, fix = compared(node, state)
        assert (result, found.partition(": daemon")[0].startswith(named), bool(fix)) == (CheckState.WARN, True, True)
        assert len(found) < 1000
        assert found.count(": daemon") <= 1, "only what differs"


def test_the_configuration_digest_is_of_its_values() -> None:
    assert digest(Config()) == digest(replace(Config(), mode=AgentMode.ENFORCE))
    assert digest(Config()) != digest(replace(Config(), node=replace(Config().node, resync_s=7.0)))


def test_protect_has_what_each_level_adds_and_what_the_next_one_lacks(good: LiveNode) -> None:
    state, text, fix = states(good.root)["protect"]
    assert (state, fix) == (CheckState.OK, "")
    assert text.startswith(
        "no preset, mode observe; cpu: BE CPU budget, idle buffer, idle class, idle class of threads; cpu+memory: "
    )
    assert "network share (no policies.network.interfaces)" in text
    assert text.endswith("; cpu+memory lacks protected memory requests (cgroup v1 has no memory.low)")


def test_a_lack_of_a_configured_level_is_a_warning(good: LiveNode) -> None:
    shutil.rmtree(f"{good.root}/sys/fs/resctrl")
    without = "policies: {memory_qos: {enabled: false}}"
    levels: list[tuple[str, CheckState, list[str]]] = [
        ("protect: cpu", CheckState.OK, []),
        ("protect: cpu+memory", CheckState.WARN, ["cpu+memory"]),
        (f"protect: cpu+memory\n{without}", CheckState.OK, []),
        ("protect: full", CheckState.WARN, ["cpu+memory", "full"]),
        (f"protect: full\n{without}", CheckState.WARN, ["full"]),
    ]
    for config, state, lacks in levels:
        good.put("etc/bypassd/config.yaml", config)
        found, text, fix = states(good.root)["protect"]
        assert found is state
        assert [part.partition(" lacks ")[0] for part in fix.split("; ") if " lacks " in part] == lacks
        assert ("overridden: policies.memory_qos.enabled" in text) is ("memory_qos" in config)


def test_keys_of_an_earlier_version_are_a_warning_and_a_contradiction_is_a_bad_configuration(good: LiveNode) -> None:
    removed = "policies: {idle_buffer: {grow_after_s: 5s}, cache: {dwell_s: 1m}}"
    good.put("etc/bypassd/config.yaml", f"{removed}\n")
    found, text, fix = states(good.root)["config"]
    assert found is CheckState.WARN
    key = "config.yaml:1:26: policies.idle_buffer.grow_after_s: no longer a setting, ignored; always 1s"
    assert text.endswith(f"{key}; and 1 more")
    assert "check-config" in fix
    good.put("etc/bypassd/config.yaml", "protect: observe\nmode: enforce\n")
    rows = states(good.root)
    assert rows["config"][0] is CheckState.BAD
    assert "etc/bypassd/config.yaml:2:7: mode: " in rows["config"][1]
    assert "protect" not in rows


def test_settings_of_a_control_plane_are_counted_and_a_failure_has_a_fix() -> None:
    facts = {"wanted": "koordinator", "source": "koordinator", "taken": {"a": "x", "b": "y"}, "left_count": 3}
    (row,) = checks.node_settings({"node_settings": facts})
    assert row.state is CheckState.OK
    assert "koordinator: 2 settings in force, 3 values not taken" in row.found
    (row,) = checks.node_settings({"node_settings": {**facts, "problem": "HTTP 403 \x1b[2J"}})
    assert row.state is CheckState.WARN
    assert "HTTP 403" in row.found
    assert "\x1b" not in row.found
    assert row.fix
    others: list[dict[str, object]] = [
        {},
        {"node_settings": None},
        {"node_settings": {}},
        {"node_settings": {"wanted": "off"}},
    ]
    for other in others:
        assert list(checks.node_settings(other)) == []
    (row,) = checks.node_settings({"node_settings": {"wanted": "katalyst", "taken": 1, "left_count": "x", "source": 7}})
    assert "0 settings in force, 0 values" in row.found


def test_a_daemon_that_does_not_answer_is_not_called_stopped(good: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hung, or under SIGSTOP: it is started already."""
    node = replace(inspected(good.root), socket="/run/s")

    def exchange(path: str, *_rest: object, **_more: object) -> tuple[int, bytes]:
        raise Unreachable(path, "no answer within 2 s", silent=True)

    monkeypatch.setattr(asking, "exchange", exchange)
    results = QueryResults()
    asking._ask_daemon(node, results)
    (check,) = [check for check in checks.agent(node, results) if check.name == "daemon"]
    assert (check.state, check.found) == (CheckState.BAD, "a daemon runs and does not answer: no answer within 2 s")
    assert "systemctl restart bypassd" in check.fix

"""What doctor says of interference and eviction: which rules can be judged here, and by which means pods could go."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.private import POINT
from reconciler.cli import asking
from reconciler.cli.asking import QueryResults, ask_api
from reconciler.cli.checks import CheckResult, CheckState, watching
from reconciler.cli.checks.kubelet import kubelet
from reconciler.cli.doctor import examine
from reconciler.sources.cri import RuntimeVersion
from tests.fakes.http_peer import HttpPeer, Reply
from tests.fakes.jwt import jwt
from tests.fakes.livenode import LiveNode, container_id
from tests.reconciler.cli.conftest import Run, inspected
from tests.reconciler.cli.test_doctor import furnished, good

__all__ = ["good"]

WATCH = "interference:\n  enabled: true\n"
EVICT = "eviction:\n  enabled: true\n"
CRI = RuntimeVersion(name="containerd", version="1.6.20", api="v1")
EVERYTHING = (1 << 41) - 1


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> LiveNode:
    """As ``good``, for tests that change nothing of it but its configuration."""
    return furnished(LiveNode(tmp_path_factory.mktemp("whole")))


def found(live: LiveNode, config: str, results: QueryResults | None = None) -> dict[str, CheckResult]:
    """On a copied node; with ``results`` on one that runs, with the copy's cgroups."""
    node = inspected(live.root, config)
    if results is not None:
        node = replace(node, root="/")
    return {result.name: result for result in watching.watching(node, results or QueryResults())}


def with_rights(monkeypatch: pytest.MonkeyPatch, effective: int, mounts: str = "") -> QueryResults:
    """A daemon with these capabilities and mounts."""

    def read(root: str, path: str) -> str | None:
        if path == "proc/4242/status":
            return f"Name:\tbypassd\nCapEff:\t{effective:016x}\n"
        return {"proc/4242/mountinfo": mounts, "proc/self/schedstat": "1 2 3"}.get(path)

    monkeypatch.setattr(watching, "read_text", read)
    return QueryResults(
        daemon="ready", daemon_pid=4242, api_problem="", cri_version=CRI, taskstats_problem="", perf_problem=""
    )


def test_a_node_that_can_do_it_all_takes_a_line_for_each_and_stays_on_its_screen(run: Run, whole: LiveNode) -> None:
    assert found(whole, "mode: enforce\n") == {}, "nothing of what is off"
    there = found(whole, f"mode: enforce\n{WATCH}  rules:\n    cpu: {{dry_run: false}}\n{EVICT}")
    assert there == {
        "interference": CheckResult(
            "interference",
            CheckState.OK,
            "4 rules, 1 enforced; checked signals are available; 11 unchecked: see bypassctl interference",
        ),
        "eviction": CheckResult(
            "eviction", CheckState.OK, "dry run (eviction.dry_run), 4 triggers; by api, cri, signal (per process)"
        ),
        "closing": CheckResult(
            "closing", CheckState.OK, "in a shortage headroom 0, and taint PreferNoSchedule on the node"
        ),
    }
    ran = run("doctor", "--root", whole.root)
    assert "OK: 0 errors, 0 warnings" in ran.out
    assert len(ran.out.splitlines()) <= 27


def test_a_rule_that_cannot_be_judged_here_is_named_with_the_remedy(good: LiveNode) -> None:
    shutil.rmtree(f"{good.root}/sys/bus")
    strict = f"{WATCH}  rules:\n    cache: {{when: [[{{cpi: {{proxies: false}}}}]]}}\n"
    state, text, fix = found(good, strict)["interference"][1:]
    assert state is CheckState.WARN
    assert text == "4 rules, 0 enforced; not available: cache (no cpi)"
    assert fix == "see PMU above; or set enabled: false for these rules"
    assert found(good, f"{WATCH}  rules:\n    cache: {{enabled: false}}\n")["interference"].state is CheckState.OK
    # As shipped, the rule makes do with how long the pod waits for a CPU.
    assert found(good, WATCH)["interference"].state is CheckState.OK


def test_another_group_of_a_rule_is_proof_enough_and_the_nodes_pressure_needs_no_groups(good: LiveNode) -> None:
    os.unlink(f"{good.root}/sys/fs/cgroup/cpuacct/kubepods/cpu.pressure")
    # The rule memory has a second group without pressure.
    state, text, fix = found(good, WATCH)["interference"][1:]
    assert (state, text) == (CheckState.WARN, "4 rules, 0 enforced; not available: io (no io.pressure)")
    assert fix.startswith("set interference.private_cgroup2: true for the pressure of pods")
    assert found(good, f"{WATCH}  private_cgroup2: true\n")["interference"].state is CheckState.OK
    node_only = f"{WATCH}  rules:\n    io: {{when: [[{{pressure: {{resource: io, of: node}}}}]]}}\n"
    assert found(good, node_only)["interference"].state is CheckState.OK
    shutil.rmtree(f"{good.root}/proc/pressure")
    assert "io (no io.pressure)" in found(good, node_only)["interference"].found


@pytest.mark.parametrize(
    ("signal", "expected"),
    [("fs.use", "checked signals are available; 1 unchecked: see"), ("cpu.wait", "all their signals are available")],
)
def test_only_what_was_checked_is_said_to_be_available(good: LiveNode, signal: str, expected: str) -> None:
    names = ("cpu", "memory", "cache", "io")
    others = "".join(f"    {name}: {{enabled: false}}\n" for name in names)
    own = f"    mine: {{when: [[{{threshold: {{signal: {signal}, above: 5}}}}]]}}\n"
    assert expected in found(good, f"{WATCH}  rules:\n{others}{own}")["interference"].found


def test_every_lacking_signal_has_its_remedy(good: LiveNode) -> None:
    shutil.rmtree(f"{good.root}/sys/bus")
    for when, signal, remedy in (
        ("cache: {}", "llc.misses", "see PMU above"),
        ("bandwidth: {}", "memory.bandwidth", "policies.cache.enabled"),
        ("threshold: {signal: service.latency, above: 50}", "service.latency", "a probe"),
    ):
        own = found(good, f"{WATCH}  rules:\n    mine: {{when: [[{{{when}}}]]}}\n")["interference"]
        assert f"mine (no {signal})" in own.found
        assert remedy in own.fix


def test_whether_pressure_is_reported_or_polled(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    results = with_rights(monkeypatch, EVERYTHING)
    results.pressure_window_s, results.pressure_problem = 1.0, ""
    assert found(whole, EVICT, results)["pressure events"][1:3] == (
        CheckState.OK,
        "memory and CPU pressure, within 1 s",
    )
    results = with_rights(monkeypatch, EVERYTHING & ~(1 << 24))
    results.pressure_window_s, results.pressure_problem = 1.0, ""
    assert "lacks CAP_SYS_RESOURCE" in found(whole, EVICT, results)["pressure events"].found
    results.pressure_window_s, results.pressure_problem = None, "psi: not supported here"
    refused = found(whole, EVICT, results)["pressure events"]
    assert (refused.state, refused.found) == (CheckState.WARN, "none: psi: not supported here; polled each 1 s")
    assert "pressure events" not in found(whole, EVICT), "a copied node"


def test_an_indicator_of_pool_sizes_that_cannot_be_measured_is_a_warning(good: LiveNode) -> None:
    pid = "policies: {shared: {sizing: measured, provision: {policy: pid, pid: {cpi: {target: 2}}}}}\n"
    assert found(good, pid) == {}
    shutil.rmtree(f"{good.root}/sys/bus")
    own = found(good, pid)["pool sizes"]
    assert own.state is CheckState.WARN
    assert own.found.startswith("cpi ")
    assert own.fix.startswith("see PMU above")
    assert found(good, pid.replace("policy: pid", "policy: canonical")) == {}


def test_what_a_share_of_the_cache_moves_by_is_told_where_something_is_missing(
    good: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    moving = "policies: {cache: {enabled: true, mode: dynamic}}\n"
    assert found(good, "policies: {cache: {enabled: true}}\n") == {}
    monkeypatch.setattr(watching, "_monitors", lambda _: True)
    assert found(good, moving) == {}
    good.put("proc/cpuinfo", "vendor_id\t: AuthenticAMD\n")
    assert found(good, moving)["cache share"] == CheckResult(
        "cache share",
        CheckState.WARN,
        "BE share adjusted by memory bandwidth only: no cache misses measured",
        "no action possible: this processor counts second-level cache misses only",
    )
    good.put("proc/cpuinfo", "vendor_id\t: GenuineIntel\n")
    monkeypatch.setattr(watching, "_monitors", lambda _: False)
    assert found(good, moving)["cache share"].found.startswith("BE share adjusted by cache misses only: no memory b")
    shutil.rmtree(f"{good.root}/sys/bus")
    result = found(good, moving)["cache share"]
    assert result.found == "BE share stays at level low: no cache misses and no memory bandwidth measured"
    assert result.fix == "see PMU above; mount resctrl with monitoring (CMT, MBM)"


def test_counters_that_are_there_but_not_for_us_say_why(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    node = inspected(whole.root, WATCH)
    assert watching._lacking(node, QueryResults(perf_problem="not permitted (EACCES)"))["cpi"] == (
        "counters: not permitted (EACCES)"
    )
    assert "cpi" not in watching._lacking(node, QueryResults(perf_problem=""))


def test_without_taskstats_waiting_is_read_by_thread(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    results = with_rights(monkeypatch, EVERYTHING)
    assert "run queue" not in found(whole, WATCH, results)
    result = found(whole, WATCH, with_rights(monkeypatch, EVERYTHING & ~(1 << 12)))["run queue"]
    assert result.state is CheckState.WARN
    assert result.found == "taskstats: the daemon lacks CAP_NET_ADMIN; using schedstat of each thread"
    results = with_rights(monkeypatch, EVERYTHING)
    results.taskstats_problem = "taskstats: not compiled in"
    assert found(whole, WATCH, results)["run queue"].found.startswith("taskstats: not compiled in; using schedstat")
    # No rule needs the run queue: nothing is missing.
    off = f"{WATCH}  rules:\n    cpu: {{enabled: false}}\n    cache: {{enabled: false}}\n"
    nobody = found(whole, f"{off}    io: {{enabled: false}}\n    memory: {{enabled: false}}\n", results)
    assert "run queue" not in nobody


def test_a_daemon_that_may_not_mount_is_told_how_to_allow_it(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    config = f"{WATCH}  private_cgroup2: true\n"
    result = found(whole, config, with_rights(monkeypatch, EVERYTHING))["private cgroup2"]
    assert (result.state, result.found) == (CheckState.WARN, f"the daemon has not mounted {POINT}")
    assert "SystemCallFilter=mount umount2" in result.fix
    mounted = with_rights(monkeypatch, EVERYTHING, f"36 35 0:31 / {POINT} rw - cgroup2 bypassd rw\n")
    assert "private cgroup2" not in found(whole, config, mounted)


def test_probes_that_cannot_be_asked_say_what_they_lack(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = (
        f"{WATCH}  probes:\n    db: {{pods: ['db-*'], command: {{argv: [/bin/true], user: probes}}}}\n"
        "    own: {pods: ['db-*'], command: {argv: [/bin/true], user: root}}\n"
    )
    results = with_rights(monkeypatch, EVERYTHING & ~(1 << 7))
    result = found(whole, probes, results)["probes"]
    assert result.found == "db: the daemon cannot switch users"
    assert "CAP_SETUID" in result.fix
    assert "probes" not in found(whole, probes, with_rights(monkeypatch, EVERYTHING))
    by_ip = f"{WATCH}  probes:\n    cart: {{pods: ['cart-*'], http: {{url: 'http://{{ip}}:80/'}}}}\n"
    assert "{ip} has no value" in found(whole, by_ip, results)["probes"].found
    results.kubelet_body = b"{}"
    assert "probes" not in found(whole, by_ip, results)


def test_what_the_daemon_may_not_write_is_seen_with_its_own_mounts(
    whole: LiveNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    results = with_rights(monkeypatch, EVERYTHING)
    config = f"{WATCH}  record: {{directory: {tmp_path}/rec}}\n{EVICT}"
    seen: list[str] = []

    def access(path: str, mode: int) -> bool:
        if mode == os.W_OK:
            seen.append(path)
        return False

    monkeypatch.setattr(os.path, "isdir", lambda path: not path.endswith("/rec"))
    monkeypatch.setattr(os, "access", access)
    there = found(whole, config, results)
    assert (there["recording"].found, there["recording"].state) == (
        f"{tmp_path}/rec is not writable",
        CheckState.WARN,
    )
    assert "ReadWritePaths=/var/lib/kubelet/pods" in there["notices"].fix
    assert seen == [f"/proc/4242/root{tmp_path}", "/proc/4242/root/var/lib/kubelet/pods"]


def test_the_end_of_the_api_servers_token_is_shown_and_a_reason_to_act_days_before(
    whole: LiveNode, tmp_path: Path
) -> None:
    path, now = tmp_path / "token", time.time()
    path.touch(mode=0o600)
    config = f"apiserver: {{server: 'https://10.0.0.1:6443', token_file: {path}}}\n"
    node = replace(inspected(whole.root, config), root="/")
    for left_s, state, words in (
        (30 * 86_400, CheckState.OK, "expires in 30 d"),
        (2 * 86_400 + 60, CheckState.WARN, "expires in 2 d"),
        (-7300, CheckState.BAD, "expired 2 h ago"),
    ):
        path.write_text(jwt(now + left_s, issued_s=now - 300 * 86_400))
        (result,) = watching._token(node)
        assert (result.name, result.state) == ("API token", state)
        assert words in result.found
        assert bool(result.fix) is (state is not CheckState.OK)
    path.write_text("opaque")
    assert list(watching._token(node)) == []


def test_means_that_cannot_be_used_say_why(whole: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    # No pod can be evicted though some should be: an error. In a dry run none is evicted anyway.
    for dry, lost in (("true", CheckState.WARN), ("false", CheckState.BAD)):
        config = f"mode: enforce\n{EVICT}  dry_run: {dry}\n"
        results = with_rights(monkeypatch, EVERYTHING)
        assert found(whole, config, results)["eviction"].state is CheckState.OK
        results.api_problem = "API server: HTTP 401"
        result = found(whole, config, results)["eviction"]
        assert result.state is CheckState.WARN
        assert result.found.endswith("; by cri, signal (per process); unusable: api: API server: HTTP 401")
        weak = with_rights(monkeypatch, EVERYTHING & ~(1 << 5))
        weak.cri_version, weak.cri_problem, weak.api_problem = None, "CRI: no answer", "none"
        result = found(whole, config, weak)["eviction"]
        unusable = "no usable method; unusable: api: none; cri: CRI: no answer; signal: the daemon lacks CAP_KILL"
        assert (result.state, unusable in result.found) == (lost, True)


def test_whether_pods_really_go_and_rules_are_enforced_and_why_not(whole: LiveNode) -> None:
    off = f"{EVICT}  dry_run: false\n"
    assert found(whole, f"mode: enforce\n{off}")["eviction"].found.startswith("enforced, 4 triggers")
    assert found(whole, f"mode: observe\n{off}")["eviction"].found.startswith("dry run (mode is observe)")
    text = found(whole, f"mode: observe\n{WATCH}  rules:\n    cpu: {{dry_run: false}}\n")["interference"].found
    assert text.startswith("4 rules, 1 enforced (mode is observe: no action is taken)")


def test_a_kernel_that_kills_whole_groups_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    live = LiveNode(tmp_path_factory.mktemp("v2"), "v2")
    live.put("sys/fs/cgroup/kubepods/cgroup.kill", "")
    assert "signal (cgroup.kill)" in found(live, EVICT)["eviction"].found


ALLOWED = json.dumps({"kind": "SelfSubjectAccessReview", "status": {"allowed": True}}).encode()
DENIED = json.dumps({"status": {"allowed": False, "reason": "no role"}}).encode()


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (Reply(ALLOWED, status="201 Created"), ""),
        (Reply(DENIED, status="201 Created"), "API server: not allowed to create pods/eviction (no role)"),
        (
            Reply(b'{"kind":"Status","message":"Unauthorized"}', status="401 Unauthorized"),
            "API server: HTTP 401 Unauthorized",
        ),
        (Reply(b"<html>", status="200 OK"), "API server: not a Kubernetes API server"),
    ],
)
async def test_the_api_server_is_asked_whether_we_may_evict(
    nursery: trio.Nursery, tmp_path: Path, reply: Reply, problem: str
) -> None:
    server, results = HttpPeer([reply]), QueryResults()
    port = await nursery.start(server.serve)
    await ask_api(inspected(str(tmp_path), f"apiserver: {{server: 'http://127.0.0.1:{port}'}}\n"), results)
    assert results.api_problem == problem
    assert server.requests[0][""] == "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews HTTP/1.1"
    wanted = {"verb": "create", "resource": "pods", "subresource": "eviction"}
    assert json.loads(server.bodies[0])["spec"]["resourceAttributes"] == wanted


async def test_no_way_to_the_api_server_is_a_reason_and_not_an_error(tmp_path: Path) -> None:
    results = QueryResults()
    await ask_api(inspected(str(tmp_path), "apiserver: {enabled: false}\n"), results)
    assert results.api_problem is not None
    assert results.api_problem.endswith("apiserver.enabled is false")


def test_containers_of_a_runtime_with_another_driver_are_outside_of_kubepods(good: LiveNode) -> None:
    node = inspected(good.root, "")
    (there,) = [result for result in kubelet(node, QueryResults()) if result.name == "kubepods"]
    assert there.state is CheckState.OK
    assert node.hierarchy is not None
    root = node.hierarchy.trigger_directory("/")
    name = f"kubepods-besteffort-pod1.slice:cri-containerd:{container_id('e1')}"
    os.makedirs(f"{root}/system.slice/containerd.service/{name}")
    (there,) = [result for result in kubelet(node, QueryResults()) if result.name == "kubepods"]
    assert there.state is CheckState.WARN
    assert "1 outside, such as /system.slice/containerd.service/kubepods-besteffort-pod1" in there.found
    assert "SystemdCgroup = true" in there.fix


def test_private_groups_for_the_pressure_of_pods_are_suggested_only_where_they_are_not_in_use(good: LiveNode) -> None:
    os.unlink(f"{good.root}/sys/fs/cgroup/cpuacct/kubepods/cpu.pressure")
    for config, state, told in (
        ("", CheckState.WARN, "not per group"),
        ("interference: {enabled: true, private_cgroup2: true}", CheckState.OK, "private groups of pods"),
        ("interference: {private_cgroup2: true}", CheckState.WARN, "not per group"),
    ):
        (result,) = [item for item in examine(inspected(good.root, config)) if item.name == "PSI"]
        assert (result.state, result.found) == (state, f"node, {told}, triggers any window")


def test_pressure_that_is_compiled_in_but_off_is_told_from_none(good: LiveNode) -> None:
    shutil.rmtree(f"{good.root}/proc/pressure")
    for built, line, told, fix in (
        ("CONFIG_PSI=y\n", "quiet psi=0", "compiled in, but disabled", "boot with psi=1 instead of psi=0"),
        ("CONFIG_PSI=y\n", "quiet", "compiled in, but disabled", "boot with psi=1: "),
        ("# CONFIG_PSI is not set\n", "quiet", "not in this kernel", "use a kernel with CONFIG_PSI"),
        ("", "quiet", "none", "boot with psi=1"),
    ):
        good.put("boot/config-6.1.0-28-amd64", built)
        good.put("proc/cmdline", f"{line}\n")
        (result,) = [item for item in examine(inspected(good.root, "")) if item.name == "PSI"]
        assert (result.state, result.found) == (CheckState.WARN, told)
        assert result.fix.startswith(fix)


def test_the_daemon_is_the_holder_of_the_lock_if_that_is_one_here(
    good: LiveNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, lock = inspected(good.root, ""), "var/lib/bypassd/lock"
    files = {"proc/7/cmdline": "/opt/bypassd\0run\0", "proc/9/cmdline": "/bin/sleep\0" + "1\0"}
    monkeypatch.setattr(asking, "read_text", lambda root, path: files.get(path) if root == "/" else None)
    good.put(lock, "7\n")
    assert asking._daemon_pid(node) == 7
    # A number of another PID namespace: here it belongs to no process, or another.
    good.put(lock, "8\n")
    assert asking._daemon_pid(node) is None
    good.put(lock, "9\n")
    assert asking._daemon_pid(node) is None
    os.unlink(f"{good.root}/{lock}")
    assert asking._daemon_pid(node) is None


@pytest.mark.kernel
def test_on_this_machine_the_kernel_is_asked_and_left_as_it_was() -> None:
    if os.geteuid() != 0:
        pytest.skip("NOT RUN: needs root: netlink and perf events")
    before = sorted(os.listdir("/proc/self/fd"))
    assert asking._taskstats_problem() == ""
    assert isinstance(asking._perf_problem(), str)
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("config", "problem", "state", "part"),
    [
        ("", "", CheckState.OK, "taint PreferNoSchedule on the node"),
        ("", "API server: not allowed to patch nodes", CheckState.OK, "no mark on the node (API server: not allowed"),
        ("closing: {mark: none}", None, CheckState.OK, "no mark on the node"),
        ("closing: {enabled: false}", None, CheckState.OK, "replacement may come back at once"),
        ("closing: {mark: NoSchedule}", "", CheckState.OK, "keeps online pods away, too"),
        ("closing: {mark: NoSchedule}", "HTTP 403", CheckState.WARN, "no taint NoSchedule: HTTP 403"),
        ("closing: {mark: condition}", "HTTP 403", CheckState.WARN, "no condition BypassdClosed: HTTP 403"),
    ],
)
def test_what_keeps_new_pods_away_in_a_shortage_is_said_and_only_a_configured_mark_is_missed(
    tmp_path: Path, config: str, problem: str | None, state: CheckState, part: str
) -> None:
    node = replace(inspected(str(tmp_path), f"{EVICT}{config}\n"), root="/")
    results = QueryResults()
    results.mark_problem = problem
    result = watching._closing(node, results)
    assert (result.state, part in result.found) == (state, True), result.found

"""What doctor says of memory, disks and interfaces: what the node has, and what the enabled policies lack."""

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from reconciler.cli.checks import CheckState
from reconciler.cli.checks.machine import devices, memory
from reconciler.cli.format import value_text
from reconciler.cli.nodeview import InspectedNode
from reconciler.cli.offline import plan_node
from reconciler.cli.recorded import RecordedNode
from reconciler.config.model import Config
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.disk import DiskPolicyConfig, DiskRule
from reconciler.policies.memory_qos import MemoryQosConfig
from reconciler.policies.memory_reclaim import MemoryReclaimConfig
from reconciler.policies.network import InterfaceRule, NetworkConfig
from reconciler.policies.numa_memory import NumaMemoryPolicyConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.policies.watermarks import WatermarksConfig
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import inspected

PSI = "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=1\n"
MEMINFO = "MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\nSwapTotal: {swap} kB\nSwapFree: 0 kB\n"
OFF = PoliciesConfig()
V1, V2 = "sys/fs/cgroup/memory/kubepods", "sys/fs/cgroup/kubepods"


@pytest.fixture
def v2(tmp_path_factory: pytest.TempPathFactory) -> LiveNode:
    return LiveNode(tmp_path_factory.mktemp("v2"), "v2")


def configured(live: LiveNode, policies: PoliciesConfig) -> InspectedNode:
    node = inspected(live.root)
    return replace(node, config=replace(node.config, policies=policies))


def found(live: LiveNode, policies: PoliciesConfig = OFF, swap: int = 0) -> dict[str, tuple[CheckState, str, str]]:
    live.put("proc/meminfo", MEMINFO.format(swap=swap))
    return {result.name: (result.state, result.found, result.fix) for result in memory(configured(live, policies))}


def test_one_line_when_something_is_on_and_none_else(live: LiveNode) -> None:
    on = PoliciesConfig(numa_memory=NumaMemoryPolicyConfig(enabled=True))
    assert found(live) == {}
    assert found(live, on) == {"memory": (CheckState.OK, "16 GiB, no swap", "")}
    live.put(f"{V1}/memory.limit_in_bytes", f"{12 << 30}\n")
    assert found(live, on, swap=1 << 20)["memory"][1] == "16 GiB, 1 GiB of swap; pods may use 12 GiB"


def test_a_node_without_memory_figures_is_unknown(live: LiveNode) -> None:
    live.put("proc/meminfo", "MemTotal: 5 kB\n")
    node = inspected(live.root)
    assert [(result.state, result.found) for result in memory(node)] == [(CheckState.WARN, "unknown")]


def test_directories_without_hierarchical_accounting_are_reported(live: LiveNode) -> None:
    live.put(f"{V1}/memory.use_hierarchy", "0\n")
    state, message, fix = found(live)["memory"]
    assert (state, message) == (CheckState.WARN, "16 GiB, no swap; kubepods does not count the memory of its pods")
    assert "memory.use_hierarchy" in fix
    live.put(f"{V1}/memory.use_hierarchy", "1\n")
    assert found(live) == {}


def test_v1_has_no_protections(live: LiveNode, v2: LiveNode) -> None:
    on = PoliciesConfig(memory_qos=MemoryQosConfig(enabled=True))
    assert found(live, on)["memory protection"][0] is CheckState.WARN
    assert "memory protection" not in found(v2, on)


def test_a_bound_without_effect_is_reported(live: LiveNode, v2: LiveNode) -> None:
    for hard, swap, on_v1, on_v2 in (
        (0, 0, CheckState.WARN, CheckState.WARN),
        (0, 5, CheckState.WARN, CheckState.OK),
        (5, 0, CheckState.OK, CheckState.OK),
    ):
        on = PoliciesConfig(be_memory=BeMemoryConfig(enabled=True, hard_percent=hard))
        assert found(live, on, swap)["memory limit"][0] is on_v1
        assert found(v2, on, swap)["memory limit"][0] is on_v2


def test_the_needs_of_reclaim_are_reported(live: LiveNode, v2: LiveNode) -> None:
    on = PoliciesConfig(memory_reclaim=MemoryReclaimConfig(enabled=True))
    assert "the whole cache of a container at once" in found(live, on)["memory reclaim"][1]
    assert found(v2, on)["memory reclaim"] == (
        CheckState.WARN,
        "no memory pressure per group: no proactive reclaim",
        "boot with psi=1",
    )
    v2.put(f"{V2}/memory.pressure", PSI)
    assert found(v2, on)["memory reclaim"] == (CheckState.OK, "page cache only: no swap", "")
    (Path(v2.root) / V2 / "memory.reclaim").unlink()
    assert found(v2, on)["memory reclaim"][2] == "Linux 5.19 or later"


def test_missing_page_migration_is_reported(live: LiveNode) -> None:
    on = PoliciesConfig(numa_memory=NumaMemoryPolicyConfig(enabled=True, migrate=True))
    assert "page migration" not in found(live, on)
    (Path(live.root) / "sys/fs/cgroup/cpuset/kubepods/cpuset.memory_migrate").unlink()
    assert found(live, on)["page migration"][0] is CheckState.WARN


def test_the_marks_are_shown_where_they_are_set(live: LiveNode) -> None:
    on = PoliciesConfig(watermarks=WatermarksConfig(enabled=True))
    assert found(live, on)["memory watermarks"][0] is CheckState.WARN
    live.put("proc/sys/vm/watermark_scale_factor", "10\n")
    live.put("proc/sys/vm/min_free_kbytes", "67584\n")
    text = "vm.min_free_kbytes 67584, vm.watermark_scale_factor 10"
    assert found(live, on)["memory watermarks"] == (CheckState.OK, text, "")


MEGA = 1 << 20
SCHEDULER = "sys/devices/block/sda/queue/scheduler"


def with_disk(live: LiveNode) -> None:
    """A disk sda that has a partition."""
    for directory, number in (("sda", "8:0"), ("sda/sda1", "8:1")):
        live.put(f"sys/devices/block/{directory}/dev", f"{number}\n")
        os.makedirs(f"{live.root}/sys/dev/block", exist_ok=True)
        os.symlink(f"{live.root}/sys/devices/block/{directory}", f"{live.root}/sys/dev/block/{number}")
    live.put("sys/devices/block/sda/sda1/partition", "1\n")
    live.put(SCHEDULER, "none [bfq]\n")


def found_devices(live: LiveNode, config: PoliciesConfig) -> list[tuple[str, CheckState, str]]:
    return [(result.name, result.state, result.found) for result in devices(configured(live, config))]


def disk(*names: str, weight: int | None = 10) -> PoliciesConfig:
    rules = tuple(DiskRule(name=name, write_bps=MEGA) for name in names)
    return PoliciesConfig(disk=DiskPolicyConfig(enabled=True, weight_be=weight, devices=rules))


def test_devices_that_are_off_are_not_spoken_of(live: LiveNode) -> None:
    assert found_devices(live, PoliciesConfig()) == []


def test_a_disk_is_reported_with_its_scheduler(live: LiveNode) -> None:
    with_disk(live)
    assert found_devices(live, disk("8:1")) == [("disk", CheckState.OK, "8:1 is sda 8:0, scheduler bfq")]
    live.put(SCHEDULER, "[none] bfq\n")
    for weight, state in ((10, CheckState.WARN), (None, CheckState.OK)):
        assert found_devices(live, disk("8:1", weight=weight)) == [("disk", state, "8:1 is sda 8:0, scheduler none")]


def test_two_names_of_one_disk_with_different_settings_are_reported(live: LiveNode) -> None:
    with_disk(live)
    rules = (DiskRule(name="8:1", write_bps=MEGA), DiskRule(name="8:0", write_bps=2 * MEGA))
    rows = found_devices(live, PoliciesConfig(disk=DiskPolicyConfig(enabled=True, devices=rules)))
    message = "8:1 and 8:0 are both sda 8:0: the smaller write_bps applies"
    assert rows[2:] == [("disk", CheckState.WARN, message)]


def test_a_missing_disk_is_reported(live: LiveNode) -> None:
    assert found_devices(live, disk("9:9")) == [("disk", CheckState.WARN, "disks: 9:9: no block device 9:9")]


def test_the_network_needs_net_cls_and_its_interfaces(live: LiveNode) -> None:
    live.put("sys/class/net/eth0/speed", "1000\n")
    live.put("sys/class/net/ens3/speed", "-1\n")
    live.put("sys/class/net/ens4/speed", "-1\n")
    names = (("eth0", None), ("eth7", None), ("ens3", None), ("ens4", 1000))
    interfaces = tuple(InterfaceRule(name=name, link_mbit=speed) for name, speed in names)
    for pods, words in ((True, "BE pods in the host network are not limited"), (False, "no BE traffic is limited")):
        config = NetworkConfig(enabled=True, interfaces=interfaces, pods=pods)
        assert found_devices(live, PoliciesConfig(network=config)) == [
            ("network", CheckState.WARN, f"no net_cls to identify BE packets: {words}"),
            ("network", CheckState.WARN, "eth7: no such interface: no limit applies"),
            ("network", CheckState.WARN, "ens3: its driver reports no speed: no limit applies"),
        ]


def test_a_kernel_without_the_modules_that_redirect_packets_is_reported(live: LiveNode) -> None:
    live.put("sys/class/net/eth0/speed", "1000\n")
    live.put("proc/sys/kernel/osrelease", "6.1.0-test\n")
    config = NetworkConfig(enabled=True, interfaces=(InterfaceRule(name="eth0"),))
    for builtin, modules, absent in (
        ("sch_ingress sch_htb cls_u32 act_mirred ifb", "", ""),
        ("sch_htb", "sch_ingress cls_u32 act_mirred ifb", ""),
        ("sch_htb sch_ingress", "cls_u32 act_mirred", "ifb"),
        ("", "nfs", "ifb, sch_ingress, sch_htb, cls_u32, act_mirred"),
    ):
        lines = "".join(f"kernel/net/{part}.ko\n" for part in builtin.split())
        live.put("lib/modules/6.1.0-test/modules.builtin", lines)
        lines = "".join(f"kernel/net/{part}.ko.zst: kernel/net/other.ko.zst\n" for part in modules.split())
        live.put("lib/modules/6.1.0-test/modules.dep", lines)
        texts = [message for _, _, message in found_devices(live, PoliciesConfig(network=config)) if "lacks" in message]
        expected = f"this kernel lacks {absent}: BE pods with their own network namespace are not limited"
        assert texts == ([expected] if absent else [])


def test_a_plan_without_a_daemon_knows_the_disks_and_what_is_wrong_with_others(live: LiveNode) -> None:
    with_disk(live)
    node = inspected(live.root)
    config: Config = replace(node.config, policies=disk("8:1", "9:9"))
    outlook = plan_node(replace(node, config=config), RecordedNode(), files=live.kernel)
    assert outlook.view.disks["8:1"].device == "8:0"
    assert "no disk found for 9:9" in outlook.desired.plan.reasons["disk"]
    assert "disks: 9:9: no block device 9:9" in outlook.problems


def test_a_file_of_several_lines_is_shown_in_one() -> None:
    assert value_text("254:0 5\n8:0 7") == "254:0 5; 8:0 7"

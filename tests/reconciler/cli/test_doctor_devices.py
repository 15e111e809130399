"""doctor and plan about the disks and interfaces that the configuration names."""

import os

from msgspec.structs import replace

from reconciler.cli.checks import CheckState
from reconciler.cli.checks.machine import devices
from reconciler.cli.format import value_text
from reconciler.cli.offline import plan_node
from reconciler.cli.recorded import RecordedNode
from reconciler.config.model import Config
from reconciler.policies.disk import DiskPolicyConfig, DiskRule
from reconciler.policies.network import InterfaceRule, NetworkConfig
from reconciler.policies.table import PoliciesConfig
from tests.fakes.livenode import LiveNode
from tests.reconciler.cli.conftest import inspected

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


def found(live: LiveNode, config: PoliciesConfig) -> list[tuple[str, CheckState, str]]:
    node = inspected(live.root)
    there = replace(node, config=replace(node.config, policies=config))
    return [(result.name, result.state, result.found) for result in devices(there)]


def disk(*names: str, weight: int | None = 10) -> PoliciesConfig:
    rules = tuple(DiskRule(name=name, write_bps=MEGA) for name in names)
    return PoliciesConfig(disk=DiskPolicyConfig(enabled=True, weight_be=weight, devices=rules))


def test_what_is_off_is_not_spoken_of(live: LiveNode) -> None:
    assert found(live, PoliciesConfig()) == []


def test_a_disk_is_reported_with_its_scheduler(live: LiveNode) -> None:
    with_disk(live)
    assert found(live, disk("8:1")) == [("disk", CheckState.OK, "8:1 is sda 8:0, scheduler bfq")]
    live.put(SCHEDULER, "[none] bfq\n")
    for weight, state in ((10, CheckState.WARN), (None, CheckState.OK)):
        assert found(live, disk("8:1", weight=weight)) == [("disk", state, "8:1 is sda 8:0, scheduler none")]


def test_two_names_of_one_disk_with_different_settings_are_reported(live: LiveNode) -> None:
    with_disk(live)
    rules = (DiskRule(name="8:1", write_bps=MEGA), DiskRule(name="8:0", write_bps=2 * MEGA))
    rows = found(live, PoliciesConfig(disk=DiskPolicyConfig(enabled=True, devices=rules)))
    message = "8:1 and 8:0 are both sda 8:0: the smaller write_bps applies"
    assert rows[2:] == [("disk", CheckState.WARN, message)]


def test_a_missing_disk_is_reported(live: LiveNode) -> None:
    assert found(live, disk("9:9")) == [("disk", CheckState.WARN, "disks: 9:9: no block device 9:9")]


def test_the_network_needs_net_cls_and_its_interfaces(live: LiveNode) -> None:
    live.put("sys/class/net/eth0/speed", "1000\n")
    live.put("sys/class/net/ens3/speed", "-1\n")
    live.put("sys/class/net/ens4/speed", "-1\n")
    names = (("eth0", None), ("eth7", None), ("ens3", None), ("ens4", 1000))
    interfaces = tuple(InterfaceRule(name=name, link_mbit=speed) for name, speed in names)
    for pods, words in ((True, "BE pods in the host network are not limited"), (False, "no BE traffic is limited")):
        config = NetworkConfig(enabled=True, interfaces=interfaces, pods=pods)
        assert found(live, PoliciesConfig(network=config)) == [
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
        texts = [message for _, _, message in found(live, PoliciesConfig(network=config)) if "lacks" in message]
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

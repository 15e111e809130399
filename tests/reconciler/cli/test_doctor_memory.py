"""What doctor says of memory: what there is for pods, and what the policies that are on lack."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from reconciler.cli.checks import CheckState
from reconciler.cli.checks.machine import memory
from reconciler.policies.be_memory import BeMemoryConfig
from reconciler.policies.memory_qos import MemoryQosConfig
from reconciler.policies.memory_reclaim import MemoryReclaimConfig
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


def found(live: LiveNode, policies: PoliciesConfig = OFF, swap: int = 0) -> dict[str, tuple[CheckState, str, str]]:
    live.put("proc/meminfo", MEMINFO.format(swap=swap))
    node = inspected(live.root)
    there = replace(node, config=replace(node.config, policies=policies))
    return {result.name: (result.state, result.found, result.fix) for result in memory(there)}


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

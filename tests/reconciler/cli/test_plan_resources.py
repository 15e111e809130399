"""plan and simulate show everything that the planner returns: memory, disk, network, cache, cookies, scores, marks."""

import json
from pathlib import Path
from typing import Any

import pytest

from reconciler.cli.offline import _cache
from reconciler.cli.plan import blocks
from reconciler.cli.screen import plain
from reconciler.control.planner import plan_node
from reconciler.policies.cache import CachePolicyConfig
from reconciler.policies.table import PoliciesConfig
from state.cache import CacheRequest
from state.plan import NodePlan
from state.summary import resource_facts
from tests.fakes.livenode import LiveNode
from tests.fakes.resctrl_model import ResctrlModel
from tests.fakes.resctrl_shapes import INTEL
from tests.reconciler.cli.conftest import Run
from tests.reconciler.interference.nodescript import night, recording, steps
from tests.reconciler.nodes import node, online, pod

ALL = """\
mode: enforce
policies:
  cache: {enabled: true}
  core_sched: {enabled: true}
  disk: {enabled: true, devices: [{name: sda, write_bps: 100000000}]}
  memory_reclaim: {enabled: true}
  network: {enabled: true, interfaces: [{name: eth0, link_mbit: 1000}]}
  oom_score: {enabled: true, lowest: 950}
  idle_class: {enabled: true, threads: true}
  watermarks: {enabled: true, min_free_factor: 100}
"""
PODS_FILE = """\
- {name: web, requests: {cpu: 500m}}
- {name: crunch, labels: {koordinator.sh/qosClass: BE}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "all.yaml"
    path.write_text(ALL)
    return str(path)


def test_a_described_machines_plan_has_every_resource(run: Run, tmp_path: Path, config: str) -> None:
    pods = tmp_path / "pods.yaml"
    pods.write_text(PODS_FILE)
    parts = ("plan", "--machine", "4 cores x 2 threads", "--pods", str(pods), "--config", config)
    ran = run(*parts, "-o", "json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    result = document["resources"]
    uids = {entry["title"]: entry for entry in document["pods"]}
    be = uids["default/crunch"]["group"]
    ((path, score),) = result["oom_scores"]["scores"].items()
    assert (path.startswith(f"{be}/"), score) == (True, 1000)
    assert result["idle_threads"]["policies"] == {path: "idle"}
    assert result["cookies"]["groups"] == {path: "reclaimed"}
    assert [interface["name"] for interface in result["network"]["interfaces"]] == ["eth0"]
    assert result["memory"]["reclaim"]["interval_s"] == 6.0
    assert result["disk"]["takers"] == 1
    assert (result["cache"]["reclaimed"]["cat_range_end_percent"], result["cache"]["groups"]) == (30, None)
    values = {name: file["value"] for name, file in result["files"].items()}
    assert values == {"vm.min_free_kbytes": None, "vm.watermark_scale_factor": None}
    assert {"cache", "core_sched", "disk", "memory_reclaim", "network", "oom_score", "watermarks"} <= {
        policy for policy, reason in result["reasons"].items() if reason != "off"
    }
    rows = {tuple(line.split()[:2]) for line in run(*parts).out.splitlines()}
    assert {("oom.score", "1000"), ("thread.policy", "idle"), ("core.cookie", "reclaimed")} <= rows


def test_without_any_of_it_the_plan_says_so_and_the_screen_is_as_short_as_before(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "none.yaml"
    path.write_text("mode: enforce\n")
    parts = ("plan", "--machine", "4 cores", "--config", str(path))
    document = json.loads(run(*parts, "-o", "json").out)
    result = document["resources"]
    assert [result[name] for name in ("network", "cache", "cookies", "oom_scores", "idle_threads")] == [None] * 5
    assert result["files"] == {}
    assert set(result["reasons"].values()) == {"off"}
    assert "POLICY" not in plain(blocks(document))


def test_the_marks_of_a_copied_node_follow_its_memory(run: Run, tmp_path: Path, config: str) -> None:
    live = LiveNode(tmp_path / "node", "v2")
    proc = Path(live.root, "proc")
    (proc / "meminfo").write_text("MemTotal: 104857600 kB\nMemAvailable: 52428800 kB\n")
    ran = run("plan", "--root", live.root, "--config", config, "-o", "json")
    assert ran.code == 0, ran.err
    files = json.loads(ran.out)["resources"]["files"]
    assert {name: file["value"] for name, file in files.items()} == {
        "vm.min_free_kbytes": 1 << 20,
        "vm.watermark_scale_factor": 50,
    }


def test_the_groups_of_a_machine_with_resctrl_are_in_the_plan(tmp_path: Path) -> None:
    ResctrlModel(INTEL).install(str(tmp_path))
    view = node(pod("be"), online("web"))
    plan = plan_node(view, None, PoliciesConfig(cache=CachePolicyConfig(enabled=True)))
    cache = _cache(plan.cache, view, str(tmp_path))
    assert cache is not None
    facts: Any = resource_facts(plan, cache)["cache"]
    assert facts["members"] == {"be": "bypassd-be"}
    assert list(facts["groups"]) == ["bypassd-be"]
    assert facts["problems"] == []


def test_a_machine_without_resctrl_is_a_problem_and_no_wish_is_none(tmp_path: Path) -> None:
    view = node(pod("be"))
    assert _cache(None, view, str(tmp_path)) is None
    cache = _cache(CacheRequest(), view, str(tmp_path))
    assert cache is not None
    assert (len(cache.problems), cache.groups) == (1, ())


def test_a_simulation_ends_with_what_each_configuration_plans(run: Run, tmp_path: Path, config: str) -> None:
    record, other = tmp_path / "a.rec", tmp_path / "other.yaml"
    record.write_bytes(recording(list(steps(night(3)))))
    other.write_text("mode: enforce\n")
    parts = ("simulate", "--record", str(record), "--config", config, "--against", str(other))
    document = json.loads(run(*parts, "-o", "json").out)
    result, against = document["resources"], document["against"]["resources"]
    assert result["oom_scores"]["scores"] == {"/kubepods/besteffort/podbatch/id-batch-1": 1000}
    assert result["disk"]["takers"] == 1
    assert result["reasons"]["cache"].startswith("BE has 0-30 %")
    assert against["oom_scores"] is None
    assert set(against["reasons"].values()) == {"off"}
    assert "oom_score" in run(*parts).out


def test_every_field_of_the_plan_is_shown() -> None:
    shown = resource_facts(NodePlan(pools=plan_node(node(), None, PoliciesConfig()).pools), None)
    # Whether the node is closed to new BE pods follows from evictions, of which a plan of one moment has none.
    assert shown.keys() | {"pools", "closed"} == set(NodePlan.__struct_fields__)

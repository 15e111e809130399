"""Exclusive CPUs of a record against the kernel's files: what the kernel says protects, and the record is a message."""

from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from cgroupfs.naming import QosClass
from reconciler.actuators.mode import WriteSettings
from reconciler.alerts.agent_alerts import SourceHealth, claim_states
from reconciler.control.planner import plan, plan_pools
from reconciler.control.record_check import _is_meant
from reconciler.daemon.agent import Agent
from reconciler.placement.claims import CpuClaim, claims_status, cpu_claims
from reconciler.policies.budget import BudgetConfig
from reconciler.policies.reclaimed import ReclaimedConfig, ReclaimedForm
from reconciler.policies.reserve import ReserveConfig
from reconciler.policies.shared import ConfineMode, SharedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.runtime.workqueue import NODE, DirtyBatch
from state.cpu import CpuPreferences, OwnerCpus
from state.model import CpuPolicy, NodeView, Pod, PodClass, RuntimeSpec
from tests.fakes.kernel import Mode
from tests.fakes.livenode import BATCH, PINNED, WEB, LiveNode, container_id, group
from tests.reconciler.nodes import container, cpus, kubelet, node, pod

ALL: Final = BudgetConfig(limit_percent=100)
CONFIG = PoliciesConfig(reserve=ReserveConfig(enabled=False), reclaimed=ReclaimedConfig(budget=ALL))
OWNER = f"dedicated/{PINNED}/main"


@pytest.fixture(params=["v1", "v2"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> LiveNode:
    """The kubelet has given CPU 7 to one container, and every file is as the kubelet wants it."""
    mode: Mode = request.param
    made = LiveNode(tmp_path, mode, files=False)
    for uid in (WEB, BATCH, PINNED):
        give(made, uid, "7" if uid == PINNED else "0-6")
    return made


def give(live: LiveNode, uid: str, text: str) -> None:
    live.write(f"{group(uid)}/{container_id(uid)}", "cpuset", "cpuset.cpus", text)


def has(live: LiveNode, uid: str) -> str:
    return live.read(f"{group(uid)}/{container_id(uid)}", "cpuset", "cpuset.cpus")


async def checked(agent: Agent) -> CpuClaim:
    """After one check and the pass that it leads to."""
    await agent.control.owner_check.check()
    batch = agent.hub.changed.take_nowait()
    if batch:
        await agent.control.reconciler.reconcile(batch)
    return next(claim for claim in agent.control.claims() if claim.owner == OWNER)


async def test_a_container_that_runs_elsewhere_is_protected_there_after_one_period(
    live: LiveNode, mock_clock: MockClock
) -> None:
    """Kubernetes 120230: the checkpoint gives it CPU 7, its file has 1-6."""
    give(live, PINNED, "1-6")
    async with live.looked() as agent:
        assert cpus(has(live, BATCH)) & cpus("1-6")
        assert not (await checked(agent)).cut
        mock_clock.jump(9.9)
        assert not (await checked(agent)).cut, "the kubelet corrects it within 10 s"
        mock_clock.jump(0.2)
        claim = await checked(agent)
        assert (claim.got, claim.asked) == (0, 1)
        assert "the kubelet's checkpoint gives it CPU 7, its CPU set file has CPU 1-6" in claim.against
        assert has(live, BATCH) == "0"
        assert "BE work is kept off CPU 1-6" in claim.against
        assert not claims_status(agent.control.claims()).ok
        # It is a problem of the node, and an alert with the pod's name once it lasts.
        assert [item.detail for item in agent.statuses() if not item.ok and "CPU 1-6" in item.detail]
        health = SourceHealth(60)
        assert not health.check(claim_states(agent.control.claims(), agent.control.inventory.pods), 0.0, 0.0)
        (alert,) = health.check(claim_states(agent.control.claims(), agent.control.inventory.pods), 60.0, 0.0)
        assert "CPU 1-6" in alert.summary
        assert alert.labels["uid"] == PINNED
        # The kubelet has corrected it.
        give(live, PINNED, "7")
        assert not (await checked(agent)).cut
        pools = agent.control.reconciler.pools
        assert pools is not None
        assert not pools.elsewhere
        assert " of 6 eligible)" in pools.reasons["reclaimed"]


async def test_cpus_that_another_container_may_use_are_not_exclusive(live: LiveNode, mock_clock: MockClock) -> None:
    give(live, WEB, "0-7")
    async with live.looked() as agent:
        await checked(agent)
        mock_clock.jump(10.1)
        claim = await checked(agent)
        assert claim.cut
        assert (
            claim.against == f"CPU 7 is not exclusive: {agent.control.inventory.pods[WEB].title}/main may run on CPU 7"
        )
        assert claim.got == 0, "none of them is its own"


async def test_a_set_that_changes_while_it_is_wrong_is_followed(live: LiveNode, mock_clock: MockClock) -> None:
    give(live, PINNED, "1-6")
    async with live.looked() as agent:
        await checked(agent)
        mock_clock.jump(10.1)
        await checked(agent)
        give(live, PINNED, "0-2")
        assert "has CPU 0-2" in (await checked(agent)).against
        assert not cpus(has(live, BATCH)) & cpus("0-2")


async def test_an_observer_reports_no_choice_of_its_own(live: LiveNode, mock_clock: MockClock) -> None:
    """Under policy none bypassd gives the CPUs; while it writes nothing, no file has them."""
    live.kubelet.cpu_manager("none", "")
    with live.agent() as agent:
        agent.mode.set_enforce(enforce=False)
        await live.look(agent)
        await agent.control.owner_check.check()
        mock_clock.jump(20)
        await agent.control.owner_check.check()
        await agent.control.reconciler.reconcile(DirtyBatch(frozenset({NODE}), ()))
        assert not agent.control.inventory.readings.owners


# The plan


def owner(*, lends: bool | None = None) -> Pod:
    main = container("main", spec=RuntimeSpec(quota_us=100_000, period_us=100_000, cpus="7"))
    return replace(pod("p", main, cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED), wish=CpuPreferences(lends=lends))


def contradicted(kernel: str, one: Pod | None = None, default: str = "0-6") -> NodeView:
    view = kubelet(CpuPolicy.STATIC, default, {"p/main": "7"})
    owners = {"p/main": OwnerCpus(record=cpus("7"), kernel=cpus(kernel))} if kernel else {}
    return node(one or owner(), pod("be"), kubelet=view, owners=owners)


@pytest.mark.parametrize(
    ("kernel", "be"),
    [
        pytest.param("", "0-6", id="as recorded"),
        pytest.param("1-6", "0", id="the kernel's value protects"),
        pytest.param("3", "0-2,4-6", id="one CPU"),
        pytest.param("0-7", "0-6", id="everywhere: no other CPU is left for BE work"),
    ],
)
def test_be_work_is_kept_off_where_an_owner_runs(kernel: str, be: str) -> None:
    view = contradicted(kernel)
    pools = plan_pools(view, None, CONFIG)
    assert pools.reclaimed == cpus(be)
    assert pools.dedicated == {"p/main": cpus("7")}, "the record's CPUs stay the owner's, too"
    (claim,) = [claim for claim in cpu_claims(view, pools) if claim.owner == "dedicated/p/main"]
    assert claim.cut == bool(kernel)
    if kernel == "0-7":
        assert "BE work also runs on CPU 0-6" in claim.against


@pytest.mark.parametrize(("lends", "be"), [(True, "0-7"), (False, "0")])
def test_an_owner_that_accepts_be_work_accepts_it_everywhere(lends: bool, be: str) -> None:
    config = replace(CONFIG, reclaimed=ReclaimedConfig(budget=ALL, share_exclusive=True))
    assert plan_pools(contradicted("1-6", owner(lends=lends)), None, config).reclaimed == cpus(be)


@pytest.mark.parametrize(("kernel", "lifted"), [("", True), ("1-6", False)])
def test_a_container_that_runs_elsewhere_keeps_its_quota(kernel: str, lifted: bool) -> None:
    settings = plan(contradicted(kernel), None, CONFIG).settings
    assert any(setting.policy == "pinned" for setting in settings.values()) == lifted


async def test_a_pod_in_gvisor_is_judged_by_its_directory(live: LiveNode, mock_clock: MockClock) -> None:
    """Its container's group has the kubelet's CPU and no process."""
    shim = f"run/containerd/io.containerd.runtime.v2.task/k8s.io/{container_id(PINNED)}/shim-binary-path"
    live.put(shim, "/usr/local/bin/containerd-shim-runsc-v1")
    with live.agent() as agent:
        agent.mode.use(WriteSettings(dry_policies=frozenset({"dedicated"})))
        await live.look(agent)
        await checked(agent)
        mock_clock.jump(10.1)
        claim = await checked(agent)
        assert "gives it CPU 7, its CPU set file has CPU 0-7" in claim.against
        assert "BE work also runs on CPU" in claim.against
        agent.mode.use(WriteSettings(dry_policies=frozenset()))
        await live.look(agent)
        assert live.read(group(PINNED), "cpuset", "cpuset.cpus").strip() == "7"
        assert not (await checked(agent)).cut
        # Two containers with a CPU each: the pod has both.
        live.kubelet.cpu_manager("static", "0-5", {PINNED: {"main": "7", "side": "6"}})
        agent.sources.checkpoints.read_all()
        live.write(group(PINNED), "cpuset", "cpuset.cpus", "6-7")
        await live.look(agent)
        await checked(agent)
        mock_clock.jump(10.1)
        assert not (await checked(agent)).cut


@pytest.mark.parametrize(
    ("cls", "policies", "ours", "meant"),
    [
        pytest.param(PodClass.RECLAIMED, CONFIG, True, False, id="BE work has a CPU set that is not in force"),
        pytest.param(PodClass.RECLAIMED, CONFIG, False, False, id="the same beside the kubelet's owners"),
        pytest.param(
            PodClass.RECLAIMED,
            PoliciesConfig(reclaimed=ReclaimedConfig(form=ReclaimedForm.QUOTA)),
            True,
            True,
            id="BE work is limited by quota only",
        ),
        pytest.param(
            PodClass.RECLAIMED,
            PoliciesConfig(reclaimed=ReclaimedConfig(share_exclusive=True)),
            False,
            True,
            id="BE work may run there",
        ),
        pytest.param(PodClass.SHARED, CONFIG, True, False, id="online pods are confined"),
        pytest.param(
            PodClass.SHARED,
            PoliciesConfig(shared=SharedConfig(confine=ConfineMode.NEVER)),
            True,
            True,
            id="online pods are never confined",
        ),
        pytest.param(PodClass.SYSTEM, CONFIG, True, True, id="system pods run everywhere under policy none"),
        pytest.param(PodClass.SYSTEM, CONFIG, False, False, id="the static policy keeps them off, too"),
    ],
)
def test_what_the_configuration_lets_run_there_is_no_contradiction(
    cls: PodClass, policies: PoliciesConfig, ours: bool, meant: bool
) -> None:
    assert _is_meant(pod("p", cls=cls), policies, ours=ours) is meant

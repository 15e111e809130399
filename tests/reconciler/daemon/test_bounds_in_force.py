"""Problems and reasons of CPU sets and quotas follow from the files: fault by fault, on the daemon's own agent."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from reconciler.config.model import AgentMode
from reconciler.control import bounds_in_force
from reconciler.control.bounds_in_force import BoundProblem, response_problem
from reconciler.daemon.agent import Agent
from reconciler.daemon.status import nothing_in_force
from reconciler.policies.reclaimed import ReclaimedForm
from reconciler.policies.shared import ConfineMode
from state.measures import Restrictions, SqueezeLimit
from state.model import Hold, PodMeta
from tests.fakes.livenode import BATCH, BOX, INNER, PINNED, WEB, LiveNode, container_id, group
from tests.fakes.report import status_report


@contextmanager
def refusing(live: LiveNode, path: str, file: str, controller: str = "cpuset") -> Iterator[None]:
    """One file that the kernel does not let change: as a cpuset with a deadline task in it does."""
    with mock.patch.object(live.kernel, "write", live.failing("write", path, controller, file, errno.EBUSY)):
        yield


def shown(agent: Agent) -> tuple[list[str], dict[str, str]]:
    document: Any = status_report(agent).state(("problems", "budget"))
    return list(document["problems"]), dict(document["budget"]["reasons"])


async def test_a_container_that_cannot_leave_an_owned_cpu_is_a_problem_of_both_pods(live: LiveNode) -> None:
    live.widen()
    with live.agent() as agent:
        with refusing(live, INNER, "cpuset.cpus"):
            await live.look_again(agent, 6)
            problems, reasons = shown(agent)
            assert live.read(BOX, "cpuset", "cpuset.cpus") == "0-7"
            mine = [line for line in problems if line.startswith("ci/batch-7: cpu.set: ")]
            assert len(mine) == 1
            assert INNER in mine[0] or os.path.dirname(INNER) in mine[0]
            (theirs,) = [line for line in problems if line.startswith("shop/db-0: CPU 7 of main is not exclusive")]
            assert "ci/batch-7 still runs there" in theirs
            assert reasons["cpuset"].startswith("1 of 1 BE containers are not limited to the BE pool: ci/batch-7: ")
        await live.look_again(agent, 3)
        problems, reasons = shown(agent)
        assert [line for line in problems if "cpu.set" in line or "exclusive" in line] == []
        assert reasons["cpuset"] == "BE containers are limited to the BE pool"
        assert "7" not in live.read(INNER, "cpuset", "cpuset.cpus").partition("-")[2]
    assert live.read(f"{group(PINNED)}/{container_id(PINNED)}", "cpuset", "cpuset.cpus") == "7", "the kubelet's value"


async def test_in_observe_mode_a_bound_is_planned(live: LiveNode) -> None:
    async with live.looked(replace(live.config, mode=AgentMode.OBSERVE)) as agent:
        reasons = shown(agent)[1]
        assert reasons["cpuset"] == "planned: BE containers are limited to the BE pool"
        assert "enforced" not in reasons["quota"]
        quota = replace(live.config.policies.reclaimed, form=ReclaimedForm.QUOTA)
    config = replace(live.config, mode=AgentMode.OBSERVE, policies=replace(live.config.policies, reclaimed=quota))
    async with live.looked(config) as agent:
        reasons = shown(agent)[1]
        assert reasons["quota"] == "planned: CPU quota on kubepods/besteffort"
        assert reasons["cpuset"].startswith("not used: ")


async def test_what_a_dry_run_plans_is_not_said_to_be_in_force(live: LiveNode) -> None:
    policies = live.config.policies
    by_quota = replace(policies.reclaimed, form=ReclaimedForm.QUOTA, dry_run=True)
    for reclaimed, name in ((replace(policies.reclaimed, dry_run=True), "cpuset"), (by_quota, "quota")):
        async with live.looked(replace(live.config, policies=replace(policies, reclaimed=reclaimed))) as agent:
            assert shown(agent)[1][name].startswith("planned: ")
            assert "planned" not in shown(agent)[1]["reserved"]
    memory = replace(policies.be_memory, enabled=True, dry_run=True)
    with live.agent(replace(live.config, policies=replace(policies, be_memory=memory))) as agent:
        agent.control.inventory.take(reclaimed_memory_bytes=8 << 30)
        await live.look(agent)
        assert shown(agent)[1]["be_memory"] == "dry run: BE memory limit 8 GiB"
        assert live.read("/kubepods/besteffort", "memory", "memory.soft_limit_in_bytes") != str(8 << 30)


@pytest.mark.parametrize("field", ["dry_run", "enabled"])
async def test_a_squeeze_of_responses_that_are_not_applied_is_a_problem(live: LiveNode, field: str) -> None:
    responses = replace(live.config.policies.responses, **{field: field == "dry_run"})
    with live.agent(replace(live.config, policies=replace(live.config.policies, responses=responses))) as agent:
        squeeze = SqueezeLimit(cpu_milli=500, reason="for victim shop/web-0 (cpu)")
        agent.control.inventory.take(measures=Restrictions(squeezed={BATCH: squeeze}))
        await live.look(agent)
        state = "a dry run" if field == "dry_run" else "off"
        assert response_problem(agent.control.reconciler, BATCH) == f"the policy responses is {state}"


async def test_a_set_that_a_person_holds_is_not_called_limited(live: LiveNode) -> None:
    async with live.looked() as agent:
        problems, reasons = shown(agent)
        assert [line for line in problems if "cpu." in line or "exclusive" in line] == []
        assert reasons["cpuset"] == "BE containers are limited to the BE pool"
        agent.record.holds.all["node"] = Hold(target="node", reason="upgrade", by="ana")
        agent.record.holds.refresh()
        live.write(BOX, "cpuset", "cpuset.cpus", "0-7")
        await live.look(agent)
        problems, reasons = shown(agent)
        assert reasons["cpuset"].startswith("1 of 1 BE containers are not limited to the BE pool: ci/batch-7: upgrade")
        (theirs,) = [line for line in problems if line.startswith("shop/db-0: CPU 7 of main is not exclusive")]
        assert "ci/batch-7 still runs there: upgrade" in theirs


async def test_many_refused_bounds_hide_no_owners_broken_claim(live: LiveNode, monkeypatch: pytest.MonkeyPatch) -> None:
    live.widen()
    with live.agent() as agent, refusing(live, INNER, "cpuset.cpus"):
        await live.look_again(agent, 6)
        many = [BoundProblem((BATCH,), f"ci/batch-7: cpu.quota: {number}") for number in range(500)]
        monkeypatch.setattr(bounds_in_force, "_of_pods", lambda _: iter(many))
        problems, _ = shown(agent)
        assert [line for line in problems if line.startswith("shop/db-0: CPU 7 of main is not exclusive")]
        assert len([line for line in problems if line.startswith("ci/batch-7: cpu.quota: ")]) < 20
        detail = bounds_in_force.bounds_status(agent.control.reconciler).detail
        assert detail.startswith("shop/db-0: CPU 7 of main is not exclusive")
        assert detail.endswith("and 498 more")


async def test_an_inner_quota_is_a_problem_with_its_pod_and_no_reason_to_be_unready(live: LiveNode) -> None:
    live.inner_quota()
    besteffort = os.path.dirname(group(BATCH))
    with live.agent(live.by_quota()) as agent:
        await live.look_again(agent, 5)
        assert live.read(besteffort, "cpu", "cpu.cfs_quota_us") == "800000"
        problems, reasons = shown(agent)
        (line,) = [line for line in problems if line.startswith(f"{besteffort}: cpu.quota: ")]
        assert INNER in line
        assert line.endswith("(a group of ci/batch-7)")
        assert reasons["quota"].startswith("not in force on 1 of 1 groups: ci/batch-7: cpu.quota: child ratio at most")
        assert "; planned: CPU quota per container: kubepods/besteffort takes no less than" in reasons["quota"]
        assert nothing_in_force(agent) is None
        live.kernel.remove_group(os.path.dirname(INNER))
        await live.look_again(agent, 5)
        assert 0 < int(live.read(besteffort, "cpu", "cpu.cfs_quota_us")) < 800_000
        assert live.read(BOX, "cpu", "cpu.cfs_quota_us") == "-1"
        problems, reasons = shown(agent)
        assert [line for line in problems if "cpu.quota" in line] == []
        assert reasons["quota"] == "enforced as CPU quota on kubepods/besteffort"


async def test_online_pods_are_limited_to_their_pool_by_what_their_files_have(live: LiveNode) -> None:
    shared = replace(live.config.policies.shared, confine=ConfineMode.ALWAYS)
    web = f"{group(WEB)}/{container_id(WEB)}"
    async with live.looked(replace(live.config, policies=replace(live.config.policies, shared=shared))) as agent:
        assert shown(agent)[1]["shared"].endswith("; online pods are limited to it")
        agent.record.holds.all["node"] = Hold(target="node", reason="upgrade", by="ana")
        agent.record.holds.refresh()
        live.write(web, "cpuset", "cpuset.cpus", "0-7")
        await live.look(agent)
        text = shown(agent)[1]["shared"]
        assert text.endswith("; 1 of 1 online containers are not limited to it: shop/web-0: upgrade (by ana)")


async def test_a_memory_limit_of_be_work_is_said_of_the_directory_that_has_it(live: LiveNode) -> None:
    memory = replace(live.config.policies.be_memory, enabled=True)
    with live.agent(replace(live.config, policies=replace(live.config.policies, be_memory=memory))) as agent:
        agent.control.inventory.take(reclaimed_memory_bytes=8 << 30)
        await live.look(agent)
        assert live.read("/kubepods/besteffort", "memory", "memory.soft_limit_in_bytes") == str(8 << 30)
        assert shown(agent)[1]["be_memory"] == "BE memory limit 8 GiB"
        agent.control.inventory.take(reclaimed_memory_bytes=4 << 30)
        with refusing(live, "/kubepods/besteffort", "memory.soft_limit_in_bytes", "memory"):
            await live.look(agent)
            problems, reasons = shown(agent)
            assert reasons["be_memory"].startswith("not in force on /kubepods/besteffort: memory.soft: ")
            assert reasons["be_memory"].endswith("; planned: BE memory limit 4 GiB")
            assert [text for text in problems if text.startswith("/kubepods/besteffort: memory.soft: ")]


async def test_a_bound_that_the_plan_refuses_is_not_said_to_be_in_force(live: LiveNode) -> None:
    """An online pod of BestEffort QoS: a bound of the directory would bind it as well."""
    memory = replace(live.config.policies.be_memory, enabled=True)
    labels = {"koordinator.sh/qosClass": "LS"}
    online = PodMeta(uid=BATCH, source="kubelet", name="batch-7", namespace="ci", labels=labels, annotations={})
    with live.agent(replace(live.config, policies=replace(live.config.policies, be_memory=memory))) as agent:
        agent.sources.metadata.set_manifests([online])
        agent.control.inventory.take(reclaimed_memory_bytes=8 << 30)
        await live.look(agent)
        assert shown(agent)[1]["be_memory"].startswith(
            "not in force on /kubepods/besteffort: ci/batch-7 is an online pod inside besteffort; planned: BE memory"
        )


async def test_a_squeeze_is_in_force_where_its_files_have_it(live: LiveNode) -> None:
    squeeze = SqueezeLimit(cpu_milli=500, reason="for victim shop/web-0 (cpu)")
    live.kernel.make_group(INNER)
    with live.agent() as agent:
        agent.control.inventory.take(measures=Restrictions(squeezed={BATCH: squeeze}))
        await live.look(agent)
        assert live.read(BOX, "cpu", "cpu.cfs_quota_us") == "50000"
        assert response_problem(agent.control.reconciler, BATCH) == ""
        live.write(INNER, "cpu", "cpu.cfs_quota_us", "50000")
        agent.control.inventory.take(measures=Restrictions(squeezed={BATCH: replace(squeeze, cpu_milli=400)}))
        await live.look_again(agent, 3)
        text = response_problem(agent.control.reconciler, BATCH)
        assert text.startswith("cpu.quota: ")
        assert INNER in text
        assert response_problem(agent.control.reconciler, WEB) == response_problem(agent.control.reconciler, "x") == ""

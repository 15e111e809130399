"""A pod's directory is the kubelet's: its values count as they are now, whatever was read at the container's start."""

from pathlib import Path

from cgroupfs.cpuset import CpuSet
from tests.fakes.livenode import BATCH, WEB, LiveNode, container_id, group
from tests.reconciler.actuators.acting import BE, GROUP, POD, Acting, make_node


async def test_each_look_has_the_quota_and_the_set_of_a_pods_directory(live: LiveNode) -> None:
    with live.agent() as agent:
        for quota, cpus in ((150_000, "0-7"), (300_000, "0-3"), (None, "0-5")):
            live.write(group(WEB), "cpu", "cpu.cfs_quota_us", str(quota or -1))
            live.write(f"{group(WEB)}/{container_id(WEB)}", "cpuset", "cpuset.cpus", "0-3")
            live.write(group(WEB), "cpuset", "cpuset.cpus", cpus)
            await live.look(agent)
            view = agent.control.reconciler.view
            assert view is not None
            assert view.actual[group(WEB), "cpu.quota"] == quota
            assert view.actual[group(WEB), "cpu.set"] == CpuSet.parse(cpus)


async def test_a_pod_that_has_been_narrowed_and_widened_again_bounds_its_container_as_it_is_now(live: LiveNode) -> None:
    box = f"{group(BATCH)}/{container_id(BATCH)}"
    for path in (box, group(BATCH)):
        live.write(path, "cpuset", "cpuset.cpus", "0,5")
    async with live.looked() as agent:
        (refusal,) = agent.control.reconciler.refusals[BATCH]
        assert refusal.reason.endswith("has only CPU 0,5: of 5-6, CPU 5 is set")
        assert live.read(box, "cpuset", "cpuset.cpus") == "5"
        live.write(group(BATCH), "cpuset", "cpuset.cpus", "0-7")
        await live.look(agent)
        assert live.read(box, "cpuset", "cpuset.cpus") == "5-6"
        assert agent.control.reconciler.refusals.get(BATCH, ()) == ()


async def test_a_write_is_planned_by_the_values_above_as_they_are_now(tmp_path: Path) -> None:
    kernel, hierarchy = make_node(tmp_path)
    acting = Acting(kernel, hierarchy, tmp_path)
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("2-3"), "cpu.quota": 50_000})])
    acting.write(GROUP, "cpu.set", "3")
    acting.write(POD, "cpu.set", "1,3")
    acting.write(BE, "cpu.quota", "60000")
    before = len(kernel.writes)
    await acting.actuator.apply([acting.target(GROUP, {"cpu.set": CpuSet.parse("0-3"), "cpu.quota": 70_000})])
    assert [code for _, _, code in kernel.writes[before:] if code] == [], "the kernel refuses nothing that is known"
    assert acting.stood(GROUP, "cpu.quota") == "blocked"
    acting.close()

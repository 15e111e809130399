"""CPUs of their own and named pools for real containers, whose first act is to read their own CPU set and quota.

Two CPUs: a dedicated pod has one, all others the other. The same on every cgroup layout.
"""

import os

import pytest
from msgspec.structs import replace

from reconciler.runtime.own_weight import GROUP
from tests.e2e.agent import eventually
from tests.e2e.conftest import PodFactory, StartAgent
from tests.e2e.intime import started_in_time, told_in_time
from tests.e2e.node import Node, Report
from tests.e2e.pods import ContainerSpec, PodSpec, best_effort, burstable, guaranteed, new_uid
from tests.e2e.test_first_instruction import ALONE, FULL, IN_TIME_ALONE, Property, figures, took_us
from tests.e2e.values import besteffort_quota, changes, cpus, is_restored, pod_quota, quota, reported_quota, snapshot
from tests.fakes.kubelet.cgroups import read
from tests.fakes.kubelet.fake import playing_the_kubelet

pytestmark = [
    pytest.mark.containerd,
    pytest.mark.core,
    pytest.mark.skipif(os.cpu_count() != 2, reason="DEDICATED CPUS NOT TESTED: the tests divide two CPUs"),
]

KATALYST = {"katalyst.kubewharf.io/qos_level": "dedicated_cores"}
KOORDINATOR = {"koordinator.sh/qosClass": "LSR"}
POOL = {
    "katalyst.kubewharf.io/qos_level": "shared_cores",
    "katalyst.kubewharf.io/cpu_enhancement": '{"cpuset_pool": "batch"}',
}
ONE, OTHER = {"0", "1"}, {"0": "1", "1": "0"}


def dedicated(name: str, *, annotations: dict[str, str] | None = None, labels: dict[str, str] | None = None) -> PodSpec:
    """A Guaranteed pod of one CPU, with a limit, and the mark of either control plane."""
    pod = guaranteed(name, cpus=1)
    return replace(pod, annotations=annotations or {}, labels=labels or {})


def own_cpu(report: Report) -> str | None:
    """The one CPU that a container could use at its first instruction."""
    return str(min(report.affinity)) if on_one_cpu(report) else None


def on_one_cpu(report: Report) -> bool:
    return len(report.affinity) == 1


@pytest.mark.parametrize(
    "marks", [{"annotations": KATALYST}, {"labels": KOORDINATOR}], ids=["Katalyst's annotation", "Koordinator's label"]
)
def test_a_dedicated_pod_has_its_cpu_from_its_first_instruction_and_keeps_it(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, marks: dict[str, dict[str, str]]
) -> None:
    web, crunch = run_pod(burstable("web")), run_pod(best_effort("crunch"))
    everywhere = cpus(web["main"])
    daemon = agent(containerd_node)
    eventually("the BE pod is confined", lambda: cpus(crunch["main"]) in ONE)
    assert cpus(web["main"]) == everywhere, "nobody needs the online pod to be confined yet"
    pinned, report = started_in_time(containerd_node, run_pod, daemon, lambda: dedicated("pinned", **marks), on_one_cpu)
    mine = own_cpu(report)
    assert mine is not None
    assert reported_quota(report) is None, "whole CPUs of its own: a quota would only throttle it"
    assert cpus(pinned["main"]) == mine
    eventually("the others have left its CPU", lambda: {cpus(web["main"]), cpus(crunch["main"])} == {OTHER[mine]})
    eventually("its pod has no quota either", lambda: pod_quota(pinned) is None)

    process = daemon.control("why", pinned.spec.uid)
    assert process.returncode == 0, process.stderr
    lines = [" ".join(line.split()) for line in process.stdout.splitlines()]
    assert any(line.startswith("default/pinned: class dedicated, from ") for line in lines), process.stdout
    assert f"pool dedicated: CPUs {mine}" in lines, process.stdout
    assert any(line.startswith(f"cpu.set {mine} ") for line in lines), process.stdout
    assert any(line.startswith("exclusive: ") for line in lines), process.stdout
    assert f"pinned: exclusive CPU {mine}: a quota would only throttle it" in lines, process.stdout

    again = containerd_node.restart_container(pinned, "main")
    eventually("its next container has the same CPU", lambda: cpus(again["main"]) == mine)
    assert own_cpu(again["main"].report()) == mine or not told_in_time(daemon, again)
    containerd_node.remove_pod(again)
    eventually("the online pod has back what it had", lambda: is_restored(web["main"], everywhere))


@pytest.mark.quiet
@pytest.mark.parametrize("reads_list", [True, False], ids=["the pod list is read", "no pod list"])
def test_what_an_init_container_ran_on_is_what_its_pod_keeps(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, pod_list: dict[str, object], reads_list: bool
) -> None:
    web = run_pod(burstable("web"))
    daemon = agent(containerd_node, **(pod_list if reads_list else {}))
    spec = dedicated("pinned", annotations=KATALYST)
    first = replace(spec.containers[0], name="first", run=("exit", "0"))
    spec = replace(spec, init=(first, replace(first, name="second")))
    pinned = run_pod(spec)
    eventually("its quota is lifted", lambda: quota(pinned["main"]) is None)
    reports = [containerd_node.first_report(spec, name) for name in ("first", "second", "main")]
    eventually("the pod has one CPU", lambda: cpus(pinned["main"]) in ONE)
    mine = cpus(pinned["main"])
    texts = [own_cpu(report) for report in reports]
    assert texts[1:] == [mine, mine], f"{texts}\n{daemon.tail()}"
    # Of the very first container of a pod it may not be known in time that it is an init container.
    assert texts[0] in {mine, None}, texts
    eventually("the online pod keeps the other", lambda: cpus(web["main"]) == OTHER[mine])
    pools = daemon.state("pools")["pools"]
    assert [name for name in pools if name.startswith("dedicated/")] == [f"dedicated/{spec.uid}/main"]


@pytest.mark.quiet
def test_be_pods_with_quotas_of_their_own_lend_what_they_do_not_use(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    """Burstable BE pods have no directory in common whose quota the kernel would divide by need."""
    be = {"koordinator.sh/qosClass": "BE"}
    idle = [run_pod(replace(burstable(f"idle-{number}"), labels=be)) for number in range(3)]
    agent(containerd_node)
    eventually("each has a quota", lambda: all(quota(pod["main"]) is not None for pod in idle))
    busy = [run_pod(replace(burstable("first", run=("burn", "2")), labels=be))]

    def most_of_all() -> bool:
        least = min(quota(pod["main"]) or 0 for pod in busy)
        return least > 3 * max(quota(pod["main"]) or 0 for pod in idle)

    eventually("the busy one has what the idle ones do not use", most_of_all)
    busy.append(run_pod(replace(burstable("second", run=("burn", "2")), labels=be)))
    eventually("a second one has as much", most_of_all)


@pytest.mark.quiet
def test_be_work_gives_way_by_the_request_of_an_online_container_that_starts(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    """The pod sleeps: what it uses would take nothing from BE work. The budget rises in one step, to be there soon."""
    agent(containerd_node, constants={"policies.reclaimed.budget.grow_percent": 100})

    def budget_us() -> int:
        return int(besteffort_quota(containerd_node).split()[0].replace("max", "-1"))

    try:
        eventually("BE work has a budget", lambda: budget_us() > 80_000, within_s=15)
    except AssertionError:
        pytest.skip("ROOM ON ARRIVAL NOT TESTED: other work keeps this machine's CPUs busy")
    run_pod(burstable("web", cpu_request=900))
    assert budget_us() <= 60_000


def test_a_named_pool_has_cpus_of_its_own(containerd_node: Node, run_pod: PodFactory, agent: StartAgent) -> None:
    web = run_pod(burstable("web"))
    everywhere = cpus(web["main"])
    daemon = agent(containerd_node)
    batch, report = started_in_time(
        containerd_node, run_pod, daemon, lambda: replace(burstable("batch"), annotations=POOL), on_one_cpu
    )
    mine = cpus(batch["main"])
    assert own_cpu(report) == mine
    eventually("the online pods without a pool have the rest", lambda: cpus(web["main"]) == OTHER[mine])
    assert daemon.state("pools")["pools"]["shared/batch"] == mine
    assert (daemon.pod(batch.spec.uid) or {})["pool"] == "shared/batch"
    beside, report = started_in_time(
        containerd_node, run_pod, daemon, lambda: replace(burstable("beside"), annotations=POOL), on_one_cpu
    )
    assert own_cpu(report) == cpus(beside["main"]) == mine
    containerd_node.remove_pods([batch, beside])
    eventually("nothing is divided any more", lambda: is_restored(web["main"], everywhere))


def test_a_resize_in_place_is_followed_without_a_restart(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent
) -> None:
    web = run_pod(burstable("web"))
    everywhere = cpus(web["main"])
    daemon = agent(containerd_node)
    pinned = run_pod(dedicated("pinned", annotations=KATALYST))
    eventually("the pod has a CPU", lambda: cpus(pinned["main"]) in ONE and quota(pinned["main"]) is None)
    eventually("its own", lambda: cpus(web["main"]) == OTHER[cpus(pinned["main"])])
    whole = pinned.spec.containers[0]
    half = replace(whole, cpu_request=500, cpu_limit=500)
    with playing_the_kubelet():
        pinned = containerd_node.resize(pinned, half)
        eventually("less than a CPU is none of its own", lambda: is_restored(web["main"], everywhere), within_s=15)
        eventually("and it runs with the others", lambda: is_restored(pinned["main"], everywhere))
        eventually("bounded by its new limit", lambda: (quota(pinned["main"]), pod_quota(pinned)) == (50_000, 50_000))
        pinned = containerd_node.resize(pinned, whole)
        eventually("a whole one is", lambda: cpus(pinned["main"]) in ONE and quota(pinned["main"]) is None)
        eventually("again", lambda: cpus(web["main"]) == OTHER[cpus(pinned["main"])] and pod_quota(pinned) is None)
    assert daemon.state("agent")["agent"]["alerts"] == {}


@pytest.mark.parametrize("killed", [False, True], ids=["daemon running", "daemon killed"])
def test_restore_gives_back_every_byte_of_what_placement_wrote(
    containerd_node: Node, run_pod: PodFactory, agent: StartAgent, killed: bool
) -> None:
    run_pod(burstable("web", cpu_limit=500))
    crunch = run_pod(best_effort("crunch"))
    batch = run_pod(PodSpec(name="batch", uid=new_uid(), annotations=KATALYST, containers=(ContainerSpec(),)))
    pinned = run_pod(dedicated("pinned", labels=KOORDINATOR))
    before = snapshot(containerd_node)
    daemon = agent(containerd_node)
    eventually("CPUs are divided", lambda: cpus(pinned["main"]) in ONE and cpus(crunch["main"]) in ONE)
    eventually("and quotas lifted", lambda: quota(pinned["main"]) is None and pod_quota(pinned) is None)
    assert len(changes(before, snapshot(containerd_node))) >= 5
    assert cpus(batch["main"]) == cpus(crunch["main"])
    if killed:
        daemon.kill()
    done = daemon.control("restore")
    assert done.returncode == 0, done.stdout + done.stderr
    assert changes(before, snapshot(containerd_node)) == {}
    if killed:
        own = containerd_node.cgroups.directory("cpu", GROUP)
        # Daemons of other tests have theirs of the same name.
        eventually(
            "no group is left that nobody is in", lambda: not os.path.exists(own) or read(own, "cgroup.procs") != ""
        )


@pytest.mark.slow
@pytest.mark.skipif(not FULL, reason="takes a minute: only in make e2e")
def test_dedicated_pods_have_their_cpu_and_no_quota_before_the_first_instruction(
    containerd_node: Node, agent: StartAgent, record_property: Property
) -> None:
    node = containerd_node
    present = node.run_pods([best_effort(f"be-{n}") if n % 2 else burstable(f"web-{n}") for n in range(20)], at_once=4)
    try:
        daemon = agent(node)
        good, times = 0, []
        for n in range(ALONE):
            pod = node.run_pod(dedicated(f"pinned-{n}", annotations=KATALYST))
            report = pod["main"].report()
            good += own_cpu(report) is not None and reported_quota(report) is None
            times.append(took_us(daemon, pod))
            node.remove_pod(pod)
    finally:
        node.remove_pods(present)
    texts = {"dedicated, in place": f"{good} of {ALONE}", "signal to last write": figures(times)}
    for name, value in texts.items():
        record_property(name, value)
        print(f"  {name}: {value}")
    assert good >= IN_TIME_ALONE * ALONE

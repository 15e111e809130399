"""reserve, dedicated and shared: what is taken before BE work gets anything."""

import pytest
from msgspec.structs import replace

from cgroupfs.naming import QosClass
from reconciler.control.planner import plan, plan_pools
from reconciler.policies.reserve import ReserveConfig, StrictReserve, spread
from reconciler.policies.table import PoliciesConfig
from state.model import ContainerKind, CpuPolicy, NodeView, Pools, RuntimeSpec
from state.topology import Topology, uniform
from tests.reconciler.nodes import container, cpus, kubelet, node, online, pod

CONFIG = PoliciesConfig()


def pools(view: NodeView, previous: Pools | None = None, config: PoliciesConfig = CONFIG) -> Pools:
    return plan_pools(view, previous, config)


def test_nothing_is_reserved_without_a_wish() -> None:
    made = pools(node())
    assert (made.reserved, made.reasons["reserved"]) == (cpus(""), "no reserved CPUs")
    assert made.shared == cpus("0-7")


def test_the_kubelets_and_our_own_reserved_cpus_stay_out_of_every_pool() -> None:
    config = PoliciesConfig(reserve=ReserveConfig(cpus="7"))
    made = pools(node(kubelet=kubelet(default="0-7", reserved="0")), config=config)
    assert made.reserved == cpus("0,7")
    assert made.shared == cpus("1-6")
    assert made.reclaimed <= made.shared
    assert made.reasons["reserved"] == "the kubelet's 0 and configured 7"


def test_a_reserved_cpu_that_is_offline_is_named_and_not_used() -> None:
    made = pools(node(topology=4), config=PoliciesConfig(reserve=ReserveConfig(cpus="0,6")))
    assert made.reserved == cpus("0")
    assert made.reasons["reserved"] == "configured 0,6; CPU 6 is not online"


def test_exclusive_cpus_are_adopted_by_pod_and_container() -> None:
    made = pools(node(kubelet=kubelet(default="0,4-7", exclusive={"b/main": "1", "a/main": "2-3"})))
    assert made.dedicated == {"a/main": cpus("2-3"), "b/main": cpus("1")}
    assert list(made.dedicated) == ["a/main", "b/main"]
    assert made.shared == cpus("0,4-7")
    assert made.reasons["dedicated"] == "adopted from the kubelet (static policy)"


def test_released_cpus_are_free_at_once_when_the_checkpoint_is_good() -> None:
    before = pools(node(kubelet=kubelet(default="0-6", exclusive={"a/main": "7"})))
    assert pools(node(kubelet=kubelet(default="0-7")), before).dedicated == {}


def test_a_held_checkpoint_keeps_what_was_exclusive_before() -> None:
    before = pools(node(kubelet=kubelet(default="0-5", exclusive={"a/main": "6-7"})))
    torn = kubelet(default="0-7", held=True, problem="checksum is wrong")
    made = pools(node(kubelet=torn), before)
    assert made.dedicated == {"a/main": cpus("6-7")}
    assert not made.reclaimed & cpus("6-7")
    assert made.reasons["dedicated"] == "kept from the last valid checkpoint: checksum is wrong"


def test_a_held_checkpoint_may_still_add_protection() -> None:
    before = pools(node(kubelet=kubelet(default="0-5", exclusive={"a/main": "7"})))
    made = pools(node(kubelet=kubelet(exclusive={"a/main": "6", "b/main": "5"}, held=True)), before)
    assert made.dedicated == {"a/main": cpus("6-7"), "b/main": cpus("5")}


def test_an_unknown_policy_never_hands_out_what_was_exclusive() -> None:
    before = pools(node(kubelet=kubelet(default="0-5", exclusive={"a/main": "6-7"})))
    made = pools(node(kubelet=kubelet(CpuPolicy.UNKNOWN)), before)
    assert made.dedicated_cpus == cpus("6-7")
    assert not made.reclaimed & cpus("6-7")


def guaranteed(uid: str, cpu_list: str, shares: int) -> NodeView:
    return node(
        pod(
            uid,
            container("main", spec=RuntimeSpec(cpus=cpu_list, shares=shares)),
            container("pause", kind=ContainerKind.SANDBOX, spec=RuntimeSpec(cpus="0-7", shares=2)),
            qos=QosClass.GUARANTEED,
        ),
        kubelet=kubelet(CpuPolicy.UNKNOWN),
    )


def test_without_any_checkpoint_exclusive_cpus_are_read_off_the_containers() -> None:
    made = pools(guaranteed("a", "2-3", 2048))
    assert made.dedicated == {"a/main": cpus("2-3")}
    assert "a/main owns 2-3 by its cgroup" in made.reasons["dedicated"]
    assert not made.reclaimed & cpus("2-3")


def test_a_guaranteed_container_of_a_fraction_is_in_the_default_set_and_owns_nothing() -> None:
    assert pools(guaranteed("a", "0,2-7", 512)).dedicated == {}


def test_a_set_that_two_containers_share_is_exclusive_to_neither() -> None:
    view = guaranteed("a", "2-3", 2048)
    other = online("b", container("main", spec=RuntimeSpec(cpus="3-5", shares=100)))
    assert pools(replace(view, pods={**view.pods, "b": other})).dedicated == {}


def test_an_unreadable_cpu_list_of_one_container_does_not_stop_the_others() -> None:
    view = guaranteed("a", "2-3", 2048)
    other = online("b", container("main", spec=RuntimeSpec(cpus="x-y", shares=100)))
    assert pools(replace(view, pods={**view.pods, "b": other})).dedicated == {"a/main": cpus("2-3")}


def test_with_every_cpu_taken_online_pods_share_the_kubelets_default_set() -> None:
    made = pools(node(topology=2, kubelet=kubelet(default="0", reserved="0", exclusive={"a/main": "1"})))
    assert made.shared == cpus("0")
    assert made.reasons["shared"] == ("all CPUs are reserved or dedicated; online pods run on CPU 0 with the system")


def test_no_policy_writes_anything_for_online_pods() -> None:
    desired = plan(node(online("a"), online("b", qos=QosClass.GUARANTEED)), None, CONFIG)
    assert [setting.path for setting in desired.settings.values()] == ["/kubepods/besteffort"]


@pytest.mark.parametrize(
    ("topology", "count", "reserved"),
    [
        (uniform(sockets=2, nodes=2, cores=8, threads=2), 2, "0,8"),
        (uniform(sockets=2, nodes=2, cores=8, threads=2), 4, "0,4,8,12"),
        (uniform(sockets=2, nodes=2, cores=8, threads=2), 5, "0-1,4,8,12"),
        (uniform(cores=4, threads=1), 2, "0-1"),
        (uniform(cores=4, threads=1), 3, "0-2"),
    ],
)
def test_a_number_of_reserved_cpus_is_whole_cores_spread_over_nodes(
    topology: Topology, count: int, reserved: str
) -> None:
    made = pools(node(topology=topology), config=PoliciesConfig(reserve=ReserveConfig(count=count)))
    assert made.reserved == cpus(reserved)
    assert not made.reserved & made.shared


def test_a_core_counts_by_its_lowest_thread_that_there_is() -> None:
    assert spread(3, uniform(cores=4, threads=2), cpus("1-7")) == cpus("1-2,5")


def test_a_list_outranks_a_number() -> None:
    config = PoliciesConfig(reserve=ReserveConfig(count=4))
    assert pools(node(kubelet=kubelet(default="0-7", reserved="3")), config=config).reserved == cpus("3")


@pytest.mark.parametrize(
    ("strict", "kubelets", "lenient"),
    [
        (StrictReserve.KUBELET, False, "0-1"),
        (StrictReserve.KUBELET, True, ""),
        (StrictReserve.ALWAYS, False, ""),
        (StrictReserve.NEVER, True, "0-1"),
    ],
)
def test_online_pods_may_use_reserved_cpus_unless_the_reservation_is_strict(
    strict: StrictReserve, kubelets: bool, lenient: str
) -> None:
    config = PoliciesConfig(reserve=ReserveConfig(strict=strict))
    view = node(kubelet=kubelet(default="0-7", reserved="0-1", strict_reserved=kubelets))
    assert pools(view, config=config).lenient == cpus(lenient)


def test_interrupt_cpus_belong_to_no_pool() -> None:
    made = pools(node(), config=PoliciesConfig(reserve=ReserveConfig(interrupt_cpus="6-7")))
    assert made.interrupt == cpus("6-7")
    assert made.shared == cpus("0-5")
    assert not made.reclaimed & made.interrupt


def test_interrupts_share_with_pods_where_nothing_else_is_left() -> None:
    made = pools(node(topology=2), config=PoliciesConfig(reserve=ReserveConfig(cpus="0", interrupt_cpus="1")))
    assert (made.interrupt, made.shared) == (cpus(""), cpus("1"))
    assert "no other CPU" in made.reasons["interrupt"]

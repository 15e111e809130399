from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.naming import QosClass
from cgroupfs.usage import UsageReader
from reconciler.control.planner import plan_pools
from reconciler.policies.quota_burst import QuotaBurstConfig
from reconciler.policies.quota_turbo import QuotaTurboConfig
from reconciler.policies.shared import PoolSizing, SharedConfig
from reconciler.policies.table import PoliciesConfig
from reconciler.signals.groups import GroupSampler, sampled
from state.cpu import GroupUse
from state.model import ContainerKind, PodClass, Pools, RuntimeSpec
from tests.cgroupfs.test_usage import POD, hierarchy_v1, hierarchy_v2, put, v1_files
from tests.fakes.clock import Clock
from tests.known import known
from tests.reconciler.nodes import container, node, online, pod


class Node:
    """One v1 group whose counters the test sets, and a sampler with a clock of the test's."""

    def __init__(self, tmp_path: Path) -> None:
        self.clock = Clock()
        self.root = tmp_path
        self.sampler = GroupSampler(UsageReader(hierarchy_v1(tmp_path), clock=self.clock))

    def counts(self, cpu_ns: int, periods: int = 0, throttled: int = 0, throttled_ns: int = 0) -> None:
        put(self.root, v1_files(cpu_ns, periods, throttled, throttled_ns, 1))

    def look(self, inode: int | None = None, *, after_s: float = 0.0) -> GroupUse | None:
        self.clock.now += after_s
        own = (self.root / "cpuset" / POD.strip("/")).stat().st_ino if inode is None else inode
        self.sampler.sample({POD: own})
        return self.sampler.current(self.clock.now).get(POD)


@pytest.fixture
def group(tmp_path: Path) -> Node:
    node = Node(tmp_path)
    node.counts(10**9, periods=100, throttled=50, throttled_ns=10**9)
    return node


def test_two_readings_make_the_use_of_the_time_between(group: Node) -> None:
    assert group.look() is None
    group.counts(2 * 10**9, periods=110, throttled=55, throttled_ns=11 * 10**8)
    assert group.look(after_s=2.0) == GroupUse(cpu_milli=500, throttled=0.5, throttled_milli=50, interval_s=2.0)
    # A lifted quota leaves a group that is not throttled.
    assert group.look(after_s=1.0) == GroupUse(cpu_milli=0, throttled=0.0, throttled_milli=0)


def test_a_group_that_never_had_a_quota_has_no_throttling_figure(group: Node) -> None:
    group.counts(0)
    group.look()
    group.counts(10**9)
    assert group.look(after_s=1.0) == GroupUse(cpu_milli=1000)


def test_quick_looks_add_up_instead_of_giving_noise(group: Node) -> None:
    group.look()
    group.counts(10**9 + 10**7)
    assert group.look(after_s=0.04) is None
    group.counts(10**9 + 10**8)
    use = known(group.look(after_s=0.06))
    assert use.cpu_milli == 1000


def test_a_group_made_anew_under_the_same_path_has_no_past(group: Node) -> None:
    group.look()
    group.counts(1)
    assert group.look(inode=0, after_s=1.0) is None  # counters ran backwards
    directory = group.root / "cpuset" / POD.strip("/")
    directory.rename(directory.parent / "old")
    group.counts(5 * 10**9)  # larger than before: only the inode distinguishes
    assert group.look(after_s=1.0) is None
    group.counts(6 * 10**9)
    use = known(group.look(after_s=1.0))
    assert use.cpu_milli == 1000


def test_what_cannot_be_read_grows_old_and_is_not_zero(group: Node) -> None:
    group.look()
    group.counts(2 * 10**9)
    group.look(after_s=1.0)
    (group.root / "cpuacct" / POD.strip("/") / "cpuacct.usage").write_text("none\n")
    use = known(group.look(after_s=3.0))
    assert (use.cpu_milli, use.age_s) == (1000, 3.0)


def test_a_group_that_is_no_longer_sampled_is_forgotten(group: Node) -> None:
    group.look()
    group.sampler.sample({})
    assert len(group.sampler) == 0
    assert group.sampler.moved(POD) is None


def test_v2_counts_microseconds_in_one_file(tmp_path: Path) -> None:
    clock = Clock()
    sampler = GroupSampler(UsageReader(hierarchy_v2(tmp_path, "cpu"), clock=clock))
    text = "usage_usec {}\nnr_periods {}\nnr_throttled {}\nthrottled_usec {}\n"
    put(tmp_path, {"all/cpu.stat": text.format(0, 10, 0, 0)})
    sampler.sample({POD: 0})
    put(tmp_path, {"all/cpu.stat": text.format(500_000, 20, 10, 250_000)})
    clock.now += 1.0
    sampler.sample({POD: 0})
    assert sampler.current(clock.now) == {POD: GroupUse(cpu_milli=500, throttled=1.0, throttled_milli=250)}


BE = "/kubepods/besteffort"
BOUNDED = container("main", spec=RuntimeSpec(shares=2, quota_us=10_000))


@pytest.mark.parametrize(
    ("policies", "groups"),
    [
        pytest.param(PoliciesConfig(), [], id="nothing is read that no policy needs"),
        pytest.param(
            PoliciesConfig(shared=SharedConfig(sizing=PoolSizing.MEASURED)),
            ["/kubepods/burstable/poda", "/kubepods/burstable/podb", "/kubepods/podd"],
            id="demand: online pods",
        ),
        pytest.param(
            PoliciesConfig(quota_burst=QuotaBurstConfig(enabled=True)),
            ["/kubepods/burstable/podb/id-main"],
            id="bursts: online containers with a quota",
        ),
        pytest.param(PoliciesConfig(quota_turbo=QuotaTurboConfig(enabled=True)), [], id="turbo reads its own"),
    ],
)
def test_what_is_read(policies: PoliciesConfig, groups: list[str]) -> None:
    pods = [online("b", BOUNDED), online("a"), pod("c", BOUNDED)]
    pods.append(pod("d", BOUNDED, cls=PodClass.DEDICATED, qos=QosClass.GUARANTEED))
    assert list(sampled({item.uid: item for item in pods}, policies, pools(), BE)) == groups


def test_what_divides_the_be_budget_is_read_where_it_is_several_quotas() -> None:
    pause = container("pause", kind=ContainerKind.SANDBOX)
    outside = pod("o", container("a"), container("b"), pause, qos=QosClass.BURSTABLE)
    pods = [pod("in"), outside, online("web")]
    two = plan_pools(node(*pods), None, PoliciesConfig())
    groups = [BE, "/kubepods/burstable/podo/id-a", "/kubepods/burstable/podo/id-b"]
    assert list(sampled({item.uid: item for item in pods}, PoliciesConfig(), two, BE)) == groups
    # An online pod in besteffort: the containers have quotas, and the directory has none.
    pods = [pod("in"), online("proxy", qos=QosClass.BESTEFFORT)]
    parts = plan_pools(node(*pods), None, PoliciesConfig())
    table = {item.uid: item for item in pods}
    assert list(sampled(table, PoliciesConfig(), parts, BE)) == [f"{BE}/podin/id-main"]


def pools() -> Pools:
    return plan_pools(node(), None, PoliciesConfig())


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 9), st.floats(-1, 2)), max_size=20))
def test_no_sequence_of_counters_gives_a_negative_use(
    tmp_path_factory: pytest.TempPathFactory, counts: list[tuple[int, int, float]]
) -> None:
    group = Node(tmp_path_factory.mktemp("node"))
    for cpu_ns, periods, passed in counts:
        group.counts(cpu_ns, periods=periods, throttled=periods, throttled_ns=cpu_ns)
        use = group.look(after_s=passed)
        assert use is None or (use.cpu_milli >= 0 and (use.throttled_milli or 0) >= 0 and use.age_s >= 0)

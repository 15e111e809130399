import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cgroupfs.cpuset import CpuSet
from reconciler.placement.churn import NONE, CpuChurn, moved
from state.model import Pools
from tests.reconciler.nodes import cpus

BEFORE = Pools(
    online_cpus=cpus("0-15"),
    reserved=cpus("0"),
    dedicated={"u1/main": cpus("1-2")},
    shared=cpus("3-9"),
    named={"shared/db": cpus("10-13")},
    reclaimed=cpus("8-9,14-15"),
    budget_milli=3000,
)


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param(BEFORE, NONE, id="the same"),
        pytest.param(replace(BEFORE, budget_milli=1, reasons={"shared": "x"}), NONE, id="no CPU"),
        pytest.param(replace(BEFORE, reclaimed=cpus("8-9,15")), CpuChurn(cpus=1, pools_changed=1), id="one pool loses"),
        pytest.param(
            replace(BEFORE, shared=cpus("3-8"), reclaimed=cpus("8,14-15")),
            CpuChurn(cpus=1, pools_changed=2),
            id="a CPU of two pools counts once",
        ),
        pytest.param(
            replace(BEFORE, shared=cpus("4-9"), named={"shared/db": cpus("3,10-13")}),
            CpuChurn(cpus=1, pools_changed=2),
            id="from pool to pool",
        ),
        pytest.param(
            replace(BEFORE, dedicated={}, shared=cpus("1-9")), CpuChurn(cpus=2, pools_changed=2), id="a pool goes"
        ),
        pytest.param(
            replace(BEFORE, named={"shared/db": cpus("10-11"), "shared/web": cpus("12-13")}),
            CpuChurn(cpus=2, pools_changed=2),
            id="a pool comes",
        ),
        pytest.param(
            replace(BEFORE, shared=cpus("6-9,12-13"), named={"shared/db": cpus("3-5,10-11")}),
            CpuChurn(cpus=5, pools_changed=2),
            id="an exchange counts each CPU",
        ),
        pytest.param(replace(BEFORE, interrupt=cpus("0")), CpuChurn(cpus=1, pools_changed=1), id="interrupts"),
    ],
)
def test_what_moves(after: Pools, expected: CpuChurn) -> None:
    assert moved(BEFORE, after) == expected
    assert moved(after, BEFORE) == expected


def test_a_first_plan_has_moved_nothing() -> None:
    assert moved(None, BEFORE) == NONE


masks = st.integers(0, 255).map(CpuSet.from_mask)
pools = st.builds(
    lambda reserved, shared, reclaimed, named: Pools(
        online_cpus=CpuSet.span(8),
        reserved=reserved,
        dedicated={},
        shared=shared,
        reclaimed=reclaimed,
        named=named,
        budget_milli=0,
    ),
    masks,
    masks,
    masks,
    st.dictionaries(st.sampled_from(["shared/a", "shared/b"]), masks),
)


@given(pools, pools)
def test_a_cpu_counts_when_the_list_of_its_pools_changes(before: Pools, after: Pools) -> None:
    def owners(of: Pools, cpu: int) -> set[str]:
        sets = {"reserved": of.reserved, "shared": of.shared, "reclaimed": of.reclaimed, **of.named}
        return {name for name, mine in sets.items() if cpu in mine}

    churn = moved(before, after)
    assert churn.cpus == sum(owners(before, cpu) != owners(after, cpu) for cpu in range(8))
    names = {"reserved", "shared", "reclaimed", *before.named, *after.named}
    assert churn.pools_changed == sum(
        any((name in owners(before, cpu)) != (name in owners(after, cpu)) for cpu in range(8)) for name in names
    )
    assert churn.pools_changed == 0 or churn.cpus > 0

"""Fair parts, debts and the bonus: bounded, repaid, and at rest."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgroupfs.naming import QosClass
from reconciler.policies.be_quota import split
from reconciler.policies.owner_shares import MOST_PERCENT, OwnerDemand, bonus_percent, fair_parts
from state.cpu import GroupUse
from state.model import Pod, Resources
from state.owners import OwnerAccount
from tests.reconciler.nodes import container, node, pod

SECONDS = st.floats(0, 1e6)
DEMANDS = st.dictionaries(
    st.text(max_size=3), st.builds(OwnerDemand, SECONDS, SECONDS, st.integers(1, 10**6)), min_size=1, max_size=6
)


@given(DEMANDS)
def test_all_that_was_sold_is_divided_and_none_gets_more_than_it_wanted(demands: dict[str, OwnerDemand]) -> None:
    parts = fair_parts(demands)
    sold = sum(demand.used_s for demand in demands.values())
    assert sum(parts.values()) == pytest.approx(sold, abs=1e-6 * (1 + sold))
    for owner, demand in demands.items():
        assert 0 <= parts[owner] <= demand.used_s + demand.taken_s
    # Max-min: who did not get all it wanted has at least as much for its weight as any other.
    short = [owner for owner, demand in demands.items() if parts[owner] < (demand.used_s + demand.taken_s) * 0.999]
    for owner in short:
        mine = parts[owner] / demands[owner].weight
        assert all(parts[other] / demands[other].weight <= mine * 1.001 + 1e-6 for other in demands)


def test_an_owner_that_wants_nothing_has_no_debt() -> None:
    parts = fair_parts({"idle": OwnerDemand(0.0, 0.0, 1000), "busy": OwnerDemand(50.0, 10.0, 1000)})
    assert parts == {"idle": 0.0, "busy": 50.0}


def test_an_owner_without_weight_gets_nothing() -> None:
    assert fair_parts({"a": OwnerDemand(0.0, 5.0, 0), "b": OwnerDemand(4.0, 0.0, 1)}) == {"a": 0.0, "b": 4.0}


@given(st.builds(OwnerAccount, sold_s=SECONDS, taken_s=SECONDS, lost_s=SECONDS, fair_s=SECONDS))
def test_the_bonus_is_bounded_and_only_for_debtors(account: OwnerAccount) -> None:
    percent = bonus_percent(account)
    assert 100 <= percent <= MOST_PERCENT == 200
    assert percent % 25 == 0
    if account.debt_s <= 0:
        assert percent == 100


@pytest.mark.parametrize(
    ("sold_s", "percent"), [(0, 200), (249, 175), (500, 150), (751, 100), (749, 125), (941, 100), (2000, 100)]
)
def test_the_bonus_grows_with_the_part_that_is_lacking(sold_s: float, percent: int) -> None:
    assert bonus_percent(OwnerAccount(sold_s=sold_s, fair_s=1000.0)) == percent


def test_a_small_debt_is_none() -> None:
    assert bonus_percent(OwnerAccount(sold_s=0.0, fair_s=59.0)) == 100


@pytest.mark.parametrize("body", [{"sold_s": float("nan")}, {"fair_s": float("inf")}, {"lost_s": -1.0}])
def test_a_stored_account_has_numbers(body: dict[str, float]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=OwnerAccount)


def burstable(uid: str) -> Pod:
    return pod(uid, container("main", requests=Resources(cpu_milli=1000)), qos=QosClass.BURSTABLE)


def divided(budget: int, bonus: dict[str, int], before: dict[str, int] | None = None) -> dict[str, int]:
    full = GroupUse(cpu_milli=500, throttled=1.0)
    uses = {f"/kubepods/burstable/pod{uid}/id-main": full for uid in ("a", "b")}
    view = node(burstable("a"), burstable("b"), uses=uses, be_bonus=bonus)
    return split(budget, view, before)[0]


@given(st.integers(1000, 64_000), st.sampled_from([100, 125, 150, 175, 200]))
def test_a_debtor_gets_at_most_twice_of_the_other_and_the_sum_stays(budget: int, percent: int) -> None:
    parts = divided(budget, {"a": percent} if percent != 100 else {})
    assert parts["a"] + parts["b"] <= budget
    assert parts["a"] / parts["b"] == pytest.approx(percent / 100, rel=0.02)
    assert divided(budget, {"a": percent}, parts) == parts, "the same input moves nothing"


def test_a_debt_is_repaid_and_then_the_shares_are_equal_again() -> None:
    """Both want all; ``a`` had nothing for an hour. Minutes of 60 CPU-seconds in all."""
    account = {"a": OwnerAccount(sold_s=0.0, fair_s=1800.0), "b": OwnerAccount(sold_s=3600.0, fair_s=1800.0)}
    gave: list[float] = []
    for _ in range(600):
        bonus = {uid: percent for uid, item in account.items() if (percent := bonus_percent(item)) != 100}
        parts = divided(1000, bonus)
        total = parts["a"] + parts["b"]
        used = {uid: 60.0 * parts[uid] / total for uid in account}
        fair = fair_parts({uid: OwnerDemand(used[uid], 60.0, 1000) for uid in account})
        account = {uid: account[uid].plus(OwnerAccount(sold_s=used[uid], fair_s=fair[uid])) for uid in account}
        gave.append(used["a"])
    assert gave[0] == pytest.approx(40.0, rel=0.02)
    assert all(before >= after - 0.5 for before, after in pairwise(gave)), "it only falls"
    assert gave[-1] == pytest.approx(30.0, rel=0.02)
    assert account["a"].debt_s < 0.25 * account["a"].fair_s
    assert account["a"].debt_s >= 0, "never more than its debt"

"""The ledger by owner on a fake kernel's counters: what is sold, taken back and lost, over restarts and bounded."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from msgspec.structs import replace

from cgroupfs.usage import UsageCounters
from reconciler.config.read_keys import read_keys
from reconciler.control.owner_ledger import OwnerLedger, add_account, load_hours, owner_of
from reconciler.daemon.agent import Agent
from reconciler.pods.selectors import ClassRules
from reconciler.policies.owner_shares import OwnersConfig
from state.eviction import EvictionCase, EvictionOrder, EvictionOutcome
from state.model import PodClass
from state.owners import OTHER, UNKNOWN, OwnerAccount
from tests.fakes.constants import varied
from tests.fakes.livenode import BATCH, LiveNode, container_id, group
from tests.until import until

HOUR = 480_000
SECOND = 1_000_000_000
ORDER = EvictionOrder(id="o", uid=BATCH, title="t", namespace="n", name="p", owner=None, cause="c", evidence="e")


class Books:
    """An agent on a fake node, and its ledger with a clock set by hand."""

    def __init__(self, agent: Agent, live: LiveNode) -> None:
        self.agent, self.live = agent, live
        self.now, self.used = HOUR * 3600.0, 0.0
        self.withheld_s = 0.0
        """By cuts of the harm law, since the start."""
        self.stepped = 0.0
        """By how much the wall clock was set wrong."""
        self.cases: list[EvictionCase] = []
        self.config = OwnersConfig()
        self.ledger = self.another()
        self.owner = agent.control.inventory.pods[BATCH].namespace or UNKNOWN

    def another(self) -> OwnerLedger:
        return OwnerLedger(
            self.agent.record.store,
            self.agent.record.lane,
            self.agent.control.inventory,
            self.agent.usage,
            self.agent.hub.changed,
            config=lambda: self.config,
            cases=lambda: self.cases,
            withheld_s=lambda: self.withheld_s,
            wall=self.wall,
            uptime=self.uptime,
        )

    def wall(self) -> float:
        return self.now + self.stepped

    def uptime(self) -> float:
        return self.now - (HOUR - 1000) * 3600.0

    def use(self, seconds: float, uid: str = BATCH) -> None:
        self.used += seconds
        self.live.kernel.charge(f"{self.live.root}/sys/fs/cgroup/cpuacct{group(uid)}", cpu_ns=int(seconds * SECOND))

    def throttle(self, path: str, seconds: float) -> None:
        self.live.kernel.throttle(f"{self.live.root}/sys/fs/cgroup/cpu{path}", int(seconds * SECOND))

    async def sample(self, after_s: float = 10.0) -> None:
        self.now += after_s
        await self.ledger.sample()

    def account(self, owner: str | None = None) -> OwnerAccount:
        return self.ledger.sums(24)[owner or self.owner]


@pytest.fixture
async def books(live: LiveNode) -> AsyncIterator[Books]:
    async with live.looked() as agent:
        made = Books(agent, live)
        await made.sample()
        yield made


async def test_what_be_pods_use_is_sold_and_what_quotas_withhold_is_taken_back(books: Books) -> None:
    books.use(8.0)
    books.throttle(f"{group(BATCH)}/{container_id(BATCH)}", 2.0)
    books.throttle(books.agent.control.inventory.besteffort, 1.0)
    await books.sample()
    assert books.account() == OwnerAccount(sold_s=8.0, taken_s=3.0, fair_s=8.0)
    await books.sample()
    assert books.account().sold_s == 8.0, "nothing is counted twice"
    assert books.ledger.totals == books.ledger.sums(1)


async def test_groups_are_read_again_only_if_something_ran_below_their_directory(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = books.agent.usage._read_cpu

    def counted(path: str) -> UsageCounters:
        read.append(path)
        return real(path)

    monkeypatch.setattr(books.agent.usage, "_read_cpu", counted)
    await books.sample()
    read.clear()
    for _ in range(3):
        await books.sample()
    assert read == []
    books.use(8.0)
    await books.sample()
    assert group(BATCH) in read
    assert books.account().sold_s == 8.0


async def test_what_a_cut_keeps_from_be_work_is_taken_back_once(books: Books) -> None:
    books.use(8.0)
    books.withheld_s = 2.5
    await books.sample()
    assert books.account() == OwnerAccount(sold_s=8.0, taken_s=2.5, fair_s=8.0)
    await books.sample()
    assert books.account().taken_s == 2.5


async def test_what_was_used_before_the_daemon_is_not_counted_and_an_online_pod_has_no_account(books: Books) -> None:
    books.use(100.0)
    books.ledger = books.another()
    await books.sample()
    assert books.ledger.hours == {}
    pods = books.agent.control.inventory.pods
    pods[BATCH] = replace(pods[BATCH], classification=replace(pods[BATCH].classification, pod_class=PodClass.SHARED))
    books.use(5.0)
    await books.sample()
    assert books.ledger.hours == {}


async def test_an_evicted_pods_whole_run_is_lost_once(books: Books) -> None:
    books.use(30.0)
    await books.sample()
    del books.agent.control.inventory.pods[BATCH]
    case = EvictionCase(order=ORDER)
    books.cases = [case]
    await books.sample()
    assert books.account().lost_s == 0.0
    books.cases = [replace(case, outcome=EvictionOutcome.DONE)]
    for _ in range(3):
        await books.sample()
    assert books.account().lost_s == books.used == 30.0


@pytest.mark.parametrize("outcome", [EvictionOutcome.REFUSED, EvictionOutcome.FAILED, EvictionOutcome.ABANDONED])
async def test_an_eviction_that_did_not_happen_loses_nothing(books: Books, outcome: EvictionOutcome) -> None:
    books.use(30.0)
    await books.sample()
    books.cases = [EvictionCase(order=ORDER, outcome=outcome)]
    await books.sample()
    assert books.account().lost_s == 0.0


async def test_accounts_are_kept_over_a_restart_by_hour_and_for_some_days_only(books: Books) -> None:
    for _ in range(3):
        books.use(10.0)
        await books.sample(3600.0)
    await books.ledger.save()
    hours = books.ledger.hours
    assert len(hours) == 3
    books.ledger = books.another()
    assert books.ledger.hours == hours
    books.config = OwnersConfig(days=1)
    books.now += 23 * 3600
    await books.ledger.save()
    assert len(books.ledger.hours) == 1
    assert load_hours(books.agent.record.store) == books.ledger.hours


async def test_accounts_of_an_hour_that_is_another_after_a_step_of_the_clock_are_added(books: Books) -> None:
    books.use(10.0)
    await books.sample()
    books.stepped = 7200.0
    books.use(5.0)
    await books.sample()
    assert {at: accounts[books.owner].sold_s for at, accounts in books.ledger.hours.items()} == {HOUR + 2: 15.0}
    assert books.account().sold_s == 15.0


async def test_owners_beyond_the_number_share_one_account(books: Books) -> None:
    books.config = varied(OwnersConfig(), most=2)
    pods, pod = books.agent.control.inventory.pods, books.agent.control.inventory.pods[BATCH]
    for number in range(5):
        pods[BATCH] = replace(pod, namespace=f"team-{number}")
        books.use(1.0)
        await books.sample()
    sums = books.ledger.sums(1)
    assert {owner: account.sold_s for owner, account in sums.items()} == {"team-0": 1.0, "team-1": 1.0, OTHER: 3.0}
    assert books.ledger.totals.keys() == sums.keys()


async def test_owners_with_throw_away_names_do_not_take_the_accounts_of_those_that_consume(books: Books) -> None:
    books.config = varied(OwnersConfig(), most=4)
    pods, pod = books.agent.control.inventory.pods, books.agent.control.inventory.pods[BATCH]

    async def use(owner: str, seconds: float) -> None:
        pods[BATCH] = replace(pod, namespace=owner)
        books.use(seconds)
        await books.sample()

    for number in range(8):
        await use(f"throw-away-{number}", 1.5)
    # None of its intervals alone is more than such an account has.
    for round_ in range(10):
        await use("consumer", 1.0)
        await use(f"more-{round_}", 0.001)
    sums = books.ledger.sums(1)
    assert sums["consumer"].sold_s == 9.0, "all but what it got before it had more than the smallest account"
    assert len(sums) == 5
    assert sum(account.sold_s for account in sums.values()) == pytest.approx(22.01)
    assert books.ledger.totals.keys() == sums.keys()


def test_names_without_an_account_are_bounded() -> None:
    accounts: dict[str, OwnerAccount] = {}
    ranks: dict[str, float] = {}
    for number in range(1000):
        add_account(accounts, f"{number}", OwnerAccount(sold_s=1.0), 2, ranks)
        add_account(accounts, "consumer", OwnerAccount(sold_s=2.0), 2, ranks)
        assert len(ranks) <= 17
    assert accounts.keys() == {"0", "consumer", OTHER}
    assert accounts["consumer"].sold_s == 2000.0


async def test_a_label_may_name_the_owner(books: Books) -> None:
    pod = replace(books.agent.control.inventory.pods[BATCH], labels={"team": "ml"})
    assert owner_of(pod, OwnersConfig(label="team")) == "ml"
    config = replace(books.live.config, owners=OwnersConfig(label="example.org/team"))
    assert "example.org/team" in read_keys(config, ClassRules()).labels
    assert owner_of(pod, OwnersConfig(label="other")) == UNKNOWN


async def test_pods_of_an_owner_in_debt_count_more_only_where_that_is_configured(books: Books) -> None:
    accounts = {books.owner: OwnerAccount(sold_s=0.0, fair_s=1000.0)}
    books.ledger.hours[HOUR] = accounts
    await books.ledger.save()
    await books.sample()
    readings = books.agent.control.inventory
    assert readings.readings.be_bonus == {}
    books.config = OwnersConfig(fair_shares=True)
    await books.sample()
    assert readings.readings.be_bonus == {BATCH: 200}
    books.ledger.hours[HOUR] = {books.owner: OwnerAccount(sold_s=1000.0, fair_s=1000.0)}
    await books.ledger.save()
    await books.sample()
    assert readings.readings.be_bonus == {}


async def test_the_section_has_each_window_and_is_empty_while_it_is_off(books: Books) -> None:
    books.use(6.0)
    await books.sample()
    status: Any = books.ledger.status()
    assert [window["hours"] for window in status["windows"]] == [1, 4, 24, 168]
    (row,) = status["windows"][0]["owners"]
    assert (row["owner"], row["sold_s"], row["counts_percent"]) == (books.owner, 6.0, 100)
    books.config = OwnersConfig(enabled=False)
    assert books.ledger.status() == {}


async def test_it_accounts_while_it_runs_and_the_last_interval_is_stored_at_the_end(books: Books) -> None:
    books.use(4.0)
    async with trio.open_nursery() as nursery:
        await nursery.start(books.ledger.run)
        await until(lambda: bool(books.ledger.hours))
        assert load_hours(books.agent.record.store) == {}
        nursery.cancel_scope.cancel()
    assert load_hours(books.agent.record.store) == {HOUR: {books.owner: OwnerAccount(sold_s=4.0, fair_s=4.0)}}


async def test_switched_off_it_gives_no_bonus_and_later_does_not_count_that_time(books: Books) -> None:
    books.agent.control.inventory.take(be_bonus={BATCH: 200})
    books.config = OwnersConfig(enabled=False)
    async with trio.open_nursery() as nursery:
        await nursery.start(books.ledger.run)
        await until(lambda: books.agent.control.inventory.readings.be_bonus == {})
        nursery.cancel_scope.cancel()
    books.use(50.0)
    books.config = OwnersConfig()
    await books.sample()
    assert books.ledger.hours == {}

"""Accounts the CPU time of BE pods by owner: sold, taken back, lost to evictions; and the bonus of owners in debt.

Every ten seconds the counters of each BE pod's groups are read, if anything ran below the directory above the pod.
*Sold*: CPU time that its groups used. *Taken back*: the time for which its containers, its own directory or the
besteffort directory were throttled, and the idle CPU time that cuts of the harm law kept from BE work. The time in a
freezer is not counted. *Lost*: what a pod had used in its whole life when bypassd ended it. A pod that lives for less
than an interval may be missed.

Accounts are hourly, by the wall clock, and stored each minute: one row of META for each hour. A crash costs a minute.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final, NamedTuple, final

import msgspec
import trio

from cgroupfs.errors import CgroupError, InputError
from cgroupfs.naming import QosClass
from cgroupfs.usage import QuietGroups, UsageCounters, UsageReader, grown
from reconciler.control.hour_rows import HourRows, load_rows, uptime_s
from reconciler.control.inventory import Inventory
from reconciler.policies.base import pod_asks
from reconciler.policies.owner_shares import OwnerDemand, OwnersConfig, bonus_percent, fair_parts
from reconciler.runtime.cooperative import TimeSlice
from reconciler.runtime.wakeup import next_beat
from reconciler.runtime.workqueue import TICK, DirtyKeys
from state.eviction import EvictionCase, EvictionOutcome
from state.model import Pod
from state.owners import AS_IS, OTHER, UNKNOWN, OwnerAccount
from state.pod_index import FixedTable, derived, index_of
from state.store import Store

NAME: Final = "owner ledger"
ROW: Final = "owners:"
"""Rows of the META table: ``owners:HOUR``, hours since the epoch; the accounts by owner."""
INTERVAL_S: Final = 10.0
_SAVE_S: Final = 60.0
_DAY: Final = 24
_NS: Final = 1_000_000_000
_GONE: Final = 512
"""Removed pods whose CPU time is known until their eviction is reported as done."""
_LONGEST: Final = 253
_MOST_READ: Final = 1024
_STOP_S: Final = 2.0
_RANKED: Final = 8
"""Owners that are compared by what they got, as a multiple of those with an account."""

Accounts = dict[str, OwnerAccount]
_DECODER: Final = msgspec.msgpack.Decoder(Annotated[Accounts, msgspec.Meta(max_length=_MOST_READ)])


class _Delta(NamedTuple):
    used_ns: int
    taken_ns: int


@final
class OwnerLedger:
    def __init__(
        self,
        store: Store,
        lane: trio.CapacityLimiter,
        inventory: Inventory,
        usage: UsageReader,
        dirty: DirtyKeys,
        *,
        config: Callable[[], OwnersConfig],
        cases: Callable[[], Sequence[EvictionCase]],
        withheld_s: Callable[[], float],
        wall: Callable[[], float] = time.time,
        uptime: Callable[[], float] = uptime_s,
    ) -> None:
        """``lane``: the store's thread limiter. ``config``: the section in force.

        ``cases``: evictions under way, and the last that ended.
        ``withheld_s``: CPU-seconds that cuts of the harm law have kept from BE work, since the daemon's start.
        """
        self._inventory, self._usage, self._dirty = inventory, usage, dirty
        self._config = config
        self._cases = cases
        self._withheld_s = withheld_s
        self._withheld_before_s = 0.0
        self._wall = wall
        self.hours: Final = load_hours(store)
        self.totals: Accounts = {}
        """Since the start, for the metrics."""
        self.bonus: dict[str, int] = {}
        """Owners whose requests count more now, in percent."""
        self._last: dict[str, tuple[int, UsageCounters]] = {}
        self._quiet = QuietGroups(usage)
        self._first = True
        """No reading was made yet: the first shows no use of an interval."""
        self._sampled: tuple[FixedTable[str, Pod] | None, str | None] = None, None
        """The pods of the last sample, and by which label they have owners."""
        self._lives: dict[str, tuple[str, int]] = {}
        """CPU time (ns) of each pod's whole life, by uid, with its owner."""
        self._gone: dict[str, tuple[str, int]] = {}
        self._counted: set[str] = set()
        self._ranks: dict[str, float] = {}
        """What each owner got in the present hour, those without an account included."""
        self._ranked_hour = -1
        self._total_ranks: dict[str, float] = {}
        self._rows = HourRows(store, lane, ROW, self.hours, merge=self._merge, wall=wall, uptime=uptime)
        self._saved_at = wall()

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        task_status.started()
        try:
            while True:
                if self._config().enabled:
                    await self.sample()
                elif not self._first:
                    self._forget()
                if not 0 <= self._wall() - self._saved_at < _SAVE_S:
                    await self.save()
                await next_beat(INTERVAL_S)
        finally:
            with trio.CancelScope(shield=True, deadline=trio.current_time() + _STOP_S):
                await self.save()

    def _forget(self) -> None:
        """Switched off: a later interval must not contain this time."""
        self._last, self._lives, self._gone, self._first = {}, {}, {}, True
        self.bonus = {}
        self._publish({})

    async def sample(self) -> None:
        """Read all BE pods, and account what they used since the last reading."""
        config, inventory = self._config(), self._inventory
        table, before_s, self._withheld_before_s = inventory.table, self._withheld_before_s, self._withheld_s()
        pods = {pod.uid: pod for pod in index_of(table).reclaimed}
        directories = derived(table, _directories)
        self._quiet.begin(directories)
        # A pod that could not be read is in no account yet.
        same = (
            self._sampled[0] is table
            and self._sampled[1] == config.label
            and not self._first
            and len(self._lives) == len(pods)
        )
        unpublished = not self.bonus and not inventory.readings.be_bonus
        if same and unpublished and before_s == self._withheld_before_s and all(map(self._quiet.is_quiet, directories)):
            # Nothing ran there, and nothing was withheld.
            self._count_evictions(config)
            return
        slices = TimeSlice()
        seen: dict[str, tuple[int, UsageCounters]] = {}
        demands: dict[str, OwnerDemand] = {}
        inside: dict[str, float] = {}
        lives: dict[str, tuple[str, int]] = {}
        for uid, pod in pods.items():
            owner, quiet = owner_of(pod, config), self._quiet.is_quiet(_directory(pod))
            own = self._delta(pod.group.path, pod.group.inode, seen, quiet=quiet)
            taken_ns = own.taken_ns
            for container in pod.workload:
                taken_ns += self._delta(container.group.path, container.group.inode, seen, quiet=quiet).taken_ns
            used_s = own.used_ns / _NS
            asked = pod_asks(pod, inventory.capacity_milli)
            demands[owner] = _more(demands.get(owner), OwnerDemand(used_s, taken_ns / _NS, asked))
            if pod.qos is QosClass.BESTEFFORT:
                inside[owner] = inside.get(owner, 0.0) + used_s
            if (known := seen.get(pod.group.path)) is not None:
                lives[uid] = owner, known[1].cpu_ns or 0
            if slices.is_over:
                await slices.checkpoint()
        # Neither the directory's throttling nor what the harm law withheld is counted for each pod.
        _divide(demands, inside, self._delta(inventory.besteffort, 0, seen).taken_ns / _NS)
        _divide(
            demands, {owner: demand.used_s for owner, demand in demands.items()}, self._withheld_before_s - before_s
        )
        self._last, self._first, self._sampled = seen, False, (table, config.label)
        self._removed({uid: life for uid, life in self._lives.items() if uid not in lives})
        self._lives = lives
        fair = fair_parts(demands)
        for owner, demand in demands.items():
            account = OwnerAccount(sold_s=demand.used_s, taken_s=demand.taken_s, fair_s=fair[owner])
            self._add(owner, account, config)
            if slices.is_over:
                await slices.checkpoint()
        self._count_evictions(config)
        self._publish(
            {uid: self.bonus[owner_of(pod, config)] for uid, pod in pods.items() if owner_of(pod, config) in self.bonus}
            if config.fair_shares
            else {}
        )

    def _delta(
        self, path: str, inode: int, seen: dict[str, tuple[int, UsageCounters]], *, quiet: bool = False
    ) -> _Delta:
        """What a group's counters grew by. The first reading of a new group counts from its creation.

        ``quiet``: nothing ran there since the last reading.
        """
        if quiet and (last := self._last.get(path)) is not None and last[0] == inode:
            seen[path] = last
            return _Delta(0, 0)
        try:
            now = self._usage.read_cpu(path, inode)
        except (CgroupError, InputError):
            return _Delta(0, 0)
        seen[path] = inode, now
        before = self._last.get(path)
        if before is not None and before[0] == inode:
            return _Delta(
                grown(before[1].cpu_ns, now.cpu_ns) or 0, grown(before[1].throttled_ns, now.throttled_ns) or 0
            )
        if self._first:
            return _Delta(0, 0)  # it was used before this run of the daemon, and accounted then
        return _Delta(now.cpu_ns or 0, now.throttled_ns or 0)

    def _removed(self, lives: Mapping[str, tuple[str, int]]) -> None:
        self._gone |= lives
        for uid in list(self._gone)[: max(0, len(self._gone) - _GONE)]:
            del self._gone[uid]

    def _count_evictions(self, config: OwnersConfig) -> None:
        done = {case.order.id: case.order.uid for case in self._cases() if case.outcome is EvictionOutcome.DONE}
        for order in done.keys() - self._counted:
            life = self._gone.pop(done[order], None) or self._lives.get(done[order])
            # After a start the pods that ended before are not known.
            if life is not None:
                self._add(life[0], OwnerAccount(lost_s=life[1] / _NS), config)
        self._counted = set(done)

    def _add(self, owner: str, account: OwnerAccount, config: OwnersConfig) -> None:
        if account == OwnerAccount():
            return
        hour = self._rows.present()
        if hour != self._ranked_hour:
            self._ranked_hour, self._ranks = hour, {}
        add_account(self.hours.setdefault(hour, {}), owner, account, config.most, self._ranks)
        add_account(self.totals, owner, account, config.most, self._total_ranks)
        self._rows.changed(hour)

    def _merge(self, accounts: Accounts, more: Accounts) -> Accounts:
        ranks: dict[str, float] = {}
        for owner, account in more.items():
            add_account(accounts, owner, account, self._config().most, ranks)
        self._ranked_hour = -1
        return accounts

    def _publish(self, bonus: Mapping[str, int]) -> None:
        if bonus != self._inventory.readings.be_bonus:
            self._inventory.take(be_bonus=bonus)
            self._dirty.mark(TICK)

    async def save(self) -> None:
        """Store the hours that changed, drop the old ones, and compute the bonuses again.

        A failing store is reported by the state writer, not here.
        """
        config, now = self._config(), self._wall()
        self._saved_at = now
        self.bonus = {
            owner: percent
            for owner, account in self.sums(config.fair_hours).items()
            if owner not in {OTHER, UNKNOWN} and (percent := bonus_percent(account)) != AS_IS
        }
        await self._rows.save(config.days)

    def sums(self, hours: int) -> Accounts:
        """The accounts of the last so many hours, the present one included."""
        hour = self._rows.present()
        sums: Accounts = {}
        for at, accounts in self.hours.items():
            if 0 <= hour - at < hours:
                for owner, account in accounts.items():
                    sums[owner] = sums.get(owner, OwnerAccount()).plus(account)
        return sums

    def status(self) -> Mapping[str, object]:
        """The section of the state document; empty while it is off."""
        config = self._config()
        if not config.enabled:
            return {}
        windows = (1, config.fair_hours, _DAY, config.days * _DAY)
        return {
            "label": config.label,
            "fair_shares": config.fair_shares,
            "fair_hours": config.fair_hours,
            "windows": [
                {
                    "hours": hours,
                    "owners": [
                        {
                            "owner": owner,
                            **facts(account),
                            "counts_percent": self.bonus.get(owner, AS_IS) if config.fair_shares else AS_IS,
                        }
                        for owner, account in sorted(self.sums(hours).items())
                    ],
                }
                for hours in sorted(set(windows))
            ],
        }


def facts(account: OwnerAccount) -> dict[str, float]:
    return {
        "sold_s": round(account.sold_s, 1),
        "taken_back_s": round(account.taken_s, 1),
        "lost_s": round(account.lost_s, 1),
        "fair_s": round(account.fair_s, 1),
        "debt_s": round(account.debt_s, 1),
    }


def _divide(demands: dict[str, OwnerDemand], used: Mapping[str, float], taken_s: float) -> None:
    """Add what was withheld from several owners together, in proportion to their use."""
    total = sum(used.values())
    for owner, used_s in used.items():
        part = taken_s * (used_s / total if total else 1 / len(used))
        demands[owner] = _more(demands[owner], OwnerDemand(0.0, part, 0))


def _directories(pods: Mapping[str, Pod]) -> frozenset[str]:
    return frozenset(_directory(pod) for pod in index_of(pods).reclaimed)


def _directory(pod: Pod) -> str:
    return pod.group.path.rpartition("/")[0]


def owner_of(pod: Pod, config: OwnersConfig) -> str:
    name = pod.namespace if config.label is None else pod.labels.get(config.label)
    return name[:_LONGEST] if name else UNKNOWN


def load_hours(store: Store) -> dict[int, Accounts]:
    """The accounts of earlier runs; a row that cannot be read is left out."""
    return dict(load_rows(store, ROW, _DECODER.decode))


def add_account(accounts: Accounts, owner: str, account: OwnerAccount, most: int, ranks: dict[str, float]) -> None:
    """Add to an owner's account, or to that of all others. ``ranks``: what each got so far, changed in place.

    An owner that has more than the smallest account gets one of its own, and the smallest is added to the shared one:
    the owner is a label's value, and a tenant that chooses many of them must not keep the others out.
    """
    if owner in accounts and owner not in ranks:
        ranks[owner] = _rank(accounts[owner])
    ranks[owner] = ranks.get(owner, 0.0) + _rank(account)
    if owner not in accounts and owner != OTHER and len(accounts) - (OTHER in accounts) >= most:
        least_s, least = min((ranks.get(name, _rank(accounts[name])), name) for name in accounts if name != OTHER)
        if ranks[owner] > least_s:
            ranks.setdefault(least, least_s)
            accounts[OTHER] = accounts.get(OTHER, OwnerAccount()).plus(accounts.pop(least))
        else:
            _bound(ranks, accounts, most)
            owner = OTHER
    accounts[owner] = accounts.get(owner, OwnerAccount()).plus(account)


def _rank(account: OwnerAccount) -> float:
    """What an owner got, and what was its due: an owner that BE work of others keeps from its part counts, too."""
    return account.sold_s + account.fair_s


def _bound(ranks: dict[str, float], accounts: Accounts, most: int) -> None:
    if len(ranks) <= _RANKED * most:
        return
    # Half of them at once, so that the cost of the order is that of as many owners.
    smaller = sorted(ranks.keys() - accounts.keys(), key=ranks.__getitem__)
    for name in smaller[: len(smaller) // 2 + 1]:
        del ranks[name]


def _more(known: OwnerDemand | None, more: OwnerDemand) -> OwnerDemand:
    if known is None:
        return more
    return OwnerDemand(known.used_s + more.used_s, known.taken_s + more.taken_s, known.weight + more.weight)
